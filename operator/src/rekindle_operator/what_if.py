"""What the plan would be if nodes were lost or added: for `rekindle plan`. Pure.

It plans for topologies with their tasks as they are, or, where none has a pod, as the plan would
place them on the nodes. Shares and priorities of namespaces, and nodes that pods avoid, are the
operator's settings and memory, which it does not know. Pods of other owners on lost nodes vanish.
Tasks of a cluster whose topology has no checkpoint are not taken away; tasks as the plan would
place them are taken to have one. Of what is suspended nothing runs, and nothing is missing.

Design: docs/design/recovery.md#plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rekindle import names
from rekindle.errors import InvalidTopology, RekindleError
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Slot, Topology
from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.cluster.convert import node_view, pod_view, topology_view
from rekindle_operator.cluster.model import NodeView, TopologyView
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity, pack
from rekindle_operator.recovery.plan import DownQuery, Plan, SpareReplica, make_plan
from rekindle_operator.recovery.preemption import TakeablePod, find_preemption
from rekindle_operator.resources.coordinator import coordinator_pod
from rekindle_operator.resources.task import task_pod
from rekindle_operator.settings import PodDefaults

T = TypeVar("T")
Json = Mapping[str, Any]
_EPOCH = "1970-01-01T00:00:00Z"
_MAX_PREEMPTIONS = 100  # queries for which something is taken away


@dataclass(frozen=True, slots=True)
class _Task:
    topology: str  # "namespace/name"
    name: str  # segment, partition, replica
    segment: str
    to_place: PodToPlace


@dataclass(frozen=True, slots=True)
class _Query:
    key: tuple[str, str]
    priority: int
    groups: frozenset[str]


def what_if(
    topologies: Sequence[Json],
    nodes: Sequence[Json],
    pods: Sequence[Json],
    lost: Sequence[str],
    added: Sequence[Mapping[str, str]],
) -> list[str]:
    """Lines for users. `topologies`, `nodes`, `pods`: objects of Kubernetes. `added`: allocatable
    resources of further nodes. Raises RekindleError."""
    views = {view.name: view for view in (_read(_node, raw) for raw in nodes)}
    if unknown := sorted(set(lost) - views.keys()):
        raise RekindleError(f"there is no node {', '.join(unknown)}: there is {_listed(views)}")
    world = _World(topologies, pods, views)
    after = {name: view for name, view in views.items() if name not in lost}
    for number, quantities in enumerate(added, start=1):
        raw = {"metadata": {"name": f"added-{number}"}, "status": {"allocatable": quantities}}
        after[f"added-{number}"] = _read(_node, raw)
    return world.lines_after({n: v for n, v in after.items() if v.ready and not v.cordoned})


class _World:
    def __init__(
        self, topologies: Sequence[Json], pods: Sequence[Json], nodes: Mapping[str, NodeView]
    ) -> None:
        self._tasks: dict[str, _Task] = {}
        self._queries: list[_Query] = []
        self._coordinators: dict[str, PodToPlace] = {}  # by uid of the topology
        self._suspended: dict[str, str] = {}  # name, by uid
        self._with_checkpoint: set[str] = set()  # "namespace/name"
        for raw in topologies:
            self._add_topology(raw)
        self._others: dict[str, list[ResourceAmounts]] = {name: [] for name in nodes}
        self._nodes_of: dict[str, str] = {}  # of the tasks that run, by key
        self._coordinator_nodes: dict[str, str] = {}
        for view in map(pod_view, pods):
            if view.node is None or view.ended:
                continue
            owner = view.owner_uid or ""
            key = _key(owner, view.slot) if view.slot is not None else ""
            if owner in self._suspended:
                continue  # it ends
            if view.role == names.ROLE_PLACEHOLDER and owner in self._coordinators:
                continue  # it ends where a task is placed
            if view.role == names.ROLE_COORDINATOR and owner in self._coordinators:
                self._coordinator_nodes[owner] = view.node
            elif view.role == names.ROLE_TASK and key in self._tasks and not view.terminating:
                self._nodes_of[key] = view.node
            elif view.role == names.ROLE_STANDBY and owner in self._coordinators:
                continue  # a plan takes its capacity back
            else:
                self._others.setdefault(view.node, []).append(view.requests)
        if not self._nodes_of:
            usable = {n: v for n, v in nodes.items() if v.ready and not v.cordoned}
            self._nodes_of = dict(self._plan(usable)[0].nodes)
            self._with_checkpoint = {task.topology for task in self._tasks.values()}

    def _add_topology(self, raw: Json) -> None:
        view = _read(lambda given: topology_view(_with_defaults(given)), raw)
        if not isinstance(view.spec, Mapping):
            raise RekindleError(f"{view.key}: spec must be an object")
        try:
            topology = compile_topology(load_spec(dict(view.spec)), view.name)
        except InvalidTopology as error:
            raise RekindleError(f"{view.key}: {error}") from error
        if topology.spec.recovery.mode == "Blocking":
            raise RekindleError(
                f"{view.key}: recovery.mode is Blocking, and nothing of it starts before all fits; "
                "plans are of modes in which queries come back one by one"
            )
        if topology.spec.suspend:
            self._suspended[view.uid] = view.name
            return
        if view.report.checkpoint is not None:
            self._with_checkpoint.add(view.key)
        spec = coordinator_pod(view, 1, (), PodDefaults())["spec"]
        name = f"{view.name} coordinator"
        self._coordinators[view.uid] = PodToPlace.of_spec(spec, name, name)
        for slot in topology.slots():
            self._tasks[_key(view.uid, slot)] = _task(view, topology, slot)
        for query in topology.spec.queries:
            needed = {segment.id for segment in topology.needed_segments(query)}
            groups = frozenset(
                task.to_place.group
                for task in self._tasks.values()
                if task.topology == view.key and task.segment in needed
            )
            self._queries.append(_Query((view.key, query.name), query.priority, groups))

    def lines_after(self, nodes: Mapping[str, NodeView]) -> list[str]:
        running = {key: node for key, node in self._nodes_of.items() if node in nodes}
        taken: dict[str, str] = {}  # key -> for which query
        plan, down, capacity = self._plan(nodes, running)
        for _ in range(_MAX_PREEMPTIONS):
            waiting = [down[r.key] for r in plan.waiting]
            takeable = self._takeable(running, {q.key for q in waiting})
            with_plan = _with(capacity, self._tasks, plan.nodes)
            pods = {n: self._first(n) for query in waiting for n in query.needs}
            found = find_preemption(waiting, pods, takeable, with_plan)
            if found is None:
                break
            taken |= {pod.uid: found.query.key[1] for pod in found.taken}
            running = {key: node for key, node in running.items() if key not in taken}
            plan, down, capacity = self._plan(nodes, running)
        return self._lines(plan, down, running, taken)

    def _plan(
        self, nodes: Mapping[str, NodeView], running: Mapping[str, str] | None = None
    ) -> tuple[Plan, dict[tuple[str, str], DownQuery], Capacity]:
        """`running`: node of each task that runs."""
        running = running or {}
        free = {
            name: NodeCapacity(view, view.allocatable - total(self._others.get(name, ())))
            for name, view in nodes.items()
        }
        capacity = Capacity(free, total(view.allocatable for view in nodes.values()))
        capacity = self._with_coordinators(_with(capacity, self._tasks, running))
        present = {self._tasks[key].to_place.group for key in running}
        absent = [task for key, task in self._tasks.items() if key not in running]
        firsts: dict[str, PodToPlace] = {}
        for task in absent:
            if task.to_place.group not in present:
                firsts.setdefault(task.to_place.group, task.to_place)
        down = {
            query.key: DownQuery(query.key, query.priority, needs)
            for query in self._queries
            if (needs := query.groups & firsts.keys())
        }
        pods = {
            group: pod
            for group, pod in firsts.items()
            if any(group in q.needs for q in down.values())
        }
        first_keys = {pod.key for pod in firsts.values()}
        spares = [
            SpareReplica(
                task.to_place,
                self._priority(task.to_place.group),
                "" if task.to_place.group in present else task.to_place.group,
            )
            for task in absent
            if task.to_place.key not in first_keys
        ]
        return make_plan(list(down.values()), pods, spares, capacity), down, capacity

    def _with_coordinators(self, capacity: Capacity) -> Capacity:
        """They are replaced first."""
        for uid, pod in self._coordinators.items():
            node = self._coordinator_nodes.get(uid)
            if node is not None and node in capacity.nodes:
                capacity = capacity.place(pod, node)
            elif (placed := pack([pod], capacity)) is not None:
                capacity = placed.capacity
        return capacity

    def _first(self, group: str) -> PodToPlace:
        return next(t.to_place for t in self._tasks.values() if t.to_place.group == group)

    def _priority(self, group: str) -> int:
        return max((q.priority for q in self._queries if group in q.groups), default=0)

    def _takeable(
        self, running: Mapping[str, str], waiting: set[tuple[str, str]]
    ) -> list[TakeablePod]:
        found, kept = [], set[str]()
        for key in sorted(running):
            task = self._tasks[key]
            pod = task.to_place
            users = frozenset(q.key for q in self._queries if pod.group in q.groups)
            is_spare = pod.group in kept
            kept.add(pod.group)
            if users <= waiting and (is_spare or task.topology in self._with_checkpoint):
                found.append(
                    TakeablePod(
                        key,
                        running[key],
                        pod.requests,
                        pod.group,
                        pod.replica,
                        pod.namespace,
                        users,
                        self._priority(pod.group),
                        is_spare,
                    )
                )
        return found

    def _lines(
        self,
        plan: Plan,
        down: Mapping[tuple[str, str], DownQuery],
        running: Mapping[str, str],
        taken: Mapping[str, str],
    ) -> list[str]:
        unharmed = [q for q in self._queries if q.key not in down]
        unharmed.sort(key=lambda q: (-q.priority, q.key))
        suspended = (f"{name} is suspended: it has no tasks" for name in self._suspended.values())
        lines = [*suspended, *(f"{_name(q.key)} goes on (priority {q.priority})" for q in unharmed)]
        for key, user in taken.items():
            lines.append(f"{self._tasks[key].name} is taken away: {user} needs its capacity")
        for number, ranked in enumerate(plan.starting_now, start=1):
            places = sorted(
                f"{task.name} on {plan.nodes[key]}"
                for key, task in self._tasks.items()
                if key in plan.nodes and task.to_place.group in down[ranked.key].needs
            )
            what = f"{_name(ranked.key)} comes back (priority {down[ranked.key].priority})"
            lines.append(f"{number}. {what}: {', '.join(places)}")
        for ranked in plan.waiting:
            keys = {self._first(group).key for group in down[ranked.key].needs}
            reasons = {
                f"{self._tasks[key].name}: {plan.unplaced[key] or 'too little is left for all'}"
                for key in keys
                if key in plan.unplaced
            }
            what = f"{_name(ranked.key)} waits (priority {down[ranked.key].priority})"
            lines.append(f"-  {what} for {'; '.join(sorted(reasons)) or 'capacity'}")
        missing = len(self._tasks) - len(running) - len(plan.nodes)
        lines.append(f"{missing} of {len(self._tasks)} replicas have no node")
        return lines


def _with(capacity: Capacity, tasks: Mapping[str, _Task], running: Mapping[str, str]) -> Capacity:
    for key, node in running.items():
        if node in capacity.nodes:
            capacity = capacity.place(tasks[key].to_place, node)
    return capacity


def _task(view: TopologyView, topology: Topology, slot: Slot) -> _Task:
    spec = task_pod(view, topology, view.generation, slot, 1, PodDefaults())["spec"]
    group = f"{view.uid}/{slot.segment}/{slot.partition}"
    pod = PodToPlace.of_spec(spec, _key(view.uid, slot), group, slot.replica_index)
    name = f"{topology.segment(slot.segment).name}/{slot.partition}/{slot.replica_index}"
    return _Task(view.key, name, slot.segment, replace(pod, namespace=view.namespace))


def _key(uid: str, slot: Slot) -> str:
    return f"{uid}/{slot.segment}/{slot.partition}/{slot.replica_index}"


def _node(raw: Json) -> NodeView:
    """Of a file it may have a name and `status.allocatable` alone."""
    raw = _with_defaults(raw)
    view = node_view(raw)
    return view if raw.get("status", {}).get("conditions") else replace(view, ready=True)


def _read(convert: Callable[[Json], T], raw: Json) -> T:
    """Of a file, so any field may have any type."""
    try:
        return convert(raw)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = raw.get("kind", "manifest")
        raise RekindleError(f"a {what} cannot be read: {error}: {raw!r:.200}") from error


def _with_defaults(raw: Json) -> dict[str, Any]:
    meta = {"namespace": "default", "resourceVersion": "1", "creationTimestamp": _EPOCH}
    given = {k: v for k, v in (raw.get("metadata") or {}).items() if v is not None}
    if "name" not in given:
        raise RekindleError(f"a {raw.get('kind', 'manifest')} has no metadata.name")
    if not all(isinstance(given.get(field, ""), str) for field in ("name", "namespace", "uid")):
        raise ValueError("metadata.name, namespace and uid must be strings")
    meta |= {"uid": f"{given.get('namespace', 'default')}/{given['name']}"} | given
    status = dict(raw.get("status") or {})
    if allocatable := status.get("allocatable"):
        status["allocatable"] = {"pods": "110", **allocatable}
    return {**raw, "metadata": meta, "status": status}


def _name(key: tuple[str, str]) -> str:
    return f"{key[0].partition('/')[2]}/{key[1]}"


def _listed(views: Mapping[str, NodeView]) -> str:
    return ", ".join(sorted(views)[:8]) + (" ..." if len(views) > 8 else "") or "none"
