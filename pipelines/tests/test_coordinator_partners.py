"""What the coordinator tells tasks of each other, so that they stabilize one after another."""

from __future__ import annotations

import pytest

from rekindle.coordinator.model import Pod
from rekindle.coordinator.tasks.membership import Membership
from rekindle.coordinator.tasks.routes import partner, serving_replicas
from rekindle.protocol import (
    ConsistencyState,
    Partner,
    PollResponse,
    Postponement,
    PostponementAnswer,
    TaskPhase,
    TaskRef,
)
from rekindle.topology.model import Slot, partition_of

ASKS = Postponement(number=3, lease_s=10)
ANSWER = PostponementAnswer(boot="boot 0", number=2, promised=True)


def pod(slot: Slot) -> Pod:
    address = f"10.0.0.{slot.replica}"
    return Pod(str(slot.replica), slot, 1, address, may_be_running=True, was_ready=True)


def members(replicas: int, **last: object) -> Membership:
    """Replicas of one partition that serve; `last`: fields of the response of the last one."""
    slots = [Slot("seg", 0, replica) for replica in range(replicas)]
    found = Membership()
    pods = [pod(s) for s in slots]
    found.pods_listed(pods, 0)
    for slot in slots:
        ref = TaskRef(segment="seg", partition=0, replica=slot.replica, incarnation=1)
        response = PollResponse(
            task=ref, boot_id=f"boot {slot.replica}", fence=1, phase=TaskPhase.LIVE
        )
        if slot == slots[-1]:
            response = response.model_copy(update=last)
        task = found.get(slot)
        assert task is not None
        found.answered(task, response, 0.0)
    return found


def partner_of(found: Membership, replica: int, suspected: int | None = None) -> Partner | None:
    slot = Slot("seg", 0, replica)
    serving = serving_replicas(found, is_untrusted=lambda _: False)[partition_of(slot)]
    return partner(slot, serving, lambda task: task.slot.replica == suspected)


def test_a_poll_says_what_the_partner_asks_and_answers() -> None:
    found = members(2, asks=ASKS, answer=ANSWER)
    assert partner_of(found, 0) == Partner(replica=1, boot="boot 1", asks=ASKS, answer=ANSWER)
    assert partner_of(found, 1) == Partner(replica=0, boot="boot 0")


@pytest.mark.parametrize(("replica", "expected"), [(0, 1), (1, 0), (2, None)])
def test_each_is_the_partner_of_its_partner(replica: int, expected: int | None) -> None:
    found = partner_of(members(3), replica)
    assert (found.replica if found is not None else None) == expected


def test_a_suspected_replica_is_no_partner() -> None:
    assert partner_of(members(2), 0, suspected=1) is None


def test_a_change_of_the_output_is_reported_at_once() -> None:
    found = members(1)
    task = found.get(Slot("seg", 0, 0))
    assert task is not None
    assert task.response is not None
    assert not found.answered(task, task.response, 0.1)
    failure = {"consistency": ConsistencyState.UP_FAILURE}
    assert found.answered(task, task.response.model_copy(update=failure), 0.2)
