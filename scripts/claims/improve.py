"""Figures of docs/improve.md: searches from naive starts."""

from scripts.claims.sources import Entries, figure, number, on_page, samples, unit_number

says, stated, _ = on_page("docs/improve.md")

NOTHING = "levers that do nothing: kept"

UNET = samples("improve-start")[0]["record"]

GPT2 = samples("improve-start-gpt2")[0]

RESNET = samples("improve-start-resnet50")[0]

ENTRIES: Entries = [
    stated("windows of models and workloads last at most 3 s", "a limit"),
    says(
        "`improve-null-cpu` kept {} of {} in {} searches",
        figure("improve-null-cpu", NOTHING),
        unit_number("improve-null-cpu", NOTHING),
        figure("improve-null-cpu", "searches that ended"),
    ),
    says("`improve-null` kept {} of {}", figure("improve-null", NOTHING), unit_number("improve-null", NOTHING)),
    says(
        "a U-Net through the factory: {} instead of {} samples/s",
        number(UNET["chosen"]["throughput_samples_per_s"]),
        number(UNET["baseline"]["throughput_samples_per_s"]),
    ),
    says("samples/s, which is {} times as fast", number(*UNET["gain"])),
    says(
        "after {} trials and {} minutes (`--budget 12m`)",
        figure("improve-start", "unet: trials"),
        figure("improve-start", "unet: time"),
    ),
    says("That is {} of the configuration", figure("improve-start", "unet: of the fastest configuration known")),
    says(
        "ResNet-50 from JPEG files: {} instead of {} images/s",
        number(RESNET["record"]["chosen"]["throughput_samples_per_s"]),
        number(RESNET["record"]["baseline"]["throughput_samples_per_s"]),
    ),
    says("images/s, which is {} times as fast", number(*RESNET["record"]["gain"])),
    says(
        "after {} trials and {} minutes (`--budget 9m`)",
        figure("improve-start-resnet50", "resnet50: trials"),
        figure("improve-start-resnet50", "resnet50: time"),
    ),
    says(
        "That is {} of the fastest configuration that we held ready: eager",
        figure("improve-start-resnet50", "resnet50: of the fastest configuration known"),
    ),
    says(
        "decoding on the GPU, {} images/s, or the same compiled, {}.",
        number(RESNET["best_samples_per_s"]["eager"]),
        number(RESNET["best_samples_per_s"]["compile"]),
    ),
    says(
        "with 8 sequences per GPU: {} instead of {} sequences/s",
        number(GPT2["record"]["chosen"]["throughput_samples_per_s"]),
        number(GPT2["record"]["baseline"]["throughput_samples_per_s"]),
    ),
    says("sequences/s, which is {} times as", number(*GPT2["record"]["gain"])),
    says(
        "after {} trials and {} minutes (`--budget 7m`)",
        figure("improve-start-gpt2", "gpt2: trials"),
        figure("improve-start-gpt2", "gpt2: time"),
    ),
    says(
        "That is {} of the fastest configuration that we held ready, a compiled CUDA graph",
        figure("improve-start-gpt2", "gpt2: of the fastest configuration known"),
    ),
    says(
        "gradients in bf16: {} sequences/s, or {} without the graph",
        number(GPT2["best_samples_per_s"]["compile_graph"]),
        number(GPT2["best_samples_per_s"]["compile"]),
    ),
    stated("with 8 sequences per GPU", "a setting"),
    stated("or above 1.2 without it", "a limit"),
    stated("or that is 1.2 or larger", "a limit"),
]
