"""The kinds of windows. A new kind is a module beside this one, and a line in `KINDS`.

Exactly one kind is set.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rekindle.errors import Problem
from rekindle.topology.spec import WindowSpec
from rekindle.topology.windows.hopping import HoppingKind
from rekindle.topology.windows.kind import WindowKind, Windows
from rekindle.topology.windows.rows import RowsKind
from rekindle.topology.windows.session import SessionKind

KINDS: Mapping[str, WindowKind] = {
    "size": HoppingKind(),
    "session": SessionKind(),
    "rows": RowsKind(),
}
"""By the field of `window` that selects the kind."""


def check_window(window: WindowSpec, path: str) -> Iterator[Problem]:
    """Check that `window` is of exactly one kind, and that its values are valid."""
    given = [field for field in KINDS if getattr(window, field) is not None]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else f"has no {' and no '.join(KINDS)}"
        kinds = ", ".join(KINDS)
        yield Problem(path, "ExactlyOneOf", what, f"write exactly one of {kinds}")
    for field, kind in KINDS.items():
        yield from kind.check(window, path)
        for option in kind.further_fields:
            if getattr(window, option) is not None and getattr(window, field) is None:
                alias = WindowSpec.name_of(option)
                what = f"{alias} needs {field}"
                hint = f"write {field} too, or leave {alias} out"
                yield Problem(f"{path}.{alias}", "InvalidWindow", what, hint)


def windows_of(window: WindowSpec) -> Windows:
    """What the engine needs to know of the windows of a valid spec."""
    field = next(f for f in KINDS if getattr(window, f) is not None)
    return KINDS[field].windows(window)
