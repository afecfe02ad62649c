"""The command line reports problems, draws valid topologies, and starts fast."""

from __future__ import annotations

import base64
import gzip
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from rekindle.cli import COMMANDS, main
from rekindle_testing.fixtures.bad_manifests import bad_manifests, good_manifest

EXAMPLE = Path(__file__).parents[2] / "examples/flights/topology.yaml"
DOCS = Path(__file__).parents[2] / "docs/command-line.md"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    file = tmp_path / "good.yaml"
    file.write_text(yaml.safe_dump(good_manifest()))
    return file


def test_a_good_topology_is_valid(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(good)]) == 0
    assert capsys.readouterr().out == "good: valid\n"


def test_problems_are_printed_with_path_message_and_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = next(b for b in bad_manifests() if b.name == "unknown-input")
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(bad.manifest))
    assert main(["validate", str(file)]) == 1
    output = capsys.readouterr().err.splitlines()
    assert output == [
        "spec.operators[0].inputs[0]: there is no source or operator tripz (did you mean trips?)"
    ]


def test_a_local_run_needs_no_volume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = good_manifest()
    del manifest["spec"]["checkpoint"]["volume"]
    file = tmp_path / "local.yaml"
    file.write_text(yaml.safe_dump(manifest))
    assert main(["validate", str(file)]) == 1
    assert main(["validate", "--local", str(file)]) == 0
    assert main(["graph", str(file)]) == 0


def test_a_missing_file_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "/nowhere/at/all.yaml"]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["validate", "graph", "run"])
def test_a_topology_file_that_is_not_utf8_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes("kind: StreamTopology # größe".encode("latin-1"))
    assert main([command, str(file)]) == 1
    output = capsys.readouterr().err
    assert "not YAML: unacceptable character #x00f6: invalid start byte" in output
    assert "(write it in UTF-8)" in output


def test_a_damaged_input_of_a_run_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress(b"k,v\na,1\n")[:-9])
    assert main(["run", str(run_of(tmp_path, f"file://{tmp_path}/in.csv.gz"))]) == 1
    output = capsys.readouterr().err
    assert "rekindle run: source s: " in output.splitlines()[-1]
    assert "in.csv.gz: Compressed file ended before" in output


@pytest.mark.process
def test_a_run_without_pyspark_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("k,v\na,1\n")
    manifest = run_of(tmp_path, f"file://{tmp_path}/in.csv")
    code = (
        "import sys, rekindle.cli\n"
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *at: None if name == 'pyspark' else find(name, *at)\n"
        f"sys.exit(rekindle.cli.main(['run', {str(manifest)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "rekindle run: no pyspark: install rekindle[spark]"


def run_of(directory: Path, url: str) -> Path:
    """A topology file with one operator, over one file."""
    file = directory / "run.yaml"
    manifest = {
        "apiVersion": "rekindle.dev/v1alpha1",
        "kind": "StreamTopology",
        "metadata": {"name": "run"},
        "spec": {
            "checkpoint": {"store": "file:///checkpoints"},
            "sources": [
                {
                    "name": "s",
                    "schema": "k STRING, v BIGINT",
                    "files": {"url": url, "format": "csv", "rowsPerSecond": 1},
                }
            ],
            "operators": [{"name": "o", "inputs": ["s"], "sql": "SELECT k FROM s"}],
            "queries": [
                {"name": "q", "from": "o", "sink": {"files": {"url": f"file://{directory}/out"}}}
            ],
        },
    }
    file.write_text(yaml.safe_dump(manifest))
    return file


def test_the_graph_shows_segments_exchanges_tasks_and_resources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["graph", str(EXAMPLE)]) == 0
    text = capsys.readouterr().out
    for line in (
        "segment flown  ",
        "  nodes      delays -> alarms",
        "  reads      flown by hash of origin",
        "  queries    delay-alarms (priority 100)",
        "  tasks      4 = 2 partitions x 2 replicas",
        "  requests   500m CPU, 1024 MiB",
        "8 tasks in 4 segments request 4000m CPU, 8192 MiB",
        "query storm-watch (priority 50) needs storms",
    ):
        assert line in text


def test_the_drawing_is_an_svg_whose_boxes_do_not_overlap(tmp_path: Path) -> None:
    out = tmp_path / "flights.svg"
    assert main(["graph", str(EXAMPLE), "--svg", str(out)]) == 0
    root = ET.parse(out).getroot()
    boxes = [r.attrib for r in root.iter() if r.tag.endswith("rect") and "x" in r.attrib]
    frames = [tuple(float(b[k]) for k in ("x", "y", "width", "height")) for b in boxes]
    assert len(frames) == 4 + 3, "segments and queries"
    for at, (x, y, w, h) in enumerate(frames):
        for x2, y2, w2, h2 in frames[at + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y
    assert max(x + w for x, _, w, _ in frames) <= float(root.attrib["width"])


def union(directory: Path) -> Path:
    """A topology file with an operator that reads three sources."""
    source = {
        "schema": "k BIGINT, t TIMESTAMP",
        "generator": {"rowsPerSecond": 1, "columns": {"k": "sequence", "t": "timestamp"}},
    }
    selects = " UNION ALL ".join(f"SELECT k FROM {name} WHERE k > 1" for name in "abc")
    manifest = good_manifest()
    manifest["spec"]["sources"] = [{"name": name, **source} for name in "abc"]
    manifest["spec"]["operators"] = [{"name": "u", "inputs": list("abc"), "sql": selects}]
    manifest["spec"]["queries"] = [{**manifest["spec"]["queries"][0], "from": "u"}]
    file = directory / "union.yaml"
    file.write_text(yaml.safe_dump(manifest))
    return file


def test_a_box_says_what_it_reads_and_no_text_lies_on_an_edge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["graph", str(union(tmp_path)), "--format", "svg"]) == 0
    root = ET.fromstring(capsys.readouterr().out)
    texts = [t for t in root.iter() if t.tag.endswith("text")]
    in_boxes = [t for group in root if group.tag.endswith("}g") for t in group.iter()]
    assert all(t in in_boxes for t in texts)
    reads = [t.text for t in texts if (t.text or "").startswith("reads")]
    assert reads == [f"reads {name} by forward" for name in "abc"]


