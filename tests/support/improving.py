"""A training simulated by a law of its step, for tests of the search for faster configurations."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analysis.compare.bottleneck import REGIONS
from study.capacity import NodeCapacity
from study.improve.evidence import Evidence, Run
from study.improve.lever import Lever, Machine
from study.improve.observe import TARGET_NOT_REACHED
from study.improve.rounds import Planned, Round, Settings
from study.improve.search import Search, replay
from trainables.trial import Trial

Law = Callable[[Trial], Mapping[str, float]]
"""Returns the seconds of a step per region."""

GPU_NODE = NodeCapacity("node-a", "10.0.0.1", cpus=32, gpus=2)
CPU_NODE = NodeCapacity("node-a", "10.0.0.1", cpus=8, gpus=0)

NAIVE: dict[str, Any] = {
    "model": "resnet50", "dataset": "image_folder", "data_dir": "/data", "image_size": 224, "device": "cuda",
    "batch_per_gpu": 64, "cpus_per_rank": 16, "loader_workers": 0, "pin_memory": False, "non_blocking": False,
    "precision": "fp32", "parallel": "none",
}  # fmt: skip
"""The start of a user who has not tuned anything."""


def naive_law(trial: Trial) -> dict[str, float]:
    """Return the step of ResNet-50 from JPEG files, so that each usual lever shrinks what it does in practice."""
    images = trial.batch_per_gpu * trial.accumulation_steps
    compute_s = images * 1.1e-3
    compute_s *= {"fp32": 1.0, "tf32": 0.6, "bf16": 0.42}.get(trial.precision, 1.0)
    compute_s *= 0.8 if trial.memory_format == "channels_last" and trial.precision == "bf16" else 1.0
    compute_s *= 0.9 if trial.compiled else 1.0
    host_s = 0.0 if trial.captured else 4e-3 * (0.6 if trial.compiled else 1.0)
    decode_s = images * (6e-3 if trial.decode in ("pil", "torchvision") else 0.1e-3)
    decode_s = 0.0 if trial.dataset == "synthetic" else decode_s
    load_s = decode_s if not trial.loader_workers else max(0.0, decode_s / trial.loader_workers - compute_s)
    copy_s = images * (0.02e-3 if trial.pin_memory else 0.06e-3) * (0.0 if trial.copy_ahead else 1.0)
    exposed_s = 0.0 if trial.world_size == 1 else 2e-3 * (0.5 if trial.parallel == "ddp_bf16" else 1.0)
    shares = {"load": load_s, "transfer": copy_s, "host": host_s, "wire": exposed_s, "compute": compute_s}
    return dict.fromkeys(REGIONS, 0.0) | shares


class SimulatedTraining:
    """Runs the rounds of a search by a law, with noise of worker groups, of their configurations, and of runs.

    noise: standard deviation of the logarithm of a run's step. Others are multiples of it. fails: status and reason of
    trials that do not end well. start_s: of each worker group. trial_s: of a trial. steps_to_target: of a training
    to its target accuracy, None if it does not reach it.
    """

    def __init__(
        self,
        law: Law = naive_law,
        noise: float = 0.005,
        seed: int = 0,
        fails: Callable[[Trial], tuple[str, str] | None] = lambda trial: None,
        losses: Callable[[Trial], Sequence[float]] = lambda trial: [2.0] * 20,
        start_s: float = 0.0,
        trial_s: Callable[[Trial], float] = lambda trial: 10.0,
        steps_to_target: Callable[[Trial], float | None] = lambda trial: 100.0,
    ) -> None:
        self.steps_to_target = steps_to_target
        self.start_s, self.trial_s = start_s, trial_s
        self.law, self.noise, self.random, self.fails, self.loss = law, noise, random.Random(seed), fails, losses
        self.runs: dict[str, Run] = {}
        self.trials: dict[str, Trial] = {}
        self.now_s = 0.0

    def evidence(self) -> Evidence:
        return Evidence(dict(self.runs), self._shares, lambda name: self.loss(self.trials[name]))

    def run(self, pending: Round, most: int | None = None) -> None:
        """Run the trials of a round that have not run, at most `most` of them."""
        left = len(pending.planned) if most is None else most
        for block in pending.blocks:
            shift = self.random.gauss(0, 3 * self.noise)
            within: dict[tuple[str, ...], float] = {}
            start_s = self.start_s
            for planned in block:
                if planned.trial.trial_id in self.runs or left == 0:
                    continue
                left -= 1
                own = within.setdefault(planned.configuration, self.random.gauss(0, self.noise))
                self._run(planned, shift + own + self.random.gauss(0, self.noise), start_s)
                start_s = 0.0

    def search(self, settings: Settings) -> Search:
        """Run a search to its end."""
        while (found := replay(settings, self.evidence())).pending:
            self.run(found.pending)
        return found

    def throughput(self, trial: Trial) -> float:
        """Return the throughput without noise, samples/s."""
        return trial.global_batch / sum(self.law(trial).values())

    def _run(self, planned: Planned, noise: float, start_s: float) -> None:
        trial = planned.trial
        status, reason = self.fails(trial) or ("done", "")
        throughput = self.throughput(trial) * math.exp(noise) if status == "done" else None
        seconds, time_to_target_s = start_s + self.trial_s(trial), None
        if trial.epochs and throughput is not None:
            steps = self.steps_to_target(trial)
            time_to_target_s = None if steps is None else steps * trial.global_batch / throughput
            if steps is None:
                status, reason = TARGET_NOT_REACHED, "best accuracy 0.5"
        self.runs[trial.trial_id] = Run(
            trial.trial_id, status, throughput, self.now_s, seconds, reason, start_s, time_to_target_s
        )
        self.trials[trial.trial_id] = trial
        self.now_s += seconds + 1.0

    def _shares(self, trial_ids: tuple[str, ...]) -> tuple[dict[str, float], str]:
        parts = self.law(self.trials[trial_ids[0]])
        shares = {name: seconds / sum(parts.values()) for name, seconds in parts.items()}
        return shares, max(shares, key=lambda name: shares[name])


def settings_of(
    levers: Sequence[Lever], node: NodeCapacity = GPU_NODE, base: Mapping[str, Any] = NAIVE, **more: Any
) -> Settings:
    """Return the settings of a search from a simulated start."""
    return Settings(Trial(**base), {lever.name: lever for lever in levers}, Machine([node], ("jpeg",)), **more)


def null_lever(name: str, field: str, value: Any) -> Lever:
    """Return a lever that changes a field, which the law does not read."""
    return Lever(name, ("compute",), "order", lambda trial, machine: {field: value})
