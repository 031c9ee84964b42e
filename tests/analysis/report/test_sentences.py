"""Sentences of the report: what they may claim, and that they agree with the card."""

import re
from dataclasses import replace

import pandas as pd
import pytest

from analysis.compare.bottleneck import WORDS, gain_rows, removable
from analysis.compare.causes import SLOWDOWN_PARTS, visible_causes
from analysis.figures.answers import lost_rows
from analysis.predict.inputs import ReportInputs
from analysis.report.answer_tables import MOST_ROWS, changes, fastest, outlook, scales, shortened, workloads
from analysis.report.answer_tables import holds_back as held_back
from analysis.report.sentences import actions, change, holds_back, largest_cause, more, scale
from analysis.tables.accuracy import lossless_batch
from analysis.text import lost_decimals, part_of
from analysis.verdict.bottleneck import bounds, host_bound
from analysis.verdict.card import card_of
from analysis.verdict.facts import facts_line
from analysis.verdict.lines.step import do_next
from analysis.verdict.lines.subject import subject_of
from analysis.verdict.next_steps import best
from scripts.claims.sources import committed_inputs

pytestmark = pytest.mark.xdist_group("committed studies")


def study_named(name: str) -> ReportInputs:
    """Return a committed study, in its main environment."""
    return committed_inputs(name)[0]


def lost(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(SLOWDOWN_PARTS, 0.0) | seconds


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (lost(transfer_s=0.15, remainder_s=0.001), "mainly to exposed transfer (0.150)"),
        (lost(transfer_s=0.15, remainder_s=0.05), "mainly to exposed transfer (0.150); 0.050 unexplained"),
        (
            lost(wait_s=0.05, remainder_s=0.15),
            "0.150 of it unexplained; the largest measured cause is waiting for the slowest rank (0.050)",
        ),
        (lost(transfer_s=0.001, remainder_s=0.2), "without a measured cause that matters"),
    ],
)
def test_the_largest_cause_is_called_the_most_only_if_it_is(parts: dict[str, float], expected: str) -> None:
    assert largest_cause(parts, sum(parts.values())) == expected


def test_some_of_several_agree_with_their_verb() -> None:
    assert [part_of(count, 8, "intervals") for count in (1, 3)] == ["1 of 8 intervals is", "3 of 8 intervals are"]


def test_no_cause_is_named_if_measured_causes_exceed_what_is_lost_by_more_than_that() -> None:
    lost = {"slower_compute_s": 0.146, "wait_s": 0.139, "remainder_s": -0.214}
    assert largest_cause(lost, 0.071).startswith("but measured causes add up to more, 0.285")


def test_a_cause_larger_than_the_loss_is_not_a_part_of_it() -> None:
    assert largest_cause(lost(wait_s=0.285, slower_compute_s=-0.115, remainder_s=0.039), 0.209) == (
        "mainly to waiting for the slowest rank (0.285), less what other parts gain"
    )
    sentence = next(sentence for sentence in holds_back(study_named("inception")) if "lost" in sentence)
    assert "lost (not significantly different from 0)" in sentence


def test_card_figure_and_table_show_the_same_parts_to_the_last_digit() -> None:
    for name in ("communication", "captured"):
        study = study_named(name)
        shown = visible_causes(study.lost_ranks)
        assert sum(shown.values()) == pytest.approx(sum(study.lost_ranks.values()), abs=0.0005)
        of_figure = lost_rows(study).set_index("cause")["lost"].to_dict()
        of_table = held_back(study).frame.set_index("cause")["lost"].to_dict()
        assert {name: value for name, value in of_figure.items() if value} == pytest.approx(of_table)
        line = card_of(study).line("lost")
        assert line is not None
        for cause, words in (("transfer_s", "exposed transfer"), ("wait_s", "slowest rank")):
            assert f"{shown[cause]:.{lost_decimals(sum(shown.values()))}f} {words}" in line.text
        assert of_figure["exposed transfer"] == shown["transfer_s"]


def test_a_gain_that_the_cards_configuration_already_has_is_no_advice() -> None:
    used = study_named("default-4gpu")
    assert used.headline_row["precision"] == "bf16"
    assert change(used)[0].startswith("Measured, and already used: bf16 instead of fp32")
    assert change(used)[-1].startswith("Measure communication")
    assert change(study_named("gpt2-scaling"))[0].startswith("Measured, and already used: accumulation steps 2 ")


