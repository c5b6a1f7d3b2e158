"""200 JSON schemas in the style of public test suites: what people send as response formats, and their odd corners."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "maxLength": 16}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}


def closed(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def listed(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _scalars() -> Iterator[Schema]:
    yield from ({"type": kind} for kind in ("boolean", "null", "integer"))
    yield from ({"type": "string", "maxLength": length} for length in (0, 1, 5, 30))
    yield from ({"type": "string", "minLength": low, "maxLength": high} for low, high in ((1, 1), (3, 6), (10, 12)))
    yield from ({"type": ["string", "null"], "maxLength": 8}, {"type": ["integer", "boolean"]})
    yield from ({"const": value} for value in (1, "a", None, True, [1, 2], {"a": {"b": []}}, 'quo"te\n', 2.5))


def _numbers() -> Iterator[Schema]:
    bounds = [(0, 9), (-5, 5), (10, 10), (-100, -90), (1, 1000), (0, 1), (99, 101), (-1, 0), (1990, 2030), (7, 77)]
    yield from ({"type": "integer", "minimum": low, "maximum": high} for low, high in bounds)
    yield from (
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in ((0, 3), (-2, 2), (10, 20))
    )
    yield from (
        {"type": "number", "minimum": low, "maximum": high} for low, high in ((0, 1), (-1.5, 1.5), (36.1, 37.4))
    )
    yield {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    yield {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}


def _enums() -> Iterator[Schema]:
    yield from (
        {"enum": values}
        for values in (
            ["red", "green", "blue"],
            [1, 2, 3],
            ["a", 1, None, True],
            ["with space", "with-dash", "with_under", "ünïcode"],
            [[1], [2]],
            [{"k": 1}, {"k": 2}],
            ["prefix", "prefix longer", "prefix longer still"],
            [0.5, 1.5],
        )
    )
    for size in (1, 2, 10, 40):
        yield closed({"choice": {"enum": [f"option {number}" for number in range(size)]}})


def _patterns() -> Iterator[Schema]:
    yield from (
        {"type": "string", "pattern": pattern}
        for pattern in (
            "^[A-Z]{3}$",
            "^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
            "^#[0-9a-f]{6}$",
            "^(yes|no|maybe)$",
            "^[a-z]{1,8}@[a-z]{1,8}\\.(com|org)$",
            "^\\d{3}-\\d{4}$",
            "^v[0-9]+(\\.[0-9]){0,2}$",
            "^[^aeiou ]{1,5}$",
            "^A{1,3}B?C*D$",
            "^\\(\\d{2}\\)$",
            "^[\\w-]{2,6}$",
            "^$",
        )
    )
    yield from ({"type": "string", "format": kind} for kind in ("date", "time", "date-time", "uuid", "ipv4"))


def _arrays() -> Iterator[Schema]:
    for items in (INTEGER, BOOLEAN, STRING, {"enum": ["x", "y"]}, {"type": "null"}, closed({"n": INTEGER})):
        yield listed(items, 3)
        yield listed(items, 2, 2)
    yield listed(listed(INTEGER, 2), 2)
    yield listed(listed(listed(BOOLEAN, 1, 1), 1, 1), 1, 1)
    yield {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2, "maxItems": 2}
    yield {"type": "array", "prefixItems": [BOOLEAN], "items": STRING, "minItems": 1, "maxItems": 3}
    yield {"type": "array", "maxItems": 0}


def _objects() -> Iterator[Schema]:
    yield closed({})
    yield closed({"name": STRING})
    yield closed({"name": STRING, "age": {"type": "integer", "minimum": 0, "maximum": 120}})
    yield closed({"name": STRING}, {"nick": STRING, "old": BOOLEAN})
    yield closed({}, {"a": INTEGER, "b": INTEGER, "c": INTEGER})
    yield closed({"with space": BOOLEAN, 'quo"te': BOOLEAN, "ünï": BOOLEAN, "$dollar": BOOLEAN})
    for depth in range(1, 9):
        schema: Schema = BOOLEAN
        for level in range(depth):
            schema = closed({f"level{level}": schema})
        yield schema
    for width in (2, 5, 10, 15):
        yield closed(
            {f"field{number}": (INTEGER, BOOLEAN, {"enum": ["a", "b"]})[number % 3] for number in range(width)}
        )
    yield {
        "type": "object",
        "additionalProperties": BOOLEAN,
        "maxProperties": 2,
        "properties": {"a": INTEGER},
        "required": ["a"],
    }
    yield {
        "type": "object",
        "patternProperties": {"^[a-c]$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    }
    yield closed(
        {"meta": {"type": "object", "properties": {"k": STRING}, "required": ["k"], "additionalProperties": False}}
    )


def _unions() -> Iterator[Schema]:
    cat = closed({"kind": {"const": "cat"}, "lives": {"type": "integer", "minimum": 1, "maximum": 9}})
    dog = closed({"kind": {"const": "dog"}, "good": BOOLEAN})
    bird = closed({"kind": {"const": "bird"}, "song": {"type": "string", "maxLength": 10}})
    for combine in ("anyOf", "oneOf"):
        yield {combine: [cat, dog]}
        yield {combine: [cat, dog, bird]}
        yield closed({"pet": {combine: [cat, dog, bird]}, "owner": STRING})
        yield listed({combine: [cat, dog]}, 2, 1)
        yield {combine: [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "null"}]}
        yield {combine: [{"type": "string", "maxLength": 4}, {"type": "boolean"}, listed(BOOLEAN, 2)]}
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]}
    yield {"allOf": [closed_open({"a": INTEGER}), closed_open({"b": BOOLEAN})]}
    yield closed({"value": {"anyOf": [closed({"x": INTEGER}), closed({"x": INTEGER, "y": INTEGER})]}})


def closed_open(properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _references() -> Iterator[Schema]:
    """Shared and recursive definitions."""
    tree = closed(
        {"value": {"type": "integer", "minimum": 0, "maximum": 9}, "children": listed({"$ref": "#/$defs/tree"}, 2)}
    )
    yield {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}
    chain = closed({"v": BOOLEAN, "next": {"anyOf": [{"$ref": "#/$defs/chain"}, {"type": "null"}]}})
    yield {"$defs": {"chain": chain}, "$ref": "#/$defs/chain"}
    yield closed({"head": {"$ref": "#/$defs/chain"}}) | {"$defs": {"chain": chain}}
    point = closed(
        {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"type": "integer", "maximum": 99, "minimum": 0}}
    )
    yield closed({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}) | {"$defs": {"point": point}}
    yield listed({"$ref": "#/definitions/point"}, 3, 1) | {"definitions": {"point": point}}
    expression: Schema = {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": 9},
            closed({"op": {"enum": ["+", "-"]}, "args": listed({"$ref": "#/$defs/expression"}, 2, 2)}),
        ]
    }
    yield {"$defs": {"expression": expression}, "$ref": "#/$defs/expression"}
    even = closed({"odd": {"anyOf": [{"$ref": "#/$defs/odd"}, {"type": "null"}]}})
    odd = closed({"even": {"anyOf": [{"$ref": "#/$defs/even"}, {"type": "null"}]}})
    yield {"$defs": {"even": even, "odd": odd}, "$ref": "#/$defs/even"}
    menu = closed({"title": {"type": "string", "maxLength": 10}, "items": listed({"$ref": "#"}, 2)})
    yield menu


def _tasks() -> Iterator[Schema]:
    """What applications ask for."""
    sentiment = {"enum": ["positive", "neutral", "negative"]}
    score = {"type": "number", "minimum": 0, "maximum": 1}
    yield closed({"sentiment": sentiment, "score": score})
    yield closed({"labels": listed(closed({"label": STRING, "score": score}), 3, 1)})
    yield closed(
        {"steps": listed(closed({"explanation": {"type": "string", "maxLength": 40}, "output": STRING}), 3, 1)}
    )
    yield closed(
        {
            "answer": {"type": "string", "maxLength": 80},
            "sources": listed({"type": "integer", "minimum": 1, "maximum": 20}, 4),
        }
    )
    date = {"type": "string", "format": "date"}
    yield closed({"title": STRING, "due": date, "priority": {"enum": ["low", "high"]}, "tags": listed(STRING, 3)})
    yield closed(
        {"street": STRING, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "city": STRING}, {"state": STRING}
    )
    yield closed(
        {
            "query": STRING,
            "filters": closed(
                {}, {"year": {"type": "integer", "minimum": 1900, "maximum": 2100}, "lang": {"enum": ["en", "de"]}}
            ),
        }
    )
    yield closed({"sql": {"type": "string", "maxLength": 60}, "safe": BOOLEAN})
    yield closed(
        {
            "rows": listed(
                {"type": "array", "prefixItems": [STRING, score], "items": False, "minItems": 2, "maxItems": 2}, 3, 1
            )
        }
    )
    yield closed({"function": {"enum": ["move", "stop"]}, "arguments": closed({}, {"x": INTEGER, "y": INTEGER})})
    line = closed(
        {
            "item": STRING,
            "count": {"type": "integer", "minimum": 1, "maximum": 99},
            "price": {"type": "number", "minimum": 0, "maximum": 999},
        }
    )
    yield closed(
        {
            "number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
            "date": date,
            "lines": listed(line, 3, 1),
            "paid": BOOLEAN,
        }
    )


_FIELDS: tuple[Schema, ...] = (
    {"type": "integer", "minimum": 0, "maximum": 50},
    BOOLEAN,
    {"enum": ["alpha", "beta", "gamma"]},
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[a-z]{2,6}$"},
    {"type": ["boolean", "null"]},
    listed({"type": "integer", "minimum": 0, "maximum": 9}, 3),
    {"anyOf": [{"type": "boolean"}, closed({"inner": BOOLEAN})]},
)


def _combinations(count: int) -> Iterator[Schema]:
    """Objects of three to five fields drawn at random; every third one inside a list."""
    for number in range(count):
        rng = random.Random(number)
        fields = {f"f{number}_{place}": rng.choice(_FIELDS) for place in range(3 + number % 3)}
        split = 2 + number % 2
        names = list(fields)
        schema = closed({name: fields[name] for name in names[:split]}, {name: fields[name] for name in names[split:]})
        yield listed(schema, 2, 1) if number % 3 == 2 else schema


def all_schemas() -> list[Schema]:
    """Exactly 200."""
    written = [
        schema
        for group in (_scalars, _numbers, _enums, _patterns, _arrays, _objects, _unions, _references, _tasks)
        for schema in group()
    ]
    return written + list(_combinations(200 - len(written)))
