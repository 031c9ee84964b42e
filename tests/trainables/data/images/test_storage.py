"""Storage formats deliver the same images, from disk or shared memory, with the requested page cache."""

import dataclasses
import gc
import os
import pickle
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from study.capacity import NodeCapacity
from study.cli.configuration import resolve
from study.errors import ConfigurationError
from study.orchestrate.failures import first_line
from study.plan.trials import plan_trials
from study.studies.basic import STUDIES
from study.studies.study import Study
from tests.support.gloo import on_ranks, preload_loader_processes
from tests.support.photos import write_photos, write_tiny_imagenet
from trainables.build import build_workload
from trainables.data.image_layout import MANIFEST, storages_in
from trainables.data.images import placement
from trainables.data.images.convert import convert
from trainables.data.images.folder import source
from trainables.data.images.open import open_folder
from trainables.data.loader import endless_batches
from trainables.data.source import DataError
from trainables.measure.run import run
from trainables.registry import STORAGES
from trainables.step.context import RankSetup
from trainables.trial import Trial

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One set in every storage format, in folders named after the formats."""
    folder = tmp_path_factory.mktemp("sets")
    photos = write_photos(folder / "photos")
    for storage in STORAGES:
        convert(photos, folder / storage, storage, image_size=28, part_images=5)
    shutil.rmtree(photos)
    return folder


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(placement, "SHARED_MEMORY", folder)
    return folder


def trial(folder: Path, storage: str = "jpeg", **fields: Any) -> Trial:
    base = {"model": "mlp", "dataset": "image_folder", "data_dir": str(folder), "storage": storage, "batch_per_gpu": 5}
    return Trial.model_validate(base | fields)


def batches(trial: Trial, count: int = 5) -> list[Any]:
    return list(islice(endless_batches(trial, build_workload(trial, CPU), rank=0), count))


def error_message(trial: Trial, split: str = "train") -> str:
    """Return the error of opening a trial's data, which must be one line."""
    with pytest.raises(DataError) as error:
        source(trial, split)
    assert "\n" not in str(error.value)
    return str(error.value)


def same(first: list[Any], second: list[Any]) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


# ------------------------------------------------------------------------------------------------------ same images


@pytest.mark.parametrize("augment", ["none", "device"])
@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "jpeg"])
def test_every_format_delivers_the_same_images_as_the_jpeg_files(sets: Path, storage: str, augment: str) -> None:
    assert same(batches(trial(sets, storage, augment=augment)), batches(trial(sets, augment=augment)))


@pytest.mark.parametrize("storage", ["lmdb", "arrow_jpeg"])
def test_encoded_formats_augment_the_same_way(sets: Path, storage: str) -> None:
    assert same(batches(trial(sets, storage, augment="cpu")), batches(trial(sets, augment="cpu")))


def test_arrow_raw_crops_from_the_stored_square(sets: Path) -> None:
    ours, others = (batches(trial(sets, storage, augment="cpu"), 1)[0] for storage in ("arrow_raw", "jpeg"))
    assert ours[0].shape == others[0].shape == (5, 3, 28, 28)
    assert not torch.equal(ours[0], others[0]) and torch.equal(ours[1], others[1])


@pytest.mark.parametrize("storage", STORAGES)
def test_loader_processes_open_the_files_themselves(sets: Path, storage: str) -> None:
    preload_loader_processes()
    expected = batches(trial(sets, storage))
    assert same(batches(trial(sets, storage, loader_workers=2)), expected)
    records, _ = open_folder(sets / storage, "train")
    first = bytes(records[0][0])
    unpickled = pickle.loads(pickle.dumps(records))
    assert (bytes(unpickled[0][0]), len(unpickled)) == (first, 18)


def test_a_folder_may_hold_one_format_or_several(sets: Path) -> None:
    assert storages_in(sets) == {storage: sets / storage for storage in STORAGES}
    assert same(batches(trial(sets / "lmdb", "lmdb")), batches(trial(sets, "lmdb")))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_complete_trial_runs_from_every_format(sets: Path, storage: str) -> None:
    measured = run(trial(sets, storage, parallel="none", steps=2, augment="device"), RankSetup(rank=0, device=CPU))
    losses = [row["loss"] for row in measured.tables["steps"]]
    assert len(losses) >= 7 and all(loss is not None for loss in losses)


# ------------------------------------------------------------------------------------------------------ wrong format


CONVERT = "python -m study.scaling convert"


