"""Compare what `rekindle run` wrote for the Nexmark example with DuckDB over the same input.

    python examples/nexmark/check.py INPUT OUTPUT

Both are compared as rows that may repeat, in any order. The exit status is 1 if a query differs.
q12 counts by event time instead of the clock, by which each run would give other rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import duckdb

BID_TYPE = """
    CASE WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'dayTime'
         WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'nightTime' ELSE 'otherTime' END"""
CHANNEL_ID = "regexp_extract(url, '(&|^)channel_id=([^&]*)', 2)"

ORACLE = {
    "q0": "SELECT auction, bidder, price, date_time, extra FROM bids",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bids",
    "q2": "SELECT auction, price FROM bids WHERE auction % 123 = 0",
    "q12": """
        SELECT time_bucket(INTERVAL 10 SECOND, date_time) AS window_start,
            window_start + INTERVAL 10 SECOND AS window_end, bidder, count(*) AS bid_count
        FROM bids GROUP BY ALL""",
    "q14": f"""
        SELECT auction, bidder, 0.908 * price AS price, {BID_TYPE} AS bid_time_type,
            date_time, extra,
            length(extra) - length(replace(extra, 'c', '')) AS c_counts
        FROM bids WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000""",
    "q17": """
        SELECT time_bucket(INTERVAL 1 DAY, date_time) AS window_start,
            window_start + INTERVAL 1 DAY AS window_end, auction, count(*) AS total_bids,
            count(*) FILTER (price < 10000) AS rank1_bids,
            count(*) FILTER (price >= 10000 AND price < 1000000) AS rank2_bids,
            count(*) FILTER (price >= 1000000) AS rank3_bids,
            min(price) AS min_price, max(price) AS max_price, avg(price) AS avg_price,
            sum(price) AS sum_price
        FROM bids GROUP BY ALL""",
    "q21": f"""
        SELECT auction, bidder, price, channel, CASE lower(channel)
            WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2'
            WHEN 'baidu' THEN '3' ELSE {CHANNEL_ID} END AS channel_id
        FROM bids
        WHERE {CHANNEL_ID} <> '' OR lower(channel) IN ('apple', 'google', 'facebook', 'baidu')""",
    "q22": """
        SELECT auction, bidder, price, channel, split_part(url, '/', 4) AS dir1,
            split_part(url, '/', 5) AS dir2, split_part(url, '/', 6) AS dir3
        FROM bids""",
}


def check(data: Path, output: Path) -> dict[str, tuple[int, int, int]]:
    """Of each query: the rows that are right, that are missing, and that should not be there."""
    database = duckdb.connect()
    database.execute("SET TimeZone = 'UTC'")
    for kind in ("persons", "auctions", "bids"):
        database.execute(f"CREATE VIEW {kind} AS FROM '{data / kind}.parquet'")
    results = {}
    for query, sql in ORACLE.items():
        database.execute(f"CREATE OR REPLACE VIEW expected AS {sql}")
        columns = database.sql("FROM expected")
        casts = zip(columns.columns, columns.types, strict=True)
        selected = ", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in casts)
        files = f"'{output / query}/*.parquet'"
        database.execute(f"CREATE OR REPLACE VIEW actual AS SELECT {selected} FROM {files}")
        missing = len(database.sql("FROM expected EXCEPT ALL FROM actual"))
        foreign = len(database.sql("FROM actual EXCEPT ALL FROM expected"))
        results[query] = (len(columns) - missing, missing, foreign)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the output of Nexmark with DuckDB's.")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    results = check(args.input, args.output)
    for query, (right, missing, foreign) in results.items():
        verdict = "equal" if not missing and not foreign else f"{missing} missing, {foreign} wrong"
        print(f"{query:<4} {right:>9,} rows  {verdict}")
    sys.exit(any(missing or foreign for _, missing, foreign in results.values()))


if __name__ == "__main__":
    main()
