"""docs/reference.md, and the descriptions of the CRD, are what `make reference` writes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CRD = "crds/rekindle.dev_streamtopologies.yaml"


def test_what_is_written_from_the_classes_is_current() -> None:
    reference = runpy.run_path(str(ROOT / "tools/reference.py"))
    for path, made in (("docs/reference.md", "page"), (CRD, "crd")):
        assert (ROOT / path).read_text() == reference[made](), "run make reference"


def test_kubectl_explains_each_field() -> None:
    version = yaml.safe_load((ROOT / CRD).read_text())["spec"]["versions"][0]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    bare = {path for path, schema in fields("spec", spec) if not schema.get("description")}
    # Those of Kubernetes' own objects, and those of kinds that are not built yet.
    others = ("resources.", "imagePullSecrets.", "python.")
    assert not {path for path in bare if not any(other in path for other in others)}


def fields(path: str, schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """All fields below an object, with their paths."""
    found = []
    for name, inner in schema.get("properties", {}).items():
        found.append((f"{path}.{name}", inner))
        found += fields(f"{path}.{name}", inner.get("items", inner))
    return found
