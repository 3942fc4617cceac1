"""The programs ``feedline`` and ``preprocess``, which the native module runs.

``python -m feedline`` is ``feedline``. Both behave as the binaries of the same names: exit codes,
signals, closed pipes and output. The interpreter takes no part while they run.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from feedline import _feedline


def feedline() -> NoReturn:
    """Runs the program ``feedline`` with the arguments of this process, and exits."""
    _run("feedline")


def preprocess() -> NoReturn:
    """Runs the program ``preprocess`` with the arguments of this process, and exits."""
    _run("preprocess")


def _run(name: str) -> NoReturn:
    _restore_signals()
    _open_closed_descriptors()
    # -P: without it, a folder `feedline` in the current folder would be the package.
    restart = [sys.executable, "-P", "-m", "feedline"] if sys.executable else []
    sys.exit(_feedline.run_program(name, sys.argv[1:], restart))


def _restore_signals() -> None:
    """Restores the actions that the interpreter replaced at its start.

    It leaves a SIGINT alone that was ignored, as in jobs that a shell started in the background.
    SIGPIPE stays ignored, as in every program in Rust.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def _open_closed_descriptors() -> None:
    """Opens standard streams that are closed, so that no file gets the number of one of them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is the descriptor.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)


if __name__ == "__main__":
    feedline()
