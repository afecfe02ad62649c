"""Chains of consistency managers in random histories: links are cut, late, healed and overlap.

Whatever happens, stable output is that of a run without failures, tentative output is in time and
corrected, buffers are bounded, and after the last failure all are STABLE.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from consistency_world import COVERED, EPOCH_BYTES, Task, World, WorldOptions, failure_free
from hypothesis import given
from hypothesis import strategies as st

from rekindle.consistency.messages import Policy
from rekindle.consistency.states import ROWS, ConsistencyState
from rekindle.streams.epochs import NO_EPOCH, BatchKind

pytestmark = pytest.mark.simulated

X_S = 3.0
"""`maxDelay`, which the paper calls X."""
POLICIES = [
    (during_failure, during_stabilization)
    for during_failure in (Policy.PROCESS, Policy.DELAY)
    for during_stabilization in Policy
]
SEEDS = st.integers(0, 2**32)


def drawn_options(random: Random, most_tasks: int = 3) -> WorldOptions:
    """Links that are late, but never by more than a task may wait: that would be a failure."""
    tasks = random.randint(1, most_tasks)
    failure, stabilization = random.choice(POLICIES)
    late, slow = random.random() < 0.3, random.random() < 0.5
    return WorldOptions(
        tasks=tasks,
        max_delay_s=None if random.random() < 0.2 else X_S,
        during_failure=failure,
        during_stabilization=stabilization,
        read_ahead_bytes=random.choice([8 * EPOCH_BYTES, 25 * EPOCH_BYTES, 1 << 20]),
        max_buffered_epochs=random.choice([4, 16, 1024]),
        latencies=tuple(
            random.uniform(0.01, 2.2 / tasks) if late else 0.01 for _ in range(2 * tasks)
        ),
        call_epochs=2 if slow else 16,
        process_epoch_s=0.06 if slow else 0.002,
    )


def drawn_cuts(random: Random, links: int) -> list[tuple[float, int, bool]]:
    """Cuts of 0 to 20 s, some of several links at once, and some of one soon after another was
    healed."""
    cuts: list[tuple[float, int, bool]] = []
    until = random.uniform(6, 20)
    for _ in range(random.randint(1, 3)):
        begin = random.uniform(1, until)
        for _ in range(random.choice([1, 1, 2, 4])):
            link, length_s = random.randrange(links), random.choice([0.5, 2, 4, 8, 20])
            end = begin + length_s * random.random()
            cuts += [(begin, link, True), (end, link, False)]
            begin = random.choice([begin, end + random.choice([0.1, 2]) * random.random()])
    return sorted(cuts)


def play(
    random: Random, options: WorldOptions, *, partners: bool = False, settle_s: float = 25
) -> World:
    """Cuts; then nothing fails any more."""
    world = World(options)
    for at, link, is_cut in drawn_cuts(random, len(world.links)):
        if partners:
            disturb(random, world)
        world.run(at)
        (world.cut if is_cut else world.heal)(link)
        if partners:
            world.run(at + random.uniform(0, 0.2))
            disturb(random, world)
    world.heal_all()
    if partners:
        for task in world.tasks:
            task.step(lambda core, now: core.partner_changed(False, now))
            task.step(lambda core, now: core.max_delay_changed(options.max_delay_s, now))
    world.run(world.now + settle_s)
    return world


def disturb(random: Random, world: World) -> None:
    """What partners may say, at any time."""
    events: list[tuple[str, tuple[object, ...]]] = [
        ("postponement_requested", (1, random.uniform(0.1, 5))),
        ("promise_ended", ()),
        ("partner_promised", (random.uniform(0.1, 5),)),
        ("partner_refused", ()),
        ("partner_changed", (random.random() < 0.8,)),
        ("max_delay_changed", (random.choice([X_S, None]),)),
    ]
    task, (name, arguments) = random.choice(world.tasks), random.choice(events)
    task.step(lambda core, now: getattr(core, name)(*arguments, now))


def check_output(task: Task) -> None:
    """I2, and the rules of UNDO and REC_DONE, record by record."""
    stable, corrected, attempt, undone = NO_EPOCH, True, 0, False
    tentative: set[int] = set()  # not replaced by stable ones yet
    for record in task.stream.records:
        match record.kind:
            case BatchKind.STABLE:
                assert record.epoch == stable + 1, "skipped or repeated"
                assert undone or not tentative, "a correction without UNDO"
                stable = record.epoch
                tentative.discard(stable)
            case BatchKind.TENTATIVE:
                assert record.epoch > stable, "a tentative epoch after its stable version"
                assert record.epoch not in tentative or undone
                if record.attempt != attempt:
                    assert not undone, "a new failure before REC_DONE"
                    assert record.epoch == stable + 1
                attempt = record.attempt
                tentative.add(record.epoch)
            case BatchKind.UNDO:
                assert record.epoch == stable + 1, "UNDO of a stable epoch"
                assert not undone, "UNDO twice"
                undone = True
                tentative = {e for e in tentative if e < record.epoch}
            case BatchKind.RECONCILIATION_DONE:
                assert undone, "REC_DONE without UNDO"
                assert record.epoch == stable
                undone = False
        corrected = not tentative and not undone
    assert corrected, "tentative output was never corrected"


def check_in_time(task: Task, options: WorldOptions) -> None:
    """X is the limit of an epoch that arrives alone; if earlier ones arrived with it, the time to
    process these is added."""
    out, now = outputs(task), task.world.now
    for epoch, arrived in task.arrived.items():
        before = sum(out.get(e, arrived) > arrived for e in task.arrived if e < epoch)
        latest = arrived + X_S + before * (options.call_s + options.process_epoch_s)
        assert out.get(epoch, arrived) <= latest
    never = [e for e, t in task.arrived.items() if e not in out and now - t > X_S]
    assert not never


def check_buffers(task: Task, options: WorldOptions) -> None:
    """Complete epochs, those that wait for other channels, live ones, and those that arrive
    although a buffer is full."""
    channels = len(task.links)
    epochs, size = task.most_buffered
    assert epochs <= 3 * channels * (options.max_buffered_epochs + 2)
    assert size <= 4 * (options.read_ahead_bytes + 2 * EPOCH_BYTES * channels)


@given(SEEDS)
def test_output_is_in_time_corrected_and_that_without_failures(seed: int) -> None:
    """And all is STABLE and complete after the last failure."""
    random = Random(seed)
    options = drawn_options(random)
    world = play(random, options)
    expected = failure_free(options, world.epochs)
    for depth, (task, values) in enumerate(zip(world.tasks, expected, strict=True)):
        check_output(task)
        got = [record.value for record in task.stream.stable]
        assert got == values[: len(got)]
        if options.max_delay_s is None:
            assert {record.kind for record in task.stream.records} == {BatchKind.STABLE}
        elif options.during_stabilization is not Policy.SUSPEND:
            check_in_time(task, options)
        check_buffers(task, options)
        assert task.core.state is ConsistencyState.STABLE
        assert task.core.tentative_epoch is None
        assert task.core.stable_epoch >= world.epochs - 2 * (depth + 2)
        assert len(task.states) == 1  # no fork is left
        assert all(link.live_from is None for link in task.links.values())


@given(SEEDS, st.floats(0.5, 1.5))
def test_an_engine_slower_than_its_input_corrects_all_the_same(seed: int, call_s: float) -> None:
    """A call may take longer than an epoch; a stable one has many epochs. Buffers of fewer epochs
    than arrive during two calls would be too few for good."""
    random = Random(seed)
    options = drawn_options(random)
    slow = replace(
        options,
        max_buffered_epochs=max(16, options.max_buffered_epochs),
        read_ahead_bytes=max(25 * EPOCH_BYTES, options.read_ahead_bytes),
        tasks=random.choice([1, 1, 2]),
        latencies=(),
        call_epochs=random.choice([16, 64]),
        call_s=call_s,
        process_epoch_s=0.002,
    )
    world = play(random, slow, settle_s=50)
    for task in world.tasks:
        assert task.core.stable_epoch >= world.epochs - 30
    if slow.max_buffered_epochs >= slow.call_epochs and slow.read_ahead_bytes >= 1 << 20:
        assert world.states[0] is ConsistencyState.STABLE
        assert world.tasks[0].core.stable_epoch >= world.epochs - 4


def outputs(task: Task) -> dict[int, float]:
    """When each epoch was out first."""
    first: dict[int, float] = {}
    for record in task.stream.records:
        if record.kind in (BatchKind.STABLE, BatchKind.TENTATIVE):
            first.setdefault(record.epoch, record.at)
    return first


@given(SEEDS)
def test_whatever_partners_say_output_is_corrected(seed: int) -> None:
    random = Random(seed)
    options = replace(drawn_options(random), max_delay_s=X_S, has_partner=True)
    world = play(random, options, partners=True)
    expected = failure_free(options, world.epochs)
    for task, values in zip(world.tasks, expected, strict=True):
        check_output(task)
        assert task.core.state is ConsistencyState.STABLE
        got = [record.value for record in task.stream.stable]
        assert got == values[: len(got)]


def undone_before_the_deadline() -> None:
    """The first task is tentative and corrected again while the second one still waits."""
    world = World(WorldOptions(tasks=2, max_delay_s=X_S, during_failure=Policy.DELAY))
    world.run(10)
    world.cut(1)
    world.cut(3)
    world.run(14)
    world.heal_all()
    world.run(20)


FIRST_SEEDS = (42, 89, 115, 39)
"""Of histories that together reach all cells; others are tried if histories have changed."""


def test_every_cell_of_the_table_is_reached() -> None:
    COVERED.clear()
    undone_before_the_deadline()
    cells = [(state, event) for state, rows in ROWS.items() for event in rows]
    for seed in (*FIRST_SEEDS, *range(200)):
        random = Random(seed)
        options = replace(drawn_options(random), has_partner=True)
        play(random, options, partners=True)
        if all(COVERED[cell] for cell in cells):
            break
    assert [cell for cell in cells if not COVERED[cell]] == []
