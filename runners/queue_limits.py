"""How many requests and prompt tokens wait in front of the engine, and how many may."""

from __future__ import annotations

from runners.errors import RateLimitError


class QueueLimits:
    """A request enters, starts with its first output, and leaves.

    `slots` is how many requests the engine runs at once; beyond them at most `max_requests` wait. Prompts without a
    first token may have `max_tokens` in all, where that is set.
    """

    def __init__(self, slots: int, max_requests: int, max_tokens: int | None) -> None:
        self._slots = slots
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """All requests are gone."""
        self._num_waiting = self._num_started = self._num_waiting_tokens = 0

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place: entered, no token yet, and no free slot to account for them."""
        return max(0, self._num_waiting - max(0, self._slots - self._num_started))

    def check(self, num_prompt_tokens: int) -> None:
        """RateLimitError when one more request with so many prompt tokens may not wait."""
        if self.num_queued >= self._max_requests:
            raise RateLimitError(f"The queue is full: {self._max_requests} requests are waiting.")
        limit, waiting = self._max_tokens, self._num_waiting_tokens
        if limit is not None and waiting > 0 and waiting + num_prompt_tokens > limit:
            raise RateLimitError(
                f"The queue is full: {waiting} prompt tokens are waiting, this request has "
                f"{num_prompt_tokens} and the limit is {limit}."
            )

    def enter(self, num_prompt_tokens: int) -> None:
        self._num_waiting += 1
        self._num_waiting_tokens += num_prompt_tokens

    def start(self, num_prompt_tokens: int) -> None:
        self._num_waiting -= 1
        self._num_waiting_tokens -= num_prompt_tokens
        self._num_started += 1

    def leave(self, num_prompt_tokens: int, *, has_started: bool) -> None:
        if has_started:
            self._num_started -= 1
        else:
            self._num_waiting -= 1
            self._num_waiting_tokens -= num_prompt_tokens
