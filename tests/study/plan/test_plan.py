"""The plan: each combination once, what fits, what was run, in which order, for how long."""

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.capacity import NodeCapacity, default_cpus_per_rank
from study.plan.estimate import blocks, estimate
from study.plan.trials import PlanError, fit, plan_trials, pruned_by
from study.studies.study import Study
from trainables.trial import Trial

HOST = [NodeCapacity("a", "10.0.0.1", cpus=8, gpus=2)]
TWO_HOSTS = [NodeCapacity("a", "10.0.0.1", cpus=16, gpus=4), NodeCapacity("b", "10.0.0.2", cpus=16, gpus=4)]


def study(repeats: int = 1, **axes: tuple[Any, ...]) -> Study:
    base = {"device": "cuda", "model": "mlp", "world_size": 1}
    kept = {name: value for name, value in base.items() if name not in axes}
    return Study(name="test", question="Does it?", base=kept, axes=axes or {"world_size": (1,)}, repeats=repeats)


# --------------------------------------------------------------------------------------------------- combinations


@given(
    st.sets(st.sampled_from([1, 2, 3, 4, 8]), min_size=1),
    st.sets(st.integers(1, 64), min_size=1, max_size=4),
    st.sets(st.sampled_from(["fp32", "tf32", "bf16"]), min_size=1),
    st.integers(1, 4),
)
def test_every_combination_is_planned_exactly_once(
    worlds: set[int], batches: set[int], precisions: set[str], repeats: int
) -> None:
    asked = study(repeats, world_size=tuple(worlds), batch_per_gpu=tuple(batches), precision=tuple(precisions))
    rows = plan_trials(asked, HOST)
    seen = Counter(
        (r.fields["world_size"], r.fields["batch_per_gpu"], r.fields["precision"], r.fields["repeat"]) for r in rows
    )
    assert set(seen.values()) == {1}
    assert len(seen) == len(worlds) * len(batches) * len(precisions) * repeats
    ids = [row.trial.trial_id for row in rows if row.trial]
    assert len(ids) == len(set(ids))


def test_an_impossible_combination_is_skipped_with_the_reason() -> None:
    rows = plan_trials(study(world_size=(1, 2), parallel=("none",)), HOST)
    assert [row.status for row in rows] == ["pending", "skipped"]
    assert rows[1].trial is None
    assert rows[1].reason.startswith("parallel 'none' runs on one rank, but world_size is 2")


def test_a_global_batch_that_does_not_divide_is_skipped() -> None:
    rows = plan_trials(study(global_batch=(6,), world_size=(1, 2, 4, 8)), TWO_HOSTS)
    assert [(row.status, row.reason) for row in rows] == [
        ("pending", ""),
        ("pending", ""),
        ("skipped", "global batch 6 does not divide over world_size 4"),
        ("skipped", "global batch 6 does not divide over world_size 8"),
    ]
    assert [row.trial.batch_per_gpu for row in rows if row.trial] == [6, 3]


def test_a_skip_rule_of_the_study_gives_its_reason() -> None:
    ruled = dataclasses.replace(
        study(precision=("fp32", "bf16")), skip=(lambda f: "not today" if f["precision"] == "bf16" else None,)
    )
    assert [(row.status, row.reason) for row in plan_trials(ruled, HOST)] == [("pending", ""), ("skipped", "not today")]


def test_images_keep_the_size_of_their_data_set_unless_another_is_asked_for() -> None:
    native = plan_trials(study(dataset=("cifar10", "fashion_mnist")), HOST)
    assert [row.trial.image_size for row in native if row.trial] == [32, 28]
    asked = plan_trials(study(dataset=("cifar10",), image_size=(64,)), HOST)
    assert [row.trial.image_size for row in asked if row.trial] == [64]


def test_a_rank_to_profile_may_be_missing_in_smaller_trials_of_a_grid() -> None:
    rows = plan_trials(study(world_size=(1, 2), profile_ranks=("1", "all")), HOST)
    assert [row.status for row in rows] == ["pending"] * 4
    assert [[rank for rank in (0, 1) if row.trial and row.trial.profiles(rank)] for row in rows] == [
        [1],
        [0, 1],
        [1],
        [0, 1],
    ]


