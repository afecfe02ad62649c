"""Cut records of live sources: which epochs a reader defines, adopts and releases."""

from __future__ import annotations

from typing import Any

import cut_world
import pytest
from cut_world import Content, Reader, World
from hypothesis import given
from hypothesis import strategies as st

from rekindle.connectors.cut_records import CutRecord, decode_cut_record, encode_cut_record
from rekindle.connectors.live_source import Reach
from rekindle.connectors.planned_cuts import (
    RECHECK_S,
    CreateRecord,
    CutsOvertaken,
    FindEnds,
    ListRecords,
    PlannedCuts,
    ReadRecord,
    ReadRows,
    WatermarkRule,
)
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK

STEPS = 1_500
FIRST = CutRecord(0, 2, {"0": 0, "1": 0}, {"0": 10, "1": 4}, {"0": 100, "1": 70}, watermark=70)


NO_RULE = WatermarkRule()


def reader(next_epoch: int = 3, rule: WatermarkRule = NO_RULE) -> PlannedCuts:
    """At the end of a chain of one record."""
    cuts = PlannedCuts(next_epoch, rule)
    cuts.listed([0], sent_at=0.0)
    cuts.record_read(FIRST, now=0.0)
    cuts.record_read(None, now=0.0)
    cuts.take()
    return cuts


def propose(
    cuts: PlannedCuts, end: dict[str, int], newest: dict[str, int], through: int, behind: str = ""
) -> CutRecord:
    request = cuts.next_request(through)
    assert isinstance(request, FindEnds)
    start = dict(request.after or {})
    caught_up = frozenset(split for split in end if split not in behind)
    cuts.ends_found(Reach({**dict.fromkeys(end, 0), **start}, end, caught_up), through)
    assert isinstance(cuts.next_request(through), ReadRows)
    cuts.rows_read(end, newest)
    created = cuts.next_request(through)
    assert isinstance(created, CreateRecord)
    return created.record


class TestChain:
    def test_a_reader_begins_with_what_is_recorded(self) -> None:
        cuts = PlannedCuts(1, WatermarkRule())
        assert cuts.next_request(5) == ListRecords()
        cuts.listed([0, 3], sent_at=0.0)
        assert cuts.next_request(5) == ReadRecord(0)
        cuts.record_read(FIRST, now=0.0)
        assert cuts.take() == FIRST
        assert cuts.next_request(5) == ReadRecord(3)

    def test_the_first_reader_begins_where_the_source_does(self) -> None:
        cuts = PlannedCuts(0, WatermarkRule())
        cuts.listed([], sent_at=0.0)
        assert cuts.next_request(0) == FindEnds(None)

    def test_nothing_is_planned_before_its_time(self) -> None:
        cuts = reader()
        assert cuts.next_request(2) is None
        assert cuts.next_request(3) == FindEnds(FIRST.end)

    def test_nothing_is_released_before_it_is_stored(self) -> None:
        cuts = reader()
        record = propose(cuts, {"0": 12, "1": 4}, {"0": 120}, through=3)
        assert cuts.take() is None
        cuts.created(True, sent_at=1.0, now=1.0)
        assert cuts.take() == record

    def test_the_loser_takes_the_winners_record(self) -> None:
        cuts = reader()
        propose(cuts, {"0": 12, "1": 4}, {"0": 120}, through=3)
        cuts.created(False, sent_at=1.0, now=1.0)
        assert cuts.next_request(3) == ReadRecord(3)
        winners = CutRecord(3, 3, FIRST.end, {"0": 11, "1": 4})
        cuts.record_read(winners, now=0.0)
        assert cuts.take() == winners
        assert cuts.take() is None

    def test_a_reader_that_is_behind_records_all_epochs_at_once(self) -> None:
        record = propose(reader(), {"0": 12, "1": 4}, {"0": 120}, through=9)
        assert (record.first, record.last) == (3, 9)

    def test_what_does_not_fit_is_left_for_the_next_epoch(self) -> None:
        record = propose(reader(), {"0": 12, "1": 4}, {"0": 120}, through=9, behind="1")
        assert (record.first, record.last) == (3, 3)

    def test_what_has_too_many_bytes_is_left_for_the_next_epoch(self) -> None:
        cuts = reader()
        cuts.next_request(9)
        cuts.ends_found(Reach(FIRST.end, {"0": 12, "1": 6}, frozenset("01")), 9)
        cuts.rows_read({"0": 12, "1": 4}, {"0": 120})
        request = cuts.next_request(9)
        assert isinstance(request, CreateRecord)
        assert (request.record.last, request.record.end) == (3, {"0": 12, "1": 4})
        assert request.record.quiet == {}

    def test_without_the_source_others_records_are_looked_for(self) -> None:
        cuts = reader()
        assert isinstance(cuts.next_request(3), FindEnds)
        cuts.failed()
        assert cuts.next_request(3) == ReadRecord(3)
        cuts.record_read(None, now=0.0)
        assert isinstance(cuts.next_request(3), FindEnds)

    def test_a_creation_without_response_is_repeated(self) -> None:
        cuts = reader()
        record = propose(cuts, {"0": 12, "1": 4}, {}, through=3)
        cuts.failed()
        assert cuts.next_request(3) == CreateRecord(record)
        cuts.created(False, sent_at=1.0, now=1.0)  # the first attempt had succeeded
        cuts.record_read(record, now=0.0)
        assert cuts.take() == record


