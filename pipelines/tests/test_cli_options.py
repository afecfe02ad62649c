"""Every option refuses values that its command cannot use, with a usage error."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle import cli
from rekindle.cli import COMMANDS, _parser, main
from rekindle.cli import run as run_module
from rekindle.connectors.cuts import MAX_EPOCH

HUGE = "9" * 5000
NOT_UTF8 = "a\udcff"
WHOLE = ["-1", "nan", "inf", "1.5", "", HUGE, NOT_UTF8]
SECONDS = ["0", "-1", "nan", "inf", "1e300", "86401", "x", "", NOT_UTF8]
DURATION = ["0s", "-5m", "15", "nan", "9999999d", f"{HUGE}s", "soon", "", NOT_UTF8]
NAME = ["", "A", "a/b", "a b", "-a", "a?", "..", "a" * 254, NOT_UTF8]
PATH = ["", NOT_UTF8]
REFUSED = {
    ("validate", "FILE"): [""],
    ("validate", "--against"): [""],
    ("validate", "--namespace"): NAME,
    ("validate", "--kubeconfig"): [""],
    ("validate", "--context"): [""],
    ("graph", "FILE"): [""],
    ("graph", "--format"): ["", "0", "gif", NOT_UTF8],
    ("graph", "--output"): [""],
    ("graph", "--svg"): [""],
    ("run", "FILE"): [""],
    ("run", "--input"): PATH,
    ("run", "--cuts"): [""],
    ("run", "--output"): PATH,
    ("run", "--show"): [""],
    ("run", "--until-epoch"): [*WHOLE, str(10**12)],
    ("run", "--epochs-per-job"): [*WHOLE, "0"],
    ("run", "--spark-log"): PATH,
    ("status", "TOPOLOGY"): NAME,
    ("status", "--namespace"): NAME,
    ("status", "--kubeconfig"): [""],
    ("status", "--context"): [""],
    ("status", "--interval"): SECONDS,
    ("tail", "TOPOLOGY"): NAME,
    ("tail", "QUERY"): [""],
    ("tail", "--namespace"): NAME,
    ("tail", "--kubeconfig"): [""],
    ("tail", "--context"): [""],
    ("tail", "--from-epoch"): WHOLE,
    ("tail", "--address"): [
        "",
        "localhost",
        "grpc://localhost:8816",
        "localhost:",
        "localhost:99999",
        "localhost:x",
    ],
    ("plan", "TOPOLOGY"): NAME,
    ("plan", "--namespace"): NAME,
    ("plan", "--kubeconfig"): [""],
    ("plan", "--context"): [""],
    ("plan", "--file"): PATH,
    ("plan", "--nodes"): PATH,
    ("plan", "--instance"): PATH,
    ("plan", "--lose"): ["", "a,", "A", NOT_UTF8],
    ("plan", "--add"): ["", "3", "2x4,8Gi", "2x4cpu", "xx4cpu,8Gi", "2xncpu,8Gi", HUGE, NOT_UTF8],
    ("plan", "--effort"): WHOLE,
    ("plan", "--max-nodes"): WHOLE,
    ("timeline", "TOPOLOGY"): NAME,
    ("timeline", "--namespace"): NAME,
    ("timeline", "--kubeconfig"): [""],
    ("timeline", "--context"): [""],
    ("timeline", "--output"): [*PATH, "t", "t.xyz", ".svg"],
    ("timeline", "--since"): DURATION,
}
CHECKED_LATER = {("run", "--master")}
"""By the reference execution: `test_a_master_that_is_not_local_is_refused_at_once`."""


@pytest.fixture(autouse=True, scope="module")
def one_parser() -> Iterator[None]:
    """One parser of all commands, for all values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_parser", functools.cache(_parser))
        yield


def options() -> set[tuple[str, str]]:
    """All options with a value, of all commands, by their long names."""
    (commands,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = set()
    for name, parser in commands.choices.items():
        for action in parser._actions:
            if action.nargs != 0:
                label = action.option_strings[-1] if action.option_strings else action.metavar
                found.add((name, str(label)))
    return found


def test_all_options_of_all_commands_are_tried() -> None:
    assert options() == set(REFUSED) | CHECKED_LATER
    assert {command for command, _ in REFUSED} == set(COMMANDS) - {"warm-up"}


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [(*option, value) for option, values in REFUSED.items() for value in values],
)
def test_a_wrong_value_is_a_usage_error(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ["t"] if option == "QUERY" else []
    given = [f"{option}={value}", "x"] if option.startswith("--") else ["--", *before, value]
    with pytest.raises(SystemExit) as end:
        main([command, *given])
    assert end.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"rekindle {command}: error: argument ")
    assert option in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "t", "--until-epoch=-3"], "-3 is not a whole number of at least 0 and at most 99"),
        (["run", "t", "--epochs-per-job=x"], "x is not a whole number of at least 1"),
        (["status", "t", "--interval=0"], "0 is not a number of seconds from 0.1 to 86400"),
        (["timeline", "t", "--since=1"], "1 is not a duration such as 90s, 15m or 2h, of at most"),
        (["timeline", "t", "-o", "t"], "t does not end in .svg, .png or .pdf"),
        (["run", "t", "--output", ""], "argument --output: is empty"),
        (
            ["tail", "t", "q", "--address=localhost"],
            "localhost is not HOST:PORT, such as localhost:8816",
        ),
        (["status", "A"], "A is not a name in Kubernetes: a-z, 0-9, - and ."),
    ],
)
def test_the_message_says_what_can_be_used(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "-", "--until-epoch", "0", "--epochs-per-job", "1", "--input", "ä b"],
        ["run", NOT_UTF8, "--until-epoch", str(10**12 - 1), "--epochs-per-job", str(10**30)],
        ["status", "a.b-1", "--interval", "0.1", "-n", "x"],
        ["timeline", "a", "--since", "3650d", "-o", "dir/t.PDF"],
        ["tail", "a", "q", "--address", "[::1]:65535", "--address", "10.0.0.1:1"],
    ],
)
def test_values_at_the_limits_are_accepted(arguments: list[str]) -> None:
    _parser().parse_args(arguments)


def test_the_last_epoch_of_a_run_is_that_of_sources() -> None:
    assert run_module.MAX_EPOCH == MAX_EPOCH


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"- 1\n- 2\n", ""),
        (b"contexts: 5\n", ""),
        (b"a: [", "while parsing"),
        (b"clusters: [\xff]", "can't decode byte 0xff"),
        (b"", "is empty"),
    ],
)
def test_a_file_that_is_no_kubeconfig_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, cause: str
) -> None:
    file = tmp_path / "config"
    file.write_bytes(content)
    assert main(["status", "flights", "--kubeconfig", str(file)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("rekindle status: no cluster: ")
    assert str(file) in message
    assert cause in message
