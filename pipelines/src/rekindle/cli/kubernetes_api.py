"""Reads a topology and its objects from a cluster, as the user of a kubeconfig.

Uses the official client, because a user's kubeconfig has contexts, login plugins (EKS, GKE, AKS,
OIDC) and proxies, which the small clients of coordinator and operator do not support. It is
installed by the extra `cli`. Never writes; a list that the user may not read counts as empty.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rekindle import names
from rekindle.cli.option_types import kubernetes_name, not_empty
from rekindle.errors import RekindleError
from rekindle.identity import Identity

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Json = dict[str, Any]

_TOPOLOGIES = f"/apis/{names.API_VERSION}/namespaces/{{namespace}}/{names.PLURAL}/{{name}}"
_TIMEOUT_S = (5.0, 10.0)  # to connect, and to read


class ApiUnavailable(RekindleError):
    """The API server did not respond in time, or had an error that passes; a retry may succeed."""


class KubernetesError(RekindleError):
    """The API server returned the HTTP error `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments for the topology and the cluster, named as in kubectl."""
    parser.add_argument(
        "topology", type=kubernetes_name, metavar="TOPOLOGY", help="name of a StreamTopology"
    )
    add_kubeconfig_arguments(parser)


def add_kubeconfig_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments for the cluster alone."""
    parser.add_argument(
        "-n", "--namespace", type=kubernetes_name, help="default: the context's, else `default`"
    )
    parser.add_argument(
        "--kubeconfig",
        type=not_empty,
        metavar="FILE",
        help="default: $KUBECONFIG, else ~/.kube/config",
    )
    parser.add_argument(
        "--context", type=not_empty, help="of the kubeconfig; default: its current one"
    )


@dataclass(frozen=True, slots=True)
class ClusterReader:
    """Raises ApiUnavailable and ApiError."""

    api: ApiClient
    namespace: str

    def topology(self, name: str) -> Json:
        try:
            return self._get(_TOPOLOGIES.format(namespace=self.namespace, name=name))
        except KubernetesError as error:
            if error.status != 404:
                raise
            raise KubernetesError(
                404,
                f"there is no StreamTopology {name} in namespace {self.namespace} "
                f"(`kubectl get streamtopologies -A` lists all)",
            ) from error

    def events(self, topology: Json) -> list[Json]:
        """The Events about this topology, without those of an older one of the same name."""
        meta = topology["metadata"]
        found = self._list(
            f"/api/v1/namespaces/{self.namespace}/events",
            (
                "fieldSelector",
                f"involvedObject.kind=StreamTopology,involvedObject.name={meta['name']}",
            ),
        )
        return [e for e in found if e["involvedObject"].get("uid", meta["uid"]) == meta["uid"]]

    def task_pods(self, topology: Json) -> list[Json]:
        selector = (
            f"{names.LABEL_TOPOLOGY}={topology['metadata']['name']},"
            f"{names.LABEL_ROLE}={names.ROLE_TASK}"
        )
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        return self._list(pods, ("labelSelector", selector))

    def reader_token(self, topology: Json) -> str:
        """The token of readers of the topology's stream sinks. Operators that are older than
        stream sinks have written an immutable Secret without it: then it is derived from the other
        token there."""
        meta = topology["metadata"]
        name = names.token_secret_name(meta["name"], meta["uid"])
        secret = self._get(f"/api/v1/namespaces/{self.namespace}/secrets/{name}")
        data = secret.get("data") or {}
        found, token = data.get(names.READER_TOKEN_KEY), data.get(names.TOKEN_KEY)
        if found is not None:
            return base64.b64decode(found).decode()
        derived = token and Identity(token=base64.b64decode(token).decode()).reader_token
        if not derived:
            raise KubernetesError(404, f"Secret {name} has no key {names.READER_TOKEN_KEY}")
        return derived

    def nodes(self) -> list[Json]:
        return self._list("/api/v1/nodes")

    def pods(self) -> list[Json]:
        """Of all namespaces."""
        return self._list("/api/v1/pods")

    def _list(self, path: str, *query: tuple[str, str]) -> list[Json]:
        try:
            return list(self._get(path, query).get("items") or ())
        except KubernetesError as error:
            if error.status in (401, 403):
                return []
            raise

    def _get(self, path: str, query: Sequence[tuple[str, str]] = ()) -> Json:
        from urllib3.exceptions import HTTPError

        request = self.api.param_serialize(
            "GET",
            path,
            query_params=list(query),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        try:
            response = self.api.call_api(*request, _request_timeout=_TIMEOUT_S)
            text = str(response.read().decode())  # type: ignore[no-untyped-call]
        except (HTTPError, OSError) as error:
            server = self.api.configuration.host
            raise ApiUnavailable(f"{server} does not respond: {_cause(error)}") from error
        if not 200 <= response.status <= 299:
            message = f"the API server returned an error: {_message(text)}"
            # It is busy (429), or it or a proxy before it has failed.
            if response.status == 429 or response.status >= 500:
                raise ApiUnavailable(message)
            raise KubernetesError(response.status, message)
        return dict(json.loads(text))


def open_cluster(args: argparse.Namespace) -> ClusterReader:
    """Open the cluster that the arguments of `add_kubeconfig_arguments` select. Raises
    RekindleError."""
    try:
        from kubernetes import client, config
        from yaml import YAMLError
    except ModuleNotFoundError as error:
        raise RekindleError("no kubernetes client: install rekindle[cli]") from error
    file = args.kubeconfig
    settings = client.Configuration()
    settings.retries = False  # report errors to the user at once
    try:
        config.load_kube_config(file, args.context, settings, persist_config=False)  # type: ignore[no-untyped-call]
        contexts, current = config.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        named = file or os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise RekindleError(
            f"no cluster: {named}: {error} (give --kubeconfig, or set KUBECONFIG)"
        ) from error
    except (YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = f": {error}" if isinstance(error, YAMLError | ValueError) else ""
        where = file or "the file that KUBECONFIG names, else ~/.kube/config,"
        raise RekindleError(f"no cluster: {where} is not a kubeconfig{why}") from error
    chosen = next((c for c in contexts if c["name"] == args.context), current)
    namespace = args.namespace or chosen["context"].get("namespace") or "default"
    return ClusterReader(client.ApiClient(settings), namespace)


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]


def _cause(error: BaseException) -> str:
    """The operating system's message in an error of urllib3, if there is one."""
    message = str(getattr(error, "reason", None) or error)
    return re.sub(r"\[Errno -?\d+\] ", "", message.rpartition(": ")[2]) or repr(error)
