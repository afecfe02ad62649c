"""Whether pods that replace others fit into a full quota, by the API server's own numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from rekindle.quantities import parse_quantity
from rekindle_operator.cluster.amounts import ResourceAmounts

_REFUSAL = re.compile(r"exceeded quota: .*?, requested: (\S+), used: (\S+), limited: (\S+)")
_NAMED = ("cpu", "memory", "ephemeral-storage", "hugepages-")  # prefixes of names without another


@dataclass(frozen=True, slots=True)
class PodExchange:
    """What an edit needs for pods that it creates, or that a roll replaces later, and what the pods
    that these replace request."""

    freed: ResourceAmounts
    needed: ResourceAmounts

    def fits(self, refusal: str, refused: ResourceAmounts) -> bool:
        """Whether there is room once pods are freed. `refusal`: the API server's message about one
        of the pods; `refused`: what its manifest requests. False if the message has no numbers, or
        names a resource (a limit) of which it is not known what the pods use."""
        if not self.needed.pods:
            return True
        if (found := _REFUSAL.search(refusal)) is None:
            return False
        try:
            requested, used, limited = map(_quantities, found.groups())
            return all(
                self._used_then(name, used[name], amount - _amount(refused, name)) <= limited[name]
                for name, amount in requested.items()
            )
        except (ValueError, KeyError):
            return False

    def _used_then(self, name: str, used: Decimal, added: Decimal) -> Decimal:
        """`added`: to each pod, by admission."""
        needed = _amount(self.needed, name) + self.needed.pods * max(added, Decimal(0))
        return used - _amount(self.freed, name) + needed


def _quantities(text: str) -> Mapping[str, Decimal]:
    """`pods=1,requests.cpu=500m`."""
    pairs = (item.partition("=") for item in text.split(","))
    return {name: parse_quantity(quantity) for name, _, quantity in pairs}


def _amount(amounts: ResourceAmounts, name: str) -> Decimal:
    """Of a resource as quotas name it. Raises ValueError for what is no request."""
    resource = name.removeprefix("requests.")
    if name != "pods" and resource == name and not name.startswith(_NAMED):
        raise ValueError(f"{name} is no request")
    amount = Decimal(amounts.amount_of(resource))
    return amount / 1000 if resource == "cpu" else amount
