"""Tool calls and thoughts out of text, whatever the pieces it comes in."""

from __future__ import annotations

import itertools
import random

import pytest

from runners.text.message_parser import MessageDelta, MessageParser
from runners.text.reasoning import ReasoningSplitter
from runners.text.tool_formats import ToolFormat, format_of
from runners.text.tool_parser import ToolParser

H, L, M, J = ToolFormat.HERMES, ToolFormat.LLAMA3, ToolFormat.MISTRAL, ToolFormat.JSON
NAMES = ("f", "g")

CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (
        H,
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\""}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name":"g"}</tool_call>',
        "Sure.",
        [("f", '{"a": "}\\""}'), ("g", "{}")],
    ),
    (H, "a < b <tool_call nope ", "a < b <tool_call nope ", []),
    (
        H,
        '<tool_call>[{"name":"f","arguments":"{\\"x\\":1}"},{"name":"g"}]</tool_call> bye',
        "bye",
        [("f", '{"x":1}'), ("g", "{}")],
    ),
    (H, '<tool_call>\n{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (H, "<tool_call>not JSON", "<tool_call>not JSON", []),
    (H, '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>"}}</tool_call>', "", [("f", '{"a": "<tool_call>"}')]),
    (
        L,
        '{"name": "f", "parameters": {"a": [1, {}]}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": [1, {}]}'), ("g", "{}")],
    ),
    (L, '<|python_tag|>{"name": "zzz", "parameters": {}}', "", [("zzz", "{}")]),
    (L, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (L, "Hello {x}", "Hello {x}", []),
    (
        M,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (M, 'ok [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', "ok", [("f", '{"a": 1}'), ("g", '{"b": 2}')]),
    (M, "plain [x]", "plain [x]", []),
    (M, "[TOOL_CALLS]fo", "[TOOL_CALLS]fo", []),
    (J, '```json\n{"name": "f", "arguments": {"a": 1}}\n```', "", [("f", '{"a": 1}')]),
    (J, '[{"name": "f", "arguments": 5}, {"name": "g", "arguments": null}]', "", [("f", "5"), ("g", "null")]),
    (J, "```python\nx```", "```python\nx```", []),
    (J, "[1, 2]", "[1, 2]", []),
    (J, "  text", "  text", []),
    (J, '{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
    (J, '{"a": 1}', '{"a": 1}', []),
    (J, "", "", []),
    (J, "```json", "```json", []),
]


def parse(parser: MessageParser, text: str, cuts: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    whole = MessageDelta()
    borders = [0, *cuts, len(text)]
    for start, end in itertools.pairwise(borders):
        whole.add(parser.push(text[start:end]))
    whole.add(parser.finish())
    assert parser.has_calls == bool(whole.calls)
    assert [call.index for call in whole.calls] == list(range(len(whole.calls)))
    return whole.reasoning, whole.content, [(call.name or "", call.arguments) for call in whole.calls]


def random_cuts(text: str, seed: int) -> list[int]:
    rng = random.Random(seed)
    return sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 12))))


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES)
def test_calls_whatever_the_pieces(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    def parser() -> MessageParser:
        return MessageParser(None, ToolParser(tool_format, NAMES))

    assert parse(parser(), text, []) == ("", content, calls)
    assert parse(parser(), text, list(range(1, len(text)))) == ("", content, calls)
    for seed in range(100):
        assert parse(parser(), text, random_cuts(text, seed)) == ("", content, calls)


def test_arguments_stream_as_they_come() -> None:
    parser = ToolParser(H, NAMES)
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
    deltas = [delta for character in text for delta in parser.push(character)[1]]
    assert [delta.name for delta in deltas].count("f") == 1
    assert "".join(delta.arguments for delta in deltas) == '{"a": 1, "b": [2]}'
    assert len(deltas) > 10


def test_calls_beyond_the_limit_are_left_out() -> None:
    text = '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
    assert parse(MessageParser(None, ToolParser(J, NAMES, max_calls=1)), text, []) == ("", "", [("f", "{}")])


THOUGHTS = [
    ("<think>\nhm < /think\n\n</think>\n\nanswer", False, "hm < /think", "answer"),
    ("hm\n</think>a", True, "hm", "a"),
    ("plain <think>", False, "", "plain <think>"),
    ("<th", False, "", "<th"),
    ("<think>cut \n", False, "cut", ""),
    ("  <think></think>x ", False, "", "x "),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), THOUGHTS)
def test_thoughts_whatever_the_pieces(text: str, is_open: bool, reasoning: str, answer: str) -> None:
    for cuts in ([], list(range(1, len(text))), *(random_cuts(text, seed) for seed in range(50))):
        parser = MessageParser(ReasoningSplitter(is_open=is_open), None)
        assert parse(parser, text, cuts) == (reasoning, answer, [])


def test_a_thought_and_calls() -> None:
    text = '<think>use {"name": "f"}</think>\n\n{"name": "g", "arguments": {}}'
    for seed in range(50):
        parser = MessageParser(ReasoningSplitter(is_open=False), ToolParser(J, NAMES))
        assert parse(parser, text, random_cuts(text, seed)) == ('use {"name": "f"}', "", [("g", "{}")])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("…<tool_call>…", H),
        ("…[TOOL_CALLS]…", M),
        ("…<|python_tag|>…", L),
        ('<|start_header_id|> {"name": function, "parameters": dictionary}', L),
        ("{{ messages }}", J),
    ],
)
def test_formats_by_template(source: str, expected: ToolFormat) -> None:
    assert format_of(source) is expected
