"""Write the input of the Nexmark example: persons, auctions and bids of an online auction.

    python examples/nexmark/generate.py DIRECTORY [--events 100000] [--rate 1000] [--seed 0]

One Parquet file for each kind of event, in the order of time. Proportions and correlations are
those of Nexmark's generator (https://github.com/nexmark/nexmark): of 50 events one is a person,
three are auctions and 46 are bids; three quarters of the auctions are a hot seller's, half of the
bids are for a hot auction, three quarters of them a hot bidder's; sellers and auctions may be named
up to ten numbers before they exist. What is random is drawn in another way, so rows are not those
of the original; the same arguments give the same rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PERSONS, AUCTIONS, EVENTS = 1, 3, 50
"""Of EVENTS successive events the first are persons, then come auctions; the others are bids."""
FIRST_ID = 1000
FIRST_CATEGORY, CATEGORIES = 10, 5
BEGIN_US = 1_436_918_400_000_000  # 2015-07-15T00:00:00Z

HOT_GROUP = 100  # persons, or auctions, of which one is hot
ACTIVE_PERSONS = 1000
OPEN_AUCTIONS = 100
LEAD = 10  # ids that may be named before they exist
CHANNELS = 10_000

# fmt: off
FIRST_NAMES = (
    "Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter",
)
LAST_NAMES = (
    "Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris",
)
CITIES = (
    "Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland",
    "Bend", "Redmond", "Seattle", "Kent", "Cheyenne",
)
STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
# fmt: on
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


class Generator:
    """Events `0` to `events - 1`, `rate` in a second of event time."""

    def __init__(self, events: int, rate: int, seed: int) -> None:
        self._random = np.random.Generator(np.random.Philox(seed))
        self._number = np.arange(events, dtype=np.int64)
        self._rate = rate

    def persons(self) -> pa.Table:
        number = self._number[self._number % EVENTS < PERSONS]
        size = len(number)
        names = [self._choice(FIRST_NAMES, size), self._choice(LAST_NAMES, size)]
        emails = [self._texts(size, 3, 7), self._texts(size, 3, 5)]
        return pa.table(
            {
                "id": _last_person(number) + FIRST_ID,
                "name": _joined(" ", *names),
                "email": _joined("", _joined("@", *emails), [".com"] * size),
                "credit_card": [
                    " ".join(f"{part:04d}" for part in card)
                    for card in self._random.integers(0, 10_000, (size, 4))
                ],
                "city": self._choice(CITIES, size),
                "state": self._choice(STATES, size),
                "date_time": self._times(number),
                "extra": self._texts(size, 100, 150),
            }
        )

    def auctions(self) -> pa.Table:
        offset = self._number % EVENTS
        number = self._number[(offset >= PERSONS) & (offset < PERSONS + AUCTIONS)]
        size = len(number)
        hot = self._random.integers(0, 4, size) > 0
        seller = np.where(hot, _hot(_last_person(number)), self._person(number))
        initial_bid = self._prices(size)
        horizon_us = OPEN_AUCTIONS * EVENTS // AUCTIONS * 1_000_000 // self._rate
        open_us = 1_000 + self._random.integers(0, 2 * horizon_us, size) // 1_000 * 1_000
        return pa.table(
            {
                "id": _last_auction(number) + FIRST_ID,
                "item": self._texts(size, 3, 20),
                "description": self._texts(size, 3, 100),
                "initial_bid": initial_bid,
                "reserve": initial_bid + self._prices(size),
                "date_time": self._times(number),
                "expires": _timestamps(self._times_us(number) + open_us),
                "seller": seller + FIRST_ID,
                "category": FIRST_CATEGORY + self._random.integers(0, CATEGORIES, size),
                "extra": self._texts(size, 300, 450),
            }
        )

    def bids(self) -> pa.Table:
        number = self._number[self._number % EVENTS >= PERSONS + AUCTIONS]
        size = len(number)
        hot = self._random.integers(0, 2, size) > 0
        auction = np.where(hot, _hot(_last_auction(number)), self._auction(number))
        hot = self._random.integers(0, 4, size) > 0
        # The second person of a group, so that hot bidders are no hot sellers.
        bidder = np.where(hot, _hot(_last_person(number)) + 1, self._person(number))
        channels = [*HOT_CHANNELS, *(f"channel-{at}" for at in range(CHANNELS))]
        urls = self._urls()
        hot = self._random.integers(0, 2, size) > 0
        channel = np.where(
            hot,
            self._random.integers(0, len(HOT_CHANNELS), size),
            len(HOT_CHANNELS) + self._random.integers(0, CHANNELS, size),
        )
        return pa.table(
            {
                "auction": auction + FIRST_ID,
                "bidder": bidder + FIRST_ID,
                "price": self._prices(size),
                "channel": pa.array(channels).take(channel),
                "url": pa.array(urls).take(channel),
                "date_time": self._times(number),
                "extra": self._texts(size, 54, 82),
            }
        )

    def _urls(self) -> list[str]:
        """Of each channel; of nine of ten that are not hot with the channel's id."""
        size = len(HOT_CHANNELS) + CHANNELS
        parts = [self._texts(size, 3, 5, b"_") for _ in range(3)]
        named = self._random.integers(0, 10, size) > 0
        paths = zip(*(part.to_pylist() for part in parts), strict=True)
        urls = [f"https://www.nexmark.com/{'/'.join(path)}/item.htm?query=1" for path in paths]
        return [
            url + (f"&channel_id={at * 7919}" if named[at] and at >= len(HOT_CHANNELS) else "")
            for at, url in enumerate(urls)
        ]

    def _person(self, number: Ints) -> Ints:
        """One of the newest persons, or one that comes soon."""
        persons = _last_person(number) + 1
        active = np.minimum(persons, ACTIVE_PERSONS)
        return persons - active + self._below(active + LEAD)

    def _auction(self, number: Ints) -> Ints:
        """One that is likely to be open, or one that comes soon."""
        last = _last_auction(number)
        first = np.maximum(last - OPEN_AUCTIONS, 0)
        return first + self._below(last - first + 1 + LEAD)

    def _below(self, limits: Ints) -> Ints:
        return (self._random.random(len(limits)) * limits).astype(np.int64)

    def _prices(self, size: int) -> Ints:
        return np.rint(10 ** (self._random.random(size) * 6) * 100).astype(np.int64)

    def _times_us(self, number: Ints) -> Ints:
        """Whole milliseconds."""
        return BEGIN_US + number * 1_000 // self._rate * 1_000

    def _times(self, number: Ints) -> pa.Array:
        return _timestamps(self._times_us(number))

    def _choice(self, words: Sequence[str], size: int) -> pa.Array:
        return pa.array(words).take(self._random.integers(0, len(words), size))

    def _texts(self, size: int, shortest: int, longest: int, space: bytes = b" ") -> pa.Array:
        """Letters, of 13 of which one is `space`."""
        lengths = self._random.integers(shortest, longest + 1, size)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        letters = LETTERS[self._random.integers(0, len(LETTERS), ends[-1])]
        letters[self._random.integers(0, 13, ends[-1]) == 0] = space[0]
        return pa.StringArray.from_buffers(size, pa.py_buffer(ends), pa.py_buffer(letters))


