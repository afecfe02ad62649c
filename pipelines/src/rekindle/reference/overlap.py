"""Reads the next input and writes the last output while a call is processed, each in a thread.

Inputs and outputs keep their order, so results do not change. Memory holds one more input and one
more output.

Design: docs/design/architecture.md#reference-execution.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterator[T]) -> Generator[T, None, None]:
    """Yields the items of `items`, none of which may be None; computes the next one while the
    caller uses one. An error of `items` is raised in place of the item."""
    with ThreadPoolExecutor(1, "prefetch") as thread:
        future = thread.submit(next, items, None)
        while (item := future.result()) is not None:
            future = thread.submit(next, items, None)
            yield item


@contextmanager
def write_behind(use: Callable[[T], None]) -> Iterator[Callable[[T], None]]:
    """Yields a function that calls `use` in a thread, for one item at a time. It first waits for
    the previous item, and raises what `use` raised for that one. So does the exit of the context,
    for the last item."""
    with ThreadPoolExecutor(1, "write_behind") as thread:
        last: Future[None] | None = None

        def submit(item: T) -> None:
            nonlocal last
            if last is not None:
                last.result()
            last = thread.submit(use, item)

        yield submit
        if last is not None:
            last.result()


@contextmanager
def set_on_error(event: threading.Event) -> Iterator[None]:
    """Sets `event` if the body ends by an error or a signal, so that the threads of `prefetch` and
    `write_behind` can stop within their current item: both contexts wait for their thread."""
    try:
        yield
    except BaseException:
        event.set()
        raise
