"""`Tokenizer`: text to ids and back, over the `tokenizers` library. No torch, no transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import tokenizers

from runners.errors import InvalidRequestError
from runners.text.detokenizer import Detokenizer
from runners.text.pieces import Pieces, Spelling

# Unicode composition makes one character of up to this many.
_MOST_CHARS_COMPOSED = 4


class Tokenizer:
    """One vocabulary. Safe to use from several threads.

    `prefix_ids` and `suffix_ids` are what `add_special_tokens` puts around a text (usually BOS, or nothing).
    """

    def __init__(
        self,
        pieces: Pieces,
        *,
        bos_id: int | None = None,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
    ) -> None:
        self.pieces = pieces
        self.bos_id = bos_id
        self.prefix_ids = list(prefix_ids)
        self.suffix_ids = list(suffix_ids)
        self._backend = pieces.backend
        self._text_only: tokenizers.Tokenizer | None = None
        highest_added = max(pieces.added, default=-1) + 1
        self.vocab_size: int = max(self._backend.get_vocab_size(with_added_tokens=True), highest_added)

    @property
    def add_bos(self) -> bool:
        """Whether a text is encoded with BOS in front."""
        return self.bos_id is not None and self.prefix_ids[:1] == [self.bos_id]

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`. Without `parse_special` the text of a special token is ordinary text.

        Raises InvalidRequestError for a text that is not Unicode (lone surrogates).
        """
        backend = self._backend if parse_special else self._text_only_backend()
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error}") from error
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def fewest_tokens(self, num_chars: int) -> int:
        """How many ids a text of `num_chars` characters has at least: each token is at most the longest one."""
        return num_chars // self._most_chars if self._most_chars else 0

    @cached_property
    def _most_chars(self) -> int:
        """Characters of a text that one token can stand for; 0 where unknown characters may all become one token."""
        model = self._backend.model
        if self.pieces.spelling is not Spelling.BYTE_LEVEL and not getattr(model, "byte_fallback", False):
            return 0
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)
        return longest if self._backend.normalizer is None else longest * _MOST_CHARS_COMPOSED

    def encode_chat(self, rendered: str) -> list[int]:
        """Ids of a rendered chat: exactly one BOS where the vocabulary asks for one, whether the template wrote it."""
        ids = self.encode(rendered, add_special_tokens=False)
        if self.bos_id is None or not self.add_bos:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self.bos_id:
            start += 1
        return [self.bos_id, *ids[start:]]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; equal to a Detokenizer's joined output for them."""
        detokenizer = Detokenizer(self, (), skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, specials as their text; empty outside the vocabulary."""
        return self.pieces.token_bytes(token_id) or b""

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` hides this id."""
        return token_id in self.pieces.special

    def token_id(self, text: str) -> int | None:
        """Id of the token that is spelled exactly `text`."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def _text_only_backend(self) -> tokenizers.Tokenizer:
        """The same vocabulary, reading the text of special tokens as text; shares the model, made at first use.

        The library has this as a setting of the tokenizer, which must not change under another thread's encode.
        """
        if self._text_only is None:
            backend = tokenizers.Tokenizer(self._backend.model)
            if self._backend.normalizer is not None:
                backend.normalizer = self._backend.normalizer
            if self._backend.pre_tokenizer is not None:
                backend.pre_tokenizer = self._backend.pre_tokenizer
            added = self._backend.get_added_tokens_decoder()
            backend.add_tokens([added[token_id] for token_id in sorted(added)])
            backend.encode_special_tokens = True
            self._text_only = backend
        return self._text_only
