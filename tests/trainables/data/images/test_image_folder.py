"""Image folders: what is read from which layout, how images are cut and augmented, and one line for each thing wrong."""

import importlib
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.ExifTags import Base
from torchvision.transforms import v2

from tests.support.gloo import preload_loader_processes
from tests.support.photos import decoded, encoded, picture, png_of_16_bits, write_photos, write_tiny_imagenet
from trainables.batch import to_device
from trainables.build import build_workload
from trainables.data import loader
from trainables.data.images import decode
from trainables.data.images.augment import RATIO, SCALE, crop_and_flip, random_resized_crop
from trainables.data.images.decode import as_baseline, centre_square, nvjpeg, pil, torchvision
from trainables.data.images.folder import source
from trainables.data.images.gpu import jpeg as device_jpeg
from trainables.data.images.gpu.jpeg import NvImageCodec, decode_jpegs, decoder_of
from trainables.data.loader import endless_batches
from trainables.data.sampler import RankSampler
from trainables.data.source import DataError, DataSource
from trainables.measure.run import run
from trainables.step.context import RankSetup
from trainables.step.process import release_memory
from trainables.trial import Trial
from trainables.workload import OnHost

CPU = torch.device("cpu")
SIZE, SIDE = 28, 32


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


def trial(folder: Path, **fields: Any) -> Trial:
    return Trial(**({"model": "mlp", "dataset": "image_folder", "data_dir": str(folder), "batch_per_gpu": 6} | fields))


def batch(found: DataSource, numbers: list[int]) -> tuple[Any, torch.Tensor]:
    return found.dataset.__getitems__(numbers)  # type: ignore[attr-defined]


def length(found: DataSource) -> int:
    return len(found.dataset)  # type: ignore[arg-type]


def line(folder: Path, split: str = "train", **fields: Any) -> str:
    with pytest.raises(DataError) as error:
        source(trial(folder, **fields), split)
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(folder), "DIR")


# ------------------------------------------------------------------------------------------------------- layouts


def test_classes_and_length_come_from_imagenets_layout(photos: Path) -> None:
    (photos / "train" / "README.txt").write_text("not an image")
    (photos / "train" / "cat" / ".hidden.JPEG").write_text("not an image")
    train, test = source(trial(photos)), source(trial(photos), "test")
    assert (length(train), length(test), train.classes, train.channels, train.image_size) == (18, 6, 3, 3, SIZE)
    assert batch(train, list(range(18)))[1].tolist() == [label for label in range(3) for _ in range(6)]
    assert batch(test, list(range(6)))[1].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_folder_of_class_folders_is_all_for_training(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"": 4})
    assert (length(source(trial(folder))), source(trial(folder)).classes) == (12, 3)
    assert line(folder, "test") == "DIR has no images to test with; expected DIR/val/CLASS/*.JPEG"


def test_tiny_imagenets_validation_labels_come_from_its_annotations(tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path / "tiny")
    with (folder / "val/val_annotations.txt").open("a") as annotations:
        annotations.write("\n")  # an empty line is no image
    train, test = (source(trial(folder, dataset="tiny_imagenet"), split) for split in ("train", "test"))
    assert (length(train), length(test), train.classes) == (12, 4, 3)
    assert batch(train, list(range(12)))[1].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    images, labels = batch(test, [0, 1, 2, 3])
    assert labels.tolist() == [0, 0, 1, 2], "n01 is the first class by name, whatever wnids.txt begins with"
    [n02] = batch(source(trial(folder, dataset="tiny_imagenet", image_size=64), "test"), [2])[0]
    expected = pil([(folder / "val/images/val_2.JPEG").read_bytes()], [centre_square], 73, CPU)[0, :, 4:68, 4:68]
    assert torch.equal(n02, expected) and images.shape == (4, 3, SIZE, SIZE)


def test_a_trial_trains_on_an_image_folder_through_loader_processes(photos: Path) -> None:
    preload_loader_processes()
    alone, loaded = (
        list(islice(endless_batches(asked, build_workload(asked, CPU), rank=0), 4))
        for asked in (trial(photos, augment="cpu"), trial(photos, augment="cpu", loader_workers=2))
    )
    for (images, labels), (expected_images, expected_labels) in zip(loaded, alone, strict=True):
        assert torch.equal(images, expected_images) and torch.equal(labels, expected_labels)
    asked = trial(photos)
    workload = build_workload(asked, CPU)
    outputs = workload.model(workload.prepare(alone[0][0]))
    assert outputs.shape == (6, 3) and torch.isfinite(workload.loss(outputs, alone[0][1]))


