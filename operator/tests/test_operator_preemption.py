"""What runs of queries that are down gives way to a query that could come back.

Design: docs/design/recovery.md#preemption.
"""

from __future__ import annotations

import copy
from time import process_time
from typing import Any

import pytest
from flights_example import flights_spec
from hypothesis import given
from hypothesis import strategies as st
from model_cluster import ModelCluster
from model_objects import rfc3339
from plan_parts import capacity, node, pod, query

from rekindle.names import LABEL_TOPOLOGY
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.reconcile.core import reconcile
from rekindle_operator.recovery.misfits import PodToPlace
from rekindle_operator.recovery.pack import Capacity, pack
from rekindle_operator.recovery.preemption import Preemption, TakeablePod, find_preemption
from rekindle_operator.settings import Timing

# --- which pods ---


def takeable(
    uid: str, where: str, priority: int, cpu: int = 1, *, is_spare: bool = False, user: str = ""
) -> TakeablePod:
    """`user`: the query that needs it; default: its own."""
    requests = ResourceAmounts(cpu, 1, 1)
    users = frozenset({("ns/t", user or f"of {uid}")})
    return TakeablePod(uid, where, requests, uid, 0, "ns", users, priority, is_spare)


def full(takeables: list[TakeablePod], **nodes: int) -> Capacity:
    """Nodes by name with so many CPUs, on which these run."""
    found = capacity(*(node(name, cpu) for name, cpu in nodes.items()))
    for each in takeables:
        placed = PodToPlace(each.uid, each.requests, each.group, each.replica)
        found = found.place(placed, each.node)
    return found


def taken(found: Preemption | None) -> list[str]:
    return sorted(each.uid for each in found.taken) if found is not None else []


def test_a_spare_replica_goes_before_a_task_of_lower_priority() -> None:
    running = [takeable("task", "n", 1), takeable("spare", "n", 100, is_spare=True)]
    found = find_preemption([query("q", 10, "p")], {"p": pod("p")}, running, full(running, n=2))
    assert taken(found) == ["spare"]


def test_the_lowest_priority_goes_first_and_no_more_than_needed() -> None:
    running = [takeable(f"t{p}", "n", p) for p in (3, 1, 2)]
    found = find_preemption([query("q", 9, "p")], {"p": pod("p", 2)}, running, full(running, n=3))
    assert taken(found) == ["t1", "t2"]


def test_a_task_too_small_to_help_stays() -> None:
    running = [takeable("small", "n", 1), takeable("large", "m", 2, 3)]
    nodes = full(running, n=1, m=3)
    found = find_preemption([query("q", 9, "p")], {"p": pod("p", 3)}, running, nodes)
    assert taken(found) == ["large"]


def test_neither_its_own_tasks_nor_those_of_its_priority_are_taken() -> None:
    running = [takeable("own", "n", 1, user="q"), takeable("equal", "n", 9)]
    nodes = full(running, n=2)
    assert find_preemption([query("q", 9, "p")], {"p": pod("p")}, running, nodes) is None


def test_nothing_is_taken_where_it_would_not_suffice_or_is_not_needed() -> None:
    running = [takeable("t", "n", 1)]
    pods = {"p": pod("p", 2)}
    assert find_preemption([query("q", 9, "p")], pods, running, full(running, n=1)) is None
    assert find_preemption([query("q", 9, "p")], pods, running, full(running, n=3)) is None


_RUNNING = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 3), st.booleans()),
    max_size=6,
)


@given(_RUNNING, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 9))
def test_what_is_taken_suffices_and_all_of_it_is_needed(
    running: list[Any], sizes: list[int], priority: int
) -> None:
    pods = {f"p{n}": pod(f"p{n}", cpu) for n, cpu in enumerate(sizes)}
    offered = [
        takeable(f"t{n}", where, rank, cpu, is_spare=spare)
        for n, (where, rank, cpu, spare) in enumerate(running)
    ]
    used = {name: sum(t.requests.cpu_m for t in offered if t.node == name) for name in "abc"}
    nodes = full(offered, **{name: max(used[name], 1) for name in "abc"})
    found = find_preemption([query("q", priority, *pods)], pods, offered, nodes)
    if found is None:
        return
    assert found.taken
    assert all(t.is_spare or t.priority < priority for t in found.taken)
    for without in ((), *((t,) for t in found.taken)):
        stays = [t for t in offered if t not in found.taken or t in without]
        left = full(stays, **{name: max(used[name], 1) for name in "abc"})
        assert (pack(pods.values(), left) is None) == bool(without)


# --- a topology ---


