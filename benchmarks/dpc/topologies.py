"""The topologies that are measured, after the paper's setting (section 5). Pure.

Three generated sources, a union, and a window over it in the same task: the union takes the place
of SUnion, the window that of the join, with a state of 100 groups. For a chain of tasks (Fig. 11),
tasks of one SQL operator each follow the union.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH

SOURCES = ("a", "b", "c")
CUT_SOURCE = "b"
"""The source whose connections to its readers an experiment cuts."""
ROWS_PER_SECOND = 1_500
"""Of each source; 4,500 together, as in Fig. 10."""
GROUPS = 100
MAX_DELAY_S = 3.0
"""X of the paper."""
DELAY_FRACTION = 0.9
"""Alpha of the paper: an epoch waits for a missing input for alpha X at most."""
EPOCH_S = 0.5
CHECKPOINT_S = 5.0
QUERY = "result"


@dataclass(frozen=True, slots=True)
class Policy:
    """What new input is subject to: during a failure, and while results are corrected. Process: as
    soon as it is there; Delay: as late as `maxDelay` allows; Suspend: not before the correction is
    done (docs/design/consistency.md#deadlines)."""

    failure: str
    stabilization: str

    def __str__(self) -> str:
        return f"{self.failure}/{self.stabilization}"

    @staticmethod
    def of(text: str) -> Policy:
        """Raises ValueError."""
        for policy in POLICIES:
            if str(policy) == text:
                return policy
        raise ValueError(f"policy {text!r} is none of {', '.join(map(str, POLICIES))}")


POLICIES = tuple(
    Policy(*pair) for pair in product(("Process", "Delay"), ("Process", "Delay", "Suspend"))
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What differs between topologies. `max_delay_s`: None is Infinite; `input_s`: how long the
    sources have rows; `chain`: number of tasks in a row between them and the sink."""

    name: str
    input_s: float
    policy: Policy = POLICIES[0]
    max_delay_s: float | None = MAX_DELAY_S
    epoch_s: float = EPOCH_S
    checkpoint_s: float = CHECKPOINT_S
    chain: int = 1


def nodes(setting: Setting) -> list[str]:
    """The last operator of each task after the sources, upstream first."""
    return ["counts"] if setting.chain == 1 else [f"step{i + 1}" for i in range(setting.chain)]


def resource(setting: Setting) -> dict[str, Any]:
    """A StreamTopology."""
    place = f"file://{SHARED_MOUNT_PATH}/{setting.name}"
    sink = {"files": {"url": f"{place}/output/{QUERY}", "format": "parquet"}}
    return {
        "apiVersion": "rekindle.dev/v1alpha1",
        "kind": "StreamTopology",
        "metadata": {"name": setting.name},
        "spec": {
            "epochInterval": _duration(setting.epoch_s),
            "maxDelay": "Infinite"
            if setting.max_delay_s is None
            else _duration(setting.max_delay_s),
            "availability": {
                "delayFraction": DELAY_FRACTION,
                "duringFailure": setting.policy.failure,
                "duringStabilization": setting.policy.stabilization,
            },
            "checkpoint": {
                "interval": _duration(setting.checkpoint_s),
                "store": f"{place}/checkpoints",
                "volume": "rekindle",
            },
            "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}},
            "sources": [_source(name, seed, setting) for seed, name in enumerate(SOURCES)],
            "operators": _operators(setting),
            "queries": [{"name": QUERY, "from": nodes(setting)[-1], "priority": 1, "sink": sink}],
        },
    }


def _source(name: str, seed: int, setting: Setting) -> dict[str, Any]:
    columns = {"k": f"integer(1, {GROUPS})", "v": "uniform(0, 100)", "t": "timestamp"}
    return {
        "name": name,
        "schema": "k BIGINT, v DOUBLE, t TIMESTAMP",
        "eventTime": {"column": "t"},
        "generator": {
            "rowsPerSecond": ROWS_PER_SECOND,
            "rows": round(setting.input_s * ROWS_PER_SECOND),
            "seed": seed,
            "columns": columns,
        },
    }


def _operators(setting: Setting) -> list[dict[str, Any]]:
    union = " UNION ALL ".join(f"SELECT k, v, t FROM {name}" for name in SOURCES)
    first, *rest = nodes(setting)
    if setting.chain == 1:
        aggregate = "count(*) AS n, sum(v) AS total"
        window = {"size": "1s", "groupBy": ["k"], "aggregate": aggregate}
        return [
            {"name": "merged", "inputs": list(SOURCES), "sql": union},
            {"name": first, "inputs": ["merged"], "window": window},
        ]
    operators: list[dict[str, Any]] = [{"name": first, "inputs": list(SOURCES), "sql": union}]
    for before, name in zip([first, *rest], rest, strict=False):
        # Without a key it would be fused with the one before.
        sql = f"SELECT k, v + 1 AS v, t FROM {before}"
        operators.append({"name": name, "inputs": [before], "keyBy": ["k"], "sql": sql})
    return operators


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
