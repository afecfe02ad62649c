"""Which states a task lends, for how long, and under which names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from state_parts import count_state

from rekindle.protocol import RestorePoint
from rekindle.task.core.lending import LEND_S, LendingCore
from rekindle.task.core.snapshots import Snapshots
from rekindle.task.state import TaskState


def state(epoch: int) -> TaskState:
    return TaskState(epoch, 0, count_state("op", epoch))


def lending(snapshots: Snapshots | None = None, boot: str = "b1") -> LendingCore:
    return LendingCore(boot, snapshots or Snapshots())


def test_the_newest_state_is_lent_once_a_poll_asks_for_it() -> None:
    core = lending()
    assert core.newest is None
    core.requested(state(7), 5, now=0.0)
    newest = core.newest
    assert newest is not None
    assert (newest.epoch, newest.lender) == (7, None)
    assert newest.object is not None
    found = core.read(newest.object, now=1.0)
    assert found is not None
    assert found.epoch == 7


def test_a_state_that_is_lent_already_is_not_replaced() -> None:
    core = lending()
    core.requested(state(7), 5, now=0.0)
    core.requested(state(9), 7, now=1.0)
    assert core.newest is not None
    assert core.newest.epoch == 7


def test_a_state_that_is_asked_for_again_does_not_expire_before_it_can_be_read() -> None:
    core = lending()
    core.requested(state(7), 5, now=0.0)
    core.requested(state(9), 7, now=LEND_S - 1)
    assert core.wake_at == 2 * LEND_S - 1


def test_a_newer_state_is_lent_beside_one_that_is_still_read() -> None:
    core = lending()
    core.requested(state(7), 5, now=0.0)
    older = core.newest
    core.requested(state(9), 8, now=1.0)
    assert core.newest is not None
    assert core.newest.epoch == 9
    assert older is not None
    assert older.object is not None
    assert core.read(older.object, now=2.0) is not None


def test_a_task_that_is_behind_the_checkpoint_lends_nothing() -> None:
    core = lending()
    core.requested(state(7), 8, now=0.0)
    assert core.newest is None


def test_what_nobody_reads_expires() -> None:
    snapshots = Snapshots()
    core = lending(snapshots)
    core.requested(state(7), 5, now=0.0)
    newest = core.newest
    assert newest is not None
    assert newest.object is not None
    assert core.read(newest.object, now=LEND_S - 1) is not None
    assert core.wake_at == 2 * LEND_S - 1
    core.woken(now=2 * LEND_S - 1)
    assert core.newest is None
    assert not snapshots.held(state(8).operators)
    assert core.read(newest.object, now=2 * LEND_S) is None


def test_nothing_is_lent_while_there_are_too_many_snapshots() -> None:
    core = lending(Snapshots(most=0))
    core.requested(state(7), 5, now=0.0)
    assert core.newest is None


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "read", "wait", "boot"]), st.integers(0, 12)), max_size=30
)


@given(steps)
def test_a_name_is_of_one_state_in_any_history(history: list[tuple[str, int]]) -> None:
    snapshots, epoch, now, boot = Snapshots(), 0, 0.0, 0
    core = lending(snapshots, f"b{boot}")
    known: dict[str, int] = {}  # by name, the epoch
    for step, number in history:
        epoch += number % 3
        match step:
            case "ask":
                core.requested(state(epoch), epoch - number, now)
                newest = core.newest
                if newest is not None and newest.object is not None:
                    assert known.setdefault(newest.object, newest.epoch) == newest.epoch
            case "read":
                for name, lent_epoch in known.items():
                    found = core.read(name, now)
                    assert found is None or found.epoch == lent_epoch
            case "wait":
                now += number * 5
                core.woken(now)
            case "boot":
                boot, snapshots = boot + 1, Snapshots()
                core = lending(snapshots, f"b{boot}")
                assert not any(core.read(name, now) for name in known)
    core.woken(now + LEND_S)
    assert not snapshots.held(state(epoch).operators)


def test_a_restore_point_without_a_lender_is_in_the_store() -> None:
    """As releases before lending send it."""
    assert RestorePoint.model_validate({"epoch": 3, "object": "e"}).lender is None
