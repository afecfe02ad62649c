"""The table of the consistency manager: what is in it, and what is refused."""

from __future__ import annotations

import re

import pytest

from rekindle.consistency.core import ConsistencyCore
from rekindle.consistency.states import (
    ROWS,
    TRANSITIONS,
    ConsistencyState,
    consistency_machine,
)
from rekindle.transitions import InvalidTransition, next_state
from rekindle_testing.paths import ROOT

PAGE = ROOT / "docs" / "design" / "consistency.md"


def test_every_row_names_a_section_of_the_paper() -> None:
    for rows in ROWS.values():
        for row in rows.values():
            assert re.fullmatch(r"[2-5](\.\d)?(, [2-5]\.\d)*", row.section)
            assert row.then


def test_events_are_methods_of_the_manager() -> None:
    for event in set().union(*ROWS.values()):
        assert hasattr(ConsistencyCore, event) or hasattr(ConsistencyCore, f"_{event}")


def test_all_states_can_be_reached_from_all_others() -> None:
    assert set(ConsistencyState) == set(TRANSITIONS)
    for begin in ConsistencyState:
        reached = {begin}
        for _ in ConsistencyState:
            reached |= {after for state in reached for after in TRANSITIONS[state].values()}
        assert reached == set(ConsistencyState)


@pytest.mark.parametrize("state", ConsistencyState)
@pytest.mark.parametrize("event", sorted(set().union(*ROWS.values())))
def test_an_event_outside_the_table_is_refused(state: ConsistencyState, event: str) -> None:
    if event in TRANSITIONS[state]:
        return
    with pytest.raises(InvalidTransition, match=f"event '{event}' is invalid in state {state}"):
        next_state("consistency", TRANSITIONS, state, event)


def test_a_refusal_quotes_the_transitions_before_it() -> None:
    machine = consistency_machine()
    machine.step("process_tentative")
    with pytest.raises(InvalidTransition, match="before: STABLE: process_tentative"):
        machine.step("reconcile")


def test_the_page_has_the_table() -> None:
    cells = re.findall(
        r"^\| `([a-z_]+)` \| ([A-Z_]+) \| ([A-Z_]+) \| ([\d., ]+) \| (.+) \|$",
        PAGE.read_text(),
        re.MULTILINE,
    )
    rows = [
        (event, str(state), str(row.after), row.section, row.then)
        for state, events in ROWS.items()
        for event, row in events.items()
    ]
    assert sorted(cells) == sorted(rows)
