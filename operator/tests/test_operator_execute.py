"""Executing actions against an API server that refuses pods."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
from kubernetes import client
from test_operator_late_reports import pod

from rekindle.names import COORDINATOR_KEY
from rekindle.topology.model import Slot
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.convert import topology_view
from rekindle_operator.cluster.model import IncarnationRef
from rekindle_operator.cluster.quota import PodExchange
from rekindle_operator.execute import Executor
from rekindle_operator.metrics import ACTIONS
from rekindle_operator.reconcile.actions import (
    METRIC_KINDS,
    Action,
    CreateGenerationRecord,
    CreatePod,
    DeletePod,
    DryRun,
    EmitEvent,
    EnsureObject,
    OpenGate,
    PlanRank,
    TopologyActions,
    WriteStatus,
)
from rekindle_operator.reconcile.schedule import schedule
from rekindle_operator.resources.access import coordinator_access

REF = IncarnationRef("uid", "seg/0/0", 2)


@dataclass
class Response:
    status: int
    body: dict[str, Any]
    reason: str = ""

    def read(self) -> bytes:
        return json.dumps(self.body).encode()


@dataclass
class Refusing(client.ApiClient):
    """Refuses every create with `status`; objects that exist belong to `owner`."""

    status: int = 403
    message: str = "exceeded quota: pods"
    owner: str = REF.topology_uid
    missing: bool = False  # of reads by name
    data: dict[str, str] | None = None  # of what exists
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def call_api(self, method: str, url: str, *_: Any, **__: Any) -> Any:
        self.calls.append(f"{method} {url.rpartition('/')[2]}")
        if method == "POST":
            return Response(self.status, {"message": self.message})
        if method == "GET" and self.missing:
            return Response(404, {"message": "not found"})
        name = url.rpartition("/")[2]
        meta = {"name": name, "namespace": "default", "ownerReferences": [{"uid": self.owner}]}
        return Response(200, {"kind": "Status", "metadata": meta, "data": self.data})


_REMOVAL = DeletePod("default", "old", "u", version=7, grace_s=None, why="why")


def meta_of(name: str, owner_uid: str) -> dict[str, Any]:
    owner = {"name": "t", "uid": owner_uid}
    found = {"name": name, "namespace": "default", "annotations": {}}
    return {**found, "ownerReferences": [owner]}


def executor_of(
    api: client.ApiClient,
    cluster: ClusterCache,
    clock: Callable[[], float],
    on_refused_status: Callable[[], None] = lambda: None,
    may_act: Callable[[], bool] = lambda: True,
) -> Executor:
    """With one worker, so that the order of calls is known. `may_act`: by default it leads."""
    return Executor(
        api,
        cluster,
        identity="me",
        status_interval_s=2.0,
        clock=clock,
        may_act=may_act,
        workers=1,
        on_refused_status=on_refused_status,
    )


def run(api: Refusing) -> ClusterCache:
    cluster = ClusterCache(api, None, lambda: 1000.0)
    executor = executor_of(api, cluster, lambda: 1000.0)
    meta = meta_of("new", REF.topology_uid)
    create = CreatePod(
        "default",
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta},
        REF,
        predecessor_lost_at=990.0,
    )
    executor.run([TopologyActions("default/t", (create, _REMOVAL))])
    return cluster


def test_a_misspelt_field_of_a_template_is_a_problem() -> None:
    api = Refusing(status=400, message='strict decoding error: unknown field "spec.nodeSelectr"')
    cluster = ClusterCache(api, None, lambda: 1000.0)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "t", "namespace": "default"}}
    pods = (("spec.podTemplate", pod),)
    executor = executor_of(api, cluster, lambda: 1000.0)
    executor.run([TopologyActions("default/t", (DryRun("default", "u", 3, (), pods),))])
    assert api.calls == ["POST pods?dryRun=All&fieldValidation=Strict"]
    (problem,) = cluster.snapshot().dry_runs["u", 3].problems
    assert (problem.path, problem.reason) == ("spec.podTemplate", "PodRefused")
    assert 'unknown field "spec.nodeSelectr"' in problem.message
    assert "correct spec.podTemplate" in problem.hint


_FULL = "exceeded quota: few, requested: pods=1, used: pods=9, limited: pods=9"


@pytest.mark.parametrize(
    ("message", "kind", "may_exceed", "problems", "waits"),
    [
        (_FULL, "Pod", False, 0, True),
        (_FULL, "Pod", True, 0, False),
        ("exceeded quota: few, requested: pods=1", "Pod", True, 0, True),
        ("exceeded quota: few, requested: secrets=1", "Secret", True, 0, True),
        ("failed quota: few: must specify limits.cpu", "Pod", True, 1, False),
        ("cannot create resource", "Secret", True, 1, False),
    ],
)
def test_a_full_quota_is_no_problem_of_the_spec(
    message: str, kind: str, may_exceed: bool, problems: int, waits: bool
) -> None:
    api = Refusing(message=message)
    cluster = ClusterCache(api, None, lambda: 1000.0)
    manifest = {"apiVersion": "v1", "kind": kind, "metadata": meta_of("t", "u"), "spec": {}}
    objects = (manifest,) if kind != "Pod" else ()
    pods = (("spec.podTemplate", manifest),) if kind == "Pod" else ()
    exchange = PodExchange(ResourceAmounts(pods=2), ResourceAmounts(pods=2))
    dry_run = DryRun("default", "u", 3, objects, pods, exchange if may_exceed else None)
    executor_of(api, cluster, lambda: 1000.0).run([TopologyActions("default/t", (dry_run,))])
    result = cluster.snapshot().dry_runs["u", 3]
    assert (len(result.problems), bool(result.waits_for)) == (problems, waits)
    assert not waits or result.waits_for == message


@pytest.mark.parametrize(("owner", "problems"), [("u", 0), ("another's", 1)])
def test_an_object_that_exists_is_a_problem_if_it_is_of_another(owner: str, problems: int) -> None:
    api = Refusing(409, "already exists", owner=owner)
    cluster = ClusterCache(api, None, lambda: 1000.0)
    manifest = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta_of("t", "u")}
    dry_run = DryRun("default", "u", 3, (manifest,), ())
    executor_of(api, cluster, lambda: 1000.0).run([TopologyActions("default/t", (dry_run,))])
    found = cluster.snapshot().dry_runs["u", 3].problems
    assert len(found) == problems
    assert all("ServiceAccount t" in str(p) and "delete it first" in str(p) for p in found)


def test_a_refused_pod_is_retried_after_the_cleanup() -> None:
    api = Refusing()
    refusal = run(api).snapshot().uncreated_pods[REF]
    assert api.calls == ["POST pods", "DELETE old", "POST pods"]
    assert (refusal.message, refusal.predecessor_lost_at) == ("exceeded quota: pods", 990.0)
    assert (refusal.retry_at > 1000.0, refusal.over_quota_since) == (True, 1000.0)


def test_no_request_is_sent_for_what_waits_for_a_coordinator() -> None:
    """A full quota refuses the coordinator's pod: that counts as a refusal of this one."""
    api = Refusing()
    cluster = ClusterCache(api, None, lambda: 1000.0)
    create = CreatePod("default", {"metadata": {"name": "new"}}, REF, refused="exceeded quota: few")
    executor_of(api, cluster, lambda: 1000.0).run([TopologyActions("default/t", (create,))])
    refusal = cluster.snapshot().uncreated_pods[REF]
    assert api.calls == []
    assert (refusal.message, refusal.over_quota_since) == ("exceeded quota: few", 1000.0)