# ------------------------------------------------------------------------------------------------------- geometry


@pytest.mark.parametrize("decoder", [pil, torchvision])
def test_an_image_becomes_what_torchvisions_resize_and_centre_crop_make_of_it(decoder: Any) -> None:
    image = picture(200, 150, 1)
    file = encoded(image)
    [ours] = decoder([file], [centre_square], SIDE, CPU)
    reference = v2.Compose([v2.Resize(SIDE), v2.CenterCrop(SIDE), v2.PILToTensor()])(decoded(file))
    assert (ours.int() - reference.int()).abs().float().mean() < 1.0


def test_the_decoders_agree() -> None:
    files = [encoded(picture(120 + 30 * k, 150 - 10 * k, k)) for k in range(5)]
    both = [decoder(files, [centre_square] * 5, SIDE, CPU).int() for decoder in (pil, torchvision)]
    assert (both[0] - both[1]).abs().float().mean() < 0.5
    assert (both[0] - both[0].flip(0)).abs().float().mean() > 5, "images that are alike would show nothing"


def test_grey_and_png_images_become_rgb_in_every_decoder() -> None:
    grey = encoded(picture(60, 40, 1).convert("L"))
    for decoder in (pil, torchvision):
        [image] = decoder([grey], [centre_square], SIDE, CPU)
        assert torch.equal(image[0], image[1]) and torch.equal(image[0], image[2])
    png = encoded(picture(60, 40, 1), "PNG")
    assert torch.equal(*(decoder([png], [centre_square], 40, CPU) for decoder in (pil, torchvision)))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_of_a_png_of_16_bits_every_decoder_takes_the_upper_8(mode: str) -> None:
    picture_8 = picture(60, 40, 1).convert(mode)
    files = encoded(picture_8, "PNG"), png_of_16_bits(np.asarray(picture_8))
    assert all(torch.equal(*(of([file], [centre_square], SIDE, CPU) for file in files)) for of in (pil, torchvision))
    assert as_baseline(files[0]) == as_baseline(files[1])


@pytest.mark.parametrize("augment", ["none", "cpu", "device"])
def test_the_smallest_images_reach_the_model_in_the_size_that_was_asked_for(photos: Path, augment: str) -> None:
    found: Any = source(trial(photos, image_size=8, augment=augment))
    assert found.prepare(batch(found, [0, 7])[0]).shape == (2, 3, 8, 8)


def test_without_augmentation_the_loader_delivers_the_centre_of_what_the_device_would_crop_from(photos: Path) -> None:
    squares, labels = batch(source(trial(photos, augment="device")), [0, 7, 17])
    centres, same_labels = batch(source(trial(photos)), [0, 7, 17])
    assert squares.shape == (3, 3, SIDE, SIDE) and squares.dtype == torch.uint8
    assert torch.equal(squares[:, :, 2:30, 2:30], centres) and torch.equal(labels, same_labels)


def test_one_sample_is_the_same_as_in_a_batch(photos: Path) -> None:
    dataset: Any = source(trial(photos)).dataset
    images, labels = dataset.__getitems__([3, 9])
    for k, index in enumerate((3, 9)):
        assert torch.equal(dataset[index][0], images[k]) and dataset[index][1] == labels[k]


# ---------------------------------------------------------------------------------------------------- augmentation


def test_the_device_crops_every_image_at_a_place_of_its_own_and_mirrors_half_of_them() -> None:
    torch.manual_seed(0)
    column = torch.arange(SIDE, dtype=torch.uint8).expand(SIDE, SIDE)
    images = torch.stack([column, column.T, torch.zeros_like(column)]).expand(400, 3, SIDE, SIDE)
    cropped = crop_and_flip(images, SIZE)
    assert cropped.shape == (400, 3, SIZE, SIZE) and cropped.dtype == torch.uint8
    across, down = cropped[:, 0, 0].int(), cropped[:, 1, :, 0].int()
    mirrored = across[:, 0] > across[:, -1]
    assert 150 < int(mirrored.sum()) < 250
    left = torch.where(mirrored, across[:, -1], across[:, 0])
    along = torch.arange(SIZE)
    assert torch.equal(across.sort(dim=1).values, left[:, None] + along), "columns in a row, none left out"
    assert torch.equal(down, down[:, :1] + along), "nothing is turned upside down"
    for offsets in (left, down[:, 0]):
        assert set(offsets.tolist()) == set(range(SIDE - SIZE + 1))


