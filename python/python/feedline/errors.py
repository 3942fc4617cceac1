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


class StepExistsError(FeedlineError, FileExistsError):
    """The step is saved already. A step is never overwritten."""


class FolderHeldError(FeedlineError):
    """Another process writes into the folder of checkpoints, or has taken it over."""


class AbortedError(FeedlineError):
    """A save of several processes was ended by one of them; the text names it and its error."""


class InterruptedRunError(FeedlineError, FileExistsError):
    """An earlier run of the same outputs was interrupted; resume it or start again."""
