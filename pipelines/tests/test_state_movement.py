"""State movements while everything fails: the newcomer has exactly the donor's state, nothing that
it needs is truncated (I5), memory is bounded, and each session ends.

Random histories of deaths, restarts, freezes, lossy links and coordinator restarts, some of them
aimed at the parties of a session at each of its steps. Mutants of the protocol show that the
properties can fail.

Design: docs/design/state-movement.md.
Paper: Flux (Shah et al. 2004), sections 3.5 and 5.3.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from movement_world import LONGEST_S, REPLAY_S, STEP_S, World
from random_histories import histories

from rekindle.exchange.state_mover.messages import Replica
from rekindle.exchange.state_mover.phases import NewcomerPhase
from rekindle.topology.model import Slot

pytestmark = pytest.mark.simulated

ACTIONS = (
    *["run"] * 12,
    *("kill", "kill", "kill", "reboot", "freeze", "thaw", "thaw", "cut", "mend", "mend", "drain"),
    *("kill_donor", "kill_newcomer", "kill_upstream", "reboot_donor", "reboot_newcomer"),
    *("reboot_upstream", "freeze_newcomer", "freeze_donor", "freeze_upstream", "diverge_donor"),
    *("coordinator", "coordinator", "zombie", "lossy", "lossy", "calm", "calm", "disk"),
)
HISTORIES = histories(ACTIONS, 30)
SIZES = st.tuples(st.integers(1, 3), st.integers(2, 3), st.integers(1, 2))
"""The number of replicas of `src`, `mid` and `end`."""


def act(world: World, action: str, number: int) -> None:
    action, target = aimed(world, action, number)
    match action:
        case "run":
            world.run(1 + number % 40)
        case "kill":
            world.kill(target)
        case "reboot":
            world.reboot(target)
        case "freeze" if target in world.nodes:
            world.nodes[target].frozen = True
        case "thaw":
            world.thaw(target)
        case "cut":
            other = picked(world, number // 7)
            world.cut |= {(target, other), *([(other, target)] if number % 2 else [])}
            if number % 3 == 0:
                world.cut |= {(None, target)}  # None: the coordinator
        case "mend":
            world.cut.clear()
        case "drain":
            world.drain(target)
        case "diverge":
            world.diverged.add(target)
        case "coordinator":
            world.restart_coordinator()
        case "zombie":
            world.restart_coordinator(keep_old=True)
        case "lossy":
            world.loss, world.duplicates = 0.3 * (number % 3) / 2, 0.2 * (number % 2)
            world.delay, world.damage = 1 + number % 8, 0.1 * (number % 2)
        case "calm":
            world.loss = world.duplicates = world.damage = world.disk_fails = 0.0
            world.delay = 1
        case "disk":
            world.disk_fails = 0.05
    world.run(1)


def aimed(world: World, action: str, number: int) -> tuple[str, Replica]:
    """The replica that an action is about; `kill_donor` and the like choose a party of a session
    in progress."""
    verb, _, role = action.partition("_")
    if not role:
        return action, picked(world, number)
    for replica in [*world.pods]:
        order = world.coordinator.core.directive_for(replica).order
        if order is None:
            continue
        found = {"donor": order.donor, "newcomer": replica}.get(role)
        upstream = (
            [
                n.replica
                for source in world.inputs[world.nodes[replica].partition]
                for n in world.serving(source)
            ]
            if replica in world.nodes
            else []
        )
        if found is None and upstream:
            found = upstream[number % len(upstream)]
        if found is not None:
            return verb, found
    return "run", picked(world, number)


def picked(world: World, number: int) -> Replica:
    pods = [*world.pods]
    return pods[number % len(pods)]


def play(seed: int, sizes: tuple[int, int, int], history: list[str]) -> World:
    world = World(seed, *sizes)
    world.run(12)
    for action in history:
        act(world, action, world.random.randrange(1000))
        if world.violations:
            break
    return world


@given(st.integers(0, 2**16), SIZES, HISTORIES)
def test_no_history_moves_a_wrong_state_or_truncates_what_is_needed(
    seed: int, sizes: tuple[int, int, int], history: list[str]
) -> None:
    """And then each session ends, and all is redundant."""
    world = play(seed, sizes, history)
    assert world.violations == []
    world.heal()
    assert unsettled_in_the_end(world) == []
    assert world.violations == []


@pytest.mark.parametrize("seed", range(3))
def test_a_newcomer_that_does_not_hear_of_the_end_still_finds_its_inputs(seed: int) -> None:
    world = play_abandonment_unknown_to_newcomer(seed)
    assert [replica for replica, _ in world.moved] == [Replica(Slot("mid", 0, 1), 2)]
    assert world.violations == []


def play_abandonment_unknown_to_newcomer(seed: int) -> World:
    """A session is given up while the newcomer, which has all chunks, is frozen and cut off from
    the coordinator: it goes on later, and starts."""
    world = World(seed, src=1, mid=2, end=1)
    world.run(12)
    world.kill(Replica(Slot("mid", 0, 1), 1))
    newcomer = Replica(Slot("mid", 0, 1), 2)
    for _ in range(200):
        world.run(1)
        node = world.nodes.get(newcomer)
        progress = node.newcomer.report().progress if node is not None else None
        if progress is not None and progress.phase is NewcomerPhase.INSTALLING:
            world.nodes[newcomer].frozen = True
            break
    world.cut |= {(None, newcomer), (newcomer, None)}
    world.diverged.add(Replica(Slot("mid", 0, 0), 1))
    world.run(60)
    world.thaw(newcomer)
    world.run(60)
    return world


def unsettled_in_the_end(world: World) -> list[str]:
    """What is not as without failures after the time within which each session ends."""
    for _ in range(int(LONGEST_S / STEP_S)):
        world.run(1)
        if not world.unsettled():
            return []
    moving = world.moving()
    world.run(int(REPLAY_S / STEP_S))
    return moving + world.unsettled()
