"""Operators with state: `registry` lists them by kind, `base` is their interface.

An operator says what Spark computes before and after it, as SQL, and computes the rest itself, from
its tables (`rekindle.engine.state`). Must not know Spark, how tables are stored, or tasks.

Design: docs/decisions/0056-operators-and-tables.md.
"""
