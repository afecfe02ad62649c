"""System columns are added to the user's SQL; the rest of its text does not change."""

from __future__ import annotations

import pytest

from rekindle.engine.spark.rewrite import with_system_columns
from rekindle.topology.sql.tokens import quote

M = "`__e`, `__late`"
"""The system columns, as they are inserted."""


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT a FROM v", f"SELECT {M}, a FROM v"),
        ("select a*2, a * b FROM v", f"select {M}, a*2, a * b FROM v"),
        ("SELECT * FROM v", f"SELECT {M}, * EXCEPT ({M}) FROM v"),
        ("SELECT *, 2 * a FROM v", f"SELECT {M}, * EXCEPT ({M}), 2 * a FROM v"),
        ("SELECT v.* FROM v", f"SELECT {M}, v.* EXCEPT ({M}) FROM v"),
        ("SELECT x.* FROM v AS x", f"SELECT {M}, x.* EXCEPT ({M}) FROM v AS x"),
        ("SELECT x.* FROM v x", f"SELECT {M}, x.* EXCEPT ({M}) FROM v x"),
        ("SELECT s.* FROM v", f"SELECT {M}, s.* FROM v"),
        ("SELECT v.s.* FROM v", f"SELECT {M}, v.s.* FROM v"),
        ("SELECT * EXCEPT (a) FROM v", f"SELECT {M}, * EXCEPT ({M}, a) FROM v"),
        (
            "SELECT to_json(struct(*)) j FROM v",
            f"SELECT {M}, to_json(struct(* EXCEPT ({M}))) j FROM v",
        ),
        ("SELECT ALL a FROM v", f"SELECT ALL {M}, a FROM v"),
        (
            "SELECT 'SELECT *' AS x FROM v -- SELECT *\nUNION ALL (SELECT b FROM `w-1`)",
            f"SELECT {M}, 'SELECT *' AS x FROM v -- SELECT *\nUNION ALL (SELECT {M}, b FROM `w-1`)",
        ),
        (
            "SELECT w.* FROM v UNION ALL SELECT w.* FROM w UNION ALL SELECT v.* FROM w AS v",
            f"SELECT {M}, w.* FROM v UNION ALL SELECT {M}, w.* EXCEPT ({M}) FROM w "
            f"UNION ALL SELECT {M}, v.* EXCEPT ({M}) FROM w AS v",
        ),
        (
            "SELECT a IS DISTINCT FROM b AS c, extract(YEAR FROM d) y, v.* FROM v",
            f"SELECT {M}, a IS DISTINCT FROM b AS c, extract(YEAR FROM d) y, "
            f"v.* EXCEPT ({M}) FROM v",
        ),
        ("SELECT v.* FROM v WHERE a", f"SELECT {M}, v.* EXCEPT ({M}) FROM v WHERE a"),
        ("SELECT V.*, b.* FROM `v` b", f"SELECT {M}, V.*, b.* EXCEPT ({M}) FROM `v` b"),
        ("SELECT 'ü😀' AS x, * FROM v", f"SELECT {M}, 'ü😀' AS x, * EXCEPT ({M}) FROM v"),
    ],
)
def test_system_columns_are_added_to_sql(sql: str, expected: str) -> None:
    assert with_system_columns(sql, ["__e", "__late"]) == expected


def test_names_are_quoted() -> None:
    assert quote("a-`b") == "`a-``b`"
