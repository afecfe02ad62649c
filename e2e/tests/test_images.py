"""`make images` without a container engine: the choice of an engine and of a base image, command
lines, and checks of what the process in a new container prints."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rekindle_testing.images import base, engines, image_checks, programs
from rekindle_testing.images.engines import ContainerEngine, EngineKind, ImageConfig, choose
from rekindle_testing.images.errors import ImageError
from rekindle_testing.images.image_runs import (
    FINDINGS_PREFIX,
    IMAGES,
    OPERATOR,
    PIPELINES,
    ContainerRun,
    config_problems,
    finding_problems,
    read_findings,
    run_problems,
)
from rekindle_testing.paths import ROOT

WORK = Path("/work")
DOCKER, PODMAN, BUILDAH = (ContainerEngine(kind, WORK) for kind in EngineKind)
every_engine = pytest.mark.parametrize("engine", [DOCKER, PODMAN, BUILDAH], ids=lambda e: e.kind)
FROM_A_START = {  # findings of `image_checks.py` in a container of the operator's image
    "user": 10001,
    "read_only": True,
    "writable": ["/tmp"],
    "process_1": "tini",
    "java": None,
    "pyspark": None,
    "bytes": 200_000_000,
}


def remove_unused() -> ModuleType:
    """It is no part of a package: a build copies the file."""
    path = ROOT / "images" / "remove_unused.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- which container engine -------------------------------------------------


def working(*kinds: EngineKind) -> Callable[[EngineKind], bool]:
    return lambda kind: kind in kinds


def test_the_first_engine_that_works_is_taken() -> None:
    assert choose({}, working(*EngineKind)) is EngineKind.DOCKER
    assert choose({}, working(EngineKind.PODMAN, EngineKind.BUILDAH)) is EngineKind.PODMAN
    assert choose({}, working()) is None


def test_a_named_engine_must_work() -> None:
    named = {"ENGINE": "buildah"}
    assert choose(named, working(*EngineKind)) is EngineKind.BUILDAH
    with pytest.raises(ImageError, match="buildah, which does not work: see `buildah --version`"):
        choose(named, working(EngineKind.DOCKER))
    with pytest.raises(ImageError, match="it can be one of docker, podman, buildah"):
        choose({"ENGINE": "kaniko"}, working(*EngineKind))


# --- which base -------------------------------------------------------------


def never() -> str:
    raise AssertionError("no base is to be made")


def test_a_base_is_made_only_where_no_registry_is_reached() -> None:
    file = "ARG BASE=docker.io/library/debian:x@sha256:1\nFROM ${BASE}\n"
    requested: list[str] = []

    def reached(host: str) -> bool:
        requested.append(host)
        return True

    assert base.choose({}, file, reached, never) is None
    assert requested == ["registry-1.docker.io"]
    assert base.choose({}, file, lambda host: False, lambda: "made") == "made"
    assert base.choose({"BASE": "mine"}, file, lambda host: False, never) == "mine"


def test_images_share_one_base_which_is_pinned() -> None:
    bases = {base.default_of((ROOT / f"images/{i.name}/Dockerfile").read_text()) for i in IMAGES}
    assert len(bases) == 1
    assert re.fullmatch(r"docker\.io/library/debian:bookworm-slim@sha256:[0-9a-f]{64}", bases.pop())


def test_a_registry_is_named_by_an_image() -> None:
    assert base.registry("docker.io/library/debian:x") == "registry-1.docker.io"
    assert base.registry("registry.example:5000/debian:x") == "registry.example:5000"


# --- command lines ----------------------------------------------------------


@every_engine
def test_engines_build_the_same_file_with_the_same_arguments(engine: ContainerEngine) -> None:
    command = engine.build(
        engine.tag("operator", "1.2"),
        Path("images/operator/Dockerfile"),
        Path("/src"),
        base="debian",
        certificates=Path("/ca.crt"),
    )
    at = command.index("--file")
    assert command[at : at + 2] == ["--file", "images/operator/Dockerfile"]
    rest = ["--build-arg", "BASE=debian", "--secret", "id=certificates,src=/ca.crt", "/src"]
    assert command[at + 4 :] == rest
    assert command[at + 3].endswith("rekindle/operator:1.2")
    assert "BASE" not in " ".join(engine.build("t", Path("f"), Path("/src")))


def test_buildah_keeps_all_that_it_makes_and_mounts_to_itself() -> None:
    command = BUILDAH.build("t", Path("f"), Path("/src"))
    assert tuple(command[: len(engines.UNSHARE_COMMAND)]) == engines.UNSHARE_COMMAND
    assert {"--root=/work/storage", "--runroot=/work/run"} <= set(command)
    assert BUILDAH.tag("operator", "1") == "localhost/rekindle/operator:1"
    assert BUILDAH.save("localhost/rekindle/operator:1", Path("/x.tar"))[-1] == (
        "docker-archive:/x.tar:rekindle/operator:1"
    )


@pytest.mark.parametrize("engine", [DOCKER, PODMAN], ids=lambda e: e.kind)
def test_a_container_has_what_a_pod_has(engine: ContainerEngine) -> None:
    command = engine.run("t", "n", writable=("/tmp",), command=("python", "-"))
    for option in ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"):
        assert option in command
    # Spark's libraries are loaded from there, which tmpfs does not allow by default.
    assert "/tmp:rw,exec,mode=1777" in command
    assert command[-3:] == ["t", "python", "-"]


@every_engine
def test_an_images_config_is_read(engine: ContainerEngine) -> None:
    config = {"User": "1:2", "Env": ["A=b=c"], "Entrypoint": ["tini", "--"], "Cmd": ["x"]}
    documents = {EngineKind.BUILDAH: {"OCIv1": {"config": config}}}
    document = documents.get(engine.kind, [{"Config": config}])
    expected = ImageConfig(
        "1:2", {"A": "b=c"}, entry_point=("tini", "--"), command=("x",), directory="/"
    )
    assert engine.parse_config(json.dumps(document)) == expected


# --- what an image must say -------------------------------------------------


def test_an_image_has_a_numeric_user_and_tini() -> None:
    good = ImageConfig("10001:10001", {}, ("tini", "--"), ("python",), "/")
    assert config_problems(good) == []
    for user in ("", "root", "0", "0:0", "rekindle"):
        (problem,) = config_problems(ImageConfig(user, {}, ("tini", "--"), (), "/"))
        assert problem.startswith(f"USER is {user!r}")
    assert config_problems(ImageConfig("1", {}, (), (), "/")) == ["ENTRYPOINT is [], not tini"]


def test_a_start_must_end_and_print_as_expected() -> None:
    start = ContainerRun("it", exit_code=2, expected_output="is not set")
    assert run_problems(start, 2, "X is not set") == []
    (problem,) = run_problems(start, 1, "Traceback\nImportError: no x")
    assert problem.startswith("it: expected exit code 2 and 'is not set', got exit code 1")
    assert problem.endswith("ImportError: no x")
    assert run_problems(start, 2, "")


def test_findings_are_read_from_the_line_that_marks_them() -> None:
    assert read_findings(f'a warning\n{FINDINGS_PREFIX}{{"user": 1}}\n') == {"user": 1}
    assert read_findings("a warning\n") == {}


def test_each_finding_that_is_wrong_is_named() -> None:
    assert finding_problems(OPERATOR, FROM_A_START) == []
    wrong = finding_problems(
        OPERATOR, {**FROM_A_START, "java": "/usr/bin/java", "read_only": False}
    )
    assert wrong == [
        "operator: read_only is False, expected True",
        "operator: java is '/usr/bin/java', expected None",
    ]
    large = finding_problems(OPERATOR, {**FROM_A_START, "bytes": (OPERATOR.max_mb + 1) * 1_000_000})
    assert large == [f"operator: {OPERATOR.max_mb + 1} MB, more than {OPERATOR.max_mb} MB"]


def test_spark_must_use_the_archive_and_compute_right() -> None:
    findings = {
        **FROM_A_START,
        "writable": list(PIPELINES.writable),
        "archive_mapped": False,
        "rows": [["a", 3.0]],
    }
    names = [problem.split()[1] for problem in finding_problems(PIPELINES, findings)]
    assert names == ["archive_mapped", "rows"]


def test_the_script_inside_reports_all_findings_that_are_checked() -> None:
    assert image_checks.operator()["version"]
    assert set(image_checks.common(file_sizes=[1, 2])) == set(FROM_A_START)


# --- lists of what is not used ----------------------------------------------


def test_what_a_list_names_is_removed(tmp_path: Path) -> None:
    module = remove_unused()
    for name in ("p/tests/a.py", "p/q/tests/b.py", "p/tests.py", "p/lib.so", "p/lib.so.1.0.0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    globs = module.parse("# a comment\np/**/tests/  # why\n\np/lib.so.*.*.*\np/gone\n")
    assert module.remove(tmp_path, globs) == ["p/gone"]
    assert {p.name for p in tmp_path.rglob("*")} == {"p", "q", "tests.py", "lib.so"}


@pytest.mark.parametrize("name", ["build", OPERATOR.name, PIPELINES.name])
def test_locks_name_no_dependency_without_hashes(name: str) -> None:
    text = (ROOT / f"images/{name}.lock").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert entries
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)


def test_images_and_tests_have_the_same_versions() -> None:
    tested = versions(ROOT / "requirements.lock")
    for image in IMAGES:
        shipped = versions(ROOT / f"images/{image.name}.lock")
        other = {n: v for n, v in shipped.items() if n in tested and tested[n] != v}
        assert other == {}, image.name


def versions(lock: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lock.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


# --- programs ---------------------------------------------------------------


def test_a_program_that_fails_is_quoted_and_its_log_kept(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with pytest.raises(ImageError, match=r"building failed with exit code 3:\nno space\nSee "):
        programs.run_or_fail("building", ["sh", "-c", "echo no space; exit 3"], log, timeout_s=20)
    assert log.read_text() == "no space\n"


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 20
    status = Path(f"/proc/{pid}/status")
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.process
def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    with pytest.raises(ImageError, match="did not end within 1 s"):
        programs.run(["sh", "-c", f"sleep 600 & echo $! > {marker}; wait"], timeout_s=1)
    wait_for_end(int(marker.read_text()))


@pytest.mark.process
def test_a_program_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    command = ["sh", "-c", f"echo $$ > {marker}.new; mv {marker}.new {marker}; exec sleep 600"]
    script = f"from rekindle_testing.images import programs; programs.run({command}, timeout_s=600)"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        deadline = time.monotonic() + 20
        while not marker.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    wait_for_end(int(marker.read_text()))


def test_a_missing_program_is_named() -> None:
    assert not programs.works(["no-such-program"])
    with pytest.raises(ImageError, match="cannot start no-such-program"):
        programs.run(["no-such-program"], timeout_s=1)