@pytest.mark.parametrize(
    ("folder", "available", "needed", "command"),
    [
        ("PHOTOS", "jpeg", "arrow_raw", "PHOTOS PHOTOS-arrow_raw --storage arrow_raw --image-size 28"),
        ("SETS/lmdb", "lmdb", "jpeg", "SETS/lmdb SETS/lmdb-jpeg --storage jpeg"),
        ("SETS/arrow_raw", "arrow_raw", "lmdb", "SRC DST --storage lmdb"),
    ],
)
def test_another_format_is_reported_with_the_conversion_command(
    sets: Path, tmp_path: Path, folder: str, available: str, needed: str, command: str
) -> None:
    photos = write_photos(tmp_path / "photos")

    def expand(text: str) -> str:
        return text.replace("PHOTOS", str(photos)).replace("SETS", str(sets))

    message = error_message(trial(Path(expand(folder)), needed))
    assert message.startswith(f"{expand(folder)} has storage {available!r}") and repr(needed) in message
    assert message.endswith(f": {CONVERT} {expand(command)}")


def test_pixels_of_another_size_are_reported_with_the_conversion_command(sets: Path) -> None:
    message = error_message(trial(sets, "arrow_raw", image_size=56))
    assert message.startswith(f"{sets}/arrow_raw has pixels for image_size 28 (32 x 32)")
    assert message.endswith(f": {CONVERT} SRC DST --storage arrow_raw --image-size 56")


def test_the_plan_marks_trials_infeasible_that_a_folder_cannot_serve(sets: Path) -> None:
    study = Study(
        name="sizes",
        question="",
        base={"device": "cpu", "world_size": 1, "dataset": "image_folder", "data_dir": str(sets)},
        axes={"storage": ("lmdb", "arrow_raw"), "image_size": (28, 56)},
        repeats=1,
    )
    rows = plan_trials(study, [NodeCapacity("", "localhost", cpus=2, gpus=0)])
    assert [row.status for row in rows] == ["pending", "pending", "pending", "infeasible"]
    assert rows[-1].reason == error_message(trial(sets, "arrow_raw", image_size=56))
    elsewhere = dataclasses.replace(study, base=dict(study.base) | {"data_dir": "/on/other/hosts/only"})
    assert {row.status for row in plan_trials(elsewhere, [NodeCapacity("", "localhost", cpus=2, gpus=0)])} == {
        "pending"
    }


@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "jpeg"])
def test_damaged_files_are_reported(sets: Path, tmp_path: Path, storage: str) -> None:
    copy = tmp_path / storage
    shutil.copytree(sets / storage, copy)
    path = max(copy.glob("train*"))
    path.write_bytes(path.read_bytes()[:50])
    message = error_message(trial(copy, storage))
    assert message.startswith(f"{path} is damaged (") and message.endswith("convert it again")
    path.unlink()
    assert error_message(trial(copy, storage)).startswith(f"{path} is damaged (")


def test_a_set_without_manifest_or_with_too_few_files_is_reported(sets: Path, tmp_path: Path) -> None:
    copy = tmp_path / "jpeg"
    shutil.copytree(sets / "jpeg", copy)
    next((copy / "train" / "cat").iterdir()).unlink()
    assert error_message(trial(copy)).startswith(f"{copy} has 17 images in 'train', its manifest lists 18")
    shutil.copytree(sets / "lmdb", tmp_path / "lmdb")
    (tmp_path / "lmdb" / MANIFEST).unlink()
    assert error_message(trial(tmp_path / "lmdb", "lmdb")).startswith(f"no images in {tmp_path}/lmdb; ")


def test_a_damaged_image_in_a_loader_process_is_reported(tmp_path: Path) -> None:
    preload_loader_processes()
    path = write_photos(tmp_path / "photos") / "train" / "cat" / "cat_1.JPEG"
    path.write_bytes(b"no image")
    with pytest.raises(DataError) as error:
        batches(trial(tmp_path / "photos", loader_workers=1))
    assert first_line(error.value).startswith(f"DataError: cannot decode {path} (not an image)")


# ----------------------------------------------------------------------------------------------------- shared memory


