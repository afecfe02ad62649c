"""`prepare` installs and builds what kubelet nodes need; `clean` removes what processes have left
that ended without removing their nodes."""

import sys

from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodesUnsupported
from rekindle_testing.embedded.kubelet_node.images import ensure_busybox
from rekindle_testing.embedded.kubelet_node.packages import ensure_machine
from rekindle_testing.embedded.kubelet_node.removal import sweep
from rekindle_testing.embedded.toolchain import ensure_control_plane, ensure_node


def prepare() -> None:
    try:
        ensure_machine(_report)
    except KubeletNodesUnsupported as error:
        # No failure: the tests are skipped for the same reason.
        _report(f"nothing is prepared: {error}")
        return
    ensure_control_plane(_report)
    ensure_node(_report)
    ensure_busybox(_report)


def clean() -> None:
    sweep(report=_report)


def main() -> int:
    commands = {"prepare": prepare, "clean": clean}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        _report(f"usage: python -m {__package__} {'|'.join(commands)}")
        return 2
    try:
        commands[sys.argv[1]]()
    except EmbeddedError as error:
        _report(f"error: {error}")
        return 1
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
