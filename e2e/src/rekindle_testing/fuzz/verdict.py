"""The outcome for a manifest that the API server accepted, read from its object. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from rekindle import names

_NAMES_A_FIELD = re.compile(r"(spec|metadata)\b")


class Verdict(StrEnum):
    REJECTED = "rejected by the API server"
    REFUSED = "refused by the operator"
    ACCEPTED = "accepted and reconciled"


def verdict(topology: Mapping[str, Any]) -> Verdict | None:
    """The verdict on the newest generation; None while the operator has not validated it."""
    valid = condition(topology, "Valid")
    if valid.get("observedGeneration") != topology["metadata"]["generation"]:
        return None
    match valid.get("status"):
        case "True":
            return Verdict.ACCEPTED
        case "False":
            return Verdict.REFUSED
    return None


def condition(topology: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    conditions = (topology.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind), {})


def violations(topology: Mapping[str, Any], pods: int) -> list[str]:
    """What is wrong with a topology that has settled. `pods`: how many exist for it."""
    found = []
    status = topology.get("status") or {}
    generation = topology["metadata"]["generation"]
    outcome, message = verdict(topology), str(condition(topology, "Valid").get("message"))
    digests = {e["generation"] for e in status.get("generations") or () if e.get("digest")}
    if outcome is None:
        found.append(f"generation {generation} got no condition Valid: {message}")
    if status.get("observedGeneration") != generation:
        found.append(f"observedGeneration is {status.get('observedGeneration')}")
    if not status.get("phase"):
        found.append("has no phase")
    if outcome is Verdict.REFUSED and not _NAMES_A_FIELD.match(message):
        found.append(f"the message names no field: {message}")
    if outcome is Verdict.ACCEPTED and generation not in digests:
        found.append(f"generation {generation} is accepted without a record")
    if not digests and pods:
        found.append(f"{pods} pods of a topology that was never accepted")
    if (degraded := condition(topology, "Degraded")).get("status") != "False":
        found.append(f"Degraded: {degraded.get('reason')}: {degraded.get('message')}")
    slots = [str(s["slot"]) for s in status.get("slots") or ()]
    # Removed slots have no pods.
    wanted = sum(not slot.startswith(f"{names.ALL_REMOVED_SEGMENTS}/") for slot in slots)
    if outcome is Verdict.ACCEPTED:
        suspended = bool(topology["spec"].get("suspend"))
        if suspended and pods:
            found.append(f"{pods} pods of a suspended topology")
        if not suspended and pods < wanted:
            found.append(f"{pods} of {wanted} pods: {status.get('queries')}")
    return found
