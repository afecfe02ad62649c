"""Commands from another terminal: each running cluster has a Unix socket in a folder of the user.

A client sends one line of text, and the response is one JSON object: {"ok": bool, "text": str}.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

from rekindle_testing.embedded.errors import EmbeddedError

DIRECTORY_VARIABLE = "REKINDLE_CLUSTER_DIR"
_MAX_LINE_BYTES = 4096
_RESPONSE_TIMEOUT_S = 180.0  # longer than any command takes

Execute = Callable[[str], str]


class NoCluster(EmbeddedError):
    """No cluster runs, it is not clear which one is meant, or the folder of sockets is not safe."""


def runtime_directory(environment: Mapping[str, str] | None = None) -> Path:
    """The same in every terminal of this user, whatever its TMPDIR; made with mode 0700."""
    environment = os.environ if environment is None else environment
    user = os.geteuid()
    system = Path(f"/run/user/{user}")
    default = system / "rekindle" if os.access(system, os.W_OK) else Path(f"/tmp/rekindle-{user}")
    directory = Path(environment.get(DIRECTORY_VARIABLE) or default)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise NoCluster(
            f"{directory} must be a folder that you own, with mode 0700: remove it, or set "
            f"{DIRECTORY_VARIABLE}"
        )
    return directory


@contextlib.contextmanager
def serve(directory: Path, execute: Execute, on_response: Callable[[], None]) -> Iterator[Path]:
    """Serve in threads until the end of the context. `on_response` is called after each
    response."""
    path = directory / f"{os.getpid()}.sock"
    path.unlink(missing_ok=True)

    class ConsoleHandler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            line = self.rfile.readline(_MAX_LINE_BYTES).decode(errors="replace")
            response = _respond(execute, line)
            with contextlib.suppress(OSError):  # the client has disconnected
                self.wfile.write(json.dumps(response).encode() + b"\n")
                self.wfile.flush()
            on_response()

    class ConsoleServer(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        block_on_close = False  # a slow command must not delay the end

    with ConsoleServer(str(path), ConsoleHandler) as server:
        try:
            threading.Thread(target=server.serve_forever, daemon=True, name="commands").start()
            yield path
        finally:
            path.unlink(missing_ok=True)
            server.shutdown()


def _respond(execute: Execute, line: str) -> dict[str, object]:
    try:
        return {"ok": True, "text": execute(line)}
    except Exception as error:  # sent to the client; the cluster keeps running
        return {"ok": False, "text": str(error) or repr(error)}


def running_clusters(directory: Path) -> list[str]:
    """The process ids of clusters that listen. Sockets of stopped ones are removed."""
    found = []
    for path in sorted(directory.glob("*.sock")):
        try:
            _connect(path).close()
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            continue
        else:
            found.append(path.stem)
    return found


def choose_cluster(running: list[str], wanted: str | None) -> str:
    """The only one, or the one that is wanted; all by process id. Raises `NoCluster`."""
    if wanted is not None and wanted not in running:
        raise NoCluster(f"no cluster {wanted} is running; running: {', '.join(running) or 'none'}")
    if not running:
        raise NoCluster("no cluster is running; start one with `make cluster`")
    if wanted is None and len(running) > 1:
        raise NoCluster(
            f"{len(running)} clusters are running: choose one with --cluster "
            f"({', '.join(running)}: the process ids)"
        )
    return wanted or running[0]


def send_command(directory: Path, cluster: str, line: str) -> tuple[bool, str]:
    """Whether the command succeeded, and the response. `cluster`: its process id."""
    with _connect(directory / f"{cluster}.sock") as connection:
        connection.settimeout(_RESPONSE_TIMEOUT_S)
        connection.sendall(line.encode() + b"\n")
        with connection.makefile("rb") as stream:
            raw = stream.readline()
    if not raw:
        raise NoCluster(f"cluster {cluster} stopped before it responded")
    response = json.loads(raw)
    return cast(bool, response["ok"]), cast(str, response["text"])


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection
