"""A line of input becomes a command, or a message with possible commands."""

import pytest

from rekindle_testing.console.commands import (
    USAGE,
    AddNodes,
    CommandError,
    FreezeCommand,
    HealNetworkCommand,
    Help,
    Kill,
    NodeStates,
    PartitionNetworkCommand,
    Quit,
    Status,
    ThawCommand,
    parse_command,
    usage,
)
from rekindle_testing.console.table import table

NODE_STATES = NodeStates(
    running=("node-1", "node-2", "node-3", "node-4"),
    killed=frozenset({"node-0"}),
    frozen=frozenset({"node-3"}),
    partitioned=frozenset({"node-2", "node-4"}),
)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("add-node", AddNodes(1)),
        ("add-node 3", AddNodes(3)),
        ("kill node-1", Kill(("node-1",))),
        ("kill node-2  node-1 node-2\n", Kill(("node-2", "node-1"))),
        ("kill node-3", Kill(("node-3",))),
        ("freeze node-1 node-2", FreezeCommand(("node-1", "node-2"))),
        ("thaw node-3", ThawCommand(("node-3",))),
        ("thaw", ThawCommand(("node-3",))),
        ("partition node-1", PartitionNetworkCommand(("node-1",))),
        ("heal node-4", HealNetworkCommand(("node-4",))),
        ("heal", HealNetworkCommand(("node-2", "node-4"))),
        ("status", Status()),
        ("help", Help()),
        ("quit", Quit()),
    ],
)
def test_a_line_is_a_command(line: str, command: object) -> None:
    assert parse_command(line, NODE_STATES) == command


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "unknown command ''; commands: add-node, kill"),
        ("kil node-1", "unknown command 'kil'; did you mean kill?"),
        ("reboot", "unknown command 'reboot'; commands: add-node, kill"),
        ("add-node 0", "from 1 to 9, got: 0"),
        ("add-node 10", "from 1 to 9, got: 10"),
        ("add-node two", "from 1 to 9, got: two"),
        ("add-node 1 2", "from 1 to 9, got: 1 2"),
        ("kill", "kill needs the name of a node; running: node-1, node-2, node-3, node-4"),
        ("kill node-0", "node-0 was killed; running: node-1"),
        ("kill node-9", "there is no node node-9; running: node-1"),
        ("freeze node-3", "node-3 is frozen already"),
        ("thaw node-1", "node-1 is not frozen; frozen: node-3"),
        ("partition node-2", "node-2 is partitioned already"),
        ("heal node-1", "node-1 is not partitioned; partitioned: node-2, node-4"),
        ("quit now", "quit takes no arguments, got: now"),
    ],
)
def test_an_impossible_command_names_possible_ones(line: str, message: str) -> None:
    with pytest.raises(CommandError) as refused:
        parse_command(line, NODE_STATES)
    assert message in str(refused.value)


@pytest.mark.parametrize(("line", "message"), [("thaw", "frozen"), ("heal", "partitioned")])
def test_thaw_and_heal_without_such_a_node_are_errors(line: str, message: str) -> None:
    with pytest.raises(CommandError, match=f"no node is {message}"):
        parse_command(line, NodeStates(("node-1",)))


def test_usage_has_a_line_for_each_command() -> None:
    assert [line.split()[0] for line in usage().splitlines()] == [name for name, _, _ in USAGE]


def test_columns_are_aligned() -> None:
    assert table([("A", "B"), ("long", "x")]) == "A      B\nlong   x"
