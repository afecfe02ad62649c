"""Kinds of windows: their fields, and properties that make panes and windows consistent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.window_assigners import HoppingAssigner
from rekindle.topology.operators.window import WindowOperatorKind
from rekindle.topology.spec import OperatorSpec, WindowSpec
from rekindle.topology.windows.hopping import HoppingWindows
from rekindle.topology.windows.registry import KINDS, check_window, windows_of

HOUR = 3_600_000_000
OF_EACH_KIND = {"size": "1h", "session": "30m", "rows": 100}


def window(**fields: object) -> WindowSpec:
    return WindowSpec.model_validate({"aggregate": "count(*) AS n", **fields})


@given(st.integers(1, 50), st.integers(1, 6), st.lists(st.integers(-60, 60), min_size=1))
def test_windows_are_whole_panes(slide: int, slides: int, numbers: list[int]) -> None:
    windows = HoppingAssigner(slide * slides, slide)
    starts = np.array(numbers, dtype=np.int64) * windows.pane_us
    assert windows.panes_per_window == slides
    assert (windows.bounds(starts)[1] == starts + slides * windows.pane_us).all()


@pytest.mark.parametrize("field", KINDS)
def test_what_is_missing_ends_after_what_began_before(field: str) -> None:
    """`first_open` and `first_complete` are the bounds of `status.queries[].missing`."""
    windows = windows_of(window(**{field: OF_EACH_KIND[field]}))
    assert windows.first_complete(5 * HOUR) > 5 * HOUR
    assert windows.first_open(5 * HOUR) <= 5 * HOUR
    assert windows.reach_us >= 0
    assert windows.describe()


def test_a_window_without_slide_does_not_overlap() -> None:
    assert windows_of(window(size="1h")) == HoppingWindows(HOUR, HOUR)
    assert windows_of(window(size="1h")).describe() == "1h"
    assert windows_of(window(size="1h", slide="15m")).describe() == "1h every 15m"


@pytest.mark.parametrize(
    ("fields", "path", "message"),
    [
        ({}, "w", "has no size and no session and no rows"),
        ({"session": 0}, "w.session", "session is 0"),
        ({"rows": 0}, "w.rows", "rows is 0"),
        ({"rows": 10, "slideRows": 4}, "w.slideRows", "rows (10) is not a multiple of slideRows"),
        ({"rows": 5000, "slideRows": 1}, "w.slideRows", "5000 rows every 1: a row is in 5,000 w"),
        ({"size": "1h", "slideRows": 4}, "w.slideRows", "slideRows needs rows"),
        ({"size": "1h", "rows": 5}, "w", "has size and rows"),
        ({"session": "1h", "slide": "5m"}, "w.slide", "slide needs size"),
        ({"size": "1h", "slide": "25m"}, "w.slide", "size (1h) is not a multiple of slide (25m)"),
        ({"size": "365d", "slide": "1s"}, "w.slide", "365d by 1s: a row is in up to 31,536,000 wi"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(
    fields: dict[str, object], path: str, message: str
) -> None:
    problems = check_window(window(**fields), "w")
    assert [p for p in problems if p.path == path and p.message.startswith(message)]


@pytest.mark.parametrize("field", KINDS)
def test_only_windows_of_rows_may_begin_with_any_row(field: str) -> None:
    node = OperatorSpec(name="w", inputs=("a",), window=window(**{field: OF_EACH_KIND[field]}))
    assert WindowOperatorKind(node).needs_all_rows == (field != "rows")


def test_every_field_of_a_window_belongs_to_a_kind_or_to_all() -> None:
    of_kinds = {*KINDS, *(field for kind in KINDS.values() for field in kind.further_fields)}
    assert set(WindowSpec.model_fields) - of_kinds == {"group_by", "aggregate"}
