"""What keeps images from being built or started."""


class ImageError(Exception):
    """The message says what failed and what to do."""


class NoContainerEngine(ImageError):
    """Nothing on this machine can build images."""
