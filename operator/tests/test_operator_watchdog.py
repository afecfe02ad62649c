"""The watchdog deletes pods of the operator only on lost nodes, and without a leader."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from typing import Any

import pytest

from rekindle import names
from rekindle_operator.watchdog.__main__ import Watchdog, WatchdogSettings
from rekindle_operator.watchdog.api import ApiServer, WatchdogAccess, kubelet_responds, pod_responds
from rekindle_operator.watchdog.core import (
    Observation,
    OperatorPod,
    OtherHosts,
    WatchdogTiming,
    read_pod,
)

TIMING = WatchdogTiming()
HEARS = OtherHosts({"10.0.0.9"}, {"10.0.0.9": inf})
HEARS_NOBODY = OtherHosts({"10.0.0.9"}, {})
HEARD_ONCE = OtherHosts({"10.0.0.9"}, {"10.0.0.9": -1.0})


def pod(name: str = "a", accepted: bool = True, node: str = "node") -> OperatorPod:
    return OperatorPod(
        name,
        f"uid of {name}",
        version="1",
        node=node,
        accepted=accepted,
        host_ip="127.0.0.1",
        pod_ip="127.0.0.1",
    )


def watched(one: OperatorPod, responses: list[bool | None], every_s: float = 1.0) -> list[str]:
    """The lost pods after these responses to probes; None: not probed."""
    observation, at = Observation(), 0.0
    for number, response in enumerate(responses):
        at = number * every_s
        probed = {} if response is None else {one.uid: response}
        observation = observation.with_responses([one], probed, at)
    return observation.lost([one], at, TIMING, HEARS)


def test_a_pod_on_a_silent_node_is_lost() -> None:
    assert watched(pod(), [False, False, False]) == ["uid of a"]


@pytest.mark.parametrize(
    ("others", "is_lost"),
    [
        (OtherHosts({"10.0.0.9"}, {"10.0.0.9": 1.0}), True),
        (OtherHosts({"10.0.0.9"}, {"10.0.0.9": 0.0}), False),  # of the round in which it began
        (OtherHosts({"10.0.0.9"}, {"10.0.0.9": -1.0}), False),  # it may be cut off since then
        (OtherHosts({"127.0.0.1", "10.0.0.9"}, {"127.0.0.1": 1.0}), False),
        (OtherHosts({"127.0.0.1"}, {"127.0.0.1": -1.0}), True),  # no other one could respond
        (OtherHosts({"127.0.0.1"}, {}), False),
    ],
)
def test_silence_counts_if_another_node_responds_meanwhile(
    others: OtherHosts, is_lost: bool
) -> None:
    observation = Observation()
    for second in range(4):
        observation = observation.with_responses([pod()], {pod().uid: False}, float(second))
    assert bool(observation.lost([pod()], 3.0, TIMING, others)) == is_lost
    assert observation.lost([pod()], 180.0, TIMING, others) == [pod().uid]


@pytest.mark.parametrize("others", [HEARD_ONCE, HEARS_NOBODY])
def test_the_silence_of_a_pod_that_is_ready_counts_once_it_should_lead(others: OtherHosts) -> None:
    """All other nodes may be dead. While it starts, and until it may lead, a policy may keep this
    process from it."""
    observation = Observation()
    for second in range(20):
        one = replace(pod(), ready=second >= 10)
        observation = observation.with_responses([one], {one.uid: False}, float(second))
        found = observation.lost([one], float(second), TIMING, others)
        assert bool(found) == (second >= 10 + TIMING.delete_after_s and others is HEARD_ONCE)


def test_a_pod_is_not_known_to_be_ready_while_pods_cannot_be_listed() -> None:
    one, observation = replace(pod(), ready=True), Observation()
    for at in (0.0, 40.0, 42.0, 44.0, 45.0):
        observation = observation.with_responses([one], {one.uid: False}, at)
        found = observation.lost([one], at, TIMING, HEARD_ONCE)
        assert bool(found) == (at == 45.0)


@pytest.mark.parametrize(("ready", "expected"), [((True, True), True), ((True, False), False)])
def test_a_pod_is_ready_once_all_its_containers_are(
    ready: tuple[bool, ...], expected: bool
) -> None:
    """A webhook may have added one, which does not start the operator."""
    raw = {
        "metadata": {"name": "a", "uid": "u", "resourceVersion": "1"},
        "status": {"containerStatuses": [{"ready": one} for one in ready]},
    }
    assert read_pod(raw).ready == expected
    assert not read_pod({**raw, "status": {}}).ready


def test_silence_must_last() -> None:
    assert watched(pod(), [False, False]) == []
    assert watched(pod(), [False]) == []


def test_a_response_ends_the_silence() -> None:
    assert watched(pod(), [False, False, True, False]) == []


def test_a_pod_that_its_kubelet_never_accepted_is_lost() -> None:
    assert watched(pod(accepted=False), [None] * 4) == []
    assert watched(pod(accepted=False), [None] * 6) == ["uid of a"]


def test_a_pod_that_waits_for_a_node_is_not_lost() -> None:
    assert watched(pod(accepted=False, node=""), [None] * 60) == []


def test_the_time_in_which_a_pod_waited_for_a_node_does_not_count() -> None:
    observation, waiting, bound = Observation(), pod(accepted=False, node=""), pod(accepted=False)
    for second in range(60):
        observation = observation.with_responses([waiting], {}, float(second))
    for second in range(60, 70):
        observation = observation.with_responses([bound], {}, float(second))
        found = observation.lost([bound], float(second), TIMING, HEARS)
        assert bool(found) == (second >= 60 + TIMING.accept_s)


def test_the_timeout_grows_with_each_pod_not_accepted() -> None:
    one = pod("b", accepted=False)
    observation = Observation().with_deleted(pod(accepted=False)).with_deleted(pod(accepted=False))
    for second in range(12):
        observation = observation.with_responses([one], {}, float(second))
        found = observation.lost([one], float(second), TIMING, HEARS)
        assert bool(found) == (second >= TIMING.accept_s * 1.5**2)


def test_a_silence_begins_anew_after_a_time_without_probes() -> None:
    """Pods could not be listed meanwhile."""
    observation = Observation().with_responses([pod()], {pod().uid: False}, 3.0)
    observation = observation.with_responses([pod()], {pod().uid: False}, 64.0)
    assert observation.lost([pod()], 64.0, TIMING, HEARS) == []


def test_a_silence_goes_on_over_a_round_that_failed() -> None:
    """The checks before and after it are as far apart as they can be."""
    observation, now = Observation(), 0.0
    for _ in range(10):
        observation = observation.with_responses([pod()], {pod().uid: False}, now)
        now += 2 * (TIMING.longest_poll_s + 2)
    assert observation.lost([pod()], now, TIMING, HEARS_NOBODY) == [pod().uid]


def test_checks_become_less_frequent_also_while_pods_cannot_be_listed() -> None:
    observation = Observation()
    for _ in range(60):
        observation = observation.without_responses()
    assert observation.pause_s(TIMING) == TIMING.longest_poll_s


def test_checks_become_less_frequent_without_a_leader() -> None:
    observation = Observation()
    for second in range(60):
        observation = observation.with_responses([], {}, float(second))
    assert observation.pause_s(TIMING) == TIMING.longest_poll_s


# --- over HTTP ------------------------------------------------------------------


class FakeApiServer:
    """An API server with one Lease and some pods."""

    def __init__(self) -> None:
        self.version = 1
        self.renewed = True
        self.drops_connections = False  # it closes them without a response
        self.refuses_every_second_list = False
        self.lists = 0
        self.pods: dict[str, dict[str, Any]] = {}
        self.deleted: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # a response in one packet: the second would wait for an ACK for 40 ms

            def do_GET(self) -> None:
                if outer.drops_connections:
                    self.close_connection = True
                elif "/leases/" in self.path:
                    outer.version += outer.renewed
                    meta = {"resourceVersion": str(outer.version)}
                    self.respond(200, {"metadata": meta, "spec": {"holderIdentity": "gone"}})
                else:
                    outer.lists += 1
                    if outer.refuses_every_second_list and outer.lists % 2:
                        self.respond(429, {"message": "too many requests"})
                    else:
                        self.respond(200, {"items": list(outer.pods.values())})

            def do_POST(self) -> None:
                outer.events.append(self.body())
                self.respond(201, {})

            def do_DELETE(self) -> None:
                name = self.path.rsplit("/", 1)[1]
                outer.deleted.append((name, self.body()))
                outer.pods.pop(name, None)
                self.respond(200, {})

            def body(self) -> dict[str, Any]:
                length = int(self.headers["Content-Length"])
                return dict(json.loads(self.rfile.read(length)))

            def respond(self, status: int, body: dict[str, Any]) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not logged."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def add_pod(
        self,
        name: str,
        host_ip: str,
        pod_ip: str,
        release: str = "rekindle",
        node: str = "node",
        created: str = "2026-01-01T00:00:00Z",
    ) -> None:
        self.pods[name] = {
            "metadata": {
                "creationTimestamp": created,
                "name": name,
                "uid": f"uid of {name}",
                "resourceVersion": "5",
                "labels": {names.LABEL_OPERATOR_DEPLOYMENT: release},
            },
            "spec": {"nodeName": node},
            "status": {"startTime": "2026-01-01T00:00:00Z", "hostIP": host_ip, "podIP": pod_ip},
        }


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    made = FakeApiServer()
    yield made
    made.server.shutdown()
    made.server.server_close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


QUICK = WatchdogTiming(
    poll_s=0.1,
    quick_poll_s=0.05,
    longest_poll_s=0.1,
    probe_after_s=0.1,
    delete_after_s=0.3,
    silent_s=0.2,
    unproven_silent_s=0.2,
    accept_s=0.3,
    jitter_s=0.0,
)


class Clock:
    """Time that passes only while a watchdog waits for its next check."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_watchdog(api: FakeApiServer, clock: Clock, pod_port: int, **more: Any) -> Watchdog:
    settings = WatchdogSettings(
        "system",
        helm_release="rekindle",
        lease="rekindle-operator",
        kubelet_port=free_port(),
        pod_port=pod_port,
    )
    quick = WatchdogSettings(**{**_fields(settings), "timing": QUICK, **more})
    return Watchdog(ApiServer(WatchdogAccess(api.url)), quick, clock)


