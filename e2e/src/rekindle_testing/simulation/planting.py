"""Planting a bug: one decision of the product is replaced by a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

Mutant = Callable[[], AbstractContextManager[object]]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Mutant:
    """A mutant in which `make` turns the original of an attribute into another one."""
    original = getattr(owner, name)
    return partial(patch.object, owner, name, make(original))
