"""How a chat answer is read and what it may be: by template, tools and response format."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runners.api.prompts import Prompt
from runners.api.protocol import ChatCompletionRequest
from runners.api.structured import refused, requested_grammar, requested_schema
from runners.api.tools import ToolChoice, ToolUse, marker_writer, special_markers, tool_use
from runners.errors import InvalidRequestError
from runners.grammar.grammars import ANY_OBJECT, check
from runners.grammar.limits import GrammarError
from runners.grammar.tool_grammars import CALL_MARKERS, answer_grammar, json_rule, tool_grammar
from runners.text.assets import TextAssets
from runners.text.message_parser import MessageParser
from runners.text.reasoning import ReasoningSplitter
from runners.text.template_traits import TemplateTraits
from runners.text.tool_formats import THINK_END, THINK_START, ToolFormat
from runners.text.tool_parser import ToolParser


@dataclass(frozen=True, slots=True)
class Parsing:
    """`calls_end_turn`: an answer that made calls finishes with "tool_calls" (after a named choice with "stop")."""

    use: ToolUse
    tool_format: ToolFormat
    thinks: bool
    thought_is_open: bool

    @property
    def calls_end_turn(self) -> bool:
        return self.use.choice is not ToolChoice.NAMED

    def new_parser(self) -> MessageParser:
        reasoning = ReasoningSplitter(is_open=self.thought_is_open) if self.thinks else None
        if self.use.choice is ToolChoice.NONE:
            return MessageParser(reasoning, None)
        return MessageParser(reasoning, ToolParser(self.tool_format, self.use.names, max_calls=self.use.max_calls))


def parsing_of(request: ChatCompletionRequest, assets: TextAssets | None, prompt: Prompt) -> Parsing | None:
    """How the answer to `prompt` is to be taken apart; None when all of it is content."""
    use = tool_use(request)
    if assets is None:
        return None
    traits = _traits(assets, use)
    if use.choice is ToolChoice.NONE and not traits.thinks:
        return None
    is_open = traits.thinks and (prompt.text or "").rstrip().endswith(THINK_START)
    return Parsing(use, _format(assets, traits), traits.thinks, is_open)


def parser_markers(request: ChatCompletionRequest, assets: TextAssets | None) -> dict[int, str]:
    """Special tokens that the parser looks for, by id."""
    if assets is None or assets.tokenizer is None:
        return {}
    use = tool_use(request)
    traits = _traits(assets, use)
    markers: tuple[str, ...] = (THINK_START, THINK_END) if traits.thinks else ()
    if use.choice is not ToolChoice.NONE:
        markers += _format(assets, traits).markers
    return special_markers(assets.tokenizer, markers)


def chat_grammar(request: ChatCompletionRequest, assets: TextAssets | None, prompt: Prompt) -> tuple[str, str]:
    """(grammar, the field that asks for it) of a chat request; empty for free text.

    A forced call excludes other constraints; with tools to choose from, a JSON schema leaves calls possible. Strict
    tools bind the arguments of calls that the model makes of itself, where a marker says that one begins. Models that
    think may think first. InvalidRequestError for a tool whose schema cannot be followed.
    """
    grammar, field = requested_grammar(request)
    parsing = parsing_of(request, assets, prompt)
    if parsing is None or assets is None or assets.tokenizer is None:
        return grammar, field
    use = parsing.use
    schema = requested_schema(request)
    if use.is_forced:
        if grammar:
            raise InvalidRequestError(f"'{field}' cannot be combined with a forced tool call.", param=field)
        _check_schemas(use)
        return _tool_grammar(parsing, assets), "tools"
    if grammar and schema is not None:
        _check_answer(grammar, field)
        if use.choice is ToolChoice.AUTO:
            _check_schemas(use)
            return _tool_grammar(parsing, assets, schema), field
        marker = marker_writer(assets.tokenizer)
        return answer_grammar(json_rule(schema), marker=marker, thought_is_open=parsing.thought_is_open), field
    if not grammar and use.strict and parsing.tool_format in CALL_MARKERS:
        loose = tuple((name, schema if name in use.strict else ANY_OBJECT) for name, schema in use.functions)
        parsing = replace(parsing, use=replace(use, functions=loose))
        _check_schemas(parsing.use)
        return _tool_grammar(parsing, assets, or_text=True), "tools"
    return grammar, field


def _tool_grammar(
    parsing: Parsing, assets: TextAssets, or_schema: dict[str, object] | None = None, *, or_text: bool = False
) -> str:
    assert assets.tokenizer is not None
    return tool_grammar(
        parsing.tool_format,
        parsing.use.functions,
        parallel=parsing.use.max_calls is None,
        marker=marker_writer(assets.tokenizer),
        thinks=parsing.thinks,
        thought_is_open=parsing.thought_is_open,
        or_schema=or_schema,
        or_text=or_text,
    )


def _check_schemas(use: ToolUse) -> None:
    """One by one, so that the error names the function and shows no grammar of ours."""
    for name, schema in use.functions:
        try:
            check(f"start: {json_rule(schema)}")
        except GrammarError as error:
            reason = str(error).partition("\n")[0]
            raise refused("tools", GrammarError(f"parameters of {name[:64]}: {reason}")) from None


def _check_answer(grammar: str, field: str) -> None:
    try:
        check(grammar)
    except GrammarError as error:
        raise refused(field, error) from None


def _traits(assets: TextAssets, use: ToolUse) -> TemplateTraits:
    return assets.chat_template.traits(tools=use.choice is not ToolChoice.NONE)


def _format(assets: TextAssets, traits: TemplateTraits) -> ToolFormat:
    if assets.tool_format is not None:
        return assets.tool_format
    return traits.tool_format if traits.shows_tools else ToolFormat.JSON
