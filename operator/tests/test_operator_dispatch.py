"""Executing several actions in parallel: a call that hangs or fails delays no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle_operator.cluster.model import IncarnationRef
from rekindle_operator.dispatch import STALL_S, Dispatcher, Outcome
from rekindle_operator.reconcile.actions import (
    CreatePod,
    DeleteGenerationRecord,
    DeletePod,
    PlanRank,
    TopologyActions,
    WriteStatus,
)
from rekindle_operator.reconcile.schedule import ActionOrder, ScheduledAction, schedule
from rekindle_operator.retries import Retries
from rekindle_testing.waiting import wait_for

_TIMEOUT_S = 10.0


def scheduled(
    name: str, topology_key: str = "t", order: ActionOrder = ActionOrder.PLACE_PODS, after: str = ""
) -> ScheduledAction:
    """Of a topology in a namespace of its own, unless `topology_key` names both."""
    action = DeleteGenerationRecord(topology_key.partition("/")[0], name, f"uid-{name}")
    return ScheduledAction(
        topology_key, action, name, order, PlanRank(0, 0), (after,) if after else ()
    )


def deletion(
    name: str, namespace: str = "t", order: ActionOrder = ActionOrder.CLEAN_UP
) -> ScheduledAction:
    action = DeletePod(namespace, name, uid="", version=1, grace_s=None, why="")
    return ScheduledAction(namespace, action, name, order, PlanRank(0, 0))


@dataclass
class Doer:
    """Executes actions, of which those fail whose keys begin with `fail`, those with `bug` raise an
    error of the operator's own, and those with `hang` hang until released."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def __call__(self, scheduled: ScheduledAction) -> Outcome:
        if scheduled.key.startswith("hang"):
            self.released.wait(_TIMEOUT_S)
        self.done.append(scheduled.key)
        if scheduled.key.startswith("bug"):
            raise KeyError(scheduled.key)
        return Outcome.FAILED if scheduled.key.startswith("fail") else Outcome.DONE

    def skip(self, scheduled: ScheduledAction) -> None:
        self.skipped.append(scheduled.key)


@pytest.fixture
def doer() -> Iterator[Doer]:
    made = Doer()
    yield made
    made.released.set()


def dispatcher(
    doer: Doer,
    workers: int = 8,
    clock: Callable[[], float] = lambda: 0.0,
    stall_s: float = STALL_S / 5,
) -> Dispatcher:
    """By default, a call may take a fifth of the usual time."""
    retries = Retries(lambda: 1.0)  # without jitter
    return Dispatcher(
        doer,
        doer.skip,
        clock,
        may_act=lambda: True,
        retries=retries,
        workers=workers,
        stall_s=stall_s,
    )


def test_calls_that_hang_delay_no_other_topology(doer: Doer) -> None:
    hanging = [scheduled(f"hang{n}", "bad") for n in range(20)]
    others = [scheduled(f"good{n}", "good") for n in range(20)]
    started = time.monotonic()
    dispatcher(doer).run([*hanging, *others])
    assert time.monotonic() - started < _TIMEOUT_S / 2
    assert sorted(doer.done) == sorted(s.key for s in others)


@pytest.mark.process  # in each example, calls hang for real
@given(
    hanging=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    good=st.integers(1, 3),
    data=st.data(),
)
def test_however_many_namespaces_hang_the_others_are_served(
    hanging: list[int], good: int, data: Any
) -> None:
    """`hanging`: topologies in each namespace all of whose calls hang, whatever comes first."""
    actions = [
        scheduled(f"hang{space}-{topology}-{n}", f"bad{space}/t{topology}")
        for space, topologies in enumerate(hanging)
        for topology in range(topologies)
        for n in range(4)
    ]
    wanted = [scheduled(f"ok{n}", f"good{n % good}/t") for n in range(2 * good)]
    doer = Doer()
    try:
        dispatcher(doer).run(data.draw(st.permutations([*actions, *wanted])))
        assert sorted(doer.done) == sorted(s.key for s in wanted)
    finally:
        doer.released.set()


