"""Rows as values of CSV, each without a line end, by the rules that CSV is read with: NULL is `NA`,
a text that could be taken for something else is in quotes. Values that are no texts are those of
JSON. Pure.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from rekindle.connectors.json_writer import UnencodableValue, json_texts, valid_texts

_NULL, _QUOTE, _COMMA, _NOTHING = (pa.scalar(t, pa.large_string()) for t in ("NA", '"', ",", ""))
_NEEDS_QUOTES = r'^$|^NA$|[",\r\n\x{feff}]|^\s|\s$'


def encode_csv(rows: pa.Table) -> list[bytes]:
    """A value for each row. Raises UnencodableValue."""
    if not rows.num_rows:
        return []
    columns = []
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        try:
            columns.append(_cells(column.combine_chunks()))
        except (ValueError, OverflowError, pa.ArrowException) as error:
            raise UnencodableValue(f"column {name}: {error}") from error
    lines = pc.binary_join_element_wise(*columns, _COMMA)
    return list(lines.cast(pa.large_binary()).to_pylist())


def _cells(column: pa.Array) -> pa.Array:
    if pa.types.is_string(column.type):
        texts = valid_texts(column).cast(pa.large_string())
        quoted = pc.replace_substring(texts, '"', '""')
        in_quotes = pc.binary_join_element_wise(_QUOTE, quoted, _QUOTE, _NOTHING)
        needs = pc.match_substring_regex(texts, _NEEDS_QUOTES)
        cells = pc.if_else(needs, in_quotes, texts)
    else:
        cells = pc.utf8_trim(json_texts(column).cast(pa.large_string()), '"')
    return pc.if_else(column.is_valid(), cells, _NULL)