@pytest.mark.parametrize(
    ("status", "message"),
    [(403, "denied by policy"), (429, "slow down"), (500, "exceeded quota"), (401, "who are you")],
)
def test_only_a_full_quota_counts_as_one(status: int, message: str) -> None:
    uncreated = run(Refusing(status=status, message=message)).snapshot().uncreated_pods[REF]
    assert (uncreated.message, uncreated.over_quota_since) == (message, None)


@pytest.mark.parametrize("status", [400, 401, 403, 422, 429])
def test_a_pod_does_not_exist_after_a_refusal(status: int) -> None:
    assert not run(Refusing(status)).snapshot().uncreated_pods[REF].may_exist


@pytest.mark.parametrize("status", [408, 500, 503, 504])
def test_a_pod_may_exist_after_any_other_error(status: int) -> None:
    assert run(Refusing(status)).snapshot().uncreated_pods[REF].may_exist


def test_a_conflict_without_an_object_is_named() -> None:
    """An API server answers so, too, if many requests change one quota."""
    uncreated = run(Refusing(status=409, missing=True)).snapshot().uncreated_pods[REF]
    assert "reports a conflict, and" in uncreated.message
    assert "does not exist" in uncreated.message


def test_a_create_of_unknown_outcome_reuses_its_incarnation() -> None:
    api = Refusing(status=500, message="etcd is unavailable")
    uncreated = run(api).snapshot().uncreated_pods[REF]
    assert (uncreated.message, uncreated.may_exist) == ("etcd is unavailable", True)
    assert api.calls == ["POST pods", "DELETE old"]  # the next pass decides