def test_a_rank_to_profile_that_no_trial_has_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        plan_trials(study(world_size=(1, 2), profile_ranks=("0", "1+2")), HOST)
    assert str(error.value) == "profile_ranks '1+2': no trial of this plan has a rank 2; ranks of the largest: 0 to 1"


def test_a_grid_too_large_to_mean_it_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        plan_trials(study(1000, batch_per_gpu=tuple(range(1, 102))), HOST)
    assert str(error.value) == "study 'test' with these axes has 101000 trials; allowed: 1 to 100000"


# --------------------------------------------------------------------------------------------------- what fits

GPU = {"device": "cuda", "cpus_per_rank": 4}


@pytest.mark.parametrize(
    ("fields", "capacity", "expected"),
    [
        (GPU | {"world_size": 2}, HOST, (1, None)),
        (GPU | {"world_size": 4}, TWO_HOSTS, (1, None)),
        (GPU | {"world_size": 6}, TWO_HOSTS, (2, None)),
        (GPU | {"world_size": 2, "nodes": 2}, TWO_HOSTS, (2, None)),
        (GPU | {"world_size": 4}, HOST, (1, "needs 4 GPUs on one node; the largest node has 2 GPUs")),
        (GPU | {"world_size": 8, "nodes": 1}, TWO_HOSTS, (1, "needs 8 GPUs on one node; the largest node has 4 GPUs")),
        (GPU | {"world_size": 16}, TWO_HOSTS, (1, "needs 16 GPUs; the 2 nodes have 4 GPUs, 4 GPUs")),
        (
            GPU | {"world_size": 10, "nodes": 2},
            TWO_HOSTS,
            (2, "needs 5 GPUs on each of 2 nodes; the nodes have 4 GPUs, 4 GPUs"),
        ),
        (GPU | {"world_size": 3, "nodes": 3}, TWO_HOSTS, (3, "needs 3 nodes; there are 2")),
        (
            GPU | {"world_size": 5},
            TWO_HOSTS,
            (1, "needs 5 GPUs, equally many on each node that takes part; the nodes have 4 GPUs, 4 GPUs"),
        ),
        (
            {"device": "cuda", "cpus_per_rank": 8, "world_size": 2},
            HOST,
            (1, "needs 8 CPU cores for each of 2 GPUs; the nodes have 8 CPU cores"),
        ),
        (
            {"device": "cpu", "cpus_per_rank": 2, "world_size": 5},
            HOST,
            (1, "needs 10 CPU cores for 5 ranks on one node; the largest node has 8 CPU cores"),
        ),
    ],
)
def test_a_trial_fits_or_the_reason_names_need_and_supply(
    fields: dict[str, Any], capacity: list[NodeCapacity], expected: tuple[int, str | None]
) -> None:
    assert fit(fields, capacity) == expected


@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 8)), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from(["cpu", "cuda"]),
    st.one_of(st.none(), st.integers(1, 5)),
    st.integers(1, 5),
)
def test_what_fits_is_on_the_fewest_nodes_that_have_room(
    hosts: list[tuple[int, int]], ranks: int, device: str, asked_nodes: int | None, cores: int
) -> None:
    capacity = [NodeCapacity(str(n), str(n), cpus=cpus, gpus=gpus) for n, (cpus, gpus) in enumerate(hosts)]
    fields: dict[str, Any] = {"device": device, "world_size": ranks, "cpus_per_rank": cores}
    if asked_nodes:
        fields["nodes"] = asked_nodes

    def has_room(nodes: int) -> bool:
        if ranks % nodes:
            return False
        each = ranks // nodes
        fitting = [n for n in capacity if n.cpus >= each * cores and (device == "cpu" or n.gpus >= each)]
        return len(fitting) >= nodes

    possible = [nodes for nodes in ([asked_nodes] if asked_nodes else range(1, ranks + 1)) if has_room(nodes)]
    nodes, reason = fit(fields, capacity)
    if possible:
        assert (nodes, reason) == (possible[0], None)
    else:
        assert reason
        assert reason.startswith("needs ")


