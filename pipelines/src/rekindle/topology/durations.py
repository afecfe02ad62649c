"""The type of fields that are durations.

Design: docs/design/compilation.md#resource.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ValidationInfo

from rekindle.topology.units import parse_duration

DURATION_UNITS_REQUIRED: Final = {"units_required": True}
"""Context of the validation of a resource: Python may write a duration as microseconds, a resource
has to name the unit."""


def read_duration(value: Any, info: ValidationInfo) -> int:
    """Microseconds. Raises ValueError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and info.context == DURATION_UNITS_REQUIRED:
        raise ValueError(f"{value!r} has no unit; write it like 250ms, 10s, 1h30m or 2d")
    return parse_duration(value)


Duration = Annotated[int, BeforeValidator(read_duration)]
