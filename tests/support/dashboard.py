"""The Prometheus queries and metrics of the Grafana dashboard."""

import json
import re
from pathlib import Path

from analysis.read.reduce import OPTIONAL_PHASES
from study.orchestrate.metrics import EPOCH_METRICS

ROOT = Path(__file__).resolve().parent.parent.parent
DASHBOARD = json.loads((ROOT / "docs/monitoring/grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
METRICS = sorted({name for query in QUERIES for name in re.findall(r"ray_\w+", query)})
OF_GPUS = (
    "ray_node_gpus_utilization", "ray_node_gram_used", "ray_scaling_study_host_to_device_s",
    "ray_scaling_study_busy_fraction", "ray_scaling_study_peak_memory_bytes",
)  # fmt: skip
OF_OTHER_STUDIES = tuple(f"ray_scaling_study_{name}" for name in (*OPTIONAL_PHASES, *EPOCH_METRICS))
"""Metrics of trainings, and of strategies or workloads that a timed study under DDP does not have."""