@pytest.mark.parametrize("storage", STORAGES)
def test_shared_memory_has_one_copy_with_the_same_images(sets: Path, storage: str, shared_memory: Path) -> None:
    in_memory = trial(sets, storage, storage_place="shared_memory")
    assert same(batches(in_memory), batches(trial(sets, storage)))
    [root] = shared_memory.iterdir()
    assert root.stat().st_mode & 0o777 == 0o700 and root.name == f"scaling-study-images-{os.getuid()}"
    [copy] = [path for path in root.iterdir() if path.is_dir()]
    before = {path: path.stat().st_ctime_ns for path in copy.rglob("*") if path.is_file()}
    assert sum(path.stat().st_size for path in before) > 0
    batches(in_memory)
    assert {path: path.stat().st_ctime_ns for path in copy.rglob("*") if path.is_file()} == before, "copied once"


def copy_on_rank(rank: int, folder: str, root: str) -> tuple[str, float]:
    """Return the folder of the copy, and the sum of its inode numbers."""
    placement.SHARED_MEMORY = Path(root)
    records, _ = open_folder(Path(folder), "train")
    copy, in_use = placement.copy_to_shared_memory(records, 0)
    with in_use:
        return copy, sum(path.stat().st_ino for path in Path(copy).rglob("*"))


def test_ranks_that_start_together_share_one_copy(sets: Path, shared_memory: Path) -> None:
    (copy, inodes), other = on_ranks(2, copy_on_rank, str(sets / "jpeg"), str(shared_memory))
    assert other == (copy, inodes)
    [root] = shared_memory.iterdir()
    assert [path.name for path in root.iterdir() if path.is_dir()] == [Path(copy).name]


def test_too_little_shared_memory_is_reported_with_the_needed_and_free_sizes(
    sets: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement.shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000_000))
    in_memory = trial(sets, "lmdb", storage_place="shared_memory", batch_per_gpu=5000, loader_workers=2)
    message = error_message(in_memory)
    assert message.startswith(f"{sets}/lmdb does not fit into {shared_memory}: it needs 0.06 GB")
    assert "0.02 GB are free" in message and "storage_place 'disk'" in message


def test_the_least_recently_used_copy_is_removed_when_another_needs_the_space(
    sets: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = {
        storage: open_folder(sets / storage, "train")[0] for storage in ("lmdb", "jpeg", "arrow_jpeg", "arrow_raw")
    }
    old, in_use, recent = (placement.copy_to_shared_memory(opened[name], 0) for name in ("lmdb", "jpeg", "arrow_jpeg"))
    for age, (folder, _) in ((30, in_use), (20, old), (10, recent)):
        os.utime(folder, (1e9 - age, 1e9 - age))
    old[1].close(), recent[1].close()
    needed = sum((sets / "arrow_raw" / name).stat().st_size for name in opened["arrow_raw"].files())
    free_bytes = iter([0, 0, needed, needed])
    monkeypatch.setattr(placement.shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free_bytes)))
    placement.copy_to_shared_memory(opened["arrow_raw"], 0)[1].close()
    assert Path(in_use[0]).is_dir(), "the oldest copy is in use"
    assert not Path(old[0]).exists()
    assert Path(recent[0]).is_dir(), "there was enough space without removing it"
    in_use[1].close()


def test_the_partial_copy_of_a_killed_process_is_removed(sets: Path, shared_memory: Path) -> None:
    records, _ = open_folder(sets / "lmdb", "train")
    folder, in_use = placement.copy_to_shared_memory(records, 0)
    in_use.close()
    Path(folder).rename(f"{folder}.partial")
    (Path(f"{folder}.partial") / "train.lmdb").write_bytes(b"half")
    second, in_use = placement.copy_to_shared_memory(records, 0)
    in_use.close()
    assert second == folder and not Path(f"{folder}.partial").exists()
    assert (Path(folder) / "train.lmdb").read_bytes() == (sets / "lmdb" / "train.lmdb").read_bytes()


# -------------------------------------------------------------------------------------------------------- page cache


