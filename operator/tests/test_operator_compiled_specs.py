"""The cache of compiled specs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flights_example import flights_spec
from model_cluster import ModelCluster

from rekindle_operator import compiled_specs
from rekindle_operator.cluster.model import Snapshot
from rekindle_operator.reconcile.core import reconcile
from rekindle_testing.waiting import eventually

_TOPOLOGIES = 1100
_LARGE = {"podTemplate": {"metadata": {"annotations": {"text": "x" * compiled_specs._LARGE_CHARS}}}}


def forget_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart of the operator."""
    monkeypatch.setattr(compiled_specs, "_COMPILED_SPECS", compiled_specs._CompiledSpecs())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of topologies, in the order in which they are compiled."""
    names: list[str] = []

    def compile_one(name: str, *_: object) -> compiled_specs.SpecResult:
        names.append(name)
        return compiled_specs.Rejected(())

    monkeypatch.setattr(compiled_specs, "_compile", compile_one)
    forget_results(monkeypatch)
    return names


def run_pass(specs: dict[str, Any]) -> None:
    compiled_specs.start_pass()
    for name, spec in specs.items():
        compiled_specs.compile_spec(name, spec)


def test_each_of_many_specs_is_compiled_once(compiled: list[str]) -> None:
    specs = {f"t{n}": {"n": n} for n in range(_TOPOLOGIES)}
    for _ in range(3):
        run_pass(specs)
    assert len(compiled) == _TOPOLOGIES


def test_a_spec_that_changed_is_compiled_again(compiled: list[str]) -> None:
    run_pass({"a": {"n": 1}, "b": {"n": 1}})
    run_pass({"a": {"n": 2}, "b": {"n": 1}})
    assert compiled == ["a", "b", "a"]


def test_the_cache_is_bounded(compiled: list[str]) -> None:
    for n in range(10 * _TOPOLOGIES):
        run_pass({"edited": {"n": n}, "kept": {}})
    assert len(compiled_specs._COMPILED_SPECS) <= compiled_specs._KEPT_RESULTS + 2  # of this pass
    assert compiled.count("kept") == 1


def test_a_pass_without_topologies_drops_none(compiled: list[str]) -> None:
    specs = {f"t{n}": {"n": n} for n in range(3 * _TOPOLOGIES)}
    for specs_of_pass in (specs, {}, {}, specs):
        run_pass(specs_of_pass)
    assert len(compiled) == len(specs)


def test_each_pass_tells_the_cache_that_it_begins(cluster: ModelCluster) -> None:
    cluster.settle()
    assert any(name == "flights" for name, *_ in compiled_specs._COMPILED_SPECS._used)
    reconcile(Snapshot(), cluster.now)
    assert not compiled_specs._COMPILED_SPECS._used


def test_a_spec_is_compiled_even_before_the_first_pass() -> None:
    result = compiled_specs.compile_spec("flights", flights_spec())
    assert isinstance(result, compiled_specs.Compiled)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Large specs take until the event is set."""
    released, compile_one = threading.Event(), compiled_specs._compile

    def compile_slowly(name: str, text: str, accepted: bool) -> compiled_specs.SpecResult:
        if len(text) >= compiled_specs._LARGE_CHARS and "quick" not in text:
            assert released.wait(60)
        if "broken" in text:
            raise ValueError("broken")
        return compile_one(name, text, accepted)

    monkeypatch.setattr(compiled_specs, "_compile", compile_slowly)
    forget_results(monkeypatch)
    monkeypatch.setattr(compiled_specs, "_WAIT_S", 0.01)
    yield released
    released.set()


def is_compiled(name: str, spec: dict[str, Any]) -> bool:
    compiled_specs.start_pass()
    try:
        compiled_specs.compile_spec(name, spec)
    except compiled_specs.StillCompiling:
        return False
    return True


def test_large_specs_are_compiled_beside_the_passes(release: threading.Event) -> None:
    large = {**flights_spec(), **_LARGE}
    assert not is_compiled("large", large)
    assert is_compiled("small", flights_spec())
    release.set()
    eventually(lambda: is_compiled("large", large))
    assert is_compiled("large", {**large, "image": "mine:1"}), "the image plays no part"


