"""Grammars of tool calls: what a model must write when it is to call, in its own format, arguments by their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runners.grammar.grammars import quoted, with_options
from runners.text.tool_formats import THINK_END, THINK_START, ToolFormat

MAX_CALLS = 8
"""Calls in one answer; without a bound a model that has lost its way would go on calling."""

Function = tuple[str, Mapping[str, Any]]
"""Name and schema of the arguments."""

CALL_MARKERS = {ToolFormat.HERMES: "<tool_call>", ToolFormat.MISTRAL: "[TOOL_CALLS]"}
"""What begins a call, in the formats where no other text can: there a model may be bound only from the marker on."""

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(
    tool_format: ToolFormat,
    functions: Sequence[Function],
    *,
    parallel: bool,
    marker: Callable[[str], str] = quoted,
    thinks: bool = False,
    thought_is_open: bool = False,
    or_schema: Mapping[str, Any] | None = None,
    or_text: bool = False,
) -> str:
    """Lark grammar of one call, or with `parallel` of up to MAX_CALLS.

    `marker` writes a marker text as the vocabulary has it: quoted text, or `<[id]>` for a special token. With `thinks`
    a thought may come first; with `thought_is_open` the prompt has begun it. `or_schema`: JSON by this schema will do.
    `or_text`: so will any text, also before the first call; for formats whose calls begin with a marker.
    """
    answers = "calls" if or_schema is None else "calls | answer"
    if or_text:
        answers = "free"
    rules = [_start(answers, marker, thinks=thinks, thought_is_open=thought_is_open)]
    if or_text:
        rules.append(_free_rules(CALL_MARKERS[tool_format], marker))
    if or_schema is not None:
        rules.append(f"answer: {json_rule(or_schema)}")
    last = MAX_CALLS - 1 if parallel else 0
    rules.append(_calls_rule(tool_format, last, marker, opened_by_text=or_text))
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    key = "parameters" if tool_format is ToolFormat.LLAMA3 else "arguments"
    for index, (name, schema) in enumerate(functions):
        head = f'{{"name": {json.dumps(name)}, "{key}": '
        rules.append(f'call_{index}: {quoted(head)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: {json_rule(schema)}")
    return "\n".join(rules)


def answer_grammar(
    answer: str,
    *,
    marker: Callable[[str], str] = quoted,
    thought_is_open: bool = False,
) -> str:
    """The Lark fragment `answer` behind a thought, for models that think before they answer."""
    return "\n".join([_start("answer", marker, thinks=True, thought_is_open=thought_is_open), f"answer: {answer}"])


def json_rule(schema: Mapping[str, Any]) -> str:
    """The right side of a Lark rule for JSON by `schema`."""
    return f"%json {json.dumps(with_options(schema))}"


def _start(answers: str, marker: Callable[[str], str], *, thinks: bool, thought_is_open: bool) -> str:
    if not thinks:
        return f"start: {answers}"
    end = marker(THINK_END)
    # A special token stands outside of text: a thought is then all text up to it.
    is_text = end == quoted(THINK_END)
    thought = "thought_text[lazy]: /[\\s\\S]*<\\/think>/" if is_text else "thought_text: /[\\s\\S]*/"
    close = "thought_text" if is_text else f"thought_text {end}"
    opened = close if thought_is_open else f"({marker(THINK_START)} {close})?"
    return f"start: {opened} /[ \\n]{{0,4}}/ ({answers})\n{thought}"


def _free_rules(opener: str, marker: Callable[[str], str]) -> str:
    """Text alone, or text and calls. `calls` then begins behind the first marker."""
    token = marker(opener)
    if token != quoted(opener):
        # A special token stands outside of text.
        return f"free: FREE_TEXT ({token} calls)?\nFREE_TEXT: /[\\s\\S]*/"
    spelled = re.escape(opener)
    return (
        f"free: FREE_TEXT | preface calls\nFREE_TEXT: /[\\s\\S]*/ & ~/[\\s\\S]*{spelled}[\\s\\S]*/\n"
        f"preface[lazy]: /[\\s\\S]*{spelled}/"
    )


def _calls_rule(
    tool_format: ToolFormat, last: int, marker: Callable[[str], str], *, opened_by_text: bool = False
) -> str:
    more = f"(%s call){{0,{last}}}" if last else ""
    match tool_format:
        case ToolFormat.HERMES:
            opener, closer = marker("<tool_call>"), marker("</tool_call>")
            rest = f'"\\n" call "\\n" {closer}'
            first = rest if opened_by_text else f"{opener} {rest}"
            return f"calls: {first}" + (f' ("\\n" {opener} {rest}){{0,{last}}}' if last else "")
        case ToolFormat.MISTRAL:
            opener = "" if opened_by_text else marker("[TOOL_CALLS]")
            return f'calls: {opener} "[" call {more % quoted(", ") if last else ""} "]"'
        case ToolFormat.LLAMA3:
            return f"calls: call {more % quoted('; ') if last else ''}"
        case ToolFormat.JSON:
            many = f' | "[" call {more % quoted(", ")} "]"' if last else ""
            return f"calls: call{many}"
