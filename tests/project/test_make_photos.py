"""Generated photographs: layout, sizes and sources, and reproducible for a seed."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts.make_photos import BYTES, SIZES, PhotosError, encode, find_sources, main, make_photos
from tests.support.photos import decoded, picture
from trainables.data.images.folder import source
from trainables.trial import Trial


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two usable photographs, and files that are not: a small one, a drawing, another format, a link."""
    folder = tmp_path_factory.mktemp("wallpapers")
    (folder / "nature").mkdir()
    picture(1400, 1000, 1).save(folder / "nature" / "sea side.jpg", quality=90)
    picture(1000, 1200, 2).save(folder / "wood.JPEG", quality=90)
    picture(600, 500, 3).save(folder / "small.jpg", quality=90)
    Image.new("RGB", (2000, 1500), "red").save(folder / "drawing.jpg")
    picture(1200, 1000, 4).save(folder / "other.png")
    (folder / "link.jpg").symlink_to("wood.JPEG")
    return folder


def test_every_large_photograph_is_a_class(sources: Path) -> None:
    assert find_sources([sources]) == {
        "nature-sea_side": sources / "nature" / "sea side.jpg",
        "wood": sources / "wood.JPEG",
    }


def test_the_result_is_an_image_folder_with_its_sources(sources: Path, tmp_path: Path) -> None:
    photos, repeated = tmp_path / "photos", tmp_path / "again"
    mean_bytes = make_photos(photos, 41, [sources], test_share=0.2, processes=1)
    files = sorted(photos.rglob("*.JPEG"))
    assert len(files) == 41 and mean_bytes == pytest.approx(np.mean([path.stat().st_size for path in files]))
    for path in files:
        with Image.open(path) as image:
            assert image.size in SIZES and image.format == "JPEG" and image.mode == "RGB"
        assert path.stat().st_size <= max(BYTES)
    assert len({path.read_bytes() for path in files}) == 41, "all are different"
    trial = Trial(dataset="image_folder", data_dir=str(photos), image_size=64)
    sizes = [len(source(trial, split).dataset) for split in ("train", "test")]  # type: ignore[arg-type]
    assert sizes == [33, 8]
    facts = json.loads((photos / "photos.json").read_text())
    assert (facts["images"], facts["seed"]) == (41, 0)
    assert facts["cut_from"]["wood"] == str(sources / "wood.JPEG")
    assert "41 images cropped from 2 wallpapers" in (photos / "README.md").read_text()
    make_photos(repeated, 41, [sources], test_share=0.2, processes=1)
    assert all((repeated / path.relative_to(photos)).read_bytes() == path.read_bytes() for path in files)


def test_an_image_gets_the_best_quality_that_fits() -> None:
    image = picture(500, 375, 1)
    sizes = [len(encode(image, max_bytes)) for max_bytes in (0, 20_000, 60_000, 10**9)]
    assert sizes == sorted(set(sizes)) and sizes[1] <= 20_000 and sizes[2] <= 60_000
    assert decoded(encode(image, 10**9)).size == (500, 375)


def test_errors_are_one_line(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PhotosError, match=f"^{tmp_path} already exists"):
        make_photos(tmp_path, 41, [sources])
    with pytest.raises(PhotosError, match="3 images are too few for 2 sources; use at least 4"):
        make_photos(tmp_path / "new", 3, [sources])
    assert main([str(tmp_path / "new"), "--sources", str(tmp_path)]) == 1
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: no JPEG photograph of 1000 pixels or more in {tmp_path}")
    assert "mate-backgrounds" in message and "--sources DIR" in message
