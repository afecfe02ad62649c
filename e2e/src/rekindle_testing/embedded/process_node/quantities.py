"""Resource quantities of Kubernetes (`500m`, `1Gi`, `1e3`) as exact numbers."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)},
    **{suffix + "i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}

# "1E" is an exa, "1E3" has an exponent.
_QUANTITY = re.compile(r"([+-]?\d*\.?\d+(?:[eE][+-]?\d+)?)([a-zA-Z]*)")


def parse(text: str | int | float) -> Decimal:
    """Cores, bytes or a count; ValueError names the text."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is no resource quantity")
    return Decimal(match[1]) * _SUFFIXES[match[2]]


def ceil_divide(amount: Decimal, divisor: Decimal) -> int:
    return int((amount / divisor).to_integral_value(ROUND_CEILING))


def parse_rounded_up(text: str | int | float) -> int:
    """Rounded up, as Kubernetes does with bytes."""
    return ceil_divide(parse(text), Decimal(1))


def parse_millis(text: str | int | float) -> int:
    """Thousandths (of a core), rounded up."""
    return ceil_divide(parse(text), Decimal("0.001"))
