"""Resources as integers: milli-CPU, bytes, places for pods. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

_SUFFIXES = {
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


def parse_quantity(text: str | int | float) -> Decimal:
    """A Kubernetes quantity as a number: `"250m"` -> 0.25, `"1Gi"` -> 1073741824."""
    value = str(text).strip()
    number = value.rstrip("numkKMGTPEi")
    try:
        return Decimal(number) * _SUFFIXES[value[len(number) :]]
    except (InvalidOperation, KeyError):
        pass
    try:
        return Decimal(value)  # 1e3, 12E6
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a quantity; write it like 250m, 2 or 1Gi") from None


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a pod asks for, or what a node has left."""

    cpu_m: int = 0
    memory: int = 0
    pods: int = 0

    @classmethod
    def parse(cls, quantities: Mapping[str, Any] | None, pods: int | None = None) -> Amounts:
        """From `requests` (give `pods=1`) or `allocatable` (its own `pods`)."""
        given = quantities or {}
        return cls(
            cpu_m=int(
                (parse_quantity(given.get("cpu", 0)) * 1000).to_integral_value("ROUND_CEILING")
            ),
            memory=int(parse_quantity(given.get("memory", 0)).to_integral_value("ROUND_CEILING")),
            pods=int(parse_quantity(given.get("pods", 0))) if pods is None else pods,
        )

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(self.cpu_m + other.cpu_m, self.memory + other.memory, self.pods + other.pods)

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(self.cpu_m - other.cpu_m, self.memory - other.memory, self.pods - other.pods)

    def clamped(self) -> Amounts:
        """What an overcommitted node lacks is no other node's loss."""
        return Amounts(max(self.cpu_m, 0), max(self.memory, 0), max(self.pods, 0))

    def covers(self, ask: Amounts) -> bool:
        """A resource that is not asked for cannot be short, as the scheduler sees it."""
        return all(
            want == 0 or want <= have
            for want, have in (
                (ask.cpu_m, self.cpu_m),
                (ask.memory, self.memory),
                (ask.pods, self.pods),
            )
        )

    def share_of(self, whole: Amounts) -> float:
        """Sum of the shares of each resource: one figure for the cost of several."""
        return (
            self.cpu_m / max(whole.cpu_m, 1)
            + self.memory / max(whole.memory, 1)
            + self.pods / max(whole.pods, 1)
        )


def total(amounts: Iterable[Amounts]) -> Amounts:
    result = Amounts()
    for each in amounts:
        result = result + each
    return result
