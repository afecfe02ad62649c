"""The two topologies of a chaos run: one reads generators, one files; small enough for two cores.

Every partition of every query gets rows in each window, so that the newest file of a partition
shows the progress of its sink independently of the status.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH

METERS, TRIPS = "meters", "trips"
NAMES = (METERS, TRIPS)
WINDOW_SLIDE_S = 2  # between two files of a sink without failures
MAX_DELAY_S = 5  # of a topology whose results may be tentative
REPLAY_TARGET_S = 5  # some of its checkpoint epochs are left out, unless the machine is very slow
_ROWS_PER_S = 40
_STATIONS = 12
_FILE_S = 10
_RESOURCES = {"requests": {"cpu": "400m", "memory": "768Mi"}}


def topology_resources(seconds: int, seed: int, standbys: int = 0) -> dict[str, dict[str, Any]]:
    """Name -> resource; both have input for so many seconds. With half of the seeds `trips` has a
    finite `maxDelay`; with half of the seeds `meters` has a join in place of a window; with half of
    the seeds it has a `replayTarget`. `standbys`: of `trips`."""
    trips = _trips()
    trips["spec"]["recovery"] = {"standby": standbys}
    random_of_seed = random.Random(f"maxDelay {seed}")
    if random_of_seed.random() < 0.5:
        trips["spec"] |= {
            "maxDelay": f"{MAX_DELAY_S}s",
            "availability": {
                "duringFailure": random_of_seed.choice(("Process", "Delay")),
                "duringStabilization": random_of_seed.choice(("Process", "Delay", "Suspend")),
            },
        }
    has_join = random.Random(f"join {seed}").random() < 0.5
    meters = _joined_meters(seconds) if has_join else _meters(seconds)
    if random.Random(f"replayTarget {seed}").random() < 0.5:
        meters["spec"]["checkpoint"]["replayTarget"] = f"{REPLAY_TARGET_S}s"
    return {METERS: meters, TRIPS: trips}


def may_be_tentative(resource: dict[str, Any]) -> bool:
    return "maxDelay" in resource["spec"]


def partitions(resource: dict[str, Any]) -> dict[str, int]:
    """Query -> number of partitions of its sink."""
    counts = {o["name"]: o.get("partitions", 1) for o in resource["spec"]["operators"]}
    return {q["name"]: counts.get(q["from"], 1) for q in resource["spec"]["queries"]}


def write_input(shared: Path, seconds: int, seed: int) -> None:
    """The files that `trips` reads, in turn by its two partitions."""
    rng = random.Random(seed)
    directory = shared / "input"
    directory.mkdir(parents=True, exist_ok=True)
    for first_s in range(0, seconds, _FILE_S):
        end = min(first_s + _FILE_S, seconds) * _ROWS_PER_S
        with (directory / f"trips-{first_s:06d}.json").open("w") as file:
            for row in range(first_s * _ROWS_PER_S, end):
                file.write(json.dumps(_trip(row, rng)) + "\n")


def _trip(row: int, rng: random.Random) -> dict[str, Any]:
    at_s, part = divmod(row, _ROWS_PER_S)
    return {
        "station": f"s{row % _STATIONS}",
        "seconds": rng.randrange(60, 3600),
        "miles": rng.random() * 10,
        "t": f"{_clock(at_s)}.{part * 1000 // _ROWS_PER_S:03d}Z",
    }


def _clock(seconds: int) -> str:
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    return f"2024-01-01T{hours:02d}:{m:02d}:{s:02d}"


def _generator(name: str, value: str, seconds: int, seed: int, replicas: int) -> dict[str, Any]:
    columns = {"k": "integer(1, 40)", value: "uniform(0, 100)", "t": "timestamp"}
    rows = seconds * _ROWS_PER_S
    return {
        "name": name,
        "replicas": replicas,
        "schema": f"k BIGINT, {value} DOUBLE, t TIMESTAMP",
        "eventTime": {"column": "t"},
        "generator": {"rowsPerSecond": _ROWS_PER_S, "seed": seed, "rows": rows, "columns": columns},
    }


def _joined_meters(seconds: int) -> dict[str, Any]:
    """As many tasks as without a join."""
    sources = [
        _generator("readings", "v", seconds, seed=7, replicas=1),
        _generator("limits", "bound", seconds, seed=8, replicas=1),
    ]
    exceeded = {
        "name": "exceeded",
        "inputs": ["readings", "limits"],
        "partitions": 2,
        "join": {
            "type": "Left",
            "on": "readings.k = limits.k AND readings.v > limits.bound",
            "within": "1s",
            "select": "readings.k, readings.v, limits.bound, readings.t",
        },
    }
    return _topology(METERS, sources, [exceeded], {"exceeded": 100, "readings": 10})


def _meters(seconds: int) -> dict[str, Any]:
    source = _generator("readings", "v", seconds, seed=7, replicas=2)
    totals = {
        "name": "totals",
        "inputs": ["readings"],
        "keyBy": ["k"],
        "partitions": 2,
        "window": {
            "size": f"{2 * WINDOW_SLIDE_S}s",
            "slide": f"{WINDOW_SLIDE_S}s",
            "groupBy": ["k"],
            "aggregate": "count(*) AS n, sum(v) AS total, max(v) AS highest",
        },
    }
    return _topology(METERS, [source], [totals], {"totals": 100, "readings": 10})


def _trips() -> dict[str, Any]:
    source = {
        "name": "trips",
        "partitions": 2,
        "schema": "station STRING, seconds BIGINT, miles DOUBLE, t TIMESTAMP",
        "eventTime": {"column": "t", "lateness": "1s"},
        "files": {
            "url": f"file://{SHARED_MOUNT_PATH}/input/trips-*.json",
            "format": "json",
            "orderBy": "t",
            "rowsPerSecond": _ROWS_PER_S,
        },
    }
    busy = {
        "name": "busy",
        "inputs": ["trips"],
        "replicas": 2,
        "window": {
            "size": f"{WINDOW_SLIDE_S}s",
            "groupBy": ["station"],
            "aggregate": "count(*) AS n, avg(seconds) AS length, min(miles) AS nearest",
        },
    }
    return _topology(TRIPS, [source], [busy], {"busy": 50})


def _topology(
    name: str,
    sources: list[dict[str, Any]],
    operators: list[dict[str, Any]],
    priorities: dict[str, int],
) -> dict[str, Any]:
    base_url = f"file://{SHARED_MOUNT_PATH}/{name}"
    queries = [
        {
            "name": f"{name}-{node}",
            "from": node,
            "priority": priority,
            "sink": {"files": {"url": f"{base_url}/output/{node}", "format": "json"}},
        }
        for node, priority in priorities.items()
    ]
    return {
        "apiVersion": "rekindle.dev/v1alpha1",
        "kind": "StreamTopology",
        "metadata": {"name": name},
        "spec": {
            "epochInterval": "1s",
            "checkpoint": {
                "interval": "5s",
                "store": f"{base_url}/checkpoints",
                "volume": "rekindle",
            },
            "resources": _RESOURCES,
            "sources": sources,
            "operators": operators,
            "queries": queries,
        },
    }
