"""The shipped sample as an image folder: made once, the same images in every storage format, and told where it cannot be made."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainables.data.fashion_mnist import SAMPLE, read_sample
from trainables.data.images import sample as image_folder_sample
from trainables.data.images.sample import source
from trainables.data.source import DataError
from trainables.registry import STORAGES
from trainables.trial import Trial


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this module's own, so that the sample is written here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def asked(**fields: object) -> Trial:
    return Trial.model_validate({"model": "mlp", "dataset": "image_folder_sample"} | fields)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_storage_format_holds_the_sample_that_the_project_ships(split: str) -> None:
    pixels, labels = read_sample(str(SAMPLE), split)
    whole = list(range(len(labels)))
    found: dict[str, Any] = {name: source(asked(storage=name, image_size=24), split).dataset for name in STORAGES}
    for name, images in found.items():
        shown, classes = images.__getitems__(whole)
        assert classes.tolist() == sorted(labels.tolist()), name
        assert torch.equal(shown, found["jpeg"].__getitems__(whole)[0]), name
    # scaling and JPEG move pixels a little; the brightness of the middle, image by image, tells whether they are the same
    own = pixels[np.argsort(labels, kind="stable"), 0, 2:26, 2:26].mean(axis=(1, 2))
    assert np.corrcoef(shown[:, 0].float().mean(dim=(1, 2)).numpy(), own)[0, 1] > 0.99


def test_ranks_that_begin_together_write_it_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written: list[Path] = []
    write = image_folder_sample._write

    def noted(folder: Path) -> None:
        written.append(folder)
        write(folder)

    monkeypatch.setattr(image_folder_sample, "_write", noted)
    with ThreadPoolExecutor(4) as ranks:
        found: list[Any] = list(ranks.map(source, [asked(storage="lmdb")] * 4))
    assert [len(each.dataset) for each in found] == [10_000] * 4 and len(written) == 1
    kinds = {path.name.rpartition("-")[2] for path in (tmp_path / "scaling-study").iterdir()}
    assert kinds == {"jpeg", "jpeg.lock", "lmdb", "lmdb.lock"}, "nothing unfinished is left"


def test_a_cache_that_cannot_be_written_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError) as error:
        source(asked())
    told = str(error.value)
    assert told.startswith("the shipped Fashion-MNIST sample cannot be converted into ")
    assert told.endswith("; XDG_CACHE_HOME=DIR names another place for the cache")
