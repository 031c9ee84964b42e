"""Converting an image set: the same content in every format, verified; killed anywhere it goes on; half of it is nothing."""

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


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


def line(source: Path, destination: Path, storage: str = "lmdb", **options: Any) -> str:
    with pytest.raises(DataError) as error:
        convert(source, destination, storage, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def content(folder: Path, split: str = "train") -> list[tuple[bytes, int]]:
    records, _ = open_folder(folder, split)
    return [(bytes(kept), label) for kept, label in (records[index] for index in range(len(records)))]


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("part_images", [4, 4096])
@pytest.mark.parametrize("storage", ENCODED)
def test_encoded_formats_keep_every_file_bit_for_bit(photos: Path, storage: str, part_images: int) -> None:
    made = photos.parent / "made"
    manifest = convert(photos, made, storage, part_images=part_images)
    for split, count in (("train", 18), ("val", 6)):
        assert content(made, split) == content(photos, split)
        assert manifest["splits"][split]["count"] == count
    assert read_manifest(made) == manifest and manifest["classes"] == ["cat", "dog", "owl"]
    assert not (photos.parent / "made.partial").exists() and not (made / NOTES).exists()


def test_pixels_are_those_that_pil_decodes(photos: Path) -> None:
    made = photos.parent / "made"
    manifest = convert(photos, made, "arrow_raw", image_size=28, part_images=7)
    assert (manifest["image_size"], manifest["stored_side"]) == (28, 32)
    records, _ = open_folder(made, "train")
    for index, (file, label) in enumerate(content(photos)):
        pixels, same_label = records[index]
        assert same_label == label and pixels.shape == (32, 32, 3)
        np.testing.assert_array_equal(pixels, pil_square(file, centre_square, 32))


def test_record_batches_and_files_are_crossed_in_order(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_files, "BATCH_IMAGES", 3)
    convert(photos, photos.parent / "made", "arrow_jpeg", part_images=7)
    assert content(photos.parent / "made") == content(photos)


def test_a_checksum_depends_on_content_and_not_on_the_format(photos: Path) -> None:
    sums = [convert(photos, photos.parent / name, name)["splits"]["train"]["sha256"] for name in ENCODED]
    assert len(set(sums)) == 1
    other = write_photos(photos.parent / "others", first_seed=50)
    assert convert(other, photos.parent / "made", "lmdb")["splits"]["train"]["sha256"] != sums[0]


def test_a_converted_set_converts_again_and_tiny_imagenet_does(photos: Path) -> None:
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
    assert content(flat / "lmdb") == content(flat), "a set beside the classes is not one of them"


@pytest.mark.parametrize("storage", STORAGES)
def test_a_class_whose_name_is_not_utf_8_is_converted_under_its_name(photos: Path, storage: str) -> None:
    name = os.fsdecode(b"gr\xfcn")
    for split in ("train", "val"):
        (photos / split / "dog").rename(photos / split / name)
    made = photos.parent / "made"
    assert convert(photos, made, storage, image_size=28)["classes"] == ["cat", name, "owl"]
    assert [label for _, label in content(made)] == [label for _, label in content(photos)]


# ---------------------------------------------------------------------------------------------------- interruptions


def convert_until_killed(photos: Path, made: Path, storage: str, phase: str, images: int) -> None:
    """Converts, and kills its own process when a phase has come to so many images."""

    def report(what: str, done: int, total: int) -> None:
        if what == phase and done >= images:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(photos, made, storage, 28, part_images=4, report=report)


@pytest.mark.parametrize(
    ("storage", "what", "images"),
    [("jpeg", "converting", 6), ("lmdb", "converting", 11), ("arrow_raw", "converting", 20), ("lmdb", "verifying", 8)],
)
def test_a_conversion_that_was_killed_goes_on_and_ends_with_the_same_bytes(
    photos: Path, storage: str, what: str, images: int
) -> None:
    made, whole = photos.parent / "made", photos.parent / "whole"
    preload_loader_processes()
    arguments = (photos, made, storage, what, images)
    process = multiprocessing.get_context("forkserver").Process(target=convert_until_killed, args=arguments)
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    assert not made.exists(), "half a set is not taken for a whole one"
    notes = json.loads((photos.parent / "made.partial" / NOTES).read_text())
    kept = sum(map(len, notes["digests"].values()))
    assert kept > 0
    reported: list[int] = []
    resumed = convert(photos, made, storage, 28, part_images=4, report=lambda w, n, _: reported.append(n) if w == "converting" else None)  # fmt: skip
    assert not reported or min(reported) > 4, "parts that were written are not read again"
    assert resumed == convert(photos, whole, storage, 28, part_images=4)
    if storage == "lmdb":  # pages may lie elsewhere in the file
        assert content(made) == content(whole)
    else:
        assert all_bytes(made) == all_bytes(whole)


def test_a_whole_set_is_not_converted_again(photos: Path) -> None:
    made = photos.parent / "made"
    first = convert(photos, made, "lmdb")
    before = (made / "train.lmdb").stat().st_mtime_ns
    assert convert(photos, made, "lmdb") == first
    assert (made / "train.lmdb").stat().st_mtime_ns == before


def test_a_set_converted_into_its_own_source_is_none_of_its_classes(photos: Path) -> None:
    flat = photos.parent / "flat"
    (photos / "train").rename(flat)
    before = content(flat)
    first = convert(flat, flat / "converted", "lmdb")
    assert content(flat) == before
    assert convert(flat, flat / "converted", "lmdb") == first


def test_two_at_the_same_time_do_not_write_the_same_folder(photos: Path) -> None:
    made = photos.parent / "made"
    told: list[str] = []

    def second(what: str, done: int, total: int) -> None:
        if not told:
            told.append(line(photos, made))

    convert(photos, made, "lmdb", report=second)
    assert told == [f"another process is writing {made}.partial: let it end, or give another DST"]


# ------------------------------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize("storage", STORAGES)
def test_a_damaged_image_ends_the_conversion_with_its_name_and_its_repair_resumes_it(
    photos: Path, storage: str
) -> None:
    path = photos / "train" / "dog" / "dog_3.JPEG"
    sound = path.read_bytes()
    path.write_bytes(sound[: len(sound) // 2])
    told = line(photos, photos.parent / "made", storage, part_images=4)
    assert told.startswith(f"{path} cannot be decoded (") and told.endswith(
        "): replace or remove it, then convert again"
    )
    assert not (photos.parent / "made").exists()
    path.write_bytes(sound)
    beside = photos.parent / "made.partial"
    assert line(photos, photos.parent / "made", storage, part_images=4) == (
        f"{beside} is an unfinished conversion of other files, or to another format; remove {beside} and convert again"
    )


def test_what_differs_from_its_source_is_not_accepted(photos: Path) -> None:
    made = photos.parent / "made"

    def change_a_byte(what: str, done: int, total: int) -> None:
        if what == "converting" and done == total:
            path = photos.parent / "made.partial" / "train" / "cat" / "00000002.JPEG"
            path.write_bytes(path.read_bytes()[:-1] + b"?")

    told = line(photos, made, "jpeg", report=change_a_byte)
    beside = f"{made}.partial"
    assert told == (
        f"{beside}/train/cat/00000000.JPEG and the following are not what was read from the source; "
        f"remove {beside} and convert again"
    )
    assert not made.exists()


def test_a_destination_that_holds_something_else_is_left_alone(photos: Path) -> None:
    made = photos.parent / "made"
    convert(photos, made, "lmdb")
    assert line(photos, made, "arrow_jpeg") == f"{made} holds another converted set; remove it, or give another DST"
    assert line(photos, photos) == f"{photos} is there already and is no converted set; give a DST that does not exist"
    empty = photos.parent / "empty"
    empty.mkdir()
    assert line(empty, photos.parent / "new").startswith(f"{empty} holds no images; expected SRC/train/CLASS/*.JPEG")
    convert(photos, photos.parent / "raw", "arrow_raw", 28)
    assert line(photos.parent / "raw", photos.parent / "new") == (
        f"{photos.parent / 'raw'} holds pixels, which cannot become JPEG files again: convert what it was made from"
    )


# ------------------------------------------------------------------------------------------------------ command line


def test_the_command_prints_what_it_made_and_how_to_use_it(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = photos.parent / "made"
    assert main(["convert", str(photos), str(made), "--storage", "lmdb", "-q"]) == 0
    printed = capsys.readouterr()
    manifest = json.loads((made / MANIFEST).read_text())
    assert printed.err == ""
    assert printed.out.splitlines() == [
        f"{made}: train: 18 images in lmdb, verified, sha256 {manifest['splits']['train']['sha256']}",
        f"{made}: val: 6 images in lmdb, verified, sha256 {manifest['splits']['val']['sha256']}",
        f"use it with: --data-dir {made} --set storage=lmdb",
    ]
    assert main(["convert", str(photos), str(photos.parent / "more"), "--storage", "arrow_raw", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["stored_side"] == 256
    assert "24/24" in printed.err, "progress goes to stderr"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["SRC", "DST", "--storage", "lmbd"], "--storage 'lmbd' is not known; allowed: jpeg, lmdb, arrow_jpeg, arrow_raw; did you mean 'lmdb'?"),
        (["SRC/none", "DST", "--storage", "lmdb"], "SRC 'SRC/none' does not exist; give an image folder or a converted set"),
        (["SRC/empty", "DST", "--storage", "lmdb"], "SRC/empty holds no images; expected SRC/train/CLASS/*.JPEG and SRC/val/CLASS/*.JPEG, SRC/CLASS/*.JPEG, Tiny-ImageNet, or a converted set"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(
    photos: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = [part.replace("DST", str(photos.parent / "new")).replace("SRC", str(photos)) for part in arguments]
    (photos / "empty").mkdir()
    assert main(["convert", *placed]) == 2
    printed = capsys.readouterr()
    told = told.replace("SRC/none", f"{photos}/none").replace("SRC/empty", f"{photos}/empty")
    assert printed.err.splitlines() == [f"error: {told}"]
    assert printed.out == ""


def test_a_destination_that_cannot_be_made_is_one_line(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    below = photos.parent / "file" / "made"
    below.parent.touch()
    assert main(["convert", str(photos), str(below), "--storage", "lmdb", "-q"]) == 2
    assert capsys.readouterr().err == (
        f"error: {photos} cannot be converted into {below} ([Errno 20] Not a directory: '{below}.partial'): mend that, then "
        "run the same again\n"
    )


@pytest.mark.parametrize("storage", STORAGES)
def test_a_disk_that_is_full_is_one_line_and_room_resumes_the_conversion(
    photos: Path, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", str(photos), str(photos.parent / "made"), "--storage", storage, "--image-size", "28", "-q"]
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, most))  # what is longer cannot be written, as on a full disk
    try:
        assert main(arguments) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    told = capsys.readouterr().err
    assert told.startswith(f"error: {photos} cannot be converted into {photos.parent / 'made'} (")
    assert told.endswith("): mend that, then run the same again\n") and told.count("\n") == 1
    assert main(arguments) == 0
    assert len(content(photos.parent / "made")) == 18


def test_an_interrupt_says_how_to_resume(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = photos.parent / "made"
    arguments = ["convert", str(photos), str(made), "--storage", "lmdb", "-q"]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    with monkeypatch.context() as while_converting:
        while_converting.setattr(Progress, "update", lambda *args, **fields: signal.raise_signal(signal.SIGINT))
        assert main(arguments) == 130
    assert capsys.readouterr() == ("", f"interrupted; resume with: python -m study.scaling {' '.join(arguments)}\n")
    assert not made.exists()
    assert main(arguments) == 0 and content(made) == content(photos)
