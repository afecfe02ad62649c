"""The loops that poll tasks."""

from __future__ import annotations

import asyncio

from rekindle.coordinator.core.state_machine import Event
from rekindle.coordinator.model import Pod
from rekindle.coordinator.shell.polling import Pollers
from rekindle.coordinator.shell.settings import Settings
from rekindle.coordinator.tasks.membership import Task
from rekindle.topology.model import Slot

SETTINGS = Settings("t", "n", "uid", incarnation=1, bind="127.0.0.1", poll_interval_s=0.01)
SLOT = Slot("s", 0, 0)
TASK = Task(Pod("p", SLOT, 1, "127.0.0.1", may_be_running=True, was_ready=True), known_since=0.0)


def feed(event: Event) -> None:
    raise AssertionError(event)


def test_a_loop_that_ends_by_an_error_is_noticed() -> None:
    def next_poll(slot: Slot) -> None:
        raise KeyError(slot)

    ended: list[BaseException | None] = []

    async def run() -> None:
        pollers = Pollers(
            SETTINGS,
            next_poll,
            on_event=feed,
            on_poll=lambda took_s, answered: None,
            on_loop_end=lambda loop: ended.append(loop.exception()),
        )
        pollers.poll_only([TASK])
        await asyncio.sleep(0.05)
        await pollers.close()

    asyncio.run(run())
    assert [repr(error) for error in ended] == [repr(KeyError(SLOT))]
