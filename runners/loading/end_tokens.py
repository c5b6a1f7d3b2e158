"""Ids that end a generation, united from every file that names one. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runners.errors import StartupError
from runners.loading.gguf_metadata import MetadataValue
from runners.loading.settings import quote, read_json_object

# Control tokens that end a turn in published chat formats. A GGUF names one EOS id only, and that is often the end of
# the text, not of the turn; llama.cpp looks for such names too.
END_OF_TURN_TOKENS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|end|>"}
)
_GGUF_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_CONTROL_TOKEN = 3


def end_token_ids_from_folder(folder: Path) -> tuple[int, ...]:
    """EOS ids of config.json, generation_config.json and tokenizer_config.json, sorted, without repeats.

    Raises StartupError where one of them is not a token id.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        settings = read_json_object(path)
        nested = settings.get("text_config")
        for source in (settings, nested if isinstance(nested, dict) else {}):
            found.update(_token_ids(source.get("eos_token_id"), path, "eos_token_id"))
    tokenizer_id = _tokenizer_eos(folder)
    return tuple(sorted(found if tokenizer_id is None else found | {tokenizer_id}))


def end_token_ids_from_gguf(metadata: Mapping[str, MetadataValue], path: Path) -> tuple[int, ...]:
    """EOS, end-of-turn and end-of-message ids of the vocabulary, sorted, without repeats.

    The keys `tokenizer.ggml.{eos,eot,eom}_token_id`, and control tokens with a known end-of-turn name.
    """
    found: set[int] = set()
    for key in _GGUF_END_KEYS:
        found.update(_token_ids(metadata.get(key), path, key))
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list) and len(tokens) == len(kinds):
        found.update(
            index
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN and isinstance(token, str) and token in END_OF_TURN_TOKENS
        )
    return tuple(sorted(found))


def _token_ids(value: Any, path: Path, key: str) -> list[int]:
    ids: Iterable[Any] = value if isinstance(value, list) else [] if value is None else [value]
    accepted = []
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise StartupError(f"{path}: {key}: {quote(token_id)} is not a token id")
        accepted.append(token_id)
    return accepted


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of tokenizer_config.json's `eos_token`, which names it by text."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    settings = read_json_object(path)
    token = settings.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    decoder = settings.get("added_tokens_decoder")
    for token_id, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if isinstance(entry, dict) and entry.get("content") == text and token_id.isdecimal():
            return int(token_id)
    tokenizer = folder / "tokenizer.json"
    added = read_json_object(tokenizer).get("added_tokens") if tokenizer.is_file() else None
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == text and type(entry.get("id")) is int:
            return int(entry["id"])
    return None
