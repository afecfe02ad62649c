"""Random topologies that are valid most of the time. Pure."""

from __future__ import annotations

import random
from typing import Any

_COLUMNS = "city STRING, fare DOUBLE, seats INT, at TIMESTAMP"
_GENERATOR: dict[str, Any] = {
    "rowsPerSecond": 5,
    "columns": {
        "city": "choice(a, b)",
        "fare": "normal(9, 2)",
        "seats": "integer(1, 4)",
        "at": "timestamp(2013-01-01 00:00:00, 30s)",
    },
}
_ROW_WISE = (
    "SELECT * FROM {0}",
    "SELECT * FROM {0} WHERE fare > 0",
    "SELECT city, fare * 2 AS fare, seats, at FROM {0}",
    "SELECT upper(city) AS city, fare, seats, at FROM {0} WHERE city IS NOT NULL",
)
_AGGREGATES = ("count(*) AS trips", "count(*) AS trips, avg(fare) AS mean", "max(seats) AS seats")
_WINDOWS = (
    {"size": "1h"},
    {"size": "1h", "slide": "15m"},
    {"size": "1d", "step": "6h"},
    {"session": "30m"},
    {"rows": 100, "slideRows": 10},
)
_MAX_OPERATORS = 6
_LARGE = 0.02  # chance of tens of operators


def spec(rng: random.Random) -> dict[str, Any]:
    large = rng.random() < _LARGE
    sources = [_source(f"s{n}", rng) for n in range(rng.randint(1, 2))]
    unwindowed = [s["name"] for s in sources]  # streams with the columns of the sources
    operators, unread = [], list(unwindowed)
    for n in range(rng.randint(20, 50) if large else rng.randint(0, _MAX_OPERATORS)):
        inputs = rng.sample(unwindowed, 2 if len(unwindowed) > 1 and rng.random() < 0.2 else 1)
        operator = _operator(f"o{n}", inputs, rng)
        operators.append(operator)
        unread = [name for name in unread if name not in inputs] + [operator["name"]]
        if "window" not in operator:
            unwindowed.append(operator["name"])
    queries = [_query(f"q{n}", name, rng) for n, name in enumerate(unread)]
    made: dict[str, Any] = {
        "checkpoint": {"store": "file:///var/lib/rekindle/checkpoints", "volume": "shared"},
        "sources": sources,
        "queries": queries,
    }
    if operators:
        made["operators"] = operators
    if rng.random() < 0.2:
        made["replicas"] = 2
    if rng.random() < 0.1:
        amounts = {"cpu": "250m", "memory": "1Gi"}
        made["resources"] = {"requests": amounts, "limits": {"memory": "2Gi"}}
    return made


def _source(name: str, rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "schema": _COLUMNS, "eventTime": {"column": "at"}}
    if rng.random() < 0.5:
        made["generator"] = {**_GENERATOR, "columns": dict(_GENERATOR["columns"])}
    else:
        url = f"file:///input/{name}.csv"
        made["files"] = {"url": url, "format": "csv", "orderBy": "at", "speedup": 60}
        if rng.random() < 0.3:
            made["partitions"] = rng.choice((1, 2, 3))
    return made


def _operator(name: str, inputs: list[str], rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "inputs": inputs}
    if len(inputs) == 1 and rng.random() < 0.4:
        made["window"] = {
            **rng.choice(_WINDOWS),
            "groupBy": ["city"],
            "aggregate": rng.choice(_AGGREGATES),
        }
        if rng.random() < 0.5:
            made |= {"keyBy": ["city"], "partitions": rng.choice((1, 2, 2, 3))}
        if rng.random() < 0.3:
            made["replicas"] = rng.choice((1, 2, 3))
        return made
    if len(inputs) == 2 and rng.random() < 0.5:
        first, second = inputs
        made["join"] = {
            "on": f"{first}.city = {second}.city AND {first}.fare < {second}.fare",
            "within": rng.choice(("10s", "1h")),
            "select": f"{first}.*",
            "type": rng.choice(("Inner", "Semi")),
        }
        return made
    selects = [f"SELECT city, fare, seats, at FROM {name}" for name in inputs]
    row_wise = rng.choice(_ROW_WISE).format(*inputs)
    made["sql"] = row_wise if len(inputs) == 1 else " UNION ALL ".join(selects)
    return made


def _query(name: str, stream: str, rng: random.Random) -> dict[str, Any]:
    sink = {"url": f"file:///var/lib/rekindle/output/{name}"}
    if rng.random() < 0.3:
        sink["format"] = "json"
    return {"name": name, "from": stream, "priority": rng.randrange(100), "sink": {"files": sink}}
