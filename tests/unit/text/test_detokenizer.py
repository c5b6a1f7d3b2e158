"""Incremental detokenisation: however ids are grouped, the text is the same; nothing of the prompt is repeated."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners.text.detokenizer import Detokenizer
from runners.text.tokenizer import Tokenizer

KINDS = ["byte_level", "sentencepiece", "sentencepiece_bare"]
# SentencePiece writes spaces as U+2581, so it cannot tell the two apart.
texts = st.text(alphabet=st.characters(exclude_characters="\u2581\ufffd", exclude_categories=["Cs"]), max_size=30)
within_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


def ids_of(tokenizer: Tokenizer, data: st.DataObject) -> list[int]:
    # One id past the end: a padded model may emit ids that the vocabulary does not have.
    return data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=40))


def joined(tokenizer: Tokenizer, prompt: list[int], groups: list[list[int]], skip: bool) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return "".join([detokenizer.push(group) for group in groups]) + detokenizer.finish()


@within_fixtures
@given(data=st.data(), skip=st.booleans())
def test_grouping_does_not_matter(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = ids_of(tokenizer, data)
    cut = data.draw(st.integers(0, len(ids)))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert joined(tokenizer, [], [[token_id] for token_id in ids], skip) == whole
    assert joined(tokenizer, [], [ids[:cut], ids[cut:]], skip) == whole


@within_fixtures
@given(data=st.data())
def test_equals_bytes_of_all_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = ids_of(tokenizer, data)
    shown = [token_id for token_id in ids if not tokenizer.is_special(token_id)]
    raw = b"".join(tokenizer.token_bytes(token_id) for token_id in shown)
    text = tokenizer.decode(ids)
    expected = raw.decode(errors="replace")
    # A prefix space may be gone from the very start; nothing else differs.
    assert text in (expected, expected.removeprefix(" "))


@within_fixtures
@given(data=st.data(), skip=st.booleans())
def test_continues_the_prompt(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    prompt = tokenizer.encode(data.draw(texts))
    ids = ids_of(tokenizer, data)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert before + joined(tokenizer, prompt, [[i] for i in ids], skip) == tokenizer.decode(
        prompt + ids, skip_special_tokens=skip
    )


@within_fixtures
@given(data=st.data())
def test_only_whole_characters_leave(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(texts)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text, parse_special=False)]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == text
    assert detokenizer.finish() == ""


@within_fixtures
@given(text=texts, parse_special=st.booleans())
def test_decode_inverts_encode(tokenizer: Tokenizer, text: str, parse_special: bool) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if parse_special:
        assert tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False), add_special_tokens=False) == ids


def split_euro(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of "cost €" without its last byte, and the ids of each single byte."""
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(tokenizer.vocab_size))}
    euro = [by_bytes[bytes([byte])] for byte in "€".encode()]
    return [*tokenizer.encode("cost "), *euro[:2]], euro


def test_prompt_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    prompt, euro = split_euro(tokenizer)
    after = tokenizer.encode("ab", add_special_tokens=False)[-1:]
    assert joined(tokenizer, prompt, [[euro[2]], after], True) == "€" + tokenizer.decode([*euro, *after])[1:]
    # Left unfinished, those bytes are the prompt's own: no delta shows them.
    assert joined(tokenizer, prompt, [], True) == ""
    assert "\ufffd" not in joined(tokenizer, prompt, [after], True)


def test_stray_bytes_become_replacement_characters(tokenizer: Tokenizer) -> None:
    _, euro = split_euro(tokenizer)
    ids = [euro[1], euro[0], euro[0], *euro, euro[0]]
    assert joined(tokenizer, [], [[token_id] for token_id in ids], True) == "\ufffd\ufffd\ufffd€\ufffd"


def test_spaces_survive(sentencepiece: Tokenizer, sentencepiece_bare: Tokenizer) -> None:
    for tokenizer in (sentencepiece, sentencepiece_bare):
        ids = tokenizer.encode(" one two three", add_special_tokens=False)
        prompt = tokenizer.encode("abc")
        assert joined(tokenizer, prompt, [[token_id] for token_id in ids[-3:]], True) == " one two three"


def test_text_after_a_special_token_keeps_its_space(tokenizer: Tokenizer) -> None:
    special = next(token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_special(token_id))
    mark = tokenizer.token_bytes(special).decode()
    text = f"{mark} one{mark}two"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    prompt = tokenizer.encode("a")
    word = tokenizer.encode("a two")[len(prompt) :]
    assert joined(tokenizer, prompt, [[special], word], True) == " two"


def test_hidden_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<think>hello<|im_end|>")
    assert byte_level.decode(ids) == "<think>hello"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<think>hello<|im_end|>"
