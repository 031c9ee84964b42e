"""Data sources: the batches they deliver, and their errors for missing or damaged files."""

import gzip
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from scripts.make_fashion_mnist_sample import MAX_BYTES, first_of_each_class, make_sample
from tests.support.system import file, needs
from trainables.data.cifar10 import cifar10
from trainables.data.fashion_mnist import SAMPLE, full, read_idx, read_sample, sample
from trainables.data.source import DataError, DataSource
from trainables.data.synthetic import from_loaders, resident_text
from trainables.trial import Trial


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_fashion_mnist(folder: Path, count: int = 40, compress: bool = True) -> np.ndarray:
    """Write both splits, with labels 0, 1, ... 9, 0, ..., and return the training images."""
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = np.arange(count, dtype=np.uint8) % 10
    for prefix in ("train", "t10k"):
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            content = idx_bytes(array)
            path = folder / (f"{name}.gz" if compress else name)
            path.write_bytes(gzip.compress(content) if compress else content)
    return images


def write_cifar10(data_dir: Path, per_file: int = 4, protocol: int = 4) -> np.ndarray:
    """Write all six files, and return the training images."""
    folder = data_dir / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6 * per_file, 3072), dtype=np.uint8)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part = images[number * per_file : (number + 1) * per_file]
        content = {"data": part, "labels": list(range(per_file)), "batch_label": name}
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return images[: 5 * per_file].reshape(-1, 3, 32, 32)


