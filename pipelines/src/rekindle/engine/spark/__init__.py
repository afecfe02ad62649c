"""The engine on Spark: the only package that imports PySpark.

`chain` runs a segment, `steps` are its queries, `analysis` asks Spark for their types, `session`
and `jvm` start Spark.

Design: docs/design/engine.md.
"""