class TestDeletedRecords:
    def created_late(self) -> PlannedCuts:
        cuts = reader()
        propose(cuts, {"0": 12, "1": 4}, {}, through=3)
        cuts.created(True, sent_at=RECHECK_S, now=RECHECK_S + 1)
        assert cuts.take() is None
        assert cuts.next_request(3) == ListRecords()
        return cuts

    def test_a_record_in_a_deleted_place_is_not_released(self) -> None:
        cuts = self.created_late()
        with pytest.raises(CutsOvertaken, match="epoch 3"):
            cuts.listed([3, 400], sent_at=RECHECK_S)  # 0 and 3 were deleted

    def test_a_record_after_its_predecessor_is_released(self) -> None:
        cuts = self.created_late()
        cuts.listed([0, 3, 4], sent_at=RECHECK_S)  # another reader has added 4
        assert cuts.take() is not None

    def test_a_record_that_was_listed_is_not_replaced(self) -> None:
        cuts = PlannedCuts(3, WatermarkRule())
        cuts.listed([0, 3], sent_at=0.0)
        cuts.record_read(FIRST, now=0.0)
        with pytest.raises(CutsOvertaken, match="epoch 3"):
            cuts.record_read(None, now=0.0)

    def test_a_chain_that_begins_too_late_is_refused(self) -> None:
        with pytest.raises(CutsOvertaken):
            PlannedCuts(3, WatermarkRule()).listed([4], sent_at=0.0)

    def test_a_chain_that_ends_too_early_is_refused(self) -> None:
        cuts = PlannedCuts(7, WatermarkRule())
        cuts.listed([0], sent_at=0.0)
        with pytest.raises(CutsOvertaken, match="epoch 3"):
            cuts.record_read(FIRST, now=0.0)