def message_of(error: pytest.ExceptionInfo[DataError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def batch_of(source: DataSource, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return source.dataset.__getitems__(indices)  # type: ignore[attr-defined]


def identity(batch: Any) -> Any:
    return batch


def test_the_shipped_sample_is_balanced_and_small() -> None:
    train, test = sample(Trial()).dataset, sample(Trial(), split="test").dataset
    assert (len(train), len(test)) == (10_000, 2_000)  # type: ignore[arg-type]
    for split, per_class in (("train", 1_000), ("test", 200)):
        assert np.bincount(read_sample(str(SAMPLE), split)[1]).tolist() == [per_class] * 10
    assert SAMPLE.stat().st_size <= MAX_BYTES


def test_the_shipped_sample_records_its_source_licence_and_command() -> None:
    metadata = pq.read_schema(SAMPLE).metadata
    assert metadata[b"source"] == b"https://github.com/zalandoresearch/fashion-mnist"
    assert b"MIT" in metadata[b"licence"]
    assert b"make_fashion_mnist_sample" in metadata[b"command"]


@needs("fashion-mnist")
def test_the_shipped_sample_has_the_first_images_of_each_class() -> None:
    published = file("fashion-mnist")
    complete = full(Trial(dataset="fashion_mnist", data_dir=str(published)))
    rows = first_of_each_class(batch_of(complete, list(range(60_000)))[1].numpy(), 1_000)
    expected_images, expected_labels = batch_of(complete, rows.tolist())
    images, labels = batch_of(sample(Trial()), list(range(10_000)))
    assert torch.equal(images, expected_images)
    assert torch.equal(labels, expected_labels)


def test_the_same_files_give_the_same_sample_bytes(tmp_path: Path) -> None:
    images = write_fashion_mnist(tmp_path / "source")
    for name in ("first", "second"):
        make_sample(tmp_path / "source", tmp_path / name, train_images=20, test_images=10)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    np.testing.assert_array_equal(read_sample(str(tmp_path / "first"), "train")[0][:, 0], images[:20])


def test_a_sample_larger_than_its_source_is_rejected(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / "source")
    with pytest.raises(ValueError, match="class 0 has 4 samples.* 5"):
        make_sample(tmp_path / "source", tmp_path / "sample", train_images=50, test_images=10)


def test_a_loader_process_delivers_the_requested_batches() -> None:
    source = sample(Trial())
    loader = DataLoader(
        source.dataset, batch_size=8, num_workers=1, collate_fn=identity, multiprocessing_context="forkserver"
    )
    images, labels = next(iter(loader))
    expected_images, expected_labels = batch_of(source, list(range(8)))
    assert images.dtype == torch.uint8 and images.shape == (8, 1, 28, 28)
    assert labels.dtype == torch.int64
    assert torch.equal(images, expected_images) and torch.equal(labels, expected_labels)


def test_a_single_sample_equals_its_place_in_a_batch() -> None:
    dataset = sample(Trial()).dataset
    image, label = dataset[3]
    images, labels = batch_of(sample(Trial()), [2, 3])
    assert torch.equal(image, images[1]) and label == labels[1]


def test_a_dataset_stays_small_when_pickled_after_reading() -> None:
    dataset = sample(Trial()).dataset
    assert len(dataset) > 0  # type: ignore[arg-type]
    assert len(pickle.dumps(dataset)) < 1_000


def test_images_are_resized_as_uint8() -> None:
    native, larger = sample(Trial()), sample(Trial(image_size=56))
    assert (native.image_size, larger.image_size) == (28, 56)
    small, large = batch_of(native, [0, 1])[0], batch_of(larger, [0, 1])[0]
    assert large.dtype == torch.uint8 and large.shape == (2, 1, 56, 56)
    averaged = torch.nn.functional.avg_pool2d(large.float(), 2)
    assert (averaged - small.float()).abs().mean() < 10


def test_random_images_depend_only_on_their_index() -> None:
    source = from_loaders(Trial(dataset="synthetic_loader", image_size=40))
    assert (source.classes, source.channels, source.image_size) == (1000, 3, 40)
    images, labels = batch_of(source, [5, 6, 1005, 5])
    assert images.dtype == torch.uint8 and images.shape == (4, 3, 40, 40)
    assert labels.tolist() == [5, 6, 5, 5]
    assert torch.equal(images[0], images[3]) and not torch.equal(images[0], images[1])
    assert images.float().mean() == pytest.approx(127.5, abs=3) and images.unique().numel() == 256
    assert torch.equal(source.dataset[6][0], images[1]) and source.dataset[6][1] == 6
    images.zero_()
    assert batch_of(source, [5])[0].any(), "a batch is a copy"


def test_resident_text_has_the_next_bytes_as_targets() -> None:
    source = resident_text(Trial(model="mlstm64", dataset="synthetic", batch_per_gpu=50, sequence_length=100))
    assert source.vocabulary == 256 and isinstance(source.dataset, TensorDataset)
    inputs, targets = source.dataset.tensors
    assert inputs.dtype == targets.dtype == torch.uint8 and inputs.shape == targets.shape == (50, 100)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.unique().numel() == 256


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("subfolder", ["FashionMNIST/raw", "."])
def test_fashion_mnist_reads_both_layouts_plain_or_compressed(tmp_path: Path, subfolder: str, compress: bool) -> None:
    images = write_fashion_mnist(tmp_path / "data" / subfolder, compress=compress)
    source = full(Trial(dataset="fashion_mnist", data_dir=str(tmp_path / "data")))
    assert (source.classes, source.channels, len(source.dataset)) == (10, 1, 40)  # type: ignore[arg-type]
    delivered, labels = batch_of(source, [39, 0])
    np.testing.assert_array_equal(delivered[:, 0].numpy(), images[[39, 0]])
    assert labels.tolist() == [9, 0]


FASHION_MNIST_LAYOUT = "DIR/FashionMNIST/raw/train-images-idx3-ubyte[.gz] and train-labels-idx1-ubyte[.gz]"


def test_fashion_mnist_without_a_folder_lists_the_expected_files() -> None:
    with pytest.raises(DataError) as error:
        full(Trial(dataset="fashion_mnist"))
    message = message_of(error)
    assert message.startswith(f"dataset 'fashion_mnist' needs --data-dir DIR with {FASHION_MNIST_LAYOUT}")
    assert "'fashion_mnist_sample'" in message


def test_fashion_mnist_in_an_empty_folder_lists_the_expected_files(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        full(Trial(dataset="fashion_mnist", data_dir=str(tmp_path)))
    message = message_of(error)
    assert message.startswith(f"no Fashion-MNIST in {tmp_path}: expected {FASHION_MNIST_LAYOUT}")
    assert "torchvision.datasets.FashionMNIST(DIR, download=True)" in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (idx_bytes(np.zeros((4, 28, 28)))[:-1], ["3136 values of shape [4, 28, 28]", "3135"]),
        (idx_bytes(np.zeros(4)), ["12 bytes are too few", "16"]),
        (idx_bytes(np.zeros((4, 28))), ["0x00000802", "expected 0x00000803"]),
        (b"", ["cannot mmap an empty file"]),
    ],
)
def test_a_damaged_idx_file_is_reported_with_the_problem(tmp_path: Path, content: bytes, problem: list[str]) -> None:
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_idx(path, dimensions=3)
    message = message_of(error)
    assert message.startswith(f"{path} is not a valid idx file: ") and message.endswith("; download it again")
    assert all(words in message for words in problem)


def test_a_truncated_gzip_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.arange(4 * 784).reshape(4, 28, 28)))[:-20])
    with pytest.raises(DataError, match=f"^{path} is not a valid idx file: .*; download it again$"):
        read_idx(path, dimensions=3)


