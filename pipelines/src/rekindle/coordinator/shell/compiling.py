"""Compiles topologies in a child process that exits afterwards.

The SQL parser costs some 30 MB and a second of CPU; a coordinator only needs it when a generation
appears, and has to poll its tasks and renew its Lease meanwhile.

Run as a module (`python -m rekindle.coordinator.shell.compiling`) it is that child: it reads JSON
`[[name, spec], ...]` from standard input and writes a pickled list to standard output, with a
Topology or an error message for each.

Design: docs/design/coordinator.md#start.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import Sequence
from typing import Any

from rekindle.errors import RekindleError
from rekindle.topology.model import Topology

_TIMEOUT_S = 60.0


class CompilationFailed(RekindleError):
    """The newest generation does not compile (the operator accepted it), or the child died."""


async def compile_specs(specs: Sequence[tuple[str, Any]]) -> list[Topology | str]:
    """The topology of each spec, or why it does not compile. Raises CompilationFailed."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        work = child.communicate(json.dumps(specs).encode())
        output, errors = await asyncio.wait_for(work, _TIMEOUT_S)
    except TimeoutError as error:
        raise CompilationFailed(f"the compiler did not end within {_TIMEOUT_S:g} s") from error
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode != 0:
        raise CompilationFailed(f"the compiler failed: {errors.decode()[-500:]}")
    compiled: list[Topology | str] = pickle.loads(output)
    return compiled


def _main() -> None:
    from rekindle.errors import InvalidTopology
    from rekindle.topology.compile import compile_topology
    from rekindle.topology.load import load_spec

    def compiled(name: str, spec: Any) -> Topology | str:
        try:
            # Whether file:// stores are shared was checked when the topology was accepted.
            return compile_topology(load_spec(spec), name, skip_cluster_checks=True, accepted=True)
        except InvalidTopology as error:
            return str(error)

    results = [compiled(name, spec) for name, spec in json.load(sys.stdin)]
    sys.stdout.buffer.write(pickle.dumps(results))


if __name__ == "__main__":
    _main()