class TestWatermark:
    RULE = WatermarkRule(lateness_us=10, idle_epochs=3)

    def test_it_is_that_of_the_slowest_split(self) -> None:
        record = propose(reader(rule=self.RULE), {"0": 12, "1": 5}, {"0": 200, "1": 90}, through=3)
        assert record.watermark == 80

    def test_it_never_falls(self) -> None:
        record = propose(reader(rule=self.RULE), {"0": 12, "1": 5}, {"0": 200, "1": 71}, through=3)
        assert record.watermark == FIRST.watermark

    def test_a_split_without_rows_holds_it_until_it_is_idle(self) -> None:
        cuts, watermarks = reader(rule=self.RULE), []
        for epoch in range(3, 7):
            record = propose(cuts, {"0": 8 + epoch, "1": 4}, {"0": 100 * epoch}, through=epoch)
            cuts.created(True, sent_at=1.0, now=1.0)
            watermarks.append((record.watermark, record.idle))
        assert watermarks == [(70, ()), (70, ()), (490, ("1",)), (590, ("1",))]

    def test_rows_end_idleness(self) -> None:
        cuts = reader(rule=self.RULE)
        idle = propose(cuts, {"0": 10, "1": 4}, {}, through=9)
        assert idle.idle == ("0", "1")
        assert idle.all_idle
        assert idle.watermark == 90  # of the newest: what is idle does not hold it
        cuts.created(True, sent_at=1.0, now=1.0)
        awake = propose(cuts, {"0": 10, "1": 5}, {"1": 75}, through=10)
        assert (awake.idle, awake.all_idle, awake.watermark) == (("0",), False, 90)

    def test_a_source_without_splits_holds_nothing_back(self) -> None:
        cuts = PlannedCuts(0, self.RULE)
        cuts.listed([], sent_at=0.0)
        record = propose(cuts, {}, {}, through=0)
        assert (record.all_idle, record.watermark) == (True, NO_WATERMARK)

    def test_it_does_not_matter_which_split_is_idle_first(self) -> None:
        watermarks = set()
        for last in ("0", "1"):
            cuts = reader(rule=self.RULE)
            end = {"0": 10, "1": 4}
            for epoch in range(3, 9):
                has_rows = epoch < 5
                end[last] += has_rows
                newest = {last: FIRST.newest_us[last]} if has_rows else {}
                record = propose(cuts, dict(end), newest, through=epoch)
                cuts.created(True, sent_at=1.0, now=1.0)
            assert record.all_idle
            watermarks.add(record.watermark)
        assert watermarks == {90}

    def test_a_split_that_is_behind_is_not_idle(self) -> None:
        cuts = reader(rule=self.RULE)
        for epoch in range(3, 9):
            record = propose(cuts, {"0": 9 + epoch, "1": 4}, {"0": 999}, through=epoch, behind="1")
            cuts.created(True, sent_at=1.0, now=1.0)
        assert record.idle == ()
        assert record.watermark == FIRST.watermark

    def test_a_split_whose_rows_are_not_committed_is_not_idle(self) -> None:
        cuts, end = reader(rule=self.RULE), {"0": 10, "1": 4}
        cuts.next_request(9)
        cuts.ends_found(Reach(end, end, frozenset("01"), pending=frozenset("1")), 9)
        cuts.rows_read(end, {})
        request = cuts.next_request(9)
        assert isinstance(request, CreateRecord)
        assert (request.record.last, request.record.idle) == (9, ("0",))

    def test_epochs_without_a_response_of_the_source_are_not_quiet(self) -> None:
        cuts = reader(rule=self.RULE)
        propose(cuts, {"0": 12, "1": 4}, {"0": 200}, through=3)
        cuts.created(True, sent_at=1.0, now=1.0)
        cuts.next_request(9)
        cuts.failed(of_source=True)  # until epoch 30; then whoever writes first closes no windows
        cuts.record_read(None, now=1.0)
        record = propose(cuts, {"0": 20, "1": 4}, {"0": 900}, through=30)
        assert (record.last, record.quiet, record.idle) == (30, {"1": 1}, ())
        cuts.created(True, sent_at=1.0, now=1.0)
        record = propose(cuts, {"0": 20, "1": 4}, {}, through=32)
        assert (record.quiet, record.idle) == ({"0": 2, "1": 3}, ("1",))

    def test_an_outage_counts_over_all_records_that_read_its_backlog(self) -> None:
        cuts = reader(rule=self.RULE)
        cuts.next_request(9)
        cuts.failed(of_source=True)
        cuts.record_read(None, now=1.0)
        record = propose(cuts, {"0": 12, "1": 4}, {"0": 200}, through=30, behind="0")
        assert (record.last, record.quiet) == (3, {"1": 1})
        cuts.created(True, sent_at=1.0, now=1.0)
        record = propose(cuts, {"0": 20, "1": 4}, {"0": 900}, through=30)
        assert (record.last, record.quiet, record.idle) == (30, {"1": 1}, ())

    def test_so_does_one_while_rows_of_a_record_are_read(self) -> None:
        cuts = PlannedCuts(3, self.RULE)
        cuts.listed([0], sent_at=0.0)
        cuts.record_read(FIRST, now=0.0)
        cuts.next_request(9)
        cuts.failed(of_source=True)
        cuts.record_read(None, now=0.0)
        record = propose(cuts, {"0": 20, "1": 4}, {"0": 900}, through=30)
        assert (record.last, record.quiet, record.idle) == (30, {"1": 1}, ())

    def test_another_reader_that_reached_the_source_ends_it(self) -> None:
        cuts = reader(rule=self.RULE)
        cuts.next_request(3)
        cuts.failed(of_source=True)
        other = propose(reader(rule=self.RULE), {"0": 12, "1": 4}, {"0": 200}, through=3)
        cuts.record_read(other, now=1.0)
        cuts.record_read(None, now=1.0)
        record = propose(cuts, {"0": 20, "1": 4}, {"0": 900}, through=5)
        assert record.quiet == {"1": other.quiet["1"] + 2}

    def test_an_outage_does_not_wake_an_idle_split(self) -> None:
        cuts = reader(rule=self.RULE)
        propose(cuts, {"0": 10, "1": 4}, {}, through=9)
        cuts.created(True, sent_at=1.0, now=1.0)
        cuts.next_request(10)
        cuts.failed(of_source=True)
        cuts.record_read(None, now=1.0)
        assert propose(cuts, {"0": 11, "1": 4}, {"0": 200}, through=12).idle == ("1",)

    def test_epochs_of_one_record_do_not_make_a_split_with_rows_idle(self) -> None:
        record = propose(reader(rule=self.RULE), {"0": 12, "1": 4}, {"0": 200}, through=9)
        assert record.idle == ("1",)

    def test_a_new_split_holds_it(self) -> None:
        end = {"0": 12, "1": 5, "2": 3}
        cuts = reader(rule=self.RULE)
        assert propose(cuts, end, {"0": 200, "1": 150}, through=3).watermark == 70
        cuts.created(True, sent_at=1.0, now=1.0)
        assert propose(cuts, {**end, "2": 4}, {"2": 140}, through=4).watermark == 130

    def test_no_event_time_is_the_end_of_input(self) -> None:
        newest = {"0": END_OF_INPUT, "1": END_OF_INPUT}
        record = propose(reader(rule=WatermarkRule()), {"0": 12, "1": 5}, newest, through=3)
        assert record.watermark < END_OF_INPUT

    def test_there_is_none_before_the_first_row(self) -> None:
        cuts = PlannedCuts(0, self.RULE)
        cuts.listed([], sent_at=0.0)
        assert propose(cuts, {"0": 0}, {}, through=0).watermark == NO_WATERMARK


