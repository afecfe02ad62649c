"""Checks of URLs: schemes, and that each output has a place of its own that outlives its pod.

In a cluster, a `file://` URL of an output has to be on a volume. Tasks and coordinator mount the
claim `checkpoint.volume`. The coordinator does not mount the volumes of `podTemplate`, so the
checkpoint store cannot be on one of them. Sources are not checked: their files may be part of the
image.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import fsspec
from fsspec.utils import glob_translate

from rekindle.errors import Problem
from rekindle.names import TASK_CONTAINER, VOLUME_MOUNT
from rekindle.objects import CREATE_IF_ABSENT_PROTOCOLS
from rekindle.topology.problems import did_you_mean
from rekindle.topology.spec import TopologySpec

_ON_DISK = ("file", "local")
_CREATE_IF_ABSENT = frozenset(_ON_DISK) | CREATE_IF_ABSENT_PROTOCOLS
_COMMON = ("file", "s3", "gs", "abfs", "https")
_STORE = "spec.checkpoint.store"
_SYNONYMS = {"local": "file", "s3a": "s3", "gcs": "gs", "az": "abfs", "abfss": "abfs"}
_POD_LOCAL_VOLUMES = frozenset(
    {"emptyDir", "ephemeral", "configMap", "secret", "projected", "downwardAPI", "image"}
)
"""Kinds of volumes that are deleted with their pod, or cannot be written."""


class _Disk(Enum):
    """What is mounted at a path of a task's container."""

    CLAIM = auto()
    OTHER_VOLUME = auto()
    POD_LOCAL = auto()


@dataclass(frozen=True, slots=True)
class _Output:
    """A sink, the dead letters of a source, or the store: the path of its field, its URL, and names
    of files below that."""

    path: str
    url: str
    files: tuple[str, ...]


def check_urls(spec: TopologySpec, *, skip_cluster_checks: bool) -> Iterator[Problem]:
    outputs = [_Output(_STORE, spec.checkpoint.store, ("uid/manifests/000000000000.json",))]
    for at, query in enumerate(spec.queries):
        for kind, sink in query.sink.kinds.items():
            if sink is not None and sink.output_url is not None:
                path = f"spec.queries[{at}].sink.{kind}.url"
                stem = f"{query.name}-p000-e000000000000"
                files = (f"{stem}.parquet", f"{stem}.jsonl")
                outputs.append(_Output(path, sink.output_url, files))
    for at, source in enumerate(spec.sources):
        for kind, given in source.kinds.items():
            if given is not None and given.output_url is not None:
                path = f"spec.sources[{at}].{kind}.deadLetters"
                letters = f"{source.name}-0-p000-e000000000000.jsonl"
                outputs.append(_Output(path, given.output_url, (letters,)))
    mounts = _mounts(spec)
    taken: dict[tuple[str, str], str] = {}
    for output in outputs:
        path, url = output.path, output.url
        why_not = "cannot create an object only if it is absent"
        yield from _check_url(
            url, path, _CREATE_IF_ABSENT, why_not, skip_cluster_checks=skip_cluster_checks
        )
        key = _normalized_url(url)
        if key in taken:
            what = f"{url} is used by {taken[key]} too"
            yield Problem(path, "SharedPlace", what, "give each its own directory")
        taken.setdefault(key, path)
        yield from _check_is_apart(output, outputs, spec)
        if not skip_cluster_checks:
            yield from _check_is_on_volume(url, path, spec.checkpoint.volume, mounts)
    # With _CREATE_IF_ABSENT, because fsspec lists some of these only if their driver is installed.
    known, why_not = (
        _CREATE_IF_ABSENT.union(fsspec.available_protocols()),
        "is not a scheme that can be read",
    )
    for at, source in enumerate(spec.sources):
        for kind, given in source.kinds.items():
            if given is not None and given.input_url is not None:
                where = f"spec.sources[{at}].{kind}.url"
                yield from _check_pattern(given.input_url, where)
                yield from _check_url(
                    given.input_url, where, known, why_not, skip_cluster_checks=skip_cluster_checks
                )


def _check_is_apart(
    output: _Output, outputs: Sequence[_Output], spec: TopologySpec
) -> Iterator[Problem]:
    """Not in the directory of a sink, whose readers would read it too, nor in that of a source."""
    url, path = output.url, output.path
    for other in outputs:
        if other.path != _STORE and _is_visible(_parts_below(url, other.url)):
            what = f"{url} is in {other.url}, the directory of {other.path}"
            yield Problem(path, "SharedPlace", what, "give each its own directory")
    for source in spec.sources:
        input_url = next((k.input_url for k in source.kinds.values() if k is not None), None)
        if input_url is not None and _is_read(output, input_url):
            what = f"{url} is where source {source.name} reads, so its files would be input"
            hint = "write it elsewhere, or into a directory whose name begins with _"
            yield Problem(path, "SharedPlace", what, hint)


def _parts_below(url: str, directory: str) -> Sequence[str]:
    """The parts of a URL's path below a directory; none if it is not below it."""
    (scheme, path), (other_scheme, above) = _normalized_url(url), _normalized_url(directory)
    above = above.rstrip("/") + "/"
    is_below = scheme == other_scheme and path.startswith(above)
    return path[len(above) :].split("/") if is_below else ()


def _is_visible(parts: Sequence[str]) -> bool:
    """Whether a reader of a directory reads what is at this path below it."""
    return bool(parts) and not any(part.startswith((".", "_")) for part in parts)


