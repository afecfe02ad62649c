"""The topologies of simulations. Of most of them, shapes matter, not what their operators compute;
in those WITH_STATE operators are real ones (`chains`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

Spec = dict[str, Any]

EPOCH_S = 1.0
CHECKPOINT_INTERVAL_EPOCHS = 4
_WITH_STATE = 1 / 3
_WITH_REPLAY_TARGETS = 1 / 4


def _source(name: str, **more: Any) -> Spec:
    files = {"url": f"s3://bucket/{name}", "format": "json", "rowsPerSecond": 1}
    return {"name": name, "schema": "a BIGINT, b BIGINT", "files": files, **more}


def _operator(name: str, *inputs: str, **more: Any) -> Spec:
    sql = " UNION ALL ".join(f"SELECT a, b FROM {i}" for i in inputs)
    return {"name": name, "inputs": list(inputs), "sql": sql, **more}


def _query(name: str, priority: int) -> Spec:
    sink = {"files": {"url": f"s3://bucket/{name}", "format": "json"}}
    return {"name": f"q-{name}", "from": name, "priority": priority, "sink": sink}


def _spec(sources: Sequence[Spec], operators: Sequence[Spec], queries: Sequence[Spec]) -> Spec:
    return {
        "epochInterval": f"{EPOCH_S:g}s",
        "checkpoint": {
            "interval": f"{CHECKPOINT_INTERVAL_EPOCHS}s",
            "store": "s3://bucket/checkpoints",
        },
        "sources": list(sources),
        "operators": list(operators),
        "queries": list(queries),
    }


CHAIN = _spec(
    [_source("src", partitions=2)],
    [_operator("mid", "src", keyBy=["a"], replicas=2)],
    [_query("mid", 10)],
)
DIAMOND = _spec(
    [_source("src", replicas=2)],
    [
        _operator("left", "src", keyBy=["a"], partitions=2, replicas=2),
        _operator("right", "src", keyBy=["b"]),
        _operator("both", "left", "right", keyBy=["a"]),
    ],
    [_query("left", 10), _query("both", 20)],
)
DEEP = _spec(
    [_source("one"), _source("two", replicas=2)],
    [
        _operator("merged", "one", "two", keyBy=["a"], partitions=2),
        _operator("final", "merged", keyBy=["b"], replicas=2),
        _operator("side", "two", keyBy=["a"]),
    ],
    [_query("final", 20), _query("side", 5)],
)
THREE = _spec(
    [_source("one"), _source("two"), _source("three", replicas=2)],
    [
        _operator("everything", "one", "two", "three", keyBy=["a"], replicas=2),
        _operator("further", "everything", keyBy=["b"], replicas=2),
        _operator("last", "further", keyBy=["a"]),
    ],
    [_query("last", 10)],
)
"""As DPC's experiments: a chain behind several inputs, of which some are missing."""


def _rows(name: str, **more: Any) -> Spec:
    source = _source(name, **more)
    files = {**source["files"], "orderBy": "t"}
    schema = "id BIGINT, k BIGINT, n BIGINT, t TIMESTAMP"
    return {**source, "schema": schema, "eventTime": {"column": "t"}, "files": files}


def _join(name: str, one: str, other: str, select: str, **more: Any) -> Spec:
    kind = more.pop("type")
    join = {"on": f"{one}.k = {other}.k AND {one}.n <= {other}.n", "before": "1s", "after": "3s"}
    return {
        "name": name,
        "inputs": [one, other],
        "join": {**join, "type": kind, "select": select},
    } | more


def _distinct(name: str, of_input: str, keep: str, **more: Any) -> Spec:
    distinct = {"keys": ["k"], "within": "4s", "keep": keep}
    return {"name": name, "inputs": [of_input], "distinct": distinct, **more}


