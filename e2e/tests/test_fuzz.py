"""A few generated topologies with a real API server and the operator; `make fuzz` runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.fuzz.__main__ import run
from rekindle_testing.fuzz.session import session
from rekindle_testing.fuzz.verdict import Verdict

pytestmark = [
    pytest.mark.api,
    pytest.mark.long,  # like `make fuzz`; cases with a name: test_crd.py
]

SEED = 1
COUNT = 60


def test_generated_topologies_are_refused_with_a_field_or_run(
    api_server: ControlPlane, tmp_path: Path
) -> None:
    with session(api_server, tmp_path) as running:
        assert run(running, SEED, first=0, count=COUNT, directory=tmp_path, batch=COUNT) == []
        created = running.statistics.created
        assert created.total() == COUNT
        assert all(created[verdict] for verdict in Verdict)
        assert running.statistics.edited
