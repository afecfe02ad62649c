"""`make mutants`: bugs that are planted in the product, each of which has to be found.

A check that cannot fail proves nothing. Each mutant replaces one decision by a wrong one that a
person could have written; the seeds run until one of them fails. Those in the order of folds, which
simulations do not run, are for unit tests to find (`fold_mutants`).

Design: docs/simulation.md#mutants.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import replace
from typing import Any

from rekindle.coordinator.checkpoints import committer, retention
from rekindle.coordinator.core import desired_state, state_machine
from rekindle.coordinator.tasks.membership import Membership, Task
from rekindle.engine.bounds import CallBounds
from rekindle.streams.sunion import SUnion
from rekindle.task.core import streams
from rekindle.task.core.loop import LoopCore
from rekindle.task.core.sink import SinkCore
from rekindle.task.core.supervisor import SupervisorCore
from rekindle_testing.simulation import store_and_sinks
from rekindle_testing.simulation.assumption_mutants import ASSUMPTION_MUTANTS
from rekindle_testing.simulation.dispute_mutants import DISPUTE_MUTANTS
from rekindle_testing.simulation.fold_mutants import FOLD_MUTANTS, found_by_tests
from rekindle_testing.simulation.lending_mutants import LENDING_MUTANTS
from rekindle_testing.simulation.operator_mutants import OPERATOR_MUTANTS
from rekindle_testing.simulation.planting import Mutant, replaced
from rekindle_testing.simulation.pool import process_pool
from rekindle_testing.simulation.replay_mutants import REPLAY_MUTANTS
from rekindle_testing.simulation.run import (
    has_replay_targets,
    has_state,
    simulate,
    wrong_results,
)
from rekindle_testing.simulation.shipping_mutants import SHIPPING_MUTANTS
from rekindle_testing.simulation.state_mutants import STATE_MUTANTS
from rekindle_testing.simulation.tentative_mutants import TENTATIVE_MUTANTS
from rekindle_testing.simulation.wiring_mutants import LIMIT_MUTANTS, WIRING_MUTANTS

SEEDS = 500
"""Within so many seeds a mutant has to be found."""
_OWN_ERRORS = tuple(f"{error.__name__}: " for error in (TypeError, AttributeError, NameError))
"""A failure that begins so is an error in the code of the mutant, and shows nothing."""


def _floors_are_positions(floors: Any) -> Any:
    def wrong(graph: Any, manifest: Any, progress: Any) -> Mapping[Any, int]:
        """What consumers have received, without the entries from which they restart."""
        found = {}
        for partition in graph.partitions:
            readers = graph.consumers[partition] or (partition,)
            known = [min(progress.positions.get(c, (-1,))) for c in readers]
            found[partition] = min(known)
        return found

    return wrong


def _without_unknown(of: Any) -> Any:
    def wrong(tasks: Any) -> retention.Progress:
        found: retention.Progress = of(tasks)
        return replace(found, unknown=frozenset())

    return staticmethod(wrong)


def _newest_entry(oldest: Any) -> Any:
    return lambda refs: refs[0]


def _commits_unwritten(written_entries: Any) -> Any:
    return lambda entries, response, sinks: list(entries)


def _forgets_positions(progress_of: Any) -> Any:
    def wrong(tasks: Any) -> retention.Progress:
        found: retention.Progress = progress_of(tasks)
        return replace(found, positions={})

    return staticmethod(wrong)


def _saves_too_late(completed: Any) -> Any:
    """The state of an epoch is saved under the number of the one before."""

    def wrong(self: LoopCore, now: float) -> Any:
        effects = completed(self, now)
        return [
            replace(e, state=replace(e.state, epoch=e.state.epoch - 1))
            if type(e).__name__ == "CheckpointReached"
            else e
            for e in effects
        ]

    return wrong


def _merges_by_arrival(add: Any) -> Any:
    """The channel that delivered last comes last."""

    def wrong(self: SUnion, channel: Any, batch: Any) -> Any:
        self._inboxes[channel] = self._inboxes.pop(channel)
        return add(self, channel, batch)

    return wrong


def _keeps_newest_only(needed: Any) -> Any:
    def wrong(objects: Any, manifests: Any) -> set[str]:
        return {
            refs[0].object
            for manifest in manifests[-1:]
            for refs in manifest.entries.values()
            if refs[0].object is not None
        }

    return wrong


def _restores_again(fields_of: Any) -> Any:
    def wrong(self: Any, task: Task) -> dict[str, object]:
        return {**fields_of(self, task), "restore": task.assigned}

    return wrong


def _skips_epoch(first_to_write: Any) -> Any:
    return lambda self, last, first: last + 2


def _never_saves(saves: Any) -> Any:
    return property(lambda self: False)


def _loses_state(completed: Any) -> Any:
    """After a call of several epochs, the state is the one before it."""

    def wrong(self: LoopCore, now: float) -> Any:
        before = self.state
        effects = completed(self, now)
        if len(effects) > 1 and self.state.epoch - before.epoch > 3:
            self.state = replace(self.state, operators=before.operators)
        return effects

    return wrong


def _suspicion_stays(answered: Any) -> Any:
    def wrong(self: Membership, task: Task, response: Any, now: float) -> bool:
        since = task.suspected_since
        news = bool(answered(self, task, response, now))
        task.suspected_since = since
        return news

    return wrong


def _keeps_newest_entries(keep: Any) -> Any:
    def wrong(graph: Any, available: Any, previous: Any, at: Any) -> Mapping[str, Any]:
        return {p.key: available[p][:1] for p in graph.partitions}

    return wrong


def _loses_call(failed: Any) -> Any:
    """A call whose engine died is not made again."""

    def wrong(self: LoopCore, error: Any, now: float) -> Any:
        effects = failed(self, error, now)
        for _ in self._call:
            self._taken.popleft()
        return effects

    return wrong


def _drops_epoch(take_ready: Any) -> Any:
    def wrong(ready: Any, bounds: CallBounds) -> Any:
        taken = take_ready(ready, bounds)
        return taken[1:] if len(taken) > 2 else taken

    return wrong


NEED_WRONG_RESULTS: Mapping[str, Mutant] = {**DISPUTE_MUTANTS, **LIMIT_MUTANTS}

MUTANTS: Mapping[str, Mutant] = {
    "a manifest keeps only the newest entries": replaced(
        committer, "keep_entries", _keeps_newest_entries
    ),
    "a call whose engine died is not made again": replaced(LoopCore, "engine_failed", _loses_call),
    "an epoch of a large call is dropped": replaced(streams, "take_ready", _drops_epoch),
    "logs are truncated below what a restart needs": replaced(
        state_machine, "floors", _floors_are_positions
    ),
    "retention ignores tasks of unknown progress": replaced(
        retention.Progress, "of", _without_unknown
    ),
    "retention ignores the positions of tasks": replaced(
        retention.Progress, "of", _forgets_positions
    ),
    "a task restores from the newest entry, not from the oldest that is needed": replaced(
        state_machine, "oldest", _newest_entry
    ),
    "entries are committed before the sinks have written": replaced(
        state_machine, "written_entries", _commits_unwritten
    ),
    "a state is saved under another epoch": replaced(LoopCore, "_call_completed", _saves_too_late),
    "inputs are merged in the order of arrival": replaced(SUnion, "add", _merges_by_arrival),
    "garbage collection keeps only the newest entries": replaced(
        store_and_sinks, "needed_entries", _keeps_newest_only
    ),
    "a restarted task gets the restore point of its last boot": replaced(
        desired_state.DesiredState, "fields_of", _restores_again
    ),
    "a sink skips the epoch after its newest one": replaced(
        SinkCore, "_first_to_write", _skips_epoch
    ),
    "no task saves checkpoints": replaced(SupervisorCore, "is_saver", _never_saves),
    "the state of a large call is lost": replaced(LoopCore, "_call_completed", _loses_state),
    "suspicion never ends": replaced(Membership, "answered", _suspicion_stays),
    **ASSUMPTION_MUTANTS,
    **OPERATOR_MUTANTS,
    **TENTATIVE_MUTANTS,
    **LENDING_MUTANTS,
    **WIRING_MUTANTS,
    **STATE_MUTANTS,
    **REPLAY_MUTANTS,
    **SHIPPING_MUTANTS,
    **NEED_WRONG_RESULTS,
}


def found_by(name: str, seeds: Iterable[int] = range(SEEDS)) -> str | None:
    """What finds a mutant: the first seed, and how; or a test. None if nothing does. What is done
    when replicas disagree is not done in seeds without wrong results, so these are left out; so are
    those without operators that have state, for bugs in these, and those without replay targets,
    for bugs in what these choose. A mutant that cannot be run is a `ValueError`."""
    if name in FOLD_MUTANTS:
        return found_by_tests(name)
    with MUTANTS[name]():
        for seed in seeds:
            if name in NEED_WRONG_RESULTS and not wrong_results(seed):
                continue
            if name in STATE_MUTANTS and not has_state(seed):
                continue
            if name in REPLAY_MUTANTS and not has_replay_targets(seed):
                continue
            failure = simulate(seed).failure
            if failure is None:
                continue
            if failure.startswith(_OWN_ERRORS):
                raise ValueError(f"seed {seed}: {failure}")
            return f"seed {seed}: {failure}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="to try for each")
    parser.add_argument("--jobs", type=int, help="processes; one for each CPU if it is not given")
    known = [*MUTANTS, *FOLD_MUTANTS]
    parser.add_argument("--names", nargs="+", choices=known, metavar="NAME", help="only these")
    options = parser.parse_args(arguments)
    names = options.names or known
    found = 0
    with process_pool(options.jobs) as pool:
        searches = {pool.submit(found_by, name, range(options.seeds)): name for name in names}
        for search in as_completed(searches):
            is_found, line = _described(search)
            found += is_found
            _print(f"{searches[search]}: {line}")
    _print(f"{found} of {len(names)} mutants found")
    return 0 if found == len(names) else 1


def _described(search: Future[str | None]) -> tuple[bool, str]:
    """Whether a mutant was found, and how."""
    try:
        result = search.result()
    except ValueError as error:
        return False, f"NOT A MUTANT, its own code fails: {error}"
    return (False, "NOT FOUND") if result is None else (True, result)


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
