"""The I/O around the election: only the leader acts; others keep running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from rekindle_operator.election import ElectionTiming, LeaseRecord
from rekindle_operator.leader import Leader
from rekindle_operator.lease import lease_body
from rekindle_operator.settings import Election
from rekindle_testing.waiting import eventually

TIMING = ElectionTiming(lease_s=1, renew_deadline_s=0.3, renew_s=0.1, retry_s=0.05)


def owner_references(lease: dict[str, Any] | None) -> list[dict[str, Any]]:
    assert lease is not None
    return list(lease["metadata"].get("ownerReferences") or ())


class LeaseServer:
    """An API with one Lease, free at first. `unavailable`: it does not respond."""

    def __init__(self) -> None:
        free = LeaseRecord(holder="", process="", lease_s=1.0, transitions=0, version="0")
        self.lease: dict[str, Any] | None = lease_body("default", "rekindle-operator", free, 0, 0)
        self.lease["metadata"]["uid"] = "uid"
        self.unavailable = False
        self.deployment: dict[str, Any] | None = None
        self.deployment_takes_s = 0.0
        # As the admission plugin OwnerReferencesPermissionEnforcement does for clients that may not
        # delete the owner.
        self.enforces_owners = False
        self._version = 0

    def request(
        self, method: str, path: str, body: Any = None, **options: Any
    ) -> dict[str, Any] | None:
        if self.unavailable:
            raise ApiException(status=503, reason="unavailable")
        match method:
            case "GET" if "/deployments/" in path:
                if self.deployment_takes_s > options["timeout_s"][1]:
                    raise HTTPError("timed out")
                return self.deployment
            case "GET":
                return self.lease
            case "POST" if self.lease is not None:
                return None
            case "PUT":
                current = self.lease and self.lease["metadata"]["resourceVersion"]
                if current != body["metadata"].get("resourceVersion"):
                    return None
                if self.enforces_owners and owner_references(body) != owner_references(self.lease):
                    raise ApiException(status=403, reason="cannot set an ownerRef")
        self._version += 1
        uid = f"uid-{self._version}" if self.lease is None else self.lease["metadata"]["uid"]
        meta = {**body["metadata"], "resourceVersion": str(self._version), "uid": uid}
        self.lease = {**body, "metadata": meta}
        return self.lease


class Clock:
    """Common clock of a test's leaders; it advances with each read."""

    now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


CLOCK = Clock()


