"""Draws from KubeRay's CRDs what the manifests of clusters/kuberay are checked against: names, types and allowed values.

    python -m scripts.crd_facts v1.7.0 ray.io_rayclusters.yaml ray.io_rayjobs.yaml > tests/kuberay_schema.json

The files are those of `helm-chart/kuberay-operator/crds` of github.com/ray-project/kuberay at that version. A whole CRD is
a megabyte, most of it descriptions and parts of a pod that no manifest here uses. What is kept is, at every place that a
manifest has, all names that may stand there, so that a mistyped one is found; below names that no manifest has, nothing.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).resolve().parent.parent / "clusters/kuberay"
KEPT = ("type", "enum", "required", "minimum", "maximum", "maxLength", "pattern", "x-kubernetes-int-or-string")


def facts(schema: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """A schema (OpenAPI v3 as a CRD has it) as a closed JSON schema, as deep as any of `values` goes."""
    kept = {name: schema[name] for name in KEPT if name in schema}
    if kept.pop("x-kubernetes-int-or-string", False):
        kept["type"] = ["integer", "string"]
    mappings = [value for value in values if isinstance(value, dict)]
    if "properties" in schema:
        kept["additionalProperties"] = False
        kept["properties"] = {
            name: facts(below, inner) if (inner := [value[name] for value in mappings if name in value]) else {}
            for name, below in sorted(schema["properties"].items())
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        inner = [each for value in mappings for each in value.values()]
        kept["additionalProperties"] = facts(schema["additionalProperties"], inner)
    if "items" in schema:
        inner = [each for value in values if isinstance(value, list) for each in value]
        kept["items"] = facts(schema["items"], inner)
    return kept


def drawn(version: str, crds: Sequence[dict[str, Any]], manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"kuberay": version, "schemas": {"ray.io/v1 RayCluster": schema, ...}} of the stored version of each CRD."""
    schemas = {}
    for crd in crds:
        kind = crd["spec"]["names"]["kind"]
        (stored,) = [each for each in crd["spec"]["versions"] if each["storage"]]
        of_kind = [manifest for manifest in manifests if manifest["kind"] == kind]
        schemas[f"{crd['spec']['group']}/{stored['name']} {kind}"] = facts(stored["schema"]["openAPIV3Schema"], of_kind)
    return {"kuberay": version, "schemas": schemas}


if __name__ == "__main__":
    crds = [yaml.safe_load(Path(path).read_text()) for path in sys.argv[2:]]
    manifests = [yaml.safe_load(path.read_text()) for path in sorted(MANIFESTS.glob("*.yaml"))]
    print(json.dumps(drawn(sys.argv[1], crds, manifests), indent=1))
