"""What is sent: prompts of drawn lengths as ids, text or chat, with shared prefixes and conversations.

Everything is a function of the seed: two servers get the same prompts in the same order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runners.simulation.trace import Arrival

InputForm = Literal["ids", "text", "chat"]
PATHS: dict[InputForm, str] = {"ids": "/v1/completions", "text": "/v1/completions", "chat": "/v1/chat/completions"}
_VOWELS, _CONSONANTS = "aeiou", "bdfghklmnprstvw"
# Two syllables each: some 5,600 words of two or three tokens in most vocabularies.
_WORDS = tuple(a + b + c + d for a in _CONSONANTS for b in _VOWELS for c in _CONSONANTS for d in _VOWELS)


@dataclass(frozen=True, slots=True)
class Request:
    """One turn. `at_s` is the planned time from the start of the run (None: as soon as its turn comes)."""

    index: int
    at_s: float | None
    prompt_tokens: int
    output_tokens: int
    conversation: str | None = None
    priority: int = 0


@dataclass(slots=True)
class _Conversation:
    ids: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class Workload:
    """How requests become bodies.

    `shared_prefix` tokens (words, for text) at the head of every prompt are the same. `keeps_sessions` sends only the
    new part of a conversation with a `session_id`; otherwise the history goes along, as with any other server.
    """

    form: InputForm
    model: str
    id_range: tuple[int, int] = (1000, 30_000)
    shared_prefix: int = 0
    seed: int = 1
    ignore_eos: bool = True
    keeps_sessions: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    run_tag: str = ""
    """Part of what is drawn, so that a second run finds nothing of the first one's prompts in a prefix cache."""
    _conversations: dict[str, _Conversation] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return PATHS[self.form]

    def body(self, request: Request) -> bytes:
        """The request's JSON, UTF-8."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if request.priority:
            fields["priority"] = request.priority
        fields |= self._prompt(request) | self.extra
        return json.dumps(fields).encode()

    def answered(self, request: Request, text: str, token_ids: Sequence[int]) -> None:
        """The answer becomes part of the conversation's next prompt."""
        if request.conversation is None or self.keeps_sessions:
            return
        conversation = self._conversations[request.conversation]
        if self.form == "chat":
            conversation.messages.append({"role": "assistant", "content": text})
        else:
            drawn = self._generator(f"answer:{request.index}")
            conversation.ids += token_ids or [drawn.randrange(*self.id_range) for _ in range(request.output_tokens)]

    def _generator(self, of: object) -> random.Random:
        return random.Random(f"{self.seed}:{self.run_tag}:{of}")

    def _prompt(self, request: Request) -> dict[str, Any]:
        conversation = None
        if request.conversation is not None:
            conversation = self._conversations.setdefault(request.conversation, _Conversation())
        is_first = conversation is None or not (conversation.ids or conversation.messages)
        shared = min(self.shared_prefix, request.prompt_tokens) if is_first else 0
        generator, common = self._generator(request.index), random.Random(f"{self.seed}:prefix")
        if self.form == "ids":
            new = [common.randrange(*self.id_range) for _ in range(shared)]
            new += [generator.randrange(*self.id_range) for _ in range(request.prompt_tokens - shared)]
            if conversation is None:
                return {"prompt": new}
            if self.keeps_sessions:
                return {"prompt": new, "session_id": f"{self.run_tag}{request.conversation}"}
            conversation.ids += new
            return {"prompt": list(conversation.ids), "return_token_ids": True}
        words = common.choices(_WORDS, k=shared) + generator.choices(_WORDS, k=request.prompt_tokens - shared)
        text = " ".join(words)
        if self.form == "text":
            return {"prompt": text}
        if conversation is None:
            return {"messages": [{"role": "user", "content": text}]}
        conversation.messages.append({"role": "user", "content": text})
        return {"messages": list(conversation.messages)}


def from_arrivals(arrivals: Sequence[Arrival], speed: float = 1.0) -> list[Request]:
    """A trace's requests, `speed` times as fast.

    A trace's prompt of a session counts the whole conversation; what a turn adds is what it has over the turn before
    with its answer.
    """
    requests: list[Request] = []
    known: dict[str, int] = {}
    for index, arrival in enumerate(arrivals):
        new = arrival.prompt_tokens
        if arrival.session is not None:
            new = max(1, new - known.get(arrival.session, 0))
            known[arrival.session] = arrival.prompt_tokens + arrival.output_tokens
        requests.append(
            Request(index, arrival.at_s / speed, new, max(1, arrival.output_tokens), arrival.session, arrival.priority)
        )
    return requests
