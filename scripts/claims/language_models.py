"""Figures of docs/language-models.md, from the registry and the bundled sample, and of GPT-2 in docs/performance.md."""

import pyarrow.parquet as pq

from scripts.claims.sources import (
    Cell,
    Entries,
    Value,
    cell,
    claim,
    figure,
    goal,
    number,
    on_page,
    samples,
    summary,
    yes_no,
)
from trainables.data.tokens import HEADER_BYTES, SAMPLE
from trainables.models.fused_loss import CHUNK_TOKENS
from trainables.registry import GPT2_VOCABULARY, MODELS, SAMPLE_VOCABULARY

says, stated, shows = on_page("docs/language-models.md")


def _weights(name: str, unit: float) -> Value:
    return number(MODELS[name].million_weights / unit)


_LENGTH = number(MODELS["gpt2"].sequence_length or 0)

ENTRIES: Entries = [
    stated("24 of width 1,024", "context"),
    stated("50,257 token ids", "context"),
    says("padded to {}", number(GPT2_VOCABULARY)),
    says("{} and {} million |", _weights("gpt2", 1), _weights("gpt2_medium", 1)),
    says("{} and {} billion |", _weights("llama_1b", 1000), _weights("llama_8b", 1000)),
    says("| {} million |", _weights("gpt2_tiny", 1)),
    says("`sequence_length` is {} by default", _LENGTH),
    says("{} ids of the King James Bible", number(pq.read_metadata(SAMPLE).num_rows)),
    says("byte-pair encoding with {} ids", number(SAMPLE_VOCABULARY)),
    says("a header of {} bytes", number(HEADER_BYTES)),
    says("and the loss together, {} tokens at a time", number(CHUNK_TOKENS)),
    stated("64 sequences of", "example"),
    says("{} tokens take {} GB in bf16", _LENGTH, number(64 * _LENGTH.value * GPT2_VOCABULARY * 2 / 1e9)),
]

# ---------------------------------------------------------------------------------------- axes, performance

ENTRIES += [claim("docs/axes.md", "{} tokens at a time", number(CHUNK_TOKENS))]

measured, given, tabulates = on_page("docs/performance.md")

SPEED = {"1:compile:64": "one GPU, 64 sequences", "2:compile:8": "two GPUs, 8 sequences each"}


def _speed_row(case: str, label: str) -> tuple[str | Cell, ...]:
    rate, ratio = figure("gpt2-speed", f"ours, {case}"), figure("gpt2-speed", f"ours/bare, {case}")
    weak = f"weak efficiency, {case}"
    efficiency = figure("gpt2-speed", weak) if weak in summary("gpt2-speed") else None
    judged = (rate, ratio, *([efficiency] if efficiency else []))
    return (
        label,
        cell("{:0}", rate),
        cell("{:0v} %", 100 * figure("gpt2-speed", f"utilisation, ours, {case}")),
        cell("{:3}", ratio),
        cell("{:2}", efficiency) if efficiency else "",
        yes_no(*(value for value in judged if value.holds is not None)),
    )


def _compiled_s(case: str) -> Value:
    """Return the seconds of a case: compilation of all sides, and measuring."""
    return number(
        next(
            row["seconds_with_compilation"]
            for row in samples("gpt2-speed")
            if row["case"] == case and "seconds_with_compilation" in row
        )
    )


ENTRIES += [
    tabulates(
        "gpt2",
        ("compiled, bf16", "tokens/s", "of the peak", "ours / bare", "weak efficiency", "goals met"),
        [_speed_row(case, label) for case, label in SPEED.items()],
    ),
    given("1,024 tokens per sequence", "setting"),
    given("at 64 and 8 sequences per GPU", "setting"),
    measured(
        "Goals: {} tokens/s on one H100, {} of the bare loop, and a weak efficiency of {} at 8 sequences",
        goal("gpt2-speed", "ours, 1:compile:64"),
        goal("gpt2-speed", "ours/bare, 1:compile:64"),
        goal("gpt2-speed", "weak efficiency, 2:compile:8"),
    ),
    given("two of five planned cases", "setting"),
    measured("took {} s with compilation", _compiled_s("1:compile:64")),
]
