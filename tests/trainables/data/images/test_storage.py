"""Storage formats: the same images from each, from the disk or from shared memory, with the page cache as it is asked."""

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
    """One set in every storage format, in folders named as the formats."""
    folder = tmp_path_factory.mktemp("sets")
    photos = write_photos(folder / "photos")
    for storage in STORAGES:
        convert(photos, folder / storage, storage, image_size=28, part_images=5)
    shutil.rmtree(photos)
    return folder


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(placement, "SHARED_MEMORY", folder)
    return folder


def trial(folder: Path, storage: str = "jpeg", **fields: Any) -> Trial:
    asked = {"model": "mlp", "dataset": "image_folder", "data_dir": str(folder), "storage": storage, "batch_per_gpu": 5}
    return Trial.model_validate(asked | fields)


def batches(asked: Trial, count: int = 5) -> list[Any]:
    return list(islice(endless_batches(asked, build_workload(asked, CPU), rank=0), count))


def line(asked: Trial, split: str = "train") -> str:
    with pytest.raises(DataError) as error:
        source(asked, split)
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
def test_formats_that_keep_the_files_augment_them_alike(sets: Path, storage: str) -> None:
    assert same(batches(trial(sets, storage, augment="cpu")), batches(trial(sets, augment="cpu")))


def test_crops_of_stored_pixels_come_from_the_stored_square(sets: Path) -> None:
    ours, others = (batches(trial(sets, storage, augment="cpu"), 1)[0] for storage in ("arrow_raw", "jpeg"))
    assert ours[0].shape == others[0].shape == (5, 3, 28, 28)
    assert not torch.equal(ours[0], others[0]) and torch.equal(ours[1], others[1])


@pytest.mark.parametrize("storage", STORAGES)
def test_loader_processes_open_the_files_for_themselves(sets: Path, storage: str) -> None:
    preload_loader_processes()
    alone = batches(trial(sets, storage))
    assert same(batches(trial(sets, storage, loader_workers=2)), alone)
    records, _ = open_folder(sets / storage, "train")
    first = bytes(records[0][0])
    again = pickle.loads(pickle.dumps(records))
    assert (bytes(again[0][0]), len(again)) == (first, 18)


def test_the_formats_side_by_side_are_found_and_a_single_one_is_enough(sets: Path) -> None:
    assert storages_in(sets) == {storage: sets / storage for storage in STORAGES}
    assert same(batches(trial(sets / "lmdb", "lmdb")), batches(trial(sets, "lmdb")))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_whole_trial_runs_from_every_format(sets: Path, storage: str) -> None:
    measured = run(trial(sets, storage, parallel="none", steps=2, augment="device"), RankSetup(rank=0, device=CPU))
    losses = [row["loss"] for row in measured.tables["steps"]]
    assert len(losses) >= 7 and all(loss is not None for loss in losses)


# ------------------------------------------------------------------------------------------------------ wrong format


def test_another_format_than_is_asked_for_is_told_with_the_command_that_converts(sets: Path, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    assert line(trial(photos, "arrow_raw")) == (
        f"{photos} holds storage 'jpeg', the trial asks for 'arrow_raw'; convert it: python -m study.scaling convert "
        f"{photos} {photos}-arrow_raw --storage arrow_raw --image-size 28"
    )
    assert line(trial(sets / "lmdb", "jpeg")) == (
        f"{sets}/lmdb holds storage 'lmdb', the trial asks for 'jpeg'; convert it: python -m study.scaling convert "
        f"{sets}/lmdb {sets}/lmdb-jpeg --storage jpeg"
    )
    assert line(trial(sets / "arrow_raw", "lmdb")) == (
        f"{sets}/arrow_raw holds storage 'arrow_raw', the trial asks for 'lmdb'; pixels cannot become JPEG files again; "
        "convert what they were made from: python -m study.scaling convert SRC DST --storage lmdb"
    )


def test_pixels_of_another_size_are_told_with_the_command_that_converts(sets: Path) -> None:
    assert line(trial(sets, "arrow_raw", image_size=56)) == (
        f"{sets}/arrow_raw holds pixels for image_size 28 (32 x 32), the trial asks for 56 (which needs 64); "
        "convert its JPEG files again: python -m study.scaling convert SRC DST --storage arrow_raw --image-size 56"
    )


def test_what_a_folder_does_not_hold_is_known_before_anything_starts_row_by_row(sets: Path) -> None:
    study = Study(
        name="sizes",
        question="",
        base={"device": "cpu", "world_size": 1, "dataset": "image_folder", "data_dir": str(sets)},
        axes={"storage": ("lmdb", "arrow_raw"), "image_size": (28, 56)},
        repeats=1,
    )
    rows = plan_trials(study, [NodeCapacity("", "localhost", cpus=2, gpus=0)])
    assert [row.status for row in rows] == ["pending", "pending", "pending", "infeasible"]
    assert rows[-1].reason == line(trial(sets, "arrow_raw", image_size=56))
    elsewhere = dataclasses.replace(study, base=dict(study.base) | {"data_dir": "/on/other/hosts/only"})
    assert {row.status for row in plan_trials(elsewhere, [NodeCapacity("", "localhost", cpus=2, gpus=0)])} == {
        "pending"
    }


@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "jpeg"])
def test_damaged_files_are_named(sets: Path, tmp_path: Path, storage: str) -> None:
    made = tmp_path / storage
    shutil.copytree(sets / storage, made)
    path = max(made.glob("train*"))
    path.write_bytes(path.read_bytes()[:50])
    told = line(trial(made, storage))
    assert told.startswith(f"{path} is damaged (") and told.endswith("): delete its set and convert it again")
    path.unlink()
    assert line(trial(made, storage)).startswith(f"{path} is damaged (")


