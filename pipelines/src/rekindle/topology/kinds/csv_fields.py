"""Checks of the fields that say how CSV is written, of each kind of source that has them."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.errors import Problem
from rekindle.topology.kinds.base import SourceOptions

_FIELDS = ("delimiter", "header", "quote", "escape", "encoding")


def check_csv_fields(options: SourceOptions, format: str, path: str) -> Iterator[Problem]:
    fields = type(options).model_fields
    given = {name: getattr(options, name) for name in _FIELDS if name in fields}
    if format != "csv":
        for field in (f for f, value in given.items() if value != fields[f].default):
            what = f"{field} applies to csv only, and the format is {format}"
            yield Problem(f"{path}.{field}", "InvalidValue", what, "leave it out")
        return
    delimiter, quote, escape = given["delimiter"], given["quote"], given["escape"]
    for field, text in {"delimiter": delimiter, "quote": quote, "escape": escape}.items():
        if text and not (len(text) == 1 and (text == "\t" or " " <= text <= "~")):
            what = f"{text!r} is not one ASCII character"
            yield Problem(f"{path}.{field}", "InvalidValue", what, 'write it like ";" or "\\t"')
    if delimiter in (quote, escape):
        what = f"{delimiter!r} is used as delimiter and as quote or escape"
        yield Problem(f"{path}.delimiter", "InvalidValue", what, "use another character")
    null_value = getattr(options, "null_value", "")
    if escape is not None and escape in null_value:
        what = f"{null_value!r} contains the escape character {escape!r}"
        hint = "escapes are removed before comparing: leave escape out, or change nullValue"
        yield Problem(f"{path}.nullValue", "InvalidValue", what, hint)
