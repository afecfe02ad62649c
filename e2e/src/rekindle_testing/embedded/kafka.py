"""Kafka brokers on this machine, on loopback ports, without Docker.

Their jars come once from Maven Central, through the Maven that is installed, into the cache; Java
is the one that Spark uses.  Each process is broker and controller (KRaft).  It can be killed and
started again with what it had stored.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from rekindle.directories import cache_root
from rekindle_testing.embedded.cache import content_key, make_once
from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.java import ensure_java
from rekindle_testing.embedded.processes import ChildProcess, ChildProcesses, choose_ports
from rekindle_testing.progress import OnProgress, no_progress

KAFKA = "org.apache.kafka:kafka_2.13:4.1.0"
_LOGGING = "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3"
_HEAP = "-Xmx256m"
_START_S = 120.0
_CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qg"  # any 16 bytes in base64
_LOG4J = """\
Configuration:
  status: warn
  Appenders: {Console: {name: out, PatternLayout: {pattern: "%d %p %m (%c)%n"}}}
  Loggers: {Root: {level: warn, AppenderRef: {ref: out}},
    Logger: {name: kafka.server.KafkaRaftServer, level: info}}
"""


class KafkaError(EmbeddedError):
    """The broker did not start."""


class KafkaUnavailable(EmbeddedError):
    """There is no Maven, or it could not download the broker."""


def ensure_kafka(
    on_progress: OnProgress = no_progress, environment: Mapping[str, str] | None = None
) -> Path:
    """A directory with the broker's jars. Raises KafkaUnavailable, JavaError."""
    environment = os.environ if environment is None else environment
    pom = _pom()
    entry = cache_root(environment) / "kafka" / content_key([("pom.xml", pom.encode())])
    return make_once(entry, lambda scratch: _download(scratch, pom, on_progress), on_progress)


def _download(directory: Path, pom: str, on_progress: OnProgress) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise KafkaUnavailable(
            "tests of Kafka need a broker, whose jars Maven downloads once, and there is no mvn on "
            "PATH: install Maven (Debian: apt-get install maven)"
        )
    on_progress(f"downloading {KAFKA} with Maven")
    java = ensure_java(on_progress)
    (directory / "pom.xml").write_text(pom)
    command = [maven, "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"]
    environment = {**os.environ, "JAVA_HOME": str(java)}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise KafkaUnavailable(
            f"Maven could not download {KAFKA}: {(done.stdout + done.stderr)[-2000:]}"
        )


def _pom() -> str:
    def dependency(coordinates: str) -> str:
        group, artifact, version = coordinates.split(":")
        return (
            f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
            f"<version>{version}</version></dependency>"
        )

    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>rekindle</groupId>"
        "<artifactId>kafka</artifactId><version>1</version><dependencies>"
        f"{dependency(KAFKA)}{dependency(_LOGGING)}</dependencies></project>\n"
    )