def test_loaders_crop_as_torchvisions_random_resized_crop_does() -> None:
    random = np.random.default_rng(0)
    boxes = [random_resized_crop(500, 375, random) for _ in range(3000)]
    torch.manual_seed(0)
    reference = v2.RandomResizedCrop(224)
    theirs = [reference.make_params([torch.empty(3, 375, 500)]) for _ in range(3000)]
    for _, _, width, height in boxes:
        assert 0.97 * SCALE[0] <= width * height / (500 * 375) <= SCALE[1]
        assert 0.97 * RATIO[0] <= width / height <= 1.03 * RATIO[1]
    ours = np.array(boxes, dtype=float).mean(axis=0)
    expected = np.mean([(p["left"], p["top"], p["width"], p["height"]) for p in theirs], axis=0)
    assert np.abs(ours / expected - 1).max() < 0.06


def test_an_image_too_narrow_for_any_crop_is_cut_to_the_nearest_shape() -> None:
    assert random_resized_crop(1000, 10, np.random.default_rng(0)) == (493, 0, 13, 10)


def test_augmentation_is_the_same_for_the_same_seed_epoch_and_sample_and_another_for_others(photos: Path) -> None:
    first = batch(source(trial(photos, augment="cpu")), [5, 5 + 18, 5])[0]
    assert torch.equal(first[0], first[2]), "whoever loads it, and in which batch"
    assert not torch.equal(first[0], first[1]), "the same sample an epoch later"
    other_seed = batch(source(trial(photos, augment="cpu", seed=1)), [5])[0]
    assert not torch.equal(first[0], other_seed[0])


# ------------------------------------------------------------------------------------------------- the device decodes


def test_encoded_images_stay_on_the_host_until_the_device_decodes_them(photos: Path) -> None:
    # nvJPEG needs a GPU; here the same path runs with torchvision's CPU decoder in its place
    asked = trial(photos, decode="nvjpeg", augment="device")
    workload = build_workload(asked, CPU)
    inputs, labels = next(endless_batches(asked, workload, rank=0))
    assert isinstance(inputs, OnHost)
    flat, ends = inputs.value
    assert flat.dtype == torch.uint8 and ends.dtype == torch.int64 and len(ends) == 7 and ends[-1] == len(flat)
    assert workload.prepare(inputs).shape == (6, 3, SIZE, SIZE)
    plain = trial(photos, decode="nvjpeg")
    on_device = build_workload(plain, CPU).prepare(inputs)
    expected, same_labels = next(
        endless_batches(plain, build_workload(trial(photos, decode="torchvision"), CPU), rank=0)
    )
    assert torch.equal(on_device, build_workload(trial(photos), CPU).prepare(expected))
    assert torch.equal(labels, same_labels)


