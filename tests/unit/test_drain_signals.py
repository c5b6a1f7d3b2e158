"""Signals begin a drain; the handler that was there before comes after it, or at once for whoever is in a hurry."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.drain_signals import SIGNALS, DrainSignals
from tests.support.eventually import eventually


class Recorder:
    """The server's own handlers, and a drain that ends when told."""

    def __init__(self) -> None:
        self.drained = asyncio.Event()
        self.num_drains = 0
        self.handed_on: list[int] = []

    async def drain(self) -> None:
        self.num_drains += 1
        await self.drained.wait()

    def handle(self, number: int, frame: object) -> None:
        self.handed_on.append(number)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    before = {number: signal.signal(number, recorder.handle) for number in SIGNALS}
    yield recorder
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
async def test_the_server_reacts_after_the_drain(recorder: Recorder, number: signal.Signals) -> None:
    DrainSignals(recorder.drain).install()
    os.kill(os.getpid(), number)
    await eventually(lambda: recorder.num_drains == 1)
    assert recorder.handed_on == []
    recorder.drained.set()
    await eventually(lambda: recorder.handed_on == [number])


async def test_ctrl_c_that_arrives_twice_is_one_drain(recorder: Recorder) -> None:
    DrainSignals(recorder.drain).install()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually(lambda: recorder.num_drains == 1)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    assert (recorder.num_drains, recorder.handed_on) == (1, [])
    recorder.drained.set()
    await eventually(lambda: recorder.handed_on == [signal.SIGINT])


async def test_a_second_ctrl_c_does_not_wait(recorder: Recorder) -> None:
    DrainSignals(recorder.drain).install()
    os.kill(os.getpid(), signal.SIGINT)
    await eventually(lambda: recorder.num_drains == 1)
    os.kill(os.getpid(), signal.SIGINT)
    await eventually(lambda: recorder.handed_on == [signal.SIGINT])
    recorder.drained.set()
    await eventually(lambda: len(recorder.handed_on) == 2)


async def test_a_drain_that_fails_does_not_keep_the_server_alive(recorder: Recorder) -> None:
    async def fail() -> None:
        raise RuntimeError("drain")

    drain_signals = DrainSignals(fail)
    drain_signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually(lambda: recorder.handed_on == [signal.SIGTERM])
    assert drain_signals._task is not None
    with pytest.raises(RuntimeError, match="drain"):
        await drain_signals._task


def test_without_a_handler_before_the_signal_ends_the_process() -> None:
    script = """
import asyncio, os, signal
from runners.drain_signals import DrainSignals

async def drain():
    print("drained", flush=True)

async def main():
    DrainSignals(drain).install()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(30)

asyncio.run(main())
"""
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=30)
    assert result.stdout == "drained\n"
    assert result.returncode == -signal.SIGTERM
