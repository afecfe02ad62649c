"""The type of a Protobuf message, found in a set of descriptors, and its place in its file.

Design: docs/decisions/0062-formats-of-kafka-values.md.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError

from rekindle.connectors.schema_registry import WrittenSchema
from rekindle.errors import SchemaMismatch

TIMESTAMP_MESSAGE = "google.protobuf.Timestamp"
_KNOWN_FILES = "google/protobuf/"
"""Registries have them."""


def find_message(descriptors: str, message: str) -> Any:
    """The descriptor of a message. `descriptors`: a FileDescriptorSet in base64. Raises
    SchemaMismatch."""
    try:
        data = base64.b64decode(descriptors, validate=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(data).file
    except (ValueError, DecodeError) as error:
        raise SchemaMismatch(f"protobufDescriptors: not a FileDescriptorSet: {error}") from error
    pool = descriptor_pool.DescriptorPool()
    try:
        for file in files:
            pool.Add(file)
        return pool.FindMessageTypeByName(message)
    except (KeyError, TypeError) as error:
        has = ", ".join(f"{f.package}.{m.name}".strip(".") for f in files for m in f.message_type)
        raise SchemaMismatch(
            f"protobufMessage: {message} is not among the descriptors, which have {has}, or needs "
            "others: write them with protoc --include_imports --descriptor_set_out"
        ) from error


def message_place(message: Any) -> list[int]:
    """Of the message in its file: its number there, or of each message that it is in."""
    outer = message.containing_type
    if outer is None:
        return [[m.name for m in _of_file(message)].index(message.name)]
    return [*message_place(outer), [m.name for m in outer.nested_types].index(message.name)]


def _of_file(message: Any) -> Sequence[Any]:
    file = descriptor_pb2.FileDescriptorProto()
    message.file.CopyToProto(file)
    return list(file.message_type)


def written_file(file: Any) -> WrittenSchema:
    """A file as a registry takes it, and the files that it imports, as its serializers write it."""
    imported = [f for f in file.dependencies if not f.name.startswith(_KNOWN_FILES)]
    return WrittenSchema(
        base64.b64encode(file.serialized_pb).decode(),
        "PROTOBUF",
        tuple((each.name, written_file(each)) for each in imported),
    )


def is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)
