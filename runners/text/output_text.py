"""From a request's generated ids to the text a client may see: detokeniser, stop strings, hidden end tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from runners.text.detokenizer import Detokenizer
from runners.text.stop_strings import StopMatcher
from runners.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text to send, how many of the pushed ids count (all, or up to the one that completed a stop string), the stop."""

    text: str
    kept_ids: int
    matched: str | None = None


class OutputText:
    """Text of one choice. `total_kept` counts the ids kept so far: `keep_tokens` of a FinishRequest, and usage.

    `hidden_ids` are never shown, special or not: the EOS ids, unless the request ignores them.
    Without a tokenizer the text stays empty and every id is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int] = (),
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        hidden_ids: Collection[int] = (),
    ) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt_ids, skip_special_tokens)
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._hidden = frozenset(
            token_id
            for token_id in hidden_ids
            if tokenizer is not None and not (skip_special_tokens and tokenizer.is_special(token_id))
        )
        self.total_kept = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._matcher is None else self._matcher.matched

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Add generated ids. After a match further ids are dropped: ("", 0)."""
        if self._detokenizer is None:
            self.total_kept += len(ids)
            return TextDelta("", len(ids))
        if self._matcher is None:
            self.total_kept += len(ids)
            return TextDelta(self._detokenizer.push(self._shown(ids)), len(ids))
        if self._matcher.matched is not None:
            return TextDelta("", 0, self._matcher.matched)
        texts = []
        # One id at a time, so that the id which completed the stop string is known.
        for count, token_id in enumerate(ids, start=1):
            text, matched = self._matcher.push(self._detokenizer.push(self._shown((token_id,))))
            texts.append(text)
            self.total_kept += 1
            if matched is not None:
                return TextDelta("".join(texts), count, matched)
        return TextDelta("".join(texts), len(ids))

    def finish(self) -> TextDelta:
        """The rest, once no more ids follow."""
        if self._detokenizer is None or self.matched is not None:
            return TextDelta("", 0, self.matched)
        text = self._detokenizer.finish()
        if self._matcher is None:
            return TextDelta(text, 0)
        shown, matched = self._matcher.push(text)
        return TextDelta(shown if matched is not None else shown + self._matcher.finish(), 0, matched)

    def _shown(self, ids: Sequence[int]) -> Sequence[int]:
        return [token_id for token_id in ids if token_id not in self._hidden] if self._hidden else ids
