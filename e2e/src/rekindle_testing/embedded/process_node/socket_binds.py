"""Restricts a pod to its own address: a bind to the wildcard address becomes one to the pod's.

All pods share the machine's loopback, so two that listen on 0.0.0.0:8080 would
conflict.  A small BPF program on the pod's control group rewrites such a bind of a
TCP port.  Other binds do not change: port 0 is for clients and never conflicts, and
the processes of one pod connect to each other on 127.0.0.1.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

# Constants of linux/bpf.h without their prefixes, such as BPF_PROG_TYPE_.
_BPF_CALL_NUMBERS = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH = 5, 8
_CGROUP_SOCK_ADDR = 18
_INET4_BIND, _INET6_BIND = 8, 9

# Offsets in struct bpf_sock_addr.
_IP4, _IP6, _PORT, _TYPE = 4, 8, 24, 32
_R0, _R1, _R2 = 0, 1, 2
# Opcodes: LDX|MEM|W, STX|MEM|W, MOV32 of an immediate, EXIT, JNE and JEQ with an immediate.
_LOAD, _STORE, _MOVE, _EXIT, _JUMP_NOT_EQUAL, _JUMP_EQUAL = 0x61, 0x63, 0xB4, 0x95, 0x55, 0x15


def create_restricted_cgroup(cgroup: Path, address: str) -> None:
    """Create a pod's control group; without bpf() its binds are not restricted."""
    cgroup.mkdir(exist_ok=True)
    try:
        restrict_bind(cgroup, address)
    except OSError as error:
        log.warning("pods can bind to any address: %s", error)


def restrict_bind(cgroup: Path, address: str) -> None:
    """Redirect wildcard binds of new sockets of the group's processes to this address. Raises
    OSError if that is not permitted."""
    word = int.from_bytes(socket.inet_aton(address), "little", signed=True)
    # An IPv6 socket on the wildcard address takes IPv4 too: it gets the IPv4-mapped address.
    mapped = (0, 0, int.from_bytes(b"\0\0\xff\xff", "little", signed=True), word)
    descriptor = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _attach(descriptor, _INET4_BIND, _program([_IP4], [word]))
        _attach(descriptor, _INET6_BIND, _program([_IP6 + 4 * i for i in range(4)], mapped))
    finally:
        os.close(descriptor)


def _program(fields: list[int], values: Iterable[int]) -> bytes:
    """`if TCP, the port is not 0 and all fields are 0: fields = values`, and allow the bind.
    `fields`: offsets in struct bpf_sock_addr."""
    rewrite = b"".join(
        _instruction(_MOVE, _R2, immediate=value) + _instruction(_STORE, _R1, _R2, field)
        for field, value in zip(fields, values, strict=True)
    )
    skipped = len(rewrite) // 8  # instructions that a failed test jumps over
    # Each test jumps over what follows it, to the end.
    checks = [(_TYPE, _JUMP_NOT_EQUAL, int(socket.SOCK_STREAM)), (_PORT, _JUMP_EQUAL, 0)]
    checks += [(field, _JUMP_NOT_EQUAL, 0) for field in fields]
    tests = b""
    for field, jump, value in reversed(checks):
        test = _instruction(_LOAD, _R2, _R1, field)
        tests = test + _instruction(jump, _R2, 0, skipped, value) + tests
        skipped += 2
    return tests + rewrite + _instruction(_MOVE, _R0, immediate=1) + _instruction(_EXIT)


def _instruction(
    code: int, target: int = 0, source: int = 0, offset: int = 0, immediate: int = 0
) -> bytes:
    return struct.pack("<BBhi", code, source << 4 | target, offset, immediate)


def _attach(cgroup: int, attach_type: int, program: bytes) -> None:
    code, license_name = ctypes.create_string_buffer(program), ctypes.create_string_buffer(b"GPL")
    # union bpf_attr: type, instructions (count, address), license; no log (three fields), any
    # kernel version, no flags; name, no network interface, expected attach type.
    load = struct.pack(
        "<IIQQIIQII16sII",
        *(_CGROUP_SOCK_ADDR, len(program) // 8),
        *(ctypes.addressof(code), ctypes.addressof(license_name)),
        *(0, 0, 0, 0, 0, b"pod_address", 0, attach_type),
    )
    loaded = _bpf(_PROG_LOAD, load)
    try:
        _bpf(_PROG_ATTACH, struct.pack("<IIII", cgroup, loaded, attach_type, 0))
    finally:
        os.close(loaded)


def _bpf(command: int, attributes: bytes) -> int:
    if (number := _BPF_CALL_NUMBERS.get(platform.machine())) is None:
        raise OSError(f"the system call number of bpf() on {platform.machine()} is unknown")
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(number, command, buffer, len(attributes))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"bpf: {os.strerror(ctypes.get_errno())}")
    return result
