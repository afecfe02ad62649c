"""Whose turn it is when several wait for memory."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.streams import memory_budget
from rekindle.streams.memory_budget import MemoryBudget

MAX_BYTES = 10


class Holder:
    """Holds something from when it gets it until `let_go`."""

    def __init__(self, budget: MemoryBudget, key: str, size: int) -> None:
        self.key, self.size, self.holds = key, size, False
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._hold(budget))

    async def _hold(self, budget: MemoryBudget) -> None:
        async with budget.reserve(self.key, self.size):
            self.holds = True
            await self._end.wait()
        self.holds = False

    def let_go(self) -> None:
        self._end.set()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_shared_memory_counts_once() -> None:
    async def play() -> None:
        budget, order = MemoryBudget(10), []

        async def hold(key: str, size: int, until: asyncio.Event) -> None:
            async with budget.reserve(key, size):
                order.append(key)
                await until.wait()

        first, rest = asyncio.Event(), asyncio.Event()
        rest.set()
        tasks = [asyncio.create_task(hold("a", 8, first)) for _ in range(3)]
        tasks.append(asyncio.create_task(hold("b", 8, rest)))
        gone = asyncio.create_task(hold("c", 1 << 30, rest))
        await asyncio.sleep(0.01)
        assert (order, budget.reserved_bytes) == (["a", "a", "a"], 8)
        gone.cancel()
        first.set()
        await asyncio.gather(*tasks)
        assert (order[-1], budget.reserved_bytes) == ("b", 0)
        async with budget.reserve("too large alone", 1 << 40):
            assert budget.reserved_bytes == 1 << 40

    asyncio.run(play())


def test_a_large_reservation_is_granted_in_the_end() -> None:
    """Small ones come one after another, so that something is always held."""

    async def play() -> None:
        budget = MemoryBudget(MAX_BYTES)
        held = [Holder(budget, "0", 3), Holder(budget, "1", 3)]
        await settle()
        large = Holder(budget, "large", 1000)
        for number in range(2, 100):
            held.append(Holder(budget, str(number), 3))
            held[number - 2].let_go()
            await settle()
            if large.holds:
                break
        assert large.holds
        assert budget.reserved_bytes == 1000
        large.let_go()
        for holder in held:
            holder.let_go()
        await asyncio.gather(*(h.task for h in held))

    asyncio.run(play())


def test_a_repeated_reservation_does_not_overtake_others() -> None:
    async def play() -> None:
        budget, order = MemoryBudget(MAX_BYTES), []

        async def files(name: str) -> None:
            """One after another, as of a spilled log."""
            for number in range(3):
                async with budget.reserve((name, number), 8):
                    order.append(name)
                    await asyncio.sleep(0)

        await asyncio.gather(files("a"), files("b"))
        assert order == ["a", "b"] * 3

    asyncio.run(play())


def test_some_that_fit_may_overtake_one_that_does_not() -> None:
    async def play() -> None:
        budget = MemoryBudget(MAX_BYTES)
        slow = Holder(budget, "slow", 5)
        await settle()
        large = Holder(budget, "large", 8)
        await settle()
        small = [Holder(budget, f"{n}", 2) for n in range(memory_budget.MAX_PASSED + 2)]
        for holder in small:
            await settle()
            holder.let_go()
        await settle()
        assert [s.task.done() for s in small].count(True) == memory_budget.MAX_PASSED
        slow.let_go()
        await settle()
        assert large.holds
        large.let_go()
        await asyncio.gather(large.task, *(s.task for s in small))
        assert budget.reserved_bytes == 0

    asyncio.run(play())


def test_a_reservation_cancelled_when_granted_is_released() -> None:
    async def play() -> None:
        budget = MemoryBudget(MAX_BYTES)
        first = Holder(budget, "a", 8)
        await settle()
        second, third = Holder(budget, "b", 8), Holder(budget, "c", 8)
        await settle()
        first.let_go()
        await asyncio.sleep(0)  # `first` is over, and `second` has not run
        second.task.cancel()
        await settle()
        assert third.holds
        third.let_go()
        await settle()
        assert budget.reserved_bytes == 0

    asyncio.run(play())


def test_memory_is_released_before_the_response_ends() -> None:
    async def play() -> None:
        budget = MemoryBudget(MAX_BYTES)
        async with budget.reserve("a", 8) as first, budget.reserve("a", 8) as second:
            other = Holder(budget, "b", 8)
            budget.shrink(first, 1)
            await settle()
            assert (budget.reserved_bytes, other.holds) == (
                9,
                False,
            )  # `second` needs it
            budget.shrink(second, 1)
            await settle()
            assert (budget.reserved_bytes, other.holds) == (10, True)
        other.let_go()
        await settle()
        assert budget.reserved_bytes == 0

    asyncio.run(play())


SIZES = (1, 2, 3, 5, 8, 15)
"""Of each key; whoever wants one knows its size."""
STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "go", "cancel", "turn"]), st.integers(0, 5)), max_size=40
)


@pytest.mark.filterwarnings("error")
@given(STEPS)
def test_any_history_keeps_the_bound_and_grants_all(
    steps: list[tuple[str, int]],
) -> None:
    async def play() -> None:
        budget, holders = MemoryBudget(MAX_BYTES), list[Holder]()
        for action, number in steps:
            if action == "come":
                holders.append(Holder(budget, f"k{number}", SIZES[number]))
            elif action == "turn":
                await asyncio.sleep(0)
            elif holders and action == "go":
                holders[number % len(holders)].let_go()
            elif holders:
                holders[number % len(holders)].task.cancel()
            held = {h.key for h in holders if h.holds and not h.task.done()}
            assert budget.reserved_bytes <= MAX_BYTES or len(held) <= 1
        for holder in holders:
            holder.let_go()
        await asyncio.wait_for(
            asyncio.gather(*(h.task for h in holders), return_exceptions=True), 5
        )
        assert budget.reserved_bytes == 0

    asyncio.run(play())
