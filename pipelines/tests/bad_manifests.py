"""The table `bad_manifests.yaml` as manifests, for unit tests and for e2e/tests/test_crd.py."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_TABLE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True, slots=True)
class BadManifest:
    """`path` and `reason`: of one of the problems that validation finds; `says`: part of its text.
    `server`: part of the API server's refusal, None if it accepts the manifest."""

    name: str
    manifest: dict[str, Any]
    path: str
    reason: str
    says: str
    server: str | None


def good_manifest() -> dict[str, Any]:
    """The manifest that the others are changes of."""
    return copy.deepcopy(_table()["base"])


def bad_manifests() -> list[BadManifest]:
    return [_read(case) for case in _table()["cases"]]


@cache
def _table() -> Any:
    return yaml.safe_load(_TABLE.read_text())


def _read(case: dict[str, Any]) -> BadManifest:
    manifest = good_manifest()
    manifest["metadata"]["name"] = case["name"]
    for path, value in case["set"].items():
        _set(manifest, path, value)
    return BadManifest(
        case["name"],
        manifest,
        case["path"],
        case["reason"],
        case.get("says", ""),
        case.get("server"),
    )


def _set(manifest: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = [int(p) if p.isdigit() else p for p in re.findall(r"[^.\[\]]+", path)]
    target: Any = manifest
    for part in parents:
        target = target[part]
    if value is None:
        target.pop(last, None)
    else:
        target[last] = copy.deepcopy(value)
