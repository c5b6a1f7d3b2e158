"""`/admin/models`: what is served, and changing it while the server runs. All of it needs an admin key."""

from __future__ import annotations

import math
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec
from pydantic import ValidationError

from configs.schema import ModelSection
from runners.api.endpoint import Endpoint, Exchange
from runners.api.interfaces import Admin, AdminStatus
from runners.api.protocol import RequestParser
from runners.errors import EngineUnavailableError, InvalidRequestError
from runners.messages import EngineStats


class QuotaChange(msgspec.Struct, kw_only=True):
    quota_blocks: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | msgspec.UnsetType | None = msgspec.UNSET


class _AdminEndpoint(Endpoint):
    needs_admin = True

    @property
    def admin(self) -> Admin:
        """EngineUnavailableError where the app serves without the server around it."""
        admin: Admin | None = self._state.admin
        if admin is None:
            raise EngineUnavailableError("There is no engine to change.")
        return admin

    def describe(self, status: AdminStatus) -> dict[str, Any]:
        """One model: its settings, where it stands, what it counts."""
        stats = self.engine.model_stats.get(status.name, EngineStats())
        info = status.info
        return {
            "id": status.name,
            "object": "model",
            "status": status.status,
            "served_names": [status.name] if info is None else info.served_names,
            "source": status.section.source,
            "quota_blocks": status.quota_blocks,
            "max_model_len": None if info is None else info.max_context,
            "weight_bytes": None if info is None else info.weight_bytes,
            "kv_bytes": None if info is None else info.kv_bytes,
            "pool_blocks": None if info is None else info.total_blocks,
            "stats": msgspec.structs.asdict(stats),
        }


class AdminModels(_AdminEndpoint):
    """GET: every model that is served, comes or goes. POST: load one, given its `models` entry; answered once requests
    may use it, 400 with the reason when it cannot be loaded, 409 when its name is taken."""

    methods = ("GET", "HEAD", "POST")

    async def handle(self, exchange: Exchange) -> None:
        if exchange.scope["method"] == "POST":
            section = _section_of(await exchange.body(self.settings.max_body_bytes))
            info = await self.admin.load(section)
            status = next(status for status in self.admin.status() if status.name == info.served_names[0])
            await exchange.reply(msgspec.json.encode(self.describe(status)), status=201)
            return
        models = [self.describe(status) for status in self.admin.status()]
        await exchange.reply(msgspec.json.encode({"object": "list", "data": models}))


class AdminModel(_AdminEndpoint):
    """GET: one model. PATCH: its `quota_blocks`, null for all of its pool. DELETE: unload it; requests in flight may
    end until `?deadline_s=` (default: `http.drain_deadline_s`), answered once all is freed."""

    methods = ("GET", "HEAD", "PATCH", "DELETE")

    _parser = RequestParser(QuotaChange)

    async def handle(self, exchange: Exchange) -> None:
        name: str = exchange.scope["path_params"]["model_id"]
        match exchange.scope["method"]:
            case "DELETE":
                await self.admin.unload(name, _deadline_of(exchange))
                await exchange.reply(msgspec.json.encode({"id": name, "object": "model.unloaded", "unloaded": True}))
            case "PATCH":
                change = await self.parse_body(exchange, self._parser)
                if isinstance(change.quota_blocks, msgspec.UnsetType):
                    raise InvalidRequestError("Send 'quota_blocks', a number or null.", param="quota_blocks")
                await self.admin.set_quota(name, change.quota_blocks)
                await exchange.reply(msgspec.json.encode(self.describe(self.admin.find(name))))
            case _:
                await exchange.reply(msgspec.json.encode(self.describe(self.admin.find(name))))


def _section_of(body: bytes) -> ModelSection:
    try:
        section = ModelSection.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        field = str(fault["loc"][0]) if fault["loc"] else None
        where = f"'{field}': " if field is not None else ""
        raise InvalidRequestError(f"{where}{fault['msg']}", param=field) from None
    if "source" not in section.model_fields_set:
        raise InvalidRequestError("Send 'source', where the weights are.", param="source")
    return section


def _deadline_of(exchange: Exchange) -> float | None:
    values = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1")).get("deadline_s")
    if values is None:
        return None
    try:
        deadline_s = float(values[0])
    except ValueError:
        deadline_s = math.nan
    if not 0 <= deadline_s < math.inf:
        raise InvalidRequestError("'deadline_s' must be a number of seconds.", param="deadline_s")
    return deadline_s
