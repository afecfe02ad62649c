"""From which replicas a task reads each of its inputs, preferred first.

Pure. Only trusted replicas that serve (CatchingUp, Live) are listed; suspected ones are last,
because suspicion may be wrong. Among equals, replica i prefers replica i, under whichever of its
numbers it runs, which distributes the readers. A replica that lags behind a Live one is marked, so
that readers leave it.

Design: docs/design/streams.md#reader, docs/design/replication.md#take-over.
Paper: DPC (Balazinska et al. 2005), section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rekindle.coordinator.tasks.graph import Graph
from rekindle.coordinator.tasks.membership import Membership, Task, TaskPredicate
from rekindle.protocol import ConsistencyState, Endpoint, Partner, PollResponse, TaskPhase, Upstream
from rekindle.topology.model import Partition, Slot, partition_of

_LAG_STEPS_S = (2.0, 10.0, 60.0)
"""Lags are only compared by these steps, so that readers do not switch between similar ones."""
_LAGGING_S = _LAG_STEPS_S[0]
_LAGGING_EPOCHS = 2
"""A replica lags when it is this far behind another one, in seconds and in epochs. Differences are
compared, so that readers do not switch back soon; epochs too, so that they do not switch within a
long epoch."""


def serves(task: Task) -> bool:
    """Whether readers may read from it; assumed for a task that was once ready and has not
    responded yet."""
    if not task.pod.may_be_running or task.pod.address is None:
        return False
    return task.phase.serves if task.response is not None else task.pod.was_ready


def upstreams(
    slot: Slot, graph: Graph, replicas: dict[Partition, list[Task]], is_suspected: TaskPredicate
) -> tuple[Upstream, ...]:
    return tuple(
        Upstream(
            stream=graph.streams[upstream.segment],
            partition=upstream.index,
            endpoints=_endpoints(replicas.get(upstream, []), slot.replica_index, is_suspected),
        )
        for upstream in graph.inputs[partition_of(slot)]
    )


def serving_replicas(
    membership: Membership, is_untrusted: Callable[[Slot], bool]
) -> dict[Partition, list[Task]]:
    found: dict[Partition, list[Task]] = {}
    for task in membership:
        if serves(task) and not is_untrusted(task.slot):
            found.setdefault(task.partition, []).append(task)
    return found


def readable_replicas(
    graph: Graph | None, serving: Mapping[Partition, Sequence[Task]]
) -> dict[Partition, tuple[Slot, ...]]:
    """For each partition, the slots of the replicas that its tasks read from."""
    inputs = graph.inputs if graph is not None else {}
    return {
        partition: tuple(t.slot for upstream in upstreams for t in serving.get(upstream, ()))
        for partition, upstreams in inputs.items()
    }


def mixed_engines(replicas: Mapping[Partition, Sequence[Task]]) -> dict[Partition, str]:
    """Partitions whose replicas run different versions of the engine, each with a message: their
    results may differ, so they are not compared."""
    found: dict[Partition, str] = {}
    for partition, tasks in replicas.items():
        if len(tasks) > 1 and len(engines := {t.response.engine for t in tasks if t.response}) > 1:
            names = " and ".join(sorted(engine or "unknown" for engine in engines))
            found[partition] = (
                f"{partition.key}: its replicas run engines {names}; their results are not "
                "compared until they run the same image"
            )
    return found


def partner(slot: Slot, replicas: Sequence[Task], is_suspected: TaskPredicate) -> Partner | None:
    """The other one of two replicas that stabilize one after another, if it serves: 0 and 1, 2 and
    3, and so on, so that each is the partner of its partner. If both numbers of the partner are
    Live, in a planned move, it is the lower one, whether that is the successor or not."""
    for task in sorted(replicas, key=lambda t: (t.phase != TaskPhase.LIVE, t.slot)):
        response = task.response
        if (
            task.slot.replica_index == slot.replica_index ^ 1
            and response is not None
            and not is_suspected(task)
        ):
            return Partner(
                replica=task.slot.replica,
                boot=response.boot_id,
                asks=response.asks,
                answer=response.answer,
            )
    return None


def running(
    replicas: dict[Partition, list[Task]], is_suspected: TaskPredicate
) -> frozenset[Partition]:
    """Partitions that a checkpoint waits for: those with a Live replica that is not suspected;
    while there are none, those that catch up."""
    for phase in (TaskPhase.LIVE, TaskPhase.CATCHING_UP):
        found = frozenset(
            partition
            for partition, tasks in replicas.items()
            if any(t.phase == phase and not is_suspected(t) for t in tasks)
        )
        if found:
            return found
    return frozenset()


def saver(replicas: list[Task], is_suspected: TaskPredicate) -> Slot | None:
    """The replica that saves a partition's checkpoints; None while no replica serves. In order of
    preference: one that is Live, otherwise CatchingUp; one that has fetched all of its state,
    because others do not report what they save until then; one that did not begin with a lent
    state, because others cannot refer to objects in the store, and save all of it; the lowest
    number."""

    def preference(task: Task) -> tuple[bool, bool, bool, int]:
        response = task.response
        is_fetching = response is not None and response.restoring is not None
        borrowed = response is not None and response.lent_from is not None
        return task.phase != TaskPhase.LIVE, is_fetching, borrowed, task.slot.replica

    responding = [t for t in replicas if t.response is not None and not is_suspected(t)]
    best = min(responding, key=preference, default=None)
    return best.slot if best else None


def _endpoints(tasks: list[Task], mine: int, is_suspected: TaskPredicate) -> tuple[Endpoint, ...]:
    def preference(task: Task) -> tuple[bool, bool, int, bool, int]:
        replica = task.slot.replica
        lag = sum(task.response.lag_s > s for s in _LAG_STEPS_S) if task.response else 0
        is_other = task.slot.replica_index != mine
        return is_suspected(task), task.phase != TaskPhase.LIVE, lag, is_other, replica

    live = [
        t.response
        for t in tasks
        if t.response and t.phase == TaskPhase.LIVE and not is_suspected(t)
    ]
    return tuple(
        Endpoint(
            address=task.endpoint,
            replica=task.slot.replica,
            incarnation=task.pod.incarnation,
            suspected=is_suspected(task),
            lagging=task.response is not None and _lags(task.response, live),
            state=task.response.consistency if task.response else ConsistencyState.STABLE,
        )
        for task in sorted(tasks, key=preference)
    )


def _lags(response: PollResponse, live: Sequence[PollResponse]) -> bool:
    return any(
        response.lag_s - other.lag_s > _LAGGING_S
        and other.stable_epoch - response.stable_epoch >= _LAGGING_EPOCHS
        for other in live
    )