def test_each_namespace_gets_two_workers_before_any_gets_more(
    doer: Doer,
) -> None:
    bad = [scheduled(f"hang{n}", f"bad/t{n}") for n in range(8)]
    good = [scheduled(f"ok{n}", f"good/t{n}") for n in range(8)]
    begun: list[str] = []

    def do(scheduled: ScheduledAction) -> Outcome:
        begun.append(scheduled.key)
        doer.released.wait(_TIMEOUT_S)
        return doer(scheduled)

    doing = Dispatcher(
        do,
        doer.skip,
        clock=lambda: 0.0,
        may_act=lambda: True,
        retries=Retries(lambda: 1.0),
        workers=8,
        stall_s=60.0,
    )
    running = threading.Thread(target=doing.run, args=([*bad, *good],))
    running.start()
    wait_for("eight are begun", lambda: len(begun) == 8)
    assert sorted(begun)[:2] == ["hang0", "hang1"]
    assert len([key for key in begun if key.startswith("ok")]) >= 2
    doer.released.set()
    running.join(_TIMEOUT_S)


def test_a_call_that_hangs_is_not_repeated(doer: Doer) -> None:
    doing = dispatcher(doer)
    doing.run([scheduled("hang")])
    doing.run([scheduled("hang"), scheduled("next", after="hang")])
    assert doer.skipped == ["next"], "its result is unknown"
    doer.released.set()
    wait_for("the call ends", lambda: doer.done == ["hang"])


def test_what_a_replica_that_leads_no_longer_had_to_do_is_skipped(doer: Doer) -> None:
    """Its term may go on, if only its renewal was late: Events come later, and a pod that was not
    created is known as such."""
    leads = [True, True, False, True]
    doing = Dispatcher(
        doer,
        doer.skip,
        clock=lambda: 0.0,
        may_act=lambda: leads.pop(0),
        retries=Retries(lambda: 1.0),
        workers=1,
    )
    event = scheduled("event", order=ActionOrder.EMIT_EVENTS)
    doing.run([*(scheduled(f"pod{n}") for n in range(4)), event])
    assert doer.done == ["pod0", "pod1"]
    assert doer.skipped == ["pod2", "pod3"]
    doing.run([])
    assert doer.done == ["pod0", "pod1", "event"]


def test_events_of_an_earlier_term_are_not_written(doer: Doer) -> None:
    leads = [False, True]
    doing = Dispatcher(
        doer, doer.skip, lambda: 0.0, may_act=lambda: leads.pop(0), retries=Retries(lambda: 1.0)
    )
    doing.run([scheduled("event", order=ActionOrder.EMIT_EVENTS)])
    doing.forget_events()
    doing.run([])
    assert doer.done == []


class QuotaDoer(Doer):
    """Pods whose names begin with `hang` are refused, once they are released; what begins with
    `then` ends after that."""

    def __call__(self, scheduled: ScheduledAction) -> Outcome:
        if scheduled.key.startswith("then"):
            wait_for("the refusal", lambda: "hang" in self.done)
        super().__call__(scheduled)
        return Outcome.POD_REFUSED if scheduled.key.startswith("hang") else Outcome.DONE


def test_a_late_refusal_is_not_retried_after_its_pass(doer: Doer) -> None:
    """Later passes decide again whether there is to be a pod."""
    doer = QuotaDoer(released=doer.released)
    doing = dispatcher(doer)
    doing.run([scheduled("hang"), deletion("delete")])
    doer.released.set()
    wait_for("the call ends", lambda: "hang" in doer.done)
    doing.run([deletion("delete")])
    assert doer.done.count("hang") == 1


@pytest.mark.parametrize("order", [ActionOrder.PREPARE, ActionOrder.CLEAN_UP])
def test_a_refusal_is_retried_in_a_pass_that_still_wants_the_pod(
    doer: Doer, order: ActionOrder
) -> None:
    doer = QuotaDoer(released=doer.released)
    doing = dispatcher(doer)
    doing.run([scheduled("hang")])
    releasing = threading.Timer(0.05, doer.released.set)
    releasing.start()
    doing.run([scheduled("hang"), deletion("then-delete", order=order)])
    releasing.join()
    assert doer.done.count("hang") == 2


@pytest.mark.parametrize(
    "clean_up",
    [scheduled("then-budget", order=ActionOrder.CLEAN_UP), deletion("then-delete", "another")],
    ids=["of another kind", "in another namespace"],
)
def test_a_refusal_is_not_retried_where_no_pod_is_deleted(
    doer: Doer, clean_up: ScheduledAction
) -> None:
    """No room was made; a second request would only double the wait."""
    doer = QuotaDoer(released=doer.released)
    doer.released.set()
    dispatcher(doer).run([scheduled("hang"), clean_up])
    assert doer.done.count("hang") == 1


def test_an_event_is_kept_for_the_next_pass(doer: Doer) -> None:
    doing = dispatcher(doer, workers=1)
    doing.run([scheduled("hang"), scheduled("event", order=ActionOrder.EMIT_EVENTS, after="hang")])
    doer.released.set()
    wait_for("the call ends", lambda: doer.done == ["hang"])
    doing.run([])
    assert doer.done == ["hang", "event"]


