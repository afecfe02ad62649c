"""The topics of the clicks example: make them, fill them, and compare its results with an oracle.

    python examples/clicks/clicks.py create
    python examples/clicks/clicks.py produce [--seconds 600] [--speedup 20] [--seed 1]
    python examples/clicks/clicks.py check [--wait 60]

`produce` sends views of advertisements and the clicks on them, in the order of their times; the
same arguments give the same records. Its last record of each partition is an hour later than all
others, so that all sessions end. `check` reads all three topics, committed records alone: the exit
status is 1 if a session is missing, wrong or there twice.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

SERVERS = "127.0.0.1:9092"
VIEWS, CLICKS, SESSIONS = TOPICS = ("views", "clicks", "sessions")
PARTITIONS = 3
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
USERS, ADS = 40, 12
LATENESS = dt.timedelta(seconds=1)
AFTER = dt.timedelta(seconds=10)
GAP = dt.timedelta(seconds=20)
HOUR = dt.timedelta(hours=1)
REQUEST_S = 30.0
Session = tuple[str, dt.datetime, dt.datetime, int, str]


@dataclass(frozen=True, slots=True)
class Event:
    """One record. `partition`: None for that of the key."""

    at: dt.datetime
    topic: str
    key: str
    value: dict[str, Any]
    partition: int | None = None

    def encoded(self) -> bytes:
        return json.dumps({**self.value, "at": self.at.isoformat()}).encode()


def events(seconds: int, seed: int, start: dt.datetime = START) -> list[Event]:
    """In the order of their times, without the last ones of the partitions."""
    draw, found = random.Random(seed), list[Event]()
    first_view = int(start.timestamp()) * 1000
    for user in range(USERS):
        name, at = f"user-{user:02d}", draw.uniform(0, 60)
        while at < seconds:
            for _ in range(draw.randint(1, 12)):
                shown = start + dt.timedelta(milliseconds=int(at * 1000))
                view = first_view + len(found)
                value = {"view": view, "user": name, "ad": f"ad-{draw.randrange(ADS):02d}"}
                found.append(Event(shown, VIEWS, name, value))
                if draw.random() < 0.6:
                    clicked = shown + dt.timedelta(milliseconds=draw.randint(200, 12_000))
                    found.append(Event(clicked, CLICKS, str(view), {"view": view}))
                at += draw.uniform(1, 15)
            at += draw.uniform(15, 90)
    return sorted(found, key=lambda event: event.at)


def last_events(after: Sequence[Event]) -> Iterator[Event]:
    """One of each partition, an hour later."""
    at = max(event.at for event in after) + HOUR
    for partition in range(PARTITIONS):
        view = -PARTITIONS * int(at.timestamp()) - partition  # none that there is
        value = {"view": view, "user": "nobody", "ad": "none"}
        yield Event(at, VIEWS, "nobody", value, partition)
        yield Event(at, CLICKS, str(view), {"view": view}, partition)


def create(servers: str) -> None:
    topics = [NewTopic(name, PARTITIONS, 1) for name in TOPICS]
    client = AdminClient({"bootstrap.servers": servers})  # its requests end with it
    for name, made in client.create_topics(topics).items():
        try:
            made.result(REQUEST_S)
            print(f"topic {name}, {PARTITIONS} partitions")
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
            print(f"topic {name} exists")


def produce(servers: str, sent: Iterable[Event], speedup: float | None = None) -> int:
    """Send records, as fast as their times are apart divided by `speedup`; None: at once. Returns
    their number."""
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 20})
    began, number = time.monotonic(), 0
    first: dt.datetime | None = None
    for event in sent:
        number += 1
        first = first or event.at
        if speedup is not None and event.partition is None:
            due = began + (event.at - first).total_seconds() / speedup
            if (early := due - time.monotonic()) > 0:
                producer.poll(early)
        place = {} if event.partition is None else {"partition": event.partition}
        producer.produce(event.topic, event.encoded(), event.key, **place)
    if producer.flush(REQUEST_S):
        raise SystemExit(f"the broker at {servers} does not respond")
    return number


def read(servers: str, topic: str) -> list[list[dict[str, Any]]]:
    """The values of all committed records, by partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "clicks-example",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    partitions = consumer.list_topics(topic, REQUEST_S).topics[topic].partitions
    found: list[list[dict[str, Any]]] = [[] for _ in partitions]
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    left = len(partitions)
    while left:
        message = consumer.poll(REQUEST_S)
        if message is None:
            raise SystemExit(f"the broker at {servers} does not respond")
        if (error := message.error()) is None:
            found[message.partition() or 0].append(json.loads(message.value() or b"null"))
        elif error.code() == KafkaError._PARTITION_EOF:
            left -= 1
        else:
            raise KafkaException(error)
    consumer.close()
    return found


