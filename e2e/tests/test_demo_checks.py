"""The demo must be able to fail: each wrong result is reported."""

import pytest

from rekindle.connectors.compare import Difference
from rekindle.timeline.history import History
from rekindle_testing.demo.checks import failures, result

SAME = {q: Difference(expected_rows=10, actual_rows=10) for q in ("keep", "first", "second")}


def _history(first_back: float, second_back: float) -> History:
    history = History()
    for at_s in range(30):
        states = {
            "keep": "Live",
            "first": "Live" if at_s < 10 or at_s >= first_back else "Waiting",
            "second": "Live" if at_s < 10 or at_s >= second_back else "Waiting",
        }
        queries = [{"name": n, "state": s, "stableEpoch": at_s} for n, s in states.items()]
        history.sample(float(at_s), {"queries": queries})
    return history


def _failures(history: History, **changed: object) -> list[str]:
    arguments: dict[str, object] = {
        "lost_at_s": 9.5,
        "last_loss_s": 9.5,
        "plan": ["first", "second"],
        "expected_lost": ["first", "second"],
        "survivors": ["keep"],
        "differences": SAME,
        "last_epoch": 30,
        "restored_from": {"first": 4, "second": 0},
        "pauses": {"keep": 3.9},
    }
    return failures(history, **(arguments | changed))  # type: ignore[arg-type]


def test_queries_that_return_in_the_planned_order_with_equal_rows_pass() -> None:
    assert _failures(_history(15, 20)) == []


@pytest.mark.parametrize(
    ("history", "changed", "part"),
    [
        (_history(20, 15), {}, "the plan was"),
        (_history(15, 99), {}, "did not recover"),
        (_history(15, 20), {"plan": ["first"]}, "does not name all"),
        (
            _history(15, 20),
            {"survivors": ["first"], "pauses": {"first": 1.0}},
            "still was down",
        ),
        (_history(15, 20), {"pauses": {"keep": 4.1}}, "keep had replicas left and paused"),
        (_history(15, 20), {"last_epoch": 9}, "the input ended"),
        (_history(15, 20), {"restored_from": {"first": 4}}, "second was not restored from"),
        (
            _history(15, 20),
            {"restored_from": {"first": -1, "second": 4}},
            "first was not restored from",
        ),
        (_history(15, 20), {"expected_lost": ["keep"]}, "did not report"),
        (
            _history(15, 20),
            {"differences": {"keep": Difference(0, 0)}},
            "nothing was compared",
        ),
        (
            _history(15, 20),
            {"differences": {"keep": Difference(expected_rows=3, actual_rows=2, lost=1)}},
            "keep: 1 rows lost",
        ),
    ],
)
def test_each_wrong_result_is_a_failure(
    history: History, changed: dict[str, object], part: str
) -> None:
    assert any(part in failure for failure in _failures(history, **changed))


@pytest.mark.parametrize(
    ("back", "part"),
    [
        ((20.0, 25.0), None),
        ((25.0, 20.0), "the plan was"),
        ((99.0, 25.0), "first did not recover"),
    ],
)
def test_the_order_counts_from_the_second_loss(back: tuple[float, float], part: str | None) -> None:
    """`first` was Live for a moment, and `second` has not been yet."""
    history = History()
    for at_s in range(30):
        first = at_s < 10 or 13 <= at_s < 16 or at_s >= back[0]
        states = {"keep": True, "first": first, "second": at_s < 10 or at_s >= back[1]}
        queries = [
            {"name": n, "state": "Live" if live else "Waiting", "stableEpoch": at_s}
            for n, live in states.items()
        ]
        history.sample(float(at_s), {"queries": queries})
    found = _failures(history, last_loss_s=15.5)
    assert any(part in failure for failure in found) if part else found == []


def test_the_result_has_the_times_of_loss_and_recovery() -> None:
    document = result(
        _history(15, 20),
        lost_at_s=9.5,
        last_loss_s=9.5,
        plan=["first", "second"],
        differences=SAME,
        restored_from={"first": 4},
        pauses={"keep": 1.234},
        failed=[],
    )
    first = next(q for q in document["queries"] if q["name"] == "first")
    assert (first["lostAt"], first["liveAt"], first["restoredFromEpoch"]) == (10, 15, 4)
    assert document["longestPauseSeconds"] == {"keep": 1.23}
    assert document["ok"]
