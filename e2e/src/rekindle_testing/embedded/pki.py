"""Certificates of an embedded cluster: a temporary CA and what it issues.

Knows openssl's command line, and nothing about Kubernetes.  The command line is used
because it is on every machine that has Python, while a library would be one more
dependency for a few certificates.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from rekindle_testing.embedded.errors import EmbeddedError

# A test cluster runs for minutes; a month is enough for a demo that is left running.
VALID_DAYS = 30

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_NAME = re.compile(r"[A-Za-z0-9:._-]+")

# A configuration of our own, since the system's may add extensions twice.
_REQUEST_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign, digitalSignature
subjectKeyIdentifier = hash
"""


class CertificateError(EmbeddedError):
    """openssl is missing or refused a request."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, both PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class CertificateAuthority:
    """Its files and all that it issues are in `directory`."""

    directory: Path
    pair: KeyPair

    @classmethod
    def create(cls, directory: Path, name: str) -> CertificateAuthority:
        directory.mkdir(parents=True, mode=0o700)
        config = directory / "request.cnf"
        config.write_text(_REQUEST_CONFIG)
        pair = KeyPair(directory / "ca.crt", directory / "ca.key")
        _openssl(
            *("req", "-x509", *_KEY, "-config", str(config), "-extensions", "authority"),
            *("-subj", _subject(name), "-days", str(VALID_DAYS), "-set_serial", _serial()),
            *("-keyout", str(pair.key), "-out", str(pair.certificate)),
        )
        return cls(directory, pair)

    def issue_client(self, file_name: str, name: str, group: str = "") -> KeyPair:
        """A client certificate; the group becomes the organisation."""
        return self._issue(file_name, _subject(name, group), ["extendedKeyUsage = clientAuth"])

    def issue_server(
        self, file_name: str, name: str, hosts: Sequence[str], *, also_client: bool = False
    ) -> KeyPair:
        """A serving certificate for addresses and DNS names, at least one."""
        usage = "serverAuth, clientAuth" if also_client else "serverAuth"
        alternatives = ", ".join(_alternative_name(host) for host in hosts)
        extensions = [f"extendedKeyUsage = {usage}", f"subjectAltName = {alternatives}"]
        return self._issue(file_name, _subject(name), extensions)

    def _issue(self, file_name: str, subject: str, extensions: Sequence[str]) -> KeyPair:
        pair = KeyPair(self.directory / f"{file_name}.crt", self.directory / f"{file_name}.key")
        request = self.directory / f"{file_name}.csr"
        extension_file = self.directory / f"{file_name}.cnf"
        lines = ["keyUsage = critical, digitalSignature, keyEncipherment", *extensions]
        extension_file.write_text("\n".join(lines) + "\n")
        _openssl(
            *("req", "-new", *_KEY, "-config", str(self.directory / "request.cnf")),
            *("-subj", subject, "-keyout", str(pair.key), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-extfile", str(extension_file)),
            *("-CA", str(self.pair.certificate), "-CAkey", str(self.pair.key)),
            *("-set_serial", _serial(), "-days", str(VALID_DAYS), "-out", str(pair.certificate)),
        )
        request.unlink()
        extension_file.unlink()
        return pair


def create_signing_key(path: Path) -> Path:
    """A private key alone, from which the API server also takes the public one.

    It does so from the older SEC 1 form only, which is what `ecparam` writes.
    """
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path))
    path.chmod(0o600)
    return path


def _subject(name: str, group: str = "") -> str:
    for part in filter(None, (name, group)):
        if not _NAME.fullmatch(part):
            raise CertificateError(
                f"{part!r} is not allowed in a certificate's subject: use letters, digits, : . _ -"
            )
    return (f"/O={group}" if group else "") + f"/CN={name}"


def _alternative_name(host: str) -> str:
    try:
        return f"IP:{ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _serial() -> str:
    # The leading 1 keeps the number positive and without leading zero bytes.
    return "0x1" + secrets.token_hex(15)


def _openssl(*arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise CertificateError(
            "openssl is not on PATH: the embedded cluster creates its keys with it"
        )
    environment = {"PATH": os.environ.get("PATH", os.defpath), "OPENSSL_CONF": os.devnull}
    done = subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    if done.returncode != 0:
        raise CertificateError(f"openssl {' '.join(arguments)} failed:\n{done.stderr.strip()}")
