"""The engine on Spark: the only package that imports PySpark.

`chain` runs a segment, `steps` generates its queries, `analysis` gets their types from Spark,
`session` and `jvm` start Spark.

Design: docs/design/engine.md.
"""