def spec_of_two_queries() -> dict[str, Any]:
    """A source that both need, one task for the query of priority 100, two for the other one."""
    spec = flights_spec()
    source: dict[str, Any] = spec["sources"][0] | {"replicas": 2}
    name = source["name"]
    columns = "origin, time_hour"
    operators: list[dict[str, Any]] = [
        {"name": "clean", "inputs": [name], "sql": f"SELECT {columns} FROM {name}"},
        {"name": "hot", "inputs": ["clean"], "sql": "SELECT origin, time_hour FROM clean"},
        {
            "name": "daily",
            "inputs": ["clean"],
            "keyBy": ["origin"],
            "partitions": 2,
            "window": {"size": "24h", "groupBy": ["origin"], "aggregate": "count(*) AS n"},
        },
    ]
    sink = spec["queries"][0]["sink"]
    queries = [
        {"name": "alerts", "from": "hot", "priority": 100, "sink": sink},
        {"name": "dashboard", "from": "daily", "priority": 10, "sink": sink},
    ]
    for entry, place in zip(queries, ("alerts", "dashboard"), strict=True):
        files = {"url": f"file:///var/lib/rekindle/{place}", "format": "json"}
        entry["sink"] = {"files": files}
    replicated = [{**operator, "replicas": 2} for operator in operators]
    return spec | {"sources": [source], "operators": replicated, "queries": queries}


def cluster_of(nodes: str) -> ModelCluster:
    cluster = ModelCluster()
    cluster.checkpoint_epoch = 40
    cluster.add_topology("flights", spec_of_two_queries())
    for name in nodes:
        cluster.add_node(name, cpu_m=1100, memory=3700 << 20)  # two tasks each, and a coordinator
    cluster.settle()
    return cluster


def segments(cluster: ModelCluster) -> list[str]:
    """Of the tasks on usable nodes, sorted."""
    return sorted(
        p.name.removeprefix("flights-").split("-")[0]
        for p in cluster.tasks().values()
        if p.node and p.node not in cluster.dead
    )


def lose(cluster: ModelCluster, segment: str, *more: str) -> None:
    """All nodes with a task of the segment, and others; then time passes."""
    assert set(cluster.query_states().values()) == {"Live"}
    tasks = cluster.tasks().values()
    lost = {p.node for p in tasks if p.node and p.name.startswith(f"flights-{segment}-")}
    for name in sorted({*lost, *more}):
        cluster.kill_node_until_not_ready(name)
    cluster.settle()
    for _ in range(4):
        cluster.pass_time(3.0)
        cluster.settle()


def preempted(cluster: ModelCluster) -> list[str]:
    """What each Event says was taken away: segment, what it was."""
    notes = [e.note for e in cluster.events if e.reason == "Preempted"]
    whats = [note.split(", ")[1].split(":")[0].split(" whose")[0] for note in notes]
    return sorted(f"{n.split('/')[0]}: {what}" for n, what in zip(notes, whats, strict=True))


def test_spare_replicas_of_what_is_down_make_room_for_all_queries() -> None:
    """Of four nodes with two tasks each, the two that held both replicas of `clean` are lost: four
    slots are left, and four partitions are needed."""
    cluster = cluster_of("abcd")
    lose(cluster, "clean")
    assert cluster.query_states() == {"alerts": "Live", "dashboard": "Live"}
    assert segments(cluster) == ["clean", "daily", "daily", "hot"]
    assert preempted(cluster) == ["daily: a spare replica"] * 2
    note = next(e.note for e in cluster.events if e.reason == "Preempted")
    assert "alerts (priority 100) is down and needs its capacity" in note


def test_tasks_without_input_make_room_for_a_query_of_higher_priority() -> None:
    cluster = cluster_of("abcd")
    lose(cluster, "clean", "d")
    assert cluster.query_states() == {"alerts": "Live", "dashboard": "Waiting"}
    assert segments(cluster) == ["clean", "hot"]
    assert preempted(cluster) == ["daily: a task of priority 10"] * 2


def test_without_a_checkpoint_only_spare_replicas_make_room() -> None:
    """The state of a task that has no other replica would be lost."""
    cluster = cluster_of("abcd")
    cluster.checkpoint_epoch = None
    lose(cluster, "clean", "d")
    assert segments(cluster) == ["daily", "daily"]
    assert preempted(cluster) == []


