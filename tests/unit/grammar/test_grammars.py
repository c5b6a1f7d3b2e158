"""From a client's constraint to a grammar: what each form allows, and why a bad one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import llguidance
import pytest

from runners.grammar import grammars, limits
from runners.grammar.compiler import GrammarCompiler, grammar_vocabulary
from runners.grammar.gate import GrammarGate
from runners.grammar.grammars import GrammarError
from runners.messages import AddRequest, pack_ids
from runners.request import SamplingParams
from runners.text.assets import load_text
from runners.text.tokenizer import Tokenizer
from tests.support.eventually import eventually
from tests.support.tiny_tokenizers import EOS, write_byte_level

VOCAB_SIZE = 300  # more than the tokenizer has, as models with padded embeddings do


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = load_text(write_byte_level(tmp_path_factory.mktemp("byte_level"))).tokenizer
    assert found is not None
    return found


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])


def accepts(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    """Whether the whole text is in the grammar, byte by byte."""
    grammars.check(grammar)
    matcher = compiler.matcher(grammar)
    data = list(text.encode())
    return matcher.validate_tokens(data) == len(data) and matcher.consume_tokens(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (grammars.from_regex(r"\d+/[a-z]+"), ["1/a", "123/xyz"], ["/a", "1/", "1/a ", "\u0661/a"]),
        (grammars.from_regex(""), [""], ["a"]),
        (grammars.from_choices(["yes", 'no "x"\n', "é"]), ["yes", 'no "x"\n', "é"], ["ye", "yesno", "e"]),
        (grammars.from_notation('start: "a" b\nb: "c" | "d" b'), ["ac", "addc"], ["a", "ad", "c"]),
        (grammars.from_notation('root ::= "a" b\nb ::= "c" | "d" b'), ["ac", "addc"], ["a", "ad", "c"]),
        (grammars.from_json_schema({"type": "integer", "minimum": -3, "maximum": 12}), ["-3", "12", "0"], ["13", "-4"]),
        (grammars.from_json_schema({"type": "integer"}), ["0", str(-(2**53) + 1)], [str(2**53), "9" * 30]),
        (
            grammars.from_json_schema({"type": "number", "minimum": 0, "maximum": 1}),
            ["0.5", "1"],
            ["0.0" + "1" * 20, "2"],
        ),
        (grammars.from_json_schema({"type": "number"}), ["6.02e23", "-1"], ["x"]),
        (grammars.from_json_schema({"type": ["integer", "null"], "minimum": 10}), ["null", "10"], ["9", "9" * 30]),
        (grammars.from_json_schema({"type": "integer", "minimum": 10**17}), [str(10**17)], ["5"]),
        (grammars.from_json_schema({"type": "integer", "maximum": -(10**17)}), [str(-(10**17))], ["5"]),
        (grammars.from_json_schema({"items": {"anyOf": [{"type": "integer"}]}, "type": "array"}), ["[1]"], ["[1" * 30]),
        (grammars.from_json_schema('{"enum": ["a", 1, null]}'), ['"a"', "1", "null"], ['"b"', "true"]),
        (grammars.from_json_schema(grammars.ANY_OBJECT), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{}{}"]),
        (grammars.from_json_schema({"oneOf": [{"const": 1}, {"type": "string"}]}), ["1", '"x"'], ["2"]),
    ],
)
def test_what_a_grammar_allows(compiler: GrammarCompiler, grammar: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(compiler, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, grammar, text)] == []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: grammars.from_json_schema({"type": "foo"}), "foo"),
        (lambda: grammars.from_json_schema({"type": "integer", "minimum": "x"}), "minimum"),
        (lambda: grammars.from_json_schema({"type": "object", "properties": [1]}), "properties"),
        (lambda: grammars.from_json_schema({"type": 5}), "type"),
        (lambda: grammars.from_json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (lambda: grammars.from_json_schema({"unevaluatedProperties": False, "type": "object"}), "unevaluated"),
        (lambda: grammars.from_json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "greater"),
        (lambda: grammars.from_json_schema({"$ref": "#/nope"}), "nope"),
        (lambda: grammars.from_json_schema("{"), "not JSON"),
        (lambda: grammars.from_json_schema("[1]"), "object"),
        (lambda: grammars.from_regex("a("), "unclosed"),
        (lambda: grammars.from_choices([]), "at least one"),
        (lambda: grammars.from_choices(["a", ""]), "empty"),
        (lambda: grammars.from_notation("nonsense"), "nonsense"),
        (lambda: grammars.from_notation("root ::= undefined"), "undefined"),
        (lambda: grammars.from_regex("a" * (limits.MAX_GRAMMAR_CHARS + 1)), "at most"),
    ],
)
def test_a_bad_grammar_is_refused_with_its_reason(make: object, reason: str) -> None:
    assert callable(make)
    with pytest.raises(GrammarError, match=reason):
        grammars.check(make())


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


CHAIN = {"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(20_000)}, "$ref": "#/$defs/d0"}
RULES = "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(20_000)) + '\nr20000: "a"'


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: grammars.from_json_schema({"type": "integer", "minimum": -(10**20), "maximum": -(10**20)}), "2.62"),
        (lambda: grammars.from_json_schema({"items": [{"x": {"maximum": -1e300}}]}), "2.62"),
        (lambda: grammars.from_json_schema(nested(40_000)), "deep"),
        (lambda: grammars.from_json_schema(CHAIN), "references"),
        (lambda: grammars.from_notation(RULES), "lines"),
        (lambda: grammars.from_notation(RULES.replace(":", " ::=").replace("start", "root")), "lines"),
        (
            lambda: grammars.from_notation('start: %json {"type": "integer", "maximum": -1e20}'),
            "%json",
        ),
    ],
)
def test_what_would_bring_the_library_down_never_reaches_it(make: object, reason: str) -> None:
    assert callable(make)
    with pytest.raises(GrammarError, match=reason):
        make()


def test_the_end_is_allowed_only_where_the_grammar_accepts(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(grammars.from_regex("ab?"))

    def allowed() -> set[int]:
        bits = matcher.compute_bitmask()
        return {token_id for token_id in range(VOCAB_SIZE) if bits[token_id // 8] >> (token_id % 8) & 1}

    assert allowed() == {ord("a")}
    matcher.consume_token(ord("a"))
    assert allowed() == {ord("b"), EOS}
    matcher.consume_token(ord("b"))
    assert allowed() == {EOS}


def test_a_token_of_several_characters_counts_by_its_bytes(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    paris = tokenizer.token_id("Paris")
    assert paris is not None
    matcher = compiler.matcher(grammars.from_choices(["Paris", "Parma"]))
    assert matcher.deep_copy().consume_token(paris)
    assert matcher.deep_copy().consume_token(ord("P"))


def test_a_model_without_an_end_token_has_no_grammars(tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match="end token"):
        grammar_vocabulary(tokenizer, VOCAB_SIZE, [VOCAB_SIZE + 1])


def test_a_gguf_vocabulary_spells_like_its_tokenizer(smollm2_path: Path) -> None:
    assets = load_text(smollm2_path)
    assert assets.tokenizer is not None
    vocabulary = grammar_vocabulary(assets.tokenizer, assets.tokenizer.vocab_size, sorted(assets.eos_token_ids))
    text = '{"città": "Zürich 東京", "n": [1, 2.5e3]}'
    ids = assets.tokenizer.encode(text, add_special_tokens=False)
    assert vocabulary.decode_bytes(ids) == text.encode()
    matcher = llguidance.LLMatcher(vocabulary, grammars.from_json_schema(grammars.ANY_OBJECT))
    assert matcher.consume_tokens(ids)
    assert matcher.is_accepting()
    assert json.loads(vocabulary.decode_str(ids)) == json.loads(text)


def message(request_id: str, grammar: str) -> AddRequest:
    return AddRequest(request_id, "m", pack_ids([1]), SamplingParams(max_tokens=4, grammar=grammar), 0.0)


async def test_the_gate_holds_a_request_until_its_grammar_is_compiled(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
    resent: list[AddRequest] = []
    gate = GrammarGate(compiler, resent.append)
    assert gate.passes(message("free", ""))
    held = message("held", grammars.from_regex("a+"))
    gone = message("gone", grammars.from_regex("b+"))
    assert not gate.passes(held)
    assert not gate.passes(gone)
    gate.abort("gone")
    gate.abort("never seen")
    await eventually(lambda: len(resent) == 2)
    assert gate.passes(held)
    assert not gate.passes(gone)
    assert gate.passes(message("again", held.params.grammar))
    compiler.close()


def test_a_grammar_that_does_not_compile_is_remembered_with_its_reason() -> None:
    compiler = GrammarCompiler(lambda: None, VOCAB_SIZE, [EOS])
    for _ in range(2):
        with pytest.raises(GrammarError, match="no tokenizer"):
            compiler.matcher(grammars.from_regex("a"))
    assert compiler.is_compiled(grammars.from_regex("a"))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$defs": {"x/y": {"$ref": "#/$defs/x~1y"}}, "$ref": "#/$defs/x~1y"},
    ],
)
def test_a_reference_to_itself_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(GrammarError, match="leads back to itself"):
        limits.check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        },
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/nowhere"},
        {"$ref": 7},
    ],
)
def test_a_reference_to_something_is_not(schema: dict[str, object]) -> None:
    limits.check_schema(schema)
