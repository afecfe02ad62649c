"""Quantities as Kubernetes writes them (`resource.Quantity`): `250m`, `2`, `1Gi`, `1e3`."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

_UNITS = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
} | {f"{unit}i": Decimal(1024**n) for n, unit in enumerate("KMGTPE", start=1)}


_MAX_EXPONENT = 40  # Kubernetes has none above 2^63 x 10^18; more would be minutes of arithmetic


def parse_quantity(text: str | int | float) -> Decimal:
    """`"250m"` -> 0.25, `"1Gi"` -> 1073741824. Raises ValueError if it is not a quantity."""
    value = str(text).strip()
    number = value.rstrip("numkKMGTPEi")
    unit = _UNITS.get(value[len(number) :])
    try:
        # A number without a unit at its end may have an exponent: 1e3, 12E6.
        quantity = Decimal(value) if unit is None else Decimal(number) * unit
    except InvalidOperation:
        quantity = Decimal("nan")
    if not quantity.is_finite() or quantity.adjusted() > _MAX_EXPONENT:
        raise ValueError(f"{text!r} is not a quantity; write it like 250m, 2 or 1Gi")
    return quantity
