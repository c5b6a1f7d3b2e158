"""`load_text`: where tokenizer, template and end tokens come from, and how broken files are reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from runners.errors import StartupError
from runners.text.assets import load_text, read_end_tokens
from runners.text.pieces import BYTE_LEVEL_ALPHABET

USER = [{"role": "user", "content": "Hi"}]
MARKS = ["<|bos|>", "<|eos|>", "<|end_a|>", "<|end_b|>"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as published: three files that each know another end token, and a template."""
    vocab = {character: index for index, character in enumerate(sorted(BYTE_LEVEL_ALPHABET))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "config.json", {"eos_token_id": 258, "bos_token_id": 256})
    write(tmp_path / "generation_config.json", {"eos_token_id": [258, 259]})
    write(
        tmp_path / "tokenizer_config.json",
        {
            "bos_token": "<|bos|>",
            "eos_token": {"content": "<|eos|>"},
            "add_bos_token": True,
            "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        },
    )
    return tmp_path


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_folder(folder: Path) -> None:
    text = load_text(folder)
    assert text.tokenizer is not None
    assert text.eos_token_ids == read_end_tokens(folder) == {257, 258, 259}
    assert text.bos_id == text.tokenizer.bos_id == 256
    rendered = text.chat_template.render(USER)
    assert rendered == "<|bos|>Hi"
    assert text.tokenizer.encode_chat(rendered) == text.tokenizer.encode("Hi")


def test_text_config_of_a_multimodal_model(folder: Path) -> None:
    write(folder / "config.json", {"text_config": {"eos_token_id": [7]}})
    assert 7 in load_text(folder).eos_token_ids


def test_template_files_come_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = load_text(folder).chat_template
    assert template.render(USER) == "file"
    assert template.render(USER, tools=[{"type": "function"}]) == "tools"


def test_template_list(folder: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(folder / "tokenizer_config.json", {"chat_template": templates})
    assert load_text(folder).chat_template.render(USER, tools=[{}]) == "tools"


def test_template_of_a_processor(folder: Path) -> None:
    write(folder / "tokenizer_config.json", {})
    write(folder / "chat_template.json", {"chat_template": "processor"})
    assert load_text(folder).chat_template.render(USER) == "processor"


def test_chatml_where_the_model_has_no_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert load_text(folder).chat_template.render(USER) == expected


def test_special_tokens_map(folder: Path) -> None:
    write(folder / "tokenizer_config.json", {})
    write(folder / "special_tokens_map.json", {"eos_token": "<|eos|>", "pad_token": {"content": "<|end_b|>"}})
    assert load_text(folder).eos_token_ids == {257, 258, 259}


def test_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    text = load_text(folder)
    assert text.tokenizer is None
    assert text.eos_token_ids == {258, 259}
    assert text.bos_id == 256


def test_empty_folder(tmp_path: Path) -> None:
    text = load_text(tmp_path)
    assert text.tokenizer is None
    assert text.eos_token_ids == frozenset()


def test_gguf(tmp_path: Path, byte_level_metadata: dict[str, Any]) -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools {{ eos_token }}"}
    path = write_gguf(tmp_path / "model.gguf", {**byte_level_metadata, **templates})
    text = load_text(path)
    assert text.tokenizer is not None
    assert text.tokenizer.decode(text.tokenizer.encode("hello €")) == "hello €"
    assert text.eos_token_ids == read_end_tokens(path)
    assert len(text.eos_token_ids) == 2
    assert text.chat_template.render(USER, tools=[{}]) == "tools <|im_end|>"
    assert load_text(tmp_path).eos_token_ids == text.eos_token_ids


def test_gguf_without_vocabulary(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {"tokenizer.ggml.model": "none"})
    text = load_text(path)
    assert text.tokenizer is None
    assert text.eos_token_ids == read_end_tokens(path) == frozenset()


def test_tokenizer_override(folder: Path, byte_level_metadata: dict[str, Any]) -> None:
    path = write_gguf(folder / "model.gguf", byte_level_metadata)
    for override in (folder, folder / "tokenizer.json"):
        text = load_text(path, tokenizer_override=override)
        assert text.tokenizer is not None
        assert text.tokenizer.add_bos
        assert text.eos_token_ids == {257, 258, 259} | load_text(path).eos_token_ids
        assert text.eos_token_ids == read_end_tokens(path, override)
        assert text.chat_template.render(USER) == "<|bos|>Hi"
    assert load_text(folder, tokenizer_override=path).tokenizer is not None


def test_chat_template_override(folder: Path) -> None:
    (folder / "mine.txt").write_text("from a file")
    assert load_text(folder, None, "{{ 1 + 1 }}").chat_template.render(USER) == "2"
    assert load_text(folder, None, str(folder / "mine.txt")).chat_template.render(USER) == "from a file"
    assert load_text(folder, None, "chatml").chat_template.render(USER).startswith("<|im_start|>")
    with pytest.raises(StartupError, match="neither a template nor a readable file"):
        load_text(folder, None, str(folder / "missing.jinja"))
    os.mkfifo(folder / "pipe")
    with pytest.raises(StartupError, match="not a regular file"):  # nobody writes to it: opening it would not return
        load_text(folder, None, str(folder / "pipe"))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", b"{", "not a tokenizer"),
        ("tokenizer.json", b"{}", "not a tokenizer"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", "vocab": 3}}', "not a tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "not a tokenizer"),
        ("tokenizer_config.json", b"{", "not JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "not JSON"),
        ("tokenizer_config.json", b"[]", "holds a list"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "chat_template is not"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "template 'default', line 1"),
        ("special_tokens_map.json", b'"x"', "holds a str"),
        ("config.json", b'{"eos_token_id": "</s>"}', "eos_token_id is </s>"),
        ("generation_config.json", b'{"eos_token_id": [1, -1]}', "eos_token_id is [1, -1]"),
        ("generation_config.json", b"\xff{}", "not UTF-8 at byte 0"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_malformed_file(folder: Path, name: str, content: bytes, reason: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(StartupError) as caught:
        load_text(folder)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert reason in message
    assert "\n" not in message
    # A broken template is named by the model it belongs to, every other fault by its file.
    assert name in message or reason.startswith("template")


def test_missing_model(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no such file or folder"):
        load_text(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartupError, match="no tokenizer there"):
        load_text(tmp_path, tokenizer_override=tmp_path / "empty")


def test_stays_light() -> None:
    script = "import sys, runners.text.assets; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.model
def test_default_model(smollm2_path: Path) -> None:
    text = load_text(smollm2_path)
    assert text.tokenizer is not None
    rendered = text.chat_template.render(USER)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = text.tokenizer.encode_chat(rendered)
    assert ids[:2] == [1, 9690]
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == rendered
    assert text.eos_token_ids == read_end_tokens(smollm2_path) == {0, 2}


@pytest.mark.model
def test_vocabulary_with_bos(gemma3_path: Path) -> None:
    text = load_text(gemma3_path)
    assert text.tokenizer is not None
    for written in ("", "<bos>", "<bos><bos>"):
        ids = text.tokenizer.encode_chat(written + "<start_of_turn>user\nHi<end_of_turn>\n")
        assert ids == [2, 105, 2364, 107, 10979, 106, 107]
    assert text.eos_token_ids == {1, 106}
