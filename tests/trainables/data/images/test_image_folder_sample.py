"""The shipped sample as an image folder: written once, with the same images in every storage format."""

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
    """An empty cache for this module, so that the tests write the sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def sample_trial(**fields: object) -> Trial:
    return Trial.model_validate({"model": "mlp", "dataset": "image_folder_sample"} | fields)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_storage_format_has_the_images_of_the_shipped_sample(split: str) -> None:
    pixels, labels = read_sample(str(SAMPLE), split)
    indices = list(range(len(labels)))
    datasets: dict[str, Any] = {
        storage: source(sample_trial(storage=storage, image_size=24), split).dataset for storage in STORAGES
    }
    decoded = datasets["jpeg"].__getitems__(indices)[0]
    for storage, dataset in datasets.items():
        images, classes = dataset.__getitems__(indices)
        assert classes.tolist() == sorted(labels.tolist()), storage
        assert torch.equal(images, decoded), storage
    # Scaling and JPEG change pixels slightly, so compare the mean brightness of each image's centre.
    expected = pixels[np.argsort(labels, kind="stable"), 0, 2:26, 2:26].mean(axis=(1, 2))
    assert np.corrcoef(images[:, 0].float().mean(dim=(1, 2)).numpy(), expected)[0, 1] > 0.99


def test_ranks_that_start_together_write_the_sample_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written: list[Path] = []
    write = image_folder_sample._write

    def record_write(folder: Path) -> None:
        written.append(folder)
        write(folder)

    monkeypatch.setattr(image_folder_sample, "_write", record_write)
    with ThreadPoolExecutor(4) as ranks:
        sources: list[Any] = list(ranks.map(source, [sample_trial(storage="lmdb")] * 4))
    assert [len(data.dataset) for data in sources] == [10_000] * 4 and len(written) == 1
    kinds = {path.name.rpartition("-")[2] for path in (tmp_path / "scaling-study").iterdir()}
    assert kinds == {"jpeg", "jpeg.lock", "lmdb", "lmdb.lock"}, "no unfinished entry remains"


def test_an_unwritable_cache_is_reported_with_the_variable_that_moves_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError) as error:
        source(sample_trial())
    message = str(error.value)
    assert "the shipped Fashion-MNIST sample" in message and message.endswith("XDG_CACHE_HOME=DIR")
