"""Objects that pods refer to: ConfigMaps, Secrets, claims, tokens.

Reads are shared and cached for a short time, since many pods use the same objects.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rekindle_testing.embedded.process_node.api import ApiClient, NodeApiError
from rekindle_testing.embedded.process_node.environment import ObjectReference
from rekindle_testing.embedded.process_node.fields import Json

_PLURALS = {"ConfigMap": "configmaps", "Secret": "secrets"}


class ObjectReader:
    """ConfigMaps and Secrets, at most `max_age_s` old."""

    def __init__(
        self, api: ApiClient, max_age_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._max_age_s = max_age_s
        self._clock = clock
        self._known: dict[tuple[str, ObjectReference], tuple[float, Json]] = {}

    async def read(
        self, namespace: str, references: Iterable[ObjectReference]
    ) -> dict[ObjectReference, Json | None]:
        """None for an object that does not exist."""
        return {r: await self._read(namespace, r) for r in set(references)}

    async def claim_directory(self, namespace: str, claim_name: str) -> Path:
        """The directory behind a claim; ValueError if there is none on this machine."""
        try:
            claim = await self._api.get(
                f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim_name}"
            )
            volume_name = claim["spec"].get("volumeName")
            # Before the claim is bound, the node authorizer would refuse to let the node read the
            # volume.
            if not volume_name or claim.get("status", {}).get("phase") != "Bound":
                raise ValueError(f"claim {claim_name!r} is not bound")
            volume = await self._api.get(f"/api/v1/persistentvolumes/{volume_name}")
        except NodeApiError as error:
            raise ValueError(f"claim {claim_name!r}: {error}") from error
        for kind in ("hostPath", "local"):
            if source := volume["spec"].get(kind):
                return Path(source["path"])
        raise ValueError(f"claim {claim_name!r}: its volume is neither hostPath nor local")

    async def _read(self, namespace: str, reference: ObjectReference) -> Json | None:
        now = self._clock()
        at, content = self._known.get((namespace, reference), (float("-inf"), {}))
        if now - at <= self._max_age_s:
            return content
        path = f"/api/v1/namespaces/{namespace}/{_PLURALS[reference.kind]}/{reference.name}"
        try:
            content = await self._api.get(path)
        except NodeApiError as error:
            # The node authorizer refuses objects of a pod that was bound just now.
            # Not cached, so that the next read goes to the API server.
            if error.status in (403, 404):
                return None
            raise
        self._known = {k: v for k, v in self._known.items() if now - v[0] <= self._max_age_s}
        self._known[(namespace, reference)] = (now, content)
        return content


@dataclass(frozen=True, slots=True)
class _Token:
    value: str
    renew_at: float


class TokenReader:
    """Tokens of service accounts, each bound to one pod, renewed at 80 % of their lifetime."""

    def __init__(self, api: ApiClient, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._clock = clock
        self._tokens: dict[tuple[str, str], _Token] = {}

    async def token(self, pod: Json, source: Json) -> str:
        key = (pod["metadata"]["uid"], json.dumps(source, sort_keys=True))
        kept = self._tokens.get(key)
        if kept is not None and self._clock() < kept.renew_at:
            return kept.value
        lifetime_s = source.get("expirationSeconds") or 3600
        meta = pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        spec: Json = {"expirationSeconds": lifetime_s, "boundObjectRef": bound}
        if audience := source.get("audience"):
            spec["audiences"] = [audience]
        account = pod["spec"].get("serviceAccountName", "default")
        response = await self._api.create(
            f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        )
        value = str(response["status"]["token"])
        self._tokens[key] = _Token(value, self._clock() + 0.8 * lifetime_s)
        return value

    def forget(self, uid: str) -> None:
        for key in [key for key in self._tokens if key[0] == uid]:
            del self._tokens[key]
