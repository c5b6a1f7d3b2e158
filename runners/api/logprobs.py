"""Log-probabilities in the two OpenAI forms: arrays for completions, a list of objects for chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runners.messages import TokenLogprobs
from runners.text.tokenizer import Tokenizer

# What OpenAI reports for a token that cannot happen; JSON has no -inf.
_FLOOR = -9999.0


class TokenTexts:
    """Text and bytes of single tokens, remembered: the same few hundred ids come again and again."""

    _MAX_ENTRIES = 1 << 16

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def text(self, token_id: int) -> str:
        return self.of(token_id)[0]

    def length(self, token_id: int, *, skip_special_tokens: bool) -> int:
        """Characters that the token adds to the text."""
        if self._tokenizer is None or (skip_special_tokens and self._tokenizer.is_special(token_id)):
            return 0
        return len(self.text(token_id))

    def key(self, token_id: int) -> str:
        """As `text`, but pieces of a character stay distinct: `bytes:\\xe2\\x82`."""
        text, data = self.of(token_id)
        if data is None or "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def of(self, token_id: int) -> tuple[str, bytes | None]:
        """Text with U+FFFD for incomplete characters, and the exact bytes; without a tokenizer the id, and None."""
        found = self._known.get(token_id)
        if found is None:
            if self._tokenizer is None:
                found = (f"token_id:{token_id}", None)
            else:
                data = self._tokenizer.token_bytes(token_id)
                found = (data.decode("utf-8", "replace"), data)
            if len(self._known) >= self._MAX_ENTRIES:
                self._known.clear()
            self._known[token_id] = found
        return found


def _finite(logprob: float) -> float:
    return logprob if logprob > _FLOOR else _FLOOR  # NaN compares false and becomes the floor too


class CompletionLogprobs:
    """Builds the `logprobs` object of one completion choice, chunk by chunk; offsets count characters of its tokens."""

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._offset = 0

    def format(self, entries: Sequence[TokenLogprobs | None], first_token_id: int | None = None) -> dict[str, Any]:
        """`entries` of consecutive tokens. A None entry is the first prompt token, whose id is `first_token_id`."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            token_id = first_token_id if entry is None else entry.token_id
            text = "" if token_id is None else self._texts.key(token_id)
            tokens.append(text)
            offsets.append(self._offset)
            if token_id is not None:
                self._offset += self._texts.length(token_id, skip_special_tokens=self._skip_special_tokens)
            token_logprobs.append(None if entry is None else _finite(entry.logprob))
            top_logprobs.append(None if entry is None else self._alternatives(entry))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """Best first; the chosen token is always among them. Of tokens with the same text the likeliest is kept."""
        alternatives: dict[str, float] = {}
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            alternatives.setdefault(self._texts.key(token_id), _finite(logprob))
        alternatives.setdefault(self._texts.key(entry.token_id), _finite(entry.logprob))
        return alternatives


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """The `logprobs` object of a chat choice or delta."""
    content = []
    for entry in entries:
        tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
        content.append(
            {
                **_token_object(entry.token_id, entry.logprob, texts),
                "top_logprobs": [_token_object(token_id, logprob, texts) for token_id, logprob in tops],
            }
        )
    return {"content": content, "refusal": None}


def _token_object(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text, data = texts.of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": None if data is None else list(data)}


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], texts: TokenTexts
) -> list[dict[str, dict[str, Any]] | None]:
    """The `prompt_logprobs` field: per prompt token a map of token id to its log-probability and text, null first."""
    result: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        pairs = dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) | {entry.token_id: entry.logprob}
        result.append(
            {
                str(token_id): {"logprob": _finite(logprob), "decoded_token": texts.text(token_id)}
                for token_id, logprob in pairs.items()
            }
        )
    return result