def test_different_numbers_of_images_and_labels_are_rejected(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / "data")
    (tmp_path / "data/train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.zeros(39))))
    source = full(Trial(dataset="fashion_mnist", data_dir=str(tmp_path / "data")))
    with pytest.raises(DataError, match="40 images, but .* 39 labels; download"):
        batch_of(source, [0])


def test_a_label_outside_the_classes_is_rejected(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / "data")
    labels = np.full(40, 10)
    (tmp_path / "data/train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels)))
    with pytest.raises(DataError, match="label 10; .* labels 0 to 9"):
        batch_of(full(Trial(dataset="fashion_mnist", data_dir=str(tmp_path / "data"))), [0])


def test_a_damaged_sample_is_reported_with_a_fix(tmp_path: Path) -> None:
    path = tmp_path / "sample.parquet"
    path.write_bytes(SAMPLE.read_bytes()[:1000])
    with pytest.raises(DataError, match=f"Fashion-MNIST sample {path} .*; restore it from the repository") as error:
        read_sample(str(path), "train")
    assert "\n" not in str(error.value)


def test_cifar10_reads_torchvisions_layout_in_file_order(tmp_path: Path) -> None:
    images = write_cifar10(tmp_path)
    source = cifar10(Trial(dataset="cifar10", data_dir=str(tmp_path), image_size=32))
    assert (source.classes, source.channels, len(source.dataset)) == (10, 3, 20)  # type: ignore[arg-type]
    delivered, labels = batch_of(source, [19, 5])
    np.testing.assert_array_equal(delivered.numpy(), images[[19, 5]])
    assert labels.tolist() == [3, 1]


def test_torchvision_reads_the_same_cifar10_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py/batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)  # the checksums are those of the real files
    monkeypatch.setattr(CIFAR10, "_load_meta", lambda self: None)
    theirs = CIFAR10(str(tmp_path)).data.transpose(0, 3, 1, 2)
    ours = batch_of(cifar10(Trial(dataset="cifar10", data_dir=str(tmp_path), image_size=32)), list(range(20)))[0]
    np.testing.assert_array_equal(ours.numpy(), theirs)


def test_cifar10_pickled_with_protocol_2_is_read(tmp_path: Path) -> None:
    images = write_cifar10(tmp_path, protocol=2)
    delivered = batch_of(cifar10(Trial(dataset="cifar10", data_dir=str(tmp_path), image_size=32)), list(range(20)))[0]
    np.testing.assert_array_equal(delivered.numpy(), images)


def test_a_pickle_that_would_run_code_is_rejected(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    marker = tmp_path / "ran"
    path = tmp_path / "cifar-10-batches-py/data_batch_2"
    path.write_bytes(b"cposix\nsystem\n(S'touch %s'\ntR." % str(marker).encode())
    with pytest.raises(DataError) as error:
        batch_of(cifar10(Trial(dataset="cifar10", data_dir=str(tmp_path))), [0])
    message = message_of(error)
    assert message.startswith(f"{path} is not a CIFAR-10 batch: ") and "posix.system" in message
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2]}, "4 images but labels of shape (3,)"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "from 10 to 10; expected 0 to 9"),
        ({"data": np.zeros((1, 100), np.uint8), "labels": [1]}, "uint8 of shape (1, 100); expected"),
        ({"labels": [1]}, "'data'"),
        ([], "list indices must be integers or slices, not str"),
    ],
)
def test_a_damaged_cifar10_batch_is_reported_with_the_problem(tmp_path: Path, content: object, problem: str) -> None:
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py/data_batch_5"
    path.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(DataError) as error:
        batch_of(cifar10(Trial(dataset="cifar10", data_dir=str(tmp_path))), [0])
    message = message_of(error)
    assert message.startswith(f"{path} is not a CIFAR-10 batch: ") and problem in message


def test_a_missing_cifar10_file_is_reported(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    missing = tmp_path / "cifar-10-batches-py/data_batch_3"
    missing.unlink()
    with pytest.raises(DataError) as error:
        cifar10(Trial(dataset="cifar10", data_dir=str(tmp_path)))
    message = message_of(error)
    assert message.startswith(f"no CIFAR-10 in {tmp_path}: {missing} is missing")
    assert "torchvision.datasets.CIFAR10(DIR, download=True)" in message


def test_the_sample_script_reports_a_missing_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.make_fashion_mnist_sample", "--source", str(tmp_path)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith(f"error: {tmp_path}/train-images-idx3-ubyte[.gz] is missing")
    assert run.stderr.count("\n") == 1