def test_dependents_of_a_failed_action_are_skipped(doer: Doer) -> None:
    actions = [
        scheduled("fail"),
        scheduled("child", after="fail"),
        scheduled("grandchild", after="child"),
    ]
    dispatcher(doer, workers=1).run([*actions, scheduled("other")])
    assert doer.done == ["fail", "other"]
    assert sorted(doer.skipped) == ["child", "grandchild"]


def test_a_worker_that_fails_between_two_actions_ends_no_pass(doer: Doer) -> None:
    def skip(_: ScheduledAction) -> None:
        raise KeyError("an internal error")

    doing = Dispatcher(doer, skip, lambda: 0.0, lambda: True, Retries(lambda: 1.0), 1)
    doing.run([scheduled("fail"), scheduled("child", after="fail"), scheduled("other")])
    assert doer.done == ["fail", "other"]


def test_an_error_of_the_operator_is_retried_with_back_off(doer: Doer) -> None:
    now = [0.0]
    # No call hangs, also on a busy machine.
    doing = dispatcher(doer, workers=1, clock=lambda: now[0], stall_s=_TIMEOUT_S)
    for _ in range(100):
        doing.run([scheduled("bug"), scheduled("other")])
        now[0] += 1.0
    assert doer.done.count("other") == 100
    assert 5 <= doer.done.count("bug") <= 12


def test_dependents_start_after_what_they_need(doer: Doer) -> None:
    actions = [scheduled("hang", order=ActionOrder.PREPARE), scheduled("pod", after="hang")]
    threading.Timer(STALL_S / 100, doer.released.set).start()
    dispatcher(doer).run(actions)
    assert doer.done == ["hang", "pod"]


_OUTCOMES = st.sampled_from(["ok", "fail", "bug"])


@given(
    topologies=st.lists(
        st.tuples(_OUTCOMES, st.lists(st.tuples(_OUTCOMES, st.integers(0, 5)), max_size=5)),
        max_size=5,
    ),
    workers=st.integers(1, 8),
)
def test_no_pod_is_created_before_its_reservation(topologies: Any, workers: int) -> None:
    """I9, whatever fails: and what depends on nothing that failed is done."""
    decisions, expected = [], set()
    for number, (status, pods) in enumerate(topologies):
        uid, created = f"t{number}", []
        for at, (outcome, rank) in enumerate(pods):
            name = f"{outcome}-{uid}-{at}"
            manifest = {"metadata": {"name": name}}
            created.append(
                (CreatePod("ns", manifest, IncarnationRef(uid, name, 1)), PlanRank(0, rank))
            )
            expected |= {name} if status == "ok" else set()
        new_incarnations = frozenset(pod.ref for pod, _ in created)
        write = WriteStatus(
            "ns", f"{status}-{uid}", uid, 1, {}, {}, urgent=True, new_incarnations=new_incarnations
        )
        ranks = {pod.name: rank for pod, rank in created}
        decisions.append(TopologyActions(uid, (*(pod for pod, _ in created), write), ranks=ranks))
    done: list[str] = []

    def do(scheduled: ScheduledAction) -> Outcome:
        name = getattr(scheduled.action, "name", "")
        done.append(name)
        if name.startswith("bug"):
            raise KeyError(name)
        return Outcome.FAILED if name.startswith("fail") else Outcome.DONE

    doing = Dispatcher(do, lambda _: None, lambda: 0.0, lambda: True, Retries(lambda: 1.0), workers)
    doing.run(schedule(decisions))
    created_names = {name for name in done if name.count("-") == 2}
    assert created_names == expected
    for name in created_names:
        uid = name.split("-")[1]
        assert done.index(f"ok-{uid}") < done.index(name)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_back_off_grows_to_half_a_minute_and_no_further(jitters: list[float]) -> None:
    numbers = iter(jitters)
    retries = Retries(lambda: next(numbers))
    waits = [retries.failed("k", 0.0) for _ in jitters]
    assert waits[0] == 0.0
    assert all(0.25 <= wait <= 30.0 for wait in waits[1:])
    assert all(wait >= 15.0 for wait in waits[8:])


def test_back_off_forgets_actions_that_are_not_retried() -> None:
    retries = Retries(lambda: 1.0)
    retries.failed("k", 0.0)
    retries.forget_old(599.0)
    assert len(retries) == 1
    retries.forget_old(601.0)
    assert len(retries) == 0
