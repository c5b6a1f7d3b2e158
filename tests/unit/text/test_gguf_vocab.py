"""GGUF vocabularies: words, merges, added tokens, flags, errors; SentencePiece merging against its definition."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners.errors import StartupError
from runners.loading.gguf_reader import open_gguf
from runners.text.gguf_vocab import convert_vocabulary, gguf_vocabulary
from runners.text.pieces import SPACE_MARK
from runners.text.spm_merges import load_merges, store_merges
from runners.text.tokenizer import Tokenizer


def merge_by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece BPE as defined: join the neighbours whose union scores best, the leftmost of equals."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    symbols = list(text)
    while True:
        unions = [
            (-scores[ids[left + right]], index)
            for index, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in ids
        ]
        if not unions:
            break
        index = min(unions)[1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(text=st.text(alphabet=" onetwhrabcaé中🙂", min_size=1, max_size=40))
def test_sentencepiece_merges_by_score(
    sentencepiece: Tokenizer, sentencepiece_bare: Tokenizer, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    tokens = sentencepiece_metadata["tokenizer.ggml.tokens"]
    scores = sentencepiece_metadata["tokenizer.ggml.scores"]
    escaped = text.replace(" ", SPACE_MARK)
    bare = sentencepiece_bare.encode(text, add_special_tokens=False)
    assert bare == merge_by_score(escaped, tokens, scores)
    assert sentencepiece.encode(text, add_special_tokens=False) == merge_by_score(SPACE_MARK + escaped, tokens, scores)


def test_long_runs_of_spaces_grow_from_the_left(
    convert: Callable[..., Tokenizer], sentencepiece_metadata: dict[str, Any]
) -> None:
    runs = [SPACE_MARK * length for length in range(4, 17)]
    tokenizer = convert(
        sentencepiece_metadata,
        tokens=sentencepiece_metadata["tokenizer.ggml.tokens"] + runs,
        token_type=sentencepiece_metadata["tokenizer.ggml.token_type"] + [1] * len(runs),
        scores=sentencepiece_metadata["tokenizer.ggml.scores"] + [-1000.0] * len(runs),
        add_space_prefix=False,
        add_bos_token=False,
    )
    assert [len(tokenizer.token_bytes(token_id)) for token_id in tokenizer.encode(" " * 40)] == [16, 16, 8]


def test_user_defined_token_is_one_id(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        think = tokenizer.token_id("<think>")
        assert tokenizer.encode("<think>", add_special_tokens=False) == [think]
        assert tokenizer.encode("<think>", add_special_tokens=False, parse_special=False) == [think]
        assert think is not None
        assert not tokenizer.is_special(think)


def test_special_tokens_as_text(byte_level: Tokenizer) -> None:
    end = byte_level.token_id("<|im_end|>")
    assert byte_level.encode("hello<|im_end|>")[-1] == end
    spelled = byte_level.encode("hello<|im_end|>", parse_special=False)
    assert end not in spelled
    assert byte_level.decode(spelled) == "hello<|im_end|>"


def test_flags(
    convert: Callable[..., Tokenizer], byte_level_metadata: dict[str, Any], sentencepiece_metadata: dict[str, Any]
) -> None:
    assert not convert(byte_level_metadata).add_bos
    assert convert(byte_level_metadata, add_bos_token=True).add_bos
    assert convert(byte_level_metadata, pre="llama-bpe").add_bos
    assert not convert(byte_level_metadata, pre="llama-bpe", add_bos_token=False).add_bos
    assert convert(sentencepiece_metadata).encode("") == [1]
    assert convert(sentencepiece_metadata, add_bos_token=False).encode("") == []
    assert convert(sentencepiece_metadata, add_eos_token=True).encode("a")[-1] == 2


def test_end_tokens_from_every_key_and_spelling(byte_level_metadata: dict[str, Any]) -> None:
    vocabulary = convert_vocabulary({**byte_level_metadata, "tokenizer.ggml.eot_token_id": 7}, "test.gguf", "digest")
    assert vocabulary is not None
    tokens = byte_level_metadata["tokenizer.ggml.tokens"]
    assert {tokens[token_id] for token_id in vocabulary.eos_token_ids} == {tokens[7], "<|endoftext|>", "<|im_end|>"}


def test_white_space_after_phi3_marks(sentencepiece_metadata: dict[str, Any]) -> None:
    vocabulary = convert_vocabulary({**sentencepiece_metadata, "general.name": "Phi-3 mini"}, "test.gguf", "phi3")
    assert vocabulary is not None
    tokenizer = vocabulary.tokenizer
    assert tokenizer.encode("</s> \n ab") == tokenizer.encode("</s>ab")
    assert tokenizer.encode("<s> ab") != tokenizer.encode("<s>ab")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("pre", "no-such-rule", "pre 'no-such-rule'"),
        ("pre", 7, "pre is a int"),
        ("model", "t5", "model 't5' is not supported"),
        ("tokens", None, "tokens is missing"),
        ("tokens", ["a", 5], "tokens is not a list of strings"),
        ("tokens", ["a", "a"], "tokens 0 and 1 are both 'a'"),
        ("merges", None, "merges is missing"),
        ("token_type", [1, 2], "token_type has 2 entries"),
        ("add_bos_token", "yes", "add_bos_token is a str"),
    ],
)
def test_malformed_vocabulary(byte_level_metadata: dict[str, Any], key: str, value: Any, reason: str) -> None:
    metadata = {**byte_level_metadata, f"tokenizer.ggml.{key}": value}
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(StartupError) as caught:
        convert_vocabulary(metadata, "broken.gguf", "digest")
    assert str(caught.value).startswith("broken.gguf: tokenizer.ggml.") or reason.startswith("tokens 0")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_scores_must_be_numbers(sentencepiece_metadata: dict[str, Any]) -> None:
    for scores in ([0.0], [float("nan")] * len(sentencepiece_metadata["tokenizer.ggml.tokens"])):
        with pytest.raises(StartupError, match="scores"):
            convert_vocabulary({**sentencepiece_metadata, "tokenizer.ggml.scores": scores}, "broken.gguf", "other")


def test_no_vocabulary() -> None:
    assert convert_vocabulary({}, "x.gguf", "d") is None
    assert convert_vocabulary({"tokenizer.ggml.model": "none"}, "x.gguf", "d") is None


def test_missing_pre_is_the_default_rule(
    convert: Callable[..., Tokenizer], byte_level_metadata: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    silent = {key: value for key, value in byte_level_metadata.items() if not key.endswith(".pre")}
    text = "hello €1234, x"
    assert convert(silent).encode(text) == convert(byte_level_metadata, pre="default").encode(text)
    assert "pre is missing" in caplog.text


def test_merges_are_cached(
    tmp_path: Path, sentencepiece_metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAVELANE_CACHE", str(tmp_path))
    first = convert_vocabulary(sentencepiece_metadata, "test.gguf", "digest")
    [stored] = (tmp_path / "tokenizers").iterdir()
    assert stored.name == "digest.merges"
    without_scores = {**sentencepiece_metadata, "tokenizer.ggml.scores": []}
    second = convert_vocabulary(without_scores, "test.gguf", "digest")
    assert first is not None
    assert second is not None
    assert second.tokenizer.encode("one two   three") == first.tokenizer.encode("one two   three")


def test_damaged_cache_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "x.merges"
    assert load_merges(path, 10) is None
    store_merges(path, [(1, 2), (3, 4)])
    assert load_merges(path, 5) == [(1, 2), (3, 4)]
    assert load_merges(path, 4) is None
    path.write_bytes(path.read_bytes()[:-3])
    assert load_merges(path, 5) is None


def test_cache_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store_merges(tmp_path / "file" / "x.merges", [(0, 1)])
    assert "not written" in caplog.text


@pytest.mark.model
@pytest.mark.parametrize(
    ("fixture", "golden"),
    [("smollm2_path", "smollm2-135m-instruct-q4_1.json"), ("gemma3_path", "gemma3-270m-q4_k_m.json")],
)
def test_ids_equal_llama_cpp(request: pytest.FixtureRequest, golden_folder: Path, fixture: str, golden: str) -> None:
    vocabulary = gguf_vocabulary(open_gguf(request.getfixturevalue(fixture)))
    assert vocabulary is not None
    tokenizer = vocabulary.tokenizer
    cases = json.loads((golden_folder / golden).read_text())["tokenizer"]
    assert len(cases) == 128
    for case in cases:
        ids = tokenizer.encode(case["text"], add_special_tokens=case["add_bos"], parse_special=case["parse_special"])
        assert ids == case["ids"], case["text"]
        if not case["add_bos"]:
            assert tokenizer.decode(ids, skip_special_tokens=False) == case["text"]


@pytest.mark.model
def test_pre_rules_equal_llama_cpp(smollm2_path: Path, golden_folder: Path) -> None:
    """SmolLM2's vocabulary under every rule; the ids are llama.cpp's for the same file with another `pre`."""
    metadata = dict(open_gguf(smollm2_path).metadata)
    golden = json.loads((golden_folder / "pre_rules_smollm2.json").read_text())
    for pre, expected in golden["ids_by_pre"].items():
        vocabulary = convert_vocabulary({**metadata, "tokenizer.ggml.pre": pre}, "smollm2", "digest")
        assert vocabulary is not None
        for text, ids in zip(golden["texts"], expected, strict=True):
            found = vocabulary.tokenizer.encode(text, add_special_tokens=False, parse_special=False)
            assert found == ids, (pre, text)
