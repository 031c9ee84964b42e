"""Every registered name in the smallest study that there is: it runs, or the plan says why it cannot."""

import json
from pathlib import Path

import pytest

from study.capacity import count_gpus
from study.scaling import main
from trainables.registry import EXECUTIONS, MEMORY_FORMATS, MODELS, PARALLEL, PRECISIONS

pytestmark = pytest.mark.timeout(900)

REGISTRIES = {
    "model": MODELS, "precision": PRECISIONS, "parallel": PARALLEL, "execution": EXECUTIONS, "memory_format": MEMORY_FORMATS,
}  # fmt: skip
LACKING_ON_CPUS = {
    "model": {"mlstm4096", "mlstm8192"}, "precision": {"tf32"}, "parallel": {"dp", "horovod"}, "execution": {"graph", "compile_graph"},
}  # fmt: skip
LACKING_ON_TWO_GPUS = {"parallel": {"horovod"}}


@pytest.mark.usefixtures("no_figures")
def test_every_registered_name_runs_or_is_infeasible(tmp_path: Path) -> None:
    """Reasons: test_studies."""
    fewest = ["--steps", "1", "--set", "account_steps=1"]
    assert main(["run", "everything", "--address", "local", "-q", *fewest, "--out", str(tmp_path / "results")]) == 0
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/trials/*/trial.json")]
    assert {record["status"] for record in records} == {"done", "infeasible"}
    done = [record["trial"] for record in records if record["status"] == "done"]
    lacking = LACKING_ON_TWO_GPUS if count_gpus() > 1 else LACKING_ON_CPUS
    for field, registry in REGISTRIES.items():
        assert {trial[field] for trial in done} == set(registry) - lacking.get(field, set())
