"""The text of a topology becomes a compiled one: `load` parses, `spec` and `kinds` have the fields,
`validate` and `checks` say what is wrong, `compile` makes segments, `model` is the result.

Shared by the operator, the command line and the tasks. Must not know Spark, the network or
Kubernetes.

Design: docs/design/compilation.md.
"""
