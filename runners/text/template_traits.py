"""What a chat template expects of a message's content, and how its model writes tool calls and thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes

from runners.text.tool_formats import THINK_END, ToolFormat, format_of

_TYPE_TESTS = frozenset(["string", "iterable", "sequence", "mapping"])


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """How content is read.

    loops_over_parts: it can be a list of parts. needs_parts: it must be one (the template never asks whether it is a
    string). tests_for_none: a null content means something to the template. shows_tools: it puts tools into the prompt.
    shows_calls: it knows messages with tool calls. tool_format: how the model writes calls. thinks: thoughts come
    before answers.
    """

    loops_over_parts: bool = False
    needs_parts: bool = False
    tests_for_none: bool = False
    shows_tools: bool = False
    shows_calls: bool = False
    tool_format: ToolFormat = ToolFormat.JSON
    thinks: bool = False


def read_traits(template: nodes.Template, source: str = "") -> TemplateTraits:
    """Traits of a parsed template and its source text."""
    loops = any(_is_content(_unfiltered(loop.iter)) for loop in template.find_all(nodes.For))
    content_tests = {test.name for test in template.find_all(nodes.Test) if _is_content(test.node)}
    compares_none = any(
        _is_content(comparison.expr)
        and any(isinstance(operand.expr, nodes.Const) and operand.expr.value is None for operand in comparison.ops)
        for comparison in template.find_all(nodes.Compare)
    )
    return TemplateTraits(
        loops_over_parts=loops,
        needs_parts=loops and not content_tests & _TYPE_TESTS,
        tests_for_none="none" in content_tests or compares_none,
        shows_tools=any(name.name == "tools" for name in template.find_all(nodes.Name)),
        shows_calls="tool_calls" in source,
        tool_format=format_of(source),
        thinks=THINK_END in source,
    )


def _unfiltered(expression: nodes.Node) -> nodes.Node:
    while isinstance(expression, nodes.Filter) and expression.node is not None:
        expression = expression.node
    return expression


def _is_content(expression: nodes.Node) -> bool:
    """`message.content`, `message['content']`, `message.get('content')`, or a variable called content."""
    if isinstance(expression, nodes.Call):
        return (
            isinstance(expression.node, nodes.Getattr)
            and expression.node.attr == "get"
            and "content" in _constants(expression.args)
        )
    if isinstance(expression, nodes.Getattr):
        return expression.attr == "content"
    if isinstance(expression, nodes.Getitem):
        return "content" in _constants([expression.arg])
    return isinstance(expression, nodes.Name) and expression.name == "content"


def _constants(expressions: list[nodes.Expr]) -> Iterator[object]:
    return (expression.value for expression in expressions if isinstance(expression, nodes.Const))
