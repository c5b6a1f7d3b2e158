"""Text files of a Hugging Face model folder: tokenizer.json and the configs around it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from runners.errors import StartupError
from runners.text.pieces import pieces_of
from runners.text.tokenizer import Tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelText:
    """What a model's files say about text. `templates` is None where there is no chat template.

    `special_texts` are special tokens by the names chat templates use.
    """

    tokenizer: Tokenizer | None = None
    eos_token_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    templates: dict[str, str] | None = None
    special_texts: dict[str, str] = field(default_factory=dict)


def read_model_folder(folder: Path, tokenizer_file: Path | None = None) -> ModelText:
    """Tokenizer (None without a tokenizer.json), end tokens of config, generation config and tokenizer, templates.

    Raises StartupError, one line naming the file and what is wrong with it.
    """
    settings = read_json(folder / "tokenizer_config.json")
    special_map = read_json(folder / "special_tokens_map.json")
    special_texts = {
        name: text
        for name in _SPECIAL_NAMES
        if (text := _token_text(settings.get(name)) or _token_text(special_map.get(name)))
    }
    config = read_json(folder / "config.json")
    ends = config_token_ids(config, "eos_token_id", folder / "config.json")
    ends |= config_token_ids(
        read_json(folder / "generation_config.json"), "eos_token_id", folder / "generation_config.json"
    )
    begins = config_token_ids(config, "bos_token_id", folder / "config.json")
    bos_id = min(begins, default=None)
    path = tokenizer_file or folder / "tokenizer.json"
    tokenizer = None
    if path.is_file():
        tokenizer = _load_tokenizer(path, settings, special_texts, bos_id)
        bos_id = tokenizer.bos_id
        eos_id = tokenizer.token_id(special_texts.get("eos_token", ""))
        ends |= {eos_id} if eos_id is not None else set()
    return ModelText(tokenizer, frozenset(ends), bos_id, _templates(folder, settings), special_texts)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty if there is no such file. Raises StartupError: file, place, reason."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"{path}: not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


def config_token_ids(config: Mapping[str, Any], key: str, path: Path) -> set[int]:
    """Ids under `key`, a number or a list of them, also where a multimodal config nests the text model's."""
    value = config.get(key)
    nested = config.get("text_config")
    if value is None and isinstance(nested, Mapping):
        value = nested.get(key)
    if value is None:
        return set()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise StartupError(f"{path}: {key} is {str(value)[:80]}, not a token id or a list of them")
    return set(ids)


def _load_tokenizer(
    path: Path, settings: Mapping[str, Any], special_texts: Mapping[str, str], bos_id: int | None
) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise StartupError(f"{path}: not a tokenizer: {' '.join(str(error).split())}") from error
    backend.no_truncation()
    backend.no_padding()
    _mark_special(backend, special_texts)
    if "bos_token" in special_texts:
        bos_id = backend.token_to_id(special_texts["bos_token"])
    prefix_ids, suffix_ids = _surrounding_ids(backend)
    eos_id = backend.token_to_id(special_texts.get("eos_token", ""))
    prefix_ids = _switched(prefix_ids, bos_id, settings.get("add_bos_token"))
    suffix_ids = _switched(suffix_ids, eos_id, settings.get("add_eos_token"))
    return Tokenizer(pieces_of(backend, str(path)), bos_id=bos_id, prefix_ids=prefix_ids, suffix_ids=suffix_ids)


def _mark_special(backend: tokenizers.Tokenizer, special_texts: Mapping[str, str]) -> None:
    """Tokens that the configs name as special are special even where tokenizer.json does not say so."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [
        AddedToken(text, special=True, normalized=False)
        for text in dict.fromkeys(special_texts.values())
        if text not in special and backend.token_to_id(text) is not None
    ]
    if missing:
        backend.add_special_tokens(missing)


def _surrounding_ids(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _switched(ids: list[int], token_id: int | None, switch: object) -> list[int]:
    """`ids` with or without `token_id` as `add_bos_token` or `add_eos_token` says; unchanged where that is silent."""
    if not isinstance(switch, bool) or token_id is None or (token_id in ids) == switch:
        return ids
    return [token_id, *ids] if switch else [other for other in ids if other != token_id]


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str] | None:
    """Templates by name: the .jinja files where there are any, else those of tokenizer_config or chat_template.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    named = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    if named:
        return named
    for path, source in (
        (folder / "tokenizer_config.json", settings),
        (folder / "chat_template.json", read_json(folder / "chat_template.json")),
    ):
        template = source.get("chat_template")
        if isinstance(template, str):
            return {"default": template}
        if isinstance(template, list):
            return _named_templates(template, path)
    return None


def _named_templates(entries: list[Any], path: Path) -> dict[str, str]:
    named = {}
    for entry in entries:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise StartupError(f"{path}: chat_template is not a text or a list of name and template")
        named[name] = template
    return named


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StartupError(f"{path}: not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from error
