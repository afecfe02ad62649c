"""`rekindle plan`: arguments, files, what is printed."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.cli import main, main_process

EXAMPLE = Path(__file__).parents[2] / "examples/flights/topology.yaml"
INSTANCE = {
    "capacity": {"cpu": 2},
    "operators": {"clean": {"cpu": "500m"}, "hot": {"cpu": 1.5}, "daily": {"cpu": 1}},
    "queries": {
        "alerts": {"priority": 100, "operators": ["clean", "hot"]},
        "report": {"priority": 10, "operators": ["clean", "daily"]},
    },
}


def nodes_file(directory: Path) -> str:
    allocatable = {"cpu": "2", "memory": "4Gi"}
    nodes = [
        {"kind": "Node", "metadata": {"name": name}, "status": {"allocatable": allocatable}}
        for name in ("a", "b", "c", "d")
    ]
    path = directory / "nodes.yaml"
    path.write_text(yaml.safe_dump({"kind": "List", "items": nodes}))
    return str(path)


def test_an_instance_is_solved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(INSTANCE))
    assert main(["plan", "--instance", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.pop("seconds") >= 0
    assert answer == {"queries": ["alerts"], "profit": 100, "bound": 100}


def test_a_plan_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["-f", str(EXAMPLE), "--nodes", nodes_file(tmp_path)]
    assert main(["plan", *files, "--lose", "a,b,c"]) == 0
    assert "flights/route-report waits (priority 10)" in capsys.readouterr().out
    assert main(["plan", *files, "--lose", "a,b,c", "--add", "2x4cpu,8Gi"]) == 0
    assert "waits" not in capsys.readouterr().out


def test_a_plan_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    listed: list[Any] = yaml.safe_load(Path(nodes_file(tmp_path)).read_text())["items"]

    class Cluster:
        def topology(self, name: str) -> Any:
            return yaml.safe_load(EXAMPLE.read_text())

        def nodes(self) -> list[Any]:
            return listed

        def pods(self) -> list[Any]:
            requests = {"cpu": "2", "memory": "4Gi"}
            spec = {"nodeName": "d", "containers": [{"resources": {"requests": requests}}]}
            meta = {"name": "other", "namespace": "default", "uid": "1", "resourceVersion": "1"}
            return [{"metadata": meta, "spec": spec, "status": {"phase": "Running"}}]

    monkeypatch.setattr("rekindle.cli.kubernetes_api.open_cluster", lambda args: Cluster())
    assert main(["plan", "flights", "--lose", "a,b,c"]) == 0
    out = capsys.readouterr().out
    assert out.count(" waits ") == 3, "a pod of another owner has the node that is left"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name topologies of a cluster"),
        (["flights", "-f", "x.yaml"], "name topologies of a cluster"),
        (["-f", "x.yaml"], "-f needs --nodes"),
        (["flights", "--instance", "x.json"], "--instance is a problem by itself"),
    ],
)
def test_what_is_missing_or_too_much_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is not JSON"),
        ("\udcff", "is not JSON"),
        ("[]", "the instance: must be an object"),
        ('{"capacity": {"cpu": "1e999999"}}', "capacity.cpu: '1e999999' is not a quantity"),
        ('{"capacity": {"cpu": -1}}', "capacity.cpu: -1 is negative"),
        ('{"capacity": {"cpu": NaN}}', "capacity.cpu: nan is not a quantity"),
    ],
)
def test_a_wrong_instance_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "instance.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    if text.startswith("{"):
        given = json.loads(text)
        path.write_text(json.dumps({"operators": {}, "queries": {}} | given))
    assert main(["plan", "--instance", str(path)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("priority", [10**400, 10**16, -1, 1e308, True, "1", None])
def test_a_priority_is_a_whole_number_that_sums_can_hold(
    priority: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "instance.json"
    queries = {"alerts": {"priority": priority, "operators": ["clean"]}}
    path.write_text(json.dumps(INSTANCE | {"queries": queries}))
    assert main(["plan", "--instance", str(path)]) == 1
    assert "queries.alerts.priority: must be a whole number from 0" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"items: 3", b"\xff\xfe", b"3", b"", b"[1, 2]", b"{"])
def test_a_file_without_nodes_is_refused(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_bytes(text)
    assert main(["plan", "-f", str(EXAMPLE), "--nodes", str(path)]) == 1
    err = capsys.readouterr().err
    assert f"rekindle plan: {path} " in err or "has no metadata.name" in err


def test_nodes_to_add_have_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "flights", "--add", "3"])
    assert "write it like 2x4cpu,8Gi" in capsys.readouterr().err


def test_kubectl_finds_the_command_line_as_a_plugin() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="kubectl-rekindle")
    assert script.load() is main_process