def test_images_decoded_ahead_are_those_that_the_step_would_have_decoded_for_every_loader(photos: Path) -> None:
    for workers in (0, 2):
        inside, ahead = (
            trial(photos, decode=decode, augment="device", loader_workers=workers)
            for decode in ("nvjpeg", "nvjpeg_ahead")
        )
        workload = build_workload(ahead, CPU)
        batches = endless_batches(ahead, workload, rank=0)
        for expected, labels in islice(endless_batches(inside, build_workload(inside, CPU), rank=0), 4):
            images, same_labels = next(batches)
            assert images.dtype == torch.uint8
            assert torch.equal(labels, same_labels)
            torch.manual_seed(0)
            prepared = workload.prepare(images)
            torch.manual_seed(0)
            assert torch.equal(prepared, workload.prepare(expected))
        del batches


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_copied_ahead_are_those_that_the_step_would_have_copied(
    photos: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    copied: list[tuple[str, Any]] = []

    def noted(batch: Any, device: torch.device, non_blocking: bool) -> Any:
        copied.append((threading.current_thread().name, batch))
        return to_device(batch, device, non_blocking)

    monkeypatch.setattr(loader, "to_device", noted)
    inside = trial(photos, augment="device", loader_workers=workers)
    ahead = inside.but(copy_ahead=True)
    workload, made = build_workload(inside, CPU), torch.zeros(1, dtype=torch.int64)
    batches = endless_batches(ahead, workload, rank=0, made=made)
    for expected, labels in islice(endless_batches(inside, workload, rank=0), 4):
        images, same_labels = next(batches)
        assert torch.equal(images, expected) and torch.equal(labels, same_labels)
    del batches
    assert made.item() == len(copied) >= 4
    assert {name.startswith("made-ahead") for name, _ in copied} == {True}


def test_a_trial_whose_images_are_decoded_ahead_is_as_fast_as_decoding_where_that_is_slow(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_batch = decode.decode_jpegs

    def slow(contents: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        time.sleep(0.2)
        return decode_batch(contents, device)

    monkeypatch.setattr(decode, "decode_jpegs", slow)
    asked = trial(photos, decode="nvjpeg_ahead", augment="device", parallel="none", warmup_steps=2, steps=2)
    plain = [row for row in run(asked, RankSetup(rank=0, device=CPU)).tables["steps"] if row["window"] == "plain"]
    assert plain[0]["window_s"] / len(plain) == pytest.approx(0.2, rel=0.2)
    assert all(math.isfinite(row["loss"]) for row in plain)


def test_what_nvjpeg_cannot_decode_is_encoded_anew_and_nothing_else() -> None:
    baseline, image = encoded(picture(60, 40, 1)), picture(60, 40, 1)
    assert as_baseline(baseline) == baseline
    for odd in (encoded(image, "PNG"), encoded(image.convert("CMYK"))):
        anew = decoded(as_baseline(odd))
        assert (anew.format, anew.mode) == ("JPEG", "RGB")
        assert np.abs(np.asarray(anew, int) - np.asarray(image, int)).mean() < 4


LIBRARIES = ["torchvision.io", "torchcodec.decoders", "nvidia.nvimgcodec"]


def use_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "torchvision.io" and not torch.backends.cuda.is_built():
        pytest.skip("TorchCodec and nvImageCodec need a build of torch with CUDA")
    chosen = NvImageCodec(CPU) if name == "nvidia.nvimgcodec" else decoder_of(name, CPU)
    monkeypatch.setattr(device_jpeg, "library", lambda device: chosen)


def jpeg_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_photograph_that_its_camera_says_to_turn_stays_as_it_lies_with_every_library(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_library(library, monkeypatch)
    image, camera = picture(60, 40, 1), Image.Exif()
    camera[Base.Orientation] = 6
    turned = BytesIO()
    image.save(turned, "JPEG", exif=camera, comment=b"kept")
    loaded = as_baseline(turned.getvalue())
    assert as_baseline(turned.getvalue().replace(b"\xff\xe1", b"\xff\xff\xe1", 1)) == loaded, "fill bytes are allowed"
    plain = decoded(loaded)
    assert not plain.getexif() and plain.info["comment"] == b"kept"
    [pixels] = decode_jpegs([jpeg_tensor(loaded)], CPU)
    assert torch.equal(pixels, torch.from_numpy(np.asarray(plain).copy()).permute(2, 0, 1))
    assert np.array_equal(np.asarray(plain), np.asarray(decoded(turned.getvalue())))


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_gives_the_same_pixels_batch_after_batch_and_after_one_that_it_cannot_decode(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_library(library, monkeypatch)
    photo, grey = encoded(picture(60, 40, 1)), encoded(picture(30, 50, 2).convert("L"))
    progressive = BytesIO()
    picture(20, 70, 3).save(progressive, "JPEG", progressive=True)
    for batch in ([photo, grey], [grey, progressive.getvalue()], [photo], [photo[:700]], [grey], [photo, photo]):
        contents = [jpeg_tensor(content) for content in batch]
        if batch == [photo[:700]]:
            with pytest.raises(DataError, match="nvjpeg cannot decode an image .*: decode 'pil' names it"):
                nvjpeg([*contents, torch.zeros(100, dtype=torch.uint8)], [centre_square] * 2, SIDE, CPU)
            continue
        for content, pixels in zip(batch, decode_jpegs(contents, CPU), strict=True):
            expected = np.asarray(decoded(content).convert("RGB")).copy()
            assert torch.equal(pixels, torch.from_numpy(expected).permute(2, 0, 1))


def test_two_threads_have_decoders_of_their_own_and_a_trial_leaves_none_behind() -> None:
    here = device_jpeg.library(CPU)
    assert device_jpeg.library(CPU) is here
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(device_jpeg.library, CPU).result() is not here
    release_memory()
    assert device_jpeg.library(CPU) is not here


def test_nvimagecodec_comes_first_and_torchvision_where_nothing_else_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.backends.cuda.is_built():
        assert isinstance(device_jpeg.first_that_loads(CPU), NvImageCodec)

    def only_torchvision(name: str) -> Any:
        if name == "torchvision.io":
            return importlib.import_module(name)
        raise ImportError(name)

    monkeypatch.setattr(device_jpeg, "import_module", only_torchvision)
    content = encoded(picture(60, 40, 1))
    [pixels] = device_jpeg.first_that_loads(CPU)([jpeg_tensor(content)])
    assert torch.equal(pixels, torch.from_numpy(np.asarray(decoded(content)).copy()).permute(2, 0, 1))


# ------------------------------------------------------------------------------------------------------- what is wrong

EXPECTED = "DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG, or DIR/CLASS/*.JPEG, or a converted set"


def test_missing_and_empty_folders_are_told_in_one_line(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        source(Trial(dataset="image_folder"))
    assert str(error.value) == f"dataset 'image_folder' needs --data-dir DIR with {EXPECTED}"
    assert line(tmp_path / "none") == f"--data-dir DIR is not a folder; dataset 'image_folder' needs {EXPECTED}"
    (tmp_path / "empty").mkdir()
    assert line(tmp_path / "empty") == f"DIR holds no images; dataset 'image_folder' needs {EXPECTED}"
    (photos / "train" / "ant").mkdir()
    assert line(photos) == "class folder DIR/train/ant holds no image; remove it, or complete the data set"
    (photos / "train" / "ant").rmdir()
    write_photos(photos / "val", {"": 1}, ["yak"])
    assert line(photos, "test") == "DIR/val/yak is a class that the training images lack; remove it, or complete them"


def test_a_layout_of_the_other_data_set_is_named(photos: Path, tmp_path: Path) -> None:
    assert line(photos, dataset="tiny_imagenet") == (
        "DIR is laid out as dataset 'image_folder', not as 'tiny_imagenet': --set dataset=image_folder"
    )
    tiny = write_tiny_imagenet(tmp_path / "tiny")
    assert (
        line(tiny) == "DIR is laid out as dataset 'tiny_imagenet', not as 'image_folder': --set dataset=tiny_imagenet"
    )


def test_damaged_tiny_imagenet_is_told_by_file_and_line(tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path / "tiny")
    (folder / "val/images/val_1.JPEG").unlink()
    told = line(folder, "test", dataset="tiny_imagenet")
    assert told == "DIR/val/val_annotations.txt line 2: DIR/val/images/val_1.JPEG is missing: unpack it again"
    (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn99\t0\t0\t1\t1\n")
    told = line(folder, "test", dataset="tiny_imagenet")
    assert told == "DIR/val/val_annotations.txt line 1: 'n99' is no class of wnids.txt"
    (folder / "val/val_annotations.txt").unlink()
    assert line(folder, "test", dataset="tiny_imagenet").startswith("DIR/val/val_annotations.txt cannot be read: ")


@pytest.mark.parametrize("decode", ["pil", "torchvision"])
@pytest.mark.parametrize("damage", [lambda content: b"no image", lambda content: content[:200], lambda content: b""])
def test_a_damaged_image_is_named(photos: Path, decode: str, damage: Any) -> None:
    path = photos / "train" / "cat" / "cat_1.JPEG"
    path.write_bytes(damage(path.read_bytes()))
    found = source(trial(photos, decode=decode))
    with pytest.raises(DataError) as error:
        batch(found, [0, 1, 2])
    assert str(error.value).startswith(f"{path} cannot be decoded (")
    assert str(error.value).endswith("): replace or remove it") and "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------- order


def endless(numbered: bool = False, **fields: Any) -> RankSampler:
    """Batches of 5 of one of two ranks, 20 samples in all."""
    return RankSampler(Trial(model="mlp", batch_per_gpu=5, world_size=2, **fields), 20, 1, numbered=numbered)


def epochs(count: int, **fields: Any) -> list[list[int]]:
    """The indices of the first epochs of one of two ranks, 20 samples in all, batches of 5."""
    batches = list(islice(endless(**fields), 2 * count))
    return [batches[2 * k] + batches[2 * k + 1] for k in range(count)]


def test_in_order_a_rank_takes_each_world_size_th_sample_of_every_epoch() -> None:
    assert epochs(2, order="in_order") == [list(range(1, 20, 2))] * 2


def test_without_set_epoch_every_epoch_repeats_the_first_and_with_it_none_does() -> None:
    repeated, another = epochs(4, set_epoch=False), epochs(4)
    assert repeated == [another[0]] * 4
    assert len({tuple(epoch) for epoch in another}) == 4
    batches = list(islice(endless(set_epoch=False), 8))
    assert sum(batches[k] in batches[:k] for k in range(2, 8)) / 6 == 1.0, "every batch is one of the first epoch"
    batches = list(islice(endless(), 8))
    assert sum(batches[k] in batches[:k] for k in range(2, 8)) == 0


def test_sample_numbers_tell_the_epoch_also_where_the_order_repeats() -> None:
    plain, numbered = epochs(3, set_epoch=False), epochs(3, set_epoch=False, numbered=True)
    assert numbered == [[20 * epoch + index for index in indices] for epoch, indices in enumerate(plain)]
