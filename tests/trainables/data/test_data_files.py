"""Planning knows from names alone whether a folder holds the data set that a trial asks for."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from study.capacity import NodeCapacity
from study.plan.trials import plan_trials
from study.scaling import main
from study.studies.study import Study
from tests.support.photos import write_photos
from trainables.data.files import CIFAR10_FILES, CIFAR10_FOLDER, FASHION_MNIST_FILES

HOST = [NodeCapacity("a", "10.0.0.1", cpus=4, gpus=0)]
TWO_HOSTS = [*HOST, NodeCapacity("b", "10.0.0.2", cpus=4, gpus=0)]

CIFAR10_HELP = "download it with torchvision.datasets.CIFAR10(DIR, download=True) and give --data-dir DIR"
CIFAR10 = f"expected DIR/cifar-10-batches-py/data_batch_1 to data_batch_5; {CIFAR10_HELP}"
EMPTY = {
    "cifar10": "no CIFAR-10 in DIR: DIR/cifar-10-batches-py/data_batch_1 is missing, " + CIFAR10,
    "fashion_mnist": "no Fashion-MNIST in DIR: expected DIR/FashionMNIST/raw/train-images-idx3-ubyte[.gz] and "
    "train-labels-idx1-ubyte[.gz], or both directly in DIR; download it with "
    "torchvision.datasets.FashionMNIST(DIR, download=True) and give --data-dir DIR",
    "tiny_imagenet": "DIR holds no images; dataset 'tiny_imagenet' needs DIR/wnids.txt, DIR/train/CLASS/images/*.JPEG and "
    "DIR/val/val_annotations.txt with DIR/val/images, or a converted set",
    "image_folder": "DIR holds no images; dataset 'image_folder' needs DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG, or "
    "DIR/CLASS/*.JPEG, or a converted set",
    "amazon_reviews": "no reviews in DIR: expected JSON Lines in *.json, *.jsonl, *.json.gz, *.jsonl.gz; correct --data-dir",
}


def reason(folder: Path, dataset: str, capacity: list[NodeCapacity] = HOST, **fields: Any) -> str:
    """Why a trial on this folder is infeasible; empty where it is not."""
    model = "mlstm64" if dataset == "amazon_reviews" else "mlp"
    base = {"device": "cpu", "model": model, "dataset": dataset, "data_dir": str(folder), "world_size": 1} | fields
    [row] = plan_trials(Study(name="test", question="Does it?", base=base, axes={}, repeats=1), capacity)
    assert row.status == ("infeasible" if row.reason else "pending")
    return row.reason.replace(str(folder), "DIR")


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("dataset", list(EMPTY))
def test_a_folder_without_the_data_set_is_told_by_the_plan(tmp_path: Path, dataset: str) -> None:
    touch(tmp_path / "unlike.txt")
    assert reason(tmp_path, dataset) == reason(tmp_path, dataset, TWO_HOSTS) == EMPTY[dataset]


@pytest.mark.parametrize("dataset", list(EMPTY))
def test_a_folder_that_only_other_hosts_have_is_left_to_them(tmp_path: Path, dataset: str) -> None:
    assert reason(tmp_path / "none", dataset) == ""
    assert reason(tmp_path, dataset, TWO_HOSTS) == ""  # where the others have it mounted
    assert reason(tmp_path, dataset) == EMPTY[dataset]


def test_the_first_missing_file_of_cifar10_is_named_and_that_for_tests_where_a_training_needs_it(
    tmp_path: Path,
) -> None:
    files = [tmp_path / CIFAR10_FOLDER / name for name in CIFAR10_FILES["train"]]
    touch(*files)
    assert reason(tmp_path, "cifar10") == ""
    told = reason(tmp_path, "cifar10", epochs=1)
    path = "DIR/cifar-10-batches-py/test_batch"
    assert told == f"no CIFAR-10 in DIR: {path} is missing, expected {path}; {CIFAR10_HELP}"
    files[2].unlink()
    assert reason(tmp_path, "cifar10").startswith(
        "no CIFAR-10 in DIR: DIR/cifar-10-batches-py/data_batch_3 is missing, expected DIR"
    )


@pytest.mark.parametrize(("place", "end"), [("FashionMNIST/raw", ""), (".", ".gz")])
def test_fashion_mnist_may_be_plain_or_gzip_in_either_place(tmp_path: Path, place: str, end: str) -> None:
    touch(*(tmp_path / place / f"{name}{end}" for name in FASHION_MNIST_FILES["train"]))
    assert reason(tmp_path, "fashion_mnist") == ""
    assert "t10k-images-idx3-ubyte[.gz] and t10k-labels" in reason(tmp_path, "fashion_mnist", epochs=1)


def test_a_training_needs_images_to_test_with(tmp_path: Path) -> None:
    flat = write_photos(tmp_path / "flat", {"": 1})
    assert reason(flat, "image_folder") == ""
    assert reason(flat, "image_folder", epochs=1) == "DIR has no images to test with; expected DIR/val/CLASS/*.JPEG"


def test_a_run_on_a_folder_without_the_data_set_ends_before_ray_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    asked = ["--set", "dataset=cifar10", "--data-dir", str(data), "--address", "local", "--out", str(out)]
    for command in ("run", "plan"):
        assert main([command, "smoke", *asked]) == 3
        told = capsys.readouterr().err.splitlines()[0]
        assert told.startswith("error: does not fit: all ")
        assert told.partition(" combinations: ")[2].replace(str(data), "DIR") == EMPTY["cifar10"]
    assert not out.exists()


def test_looking_for_data_files_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from study.scaling import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)), code)"
    )
    arguments = ["plan", "smoke", "--set", "dataset=cifar10", "--data-dir", str(tmp_path), "--address", "local"]
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[] 3"
