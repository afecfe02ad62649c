"""Certificates of the temporary authority are accepted by TLS."""

import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from rekindle_testing.embedded.pki import (
    CertificateAuthority,
    CertificateError,
    KeyPair,
    create_signing_key,
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path_factory.mktemp("pki") / "ca", "tests")


def handshake(ca: Path, server: KeyPair, client: KeyPair, host: str) -> dict[str, str]:
    """Both sides verify the other; returns the subject that the server saw."""
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ca))
    server_side.verify_mode = ssl.CERT_REQUIRED
    server_side.load_cert_chain(server.certificate, server.key)
    client_side = ssl.create_default_context(cafile=str(ca))
    client_side.load_cert_chain(client.certificate, client.key)
    ours, theirs = socket.socketpair()
    seen: dict[str, str] = {}

    def serve() -> None:
        try:
            with server_side.wrap_socket(ours, server_side=True) as connection:
                peer: Any = connection.getpeercert()
                seen.update(dict(attribute for (attribute,) in peer["subject"]))
                connection.send(b".")
        except OSError:
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client_side.wrap_socket(theirs, server_hostname=host) as connection:
            connection.recv(1)
    finally:
        thread.join(10)
    return seen


def test_a_client_certificate_has_name_and_group(
    authority: CertificateAuthority,
) -> None:
    server = authority.issue_server("server", "server", hosts=["127.0.0.5", "node.local"])
    client = authority.issue_client("node", "system:node:n1", group="system:nodes")
    subject = handshake(authority.pair.certificate, server, client, host="127.0.0.5")
    assert subject == {"commonName": "system:node:n1", "organizationName": "system:nodes"}
    assert handshake(authority.pair.certificate, server, client, "node.local")


def test_a_server_certificate_is_for_its_addresses_only(authority: CertificateAuthority) -> None:
    server = authority.issue_server("elsewhere", "server", hosts=["127.0.0.5"])
    client = authority.issue_client("client", "client")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(authority.pair.certificate, server, client, "127.0.0.6")


def test_keys_are_readable_by_their_owner_only(authority: CertificateAuthority) -> None:
    key = create_signing_key(authority.directory / "tokens.key")
    for file in (key, authority.pair.key, authority.issue_client("own", "own").key):
        assert file.stat().st_mode & 0o077 == 0
    assert authority.directory.stat().st_mode & 0o077 == 0


def test_a_name_that_would_change_the_subject_is_refused(authority: CertificateAuthority) -> None:
    with pytest.raises(CertificateError, match="subject"):
        authority.issue_client("bad", "me/O=system:masters")