def test_a_set_without_its_manifest_or_with_too_few_files_is_told(sets: Path, tmp_path: Path) -> None:
    made = tmp_path / "jpeg"
    shutil.copytree(sets / "jpeg", made)
    next((made / "train" / "cat").iterdir()).unlink()
    assert line(trial(made)) == f"{made} holds 17 images in 'train', its manifest promises 18: convert it again"
    shutil.copytree(sets / "lmdb", tmp_path / "lmdb")
    (tmp_path / "lmdb" / MANIFEST).unlink()
    assert line(trial(tmp_path / "lmdb", "lmdb")).startswith(f"{tmp_path}/lmdb holds no images; ")


def test_a_damaged_image_is_named_also_where_a_loader_process_finds_it(tmp_path: Path) -> None:
    preload_loader_processes()
    path = write_photos(tmp_path / "photos") / "train" / "cat" / "cat_1.JPEG"
    path.write_bytes(b"no image")
    with pytest.raises(DataError) as error:
        batches(trial(tmp_path / "photos", loader_workers=1))
    told = f"DataError: {path} cannot be decoded (it is no image): replace or remove it"
    assert first_line(error.value) == told


# ----------------------------------------------------------------------------------------------------- shared memory


@pytest.mark.parametrize("storage", STORAGES)
def test_shared_memory_holds_one_copy_that_delivers_the_same(sets: Path, storage: str, shared_memory: Path) -> None:
    asked = trial(sets, storage, storage_place="shared_memory")
    assert same(batches(asked), batches(trial(sets, storage)))
    [root] = shared_memory.iterdir()
    assert root.stat().st_mode & 0o777 == 0o700 and root.name == f"scaling-study-images-{os.getuid()}"
    [copy] = [path for path in root.iterdir() if path.is_dir()]
    before = {path: path.stat().st_ctime_ns for path in copy.rglob("*") if path.is_file()}
    assert sum(path.stat().st_size for path in before) > 0
    batches(asked)
    assert {path: path.stat().st_ctime_ns for path in copy.rglob("*") if path.is_file()} == before, "copied once"


def copied(rank: int, folder: str, root: str) -> tuple[str, float]:
    placement.SHARED_MEMORY = Path(root)
    records, _ = open_folder(Path(folder), "train")
    found, in_use = placement.in_shared_memory(records, 0)
    with in_use:
        return found, sum(path.stat().st_ino for path in Path(found).rglob("*"))


def test_ranks_that_ask_at_the_same_time_share_one_copy(sets: Path, shared_memory: Path) -> None:
    (found, inodes), other = on_ranks(2, copied, str(sets / "jpeg"), str(shared_memory))
    assert other == (found, inodes)
    [root] = shared_memory.iterdir()
    assert [path.name for path in root.iterdir() if path.is_dir()] == [Path(found).name]


def test_no_room_is_told_with_what_is_needed_and_what_is_there(
    sets: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement.shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000_000))
    asked = trial(sets, "lmdb", storage_place="shared_memory", batch_per_gpu=5000, loader_workers=2)
    assert line(asked) == (
        f"{sets}/lmdb does not fit into {shared_memory}: 0.06 GB are needed with the loaders' batches, 0.02 GB are free; "
        "enlarge it (mount -o remount,size=...), or use storage_place 'disk'"
    )