PAYMENTS = _spec(
    [_rows("orders", partitions=2), _rows("payments", replicas=2)],
    [
        _join(
            "settled",
            "orders",
            "payments",
            "orders.id AS id, payments.id AS other, orders.k AS k, orders.n AS n, orders.t AS t",
            type="Left",
            partitions=2,
            replicas=2,
        ),
        _distinct("newest", "settled", "Last"),
    ],
    [_query("settled", 10), _query("newest", 20)],
)
VISITS = _spec(
    [_rows("clicks"), _rows("pages", replicas=2)],
    [
        _join(
            "matched",
            "clicks",
            "pages",
            "clicks.id AS id, pages.id AS page, clicks.k AS k, clicks.t AS t",
            type="Inner",
            partitions=2,
        ),
        {
            "name": "visits",
            "inputs": ["clicks"],
            "keyBy": ["k"],
            "window": {"session": "1s", "groupBy": ["k"], "aggregate": "count(*) AS n"},
            "replicas": 2,
        },
    ],
    [_query("matched", 5), _query("visits", 20)],
)
QUESTIONS = _spec(
    [_rows("asked", partitions=2), _rows("answers")],
    [
        _distinct("once", "asked", "First", partitions=2, replicas=2),
        _join(
            "open",
            "once",
            "answers",
            "once.id AS id, once.k AS k, once.t AS t",
            type="Anti",
            replicas=2,
        ),
    ],
    [_query("once", 10), _query("open", 20)],
)
WITH_STATE = (PAYMENTS, VISITS, QUESTIONS)
"""With joins, sessions and `distinct`; one operator a segment."""
TOPOLOGIES = (CHAIN, DIAMOND, DEEP)
WITH_TENTATIVE_RESULTS = (*TOPOLOGIES, THREE)
"""Those that may have a finite `maxDelay`."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A topology, how long its tasks wait, and what they do then. `max_delay_s`: None if it is
    infinite; `buffered_epochs`: what a task keeps of a channel. `replay_targets_s`: that of the
    topology, and that of its last operator; None if it has none."""

    topology: Spec
    max_delay_s: float | None = None
    during_failure: str = "Process"
    during_stabilization: str = "Process"
    buffered_epochs: int = 1024
    replay_targets_s: tuple[float, float] | None = None

    @property
    def spec(self) -> Spec:
        spec = self._with_replay_targets()
        if self.max_delay_s is None:
            return spec
        policies = {
            "duringFailure": self.during_failure,
            "duringStabilization": self.during_stabilization,
        }
        delay = f"{self.max_delay_s * 1000:g}ms"
        return {**spec, "maxDelay": delay, "availability": policies}

    def _with_replay_targets(self) -> Spec:
        if self.replay_targets_s is None:
            return self.topology
        of_all, of_last = (f"{target_s:g}s" for target_s in self.replay_targets_s)
        *operators, last = self.topology["operators"]
        return {
            **self.topology,
            "checkpoint": {**self.topology["checkpoint"], "replayTarget": of_all},
            "operators": [*operators, {**last, "checkpoint": {"replayTarget": of_last}}],
        }


def draw_variant(random: Random, topology: Spec) -> Variant:
    """Half of the seeds have a finite `maxDelay`, and a topology that is drawn here; the others
    have `topology`."""
    if random.random() < 0.5:
        return Variant(topology)
    return Variant(
        random.choice(WITH_TENTATIVE_RESULTS),
        random.choice((EPOCH_S, 2.0, 4.0)),
        random.choice(("Process", "Delay")),
        random.choice(("Process", "Delay", "Suspend")),
        random.choice((4, 16, 1024)),
    )


def draw_operators(random: Random, variant: Variant) -> Variant:
    """A third of the seeds have operators with state, and all else as without them."""
    if random.random() >= _WITH_STATE:
        return variant
    return replace(variant, topology=random.choice(WITH_STATE))


def draw_replay_targets(random: Random, variant: Variant) -> Variant:
    """A quarter of the seeds have replay targets, and all else as without them."""
    if random.random() >= _WITH_REPLAY_TARGETS:
        return variant
    return replace(variant, replay_targets_s=(random.choice((2.0, 4.0)), random.choice((1.0, 8.0))))