def test_a_rank_gets_its_gpus_share_of_the_cores_and_a_cpu_rank_one() -> None:
    uneven = [NodeCapacity("a", "", cpus=64, gpus=4), NodeCapacity("b", "", cpus=48, gpus=8)]
    assert default_cpus_per_rank("cuda", uneven) == 6
    assert default_cpus_per_rank("cpu", uneven) == 1
    assert default_cpus_per_rank("cuda", [NodeCapacity("a", "", cpus=2, gpus=4)]) == 1


def test_a_row_that_does_not_fit_is_infeasible_and_the_others_stay() -> None:
    rows = plan_trials(study(world_size=(1, 2, 4)), HOST)
    assert [row.status for row in rows] == ["pending", "pending", "infeasible"]
    assert rows[2].trial is not None


# --------------------------------------------------------------------------------------------------- earlier results


def test_settled_trials_stay_and_failed_ones_run_again() -> None:
    asked = study(batch_per_gpu=(8, 16, 32, 64, 128))
    ids = [row.trial.trial_id for row in plan_trials(asked, HOST) if row.trial]
    statuses = dict(zip(ids, ["done", "failed", "timeout", "out_of_memory", "infeasible"], strict=True))
    rows = plan_trials(asked, HOST, statuses)
    assert [(row.status, row.reason) for row in rows] == [
        ("done", ""),
        ("pending", "ended as failed before; runs again"),
        ("pending", "ended as timeout before; runs again"),
        ("out_of_memory", ""),
        ("pending", ""),
    ]


def test_a_larger_batch_of_a_row_that_ran_out_of_memory_is_pruned() -> None:
    asked = study(2, batch_per_gpu=(8, 16, 32), precision=("fp32", "bf16"))
    exhausted = Trial(device="cuda", model="mlp", batch_per_gpu=16, precision="fp32", cpus_per_rank=4)
    rows = plan_trials(asked, HOST, {exhausted.trial_id: "out_of_memory"}, [exhausted])
    found = {(r.fields["precision"], r.fields["batch_per_gpu"], r.fields["repeat"]): r.status for r in rows}
    assert {status for key, status in found.items() if key[0] == "bf16"} == {"pending"}
    assert {key[1:]: status for key, status in found.items() if key[0] == "fp32"} == {
        (8, 0): "pending",
        (8, 1): "pending",
        (16, 0): "out_of_memory",
        (16, 1): "pruned",
        (32, 0): "pruned",
        (32, 1): "pruned",
    }
    assert {row.reason for row in rows if row.status == "pruned"} == {"batch_per_gpu 16 of this row ran out of memory"}


@pytest.mark.parametrize(
    ("changes", "pruned"),
    [
        ({}, True),
        ({"repeat": 3}, True),
        ({"batch_per_gpu": 65}, True),
        ({"batch_per_gpu": 63}, False),
        ({"batch_per_gpu": 128, "precision": "bf16"}, False),
        ({"batch_per_gpu": 128, "world_size": 2}, False),
        ({"batch_per_gpu": 128, "seed": 1}, True),
    ],
)
def test_pruning_keeps_to_the_row(changes: dict[str, Any], pruned: bool) -> None:
    exhausted = Trial(batch_per_gpu=64, device="cuda")
    assert (pruned_by(exhausted.but(**changes), [exhausted]) is not None) is pruned


# --------------------------------------------------------------------------------------------------- order