def make_watchdog_near_kubelet(api: FakeApiServer, clock: Clock) -> Watchdog:
    """The port of the fake API server is that of the kubelet."""
    return make_watchdog(
        api,
        clock,
        pod_port=free_port(),
        kubelet_port=api.server.server_port,
        timing=replace(QUICK, unproven_silent_s=60.0),
    )


def _fields(settings: WatchdogSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__slots__}


def run_until(watchdog: Watchdog, clock: Clock, done: Any, timeout_s: float = 10) -> None:
    end = clock.now + timeout_s
    while not done():
        assert clock.now < end
        clock.now += watchdog.step()


def run_for(watchdog: Watchdog, clock: Clock, seconds: float) -> None:
    end = clock.now + seconds
    run_until(watchdog, clock, lambda: clock.now > end)


def test_pods_on_lost_nodes_are_deleted_without_a_leader(api: FakeApiServer, clock: Clock) -> None:
    api.add_pod("dead", "127.0.0.1", "127.0.0.1")
    watchdog = make_watchdog(api, clock, pod_port=free_port())
    api.renewed = False
    run_until(watchdog, clock, lambda: api.deleted)
    ((name, body),) = api.deleted
    assert name == "dead"
    assert body["preconditions"] == {"uid": "uid of dead", "resourceVersion": "5"}
    assert body["gracePeriodSeconds"] == 0
    run_until(watchdog, clock, lambda: api.events)
    assert api.events[0]["reason"] == "OperatorLost"


