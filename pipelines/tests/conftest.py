"""Shared by tests on Spark: one JVM for all of a process, and the archive that halves its start
time. Of those on Kafka: one broker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from spark_parts import StartSession

from rekindle.directories import cache_root
from rekindle_testing.embedded.kafka import KafkaBroker, KafkaUnavailable, ensure_kafka

ACCESS_CONTROL = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
    # How often brokers look for transactions that are open for too long; 10 s by default.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
}


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """For all tests of this process, each with topics of its own. They do not stop it."""
    try:
        ensure_kafka(print)
    except KafkaUnavailable as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("kafka")
    with KafkaBroker(directory, ACCESS_CONTROL, on_progress=print) as broker:
        yield broker


@pytest.fixture(scope="session")
def cds_archive() -> Path:
    """In the user's cache, created once (about 30 s) for a JVM and its jars."""
    from rekindle.engine.spark.archive_cache import ensure_archive

    return ensure_archive(cache_root(os.environ) / "appcds")


@pytest.fixture(scope="session")
def start_shared(
    tmp_path_factory: pytest.TempPathFactory, cds_archive: Path
) -> Iterator[StartSession]:
    """Starts a session in the one JVM of this process's tests. They stop it with `keep_jvm`; after
    a test that has killed the JVM, the next session starts another one."""
    from rekindle.engine.spark import session as sessions

    directory = tmp_path_factory.mktemp("spark")
    yield partial(sessions.start_session, data_dir=directory, cds_archive=cds_archive)
    if (jvm := sessions.current_jvm()) is not None:
        jvm.stop()
        sessions.kill_session()


@pytest.fixture(scope="module")
def shared_jvm(start_shared: StartSession) -> Iterator[None]:
    """`run_reference` and `rekindle run` in this process use the JVM of all tests, and keep it."""
    from rekindle.engine.spark import session as sessions

    jvm = sessions.current_jvm()
    if jvm is None or not jvm.alive:
        sessions.stop_session(start_shared("test"), keep_jvm=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "stop_session", partial(sessions.stop_session, keep_jvm=True))
        yield
