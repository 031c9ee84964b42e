"""A user's own workload: finding, loading and reloading its file, and one-line messages for its errors."""

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.support.gloo import on_ranks
from trainables.build import build_workload
from trainables.data.loader import endless_batches
from trainables.measure.run import run
from trainables.registry import MODELS, TEXT_MODELS, load
from trainables.step.context import RankOutput, RankSetup
from trainables.trial import Trial
from trainables.user_workload import load_user_workload
from trainables.workload import Workload, WorkloadError

EXAMPLE = Path(__file__).parent.parent.parent / "examples/own_workload.py"
CPU = torch.device("cpu")
META = torch.device("meta")
NAMED = "def build(trial):\n    return {!r}\n"


@pytest.fixture(autouse=True)
def imports_as_they_were() -> Iterator[None]:
    """Remove users' files, which are imported as top-level modules, after each test."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("mine", "outer", "layers_beside_it", "on_another_host", "padded_stand_in", "own_workload", "depth"):
        sys.modules.pop(name, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "package_of_mine"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def line(spec: str, source: str | None = None) -> str:
    with pytest.raises(WorkloadError) as error:
        load_user_workload(spec, source)
    assert "\n" not in str(error.value)
    return str(error.value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ---------------------------------------------------------------------------------------------------- the example


def test_the_example_is_a_workload_of_fewer_than_forty_lines() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 40
    assert "python -m study.scaling run --workload examples/own_workload.py:tiny --gpus 1,2" in text
    trial = Trial(workload=f"{EXAMPLE}:tiny", batch_per_gpu=16)
    workload = build_workload(trial, CPU)
    assert isinstance(workload, Workload) and workload.loss is not None
    inputs, targets = next(endless_batches(trial, workload, rank=0))
    assert workload.loss(workload.model(inputs), targets).shape == ()


def train_the_example(rank: int, workers: int) -> RankOutput:
    from study.orchestrate.processes.fork_server import start_forkserver

    start_forkserver([])
    trial = Trial(
        workload=f"{EXAMPLE}:tiny",
        world_size=2,
        batch_per_gpu=32,
        learning_rate=0.003,
        steps=20,
        loader_workers=workers,
    )
    return run(trial, RankSetup(rank=rank, device=CPU))


def test_the_example_learns_on_two_ranks_with_loader_processes() -> None:
    for measurement in on_ranks(2, train_the_example, 1):
        losses = [row["loss"] for row in measurement.tables["steps"]]
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


# --------------------------------------------------------------------------------------------- where models are made


@pytest.mark.parametrize("name", ["resnet18", "mlstm64"])
def test_a_model_is_created_on_the_device_and_data_on_the_cpu(name: str) -> None:
    workload = build_workload(Trial(model=name, dataset="synthetic", batch_per_gpu=2, image_size=8), META)
    assert {parameter.device for parameter in workload.model.parameters()} == {META}
    assert isinstance(workload.dataset, TensorDataset)
    assert {tensor.device for tensor in workload.dataset.tensors} == {CPU}, "data follow the trial's device"
    assert torch.zeros(1).device == CPU, "the default device is restored"


@pytest.mark.parametrize("name", ["resnet18", "resnet50_small", "mlstm64", "transformer_tiny"])
def test_weights_created_on_the_cpu_depend_only_on_the_seed(name: str) -> None:
    trial = Trial(model=name, dataset="text_sample" if name in TEXT_MODELS else "fashion_mnist_sample")
    torch.manual_seed(5)
    model = build_workload(trial, CPU).model
    torch.manual_seed(5)
    by_itself = load(MODELS[name])(*((256, trial) if name in TEXT_MODELS else (10, 1, 28)))
    for ours, theirs in zip(model.parameters(), by_itself.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_users_model_is_created_on_the_cpu() -> None:
    workload = build_workload(Trial(workload=f"{EXAMPLE}:tiny"), META)
    assert {parameter.device for parameter in workload.model.parameters()} == {CPU}


# -------------------------------------------------------------------------------------------------- error messages


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    message = line(f"{path}:build")
    assert str(path) in message and "does not exist" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise ValueError('no data here')\n", "ValueError: no data here"),
        ("raise ValueError('first line\\nsecond line')\n", "ValueError: first line"),
        ("import sys\nsys.exit('usage: mine.py DATA')\n", "SystemExit: usage: mine.py DATA"),
        ("raise KeyError\n", "KeyError"),
    ],
)
def test_an_import_error_is_reported(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path / "mine.py", text)
    message = line(f"{path}:build")
    assert str(path) in message and message.endswith(f": {expected}")


def test_a_syntax_error_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "def build(trial:\n")
    assert line(f"{path}:build").endswith(": SyntaxError: '(' was never closed (mine.py, line 1)")


def test_an_unknown_function_lists_the_defined_ones(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom math import sqrt\nfrom numpy import add\nsize = 3\ndef small(t): ...\ndef large(t): ...\n"
    )
    path = write(tmp_path / "mine.py", text)
    expected = f"file {path} has no function 'build'; it defines: small, large"
    assert line(f"{path}:build") == expected
    assert line(f"{path}:size") == expected.replace("'build'", "'size'")


def test_a_file_without_functions_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "")
    assert line(f"{path}:build") == f"file {path} has no function 'build'; it defines: none"


def test_a_file_name_that_python_cannot_import_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "my-model.py", NAMED.format(1))
    message = line(f"{path}:build")
    assert str(path) in message and "'my-model'" in message and "rename" in message


def test_a_function_that_returns_no_workload_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", NAMED.format("a model"))
    with pytest.raises(WorkloadError) as error:
        build_workload(Trial(workload=f"{path}:build"), CPU)
    assert f"'{path}:build' returned str" in str(error.value)
    assert "trainables.workload.Workload" in str(error.value)


@pytest.mark.parametrize("name", ["random", "statistics", "study", "torch", "time"])
def test_a_file_that_shadows_another_module_is_rejected(tmp_path: Path, name: str) -> None:
    other = importlib.import_module(name)
    path = write(tmp_path / f"{name}.py", NAMED.format(1))
    message = line(f"{path}:build")
    assert str(path) in message and repr(name) in message and str(getattr(other, "__file__", None)) in message
    assert importlib.import_module(name) is other


# --------------------------------------------------------------------------------------------------------- loading


def test_a_file_next_to_the_workload_can_be_imported(tmp_path: Path) -> None:
    write(tmp_path / "layers_beside_it.py", "WIDTH = 7\n")
    path = write(tmp_path / "mine.py", "import layers_beside_it\ndef build(t):\n    return layers_beside_it.WIDTH\n")
    assert load_user_workload(f"{path}:build")(Trial()) == 7


def test_a_file_in_a_package_may_import_relatively(tmp_path: Path) -> None:
    package = tmp_path / "package_of_mine"
    write(package / "__init__.py", "")
    write(package / "layers.py", "WIDTH = 7\n")
    write(package / "inner" / "__init__.py", "")
    write(package / "inner" / "depth.py", "DEPTH = 3\n")
    text = (
        "from ..layers import WIDTH\nfrom .depth import DEPTH\nimport depth\nfrom package_of_mine import layers\n"
        "def build(t):\n    return WIDTH, DEPTH, depth.DEPTH, layers.WIDTH\n"
    )
    path = write(package / "inner" / "mine.py", text)
    function = load_user_workload(f"{path}:build")
    assert function(Trial()) == (7, 3, 3, 7)
    assert function.__module__ == "package_of_mine.inner.mine"
    assert load_user_workload(f"{path}:build") is function
    write(path, text.replace("return WIDTH", "return 2 * WIDTH"))
    assert load_user_workload(f"{path}:build")(Trial()) == (14, 3, 3, 7)


def test_a_package_named_like_one_in_use_is_no_obstacle(tmp_path: Path) -> None:
    write(tmp_path / "study" / "__init__.py", "raise SystemExit('never imported')\n")
    path = write(tmp_path / "study" / "mine.py", NAMED.format(5))
    assert load_user_workload(f"{path}:build")(Trial()) == 5


def test_a_file_is_loaded_once_until_it_is_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = write(tmp_path / "mine.py", NAMED.format("one"))
    first = load_user_workload(f"{path}:build")
    assert load_user_workload(f"{path}:build") is first
    # same length and modification time, which Python's .pyc cache cannot distinguish
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    os.utime(write(path, NAMED.format("two")), ns=times)
    assert load_user_workload(f"{path}:build")(Trial()) == "two"


def test_a_file_that_another_module_imported_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", NAMED.format("one"))
    outer = write(tmp_path / "outer.py", "import mine\nbuild = mine.build\n")
    assert load_user_workload(f"{outer}:build")(Trial()) == "one"
    assert load_user_workload(f"{path}:build")(Trial()) == "one"


def test_files_of_the_same_name_in_two_folders_are_reloaded(tmp_path: Path) -> None:
    specs = [f"{write(tmp_path / folder / 'mine.py', NAMED.format(folder))}:build" for folder in ("a", "b")]
    built = [load_user_workload(spec)(Trial()) for spec in [*specs, *specs]]
    assert built == ["a", "b", "a", "b"]


def test_the_source_is_used_if_the_file_does_not_exist(tmp_path: Path) -> None:
    spec = f"{tmp_path}/on_another_host.py:build"
    assert load_user_workload(spec, NAMED.format("one"))(Trial()) == "one"
    assert load_user_workload(spec, NAMED.format("two"))(Trial()) == "two"


def test_the_file_is_used_if_it_exists(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", NAMED.format("file"))
    assert load_user_workload(f"{path}:build", NAMED.format("text"))(Trial()) == "file"


def test_the_written_source_is_never_partial(tmp_path: Path) -> None:
    source = NAMED.format("whole") + "# padding\n" * 200_000
    spec = f"{tmp_path}/padded_stand_in.py:build"
    file = Path(sys.modules[load_user_workload(spec, source).__module__].__file__ or "")
    done = threading.Event()

    def another_rank() -> None:
        while not done.is_set():
            load_user_workload(spec, source)

    writer = threading.Thread(target=another_rank)
    writer.start()
    try:
        sizes = {len(file.read_bytes()) for _ in range(200)}
    finally:
        done.set()
        writer.join()
    assert sizes == {len(source)}
