"""The operator's image has neither Arrow nor NumPy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
print(json.dumps({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}))
"""
SAMPLE = 20
"""Of so many bad manifests one is compiled: of modules that are imported late, the product's own
are found by reading the code."""


@pytest.mark.process
def test_the_operator_loads_neither_arrow_nor_numpy() -> None:
    manifests = [good_manifest(), *(bad.manifest for bad in [*bad_manifests()][::SAMPLE])]
    specs = json.dumps([manifest["spec"] for manifest in manifests], default=str)
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, input=specs, capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert not {"numpy", "pandas", "pyarrow", "pyspark", "rich"} & loaded.keys()
    ours = {name: file for name, file in loaded.items() if name.startswith("rekindle") and file}
    assert len(ours) > 100
    late = {name: set(late_imports(Path(file))) - loaded.keys() for name, file in ours.items()}
    assert {name: modules for name, modules in late.items() if modules} == {}


def late_imports(file: Path) -> Iterator[str]:
    """Modules that functions of a file import."""
    text = file.read_text()
    if "    from " not in text and "    import " not in text:
        return
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom):
                yield node.module or ""
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
