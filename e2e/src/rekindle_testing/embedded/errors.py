"""The base class of all errors of the embedded cluster, so that a test can distinguish
a cluster that failed from a product that failed on it."""


class EmbeddedError(Exception):
    """Something of the embedded cluster failed; the message says what, and what to do."""