def _is_read(output: _Output, input_url: str) -> bool:
    """Whether a source of `input_url`, a directory or a pattern, would read files of an output."""
    fixed = re.split(r"[*?[]", input_url)[0]
    if fixed == input_url:
        same = _normalized_url(output.url) == _normalized_url(input_url)
        return same or _is_visible(_parts_below(output.url, input_url))
    (scheme, path), (other_scheme, pattern) = map(_normalized_url, (output.url, input_url))
    if scheme != other_scheme:
        return False
    names_hidden = any(part.startswith((".", "_")) for part in input_url[len(fixed) :].split("/"))
    files = [f"{path}/{name}" for name in output.files]
    with contextlib.suppress(ValueError):  # a pattern that is refused
        found = [file for file in files if re.match(glob_translate(pattern), file)]
        above = f"{scheme}://{re.split(r'[*?[]', pattern)[0].rpartition('/')[0]}"
        return any(
            names_hidden or _is_visible(_parts_below(f"{scheme}://{file}", above)) for file in found
        )
    return False


def _check_pattern(url: str, path: str) -> Iterator[Problem]:
    try:
        glob_translate(url)
    except ValueError:
        what = f"{url}: ** stands for whole directories"
        yield Problem(path, "InvalidUrl", what, "write it like dir/**/*.parquet")


def _normalized_url(url: str) -> tuple[str, str]:
    """(scheme, path), equal for two spellings of one directory. In keys of object stores `//`, `.`
    and `%2F` are taken literally, on disks only `%2F`."""
    scheme, _, path = url.partition("://")
    scheme = _SYNONYMS.get(scheme, scheme)
    if scheme == "file":
        return scheme, _normalized(path)
    if scheme == "memory":
        path = path.lstrip("/")
    if scheme == "abfs":  # container@account.dfs.core.windows.net/path
        authority, slash, rest = path.partition("/")
        path = authority.lower() + slash + rest
    return scheme, path.rstrip("/")


def _check_is_on_volume(
    url: str, path: str, claim: str | None, mounts: Mapping[str, _Disk]
) -> Iterator[Problem]:
    scheme, _, disk_path = url.partition("://")
    if scheme not in _ON_DISK or not disk_path.startswith("/"):
        return
    disk_path = _normalized(disk_path)
    disk = _disk_at(disk_path, mounts)
    if disk is _Disk.CLAIM or (disk is _Disk.OTHER_VOLUME and path != _STORE):
        return
    write_to_volume = f"write file://{posixpath.join(VOLUME_MOUNT, disk_path.lstrip('/'))}"
    if not claim:
        what = f"{url} is on a node's disk, and is lost with the node"
        also = "" if _is_below(disk_path, VOLUME_MOUNT) else f" and {write_to_volume}"
        named = f"name a shared volume (an RWX claim) in spec.checkpoint.volume{also}"
        hint = f"{named}, or use s3://..."
    else:
        what = f"{url} is not on the claim {claim}, which pods mount at {VOLUME_MOUNT}"
        hint = f"{write_to_volume}: other paths are the pod's own disk, and are lost with it"
    yield Problem(path, "NoVolume", what, hint)


def _mounts(spec: TopologySpec) -> dict[str, _Disk]:
    """What a task's container mounts, by path: the claim, and the volumes of `podTemplate`. A mount
    below the path of another one hides that part of it."""
    mounts = {VOLUME_MOUNT: _Disk.CLAIM} if spec.checkpoint.volume else {}
    pod = spec.pod_template.get("spec")
    volumes = {str(v.get("name")): v for v in _mappings(pod, "volumes")}
    for container in _mappings(pod, "containers"):
        if container.get("name") != TASK_CONTAINER:
            continue
        for mount in _mappings(container, "volumeMounts"):
            at, volume = mount.get("mountPath"), volumes.get(str(mount.get("name")), {})
            if isinstance(at, str) and at.startswith("/"):
                outlives_pod = _POD_LOCAL_VOLUMES.isdisjoint(volume)
                mounts[_normalized(at)] = _Disk.OTHER_VOLUME if outlives_pod else _Disk.POD_LOCAL
    return mounts


def _mappings(parent: object, field: str) -> list[Mapping[str, Any]]:
    """The objects of a list in `podTemplate`. The API server reports items that are no objects."""
    items = parent.get(field) if isinstance(parent, Mapping) else None
    return [i for i in items if isinstance(i, Mapping)] if isinstance(items, list) else []


def _disk_at(disk_path: str, mounts: Mapping[str, _Disk]) -> _Disk:
    mounts_above = [path for path in mounts if _is_below(disk_path, path)]
    return mounts[max(mounts_above, key=len)] if mounts_above else _Disk.POD_LOCAL


def _is_below(disk_path: str, directory: str) -> bool:
    return posixpath.commonpath([disk_path, directory]) == directory


def _normalized(path: str) -> str:
    return posixpath.normpath("/" + path.lstrip("/"))


def _check_url(
    url: str, path: str, schemes: Collection[str], why_not: str, *, skip_cluster_checks: bool
) -> Iterator[Problem]:
    """Schemes are case-sensitive, as in fsspec. Whether a driver is installed is not checked: that
    depends on the image of the tasks."""
    scheme, _, rest = url.partition("://")
    if not (scheme and rest) or (scheme in _ON_DISK) != rest.startswith("/"):
        hint = "write it like file:///path or s3://bucket/path"
        yield Problem(path, "InvalidUrl", f"{url!r} is not a URL", hint)
        return
    possible = sorted(s for s in schemes if skip_cluster_checks or s != "memory")
    if scheme in possible:
        return
    if scheme in schemes:
        why_not = "is the memory of one process, which other tasks do not see"
    common = [s for s in _COMMON if s in possible]
    hint = did_you_mean(scheme, possible) or f"use for instance {', '.join(common)}"
    yield Problem(path, "InvalidUrl", f"{scheme}:// {why_not}", hint)