def oracle(
    views: Sequence[Sequence[dict[str, Any]]], clicks: Sequence[Sequence[dict[str, Any]]]
) -> list[Session]:
    """The sessions that have ended, of the records of both topics by partition."""
    newest = [[_at(row) for row in part] for part in (*views, *clicks)]
    if not all(newest):
        return []
    watermark = min(max(times) for times in newest) - LATENESS
    of_view = {row["view"]: row for part in views for row in part}
    clicked = defaultdict[str, list[tuple[dt.datetime, str]]](list)
    for click in (row for part in clicks for row in part):
        view = of_view.get(click["view"])
        if view is not None and _at(view) <= _at(click) <= _at(view) + AFTER:
            clicked[view["user"]].append((_at(click), view["ad"]))
    found = list[Session]()
    for user, pairs in clicked.items():
        pairs.sort()
        first = 0
        for at in range(1, len(pairs) + 1):
            if at == len(pairs) or pairs[at][0] - pairs[at - 1][0] >= GAP:
                ads = [ad for _, ad in pairs[first:at]]
                end = pairs[at - 1][0] + GAP
                found.append((user, pairs[first][0], end, at - first, max(ads)))
                first = at
    return [session for session in found if session[2] <= watermark]


def results(rows: Iterable[dict[str, Any]]) -> list[Session]:
    return [
        (
            row["user"],
            dt.datetime.fromisoformat(row["window_start"]),
            dt.datetime.fromisoformat(row["window_end"]),
            row["clicks"],
            row["ad"],
        )
        for row in rows
    ]


def differences(servers: str) -> tuple[int, Counter[Session], Counter[Session]]:
    """The number of sessions that there should be, those that are missing, and those that are there
    and should not be."""
    expected = Counter(oracle(read(servers, VIEWS), read(servers, CLICKS)))
    found = Counter(results(row for part in read(servers, SESSIONS) for row in part))
    return expected.total(), expected - found, found - expected


def check(servers: str, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        expected, missing, wrong = differences(servers)
        if wrong or not missing or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    print(f"{expected} sessions; missing: {missing.total()}, wrong or twice: {wrong.total()}")
    return expected > 0 and not missing and not wrong


def _at(row: dict[str, Any]) -> dt.datetime:
    return dt.datetime.fromisoformat(row["at"])


def _day(text: str) -> dt.datetime:
    return dt.datetime.combine(dt.date.fromisoformat(text), dt.time(), dt.UTC)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", default=SERVERS, help=f"the broker, {SERVERS} by default")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("create", help="create the topics")
    producing = commands.add_parser("produce", help="send views and clicks")
    producing.add_argument("--seconds", type=int, default=600, help="of event time")
    producing.add_argument("--speedup", type=float, default=20.0, help="of event time")
    producing.add_argument("--seed", type=int, default=1)
    producing.add_argument("--start", type=_day, default=START, help="a day, as 2026-01-02")
    checking = commands.add_parser("check", help="compare the sessions with the oracle")
    checking.add_argument("--wait", type=float, default=60.0, help="seconds until all are there")
    options = parser.parse_args()
    if options.command == "create":
        create(options.servers)
    elif options.command == "produce":
        sent = events(options.seconds, options.seed, options.start)
        number = produce(options.servers, [*sent, *last_events(sent)], options.speedup)
        print(f"{number} records")
    else:
        return 0 if check(options.servers, options.wait) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
