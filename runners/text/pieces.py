"""The text of single tokens: raw bytes by id, and tables that the incremental detokenizer reads.

Byte-level BPE spells every byte as one printable character (OpenAI's GPT-2 encoder); SentencePiece spells a space as
U+2581 and a byte without a piece as `<0xNN>`. Added tokens are literal text in both.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from runners.errors import StartupError

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(enum.Enum):
    """How the model's vocabulary writes text."""

    BYTE_LEVEL = "byte_level"
    SENTENCEPIECE = "sentencepiece"
    WORDS = "words"


class PrefixSpace(enum.Enum):
    """Where encoding puts a space in front of text; decoding takes it off again at the same place."""

    NONE = "none"
    TEXT_START = "text_start"
    AFTER_ADDED_TOKENS = "after_added_tokens"


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of GPT-2's encoding: printable Latin-1 stands for itself, the rest moves to U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


class PieceTable(dict[int, str | bytes]):
    """Token id → its text, or its bytes where they are not whole characters; "" for an id outside the vocabulary.

    Filled as ids are first seen: a vocabulary has up to 260,000 entries, a conversation a few thousand.
    """

    def __init__(self, token_bytes: Callable[[int], bytes | None]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | bytes:
        raw = self._token_bytes(token_id)
        if raw is None:
            return ""
        try:
            piece: str | bytes = raw.decode()
        except UnicodeDecodeError:
            piece = raw
        self[token_id] = piece
        return piece


@dataclass(slots=True)
class Pieces:
    """Bytes of every token of `backend`. `added` maps added ids to their text, `special` are those hidden in output."""

    backend: tokenizers.Tokenizer
    spelling: Spelling
    prefix_space: PrefixSpace = PrefixSpace.NONE
    byte_fallback: bool = True
    added: dict[int, str] = field(init=False)
    special: frozenset[int] = field(init=False)
    visible: PieceTable = field(init=False)
    everything: PieceTable = field(init=False)

    def __post_init__(self) -> None:
        added_tokens = self.backend.get_added_tokens_decoder()
        self.added = {token_id: token.content for token_id, token in added_tokens.items()}
        self.special = frozenset(token_id for token_id, token in added_tokens.items() if token.special)
        self.visible = PieceTable(self._visible_bytes)
        self.everything = PieceTable(self.token_bytes)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes that `token_id` stands for, specials as their text; None outside the vocabulary."""
        added = self.added.get(token_id)
        if added is not None:
            return added.encode()
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return None
        if self.spelling is Spelling.BYTE_LEVEL:
            try:
                return bytes([BYTE_LEVEL_ALPHABET[character] for character in token])
            except KeyError:
                return token.encode()
        if self.spelling is Spelling.WORDS:
            return b" " + token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()

    def _visible_bytes(self, token_id: int) -> bytes | None:
        return b"" if token_id in self.special else self.token_bytes(token_id)


def pieces_of(backend: tokenizers.Tokenizer, where: str) -> Pieces:
    """Spelling and prefix space of a `tokenizer.json`, read off its decoder and its normalizer.

    `where` names the file in errors. Raises StartupError for a decoder that is neither byte-level nor
    SentencePiece-style.
    """
    if backend.decoder is None:
        return Pieces(backend, Spelling.WORDS, PrefixSpace.TEXT_START)
    decoders = _flatten(backend.decoder, "decoders")
    kinds = {decoder["type"] for decoder in decoders}
    if "ByteLevel" in kinds:
        return Pieces(backend, Spelling.BYTE_LEVEL)
    replaces_mark = any(
        decoder["type"] == "Replace" and decoder.get("pattern") == {"String": SPACE_MARK} for decoder in decoders
    )
    if "Metaspace" not in kinds and not replaces_mark:
        raise StartupError(f"{where}: decoder {'+'.join(sorted(kinds))} is not supported (ByteLevel and Metaspace are)")
    strips = any(
        (decoder["type"] == "Strip" and decoder.get("start", 0) > 0)
        or (decoder["type"] == "Metaspace" and decoder.get("prepend_scheme", "always") != "never")
        for decoder in decoders
    )
    prefix_space = _prefix_space(backend) if strips else PrefixSpace.NONE
    return Pieces(backend, Spelling.SENTENCEPIECE, prefix_space, byte_fallback="ByteFallback" in kinds)


def _prefix_space(backend: tokenizers.Tokenizer) -> PrefixSpace:
    normalizers = _flatten(backend.normalizer, "normalizers")
    splitters = _flatten(backend.pre_tokenizer, "pretokenizers")
    every_fragment = any(part["type"] == "Prepend" for part in normalizers) or any(
        part["type"] == "Metaspace" and part.get("prepend_scheme") == "always" for part in splitters
    )
    return PrefixSpace.AFTER_ADDED_TOKENS if every_fragment else PrefixSpace.TEXT_START


def _flatten(component: Any, member: str) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as the list of its parts in tokenizer.json's own form."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    pending, parts = [state], []
    while pending:
        part = pending.pop(0)
        if part["type"] == "Sequence":
            pending = [*part[member], *pending]
        else:
            parts.append(part)
    return parts
