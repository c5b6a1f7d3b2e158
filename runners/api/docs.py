"""`/openapi.json`, and `/docs`, which shows it without any script from elsewhere."""

from __future__ import annotations

import html
from functools import cached_property
from typing import Any

import msgspec

from runners.api.endpoint import Endpoint, Exchange
from runners.api.openapi import openapi_document

_STYLE = (
    "body{font:15px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em}code{background:#8882;padding:0 .3em}"
    "td{vertical-align:top;padding:.1em 1em .1em 0}summary{cursor:pointer;margin:.5em 0}"
)


class OpenApi(Endpoint):
    """The document as JSON."""

    methods = ("GET", "HEAD")
    is_public = True

    async def handle(self, exchange: Exchange) -> None:
        await exchange.reply(self._body)

    @cached_property
    def _body(self) -> bytes:
        return msgspec.json.encode(openapi_document(self.settings.version))


class Docs(Endpoint):
    """The document as a page: every route, and the fields of its request."""

    methods = ("GET", "HEAD")
    is_public = True

    async def handle(self, exchange: Exchange) -> None:
        await exchange.reply(self._body, content_type=b"text/html; charset=utf-8")

    @cached_property
    def _body(self) -> bytes:
        return _page(openapi_document(self.settings.version)).encode()


def _page(document: dict[str, Any]) -> str:
    title = html.escape(document["info"]["title"])
    routes = [
        _route(document, path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title} {html.escape(document['info']['version'])}</h1>"
        f"<p>{html.escape(document['info']['description'])} As a document: <a href=openapi.json>openapi.json</a>.</p>"
        f"{''.join(routes)}</html>"
    )


def _route(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody")
    rows = ""
    if body is not None:
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        schema = document["components"]["schemas"][name]
        required = schema.get("required", ())
        rows = "".join(
            f"<tr><td><code>{html.escape(field)}</code>{' (required)' if field in required else ''}"
            f"<td>{html.escape(_described(property_schema))}"
            for field, property_schema in schema["properties"].items()
        )
    return f"<details><summary><b>{method.upper()}</b> {html.escape(path)}</summary><table>{rows}</table></details>"


def _described(schema: dict[str, Any]) -> str:
    """A property's type and limits in a few words."""
    if "anyOf" in schema:
        return " or ".join(_described(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        kind = f"list of {_described(schema.get('items', {}))}"
    limits = ", ".join(f"{name} {value}" for name, value in schema.items() if name not in ("type", "items"))
    return f"{kind} ({limits})" if limits and kind != "object" else kind
