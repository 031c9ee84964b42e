"""Does `improve` find what is fast, and does it keep noise?

    python -m benchmarks.truth.improve null     # 20 searches on two CPU ranks with levers that do nothing
    python -m benchmarks.truth.improve start    # from naive starts on GPUs; --cases resnet50,gpt2,vgg19,mlstm,unet

null: real ranks over gloo in the study's own process, without Ray. Each lever changes a number that costs no time, such
as the learning rate. Goal: at most one lever is kept in all searches. --simulated: ranks with generated step times.

start: fp32, eager, contiguous, no loader processes, unpinned, JPEG by Pillow. Each case runs the `improve` command
within 40 trials and --budget, then a grid of good configurations in five worker groups (--repeats). Goal: at
least 0.95 of the fastest of them.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.measure.configurations import configurations
from analysis.measure.measures import summaries
from analysis.read.results import load_reduced
from analysis.read.study_record import StudyRecord
from benchmarks.harness.common import figure, kept_samples, write_summary
from study.capacity import local_capacity
from study.cli.commands import print_to_stderr
from study.cli.configuration import Configuration
from study.improve.lever import Machine
from study.improve.observe import Observer
from study.improve.rounds import Settings
from study.improve.search import Search
from study.improve.session import Session, search_rounds
from study.improve.start import Request
from study.orchestrate.twin.in_process import local_cluster, run_trials
from study.orchestrate.twin.local_ranks import LocalProcesses
from study.store.store import Store
from tests.support.improving import CPU_NODE, SimulatedTraining, null_lever, settings_of
from trainables.trial import Trial

ROOT = Path(__file__).parents[2]
WORKLOADS = ROOT / "benchmarks" / "harness" / "improve_workloads.py"

NULL_LEVERS = [
    null_lever("learning_rate 0.02", "learning_rate", 0.02),
    null_lever("weight_decay 0.0001", "weight_decay", 1e-4),
    null_lever("momentum 0.8", "momentum", 0.8),
    null_lever("reference_batch 64", "reference_batch", 64),
    null_lever("learning_rate 0.005", "learning_rate", 0.005),
]
"""Changes of numbers, which cost no time."""

SIMULATED_NOISE = (0.003, 0.03)
"""Standard deviation of the logarithm of a step between runs; between worker groups it is three times as large."""

NULL_TRIAL: dict[str, Any] = {
    "model": "mlp", "world_size": 2, "batch_per_gpu": 16, "warmup_steps": 3, "steps": 20, "communication_steps": 3,
    "sweep_bytes": 2**12, "prefetch_batches": 1,
}  # fmt: skip

NAIVE = (
    "--precision fp32 --loader-workers 0 --set execution=eager --set memory_format=contiguous --set pin_memory=false "
    "--set non_blocking=false"
)
BEST = "--precision bf16 --set memory_format=channels_last"
SHORT = "--set warmup_steps=5 --set steps=15 --set window_limit_s=2 --set communication_steps=5"
"""For models whose naive steps take so long that trials of the usual length would use up the time of the search."""


@dataclass(frozen=True)
class Case:
    """A naive start. work: options of both sides. best: those of a grid that has the fastest configuration known."""

    gpus: int
    work: str
    naive: str
    best: str


CASES: dict[str, Case] = {
    "resnet50": Case(
        1, "--model resnet50 --batch-per-gpu 128 --set dataset=image_folder_sample --set image_size=224",
        f"{NAIVE} --set decode=pil",
        f"{BEST} --loader-workers 8 --set decode=nvjpeg_ahead --set execution=eager,compile --set copy_ahead=true",
    ),
    "gpt2": Case(
        2, "--model gpt2 --batch-per-gpu 8 --set sequence_length=1024 --set optimizer=adamw", NAIVE,
        "--precision bf16 --set execution=compile,compile_graph --set parallel=ddp_bf16",
    ),
    "vgg19": Case(
        2,
        f"--model vgg19 --batch-per-gpu 64 --set dataset=synthetic --set image_size=224 --interconnect no_p2p {SHORT}",
        NAIVE,
        f"{BEST} --set execution=eager,compile --set parallel=ddp_bf16",
    ),
    "mlstm": Case(
        1, f"--model mlstm4096 --batch-per-gpu 128 --set dataset=text_sample {SHORT}", NAIVE,
        "--precision bf16 --set execution=compile,compile_graph",
    ),
    "unet": Case(
        1, f"--workload {WORKLOADS}:unet --batch-per-gpu 16", NAIVE,
        f"{BEST} --loader-workers 8 --set execution=eager,compile --set copy_ahead=true",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["null", "start"])
    parser.add_argument("--runs", type=int, default=20, help="searches of null")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--budget", default="15m", help="time per case of start")
    parser.add_argument("--repeats", type=int, default=5, help="worker groups of the grid of good configurations")
    parser.add_argument("--keep", help="folder for the results of start, which then continues what it finds there")
    parser.add_argument("--name", help="folder under benchmarks/results; default: improve-null or improve-start")
    options = parser.parse_args()
    name = options.name or f"improve-{options.what}"
    if options.what == "start":
        with tempfile.TemporaryDirectory() as temporary:
            return start(options.cases.split(","), options.budget, options.repeats, options.keep or temporary, name)
    samples = kept_samples(name)
    for number in range(len(samples), options.runs):
        samples.append({"run": number} | (simulated(number) if options.simulated else measured()))
        print(samples[-1], flush=True)
        write_summary(name, null_figures(samples), samples)


# -------------------------------------------------------------------------------------------------------------- null


def simulated(number: int) -> dict[str, Any]:
    """Search with generated step times."""
    base = {"model": "mlp", "device": "cpu", "world_size": 2, "batch_per_gpu": 16}
    settings = settings_of(NULL_LEVERS, CPU_NODE, base, trials=40)
    return found_in(SimulatedTraining(noise=SIMULATED_NOISE[number % 2], seed=number).search(settings))


def measured() -> dict[str, Any]:
    """Search on two CPU ranks."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = [node.__class__("here", node.address, max(2, node.cpus), 0) for node in local_capacity()]
        settings = Settings(
            Trial(**NULL_TRIAL), {lever.name: lever for lever in NULL_LEVERS}, Machine(nodes), trials=40
        )
        configuration = Configuration(study="improve-null", out=folder)
        asked = Request(configuration, "", "throughput", 40, None, keep_arithmetic=False)
        session = Session(asked, settings, "benchmark", Observer(folder))
        session.save(Search())

        def run(blocks: Sequence[Sequence[Trial]], store: Store) -> bool:
            return run_trials("improve-null", blocks, store, local_cluster(nodes), ranks=LocalProcesses())

        search_rounds(session, run, print_to_stderr)
        return found_in(session.read()[0])


