"""A reader leaves a replica that falls behind once, and does not switch between equal ones.

Design: docs/design/streams.md#reader.
"""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from rekindle.coordinator.model import Pod
from rekindle.coordinator.tasks.graph import build_graph
from rekindle.coordinator.tasks.membership import Membership
from rekindle.coordinator.tasks.routes import serving_replicas, upstreams
from rekindle.protocol import PollResponse, TaskRef
from rekindle.streams.replica_choice import ReplicaChoice, SwitchReplica
from rekindle.topology.model import Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment, make_topology

Phase = Literal["CatchingUp", "Live"]
HEAD = 10_000
STEP_S = 2.0
"""The least lag behind another replica at which `routes` calls a replica lagging."""
lags = st.floats(0, 100)
behind = st.integers(0, 100)
phases = st.sampled_from(["CatchingUp", "Live"])


class Reader:
    """A reader of `src` and its two replicas, with the routes of the coordinator. `left`: the
    replicas that it has left, in order."""

    def __init__(self) -> None:
        self.choice = ReplicaChoice(0, stall_s=4)
        self.now = 0.0
        self.left: list[str | None] = []
        parts = [SimulatedSegment("src", replicas=2), SimulatedSegment("out", ("src",))]
        self._graph = build_graph(make_topology(parts))
        self._slots = [Slot("src", 0, 0), Slot("src", 0, 1)]
        self._members = Membership()
        pods = [
            Pod(str(n), slot, 1, f"10.0.0.{n}", may_be_running=True, was_ready=True)
            for n, slot in enumerate(self._slots)
        ]
        self._members.pods_listed(pods, 0)

    def responses(self, *replicas: tuple[float, int, Phase]) -> None:
        """Lag, epochs behind the head and phase of each replica."""
        self.now += 0.25
        for slot, (lag_s, epochs, phase) in zip(self._slots, replicas, strict=True):
            ref = TaskRef(segment="src", partition=0, replica=slot.replica, incarnation=1)
            response = PollResponse(
                task=ref,
                boot_id="b",
                fence=1,
                phase=phase,
                lag_s=lag_s,
                stable_epoch=HEAD - epochs,
            )
            task = self._members.get(slot)
            assert task is not None
            self._members.answered(task, response, self.now)
        serving = serving_replicas(self._members, is_untrusted=lambda _: False)
        (upstream,) = upstreams(Slot("out", 0, 0), self._graph, serving, lambda t: t.suspected)
        before = self.choice.current
        effects = self.choice.routes_changed(upstream.endpoints, self.now)
        if before is not None:
            self.left += [before for e in effects if isinstance(e, SwitchReplica)]


@given(st.lists(st.tuples(lags, st.floats(-STEP_S, STEP_S), behind, behind, phases, phases)))
def test_replicas_whose_lag_differs_by_less_than_a_step_are_equals(
    steps: list[tuple[float, float, int, int, Phase, Phase]],
) -> None:
    reader = Reader()
    for lag_s, more_s, epochs, other_epochs, phase, other_phase in steps:
        lag_s += STEP_S
        other_lag_s = lag_s + more_s * 0.999
        reader.responses((lag_s, epochs, phase), (other_lag_s, other_epochs, other_phase))
    assert not reader.left


@given(st.lists(st.tuples(lags, behind, phases, st.floats(0, STEP_S)), min_size=1))
def test_readers_leave_a_lagging_replica_once(
    steps: list[tuple[float, int, Phase, float]],
) -> None:
    reader = Reader()
    reader.responses((0, 0, "Live"), (0, 0, "Live"))
    first = reader.choice.current
    lagged = False
    for lag_s, epochs, phase, other_s in steps:
        reader.responses((lag_s, epochs, phase), (other_s, 0, "Live"))
        lagged = lagged or (lag_s - other_s > STEP_S and epochs >= 2)
        assert reader.left == ([first] if lagged else [])


def test_readers_leave_a_slow_replica_within_three_seconds() -> None:
    reader = Reader()
    for tick in range(40):
        behind_s = tick * 0.25 / 2
        reader.responses((behind_s, int(behind_s), "Live"), (0.3, 0, "Live"))
        if reader.left:
            break
    assert behind_s < 3


def test_readers_do_not_switch_to_one_that_catches_up() -> None:
    reader = Reader()
    reader.responses((0, 0, "Live"), (0, 0, "Live"))
    reader.responses((50, 50, "CatchingUp"), (10, 10, "CatchingUp"))
    assert not reader.left
    reader.responses((50, 50, "CatchingUp"), (9, 9, "Live"))
    assert reader.left
