"""`ApiSettings`: what the HTTP layer needs of the profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import Profile

DEFAULT_VERSION = "0.1.0"


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits of the HTTP layer. `max_tokens` None means what the context leaves; sizes in bytes, times in seconds."""

    max_body_bytes: int = 16 * 2**20
    tokenizer_threads: int = 2
    default_max_tokens: int = 16
    max_tokens: int | None = None
    request_deadline_s: float | None = None
    version: str = DEFAULT_VERSION

    @classmethod
    def from_profile(cls, profile: Profile, version: str = DEFAULT_VERSION) -> ApiSettings:
        """The sections `http` and `limits` of a resolved profile."""
        return cls(
            max_body_bytes=profile.http.max_body_bytes,
            tokenizer_threads=profile.http.threads,
            default_max_tokens=profile.limits.default_max_tokens,
            max_tokens=profile.limits.max_tokens,
            request_deadline_s=profile.limits.request_deadline_s,
            version=version,
        )
