"""System calls that Python 3.11 does not have, and atomic writes of small files.

Standard library only: the launcher, the init and the shims import it.  ctypes
is loaded at the first call, because a shim needs it only in its forked child.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def unshare(flags: int) -> None:
    _call("unshare", flags)


def set_namespace(descriptor: int, kind: int) -> None:
    _call("setns", descriptor, kind)


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel for this signal once the thread that forked us is gone."""
    _call("prctl", _PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def no_new_privileges() -> None:
    """Programs that this process executes gain no privileges, such as by a setuid bit."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    _call("mount", os.fsencode(source), os.fsencode(target), kind.encode(), flags, data.encode())


def bind(source: str, target: str, *, read_only: bool = False, recursive: bool = True) -> None:
    """Show `source` at `target`, which must exist."""
    mount(source, target, flags=MS_BIND | (MS_REC if recursive else 0))
    if read_only:
        mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def unmount(target: str) -> None:
    """Lazily: hidden at once, released when nothing uses it any more."""
    _call("umount2", os.fsencode(target), _MNT_DETACH)


def make_mounts_private() -> None:
    """Hide later mounts from all other namespaces."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def write_json(path: Path, content: Any) -> None:
    """Replace a file atomically: a reader sees the old one or the new one."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(content))
    draft.replace(path)


def _call(name: str, *arguments: Any) -> int:
    import ctypes

    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    converted = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    result: int = function(*converted)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")
    return result
