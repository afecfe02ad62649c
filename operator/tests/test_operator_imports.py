"""The operator's image has neither Arrow nor NumPy."""

from __future__ import annotations

import json
import subprocess
import sys

from rekindle_testing.fixtures.bad_manifests import bad_manifests, good_manifest

CODE = """
import json, sys
import rekindle_operator.__main__, rekindle_operator.watchdog.__main__
from rekindle.errors import InvalidTopology
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec

for spec in json.load(sys.stdin):  # some modules may be imported only when they are needed
    try:
        compile_topology(load_spec(spec), "t")
    except InvalidTopology:
        pass
print([name for name in ("numpy", "pandas", "pyarrow", "pyspark", "rich") if name in sys.modules])
"""


def test_the_operator_loads_neither_arrow_nor_numpy() -> None:
    manifests = [good_manifest(), *(bad.manifest for bad in bad_manifests())]
    specs = json.dumps([manifest["spec"] for manifest in manifests], default=str)
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, input=specs, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
