"""JSON for the API server's YAML parser: bodies of server-side apply.

Python's JSON escapes characters beyond U+FFFF as two surrogates, which that parser refuses. It also
refuses characters that are not printable by the YAML specification, unless they are escaped.
"""

from __future__ import annotations

import json
import re
from typing import Any

_NOT_PRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def dump(value: Any) -> bytes:
    """UTF-8. Lone surrogates, which UTF-8 does not have, are replaced."""
    text = json.dumps(value, ensure_ascii=False)
    text = _NOT_PRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return _SURROGATE.sub("\ufffd", text).encode()
