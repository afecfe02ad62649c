"""Containers that fail beside those of tasks and coordinator, for `status` and Events. Pure.

They are the user's (`podTemplate`) or were added by an admission webhook: what they do replaces no
pod.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle_operator.reconcile.context import ReconcileContext, coordinator_pods
from rekindle_operator.reconcile.slots import SlotState

_SHOWN_FOR_S = 600.0  # after the last crash; a container that runs for so long has recovered


def failing_sidecars(context: ReconcileContext, states: Sequence[SlotState]) -> list[str]:
    """A text for each container, by name: of the first pod that has it, and of how many others."""
    pods = [(s.name, s.pod) for s in states if s.pod is not None]
    pods += [("the coordinator", p) for p in coordinator_pods(context)]
    found: dict[str, list[str]] = {}
    for name, pod in pods:
        is_recent = context.pass_inputs.now - pod.sidecar_failed_at < _SHOWN_FOR_S
        if pod.sidecar_error and is_recent and not pod.ended:
            container, _, why = pod.sidecar_error.partition(": ")
            found.setdefault(container, []).append(f"of {name} fails: {why}")
    return [
        f"{container} {first}" + (f" (and of {len(others)} more pods)" if others else "")
        for container, (first, *others) in sorted(found.items())
    ]
