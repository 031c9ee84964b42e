"""Figures of docs/improve.md: searches from naive starts."""

import json

from scripts.claims.sources import RESULTS, Entries, figure, number, on_page, samples, unit_number

says, stated, _ = on_page("docs/improve.md")

NOTHING = "levers that do nothing: kept"

UNET = samples("improve-start")[0]["record"]

_STUDY = json.loads((RESULTS / "improve-resnet50" / "study.json").read_text())
USUAL = next(row for row in _STUDY["improve"]["levers"] if row["lever"] == "usual settings")

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
    says("which is {} times as fast", number(*UNET["gain"])),
    says(
        "after {} trials and {} minutes",
        figure("improve-start", "unet: trials"),
        figure("improve-start", "unet: time"),
    ),
    says("That is {} of the configuration", figure("improve-start", "unet: of the fastest configuration known")),
    says(
        "missed the goal, with {} of the fastest",
        figure("improve-start-first", "resnet50: of the fastest configuration known"),
    ),
    says("the usual settings reached {} times the baseline", number(*USUAL["gain"])),
    stated("or above 1.2 without it", "a limit"),
    stated("or that is 1.2 or larger", "a limit"),
]
