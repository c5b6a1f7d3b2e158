"""A GGUF file's vocabulary as a `tokenizers` tokenizer whose ids equal llama.cpp's.

`tokenizer.ggml.model` is `gpt2` (byte-level BPE with merges, words split by the `pre` rule) or `llama` (SentencePiece
pieces with scores and byte fallback). Source: ggml's GGUF specification, and llama.cpp's loader where that is silent.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from runners.errors import StartupError
from runners.loading.gguf_reader import GGUFFile
from runners.loading.sources import cache_folder
from runners.text.pieces import SPACE_MARK, Pieces, PrefixSpace, Spelling
from runners.text.pre_rules import DEFAULT_RULE, PRE_RULES, PreRule
from runners.text.spm_merges import derive_merges, load_merges, store_merges
from runners.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_CACHE_FORMAT = 1  # part of the cache key: raise it when derive_merges changes
_DEFAULT_EOS = {"llama": 2}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Tokens that end a turn or a text, by spelling: files often name only one of them. Not </s>: an HTML tag in Gemma.
_END_TOKENS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<eos>"),
        *("<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>"),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
# Fill-in-the-middle marks: control tokens even where a converter typed them as normal.
_FILL_TOKENS = frozenset(
    {
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>"),
        *("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        *("<|file_sep|>", "<fim_pad>", "<reponame>", "<PRE>", "<SUF>", "<MID>", "<PAD>"),
        *("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    }
)


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """The converted tokenizer, ids that end a text, and special tokens by the names chat templates use."""

    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    special_texts: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Table:
    tokens: list[str]
    types: list[int]

    def ids_of_types(self, *types: int) -> list[int]:
        return [token_id for token_id, token_type in enumerate(self.types) if token_type in types]


def gguf_vocabulary(file: GGUFFile) -> GGUFVocabulary | None:
    """Convert the vocabulary of `file`; None where it has none (`tokenizer.ggml.model` absent or "none").

    Raises StartupError naming the file and the key that is missing, malformed or not supported.
    """
    return convert_vocabulary(file.metadata, str(file.path), _header_digest(file))


def convert_vocabulary(metadata: Mapping[str, Any], where: str, digest: str) -> GGUFVocabulary | None:
    """The same from metadata alone; `where` names the file in errors, `digest` the header's content in the cache."""
    reader = _Metadata(metadata, where)
    model = reader.text("model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model == "gpt2":
        table = _read_table(reader)
        rule = _pre_rule(reader)
        backend = _byte_level_backend(table, reader.strings("merges"), rule)
        pieces = Pieces(_with_added_tokens(backend, table, metadata), Spelling.BYTE_LEVEL)
        return _finish(reader, table, pieces, add_bos=rule.add_bos, bos_id=None)
    if model == "llama":
        table = _read_table(reader)
        add_prefix = reader.flag("add_space_prefix", True)
        backend = _sentencepiece_backend(reader, table, add_prefix, digest)
        prefix = PrefixSpace.AFTER_ADDED_TOKENS if add_prefix else PrefixSpace.NONE
        pieces = Pieces(_with_added_tokens(backend, table, metadata), Spelling.SENTENCEPIECE, prefix)
        return _finish(reader, table, pieces, add_bos=True, bos_id=1)
    raise StartupError(f"{where}: {_PREFIX}model {model!r} is not supported (gpt2 and llama are)")


def gguf_end_tokens(file: GGUFFile) -> frozenset[int]:
    """Ids that end a text, without converting the vocabulary. Raises StartupError as `gguf_vocabulary` does."""
    reader = _Metadata(file.metadata, str(file.path))
    model = reader.text("model", "none")
    if model in ("none", "no_vocab"):
        return frozenset()
    table = _read_table(reader)
    eos_id = reader.token_id("eos_token_id", _DEFAULT_EOS.get(model), len(table.tokens))
    return _end_tokens(reader, table, eos_id)


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Typed reads of `tokenizer.ggml.*` keys."""

    values: Mapping[str, Any]
    where: str

    def text(self, key: str, default: str) -> str:
        return cast(str, self._typed(key, str, default))

    def flag(self, key: str, default: bool) -> bool:
        return cast(bool, self._typed(key, bool, default))

    def token_id(self, key: str, default: int | None, vocab_size: int) -> int | None:
        """A token id; one outside the vocabulary counts as absent, as in llama.cpp."""
        value = self.values.get(_PREFIX + key, default)
        return value if type(value) is int and 0 <= value < vocab_size else None

    def strings(self, key: str) -> list[str]:
        value = self._typed(key, list, None)
        if value is None:
            raise StartupError(f"{self.where}: {_PREFIX}{key} is missing")
        if not all(type(item) is str for item in value):
            raise StartupError(f"{self.where}: {_PREFIX}{key} is not a list of strings")
        return cast(list[str], value)

    def numbers(self, key: str, count: int, default: float | None = None) -> list[Any]:
        """One number a token; `default` for each where the key is absent."""
        value = self._typed(key, list, None)
        if value is None:
            if default is None:
                raise StartupError(f"{self.where}: {_PREFIX}{key} is missing")
            return [default] * count
        if len(value) < count:
            raise StartupError(f"{self.where}: {_PREFIX}{key} has {len(value)} entries for {count} tokens")
        if not all(type(item) in (int, float) and item == item for item in value):
            raise StartupError(f"{self.where}: {_PREFIX}{key} is not a list of numbers")
        return cast(list[Any], value)

    def _typed(self, key: str, expected: type, default: Any) -> Any:
        value = self.values.get(_PREFIX + key, default)
        if value is not default and type(value) is not expected:
            raise StartupError(f"{self.where}: {_PREFIX}{key} is a {type(value).__name__}, not a {expected.__name__}")
        return value


def _read_table(reader: _Metadata) -> _Table:
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(reader.strings("tokens"))]
    types = reader.numbers("token_type", len(tokens), default=_NORMAL)[: len(tokens)]
    first_ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if first_ids.setdefault(token, token_id) != token_id:
            raise StartupError(f"{reader.where}: tokens {first_ids[token]} and {token_id} are both {token!r}")
        if token in _END_TOKENS or token in _FILL_TOKENS:
            types[token_id] = _CONTROL
    return _Table(tokens, types)


def _pre_rule(reader: _Metadata) -> PreRule:
    name = reader.text("pre", "")
    if not name:
        logger.warning("%s: %spre is missing, words are split by the default rule", reader.where, _PREFIX)
        return DEFAULT_RULE
    rule = PRE_RULES.get(name)
    if rule is None:
        raise StartupError(f"{reader.where}: {_PREFIX}pre {name!r} is not a pre-tokenizer that is supported")
    return rule


def _byte_level_backend(table: _Table, merge_lines: list[str], rule: PreRule) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(table.tokens)}
    merges = []
    for line in merge_lines:
        # A part may itself begin with a space.
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut > 0 and left in vocab and right in vocab and left + right in vocab:
            merges.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=rule.ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def _sentencepiece_backend(reader: _Metadata, table: _Table, add_prefix: bool, digest: str) -> tokenizers.Tokenizer:
    tokens = table.tokens
    path = cache_folder() / "tokenizers" / f"{digest}.merges"
    merge_ids = load_merges(path, len(tokens))
    if merge_ids is None:
        merge_ids = derive_merges(tokens, reader.numbers("scores", len(tokens)))
        store_merges(path, merge_ids)
    unknown_id = reader.token_id("unknown_token_id", 0, len(tokens))
    model = models.BPE(
        {token: token_id for token_id, token in enumerate(tokens)},
        [(tokens[left], tokens[right]) for left, right in merge_ids],
        unk_token=None if unknown_id is None else tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    escape = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), escape]) if add_prefix else escape
    return backend


def _with_added_tokens(
    backend: tokenizers.Tokenizer, table: _Table, metadata: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """Control and unknown tokens become special, user-defined ones plain added tokens; both match raw text."""
    name = str(metadata.get("general.name", "")).lower()
    strips_right = "phi-3" in name or "phi3" in name  # Phi-3's marks swallow the white space after them
    added = []
    for token_id in table.ids_of_types(_UNKNOWN, _CONTROL, _USER_DEFINED):
        token = table.tokens[token_id]
        added.append(
            AddedToken(
                token,
                rstrip=strips_right and token not in ("<unk>", "<s>", "<|endoftext|>"),
                normalized=False,
                special=table.types[token_id] != _USER_DEFINED,
            )
        )
    backend.add_tokens(added)
    return backend


def _finish(reader: _Metadata, table: _Table, pieces: Pieces, *, add_bos: bool, bos_id: int | None) -> GGUFVocabulary:
    size = len(table.tokens)
    bos_id = reader.token_id("bos_token_id", bos_id, size)
    eos_id = reader.token_id("eos_token_id", _DEFAULT_EOS.get(reader.text("model", "")), size)
    tokenizer = Tokenizer(
        pieces,
        bos_id=bos_id,
        prefix_ids=[bos_id] if reader.flag("add_bos_token", add_bos) and bos_id is not None else [],
        suffix_ids=[eos_id] if reader.flag("add_eos_token", False) and eos_id is not None else [],
    )
    named = {
        "bos_token": bos_id,
        "eos_token": eos_id,
        "unk_token": reader.token_id("unknown_token_id", None, size),
        "pad_token": reader.token_id("padding_token_id", None, size),
    }
    texts = {name: table.tokens[token_id] for name, token_id in named.items() if token_id is not None}
    return GGUFVocabulary(tokenizer, _end_tokens(reader, table, eos_id), texts)


def _end_tokens(reader: _Metadata, table: _Table, eos_id: int | None) -> frozenset[int]:
    size = len(table.tokens)
    named = [eos_id, reader.token_id("eot_token_id", None, size), reader.token_id("eom_token_id", None, size)]
    spelled = [token_id for token_id in table.ids_of_types(_CONTROL) if table.tokens[token_id] in _END_TOKENS]
    return frozenset(token_id for token_id in [*named, *spelled] if token_id is not None)


def _header_digest(file: GGUFFile) -> str:
    """Content hash of everything before the first tensor's data: metadata, and with it the vocabulary."""
    header_bytes = min((info.offset for info in file.tensors.values()), default=file.path.stat().st_size)
    with file.path.open("rb") as stream:
        header = stream.read(header_bytes)
    return hashlib.sha256(b"%d\0" % _CACHE_FORMAT + header).hexdigest()
