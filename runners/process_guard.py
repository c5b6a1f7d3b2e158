"""No orphans: a process that ends with its parent, and two ways to learn of another one's end."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends (Linux; elsewhere only pipes tell).

    The signal follows the thread that started this process, so start children from the main thread. `parent_pid` is
    the parent's pid when it started this process: if it has ended already, this process exits at once.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("prctl(PR_SET_PDEATHSIG): %s", os.strerror(ctypes.get_errno()))
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def exit_at_end_of_file(fd: int) -> None:
    """Exit when the other end of a pipe closes: its holder has ended. Watched by a thread of its own."""

    def watch() -> None:
        try:
            while os.read(fd, 4096):
                pass
        except OSError:
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