def _last_person(number: Ints) -> Ints:
    """The newest person when event `number` comes, from 0."""
    return number // EVENTS * PERSONS + np.minimum(number % EVENTS, PERSONS - 1)


def _last_auction(number: Ints) -> Ints:
    """The newest auction when event `number` comes, from 0; -1 before the first one."""
    offset = np.clip(number % EVENTS - PERSONS, -1, AUCTIONS - 1)
    return number // EVENTS * AUCTIONS + offset


def _hot(newest: Ints) -> Ints:
    """The first of each group is hot for as long as its group is the newest."""
    return newest // HOT_GROUP * HOT_GROUP


def _joined(between: str, first: pa.Array, second: pa.Array | Sequence[str]) -> pa.Array:
    pairs = zip(first.to_pylist(), pa.array(second).to_pylist(), strict=True)
    return pa.array([f"{one}{between}{other}" for one, other in pairs])


def _timestamps(times_us: Ints) -> pa.Array:
    return pa.array(times_us).cast(pa.timestamp("us", "UTC"))


def generate(directory: Path, events: int, rate: int = 1000, seed: int = 0) -> dict[str, int]:
    """Write the three files; the rows of each."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = Generator(events, rate, seed)
    tables = {
        "persons": generator.persons(),
        "auctions": generator.auctions(),
        "bids": generator.bids(),
    }
    for name, table in tables.items():
        pq.write_table(table, directory / f"{name}.parquet", row_group_size=20_000)
    return {name: table.num_rows for name, table in tables.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the input of the Nexmark example.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--events", type=int, default=100_000, help="of all three kinds")
    parser.add_argument("--rate", type=int, default=1000, help="events in a second of event time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = generate(args.directory, args.events, args.rate, args.seed)
    for name, number in rows.items():
        print(f"{args.directory / name}.parquet: {number:,} rows")


if __name__ == "__main__":
    main()
