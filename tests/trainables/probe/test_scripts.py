"""Scripts as people have them, unmodified, through the script entry on two gloo ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import SHORT, run_on_ranks

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"

ROWS: dict[str, dict[str, Any]] = {
    "hf_trainer": {"samples": 8, "tokens": 8 * 32},
    "lightning_trainer": {"samples": 8},
    "accelerate_loop": {"samples": 16},
    "mini_gpt": {"samples": 8, "tokens": 8 * 16},
    "imagenet": {"samples": 4},
    "fsdp2": {"samples": 4, "tokens": 4 * 16},
    "gan": {"samples": 8},
}
"""samples and tokens per step and rank"""

ARGUMENTS = {"mini_gpt": ["--compile_backend=aot_eager"]}
PACKAGES = {"hf_trainer": "transformers", "lightning_trainer": "lightning", "accelerate_loop": "accelerate"}


@pytest.mark.parametrize("name", ROWS)
def test_a_script_is_measured_as_it_is(tmp_path: Path, name: str) -> None:
    if package := PACKAGES.get(name):
        pytest.importorskip(package)
    outputs = run_on_ranks(SCRIPTS / f"{name}.py", tmp_path, *ARGUMENTS.get(name, ()))
    assert [output.failure for output in outputs] == [None, None], (tmp_path / "0.log").read_text()[-3000:]
    for output in outputs:
        rows = output.tables["steps"]
        windows = [row["window"] for row in rows]
        assert windows.count("plain") >= SHORT.plain_steps and windows.count("phases") >= SHORT.phase_steps - 1
        evidence = output.evidence
        assert evidence["samples_per_step"] == ROWS[name]["samples"]
        assert evidence["tokens_per_step"] == ROWS[name].get("tokens")
        phases = [row for row in rows if row["window"] == "phases"]
        for row in phases:
            assert row["forward_s"] > 0 and row["backward_s"] > 0 and row["optimizer_s"] > 0
    assert outputs[0].tables["collectives"], "the trace has the ranks' communication"
