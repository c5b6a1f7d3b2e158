"""The tool fields of a chat request: what the model is shown, and what it may or must call."""

from __future__ import annotations

import enum
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runners.api.protocol import ChatCompletionRequest
from runners.errors import InvalidRequestError
from runners.grammar.grammars import quoted
from runners.grammar.limits import GrammarError, check_schema
from runners.grammar.tool_grammars import NO_PARAMETERS, Function
from runners.text.tokenizer import Tokenizer
from runners.text.tool_formats import ToolFormat

MAX_TOOLS = 128


class ToolChoice(enum.Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`functions` are those that may be called: with a named choice that one alone. `strict`: names of those whose
    arguments must follow their schema although the model is free to call or not."""

    choice: ToolChoice
    functions: tuple[Function, ...] = ()
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def is_forced(self) -> bool:
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.functions)

    @property
    def max_calls(self) -> int | None:
        return None if self.parallel and self.choice is not ToolChoice.NAMED else 1


def checked_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as the template gets them. InvalidRequestError for one that is no function with a name."""
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"Invalid value for 'tools': {len(tools)} tools, at most {MAX_TOOLS} are allowed.", param="tools"
        )
    for tool in tools or ():
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise InvalidRequestError(
                "Invalid value for 'tools': each needs type 'function' and a function with a name.", param="tools"
            )
        if not isinstance(function.get("parameters") or {}, dict):
            raise InvalidRequestError("Invalid value for 'tools': parameters must be a JSON schema.", param="tools")
        try:
            check_schema(function.get("parameters") or {})
        except GrammarError as error:
            raise InvalidRequestError(f"Invalid value for 'tools': parameters: {error}.", param="tools") from None
    return tools or None


def tool_use(request: ChatCompletionRequest) -> ToolUse:
    """What the request's tools and tool_choice come to. InvalidRequestError where they do not fit together."""
    tools = checked_tools(request.tools) or []
    functions = tuple((tool["function"]["name"], tool["function"].get("parameters") or NO_PARAMETERS) for tool in tools)
    wanted = request.tool_choice
    parallel = request.parallel_tool_calls is not False
    if wanted == "none" or (not tools and wanted in (None, "auto")):
        return ToolUse(ToolChoice.NONE)
    if wanted in (None, "auto"):
        strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True)
        return ToolUse(ToolChoice.AUTO, functions, parallel, strict)
    name = _named(wanted)
    if not tools:
        raise InvalidRequestError("Invalid value for 'tool_choice': there are no tools to choose.", param="tool_choice")
    if name is None:
        return ToolUse(ToolChoice.REQUIRED, functions, parallel)
    chosen = tuple(function for function in functions if function[0] == name)
    if not chosen:
        raise InvalidRequestError(
            f"Invalid value for 'tool_choice': there is no function {name[:64]!r}.", param="tool_choice"
        )
    return ToolUse(ToolChoice.NAMED, chosen[:1], parallel=False)


def _named(wanted: str | dict[str, Any] | None) -> str | None:
    """The name of a named choice, None for "required"."""
    if wanted == "required":
        return None
    function = wanted.get("function") if isinstance(wanted, dict) and wanted.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            "Invalid value for 'tool_choice': must be none, auto, required or a named function.", param="tool_choice"
        )
    return name


def new_call_id(tool_format: ToolFormat) -> str:
    """Mistral's templates insist on nine letters and digits."""
    if tool_format is ToolFormat.MISTRAL:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def marker_writer(tokenizer: Tokenizer) -> Callable[[str], str]:
    """How a grammar names a marker: by its id where it is a special token, which no text can spell."""

    def write(text: str) -> str:
        token_id = tokenizer.token_id(text)
        return f"<[{token_id}]>" if token_id is not None and tokenizer.is_special(token_id) else quoted(text)

    return write


def special_markers(tokenizer: Tokenizer, markers: tuple[str, ...]) -> dict[int, str]:
    """Of `markers` those that are special tokens, by id: a parser has to see what the reader does not."""
    ids = {tokenizer.token_id(text): text for text in markers}
    return {token_id: text for token_id, text in ids.items() if token_id is not None and tokenizer.is_special(token_id)}
