"""A small process on every node that has the operator replaced when all its replicas are lost
together (docs/decisions/0030). Standard library only, since it runs everywhere."""
