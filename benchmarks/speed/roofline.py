"""Compute the roofline of a step by kernel: measured time, and the least time for its operations and bytes.

Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model". Operations and bytes are
those of the operator that launched a kernel, from the shapes in the profile; each tensor that it reads or writes moves
once. Several kernels of one operator share them in proportion to their time. A kernel of the compiler has its tensors
as arguments; values that it computes in registers do not count. The result is therefore a lower bound: no kernel can be
faster, unless a tensor is still in the device's cache.
"""

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from analysis.measure.hardware import PEAKS
from benchmarks.harness.sides import Ours
from trainables.step.timing import no_mark
from trainables.trial import Trial

STEPS = 3
ELEMENT_BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long int": 8, "int": 4, "bool": 1,
                 "unsigned char": 1, "signed char": 1, "long": 8, "unsigned int": 4}  # fmt: skip
"""by the names that torch's profiler gives types"""

Event = dict[str, Any]
Classes = tuple[tuple[str, tuple[str, ...]], ...]

LANGUAGE_MODEL: Classes = (
    ("attention", ("attention", "flash", "fmha", "sdpa")),
    ("optimizer", ("adam",)),
    ("embedding", ("embedding", "index")),
    ("output layer and loss", ("50304", "log_softmax", "nll_loss", "_exp_", "_amax_")),
    ("layer normalisation", ("layer_norm",)),
    ("GELU", ("gelu", "tanh")),
    ("matrix product", ("gemm", "nvjet", "aten::mm", "aten::addmm")),
)
"""classes of the kernels of GPT-2, also those of the compiler, whose names list what they compute"""


def profiled(side: Ours) -> list[Event]:
    """Return the Chrome trace events of `STEPS` steps."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    side.step(next(side.batches), no_mark)
    torch.cuda.synchronize()
    with profile(activities=activities, record_shapes=True) as recorded:
        for _ in range(STEPS):
            side.step(next(side.batches), no_mark)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="roofline-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return list(json.loads(path.read_text())["traceEvents"])


def roofline(events: list[Event], device: torch.device, trial: Trial, first: Classes = ()) -> dict[str, Any]:
    """Return rows by kernel and by class of kernels: seconds per step, and the least time at the device's peaks.

    first: classes to look for before `CLASSES`. A row: kernel, class, calls (per step), seconds, flops, bytes, floor_s,
    and of_floor = floor_s / seconds. Floors are None if the device's peaks are unknown (`analysis.measure.hardware`).
    """
    peak = PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flops_per_s = peak.flops_per_s(trial.precision) if peak else None
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    operators = {
        e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op" and "External id" in e.get("args", {})
    }
    took: dict[Any, float] = defaultdict(float)
    for kernel in kernels:
        took[kernel["args"].get("External id")] += kernel["dur"]
    rows: dict[str, dict[str, Any]] = {}
    for kernel in kernels:
        number = kernel["args"].get("External id")
        operator = operators.get(number)
        share = kernel["dur"] / took[number] if took[number] else 0.0
        flops, moved = needs(operator) if operator else (0.0, 0.0)
        launched_by = f"{operator['name']} {operator['args'].get('Input Dims', '')}" if operator else ""
        kind = class_of(kernel["name"], launched_by, first)
        row = rows.setdefault(
            kernel["name"],
            {"kernel": kernel["name"], "class": kind, "operator": operator["name"] if operator else None}
            | dict.fromkeys(("calls", "seconds", "flops", "bytes", "floor_s"), 0.0),
        )
        row["calls"] += 1 / STEPS
        row["seconds"] += kernel["dur"] * 1e-6 / STEPS
        row["flops"] += flops * share / STEPS
        row["bytes"] += moved * share / STEPS
        if peak and flops_per_s:
            row["floor_s"] += max(flops / flops_per_s, moved / peak.memory_bytes_per_s) * share / STEPS
    found = sorted(rows.values(), key=lambda row: -row["seconds"])
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "batch": trial.batch_per_gpu,
        "peak_flops_per_s": flops_per_s,
        "peak_bytes_per_s": peak.memory_bytes_per_s if peak else None,
        "kernels": [_rated(row, peak is not None) for row in found],
        "classes": [_rated(row, peak is not None) for row in _by_class(found)],
        "total": _rated(_sum("all kernels", found), peak is not None),
    }


def needs(operator: Event) -> tuple[float, float]:
    """Return the least operations and bytes of an operator; see the module."""
    arguments, name = operator["args"], operator["name"]
    held = _tensors(arguments.get("Input Dims", []), arguments.get("Input type", []))
    sizes = [math.prod(dim) * width for dim, width in held]
    if not sizes:
        return 0.0, 0.0
    if name == "aten::convolution_backward":
        gradient, given, weight = (dim for dim, _ in held[:3])
        flops = 2.0 * math.prod(gradient) * math.prod(weight[1:])
        of_images = given[1] == 3  # for which no gradient is wanted
        # the gradient is read for each of two results, which are as large as what they are gradients of
        twice = 1 if of_images else 2
        return flops * twice, sizes[0] * twice + sizes[1] + 2 * sizes[2] + (0 if of_images else sizes[1])
    if name in _CONVOLUTIONS:
        (given, width), (weight, _) = held[:2]
        out = _convolved(given, weight, arguments.get("Concrete Inputs", []), _CONVOLUTIONS[name])
        return 2.0 * math.prod(out) * math.prod(weight[1:]), sizes[0] + sizes[1] + math.prod(out) * width
    if name in ("aten::mm", "aten::addmm", "aten::bmm"):
        first, second = [dim for dim, _ in held if len(dim) > 1][-2:]
        out_elements = math.prod(first[:-1]) * second[-1]
        return 2.0 * out_elements * first[-1], sum(sizes) + out_elements * held[-1][1]
    if "_attention" in name and not name.startswith("triton_"):  # the gradient is the first argument of a backward pass
        backward = name.endswith("backward")
        query, key = (dim for dim, _ in held[int(backward) : int(backward) + 2])
        length = key[1] if name.startswith("aten::_flash") else key[2]
        products = 5 if backward else 2
        return products * math.prod(query) * length * 1.0, float(sum(sizes) + sizes[0] * (3 if backward else 1))
    flops = float(arguments.get("kernel_flop") or 0)  # the compiler notes those of its own products
    if name.startswith("triton_") or name.endswith("_"):
        return flops, float(sum(sizes))  # results are among the arguments
    return flops, float(sum(sizes) + max(sizes))


def _tensors(dims: list[Any], types: list[str]) -> list[tuple[list[int], int]]:
    """Return shape and bytes per element of each tensor argument. Tensors in lists count as fp32, like the weights."""
    found = []
    for dim, kind in zip(dims, types, strict=False):
        if kind == "TensorList":
            found += [(each, 4) for each in dim]
        elif dim and kind in ELEMENT_BYTES:
            found.append((dim, ELEMENT_BYTES[kind]))
    return found


_CONVOLUTIONS = {
    "aten::cudnn_convolution": ("padding", "stride"),
    "aten::mkldnn_convolution": ("padding", "stride"),
    "aten::convolution": ("stride", "padding"),
}
"""operators that convolve, with the order of their first two pairs of numbers"""


def _convolved(given: list[int], weight: list[int], concrete: list[str], order: tuple[str, str]) -> list[int]:
    """Return the shape of a convolution's output."""
    pairs = [json.loads(text) for text in concrete if text.startswith("[") and text.count(",") == 1]
    by_name = dict(zip(order, pairs, strict=False))
    edges = [
        (n + 2 * padding - kernel) // stride + 1
        for n, padding, kernel, stride in zip(given[2:], by_name["padding"], weight[2:], by_name["stride"], strict=True)
    ]
    return [given[0], weight[0], *edges]


