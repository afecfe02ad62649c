"""The plan of a chaos run: deterministic, and every fault ends."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from rekindle_testing.chaos.plan import (
    FAULTS_END_BY_S,
    MAX_API_PAUSE_S,
    AddNode,
    ChaosPlan,
    ChaosStep,
    DeleteNodeObject,
    Fault,
    FaultAction,
    Freeze,
    HealNetwork,
    KillNodes,
    PartitionNetwork,
    PauseApiServer,
    RemoveStore,
    RestoreStore,
    ResumeApiServer,
    Round,
    Thaw,
    make_plan,
)
from rekindle_testing.paths import ROOT

NODES = 5
SEEDS = range(60)


def _plan(seed: int, rounds: int = 8) -> ChaosPlan:
    return make_plan(seed, rounds, nodes=NODES, topologies=("one", "two"))


def _rounds() -> list[Round]:
    return [r for seed in SEEDS for r in _plan(seed).rounds]


def test_the_same_seed_gives_the_same_plan() -> None:
    assert _plan(7) == _plan(7)
    assert _plan(7) != _plan(9)


def test_a_round_does_not_depend_on_how_many_follow() -> None:
    assert _plan(3, rounds=2).rounds == _plan(3, rounds=8).rounds[:2]


def test_node_objects_stay_in_half_of_the_seeds() -> None:
    stay = [_plan(seed).node_objects_stay for seed in SEEDS]
    assert sum(stay) == len(stay) / 2


@pytest.mark.parametrize("seed", SEEDS)
def test_node_objects_are_deleted_only_where_they_do_not_stay(seed: int) -> None:
    plan = _plan(seed)
    actions = [s.action for r in plan.rounds for s in r.steps]
    deleted = {a.node for a in actions if isinstance(a, DeleteNodeObject)}
    dead = {n for a in actions if isinstance(a, KillNodes) for n in a.nodes}
    assert deleted == (set() if plan.node_objects_stay else dead)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_node_has_no_fault_and_killed_ones_are_replaced(seed: int) -> None:
    alive = {f"node-{n}" for n in range(1, NODES + 1)}
    for round in _plan(seed).rounds:
        touched: set[str] = set()
        for step in round.steps:
            match step.action:
                case KillNodes(nodes):
                    assert set(nodes) <= alive
                    alive -= set(nodes)
                    touched |= set(nodes)
                case Freeze(node) | PartitionNetwork(node):
                    assert node in alive - touched
                    touched.add(node)
                case AddNode(node):
                    assert node not in alive
                    alive.add(node)
                case _:
                    pass
        assert alive - touched - {a for s in round.steps for a in _added(s)}
        assert len(alive) == NODES


def _added(step: ChaosStep) -> list[str]:
    return [step.action.node] if isinstance(step.action, AddNode) else []


def test_nodes_are_added_in_the_order_of_their_numbers() -> None:
    for seed in SEEDS:
        added = [n for r in _plan(seed).rounds for s in r.steps for n in _added(s)]
        assert added == [f"node-{n}" for n in range(NODES + 1, NODES + 1 + len(added))]


def test_every_fault_ends_in_its_round() -> None:
    for round in _rounds():
        open_: dict[object, float] = {}
        for step in round.steps:
            match step.action:
                case Freeze(node) | PartitionNetwork(node):
                    open_[node] = step.at_s
                case Thaw(node) | HealNetwork(node):
                    del open_[node]
                case KillNodes(nodes):
                    open_ = {k: v for k, v in open_.items() if k not in nodes}
                case RemoveStore(name):
                    open_["store", name] = step.at_s
                case RestoreStore(name):
                    del open_["store", name]
                case _:
                    pass
        assert not open_
        assert round.steps[-1].at_s <= FAULTS_END_BY_S


def test_the_api_server_is_paused_for_a_bounded_time() -> None:
    for round in _rounds():
        pauses = [s.at_s for s in round.steps if isinstance(s.action, PauseApiServer)]
        resumes = [s.at_s for s in round.steps if isinstance(s.action, ResumeApiServer)]
        lengths = [b - a for a, b in zip(pauses, resumes, strict=True)]
        assert all(0 < length <= MAX_API_PAUSE_S + 0.1 for length in lengths)


def test_faults_overlap_and_all_kinds_occur() -> None:
    kinds = {type(s.action) for r in _rounds() for s in r.steps}
    assert kinds == set(get_args(FaultAction))
    overlapping = [r for r in _rounds() if any(_overlap(a, r) for a in r.steps)]
    assert len(overlapping) > len(_rounds()) / 4


def _overlap(step: ChaosStep, round: Round) -> bool:
    """Whether something else begins while a node is frozen or partitioned."""
    if not isinstance(step.action, Freeze | PartitionNetwork):
        return False
    node = step.action.node
    ends = [s.at_s for s in round.steps if s.action in (Thaw(node), HealNetwork(node))]
    until_s = min(ends, default=FAULTS_END_BY_S)
    begins = [s.at_s for s in round.steps if not isinstance(s.action, Thaw | HealNetwork)]
    return any(step.at_s < at_s < until_s for at_s in begins)


def test_most_nodes_die_at_once_in_some_rounds() -> None:
    actions = [s.action for r in _rounds() for s in r.steps]
    sizes = [len(a.nodes) for a in actions if isinstance(a, KillNodes)]
    assert {1, 2, NODES - 1} <= set(sizes)


def test_a_plan_can_be_limited_to_some_kinds_of_faults() -> None:
    plan = make_plan(1, 4, nodes=NODES, topologies=("one",), faults=(Fault.LEADER, Fault.FREEZE))
    kinds = {type(s.action).__name__ for r in plan.rounds for s in r.steps}
    assert kinds <= {"KillLeader", "Freeze", "Thaw"}


def test_steps_are_in_the_order_of_their_times() -> None:
    for round in _rounds():
        assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(round.steps))


def test_every_kind_of_fault_is_documented() -> None:
    table = (ROOT / "docs/chaos.md").read_text().partition("\n## Faults\n")[2]
    assert [f.value for f in Fault if f"`{f.value}`" not in table] == []