def test_an_incarnation_whose_pod_was_seen_is_not_used_again() -> None:
    """The pod was created and has ended, before the request ended without a response."""
    cluster = ClusterCache(Refusing(), None, lambda: 1000.0)
    cluster.remember_create_attempt(REF, 990.0)
    seen = replace(pod("new", "node"), owner_uid=REF.topology_uid, slot=Slot("seg", 0, 0))
    cluster.pods._views = {("default", "new"): replace(seen, incarnation=REF.incarnation)}
    cluster.snapshot()
    cluster.pods._views = {}
    cluster.remember_failed_create(REF, "timed out", 990.0, may_exist=True)
    assert not cluster.snapshot().uncreated_pods


def test_a_failed_status_write_reuses_its_incarnations() -> None:
    api = Failing({"PATCH status": 500})
    cluster = ClusterCache(api, None, lambda: 1000.0)
    executor = executor_of(api, cluster, lambda: 1000.0)
    executor.run(
        [TopologyActions("default/t", (status_reserving("t"), creation("t-0", uid="t"), _REMOVAL))]
    )
    assert api.calls == ["PATCH status", "DELETE old"], (
        "the pod needs the status, nothing else does"
    )
    assert cluster.snapshot().uncreated_pods


def fails_to_create(api: client.ApiClient, manifest: dict[str, Any], *others: Any) -> bool:
    """Whether the creation of this record fails; `others`: actions beside it."""
    failed = ACTIONS.labels("CreateConfigFailed")
    before = failed._value.get()
    cluster = ClusterCache(api, None, lambda: 0.0)
    record = CreateGenerationRecord("default", manifest)
    executor_of(api, cluster, lambda: 0.0).run([TopologyActions("default/t", (record, *others))])
    return bool(failed._value.get() > before)


@pytest.mark.parametrize(("owner", "fails"), [("uid", False), ("of the topology before", True)])
def test_a_record_of_an_earlier_topology_is_not_accepted(owner: str, fails: bool) -> None:
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta_of("t-g1", "uid")}
    assert fails_to_create(Refusing(409, "already exists", owner=owner), manifest) is fails


@pytest.mark.parametrize("text", ["{}", "another"])
def test_a_record_with_another_content_is_not_accepted(text: str) -> None:
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta_of("t-g1", "uid")}
    manifest |= {"data": {"topology.json": text}}
    api = Refusing(409, "already exists", owner="uid", data={"topology.json": "{}"})
    assert fails_to_create(api, manifest) is (text != "{}")


@pytest.mark.parametrize(("status", "checks"), [(500, 1), (422, 1), (404, 0)])
def test_a_refused_status_requests_a_check_of_the_crd(status: int, checks: int) -> None:
    requested: list[str] = []
    api = Failing({"PATCH status": status})
    executor = executor_of(
        api,
        ClusterCache(api, None, lambda: 0.0),
        lambda: 0.0,
        on_refused_status=lambda: requested.append("check"),
    )
    executor.run([TopologyActions("default/t", (status_reserving("t"),))])
    assert len(requested) == checks


