"""Two replicas that stabilize one after another: their messages go by polls."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import Mock, call

import pytest
from consistency_world import SCHEMA, failure_free
from hypothesis import given
from task_consistency_world import CoreReplicas, WorldOptions, play_cuts, records_of
from test_consistency_histories import SEEDS, X_S, check_output, drawn_cuts

from rekindle.consistency.messages import (
    AnswerPartner,
    ConsistencySettings,
    EndPostponement,
    Policy,
    RequestPostponement,
)
from rekindle.protocol import ConsistencyState, Partner, Postponement, PostponementAnswer
from rekindle.streams.epochs import NO_EPOCH, BatchKind
from rekindle.task.core.partner import PartnerMessages
from rekindle.task.core.streams import UNANSWERED_S, StreamsCore

pytestmark = pytest.mark.simulated

SLOW = WorldOptions(
    max_delay_s=X_S, during_stabilization=Policy.SUSPEND, call_epochs=2, process_epoch_s=0.1
)


def common_failure(seconds: float) -> CoreReplicas:
    world = CoreReplicas(SLOW)
    world.run(10)
    for link in (1, 3):
        world.cut(link)
    world.run(10 + seconds)
    world.heal_all()
    return world


def test_replicas_correct_themselves_one_after_the_other() -> None:
    world = common_failure(40)
    world.run(80)
    ends = [
        (
            records_of(task, BatchKind.UNDO)[0].at,
            records_of(task, BatchKind.RECONCILIATION_DONE)[0].at,
        )
        for task in world.tasks
    ]
    (first_began, first_ended), (second_began, second_ended) = sorted(ends)
    assert first_began < first_ended <= second_began < second_ended
    assert [task.streams.state for task in world.tasks] == [ConsistencyState.STABLE] * 2


def test_a_replica_whose_partner_is_lost_does_not_wait() -> None:
    world = common_failure(40)
    world.not_polled = {1}
    world.run(55)
    assert records_of(world.tasks[0], BatchKind.UNDO)
    world.run(80)
    assert world.tasks[0].streams.state is ConsistencyState.STABLE


def test_both_correct_themselves_at_once_without_a_coordinator() -> None:
    """Nobody carries what they ask; a call takes longer than an epoch."""
    world = CoreReplicas(WorldOptions(max_delay_s=X_S, call_s=1.2, call_epochs=64))
    world.run(10)
    for link in (1, 3):
        world.cut(link)
    world.run(40)
    world.not_polled = {0, 1}
    world.heal_all()
    world.run(110)
    for task in world.tasks:
        assert task.streams.state is ConsistencyState.STABLE
        assert task.streams.stable_epoch >= world.epochs - 4


@given(SEEDS)
def test_both_end_stable_and_equal(seed: int) -> None:
    random = Random(seed)
    world = CoreReplicas(replace(SLOW, during_stabilization=random.choice(list(Policy))))
    play_cuts(world, drawn_cuts(random, len(world.links)), settle_s=25)
    expected = failure_free(world.options, world.epochs)[0]
    for task in world.tasks:
        check_output(task)
        assert task.streams.state is ConsistencyState.STABLE
        got = [record.value for record in task.stream.stable]
        assert len(got) >= world.epochs - 4
        assert got == expected[: len(got)]


# --- the messages ---


def streams() -> StreamsCore:
    """Of replica 1, after epoch 9."""
    made = ConsistencySettings([[0], [0]], [SCHEMA, SCHEMA], max_delay_s=X_S, replica=1)
    return StreamsCore(made, next_epoch=10, watermark=-1)


ASKING = Partner(replica=0, boot="a", asks=Postponement(number=1, lease_s=10.0))


def test_a_replica_that_is_not_live_yet_does_not_promise_to_serve() -> None:
    replica = streams()
    replica.update_partner(ASKING, "b", 1.0)
    assert replica.partner.answer is None
    replica.allow_tentative(2.0)
    replica.update_partner(ASKING, "b", 2.5)
    assert replica.partner.answer == PostponementAnswer(boot="a", number=1, promised=True)


def test_a_replica_whose_tentative_epochs_fail_does_not_promise_to_serve() -> None:
    replica = streams()
    replica.allow_tentative(0.0)
    replica._retry_at = 10.0
    replica.update_partner(ASKING, "b", 1.0)
    assert replica.partner.answer is None


@pytest.mark.parametrize(
    ("heads", "missing"), [((NO_EPOCH, 90), True), ((90, 90), False), ((NO_EPOCH, NO_EPOCH), False)]
)
def test_an_input_without_responses_is_missing(heads: tuple[int, int], missing: bool) -> None:
    replica = streams()
    replica.check_heads(heads, 0.0)
    replica.check_heads(heads, UNANSWERED_S - 1)
    assert not replica._tentative_allowed
    replica.check_heads(heads, UNANSWERED_S)
    assert replica._tentative_allowed is missing


def test_a_task_without_a_checkpoint_waits_for_all_inputs() -> None:
    settings = ConsistencySettings([[0], [0]], [SCHEMA, SCHEMA], max_delay_s=X_S)
    first = StreamsCore(settings, next_epoch=0, watermark=-1)
    first.check_heads((NO_EPOCH, 90), 0.0)
    first.check_heads((NO_EPOCH, 90), 1000.0)
    assert not first._tentative_allowed


def received(messages: PartnerMessages, partner: Partner | None, boot: str) -> list[Any]:
    """The calls that messages of the partner lead to."""
    core = Mock()
    for event in messages.receive(partner, boot):
        event(core, 0.0)
    return core.mock_calls


def test_a_partner_that_is_lost_for_a_moment_has_not_asked_again() -> None:
    messages = PartnerMessages()
    messages.receive(ASKING, "b")
    messages.send(AnswerPartner(promised=True, lease_s=10))
    messages.receive(None, "b")
    assert received(messages, ASKING, "b") == [call.partner_changed(True, 0.0)]


def test_a_repeated_request_is_received_once() -> None:
    messages = PartnerMessages()
    partner = Partner(replica=1, boot="b", asks=Postponement(number=1, lease_s=10))
    assert received(messages, partner, "a") == [
        call.partner_changed(True, 0.0),
        call.postponement_requested(1, 10, 0.0),
    ]
    messages.send(AnswerPartner(promised=True, lease_s=10))
    assert messages.answer == PostponementAnswer(boot="b", number=1, promised=True)
    assert messages.receive(partner, "a") == []
    ended = partner.model_copy(update={"asks": Postponement(number=2, lease_s=0)})
    assert received(messages, ended, "a") == [call.promise_ended(0.0)]


def test_an_answer_to_an_older_request_is_ignored() -> None:
    """Its lease would be counted from the newer one."""
    messages = PartnerMessages()
    partner = Partner(replica=1, boot="b")
    messages.receive(partner, "a")
    messages.send(RequestPostponement(10))
    messages.send(RequestPostponement(10))

    def answered(number: int, boot: str = "a", promised: bool = True) -> Partner:
        answer = PostponementAnswer(boot=boot, number=number, promised=promised)
        return partner.model_copy(update={"answer": answer})

    assert messages.receive(answered(1), "a") == []
    assert messages.receive(answered(2, boot="an earlier boot"), "a") == []
    assert received(messages, answered(2), "a") == [call.partner_promised(10, 0.0)]
    assert messages.receive(answered(2), "a") == []
    messages.send(RequestPostponement(10))
    assert received(messages, answered(3, promised=False), "a") == [call.partner_refused(0.0)]
    messages.send(EndPostponement())
    assert messages.asks == Postponement(number=4, lease_s=0)


def test_a_partner_that_restarts_is_another_one() -> None:
    messages = PartnerMessages()
    messages.receive(Partner(replica=1, boot="b"), "a")
    messages.send(RequestPostponement(10))
    after = received(messages, Partner(replica=1, boot="c"), "a")
    assert after == [call.partner_changed(False, 0.0), call.partner_changed(True, 0.0)]
    assert messages.asks == Postponement(number=2, lease_s=0)
    assert received(messages, None, "a") == [call.partner_changed(False, 0.0)]
