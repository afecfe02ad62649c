"""Replies of a donor as bytes: what is damaged is refused as a `ValueError`, which is retried."""

from __future__ import annotations

import json
import struct
import zlib

import pytest

from rekindle.identity import Identity
from rekindle.streams.movement_wire import reply_of


def frame(header: object) -> bytes:
    """A reply with a correct checksum."""
    text = json.dumps(header).encode()
    return struct.pack("!II", len(text), zlib.crc32(text)) + text


@pytest.mark.parametrize("header", [[], "later", 1, None])
def test_a_reply_that_is_no_object_is_refused(header: object) -> None:
    with pytest.raises(ValueError, match="a reply"):
        reply_of(frame(header), Identity())