def test_advice_for_one_of_several_workloads_was_measured_with_it() -> None:
    study = study_named("everything")
    assert set(study.gains["configuration"].map(study.configurations["model"])) == {"mlstm64"}
    sentences = change(study)
    assert sentences[0] == "This is about mlstm64, text_sample, sequence length 16."
    assert not [sentence for sentence in sentences if "Measured" in sentence]


def test_all_but_compute_is_small_only_as_far_as_it_was_measured() -> None:
    assert change(study_named("hpml-lab4-dp"))[-1].startswith("All else that was measured takes less than")
    assert change(study_named("default-resnet50-4gpu"))[-1].startswith("All but compute takes less than")


def test_a_report_says_if_fewer_gpus_train_faster() -> None:
    assert scale(study_named("averaging-4gpu"))[-1] == "2 GPUs train faster than 4 GPUs: 4,683 against 3,910 samples/s."
    assert "faster" not in " ".join(scale(study_named("default-resnet50-4gpu")))


def test_a_strategy_without_breakdown_is_not_told_to_measure_one() -> None:
    assert (
        holds_back(study_named("averaging-4gpu"))[-1]
        == "dp has no communication breakdown: these parts include its communication."
    )


def test_a_host_that_bounds_an_unknown_share_of_the_step_is_described_by_its_launches() -> None:
    sentence = holds_back(study_named("averaging-4gpu"))[0]
    assert re.search(r"bound by the host: launching a step takes all of its .* ms", sentence)


def test_a_gain_that_is_not_significant_is_not_advice() -> None:
    study = study_named("forum-phases")
    first = study.gains[study.gains["is_measured"]].iloc[0]
    assert first["gain"] > 1 > first["gain_low"]
    assert not [sentence for sentence in change(study) if sentence.startswith("Measured:")]


def test_a_long_table_of_changes_says_how_many_it_has() -> None:
    study = replace(study_named("storage-order"))
    study.__dict__["gains"] = pd.concat([study.gains] * 2, ignore_index=True)  # as if there were more of them
    assert len(study.gains) > MOST_ROWS
    assert changes(study).note == f"The first {MOST_ROWS} of {len(study.gains)} rows."


def test_predictions_of_other_configurations_than_the_cards_are_named() -> None:
    study = study_named("gpt2-scaling")
    assert more(study)[0].startswith("No prediction for the card's configuration: ")
    assert "configuration" in [column.header for column in outlook(study).columns]


def test_a_range_without_emulated_interconnects_says_so() -> None:
    assert scale(study_named("captured"))[-1] == "Emulated interconnects are not among them."
    assert "Emulated" not in " ".join(scale(study_named("default-2gpu")))


def test_a_range_of_efficiencies_says_how_many_of_their_intervals_are_wide() -> None:
    weak = next(line for line in scale(study_named("gpt2-scaling")) if "weak" in line)
    assert weak.endswith(" over 2 series; 1 of 2 intervals is wider than ±5\u00a0%.")


def test_a_table_of_workloads_names_unusual_settings_of_the_fastest_of_each() -> None:
    labels = workloads(study_named("everything")).frame["label"].tolist()
    assert len(set(labels)) == len(labels)
    assert [label for label in labels if "compile_graph" in label]


def test_the_same_cause_has_the_same_remedy_in_every_table() -> None:
    study = study_named("storage-order")
    by_part, by_gain = held_back(study).frame.set_index("part")["how"], study.gains.set_index("change")["how"]
    for part in ("host", "load", "transfer"):
        takes = WORDS[part].takes
        assert by_part[takes] == by_gain[f"no {takes}"]
    assert "precision" not in by_part[WORDS["compute"].takes], "it trains in bf16 already"


def test_a_bound_of_a_script_is_one_of_what_is_exposed() -> None:
    study = study_named("doors-2gpu/study")
    slow = int(str(study.regions["wire"].astype(float).idxmax()))
    line = do_next(study, subject_of(study, study.configurations["trial_ids"][slow])[0])
    assert line is not None and "(upper bound of what is exposed)" in line.text
    bounds_of_slow = gain_rows(study.regions, study.changes, study.configurations, slow, ("GPU", "GPUs"))
    assert bounds_of_slow["is_partial"].any()
    first = replace(study)
    vars(first)["headlines"] = [replace(study.headlines[0], configuration=slow)]
    assert "upper bound of what is exposed" in changes(first).frame["evidence"].tolist()
    assert "upper bound of what is exposed" not in changes(study_named("gpt2-scaling")).frame["evidence"].tolist()


