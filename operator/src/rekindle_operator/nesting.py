"""How deep objects of the API may be nested.

The API server accepts JSON that is nested 10,000 levels deep, and `podTemplate` has no schema. The
parser of Python fails at the recursion limit, by default 1,000; then topologies cannot be listed.
So the limit is raised until everything can be parsed, and a spec that is deeper than any real one
is refused, before anything else walks it.

Design: docs/design/kubernetes.md#limits-of-the-api-server.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

MAX_SPEC_DEPTH = 100

# For 10,000 levels, and the calls around them. Parsing, printing and comparing that many needs less
# than 2 MiB of stack; threads have 8 MiB.
_RECURSION_LIMIT = 12_000


def raise_recursion_limit() -> None:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _RECURSION_LIMIT))


def is_too_deep(spec: Any) -> bool:
    level = [spec]
    for _ in range(MAX_SPEC_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []
