"""Small vocabularies of both kinds, in the form of GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runners.text.gguf_vocab import convert_vocabulary
from runners.text.pieces import BYTE_LEVEL_ALPHABET
from runners.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"
WORDS = [
    f"{SPACE}one",
    f"{SPACE}two",
    f"{SPACE}three",
    "ab",
    "abc",
    f"{SPACE}{SPACE}",
    f"{SPACE}{SPACE}{SPACE}",
    "aa",
    "aaa",
]


@pytest.fixture(autouse=True)
def own_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Converted vocabularies of these tests stay out of the user's cache; downloaded models may come from it."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("WAVELANE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def byte_level_metadata() -> dict[str, Any]:
    """All 256 bytes, a few merges (one of which ends inside a character), ChatML marks, `<think>` as user-defined."""
    by_byte = {byte: character for character, byte in BYTE_LEVEL_ALPHABET.items()}
    tokens = [by_byte[byte] for byte in range(256)]
    space = by_byte[ord(" ")]
    euro = "".join(by_byte[byte] for byte in "€".encode())
    merges = ["h e", "l l", "he ll", "hell o", f"{space} w", f"{euro[0]} {euro[1]}", f"{space} {euro[0]}", "1 2"]
    tokens += [merge.replace(" ", "") for merge in merges]
    added = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *added],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + list(added.values()),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    """Llama's layout: unknown, BOS, EOS, 256 bytes, letters, words with every prefix, a user-defined `<think>`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256)]
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz", "é", "中"]
    prefixes = [word[:end] for word in WORDS for end in range(2, len(word) + 1)]
    pieces = [*letters, *dict.fromkeys(prefixes), "<think>"]
    # Runs of spaces and of one letter share a score, as in Llama's vocabulary.
    scores = [-1000.0 if len(set(piece)) == 1 and len(piece) > 1 else -float(rank) for rank, piece in enumerate(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + pieces,
        "tokenizer.ggml.token_type": types + [NORMAL] * (len(pieces) - 1) + [USER_DEFINED],
        "tokenizer.ggml.scores": [0.0] * len(tokens) + scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """Metadata, and overrides without their `tokenizer.ggml.` prefix, to a tokenizer."""

    def build(metadata: dict[str, Any], **overrides: Any) -> Tokenizer:
        changed = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in overrides.items()}}
        vocabulary = convert_vocabulary(changed, "test.gguf", digest=str(hash(str(changed))))
        assert vocabulary is not None
        return vocabulary.tokenizer

    return build


@pytest.fixture(scope="session")
def byte_level(convert: Callable[..., Tokenizer], byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return convert(byte_level_metadata)


@pytest.fixture(scope="session")
def sentencepiece(convert: Callable[..., Tokenizer], sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    """With a space in front of text, as Llama has it."""
    return convert(sentencepiece_metadata)


@pytest.fixture(scope="session")
def sentencepiece_bare(convert: Callable[..., Tokenizer], sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    """Without one, as Gemma has it."""
    return convert(sentencepiece_metadata, add_space_prefix=False)


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return Path(__file__).parents[2] / "golden"
