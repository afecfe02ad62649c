"""From the text of a topology to a compiled one: `load` parses, `spec` and `kinds` define the
fields, `validate` and `checks` find problems, `compile` makes segments, `model` is the result.

Shared by the operator, the command line and the tasks. Must not know Spark, the network or
Kubernetes.

Design: docs/design/compilation.md.
"""
