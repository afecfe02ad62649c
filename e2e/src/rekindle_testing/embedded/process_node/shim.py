"""The parent of one container: writes its logs and its exit to disk, forwards signals.

It outlives the agent, so that a restarted agent finds running containers and missed
exits.  The container is pid 1 of a PID namespace: when it ends, the kernel kills all
its processes, whatever their process group.
SIGTERM is forwarded; SIGUSR1 becomes SIGKILL.  Standard library only, and small:
there is one for each container.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import NoReturn

from rekindle_testing.embedded import priority
from rekindle_testing.embedded.process_node import rootfs, syscalls

_MAX_LINE_BYTES = 16 * 1024
# Time for the last output of the container's descendants after its end.
_DRAIN_S = 1.0
_POLL_MS = 50
_MAX_MESSAGE_BYTES = 4096


class Log:
    """The container's output in the format of CRI logs: `time stream tag line`. Tag F: a full line,
    or its end; P: a part of a line."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._file = self._open()
        self._rest = {"stdout": b"", "stderr": b""}

    def add(self, stream: str, data: bytes) -> None:
        *lines, rest = (self._rest[stream] + data).split(b"\n")
        for line in lines:
            self._write(stream, b"F", line)
        while len(rest) >= _MAX_LINE_BYTES:
            self._write(stream, b"P", rest[:_MAX_LINE_BYTES])
            rest = rest[_MAX_LINE_BYTES:]
        self._rest[stream] = rest

    def close(self) -> None:
        for stream, rest in self._rest.items():
            if rest:
                self._write(stream, b"P", rest)
        os.close(self._file)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _write(self, stream: str, tag: bytes, line: bytes) -> None:
        head = f"{timestamp(time.time_ns())} {stream} ".encode()
        os.write(self._file, head + tag + b" " + line + b"\n")
        if os.fstat(self._file).st_size >= self._limit_bytes:
            os.close(self._file)
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._open()


def timestamp(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:09d}Z"


def main(directory_path: str) -> None:
    directory = Path(directory_path)
    spec = json.loads((directory / "spec.json").read_text())
    hold_lock(directory)
    if spec["cgroup"]:
        Path(spec["cgroup"], "cgroup.procs").write_text("0")
    forwarded = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    outputs = {name: os.pipe() for name in ("stdout", "stderr")}
    failure_in, failure_out = os.pipe()
    syscalls.unshare(syscalls.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        _become_container(spec, outputs, failure_out)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(child, signal.SIGKILL))
    for _, write_end in outputs.values():
        os.close(write_end)
    os.close(failure_out)
    # Ends when the child executes the container's program.
    failure = _read_all(failure_in)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
    if not failure:
        syscalls.write_json(directory / "state.json", {"pid": child})
    log = Log(directory / "log", spec["log_limit_bytes"])
    _copy({read_end: name for name, (read_end, _) in outputs.items()}, log, child)
    _, status = os.waitpid(child, 0)
    log.close()
    code = os.waitstatus_to_exitcode(status)
    syscalls.write_json(
        directory / "exit.json",
        {
            "exit_code": 128 - code if code < 0 else code,
            "signal": -code if code < 0 else 0,
            "started_at": spec["started_at"],
            "finished_at": time.time(),
            "start_error": failure.decode(errors="replace"),
            "message": _message(Path(spec["termination_message"])),
        },
    )


def hold_lock(directory: Path) -> None:
    """Until the shim ends: others check by the lock whether it runs, and read its pid."""
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, str(os.getpid()).encode())


def _become_container(
    spec: rootfs.Spec, outputs: dict[str, tuple[int, int]], failure: int
) -> NoReturn:
    try:
        syscalls.die_with_parent(signal.SIGKILL)
        os.setsid()
        priority.lower_priority(priority.POD_NICE)
        for limitation in rootfs.enter_root(spec):
            # What this machine does not support. Still the agent's log, not the container's.
            os.write(2, f"{spec['hostname']}: {limitation}\n".encode())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(outputs[name][1], number)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        argv: list[str] = spec["argv"]
        os.execvpe(argv[0], argv, spec["environment"])
    except BaseException as error:
        os.write(failure, f"{spec['argv'][0]}: {error}".encode())
    os._exit(128)


def _copy(pipes: dict[int, str], log: Log, child: int) -> None:
    """Until both pipes are closed, or the child has ended and they have no more output."""
    poll = select.poll()
    for descriptor in pipes:
        poll.register(descriptor, select.POLLIN)
    ended = os.pidfd_open(child)
    poll.register(ended, select.POLLIN)
    deadline: float | None = None
    pipes = dict(pipes)
    while pipes:
        ready = poll.poll(None if deadline is None else _POLL_MS)
        if deadline is not None and (not ready or time.monotonic() > deadline):
            break
        for descriptor, _ in ready:
            if descriptor == ended:
                poll.unregister(ended)
                deadline = time.monotonic() + _DRAIN_S
            elif data := os.read(descriptor, 65536):
                log.add(pipes[descriptor], data)
            else:
                poll.unregister(descriptor)
                del pipes[descriptor]


def _read_all(descriptor: int) -> bytes:
    parts: list[bytes] = []
    while part := os.read(descriptor, 4096):
        parts.append(part)
    os.close(descriptor)
    return b"".join(parts)


def _message(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-_MAX_MESSAGE_BYTES:].decode(errors="replace")
    return ""
