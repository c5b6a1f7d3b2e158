"""The parts of the HTTP process, put together: engine client and supervisor, ASGI app, signals, metrics."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path

from starlette.applications import Starlette

from configs.api_keys import load_api_keys
from configs.loader import ResolvedProfile
from runners.api.app import create_app
from runners.api.native import NativeCompletions
from runners.api.settings import ApiSettings
from runners.drain_signals import DrainSignals
from runners.engine_client import EngineClient
from runners.engine_state import EnginePhase
from runners.engine_supervisor import EngineSupervisor
from runners.errors import StartupError
from runners.http_metrics import HttpMetrics
from runners.messages import ModelInfo
from runners.metrics import render
from runners.model_admin import ModelAdmin
from runners.process_guard import die_with_parent
from runners.service_supervisor import end_supervisor
from runners.slow_clients import drop_clients_that_do_not_read
from runners.start_report import service_url, start_report
from runners.telemetry.feed import Feed
from runners.text.assets import TextAssets, load_text
from runners.text.tool_formats import ToolFormat
from runners.tracing import bentoml_tracer

logger = logging.getLogger(__name__)


class Server:
    """Everything beside BentoML. Constructing it starts nothing: `app` can be mounted at import time."""

    def __init__(self, resolved: ResolvedProfile, service_name: str) -> None:
        profile = resolved.profile
        self._resolved = resolved
        self._service_name = service_name
        self._settings = ApiSettings.from_profile(profile, load_api_keys(profile.auth))
        self._text: dict[str, TextAssets] = {}
        self._text_of: dict[str, tuple[ModelInfo, TextAssets]] = {}  # by a model's first name
        self.client = EngineClient(
            slots=profile.engine.slots,
            max_queued_requests=profile.admission.max_queued_requests,
            max_queued_tokens=profile.admission.max_queued_tokens,
            beat_limit_s=profile.watchdog.beat_s,
        )
        self.admin = ModelAdmin(self.client, profile.models, profile.http.drain_deadline_s)
        self.supervisor = EngineSupervisor(resolved, self.client, self._on_ready, lambda: self.admin.sections)
        self.http_metrics = HttpMetrics()
        self.app: Starlette = create_app(self._settings, self.client, self._text)
        self.app.state.metrics_text = self.metrics_text
        self.app.state.admin = self.admin
        self._feed_task: asyncio.Task[None] | None = None
        self.completions = NativeCompletions(self.app.state)

    def start(self) -> None:
        """Start the engine in the background. On the main thread, on the running asyncio loop; does not block."""
        drop_clients_that_do_not_read(self._resolved.profile.http.send_timeout_s)
        logging.getLogger("runners").setLevel(logging.INFO)  # BentoML leaves other loggers at WARNING
        self.client.metrics.tracer = self.app.state.tracer = bentoml_tracer()
        die_with_parent()
        self.supervisor.on_failed = end_supervisor
        if self._settings.page:
            self.start_feed()
        self.supervisor.start()
        DrainSignals(self.supervisor.drain).install()

    def start_feed(self) -> None:
        """Sample the page's curves from now on, and let readers come."""
        feed = self.app.state.feed = Feed(self.client, self._resolved, self._settings.version)
        self._feed_task = asyncio.get_running_loop().create_task(feed.run(), name="page-feed")

    async def stop(self) -> None:
        """Drain, then stop the engine."""
        await self.supervisor.stop()
        if self._feed_task is not None:
            self._feed_task.cancel()

    @property
    def is_ready(self) -> bool:
        return self.client.is_ready

    @property
    def is_alive(self) -> bool:
        """False when start-up has failed for good; the service is about to end."""
        return self.client.state.phase is not EnginePhase.FAILED

    def metrics_text(self) -> str:
        return render(self.client, self.http_metrics, self.supervisor.engine_pid)

    async def _on_ready(self, models: list[ModelInfo]) -> None:
        """Tokenizer and template come from the files the engine has just loaded."""
        names = {info.served_names[0] for info in models}
        for name in self._text_of.keys() - names:
            info, _ = self._text_of.pop(name)
            for alias in info.served_names:
                self._text.pop(alias, None)
        for info in models:
            await self._add_text(info)
        await self.admin.restore_quotas(models)

    async def _add_text(self, info: ModelInfo) -> None:
        name = info.served_names[0]
        known = self._text_of.get(name)
        if known is not None and known[0].path == info.path:
            return
        try:
            assets = await asyncio.to_thread(self._load_text, info)
        except StartupError as error:
            if not self.client.is_answering:
                raise
            self.client.refused[name] = str(error)  # a model that was added: the others go on
            return
        self._text.update(dict.fromkeys(info.served_names, assets))
        self._text_of[name] = info, assets
        # Vocabularies are hundreds of thousands of objects that never die: collections need not walk them.
        gc.collect()
        gc.freeze()
        url = service_url(self._service_name)
        logger.info("%s", start_report(info, self._resolved.name, url, self._settings.version))

    def _load_text(self, info: ModelInfo) -> TextAssets:
        model = self.admin.section_of(info)
        tokenizer = Path(model.tokenizer) if model.tokenizer is not None else None
        tool_format = None if model.tool_parser == "auto" else ToolFormat(model.tool_parser)
        try:
            return load_text(Path(info.path), tokenizer, model.chat_template, tool_format)
        except StartupError:
            raise
        except Exception as error:  # whatever it is: without an answer the model would be loading for ever
            logger.exception("the tokenizer or template of %s could not be read", info.path)
            raise StartupError(f"{info.path}: tokenizer or chat template: {type(error).__name__}: {error}") from error
