"""Checks of URLs: schemes, and that each output has a place of its own that outlives its pod."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import fsspec

from rekindle.errors import Problem
from rekindle.objects import CONDITIONAL
from rekindle.topology.problems import did_you_mean
from rekindle.topology.spec import TopologySpec

_ON_DISK = ("file", "local")
_CREATE_IF_ABSENT = frozenset(_ON_DISK) | CONDITIONAL
_COMMON = ("file", "s3", "gs", "abfs", "https")


def check_urls(spec: TopologySpec, *, local: bool) -> Iterator[Problem]:
    urls = [("spec.checkpoint.store", spec.checkpoint.store)]
    for at, query in enumerate(spec.queries):
        for kind, sink in query.sink.kinds.items():
            if sink is not None and sink.output_url is not None:
                urls.append((f"spec.queries[{at}].sink.{kind}.url", sink.output_url))
    taken: dict[str, str] = {}
    for path, url in urls:
        lacks = "cannot create an object only if it is absent"
        yield from _url(url, path, _CREATE_IF_ABSENT, lacks, local=local)
        key = url.rstrip("/")
        if key in taken:
            what = f"{url} is used by {taken[key]} too"
            yield Problem(path, "SharedPlace", what, "give each its own directory")
        taken.setdefault(key, path)
        on_disk = url.partition("://")[0] in _ON_DISK
        if on_disk and spec.checkpoint.volume is None and not local:
            what = f"{url} is on a node's disk, and is lost with the node"
            hint = "name a shared volume (an RWX claim) in spec.checkpoint.volume, or use s3://..."
            yield Problem(path, "NoVolume", what, hint)
    # With _CREATE_IF_ABSENT, because fsspec lists some of these only if their driver is installed.
    known, lacks = (
        _CREATE_IF_ABSENT.union(fsspec.available_protocols()),
        "is not a scheme that can be read",
    )
    for at, source in enumerate(spec.sources):
        for kind, given in source.kinds.items():
            if given is not None and given.input_url is not None:
                where = f"spec.sources[{at}].{kind}.url"
                yield from _url(given.input_url, where, known, lacks, local=local)


def _url(
    url: str, path: str, schemes: Collection[str], lacks: str, *, local: bool
) -> Iterator[Problem]:
    """Schemes are case-sensitive, as in fsspec. Whether a driver is installed is not checked: that
    depends on the image of the tasks."""
    scheme, _, rest = url.partition("://")
    if not (scheme and rest) or (scheme in _ON_DISK) != rest.startswith("/"):
        hint = "write it like file:///path or s3://bucket/path"
        yield Problem(path, "InvalidUrl", f"{url!r} is not a URL", hint)
        return
    possible = sorted(s for s in schemes if local or s != "memory")
    if scheme in possible:
        return
    if scheme in schemes:
        lacks = "is the memory of one process, which other tasks do not see"
    common = [s for s in _COMMON if s in possible]
    hint = did_you_mean(scheme, possible) or f"use for instance {', '.join(common)}"
    yield Problem(path, "InvalidUrl", f"{scheme}:// {lacks}", hint)
