"""`rekindle-cluster`: commands for the cluster that `make cluster` started, from any terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rekindle_testing.console.commands import usage
from rekindle_testing.console.sockets import (
    NoCluster,
    choose_cluster,
    running_clusters,
    runtime_directory,
    send_command,
)

_EXAMPLES = """
examples:
  rekindle-cluster status
  rekindle-cluster kill node-1 node-2
  rekindle-cluster add-node 2
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="rekindle-cluster",
        description="Commands for the cluster that `make cluster` started.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"commands:\n{_indented(usage())}\n{_EXAMPLES}",
    )
    parser.add_argument("--cluster", metavar="PID", help="which one, if several run")
    parser.add_argument("command", nargs="*", help="a command and its arguments")
    options = parser.parse_args(arguments)
    if not options.command or options.command == ["help"]:
        parser.print_help()
        return 0
    try:
        directory = runtime_directory()
        cluster = choose_cluster(running_clusters(directory), options.cluster)
        ok, text = send_command(directory, cluster, " ".join(options.command))
    except (NoCluster, OSError) as error:
        ok, text = False, str(error)
    if ok:
        print(text)
        return 0
    print(f"rekindle-cluster: {text}", file=sys.stderr)
    return 1


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
