"""`ApiSettings`: what the HTTP layer needs of the profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.operation import ApiKeySection
    from configs.schema import Profile

DEFAULT_VERSION = "0.1.0"
MAX_PROMPTS = 2048
"""OpenAI's limit for the inputs of one request."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits of the HTTP layer. `max_tokens` None means what the context leaves; sizes in bytes, times in seconds.

    Without `keys` everyone may use the API. `max_prompts` of one request: more could never wait in the queue at once.
    """

    keys: Sequence[ApiKeySection] = ()
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 32 * 2**10
    body_timeout_s: float = 60.0
    tokenizer_threads: int = 2
    default_max_tokens: int = 16
    max_tokens: int | None = None
    request_deadline_s: float | None = None
    max_prompts: int = MAX_PROMPTS
    most_urgent_priority: int = 0
    request_log: bool = False
    page: bool = True
    version: str = DEFAULT_VERSION

    def most_urgent_of(self, key_id: str) -> int:
        """The most urgent priority that requests of a key may have."""
        for key in self.keys:
            if key.name == key_id and key.most_urgent_priority is not None:
                return key.most_urgent_priority
        return self.most_urgent_priority

    @classmethod
    def from_profile(
        cls, profile: Profile, keys: Sequence[ApiKeySection] = (), version: str = DEFAULT_VERSION
    ) -> ApiSettings:
        """The sections `http` and `limits` of a resolved profile."""
        return cls(
            keys=tuple(keys),
            max_body_bytes=profile.http.max_body_bytes,
            max_header_bytes=profile.http.max_header_bytes,
            body_timeout_s=profile.http.body_timeout_s,
            tokenizer_threads=profile.http.threads,
            default_max_tokens=profile.limits.default_max_tokens,
            max_tokens=profile.limits.max_tokens,
            request_deadline_s=profile.limits.request_deadline_s,
            max_prompts=min(MAX_PROMPTS, profile.engine.slots + profile.admission.max_queued_requests),
            most_urgent_priority=profile.fairness.most_urgent_priority,
            request_log=profile.telemetry.request_log,
            page=profile.telemetry.page,
            version=version,
        )
