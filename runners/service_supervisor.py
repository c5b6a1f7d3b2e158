"""In BentoML's supervisor, the process above the HTTP process: what is checked first, and how a failed start ends it.

BentoML starts an HTTP process again whatever it ended with, and its supervisor ends with status 0. An orchestrator, or
a person at a terminal, should see a start-up that cannot succeed: as one line, and as an exit status.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import socket
import sys
from types import FrameType

_FAILED = signal.SIGUSR2  # of those that neither BentoML nor circus uses


def prepare_supervisor(service_name: str) -> None:
    """Call in the supervisor before it starts anything. SystemExit, with one line, where that could only go wrong."""
    _check_workers(service_name)
    _check_port()
    has_failed = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal has_failed
        has_failed = True
        os.kill(os.getpid(), signal.SIGTERM)  # circus ends its processes in good order

    def exit_with_failure() -> None:
        if has_failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    signal.signal(_FAILED, on_signal)
    atexit.register(exit_with_failure)


def end_supervisor() -> None:
    """Call in the HTTP process: everything ends, with exit status 1. The reason has been logged."""
    os.kill(os.getppid(), _FAILED)


def _check_workers(service_name: str) -> None:
    """Each HTTP process owns an engine; two engines would share one device, and each would know half of the metrics."""
    from bentoml._internal.configuration.containers import BentoMLContainer

    workers = BentoMLContainer.config.services[service_name].workers.get()
    if workers != 1:
        raise SystemExit(
            f"services.{service_name}.workers: {workers}, but only 1 works: every HTTP process would start an engine "
            "of its own. For more than one carries, run replicas behind a proxy (deploy/nginx.conf)."
        )


def _check_port() -> None:
    import click
    from bentoml._internal.configuration.containers import BentoMLContainer

    context = click.get_current_context(silent=True)
    if context is None:  # started by a program, whose options are not known here
        return
    port = context.params.get("port") or BentoMLContainer.http.port.get()
    host = context.params.get("host") or BentoMLContainer.http.host.get()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            hint = "; --port (or PORT=… make serve) takes another one" if error.errno == errno.EADDRINUSE else ""
            raise SystemExit(f"cannot listen on {host} port {port}: {error.strerror}{hint}") from None
