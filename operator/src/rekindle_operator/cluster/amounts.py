"""Resources as integers: milli-CPU, bytes, number of pods, and extended resources. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.quantities import parse_quantity

_NAMED = ("cpu", "memory", "pods")  # with a field of their own
_IN_BYTES = ("ephemeral-storage", "hugepages-")  # prefixes
_NON_DEVICES = (*_IN_BYTES, "attachable-volumes-")


@dataclass(frozen=True, slots=True)
class ResourceAmounts:
    """What a pod requests, or what a node has left. `others`: extended resources,
    ephemeral-storage and the like, sorted by name, each in its own unit."""

    cpu_m: int = 0
    memory: int = 0
    pods: int = 0
    others: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(
        cls, quantities: Mapping[str, Any] | None, pods: int | None = None
    ) -> ResourceAmounts:
        """From `requests` (pass `pods=1`) or from `allocatable` (which has `pods`)."""
        quantities = quantities or {}
        others = (
            (name, _rounded_up(quantities[name]))
            for name in sorted(quantities)
            if name not in _NAMED
        )
        return cls(
            cpu_m=int(
                (parse_quantity(quantities.get("cpu", 0)) * 1000).to_integral_value("ROUND_CEILING")
            ),
            memory=_rounded_up(quantities.get("memory", 0)),
            pods=_rounded_up(quantities.get("pods", 0)) if pods is None else pods,
            others=tuple((name, amount) for name, amount in others if amount),
        )

    def __add__(self, other: ResourceAmounts) -> ResourceAmounts:
        others = self.others or other.others
        return ResourceAmounts(
            self.cpu_m + other.cpu_m,
            self.memory + other.memory,
            self.pods + other.pods,
            _combined(self.others, other.others, operator.add) if others else (),
        )

    def __sub__(self, other: ResourceAmounts) -> ResourceAmounts:
        others = self.others or other.others
        return ResourceAmounts(
            self.cpu_m - other.cpu_m,
            self.memory - other.memory,
            self.pods - other.pods,
            _combined(self.others, other.others, operator.sub) if others else (),
        )

    def highest(self, other: ResourceAmounts) -> ResourceAmounts:
        """The larger amount of each resource."""
        return ResourceAmounts(
            max(self.cpu_m, other.cpu_m),
            max(self.memory, other.memory),
            max(self.pods, other.pods),
            _combined(self.others, other.others, max),
        )

    def scaled(self, factor: float) -> ResourceAmounts:
        """Rounded down."""
        others = tuple((name, int(amount * factor)) for name, amount in self.others)
        cpu_m, memory, pods = (int(n * factor) for n in (self.cpu_m, self.memory, self.pods))
        return ResourceAmounts(cpu_m, memory, pods, others)

    def clamped(self) -> ResourceAmounts:
        """Without negative amounts: an overcommitted node takes nothing from other nodes."""
        others = tuple((name, amount) for name, amount in self.others if amount > 0)
        return ResourceAmounts(max(self.cpu_m, 0), max(self.memory, 0), max(self.pods, 0), others)

    def covers(self, requests: ResourceAmounts) -> bool:
        return not self.lacking(requests)

    def lacking(self, requests: ResourceAmounts) -> str:
        """The first resource of which there is less than requested; empty: none. Only resources
        that are requested are compared, as the scheduler does."""
        if requests.cpu_m and requests.cpu_m > self.cpu_m:
            return "cpu"
        if requests.memory and requests.memory > self.memory:
            return "memory"
        if requests.pods and requests.pods > self.pods:
            return "pods"
        if not requests.others:
            return ""
        have = dict(self.others)
        short = (name for name, n in requests.others if n and n > have.get(name, 0))
        return next(short, "")

    def amount_of(self, name: str) -> int:
        """In its own unit: of `cpu` a thousandth."""
        named = {"cpu": self.cpu_m, "memory": self.memory, "pods": self.pods}
        return named[name] if name in named else dict(self.others).get(name, 0)

    def restricted_to(self, requests: ResourceAmounts) -> ResourceAmounts:
        """Only the resources that are requested."""
        requested = {name for name, amount in requests.others if amount}
        return ResourceAmounts(
            self.cpu_m if requests.cpu_m else 0,
            self.memory if requests.memory else 0,
            self.pods if requests.pods else 0,
            tuple((name, amount) for name, amount in self.others if name in requested),
        )

    def fraction_of(self, whole: ResourceAmounts) -> float:
        """Sum of the fractions of all resources: one number for the cost of several."""
        fraction = self.cpu_memory_pods_fraction_of(whole)
        if self.others:
            total_of = dict(whole.others)
            fraction += sum(
                _fraction(amount, total_of.get(name, 0)) for name, amount in self.others
            )
        return fraction

    def highest_fraction_of(self, whole: ResourceAmounts) -> float:
        """The largest of the fractions of all resources: how full a node is."""
        total_of = dict(whole.others)
        return max(
            _fraction(self.cpu_m, whole.cpu_m),
            _fraction(self.memory, whole.memory),
            _fraction(self.pods, whole.pods),
            *(_fraction(amount, total_of.get(name, 0)) for name, amount in self.others),
        )

    def cpu_memory_pods_fraction_of(self, whole: ResourceAmounts) -> float:
        """Sum of the fractions of what every node has: CPU, memory, pods."""
        if whole.cpu_m > 0 and whole.memory > 0 and whole.pods > 0:
            # The common case, computed for each node and each task of a plan.
            cpu, memory = self.cpu_m / whole.cpu_m, self.memory / whole.memory
            return cpu + memory + self.pods / whole.pods
        return (
            _fraction(self.cpu_m, whole.cpu_m)
            + _fraction(self.memory, whole.memory)
            + _fraction(self.pods, whole.pods)
        )

    def has_devices_besides(self, requests: ResourceAmounts) -> bool:
        """Whether there are devices (extended resources) that `requests` does not need."""
        if not self.others:
            return False
        needed = {name for name, _ in requests.others}
        return any(
            amount > 0 and name not in needed and not name.startswith(_NON_DEVICES)
            for name, amount in self.others
        )

    def with_pod_level(self, quantities: Mapping[str, Any]) -> ResourceAmounts:
        """Pod-level `resources` replace the sum over the containers (KEP-2837)."""
        given = ResourceAmounts.parse(quantities, pods=0)
        pages = {name: amount for name, amount in given.others if name.startswith("hugepages-")}
        return ResourceAmounts(
            given.cpu_m if "cpu" in quantities else self.cpu_m,
            given.memory if "memory" in quantities else self.memory,
            self.pods,
            tuple(sorted((dict(self.others) | pages).items())) if pages else self.others,
        )


def readable_amount(name: str, amount: int) -> str:
    """As a manifest has it, rounded down."""
    if name == "cpu":
        return f"{amount}m" if amount % 1000 else str(amount // 1000)
    if name == "memory" or name.startswith(_IN_BYTES):
        for unit, size in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
            if amount >= size:
                return f"{amount * 100 // size / 100:g}{unit}"
    return str(amount)


def _fraction(amount: int, whole: int) -> float:
    """A request for a resource of which there is nothing counts as all of it."""
    return amount / whole if whole > 0 else float(amount > 0)


def _rounded_up(quantity: str | int | float) -> int:
    return int(parse_quantity(quantity).to_integral_value("ROUND_CEILING"))


def _combined(
    one: tuple[tuple[str, int], ...],
    other: tuple[tuple[str, int], ...],
    combine: Callable[[int, int], int],
) -> tuple[tuple[str, int], ...]:
    if not other and combine is not max:
        return one  # the common case: most pods request no other resource
    if len(one) == 1 == len(other) and one[0][0] == other[0][0]:
        return ((one[0][0], combine(one[0][1], other[0][1])),)
    left, right = dict(one), dict(other)
    names = sorted(left.keys() | right.keys())
    return tuple((name, combine(left.get(name, 0), right.get(name, 0))) for name in names)


def total(amounts: Iterable[ResourceAmounts]) -> ResourceAmounts:
    result = ResourceAmounts()
    for each in amounts:
        result = result + each
    return result
