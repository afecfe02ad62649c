"""Threads that read ahead and write behind: same items, same order, same errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rekindle.reference.overlap import prefetch, set_on_error, write_behind

TIMEOUT_S = 10.0


def test_items_keep_their_order() -> None:
    assert list(prefetch(iter(range(1, 50)))) == list(range(1, 50))


def test_only_the_next_item_is_made_while_one_is_used() -> None:
    made: list[int] = []
    second, third = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        for n, event in enumerate((threading.Event(), second, third), 1):
            made.append(n)
            event.set()
            yield n

    found = prefetch(items())
    assert next(found) == 1
    assert second.wait(TIMEOUT_S)
    assert not third.wait(0.05)
    assert made == [1, 2]
    found.close()


def test_an_error_of_an_item_is_raised_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("second")

    found = prefetch(items())
    assert next(found) == 1
    with pytest.raises(ValueError, match="second"):
        next(found)


def test_items_are_written_in_order_before_the_end() -> None:
    written: list[int] = []
    with write_behind(written.append) as write:
        for n in range(20):
            write(n)
    assert written == list(range(20))


def test_a_failed_write_is_raised_by_the_next_one() -> None:
    def fail(item: int) -> None:
        raise ValueError(f"item {item}")

    def write_two() -> None:
        with write_behind(fail) as write:
            write(1)
            write(2)

    with pytest.raises(ValueError, match="item 1"):
        write_two()


def test_a_failed_last_write_is_raised_at_the_end() -> None:
    def fail(item: int) -> None:
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 1"), write_behind(fail) as write:
        write(1)


def test_a_write_in_progress_is_ended_early_after_an_error() -> None:
    ended = threading.Event()
    noticed: list[bool] = []

    def wait(_: int) -> None:
        noticed.append(ended.wait(TIMEOUT_S))

    def fail() -> None:
        with write_behind(wait) as write, set_on_error(ended):
            write(1)
            raise ValueError("the computation")

    with pytest.raises(ValueError, match="the computation"):
        fail()
    assert noticed == [True]
