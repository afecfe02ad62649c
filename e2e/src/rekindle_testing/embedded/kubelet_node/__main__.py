"""`prepare` installs and builds what kubelet nodes need; `clean` removes nodes whose process ended
without removing them."""

import sys

from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodesUnsupported
from rekindle_testing.embedded.kubelet_node.images import ensure_busybox
from rekindle_testing.embedded.kubelet_node.packages import ensure_host_prerequisites
from rekindle_testing.embedded.kubelet_node.removal import remove_leftovers
from rekindle_testing.embedded.toolchain import (
    ensure_control_plane_binaries,
    ensure_kubelet_binaries,
)


def prepare() -> None:
    try:
        ensure_host_prerequisites(_print_line)
    except KubeletNodesUnsupported as error:
        # No failure: the tests are skipped for the same reason.
        _print_line(f"nothing is prepared: {error}")
        return
    ensure_control_plane_binaries(_print_line)
    ensure_kubelet_binaries(_print_line)
    ensure_busybox(_print_line)


def clean() -> None:
    remove_leftovers(on_progress=_print_line)


def main() -> int:
    commands = {"prepare": prepare, "clean": clean}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        _print_line(f"usage: python -m {__package__} {'|'.join(commands)}")
        return 2
    try:
        commands[sys.argv[1]]()
    except EmbeddedError as error:
        _print_line(f"error: {error}")
        return 1
    return 0


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
