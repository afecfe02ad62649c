"""A class has a name of its own, in the product and the test platform. Private ones are left out:
they are seen in their module only, where a longer name says nothing more."""

from __future__ import annotations

import ast
from collections import Counter

from rekindle_testing.paths import ROOT


def test_no_two_classes_have_one_name() -> None:
    files = [
        path
        for part in ("pipelines", "operator", "e2e")
        for path in (ROOT / part).glob("src/**/*.py")
    ]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    double = {name for name, count in names.items() if count > 1 and not name.startswith("_")}
    assert double == set()
