"""Planning: combinations, placement on nodes, earlier results, order, and estimates of time and cost."""

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.capacity import NodeCapacity, default_cpus_per_rank
from study.plan.duration import AFTER_S, BEFORE_S, RENEWAL_S, START_S, step_s, trial_s
from study.plan.estimate import blocks, estimate, group_of, opening_groups
from study.plan.trials import PlanError, fit, plan_trials, pruned_by
from study.studies.study import Study
from trainables.trial import Trial

AROUND_S = BEFORE_S + AFTER_S
HOST = [NodeCapacity("a", "10.0.0.1", cpus=8, gpus=2)]
TWO_HOSTS = [NodeCapacity("a", "10.0.0.1", cpus=16, gpus=4), NodeCapacity("b", "10.0.0.2", cpus=16, gpus=4)]


def study(repeats: int = 1, **axes: tuple[Any, ...]) -> Study:
    base = {"device": "cuda", "model": "mlp", "world_size": 1}
    fixed = {name: value for name, value in base.items() if name not in axes}
    return Study(name="test", question="Does it?", base=fixed, axes=axes or {"world_size": (1,)}, repeats=repeats)


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
    grid = study(repeats, world_size=tuple(worlds), batch_per_gpu=tuple(batches), precision=tuple(precisions))
    rows = plan_trials(grid, HOST)
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
    assert "parallel 'none'" in rows[1].reason and "world_size is 2" in rows[1].reason


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
    with_rule = dataclasses.replace(
        study(precision=("fp32", "bf16")), skip=(lambda f: "not today" if f["precision"] == "bf16" else None,)
    )
    assert [(row.status, row.reason) for row in plan_trials(with_rule, HOST)] == [
        ("pending", ""),
        ("skipped", "not today"),
    ]


def test_images_have_the_size_of_their_data_set_unless_image_size_is_set() -> None:
    native = plan_trials(study(dataset=("cifar10", "fashion_mnist")), HOST)
    assert [row.trial.image_size for row in native if row.trial] == [32, 28]
    resized = plan_trials(study(dataset=("cifar10",), image_size=(64,)), HOST)
    assert [row.trial.image_size for row in resized if row.trial] == [64]


def test_smaller_trials_of_a_grid_may_lack_the_rank_to_profile() -> None:
    rows = plan_trials(study(world_size=(1, 2), profile_ranks=("1", "all")), HOST)
    assert [row.status for row in rows] == ["pending"] * 4
    assert [[rank for rank in (0, 1) if row.trial and row.trial.profiles(rank)] for row in rows] == [
        [1],
        [0, 1],
        [1],
        [0, 1],
    ]


def test_a_rank_to_profile_that_no_trial_has_is_an_error() -> None:
    with pytest.raises(PlanError) as error:
        plan_trials(study(world_size=(1, 2), profile_ranks=("0", "1+2")), HOST)
    assert "profile_ranks '1+2'" in str(error.value)
    assert "rank 2" in str(error.value) and "0 to 1" in str(error.value)