def test_wide_differences_in_accuracy_ask_for_more_seeds_and_lower_trust() -> None:
    study = study_named("vgg-case-study")
    assert [line for line in actions(study) if line.startswith("Run more seeds: ")]
    assert "differences in accuracy ±" in card_of(study).trust.reason
    assert not [line for line in actions(study_named("accuracy")) if "seeds" in line]


def test_advice_starts_from_what_the_cards_configuration_uses() -> None:
    gains = study_named("mlstm-executions").gains.set_index("change")
    graph = gains.loc["execution graph"].to_dict()
    assert graph["gain"] > 1.4
    assert not graph["is_used"] and not graph["is_open"], "it gains over eager, the card compiles"
    assert change(study_named("mlstm-executions"))[0].startswith("Measured, and already used: execution compile ")


def test_changes_were_measured_with_the_cards_workload() -> None:
    study = study_named("sharding-4gpu")
    measured = study.gains[study.gains["is_measured"]]
    models = study.configurations.loc[measured["configuration"].astype(int), "workload"]
    assert set(models) == {study.headlines[0].shown["workload"]}


def test_fewer_ranks_that_train_faster_are_the_first_advice() -> None:
    for name, start in (("averaging-4gpu", "use 2 GPUs, which train faster, or "), ("averaging-horovod", "use 1 CPU ")):
        line = card_of(study_named(name)).line("do_next")
        assert line is not None and line.text.startswith(start)


def test_nothing_is_lost_only_as_far_as_the_interval_allows() -> None:
    line = card_of(study_named("default-grid")).line("lost")
    assert line is not None and line.text == "nothing; the interval allows 0.26 GPU"


@pytest.mark.parametrize("name", ["everything", "doors/study", "doors-2gpu/study"])
def test_card_and_sections_of_many_workloads_are_about_one_configuration(name: str) -> None:
    study = study_named(name)
    parts = removable(study.regions).max(axis=1)
    to_gain = [parts[each.configuration] for each in study.headlines]
    assert to_gain[0] == max(to_gain)
    line = card_of(study).line("do_next")
    assert line is not None and line.quantities[0].value == pytest.approx(study.gains["gain"].max())
    assert f": {study.gains.sort_values('gain')['how'].iloc[-1]}: " in line.text


def test_numbers_have_no_more_digits_than_they_are_known_to() -> None:
    cost = best(study_named("default-2gpu"), "cost")
    assert "14.12 [14.10, 14.14] million samples per GPU-hour" in cost
    lost_ms = next(
        column for column in held_back(study_named("averaging-horovod")).columns if column.name == "longer_s"
    )
    assert lost_ms.decimals == 1
    card = card_of(study_named("vgg-case-study"))
    accuracy = card.line("accuracy")
    assert accuracy is not None and accuracy.text.startswith("78.8 % (61.1–96.5) at".replace(" %", "\u00a0%"))
    assert "differences in accuracy ±17.5 points" in card.trust.reason
    unknown_causes = card_of(study_named("averaging")).line("lost")
    assert unknown_causes is not None and unknown_causes.text.startswith("0.16 GPU; causes not measured")


def test_launching_never_takes_longer_than_the_step_that_it_is_part_of() -> None:
    study = study_named("default-1gpu")
    assert study.headline_row["step_launch_s"] > study.headline_row["step_s"]
    for text in (bounds(study), host_bound(study)):
        assert text is not None and "launching a step takes all of its 10.2 ms" in text


def test_missing_trials_are_a_part_of_all_trials_of_the_folder() -> None:
    study = study_named("default-models-4gpu")
    card = card_of(study)
    assert card.planned_trials == len(study.results.trials) + card.missing_trials


def test_a_table_of_many_series_has_the_best_and_worst_of_each_kind() -> None:
    study = study_named("default-4gpu")
    rows = scales(study).frame
    assert len(rows) == MOST_ROWS
    several = study.scaling[study.scaling["world_size"] == 4]
    for kind, series in several[~(several["efficiency_more"] > 0)].groupby("scaling"):
        shown = rows.loc[rows["scaling"] == kind, "efficiency"]
        assert (shown.min(), shown.max()) == (series["efficiency"].min(), series["efficiency"].max())


