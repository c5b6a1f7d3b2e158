"""One choice while it is generated: ids in from the engine, text out, and how it ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from runners.api.interfaces import OutputChunk, RequestStream
from runners.api.prompts import Prompt
from runners.errors import RequestFailedError
from runners.messages import TokenLogprobs
from runners.request import FinishReason
from runners.text.detokenizer import Detokenizer
from runners.text.message_parser import MessageDelta
from runners.text.stop_strings import StopMatcher
from runners.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """What one chunk of the engine adds to a choice. `text` may be empty; `logprobs` has one entry a token id, but with
    stop strings those of the tokens that `text` has reached.

    `message` is the text taken apart, for choices that do so.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    message: MessageDelta | None = None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How ids become text: the same for every choice of a request.

    `shown_specials` are special tokens whose text is kept although others are skipped: a parser looks for them.
    """

    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    stops: list[str]
    min_tokens: int = 0
    skip_special_tokens: bool = True
    include_stop: bool = False
    ignore_eos: bool = False
    shown_specials: Mapping[int, str] = field(default_factory=dict)


class HeldLogprobs:
    """Entries of tokens whose text may still turn out to be behind the cut: a stop string takes the entries of its own
    tokens with it, so that the entries and the text end at the same place."""

    __slots__ = ("_held", "_num_given", "_num_seen")

    def __init__(self) -> None:
        self._held: deque[tuple[int, TokenLogprobs]] = deque()
        self._num_seen = 0  # characters that the tokens added
        self._num_given = 0  # characters given to the reader

    def add(self, entry: TokenLogprobs, num_chars: int) -> None:
        self._held.append((self._num_seen, entry))
        self._num_seen += num_chars

    def reached(self, num_chars: int) -> list[TokenLogprobs]:
        """Entries of the tokens that begin before the end of the text, now that it has `num_chars` more."""
        self._num_given += num_chars
        entries: list[TokenLogprobs] = []
        while self._held and self._held[0][0] < self._num_given:
            entries.append(self._held.popleft()[1])
        return entries

    def rest(self, unseen: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """All that are left, and those of tokens without text: the text has ended of itself."""
        return [*(entry for _, entry in self._held), *unseen]


class Choice:
    """Feeds one request stream through the incremental detokeniser and the stop matcher.

    Streamed and whole answers both go through here token by token, so that text, usage and end are the same.
    """

    __slots__ = (
        "_detokenizer",
        "_echo",
        "_held",
        "_hidden_ids",
        "_matcher",
        "_options",
        "_stream",
        "cached_tokens",
        "completion_tokens",
        "finish_reason",
        "index",
        "prompt",
    )

    def __init__(
        self, index: int, prompt: Prompt, stream: RequestStream, options: TextOptions, *, echo: str = ""
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self._options = options
        self._echo = echo
        tokenizer = options.tokenizer
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(tokenizer, prompt.ids, skip_special_tokens=options.skip_special_tokens)
        )
        # With ignore_eos an end marker is a token like any other, but its text is still not for the reader.
        hides_eos = options.ignore_eos and options.skip_special_tokens
        self._hidden_ids = options.eos_token_ids if hides_eos else frozenset()
        self._matcher = StopMatcher(options.stops, include=options.include_stop) if options.stops else None
        self._held = HeldLogprobs()

    async def deltas(self) -> AsyncIterator[Delta]:
        """One delta a chunk, the last one with `finish_reason` set. Raises what the engine raises."""
        async for chunk in self._stream:
            yield self._push(chunk)
            if self.finish_reason is not None:
                return
        raise RequestFailedError("The engine ended the request without a result.")

    def abort(self) -> None:
        """Gives the engine's side back unless the request has ended."""
        if self.finish_reason is None:
            self._stream.abort()

    def _push(self, chunk: OutputChunk) -> Delta:
        ids = chunk.token_ids
        reason = chunk.finish_reason
        if chunk.cached_tokens:
            self.cached_tokens = chunk.cached_tokens
        if self._matcher is not None:
            text, kept, logprobs = self._matched_text(chunk)
        else:
            text, kept, logprobs = self._plain_text(ids, reason), len(ids), chunk.logprobs
            self.finish_reason = reason
        if self._echo:
            text, self._echo = self._echo + text, ""
        self.completion_tokens += kept
        return Delta(text, ids[:kept], logprobs, chunk.prompt_logprobs)

    def _hides_last(self, ids: list[int], reason: FinishReason | None) -> bool:
        """Whether the last id is an end marker: it counts, but is not shown."""
        if reason is not FinishReason.STOP or not ids:
            return False
        return not self._options.include_stop or ids[-1] in self._options.eos_token_ids

    def _plain_text(self, ids: list[int], reason: FinishReason | None) -> str:
        detokenizer = self._detokenizer
        if detokenizer is None:
            return ""
        if self._hides_last(ids, reason):
            ids = ids[:-1]
        if self._hidden_ids and not self._hidden_ids.isdisjoint(ids):
            ids = [token_id for token_id in ids if token_id not in self._hidden_ids]
        text = self._decode(detokenizer, ids)
        return text if reason is None else text + detokenizer.finish()

    def _decode(self, detokenizer: Detokenizer, ids: list[int]) -> str:
        shown = self._options.shown_specials
        if not shown or shown.keys().isdisjoint(ids):
            return detokenizer.push(ids)
        return "".join([detokenizer.push([token_id]) + shown.get(token_id, "") for token_id in ids])

    def _matched_text(self, chunk: OutputChunk) -> tuple[str, int, list[TokenLogprobs] | None]:
        """Text up to a stop string, how many ids of this chunk it took, and the entries it has reached; sets the end.

        Goes token by token even through a chunk of several, so that the count does not depend on how they arrived.
        """
        matcher, detokenizer = self._matcher, self._detokenizer
        assert matcher is not None
        assert detokenizer is not None
        ids, reason, entries = chunk.token_ids, chunk.finish_reason, chunk.logprobs
        num_shown = len(ids) - self._hides_last(ids, reason)
        parts: list[str] = []
        kept = len(ids)
        for position, token_id in enumerate(ids[:num_shown]):
            piece = "" if token_id in self._hidden_ids else self._decode(detokenizer, [token_id])
            if entries is not None:
                self._held.add(entries[position], len(piece))
            if self.completion_tokens + position < self._options.min_tokens:
                parts.append(piece)
                continue
            emitted, matched = matcher.push(piece)
            parts.append(emitted)
            if matched is not None:
                kept = self._stop_at(position + 1)
                break
        else:
            if reason is not None:
                emitted, matched = matcher.push(detokenizer.finish())
                parts.append(emitted)
                if matched is not None:
                    kept = self._stop_at(len(ids))
                else:
                    parts.append(matcher.finish())
                    self.finish_reason = reason
                    return "".join(parts), kept, None if entries is None else self._held.rest(entries[num_shown:])
        text = "".join(parts)
        return text, kept, None if entries is None else self._held.reached(len(text))

    def _stop_at(self, kept: int) -> int:
        self.finish_reason = FinishReason.STOP
        self._stream.finish(self.completion_tokens + kept)
        return kept


async def collect(choices: Sequence[Choice]) -> list[Delta]:
    """Everything each choice generates, as one delta a choice. The first error ends them all."""
    if len(choices) == 1:
        return [await _collect_one(choices[0])]
    tasks = [asyncio.ensure_future(_collect_one(choice)) for choice in choices]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _collect_one(choice: Choice) -> Delta:
    texts: list[str] = []
    whole = Delta("", [])
    async for delta in choice.deltas():
        texts.append(delta.text)
        whole.token_ids += delta.token_ids
        if delta.logprobs is not None:
            whole.logprobs = [*(whole.logprobs or ()), *delta.logprobs]
        if delta.prompt_logprobs is not None:
            whole.prompt_logprobs = delta.prompt_logprobs
        if delta.message is not None:
            whole.message = whole.message or MessageDelta()
            whole.message.add(delta.message)
    whole.text = "".join(texts)
    return whole