class OnlyValidStatus(client.ApiClient):
    """Refuses each status that has queries."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.written: list[dict[str, Any]] = []

    def call_api(self, method: str, url: str, *more: Any, **_: Any) -> Any:
        self.calls.append(f"{method} {url.rpartition('/')[2].partition('?')[0]}")
        meta = {"namespace": "default", "name": "t", "uid": "t"}
        meta["creationTimestamp"] = "2026-01-01T00:00:00Z"
        body = {"kind": "Status", "metadata": meta}
        if method == "PATCH":
            status = json.loads(more[1])["status"]
            if status.get("queries"):
                return Response(422, {"kind": "Status", "message": "queries: Too long"})
            self.written.append(status)
        return Response(200, body)


def test_pods_do_not_wait_for_a_status_that_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    api = OnlyValidStatus()
    cluster = ClusterCache(api, None, lambda: 0.0)
    executor = executor_of(api, cluster, lambda: 0.0)
    slots = [{"slot": "t-0", "incarnation": 2}]
    decided = {"phase": "Recovering", "queries": [{"name": "q"}], "slots": slots}
    last = {"phase": "Running", "dataPlane": {"fence": 1}}
    write = replace(status_reserving("t"), replaces=last, status=decided)
    failed = ACTIONS.labels("WriteStatusFailed")
    before = failed._value.get()
    executor.run([TopologyActions("default/t", (write, creation("t-0", uid="t")))])
    assert api.calls == ["PATCH status", "PATCH status", "POST pods"]
    assert failed._value.get() == before + 1
    assert api.written == [{"phase": "Running", "slots": slots}]
    assert "queries: Too long" in caplog.text
    assert not cluster.snapshot().uncreated_pods


def test_a_failed_status_write_creates_no_record() -> None:
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta_of("t-g1", "t")}
    status = WriteStatus("default", "t", "t", 1, {}, {}, urgent=True, accepts_generation=True)
    api = Failing({"PATCH status": 500})
    assert not fails_to_create(api, manifest, status)
    assert api.calls == ["PATCH status"]


def grant_access(owner: str | None, leads_for_calls: int | None = None) -> list[str]:
    """Calls, where objects of these names are there and belong to `owner`; None: they are not.
    `leads_for_calls`: after so many another replica leads."""
    api = Refusing(owner=owner or "") if owner is not None else Refusing(missing=True)
    topology = topology_view(
        {
            "metadata": {
                "name": "t",
                "namespace": "default",
                "uid": "uid",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            }
        }
    )
    cluster = ClusterCache(api, None, lambda: 0.0)
    executor = executor_of(
        api,
        cluster,
        lambda: 0.0,
        may_act=lambda: leads_for_calls is None or len(api.calls) < leads_for_calls,
    )
    access = [EnsureObject("default", manifest) for manifest in coordinator_access(topology)]
    ref = IncarnationRef("uid", COORDINATOR_KEY, 1)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta_of("c", "uid")}
    executor.run([TopologyActions("default/t", (*access, CreatePod("default", pod, ref)))])
    return api.calls


def test_an_account_of_another_owner_is_not_changed_or_used() -> None:
    """Otherwise a user who may create topologies could choose a name, and run an image as the
    ServiceAccount that has it."""
    calls = grant_access("another's")
    assert not [c for c in calls if c.startswith(("PATCH", "POST"))]


@pytest.mark.parametrize("owner", ["uid", None])
def test_the_access_objects_of_a_topology_are_updated(owner: str | None) -> None:
    calls = grant_access(owner)
    assert sum(c.startswith("PATCH t-coordinator") for c in calls) == 3
    assert "POST pods" in calls


@pytest.mark.parametrize("calls", range(1, 6))
def test_a_replica_that_leads_no_longer_changes_nothing_more(calls: int) -> None:
    """It may have been paused between two calls of one action."""
    made = grant_access("uid", leads_for_calls=calls)
    assert not [c for c in made[calls:] if not c.startswith("GET")]
    assert "POST pods" not in made


def test_a_pod_of_an_earlier_topology_delays_only_itself() -> None:
    api = Refusing(409, "already exists", owner="of the topology before")
    refusal = run(api).snapshot().uncreated_pods[REF]
    assert "delete it first" in refusal.message
    assert api.calls[:3] == ["POST pods", "GET new", "DELETE old"]


@dataclass
class Failing(client.ApiClient):
    """Answers with the status that `fails` has for "VERB last-part-of-the-path", else 200."""

    fails: dict[str, int]
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def call_api(self, method: str, url: str, *_: Any, **__: Any) -> Any:
        call = f"{method} {url.rpartition('/')[2].partition('?')[0]}"
        self.calls.append(call)
        stamp = "2026-01-01T00:00:00Z"
        meta = {"namespace": "default", "name": "t", "uid": "t", "creationTimestamp": stamp}
        body = {"kind": "Status", "message": "no", "metadata": meta}
        return Response(self.fails.get(call, 200), body)


def status_reserving(topology: str) -> WriteStatus:
    new_incarnations = frozenset({IncarnationRef(topology, f"{topology}-0", 2)})
    return WriteStatus(
        "default",
        topology,
        uid=topology,
        version=1,
        replaces={},
        status={},
        urgent=True,
        new_incarnations=new_incarnations,
    )


def creation(name: str, *, uid: str) -> CreatePod:
    meta = meta_of(name, uid)
    return CreatePod(
        "default",
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta},
        IncarnationRef(uid, name, 2),
    )


def removal(name: str) -> DeletePod:
    return DeletePod("default", name, f"uid-{name}", version=7, grace_s=0, why="its node is lost")


def event(topology: str) -> EmitEvent:
    return EmitEvent(
        "default",
        topology,
        uid=topology,
        warning=False,
        reason="QueryLive",
        action="Recover",
        note="note",
        dedup_key="1",
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_denied_delete_delays_no_other() -> None:
    clock, api = Clock(), Failing({"DELETE z0": 403})
    cluster = ClusterCache(api, None, clock)
    executor = executor_of(api, cluster, clock)
    decision = TopologyActions("", tuple(removal(f"z{n}") for n in range(5)))
    executor.run([decision])
    assert sorted(api.calls) == [f"DELETE z{n}" for n in range(5)]
    for _ in range(600):
        executor.run([TopologyActions("", (removal("z0"),))])
        clock.now += 1.0
    assert 20 < api.calls.count("DELETE z0") < 60, "with back-off, and without end"


def test_replacements_precede_clean_up_status_and_events() -> None:
    api = Failing({})
    clock = Clock()
    executor = executor_of(api, ClusterCache(api, None, clock), clock)
    first = (event("a"), removal("old-a"), status_reserving("a"), creation("a-0", uid="a"))
    second = (
        removal("old-b"),
        WriteStatus("default", "b", "b", 1, {}, {}, urgent=True),
        event("b"),
    )
    executor.run(
        [
            TopologyActions("", (removal("zombie"),)),
            TopologyActions("a", first),
            TopologyActions("b", second),
        ]
    )
    assert api.calls == [
        "PATCH status",
        "POST pods",
        "DELETE zombie",
        "DELETE old-a",
        "DELETE old-b",
        "PATCH status",
        "POST events",
        "POST events",
    ]


def test_every_action_has_a_kind_in_metrics() -> None:
    assert set(METRIC_KINDS) == set(get_args(Action))


def test_pods_are_created_in_the_order_of_the_plan() -> None:
    decisions = [
        TopologyActions(
            name,
            (status_reserving(name), creation(f"{name}-0", uid=name)),
            ranks={f"{name}-0": PlanRank(*rank)},
        )
        for name, rank in (("a", (0, 2)), ("b", (1, 0)), ("c", (0, 1)), ("d", (-1, 0)))
    ]
    pods = [s.action.name for s in schedule(decisions) if isinstance(s.action, CreatePod)]
    assert pods == ["d-0", "c-0", "a-0", "b-0"]
    keys = [s.key for s in schedule(decisions)]
    assert keys[:2] == ["WriteStatus default/d d", "CreatePod default/d-0 d"]


def test_an_action_that_keeps_failing_is_reported() -> None:
    clock, api = Clock(), Failing({"PATCH p": 403})
    cluster = ClusterCache(api, None, clock)
    executor = executor_of(api, cluster, clock)
    opening = (OpenGate("default", "p", "u", "node", ()),)
    decision = TopologyActions("default/t", opening, topology_uid="uid")
    executor.run([decision])
    assert cluster.snapshot().failures == {}, "one failure is most often a conflict"
    clock.now += 1.0
    executor.run([decision])
    assert cluster.snapshot().failures == {"uid": "OpenGate default/p u fails: 403 no"}
    api.fails.clear()
    clock.now += 40.0
    executor.run([decision])
    assert cluster.snapshot().failures == {}


def test_creations_of_a_coordinator_that_keep_failing_are_reported() -> None:
    """Each is of another incarnation."""
    clock, api = Clock(), Refusing(status=500, message="a webhook is down")
    cluster = ClusterCache(api, None, clock)
    executor = executor_of(api, cluster, clock)
    for incarnation in (2, 3):
        meta = meta_of(f"t-coordinator-{incarnation}", "uid")
        ref = IncarnationRef("uid", COORDINATOR_KEY, incarnation)
        create = CreatePod("default", {"apiVersion": "v1", "kind": "Pod", "metadata": meta}, ref)
        executor.run([TopologyActions("default/t", (create,), topology_uid="uid")])
        clock.now += 1.0
    message = cluster.snapshot().failures["uid"]
    assert message.startswith("CreatePod default/t-coordinator uid fails: 500")


def test_what_failed_says_nothing_of_the_next_of_that_name() -> None:
    clock, api = Clock(), Failing({"POST configmaps": 403})
    cluster = ClusterCache(api, None, clock)
    executor = executor_of(api, cluster, clock)

    def record(uid: str) -> TopologyActions:
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta_of("t-g1", uid)}
        create = CreateGenerationRecord("default", manifest)
        return TopologyActions("default/t", (create,), topology_uid=uid)

    for _ in range(2):
        executor.run([record("before")])
        clock.now += 1.0
    executor.run([record("before")])
    assert cluster.snapshot().failures.keys() == {"before"}
    api.calls.clear()
    executor.run([record("after")])
    assert api.calls == ["POST configmaps"], "it waits for no back-off"
    assert cluster.snapshot().failures.keys() == {"before"}


def test_a_namespace_that_is_being_deleted_causes_no_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Terminating(Refusing):
        def call_api(self, method: str, url: str, *_: Any, **__: Any) -> Any:
            causes = [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]
            return Response(403, {"message": "is being terminated", "details": {"causes": causes}})

    clock = Clock()
    cluster = ClusterCache(Terminating(), None, clock)
    executor = executor_of(Terminating(), cluster, clock)
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta_of("t-g1", "t")}
    record = CreateGenerationRecord("default", manifest)
    event = EmitEvent("default", "t", "t", True, "Invalid", "Validate", "note", "1")
    for _ in range(3):
        executor.run(
            [TopologyActions("default/t", (record, creation("t-0", uid="t"), event), None, {}, "t")]
        )
        clock.now += 60.0
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == []
    assert cluster.snapshot().failures == {}


def test_a_failed_action_is_forgotten_when_not_retried() -> None:
    clock, api = Clock(), Failing({"PATCH p": 403})
    cluster = ClusterCache(api, None, clock)
    executor = executor_of(api, cluster, clock)
    for _ in range(2):
        executor.run([TopologyActions("default/t", (OpenGate("default", "p", "u", "node", ()),))])
        clock.now += 1.0
    assert cluster.snapshot().failures
    clock.now += 120.0
    assert cluster.snapshot().failures == {}