@pytest.fixture
def advice_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """(file, advice) of every call to posix_fadvise."""
    calls: list[tuple[str, int]] = []
    real = os.posix_fadvise
    monkeypatch.setattr(placement, "MEMORY_FILE_SYSTEMS", ())  # the tests' files may be on one

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        calls.append((os.readlink(f"/proc/self/fd/{descriptor}"), advice))
        assert (offset, length) == (0, 0), "the complete file"
        real(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    yield calls


@pytest.mark.parametrize("storage", STORAGES)
def test_a_cold_cache_drops_every_file_of_the_split_before_the_first_batch(
    sets: Path, storage: str, advice_calls: list[tuple[str, int]]
) -> None:
    data = source(trial(sets, storage, page_cache="cold"))
    records = data.dataset.records  # type: ignore[attr-defined]
    files = {os.path.join(records.folder, name) for name in records.files()}
    assert len(files) == {"jpeg": 18, "lmdb": 1}.get(storage, 4)
    assert sorted(advice_calls) == sorted((os.path.realpath(path), os.POSIX_FADV_DONTNEED) for path in files)


def test_files_in_memory_cannot_be_cold(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement.file_system("/proc") == "proc"
    monkeypatch.setattr(placement, "MEMORY_FILE_SYSTEMS", (placement.file_system(str(sets)),))
    with pytest.raises(DataError, match=r"^page_cache 'cold' is impossible: .*lmdb is in memory \(.*'as_is'$"):
        source(trial(sets, "lmdb", page_cache="cold"))
    source(trial(sets, "lmdb", page_cache="warm"))


def test_a_warm_cache_reads_every_byte_and_as_is_touches_nothing(
    sets: Path, advice_calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[str] = []
    real = placement._read_through

    def read_through(path: str) -> None:
        warmed.append(path)
        real(path)

    monkeypatch.setattr(placement, "_read_through", read_through)
    source(trial(sets, "arrow_raw"))
    assert not warmed and not advice_calls
    source(trial(sets, "arrow_raw", page_cache="warm"))
    assert sorted(warmed) == sorted(str(path) for path in (sets / "arrow_raw").glob("train-*"))
    assert not advice_calls


def test_no_file_stays_mapped_after_the_trial(sets: Path) -> None:
    def mapped_files() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {part.split(maxsplit=5)[5] for part in lines if str(sets) in part}

    for storage in ("lmdb", "arrow_jpeg", "arrow_raw"):
        stored = trial(sets, storage)
        workload = build_workload(stored, CPU)
        next(endless_batches(stored, workload, rank=0))
        assert mapped_files()
        del workload
        gc.collect()  # as a rank does after each trial
        assert mapped_files() == set(), "mapped pages stay in the page cache"


# ------------------------------------------------------------------------------------------------------ command line


def data_axes(folder: Path, **options: Any) -> dict[str, Any]:
    return {k: v for k, v in resolve({"data-dir": str(folder)} | options).axes.items() if k != "data_dir"}


def test_the_command_line_detects_the_data_set_in_a_folder(sets: Path, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    flat = write_photos(tmp_path / "flat", {"": 1})
    tiny = write_tiny_imagenet(tmp_path / "tiny")
    assert data_axes(photos) == data_axes(flat) == data_axes(sets) == {"dataset": ("image_folder",)}
    assert data_axes(tiny) == {"dataset": ("tiny_imagenet",)}
    assert data_axes(sets / "lmdb") == {"dataset": ("image_folder",), "storage": ("lmdb",)}
    assert data_axes(sets / "lmdb", set=["storage=jpeg"])["storage"] == ("jpeg",)
    assert data_axes(sets, set=["storage=jpeg,lmdb"])["storage"] == ("jpeg", "lmdb")
    (photos / "cifar-10-batches-py").mkdir()
    with pytest.raises(ConfigurationError) as error:
        data_axes(photos)
    message = str(error.value)
    assert message.startswith(f"--data-dir: {photos}")
    assert "--set dataset=cifar10" in message and "--set dataset=image_folder" in message


def test_an_image_folder_needs_data_dir() -> None:
    with pytest.raises(ConfigurationError) as error:
        resolve({"set": ["dataset=tiny_imagenet"]})
    assert str(error.value).startswith("--set dataset: 'tiny_imagenet' needs --data-dir DIR")


def test_a_study_of_storage_formats_is_planned_with_imagenets_image_size(sets: Path) -> None:
    host = [NodeCapacity("", "localhost", cpus=2, gpus=0)]
    axes = data_axes(sets, set=["storage=jpeg,arrow_raw", "decode=pil,torchvision"]) | {"data_dir": (str(sets),)}
    rows = plan_trials(STUDIES["smoke"](host).with_overrides(axes), host)
    trials = [row.trial for row in rows if row.trial]
    assert {planned.image_size for planned in trials} == {224}
    assert {(planned.storage, planned.decode) for planned in trials} == {
        ("jpeg", "pil"),
        ("jpeg", "torchvision"),
        ("arrow_raw", "pil"),
    }
    assert any("decode 'torchvision'" in row.reason for row in rows if row.trial is None)
