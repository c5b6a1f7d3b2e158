"""Grammars of forced calls: every format, its markers as text or as special tokens, thoughts, alternatives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runners.grammar import grammars
from runners.grammar.compiler import GrammarCompiler
from runners.grammar.tool_grammars import (
    CALL_MARKERS,
    MAX_CALLS,
    NO_PARAMETERS,
    answer_grammar,
    json_rule,
    tool_grammar,
)
from runners.text.assets import load_text
from runners.text.message_parser import MessageDelta, MessageParser
from runners.text.reasoning import ReasoningSplitter
from runners.text.tool_formats import ToolFormat
from runners.text.tool_parser import ToolParser
from tests.support.tiny_tokenizers import EOS, IM_START, write_byte_level

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTIONS = [("add", ADD), ("now", NO_PARAMETERS)]
ONE = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    ToolFormat.LLAMA3: '{"name": "add", "parameters": {"a": 1}}',
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    ToolFormat.JSON: '{"name": "add", "arguments": {"a": 1}}',
}
TWO = {
    ToolFormat.HERMES: ONE[ToolFormat.HERMES] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ToolFormat.LLAMA3: ONE[ToolFormat.LLAMA3] + '; {"name": "now", "parameters": {}}',
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
    ToolFormat.JSON: '[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = load_text(write_byte_level(tmp_path_factory.mktemp("byte_level"))).tokenizer
    return GrammarCompiler(lambda: tokenizer, 270, [EOS])


def accepts(compiler: GrammarCompiler, grammar: str, tokens: str | list[int]) -> bool:
    grammars.check(grammar)
    matcher = compiler.matcher(grammar)
    ids = list(tokens.encode()) if isinstance(tokens, str) else tokens
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_calls_in_every_format(compiler: GrammarCompiler, tool_format: ToolFormat) -> None:
    single = tool_grammar(tool_format, FUNCTIONS, parallel=False)
    several = tool_grammar(tool_format, FUNCTIONS, parallel=True)
    assert accepts(compiler, single, ONE[tool_format])
    assert accepts(compiler, several, TWO[tool_format])
    assert not accepts(compiler, single, TWO[tool_format])
    assert not accepts(compiler, several, ONE[tool_format].replace('"a": 1', '"a": "x"'))
    assert not accepts(compiler, several, ONE[tool_format].replace("add", "sub"))
    assert not accepts(compiler, several, "hello")


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_what_the_grammar_allows_the_parser_reads(tool_format: ToolFormat) -> None:
    for text, count in ((ONE[tool_format], 1), (TWO[tool_format], 2)):
        parser = ToolParser(tool_format, ["add", "now"])
        whole = MessageDelta()
        for part in (parser.push(text), parser.finish()):
            whole.add(MessageDelta(content=part[0], calls=part[1]))
        assert whole.content == ""
        assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [("add", {"a": 1}), ("now", {})][
            :count
        ]


@pytest.mark.parametrize("tool_format", list(CALL_MARKERS))
@pytest.mark.parametrize("is_special", [False, True])
def test_text_or_calls(compiler: GrammarCompiler, tool_format: ToolFormat, is_special: bool) -> None:
    """Any text is fine; from the first marker on, only calls that follow their schemas."""
    opener = CALL_MARKERS[tool_format]

    def marker(text: str) -> str:
        return f"<[{IM_START}]>" if is_special and text == opener else grammars.quoted(text)

    def ids(text: str) -> list[int]:
        first, *rest = text.split(opener)
        opening = [IM_START] if is_special else list(opener.encode())
        return list(first.encode()) + [token for part in rest for token in (*opening, *part.encode())]

    single = tool_grammar(tool_format, FUNCTIONS, parallel=False, marker=marker, or_text=True)
    several = tool_grammar(tool_format, FUNCTIONS, parallel=True, marker=marker, or_text=True)
    for grammar in (single, several):
        for text in ("", "Hello.\n", opener[:-1], f"a {opener[:3]} b", '{"name": "sub"}'):
            assert accepts(compiler, grammar, ids(text)), text
        for text in (ONE[tool_format], "I will add.\n" + ONE[tool_format]):
            assert accepts(compiler, grammar, ids(text)), text
            assert not accepts(compiler, grammar, ids(text.replace('"a": 1', '"a": "x"')))
            assert not accepts(compiler, grammar, ids(text.replace('add", ', 'sub", ')))
        assert not accepts(compiler, grammar, ids("text " + opener + "nothing"))
    assert accepts(compiler, several, ids("Both. " + TWO[tool_format]))
    assert not accepts(compiler, single, ids("Both. " + TWO[tool_format]))


def test_calls_are_bounded(compiler: GrammarCompiler) -> None:
    grammar = tool_grammar(ToolFormat.LLAMA3, FUNCTIONS, parallel=True)
    call = '{"name": "now", "parameters": {}}'
    assert accepts(compiler, grammar, "; ".join([call] * MAX_CALLS))
    assert not accepts(compiler, grammar, "; ".join([call] * (MAX_CALLS + 1)))


def test_a_special_marker_is_a_token(compiler: GrammarCompiler) -> None:
    grammar = tool_grammar(ToolFormat.MISTRAL, FUNCTIONS, parallel=False, marker=lambda text: f"<[{IM_START}]>")
    assert accepts(compiler, grammar, [IM_START, *b'[{"name": "now", "arguments": {}}]'])
    assert not accepts(compiler, grammar, "[TOOL_CALLS]" + '[{"name": "now", "arguments": {}}]')


@pytest.mark.parametrize("is_open", [False, True])
def test_a_thought_may_come_first(compiler: GrammarCompiler, is_open: bool) -> None:
    answer = answer_grammar(json_rule(ADD), thought_is_open=is_open)
    calls = tool_grammar(ToolFormat.JSON, FUNCTIONS, parallel=False, thinks=True, thought_is_open=is_open)
    start = "" if is_open else "<think>"
    for grammar, rest in ((answer, '{"a": 1}'), (calls, ONE[ToolFormat.JSON])):
        text = start + 'Hm, {"b": </ think>.\n</think>\n\n' + rest
        assert accepts(compiler, grammar, text)
        assert accepts(compiler, grammar, rest) != is_open
        assert not accepts(compiler, grammar, start + "no end")
        parser = MessageParser(ReasoningSplitter(is_open=is_open), None)
        whole = parser.push(text)
        whole.add(parser.finish())
        assert whole.content == rest


def test_a_thought_between_special_tokens(compiler: GrammarCompiler) -> None:
    ids = {"<think>": 258, "</think>": 259}
    grammar = answer_grammar('"yes"', marker=lambda text: f"<[{ids[text]}]>")
    assert accepts(compiler, grammar, [258, *b"hm", 259, *b"\nyes"])
    assert accepts(compiler, grammar, "yes")


def test_an_answer_by_schema_instead_of_a_call(compiler: GrammarCompiler) -> None:
    grammar = tool_grammar(ToolFormat.HERMES, FUNCTIONS, parallel=True, or_schema={"type": "array", "maxItems": 0})
    assert accepts(compiler, grammar, "[]")
    assert accepts(compiler, grammar, TWO[ToolFormat.HERMES])
    assert not accepts(compiler, grammar, "[]" + ONE[ToolFormat.HERMES])


def test_the_default_models_vocabulary(smollm2_path: Path) -> None:
    assets = load_text(smollm2_path)
    tokenizer = assets.tokenizer
    assert tokenizer is not None
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, sorted(assets.eos_token_ids))
    for tool_format, text in TWO.items():
        grammar = tool_grammar(tool_format, FUNCTIONS, parallel=True)
        assert accepts(compiler, grammar, tokenizer.encode(text, add_special_tokens=False))
