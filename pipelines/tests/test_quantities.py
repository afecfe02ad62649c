"""Quantities as Kubernetes writes them."""

from __future__ import annotations

from decimal import Decimal

import pytest

from rekindle.quantities import parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("250m", "0.25"),
        ("2", "2"),
        (2, "2"),
        (0.5, "0.5"),
        ("100n", "1e-7"),
        ("7u", "7e-6"),
        ("1500M", "1.5e9"),
        ("1k", "1000"),
        ("1Ki", "1024"),
        ("1.5Gi", "1610612736"),
        ("2E", "2e18"),
        ("1Ei", "1152921504606846976"),
        ("1e3", "1000"),
        ("12E6", "12e6"),
        (" 1Gi ", "1073741824"),
    ],
)
def test_a_quantity_is_read_exactly(text: str | float, value: str) -> None:
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "fast", "Gi", "1 kg", "1kk", "1mi", "inf", "Infinity", "nan"])
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is not a quantity; write it like"):
        parse_quantity(text)
