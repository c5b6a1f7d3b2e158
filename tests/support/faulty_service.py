"""The service, except that SIGUSR1 puts messages that cannot be decoded on its socket, both ways."""

from __future__ import annotations

import signal

import zmq

from runners.ipc import FrontEndSocket
from service import Wavelane, server
from tests.support.faulty_messages import GARBAGE

__all__ = ["Wavelane"]


def _corrupt_soon(*_: object) -> None:
    front_end = server.client._socket
    assert front_end is not None
    front_end._loop.call_soon_threadsafe(_corrupt, front_end)


def _corrupt(front_end: FrontEndSocket) -> None:
    for data in GARBAGE:
        front_end._socket.send(data, zmq.NOBLOCK)
        front_end._handle(data)
    front_end._look_again()  # as after every call on that socket


signal.signal(signal.SIGUSR1, _corrupt_soon)
