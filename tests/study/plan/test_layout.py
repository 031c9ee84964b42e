"""Placement of ranks: the same nodes for every trial, smaller trials nested in larger ones."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.capacity import NodeCapacity
from study.plan.placement import Layout, ProcessKind, imports, layouts, members, ranks_by_node
from trainables.trial import Trial


def cluster(*sizes: tuple[int, int]) -> list[NodeCapacity]:
    """Return nodes a, b, c ... with these (CPUs, GPUs)."""
    return [NodeCapacity(chr(ord("a") + i), f"10.0.0.{i}", cpus, gpus) for i, (cpus, gpus) in enumerate(sizes)]


def only_layout(trials: Sequence[Trial], capacity: Sequence[NodeCapacity]) -> Layout:
    [layout] = layouts(trials, capacity).values()
    return layout


def test_trials_on_one_node_use_its_first_ranks() -> None:
    node_ids = ["a"] * 8
    assert [members(node_ids, size) for size in (1, 2, 4, 8)] == [[0], [0, 1], [0, 1, 2, 3], list(range(8))]


def test_trials_on_two_nodes_use_both_equally() -> None:
    node_ids = ["a"] * 4 + ["b"] * 4
    assert [members(node_ids, size) for size in (2, 4, 8)] == [[0, 4], [0, 1, 4, 5], list(range(8))]


def test_members_depend_on_nodes_rather_than_on_the_order_of_ranks() -> None:
    node_ids = ["b", "a", "b", "a"]
    assert ranks_by_node(node_ids) == [[0, 2], [1, 3]]
    assert members(node_ids, 2) == [0, 1]
    assert members(["b", "b", "a", "a"], 2) == [0, 2]


@given(st.data())
def test_smaller_trials_are_nested_in_larger_ones(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 3))
    per_node = data.draw(st.integers(1, 8))
    node_ids = data.draw(st.permutations([str(node) for node in range(nodes) for _ in range(per_node)]))
    small, large = sorted(data.draw(st.lists(st.integers(1, per_node), min_size=2, max_size=2)))
    inner, outer = members(node_ids, nodes * small), members(node_ids, nodes * large)
    assert set(inner) <= set(outer)
    for ranks, count in ((inner, small), (outer, large)):
        assert len(set(ranks)) == len(ranks)
        assert [[node_ids[rank] for rank in ranks].count(str(node)) for node in range(nodes)] == [count] * nodes


def test_a_layout_is_as_large_as_its_largest_trial() -> None:
    trials = [Trial(world_size=size, batch_per_gpu=batch) for size in (4, 1, 2) for batch in (8, 16)]
    layout = only_layout(trials, cluster((8, 0)))
    assert layout.kind == ProcessKind("cpu", 1, 1, False, "auto", False)
    assert (layout.node_ids, layout.world_sizes) == (("a",) * 4, (1, 2, 4))


def test_a_group_imports_only_the_modules_that_its_trials_need() -> None:
    text = Trial(model="mlstm64", dataset="text_sample")
    folder = {"dataset": "image_folder", "data_dir": "/d", "storage": "lmdb", "loader_workers": 2}
    workload = Trial(workload="w.py:w", loader_workers=1)
    always = ("trainables.step.parallel", "trainables.step.precision")
    assert imports([text]) == (("trainables.data.text", "trainables.models.mlstm", *always), None)
    loaders = ("trainables.data.images.decode", "trainables.data.images.folder", "trainables.data.images.lmdb_file")
    images = Trial(model="resnet18", **folder)
    models = ("trainables.models.mlstm", "trainables.models.resnet")
    assert imports([text, images]) == ((*loaders, "trainables.data.text", *models, *always), loaders)
    assert imports([workload]) == (always, ())


def test_layouts_of_a_study_use_the_same_nodes() -> None:
    trials = [
        Trial(world_size=2, nodes=2, deterministic=deterministic, cpus_per_rank=cpus)
        for deterministic in (True, False)
        for cpus in (1, 2)
    ]
    nodes = cluster((1, 0), (4, 0), (4, 0), (4, 0))
    by_kind = layouts(trials, nodes)
    assert len(by_kind) == 4
    assert by_kind[ProcessKind("cpu", 2, 2, True, "auto", False)].node_ids == ("b", "c")
    assert by_kind[ProcessKind("cpu", 2, 1, True, "auto", False)].node_ids == ("a", "b")
    assert layouts(reversed(trials), nodes) == by_kind


def test_only_gpu_trials_require_gpus() -> None:
    capacity = cluster((64, 0), (64, 4))
    assert only_layout([Trial(device="cuda", world_size=4)], capacity).node_ids == ("b",) * 4
    assert only_layout([Trial(device="cpu", world_size=4)], capacity).node_ids == ("a",) * 4


def test_every_node_gets_the_same_number_of_ranks() -> None:
    layout = only_layout([Trial(device="cuda", world_size=8, nodes=2)], cluster((16, 4), (16, 4)))
    assert layout.node_ids == ("a",) * 4 + ("b",) * 4


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        (Trial(world_size=3), "1 nodes with 3 ranks of 1 CPUs each are needed; 0 fit"),
        (Trial(world_size=1, cpus_per_rank=3), "1 nodes with 1 ranks of 3 CPUs each are needed; 0 fit"),
        (Trial(world_size=3, nodes=3), "3 nodes with 1 ranks of 1 CPUs each are needed; 2 fit"),
        (Trial(device="cuda", world_size=2), "1 nodes with 2 ranks of 1 CPUs each are needed; 0 fit"),
        (Trial(device="cuda", world_size=2, nodes=2), "2 nodes with 1 ranks of 1 CPUs each are needed; 1 fit"),
    ],
)
def test_trials_that_do_not_fit_are_refused(trial: Trial, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}$"):
        layouts([trial], cluster((2, 1), (2, 0)))


@pytest.mark.parametrize(
    ("trial", "variables"),
    [
        (Trial(), {}),
        (Trial(deterministic=True), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        (Trial(device="cuda", interconnect="no_p2p"), {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}),
        (
            Trial(device="cuda", interconnect="socket"),
            {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
        ),
        (
            Trial(device="cuda", interconnect="no_p2p", deterministic=True),
            {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"},
        ),
    ],
)
def test_rank_processes_get_the_environment_variables_that_trials_need(trial: Trial, variables: dict[str, str]) -> None:
    assert ProcessKind.of(trial).environment() == variables


@pytest.mark.parametrize("changes", [{"interconnect": "socket"}, {"profile_ranks": "0"}, {"deterministic": True}])
def test_trials_with_lasting_effects_on_a_process_need_their_own_group(changes: dict[str, Any]) -> None:
    plain = Trial(device="cuda")
    kinds = {ProcessKind.of(trial) for trial in (plain, plain.but(**changes), plain.but(batch_per_gpu=2, steps=3))}
    assert len(kinds) == 2


def test_trials_that_profile_other_ranks_share_a_group() -> None:
    assert ProcessKind.of(Trial(profile_ranks="0")) == ProcessKind.of(Trial(profile_ranks="all"))
