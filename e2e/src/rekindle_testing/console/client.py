"""`rekindle-cluster`: commands for the cluster that `make cluster` started, from any terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rekindle_testing.console.commands import usage
from rekindle_testing.console.sockets import (
    NoCluster,
    ask,
    choose_cluster,
    running_clusters,
    runtime_directory,
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
        done, said = ask(directory, cluster, " ".join(options.command))
    except (NoCluster, OSError) as error:
        done, said = False, str(error)
    if done:
        print(said)
        return 0
    print(f"rekindle-cluster: {said}", file=sys.stderr)
    return 1


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