def test_what_answers_is_not_taken_away() -> None:
    """A query of priority 10 goes on; one of priority 100 has lost its only task."""
    cluster = ModelCluster()
    cluster.checkpoint_epoch = 40
    cluster.add_topology("flights", spec_of_two_queries())
    other = spec_of_two_queries()
    for entry in other["queries"]:
        entry["priority"] = 1000
    for name in "abcdef":
        cluster.add_node(name, cpu_m=1100, memory=3700 << 20)
    cluster.settle()
    cluster.add_topology("other", other)
    cluster.settle()
    for _ in range(4):
        cluster.pass_time(3.0)
        cluster.settle()
    assert set(cluster.query_states().values()) == {"Live"}
    assert preempted(cluster) == []


@pytest.mark.parametrize(("has_served", "is_ready"), [(False, False), (True, False), (True, True)])
def test_a_spare_replica_that_has_never_served_makes_room(has_served: bool, is_ready: bool) -> None:
    """It got the node that had joined before the loss of `daily` was noticed; its partner answers
    alone. One that has served stays, also while its kubelet has not reported yet that it is ready.
    """
    spec = spec_of_two_queries()
    spec["operators"][-1]["replicas"] = 1
    cluster = ModelCluster()
    cluster.checkpoint_epoch = 40
    cluster.add_topology("flights", spec)
    for name in "abcdef":
        cluster.add_node(name, cpu_m=650, memory=1900 << 20)  # one task each
    cluster.settle()
    lose(cluster, "hot-0-1")
    spare = "flights-hot-0-1-2"
    if not has_served:
        cluster.task_reports[spare] = {"phase": "Restoring", "stableEpoch": -1}
    cluster.add_node("g", cpu_m=650, memory=1900 << 20)
    cluster.settle()
    assert cluster.tasks()[spare].node == "g"
    if not is_ready:
        cluster.raw_pods[spare]["status"]["conditions"] = []
    lose(cluster, "daily-0")
    assert cluster.query_states() == {
        "alerts": "Live",
        "dashboard": "Waiting" if has_served else "Live",
    }
    assert preempted(cluster) == ([] if has_served else ["hot: a spare replica"])


def cluster_with_a_spare_that_restores() -> ModelCluster:
    """`dashboard` has lost both of its tasks, and waits for two nodes. A spare replica of `alerts`,
    which answers, is on `g`; neither it nor any that replaces it becomes ready."""
    spec = spec_of_two_queries()
    spec["operators"][-1]["replicas"] = 1
    cluster = ModelCluster()
    cluster.checkpoint_epoch = 40
    cluster.add_topology("flights", spec)
    for name in "abcdef":
        cluster.add_node(name, cpu_m=650, memory=1900 << 20)  # one task each
    cluster.settle()
    lose(cluster, "daily", *(p.node or "" for n, p in cluster.tasks().items() if "-hot-0-1-" in n))
    cluster.stuck |= {f"flights-hot-0-1-{incarnation}" for incarnation in range(2, 100)}
    cluster.pass_time(OVER_S)  # nothing is reserved for `dashboard` any more
    cluster.add_node("g", cpu_m=650, memory=1900 << 20)
    cluster.settle()
    assert cluster.tasks()["flights-hot-0-1-2"].node == "g"
    return cluster


OVER_S = Timing().capacity_reservation_s + 1


def end_late(
    cluster: ModelCluster, monkeypatch: pytest.MonkeyPatch, after_s: float, only: str = ""
) -> None:
    """From now on pods end so long after they were deleted. `only`: on this node."""
    run, deleted_at = cluster.kubelets_and_scheduler, dict[str, float]()

    def without_late_ends() -> bool:
        ending = {
            n: r
            for n, r in cluster.raw_pods.items()
            if is_ending(r)
            and only in ("", r["spec"].get("nodeName"))
            and cluster.now - deleted_at.setdefault(n, cluster.now) < after_s
        }
        for name in ending:
            del cluster.raw_pods[name]
        changed = run()
        cluster.raw_pods.update(ending)
        return changed

    monkeypatch.setattr(cluster, "kubelets_and_scheduler", without_late_ends)


def pass_by_pass(cluster: ModelCluster, seconds: float) -> None:
    """One pass in each second, so that pods end between any two decisions."""
    for _ in range(int(seconds)):
        cluster.apply(reconcile(cluster.snapshot(), cluster.now, cluster.settings))
        cluster.kubelets_and_scheduler()
        cluster.pass_time(1.0)