def test_a_host_that_bounds_a_step_for_an_unknown_time_is_part_of_its_table() -> None:
    part = held_back(study_named("averaging-4gpu")).frame.iloc[0]
    assert part["part"].endswith(", and waiting for the host")
    assert "DDP in place of DataParallel" in part["how"]


def test_a_rate_that_is_not_resolved_may_be_the_best() -> None:
    text = best(study_named("interconnect/1gbit"), "throughput")
    assert "1 CPU rank, batch 8 per CPU rank may be faster, but its rate is not resolved" in text


def test_the_model_of_the_card_is_the_first_in_the_line_of_facts() -> None:
    assert facts_line(study_named("communication"))[0].startswith("vgg19, resnet50, ")


def test_a_delayed_all_reduce_is_not_told_to_measure_buckets() -> None:
    line = card_of(study_named("averaging")).line("lost")
    assert line is not None and "(ddp_delayed has no communication breakdown)" in line.text


def test_a_reference_batch_is_not_called_lossless_without_saying_that_it_is_the_reference() -> None:
    line = card_of(study_named("fifth-epoch")).line("largest_lossless_batch")
    assert line is not None
    assert line.text == "only the reference batch 128 without a recipe"


def test_titles_name_an_unusual_execution_and_strategy() -> None:
    assert " compile_graph, " in card_of(study_named("real-images/compiled")).title
    assert " dp, " in card_of(study_named("averaging-4gpu")).title
    assert "eager" not in card_of(study_named("real-images/eager")).title


def test_of_many_storage_settings_each_format_has_rows() -> None:
    table = fastest(study_named("storage-order"))
    assert table.note == f"{MOST_ROWS} of 18 rows: the card's, and others evenly spread."
    assert set(table.frame["storage"]) == {"arrow_raw", "jpeg", "lmdb"}


@pytest.mark.parametrize("name", ["mlstm-scaling", "gpt2-scaling", "averaging"])
def test_a_short_table_of_throughputs_has_the_configurations_of_the_card_and_their_references(name: str) -> None:
    analysis = study_named(name)
    shown = {trial_ids for trial_ids in fastest(analysis).frame["trial_ids"]}
    for headline in analysis.headlines:
        assert headline.scaling is not None
        for index in (headline.configuration, int(headline.scaling["reference"])):
            assert analysis.configurations["trial_ids"][index] in shown
    assert len(fastest(analysis).frame) <= MOST_ROWS


def test_a_card_of_models_that_read_text_states_characters_per_second() -> None:
    card = card_of(study_named("mlstm-scaling"))
    line = card.line("speed")
    assert line is not None
    assert [(rate.part, rate.unit) for rate in line.quantities] == [
        ("mlstm4096", "characters/s"),
        ("mlstm8192", "characters/s"),
    ]
    assert all(rate.value and rate.value > 3e5 for rate in line.quantities)
    assert "image_size" not in card.facts
    images = card_of(study_named("captured"))
    assert images.line("speed") is None and images.facts["image_size"] == 224


def test_a_study_of_speed_and_accuracy_states_loss_and_lossless_batch_in_one_line() -> None:
    line = card_of(study_named("hpml-lab4")).line("accuracy")
    assert line is not None
    assert "; lossless up to 128; -31.4 points at 16,384; target 88.1" in line.text.replace("\u00a0", " ")
    names = {quantity.name for quantity in line.quantities}
    assert {"accuracy", "accuracy_lost", "largest_lossless_batch", "time_to_target"} <= names


@pytest.mark.parametrize("name", ["default-grid", "acceleration-ladder", "captured", "doors/study"])
def test_what_holds_a_study_back_takes_two_sentences(name: str) -> None:
    found = holds_back(study_named(name))
    assert 1 <= len(found) <= 2
    assert not [text for text in found if ". " in text]


def test_a_bound_of_many_workloads_starts_with_the_configuration() -> None:
    line = card_of(study_named("doors/study")).line("do_next")
    assert line is not None and re.match(r".* --load-ms [\d.]+: .*\(upper bound\)$", line.text)


def test_a_difference_at_the_first_lossy_batch_names_that_batch() -> None:
    table = shortened(lossless_batch(study_named("hpml-lab4")))
    headers = [column.header for column in table.columns]
    assert headers.index("difference there (points)") == headers.index("first lossy batch") + 1
