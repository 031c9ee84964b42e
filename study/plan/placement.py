"""Where ranks sit: which nodes a worker group takes, and which of its ranks a smaller trial uses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from study.capacity import NodeCapacity
from trainables.facts import DatasetFacts, Facts
from trainables.registry import DATASETS, DECODERS, MODELS, PARALLEL, PRECISIONS, STORAGES, modules
from trainables.trial import Trial

INTERCONNECT_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "no_p2p": {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"},
    "socket": {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
}
"""What makes NCCL leave out direct copies between GPUs and NVLink's multicast, and then also the host's shared memory
and InfiniBand, so that sockets are left (NVIDIA, NCCL: "Environment Variables"). NCCL reads them once, when a process
makes its first communicator."""


class ProcessKind(NamedTuple):
    """What a trial needs of its ranks' processes, beyond their number; trials that differ in it share no worker group.

    `profiled`: the profiler leaves its library loaded in a process, and trials without it are not to run beside that.
    """

    device: str
    nodes: int
    cpus_per_rank: int
    deterministic: bool
    interconnect: str
    profiled: bool

    @classmethod
    def of(cls, trial: Trial) -> "ProcessKind":
        return cls(
            device=trial.device,
            nodes=trial.nodes,
            cpus_per_rank=trial.cpus_per_rank,
            deterministic=trial.deterministic,
            interconnect=trial.interconnect,
            profiled=bool(trial.profile_ranks),
        )

    def environment(self) -> dict[str, str]:
        """Environment variables that must be there before a rank's process starts."""
        # cuBLAS is deterministic only with a fixed workspace (NVIDIA, cuBLAS: "Results Reproducibility")
        cublas = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if self.deterministic else {}
        return cublas | dict(INTERCONNECT_VARIABLES[self.interconnect])


@dataclass(frozen=True)
class Layout:
    """A worker group's ranks: `node_ids` has one entry a rank; trials use nested subsets of `world_sizes` of them.

    modules: what a rank imports before its first trial, loader_modules: what its loader processes do, None where no trial
    has any. An import takes a core seconds, so a group imports what its trials need and no more.
    """

    kind: ProcessKind
    node_ids: tuple[str, ...]
    world_sizes: tuple[int, ...]
    modules: tuple[str, ...] = ()
    loader_modules: tuple[str, ...] | None = None


def layouts(trials: Iterable[Trial], capacity: Sequence[NodeCapacity]) -> dict[ProcessKind, Layout]:
    """One layout for each kind of process that the trials need, as large as its largest trial.

    It takes the first nodes that fit, so that every group of a study sits on the same ones.
    Raises ValueError where too few nodes fit.
    """
    by_kind: dict[ProcessKind, list[Trial]] = {}
    for trial in trials:
        by_kind.setdefault(ProcessKind.of(trial), []).append(trial)
    return {
        kind: Layout(
            kind,
            _rank_nodes(kind, max(trial.world_size for trial in of_kind), capacity),
            tuple(sorted({trial.processes for trial in of_kind})),
            *_imports(of_kind),
        )
        for kind, of_kind in by_kind.items()
    }


def relocate(layout: Layout, capacity: Sequence[NodeCapacity]) -> Layout:
    """Return the layout if all its nodes are alive, else the same ranks on the first nodes that fit. Raises ValueError."""
    alive = {node.node_id for node in capacity}
    if alive.issuperset(layout.node_ids):
        return layout
    return replace(layout, node_ids=_rank_nodes(layout.kind, len(layout.node_ids), capacity))


def _imports(trials: Sequence[Trial]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """`modules` and `loader_modules` of a layout for these trials."""
    loaded: set[str] = set()
    for_loaders: set[str] = set()
    for trial in trials:
        chosen: list[tuple[Mapping[str, Facts | DatasetFacts], str]] = [(DATASETS, trial.dataset)]
        if DATASETS[trial.dataset].image_folder:
            chosen += [(STORAGES, trial.storage), (DECODERS, trial.decode)]
        own = {} if trial.workload else {name: table[name] for table, name in chosen}
        for_loaders |= set(modules(own)) if trial.loader_workers else set()
        models = {name: MODELS[name] for name in [trial.model] if not trial.workload}
        used: dict[str, Facts] = {
            trial.precision: PRECISIONS[trial.precision],
            trial.parallel: PARALLEL[trial.parallel],
        }
        loaded |= set(modules(own, models, used))
    has_loaders = any(trial.loader_workers for trial in trials)
    return tuple(sorted(loaded)), tuple(sorted(for_loaders)) if has_loaders else None


def _rank_nodes(kind: ProcessKind, ranks: int, capacity: Sequence[NodeCapacity]) -> tuple[str, ...]:
    """Return a node id per rank. Raises ValueError where too few nodes fit."""
    per_node = ranks // kind.nodes
    fitting = [
        node
        for node in capacity
        if node.cpus >= per_node * kind.cpus_per_rank and (kind.device == "cpu" or node.gpus >= per_node)
    ]
    if len(fitting) < kind.nodes:
        raise ValueError(
            f"{kind.nodes} nodes with {per_node} ranks of {kind.cpus_per_rank} CPUs each are needed; {len(fitting)} fit"
        )
    return tuple(node.node_id for node in fitting[: kind.nodes] for _ in range(per_node))


def can_share_host(trial: Trial) -> bool:
    """Return True if other trainings may share the host. Timed trials and trials of several ranks need it exclusively."""
    return trial.epochs > 0 and trial.world_size == 1


def concurrent_slots(trials: Iterable[Trial], capacity: Sequence[NodeCapacity]) -> list[str]:
    """Return a node id per slot: as many trials of one rank fit at the same time, whichever of `trials` they are."""
    trials = list(trials)
    cores = max(trial.cpus_per_rank for trial in trials)
    on_gpus = any(trial.device == "cuda" for trial in trials)
    slots = {node.node_id: min(node.cpus // cores, node.gpus) if on_gpus else node.cpus // cores for node in capacity}
    return [node_id for node_id, count in slots.items() for _ in range(count)]


def ranks_by_node(node_ids: Sequence[str]) -> list[list[int]]:
    """Ranks grouped by the node they sit on, nodes in the order of their first rank; `node_ids` is one entry a rank."""
    return [[rank for rank, at in enumerate(node_ids) if at == node] for node in dict.fromkeys(node_ids)]


def members(node_ids: Sequence[str], world_size: int) -> list[int]:
    """The ranks that a trial of `world_size` uses: the first ones of every node, so that smaller trials are nested."""
    nodes = ranks_by_node(node_ids)
    return [rank for ranks in nodes for rank in ranks[: world_size // len(nodes)]]
