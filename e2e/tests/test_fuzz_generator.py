"""Generated manifests: the same for a seed, nearly valid, and with every field of the CRD."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import names
from rekindle.errors import InvalidTopology
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle_testing.fixtures.bad_manifests import good_manifest
from rekindle_testing.fixtures.crd import resource_schema
from rekindle_testing.fuzz import topologies, values
from rekindle_testing.fuzz.generator import case, edit, is_edited
from rekindle_testing.fuzz.schema import Path, pool, random_value, schema_at
from rekindle_testing.fuzz.verdict import Verdict, verdict, violations

_INDEXES = st.integers(0, 10_000)


def _fields(schema: Any, path: Path) -> Iterator[Path]:
    yield path
    for name, inner in (schema.get("properties") or {}).items():
        yield from _fields(inner, (*path, name))
    if "items" in schema:
        yield from _fields(schema["items"], (*path, 0))


_SPEC = resource_schema()["properties"]["spec"]
_ALL_FIELDS = list(_fields(_SPEC, ("spec",)))


def _compiles(spec: Any) -> bool:
    try:
        compile_topology(load_spec(spec), "made")
    except InvalidTopology:
        return False
    return True


@given(st.integers(), _INDEXES)
def test_a_manifest_depends_on_seed_and_index_alone(seed: int, index: int) -> None:
    one = case(seed, index)
    case(seed, index + 1)
    assert case(seed, index) == one
    assert is_edited(seed, index) == is_edited(seed, index)


@given(_INDEXES)
def test_every_manifest_is_json(index: int) -> None:
    json.loads(case(1, index).body)


@given(_INDEXES)
def test_an_edit_depends_on_seed_and_index_alone(index: int) -> None:
    spec = good_manifest()["spec"]
    assert edit(1, index, spec) == edit(1, index, spec)
    assert spec == good_manifest()["spec"], "the first spec stays as it is"


def test_seeds_and_indexes_give_other_manifests() -> None:
    bodies = {case(seed, index).body for seed in (1, 2) for index in range(50)}
    assert len(bodies) > 90


def test_many_manifests_are_valid_and_many_are_not() -> None:
    count, valid = 120, 0
    for index in range(count):
        manifest = json.loads(case(1, index).body)
        valid += isinstance(manifest, dict) and _compiles(manifest.get("spec"))
    assert 0.1 * count < valid < 0.5 * count


def test_a_third_is_edited() -> None:
    assert 250 < sum(is_edited(1, index) for index in range(900)) < 350


def test_some_are_suspended() -> None:
    bodies = [case(1, index).body for index in range(300)]
    assert any('"suspend": true' in body for body in bodies)


@pytest.mark.parametrize("seed", range(20))
def test_unchanged_graphs_are_valid(seed: int) -> None:
    """Before the generator changes fields of it."""
    compile_topology(load_spec(topologies.spec(random.Random(seed))), "made")


def test_every_field_of_the_crd_is_written() -> None:
    drawn = [random_value(("spec",), _SPEC, random.Random(n)) for n in range(600)]

    def has(node: Any, path: Path) -> bool:
        for part in path:
            if isinstance(part, int):
                return any(has(item, path[path.index(part) + 1 :]) for item in node)
            if not isinstance(node, dict) or part not in node:
                return False
            node = node[part]
        return True

    # `_ALL_FIELDS` has what the CRD declares, not what it lets through undeclared (below
    # `podTemplate`). 0 stands for an item of a list, which is no field.
    missing = [
        path
        for path in _ALL_FIELDS
        if not any(has(spec, path[1:]) for spec in drawn) and path[-1] != 0
    ]
    assert missing == []


@pytest.mark.parametrize("path", _ALL_FIELDS, ids=lambda p: ".".join(map(str, p)))
def test_every_pattern_has_values_that_match(path: Path) -> None:
    schema = schema_at(path)
    assert schema is not None
    if "pattern" in schema and path[-1] not in ("delimiter", "quote", "escape"):
        texts = [v for v in pool(path, schema) if isinstance(v, str)]
        assert any(re.search(schema["pattern"], text) for text in texts)


# --- verdicts -----------------------------------------------------------------


def _topology(status: str, message: str = "", **more: Any) -> dict[str, Any]:
    valid = {"type": "Valid", "status": status, "observedGeneration": 2, "message": message}
    degraded = {"type": "Degraded", "status": "False"}
    accepted: dict[str, Any] = {
        "conditions": [valid, degraded],
        "observedGeneration": 2,
        "phase": "Starting",
        "generations": [{"generation": 2, "digest": "abc"}],
        # The last one is of a removed segment, and has no pod.
        "slots": [{"slot": "coordinator"}, {"slot": "s/0/0"}, {"slot": "-/0/1"}],
    }
    return {"metadata": {"generation": 2}, "spec": {}, "status": accepted | more}


def test_a_reconciled_topology_has_all_its_pods() -> None:
    topology = _topology("True")
    assert verdict(topology) is Verdict.ACCEPTED
    assert violations(topology, pods=2) == []
    assert len(violations(topology, pods=1)) == 1


def test_a_refused_topology_has_a_message_with_a_field() -> None:
    refused = _topology("False", "spec.queries[0].from: is nothing", generations=[])
    assert verdict(refused) is Verdict.REFUSED
    assert violations(refused, pods=0) == []
    assert len(violations(refused, pods=1)) == 1
    assert len(violations(_topology("False", "something is wrong"), pods=0)) == 1


def test_a_condition_of_an_older_generation_is_ignored() -> None:
    topology = _topology("True")
    topology["metadata"]["generation"] = 3
    assert verdict(topology) is None
    found = Counter(what.partition(" ")[0] for what in violations(topology, pods=2))
    assert found == {"generation": 1, "observedGeneration": 1}


def test_a_pod_template_may_have_the_operators_own_gate() -> None:
    gates = [t["spec"].get("schedulingGates") for t in _pod_specs()]
    assert [{"name": names.GATE}] in gates


def _pod_specs() -> list[Any]:
    templates = [t for t in values.POD_TEMPLATES if isinstance(t, dict)]
    return [t for t in templates if isinstance(t.get("spec"), dict)]
