"""Bugs that are planted in the output logs of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rekindle.task.core.shipping import ShippingCore
from rekindle_testing.simulation import shipping
from rekindle_testing.simulation.planting import Mutant, replaced


def _all_that_is_known(next_shipment: Any) -> Any:
    def wrong(self: ShippingCore, now: float) -> Any:
        return [replace(e, through=max(e.chained)) for e in next_shipment(self, now)]

    return wrong


def _any_content(is_content_of: Any) -> Any:
    return lambda name, data: True


SHIPPING_MUTANTS: Mapping[str, Mutant] = {
    "a log is shipped past the committed entry": replaced(
        ShippingCore, "_next", _all_that_is_known
    ),
    "a piece of a log is read although it is damaged": replaced(
        shipping, "is_content_of", _any_content
    ),
}
