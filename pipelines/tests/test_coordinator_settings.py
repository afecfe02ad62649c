"""Settings of a coordinator from its environment, and its token for the API server from a file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rekindle.coordinator.shell.kube_access import Token
from rekindle.coordinator.shell.settings import SettingsError, read_settings


def test_the_service_account_token_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    token = Token(file=file)
    assert token.read() == "one"
    file.write_text("two\n")
    assert token.read() == "one"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    assert token.read() == "two"


def test_the_token_of_the_topology_is_in_no_repr() -> None:
    found = read_settings(
        {
            "REKINDLE_TOPOLOGY": "t",
            "REKINDLE_NAMESPACE": "n",
            "REKINDLE_TOPOLOGY_UID": "u",
            "REKINDLE_INCARNATION": "1",
            "REKINDLE_BIND": "127.0.0.1",
            "REKINDLE_TOKEN": "hunter2",
        }
    )
    assert found.identity.authorization == "Bearer hunter2"
    assert "hunter2" not in repr(found) + repr(found.identity)


def test_settings_name_the_variable_that_is_missing() -> None:
    with pytest.raises(SettingsError, match="REKINDLE_INCARNATION"):
        read_settings({"REKINDLE_TOPOLOGY": "t"})