def test_what_is_taken_goes_to_the_query_it_is_taken_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends slowly, and the spare replica that replaces it would fit on the other node, where it
    would be taken away again, and so on."""
    cluster = cluster_with_a_spare_that_restores()
    end_late(cluster, monkeypatch, after_s=4.0)
    cluster.add_node("h", cpu_m=650, memory=1900 << 20)
    pass_by_pass(cluster, 20)
    assert cluster.query_states() == {"alerts": "Live", "dashboard": "Live"}
    assert preempted(cluster) == ["hot: a spare replica"]


def test_what_never_ends_keeps_spare_replicas_waiting_for_90_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The spare replica that replaces it gets the other node then, and stays: it is of no use for
    the query alone."""
    cluster = cluster_with_a_spare_that_restores()
    end_late(cluster, monkeypatch, after_s=1e6, only="g")
    cluster.add_node("h", cpu_m=650, memory=1900 << 20)
    pass_by_pass(cluster, 10)
    assert all(p.node != "h" for p in cluster.tasks().values())
    cluster.pass_time(Timing().ending_max_s)
    pass_by_pass(cluster, 10)
    assert [n for n, p in cluster.tasks().items() if p.node == "h"] == ["flights-hot-0-1-3"]
    assert preempted(cluster) == ["hot: a spare replica"]


def test_a_query_in_blocking_mode_takes_nothing_away() -> None:
    cluster = cluster_of("abcd")
    cluster.edit("flights", recovery={"mode": "Blocking"})
    cluster.settle()
    lose(cluster, "clean", "d")
    assert preempted(cluster) == []


NO_STATE: list[dict[str, Any]] = [
    {"suspected": True},
    {"phase": "Waiting"},
    {"phase": "Restoring"},
    {"phase": "Failed"},
    {"phase": "CatchingUp", "stableEpoch": 0},
    {"untrusted": True},
]


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("report", NO_STATE)
def test_the_replica_that_stays_has_the_state(report: dict[str, Any], replica: int) -> None:
    """Without a checkpoint, state and log may be in the pod of one replica alone."""
    cluster = cluster_of("abcd")
    cluster.checkpoint_epoch = None
    daily = {n: p for n, p in cluster.tasks().items() if n.startswith("flights-daily-")}
    with_state = set()
    for name, view in daily.items():
        assert view.slot is not None
        if view.slot.replica_index == replica:
            cluster.task_reports[name] = report
        else:
            with_state.add(name)
    lose(cluster, "clean")
    assert with_state <= cluster.tasks().keys()
    assert preempted(cluster) == ["daily: a spare replica"] * 2


