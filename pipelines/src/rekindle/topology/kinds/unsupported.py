"""Kinds of v1alpha1 that this version does not support: any fields, no connector."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from rekindle.topology.kinds.base import SinkOptions

_ANY_FIELDS = ConfigDict(frozen=True, extra="allow", alias_generator=to_camel)


class UnsupportedSink(SinkOptions):
    model_config = _ANY_FIELDS
