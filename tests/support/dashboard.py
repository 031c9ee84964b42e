"""The Prometheus queries and metrics of the Grafana dashboard."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DASHBOARD = json.loads((ROOT / "docs/monitoring/grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
METRICS = sorted({name for query in QUERIES for name in re.findall(r"ray_\w+", query)})
OF_GPUS = ("ray_node_gpus_utilization", "ray_node_gram_used", "ray_scaling_study_host_to_device_s")
