"""The topology of `examples/clicks` in task processes on a real broker, against its oracle."""

from __future__ import annotations

import importlib.util
import sys
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rekindle.topology.load import load_spec
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.harness.task_processes import task_processes

EXAMPLE = Path(__file__).parents[2] / "examples/clicks"


@cache
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clicks_example", EXAMPLE / "clicks.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look for it
    spec.loader.exec_module(found)
    return found


def rows(*times_and_values: tuple[float, dict[str, Any]]) -> list[dict[str, Any]]:
    start = example().START
    return [
        {**value, "at": (start + timedelta(seconds=at)).isoformat()}
        for at, value in times_and_values
    ]


def test_the_same_arguments_give_the_same_records() -> None:
    first, second = (example().events(300, seed=3) for _ in range(2))
    assert first == second
    assert first != example().events(300, seed=4)
    assert [event.at for event in first] == sorted(event.at for event in first)
    assert {event.topic for event in first} == {"views", "clicks"}


def test_no_two_views_have_one_number() -> None:
    days = [example().START, example().START + timedelta(days=1)]
    sent = [example().events(300, seed=3, start=day) for day in days]
    every = [event for part in sent for event in (*part, *example().last_events(part))]
    views = [event.value["view"] for event in every if event.topic == "views"]
    assert len(set(views)) == len(views)


def test_the_oracle_joins_and_ends_sessions() -> None:
    def view(number: int, user: str, ad: str) -> dict[str, Any]:
        return {"view": number, "user": user, "ad": ad}

    views = rows(
        (0, view(1, "a", "x")),
        (12, view(2, "a", "y")),
        (50, view(3, "a", "z")),
        (0, view(4, "b", "x")),
        (100, view(5, "c", "z")),
    )
    clicks = rows(
        (1, {"view": 1}),
        (20.9, {"view": 2}),  # 19.9 s after the click before
        (52, {"view": 3}),
        (10.1, {"view": 4}),  # too late
        (100, {"view": 9}),  # of no view
    )

    def session(user: str, begin: float, end: float, count: int, ad: str) -> Any:
        first: datetime = example().START
        return user, first + timedelta(seconds=begin), first + timedelta(seconds=end), count, ad

    expected = [session("a", 1, 40.9, 2, "y"), session("a", 52, 72, 1, "z")]
    assert example().oracle([views], [clicks]) == expected
    assert example().oracle([views[:3]], [clicks]) == expected[:1]  # the watermark is 49 s
    assert example().oracle([views, []], [clicks]) == []


def test_the_topology_is_valid() -> None:
    spec = load_spec(yaml.safe_load((EXAMPLE / "topology.yaml").read_text())["spec"])
    topics = {source.kafka.topic for source in spec.sources if source.kafka is not None}
    assert topics == {example().VIEWS, example().CLICKS}


# Long: windows over a topic, joins, and topics as sinks are each compared with a reference in tests
# of their own; here is that they fit together.
@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_topic_has_what_the_oracle_says(
    tmp_path: Path, kafka_broker: KafkaBroker, cds_archive: Path
) -> None:
    servers = kafka_broker.bootstrap_servers
    text = (EXAMPLE / "topology.yaml").read_text().replace(example().SERVERS, servers)
    spec = yaml.safe_load(text)["spec"]
    spec["checkpoint"]["store"] = f"file://{tmp_path}/store"
    spec["replicas"] = 1
    example().create(servers)
    sent = example().events(200, seed=5)
    example().produce(servers, [*sent, *example().last_events(sent)])
    environment = {"REKINDLE_CDS_ARCHIVE": str(cds_archive)}
    with task_processes(tmp_path, spec, environment) as tasks:
        tasks.poll_until(tasks.all_live, 360)
        tasks.poll_until(lambda: not example().differences(servers)[1], 120)
        committed = tasks.committed_epoch()
        tasks.poll_until(lambda: tasks.committed_epoch() > committed, 60)
    expected, missing, wrong = example().differences(servers)
    assert expected > 50
    assert (missing.total(), wrong.total()) == (0, 0)