def test_lists_that_fail_do_not_postpone_deletions(api: FakeApiServer, clock: Clock) -> None:
    api.add_pod("dead", "127.0.0.1", "127.0.0.1")
    watchdog = make_watchdog(api, clock, pod_port=free_port())
    api.renewed, api.refuses_every_second_list = False, True
    run_until(watchdog, clock, lambda: api.deleted)


def test_pods_whose_node_responds_are_kept(api: FakeApiServer, clock: Clock) -> None:
    """The port of the fake API server is that of the pod."""
    api.add_pod("crashed", "127.0.0.1", "127.0.0.1")
    watchdog = make_watchdog(api, clock, pod_port=api.server.server_port)
    api.renewed = False
    run_for(watchdog, clock, 1.5)
    assert api.deleted == []


def test_a_new_machine_with_its_address_does_not_save_a_pod(
    api: FakeApiServer, clock: Clock
) -> None:
    """The port of the fake API server is that of the kubelet."""
    api.add_pod("dead", "127.0.0.1", "127.0.0.1")
    api.add_pod("watchdog", "127.0.0.1", "", release="", node="new", created="2026-01-01T00:01:00Z")
    watchdog = make_watchdog(api, clock, pod_port=free_port(), kubelet_port=api.server.server_port)
    watchdog.step()
    api.renewed = False
    run_for(watchdog, clock, 1.5)
    assert [name for name, _ in api.deleted] == ["dead"]