def hold(cluster: ModelCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on pods that terminate do not end."""
    run = cluster.kubelets_and_scheduler

    def without_ends() -> bool:
        ending = {n: r for n, r in cluster.raw_pods.items() if is_ending(r)}
        for name in ending:
            del cluster.raw_pods[name]
        changed = run()
        cluster.raw_pods.update(ending)
        return changed

    monkeypatch.setattr(cluster, "kubelets_and_scheduler", without_ends)


def is_ending(raw: dict[str, Any]) -> bool:
    return bool(raw["metadata"].get("deletionTimestamp"))


def test_while_what_was_taken_ends_nothing_else_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of("abcd")
    hold(cluster, monkeypatch)
    lose(cluster, "clean")
    for _ in range(20):
        cluster.pass_time(6.0)
        cluster.settle()
    assert len(preempted(cluster)) == 2
    monkeypatch.undo()
    cluster.settle()
    assert cluster.query_states() == {"alerts": "Live", "dashboard": "Live"}


def test_a_task_that_never_ends_elsewhere_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one with a volume that cannot be unmounted, on a node too small to help."""
    cluster = cluster_of("abcd")
    cluster.add_node("small", cpu_m=100, memory=100 << 20)
    raw = copy.deepcopy(next(r for n, r in cluster.raw_pods.items() if "-hot-" in n))
    raw["metadata"] |= {"name": "stays", "uid": "stays", "deletionTimestamp": rfc3339(cluster.now)}
    raw["metadata"]["labels"] |= {LABEL_TOPOLOGY: "other"}
    raw["metadata"]["ownerReferences"] = []
    raw["spec"]["nodeName"] = "small"
    raw["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "10m"}}
    run = cluster.kubelets_and_scheduler

    def without_end() -> bool:
        cluster.raw_pods.pop("stays", None)
        changed = run()
        cluster.raw_pods["stays"] = raw
        return changed

    monkeypatch.setattr(cluster, "kubelets_and_scheduler", without_end)
    lose(cluster, "clean")
    assert cluster.query_states() == {"alerts": "Live", "dashboard": "Live"}


def spec_with_a_small_query() -> dict[str, Any]:
    """`alerts` (100) needs two nodes, `dash` (10) three, `low` (1) one; `root` is for all."""
    spec, columns = flights_spec(), "origin, time_hour"
    source = spec["sources"][0] | {"replicas": 1}

    def operator(name: str, input_: str, partitions: int = 1) -> dict[str, Any]:
        found = {"name": name, "inputs": [input_], "replicas": 1}
        if partitions == 1:
            return found | {"sql": f"SELECT {columns} FROM {input_}"}
        window = {"size": "24h", "groupBy": ["origin"], "aggregate": "count(*) AS n"}
        return found | {"keyBy": ["origin"], "partitions": partitions, "window": window}

    def query(name: str, of: str, priority: int) -> dict[str, Any]:
        sink = {"files": {"url": f"file:///var/lib/rekindle/{name}", "format": "json"}}
        return {"name": name, "from": of, "priority": priority, "sink": sink}

    operators = [
        operator("root", source["name"]),
        operator("middle", "root"),
        operator("leaf", "middle", 2),
        operator("hot", "root", 2),
        operator("small", "root"),
    ]
    queries = [query("alerts", "hot", 100), query("dash", "leaf", 10), query("low", "small", 1)]
    return spec | {"sources": [source], "operators": operators, "queries": queries}


def test_what_ends_first_is_kept_for_the_query_it_was_taken_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tasks are taken away and end one after the other: a query of priority 1 would fit."""
    cluster = ModelCluster()
    cluster.checkpoint_epoch = 40
    cluster.add_topology("flights", spec_with_a_small_query())
    for name in "abcdefgh":
        cluster.add_node(name, cpu_m=600, memory=1900 << 20)
    cluster.settle()
    kept = {p.node for n, p in cluster.tasks().items() if "-root-" in n or "-leaf-" in n}
    last = next(n for n in cluster.tasks() if "-leaf-1-" in n)
    run = cluster.kubelets_and_scheduler

    def without_the_last() -> bool:
        raw = cluster.raw_pods[last]
        if is_ending(raw):
            del cluster.raw_pods[last]
        changed = run()
        cluster.raw_pods[last] = raw
        return changed

    monkeypatch.setattr(cluster, "kubelets_and_scheduler", without_the_last)
    for name in sorted(set("abcdefgh") - kept):
        cluster.kill_node_until_not_ready(name)
    cluster.settle()
    for _ in range(4):
        cluster.pass_time(3.0)
        cluster.settle()
    assert set(cluster.query_states().values()) == {"Waiting"}
    assert preempted(cluster) == ["leaf: a task of priority 10"] * 2
    monkeypatch.undo()
    cluster.settle()
    states = {"alerts": "Live", "dash": "Waiting", "low": "Waiting"}
    assert cluster.query_states() == states


def test_what_is_free_soon_is_kept_for_the_query_of_the_highest_priority() -> None:
    """Of `first` nothing is taken, and `second` takes no part of what `first` gets."""
    running = [takeable("t", "n", 1)]
    pods = {"p": pod("p", 2), "r": pod("r", 2)}
    queries = [query("first", 9, "p"), query("second", 8, "r")]
    assert find_preemption(queries, pods, running, full(running, n=3)) is None
    found = find_preemption(queries, pods, running, full(running, n=4))
    assert taken(found) == ["t"]
    assert found is not None
    assert found.query.key[1] == "second"


def test_for_a_query_that_waits_for_what_never_ends_nothing_is_taken() -> None:
    """`first` would fit if `late` ended; for `second`, which would not, something is taken."""
    running = [takeable("t", "n", 1, 2)]
    late = takeable("late", "m", 0, 2)
    nodes = full([*running, late], n=2, m=2)
    pods = {"p": pod("p", 2), "r": pod("r", 1), "s": pod("s", 2), "u": pod("u", 1)}
    queries = [query("first", 9, "p"), query("second", 8, "s", "u", "r")]
    assert taken(find_preemption(queries[:1], pods, running, nodes)) == ["t"]
    assert find_preemption(queries[:1], pods, running, nodes, [late]) is None
    running.append(takeable("t2", "n2", 1, 2))
    nodes = full([*running, late], n=2, m=2, n2=2)
    found = find_preemption(queries, pods, running, nodes, [late])
    assert found is not None
    assert found.query.key[1] == "second"


def test_the_work_is_bounded_however_many_queries_wait() -> None:
    """A pass takes place each half second. 2,000 queries wait on 200 nodes, in vain."""
    running = [takeable(f"t{n}", f"n{n}", 0) for n in range(200)]
    nodes = full(running, **{f"n{n}": 3 for n in range(200)})
    pods = {f"p{n}": pod(f"p{n}", 1 + n % 7) for n in range(20_000)}
    waiting = [query(f"q{n}", 1 + n, *(f"p{n * 10 + i}" for i in range(10))) for n in range(2_000)]
    began = process_time()
    assert find_preemption(waiting, pods, running, nodes) is None
    assert process_time() - began < 3
