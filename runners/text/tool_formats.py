"""How a family of models writes tool calls, and which family a chat template belongs to.

hermes   <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>, repeated     (Hermes, Qwen)
llama3   {"name": …, "parameters": {…}}; …, maybe after <|python_tag|>           (Llama 3)
mistral  [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or name[ARGS]{…}       (Mistral)
json     {"name": …, "arguments": {…}} or a list of them, maybe in a code fence  (any model that is told to)
"""

from __future__ import annotations

import enum


class ToolFormat(enum.StrEnum):
    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    JSON = "json"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that announce calls; special tokens in some vocabularies, plain text in others."""
        return _MARKERS[self]

    @property
    def takes_bare_json(self) -> bool:
        """Whether an answer that begins with the JSON of a known function is a call without any marker."""
        return self in (ToolFormat.LLAMA3, ToolFormat.JSON)


_MARKERS = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA3: ("<|python_tag|>",),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]", "[ARGS]"),
    ToolFormat.JSON: (),
}

THINK_START, THINK_END = "<think>", "</think>"


def format_of(template: str) -> ToolFormat:
    """The format whose marks a chat template's source contains."""
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if "<|python_tag|>" in template or ('"parameters": ' in template and "<|start_header_id|>" in template):
        return ToolFormat.LLAMA3
    return ToolFormat.JSON
