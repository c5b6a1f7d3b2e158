"""What one request got: first token, gaps between tokens, usage, how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.load.http_stream import Exchange
from benchmarks.load.workload import Request


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Record:
    """One request. `token_at_s` counts from the request's sending: one entry for each event that carried tokens."""

    request: Request
    sent_at: float
    late_s: float
    """How long after its planned time it was sent: the tool's own delay."""
    token_at_s: list[float]
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None
    text: str
    token_ids: list[int]
    error: str | None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float:
        return self.token_at_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latency: between events that carried tokens."""
        return [after - before for before, after in zip(self.token_at_s, self.token_at_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first one."""
        if self.output_tokens < 2:
            return 0.0
        return (self.token_at_s[-1] - self.token_at_s[0]) / (self.output_tokens - 1)


def read(request: Request, exchange: Exchange, late_s: float = 0.0) -> Record:
    """Events of an ended exchange, each with the time at which its last byte had arrived."""
    record = Record(request, exchange.sent_at, late_s, [], 0.0, 0, 0, None, "", [], exchange.error)
    record.e2e_s = exchange.ended_at - exchange.sent_at
    if exchange.error is None and exchange.status != 200:
        record.error = f"HTTP {exchange.status}: {exchange.body[:300].decode(errors='replace')}"
    if record.error is None:
        _read_events(record, exchange)
    if record.error is None and not record.token_at_s:
        record.error = "no token came"
    return record


def _read_events(record: Record, exchange: Exchange) -> None:
    usage: _Usage | None = None
    done = closing_is_empty = False
    tail, texts = b"", []
    for arrived_at, piece in exchange.reads:
        *lines, tail = (tail + piece).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if not data:
                continue
            if data == b"[DONE]":
                done = True
                continue
            try:
                event = _decode_event(data)
            except msgspec.DecodeError as error:
                record.error = f"an event is no JSON of ours: {error}: {data[:200]!r}"
                return
            if event.error is not None:
                record.error = f"error event: {str(event.error)[:300]}"
                return
            usage = event.usage or usage
            for choice in event.choices:
                text = _text_of(choice)
                texts.append(text or "")
                record.token_ids += choice.token_ids or ()
                record.finish_reason = choice.finish_reason or record.finish_reason
                closing_is_empty = bool(choice.finish_reason and not text and not choice.token_ids)
                # A chat's opening event has a role and no content: no token has been made yet.
                if text is not None and (text or choice.delta is None or record.token_at_s):
                    record.token_at_s.append(arrived_at - record.sent_at)
    record.text = "".join(texts)
    if not done:
        record.error = "the stream ended without [DONE]"
    events = len(record.token_at_s)
    if usage is not None:
        record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
        if closing_is_empty and events > max(1, usage.completion_tokens):
            record.token_at_s.pop()  # only said that the answer is over
    else:
        record.output_tokens = len(record.token_ids) or events


def _text_of(choice: _Choice) -> str | None:
    """None when the event can carry no token (a chat's event without content)."""
    if choice.delta is None:
        return choice.text or ""
    if choice.delta.content is None and choice.delta.reasoning_content is None:
        return "" if choice.finish_reason else None
    return (choice.delta.content or "") + (choice.delta.reasoning_content or "")
