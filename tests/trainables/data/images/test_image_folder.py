"""Image folders: layouts, geometry, augmentation, decoding on the device, errors and order."""

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
from trainables.data.images.gpu.jpeg import NvImageCodec, decode_jpegs, torch_decoder
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


def trial(folder: Path, **fields: Any) -> Trial:
    return Trial(**({"model": "mlp", "dataset": "image_folder", "data_dir": str(folder), "batch_per_gpu": 6} | fields))


def batch(data: DataSource, numbers: list[int]) -> tuple[Any, torch.Tensor]:
    return data.dataset.__getitems__(numbers)  # type: ignore[attr-defined]


def length(data: DataSource) -> int:
    return len(data.dataset)  # type: ignore[arg-type]


def error_message(folder: Path, split: str = "train", **fields: Any) -> str:
    """Return the error of opening a folder, which must be one line, with DIR in place of the folder."""
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


def test_without_train_and_val_all_images_are_for_training(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", {"": 4})
    assert (length(source(trial(folder))), source(trial(folder)).classes) == (12, 3)
    assert error_message(folder, "test") == "no test images in DIR; expected DIR/val/CLASS/*.JPEG"


def test_tiny_imagenets_validation_labels_come_from_its_annotations(tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path / "tiny")
    with (folder / "val/val_annotations.txt").open("a") as annotations:
        annotations.write("\n")  # an empty line is not an image
    train, test = (source(trial(folder, dataset="tiny_imagenet"), split) for split in ("train", "test"))
    assert (length(train), length(test), train.classes) == (12, 4, 3)
    assert batch(train, list(range(12)))[1].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    images, labels = batch(test, [0, 1, 2, 3])
    assert labels.tolist() == [0, 0, 1, 2], "n01 is the first class by name, whatever the order in wnids.txt"
    [n02] = batch(source(trial(folder, dataset="tiny_imagenet", image_size=64), "test"), [2])[0]
    expected = pil([(folder / "val/images/val_2.JPEG").read_bytes()], [centre_square], 73, CPU)[0, :, 4:68, 4:68]
    assert torch.equal(n02, expected) and images.shape == (4, 3, SIZE, SIZE)


def test_a_trial_trains_on_an_image_folder_through_loader_processes(photos: Path) -> None:
    preload_loader_processes()
    expected, loaded = (
        list(islice(endless_batches(variant, build_workload(variant, CPU), rank=0), 4))
        for variant in (trial(photos, augment="cpu"), trial(photos, augment="cpu", loader_workers=2))
    )
    for (images, labels), (expected_images, expected_labels) in zip(loaded, expected, strict=True):
        assert torch.equal(images, expected_images) and torch.equal(labels, expected_labels)
    workload = build_workload(trial(photos), CPU)
    assert workload.loss is not None
    images, labels = expected[0]
    outputs = workload.model(workload.prepare(images))
    assert outputs.shape == (6, 3) and torch.isfinite(workload.loss(outputs, labels))


# ------------------------------------------------------------------------------------------------------- geometry


@pytest.mark.parametrize("decoder", [pil, torchvision])
def test_decoders_match_torchvisions_resize_and_centre_crop(decoder: Any) -> None:
    image = picture(200, 150, 1)
    file = encoded(image)
    [ours] = decoder([file], [centre_square], SIDE, CPU)
    reference = v2.Compose([v2.Resize(SIDE), v2.CenterCrop(SIDE), v2.PILToTensor()])(decoded(file))
    assert (ours.int() - reference.int()).abs().float().mean() < 1.0


def test_the_decoders_agree() -> None:
    files = [encoded(picture(120 + 30 * k, 150 - 10 * k, k)) for k in range(5)]
    by_pil, by_torchvision = (decoder(files, [centre_square] * 5, SIDE, CPU).int() for decoder in (pil, torchvision))
    assert (by_pil - by_torchvision).abs().float().mean() < 0.5
    assert (by_pil - by_pil.flip(0)).abs().float().mean() > 5, "similar images would prove nothing"


def test_grey_and_png_images_become_rgb_in_every_decoder() -> None:
    grey = encoded(picture(60, 40, 1).convert("L"))
    for decoder in (pil, torchvision):
        [image] = decoder([grey], [centre_square], SIDE, CPU)
        assert torch.equal(image[0], image[1]) and torch.equal(image[0], image[2])
    png = encoded(picture(60, 40, 1), "PNG")
    assert torch.equal(*(decoder([png], [centre_square], 40, CPU) for decoder in (pil, torchvision)))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_every_decoder_keeps_the_upper_8_bits_of_a_16_bit_png(mode: str) -> None:
    picture_8 = picture(60, 40, 1).convert(mode)
    files = encoded(picture_8, "PNG"), png_of_16_bits(np.asarray(picture_8))
    for decoder in (pil, torchvision):
        assert torch.equal(*(decoder([file], [centre_square], SIDE, CPU) for file in files))
    assert as_baseline(files[0]) == as_baseline(files[1])


@pytest.mark.parametrize("augment", ["none", "cpu", "device"])
def test_small_images_reach_the_model_in_the_requested_size(photos: Path, augment: str) -> None:
    data: Any = source(trial(photos, image_size=8, augment=augment))
    assert data.prepare(batch(data, [0, 7])[0]).shape == (2, 3, 8, 8)


def test_without_augmentation_the_loader_delivers_the_centre_of_the_device_crop(photos: Path) -> None:
    squares, labels = batch(source(trial(photos, augment="device")), [0, 7, 17])
    centres, same_labels = batch(source(trial(photos)), [0, 7, 17])
    assert squares.shape == (3, 3, SIDE, SIDE) and squares.dtype == torch.uint8
    assert torch.equal(squares[:, :, 2:30, 2:30], centres) and torch.equal(labels, same_labels)


def test_a_single_sample_equals_its_place_in_a_batch(photos: Path) -> None:
    dataset: Any = source(trial(photos)).dataset
    images, labels = dataset.__getitems__([3, 9])
    for k, index in enumerate((3, 9)):
        assert torch.equal(dataset[index][0], images[k]) and dataset[index][1] == labels[k]


# ---------------------------------------------------------------------------------------------------- augmentation


def test_the_device_crops_each_image_at_random_and_mirrors_half_of_them() -> None:
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
    assert torch.equal(across.sort(dim=1).values, left[:, None] + along), "consecutive columns"
    assert torch.equal(down, down[:, :1] + along), "no vertical flip"
    for offsets in (left, down[:, 0]):
        assert set(offsets.tolist()) == set(range(SIDE - SIZE + 1))


def test_loader_crops_match_torchvisions_random_resized_crop() -> None:
    random = np.random.default_rng(0)
    boxes = [random_resized_crop(500, 375, random) for _ in range(3000)]
    torch.manual_seed(0)
    reference = v2.RandomResizedCrop(224)
    reference_params = [reference.make_params([torch.empty(3, 375, 500)]) for _ in range(3000)]
    for _, _, width, height in boxes:
        assert 0.97 * SCALE[0] <= width * height / (500 * 375) <= SCALE[1]
        assert 0.97 * RATIO[0] <= width / height <= 1.03 * RATIO[1]
    ours = np.array(boxes, dtype=float).mean(axis=0)
    expected = np.mean([(p["left"], p["top"], p["width"], p["height"]) for p in reference_params], axis=0)
    assert np.abs(ours / expected - 1).max() < 0.06


def test_an_image_too_narrow_for_any_crop_is_cropped_to_the_nearest_ratio() -> None:
    assert random_resized_crop(1000, 10, np.random.default_rng(0)) == (493, 0, 13, 10)


def test_augmentation_depends_only_on_seed_epoch_and_sample(photos: Path) -> None:
    first = batch(source(trial(photos, augment="cpu")), [5, 5 + 18, 5])[0]
    assert torch.equal(first[0], first[2]), "independent of the position in the batch"
    assert not torch.equal(first[0], first[1]), "the same sample in the next epoch"
    other_seed = batch(source(trial(photos, augment="cpu", seed=1)), [5])[0]
    assert not torch.equal(first[0], other_seed[0])


# ------------------------------------------------------------------------------------------------- the device decodes


def test_encoded_images_stay_on_the_host_until_the_device_decodes_them(photos: Path) -> None:
    # nvJPEG needs a GPU, so torchvision's CPU decoder takes its place here
    augmented = trial(photos, decode="nvjpeg", augment="device")
    workload = build_workload(augmented, CPU)
    inputs, labels = next(endless_batches(augmented, workload, rank=0))
    assert isinstance(inputs, OnHost)
    flat, offsets = inputs.value
    assert flat.dtype == torch.uint8 and offsets.dtype == torch.int64
    assert len(offsets) == 7 and offsets[-1] == len(flat)
    assert workload.prepare(inputs).shape == (6, 3, SIZE, SIZE)
    plain = trial(photos, decode="nvjpeg")
    on_device = build_workload(plain, CPU).prepare(inputs)
    expected, same_labels = next(
        endless_batches(plain, build_workload(trial(photos, decode="torchvision"), CPU), rank=0)
    )
    assert torch.equal(on_device, build_workload(trial(photos), CPU).prepare(expected))
    assert torch.equal(labels, same_labels)


def test_images_decoded_ahead_equal_those_decoded_in_the_step(photos: Path) -> None:
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
def test_batches_copied_ahead_equal_those_copied_in_the_step(
    photos: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    copied: list[tuple[str, Any]] = []

    def record_copy(batch: Any, device: torch.device, non_blocking: bool) -> Any:
        copied.append((threading.current_thread().name, batch))
        return to_device(batch, device, non_blocking)

    monkeypatch.setattr(loader, "to_device", record_copy)
    inside = trial(photos, augment="device", loader_workers=workers)
    ahead = inside.but(copy_ahead=True)
    workload, count = build_workload(inside, CPU), torch.zeros(1, dtype=torch.int64)
    batches = endless_batches(ahead, workload, rank=0, prefetch_count=count)
    for expected, labels in islice(endless_batches(inside, workload, rank=0), 4):
        images, same_labels = next(batches)
        assert torch.equal(images, expected) and torch.equal(labels, same_labels)
    del batches
    assert count.item() == len(copied) >= 4
    assert {name.startswith("prefetch") for name, _ in copied} == {True}


def test_a_trial_with_slow_decoding_ahead_is_as_fast_as_the_decoding(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_batch = decode.decode_jpegs

    def slow(contents: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        time.sleep(0.2)
        return decode_batch(contents, device)

    monkeypatch.setattr(decode, "decode_jpegs", slow)
    ahead = trial(photos, decode="nvjpeg_ahead", augment="device", parallel="none", warmup_steps=2, steps=2)
    plain = [row for row in run(ahead, RankSetup(rank=0, device=CPU)).tables["steps"] if row["window"] == "plain"]
    assert plain[0]["window_s"] / len(plain) == pytest.approx(0.2, rel=0.2)
    assert all(math.isfinite(row["loss"]) for row in plain)


def test_only_files_that_nvjpeg_cannot_decode_are_re_encoded() -> None:
    baseline, image = encoded(picture(60, 40, 1)), picture(60, 40, 1)
    assert as_baseline(baseline) == baseline
    for odd in (encoded(image, "PNG"), encoded(image.convert("CMYK"))):
        encoded_again = decoded(as_baseline(odd))
        assert (encoded_again.format, encoded_again.mode) == ("JPEG", "RGB")
        assert np.abs(np.asarray(encoded_again, int) - np.asarray(image, int)).mean() < 4


LIBRARIES = ["torchvision.io", "torchcodec.decoders", "nvidia.nvimgcodec"]


def use_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "torchvision.io" and not torch.backends.cuda.is_built():
        pytest.skip("TorchCodec and nvImageCodec need a build of torch with CUDA")
    decoder = NvImageCodec(CPU) if name == "nvidia.nvimgcodec" else torch_decoder(name, CPU)
    monkeypatch.setattr(device_jpeg, "thread_decoder", lambda device: decoder)


def jpeg_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_library_applies_the_exif_orientation(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(library, monkeypatch)
    image, exif = picture(60, 40, 1), Image.Exif()
    exif[Base.Orientation] = 6
    rotated = BytesIO()
    image.save(rotated, "JPEG", exif=exif, comment=b"kept")
    loaded = as_baseline(rotated.getvalue())
    assert as_baseline(rotated.getvalue().replace(b"\xff\xe1", b"\xff\xff\xe1", 1)) == loaded, "fill bytes are allowed"
    plain = decoded(loaded)
    assert not plain.getexif() and plain.info["comment"] == b"kept"
    [pixels] = decode_jpegs([jpeg_tensor(loaded)], CPU)
    assert torch.equal(pixels, torch.from_numpy(np.asarray(plain).copy()).permute(2, 0, 1))
    assert np.array_equal(np.asarray(plain), np.asarray(decoded(rotated.getvalue())))


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_gives_the_same_pixels_even_after_a_batch_that_fails(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_library(library, monkeypatch)
    photo, grey = encoded(picture(60, 40, 1)), encoded(picture(30, 50, 2).convert("L"))
    progressive = BytesIO()
    picture(20, 70, 3).save(progressive, "JPEG", progressive=True)
    for batch in ([photo, grey], [grey, progressive.getvalue()], [photo], [photo[:700]], [grey], [photo, photo]):
        contents = [jpeg_tensor(content) for content in batch]
        if batch == [photo[:700]]:
            with pytest.raises(DataError, match="nvjpeg cannot decode an image .*'pil'"):
                nvjpeg([*contents, torch.zeros(100, dtype=torch.uint8)], [centre_square] * 2, SIDE, CPU)
            continue
        for content, pixels in zip(batch, decode_jpegs(contents, CPU), strict=True):
            expected = np.asarray(decoded(content).convert("RGB")).copy()
            assert torch.equal(pixels, torch.from_numpy(expected).permute(2, 0, 1))


def test_decoders_belong_to_one_thread_and_are_released_after_a_trial() -> None:
    decoder = device_jpeg.thread_decoder(CPU)
    assert device_jpeg.thread_decoder(CPU) is decoder
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(device_jpeg.thread_decoder, CPU).result() is not decoder
    release_memory()
    assert device_jpeg.thread_decoder(CPU) is not decoder


def test_nvimagecodec_is_the_first_choice_and_torchvision_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.backends.cuda.is_built():
        assert isinstance(device_jpeg.new_decoder(CPU), NvImageCodec)

    def only_torchvision(name: str) -> Any:
        if name == "torchvision.io":
            return importlib.import_module(name)
        raise ImportError(name)

    monkeypatch.setattr(device_jpeg, "import_module", only_torchvision)
    content = encoded(picture(60, 40, 1))
    [pixels] = device_jpeg.new_decoder(CPU)([jpeg_tensor(content)])
    assert torch.equal(pixels, torch.from_numpy(np.asarray(decoded(content)).copy()).permute(2, 0, 1))


# ------------------------------------------------------------------------------------------------------- errors

EXPECTED = "DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG, or DIR/CLASS/*.JPEG, or a converted set"


def test_missing_and_empty_folders_are_reported(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        source(Trial(dataset="image_folder"))
    assert str(error.value) == f"dataset 'image_folder' needs --data-dir DIR with {EXPECTED}"
    assert error_message(tmp_path / "none").startswith("--data-dir DIR is not a folder")
    (tmp_path / "empty").mkdir()
    assert error_message(tmp_path / "empty") == f"no images in DIR; dataset 'image_folder' needs {EXPECTED}"
    (photos / "train" / "ant").mkdir()
    assert error_message(photos).startswith("class folder DIR/train/ant has no images")
    (photos / "train" / "ant").rmdir()
    write_photos(photos / "val", {"": 1}, ["yak"])
    assert error_message(photos, "test").startswith("class DIR/val/yak has no training images")


def test_the_layout_of_another_data_set_is_reported(photos: Path, tmp_path: Path) -> None:
    message = error_message(photos, dataset="tiny_imagenet")
    assert (
        message.startswith("DIR has the layout of dataset 'image_folder'") and "--set dataset=image_folder" in message
    )
    message = error_message(write_tiny_imagenet(tmp_path / "tiny"))
    assert message.startswith("DIR has the layout of dataset 'tiny_imagenet'")
    assert "--set dataset=tiny_imagenet" in message


def test_damaged_tiny_imagenet_is_reported_by_file_and_line(tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path / "tiny")
    (folder / "val/images/val_1.JPEG").unlink()
    message = error_message(folder, "test", dataset="tiny_imagenet")
    assert message.startswith("DIR/val/val_annotations.txt line 2: DIR/val/images/val_1.JPEG is missing")
    (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn99\t0\t0\t1\t1\n")
    message = error_message(folder, "test", dataset="tiny_imagenet")
    assert message.startswith("DIR/val/val_annotations.txt line 1: ") and "'n99'" in message
    (folder / "val/val_annotations.txt").unlink()
    message = error_message(folder, "test", dataset="tiny_imagenet")
    assert message.startswith("cannot read DIR/val/val_annotations.txt: ")


@pytest.mark.parametrize("decode", ["pil", "torchvision"])
@pytest.mark.parametrize("damage", [lambda content: b"no image", lambda content: content[:200], lambda content: b""])
def test_a_damaged_image_is_reported(photos: Path, decode: str, damage: Any) -> None:
    path = photos / "train" / "cat" / "cat_1.JPEG"
    path.write_bytes(damage(path.read_bytes()))
    data = source(trial(photos, decode=decode))
    with pytest.raises(DataError) as error:
        batch(data, [0, 1, 2])
    assert str(error.value).startswith(f"cannot decode {path} (")
    assert str(error.value).endswith("replace or remove it") and "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------- order


def rank_sampler(numbered: bool = False, **fields: Any) -> RankSampler:
    """Return the sampler of rank 1 of 2, for 20 samples in batches of 5."""
    return RankSampler(Trial(model="mlp", batch_per_gpu=5, world_size=2, **fields), 20, 1, numbered=numbered)


def epochs(count: int, **fields: Any) -> list[list[int]]:
    """Return the indices of that sampler's first epochs."""
    batches = list(islice(rank_sampler(**fields), 2 * count))
    return [batches[2 * k] + batches[2 * k + 1] for k in range(count)]


def test_in_order_a_rank_takes_each_world_size_th_sample_of_every_epoch() -> None:
    assert epochs(2, order="in_order") == [list(range(1, 20, 2))] * 2


def test_without_set_epoch_every_epoch_repeats_the_first_and_with_it_none_does() -> None:
    repeated, shuffled = epochs(4, set_epoch=False), epochs(4)
    assert repeated == [shuffled[0]] * 4
    assert len({tuple(epoch) for epoch in shuffled}) == 4
    batches = list(islice(rank_sampler(set_epoch=False), 8))
    assert sum(batches[k] in batches[:k] for k in range(2, 8)) / 6 == 1.0, "every batch occurs in the first epoch"
    batches = list(islice(rank_sampler(), 8))
    assert sum(batches[k] in batches[:k] for k in range(2, 8)) == 0


def test_sample_numbers_encode_the_epoch_even_if_the_order_repeats() -> None:
    plain, numbered = epochs(3, set_epoch=False), epochs(3, set_epoch=False, numbered=True)
    assert numbered == [[20 * epoch + index for index in indices] for epoch, indices in enumerate(plain)]
