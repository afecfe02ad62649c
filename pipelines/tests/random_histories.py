"""Long random histories: lists that Hypothesis makes element by element are mostly too short for
anything to happen, and slow to make."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st


def histories(moves: Sequence[str], longest: int) -> st.SearchStrategy[list[str]]:
    """A quarter of `longest` moves, or more; one that is named more often is made more often."""

    def drawn(seed: int) -> list[str]:
        random = Random(seed)
        return random.choices(moves, k=random.randint(longest // 4, longest))

    return st.integers(0, 2**32).map(drawn)
