"""Real task processes whose password a broker refuses: they say so at once, and go on once the
Secret is corrected. What they read is Avro of a registry that asks for a password, too."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pytest
from kafka_parts import new_topic
from schema_server import SchemaServer

from rekindle.connectors.avro_values import PREFIX
from rekindle.connectors.compare import read_sink
from rekindle.secret_files import DIRECTORY_VARIABLE
from rekindle_testing.embedded.kafka import KafkaBroker, KafkaUnavailable, ensure_kafka
from rekindle_testing.harness.task_processes import TaskProcesses, task_processes

PASSWORD, WRONG = "correct-horse", "battery-staple"
AVRO = {"type": "record", "name": "Click", "fields": [{"name": "id", "type": "long"}]}
_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


def encoded(id: int) -> bytes:
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(AVRO), {"id": id})
    return PREFIX.pack(0, 1) + data.getvalue()


def write_secret(directory: Path, password: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "username").write_text("alice")
    (directory / "password").write_text(password)


def refusals(tasks: TaskProcesses) -> list[str]:
    """What the tasks say of a source whose definition is wrong: `Valid` has it."""
    problems = [r.response.problem for r in tasks.replicas.values() if r.response is not None]
    return [p.message for p in problems if p is not None and p.wrong_definition == "clicks"]


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_refused_password_is_said_and_a_corrected_one_is_used(tmp_path: Path) -> None:
    try:
        ensure_kafka(print)
    except KafkaUnavailable as error:
        pytest.skip(str(error))
    properties = {
        "listener.name.users.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.users.plain.sasl.jaas.config": (
            f'{_LOGIN} required user_alice="{PASSWORD}";'
        ),
    }
    listeners = {"USERS": "SASL_PLAINTEXT"}
    user, secret = f"alice:{PASSWORD}", tmp_path / "secrets" / "user-rekindle"
    with (
        KafkaBroker(tmp_path / "kafka", properties, print, listeners) as broker,
        SchemaServer({1: {"schema": json.dumps(AVRO)}}, user=user) as server,
    ):
        topic = new_topic(broker)
        topic.send([encoded(id) for id in range(100)])
        source: dict[str, Any] = {
            "name": "clicks",
            "schema": "id BIGINT",
            "kafka": {
                "bootstrapServers": broker.servers_of("USERS"),
                "topic": topic.name,
                "format": "avro",
                "schemaRegistry": {"url": server.url, "secretRef": "user-rekindle"},
                "security": {"sasl": {"mechanism": "PLAIN", "secretRef": "user-rekindle"}},
            },
        }
        out = f"file://{tmp_path}/out"
        spec = {
            "epochInterval": "200ms",
            "checkpoint": {"interval": "2s", "store": f"file://{tmp_path}/store", "volume": "v"},
            "replicas": 2,
            "sources": [source],
            "queries": [
                {"name": "all", "from": "clicks", "sink": {"files": {"url": out, "format": "json"}}}
            ],
        }
        write_secret(secret, WRONG)
        environment = {DIRECTORY_VARIABLE: str(secret.parent)}
        with task_processes(tmp_path, spec, environment) as tasks:
            tasks.poll_until(lambda: len(refusals(tasks)) == 2, 60)
            where = f"topic {topic.name} at {broker.servers_of('USERS')}"
            assert all(where in message for message in refusals(tasks))
            write_secret(secret, PASSWORD)
            tasks.poll_until(tasks.all_live, 60)
            tasks.poll_until(lambda: len(list((tmp_path / "out").glob("*.jsonl"))) > 0, 60)
            tasks.poll_until(lambda: tasks.committed_epoch() > 10, 60)
            for replica in tasks.replicas.values():
                process = Path(f"/proc/{replica.process.pid}")
                said = replica.output.read_bytes() + (process / "environ").read_bytes()
                said += (process / "cmdline").read_bytes()
                assert PASSWORD.encode() not in said
                assert WRONG.encode() not in said
        rows = read_sink(out, "json")
        assert sorted(rows.column("id").to_pylist()) == list(range(100))
        assert server.requests.count("/schemas/ids/1") == 2
