"""`load_text`: everything the HTTP process needs to turn a model's text into ids and back."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runners.errors import StartupError
from runners.loading.gguf_reader import is_gguf, open_gguf
from runners.text.chat_template import CHATML_TEMPLATE, ChatTemplate
from runners.text.gguf_vocab import gguf_end_tokens, gguf_vocabulary
from runners.text.model_folder import ModelText, read_model_folder
from runners.text.tokenizer import Tokenizer
from runners.text.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True)
class TextAssets:
    """Tokenizer (None: ids flow, text stays empty), chat template, ids that end a text, BOS.

    `tool_format`, where given, replaces the one that the template shows.
    """

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate
    eos_token_ids: frozenset[int]
    bos_id: int | None
    tool_format: ToolFormat | None = None


def load_text(
    path: Path,
    tokenizer_override: Path | None = None,
    chat_template_override: str | None = None,
    tool_format: ToolFormat | None = None,
) -> TextAssets:
    """Text assets of the model at `path`, a folder or a GGUF file.

    `tokenizer_override` is a folder, a tokenizer.json or a GGUF file to take the tokenizer from;
    `chat_template_override` a template, the path of one, or "chatml". End tokens are united over config, generation
    config and tokenizer. Raises StartupError, one line: which file, where, why.
    """
    model = _read(path)
    if tokenizer_override is not None:
        model = _with_tokenizer(model, _read(tokenizer_override), tokenizer_override)
    templates: str | Mapping[str, str] = model.templates or CHATML_TEMPLATE
    where = f"{tokenizer_override or path}"
    if chat_template_override is not None:
        templates, where = _template_text(chat_template_override), "chat_template"
    return TextAssets(
        model.tokenizer,
        ChatTemplate(templates, model.special_texts, where=where),
        model.eos_token_ids,
        model.bos_id,
        tool_format,
    )


def read_end_tokens(path: Path, tokenizer_override: Path | None = None) -> frozenset[int]:
    """`load_text(...).eos_token_ids` for the engine process, which needs no tokenizer: a GGUF's is not built."""
    ends: frozenset[int] = frozenset()
    for source in (path, tokenizer_override):
        if source is not None:
            gguf = _gguf_at(source)
            ends |= gguf_end_tokens(open_gguf(gguf)) if gguf is not None else _read(source).eos_token_ids
    return ends


def _read(path: Path) -> ModelText:
    gguf = _gguf_at(path)
    if gguf is not None:
        return _read_gguf(gguf)
    return read_model_folder(path) if path.is_dir() else read_model_folder(path.parent, tokenizer_file=path)


def _gguf_at(path: Path) -> Path | None:
    """The GGUF file that `path` is or, for a folder without a tokenizer.json, holds (the first shard)."""
    if path.is_dir():
        files = [] if (path / "tokenizer.json").is_file() else sorted(path.glob("*.gguf"))
        return files[0] if files else None
    if not path.is_file():
        raise StartupError(f"{path}: no such file or folder")
    return path if is_gguf(path) else None


def _read_gguf(path: Path) -> ModelText:
    file = open_gguf(path)
    vocabulary = gguf_vocabulary(file)
    templates = _gguf_templates(file.metadata)
    if vocabulary is None:
        return ModelText(templates=templates)
    return ModelText(
        vocabulary.tokenizer,
        vocabulary.eos_token_ids,
        vocabulary.tokenizer.bos_id,
        templates,
        vocabulary.special_texts,
    )


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str] | None:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): value for name, value in metadata.items() if name.startswith(f"{key}.")}
    if key in metadata:
        named["default"] = metadata[key]
    return {name: value for name, value in named.items() if isinstance(value, str)} or None


def _with_tokenizer(model: ModelText, other: ModelText, path: Path) -> ModelText:
    if other.tokenizer is None:
        raise StartupError(f"{path}: no tokenizer there (a tokenizer.json or a GGUF vocabulary)")
    return replace(
        other, eos_token_ids=model.eos_token_ids | other.eos_token_ids, templates=other.templates or model.templates
    )


def _template_text(override: str) -> str:
    if override == "chatml":
        return CHATML_TEMPLATE
    if "{{" in override or "{%" in override:
        return override
    try:
        path = Path(override)
        if path.exists() and not path.is_file():  # a pipe would be waited for, a device read without end
            raise OSError(errno.EINVAL, "not a regular file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise StartupError(
            f"chat_template {override[:200]!r}: neither a template nor a readable file ({reason})"
        ) from error
