"""Calls that do not fit into memory, and full disks, with a chain in plain Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from task_world import SCHEMA, Counting, World

from rekindle.engine.bounds import CallBounds
from rekindle.engine.call_sizes import CallSizes, check_column_sizes
from rekindle.engine.failure import DiskFull, EngineUnavailable, OutOfMemory, describe_exit
from rekindle.engine.memory import MIB, plan_memory
from rekindle.engine.model import ChainResult, State
from rekindle.errors import EpochTooLarge, RekindleError, StoreError
from rekindle.streams.epochs import EpochInput
from rekindle.task.call_size_file import FILE_NAME, CallSize, CallSizeFile

HEAP_FULL = EngineUnavailable(describe_exit(3, "512m"), 3)


class Limited(Counting):
    """A chain whose engine fails for calls for which `refuse` returns an error."""

    def __init__(self, refuse: Callable[[Sequence[EpochInput]], Exception | None]) -> None:
        super().__init__()
        self._refuse = refuse

    def process(self, state: State, epochs: Sequence[EpochInput]) -> ChainResult:
        if (error := self._refuse(epochs)) is not None:
            self.calls.append([-e.epoch for e in epochs])  # negative: it failed
            raise error
        return super().process(state, epochs)


class Engine:
    """Records what each restart is given."""

    def __init__(self, chain: Limited) -> None:
        self.chain = chain
        self.spark_job_input_bytes: list[int] = []
        self.dead: EngineUnavailable | None = None

    def lost(self) -> EngineUnavailable | None:
        return self.dead

    def restart(self, spark_job_input_bytes: int) -> Limited:
        self.dead = None
        self.spark_job_input_bytes.append(spark_job_input_bytes)
        return self.chain


def limited_world(
    directory: Path, refuse: Callable[[Sequence[EpochInput]], Exception | None]
) -> tuple[World, Engine]:
    world = World(directory)
    engine = Engine(Limited(refuse))
    world.chain = engine.chain
    world.parts.chain = engine.chain
    world.parts.engine = engine
    return world, engine


def run(world: World, now: float) -> None:
    """Until the log has all released epochs."""
    world.now = now
    for _ in range(300):
        if world.log.last == int(now) - 1:
            return
        world.run_next()
    raise AssertionError(f"only epoch {world.log.last} after 300 requests")


@pytest.mark.parametrize(
    "error", [HEAP_FULL, OutOfMemory("direct buffers"), EngineUnavailable("x", -9)]
)
def test_a_call_without_memory_is_halved(tmp_path: Path, error: RekindleError) -> None:
    world, engine = limited_world(tmp_path, lambda es: error if len(es) > 2 else None)
    run(world, 10)
    assert world.chain.calls[0] == [-n for n in range(10)]
    assert world.sums() == [sum(range(e + 1)) for e in range(10)]
    assert [len(c) for c in world.chain.calls[:3]] == [10, 5, 2]
    assert len(engine.spark_job_input_bytes) == 2
    assert world.status.response(1).problem is None


def test_a_call_that_was_reduced_for_memory_stays_reduced(tmp_path: Path) -> None:
    world, engine = limited_world(tmp_path, lambda es: HEAP_FULL if len(es) > 5 else None)
    run(world, 10)
    run(world, 30)
    assert len(engine.spark_job_input_bytes) == 1
    assert max(len(c) for c in world.chain.calls[1:]) == 5


def test_an_engine_without_memory_is_reported(tmp_path: Path) -> None:
    world, _ = limited_world(tmp_path, lambda es: HEAP_FULL if len(es) > 4 else None)
    run(world, 8)
    reported, recovered = world.problems
    assert "ran out of memory" in (reported or "")
    assert recovered is None


def test_one_epoch_without_memory_is_tried_in_smaller_jobs(tmp_path: Path) -> None:
    failures = [HEAP_FULL]
    world, engine = limited_world(tmp_path, lambda _: failures.pop() if failures else None)
    run(world, 1)
    assert engine.spark_job_input_bytes == [plan_memory().spark_job_input_bytes // 16]


def test_an_epoch_that_never_fits_fails_the_task(tmp_path: Path) -> None:
    world, _ = limited_world(tmp_path, lambda _: HEAP_FULL)
    with pytest.raises(EpochTooLarge) as raised:
        run(world, 1)
    for words in ("epoch 0", "1 rows", "1024 MiB", "512 MiB", "resources.limits.memory"):
        assert words in str(raised.value)


def test_an_engine_that_keeps_dying_fails_the_task(tmp_path: Path) -> None:
    crash = EngineUnavailable("the JVM died (status 134)", 134)
    world, engine = limited_world(tmp_path, lambda _: crash)
    with pytest.raises(EngineUnavailable, match="134"):
        run(world, 1)
    assert len(engine.spark_job_input_bytes) == 2


def test_an_engine_that_dies_while_idle_is_restarted(tmp_path: Path) -> None:
    world, engine = limited_world(tmp_path, lambda _: None)
    run(world, 2)
    engine.dead = EngineUnavailable("the JVM died (status -9)", -9)
    run(world, 4)
    assert len(engine.spark_job_input_bytes) == 1
    assert world.sums() == [0, 1, 3, 6]


def test_an_epoch_too_large_for_the_task_is_refused(tmp_path: Path) -> None:
    sizes = CallSizes.of(plan_memory(1024 * MIB))
    rows = pa.table({"s": pa.repeat("x" * MIB, 100)})
    epoch = EpochInput(7, watermark_before=0, watermark=0, inputs=(rows,))
    with pytest.raises(EpochTooLarge, match=r"epoch 7 \(100 rows, 100\.0 MiB\).*\d+Mi"):
        sizes.check(epoch)
    needed = CallSizes.of(plan_memory(4096 * MIB))
    needed.check(epoch)


def test_a_column_that_arrow_cannot_hold_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rekindle.engine.call_sizes.COLUMN_BYTES", 1000)
    rows = pa.table({"n": list(range(500)), "s": ["xyz"] * 500})
    with pytest.raises(EpochTooLarge, match=r"column s of epoch 3 has .* of type string"):
        check_column_sizes(3, rows)
    check_column_sizes(3, rows.slice(0, 50))


def test_an_engine_restart_waits_for_disk_space(tmp_path: Path) -> None:
    failures: list[Exception] = [HEAP_FULL]
    world, engine = limited_world(tmp_path, lambda _: failures.pop() if failures else None)
    full = [OSError(28, "No space left on device")] * 2
    restart = engine.restart

    def restart_later(spark_job_input_bytes: int) -> Limited:
        if full:
            raise full.pop()
        return restart(spark_job_input_bytes)

    engine.restart = restart_later  # type: ignore[method-assign]
    run(world, 1)
    assert len(engine.spark_job_input_bytes) == 1
    assert world.status.response(1).problem is None


def test_a_killed_task_finds_the_size_of_its_call(tmp_path: Path) -> None:
    world, _ = limited_world(tmp_path / "log", lambda _: None)
    file = world.parts.call_size_file = CallSizeFile(tmp_path)
    seen: list[CallSize | None] = []
    world.chain._refuse = lambda es: seen.append(CallSizeFile(tmp_path).interrupted())  # type: ignore[attr-defined]
    run(world, 5)
    run(world, 6)
    assert seen == [CallSize(5, 40), None]  # the second is no larger than what succeeded
    assert file.interrupted() is None


def test_a_task_that_is_killed_while_its_call_waits_finds_no_size(tmp_path: Path) -> None:
    """Other threads may wait too: for them the call goes on."""
    file, found = CallSizeFile(tmp_path), CallSizeFile(tmp_path)
    with file.during_wait():
        file.begin(CallSize(5, 40))
    assert found.interrupted() == CallSize(5, 40)
    with ThreadPoolExecutor(1) as pool:
        waits = file.during_wait()
        pool.submit(waits.__enter__).result(10)
        assert found.interrupted() == CallSize(5, 40)
    with contextlib.suppress(StoreError), file.during_wait():
        assert found.interrupted() is None
        raise StoreError
    assert found.interrupted() == CallSize(5, 40)
    file.end()
    assert found.interrupted() is None


def test_calls_are_smaller_after_a_kill() -> None:
    sizes = CallSizes.of(plan_memory())
    sizes.killed_in(8, 4 * MIB)
    assert (sizes.bounds.max_bytes, sizes.spark_job_input_bytes) == (
        2 * MIB,
        plan_memory().spark_job_input_bytes,
    )
    sizes.killed_in(1, MIB)
    assert sizes.spark_job_input_bytes == plan_memory().spark_job_input_bytes // 16


def test_a_kill_in_a_small_call_halves_its_epochs_but_not_the_byte_limit() -> None:
    sizes = CallSizes.of(plan_memory())
    sizes.killed_in(64, 640)
    assert sizes.next_call == CallBounds(32, max_bytes=plan_memory().call_bytes)


def test_calls_after_repeated_kills_do_not_grow_again() -> None:
    killed_in = CallSize(5, 30 * MIB)
    for _ in range(6):
        sizes = CallSizes.of(plan_memory())
        sizes.killed_in(killed_in.epochs, killed_in.bytes)
        epochs = max(1, sizes.next_call.max_bytes // (6 * MIB))
        killed_in = CallSize(epochs, epochs * 6 * MIB)
    assert (killed_in.epochs, sizes.spark_job_input_bytes) == (
        1,
        plan_memory().spark_job_input_bytes // 16,
    )


def test_a_crash_in_a_small_call_shrinks_calls_only_until_its_epochs_are_done() -> None:
    sizes = CallSizes.of(plan_memory())
    empty = [EpochInput(n, 0, 0, (SCHEMA.empty_table(),)) for n in range(2)]
    sizes.failed(empty, EngineUnavailable("killed", -9))
    assert sizes.next_call.max_epochs == 1
    sizes.succeeded(0)
    assert sizes.next_call.max_epochs == 1
    sizes.succeeded(1)
    assert sizes.next_call == CallBounds(max_bytes=plan_memory().call_bytes)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"epochs": 1, "bytes": null}'])
def test_a_damaged_call_size_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert CallSizeFile(tmp_path).interrupted() is None


def test_a_call_waits_for_a_full_disk(tmp_path: Path) -> None:
    failures: list[Exception] = [DiskFull("no space left on the local disk"), OSError(28, "ENOSPC")]
    world, engine = limited_world(tmp_path, lambda _: failures.pop() if failures else None)
    run(world, 1)
    first, second, recovered = world.problems
    assert "ENOSPC" in (first or "")
    assert "no space left on the local disk" in (second or "")
    assert recovered is None
    assert engine.spark_job_input_bytes == []
    assert world.status.response(1).problem is None


def test_halving_a_call_halves_its_bytes() -> None:
    sizes = CallSizes.of(plan_memory())
    epochs = [EpochInput(n, 0, 0, (pa.table({"n": [n] * 100}, schema=SCHEMA),)) for n in range(8)]
    sizes.failed(epochs, HEAP_FULL)
    size = sum(e.nbytes for e in epochs)
    assert sizes.bounds == CallBounds(max_bytes=size // 2)
    assert sizes.next_call.max_epochs == 4
    sizes.succeeded(7)
    assert sizes.next_call.max_epochs == CallBounds().max_epochs