def test_the_copy_that_was_not_used_for_longest_goes_when_another_needs_the_room(
    sets: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = {
        storage: open_folder(sets / storage, "train")[0] for storage in ("lmdb", "jpeg", "arrow_jpeg", "arrow_raw")
    }
    old, held, recent = (placement.in_shared_memory(opened[name], 0) for name in ("lmdb", "jpeg", "arrow_jpeg"))
    for age, (folder, _) in ((30, held), (20, old), (10, recent)):
        os.utime(folder, (1e9 - age, 1e9 - age))
    old[1].close(), recent[1].close()
    needed = sum((sets / "arrow_raw" / name).stat().st_size for name in opened["arrow_raw"].files())
    frees = iter([0, 0, needed, needed])
    monkeypatch.setattr(placement.shutil, "disk_usage", lambda path: SimpleNamespace(free=next(frees)))
    placement.in_shared_memory(opened["arrow_raw"], 0)[1].close()
    assert Path(held[0]).is_dir(), "it is the oldest, and in use"
    assert not Path(old[0]).exists()
    assert Path(recent[0]).is_dir(), "there was room enough without it"
    held[1].close()


def test_what_a_killed_process_left_half_copied_is_cleared_away(sets: Path, shared_memory: Path) -> None:
    records, _ = open_folder(sets / "lmdb", "train")
    folder, in_use = placement.in_shared_memory(records, 0)
    in_use.close()
    Path(folder).rename(f"{folder}.partial")
    (Path(f"{folder}.partial") / "train.lmdb").write_bytes(b"half")
    again, in_use = placement.in_shared_memory(records, 0)
    in_use.close()
    assert again == folder and not Path(f"{folder}.partial").exists()
    assert (Path(folder) / "train.lmdb").read_bytes() == (sets / "lmdb" / "train.lmdb").read_bytes()


# -------------------------------------------------------------------------------------------------------- page cache


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """(file, advice) of every call that tells the kernel what to do with a file's pages."""
    seen: list[tuple[str, int]] = []
    real = os.posix_fadvise
    monkeypatch.setattr(placement, "MEMORY_FILE_SYSTEMS", ())  # where the tests' own files may lie

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        seen.append((os.readlink(f"/proc/self/fd/{descriptor}"), advice))
        assert (offset, length) == (0, 0), "the whole file"
        real(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    yield seen


@pytest.mark.parametrize("storage", STORAGES)
def test_a_cold_cache_drops_every_file_of_the_split_before_the_first_batch(
    sets: Path, storage: str, advised: list[tuple[str, int]]
) -> None:
    found = source(trial(sets, storage, page_cache="cold"))
    records = found.dataset.records  # type: ignore[attr-defined]
    files = {os.path.join(records.folder, name) for name in records.files()}
    assert len(files) == {"jpeg": 18, "lmdb": 1}.get(storage, 4)
    assert sorted(advised) == sorted((os.path.realpath(path), os.POSIX_FADV_DONTNEED) for path in files)


def test_files_that_lie_in_memory_are_not_called_cold(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement.file_system("/proc") == "proc"
    monkeypatch.setattr(placement, "MEMORY_FILE_SYSTEMS", (placement.file_system(str(sets)),))
    with pytest.raises(DataError, match=r"^page_cache 'cold' cannot be had: .*lmdb lies in memory \(.*or use 'as_is'$"):
        source(trial(sets, "lmdb", page_cache="cold"))
    source(trial(sets, "lmdb", page_cache="warm"))


def test_a_warm_cache_reads_every_byte_and_as_is_touches_nothing(
    sets: Path, advised: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[str] = []
    real = placement._read_through

    def read_through(path: str) -> None:
        warmed.append(path)
        real(path)

    monkeypatch.setattr(placement, "_read_through", read_through)
    source(trial(sets, "arrow_raw"))
    assert not warmed and not advised
    source(trial(sets, "arrow_raw", page_cache="warm"))
    assert sorted(warmed) == sorted(str(path) for path in (sets / "arrow_raw").glob("train-*"))
    assert not advised


def test_files_are_not_held_open_after_the_trial(sets: Path) -> None:
    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {part.split(maxsplit=5)[5] for part in lines if str(sets) in part}

    for storage in ("lmdb", "arrow_jpeg", "arrow_raw"):
        asked = trial(sets, storage)
        workload = build_workload(asked, CPU)
        next(endless_batches(asked, workload, rank=0))
        assert mapped()
        del workload
        gc.collect()  # as a rank does after each trial
        assert mapped() == set(), "a page that is mapped does not leave the cache"


# ------------------------------------------------------------------------------------------------------ command line


def data_axes(folder: Path, **options: Any) -> dict[str, Any]:
    return {k: v for k, v in resolve({"data-dir": str(folder)} | options).axes.items() if k != "data_dir"}


def test_the_command_line_finds_what_lies_in_a_folder(sets: Path, tmp_path: Path) -> None:
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
    assert str(error.value) == (
        f"--data-dir: {photos} contains several data sets; choose one: --set dataset=cifar10 or --set dataset=image_folder"
    )


def test_an_image_folder_without_a_folder_is_told() -> None:
    with pytest.raises(ConfigurationError) as error:
        resolve({"set": ["dataset=tiny_imagenet"]})
    assert str(error.value) == (
        "--set dataset: 'tiny_imagenet' needs --data-dir DIR with its files; 'fashion_mnist_sample' needs no files"
    )


def test_a_study_of_storage_formats_is_planned_at_imagenets_size(sets: Path) -> None:
    from study.capacity import NodeCapacity

    host = [NodeCapacity("", "localhost", cpus=2, gpus=0)]
    axes = data_axes(sets, set=["storage=jpeg,arrow_raw", "decode=pil,torchvision"]) | {"data_dir": (str(sets),)}
    rows = plan_trials(STUDIES["smoke"](host).asking(axes), host)
    trials = [row.trial for row in rows if row.trial]
    assert {asked.image_size for asked in trials} == {224}
    assert {(asked.storage, asked.decode) for asked in trials} == {("jpeg", "pil"), ("jpeg", "torchvision"), ("arrow_raw", "pil")}  # fmt: skip
    assert any("decode 'torchvision' has nothing to decode" in row.reason for row in rows if row.trial is None)
