"""Figures of docs/performance.md: ResNet-50 on one GPU, and one compiler option at a time."""

import re

from scripts.claims.sources import (
    RESULTS,
    Cell,
    Entries,
    Value,
    cell,
    figure,
    frames,
    goal,
    number,
    on_page,
    yes_no,
)

says, stated, shows = on_page("docs/performance.md")


# ------------------------------------------------------------------------------------------------ ResNet-50 on one GPU

MODES = (
    ("eager", "256", "resnet50-modes", "eager:256"),
    ("compiled", "512", "resnet50-modes", "compile:512"),
    ("compiled, the step as a CUDA graph", "512", "resnet50-modes", "compile_graph:512"),
    ("the same", "1,024", "resnet50-modes", "compile_graph:1024"),
    (
        "the same with `rewritten_stem`, which the bare loop does not have, and block sizes by trial",
        "1,024",
        "resnet50-stem",
        "compile_graph:1024:stem+pointwise",
    ),
)
BEST, BEST_MODE = "resnet50-stem", "best mode (compile_graph:1024:stem+pointwise)"


def _real_images(execution: str) -> tuple[Value, Value, Value, Value, Value]:
    """Return images/s; first, highest and mean of the last ten losses; and steps, of a trial on real images."""
    trials, steps, _ = frames(f"real-images/{execution}")
    losses = steps["loss"].tolist()
    rate = float(trials["throughput_samples_per_s"].iloc[0])
    return (
        number(rate),
        number(losses[0]),
        number(max(losses)),
        number(sum(losses[-10:]) / 10),
        number(len(losses)),
    )


KERNELS = (RESULTS / "resnet50-modes" / "kernels.md").read_text()
TOTAL_MS, FLOOR_MS = map(float, re.findall(r"All kernels of a step: ([\d.]+) ms; .* them: ([\d.]+) ms", KERNELS)[0])


def _kernels(name: str) -> list[tuple[int, float, float]]:
    """Return calls, milliseconds and floor of the kernels or classes whose rows start like this."""
    rows = [line.strip("| ").split(" | ") for line in KERNELS.splitlines() if line.startswith(f"| {name}")]
    return [(int(row[1]), float(row[2]), float(row[6])) for row in rows]


CLASSES = "(compiled, elementwise|convolution|optimizer|elementwise|matrix product|copy or set)"
CALLS = sum(int(calls) for _, calls in re.findall(rf"^\| {CLASSES}[^|]*\| (\d+) \|", KERNELS, re.MULTILINE))
STEM = [*_kernels("void cutlass__5x_cudnn::Kernel"), *_kernels("_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23")]
POOLING = _kernels("triton_poi_fused_add_max_pool2d_with_indices_max_pool2d_with_indices_b")
OPTIMIZER = _kernels("optimizer")

TUNED = {
    shape: (float(library), float(own))
    for shape, library, own in re.findall(
        r"^(\S+\(.*?\)) +\S+ +([\d.]+) +triton ([\d.]+)$",
        (RESULTS / "resnet50-levers-more" / "autotune.txt").read_text(),
        re.MULTILINE,
    )
}
CONVOLUTIONS = [times for shape, times in TUNED.items() if shape.startswith("convolution")]
PRODUCTS = [times for shape, times in TUNED.items() if not shape.startswith("convolution")]
OWN_FASTER = [times for times in PRODUCTS if times[1] < times[0]]


def _generated_kernels() -> tuple[Value, Value]:
    """Return milliseconds of the compiler's kernels, and their floor as a percentage of it."""
    [(_, ms, floor)] = _kernels("compiled, elementwise")
    return number(ms), number(100 * floor / ms)


OPTIONS: tuple[tuple[str, str | Cell, str, str], ...] = (
    ("images as bytes, converted inside the graph (`uint8`)", "1.001: 0.2 GB less to read", "resnet50-levers", "uint8"),
    (
        "block sizes of generated kernels by trial (`pointwise`)",
        cell("1.02: they take {:0} ms, and reach {:0} % of the limit", *_generated_kernels()),
        "resnet50-levers",
        "pointwise",
    ),
    ("the rewritten stem (`stem`)", "1.10: 7 of 71.5 ms", "resnet50-levers", "stem"),
    (
        "the fastest of all kernels for each convolution and product, and block sizes by trial (`autotune`)",
        "1.02",
        "resnet50-levers-more",
        "autotune",
    ),
    ("small kernels combined into one (`combo`)", "1.005: half a millisecond of gaps", "resnet50-levers-more", "combo"),
)
GRAPH, COMPILED = (
    figure("resnet50-modes", "resnet50 compile_graph:512"),
    figure("resnet50-modes", "resnet50 compile:512"),
)


