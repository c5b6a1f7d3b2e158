"""Which grammar a request asks for: `response_format`, vLLM's `guided_*` fields, `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from runners.api.prompts import TextThreads
from runners.api.protocol import GenerationFields
from runners.errors import InvalidRequestError
from runners.grammar import grammars
from runners.grammar.limits import GrammarError

_MAKERS: dict[str, tuple[type | tuple[type, ...], Callable[[Any], str]]] = {
    "json": ((str, dict), grammars.from_json_schema),
    "regex": (str, grammars.from_regex),
    "grammar": (str, grammars.from_notation),
    "choice": (list, grammars.from_choices),
    "json_object": (bool, lambda wanted: grammars.from_json_schema(grammars.ANY_OBJECT) if wanted else ""),
}


def requested_grammar(request: GenerationFields) -> tuple[str, str]:
    """(grammar, the field that asks for it), both empty without one. InvalidRequestError for a bad or a second one."""
    wanted = [*_from_response_format(request.response_format), *_from_guided_fields(request)]
    if len(wanted) > 1:
        fields = " and ".join(field for field, _ in wanted)
        raise InvalidRequestError(f"At most one constraint on the output is allowed, not {fields}.", param=wanted[1][0])
    if not wanted:
        return "", ""
    field, make = wanted[0]
    try:
        return make(), field
    except GrammarError as error:
        raise refused(field, error) from None


def requested_schema(request: GenerationFields) -> dict[str, Any] | None:
    """The JSON schema behind `requested_grammar`, when it is one."""
    wanted = request.response_format
    if wanted is not None and wanted.get("type") != "text":
        return _schema_of_format(wanted)
    options = request.structured_outputs or {}
    schema = request.guided_json if request.guided_json is not None else options.get("json")
    if schema is None:
        return grammars.ANY_OBJECT if options.get("json_object") else None
    if isinstance(schema, str):
        schema = json.loads(schema)
    return schema if isinstance(schema, dict) else None


async def check_grammar(grammar: str, field: str, threads: TextThreads) -> None:
    """InvalidRequestError with the library's reason for a grammar that does not compile; long ones off the loop."""
    try:
        await threads.run(len(grammar), lambda: grammars.check(grammar))
    except GrammarError as error:
        raise refused(field, error) from None


def refused(field: str, error: GrammarError) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid value for '{field}': {error}", param=field, code="invalid_grammar")


Maker = tuple[str, Callable[[], str]]


def _from_response_format(wanted: dict[str, Any] | None) -> list[Maker]:
    if wanted is None or wanted.get("type") == "text":
        return []
    schema = _schema_of_format(wanted)
    return [("response_format", lambda: grammars.from_json_schema(schema))]


def _schema_of_format(wanted: dict[str, Any]) -> dict[str, Any]:
    kind = wanted.get("type")
    if kind not in ("json_object", "json_schema"):
        raise InvalidRequestError(
            "Invalid value for 'response_format': type must be text, json_object or json_schema.",
            param="response_format",
        )
    if kind == "json_object":
        return grammars.ANY_OBJECT
    named = wanted.get("json_schema")
    schema = named.get("schema", grammars.ANY_OBJECT) if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            "Invalid value for 'response_format': json_schema must be an object with a 'schema' that is one.",
            param="response_format",
        )
    return schema


def _from_guided_fields(request: GenerationFields) -> list[Maker]:
    wanted: list[Maker] = []
    for name in ("json", "regex", "grammar", "choice"):
        value = getattr(request, f"guided_{name}")
        if value is not None:
            wanted.append((f"guided_{name}", _maker(f"guided_{name}", name, value)))
    for name, value in (request.structured_outputs or {}).items():
        if value is None:
            continue
        if name not in _MAKERS:
            raise InvalidRequestError(
                f"Invalid value for 'structured_outputs': {name[:40]!r} is none of {', '.join(_MAKERS)}.",
                param="structured_outputs",
            )
        wanted.append(("structured_outputs", _maker("structured_outputs", name, value)))
    return wanted


def _maker(field: str, name: str, value: Any) -> Callable[[], str]:
    kinds, make = _MAKERS[name]
    is_texts = name != "choice" or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    if not isinstance(value, kinds) or not is_texts:
        raise InvalidRequestError(f"Invalid value for '{field}': {name} has the wrong type.", param=field)
    return lambda: make(value)
