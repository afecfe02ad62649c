"""When a task ships its output log: only while a reader is far behind, and never past the committed
entry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.protocol import PollRequest, RestorePoint, TaskRef
from rekindle.task.core.shipping import FAR_BEHIND_INTERVALS, WAIT_SHARE, ShipLog, ShippingCore

INTERVAL = 5
FAR_BEHIND = FAR_BEHIND_INTERVALS * INTERVAL
REF = TaskRef(segment="s", partition=0, replica=0, incarnation=1)


def poll(committed: int, floor: int | None, saver: bool = True) -> PollRequest:
    point = RestorePoint(epoch=committed, object="entry")
    return PollRequest(fence=1, generation=1, task=REF, committed=point, floor=floor, saver=saver)


def core_with(*epochs: int, left_out_intervals: int = 0) -> ShippingCore:
    core = ShippingCore(INTERVAL, left_out_intervals)
    for epoch in epochs:
        core.state_known(epoch, f"-1:{epoch}")
    return core


def test_nothing_is_shipped_while_all_readers_keep_up() -> None:
    core = core_with(FAR_BEHIND - 1)
    assert core.poll_accepted(poll(FAR_BEHIND - 1, floor=-1), 0.0) == []
    assert core.entries() == ()


def test_a_reader_that_is_far_behind_has_the_log_shipped() -> None:
    core = core_with(FAR_BEHIND)
    (request,) = core.poll_accepted(poll(FAR_BEHIND, floor=-1), 0.0)
    assert (request.first, request.through) == (0, FAR_BEHIND)
    assert core.entries() == (FAR_BEHIND,), "it is kept while it is being shipped"
    assert core.shipped(FAR_BEHIND, 1.0) == []
    assert core.entries() == (FAR_BEHIND,)


def test_checkpoints_that_may_be_left_out_make_no_reader_far_behind() -> None:
    core = core_with(FAR_BEHIND, left_out_intervals=30)
    assert core.poll_accepted(poll(FAR_BEHIND, floor=-1), 0.0) == []


def test_only_the_saver_ships() -> None:
    core = core_with(FAR_BEHIND)
    assert core.poll_accepted(poll(FAR_BEHIND, floor=-1, saver=False), 0.0) == []


def test_an_entry_of_which_the_output_is_not_known_is_not_shipped_through() -> None:
    core = core_with(FAR_BEHIND - INTERVAL)
    assert core.poll_accepted(poll(FAR_BEHIND, floor=-1), 0.0) == []


def test_the_floor_stays_while_it_is_unknown() -> None:
    core = core_with(FAR_BEHIND)
    core.poll_accepted(poll(0, floor=10), 0.0)
    assert core.poll_accepted(poll(FAR_BEHIND, floor=None), 0.0) == []


@pytest.mark.parametrize(("floor", "saver"), [(FAR_BEHIND, True), (-1, False)])
def test_a_failure_is_no_problem_once_nothing_has_to_be_shipped(floor: int, saver: bool) -> None:
    """As of a reader that catches up, so that the log is truncated while it is shipped."""
    core = core_with(FAR_BEHIND)
    core.poll_accepted(poll(FAR_BEHIND, floor=-1), 0.0)
    core.failed("an epoch is no longer in the log", 1.0)
    assert core.problem is not None
    core.poll_accepted(poll(FAR_BEHIND, floor, saver), 2.0)
    assert core.problem is None


def test_a_shipment_that_failed_is_tried_again_after_a_while() -> None:
    core = core_with(FAR_BEHIND)
    core.poll_accepted(poll(FAR_BEHIND, floor=-1), 0.0)
    assert core.failed("no store", 1.0) == []
    assert core.problem is not None
    assert core.woken(1.1) == []
    assert core.wake_at is not None
    (request,) = core.woken(core.wake_at)
    assert request.through == FAR_BEHIND
    core.shipped(FAR_BEHIND, 9.0)
    assert core.problem is None


def test_a_successor_goes_on_where_the_log_in_the_store_ends() -> None:
    core = core_with(FAR_BEHIND)
    core.adopted(FAR_BEHIND)
    assert core.poll_accepted(poll(FAR_BEHIND, floor=-1), 0.0) == []
    assert core.entries() == (FAR_BEHIND,)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["commit"] * 4 + ["ended", "ended", "failed", "caught up", "other saver"]),
        st.integers(1, 40),
    ),
    max_size=60,
)


@given(STEPS)
def test_no_shipment_passes_the_committed_entry_and_all_are_kept(
    steps: list[tuple[str, int]],
) -> None:
    """Whatever the order of commits and ends: what is in the store ends at an entry that responses
    have named since before the next one was committed."""
    core, committed, floor, now, saver = core_with(), -1, -1, 0.0, True
    requested: ShipLog | None = None
    named: tuple[int, ...] = ()
    for action, number in steps:
        now += 1.0
        found: list[ShipLog] = []
        match action:
            case "commit":
                committed += number * INTERVAL
                core.state_known(committed, f"-1:{committed}")
                if requested is not None:
                    assert requested.through in named or floor >= 0
            case "ended" if requested is not None:
                ended, requested = requested, None
                found = core.shipped(ended.through, now)
            case "failed" if requested is not None:
                requested = None
                found = core.failed("no store", now)
            case "caught up":
                floor = committed
            case "other saver":
                saver = not saver
        found += core.poll_accepted(poll(committed, floor, saver), now)
        if found:
            (requested,) = found
            assert requested.through == committed
            assert committed - floor > FAR_BEHIND
            assert saver
        named = core.entries()
        assert all(epoch <= committed for epoch in named)


def test_the_number_of_shipments_grows_slowly_in_a_long_wait() -> None:
    core, shipments, longest = core_with(), 0, 0.0
    shipped = -1
    for committed in range(INTERVAL - 1, 20_000 * INTERVAL, INTERVAL):
        core.state_known(committed, f"-1:{committed}")
        if core.poll_accepted(poll(committed, floor=-1), 0.0):
            core.shipped(committed, 0.0)
            shipments, shipped = shipments + 1, committed
        elif shipped >= 0:
            longest = max(longest, (committed - shipped) / (committed + 1))
    assert longest <= 1 / WAIT_SHARE
    assert shipments < 2500