class KafkaBroker:
    """One broker; what it has stored is in `directory`. `port`: that of its clients, and
    `controller_port`: of the other controllers; None: one that is free. `properties`: more of the
    broker's settings. `listeners`: by name, the security protocols of more listeners
    (`servers_of`), whose settings are in `properties` (`listener.name.<name>.…`)."""

    def __init__(
        self,
        directory: Path,
        properties: Mapping[str, str] | None = None,
        on_progress: OnProgress = no_progress,
        listeners: Mapping[str, str] | None = None,
        port: int | None = None,
        controller_port: int | None = None,
    ) -> None:
        self._directory = directory
        self._jars = ensure_kafka(on_progress)
        self._java = ensure_java(on_progress) / "bin" / "java"
        self._protocols = dict(listeners or {})
        free, free_controller, *more = choose_ports(2 + len(self._protocols))
        self._port = free if port is None else port
        self._controller_port = free_controller if controller_port is None else controller_port
        self._ports = dict(zip(self._protocols, more, strict=True))
        self._processes = ChildProcesses(directory / "logs")
        self._process: ChildProcess | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._log4j = directory / "log4j2.yaml"
        self._log4j.write_text(_LOG4J)
        self._config = directory / "server.properties"
        self._config.write_text(self._settings(properties or {}))
        self._run("kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(self._config))

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self._port}"

    def servers_of(self, listener: str) -> str:
        return f"127.0.0.1:{self._ports[listener]}"

    def __enter__(self) -> KafkaBroker:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Returns when it accepts connections. Raises KafkaError."""
        self.launch()
        self.await_start()

    def launch(self) -> None:
        command = [*self._command("kafka.Kafka"), str(self._config)]
        self._process = self._processes.start("kafka", command)

    def await_start(self) -> None:
        """Raises KafkaError."""
        process = self._process
        assert process is not None, "it was launched"
        deadline = time.monotonic() + _START_S
        while not self._accepts():
            if process.exit_code is not None or time.monotonic() > deadline:
                raise KafkaError(f"the Kafka broker did not start:\n{process.log_tail()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL; `start` starts it again with what it has stored."""
        if self._process is not None:
            self._processes.stop(self._process, grace_s=0)
            self._process = None

    def freeze(self) -> None:
        if self._process is not None:
            self._process.pause()

    def resume(self) -> None:
        if self._process is not None:
            self._process.resume()

    def close(self) -> None:
        self._processes.close()

    def _accepts(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(
            self._command(*arguments), capture_output=True, text=True, timeout=_START_S
        )
        if done.returncode:
            raise KafkaError(f"{arguments[0]} failed: {(done.stdout + done.stderr)[-2000:]}")

    def _command(self, *arguments: str) -> list[str]:
        return [
            str(self._java),
            _HEAP,
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            f"-Dlog4j2.configurationFile={self._log4j}",
            "-cp",
            f"{self._jars}/jars/*",
            *arguments,
        ]

    def _settings(self, more: Mapping[str, str]) -> str:
        address, controller = f"127.0.0.1:{self._port}", f"127.0.0.1:{self._controller_port}"
        others = "".join(f",{name}://{self.servers_of(name)}" for name in self._protocols)
        protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **self._protocols}
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{controller}",
            "listeners": f"PLAINTEXT://{address},CONTROLLER://{controller}{others}",
            "advertised.listeners": f"PLAINTEXT://{address}{others}",
            "listener.security.protocol.map": ",".join(f"{k}:{v}" for k, v in protocols.items()),
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self._directory / "data"),
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            "num.partitions": "1",
            **more,
        }
        return "".join(f"{name}={value}\n" for name, value in settings.items())


class KafkaCluster:
    """Three brokers, by their ids, which replicate all topics: one of them may fail. `properties`:
    more settings of each broker."""

    def __init__(
        self,
        directory: Path,
        properties: Mapping[str, str] | None = None,
        on_progress: OnProgress = no_progress,
    ) -> None:
        ids = range(1, 4)
        ports = choose_ports(2 * len(ids))
        controllers = dict(zip(ids, ports[len(ids) :], strict=True))
        settings = {
            "controller.quorum.voters": ",".join(
                f"{id}@127.0.0.1:{port}" for id, port in controllers.items()
            ),
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "default.replication.factor": "3",
            "min.insync.replicas": "2",
            "offsets.topic.replication.factor": "3",
            "transaction.state.log.replication.factor": "3",
            "transaction.state.log.min.isr": "2",
            **(properties or {}),
        }
        self.brokers = {
            id: KafkaBroker(
                directory / f"broker-{id}",
                {**settings, "node.id": str(id)},
                on_progress,
                port=port,
                controller_port=controllers[id],
            )
            for id, port in zip(ids, ports, strict=False)
        }

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(broker.bootstrap_servers for broker in self.brokers.values())

    def __enter__(self) -> KafkaCluster:
        for broker in self.brokers.values():
            broker.launch()
        try:
            for broker in self.brokers.values():
                broker.await_start()
        except KafkaError:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for broker in self.brokers.values():
            broker.close()
