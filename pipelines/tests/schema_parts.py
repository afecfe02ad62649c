"""Schemas of topologies for tests that have Arrow's."""

from __future__ import annotations

import pyarrow as pa

from rekindle.arrow_types import arrow_schema, topology_type
from rekindle.topology.schema import Field, Schema
from rekindle.topology.sql.ddl import ddl_to_schema


def topology_schema(schema: pa.Schema) -> Schema:
    return Schema(tuple(Field(f.name, topology_type(f.type)) for f in schema))


def arrow_schema_of(ddl: str) -> pa.Schema:
    return arrow_schema(ddl_to_schema(ddl))
