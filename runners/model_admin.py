"""Which models are served, and changing that while the server runs: the HTTP process's half (`/admin/models`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from configs.schema import ModelSection
from runners.engine_client import EngineClient
from runners.errors import (
    ConflictError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelNotFoundError,
    StartupError,
    WavelaneError,
)
from runners.messages import LoadModel, ModelInfo, SetQuota, UnloadModel
from runners.model_names import names_of

ResultT = TypeVar("ResultT")

LOADING, READY, UNLOADING = "loading", "ready", "unloading"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model and where it stands: loading, ready or unloading. `info` is there once it has been loaded; `quota_blocks`
    is the one that holds now, None: none of its own."""

    section: ModelSection
    status: str
    info: ModelInfo | None
    quota_blocks: int | None

    @property
    def name(self) -> str:
        return names_of(self.section)[0]


class ModelAdmin:
    """`sections` are the models that an engine which starts now is to load: a restart brings back what was there."""

    def __init__(self, client: EngineClient, sections: Sequence[ModelSection], drain_deadline_s: float) -> None:
        self.sections = list(sections)
        self._client = client
        self._drain_deadline_s = drain_deadline_s
        self._quotas: dict[str, int | None] = {}  # those set while it runs, by a model's first name
        self._changes: set[asyncio.Future[Any]] = set()
        self._loading: list[ModelSection] = []
        self._unloading: list[tuple[ModelSection, ModelInfo | None]] = []

    def section_of(self, info: ModelInfo) -> ModelSection:
        """The settings of a model that the engine serves."""
        known = [*self.sections, *self._loading, *(section for section, _ in self._unloading)]
        return next(section for section in known if names_of(section) == info.served_names)

    def status(self) -> list[ModelStatus]:
        """Every model that is served, comes or goes."""
        infos = {info.served_names[0]: info for info in self._client.models}
        found = []
        for section in self.sections:
            info = infos.get(names_of(section)[0])
            found.append(self._status(section, LOADING if info is None else READY, info))
        found += [self._status(section, LOADING, None) for section in self._loading]
        return found + [self._status(section, UNLOADING, info) for section, info in self._unloading]

    def _status(self, section: ModelSection, status: str, info: ModelInfo | None) -> ModelStatus:
        return ModelStatus(section, status, info, self._quotas.get(names_of(section)[0], section.quota_blocks))

    async def load(self, section: ModelSection) -> ModelInfo:
        """Load one more model; returns once requests may use it.

        ConflictError when one of its names is taken, InvalidRequestError with the reason when it cannot be loaded.
        """
        taken = {name for status in self.status() for name in names_of(status.section)}
        if names := taken & set(names_of(section)):
            raise ConflictError(f"A model {min(names)!r} is there already.", param="served_names", code="model_exists")
        if len(set(names_of(section))) < len(names_of(section)):
            raise ConflictError("served_names has a name twice.", param="served_names")
        self._require_engine()
        self._loading.append(section)
        return await self._to_its_end(self._load(section))

    async def _load(self, section: ModelSection) -> ModelInfo:
        try:
            await self._client.admin.ask(lambda query_id: LoadModel(query_id, section.model_dump_json().encode()))
            self.sections.append(section)
        finally:
            self._loading.remove(section)
        try:
            return await self._served(names_of(section)[0])
        except StartupError as error:  # its tokenizer or template
            await self.unload(names_of(section)[0], 0.0)
            raise InvalidRequestError(str(error), code="model_not_loaded") from error

    async def unload(self, name: str, deadline_s: float | None = None) -> None:
        """No new requests from now on; returns once those in flight have ended, at the latest with an error after
        `deadline_s`, and everything is freed. ModelNotFoundError."""
        status = self.find(name)
        self._require_engine()
        if status.section not in self.sections:
            raise ConflictError(f"The model {name!r} is being loaded.")
        deadline = time.monotonic() + (self._drain_deadline_s if deadline_s is None else deadline_s)
        leaving = (status.section, status.info)
        self.sections.remove(status.section)
        self._unloading.append(leaving)
        self._client.stop_serving(status.name)
        await self._to_its_end(self._unload(status.name, deadline, leaving))

    async def _unload(self, name: str, deadline: float, leaving: tuple[ModelSection, ModelInfo | None]) -> None:
        try:
            await self._client.admin.ask(lambda query_id: UnloadModel(query_id, name, deadline))
        except EngineUnavailableError:
            if self._client.is_draining:
                raise
            # The engine died, and comes back without the model: it is gone all the same.
        finally:
            self._unloading.remove(leaving)
            self._client.left(name)
            self._quotas.pop(name, None)

    async def set_quota(self, name: str, quota_blocks: int | None) -> None:
        """Bound the KV blocks of a model, now and after a restart of the engine. ModelNotFoundError, ClientError."""
        status = self.find(name)
        self._require_engine()
        await self._client.admin.ask(lambda query_id: SetQuota(query_id, status.name, quota_blocks))
        self._quotas[status.name] = quota_blocks

    async def restore_quotas(self, models: Sequence[ModelInfo]) -> None:
        """An engine that has started knows only the quotas of the profile: tell it those set since."""
        for info in models:
            name = info.served_names[0]
            if name in self._quotas:
                with contextlib.suppress(WavelaneError):  # it is gone again: its successor is told
                    await self._client.admin.ask(partial(SetQuota, model=name, quota_blocks=self._quotas[name]))

    async def _to_its_end(self, change: Coroutine[None, None, ResultT]) -> ResultT:
        """A change that has begun is carried through, also when whoever asked for it has gone."""
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    def find(self, name: str) -> ModelStatus:
        """A model by any of its names. ModelNotFoundError when there is none, or it is being unloaded."""
        for status in self.status():
            if name in names_of(status.section) and status.status != UNLOADING:
                return status
        raise ModelNotFoundError(f"The model {name!r} does not exist.", param="model")

    def _require_engine(self) -> None:
        if not self._client.is_answering:
            raise EngineUnavailableError("The engine does not answer.")

    async def _served(self, name: str) -> ModelInfo:
        """The facts of a model that the engine has loaded, once its tokenizer is there too."""
        while True:
            for info in self._client.models:
                if info.served_names[0] == name:
                    return info
            if not self._client.is_answering:
                raise EngineUnavailableError("The engine stopped before the model could be served.")
            if (reason := self._client.refused.pop(name, None)) is not None:
                raise StartupError(reason)
            await asyncio.sleep(0.02)
