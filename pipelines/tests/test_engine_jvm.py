"""The JVM of a process: its command line, its archive, its exit."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
from engine_fixtures import edge_case_epochs, topology
from spark_parts import StartSession

from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.model import State
from rekindle.engine.spark import cds, jvm
from rekindle.engine.spark import session as sessions
from rekindle.engine.spark.signed_jars import is_signed

pyspark = pytest.importorskip("pyspark")


SIGNED_MANIFEST = b"Manifest-Version: 1.0\r\n\r\nName: a/Class.class\r\nSHA-256-Digest: eA==\r\n"


def write_jar(path: Path, entries: dict[str, bytes]) -> None:
    with ZipFile(path, "w") as jar:
        for name, content in entries.items():
            jar.writestr(name, content)


def spec_of(directory: Path) -> jvm.JvmSpec:
    for name in ("bin", "jars"):
        (directory / name).mkdir()
    (directory / "bin/java").write_text("java")
    signed = {
        "META-INF/MANIFEST.MF": SIGNED_MANIFEST,
        "META-INF/A.SF": b"digests",
        "META-INF/A.RSA": b"signature",
        "META-INF/services/a.Service": b"a.Class",
        "a/Class.class": b"bytes",
    }
    write_jar(directory / "jars/a.jar", signed)
    for name in ("b", "slf4j-api-2", "spark-mllib_2.13-4.3.0"):
        write_jar(directory / f"jars/{name}.jar", {f"{name}.class": b"bytes"})
    return jvm.JvmSpec(directory / "bin/java", jvm.find_jars(directory))


def test_the_class_path_has_slf4j_first_then_names_in_order_and_no_mllib(tmp_path: Path) -> None:
    assert [j.name for j in spec_of(tmp_path).jars] == ["slf4j-api-2.jar", "a.jar", "b.jar"]


def test_an_archive_serves_only_the_jvm_flags_and_jars_it_was_made_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(tmp_path)
    archive = tmp_path / "spark.jsa"
    assert cds.with_archive(spec, None) == spec
    with caplog.at_level(logging.WARNING):
        assert cds.with_archive(spec, archive) == spec
    assert "rekindle.engine.spark.training" in caplog.text
    archive.write_text("classes")
    prepared = cds.with_unsigned_jars(spec, archive)
    cds.write_key(spec, prepared, archive)
    used = cds.with_archive(spec, archive)
    assert f"-XX:SharedArchiveFile={archive}" in used.archive_flags
    assert used.jars == prepared.jars
    bigger = replace(spec, heap="1g", direct="256m")
    assert cds.with_archive(bigger, archive).archive_flags == used.archive_flags
    huge = replace(spec, heap="40g")  # its object pointers are not compressed
    assert cds.with_archive(huge, archive) == huge
    other = replace(spec, extra_flags=("-Xint",))
    assert cds.with_archive(other, archive) == other
    (tmp_path / "spark.jsa.jars/a.jar").unlink()
    assert cds.with_archive(spec, archive) == spec
    cds.with_unsigned_jars(spec, archive)
    assert cds.with_archive(spec, archive) == used
    write_jar(tmp_path / "jars/b.jar", {"b/Another.class": b"version"})
    assert cds.with_archive(spec, archive) == spec


def test_signed_jars_are_replaced_by_copies_that_an_archive_can_hold(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    prepared = cds.with_unsigned_jars(spec, tmp_path / "spark.jsa")
    changed = [(a.name, b) for a, b in zip(spec.jars, prepared.jars, strict=True) if a != b]
    copy = tmp_path / "spark.jsa.jars/a.jar"
    assert changed == [("a.jar", copy)]
    assert not is_signed(copy)
    with ZipFile(copy) as jar:
        assert {name: jar.read(name) for name in jar.namelist()} == {
            "META-INF/MANIFEST.MF": b"Manifest-Version: 1.0\r\n\r\n",
            "META-INF/services/a.Service": b"a.Class",
            "a/Class.class": b"bytes",
        }


@pytest.mark.spark
def test_no_jar_of_spark_stays_signed(tmp_path: Path) -> None:
    spec = sessions.jvm_spec()
    prepared = cds.with_unsigned_jars(spec, tmp_path / "spark.jsa")
    assert not any(is_signed(jar) for jar in prepared.jars)
    compiler = next(jar for jar in prepared.jars if jar.name.startswith("janino-"))
    assert compiler.parent == tmp_path / "spark.jsa.jars"


@pytest.mark.spark
@pytest.mark.parametrize("chosen", ["-XX:+UseParallelGC", "-XX:+UseG1GC -XX:SurvivorRatio=8"])
def test_a_users_choice_of_collector_wins(chosen: str) -> None:
    spec = sessions.jvm_spec({"spark.driver.extraJavaOptions": chosen})
    command = [str(spec.java), *spec.flags, "-XX:+PrintFlagsFinal", "-version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    flags = dict(re.findall(r" (\w+GC|SurvivorRatio) += (\w+)", printed))
    assert flags["UseSerialGC"] == "false"
    for flag in chosen.split():
        name, _, value = flag.removeprefix("-XX:").lstrip("+").partition("=")
        assert flags[name] == (value or "true")


@pytest.mark.spark
def test_flags_are_those_of_sparks_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(pyspark.__file__).parent
    printed = subprocess.run(
        [
            *(str(jvm.find_java()), "-cp", f"{home}/jars/*", "org.apache.spark.launcher.Main"),
            *("org.apache.spark.deploy.SparkSubmit", "pyspark-shell"),
        ],
        env={**os.environ, "SPARK_HOME": str(home), "SPARK_SCALA_VERSION": "2.13"},
        capture_output=True,
        check=True,
    ).stdout.decode()
    flags = [f for f in printed.replace("\n", "\0").split("\0") if f.startswith("-")]
    assert [f for f in flags if f != "-cp" and not f.startswith("-Xmx")] == list(jvm.MODULE_FLAGS)


@pytest.mark.spark
def test_a_jvm_ignores_the_signals_of_a_terminal(start_shared: StartSession) -> None:
    spark = start_shared("test")
    running = sessions.current_jvm()
    assert running is not None
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)
    for number in (signal.SIGINT, signal.SIGHUP):
        assert int(mask, 16) & 1 << (number - 1), number.name
    sessions.stop_session(spark, keep_jvm=True)


@pytest.mark.spark
def test_a_jvm_that_dies_is_an_error_at_once(start_shared: StartSession) -> None:
    from rekindle.engine.spark.chain import SparkChain

    died = threading.Event()
    spark = start_shared("test", on_exit=lambda _: died.set())
    compiled = topology('- {name: a, inputs: [rows], sql: "SELECT * FROM rows"}', "a")
    chain = SparkChain(compiled.segments[0], compiled, spark)
    epochs = edge_case_epochs(1, 1, 10)
    chain.process(State(), epochs)
    running = sessions.current_jvm()
    assert running is not None
    killed = time.monotonic()
    os.kill(running.process.pid, signal.SIGKILL)
    assert died.wait(5)
    with pytest.raises(EngineUnavailable, match="operator a, epochs 0 to 0"):
        chain.process(State(), epochs)
    assert time.monotonic() - killed < 5
    sessions.stop_session(spark)
    again = start_shared("test")
    assert again.range(3).count() == 3
    sessions.stop_session(again, keep_jvm=True)
