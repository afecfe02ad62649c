"""What can be wrong with a topology, by what a check needs: `fields` of one object, `references`
between objects, `streams` of columns; what is not built is in `unsupported`.

Checks of one kind of source, sink or window are with the kind.
"""