def make_leader(
    server: LeaseServer, name: str, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> Leader:
    election = Election(identity=name, timing=TIMING, deployment="rekindle")
    leader = Leader(None, election, lambda: None, **{"clock": CLOCK, **more})  # type: ignore[arg-type]
    monkeypatch.setattr(leader, "_request", server.request)
    return leader


def lead(leader: Leader) -> None:
    for _ in range(2):  # it reads, and then writes
        leader.step()
    assert leader.leading


def pass_until(condition: Callable[[], bool], *steps: Leader) -> None:
    """Let these leaders take steps for some time."""
    end = CLOCK.now + 10
    while not condition():
        assert CLOCK.now < end
        for leader in steps:
            leader.step()
        CLOCK.now += 0.02


def test_a_leader_without_its_lease_waits_and_may_lead_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = LeaseServer()
    first, second = (make_leader(server, name, monkeypatch) for name in "ab")
    lead(first)
    first.release()
    lead(second)
    third = make_leader(server, "a", monkeypatch)
    third.step()
    assert not third.leading
    assert not third.wait_leading(0.01)
    second.release()
    lead(third)
    assert third.wait_leading(0.01)


def test_actions_of_an_earlier_term_are_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = LeaseServer()
    leader = make_leader(server, "a", monkeypatch)
    lead(leader)
    leader.begin_pass()
    assert leader.may_act()
    other = make_leader(server, "b", monkeypatch)
    pass_until(lambda: other.leading, other)  # `a` does not renew meanwhile
    leader.step()
    assert not leader.may_act()
    other.release()
    pass_until(lambda: leader.leading, leader)
    assert not leader.may_act(), "the pass began in another term"
    leader.begin_pass()
    assert leader.may_act()


def test_a_leader_that_cannot_renew_stops_acting(monkeypatch: pytest.MonkeyPatch) -> None:
    server = LeaseServer()
    leader = make_leader(server, "a", monkeypatch)
    lead(leader)
    leader.begin_pass()
    server.unavailable = True
    pass_until(lambda: not leader.leading, leader)
    assert not leader.may_act()
    server.unavailable = False
    leader.step()
    assert leader.may_act(), "no other leader in between"


def test_a_replica_that_is_not_ready_takes_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    server, ready = LeaseServer(), False
    leader = make_leader(server, "a", monkeypatch, ready=lambda: ready)
    for _ in range(3):
        leader.step()
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == ""
    ready = True
    lead(leader)


def test_a_released_lease_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    server = LeaseServer()
    leader = make_leader(server, "a", monkeypatch, clock=time.monotonic)
    leader.start()
    eventually(lambda: leader.leading)
    leader.release()
    ended = [t for t in threading.enumerate() if t.name == "election"]
    for thread in ended:
        thread.join(5)
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == ""
    assert not leader.leading


def test_a_stuck_leader_lets_its_lease_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    server, healthy = LeaseServer(), True
    stuck = make_leader(server, "a", monkeypatch, healthy=lambda: healthy)
    lead(stuck)
    healthy = False
    other = make_leader(server, "b", monkeypatch)
    pass_until(lambda: other.leading, stuck, other)
    assert not stuck.leading


def test_the_lease_belongs_to_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = LeaseServer()
    server.deployment = {"metadata": {"name": "rekindle", "uid": "d-1"}}
    first, second = (make_leader(server, name, monkeypatch) for name in "ab")
    for leader in (first, second):
        leader.find_owner()
    server.deployment = None  # helm uninstall
    lead(first)
    assert _owners(server) == [("Deployment", "d-1")]
    server.lease = None  # deleted with its owner, and made again by a replica that still runs
    while server.lease is None:
        second.step()
    assert _owners(server) == [("Deployment", "d-1")]


def _owners(server: LeaseServer) -> list[tuple[str, str]]:
    return [(o["kind"], o["uid"]) for o in owner_references(server.lease)]


@pytest.mark.parametrize(
    ("timing", "timeout_s"),
    [
        (ElectionTiming(), 1.0),
        (ElectionTiming(lease_s=15, renew_deadline_s=10, renew_s=2, retry_s=2), 4.0),
    ],
)
def test_calls_of_longer_timings_may_take_longer(timing: ElectionTiming, timeout_s: float) -> None:
    """Otherwise no replica could lead where each call takes more than a second."""
    timeouts_s: list[tuple[float, float]] = []

    class SlowApi:
        def param_serialize(self, *_: Any, **__: Any) -> tuple[()]:
            return ()

        def call_api(self, _request_timeout: tuple[float, float]) -> None:
            timeouts_s.append(_request_timeout)
            raise ApiException(status=503, reason="unavailable")

    Leader(SlowApi(), Election(timing=timing), lambda: None).step()  # type: ignore[arg-type]
    assert timeouts_s == [(timeout_s, timeout_s)]


def test_without_the_right_to_set_an_owner_a_replica_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    server = LeaseServer()
    server.deployment = {"metadata": {"name": "rekindle", "uid": "d-1"}}
    server.enforces_owners = True  # the Lease is of a version that set none
    leader = make_leader(server, "a", monkeypatch)
    leader.find_owner()
    pass_until(lambda: leader.leading, leader)
    assert _owners(server) == []


def test_a_replica_that_does_not_know_the_owner_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = LeaseServer()
    server.deployment = {"metadata": {"name": "rekindle", "uid": "d-1"}}
    first, second = (make_leader(server, name, monkeypatch) for name in "ab")
    first.find_owner()
    lead(first)
    first.release()
    server.enforces_owners = True
    lead(second)
    assert _owners(server) == [("Deployment", "d-1")]


def test_a_replica_waits_for_its_owner_before_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it could take the Lease during an uninstallation, and leave it behind."""
    server = LeaseServer()
    server.deployment = {"metadata": {"name": "rekindle", "uid": "d-1"}}
    server.deployment_takes_s = 2.0  # it waits for 5 s
    leader = make_leader(server, "a", monkeypatch)
    leader.find_owner()
    server.deployment = server.lease = None  # uninstalled
    leader.step()
    leader.find_owner()
    leader.step()
    assert _owners(server) == [("Deployment", "d-1")]


def test_an_owner_that_could_not_be_read_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = LeaseServer()
    server.deployment = {"metadata": {"name": "rekindle", "uid": "d-1"}}
    server.deployment_takes_s = 60.0
    leader = make_leader(server, "a", monkeypatch)
    leader.find_owner()
    server.deployment_takes_s = 0.0
    CLOCK.now += 1.5
    leader.find_owner()
    lead(leader)
    assert _owners(server) == [("Deployment", "d-1")]


def test_the_holder_of_the_lease_does_not_wait_for_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = LeaseServer()
    server.deployment_takes_s = 60.0
    leader = make_leader(server, "a", monkeypatch)
    lead(leader)
    server.deployment = {"metadata": {"name": "rekindle", "uid": "d-1"}}
    server.deployment_takes_s = 1.0  # a holder of the Lease waits for 0.3 s
    leader.find_owner()
    leader.step()
    assert _owners(server) == []


def test_the_owner_is_read_again_when_the_lease_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Deployment that is replaced while its pods stay (`--cascade=orphan`) has another uid; the
    garbage collector deletes what belongs to the old one."""
    server = LeaseServer()
    server.deployment = {"metadata": {"name": "rekindle", "uid": "d-1"}}
    leader = make_leader(server, "a", monkeypatch)
    leader.find_owner()
    lead(leader)
    server.deployment["metadata"]["uid"] = "d-2"

    def step() -> None:
        CLOCK.now += 0.1
        if server.lease is not None and ("Deployment", "d-1") in _owners(server):
            server.lease = None
        leader.find_owner()
        leader.step()

    for _ in range(40):
        step()
    assert leader.leading
    assert _owners(server) == [("Deployment", "d-2")]


def test_a_missing_right_to_read_the_deployment_stops_no_election(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = LeaseServer()
    leader = make_leader(server, "a", monkeypatch)

    def refuse(method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any] | None:
        if "/deployments/" in path:
            raise ApiException(status=403, reason="Forbidden")
        return server.request(method, path, body)

    monkeypatch.setattr(leader, "_request", refuse)
    leader.find_owner()
    lead(leader)
    assert leader.leading
    assert server.lease is not None
    assert "ownerReferences" not in server.lease["metadata"]
