"""Planning detects a missing data set from file names alone."""

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

EMPTY_FOLDER_REASONS = {
    "cifar10": "no CIFAR-10 in DIR: DIR/cifar-10-batches-py/data_batch_1 is missing",
    "fashion_mnist": "no Fashion-MNIST in DIR: expected DIR/FashionMNIST/raw/train-images-idx3-ubyte[.gz]",
    "tiny_imagenet": "no images in DIR; dataset 'tiny_imagenet' needs DIR/wnids.txt, DIR/train/CLASS/images/*.JPEG",
    "image_folder": "no images in DIR; dataset 'image_folder' needs DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG",
    "amazon_reviews": "no reviews in DIR: expected JSON Lines in *.json, *.jsonl, *.json.gz, *.jsonl.gz",
}
"""data set -> how the reason starts"""


def reason(folder: Path, dataset: str, capacity: list[NodeCapacity] = HOST, **fields: Any) -> str:
    """Return why a trial on this folder is infeasible, or an empty string if it is feasible."""
    model = "mlstm64" if dataset == "amazon_reviews" else "mlp"
    base = {"device": "cpu", "model": model, "dataset": dataset, "data_dir": str(folder), "world_size": 1} | fields
    [row] = plan_trials(Study(name="test", question="Does it?", base=base, axes={}, repeats=1), capacity)
    assert row.status == ("infeasible" if row.reason else "pending")
    return row.reason.replace(str(folder), "DIR")


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("dataset", list(EMPTY_FOLDER_REASONS))
def test_the_plan_reports_a_folder_without_the_data_set(tmp_path: Path, dataset: str) -> None:
    touch(tmp_path / "unrelated.txt")
    assert reason(tmp_path, dataset).startswith(EMPTY_FOLDER_REASONS[dataset])
    assert reason(tmp_path, dataset) == reason(tmp_path, dataset, TWO_HOSTS)


@pytest.mark.parametrize("dataset", list(EMPTY_FOLDER_REASONS))
def test_the_plan_accepts_a_folder_that_other_hosts_may_have(tmp_path: Path, dataset: str) -> None:
    assert reason(tmp_path / "none", dataset) == ""
    assert reason(tmp_path, dataset, TWO_HOSTS) == ""  # the other host may have it mounted
    assert reason(tmp_path, dataset).startswith(EMPTY_FOLDER_REASONS[dataset])


def test_the_first_missing_cifar10_file_is_reported_and_the_test_file_only_for_trainings(tmp_path: Path) -> None:
    files = [tmp_path / CIFAR10_FOLDER / name for name in CIFAR10_FILES["train"]]
    touch(*files)
    assert reason(tmp_path, "cifar10") == ""
    assert "DIR/cifar-10-batches-py/test_batch is missing" in reason(tmp_path, "cifar10", epochs=1)
    files[2].unlink()
    assert "DIR/cifar-10-batches-py/data_batch_3 is missing" in reason(tmp_path, "cifar10")


@pytest.mark.parametrize(("subfolder", "suffix"), [("FashionMNIST/raw", ""), (".", ".gz")])
def test_fashion_mnist_may_be_plain_or_gzip_in_either_folder(tmp_path: Path, subfolder: str, suffix: str) -> None:
    touch(*(tmp_path / subfolder / f"{name}{suffix}" for name in FASHION_MNIST_FILES["train"]))
    assert reason(tmp_path, "fashion_mnist") == ""
    assert "t10k-images-idx3-ubyte[.gz] and t10k-labels" in reason(tmp_path, "fashion_mnist", epochs=1)


def test_a_training_needs_test_images(tmp_path: Path) -> None:
    flat = write_photos(tmp_path / "flat", {"": 1})
    assert reason(flat, "image_folder") == ""
    assert reason(flat, "image_folder", epochs=1) == "no test images in DIR; expected DIR/val/CLASS/*.JPEG"


def test_run_stops_before_ray_starts_if_the_data_set_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    options = ["--set", "dataset=cifar10", "--data-dir", str(data), "--address", "local", "--out", str(out)]
    for command in ("run", "plan"):
        assert main([command, "smoke", *options]) == 3
        message = capsys.readouterr().err.splitlines()[0].replace(str(data), "DIR")
        assert EMPTY_FOLDER_REASONS["cifar10"] in message
    assert not out.exists()


def test_planning_checks_data_files_without_importing_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from study.scaling import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)), code)"
    )
    arguments = ["plan", "smoke", "--set", "dataset=cifar10", "--data-dir", str(tmp_path), "--address", "local"]
    process = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "[] 3"
