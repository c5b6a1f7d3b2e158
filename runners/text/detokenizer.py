"""Incremental detokenisation: token ids in, whole characters out, at constant cost per token."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runners.text.pieces import PrefixSpace

if TYPE_CHECKING:
    from runners.text.tokenizer import Tokenizer

_MAX_UTF8_BYTES = 4


class Detokenizer:
    """Text of the tokens that follow `prompt_ids`.

    The joined results of `push` and `finish` do not depend on how the ids were grouped, and `Tokenizer.decode` is
    this class over an empty prompt. Invalid bytes become U+FFFD as in `bytes.decode(errors="replace")`. A character
    that the prompt began and the output completes belongs to the output; one that is not completed belongs to the
    prompt and is not shown.
    """

    __slots__ = ("_at_text_start", "_careful", "_pending", "_pending_is_prompt", "_pieces", "_skip", "_source")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._source = tokenizer.pieces
        self._skip = skip_special_tokens
        self._pieces = self._source.visible if skip_special_tokens else self._source.everything
        self._pending = self._unfinished_character(prompt_ids)
        self._pending_is_prompt = bool(self._pending)
        self._at_text_start = self._starts_text(prompt_ids)
        self._careful = self._needs_care()

    def push(self, ids: Sequence[int]) -> str:
        """Whole characters that became known with `ids`, in order."""
        if self._careful:
            return "".join([self._push_carefully(token_id) for token_id in ids])
        pieces, pending = self._pieces, self._pending
        if not pending and len(ids) == 1:  # what nearly every decode step brings
            piece = pieces[ids[0]]
            if piece.__class__ is str:
                return piece
        texts: list[str] = []
        for token_id in ids:
            piece = pieces[token_id]
            if not pending and piece.__class__ is str:
                texts.append(piece)
            elif piece:
                data = pending + (piece.encode() if isinstance(piece, str) else piece)
                text, used = utf_8_decode(data, "replace", False)
                pending = data[used:]
                texts.append(text)
        self._pending = pending
        return "".join(texts)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed, else nothing."""
        pending, self._pending = self._pending, b""
        if not pending or self._pending_is_prompt:
            return ""
        return pending.decode(errors="replace")

    def _push_carefully(self, token_id: int) -> str:
        """One token while the prompt's unfinished character or a prefix space may still matter."""
        piece = self._pieces[token_id]
        raw = piece.encode() if isinstance(piece, str) else piece
        is_added = token_id in self._source.added
        if self._at_text_start and raw and not is_added:
            raw = raw.removeprefix(b" ")
            self._at_text_start = False
        elif is_added and raw:
            self._at_text_start = self._source.prefix_space is PrefixSpace.AFTER_ADDED_TOKENS and not self._skip
        if raw and self._pending_is_prompt:
            if not _continues(self._pending, raw):
                self._pending = b""
            self._pending_is_prompt = False
        self._careful = self._needs_care()
        data = self._pending + raw
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def _needs_care(self) -> bool:
        strips_later = self._source.prefix_space is PrefixSpace.AFTER_ADDED_TOKENS and not self._skip
        return self._at_text_start or self._pending_is_prompt or strips_later

    def _starts_text(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the next piece is the first of a text, so that its prefix space was put there by encoding."""
        if self._source.prefix_space is PrefixSpace.NONE:
            return False
        if self._skip:
            return all(token_id in self._source.special for token_id in prompt_ids)
        if self._source.prefix_space is PrefixSpace.AFTER_ADDED_TOKENS and prompt_ids:
            return prompt_ids[-1] in self._source.added
        return not prompt_ids

    def _unfinished_character(self, prompt_ids: Sequence[int]) -> bytes:
        """Bytes at the end of the prompt that begin a character but do not complete it."""
        tail = b""
        for token_id in reversed(prompt_ids):
            piece = self._pieces[token_id]
            if isinstance(piece, str):
                if piece:
                    break
                continue
            tail = piece + tail
            if len(tail) >= _MAX_UTF8_BYTES:
                break
        return tail[utf_8_decode(tail, "replace", False)[1] :]


def _continues(unfinished: bytes, following: bytes) -> bool:
    """Whether the first byte of `following` carries on the character that `unfinished` begins."""
    try:
        utf_8_decode(unfinished + following[:1], "strict", False)
    except UnicodeDecodeError:
        return False
    return True
