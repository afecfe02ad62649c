"""`make cluster`: an embedded cluster with Rekindle installed, until Ctrl-C or `quit`."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rekindle_testing.console.commands import CommandError
from rekindle_testing.console.interrupts import (
    Interrupted,
    Interruption,
    end_children,
    interrupt_main_thread,
    interruptible,
)
from rekindle_testing.console.session import ConsoleSession
from rekindle_testing.console.sockets import runtime_directory, serve
from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.embedded.toolchain import ensure_control_plane_binaries, ensure_helm
from rekindle_testing.harness import flights
from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.paths import ROOT
from rekindle_testing.waiting import DeadlineError

_PROMPT = "rekindle-cluster> "
_CLAIM = "rekindle"  # of the example's checkpoint store
KAFKA_PORT = 9092
EXAMPLE_SERVERS = f"127.0.0.1:{KAFKA_PORT}"
"""What examples/clicks has."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5, help="number of nodes at the start")
    parser.add_argument("--kafka", action="store_true", help="a broker of Kafka beside it")
    options = parser.parse_args(arguments)
    ready = threading.Event()
    try:
        with interruptible() as interruption:
            try:
                with tempfile.TemporaryDirectory(prefix="rekindle-cluster-") as directory:
                    _run(Path(directory), options, ready, interruption)
            finally:
                end_children()  # that an interrupted start has left
    except Interrupted as interrupted:
        print("\nthe cluster has stopped", flush=True)
        # It runs until a signal, so this is no failure.
        return 0 if ready.is_set() else 128 + interrupted.number
    except (EmbeddedError, DeadlineError, RuntimeError) as error:
        print(f"rekindle-cluster: {error}", file=sys.stderr)
        return 1
    print("the cluster has stopped", flush=True)
    return 0


def _run(
    directory: Path,
    options: argparse.Namespace,
    ready: threading.Event,
    interruption: Interruption,
) -> None:
    runtime = runtime_directory()
    with ExitStack() as stack:
        kafka = stack.enter_context(_start_kafka(directory)) if options.kafka else None
        cluster = stack.enter_context(
            EmbeddedCluster(directory, nodes=options.nodes, on_progress=_print_line)
        )
        _print_line("copying the example's input, 336,776 flights")
        flights.prepare_input(cluster.shared / "input")
        cluster.create_claim(_CLAIM)
        _print_line("helm install rekindle")
        cluster.install()
        programs = _link_programs(directory / "bin")
        session = ConsoleSession(cluster)

        def stop_if_requested() -> None:
            if session.ended:
                interrupt_main_thread()

        with serve(runtime, session.execute, stop_if_requested):
            print(
                hints(
                    cluster.control_plane.kubeconfig,
                    programs,
                    cluster.shared,
                    list(cluster.nodes),
                    kafka.bootstrap_servers if kafka is not None else None,
                ),
                flush=True,
            )
            ready.set()
            if _has_terminal():
                prompt(session)
                interruption.ignore_signals()  # the cluster is being stopped
            else:
                while True:  # until a signal, which does not end a wait that it came just before
                    time.sleep(1)


def _start_kafka(directory: Path) -> KafkaBroker:
    """At the port that the example has, if that is free."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the broker does
        try:
            probe.bind(("127.0.0.1", KAFKA_PORT))
            port: int | None = KAFKA_PORT
        except OSError:
            port = None
    _print_line("starting a broker of Kafka")
    return KafkaBroker(directory / "kafka", on_progress=_print_line, port=port)


def _link_programs(directory: Path) -> Path:
    """A folder for PATH with the programs that a user needs, and no others."""
    directory.mkdir()
    (directory / "kubectl").symlink_to(ensure_control_plane_binaries().kubectl)
    (directory / "helm").symlink_to(ensure_helm())
    for name in ("rekindle", "rekindle-cluster"):
        (directory / name).symlink_to(Path(sys.executable).parent / name)
    return directory


def hints(
    kubeconfig: Path,
    programs: Path,
    shared: Path,
    nodes: Sequence[str],
    kafka: str | None = None,
) -> str:
    """The commands to try next. `shared`: the directory that all pods mount. `kafka`: where the
    broker listens, if there is one."""
    steps = (
        (f"kubectl apply -f {_relative(flights.TOPOLOGY)}", "a year of flights, a day each second"),
        ("kubectl get topo -w", "its queries: how many are Live"),
        ("rekindle status flights --watch", "queries and tasks, with phases and lag"),
        ("rekindle-cluster status", "nodes and topologies"),
        (f"rekindle-cluster kill {' '.join(nodes[:2])}", "kill machines: any, as many as you like"),
        ("kubectl describe topo flights", "what is lost, the recovery plan, Events"),
        ("rekindle-cluster add-node 2", "capacity returns"),
        ("rekindle-cluster help", "freeze, thaw, partition, heal"),
    )
    width = max(len(step) for step, _ in steps)
    return "\n".join(
        (
            "",
            f"The cluster is ready: {len(nodes)} nodes, Rekindle installed. In another terminal:",
            "",
            f"  export KUBECONFIG={kubeconfig} PATH={programs}:$PATH",
            "",
            *(f"  {step:<{width}}  # {text}" for step, text in steps),
            "",
            f"Your own files: what is in {shared}",
            f"a topology in the namespace default reads and writes as file://{SHARED_MOUNT_PATH},",
            f"with checkpoint.volume: {_CLAIM}.",
            "",
            *(_kafka_hints(kafka) if kafka is not None else ()),
            "The commands of rekindle-cluster work here, too. Ctrl-C ends everything.",
            "",
        )
    )


def _kafka_hints(servers: str) -> Sequence[str]:
    """How to run the example on it."""
    example = _relative(ROOT / "examples" / "clicks")
    given = "" if servers == EXAMPLE_SERVERS else f" --servers {servers}"
    apply = f"kubectl apply -f {example}/topology.yaml"
    if given:
        edit = f"sed s/{EXAMPLE_SERVERS}/{servers}/ {example}/topology.yaml"
        apply = f"{edit} | kubectl apply -f -"
    script = f"{_relative(Path(sys.executable))} {example}/clicks.py{given}"
    return (
        f"Kafka listens at {servers}. Its example, in the same terminal:",
        "",
        f"  {script} create",
        f"  {apply}",
        f"  {script} produce    # half a minute",
        f"  {script} check      # that each session is there once",
        "",
    )


def _relative(path: Path) -> str:
    """Relative to the current folder, if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _has_terminal() -> bool:
    """Whether input is from a terminal: not for a pipe, nor for a job in the background."""
    return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()


def prompt(session: ConsoleSession) -> None:
    """Take commands from the terminal until `quit` or the end of input."""
    import readline  # noqa: F401 — history and editing for input()

    while not session.ended:
        try:
            line = input(_PROMPT)
        except EOFError:
            return
        if not line.strip():
            continue
        try:
            print(session.execute(line))
        except CommandError as error:
            print(error)
        except Exception as error:  # of the cluster, which keeps running
            print(f"failed: {error}")


def _print_line(text: str) -> None:
    print(f"rekindle-cluster: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