def found_in(search: Search) -> dict[str, Any]:
    """Return what a search kept, and what it measured."""
    return {
        "kept": list(search.chosen or ()),
        "added_before_the_final_round": [names[-1] for names, _ in search.steps],
        "is_complete": search.chosen is not None,
        "trials": sum(len(done.planned) for done in search.rounds),
        "levers": [{"lever": tried.lever, "gain": list(tried.gain)} for tried in search.attempts],
    }


def null_figures(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = sum(len(sample["kept"]) for sample in samples)
    tried = sum(len(sample["levers"]) for sample in samples)
    complete = sum(sample["is_complete"] for sample in samples)
    return [
        figure("levers that do nothing: kept", kept, None, f"of {tried} tried", "<= 1", kept <= 1),
        figure("searches that ended", complete, None, f"of {len(samples)}", "all", complete == len(samples)),
    ]


# ------------------------------------------------------------------------------------------------------------- start


def start(names: list[str], budget: str, repeats: int, folder: str, result: str) -> None:
    """Improve each naive start, measure good configurations, and write the figures."""
    samples = [sample for sample in kept_samples(result) if sample["case"] not in names]
    for name in names:
        case = CASES[name]
        gpus = f"--gpus {case.gpus}"
        improved, best = f"{folder}/{name}-improve", f"{folder}/{name}-best"
        _study(f"improve {case.work} {case.naive} {gpus} --trials 40 --budget {budget} --out {improved}")
        _study(f"run {case.work} {case.best} {gpus} --repeats {repeats} --out {best}")
        samples.append({"case": name} | compared(improved, best))
        write_summary(result, [entry for sample in samples for entry in start_figures(sample)], samples)


def _study(arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "study.scaling", *shlex.split(arguments)], check=True)


def compared(improved: str, best: str) -> dict[str, Any]:
    """Return what `improve` found, and its throughput relative to that of the fastest configuration in `best`."""
    study = Store.at(improved).study()
    found = StudyRecord.of(study).improvement
    assert found is not None and found.chosen is not None
    results = load_reduced(best)
    known = configurations(summaries(results.trials, results.windows)).set_index("execution")[
        "throughput_samples_per_s"
    ]
    return {
        "ratio": found.chosen.throughput_samples_per_s / float(known.max()),
        "best_samples_per_s": known.to_dict(),
        "minutes": found.elapsed_s / 60,
        "record": json.loads(json.dumps(study["improve"]).replace(f"{ROOT}/", "")),  # no paths of this machine
    }


def start_figures(sample: dict[str, Any]) -> list[dict[str, Any]]:
    name, record, minutes = sample["case"], sample["record"], sample["minutes"]
    ratio, trials = sample["ratio"], record["trials"]
    return [
        figure(f"{name}: of the fastest configuration known", ratio, None, "", ">= 0.95", ratio >= 0.95),
        figure(f"{name}: trials", trials, None, "trials", "<= 40", trials <= 40),
        figure(f"{name}: time", minutes, None, "min", "<= 15", minutes <= 15),
    ]


if __name__ == "__main__":
    main()
