"""Analysis of SQL without Spark: what is allowed, columns, types, aggregates."""
