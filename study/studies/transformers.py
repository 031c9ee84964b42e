"""Studies of transformers: how a language model scales, and what sharding its state costs."""

from typing import Any

from study.capacity import Capacity, gpus
from study.studies.questions import asked
from study.studies.study import Fields, Study, small_form, world_sizes

TOKENS_PER_STEP = 524_288
"""tokens of an optimizer step in the public reproductions of GPT-2 124M (llm.c, nanoGPT: about 0.5 million)"""


def _base(on_gpus: bool) -> dict[str, Any]:
    if not on_gpus:
        return {
            "device": "cpu", "dataset": "token_sample", "model": "gpt2_tiny", "sequence_length": 64,
            "optimizer": "adamw", "learning_rate": 3e-4, "steps": 8, "communication_steps": 4, "sweep_bytes": 2**20,
        }  # fmt: skip
    return {
        "device": "cuda", "dataset": "synthetic", "model": "gpt2", "precision": "bf16", "execution": "compile",
        "optimizer": "adamw", "learning_rate": 3e-4, "steps": 50,
    }  # fmt: skip


def gpt2_scaling(capacity: Capacity) -> Study:
    """Scale GPT-2 124M: a fixed number of sequences per GPU, and a fixed number of tokens per step."""
    on_gpus = gpus(capacity) > 0
    batches, tokens = ((1, 4, 8, 16, 32, 64), TOKENS_PER_STEP) if on_gpus else ((2, 8), 1024)
    cases: dict[str, dict[str, Any]] = {f"weak, {batch}": {"batch_per_gpu": batch} for batch in batches}
    cases["strong"] = {"batch_per_gpu": batches[-1], "tokens_per_step": tokens}
    if on_gpus:
        cases["strong"] |= {"steps": 20}  # of up to a second each
    return Study(
        name="gpt2-scaling",
        question=(
            "How many tokens per second does a language model train on with more and more GPUs, with a fixed number of "
            "sequences per GPU and with a fixed number of tokens per step?"
        ),
        base=_base(on_gpus),
        axes={"world_size": world_sizes(capacity)},
        repeats=3,
        cases=cases,
        report=small_form(on_gpus),
    )


def sharding(capacity: Capacity) -> Study:
    """Train ever larger models with replicated and with sharded state, until memory ends."""
    on_gpus = gpus(capacity) > 0
    models = ("gpt2", "gpt2_medium", "llama_1b", "llama_8b") if on_gpus else ("gpt2_tiny", "llama_tiny")
    return Study(
        name="sharding",
        question=(
            "What does sharding optimizer state (ZeRO-1), or all state within groups of GPUs (HSDP) or over all GPUs "
            "(FSDP2), cost or gain in speed and memory, and which is the largest model that fits with each?"
        ),
        base=_base(on_gpus) | {"execution": "eager", "batch_per_gpu": 8 if on_gpus else 2},
        axes={
            "model": models,
            "parallel": ("ddp", "zero1", "hsdp", "fsdp2"),
            "world_size": tuple(size for size in world_sizes(capacity) if size > 1) or (1,),
        },
        repeats=3,
        skip=(_one_rank_per_copy,),
        report=asked("sharding") | small_form(on_gpus),
    )


def _one_rank_per_copy(fields: Fields) -> str | None:
    """Return why hybrid sharding is left out on fewer than four GPUs; CPU ranks run it to show that it works."""
    if fields["parallel"] == "hsdp" and fields["device"] == "cuda" and fields["world_size"] < 4:
        return "on fewer than four GPUs, hybrid sharding shards nothing, or is FSDP2"
    return None
