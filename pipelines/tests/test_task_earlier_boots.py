"""The log of a task's earlier boots: results that may be wrong are never served."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_world import SINK, World

from rekindle.engine.model import State
from rekindle.errors import DifferentResults, LogCorrupt, NotDeterministic
from rekindle.protocol import RestorePoint
from rekindle.streams.epochs import NO_EPOCH
from rekindle.streams.log_files import refuse_shipped
from rekindle.task.discard import discard_log_if_marked, mark_comparison, mark_for_discard
from rekindle.task.earlier_boots import held_log, is_doubted, require_held
from rekindle.task.state import TaskState
from rekindle_testing.waiting import eventually

WRONG = 5
SUMS = [sum(range(e + 1)) for e in range(12)]


class Boot:
    """One boot of a task from the first epoch; `wrong` is added to its result of epoch WRONG."""

    def __init__(self, directory: Path, replicas: int, wrong: int = 0) -> None:
        self.world = World(directory, replicas=replicas)
        self.world.chain.wrong = {WRONG: wrong}

    def run(self) -> World:
        try:
            self.world.run_to(12)
        finally:
            self.world.sinks.stop()
            self.world.saver.stop(1)
            self.world.log.close()
        return self.world


def run_boot_with_wrong_result(directory: Path, replicas: int) -> None:
    """A boot that computed WRONG wrongly, and ended before any poll."""
    Boot(directory, replicas, wrong=100).run()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The directory of the task's log, which outlives its boots."""
    return tmp_path / "log"


def test_a_replica_serves_only_what_this_boot_computes(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=2)
    boot = Boot(home, replicas=2)
    assert boot.world.log.last == NO_EPOCH
    boot.run()
    assert boot.world.sums() == SUMS


def test_with_partners_sinks_write_nothing_of_earlier_boots(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=2)
    boot = Boot(home, replicas=2)
    boot.world.sinks.assign([SINK])
    boot.world.run_to(WRONG)
    eventually(lambda: boot.world.sinks.progress()[0].durable == WRONG - 1)
    assert boot.world.sink.epochs == list(range(WRONG))
    boot.run()


def test_a_contradiction_is_reported_until_a_commit(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=2)
    world = Boot(home, replicas=2).run()
    found = world.status.response(1).contradiction
    assert found is not None
    assert (found.epoch, "earlier boot" in found.message) == (WRONG, True)
    world.status.committed(WRONG - 1)
    assert world.status.response(1).contradiction == found
    world.status.committed(WRONG)
    assert world.status.response(1).contradiction is None


def test_a_task_without_partners_serves_its_log_at_once(home: Path) -> None:
    Boot(home, replicas=1).run()
    assert Boot(home, replicas=1).world.log.last == 11


def test_a_log_is_reported_that_a_task_without_partners_will_serve(home: Path) -> None:
    assert held_log(home, has_no_partners=True) is None
    Boot(home, replicas=1).run()
    assert held_log(home, has_no_partners=True) == (0, 11)
    assert held_log(home, has_no_partners=False) is None
    mark_comparison(home)
    assert held_log(home, has_no_partners=True) is None


def test_a_log_that_is_discarded_is_not_reported(home: Path) -> None:
    Boot(home, replicas=1).run()
    mark_for_discard(home)
    assert held_log(home, has_no_partners=True) is None


def test_a_disputed_log_is_not_reported(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=1)
    with pytest.raises(DifferentResults):
        Boot(home, replicas=1).run()
    assert held_log(home, has_no_partners=True) is None


def test_a_task_that_refused_what_was_shipped_has_a_log_of_its_own(home: Path) -> None:
    refuse_shipped(home)
    Boot(home, replicas=1).run()
    assert is_doubted(home)
    assert held_log(home, has_no_partners=True) == (0, 11)


def test_a_torn_end_is_not_reported_and_not_touched(home: Path) -> None:
    Boot(home, replicas=1).run()
    (path,) = home.glob("*.log")
    path.write_bytes(path.read_bytes()[:-100])
    before = path.read_bytes()
    assert held_log(home, has_no_partners=True) == (0, 10)
    assert path.read_bytes() == before


def test_a_log_that_cannot_be_read_is_not_reported(home: Path) -> None:
    Boot(home, replicas=1).run()
    (path,) = home.glob("*.log")
    path.unlink()
    path.mkdir()  # reading it fails, also for root
    assert held_log(home, has_no_partners=True) is None


def test_a_log_that_lacks_what_is_left_to_it_is_refused(home: Path) -> None:
    Boot(home, replicas=1).run()
    log = Boot(home, replicas=1).world.log
    require_held(log, RestorePoint(epoch=7))
    require_held(log, RestorePoint(epoch=11, log_from=0))
    with pytest.raises(LogCorrupt, match="0 to 12 are needed"):
        require_held(log, RestorePoint(epoch=12, log_from=0))
    log.start_at(20)
    with pytest.raises(LogCorrupt, match="has epochs 20 to 19; 8 to 11"):
        require_held(log, RestorePoint(epoch=11, log_from=8))


