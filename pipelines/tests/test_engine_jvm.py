"""The JVM beside the process: its command line, its archive, its death."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from engine_fixtures import nasty_epochs, topology

from rekindle.engine.failure import EngineLost
from rekindle.engine.model import State
from rekindle.engine.spark import cds, jvm
from rekindle.engine.spark import session as sessions

pyspark = pytest.importorskip("pyspark")


def spec_of(directory: Path) -> jvm.JvmSpec:
    for name in ("bin/java", "jars/b.jar", "jars/a.jar", "jars/slf4j-api-2.jar"):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return jvm.JvmSpec(directory / "bin/java", jvm.find_jars(directory))


def test_the_class_path_is_sorted(tmp_path: Path) -> None:
    assert [j.name for j in spec_of(tmp_path).jars] == ["slf4j-api-2.jar", "a.jar", "b.jar"]


def test_an_archive_serves_only_the_jvm_flags_and_jars_it_was_made_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(tmp_path)
    archive = tmp_path / "spark.jsa"
    assert cds.flags_for(spec, None) == ()
    with caplog.at_level(logging.WARNING):
        assert cds.flags_for(spec, archive) == ()
    assert "rekindle.engine.spark.training" in caplog.text
    archive.write_text("classes")
    cds.write_key(spec, archive)
    assert f"-XX:SharedArchiveFile={archive}" in cds.flags_for(spec, archive)
    bigger = jvm.JvmSpec(spec.java, spec.jars, heap="1g")
    assert cds.flags_for(bigger, archive) == ()
    (tmp_path / "jars/a.jar").write_text("another version")
    assert cds.flags_for(spec, archive) == ()


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
def test_a_jvm_that_dies_is_an_error_at_once(tmp_path: Path) -> None:
    from rekindle.engine.spark.chain import SparkChain

    died = threading.Event()
    spark = sessions.start_session("test", data_dir=tmp_path, on_death=lambda _: died.set())
    compiled = topology('- {name: a, inputs: [rows], sql: "SELECT * FROM rows"}', "a")
    chain = SparkChain(compiled.segments[0], compiled, spark)
    epochs = nasty_epochs(1, 1, 10)
    chain.process(State(), epochs)
    running = sessions.current_jvm()
    assert running is not None
    killed = time.monotonic()
    os.kill(running.process.pid, signal.SIGKILL)
    assert died.wait(5)
    with pytest.raises(EngineLost, match="operator a, epochs 0 to 0"):
        chain.process(State(), epochs)
    assert time.monotonic() - killed < 5
    sessions.stop_session(spark)
    again = sessions.start_session("test", data_dir=tmp_path)
    assert again.range(3).count() == 3
    sessions.stop_session(again)
