"""Exceptions for which Python has no class.

Errors of a store are an ordinary ``OSError`` with ``errno`` (``FileNotFoundError``,
``PermissionError``, ``OSError`` with ``ENOSPC``), and a wrong argument or setting a ``ValueError``.
Each message has what was expected, what was found and, if there is one, a hint.
"""


class FeedlineError(Exception):
    """An error of feedline, and a base of the classes below."""


class CorruptError(FeedlineError, OSError):
    """Bytes differ from their checksum, or a file does not match its format or its index."""


class StalledError(FeedlineError, TimeoutError):
    """A store returned no data within the timeout. After this and any other error of a `Loader`,
    the next call tries the same batch again."""


class ClosedError(FeedlineError, ValueError):
    """The loader was closed."""


class OtherDataError(FeedlineError, ValueError):
    """The state of a loader is of other data, another order or other settings."""


class StepExistsError(FeedlineError, FileExistsError):
    """The step is saved already. A step is never overwritten."""


class FolderHeldError(FeedlineError):
    """Another process writes into the folder of checkpoints, or has taken over its lease."""


class AbortedError(FeedlineError):
    """One process aborted the save of several; the message has its name and its error."""


class InterruptedRunError(FeedlineError, FileExistsError):
    """An earlier `preprocess` of the same outputs was interrupted: pass ``resume=True`` to continue
    it, or ``resume="restart"`` to discard it."""