def test_a_huge_spec_delays_no_large_one(release: threading.Event) -> None:
    text = "x" * compiled_specs._HUGE_CHARS
    huge = {"podTemplate": {"metadata": {"annotations": {"huge": text}}}}
    for number in range(3):
        assert not is_compiled(f"huge {number}", huge)
    eventually(lambda: is_compiled("large", {**_LARGE, "quick": 1}))


def test_an_error_of_a_large_spec_is_raised_where_it_is_needed(release: threading.Event) -> None:
    release.set()
    with pytest.raises(ValueError, match="broken"):
        eventually(lambda: is_compiled("large", {**_LARGE, "broken": 1}))
    eventually(lambda: is_compiled("other", {**flights_spec(), **_LARGE}))


def settle_until(cluster: ModelCluster, condition: Callable[[], bool]) -> None:
    def holds() -> bool:
        cluster.settle()
        return condition()

    eventually(holds)


def is_accepted(cluster: ModelCluster) -> bool:
    return bool(cluster.condition("Valid")["reason"] == "Accepted")


def test_a_large_spec_delays_no_other_topology(
    running: ModelCluster, release: threading.Event
) -> None:
    running.add_node("d")
    running.add_topology("large", {**flights_spec(), **_LARGE})
    running.kill_node_until_not_ready("a")
    running.settle()
    assert running.status()["phase"] == "Running"
    assert running.condition("Valid", "large")["reason"] == "Checking"
    assert not running.tasks("large")
    release.set()
    settle_until(running, lambda: bool(running.tasks("large")))


def test_an_edit_that_makes_a_spec_large_stops_no_recovery(
    running: ModelCluster, release: threading.Event
) -> None:
    running.add_node("d")
    running.edit("flights", **_LARGE)
    running.settle()
    running.kill_node_until_not_ready("a")
    running.settle()
    assert running.query_states() == dict.fromkeys(running.query_states(), "Live")
    assert running.condition("Valid")["reason"] == "Checking"
    release.set()
    settle_until(running, lambda: is_accepted(running))


def test_a_topology_of_which_nothing_is_compiled_yet_is_unknown(
    running: ModelCluster, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    release.set()
    running.edit("flights", **_LARGE)
    settle_until(running, lambda: is_accepted(running))
    release.clear()
    forget_results(monkeypatch)
    pods = set(running.raw_pods)
    running.settle()
    assert running.condition("Ready")["reason"] == "Compiling"
    assert running.status()["phase"] == "Unknown"
    assert set(running.raw_pods) == pods
    release.set()
    settle_until(running, lambda: running.status()["phase"] == "Running")


def test_what_runs_is_not_refused_by_a_newer_release() -> None:
    spec = flights_spec()
    for operator in spec["operators"]:
        if "sql" in operator:
            operator["sql"] += " AND origin <> 7" if "WHERE" in operator["sql"] else ""
    new = compiled_specs.compile_spec("flights", spec)
    assert isinstance(new, compiled_specs.Rejected)
    assert {problem.reason for problem in new.problems} == {"NotANumber"}
    accepted = compiled_specs.compile_spec("flights", spec, accepted=True)
    assert isinstance(accepted, compiled_specs.Compiled)


def test_the_record_of_a_release_with_checkpoint_modes_still_compiles() -> None:
    spec, now = flights_spec(), compiled_specs.compile_spec("flights", flights_spec())
    for operator in spec["operators"]:
        operator["checkpoint"] = {"mode": "Global"}
    then = compiled_specs.compile_spec("flights", spec)
    assert isinstance(then, compiled_specs.Compiled)
    assert isinstance(now, compiled_specs.Compiled)
    assert then.topology.segments == now.topology.segments, "the same state is restored"


def test_the_record_of_a_release_with_burst_fields_still_compiles() -> None:
    spec = flights_spec()
    spec["recovery"] = {"mode": "Blocking", "burstThreshold": 2, "burstWindow": "10s"}
    compiled = compiled_specs.compile_spec("flights", spec, accepted=True)
    assert isinstance(compiled, compiled_specs.Compiled)
    assert compiled.topology.spec.recovery.mode == "Blocking"
