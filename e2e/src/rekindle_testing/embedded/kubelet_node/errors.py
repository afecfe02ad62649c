"""What can go wrong with kubelet nodes."""

from rekindle_testing.embedded.errors import EmbeddedError


class KubeletNodeError(EmbeddedError):
    """An operation on a node or its network failed; the message has the output of its programs."""


class KubeletNodesUnsupported(EmbeddedError):
    """This machine cannot have kubelet nodes; the message says what it lacks."""
