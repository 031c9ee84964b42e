"""Conversion of image sets: same content in every format, verified, resumable after a kill, and atomic."""

import json
import multiprocessing
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.progress import Progress

from study.scaling import main
from tests.support.gloo import preload_loader_processes
from tests.support.photos import write_photos, write_tiny_imagenet
from trainables.data.image_layout import MANIFEST, read_manifest
from trainables.data.images import arrow_files
from trainables.data.images.convert import NOTES, convert
from trainables.data.images.decode import centre_square, pil_square
from trainables.data.images.open import open_folder
from trainables.data.source import DataError
from trainables.registry import STORAGES

ENCODED = [name for name in STORAGES if name != "arrow_raw"]


def error_message(source: Path, destination: Path, storage: str = "lmdb", **options: Any) -> str:
    """Return the error of a conversion, which must be one line."""
    with pytest.raises(DataError) as error:
        convert(source, destination, storage, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def content(folder: Path, split: str = "train") -> list[tuple[bytes, int]]:
    records, _ = open_folder(folder, split)
    return [(bytes(image), label) for image, label in (records[index] for index in range(len(records)))]


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("part_images", [4, 4096])
@pytest.mark.parametrize("storage", ENCODED)
def test_encoded_formats_keep_every_file_unchanged(photos: Path, storage: str, part_images: int) -> None:
    destination = photos.parent / "made"
    manifest = convert(photos, destination, storage, part_images=part_images)
    for split, count in (("train", 18), ("val", 6)):
        assert content(destination, split) == content(photos, split)
        assert manifest["splits"][split]["count"] == count
    assert read_manifest(destination) == manifest and manifest["classes"] == ["cat", "dog", "owl"]
    assert not (photos.parent / "made.partial").exists() and not (destination / NOTES).exists()


def test_arrow_raw_has_the_pixels_decoded_by_pil(photos: Path) -> None:
    destination = photos.parent / "made"
    manifest = convert(photos, destination, "arrow_raw", image_size=28, part_images=7)
    assert (manifest["image_size"], manifest["stored_side"]) == (28, 32)
    records, _ = open_folder(destination, "train")
    for index, (file, label) in enumerate(content(photos)):
        pixels, same_label = records[index]
        assert same_label == label and pixels.shape == (32, 32, 3)
        np.testing.assert_array_equal(pixels, pil_square(file, centre_square, 32))


def test_the_order_is_kept_across_record_batches_and_files(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_files, "BATCH_IMAGES", 3)
    convert(photos, photos.parent / "made", "arrow_jpeg", part_images=7)
    assert content(photos.parent / "made") == content(photos)


def test_a_checksum_depends_on_the_content_but_not_on_the_format(photos: Path) -> None:
    sums = [convert(photos, photos.parent / name, name)["splits"]["train"]["sha256"] for name in ENCODED]
    assert len(set(sums)) == 1
    other = write_photos(photos.parent / "others", first_seed=50)
    assert convert(other, photos.parent / "made", "lmdb")["splits"]["train"]["sha256"] != sums[0]


def test_converted_sets_tiny_imagenet_and_flat_folders_can_be_converted(photos: Path) -> None:
    folder = photos.parent
    convert(photos, folder / "a", "lmdb")
    convert(folder / "a", folder / "b", "arrow_jpeg")
    convert(folder / "b", folder / "c", "jpeg")
    assert content(folder / "c", "val") == content(photos, "val")
    tiny = write_tiny_imagenet(folder / "tiny")
    convert(tiny, folder / "d", "arrow_jpeg")
    assert content(folder / "d", "val") == content(tiny, "val")
    flat = write_photos(folder / "flat", {"": 2})
    assert list(convert(flat, flat / "lmdb", "lmdb")["splits"]) == ["train"]
    assert content(flat / "lmdb") == content(flat), "a set next to the classes is not a class"


@pytest.mark.parametrize("storage", STORAGES)
def test_a_class_name_that_is_not_utf_8_is_kept(photos: Path, storage: str) -> None:
    name = os.fsdecode(b"gr\xfcn")
    for split in ("train", "val"):
        (photos / split / "dog").rename(photos / split / name)
    destination = photos.parent / "made"
    assert convert(photos, destination, storage, image_size=28)["classes"] == ["cat", name, "owl"]
    assert [label for _, label in content(destination)] == [label for _, label in content(photos)]


# ----------------------------------------------------------------------------------------- names of a hostile set


OUTSIDE = ("../../outside", "..", ".", "", "a/b", ".hidden", "nul\0", 7, None)


@pytest.mark.parametrize("name", [*OUTSIDE, "ABSOLUTE"])
def test_a_class_of_a_manifest_that_is_no_folder_name_is_refused(photos: Path, name: Any) -> None:
    escaped = photos.parent / "absolute"
    convert(photos, photos.parent / "set", "lmdb")
    change_manifest(photos.parent / "set", classes=[str(escaped) if name == "ABSOLUTE" else name, "dog", "owl"])
    before = names_below(photos.parent)
    message = error_message(photos.parent / "set", photos.parent / "deep" / "made", "jpeg")
    assert message.startswith(f"{photos.parent / 'set' / MANIFEST}: class ")
    assert names_below(photos.parent) == before


@pytest.mark.parametrize("split", ["../other", "", "test", "train/../val"])
def test_a_split_of_a_manifest_that_is_not_known_is_refused(photos: Path, split: str) -> None:
    convert(photos, photos.parent / "set", "lmdb")
    manifest = read_manifest(photos.parent / "set")
    assert manifest is not None
    change_manifest(photos.parent / "set", splits={split: manifest["splits"]["train"]})
    message = error_message(photos.parent / "set", photos.parent / "made", "jpeg")
    assert message.startswith(f"{photos.parent / 'set' / MANIFEST}: split {split!r}") and "train, val" in message


@pytest.mark.parametrize("name", ["../../evil", "..", "/etc", ".hidden"])
def test_a_class_of_tiny_imagenet_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    tiny = write_tiny_imagenet(tmp_path / "tiny")
    (tiny / "wnids.txt").write_text(f"n01\n{name}\n")
    message = error_message(tiny, tmp_path / "made", "jpeg")
    assert message.startswith(f"{tiny / 'wnids.txt'}: class {name!r}")
    assert not (tmp_path / "made.partial").exists()


@pytest.mark.parametrize(
    ("storage", "changes", "name"),
    [
        ("lmdb", {"splits": {"train": 5}}, "count of split 'train'"),
        ("lmdb", {"splits": {"train": {"count": "a"}}}, "count of split 'train'"),
        ("lmdb", {"splits": {"train": {"count": -1}}}, "count of split 'train'"),
        ("lmdb", {"splits": {"val": {"count": 10**30}}}, "count of split 'val'"),
        ("arrow_jpeg", {"part_images": 0}, "part_images"),
        ("arrow_jpeg", {"part_images": None}, "part_images"),
    ],
)
def test_a_count_of_a_manifest_that_is_none_is_refused(
    photos: Path, storage: str, changes: dict[str, Any], name: str
) -> None:
    convert(photos, photos.parent / "set", storage)
    change_manifest(photos.parent / "set", **changes)
    message = error_message(photos.parent / "set", photos.parent / "made", "jpeg")
    assert message.startswith(f"{photos.parent / 'set' / MANIFEST}: {name} is ")


@pytest.mark.parametrize("kind", ["nested", "list", "pipe"])
def test_a_manifest_that_cannot_be_read_is_as_if_there_were_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / MANIFEST
    if kind == "pipe":
        os.mkfifo(path)
    else:
        known = {"format": "scaling-study image set", "version": 1, "splits": {}, "classes": [], "storage": ["lmdb"]}
        path.write_text("[" * 100_000 if kind == "nested" else json.dumps(known))
    assert read_manifest(tmp_path) is None
    assert error_message(tmp_path, tmp_path / "made").startswith(f"no images in {tmp_path}")


def test_a_label_without_a_class_is_refused(photos: Path) -> None:
    convert(photos, photos.parent / "set", "lmdb")
    change_manifest(photos.parent / "set", classes=["cat"])
    assert "label 1" in error_message(photos.parent / "set", photos.parent / "made", "jpeg")


def change_manifest(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# ---------------------------------------------------------------------------------------------------- interruptions


def convert_until_killed(photos: Path, destination: Path, storage: str, phase: str, images: int) -> None:
    """Convert, and kill this process when a phase has processed `images` images."""

    def report(current_phase: str, done: int, total: int) -> None:
        if current_phase == phase and done >= images:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(photos, destination, storage, 28, part_images=4, report=report)


@pytest.mark.parametrize(
    ("storage", "phase", "images"),
    [("jpeg", "converting", 6), ("lmdb", "converting", 11), ("arrow_raw", "converting", 20), ("lmdb", "verifying", 8)],
)
def test_a_killed_conversion_resumes_and_gives_the_same_bytes(
    photos: Path, storage: str, phase: str, images: int
) -> None:
    destination, uninterrupted = photos.parent / "made", photos.parent / "uninterrupted"
    preload_loader_processes()
    arguments = (photos, destination, storage, phase, images)
    process = multiprocessing.get_context("forkserver").Process(target=convert_until_killed, args=arguments)
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    assert not destination.exists(), "a partial set must not look complete"
    notes = json.loads((photos.parent / "made.partial" / NOTES).read_text())
    assert sum(map(len, notes["digests"].values())) > 0
    converted_counts: list[int] = []

    def report(current_phase: str, done: int, total: int) -> None:
        if current_phase == "converting":
            converted_counts.append(done)

    resumed = convert(photos, destination, storage, 28, part_images=4, report=report)
    assert not converted_counts or min(converted_counts) > 4, "recorded parts are not read again"
    assert resumed == convert(photos, uninterrupted, storage, 28, part_images=4)
    if storage == "lmdb":  # the order of pages in the file may differ
        assert content(destination) == content(uninterrupted)
    else:
        assert all_bytes(destination) == all_bytes(uninterrupted)


def test_a_complete_set_is_not_converted_again(photos: Path) -> None:
    destination = photos.parent / "made"
    first = convert(photos, destination, "lmdb")
    before = (destination / "train.lmdb").stat().st_mtime_ns
    assert convert(photos, destination, "lmdb") == first
    assert (destination / "train.lmdb").stat().st_mtime_ns == before


def test_a_set_converted_into_its_source_folder_is_not_a_class(photos: Path) -> None:
    flat = photos.parent / "flat"
    (photos / "train").rename(flat)
    before = content(flat)
    first = convert(flat, flat / "converted", "lmdb")
    assert content(flat) == before
    assert convert(flat, flat / "converted", "lmdb") == first


def test_two_conversions_do_not_write_the_same_folder(photos: Path) -> None:
    destination = photos.parent / "made"
    messages: list[str] = []

    def start_second(phase: str, done: int, total: int) -> None:
        if not messages:
            messages.append(error_message(photos, destination))

    convert(photos, destination, "lmdb", report=start_second)
    assert messages[0].startswith(f"another process is writing {destination}.partial")


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("storage", STORAGES)
def test_a_damaged_image_is_reported_and_its_repair_needs_a_new_conversion(photos: Path, storage: str) -> None:
    path = photos / "train" / "dog" / "dog_3.JPEG"
    intact = path.read_bytes()
    path.write_bytes(intact[: len(intact) // 2])
    message = error_message(photos, photos.parent / "made", storage, part_images=4)
    assert message.startswith(f"cannot decode {path} (") and "replace or remove it" in message
    assert not (photos.parent / "made").exists()
    path.write_bytes(intact)
    partial = photos.parent / "made.partial"
    message = error_message(photos, photos.parent / "made", storage, part_images=4)
    assert message.startswith(f"{partial} is an unfinished conversion") and f"remove {partial}" in message


def test_a_set_that_differs_from_its_source_is_rejected(photos: Path) -> None:
    destination = photos.parent / "made"

    def change_a_byte(phase: str, done: int, total: int) -> None:
        if phase == "converting" and done == total:
            path = photos.parent / "made.partial" / "train" / "cat" / "00000002.JPEG"
            path.write_bytes(path.read_bytes()[:-1] + b"?")

    message = error_message(photos, destination, "jpeg", report=change_a_byte)
    assert message.startswith("checksum mismatch") and f"{destination}.partial/train/cat/00000000.JPEG" in message
    assert f"remove {destination}.partial" in message
    assert not destination.exists()


def test_an_existing_destination_with_other_content_is_left_alone(photos: Path) -> None:
    destination = photos.parent / "made"
    convert(photos, destination, "lmdb")
    assert error_message(photos, destination, "arrow_jpeg").startswith(
        f"{destination} already has another converted set"
    )
    assert error_message(photos, photos).startswith(f"{photos} exists and is not a converted set")
    empty = photos.parent / "empty"
    empty.mkdir()
    message = error_message(empty, photos.parent / "new")
    assert message.startswith(f"no images in {empty}; expected SRC/train/CLASS/*.JPEG")
    convert(photos, photos.parent / "raw", "arrow_raw", 28)
    message = error_message(photos.parent / "raw", photos.parent / "new")
    assert message.startswith(f"{photos.parent / 'raw'} has pixels")


# ------------------------------------------------------------------------------------------------------ command line


def test_the_command_prints_the_result_and_how_to_use_it(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    destination = photos.parent / "made"
    assert main(["convert", str(photos), str(destination), "--storage", "lmdb", "-q"]) == 0
    printed = capsys.readouterr()
    manifest = json.loads((destination / MANIFEST).read_text())
    assert printed.err == ""
    train, val, usage = printed.out.splitlines()
    assert "train: 18 images" in train and manifest["splits"]["train"]["sha256"] in train
    assert "val: 6 images" in val and manifest["splits"]["val"]["sha256"] in val
    assert f"--data-dir {destination} --set storage=lmdb" in usage
    assert main(["convert", str(photos), str(photos.parent / "more"), "--storage", "arrow_raw", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["stored_side"] == 256
    assert "24/24" in printed.err, "progress goes to stderr"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["SRC", "DST", "--storage", "lmbd"], ["--storage 'lmbd'", "jpeg, lmdb, arrow_jpeg, arrow_raw", "'lmdb'?"]),
        (["SRC/none", "DST", "--storage", "lmdb"], ["SRC/none' does not exist"]),
        (["SRC/empty", "DST", "--storage", "lmdb"], ["no images in SRC/empty", "SRC/train/CLASS/*.JPEG"]),
    ],
)
def test_an_invalid_argument_is_one_line_and_exit_code_2(
    photos: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [part.replace("DST", str(photos.parent / "new")).replace("SRC", str(photos)) for part in arguments]
    (photos / "empty").mkdir()
    assert main(["convert", *paths]) == 2
    printed = capsys.readouterr()
    [message] = printed.err.replace(str(photos), "SRC").splitlines()
    assert message.startswith("error: ") and all(part in message for part in words)
    assert printed.out == ""


def test_a_destination_that_cannot_be_created_is_an_error(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    destination = photos.parent / "file" / "made"
    destination.parent.touch()
    assert main(["convert", str(photos), str(destination), "--storage", "lmdb", "-q"]) == 2
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith("error: ") and str(photos) in message
    assert f"Not a directory: '{destination}.partial'" in message


@pytest.mark.parametrize("storage", STORAGES)
def test_a_conversion_resumes_after_a_full_disk(photos: Path, storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(photos), str(photos.parent / "made"), "--storage", storage, "--image-size", "28", "-q"]
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard_limit))  # longer files fail as on a full disk
    try:
        assert main(arguments) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith("error: ") and str(photos) in message and str(photos.parent / "made") in message
    assert main(arguments) == 0
    assert len(content(photos.parent / "made")) == 18


def test_an_interrupt_prints_the_command_to_resume(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    destination = photos.parent / "made"
    arguments = ["convert", str(photos), str(destination), "--storage", "lmdb", "-q"]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    with monkeypatch.context() as while_converting:
        while_converting.setattr(Progress, "update", lambda *args, **fields: signal.raise_signal(signal.SIGINT))
        assert main(arguments) == 130
    printed = capsys.readouterr()
    assert printed.out == "" and f"python -m study.scaling {' '.join(arguments)}\n" in printed.err
    assert not destination.exists()
    assert main(arguments) == 0 and content(destination) == content(photos)
