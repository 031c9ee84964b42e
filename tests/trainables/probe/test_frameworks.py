"""Scripts of frameworks, through the script entry on two gloo ranks: unmodified, and with one changed line."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.script_runs import SHORT, run_on_ranks

ROOT = Path(__file__).parent.parent.parent.parent
SCRIPTS, EXAMPLES = ROOT / "tests/scripts", ROOT / "examples"

ROWS: dict[str, dict[str, Any]] = {
    "hf_trainer": {"samples": 8, "tokens": 8 * 32},
    "lightning_trainer": {"samples": 8},
    "accelerate_loop": {"samples": 16},
    "deepspeed_zero": {"samples": 8},
    "mini_gpt": {"samples": 8, "tokens": 8 * 16},
    "imagenet": {"samples": 4},
}
"""samples and tokens per step and rank"""

ARGUMENTS = {"mini_gpt": ["--compile_backend=aot_eager"]}
PACKAGES = {
    "hf_trainer": "transformers",
    "lightning_trainer": "lightning",
    "accelerate_loop": "accelerate",
    "deepspeed_zero": "deepspeed",
}


def needs(package: str) -> None:
    """Skip a test if a package is not installed, without importing it, which takes seconds."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("name", ROWS)
def test_a_script_is_measured_as_it_is(tmp_path: Path, name: str) -> None:
    if package := PACKAGES.get(name):
        needs(package)
    outputs = run_on_ranks(SCRIPTS / f"{name}.py", tmp_path, *ARGUMENTS.get(name, ()))
    assert [output.failure for output in outputs] == [None, None], (tmp_path / "0.log").read_text()[-3000:]
    for output in outputs:
        rows = output.tables["steps"]
        windows = [row["window"] for row in rows]
        # a step with an evaluation in it is labelled as such
        assert windows.count("plain") + windows.count("evaluation") >= SHORT.plain_steps
        assert windows.count("phases") >= SHORT.phase_steps - 1
        evidence = output.evidence
        assert evidence["samples_per_step"] == ROWS[name]["samples"]
        assert evidence["tokens_per_step"] == ROWS[name].get("tokens")
        phases = [row for row in rows if row["window"] == "phases"]
        for row in phases:
            assert row["forward_s"] > 0 and row["backward_s"] > 0 and row["optimizer_s"] > 0
    assert outputs[0].tables["collectives"], "the trace has the ranks' communication"


CALLBACKS = {
    "hf_trainer": ("hf_callback", "Trainer(\n", "Trainer(\n        callbacks=[StudySteps()],\n"),
    "lightning_trainer": ("lightning_callback", "Trainer(\n", "Trainer(\n        callbacks=[StudySteps()],\n"),
}
"""example of a callback, and the change that adds it to a script"""


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_marks_the_steps_and_ends_the_training(tmp_path: Path, name: str) -> None:
    needs(PACKAGES[name])
    example, before, after = CALLBACKS[name]
    text = (SCRIPTS / f"{name}.py").read_text()
    assert text.count(before) == 1
    script = tmp_path / "train.py"
    script.write_text(f"from {example} import StudySteps\n" + text.replace(before, after) + "    print('ended')\n")
    shutil.copy(EXAMPLES / f"{example}.py", tmp_path)
    arguments = ["--devices", "1"] if name == "lightning_trainer" else []
    [output] = run_on_ranks(script, tmp_path, *arguments, ranks=1)
    log = (tmp_path / "0.log").read_text()
    assert output.failure is None, log[-3000:]
    assert output.evidence["entry"] == "loop"
    assert output.evidence["samples_per_step"] == ROWS[name]["samples"]
    assert log.rstrip().endswith("ended"), "the training ends by itself"


def test_the_example_loop_is_measured_and_ends_by_itself(tmp_path: Path) -> None:
    outputs = run_on_ranks(EXAMPLES / "train_loop.py", tmp_path, "--batch-size", "8")
    assert [output.failure for output in outputs] == [None, None]
    for output in outputs:
        windows = [row["window"] for row in output.tables["steps"]]
        assert (windows.count("plain"), windows.count("phases")) == (SHORT.plain_steps, SHORT.phase_steps)
        assert output.evidence["entry"] == "loop" and output.evidence["samples_per_step"] == 8


def test_every_example_has_fewer_than_forty_lines() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths and {name: lines for name, lines in lengths.items() if lines >= 40} == {}


def test_without_a_study_steps_is_a_plain_iterator(tmp_path: Path) -> None:
    code = "from trainables.probe import steps; import sys; print(list(steps([1, 2])), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[1, 2] False\n"
