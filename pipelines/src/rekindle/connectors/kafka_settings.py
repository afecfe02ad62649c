"""Settings by which a client of Kafka signs in and encrypts: the same for sources and sinks.

Passwords are read from the files of a Secret, and are given to librdkafka alone, which does not
write them to its log.
"""

from __future__ import annotations

import re
from typing import Any

from confluent_kafka import KafkaError

from rekindle.secret_files import SecretFiles
from rekindle.topology.kinds.kafka_security import KafkaSaslSpec, KafkaSecuritySpec, KafkaTlsSpec

_REFUSALS = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_STATE = re.compile(r" \(after \d+ms in state [^)]*\)")


def client_settings(bootstrap_servers: str, security: KafkaSecuritySpec | None) -> dict[str, Any]:
    """Of any client. Raises SecretIncomplete."""
    sasl = security.sasl if security is not None else None
    tls = security.tls if security is not None else None
    protocol = ("SASL_" if sasl is not None else "") + ("SSL" if tls is not None else "PLAINTEXT")
    return {
        "bootstrap.servers": bootstrap_servers,
        "security.protocol": protocol,
        **(_sasl(sasl) if sasl is not None else {}),
        **(_tls(tls) if tls is not None else {}),
    }


def refusal(error: KafkaError) -> str | None:
    """Why a broker does not accept the client, the same text for each attempt; None: another
    error."""
    is_refusal = error.code() in _REFUSALS or "SSL alert" in error.str()
    return _STATE.sub("", error.str()) if is_refusal else None


def _sasl(sasl: KafkaSaslSpec) -> dict[str, Any]:
    secret = SecretFiles(sasl.secret_ref)
    if sasl.mechanism != "OAUTHBEARER":
        return {
            "sasl.mechanism": sasl.mechanism,
            "sasl.username": secret.text("username"),
            "sasl.password": secret.text("password"),
        }
    scope = {"sasl.oauthbearer.scope": secret.text("scope")} if secret.has("scope") else {}
    return {
        "sasl.mechanism": sasl.mechanism,
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": secret.text("client-id"),
        "sasl.oauthbearer.client.secret": secret.text("client-secret"),
        "sasl.oauthbearer.token.endpoint.url": secret.text("token-url"),
        **scope,
    }


def _tls(tls: KafkaTlsSpec) -> dict[str, Any]:
    """The texts, not the paths of the files: settings differ when the Secret does."""
    if tls.secret_ref is None:
        return {}
    secret = SecretFiles(tls.secret_ref)
    found = {"ssl.ca.pem": secret.text("ca.crt")} if secret.has("ca.crt") else {}
    if secret.has("tls.crt") or secret.has("tls.key"):
        found["ssl.certificate.pem"] = secret.text("tls.crt")
        found["ssl.key.pem"] = secret.text("tls.key")
    if not found:
        secret.text("ca.crt")  # says what the Secret has
    return found
