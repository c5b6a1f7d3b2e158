"""Clients that do not read: the kernel drops them, so that nothing waits for them for ever.

While a client does not read, the server's writes wait, its engine request is held back and its tokens merge up to a
limit; all that stays, until the client reads on or its connection ends. TCP alone never ends it: a receiver with a
closed window answers every probe. TCP_USER_TIMEOUT (RFC 5482; tcp(7)) limits for how long it may keep its window
closed; then the connection fails, and the request ends as for any client that has gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys


def drop_clients_that_do_not_read(timeout_s: float) -> int:
    """Let every connection accepted from now on fail when its client takes nothing for `timeout_s`.

    Accepted sockets inherit the option from their listening socket, whoever has opened that. Returns how many
    listening sockets there are. Linux only; elsewhere it does nothing.
    """
    if sys.platform != "linux":
        return 0
    num_listening = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                num_listening += _limit_if_listening(int(name), round(timeout_s * 1000))
    return num_listening


def _limit_if_listening(fd: int, timeout_ms: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as candidate:
        is_tcp = candidate.family in (socket.AF_INET, socket.AF_INET6) and candidate.type == socket.SOCK_STREAM
        if not is_tcp or not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        candidate.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        return True
