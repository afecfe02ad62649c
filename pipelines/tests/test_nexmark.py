"""The queries of `examples/nexmark` against DuckDB."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/nexmark"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"nexmark_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_same_arguments_give_the_same_rows(tmp_path: Path) -> None:
    for run in ("one", "two"):
        module("generate").generate(tmp_path / run, events=1_000, rate=100, seed=3)
    files = [sorted((tmp_path / run).iterdir()) for run in ("one", "two")]
    assert [f.name for f in files[0]] == ["auctions.parquet", "bids.parquet", "persons.parquet"]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


@pytest.mark.spark
def test_every_query_gives_the_rows_of_the_oracle(tmp_path: Path) -> None:
    data, output = tmp_path / "input", tmp_path / "output"
    rows = module("generate").generate(data, events=5_000, rate=100, seed=1)
    assert rows == {"persons": 100, "auctions": 300, "bids": 4_600}
    command = [str(Path(sys.executable).with_name("rekindle")), "run"]
    places = ["--input", str(data), "--output", str(output)]
    subprocess.run([*command, str(EXAMPLE / "topology.yaml"), *places], check=True)
    results = module("check").check(data, output)
    assert {path.name for path in output.iterdir()} == set(results)
    assert all(right for right, _, _ in results.values())
    assert {q: r for q, r in results.items() if any(r[1:])} == {}
