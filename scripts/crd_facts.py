"""Extract the schema for the manifests in clusters/kuberay from KubeRay's CRDs: names, types and allowed values.

    python -m scripts.crd_facts v1.7.0 ray.io_rayclusters.yaml ray.io_rayjobs.yaml > tests/project/kuberay_schema.json

The files are in `helm-chart/kuberay-operator/crds` of github.com/ray-project/kuberay at that version. A complete CRD is
about 1 MB, mostly descriptions and parts of a pod that these manifests do not use. The result has all names allowed at
every level that a manifest uses, so that mistyped names are detected, and nothing below names that no manifest uses.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).resolve().parent.parent / "clusters/kuberay"
KEYWORDS = ("type", "enum", "required", "minimum", "maximum", "maxLength", "pattern", "x-kubernetes-int-or-string")


def closed_schema(schema: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return a CRD's OpenAPI v3 schema as a closed JSON schema, as deep as any of `values` goes."""
    closed = {name: schema[name] for name in KEYWORDS if name in schema}
    if closed.pop("x-kubernetes-int-or-string", False):
        closed["type"] = ["integer", "string"]
    mappings = [value for value in values if isinstance(value, dict)]
    if "properties" in schema:
        closed["additionalProperties"] = False
        closed["properties"] = {
            name: closed_schema(child, inner) if (inner := [value[name] for value in mappings if name in value]) else {}
            for name, child in sorted(schema["properties"].items())
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        inner = [item for value in mappings for item in value.values()]
        closed["additionalProperties"] = closed_schema(schema["additionalProperties"], inner)
    if "items" in schema:
        inner = [item for value in values if isinstance(value, list) for item in value]
        closed["items"] = closed_schema(schema["items"], inner)
    return closed


def extract(version: str, crds: Sequence[dict[str, Any]], manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return {"kuberay": version, "schemas": {"ray.io/v1 RayCluster": schema, ...}} for each CRD's stored version."""
    schemas = {}
    for crd in crds:
        kind = crd["spec"]["names"]["kind"]
        (stored,) = [entry for entry in crd["spec"]["versions"] if entry["storage"]]
        matching = [manifest for manifest in manifests if manifest["kind"] == kind]
        schema = closed_schema(stored["schema"]["openAPIV3Schema"], matching)
        schemas[f"{crd['spec']['group']}/{stored['name']} {kind}"] = schema
    return {"kuberay": version, "schemas": schemas}


if __name__ == "__main__":
    crds = [yaml.safe_load(Path(path).read_text()) for path in sys.argv[2:]]
    manifests = [yaml.safe_load(path.read_text()) for path in sorted(MANIFESTS.glob("*.yaml"))]
    print(json.dumps(extract(sys.argv[1], crds, manifests), indent=1))
