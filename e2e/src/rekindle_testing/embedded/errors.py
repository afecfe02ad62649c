"""The base of all errors of the embedded cluster, so that a test can tell a
cluster that did not come up from a product that misbehaved on it."""


class EmbeddedError(Exception):
    """Something of the embedded cluster failed; the message says what, and what to do."""
