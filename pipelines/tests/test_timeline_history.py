"""The history of a topology: checked by the demo and drawn by the timeline."""

from rekindle.timeline.history import History


def _status(state: str, epoch: int, plan: list[str] | None = None) -> dict[str, object]:
    return {
        "queries": [{"name": "q", "state": state, "stableEpoch": epoch}],
        "recovery": {"plan": plan or []},
    }


def test_an_outage_runs_from_the_first_state_that_is_not_live_to_live_again() -> None:
    history = History()
    for at_s, state in enumerate(["Waiting", "Live", "Live", "Waiting", "CatchingUp", "Live"]):
        history.sample(float(at_s), _status(state, at_s))
    outage = history.outage("q", since_s=1.5)
    assert outage is not None
    assert (outage.lost_s, outage.restored_s, outage.live_s) == (3.0, 4.0, 5.0)


def test_a_query_that_stays_live_has_no_outage() -> None:
    history = History()
    for at_s in range(5):
        history.sample(float(at_s), _status("Live", at_s))
    assert history.outage("q", since_s=0.0) is None


def test_the_newest_epoch_is_that_of_its_time() -> None:
    history = History()
    for at_s in range(5):
        history.sample(float(at_s), _status("Live", 10 * at_s))
    assert [history.newest_epoch(at_s) for at_s in (-1.0, 0.0, 2.5)] == [-1, 0, 20]


def test_a_plan_is_kept_once_until_it_changes() -> None:
    history = History()
    for at_s, plan in enumerate([[], ["a", "b"], ["a", "b"], ["b"], []]):
        history.sample(float(at_s), _status("Live", at_s, plan))
    assert [p for _, p in history.plans] == [("a", "b"), ("b",)]


def test_the_plan_of_an_earlier_loss_is_in_effect_after_another_one() -> None:
    history = History()
    for at_s, state in enumerate(["Waiting", "Live", "Waiting", "Live"]):
        history.sample(float(at_s), _status(state, at_s, ["q", "r"]))
    assert history.plan_of_recovery(1.5, ["q"]) == ("q", "r")