CLASSES: Classes = (
    ("convolution", ("conv", "fprop", "dgrad", "wgrad", "xmma", "implicit_gemm", "cutlass")),
    ("matrix product", ("gemm", "nvjet", "addmm", "aten::mm")),
    ("normalisation", ("batch_norm", "bn_", "native_batch_norm", "batchnorm")),
    ("pooling", ("pool",)),
    ("optimizer", ("_fused_sgd", "foreach", "multi_tensor")),
    ("communication", ("nccl",)),
    ("copy or set", ("memcpy", "memset", "copy", "fill")),
    ("compiled, elementwise and reductions", ("triton",)),
)


def class_of(kernel: str, operator: str, first: Classes = ()) -> str:
    """Return the class of a kernel, from its name and its operator's. first: classes to look for before `CLASSES`."""
    text = f"{kernel} {operator}".lower()
    if found := next((name for name, parts in first if any(part in text for part in parts)), None):
        return found
    if kernel.startswith("triton") and "conv" not in kernel.partition("_fused")[0]:
        return "compiled, elementwise and reductions"
    return next((name for name, parts in CLASSES if any(part in text for part in parts)), "elementwise")


def _by_class(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(row["class"] for row in rows)
    found = [_sum(name, [row for row in rows if row["class"] == name]) for name in names]
    return sorted(found, key=lambda row: -row["seconds"])


def _sum(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    totals = ("calls", "seconds", "flops", "bytes", "floor_s")
    return {"class": name} | {key: sum(row[key] for row in rows) for key in totals}


def _rated(row: dict[str, Any], known: bool) -> dict[str, Any]:
    """Add the share of the floor in the measured time. Without floors if peaks are unknown."""
    if not known:
        return row | {"floor_s": None, "of_floor": None}
    return row | {"of_floor": row["floor_s"] / row["seconds"] if row["seconds"] else None}


def write_kernels(folder: Path, tables: Mapping[str, dict[str, Any]]) -> None:
    """Write the rooflines by case to kernels.json and kernels.md, if there are any."""
    if tables:
        (folder / "kernels.json").write_text(json.dumps(tables, indent=1) + "\n")
        (folder / "kernels.md").write_text("\n".join(as_markdown(case, table) for case, table in tables.items()))


def as_markdown(case: str, table: dict[str, Any], most: int = 25) -> str:
    """Return the largest kernels, and all classes, as two tables."""
    total = table["total"]
    lines = [
        f"## {case}, batch {table['batch']}, on {table['device']}",
        "",
        f"All kernels of a step: {1e3 * total['seconds']:.2f} ms"
        + (f"; the device's floor for them: {1e3 * total['floor_s']:.2f} ms" if total["floor_s"] else ""),
        "",
    ]
    for title, rows in (("class", table["classes"]), ("kernel", table["kernels"][:most])):
        lines += [f"| {title} | calls | ms | % of step | TFLOP/s | TB/s | floor ms | floor / time |", "|---" * 8 + "|"]
        for row in rows:
            name, seconds = str(row[title])[:70], row["seconds"]
            floor = ("", "") if row["floor_s"] is None else (f"{1e3 * row['floor_s']:.3f}", f"{row['of_floor']:.2f}")
            lines.append(
                f"| {name} | {row['calls']:.0f} | {1e3 * seconds:.3f} | {100 * seconds / total['seconds']:.1f} "
                f"| {row['flops'] / seconds / 1e12:.0f} | {row['bytes'] / seconds / 1e12:.2f} "
                f"| {floor[0]} | {floor[1]} |"
            )
        lines.append("")
    return "\n".join(lines)
