"""Gets schemas from a registry, by their numbers, and the numbers of schemas that are written.

A number means one schema for ever, so a schema that was found is not asked for again. A number that
the registry does not know may be known later, or at another replica: it is an error of the source,
not of the value, for all replicas have to drop the same values.

Design: docs/decisions/0062-formats-of-kafka-values.md.
"""

from __future__ import annotations

import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.parse import quote

from rekindle.errors import SourceFailed, SourceRefused
from rekindle.secret_files import SecretFiles, SecretIncomplete
from rekindle.topology.avro import InvalidAvroSchema
from rekindle.topology.kinds.kafka_security import SchemaRegistrySpec

REQUEST_S = 5.0
_MOST_BYTES = 8 << 20
_MOST_REFERENCES = 256
_MESSAGE_LENGTH = 500
"""An incompatible schema may be repeated whole."""


class _NotThere(SourceFailed):
    """HTTP 404."""


@dataclass(frozen=True, slots=True)
class WrittenSchema:
    """As a registry takes it. `references`: by name, which is also their subject."""

    text: str
    kind: str = "AVRO"
    references: tuple[tuple[str, WrittenSchema], ...] = ()


class SchemaRegistry:
    """Used by one thread."""

    def __init__(self, spec: SchemaRegistrySpec) -> None:
        self._url = spec.url.rstrip("/")
        self._secret = SecretFiles(spec.secret_ref) if spec.secret_ref else None
        self._where = f"schema registry {self._url}"

    def check(self) -> None:
        """Raises SourceRefused if its Secret is incomplete, or the registry does not accept it;
        SourceFailed if it is away."""
        self._get("/schemas/types")

    def schema(self, number: int) -> tuple[str, tuple[str, ...]]:
        """A schema, and those whose names it uses, each after those that it uses itself. Raises
        SourceFailed; InvalidAvroSchema if it is none of Avro."""
        found = self._get(f"/schemas/ids/{number}")
        if (kind := found.get("schemaType", "AVRO")) != "AVRO":
            raise InvalidAvroSchema(f"it is a schema of {kind}")
        references = dict[str, str]()
        self._add_references(found, references, set())
        return self._text(found), tuple(references.values())

    def number_of(self, subject: str, schema: WrittenSchema) -> int:
        """The number of a schema, which is registered for the subject if it is not there, after
        those that it refers to. Raises SourceFailed."""
        path, body = self._written(subject, schema)
        try:  # those who may not register find what others have registered
            found = self._get(path, body)
        except _NotThere:
            found = self._get(f"{path}/versions", body)
        return self._whole(found, "id", path)

    def _written(self, subject: str, schema: WrittenSchema) -> tuple[str, bytes]:
        """Path and body of a request."""
        message: dict[str, Any] = {"schema": schema.text}
        if schema.kind != "AVRO":
            message["schemaType"] = schema.kind
        if schema.references:
            message["references"] = [
                {"name": name, "subject": name, "version": self._version_of(name, each)}
                for name, each in schema.references
            ]
        return f"/subjects/{quote(subject, safe='')}", json.dumps(message).encode()

    def _version_of(self, subject: str, schema: WrittenSchema) -> int:
        """As `number_of`; the version that the schema is of its subject."""
        self.number_of(subject, schema)
        path, body = self._written(subject, schema)
        return self._whole(self._get(path, body), "version", path)

    def _whole(self, found: Mapping[str, Any], name: str, path: str) -> int:
        if not isinstance(number := found.get(name), int):
            raise SourceFailed(f"{self._where}: {path}: a response without a number as {name}")
        return number

    def _add_references(
        self, schema: Mapping[str, Any], found: dict[str, str], begun: set[str]
    ) -> None:
        """`begun`: the names of those that are found, and of those that these refer to."""
        references = schema.get("references") or []
        if not isinstance(references, list) or not all(isinstance(r, dict) for r in references):
            raise SourceFailed(f"{self._where}: a response with references that are no list")
        for reference in references:
            name = str(reference.get("name"))
            if name in found:
                continue
            if name in begun:
                raise InvalidAvroSchema(f"schema {name} refers to itself")
            if len(begun) == _MOST_REFERENCES:
                raise InvalidAvroSchema(f"more than {_MOST_REFERENCES} references")
            begun.add(name)
            subject = quote(str(reference.get("subject")), safe="")
            version = quote(str(reference.get("version")), safe="")
            inner = self._get(f"/subjects/{subject}/versions/{version}")
            self._add_references(inner, found, begun)
            found[name] = self._text(inner)

    def _text(self, found: Mapping[str, Any]) -> str:
        if not isinstance(text := found.get("schema"), str):
            raise SourceFailed(f"{self._where}: a response without a schema")
        return text

    def _get(self, path: str, body: bytes | None = None) -> Mapping[str, Any]:
        """Raises SourceFailed. With a `body` the request is a POST."""
        try:
            request = self._request(path, body)
            with self._opener().open(request, timeout=REQUEST_S) as response:
                found = json.loads(response.read(_MOST_BYTES))
        except SecretIncomplete as error:
            raise SourceRefused(f"{self._where}: {error}") from error
        except urllib.error.HTTPError as error:
            raise self._refused(path, error.code, _message_of(error)) from error
        except (OSError, ValueError, RecursionError, HTTPException) as error:  # URLError: OSError
            raise SourceFailed(f"{self._where}: {path}: {error}") from error
        return found if isinstance(found, dict) else {}

    def _refused(self, path: str, status: int, message: str) -> SourceFailed:
        says = f": {message}" if message else ""
        if status in (401, 403):
            return SourceRefused(
                f"{self._where} refuses the user: HTTP {status}; correct username and password of "
                "schemaRegistry.secretRef"
            )
        if status == 404:
            return _NotThere(
                f"{self._where} does not have {path}: check schemaRegistry.url, and that the "
                "schema was not deleted"
            )
        if status == 409:
            return SourceFailed(
                f"{self._where}: {path}: the columns are not compatible with the schema that is "
                f"registered: write columns that are, or change the subject's compatibility{says}"
            )
        if status == 422:
            return SourceFailed(f"{self._where}: {path}: the schema is refused{says}")
        return SourceFailed(f"{self._where}: {path}: HTTP {status}{says}")

    def _request(self, path: str, body: bytes | None) -> urllib.request.Request:
        headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        if self._secret is not None and self._secret.has("username"):
            user = f"{self._secret.text('username')}:{self._secret.text('password')}"
            headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        if body is not None:
            headers["Content-Type"] = "application/vnd.schemaregistry.v1+json"
        return urllib.request.Request(f"{self._url}{path}", body, headers)

    def _opener(self) -> urllib.request.OpenerDirector:
        has_ca = self._secret is not None and self._secret.has("ca.crt")
        cafile = str(self._secret.path("ca.crt")) if self._secret is not None and has_ca else None
        context = ssl.create_default_context(cafile=cafile)
        return urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=context), _NoRedirects()
        )


def _message_of(error: urllib.error.HTTPError) -> str:
    """What the registry says about a request that it refuses, in one line; "" if nothing."""
    try:
        found = json.loads(error.read(_MOST_BYTES))
        return " ".join(str(found["message"]).split())[:_MESSAGE_LENGTH]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, HTTPException):
        return ""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another server would be given the password."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        return None
