"""Figures of docs/language-models.md (sizes, vocabularies, the bundled sample), and GPT-2's in docs/performance.md."""

import pyarrow.parquet as pq

from scripts.claims.sources import Cell, Entries, Value, cell, figure, goal, number, on_page, yes_no
from trainables.data.tokens import HEADER_BYTES, SAMPLE
from trainables.measure.matmul_limit import LIMIT_S
from trainables.models.fused_loss import CHUNK_TOKENS
from trainables.registry import GPT2_VOCABULARY, MODELS, SAMPLE_VOCABULARY

says, stated, shows = on_page("docs/language-models.md")


def _weights(name: str, unit: float) -> Value:
    return number(MODELS[name].million_weights / unit)


_SEQUENCES = 64
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
    says("a large matrix product in the trial's number format, measured for {} seconds", number(LIMIT_S)),
    says("output layer and the loss together, {} tokens at a time", number(CHUNK_TOKENS)),
    says("The logits of {} sequences of {} tokens", number(_SEQUENCES), _LENGTH),
    says("take {} GB in bf16", number(2e-9 * _SEQUENCES * _LENGTH.value * GPT2_VOCABULARY)),
]


# ----------------------------------------------------------------------------------------------- speed of GPT-2 on GPUs

of_speed, stated_of_speed, table_of_speed = on_page("docs/performance.md")

SPEED = "gpt2-speed"
CASES = (
    ("1 GPU, compiled, 64 sequences", "1:compile:64", 1),
    ("2 GPUs, compiled, 8 sequences each", "2:compile:8", 2),
)


def _goals(case: str, gpus: int) -> tuple[Cell, Cell, Cell]:
    """Return ours / bare, weak efficiency, and whether the goals of a case are met."""
    ratio = figure(SPEED, f"ours/bare, {case}")
    judged = figure(SPEED, f"weak efficiency, {case}" if gpus > 1 else f"ours, {case}")
    efficiency = cell("{:3}", judged) if gpus > 1 else cell("")
    return cell("{:3}", ratio), efficiency, yes_no(ratio, judged)


OPTIONS = (
    ("`fused_loss`", "1.02: logits are read once less, and gradients computed while a part of them is in the cache"),
    ("`cudnn`, attention by cuDNN only", "1.04 if torch chooses FlashAttention 2 by itself, else 1.00"),
    ("`bf16_master+fused_loss`", "1.05: sums of residual branches move half the bytes"),
    ("`coordinate`, block sizes of generated kernels", "1.01"),
    ("`autotune_gemm`, products with what follows them", "0.99: the library's products are faster than the compiler's"),
    ("`2:compile_graph:8`, DDP as a CUDA graph", "1.3 of `2:compile:8`, which waits for the host"),
    ("`2:compile_graph:8:one_graph+ddp_bf16`", "1.05 of the graph: half the bytes, and kernels across buckets"),
    ("`2:compile:64:buckets_100`", "1.01: fewer parts of the compiled model"),
)

ENTRIES += [
    of_speed("at least {} tokens/s on one H100", goal(SPEED, "ours, 1:compile:64")),
    of_speed("one GPU alone reaches {} of the peak", figure(SPEED, "utilisation, one, 2:compile:8")),
    of_speed("with {} tokens per sequence, bf16", _LENGTH),
    of_speed("at least {} of the bare loop in every mode", goal(SPEED, "ours/bare, 1:compile:64")),
    of_speed("a weak efficiency of {} at 8 sequences", goal(SPEED, "weak efficiency, 2:compile:8")),
    table_of_speed(
        "gpt2",
        ("case", "tokens/s", "of the peak", "ours / bare", "weak efficiency", "goals met"),
        [
            (
                label,
                cell("{:0}", figure(SPEED, f"ours, {case}")),
                cell("{:3}", figure(SPEED, f"utilisation, ours, {case}")),
                *_goals(case, gpus),
            )
            for label, case, gpus in CASES
        ],
    ),
    table_of_speed(
        "gpt2-options",
        ("option", "predicted tokens/s with / without, because", "measured"),
        [(label, prediction, "not run") for label, prediction in OPTIONS],
    ),
    stated_of_speed("and of 0.985 at 64", "goal"),
]
