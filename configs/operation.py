"""Sections of the profile about running the server: HTTP, API keys, limits, watchdog, fairness, telemetry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from configs.section import FromList, NonNegativeInt, PositiveFloat, Section, Size


class HttpSection(Section):
    """The HTTP process."""

    threads: PositiveInt = 2
    """Threads that tokenise long texts."""
    cors: Annotated[tuple[str, ...], FromList] = ()
    """Origins whose pages may call the API from a browser (`https://chat.example.com`, or `*`); empty: none."""
    max_body_bytes: Size = 16 * 2**20
    """Larger request bodies are refused with 413."""
    max_header_bytes: Size = 32 * 2**10
    """Requests whose headers are larger in all are refused with 431."""
    body_timeout_s: PositiveFloat = 60.0
    """A request whose headers, or whose body, have not arrived after this long is refused with 408."""
    send_timeout_s: PositiveFloat = 30.0
    """A client that takes nothing of its answer for this long is disconnected, and its request aborted (Linux)."""
    drain_deadline_s: Annotated[float, Field(ge=0)] = 30.0
    """How long streams may go on after SIGTERM, or after their model is to be unloaded."""


class ApiKeySection(Section):
    """One API key; only its hash is known."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
    """Who it is, in logs and in `fairness.key_weights`."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key in hex; `python -m configs key NAME` makes both."""
    admin: bool = False
    """May also do what changes the server for everyone."""
    requests_per_minute: PositiveInt | None = None
    """In place of `auth.requests_per_minute`."""
    max_concurrency: PositiveInt | None = None
    """In place of `auth.max_concurrency`."""
    most_urgent_priority: Annotated[int, Field(ge=-(2**31) + 1, le=0)] | None = None
    """In place of `fairness.most_urgent_priority`."""


class AuthSection(Section):
    """Who may use the API. Without any key everyone may, except what needs an admin key."""

    keys: Annotated[tuple[ApiKeySection, ...], FromList] = ()
    """The keys, by name and hash."""
    keys_file: str | None = None
    """YAML file with a list of more keys, such as a mounted secret; read at the start. Keys in plain text may come in
    the variable WAVELANE_API_KEYS, separated by commas."""
    requests_per_minute: PositiveInt | None = None
    """Requests of one key in a minute; more are refused with 429. None: no limit."""
    max_concurrency: PositiveInt | None = None
    """Requests of one key in flight at once; more are refused with 429. None: no limit."""


class LimitsSection(Section):
    """Limits of one request."""

    default_max_tokens: PositiveInt = 16
    """`max_tokens` of a completion that names none."""
    max_tokens: PositiveInt | None = None
    """Largest `max_tokens` a client may ask for; None: what the context leaves."""
    request_deadline_s: PositiveFloat | None = None
    """A request that has not finished after this long fails; None: no deadline."""


class WatchdogSection(Section):
    """When the engine counts as dead or hung, and how it comes back."""

    beat_s: PositiveFloat = 5.0
    """No beat of the engine process for this long: dead."""
    hung_factor: Annotated[float, Field(gt=1)] = 20.0
    """A step that takes this many times its predicted time, and at least `hung_min_s`: hung."""
    hung_min_s: PositiveFloat = 30.0
    """No shorter step counts as hung, whatever its predicted time."""
    restart_backoff_s: PositiveFloat = 0.5
    """Wait before the first restart; doubles up to `restart_backoff_max_s`."""
    restart_backoff_max_s: PositiveFloat = 30.0
    """Longest wait before a restart."""


class FairnessSection(Section):
    """Who goes first when requests wait."""

    ageing_s: PositiveFloat = 10.0
    """A request of priority p counts as if it had arrived this much later p times over: urgent ones go first, none
    starves."""
    most_urgent_priority: Annotated[int, Field(ge=-(2**31) + 1, le=0)] = 0
    """Lowest `priority` that a client's request may have (lower goes first); one that asks for less gets this. With 0,
    clients may only stand back behind others."""
    key_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Share of each API key among those that wait; a key that is not named weighs 1."""


class TelemetrySection(Section):
    """What the server writes down about itself. Never the text of a request."""

    arrivals_file: str | None = None
    """Append a trace of arrivals to this file, for `runners.simulate` and `runners.tune`: counts and times, no text."""
    phase_profile_steps: NonNegativeInt = 64
    """Every so many steps the metrics learn where the engine loop's time went, phase by phase; 0: not taken."""
    page: bool = True
    """Serve the dashboard at `/`, and what feeds it at `/telemetry`."""
    perfetto_file: str | None = None
    """Write what the engine loop, its steps and its slots do to this file, for Perfetto or Chrome's tracing page."""
    perfetto_max_bytes: Size = 256 * 2**20
    """Of the trace file and the older one beside it (`trace.json`, `trace.older.json`): past half of it, a new one is
    begun."""
    emit_trace: bool = False
    """The trace file also says when each output left the engine."""
    request_log: bool = True
    """One line of JSON in the log for every request: ids, status, counts and times, no text."""
