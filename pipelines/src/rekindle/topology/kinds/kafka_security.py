"""How clients of Kafka and of its schema registry sign in: fields of sources and sinks.

Of a Secret only its name is here. Pods have its keys as files (`rekindle.names.SECRETS_MOUNT`),
which the client reads itself.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rekindle.topology.kinds.base import Spec

SECRET_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"


class KafkaSaslSpec(Spec):
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
    """SASL mechanism."""
    secret_ref: str = Field(min_length=1, max_length=253, pattern=SECRET_NAME)
    """Name of a Secret with `username` and `password`; for OAUTHBEARER with `client-id`,
    `client-secret` and `token-url` (OIDC), and perhaps `scope`."""


class KafkaTlsSpec(Spec):
    secret_ref: str | None = Field(None, min_length=1, max_length=253, pattern=SECRET_NAME)
    """Name of a Secret with `ca.crt`, if the brokers' certificates are not signed by a public
    authority, and with `tls.crt` and `tls.key`, if they ask for a client's."""


class KafkaSecuritySpec(Spec):
    """Neither: the connection is not encrypted, and nobody signs in."""

    sasl: KafkaSaslSpec | None = None
    """How clients sign in."""
    tls: KafkaTlsSpec | None = None
    """Connections are encrypted, and the brokers' certificates are checked; `{}` with the system's
    authorities."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the Secrets that a client reads."""
        given = (self.sasl.secret_ref if self.sasl else None, self.tls and self.tls.secret_ref)
        return tuple(sorted({name for name in given if name}))


class SchemaRegistrySpec(Spec):
    url: str = Field(min_length=1, max_length=2048, pattern=r"^https?://[^\s@]+$")
    """URL of the registry: `http://registry:8081`."""
    secret_ref: str | None = Field(None, min_length=1, max_length=253, pattern=SECRET_NAME)
    """Name of a Secret with `username` and `password`, with `ca.crt`, or with both."""