@given(st.integers(1, 6), st.integers(0, 1000), st.sets(st.sampled_from([1, 2, 4, 8]), min_size=1))
def test_blocks_hold_every_trial_once_and_keep_layouts_and_repeats_together(
    repeats: int, seed: int, worlds: set[int]
) -> None:
    rows = plan_trials(study(repeats, world_size=tuple(worlds), batch_per_gpu=(4, 8, 16)), TWO_HOSTS)
    trials = [row.trial for row in rows if row.trial]
    ordered = blocks(trials, repeats, seed)
    assert sorted(t.trial_id for block in ordered for t in block) == sorted(t.trial_id for t in trials)
    assert len(ordered) == min(2, repeats)
    for block in ordered:
        runs = [(t.nodes, t.repeat) for t in block]
        changes = [run for number, run in enumerate(runs) if number == 0 or run != runs[number - 1]]
        assert len(changes) == len(set(runs)), "a layout's repeat is one stretch"
        layouts = [nodes for nodes, _ in changes]
        assert sum(a != b for a, b in itertools.pairwise(layouts)) == len(set(layouts)) - 1
    if repeats > 1:
        assert {t.repeat for t in ordered[0]} == set(range((repeats + 1) // 2))


def test_the_order_is_random_yet_the_same_for_the_same_seed() -> None:
    trials = [r.trial for r in plan_trials(study(2, batch_per_gpu=tuple(range(1, 21))), HOST) if r.trial]
    assert blocks(trials, 2, seed=7) == blocks(trials, 2, seed=7)
    assert blocks(trials, 2, seed=7) != blocks(trials, 2, seed=8)
    first, second = blocks(trials, 2, seed=7)
    assert [t.batch_per_gpu for t in first] != sorted(t.batch_per_gpu for t in first)
    assert [t.batch_per_gpu for t in first] != [t.batch_per_gpu for t in second]


def test_trials_that_share_no_processes_do_not_alternate() -> None:
    asked = study(2, interconnect=("auto", "no_p2p", "socket"), batch_per_gpu=(4, 8, 16))
    for block in blocks([row.trial for row in plan_trials(asked, HOST) if row.trial], 2, seed=0):
        assert len([kind for kind, _ in itertools.groupby(trial.interconnect for trial in block)]) == 3


def test_nothing_left_to_run_needs_no_blocks() -> None:
    assert blocks([], 3, seed=0) == []


# --------------------------------------------------------------------------------------------------- time and money


def record(trial: Trial, duration_s: float, status: str = "done") -> dict[str, Any]:
    return {"trial_id": trial.trial_id, "trial": trial.model_dump(), "status": status, "duration_s": duration_s}


def test_time_is_unknown_where_nothing_alike_was_recorded() -> None:
    rows = plan_trials(study(world_size=(1,)), HOST)
    found = estimate(rows, [record(Trial(model="resnet50"), 9.0)], price_per_gpu_hour=2.0)
    assert (found.duration_s, found.gpu_hours, found.cost) == (None, None, None)


def test_time_comes_from_repeats_and_gpu_hours_count_what_the_group_holds() -> None:
    asked = study(3, world_size=(1, 2))
    first = plan_trials(asked, HOST)
    done = [row.trial for row in first if row.trial and row.trial.repeat == 0]
    records = [record(done[0], 100.0), record(done[1], 140.0)]
    rows = plan_trials(asked, HOST, {t.trial_id: "done" for t in done})
    found = estimate(rows, records, price_per_gpu_hour=3.0)
    assert found.duration_s == 2 * 100 + 2 * 140
    assert found.gpu_hours == pytest.approx(480 * 2 / 3600)  # a group of two GPUs serves the one-GPU trials too
    assert found.cost == pytest.approx(480 * 2 / 3600 * 3.0)
    assert found.basis == "2 recorded trials; the start of worker groups is not in it"


def test_time_from_another_batch_is_said_to_be() -> None:
    asked = study(batch_per_gpu=(8, 16))
    done = next(row.trial for row in plan_trials(asked, HOST) if row.trial)
    rows = plan_trials(asked, HOST, {done.trial_id: "done"})
    found = estimate(rows, [record(done, 30.0)], None)
    assert found.duration_s == 30.0
    assert found.cost is None
    assert found.basis.startswith("1 of 1 from trials of another batch, loader workers or precision; 1 recorded trial")


def test_failed_trials_say_nothing_about_time() -> None:
    rows = plan_trials(study(2, world_size=(1,)), HOST)
    assert rows[0].trial
    assert estimate(rows, [record(rows[0].trial, 1.0, "failed")], None).duration_s is None
