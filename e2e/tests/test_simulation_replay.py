"""Replay targets in simulations, and the bugs in the choice of checkpoint epochs that they find."""

from __future__ import annotations

import pytest

from rekindle_testing.simulation.replay_mutants import REPLAY_MUTANTS
from rekindle_testing.simulation.run import has_replay_targets, simulate
from rekindle_testing.simulation.topologies import CHAIN, Variant

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.long,  # of the choice alone: test_coordinator_policy.py
]

FOUND = {
    "replay targets count as ten times as long": (2.0, 1.0),
    "the replay target of an operator does not count": (4.0, 1.0),
    "the partition with the longest replay target decides": (4.0, 1.0),
    "replays are counted from the newest epoch, not from the entry": (2.0, 1.0),
}
"""By mutant, the targets with which it is found without any fault."""


def test_a_killed_task_replays_no_longer_than_its_target() -> None:
    assert simulate(0, [], Variant(CHAIN, replay_targets_s=(4.0, 1.0))).failure is None


@pytest.mark.parametrize("name", REPLAY_MUTANTS)
def test_planted_bugs_in_the_choice_are_found(name: str) -> None:
    with REPLAY_MUTANTS[name]():
        failure = simulate(0, [], Variant(CHAIN, replay_targets_s=FOUND[name])).failure
    assert failure is not None
    assert "its target is" in failure or "no checkpoint is committed" in failure


def test_a_part_of_the_seeds_has_replay_targets() -> None:
    assert {has_replay_targets(seed) for seed in range(20)} == {False, True}
