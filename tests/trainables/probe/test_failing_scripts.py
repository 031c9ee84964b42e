"""Scripts that fail: each has a kind, one line, an exit code and a log."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainables.probe.runs import SCRIPTS, SHORT, rows, run_on
from trainables.probe.failures import exception, exit_code
from trainables.probe.job import ScriptFailure, ScriptOutput

TRACED = f"early {SHORT.needed_steps - 1}"
"""ends within the window with a trace"""

KINDS = {
    "exit": ("exit", 3, "code 3"),
    "hang": ("start_timeout", None, "no optimizer step within 8 s"),
    "spawn": ("starts_processes", 1, "starts its ranks itself (broken.py:"),
    "imported spawn": ("starts_processes", 1, "starts its ranks itself (broken.py:"),
    "import": ("import", 1, "a_module_that_does_not_exist' (broken.py:"),
    "old import": ("import", 1, "the script requires another version of torch"),
    "import with a hint": ("import", 1, "rouge needs a package: pip install absl-py (broken.py:"),
    "assertion": ("error", 1, 'AssertionError: assert torch.__version__ == "0.3.2" (broken.py:'),
    "GPU": ("error", 1, "; the script requires GPUs: "),
    "GPU of NCCL": ("error", 1, "; the script requires GPUs: "),
    "GPU of DDP": ("error", 1, "; the script requires GPUs: "),
    "bold": ("error", 1, "ValueError: only trusted files (broken.py:"),
    "silent print": ("error", 1, "ValueError: not printed"),
    "read-only": ("read_only", 1, "/sys/checkpoints"),
    "memory": ("out_of_memory", 1, "2.00 GiB"),
    "early 4": ("early", 0, f"after 4 optimizer steps, but {SHORT.needed_steps} are needed"),
    TRACED: ("early", 0, f"steps, but {SHORT.needed_steps} are needed"),
    "nothing": ("no_step", 0, "without a step of a torch optimizer; if"),
    "one GPU": ("no_step", 0, 'its last output was "2 GPUs are needed"'),
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ScriptOutput]:
    logs = tmp_path_factory.mktemp("logs")

    def run(kind: str) -> ScriptOutput:
        return run_on(1, "broken.py", kind, logs=logs, start_timeout_s=8.0 if kind == "hang" else 120.0)[0]

    with ThreadPoolExecutor(3) as pool:
        return dict(zip([*KINDS, "swallow"], pool.map(run, [*KINDS, "swallow"]), strict=True))


def failure_of(output: ScriptOutput) -> ScriptFailure:
    assert output.failure is not None
    return output.failure


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_one_line_with_its_reason(outputs: dict[str, ScriptOutput], kind: str) -> None:
    failure = failure_of(outputs[kind])
    expected_kind, exit_code, part = KINDS[kind]
    assert (failure.kind, failure.exit_code) == (expected_kind, exit_code if kind != "hang" else None)
    assert part in failure.line
    assert "\n" not in failure.line
    assert Path(failure.log).exists()


def test_steps_before_an_early_end_are_kept(outputs: dict[str, ScriptOutput]) -> None:
    failure = failure_of(outputs["early 4"])
    assert (failure.steps_run, failure.steps_needed) == (4, SHORT.needed_steps)
    assert len(rows(outputs["early 4"], "warmup")) == 4


def test_no_profiler_is_live_when_a_script_exits(outputs: dict[str, ScriptOutput]) -> None:
    assert "profiler at exit: False" in Path(failure_of(outputs[TRACED]).log).read_text()


def test_the_log_has_the_traceback_of_a_script_that_silences_print(outputs: dict[str, ScriptOutput]) -> None:
    """As many scripts do on all ranks but the first."""
    log = Path(failure_of(outputs["silent print"]).log).read_text()
    assert log.startswith("Traceback (most recent call last):") and log.rstrip().endswith("ValueError: not printed")


def test_a_script_that_swallows_all_exceptions_is_ended(outputs: dict[str, ScriptOutput]) -> None:
    assert outputs["swallow"].failure is None
    assert outputs["swallow"].evidence["steps_run"] == SHORT.needed_steps


def test_missing_arguments_are_reported_in_the_words_of_the_script(tmp_path: Path) -> None:
    failures = [failure_of(output) for output in run_on(2, "accumulate.py", logs=tmp_path)]
    for failure in failures:
        assert (failure.kind, failure.exit_code) == ("arguments", 2)
        assert "the following arguments are required: --data" in failure.line
        assert "before --" in failure.line


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
def test_an_option_for_the_local_rank_is_not_one_to_give(option: str) -> None:
    kind, line = exit_code(2, f"train.py: error: the following arguments are required: --data, {option}\n")
    assert kind == "arguments"
    assert "torchrun sets LOCAL_RANK" in line and "after --" not in line


def test_variables_of_other_launchers_have_a_counterpart(tmp_path: Path) -> None:
    """The place is in the script, though Python's own `os` raises the error."""
    [output] = run_on(1, "broken.py", "variable", logs=tmp_path, directory=SCRIPTS)
    assert "KeyError: 'SLURM_PROCID' (broken.py:" in failure_of(output).line
    assert "let the script read RANK" in failure_of(output).line
    of_mpirun: dict[str, Any] = {"type": "KeyError", "bases": [], "text": "'OMPI_COMM_WORLD_RANK'", "place": None}
    assert "let the script read RANK" in exception(of_mpirun)[1]
    assert "RANK" not in exception(of_mpirun | {"text": "'lr'"})[1]


def test_ranks_without_a_common_process_group_are_no_training(tmp_path: Path) -> None:
    """As of PyTorch's ImageNet example without `--dist-url env://`."""
    for output in run_on(2, "broken.py", "swallow", logs=tmp_path):
        assert failure_of(output).kind == "alone"
        assert "no process group at the end of the measurement, but 2 ranks" in failure_of(output).line
        assert "A script for one GPU" in failure_of(output).line
        assert len(rows(output, "plain")) == SHORT.plain_steps


def test_a_package_in_the_working_directory_is_not_one_to_install(tmp_path: Path) -> None:
    """As of a script that people start with `torchrun -m`."""
    [output] = run_on(1, "broken.py", "import of a neighbour", logs=tmp_path, directory=SCRIPTS.parent)
    assert "scripts is in the working directory" in failure_of(output).line
    assert "install it" not in failure_of(output).line


def test_a_script_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    [output] = run_on(1, "missing.py", logs=tmp_path)
    assert failure_of(output).kind == "not_found"


def test_no_process_of_a_script_remains(outputs: dict[str, ScriptOutput]) -> None:
    time.sleep(0.2)
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True) if child.is_running()]
    assert not [command for command in commands if "probe/child.py" in command]
