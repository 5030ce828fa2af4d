"""Errors that a user can fix: their text says what was met, with its value, and what to do next."""


class KvprobeError(Exception):
    """Anything the user can act on. The command line prints the text as one line and exits with 1."""


class UnsupportedModelError(KvprobeError):
    """A model, family or checkpoint that kvprobe cannot read honestly; the text names it and the reason."""


class NotIntercepted(KvprobeError):
    """An attention layer that should have passed through the seam did not: a result would be of the plain model."""
