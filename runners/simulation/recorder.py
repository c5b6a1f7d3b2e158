"""Record the arrivals of a running server as a trace: counts and times, no text, no names.

Sessions and keys are written as digests, so that turns of one session can be told to belong together and no more.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path

from runners.errors import StartupError
from runners.messages import AddRequest, RequestOutput
from runners.simulation.trace import Arrival

logger = logging.getLogger(__name__)


class ArrivalRecorder:
    """Writes one line a request once it has ended: only then its output tokens are known.

    Lines are in the order of the ends; `read_trace` sorts them. Requests that were refused or failed before their
    first token are left out. OSError when the file cannot be opened; one that cannot be written later (a full disk)
    ends the recording with one log line, not the engine.
    """

    def __init__(self, path: Path, session_ttl_s: float = 3600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._has_failed = False
        self._start: float | None = None
        self._open: dict[str, tuple[AddRequest, int]] = {}
        self._session_ttl_s = session_ttl_s
        self._clock = clock
        self._sessions: OrderedDict[str, tuple[float, int]] = OrderedDict()  # when used and its tokens, oldest first

    def arrived(self, message: AddRequest) -> None:
        if self._has_failed:
            return
        if self._start is None:
            self._start = message.arrival_time
        self._open[message.request_id] = (message, 0)

    def published(self, outputs: Iterable[RequestOutput]) -> None:
        """Count the tokens; a final output ends its request."""
        for output in outputs:
            entry = self._open.get(output.request_id)
            if entry is None:
                continue
            message, tokens = entry
            self._open[output.request_id] = (message, tokens + len(output.token_ids) // 4)
            if output.is_final:
                self.ended(output.request_id)

    def ended(self, request_id: str) -> None:
        """The request is over, also one that was aborted or that the front end finished."""
        entry = self._open.pop(request_id, None)
        if entry is None or entry[1] == 0:
            return
        message, output_tokens = entry
        prompt_tokens = len(message.prompt) // 4
        session = None
        if message.session_id is not None:
            session = _digest(message.session_id)
            if message.append_to_session:
                prompt_tokens += self._sessions.get(session, (0.0, 0))[1]
            self._remember(session, prompt_tokens + output_tokens)
        at_s = message.arrival_time - (self._start or 0.0)
        key = _digest(message.key_id) if message.key_id else ""
        arrival = Arrival(max(0.0, at_s), prompt_tokens, output_tokens, session, message.priority, key)
        line = arrival.to_json() + "\n"
        self._attempt(lambda: self._file.write(line))

    def _remember(self, session: str, tokens: int) -> None:
        """The session's tokens, for as long as the engine keeps them; those it has dropped go here too."""
        now = self._clock()
        self._sessions[session] = now, tokens
        self._sessions.move_to_end(session)
        while next(iter(self._sessions.values()))[0] + self._session_ttl_s <= now:
            self._sessions.popitem(last=False)

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def close(self) -> None:
        self._attempt(self._file.close)

    def _attempt(self, operation: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            operation()
        except OSError as error:
            self._has_failed = True
            logger.error("arrivals are no longer recorded: %s: %s", self._file.name, error.strerror)


def open_recorder(path: str | None, session_ttl_s: float) -> ArrivalRecorder | None:
    """A recorder for the profile's `telemetry.arrivals_file`. StartupError when the file cannot be opened."""
    if path is None:
        return None
    try:
        return ArrivalRecorder(Path(path), session_ttl_s)
    except OSError as error:
        raise StartupError(f"telemetry.arrivals_file: {path}: {error.strerror}") from error


def _digest(name: str) -> str:
    return blake2b(name.encode(), digest_size=6).hexdigest()