def test_a_box_shows_sql_and_its_tooltip_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["graph", str(union(tmp_path)), "--format", "svg"]) == 0
    text = capsys.readouterr().out
    assert ">u: SELECT k FROM a WHERE k &gt; 1 UNION ALL …<" in text
    assert "UNION ALL SELECT k FROM c WHERE k &gt; 1\n" in text


def test_mermaid_has_each_segment_query_and_exchange(tmp_path: Path) -> None:
    out = tmp_path / "flights.mmd"
    assert main(["graph", str(EXAMPLE), "--format", "mermaid", "-o", str(out)]) == 0
    lines = [line.strip() for line in out.read_text().splitlines()]
    assert lines[0] == "flowchart LR"
    assert sum(line.endswith(("]:::source", "]:::operator")) for line in lines) == 4
    assert '    s0 -->|"hash of origin"| s2'.strip() in lines
    assert 'q0(["<b>delay-alarms</b><br/>priority 100"]):::query' in lines
    assert "s2 --> q0" in lines
    assert any("WHERE delay #gt; 30<br/>4 tasks" in line for line in lines)


def test_the_documentation_shows_the_mermaid_of_the_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["graph", str(EXAMPLE), "--format", "mermaid"]) == 0
    assert f"```mermaid\n{capsys.readouterr().out}```\n" in DOCS.read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    output = capsys.readouterr().out
    assert f"examples:\n  rekindle {command}" in output


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"rekindle {metadata.version('rekindle')}\n"


@pytest.mark.process
def test_help_loads_neither_arrow_nor_sql_nor_spark() -> None:
    code = (
        "import sys, rekindle.cli\n"
        "try: rekindle.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = ('pyarrow', 'sqlglot', 'pyspark', 'pydantic', 'rich', 'matplotlib')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "run" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def end_of_process(code: str, stdout: int) -> tuple[int, str]:
    """Exit code and standard error of a process whose command is `code`. It writes `cleaned up` at
    its end, and `finalized` if the interpreter ends it."""
    program = (
        "import atexit, os, rekindle.cli\n"
        "class Object:\n"
        "    def __del__(self): os.write(2, b'finalized')\n"
        f"def command():\n"
        "    global kept\n"
        "    kept = Object()\n"
        "    atexit.register(lambda: os.write(2, b'cleaned up'))\n"
        f"    {code}\n"
        "rekindle.cli.main = command\n"
        "rekindle.cli.main_process()\n"
    )
    command = [sys.executable, "-E", "-c", program]  # -E: with buffered output
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "status"), [("return 3", 3), ("raise SystemExit(2)", 2), ("return 0", 0)]
)
def test_a_process_cleans_up_and_is_not_ended_by_the_interpreter(code: str, status: int) -> None:
    """A thread that returns from a call of Arrow Flight while the interpreter ends may crash it."""
    assert end_of_process(code, subprocess.DEVNULL) == (status, "cleaned up")


@pytest.mark.process
def test_an_unexpected_error_ends_a_process_in_the_same_way() -> None:
    code, errors = end_of_process("raise ZeroDivisionError('a mistake')", subprocess.DEVNULL)
    assert code == 1
    assert errors.endswith("ZeroDivisionError: a mistake\ncleaned up")


@pytest.mark.process
def test_output_that_cannot_be_written_is_an_error_unless_nobody_reads_it() -> None:
    with Path("/dev/full").open("w") as full:
        code, errors = end_of_process("print(1); return 0", full.fileno())
    assert code == 1
    assert errors.startswith("cleaned up")
    assert "the output cannot be written: [Errno 28] No space left on device" in errors
    read_end, write_end = os.pipe()
    os.close(read_end)
    assert end_of_process("print(1); return 0", write_end) == (0, "cleaned up")
    os.close(write_end)


@pytest.mark.process
def test_the_key_of_a_kubeconfig_is_not_left_in_a_file(tmp_path: Path) -> None:
    """The Kubernetes client writes what a kubeconfig contains to temporary files."""
    content, temporary = base64.b64encode(b"a key").decode(), tmp_path / "tmp"
    temporary.mkdir()
    cluster = {"server": "https://127.0.0.1:1", "certificate-authority-data": content}
    user = {"client-certificate-data": content, "client-key-data": content}
    config = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "rekindle.cli", "status", "t", "--kubeconfig", "kubeconfig"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("rekindle status: ")
    assert not [*temporary.iterdir()]
