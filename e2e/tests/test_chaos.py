"""One seed of random faults; `make chaos SEED= ROUNDS=` runs others, and replays a failure."""

from __future__ import annotations

import pytest

from rekindle_testing.chaos.run import BUILD, run_seed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.failures,
    pytest.mark.long,
    pytest.mark.timeout(600),
]

SEED = 5
ROUNDS = 3


def test_random_faults_lose_and_repeat_no_rows() -> None:
    result = run_seed(SEED, ROUNDS, print, build=BUILD / "test")
    assert not result.failure, f"{result.failure}\nevidence: {result.evidence}"
    assert [r.number for r in result.rounds] == [1, 2, 3]
    assert all(r.rows for r in result.rounds)
