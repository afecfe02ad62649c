"""Bugs that are planted in the operator, each of which simulations must find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rekindle_operator import execute
from rekindle_operator.election import Candidate
from rekindle_operator.leader import Leader
from rekindle_operator.reconcile import coordinator, core, slots
from rekindle_operator.reconcile.actions import WriteStatus
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery import losses
from rekindle_operator.recovery.losses import Loss
from rekindle_operator.recovery.misfits import NodeCapacity
from rekindle_operator.recovery.unready import Unready
from rekindle_testing.simulation.planting import Mutant, replaced


def _suspected_is_lost(loss_of_pod: Any) -> Any:
    """A task whose node may only be slow is replaced without further evidence."""

    def wrong(pod: Any, assessment: Any, snapshot: Any, now: float, timing: Any) -> Any:
        if pod.node is not None and pod.ref in snapshot.suspects_silent_since:
            return Loss.SILENT
        return loss_of_pod(pod, assessment, snapshot, now, timing)

    return wrong


def _forgets_reserved(next_incarnation: Any) -> Any:
    """The next incarnation follows that of the pod that exists."""

    def wrong(self: SlotState) -> int:
        return (self.pod.incarnation if self.pod is not None else 0) + 1

    return property(wrong)


def _creates_first(schedule: Any) -> Any:
    """Pods are created before the status that reserves their incarnations is written."""

    def wrong(decisions: Any) -> Any:
        scheduled = [replace(s, after=()) for s in schedule(decisions)]
        return sorted(scheduled, key=lambda s: isinstance(s.action, WriteStatus))

    return wrong


def _nothing_uses_capacity(measure_capacity: Any) -> Any:
    def wrong(pass_inputs: Any, cancelled: Any, coordinators: Any) -> Any:
        empty = replace(pass_inputs, snapshot=replace(pass_inputs.snapshot, pods=()))
        return measure_capacity(empty, cancelled, coordinators)

    return wrong


def _forgets_waiting(with_pods_to_place: Any) -> Any:
    """The plan leaves out pods that were gated for a while."""

    def wrong(plan_input: Any) -> Any:
        found, now = with_pods_to_place(plan_input), plan_input.context.pass_inputs.now
        waits = {
            key: candidate
            for key, candidate in found.candidates.items()
            if candidate.pod is None or now - candidate.pod.created_at < 5.0
        }
        return replace(found, candidates=waits)

    return wrong


def _ignores_replicas(fits: Any) -> Any:
    return lambda self, pod: fits(replace(self, replicas=frozenset()), pod)


def _takes_lease_at_once(is_free: Any) -> Any:
    return lambda self: self.seen is not None


def _acts_in_any_term(may_act: Any) -> Any:
    return lambda self: True


def _impatient_with_coordinators(why_silent: Any) -> Any:
    """A coordinator is replaced if it missed one renewal."""

    def wrong(context: Any, pod: Any, lease: Any) -> str:
        is_late = (
            lease is not None
            and lease.holder == str(pod.incarnation)
            and context.pass_inputs.now - lease.seen_at > 1.0
        )
        return "it is late" if is_late else str(why_silent(context, pod, lease))

    return wrong


def _not_ready_is_lost(assess_unready: Any) -> Any:
    """A node whose kubelet does not reach the API server is lost, whatever responds there."""

    def wrong(snapshot: Any, occupied: Any, evidence: Any, now: float, timing: Any) -> Any:
        return Unready(frozenset(node.name for node in snapshot.nodes if not node.ready))

    return wrong


def _waits_for_coordinators_pod(why_replaced: Any) -> Any:
    return lambda context, newest, lease: "" if newest is not None else "it has no pod"


OPERATOR_MUTANTS: Mapping[str, Mutant] = {
    "a suspected task is replaced at once": replaced(slots, "loss_of_pod", _suspected_is_lost),
    "reserved incarnations are forgotten": replaced(
        SlotState, "next_incarnation", _forgets_reserved
    ),
    "pods are created before their incarnations are reserved": replaced(
        execute, "schedule", _creates_first
    ),
    "the plan ignores what runs": replaced(core, "measure_capacity", _nothing_uses_capacity),
    "the plan forgets pods that wait": replaced(core, "with_pods_to_place", _forgets_waiting),
    "replicas may share a node": replaced(NodeCapacity, "fits", _ignores_replicas),
    "the operator's Lease is taken at once": replaced(Candidate, "_is_free", _takes_lease_at_once),
    "a replica acts after its term": replaced(Leader, "may_act", _acts_in_any_term),
    "a coordinator is replaced for one late renewal": replaced(
        coordinator, "_why_silent", _impatient_with_coordinators
    ),
    "a node that is not Ready is lost": replaced(losses, "assess_unready", _not_ready_is_lost),
    "a coordinator stays until its pod is gone": replaced(
        coordinator, "_why_replaced", _waits_for_coordinators_pod
    ),
}
