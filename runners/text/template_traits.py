"""What a chat template expects of a message's content, read off its syntax tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes

_TYPE_TESTS = frozenset(["string", "iterable", "sequence", "mapping"])


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """How content is read.

    loops_over_parts: it can be a list of parts. needs_parts: it must be one (the template never asks whether it is a
    string). tests_for_none: a null content means something to the template.
    """

    loops_over_parts: bool = False
    needs_parts: bool = False
    tests_for_none: bool = False


def read_traits(template: nodes.Template) -> TemplateTraits:
    """Traits of a parsed template."""
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
