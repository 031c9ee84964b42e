"""Published studies share a host: each has GPUs and cores of its own, and the time ends them."""

import json
import os
import shlex
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts.run_published import STUDIES, Published, run_all
from study.capacity import NodeCapacity
from study.studies.basic import STUDIES as NAMED

RECORD = """
import json, os, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
begins = time.monotonic()
time.sleep(float(sys.argv[1]))
with open(out + ".json", "a") as file:
    facts = {"arguments": sys.argv[2:], "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "begins": begins}
    file.write(json.dumps(facts | {"ends": time.monotonic(), "cores": sorted(os.sched_getaffinity(0))}) + "\\n")
"""
PROGRAM = (sys.executable, "-c", RECORD)


def runs(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"{name}.json").read_text().splitlines()]


def test_studies_run_at_the_same_time_on_gpus_and_cores_of_their_own(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    studies = [
        Published("pair", ("1.5 --data-dir {photos}", "0 --second")),
        Published("other", ("1.5",)),
        Published("third", ("0",)),
        Published("alone", ("0",), gpus=1),
    ]
    codes = run_all(
        studies, tmp_path, gpus=4, usual_gpus=2, seconds=60, folders={"photos": Path("/p")}, program=PROGRAM
    )
    assert codes == dict.fromkeys(("pair", "other", "third", "alone"), 0)
    first, second = runs(tmp_path, "pair")
    [other], [third], [alone] = (runs(tmp_path, name) for name in ("other", "third", "alone"))
    assert first["gpus"] == second["gpus"] == "0,1" and other["gpus"] == "2,3"
    assert first["arguments"] == ["--data-dir", "/p", "--out", str(tmp_path / "pair"), "--quiet"]
    assert "--second" in second["arguments"]
    assert other["begins"] < first["ends"], "they run at the same time"
    assert min(third["begins"], alone["begins"]) > min(other["ends"], first["ends"])
    if len(cores) >= 4:
        assert not set(first["cores"]) & set(other["cores"])
    assert sorted(os.sched_getaffinity(0)) == cores, "the caller keeps its cores"


def test_a_host_with_one_gpu_shows_it_to_its_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, expected in ((None, "0"), ("3", "3")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        directory = tmp_path / expected
        run_all([Published("one", ("0",))], directory, gpus=1, usual_gpus=1, seconds=30, folders={}, program=PROGRAM)
        assert [run["gpus"] for run in runs(directory, "one")] == [expected]


def test_the_end_of_the_time_ends_running_studies_and_starts_no_more(tmp_path: Path) -> None:
    begin = time.monotonic()
    studies = [Published("long", ("30", "0")), Published("waiting", ("0",))]
    codes = run_all(studies, tmp_path, gpus=2, usual_gpus=2, seconds=1.0, folders={}, program=PROGRAM)
    assert time.monotonic() - begin < 20
    assert codes == {"long": -15}


@pytest.mark.parametrize("published", STUDIES, ids=lambda published: published.name)
def test_the_commands_name_studies_and_their_cases(published: Published) -> None:
    for name, *options in map(shlex.split, published.commands):
        study = NAMED[name]([NodeCapacity("host", "", cpus=32, gpus=2)])
        for option, value in pairwise(options):
            assert option != "--case" or value in study.cases