@given(
    st.builds(
        CutRecord,
        st.integers(0, 2**40),
        st.integers(0, 2**40),
        st.dictionaries(st.text(), st.integers(0, 2**62)),
        st.dictionaries(st.text(), st.integers(0, 2**62)),
        st.dictionaries(st.text(), st.integers(-(2**63), 2**63 - 1)),
        st.dictionaries(st.text(), st.integers(0, 2**40)),
        st.lists(st.text()).map(tuple),
        st.integers(-(2**63), 2**63 - 1),
    )
)
def test_a_record_is_read_as_it_was_written(record: CutRecord) -> None:
    assert decode_cut_record(encode_cut_record(record)) == record


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format":2}', b'{"format":1,"first":0}'])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"record|Expecting"):
        decode_cut_record(data)


@pytest.mark.simulated
@given(st.integers(0, 2**32))
def test_all_readers_and_replays_release_the_same_epochs(seed: int) -> None:
    World(seed).run(STEPS)


class _ReleasesBeforeItIsStored(PlannedCuts):
    def rows_read(self, end, newest_us):  # type: ignore[no-untyped-def]  # a planted bug
        super().rows_read(end, newest_us)
        assert isinstance(self._request, CreateRecord)
        self._adopted.append(self._request.record)


class _KeepsItsOwn(PlannedCuts):
    def created(self, was_absent, sent_at, now):  # type: ignore[no-untyped-def]  # a planted bug
        super().created(True, sent_at, now)


class _BelievesDeletedPlaces(PlannedCuts):
    def _check(self, record, firsts):  # type: ignore[no-untyped-def]  # a planted bug
        pass


def _idle_by_own_clock(world: World, reader: Reader, record: CutRecord, epoch: int) -> Content:
    content = world.content_of(reader, record, epoch)
    late = world.now - epoch > 3.0 + reader.released_behind
    newest = max(record.newest_us.values(), default=0)
    return Content(content.rows, max(content.watermark, newest) if late else content.watermark)


def _found(bug: dict[str, Any]) -> str:
    for seed in range(60):
        try:
            World(seed, **bug).run(STEPS)
        except AssertionError as error:
            return str(error)
    return ""


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ({"make": _ReleasesBeforeItIsStored}, "before it is stored"),
        ({"make": _KeepsItsOwn}, "before it is stored"),
        ({"make": _BelievesDeletedPlaces}, "and was"),
        ({"content": _idle_by_own_clock}, "and was"),
        ({"by_counting": True}, "and was"),
    ],
    ids=["release-first", "keep-own", "deleted-place", "idle-by-clock", "count-rows"],
)
def test_planted_bugs_are_found(bug: dict[str, Any], message: str) -> None:
    assert message in _found(bug)


@pytest.mark.simulated
def test_a_reader_that_was_frozen_for_long_is_overtaken() -> None:
    overtaken = 0
    for seed in range(20):
        world = cut_world.World(seed)
        world.run(STEPS)
        overtaken += world.overtaken
    assert overtaken > 0
