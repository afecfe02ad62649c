"""Everything that is known of SQL without Spark: what is allowed, columns, types, aggregates."""
