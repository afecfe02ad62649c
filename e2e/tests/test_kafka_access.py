"""The password of a Kafka source is a Secret of the cluster: one that does not exist, and one that
the broker refuses, are said by `Valid`; a corrected one is used without an edit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Producer, admin

from rekindle_testing.embedded.kafka import KafkaBroker, KafkaUnavailable, ensure_kafka
from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.nodes import ProcessNodes
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.failures,
    pytest.mark.long,
    pytest.mark.timeout(900),
]
PASSWORD, WRONG = "correct-horse", "battery-staple"
_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    kind = ProcessNodes()
    with EmbeddedCluster(directory, nodes=2, node_kind=kind, on_progress=print) as cluster:
        cluster.create_claim("rekindle")
        cluster.install()
        yield cluster


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
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
    with KafkaBroker(tmp_path_factory.mktemp("kafka"), properties, print, listeners) as broker:
        settings: dict[str, Any] = {"bootstrap.servers": broker.bootstrap_servers}
        client = admin.AdminClient(settings)
        client.create_topics([admin.NewTopic("clicks", 1, 1)])["clicks"].result()
        producer = Producer(settings)
        for id in range(100):
            producer.produce("clicks", b'{"id": %d}' % id)
        assert producer.flush(60) == 0
        yield broker


def secret(password: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "clicks-rekindle"},
        "stringData": {"username": "alice", "password": password},
    }


def test_a_secret_is_missing_then_wrong_then_right(
    cluster: EmbeddedCluster, broker: KafkaBroker
) -> None:
    shared, servers = f"file://{SHARED_MOUNT_PATH}", broker.servers_of("USERS")
    kafka = {
        "bootstrapServers": servers,
        "topic": "clicks",
        "format": "json",
        "security": {"sasl": {"mechanism": "PLAIN", "secretRef": "clicks-rekindle"}},
    }
    sink = {"files": {"url": f"{shared}/clicks/output/all", "format": "json"}}
    document = {
        "apiVersion": "rekindle.dev/v1alpha1",
        "kind": "StreamTopology",
        "metadata": {"name": "clicks"},
        "spec": {
            "checkpoint": {"store": f"{shared}/clicks/checkpoints", "volume": "rekindle"},
            "sources": [{"name": "clicks", "schema": "id INT", "kafka": kafka}],
            "queries": [{"name": "all", "from": "clicks", "sink": sink}],
        },
    }
    with TopologyRun(cluster, document) as run:
        message = partial(run.observer.message, "Valid")
        wait_for("a problem", lambda: "spec.sources[0]: " in message(), 120)
        where = f"source clicks: topic clicks at {servers}: "
        assert f"{where}Secret clicks-rekindle has no key username" in message()
        cluster.apply(secret(WRONG))
        wait_for("the refused password", lambda: "Invalid username or password" in message(), 120)
        assert where in message()
        assert WRONG not in str(run.observer.message("Valid"))
        cluster.apply(secret(PASSWORD))
        run.wait_live()
        wait_for("Valid", lambda: run.observer.condition_status("Valid") == "True", 30)
        wait_for("rows", lambda: run.written_epochs("all"), 60)
