"""Keeps one engine process running beneath an `EngineClient`: start, watch, kill when hung, restart, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from configs.loader import ResolvedProfile
from configs.schema import ModelSection
from runners.engine_client import EngineClient
from runners.engine_process import EngineProcess
from runners.engine_state import EnginePhase
from runners.errors import EngineUnavailableError, StartupError
from runners.ipc import SOCKET_NAME, make_socket_folder
from runners.messages import EngineOutput, ModelInfo, Progress, Ready, Shutdown, StartupFailed

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_LATE_TICK_S = 1.0
# Loading may hold the interpreter lock for long (importing torch from a cold disk): be patient until the first Ready.
_LOADING_BEAT_LIMIT_S = 120.0
_STOP_TIMEOUT_S = 5.0
_STOP_LINGER_MS = 200


class EngineSupervisor:
    """`on_ready` is awaited with the models of an engine that has loaded, before requests are taken; again when they
    change. `models` are what an engine that starts now is to load, by default the profile's.

    Start-up that fails by itself (a malformed file, a wrong setting) is final until the first success: trying again
    would fail again; `on_failed` is called. Everything later, and every crash, is answered by a restart with back-off.
    """

    def __init__(
        self,
        resolved: ResolvedProfile,
        client: EngineClient,
        on_ready: Callable[[list[ModelInfo]], Awaitable[None]],
        models: Callable[[], Sequence[ModelSection]] | None = None,
    ) -> None:
        self._resolved = resolved
        self._watchdog = resolved.profile.watchdog
        self._client = client
        self._on_ready = on_ready
        self._models = models if models is not None else lambda: resolved.profile.models
        self._ready_lock = asyncio.Lock()
        self.on_failed: Callable[[], None] = lambda: None
        self._process: EngineProcess | None = None
        self._socket_folder: Path | None = None
        self._was_ever_ready = False
        self._ready_since: float | None = None
        self._run_task: asyncio.Task[None] | None = None
        self._ready_task: asyncio.Task[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the engine and the task that watches it. On the main thread, on the running asyncio loop."""
        self._client.on_announcement = self._on_announcement
        self._spawn()
        self._run_task = asyncio.get_running_loop().create_task(self._run(), name="engine-supervisor")

    @property
    def engine_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    # --- starting and watching ------------------------------------------------------------------------------------

    def _spawn(self) -> EngineProcess:
        self._remove_socket_folder()
        self._socket_folder = make_socket_folder()  # a new one, so that no message of a dead engine is left in it
        socket_path = self._socket_folder / SOCKET_NAME
        self._ready_since = None
        self._process = EngineProcess(self._resolved, socket_path, self._models())
        self._client.attach(f"ipc://{socket_path}")
        logger.info("the engine is process %d", self.engine_pid)
        return self._process

    async def _run(self) -> None:
        backoff_s = self._watchdog.restart_backoff_s
        while True:
            assert self._process is not None
            status = await self._watch(self._process)
            self._client.detach()
            self._client.fail_streams(EngineUnavailableError("The engine stopped while the request was running."))
            if not self._may_restart():
                return
            if self._ready_since is not None and time.monotonic() - self._ready_since > backoff_s:
                backoff_s = self._watchdog.restart_backoff_s
            logger.error("the engine %s, it is started again in %.1f s", _describe_exit(status), backoff_s)
            self._client.set_state(EnginePhase.RESTARTING, f"the engine {_describe_exit(status)}")
            await asyncio.sleep(backoff_s)
            if not self._may_restart():
                return
            backoff_s = min(2 * backoff_s, self._watchdog.restart_backoff_max_s)
            self._client.restarts += 1
            self._spawn()

    def _remove_socket_folder(self) -> None:
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder = None

    def _may_restart(self) -> bool:
        return not self._client.is_draining and self._client.state.phase is not EnginePhase.FAILED

    async def _watch(self, process: EngineProcess) -> int:
        """Until the process has ended; one that hangs is made to end. Returns its exit status."""
        exited = asyncio.get_running_loop().create_task(process.wait())
        try:
            last_tick = time.monotonic()
            while True:
                done, _ = await asyncio.wait({exited}, timeout=_TICK_S)
                if done:
                    return exited.result()
                now = time.monotonic()
                if now - last_tick > _LATE_TICK_S:
                    self._forgive(now)
                last_tick = now
                self._check(process, now)
        finally:
            exited.cancel()

    def _forgive(self, now: float) -> None:
        """This process itself was stopped or busy: the engine's signs of life may wait unread in the socket."""
        if self._client.vitals is not None:
            self._client.vitals.last_beat = self._client.vitals.loop_stamp = now

    def _check(self, process: EngineProcess, now: float) -> None:
        vitals = self._client.vitals
        limit_s = _LOADING_BEAT_LIMIT_S if self._ready_since is None else self._watchdog.beat_s
        fault = vitals.fault(now, limit_s) if vitals is not None else None
        if fault is None:
            return
        logger.error("the engine hangs (%s): it is killed", fault)
        self._client.set_state(EnginePhase.RESTARTING, f"the engine hung: {fault}")
        self._client.detach()
        self._client.fail_streams(EngineUnavailableError(f"The engine hung while the request was running: {fault}."))
        process.kill()

    # --- what the engine announces --------------------------------------------------------------------------------

    def _on_announcement(self, message: EngineOutput) -> None:
        self._remove_socket_folder()  # both ends are connected: a crash of this process leaves no file behind
        match message:
            case Progress():
                self._client.set_state(
                    EnginePhase.LOADING, f"{message.phase} {message.detail}".rstrip(), message.fraction
                )
            case Ready():
                self._ready_task = asyncio.get_running_loop().create_task(self._become_ready(message.models))
            case StartupFailed():
                self._fail(message.reason)

    async def _become_ready(self, models: list[ModelInfo]) -> None:
        process = self._process
        async with self._ready_lock:  # the models may change again before the tokenizer of a new one is there
            try:
                await self._on_ready(models)
            except StartupError as error:
                self._fail(str(error))
                return
            if process is not self._process or self._client.vitals is None:
                return  # it died meanwhile; its successor announces itself
            self._was_ever_ready = True
            if self._ready_since is None:
                self._ready_since = time.monotonic()
            self._client.set_models(models)
            self._client.set_state(EnginePhase.READY, "" if models else "no model is loaded")

    def _fail(self, reason: str) -> None:
        logger.error("start-up failed: %s", reason)
        if not self._was_ever_ready:
            self._client.set_state(EnginePhase.FAILED, reason)
            self.on_failed()
        if self._process is not None:
            self._process.kill()

    # --- the end --------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Readiness red, no new requests; wait for open streams up to the deadline, then end them with an error."""
        if self._drain_task is None:
            self._client.begin_drain()
            self._drain_task = asyncio.get_running_loop().create_task(self._drain())
        await asyncio.shield(self._drain_task)

    async def _drain(self) -> None:
        deadline_s = self._resolved.profile.http.drain_deadline_s
        if self._client.num_open_streams:
            logger.info("draining: %d requests, at most %.0f s", self._client.num_open_streams, deadline_s)
        if not await self._client.wait_until_idle(deadline_s):
            logger.warning("%d requests end unfinished: the drain's deadline has passed", self._client.num_open_streams)
            self._client.fail_streams(EngineUnavailableError("The server is shutting down."))

    async def stop(self) -> None:
        """Drain, then end the engine process: by message, and by force when it does not follow."""
        await self.drain()
        for task in (self._ready_task, self._run_task):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._process is not None:
            await self._stop_process(self._process)
            self._process = None
        self._remove_socket_folder()

    async def _stop_process(self, process: EngineProcess) -> None:
        if process.exit_status is None and self._ready_since is not None:
            self._client.send(Shutdown())
            self._client.detach(_STOP_LINGER_MS)
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                logger.warning("the engine did not stop within %.0f s, it is killed", _STOP_TIMEOUT_S)
        self._client.detach()
        if process.exit_status is None:
            process.kill()
            await process.wait()
        process.close()


def _describe_exit(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
