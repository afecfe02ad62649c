"""Commands for a running cluster: parses and validates a line of text.

Pure: knows the names and states of the machines, not the machines.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

MAX_ADDED_NODES = 9


@dataclass(frozen=True, slots=True)
class AddNodes:
    count: int


@dataclass(frozen=True, slots=True)
class Kill:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FreezeCommand:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ThawCommand:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartitionNetworkCommand:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HealNetworkCommand:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Status:
    pass


@dataclass(frozen=True, slots=True)
class Help:
    pass


@dataclass(frozen=True, slots=True)
class Quit:
    pass


Command = (
    AddNodes
    | Kill
    | FreezeCommand
    | ThawCommand
    | PartitionNetworkCommand
    | HealNetworkCommand
    | Status
    | Help
    | Quit
)

# Command, arguments, meaning.
USAGE = (
    ("add-node", "[COUNT]", "start machines; returns when they are Ready"),
    ("kill", "NODE...", "like a power failure: all processes and the disk are lost"),
    ("freeze", "NODE...", "stop all processes (SIGSTOP): connections stay open"),
    ("thaw", "[NODE...]", "resume frozen nodes; all of them if none is named"),
    ("partition", "NODE...", "drop all packets between these nodes and everything else"),
    ("heal", "[NODE...]", "end the network partition; of all such nodes if none is named"),
    ("status", "", "nodes, and topologies"),
    ("help", "", "this list"),
    ("quit", "", "stop the cluster and everything on it"),
)
_NAMES = tuple(name for name, _, _ in USAGE)
_WITHOUT_ARGUMENTS: dict[str, Command] = {"status": Status(), "help": Help(), "quit": Quit()}


class CommandError(ValueError):
    """A line that cannot be executed; the message has the reason and what is possible."""


@dataclass(frozen=True, slots=True)
class NodeStates:
    """The cluster's nodes by state."""

    running: tuple[str, ...]
    killed: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    partitioned: frozenset[str] = frozenset()


def usage() -> str:
    """All commands, one a line."""
    left = [f"{name} {arguments}".rstrip() for name, arguments, _ in USAGE]
    width = max(map(len, left))
    return "\n".join(
        f"{row:<{width}}  {text}" for row, (_, _, text) in zip(left, USAGE, strict=True)
    )


def parse_command(line: str, states: NodeStates) -> Command:
    """Raises `CommandError` for an unknown command, or one that the nodes do not allow now."""
    name, *arguments = line.split() or [""]
    match name:
        case "add-node":
            return AddNodes(_count(arguments))
        case "kill":
            return Kill(_nodes(name, arguments, states))
        case "freeze":
            nodes = _nodes(name, arguments, states)
            _refuse(nodes, states.frozen, "frozen already")
            return FreezeCommand(nodes)
        case "thaw":
            return ThawCommand(_affected(name, arguments, states, states.frozen, "frozen"))
        case "partition":
            nodes = _nodes(name, arguments, states)
            _refuse(nodes, states.partitioned, "partitioned already")
            return PartitionNetworkCommand(nodes)
        case "heal":
            return HealNetworkCommand(
                _affected(name, arguments, states, states.partitioned, "partitioned")
            )
        case "status" | "help" | "quit":
            if arguments:
                raise CommandError(f"{name} takes no arguments, got: {' '.join(arguments)}")
            return _WITHOUT_ARGUMENTS[name]
        case _:
            near = difflib.get_close_matches(name, _NAMES, 1)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(_NAMES)}"
            raise CommandError(f"unknown command {name!r}; {hint}")


def _count(arguments: Sequence[str]) -> int:
    text = arguments[0] if arguments else "1"
    if len(arguments) > 1 or not text.isdecimal() or not 1 <= int(text) <= MAX_ADDED_NODES:
        raise CommandError(
            f"add-node takes a number of nodes from 1 to {MAX_ADDED_NODES}, got: "
            f"{' '.join(arguments)}"
        )
    return int(text)


def _nodes(command: str, names: Sequence[str], states: NodeStates) -> tuple[str, ...]:
    """Names of nodes that run, each once."""
    running = f"running: {', '.join(states.running) or 'none'}"
    if not names:
        raise CommandError(f"{command} needs the name of a node; {running}")
    for name in names:
        if name in states.killed:
            raise CommandError(f"{name} was killed; {running}")
        if name not in states.running:
            raise CommandError(f"there is no node {name}; {running}")
    return tuple(dict.fromkeys(names))


def _affected(
    command: str, names: Sequence[str], states: NodeStates, affected: frozenset[str], text: str
) -> tuple[str, ...]:
    """The named nodes, which must be among `affected`, the nodes in the state `text`; all of
    `affected` if none is named."""
    if not affected:
        raise CommandError(f"no node is {text}")
    nodes = _nodes(command, names or sorted(affected), states)
    for node in nodes:
        if node not in affected:
            raise CommandError(f"{node} is not {text}; {text}: {', '.join(sorted(affected))}")
    return nodes


def _refuse(nodes: Sequence[str], affected: frozenset[str], text: str) -> None:
    for node in nodes:
        if node in affected:
            raise CommandError(f"{node} is {text}")
