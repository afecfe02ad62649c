"""Bugs that are planted in the choice of the checkpoint epochs that are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rekindle.coordinator.checkpoints import policy
from rekindle.coordinator.core import state_machine
from rekindle_testing.simulation.planting import Mutant, replaced


def _in_tenths(replay_target_s: Any) -> Any:
    def wrong(topology: Any, segment: Any) -> Any:
        target_s = replay_target_s(topology, segment)
        return None if target_s is None else target_s * 10

    return wrong


def _of_the_topology(replay_target_s: Any) -> Any:
    def wrong(topology: Any, segment: Any) -> Any:
        return replay_target_s(topology, replace(segment, nodes=()))

    return wrong


def _the_longest(next_checkpoint: Any) -> Any:
    def wrong(replays: Any, interval_epochs: int, *, wanted: bool = False) -> Any:
        """The partition that may replay for the longest time decides."""
        each = [next_checkpoint([replay], interval_epochs, wanted=wanted) for replay in replays]
        return max(each, default=next_checkpoint(replays, interval_epochs, wanted=wanted))

    return wrong


def _since_the_newest_epoch(replays_of: Any) -> Any:
    def wrong(generation: Any, replicas: Any, entries: Any) -> Any:
        found = replays_of(generation, replicas, entries)
        return {
            partition: replace(replay, entry=max([replay.entry, *_epochs(replicas, partition)]))
            for partition, replay in found.items()
        }

    return wrong


def _epochs(replicas: Any, partition: Any) -> list[int]:
    tasks = replicas.get(partition, ())
    return [task.response.stable_epoch for task in tasks if task.response is not None]


REPLAY_MUTANTS: Mapping[str, Mutant] = {
    "replay targets count as ten times as long": replaced(policy, "replay_target_s", _in_tenths),
    "the replay target of an operator does not count": replaced(
        policy, "replay_target_s", _of_the_topology
    ),
    "the partition with the longest replay target decides": replaced(
        state_machine, "next_checkpoint", _the_longest
    ),
    "replays are counted from the newest epoch, not from the entry": replaced(
        state_machine, "replays_of", _since_the_newest_epoch
    ),
}
