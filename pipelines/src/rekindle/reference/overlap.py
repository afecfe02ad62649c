"""Reads the next input and writes the last output while a batch is processed, each in a thread.

The order of each does not change, so results do not. Memory holds one more input and one more
output.

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
    """The same items, none of them None; the next one is made while one is used. Raises what
    `items` raises, in its place."""
    with ThreadPoolExecutor(1, "prefetch") as thread:
        made = thread.submit(next, items, None)
        while (item := made.result()) is not None:
            made = thread.submit(next, items, None)
            yield item


@contextmanager
def write_behind(use: Callable[[T], None]) -> Iterator[Callable[[T], None]]:
    """A function that calls `use` in a thread, for one item after another. It waits for the item
    before, and raises what `use` raised for it; so does the end."""
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
    `write_behind`, which are waited for, can leave the rest of their item."""
    try:
        yield
    except BaseException:
        event.set()
        raise
