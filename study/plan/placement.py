"""Place ranks: choose the nodes of a worker group, and the ranks of it that a smaller trial uses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from study.capacity import NodeCapacity
from trainables.facts import DatasetFacts, Facts
from trainables.field_facts import Door
from trainables.registry import DATASETS, DECODERS, MODELS, PARALLEL, PRECISIONS, STORAGES, modules
from trainables.trial import Trial

INTERCONNECT_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "no_p2p": {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"},
    "socket": {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
}
"""Environment variables per interconnect (NVIDIA, NCCL: "Environment Variables").

"no_p2p" disables direct copies between GPUs and NVLink multicast. "socket" also disables shared memory and InfiniBand.
NCCL reads these variables once per process, when it creates the first communicator.
"""


class ProcessKind(NamedTuple):
    """Requirements of a trial on its ranks' processes. Trials that differ in them cannot share a worker group."""

    device: str
    nodes: int
    cpus_per_rank: int
    deterministic: bool
    interconnect: str
    profiled: bool
    """True with a profiler, whose library stays loaded in the process and would disturb trials without one."""
    door: Door = "factory"
    """How the user's code is run. Processes that start scripts never use the GPU themselves."""

    @classmethod
    def of(cls, trial: Trial) -> "ProcessKind":
        return cls(
            device=trial.device,
            nodes=trial.nodes,
            cpus_per_rank=trial.cpus_per_rank,
            deterministic=trial.deterministic,
            interconnect=trial.interconnect,
            profiled=bool(trial.profile_ranks),
            door=trial.door,
        )

    @property
    def launch_kind(self) -> "ProcessKind":
        """The kind without what each forked process gets anew: groups that agree in it can follow on the same ranks."""
        return self._replace(deterministic=False, interconnect="auto", profiled=False)

    @property
    def forks_ranks(self) -> bool:
        """True if ranks run in processes of their own, and not in those of Ray Train."""
        return self.door in ("factory", "script")

    def environment(self) -> dict[str, str]:
        """Return the environment variables that a rank's process must start with."""
        # cuBLAS is deterministic only with a fixed workspace (NVIDIA, cuBLAS: "Results Reproducibility")
        cublas = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if self.deterministic else {}
        return cublas | dict(INTERCONNECT_VARIABLES[self.interconnect])


@dataclass(frozen=True)
class Layout:
    """The ranks of a worker group. Trials use nested subsets of them.

    Imports take seconds of a core, so a group imports only the modules that its trials need.
    """

    kind: ProcessKind
    node_ids: tuple[str, ...]
    """One node id per rank."""
    world_sizes: tuple[int, ...]
    """Numbers of ranks that its trials use."""
    modules: tuple[str, ...] = ()
    """Modules that a rank imports before its first trial."""
    loader_modules: tuple[str, ...] | None = None
    """Modules that its loader processes import; None if no trial has loader processes."""


def layouts(trials: Iterable[Trial], capacity: Sequence[NodeCapacity]) -> dict[ProcessKind, Layout]:
    """Return one layout per process kind, as large as its largest trial.

    A layout takes the first nodes that fit, so that all groups of a study use the same nodes. Raises ValueError if too
    few nodes fit.
    """
    by_kind: dict[ProcessKind, list[Trial]] = {}
    for trial in trials:
        by_kind.setdefault(ProcessKind.of(trial), []).append(trial)
    return {
        kind: Layout(
            kind,
            _rank_nodes(kind, max(trial.world_size for trial in of_kind), capacity),
            tuple(sorted({trial.processes for trial in of_kind})),
            *imports(of_kind),
        )
        for kind, of_kind in by_kind.items()
    }


def relocate(layout: Layout, capacity: Sequence[NodeCapacity]) -> Layout:
    """Return the layout if all its nodes are alive, else the same ranks on the first nodes that fit.

    Raises ValueError if too few nodes fit.
    """
    alive = {node.node_id for node in capacity}
    if alive.issuperset(layout.node_ids):
        return layout
    return replace(layout, node_ids=_rank_nodes(layout.kind, len(layout.node_ids), capacity))


def imports(trials: Sequence[Trial]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return `modules` and `loader_modules` of a layout for these trials, see `Layout`."""
    rank_modules: set[str] = set()
    loader_modules: set[str] = set()
    for trial in (trial for trial in trials if trial.door == "factory"):
        choices: list[tuple[Mapping[str, Facts | DatasetFacts], str]] = [(DATASETS, trial.dataset)]
        if DATASETS[trial.dataset].image_folder:
            choices += [(STORAGES, trial.storage), (DECODERS, trial.decode)]
        data = {} if trial.workload else {name: table[name] for table, name in choices}
        loader_modules |= set(modules(data)) if trial.loader_workers else set()
        models = {name: MODELS[name] for name in [trial.model] if not trial.workload}
        step: dict[str, Facts] = {
            trial.precision: PRECISIONS[trial.precision],
            trial.parallel: PARALLEL[trial.parallel],
        }
        rank_modules |= set(modules(data, models, step))
    has_loaders = any(trial.loader_workers for trial in trials if trial.door == "factory")
    return tuple(sorted(rank_modules)), tuple(sorted(loader_modules)) if has_loaders else None


def _rank_nodes(kind: ProcessKind, ranks: int, capacity: Sequence[NodeCapacity]) -> tuple[str, ...]:
    """Return a node id per rank. Raises ValueError if too few nodes fit."""
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
    """Return True if other training trials may share the host. Timed and multi-rank trials need it exclusively."""
    return trial.epochs > 0 and trial.world_size == 1


def concurrent_slots(trials: Iterable[Trial], capacity: Sequence[NodeCapacity]) -> list[str]:
    """Return one node id per slot. Any of `trials`, each of one rank, fits into any slot."""
    trials = list(trials)
    cores = max(trial.cpus_per_rank for trial in trials)
    on_gpus = any(trial.device == "cuda" for trial in trials)
    slots = {node.node_id: min(node.cpus // cores, node.gpus) if on_gpus else node.cpus // cores for node in capacity}
    return [node_id for node_id, count in slots.items() for _ in range(count)]


def ranks_by_node(node_ids: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each node, nodes in the order of their first rank. `node_ids` has one entry per rank."""
    return [[rank for rank, node_id in enumerate(node_ids) if node_id == node] for node in dict.fromkeys(node_ids)]


def members(node_ids: Sequence[str], world_size: int) -> list[int]:
    """Return the ranks of a trial of `world_size`: the first ones of each node, so that smaller trials are nested."""
    nodes = ranks_by_node(node_ids)
    return [rank for ranks in nodes for rank in ranks[: world_size // len(nodes)]]
