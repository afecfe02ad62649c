"""The checks of a topology, by what they look at: `fields` of one object, `references` between
objects, `streams` with their columns, and what this version does not support (`unsupported`).

Checks of one kind of source, sink or window are with the kind.
"""
