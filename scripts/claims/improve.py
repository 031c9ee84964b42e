"""Figures of docs/improve.md: searches from naive starts."""

import json

from scripts.claims.sources import RESULTS, Entries, figure, frames, number, on_page, samples, unit_number
from study.improve.rounds import REPEATS_PER_ROUND

says, stated, _ = on_page("docs/improve.md")

NOTHING = "levers that do nothing: kept"

GPT2, MLSTM, RESNET, VGG = (
    samples(f"improve-start-{case}")[0]["best_samples_per_s"] for case in ("gpt2", "mlstm", "resnet50", "vgg19")
)


FP8 = json.loads((RESULTS / "improve-fp8" / "study.json").read_text())["improve"]
LEVERS = {lever["lever"]: lever for lever in FP8["levers"]}


def _repeated() -> int:
    """Return the number of trials in rounds of the usual settings, each of which has its reference."""
    trials = frames("improve-fp8").trials
    rounds = trials["repeat"] // REPEATS_PER_ROUND
    return int(rounds.isin(rounds[trials["loader_workers"] > 0]).sum())


def _search(folder: str, case: str, start: str, unit: str, budget: str, compared: str) -> Entries:
    """Return the claims about a search from a naive start.

    budget, compared: the text after `--budget`, and after its share of the fastest known.
    """
    record = samples(folder)[0]["record"]
    rates = (number(record[name]["throughput_samples_per_s"]) for name in ("chosen", "baseline"))
    return [
        says(f"{start}: {{}} instead of {{}} {unit}, which is {{}} times as", *rates, number(*record["gain"])),
        says(
            f"{{}} trials and {{}} minutes (`--budget {budget}",
            figure(folder, f"{case}: trials"),
            figure(folder, f"{case}: time"),
        ),
        says(f"That is {{}} of {compared}", figure(folder, f"{case}: of the fastest configuration known")),
    ]


ENTRIES: Entries = [
    stated("windows of models and workloads last at most 3 s", "a limit"),
    says(
        "`improve-null-cpu` kept {} of {} in {} searches",
        figure("improve-null-cpu", NOTHING),
        unit_number("improve-null-cpu", NOTHING),
        figure("improve-null-cpu", "searches that ended"),
    ),
    says("`improve-null` kept {} of {}", figure("improve-null", NOTHING), unit_number("improve-null", NOTHING)),
    *_search("improve-start", "unet", "a U-Net through the factory", "samples/s", "12m`). That", "the configuration"),
    *_search(
        "improve-start-resnet50",
        "resnet50",
        "ResNet-50 from JPEG files",
        "images/s",
        "9m`",
        "the fastest configuration that we held ready: eager",
    ),
    *_search(
        "improve-start-gpt2",
        "gpt2",
        "with 8 sequences per GPU",
        "sequences/s",
        "7m`",
        "the fastest configuration that we held ready, a compiled CUDA graph",
    ),
    *_search(
        "improve-start-vgg19",
        "vgg19",
        "VGG-19 with `no_p2p`",
        "images/s",
        "12m`). It",
        "the fastest configuration that we held ready, compiled",
    ),
    *_search(
        "improve-start-mlstm",
        "mlstm",
        "mLSTM of 4,096 units",
        "sequences/s",
        "12m`), and",
        "\n  the fastest one",
    ),
    says(
        "a compiled CUDA graph: {} sequences/s, or {} without the graph, in three\n  worker groups each. Its",
        number(MLSTM["compile_graph"]),
        number(MLSTM["compile"]),
    ),
    stated("0.95 of the fastest configuration", "the goal"),
    stated("Its batch of 128 was not doubled", "a setting"),
    stated("mLSTM of 4,096 units", "the size of the model"),
    stated("compiled all 256 steps", "a setting"),
    stated("it now compiles 16", "a setting"),
    says(
        "gradients in bf16: {}\n  images/s, or {} without compilation",
        number(VGG["compile"]),
        number(VGG["eager"]),
    ),
    stated("Its batch of 64 was not doubled", "a setting"),
    says(
        "decoding on the GPU, {} images/s, or the same compiled, {}.",
        number(RESNET["eager"]),
        number(RESNET["compile"]),
    ),
    says(
        "gradients in bf16: {} sequences/s, or {} without the graph",
        number(GPT2["compile_graph"]),
        number(GPT2["compile"]),
    ),
    stated("with 8 sequences per GPU", "a setting"),
    stated("or above 1.2 without it", "a limit"),
    stated("or that is 1.2 or larger", "a limit"),
    stated("8 sequences of 256 tokens", "a setting"),
    stated("Llama's shape of 1 billion weights", "the size of the model"),
    says("It ended after {} trials and {} minutes", number(FP8["trials"]), number(FP8["elapsed_s"] / 60)),
    says("fp8 is {} times as fast and", number(*LEVERS["fp8"]["gain"])),
    says(
        "twice as large is {} times as fast, more than its upper bound of {}",
        number(*LEVERS["batch 2x"]["gain"]),
        number(LEVERS["batch 2x"]["bound"]),
    ),
    says("The result is {} times as fast in five", number(*FP8["gain"])),
    says("The search spent {} trials", number(_repeated())),
]
