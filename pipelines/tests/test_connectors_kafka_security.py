"""Signing in to a real broker, with the files of Secrets: SASL and TLS."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from confluent_kafka import admin
from kafka_parts import Topic, new_topic, open_kafka
from schema_server import SchemaServer

from rekindle.connectors.kafka_source import KafkaSource
from rekindle.connectors.schema_registry import SchemaRegistry
from rekindle.errors import SourceFailed, SourceRefused
from rekindle.secret_files import DIRECTORY_VARIABLE
from rekindle.topology.kinds.kafka_security import SchemaRegistrySpec
from rekindle_testing.embedded.kafka import KafkaBroker, KafkaUnavailable, ensure_kafka
from rekindle_testing.embedded.pki import CertificateAuthority

pytestmark = pytest.mark.process
PASSWORD, WRONG = "correct-horse", "battery-staple"
_KAFKA = "org.apache.kafka.common.security"


def properties(authority: CertificateAuthority, directory: Path) -> dict[str, str]:
    pair = authority.issue_server("broker", "broker", ["127.0.0.1"])
    keystore = directory / "keystore.pem"
    keystore.write_text(pair.key.read_text() + pair.certificate.read_text())
    tls = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.pair.certificate),
    }
    plain = f'{_KAFKA}.plain.PlainLoginModule required user_alice="{PASSWORD}";'
    scram = f"{_KAFKA}.scram.ScramLoginModule required;"
    oauth = (
        f'{_KAFKA}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="b";'
    )
    handler = "internals.unsecured.OAuthBearerUnsecuredValidatorCallbackHandler"
    listeners = {
        "password": {
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            "plain.sasl.jaas.config": plain,
            "scram-sha-256.sasl.jaas.config": scram,
            "scram-sha-512.sasl.jaas.config": scram,
        },
        "both": {"sasl.enabled.mechanisms": "PLAIN", "plain.sasl.jaas.config": plain, **tls},
        "mutual": {"ssl.client.auth": "required", **tls},
        "oauth": {
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "oauthbearer.sasl.jaas.config": oauth,
            "oauthbearer.sasl.server.callback.handler.class": f"{_KAFKA}.oauthbearer.{handler}",
        },
    }
    return {
        f"listener.name.{listener}.{name}": value
        for listener, settings in listeners.items()
        for name, value in settings.items()
    }


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path_factory.mktemp("pki") / "ca", "authority")


@pytest.fixture(scope="module")
def topic(
    authority: CertificateAuthority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Topic]:
    """With one record."""
    try:
        ensure_kafka(print)
    except KafkaUnavailable as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("kafka")
    protocols = {
        "PASSWORD": "SASL_PLAINTEXT",
        "BOTH": "SASL_SSL",
        "MUTUAL": "SSL",
        "OAUTH": "SASL_PLAINTEXT",
    }
    settings = properties(authority, directory)
    with KafkaBroker(directory / "broker", settings, print, protocols) as broker:
        topic = new_topic(broker)
        for mechanism in (admin.ScramMechanism.SCRAM_SHA_256, admin.ScramMechanism.SCRAM_SHA_512):
            add_user(topic, mechanism)
        topic.send([{"id": 1}])
        yield topic


def add_user(topic: Topic, mechanism: admin.ScramMechanism) -> None:
    info = admin.ScramCredentialInfo(mechanism, 4096)
    user = admin.UserScramCredentialUpsertion("alice", info, PASSWORD.encode())
    topic.administer(lambda client: client.alter_user_scram_credentials([user]))


class Secrets:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, name: str, **keys: str) -> str:
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        for key, value in keys.items():
            (directory / key.replace("_", ".")).write_text(value)
        return name


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Secrets:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return Secrets(tmp_path)


def servers_of(topic: Topic, listener: str) -> str:
    assert isinstance(topic.broker, KafkaBroker)
    return topic.broker.servers_of(listener)


def source(topic: Topic, listener: str, **options: Any) -> KafkaSource:
    return open_kafka(topic, bootstrapServers=servers_of(topic, listener), **options)


def sasl(mechanism: str, secret: str, **more: Any) -> dict[str, Any]:
    return {"sasl": {"mechanism": mechanism, "secretRef": secret}, **more}


def read(opened: KafkaSource) -> list[int]:
    opened.require_access()
    reach = opened.ends(None)
    found: list[int] = opened.read(reach.start, reach.end).table.column("id").to_pylist()
    opened.close()
    return found


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_password_is_accepted_or_refused_at_once(
    topic: Topic, secrets: Secrets, mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = secrets.write("user-rekindle", username="alice", password=f"{PASSWORD}\n")
    assert read(source(topic, "PASSWORD", security=sasl(mechanism, secret))) == [1]
    secrets.write(secret, password=WRONG)
    opened, began = source(topic, "PASSWORD", security=sasl(mechanism, secret)), time.monotonic()
    where = f"source clicks: topic {topic.name} at {servers_of(topic, 'PASSWORD')}: .*"
    with pytest.raises(SourceRefused, match=f"{where}uthentication.*correct the source") as refused:
        opened.require_access()
    assert time.monotonic() - began < 3.0
    with pytest.raises(SourceRefused, match=where) as again:
        source(topic, "PASSWORD", security=sasl(mechanism, secret)).require_access()
    assert str(refused.value) == str(again.value)
    said = caplog.text + str(refused.value)
    assert PASSWORD not in said
    assert WRONG not in said


def test_a_password_that_is_corrected_is_used(topic: Topic, secrets: Secrets) -> None:
    secret = secrets.write("user-rekindle", username="alice", password=WRONG)
    opened = source(topic, "PASSWORD", security=sasl("PLAIN", secret))
    with pytest.raises(SourceRefused):
        opened.ends(None)
    with pytest.raises(SourceRefused):
        opened.ends(None)
    secrets.write(secret, password=PASSWORD)
    with pytest.raises(SourceRefused):
        opened.ends(None)  # notices
    assert read(opened) == [1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "Secret user-rekindle has no key username"),
        ({"username": "alice"}, r"Secret user-rekindle has no key password \(it has username\)"),
    ],
)
def test_a_key_that_the_secret_lacks_is_named(
    topic: Topic, secrets: Secrets, keys: dict[str, str], message: str
) -> None:
    secret = secrets.write("user-rekindle", **keys)
    opened = source(topic, "PASSWORD", security=sasl("PLAIN", secret))
    with pytest.raises(SourceRefused, match=message):
        opened.require_access()


def test_tls_with_a_certificate_of_the_client(
    topic: Topic, secrets: Secrets, authority: CertificateAuthority
) -> None:
    pair = authority.issue_client("client", "alice")
    secret = secrets.write(
        "tls-rekindle",
        ca_crt=authority.pair.certificate.read_text(),
        tls_crt=pair.certificate.read_text(),
        tls_key=pair.key.read_text(),
    )
    assert read(source(topic, "MUTUAL", security={"tls": {"secretRef": secret}})) == [1]
    without = secrets.write("ca-rekindle", ca_crt=authority.pair.certificate.read_text())
    opened = source(topic, "MUTUAL", security={"tls": {"secretRef": without}})
    with pytest.raises(SourceRefused, match="SSL"):
        opened.require_access()


def test_tls_and_a_password(
    topic: Topic, secrets: Secrets, authority: CertificateAuthority
) -> None:
    user = secrets.write("user-rekindle", username="alice", password=PASSWORD)
    ca = secrets.write("ca-rekindle", ca_crt=authority.pair.certificate.read_text())
    security = sasl("PLAIN", user, tls={"secretRef": ca})
    assert read(source(topic, "BOTH", security=security)) == [1]
    opened = source(topic, "BOTH", security=sasl("PLAIN", user, tls={}))
    with pytest.raises(SourceRefused, match="certificate verify failed"):
        opened.require_access()


def test_a_key_without_its_certificate_is_named(topic: Topic, secrets: Secrets) -> None:
    secret = secrets.write("tls-rekindle", tls_key="x")
    opened = source(topic, "MUTUAL", security={"tls": {"secretRef": secret}})
    with pytest.raises(SourceRefused, match=r"no key tls.crt"):
        opened.require_access()
    secrets.write(secret, tls_crt="x")
    with pytest.raises(SourceRefused, match="ssl"):
        source(topic, "MUTUAL", security={"tls": {"secretRef": secret}}).require_access()


class TokenServer:
    """Gives a token without a signature, which the test's broker accepts."""

    def __init__(self, secret: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                wanted = base64.b64encode(f"alice:{secret}".encode()).decode()
                if self.headers["Authorization"] != f"Basic {wanted}":
                    self.send_error(401)
                    return
                now = int(time.time())
                claims = {"sub": "alice", "iat": now, "exp": now + 3600}
                parts = [_base64url({"alg": "none"}), _base64url(claims), ""]
                body = json.dumps({"access_token": ".".join(parts), "token_type": "Bearer"})
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/token"

    def __enter__(self) -> TokenServer:
        Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def _base64url(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def test_a_token_of_a_server(topic: Topic, secrets: Secrets) -> None:
    with TokenServer(PASSWORD) as server:
        keys = {"client-id": "alice", "client-secret": PASSWORD, "token-url": server.url}
        secret = secrets.write("oauth-rekindle", **keys)
        assert read(source(topic, "OAUTH", security=sasl("OAUTHBEARER", secret))) == [1]
        secrets.write(secret, **{"client-secret": WRONG})
        opened = source(topic, "OAUTH", security=sasl("OAUTHBEARER", secret))
        with pytest.raises(SourceRefused, match=r"OIDC|token") as refused:
            opened.require_access()
        assert WRONG not in str(refused.value)


def test_a_broker_that_is_away_is_no_refusal(topic: Topic, secrets: Secrets) -> None:
    secret = secrets.write("user-rekindle", username="alice", password=PASSWORD)
    away = replace(topic)
    opened = open_kafka(away, bootstrapServers="127.0.0.1:1", security=sasl("PLAIN", secret))
    opened.require_access()
    opened.close()


def registry(url: str, secret: str | None = None) -> SchemaRegistry:
    given = {"url": url} | ({"secretRef": secret} if secret else {})
    return SchemaRegistry(SchemaRegistrySpec.model_validate(given))


class TestRegistry:
    def test_a_schema_and_what_it_refers_to(self) -> None:
        inner = {"schema": '{"type": "record", "name": "B", "fields": []}'}
        refers = {"name": "B", "subject": "b", "version": 2}
        outer = {"schema": "{}", "references": [refers]}
        with SchemaServer({1: outer}, {"b/2": inner}) as server:
            assert registry(server.url).schema(1) == ("{}", (inner["schema"],))

    def test_a_password_is_refused_at_once(self, secrets: Secrets) -> None:
        secret = secrets.write("registry-rekindle", username="alice", password=PASSWORD)
        with SchemaServer({1: {"schema": "{}"}}, user=f"alice:{PASSWORD}") as server:
            registry(server.url, secret).check()
            assert registry(server.url, secret).schema(1) == ("{}", ())
            secrets.write(secret, password=WRONG)
            with pytest.raises(SourceRefused, match=f"{server.url} refuses.*401") as refused:
                registry(server.url, secret).check()
            assert WRONG not in str(refused.value)

    def test_one_that_is_away_is_no_refusal(self) -> None:
        with pytest.raises(SourceFailed, match=r"schema registry http://127.0.0.1:1: ") as away:
            registry("http://127.0.0.1:1").schema(1)
        assert not isinstance(away.value, SourceRefused)
