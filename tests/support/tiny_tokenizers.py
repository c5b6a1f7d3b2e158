"""Small tokenizers made on the spot: a byte-level one whose ids 0–255 are the bytes, and a SentencePiece-style one."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
PARIS = 263

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Role ' + message.role + ' is not for this model.') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if tools %}{% for tool in tools %}<tool>{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table, extra = [], 0
    for byte in range(256):
        if byte in plain:
            table.append(chr(byte))
        else:
            table.append(chr(256 + extra))
            extra += 1
    return table


def write_byte_level(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, add_bos: bool = False) -> Path:
    """A folder with `tokenizer.json` and its config. "Paris" is one token (263), everything else is bytes."""
    characters = _byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(characters)}
    vocabulary |= {name: 256 + number for number, name in enumerate(SPECIALS)}
    merges = []
    for length in range(2, 6):
        vocabulary["Paris"[:length]] = 258 + length
        merges.append(("Paris"[: length - 1], "Paris"[length - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return _write(folder, tokenizer, chat_template, add_bos)


def write_sentencepiece_style(folder: Path) -> Path:
    """Pieces with `▁` for a space and byte fallback, as Llama 2 and Gemma have them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁one", "▁two", "▁three"]
    letters = sorted(set("onetwothree"))
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    return _write(folder, tokenizer, None, add_bos=True)


def _write(folder: Path, tokenizer: Tokenizer, chat_template: str | None, add_bos: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
