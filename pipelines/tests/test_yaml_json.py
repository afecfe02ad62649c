"""JSON that a YAML parser reads, as the API server's does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rekindle.yaml_json import dump

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_VALUES = st.recursive(_TEXTS | st.none() | st.booleans(), lambda v: st.dictionaries(_TEXTS, v))


@given(_VALUES)
def test_text_reads_back_as_json_and_as_yaml(value: Any) -> None:
    text = dump(value).decode()
    assert json.loads(text) == value
    assert yaml.safe_load(text) == value


@pytest.mark.parametrize("text", ["🔥", "\\ud83d\\udd25", "\x7f\x85", "\ufeff", "\uffff", "\x00"])
def test_characters_that_yaml_refuses_are_kept(text: str) -> None:
    assert yaml.safe_load(dump({"message": text})) == {"message": text}


def test_no_character_is_written_as_two_surrogates() -> None:
    assert dump("'🔥'") == "\"'🔥'\"".encode()


def test_a_lone_surrogate_is_replaced() -> None:
    assert json.loads(dump("a\ud83d")) == "a\ufffd"