def _gain(folder: str, option: str) -> Value:
    return figure(folder, f"compile_graph:512:{option} / compile_graph:512, ABBA")


GRADIENT = "gradient's distance from fp32, resnet18 compiled, {} stem"

RESNET: Entries = [
    says("at least {} images/s in some mode", goal(BEST, BEST_MODE)),
    says("eager at least {} of the bare loop", goal("resnet50-modes", "ours/bare, eager:256, ABBA")),
    shows(
        "modes",
        ("mode", "batch", "images/s", "ours / bare", "not below the bare loop", "results"),
        [
            (
                label,
                batch,
                cell("{:0}", figure(folder, f"resnet50 {mode}")),
                cell("{:3}", figure(folder, f"ours/bare, {mode}, ABBA")),
                yes_no(figure(folder, f"ours/bare, {mode}, ABBA")),
                f"`{folder}`",
            )
            for label, batch, folder, mode in MODES
        ],
    ),
    says("trial ran at {} images/s", _real_images("compiled")[0]),
    says(
        "the loss rose from {} to {} in the first eight, and had fallen to {} in the last ten of its {}.",
        *_real_images("compiled")[1:],
    ),
    says(
        "Eager, at {} images/s, it rose to {} and fell to {} in the last ten of {}",
        _real_images("eager")[0],
        *_real_images("eager")[2:],
    ),
    says("Its kernels take {} ms. The device needs at least {} ms", number(TOTAL_MS), number(FLOOR_MS)),
    says("The {} ms above that floor", number(TOTAL_MS - FLOOR_MS)),
    says(
        "The first convolution takes {} ms, forward and for the gradient of its weight, {} ms more than its floor",
        number(sum(ms for _, ms, _ in STEM)),
        number(sum(ms - floor for _, ms, floor in STEM)),
    ),
    says("reach {} and {} % of the device's limit", *(number(100 * floor / ms) for _, ms, floor in STEM)),
    says(
        "max pooling takes {} ms, {} ms more than its floor",
        number(POOLING[0][1]),
        number(POOLING[0][1] - POOLING[0][2]),
    ),
    says("and reaches {} % of the limit", number(100 * POOLING[0][2] / POOLING[0][1])),
    says("spread over {} launches", number(CALLS - len(STEM) - len(POOLING))),
    says(
        "{} and {} of its length",
        figure("resnet50-stem", GRADIENT.format("rewritten")),
        figure("resnet50-stem", GRADIENT.format("plain")),
    ),
    says(
        "reaches the goal of {} images/s. It is missed without them ({} at batch 1,024), with the stem ({} at batch "
        "512) and with `autotune` ({} at batch 512)",
        goal(BEST, BEST_MODE),
        figure("resnet50-modes", "best mode (compile_graph:1024)"),
        figure("resnet50-levers", "best mode (compile_graph:512:stem)"),
        figure("resnet50-levers-more", "best mode (compile_graph:512:autotune)"),
    ),
    shows(
        "options",
        ("option", "predicted, because", "images/s with / without", "results"),
        [(label, because, cell("{:3}", _gain(more, option)), f"`{more}`") for label, because, more, option in OPTIONS],
    ),
    says("`pointwise` alone reaches {}", number(_gain("resnet50-levers", "pointwise").value)),
    says("Of the {} products {} change", number(len(PRODUCTS)), number(len(OWN_FASTER))),
    says("for all but those {} products", number(len(OWN_FASTER))),
    says(
        "takes {} ms in the library and {} ms in that kernel, the eighth {} and {} ms",
        *(number(ms) for ms in (*PRODUCTS[0], *PRODUCTS[7])),
    ),
    says("each of the {} convolutions that are no product", number(len(CONVOLUTIONS))),
    says(
        "by a factor of {} to {}: {} ms in total instead of {} ms",
        number(min(own / library for library, own in CONVOLUTIONS)),
        number(max(own / library for library, own in CONVOLUTIONS)),
        number(sum(own for _, own in CONVOLUTIONS)),
        number(sum(library for library, _ in CONVOLUTIONS)),
    ),
    says("reaches {} of compiled alone at batch 512", GRAPH / COMPILED),
    stated("epilogues include what follows, normalisation among it (predicted: 1.03)", "predicted"),
    stated("(predicted: 0.8)", "predicted"),
    stated("(predicted: 1.00, because the host is ahead there", "predicted"),
    says("and the optimizer takes {} ms)", number(OPTIMIZER[0][1])),
    says("Batch 1,024 reaches {} of batch 512", figure("resnet50-modes", "resnet50 compile_graph:1024") / GRAPH),
]


ENTRIES = RESNET
