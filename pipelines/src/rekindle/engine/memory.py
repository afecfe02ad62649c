"""How a task divides the memory of its pod. Pure.

The pod's limit covers the JVM's heap, the JVM's other memory (classes, compiled code, threads,
Arrow's buffers), and Python with the rows of a call. From the limit in bytes the plan computes
bounds in bytes, which the task's loop, the readers and the JVM's command line apply.

Design: docs/design/engine.md#memory.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
DEFAULT_LIMIT_BYTES = 1024 * MIB
"""Limit of a task without `resources`."""
MIN_HEAP_BYTES = 512 * MIB
"""Below this, Spark refuses to start."""
JVM_BASE_BYTES = 112 * MIB
"""Classes, compiled code and threads of a JVM; not its heap, not Arrow's buffers."""
PYTHON_BYTES = 140 * MIB
"""The Python process of a task without rows, with PySpark and PyArrow loaded."""
COPIES = 3
"""Copies of one epoch in Python at the same time: input, output, and the record for the log."""
MAX_SERVE_BYTES = 112 * MIB
"""Limit on the shares and fetched log files that are in responses, or kept for the next ones."""
_HEAP_SHARE = 0.4
"""Share of the heap in the memory above the default limit. The rest is for Arrow's tables, in
Python and in the JVM."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bounds in bytes. `heap` and `direct` are 0 for a task without a JVM.

    `direct`: Arrow's buffers in the JVM. `call`: input rows of one call of the chain; only a single
    epoch may have more. `spark_job_input`: input rows of one Spark job. A call with more is divided
    into several jobs if it can be divided by rows; otherwise one job has the whole call. Each job
    needs several times its input in the `direct` buffers. `read_ahead`: rows that readers buffer
    for incomplete epochs, and the same again for complete epochs that the engine has not taken.
    `epoch`: the largest epoch of which Python can hold all copies. `state`: windows' state in
    memory; the rest of it is in memory-mapped files. `fetch`: objects of a restored state that are
    fetched at the same time; they use the part of the memory that is for rows. `serve`: what the
    stream server holds for readers.
    `branches`: output may be tentative, so there may be two states, with `state` bytes each.
    """

    limit_bytes: int
    heap_bytes: int
    direct_bytes: int
    call_bytes: int
    read_ahead_bytes: int
    spark_job_input_bytes: int
    epoch_bytes: int
    state_bytes: int
    fetch_bytes: int
    serve_bytes: int
    branches: bool


def plan_memory(
    limit_bytes: int = DEFAULT_LIMIT_BYTES, *, with_jvm: bool = True, branches: bool = False
) -> MemoryPlan:
    """The plan for a limit. Below the default limit, the JVM's heap is Spark's minimum."""
    beyond = max(0, limit_bytes - DEFAULT_LIMIT_BYTES)
    heap = MIN_HEAP_BYTES + int(_HEAP_SHARE * beyond) if with_jvm else 0
    direct = heap // 4
    other_jvm = JVM_BASE_BYTES + direct if with_jvm else 0
    read_ahead = _between(8 * MIB, limit_bytes // 64, 128 * MIB)
    state = _between(8 * MIB, limit_bytes // 64, 1024 * MIB)
    serve = _between(16 * MIB, limit_bytes // 32, MAX_SERVE_BYTES)
    held = 2 * read_ahead + serve + (2 if branches else 1) * state
    epoch = (limit_bytes - heap - other_jvm - PYTHON_BYTES - held) // COPIES
    call = _between(8 * MIB, min(limit_bytes // 64, epoch), 128 * MIB)
    return MemoryPlan(
        limit_bytes=limit_bytes,
        heap_bytes=heap,
        direct_bytes=direct,
        call_bytes=call,
        read_ahead_bytes=read_ahead,
        spark_job_input_bytes=heap // 64,
        epoch_bytes=max(call, epoch),
        state_bytes=state,
        fetch_bytes=_between(8 * MIB, limit_bytes // 32, 64 * MIB),
        serve_bytes=serve,
        branches=branches,
    )


def needed_bytes(epoch_bytes: int, *, with_jvm: bool = True, branches: bool = False) -> int:
    """The lowest limit, a multiple of 64 MiB, whose plan allows an epoch of `epoch_bytes`."""
    step = 64 * MIB
    limit = DEFAULT_LIMIT_BYTES
    while plan_memory(limit, with_jvm=with_jvm, branches=branches).epoch_bytes < epoch_bytes:
        limit += step
    return limit


def _between(low: int, value: int, high: int) -> int:
    return min(max(low, value), high)
