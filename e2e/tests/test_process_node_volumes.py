"""How a process node refreshes the volumes of a pod: each independently of the others."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from rekindle_testing.embedded.process_node.api import ApiClient, NodeApiError, Unreachable
from rekindle_testing.embedded.process_node.fields import DownwardValues
from rekindle_testing.embedded.process_node.objects import ObjectReader, TokenReader
from rekindle_testing.embedded.process_node.volume_manager import VolumeManager
from rekindle_testing.embedded.process_node.volumes import Volumes

DOWNWARD_VALUES = DownwardValues(pod_ip="127.7.1.1", host_ip="127.7.0.1", allocatable={})
CONFIG = {"name": "config", "configMap": {"name": "settings"}}
TOKEN = {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "d", "uid": "u"},
    "spec": {"volumes": [CONFIG, TOKEN]},
}


class Api:
    """`failure`: what a read of the ConfigMap raises. Each token has another value."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._issued = 0

    async def get(self, path: str) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        return {"data": {"a": "1"}}

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._issued += 1
        return {"status": {"token": f"token {self._issued}"}}


def volumes_of(api: Api, directory: Path, clock: Callable[[], float]) -> Volumes:
    client = cast(ApiClient, api)
    return Volumes(directory, ObjectReader(client, max_age_s=0.0), TokenReader(client, clock))


@pytest.mark.parametrize(
    ("failure", "problems"),
    [
        (
            NodeApiError(404, "not found"),
            ["MountVolume.SetUp failed: volume 'config': ConfigMap 'settings' not found"],
        ),
        (NodeApiError(500, "etcd is full"), []),
        (Unreachable("no response"), []),
    ],
    ids=["missing", "refused", "unreachable"],
)
def test_a_token_is_refreshed_though_another_volume_fails(
    failure: Exception, problems: list[str], tmp_path: Path
) -> None:
    now, api, found = 0.0, Api(), list[str]()

    async def refresh() -> None:
        nonlocal now
        volumes = volumes_of(api, tmp_path, lambda: now)
        manager = VolumeManager(
            volumes, refresh_s=0.0, record_problem=found.append, evict=found.append
        )
        assert await manager.sync(POD, DOWNWARD_VALUES) is not None
        assert (tmp_path / "token/token").read_text() == "token 1"
        now, api.failure = 3600.0, failure
        await manager.sync(POD, DOWNWARD_VALUES)
        deadline = time.monotonic() + 5
        while (tmp_path / "token/token").read_text() == "token 1" and time.monotonic() < deadline:
            await asyncio.sleep(0.001)

    asyncio.run(refresh())
    assert (tmp_path / "token/token").read_text() == "token 2"
    assert (tmp_path / "config/a").read_text() == "1", "files stay as they are"
    assert found == problems


def test_a_changed_annotation_is_in_its_file_at_once(tmp_path: Path) -> None:
    field = {"path": "slot", "fieldRef": {"fieldPath": "metadata.annotations['slot']"}}
    spec = {"volumes": [{"name": "pod", "downwardAPI": {"items": [field]}}]}
    file = tmp_path / "pod/slot"

    async def refresh() -> None:
        manager = VolumeManager(
            volumes_of(Api(), tmp_path, time.time),
            refresh_s=600.0,
            record_problem=print,
            evict=print,
        )
        pod: dict[str, Any] = {"metadata": {**POD["metadata"], "annotations": {}}, "spec": spec}
        assert await manager.sync(pod, DOWNWARD_VALUES) is not None
        assert file.read_text() == ""
        pod = {**pod, "metadata": {**pod["metadata"], "annotations": {"slot": "s"}}}
        await manager.sync(pod, DOWNWARD_VALUES)
        manager.refresh_now()
        await manager.sync(pod, DOWNWARD_VALUES)
        deadline = time.monotonic() + 5
        while file.read_text() == "" and time.monotonic() < deadline:
            await asyncio.sleep(0.001)

    asyncio.run(refresh())
    assert file.read_text() == "s"