def test_a_starting_operator_is_kept_if_probes_do_not_work(
    api: FakeApiServer, clock: Clock
) -> None:
    api.add_pod("pulls-its-image", "127.0.0.1", "")
    watchdog = make_watchdog(
        api, clock, pod_port=free_port(), timing=replace(QUICK, unproven_silent_s=60.0)
    )
    api.renewed = False
    run_for(watchdog, clock, 1.5)
    assert api.deleted == []


def test_silence_counts_if_a_kubelet_has_responded_before(api: FakeApiServer, clock: Clock) -> None:
    """The port of the fake API server is that of the kubelet."""
    api.add_pod("alive", "127.0.0.1", "127.0.0.1")
    watchdog = make_watchdog_near_kubelet(api, clock)
    watchdog.step()
    api.pods.clear()
    api.add_pod("dead", "127.0.0.2", "127.0.0.2")
    api.renewed = False
    run_until(watchdog, clock, lambda: api.deleted)


def test_a_starting_operator_is_kept_if_probes_work_no_longer(
    api: FakeApiServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy blocks them since some time, or this node is cut off from the others."""
    api.add_pod("watchdog", "127.0.0.1", "", release="")
    watchdog = make_watchdog_near_kubelet(api, clock)
    watchdog.step()
    monkeypatch.setattr("rekindle_operator.watchdog.__main__.kubelet_responds", lambda *_: False)
    api.add_pod("starts", "127.0.0.2", "127.0.0.2")
    api.renewed = False
    run_for(watchdog, clock, 1.5)
    assert api.deleted == []


def test_kubelets_of_other_watchdogs_are_probed_at_once(api: FakeApiServer, clock: Clock) -> None:
    watchdog = make_watchdog_near_kubelet(api, clock)
    api.renewed = False
    watchdog.step()
    api.add_pod("watchdog", "127.0.0.1", "", release="")
    api.add_pod("dead", "127.0.0.2", "127.0.0.2")
    run_until(watchdog, clock, lambda: api.deleted)
    assert [name for name, _ in api.deleted] == ["dead"]


def test_its_own_nodes_kubelet_does_not_show_that_probes_work(
    api: FakeApiServer, clock: Clock
) -> None:
    api.add_pod("beside", "127.0.0.1", "127.0.0.1")
    watchdog = make_watchdog(
        api,
        clock,
        pod_port=free_port(),
        kubelet_port=api.server.server_port,
        own_host="127.0.0.1",
        timing=replace(QUICK, unproven_silent_s=60.0),
    )
    watchdog.step()
    api.pods.clear()
    api.add_pod("starts", "127.0.0.2", "")
    api.renewed = False
    run_for(watchdog, clock, 1.0)
    assert api.deleted == []


def test_nothing_is_deleted_while_the_lease_is_renewed(api: FakeApiServer, clock: Clock) -> None:
    api.add_pod("dead", "127.0.0.1", "127.0.0.1")
    watchdog = make_watchdog(api, clock, pod_port=free_port())
    run_for(watchdog, clock, 1.5)
    assert api.deleted == []


def test_nothing_is_lost_while_the_api_server_is_unreachable(
    api: FakeApiServer, clock: Clock
) -> None:
    watchdog = make_watchdog(api, clock, pod_port=free_port())
    api.renewed = False
    api.add_pod("dead", "127.0.0.1", "127.0.0.1")
    watchdog.step()
    api.drops_connections = True
    run_for(watchdog, clock, 1.0)
    api.drops_connections = False
    watchdog.step()
    assert api.deleted == []
    run_until(watchdog, clock, lambda: api.deleted)


def test_a_node_that_accepts_connections_only_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not kubelet_responds("127.0.0.1", port, 0.2)
        assert not pod_responds("127.0.0.1", port, 0.2)