def test_a_grid_of_too_many_trials_is_an_error() -> None:
    with pytest.raises(PlanError) as error:
        plan_trials(study(1000, batch_per_gpu=tuple(range(1, 102))), HOST)
    assert "101000 trials" in str(error.value) and "1 to 100000" in str(error.value)


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
            (1, "needs 5 GPUs, the same number on each node used; the nodes have 4 GPUs, 4 GPUs"),
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
def test_a_trial_fits_or_the_reason_states_demand_and_supply(
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
def test_a_trial_uses_the_fewest_nodes_that_fit(
    hosts: list[tuple[int, int]], ranks: int, device: str, requested: int | None, cores: int
) -> None:
    capacity = [NodeCapacity(str(n), str(n), cpus=cpus, gpus=gpus) for n, (cpus, gpus) in enumerate(hosts)]
    fields: dict[str, Any] = {"device": device, "world_size": ranks, "cpus_per_rank": cores}
    if requested:
        fields["nodes"] = requested

    def fits_on(nodes: int) -> bool:
        if ranks % nodes:
            return False
        per_node = ranks // nodes
        fitting = [n for n in capacity if n.cpus >= per_node * cores and (device == "cpu" or n.gpus >= per_node)]
        return len(fitting) >= nodes

    possible = [nodes for nodes in ([requested] if requested else range(1, ranks + 1)) if fits_on(nodes)]
    nodes, reason = fit(fields, capacity)
    if possible:
        assert (nodes, reason) == (possible[0], None)
    else:
        assert reason
        assert reason.startswith("needs ")


def test_a_gpu_rank_gets_its_share_of_cores_and_a_cpu_rank_gets_one() -> None:
    uneven = [NodeCapacity("a", "", cpus=64, gpus=4), NodeCapacity("b", "", cpus=48, gpus=8)]
    assert default_cpus_per_rank("cuda", uneven) == 6
    assert default_cpus_per_rank("cpu", uneven) == 1
    assert default_cpus_per_rank("cuda", [NodeCapacity("a", "", cpus=2, gpus=4)]) == 1


def test_only_the_trial_that_does_not_fit_is_infeasible() -> None:
    rows = plan_trials(study(world_size=(1, 2, 4)), HOST)
    assert [row.status for row in rows] == ["pending", "pending", "infeasible"]
    assert rows[2].trial is not None


# --------------------------------------------------------------------------------------------------- earlier results


def test_final_results_stay_and_failed_trials_run_again() -> None:
    grid = study(batch_per_gpu=(8, 16, 32, 64, 128))
    ids = [row.trial.trial_id for row in plan_trials(grid, HOST) if row.trial]
    statuses = dict(zip(ids, ["done", "failed", "timeout", "out_of_memory", "infeasible"], strict=True))
    rows = plan_trials(grid, HOST, statuses)
    assert [row.status for row in rows] == ["done", "pending", "pending", "out_of_memory", "pending"]
    assert "failed" in rows[1].reason and "timeout" in rows[2].reason
    assert [rows[number].reason for number in (0, 3, 4)] == ["", "", ""]


def test_the_same_and_larger_batches_are_pruned_after_one_ran_out_of_memory() -> None:
    grid = study(2, batch_per_gpu=(8, 16, 32), precision=("fp32", "bf16"))
    exhausted = Trial(device="cuda", model="mlp", batch_per_gpu=16, precision="fp32", cpus_per_rank=4)
    rows = plan_trials(grid, HOST, {exhausted.trial_id: "out_of_memory"}, [exhausted])
    statuses = {(r.fields["precision"], r.fields["batch_per_gpu"], r.fields["repeat"]): r.status for r in rows}
    assert {status for key, status in statuses.items() if key[0] == "bf16"} == {"pending"}
    assert {key[1:]: status for key, status in statuses.items() if key[0] == "fp32"} == {
        (8, 0): "pending",
        (8, 1): "pending",
        (16, 0): "out_of_memory",
        (16, 1): "pruned",
        (32, 0): "pruned",
        (32, 1): "pruned",
    }
    assert all("batch_per_gpu 16" in row.reason for row in rows if row.status == "pruned")


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
def test_pruning_affects_only_trials_that_differ_in_batch_repeat_or_seed(changes: dict[str, Any], pruned: bool) -> None:
    exhausted = Trial(batch_per_gpu=64, device="cuda")
    assert (pruned_by(exhausted.but(**changes), [exhausted]) is not None) is pruned


# --------------------------------------------------------------------------------------------------- order


@given(st.integers(1, 6), st.integers(0, 1000), st.sets(st.sampled_from([1, 2, 4, 8]), min_size=1))
def test_a_block_has_every_trial_of_one_repeat_and_keeps_layouts_together(
    repeats: int, seed: int, worlds: set[int]
) -> None:
    rows = plan_trials(study(repeats, world_size=tuple(worlds), batch_per_gpu=(4, 8, 16)), TWO_HOSTS)
    trials = [row.trial for row in rows if row.trial]
    ordered = blocks(trials, seed)
    assert sorted(t.trial_id for block in ordered for t in block) == sorted(t.trial_id for t in trials)
    assert [{t.repeat for t in block} for block in ordered] == [{repeat} for repeat in range(repeats)]
    for block in ordered:
        layouts = [nodes for nodes, _ in itertools.groupby(trial.nodes for trial in block)]
        assert len(layouts) == len(set(layouts))


def test_the_order_is_random_but_reproducible_and_differs_between_repeats() -> None:
    trials = [r.trial for r in plan_trials(study(2, batch_per_gpu=tuple(range(1, 21))), HOST) if r.trial]
    assert blocks(trials, seed=7) == blocks(trials, seed=7)
    assert blocks(trials, seed=7) != blocks(trials, seed=8)
    first, second = blocks(trials, seed=7)
    assert [t.batch_per_gpu for t in first] != sorted(t.batch_per_gpu for t in first)
    assert [t.batch_per_gpu for t in first] != [t.batch_per_gpu for t in second]


def test_trials_of_different_process_kinds_do_not_alternate() -> None:
    grid = study(2, interconnect=("auto", "no_p2p", "socket"), batch_per_gpu=(4, 8, 16))
    for block in blocks([row.trial for row in plan_trials(grid, HOST) if row.trial], seed=0):
        assert len([kind for kind, _ in itertools.groupby(trial.interconnect for trial in block)]) == 3


def test_kinds_that_share_ranks_are_neighbours_and_every_second_block_is_in_reverse() -> None:
    grid = study(3, interconnect=("auto", "socket"), cpus_per_rank=(1, 2), batch_per_gpu=(4, 8))
    orders = []
    for block in blocks([row.trial for row in plan_trials(grid, HOST) if row.trial], seed=0):
        kinds = [(trial.cpus_per_rank, trial.interconnect) for trial in block]
        orders.append([kind for kind, _ in itertools.groupby(kinds)])
    assert [len(order) for order in orders] == [4, 4, 4]
    assert len([cpus for cpus, _ in itertools.groupby(cpus for cpus, _ in orders[0])]) == 2
    assert orders[1] == orders[0][::-1]
    assert orders[2] == orders[0]


def test_groups_that_differ_only_in_variables_share_a_launch() -> None:
    groups = [
        group_of(Trial(device="cuda", interconnect=interconnect, cpus_per_rank=cpus, repeat=repeat))
        for repeat, cpus, interconnect in [(0, 1, "auto"), (0, 1, "socket"), (0, 2, "auto"), (1, 2, "auto")]
    ]
    own = [own_launch for _, own_launch in opening_groups(groups)]
    assert own == [True, False, True, False]
    assert [own_launch for _, own_launch in opening_groups(groups[1:], groups[1])] == [True, False]


def test_no_trials_give_no_blocks() -> None:
    assert blocks([], seed=0) == []


# --------------------------------------------------------------------------------------------------- time and money


def record(trial: Trial, duration_s: float, status: str = "done") -> dict[str, Any]:
    return {"trial_id": trial.trial_id, "trial": trial.model_dump(), "status": status, "duration_s": duration_s}


def test_without_records_the_time_is_modelled_from_operations_and_includes_starts_of_worker_groups() -> None:
    grid = study(3, world_size=(1, 2), model=("resnet50",), batch_per_gpu=(64,), dataset=("synthetic",))
    rows = plan_trials(grid.with_overrides({"image_size": (224,), "precision": ("bf16",)}), HOST)
    estimated = estimate(rows, [], price_per_gpu_hour=2.0)
    modelled_s = sum(trial_s(row.trial) for row in rows if row.trial)
    starts_s = START_S["cuda"] + 2 * RENEWAL_S["cuda"]
    assert estimated.duration_s == pytest.approx(modelled_s + starts_s + AROUND_S)
    assert estimated.cost == pytest.approx(2.0 * (modelled_s + starts_s) * 2 / 3600)
    assert "estimate" in estimated.basis


def test_an_estimate_is_the_sum_of_its_parts_and_cpu_ranks_have_no_cost() -> None:
    grid = study(2, world_size=(1, 2))
    estimated = estimate(plan_trials(grid, HOST), [], 2.0)
    expected = estimated.expected
    assert len(expected.trials_s) == 4
    parts_s = sum(expected.trials_s.values()) + expected.start_s + expected.renewal_s + BEFORE_S + expected.end_s
    assert estimated.duration_s == pytest.approx(parts_s)
    on_cpus = estimate(plan_trials(grid.with_overrides({"device": ("cpu",)}), HOST), [], 2.0)
    assert (on_cpus.gpu_hours, on_cpus.cost) == (0.0, None)


def test_the_step_of_a_workload_is_assumed_and_the_estimate_says_so() -> None:
    grid = study(workload=("mine.py:build",))
    [trial] = [row.trial for row in plan_trials(grid, HOST) if row.trial]
    assert step_s(trial) == step_s(trial.but(batch_per_gpu=512))
    assert "assuming steps of 0.1 s of your own code" in estimate(plan_trials(grid, HOST), [], None).basis


def test_records_of_other_trials_scale_the_model() -> None:
    rows = plan_trials(study(batch_per_gpu=(8,)), HOST)
    [trial] = [row.trial for row in rows if row.trial]
    other = trial.but(model="resnet50")
    estimated = estimate(rows, [record(other, 3 * trial_s(other))], None)
    assert estimated.duration_s - START_S["cuda"] - AROUND_S == pytest.approx(3 * trial_s(trial))
    assert "1 of 1 estimated from operations" in estimated.basis


def test_recorded_starts_of_worker_groups_replace_the_typical_ones() -> None:
    grid = study(2)
    first = next(row.trial for row in plan_trials(grid, HOST) if row.trial)
    rows = plan_trials(grid, HOST, {first.trial_id: "done"})
    started = record(first, 5.0) | {"environment": {"group": {"asked_at": 100.0, "opened_at": 107.0}}}
    assert estimate(rows, [started], None).duration_s == pytest.approx(5.0 + 7.0 + AROUND_S)


def test_starts_of_first_and_of_further_worker_groups_are_estimated_apart() -> None:
    rows = plan_trials(study(3), HOST)
    trials = [row.trial for row in rows if row.trial]
    starts = [(100.0, 117.0), (200.0, 202.0), (300.0, 302.0)]
    records = [
        record(trial, 5.0)
        | {"worker_group": f"launch-{number}", "environment": {"group": {"asked_at": asked, "opened_at": opened}}}
        for number, (trial, (asked, opened)) in enumerate(zip(trials, starts, strict=True), start=1)
    ]
    assert estimate(rows, records, None).duration_s == pytest.approx(3 * 5.0 + 17.0 + 2 * 2.0 + AROUND_S)


def test_time_comes_from_repeats_and_gpu_hours_count_all_gpus_of_the_group() -> None:
    grid = study(3, world_size=(1, 2))
    first = plan_trials(grid, HOST)
    done = [row.trial for row in first if row.trial and row.trial.repeat == 0]
    records = [record(done[0], 100.0), record(done[1], 140.0)]
    rows = plan_trials(grid, HOST, {t.trial_id: "done" for t in done})
    estimated = estimate(rows, records, price_per_gpu_hour=3.0)
    starts_s = START_S["cuda"] + RENEWAL_S["cuda"]
    assert estimated.duration_s == 2 * 100 + 2 * 140 + starts_s + AROUND_S
    gpu_s = (480 + starts_s) * 2  # one-GPU trials also use the group of two GPUs
    assert estimated.gpu_hours == pytest.approx(gpu_s / 3600)
    assert estimated.cost == pytest.approx(gpu_s / 3600 * 3.0)
    assert estimated.basis == "2 recorded trials"


def test_an_estimate_from_another_batch_says_so() -> None:
    grid = study(batch_per_gpu=(8, 16))
    done = next(row.trial for row in plan_trials(grid, HOST) if row.trial)
    rows = plan_trials(grid, HOST, {done.trial_id: "done"})
    estimated = estimate(rows, [record(done, 30.0)], None)
    assert estimated.duration_s == 30.0 + START_S["cuda"] + AROUND_S
    assert estimated.cost is None
    assert "1 of 1 " in estimated.basis and "another batch" in estimated.basis
    assert estimated.basis.startswith("1 recorded trial;")


def test_failed_trials_and_negative_durations_are_not_used_for_estimates() -> None:
    rows = plan_trials(study(2, world_size=(1,)), HOST)
    assert rows[0].trial
    clock_set_back = record(rows[0].trial, 5.0) | {"environment": {"group": {"asked_at": 7200.0, "opened_at": 1.0}}}
    assert estimate(rows, [clock_set_back], None) == estimate(rows, [record(rows[0].trial, 5.0)], None)
    assert estimate(rows, [record(rows[0].trial, -7198.0)], None) == estimate(rows, [], None)
    failed = estimate(rows, [record(rows[0].trial, 1000.0, "failed")], None)
    assert failed.duration_s == estimate(rows, [], None).duration_s