def test_a_wrong_log_is_replaced_once_two_computations_agree(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=1)
    with pytest.raises(DifferentResults, match="two of three"):
        Boot(home, replicas=1).run()
    third = Boot(home, replicas=1)
    assert third.world.log.last == NO_EPOCH, "nothing is served before it is decided"
    world = third.run()
    assert world.sums() == SUMS
    found = world.status.response(1).contradiction
    assert found is not None
    assert (found.epoch, "two computations agree" in found.message) == (WRONG, True)
    assert Boot(home, replicas=1).run().status.response(1).contradiction is None


def test_a_right_log_is_kept_when_one_computation_was_wrong(home: Path) -> None:
    Boot(home, replicas=1).run()
    with pytest.raises(DifferentResults):
        Boot(home, replicas=1, wrong=7).run()
    world = Boot(home, replicas=1).run()
    assert world.sums() == SUMS
    assert world.status.response(1).contradiction is None


def test_a_task_whose_results_all_differ_stays_failed(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=1)
    with pytest.raises(DifferentResults):
        Boot(home, replicas=1, wrong=7).run()
    with pytest.raises(NotDeterministic, match="3 different results"):
        Boot(home, replicas=1).run()
    with pytest.raises(NotDeterministic, match="change the operator's definition"):
        Boot(home, replicas=1)
    mark_for_discard(home)
    assert discard_log_if_marked(home)
    assert Boot(home, replicas=1).run().sums() == SUMS


def test_sinks_compare_files_written_from_a_wrong_log(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=1)
    with pytest.raises(DifferentResults):
        Boot(home, replicas=1).run()
    boot = Boot(home, replicas=1)
    boot.world.sink.epochs = list(range(8))
    boot.world.sinks.assign([SINK])
    boot.world.run_to(12)
    eventually(lambda: boot.world.sinks.progress()[0].durable == 11)
    assert boot.world.sink.epochs == [*range(8), *range(WRONG, 12)]
    boot.run()


def run_and_compare_all_files(boot: Boot) -> None:
    """Its sink has files of eight epochs, and gets all epochs again."""
    boot.world.sink.epochs = list(range(8))
    boot.world.sinks.assign([SINK])
    boot.world.run_to(12)
    eventually(lambda: boot.world.sinks.progress()[0].durable == 11)
    assert boot.world.sink.epochs == [*range(8), *range(12)]
    boot.run()


def test_sinks_compare_files_of_a_boot_that_may_be_wrong(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=2)
    mark_for_discard(home)
    run_and_compare_all_files(Boot(home, replicas=2))


def test_sinks_of_a_new_pod_compare_files_if_a_poll_asked_for_it(home: Path) -> None:
    mark_comparison(home)
    run_and_compare_all_files(Boot(home, replicas=2))


def killed(boot: Boot, epoch: int) -> None:
    """Run it through an epoch, and end it before its sinks have written anything."""
    boot.world.run_to(epoch + 1)
    boot.world.saver.stop(1)
    boot.world.log.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_sinks_compare_although_the_boot_that_had_to_was_killed(home: Path, replicas: int) -> None:
    run_boot_with_wrong_result(home, replicas)
    mark_for_discard(home)
    killed(Boot(home, replicas), epoch=2)
    killed(Boot(home, replicas), epoch=2)
    run_and_compare_all_files(Boot(home, replicas))


def test_files_are_compared_after_a_kill_too_once_two_results_agree(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=1)
    with pytest.raises(DifferentResults):
        Boot(home, replicas=1).run()
    killed(Boot(home, replicas=1), epoch=WRONG)
    boot = Boot(home, replicas=1)
    boot.world.sink.epochs = list(range(8))
    boot.world.sinks.assign([SINK])
    boot.world.run_to(12)
    eventually(lambda: boot.world.sinks.progress()[0].durable == 11)
    assert boot.world.sink.epochs[8:] == list(range(12))
    boot.run()


def test_a_comparison_lasts_until_all_files_are_compared(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=1)
    mark_for_discard(home)
    world = Boot(home, replicas=1).world
    assert world.earlier.compare_files_from is not None, "no sink is known yet"
    world.sink.epochs = list(range(8))
    world.sinks.assign([SINK])
    world.run_to(5)
    eventually(lambda: world.sinks.progress()[0].durable == 4)
    assert world.earlier.compare_files_from is not None
    world.run_to(9)
    eventually(lambda: world.earlier.compare_files_from is None)
    world.sinks.stop()
    killed(Boot(home, replicas=1), epoch=9)
    assert Boot(home, replicas=1).world.earlier.compare_files_from is None


def test_a_conflict_keeps_a_comparison_alive(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=1)
    mark_for_discard(home)
    world = Boot(home, replicas=1).world
    world.sink.conflict = "epoch 6 exists with rows that differ"
    world.sink.epochs = list(range(8))
    world.sinks.assign([SINK])
    world.run_to(9)
    eventually(lambda: world.sinks.progress()[0].durable == 8)
    assert world.earlier.compare_files_from is not None
    world.sinks.stop()


def test_a_checkpoint_beyond_the_epoch_ends_the_comparison_of_results(home: Path) -> None:
    run_boot_with_wrong_result(home, replicas=1)
    with pytest.raises(DifferentResults):
        Boot(home, replicas=1).run()
    world = World(home, TaskState(WRONG, 50, State()))
    assert (world.log.base, world.log.last) == (WRONG + 1, WRONG)
    world.sinks.stop()
    world.saver.stop(1)
