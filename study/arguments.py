"""Arguments and options of the commands that read results, for the signatures in `study.scaling`."""

from typing import Annotated

from typer import Argument, Option

Directory = Annotated[str, Argument(metavar="DIR", help="Results folder of a study, or its URI.")]
LatestDirectory = Annotated[
    str | None,
    Argument(
        metavar="DIR", help="Results folder or URI. Default: the most recent folder below results/.", show_default=False
    ),
]
PackedInto = Annotated[str | None, Argument(metavar="DIR2", help="New folder; left out: in place.")]

PredictedSizes = Annotated[
    str, Option(metavar="LIST", help="Numbers of GPUs (or CPU ranks) to predict for, such as 8 or 16,64.")
]
PredictedLink = Annotated[
    str | None,
    Option(
        metavar="X", help="A measured interconnect (auto, no_p2p, socket), or LATENCY_US:BANDWIDTH_GB_S, such as 5:50."
    ),
]
Price = Annotated[float | None, Option(metavar="PRICE", help="Price of a GPU-hour, in any currency, for costs.")]
Goal = Annotated[
    str | None,
    Option(metavar="GOAL", help="Criterion for the best configuration: throughput, time-to-accuracy or cost."),
]
Laws = Annotated[bool, Option("--laws", metavar="", help="Show the candidate laws, their weights and errors too.")]
Details = Annotated[bool, Option("--details", metavar="", help="Show every column and note too.")]

Baseline = Annotated[str, Argument(metavar="DIR_A", help="Results folder or URI of the baseline.")]
Compared = Annotated[
    str,
    Argument(
        metavar="DIR_B",
        help="Results folder or URI to compare with the baseline. Or @NAME: compare DIR_A with committed results.",
    ),
]
FailAbove = Annotated[
    str | None,
    Option(
        metavar="PERCENT",
        help="Exit with code 1 if a configuration lost more throughput than this, such as 5%, according to the "
        "entire 95 % interval of its ratio, or if it failed in DIR_B only. Otherwise exit with code 3 if one is "
        "missing in DIR_B, if none can be judged, or if one that cannot be judged seems to have lost more.",
    ),
]
OfScaling = Annotated[
    bool,
    Option("--scaling", metavar="", help="With --fail-above: judge the scaling efficiency instead of the throughput."),
]
AllowMissing = Annotated[
    bool, Option("--allow-missing", metavar="", help="With --fail-above: accept configurations that DIR_B lacks.")
]
CompleteTable = Annotated[
    bool, Option("--table", metavar="", help="Show every configuration, the throughputs and the parts of a step too.")
]
Format = Annotated[str, Option("--format", metavar="FORMAT", help="text, or markdown for a comment on a pull request.")]

Improved = Annotated[
    str | None,
    Argument(metavar="DIR", help="Results folder whose training to improve. Or give a workload.", show_default=False),
]
ImprovementGoal = Annotated[
    str | None,
    Option(
        "--goal",
        metavar="GOAL",
        help="What to improve: throughput (default), efficiency (of N GPUs against one), cost (samples per GPU-hour, "
        "with several --gpus), or time-to-accuracy (with --epochs and --target-accuracy).",
    ),
]
Budget = Annotated[
    str | None,
    Option("--budget", metavar="TIME", help="Time for the search, such as 20m. A round that fits may start."),
]
MostTrials = Annotated[
    int | None, Option("--trials", metavar="N", min=1, help="Most trials of the search. Default without --budget: 40.")
]
KeepArithmetic = Annotated[
    bool, Option("--keep-arithmetic", metavar="", help="Leave out levers that change how numbers are computed.")
]
OutDirectory = Annotated[str | None, Option(metavar="DIR2", help="Output folder. Default: DIR/report.")]
DropTraces = Annotated[
    bool,
    Option("--drop-traces", metavar="", help="In place: remove profiler traces, which a packed folder cannot hold."),
]

ConvertedFrom = Annotated[str, Argument(metavar="SRC", help="Image folder, Tiny-ImageNet, or a converted data set.")]
ConvertedTo = Annotated[str, Argument(metavar="DST", help="New folder to create.")]
StorageFormat = Annotated[str, Option(metavar="FORMAT", help="Any of jpeg, lmdb, arrow_jpeg, arrow_raw.")]
StoredSize = Annotated[
    int, Option(metavar="N", min=8, max=4096, help="For arrow_raw: the image_size that trials will use.")
]
