"""Exceptions that Python has no class for.

What a store reports is an ordinary ``OSError`` with ``errno`` (``FileNotFoundError``,
``PermissionError``, ``OSError`` with ``ENOSPC``), and a wrong argument or setting a ``ValueError``.
The text of each says what was expected, what was found and, where there is one, a hint.
"""


class FeedlineError(Exception):
    """What went wrong in feedline, and a base of the classes below."""


class CorruptError(FeedlineError, OSError):
    """Bytes differ from their checksum, or a file is not what its format or its index says."""


class StalledError(FeedlineError, TimeoutError):
    """A store gave no data within the timeout. The call may be repeated."""


class ClosedError(FeedlineError, ValueError):
    """The loader was closed."""


class OtherDataError(FeedlineError, ValueError):
    """The state of a loader is of other data, another order or other settings."""


class InterruptedRunError(FeedlineError, FileExistsError):
    """An earlier run of the same outputs was interrupted; resume it or start again."""
