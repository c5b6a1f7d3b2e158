"""Models that come and go while the engine serves: load, drain, unload, quota. Runs on the loop thread.

What takes long (files, weights) happens on a thread of its own and at a lower priority, one model at a time. Pool,
executor and first steps are the loop's own work: the other models pause for that moment.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from configs.schema import ModelSection
from runners.engine_io import EngineIO
from runners.engine_startup import LoadedModel, ModelLoader
from runners.errors import StartupError
from runners.messages import AdminQuery, AdminReply, LoadModel, OutputError, SetQuota, UnloadModel
from runners.model_names import names_of
from runners.model_preparation import PreparedModel
from runners.served_model import ServedModel

logger = logging.getLogger("runners.engine_core")

_LOADING_NICENESS = 10


class Loop(Protocol):
    """What is asked of the engine's loop."""

    models: list[ServedModel]

    def add_model(self, loaded: LoadedModel) -> None: ...
    def remove_model(self, model: ServedModel) -> None: ...
    def announce_models(self) -> None: ...
    def update_stats(self) -> None: ...


class EngineAdmin:
    """Carries out admin queries of the front end, each answered once it is done."""

    def __init__(self, io: EngineIO, loader: ModelLoader | None, loop: Loop) -> None:
        self._io = io
        self._loader = loader
        self._loop = loop
        self._to_load: deque[LoadModel] = deque()
        self._is_loading = False

    def handle(self, query: AdminQuery) -> None:
        match query:
            case LoadModel():
                self._to_load.append(query)
                self._load_next()
            case UnloadModel():
                self._unload(query)
            case SetQuota():
                self._set_quota(query)

    def _find(self, query: UnloadModel | SetQuota) -> ServedModel | None:
        for model in self._loop.models:
            if query.model in model.info.served_names and model.draining_until is None:
                return model
        self._refuse(query.query_id, f"The model {query.model!r} does not exist.", "model_not_found")
        return None

    def _refuse(self, query_id: str, message: str, code: str) -> None:
        self._io.answer(AdminReply(query_id, OutputError(message, code)))

    def _done(self, query_id: str) -> None:
        self._loop.update_stats()
        self._io.answer(AdminReply(query_id, models=self._io.vitals.model_stats))

    def _set_quota(self, query: SetQuota) -> None:
        model = self._find(query)
        if model is None:
            return
        total = model.scheduler.cache.pool.num_blocks
        try:
            model.scheduler.set_quota_blocks(total if query.quota_blocks is None else query.quota_blocks)
        except ValueError as error:
            self._refuse(query.query_id, f"quota_blocks: {error}", "invalid_request")
            return
        logger.info("%s may hold %s of %d KV blocks", model.name, query.quota_blocks or "all", total)
        self._done(query.query_id)

    # --- load -----------------------------------------------------------------------------------------------------

    def _load_next(self) -> None:
        if self._is_loading or not self._to_load:
            return
        query = self._to_load.popleft()
        section = ModelSection.model_validate_json(query.section)
        taken = {name for model in self._loop.models for name in model.info.served_names}
        if self._loader is None or taken & set(names_of(section)):
            self._refuse(query.query_id, f"A model {names_of(section)[0]!r} is loaded already.", "model_exists")
            self._load_next()
            return
        self._is_loading = True
        threading.Thread(target=self._prepare, args=(query, section, self._loader), daemon=True).start()

    def _prepare(self, query: LoadModel, section: ModelSection, loader: ModelLoader) -> None:
        """The loading thread."""
        with contextlib.suppress(AttributeError, OSError):  # Linux: of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOADING_NICENESS)
        name = names_of(section)[0]

        def report(phase: str, detail: str, fraction: float | None) -> None:
            share = "" if fraction is None else f" ({fraction:.0%})"
            logger.debug("%s: %s %s%s", name, phase, detail, share)

        step: Callable[[], None]
        try:
            prepared = loader.prepare(section, report)
            step = lambda: self._finish(query, prepared, loader)  # noqa: E731
        except Exception as error:
            reason = _reason(error, name)
            step = lambda: self._loading_failed(query, reason)  # noqa: E731
        self._io.inbox.put(step)

    def _finish(self, query: LoadModel, prepared: PreparedModel, loader: ModelLoader) -> None:
        self._io.vitals.step_limit_s = None  # steps under way may wait longer than any that was seen
        try:
            loaded = loader.finish(prepared)
        except Exception as error:
            self._loading_failed(query, _reason(error, prepared.info.served_names[0]))
            return
        self._is_loading = False
        self._loop.add_model(loaded)
        self._loop.announce_models()
        gc.collect()
        gc.freeze()
        self._done(query.query_id)
        self._load_next()

    def _loading_failed(self, query: LoadModel, reason: str) -> None:
        logger.error("a model could not be loaded: %s", reason)
        self._is_loading = False
        gc.collect()  # what was loaded of it
        self._refuse(query.query_id, reason, "model_not_loaded")
        self._load_next()

    # --- unload ---------------------------------------------------------------------------------------------------

    def _unload(self, query: UnloadModel) -> None:
        model = self._find(query)
        if model is None:
            return
        model.draining_until = query.deadline
        model.on_drained = lambda: self._done(query.query_id)
        self._loop.announce_models()
        logger.info("%s is unloaded once its %d requests have ended", model.name, len(model.scheduler.live.requests))

    def drain(self, now: float) -> None:
        """Go on with the models on their way out: end what is late, and free those that have nothing left. Their last
        outputs have left."""
        freed = []
        leaving = [model for model in self._loop.models if model.draining_until is not None]
        while leaving:
            model = leaving.pop(0)
            assert model.draining_until is not None
            if now >= model.draining_until:
                error = OutputError("The model was unloaded while the request was running.", "engine_unavailable")
                if num_ended := model.end_requests(error, now):
                    logger.warning("%s: %d requests end unfinished, it is unloaded", model.name, num_ended)
            if not model.scheduler.has_work and not model.scheduler.live.outputs:
                freed.append((model.name, model.on_drained))
                self._free(model)
            del model  # or its weights would outlive the collection below
        if freed:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            _give_memory_back()
        for name, on_drained in freed:
            logger.info("%s is unloaded", name)
            on_drained()

    def _free(self, model: ServedModel) -> None:
        self._loop.remove_model(model)
        num_lost = self._loader.unload(model.loaded) if self._loader is not None else model.scheduler.cache.close()
        if num_lost:
            logger.error("%s: %d KV blocks were still held when it was unloaded", model.name, num_lost)

    @property
    def next_deadline(self) -> float | None:
        """When `drain` must be called again at the latest."""
        times = [model.draining_until for model in self._loop.models if model.draining_until is not None]
        return min(times, default=None)


def _reason(error: Exception, name: str) -> str:
    if not isinstance(error, StartupError):
        logger.error("loading %s failed in a way that is not foreseen", name, exc_info=error)
    lines = str(error).strip().splitlines() or ["no reason given"]
    return lines[0] if isinstance(error, StartupError) else f"{type(error).__name__}: {lines[0]}"


def _give_memory_back() -> None:
    """To the device's driver and to the system: allocators keep what is freed for themselves."""
    import ctypes
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
