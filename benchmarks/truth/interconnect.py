"""Does a study measure the network that it runs on? The same hosts with links of several rates, as root on one machine.

    python -m benchmarks.truth.interconnect                          # unlimited, 1 Gbit/s, 200 Mbit/s; 3 repeats
    python -m benchmarks.truth.interconnect --rates none,200mbit --repeats 1

Two hosts in network namespaces (tests/support/hosts.py) with one CPU rank each, and links shaped by tc in both
directions. The study `interconnect` runs on them once per rate, into results/interconnect/RATE. The hosts share this
machine's cores, so only the effect of the network on two models is compared.

Goals:
- The bandwidth fitted to the all-reduce sweep is within 15 % of the rate (Ethernet, IP and TCP take 4.4 % of it).
- For the larger model, a step's transfer time is within 25 % of gradient bytes / rate if the step is
  communication-bound.
- At each shaped rate, the model with more operations per byte has the higher weak and strong efficiency.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from analysis.measure.allreduce import fits, measured_limits
from analysis.measure.communication import bucket_rows, communication_breakdown
from analysis.read.results import load
from analysis.study import analyse
from benchmarks.harness.common import RESULTS, command, figure, write_summary
from tests.support.hosts import ROOT, Hosts, start_ray

NAME = "interconnect"
RATES = {"none": None, "1gbit": 1e9, "200mbit": 200e6}
"""as tc writes them, in bit/s"""
FIT_GOAL = 0.15
WIRE_GOAL = 0.25
LARGE, SMALL = "resnet18_small", "mlp"


def folder_of(rate: str) -> Path:
    return RESULTS / NAME / ("unlimited" if rate == "none" else rate)


def measure(rates: list[str], repeats: int) -> None:
    """Run the study once per rate. A folder with some trials gets only the missing ones."""
    with Hosts(2) as hosts:
        address = start_ray(hosts, cpus=1)
        for rate in rates:
            hosts.set_rate(None if rate == "none" else rate)
            study = ["-m", "study.scaling", "run", NAME, "--repeats", str(repeats), "--out", str(folder_of(rate))]
            patience = ["--trial-timeout", "3600", "--address", address]
            done = hosts[0].start([sys.executable, *study, *patience], cwd=str(ROOT)).wait()
            if done:
                raise SystemExit(f"the study at {rate} ended with exit code {done}: {folder_of(rate)}")


def findings(rate: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the figures of one rate's folder, and the rows from which they are computed."""
    results = load(folder_of(rate))
    bits_per_s = RATES[rate]
    analysis = analyse(results)
    label = "unlimited" if rate == "none" else rate
    figures = []

    fitted = fits(measured_limits(results.trials, results.sweep))
    bandwidth = float(fitted["bus_bytes_per_s"].iloc[0])
    set_to = bits_per_s / 8 if bits_per_s else None
    figures.append(
        figure(
            f"fitted bandwidth, {label}", bandwidth / 1e6, None, "MB/s",
            f"{set_to / 1e6:.0f} within {FIT_GOAL:.0%}" if set_to else "none: what the kernel copies",
            abs(bandwidth / set_to - 1) <= FIT_GOAL if set_to else None,
        )
    )  # fmt: skip

    found = communication_breakdown(bucket_rows(results.buckets, results.steps, results.trials), results.windows)
    found = found.merge(results.trials[["trial_id", "model"]], on="trial_id")
    for model, rows in found.groupby("model"):
        wire_s, gradient_bytes = float(rows["wire_s"].median()), float(rows["gradient_bytes"].median())
        expected_s = gradient_bytes / set_to if set_to else None
        judged = expected_s is not None and model == LARGE
        figures.append(
            figure(
                f"wire time of {model}, {label}", 1e3 * wire_s, None, "ms",
                f"{1e3 * expected_s:.0f} within {WIRE_GOAL:.0%}" if expected_s and judged else "none: shown only",
                abs(wire_s / expected_s - 1) <= WIRE_GOAL if expected_s and judged else None,
            )
        )  # fmt: skip

    rows = analysis.scaling.merge(analysis.configurations[["model"]], left_on="configuration", right_index=True)
    rows = rows[rows["world_size"] > 1]
    for kind in ("weak", "strong"):
        each = rows[rows["scaling"] == kind].set_index("model")["efficiency"]
        if {LARGE, SMALL} <= set(each.index):
            figures.append(
                figure(
                    f"{kind} efficiency of {LARGE} / {SMALL}, {label}", float(each[LARGE] / each[SMALL]), None, "ratio",
                    "> 1" if set_to else "none: no link is in the way",
                    bool(each[LARGE] > each[SMALL]) if set_to else None,
                )
            )  # fmt: skip
    samples: list[dict[str, Any]] = [
        {"rate": label} | {str(name): value for name, value in row.items()}
        for row in found[["model", "trial_id", "wire_s", "gradient_bytes"]].to_dict("records")
    ]
    samples += [{"rate": label, "fit": row} for row in fitted.to_dict("records")]
    return figures, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default=",".join(RATES), help=f"of {', '.join(RATES)}")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rates = options.rates.split(",")
    if unknown := [rate for rate in rates if rate not in RATES]:
        parser.error(f"--rates {','.join(unknown)}: allowed are {', '.join(RATES)}")
    measure(rates, options.repeats)
    figures, samples = [], []
    for rate in rates:
        of_rate, rows = findings(rate)
        figures += of_rate
        samples += rows
    print(command(), "load", os.getloadavg()[0], file=sys.stderr)
    write_summary(NAME, figures, samples)


if __name__ == "__main__":
    main()
