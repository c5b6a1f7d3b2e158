"""`tokenizer.json` vocabularies of both kinds, with transformers as the oracle, and rules of chats."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from runners.errors import InvalidRequestError, StartupError
from runners.text.model_folder import read_model_folder
from runners.text.pieces import BYTE_LEVEL_ALPHABET, SPACE_MARK, PrefixSpace
from runners.text.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<unk>"]


def byte_level_backend() -> tokenizers.Tokenizer:
    vocab = {character: index for index, character in enumerate(sorted(BYTE_LEVEL_ALPHABET))}
    for merged in ("th", "the", "Ġthe", "Ġt"):
        vocab[merged] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "t")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE_MARK, *"abcdefgh", f"{SPACE_MARK}a", "ab"]
    model = models.BPE(
        {token: index for index, token in enumerate(tokens)},
        [(SPACE_MARK, "a"), ("a", "b")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    return tokenizers.Tokenizer(model)


def legacy_llama_backend() -> tokenizers.Tokenizer:
    """A space in front of every fragment."""
    backend = sentencepiece_backend()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """A space in front of the text only."""
    backend = sentencepiece_backend()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def gemma_backend() -> tokenizers.Tokenizer:
    """No space in front at all."""
    backend = sentencepiece_backend()
    backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


BACKENDS = [byte_level_backend, legacy_llama_backend, metaspace_backend, gemma_backend]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.__name__)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours and transformers', from the same file: BOS by the post-processor, two added tokens."""
    backend = request.param()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    folder = tmp_path_factory.mktemp("model")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    ours = read_model_folder(folder).tokenizer
    assert ours is not None
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False, bos_token="<s>"
    )
    return ours, theirs


texts = st.text(alphabet=st.sampled_from("abcdeht 的é🙂\n"), max_size=20)
marked = st.lists(st.one_of(texts, st.sampled_from(["<s>", "</s>", "<tool>"])), max_size=5).map("".join)
within_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)


def invertible(tokenizer: Tokenizer, text: str) -> bool:
    """Metaspace puts no space in front of a text that begins with one: " a" and "a" have the same ids."""
    return tokenizer.pieces.prefix_space is not PrefixSpace.TEXT_START or not text.startswith(" ")


@within_fixtures
@given(text=marked)
def test_encode_equals_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@within_fixtures
@given(text=marked)
def test_text_only_equals_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens=False, parse_special=False)
    assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)


@within_fixtures
@given(text=texts)
def test_decode_equals_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    assume(invertible(ours, text))
    ids = ours.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


@within_fixtures
@given(text=marked)
def test_ids_survive_a_round_trip(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, _ = pair
    assume(invertible(ours, text))
    ids = ours.encode(text, add_special_tokens=False)
    again = ours.decode(ids, skip_special_tokens=False)
    assert again == text
    assert ours.encode(again, add_special_tokens=False) == ids


@within_fixtures
@given(text=marked)
def test_fewest_tokens_is_a_lower_bound(pair: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, _ = pair
    assert tokenizer.fewest_tokens(len(text)) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.fewest_tokens(1000) >= 1000 // 40


def test_fewest_tokens_is_unknown_where_unknown_characters_fuse(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_model_folder(tmp_path).tokenizer
    assert tokenizer is not None
    assert len(tokenizer.encode("é" * 1000)) == 1
    assert tokenizer.fewest_tokens(1000) == 0


@pytest.mark.parametrize("template_writes_bos", [True, False])
def test_chat_has_exactly_one_bos(pair: tuple[Tokenizer, Any], template_writes_bos: bool) -> None:
    ours, _ = pair
    ids = ours.encode_chat("<s>ab" if template_writes_bos else "ab")
    assert ids[0] == ours.bos_id
    assert ids.count(ours.bos_id) == 1
    assert ours.encode_chat("")[0] == ours.bos_id


def test_chat_without_bos(convert: Callable[..., Tokenizer], byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = convert(byte_level_metadata, bos_token_id=byte_level_metadata["tokenizer.ggml.bos_token_id"] + 1)
    rendered = "<|im_start|>hello<|im_end|>"
    # Its BOS is the mark that opens a turn: added by the template, never by us.
    assert tokenizer.encode_chat(rendered) == tokenizer.encode(rendered, add_special_tokens=False)


def test_switches_of_the_config_win(tmp_path: Path) -> None:
    backend = gemma_backend()
    backend.add_special_tokens(SPECIALS)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    for switches, expected in (
        ("", ["a"]),
        (', "add_bos_token": true', ["<s>", "a"]),
        (', "add_bos_token": true, "add_eos_token": true', ["<s>", "a", "</s>"]),
        (', "add_bos_token": false', ["a"]),
    ):
        config.write_text('{"bos_token": "<s>", "eos_token": "</s>"' + switches + "}")
        tokenizer = read_model_folder(tmp_path).tokenizer
        assert tokenizer is not None
        assert [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode("a")] == expected


def test_config_makes_a_token_special(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<|end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    text = read_model_folder(tmp_path)
    assert text.tokenizer is not None
    assert text.tokenizer.decode(text.tokenizer.encode("the<|end|>")) == "the"
    assert text.eos_token_ids == {text.tokenizer.token_id("<|end|>")}


def test_padding_and_truncation_are_off(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_model_folder(tmp_path).tokenizer
    assert tokenizer is not None
    assert len(tokenizer.encode("abcdefgh")) == 8


def test_lone_surrogate_is_the_clients_fault(pair: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        pair[0].encode("\ud800")


def test_unsupported_decoder(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StartupError, match=r"tokenizer\.json: decoder WordPiece is not supported"):
        read_model_folder(tmp_path)


def test_ids_outside_the_vocabulary_are_silent(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    assert ours.decode([ours.vocab_size, ours.vocab_size + 7, -1]) == ""
    assert ours.token_bytes(ours.vocab_size) == b""


def test_threads_share_one_tokenizer(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    text = "abc the <tool> de </s> " * 50
    expected = {flag: ours.encode(text, parse_special=flag) for flag in (True, False)}
    wrong: list[bool] = []

    def work() -> None:
        for step in range(50):
            flag = step % 2 == 0
            if ours.encode(text, parse_special=flag) != expected[flag]:
                wrong.append(flag)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
