"""The Jinja environment chat templates run in: immutable sandbox, the functions templates expect, and limits.

Templates come with model files, so they are code of strangers: they see plain data only, and loops, memory and time
are bounded. Functions and settings are those that Hugging Face documents for chat templates.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 1 << 20
MAX_VALUE_CHARS = 1 << 24
MAX_STEPS = 2_000_000
MAX_SECONDS = 10.0
_CLOCK_EVERY_STEPS = 1024
_WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*(?:\*|\d{5})")


class TemplateReasonError(jinja2.TemplateError):
    """`raise_exception` was called: the template's own reason for refusing a conversation."""


class _Budget:
    """Steps and time that one rendering may still use."""

    def __init__(self) -> None:
        self.steps = 0
        self.deadline_s = time.monotonic() + MAX_SECONDS

    def spend(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SecurityError(f"the template runs more than {MAX_STEPS} loop steps")
        if self.steps % _CLOCK_EVERY_STEPS == 0 and time.monotonic() > self.deadline_s:
            raise SecurityError(f"the template runs longer than {MAX_SECONDS:.0f} s")


_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; rendering just shows its body."""

    tags = {"generation"}  # noqa: RUF012 - read by Jinja as a class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox in which every loop and macro body spends a step and no operator makes an oversized value."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def compile_chat_template(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError, or SecurityError for a source over MAX_TEMPLATE_CHARS."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise SecurityError(f"the template is longer than {MAX_TEMPLATE_CHARS} characters")
        return self.from_string(_Instrument().visit(self.parse(source)))

    def spend_step(self) -> str:
        """Called at the start of every loop and macro body."""
        _budget.get().spend()
        return ""

    def join_text(self, *parts: Any) -> str:
        """The `~` operator."""
        joined = "".join([str(part) for part in parts])
        _check_count(len(joined))
        return joined

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _check_count(len(sequence) * count)
        elif operator == "**":
            _check_count(abs(right) * 64 if isinstance(right, int) else 0)
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("the template formats text wider than 9999 characters")
        return _checked_size(super().call_binop(context, operator, left, right))


def render_within_limits(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render under a fresh budget. Raises what Jinja and the template raise, SecurityError at a limit."""
    token = _budget.set(_Budget())
    try:
        return "".join(_limited(template.generate(variables)))
    finally:
        _budget.reset(token)


def _limited(chunks: Iterator[str]) -> Iterator[str]:
    total = 0
    for chunk in chunks:
        total += len(chunk)
        _check_count(total)
        yield chunk


class _Instrument(NodeTransformer):
    """Puts `spend_step` in front of loop and macro bodies and `join_text` in place of `~`."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            step = nodes.ExprStmt(_environment_call("spend_step", [], node.lineno), lineno=node.lineno)
            node.body.insert(0, step)
        elif isinstance(node, nodes.Concat):
            return _environment_call("join_text", node.nodes, node.lineno)
        return node


def _environment_call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


def _checked_size(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_count(len(value))
    return value


def _check_count(count: int) -> None:
    if count > MAX_VALUE_CHARS:
        raise SecurityError(f"the template makes a value of more than {MAX_VALUE_CHARS} characters")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateReasonError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
