"""The client against an engine's I/O thread in this process: the test plays scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from runners.engine_client import EngineClient
from runners.engine_io import EngineIO
from runners.engine_state import EnginePhase, Vitals
from runners.errors import (
    ConflictError,
    ContextLengthError,
    EngineUnavailableError,
    RateLimitError,
    RequestFailedError,
    RequestTimeoutError,
)
from runners.ipc import encode
from runners.messages import (
    AbortRequests,
    AddRequest,
    EngineInput,
    EngineStats,
    FinishRequest,
    OutputError,
    RequestOutput,
    StepOutputs,
    TokenLogprobs,
    pack_ids,
    unpack_ids,
)
from runners.request import FinishReason, SamplingParams
from runners.request_stream import OutputChunk, RequestStream
from tests.support.eventually import eventually

PARAMS = SamplingParams(max_tokens=8)


class Engine:
    """The engine's side: its I/O thread, and an inbox one can await."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder / 'e.sock'}"
        self.io = EngineIO(folder / "e.sock", beat_interval_s=0.05)
        self.io.start()

    async def receive(self) -> EngineInput:
        return await asyncio.to_thread(self.io.inbox.get, True, 10)

    def publish(self, request_id: str, *ids: int, finish: FinishReason | None = None) -> None:
        self.io.publish([RequestOutput(request_id, pack_ids(ids), finish)])


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.io.stop()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[EngineClient]:
    client = EngineClient(slots=2, max_queued_requests=3, beat_limit_s=30.0)
    client.attach(engine.endpoint)
    client.set_state(EnginePhase.READY)
    yield client
    client.detach()


async def submit(client: EngineClient, request_id: str) -> RequestStream:
    return await client.submit("m", [1, 2, 3], PARAMS, request_id=request_id)


async def collect(stream: RequestStream) -> list[OutputChunk]:
    return [chunk async for chunk in stream]


async def test_a_request_travels_whole(client: EngineClient, engine: Engine) -> None:
    before = time.monotonic()
    stream = await client.submit(
        "m", [1, 2, 3], PARAMS, request_id="a", priority=2, key_id="k", deadline_s=9.0, session_id="s", cache_salt="x"
    )
    message = await engine.receive()
    assert isinstance(message, AddRequest)
    assert unpack_ids(message.prompt) == [1, 2, 3]
    assert (message.model, message.priority, message.key_id, message.session_id) == ("m", 2, "k", "k/s")
    assert message.arrival_time >= before
    assert message.deadline == message.arrival_time + 9.0
    assert message.params == PARAMS
    engine.publish("a", 7)
    chunk = await anext(stream)
    assert (chunk.token_ids, chunk.finish_reason) == ([7], None)
    engine.publish("a", 8, finish=FinishReason.STOP)
    assert [(c.token_ids, c.finish_reason) for c in await collect(stream)] == [([8], FinishReason.STOP)]
    assert client.num_open_streams == 0


async def test_a_reader_that_keeps_up_gets_one_chunk_a_message(client: EngineClient, engine: Engine) -> None:
    stream = await submit(client, "a")
    await engine.receive()
    reader = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    for token in range(50):  # more than the window: acknowledgements flow
        engine.publish("a", token)
    engine.publish("a", finish=FinishReason.LENGTH)
    chunks = await asyncio.wait_for(reader, 10)
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(50))
    assert [len(chunk.token_ids) for chunk in chunks[:16]] == [1] * 16


async def test_a_reader_that_lags_gets_everything_in_one_chunk(client: EngineClient, engine: Engine) -> None:
    stream = await submit(client, "a")
    await engine.receive()
    first = TokenLogprobs(0, -0.1, [0], [-0.1])
    engine.io.publish([RequestOutput("a", pack_ids([0]), logprobs=[first], prompt_logprobs=[None], cached_tokens=16)])
    for token in range(1, 100):
        entry = TokenLogprobs(token, -0.1, [token], [-0.1])
        finish = FinishReason.LENGTH if token == 99 else None
        engine.io.publish([RequestOutput("a", pack_ids([token]), finish, logprobs=[entry])])
    await eventually(lambda: client.num_open_streams == 0)
    (chunk,) = await collect(stream)
    assert chunk.token_ids == list(range(100))
    assert chunk.logprobs is not None
    assert [entry.token_id for entry in chunk.logprobs] == list(range(100))
    assert chunk.prompt_logprobs == [None]
    assert (chunk.finish_reason, chunk.cached_tokens) == (FinishReason.LENGTH, 16)


async def test_a_reader_that_never_reads_is_aborted_past_the_limit(engine: Engine) -> None:
    client = EngineClient(slots=2, max_queued_requests=3, beat_limit_s=30.0, max_buffered_tokens=50)
    client.attach(engine.endpoint)
    client.set_state(EnginePhase.READY)
    stream = await submit(client, "a")
    await engine.receive()
    for token in range(51):
        engine.publish("a", token)
    assert await engine.receive() == AbortRequests(["a"])
    assert (await anext(stream)).token_ids == list(range(51))
    with pytest.raises(RequestFailedError, match="50 tokens behind") as raised:
        await anext(stream)
    assert raised.value.code == "reader_too_slow"
    client.detach()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("request_failed", RequestFailedError),
        ("deadline_exceeded", RequestTimeoutError),
        ("context_length_exceeded", ContextLengthError),
        ("nan_logits", RequestFailedError),
    ],
)
async def test_an_engine_error_is_raised_after_the_tokens_before_it(
    client: EngineClient, engine: Engine, code: str, kind: type[Exception]
) -> None:
    stream = await submit(client, "a")
    await engine.receive()
    engine.io.publish([RequestOutput("a", pack_ids([5]), error=OutputError("why", code))])
    assert (await anext(stream)).token_ids == [5]
    with pytest.raises(kind, match="why") as raised:
        await anext(stream)
    assert raised.value.code == code  # type: ignore[attr-defined]
    assert client.num_open_streams == 0


async def test_abort_is_told_once_and_ends_the_stream(client: EngineClient, engine: Engine) -> None:
    stream = await submit(client, "a")
    other = await submit(client, "b")
    await engine.receive()
    await engine.receive()
    engine.publish("a", 1)
    await anext(stream)
    stream.abort()
    stream.abort()
    assert await engine.receive() == AbortRequests(["a"])
    assert await collect(stream) == []
    engine.publish("b", 1, finish=FinishReason.STOP)
    await collect(other)
    other.abort()  # after its end: nothing to tell
    await submit(client, "c")
    message = await engine.receive()
    assert isinstance(message, AddRequest)
    assert message.request_id == "c"


async def test_abort_wakes_a_waiting_reader(client: EngineClient, engine: Engine) -> None:
    stream = await submit(client, "a")
    reader = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)  # the reader waits now
    stream.abort()
    assert await asyncio.wait_for(reader, 10) == []


async def test_finish_tells_what_is_kept(client: EngineClient, engine: Engine) -> None:
    stream = await submit(client, "a")
    await engine.receive()
    engine.publish("a", 1, 2, 3)
    await anext(stream)
    stream.finish(2)
    stream.finish(3)
    stream.abort()
    assert await engine.receive() == FinishRequest("a", 2)
    assert await collect(stream) == []
    assert client.num_open_streams == 0
    assert engine.io.inbox.empty()


async def test_a_cancelled_reader_can_go_on(client: EngineClient, engine: Engine) -> None:
    stream = await submit(client, "a")
    await engine.receive()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    engine.publish("a", 4, finish=FinishReason.STOP)
    assert [chunk.token_ids for chunk in await collect(stream)] == [[4]]


async def test_the_queue_has_a_limit_beyond_the_slots(client: EngineClient, engine: Engine) -> None:
    streams = [await submit(client, str(index)) for index in range(5)]  # 2 slots, 3 in the queue
    with pytest.raises(RateLimitError) as raised:
        await submit(client, "5")
    assert raised.value.retry_after_s > 0
    for _ in streams:
        await engine.receive()
    engine.publish("0", 1)
    await anext(streams[0])
    follower = await client.submit("m", [1, 2, 3], PARAMS, request_id="0-1", follows=True)
    follower.abort()
    with pytest.raises(RateLimitError):
        await submit(client, "5")
    streams[4].abort()
    await submit(client, "5")
    engine.publish("0", 1, finish=FinishReason.STOP)
    await anext(streams[0])
    assert client.num_queued == 2
    await submit(client, "6")


async def test_a_request_id_in_flight_is_refused(client: EngineClient) -> None:
    await submit(client, "a")
    with pytest.raises(ConflictError):
        await submit(client, "a")


async def test_nothing_is_taken_before_ready_or_while_draining(client: EngineClient, engine: Engine) -> None:
    client.set_state(EnginePhase.LOADING, "weights", 0.5)
    with pytest.raises(EngineUnavailableError, match=r"loading \(weights\)"):
        await submit(client, "a")
    client.set_state(EnginePhase.READY)
    stream = await submit(client, "a")
    client.begin_drain()
    assert not client.is_ready
    with pytest.raises(EngineUnavailableError, match="draining"):
        await submit(client, "b")
    client.set_state(EnginePhase.RESTARTING)
    assert client.state.phase is EnginePhase.DRAINING
    assert not await client.wait_until_idle(0.01)
    await engine.receive()
    engine.publish("a", 1, finish=FinishReason.STOP)
    assert await client.wait_until_idle(10)
    assert (await anext(stream)).finish_reason is FinishReason.STOP


async def test_a_dead_engine_fails_every_stream_at_once(client: EngineClient, engine: Engine) -> None:
    streams = [await submit(client, name) for name in "abc"]
    readers = [asyncio.create_task(collect(stream)) for stream in streams]
    await asyncio.sleep(0)
    client.detach()
    client.fail_streams(EngineUnavailableError("gone"))
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(result) for result in results] == [EngineUnavailableError] * 3
    assert client.num_open_streams == 0
    assert not client.is_ready
    streams[0].abort()  # no engine to tell


async def test_beats_bring_stats_and_silence_turns_readiness_red(client: EngineClient, engine: Engine) -> None:
    engine.io.vitals.stats = EngineStats(running=3, free_blocks=7)
    await eventually(lambda: client.stats.running == 3)
    assert client.is_ready
    assert client.vitals is not None
    engine.io.vitals.step_limit_s = 1.0
    engine.io.vitals.loop_stamp = time.monotonic() - 2.0
    await eventually(lambda: not client.is_ready)
    engine.io.vitals.step_limit_s = None
    await eventually(lambda: client.is_ready)


def test_vitals_name_the_fault() -> None:
    vitals = Vitals(last_beat=100.0, loop_stamp=50.0)
    assert vitals.fault(104.9, 5.0) is None
    assert "no sign of life" in str(vitals.fault(105.1, 5.0))
    vitals.step_limit_s = 30.0
    vitals.last_beat = 80.0
    assert vitals.fault(79.9, 5.0) is None
    assert "a step takes longer than 30 s" in str(vitals.fault(80.1, 5.0))


async def test_lost_or_malformed_outputs_never_pass_as_whole(tmp_path: Path) -> None:
    """A gap in the sequence fails what is open; token bytes that are no ids fail their request; others go on."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path / 'e.sock'}")
    client = EngineClient(slots=8, max_queued_requests=8, beat_limit_s=30.0)
    client.attach(f"ipc://{tmp_path / 'e.sock'}")
    client.set_state(EnginePhase.READY)
    try:
        identity, _ = await asyncio.to_thread(router.recv_multipart)

        def send(sequence: int, *outputs: RequestOutput) -> None:
            router.send_multipart([identity, encode(StepOutputs(sequence, list(outputs)))])

        malformed, whole = await submit(client, "malformed"), await submit(client, "whole")
        send(1, RequestOutput("malformed", b"\1\2\3"), RequestOutput("whole", pack_ids([1]), FinishReason.STOP))
        with pytest.raises(RequestFailedError, match="malformed"):
            await asyncio.wait_for(anext(malformed), 10)
        assert [chunk.token_ids for chunk in await collect(whole)] == [[1]]
        holed = await submit(client, "holed")
        send(3, RequestOutput("holed", pack_ids([1])))
        with pytest.raises(RequestFailedError, match="lost"):
            await asyncio.wait_for(anext(holed), 10)
        after = await submit(client, "after")
        send(4, RequestOutput("after", pack_ids([2]), FinishReason.STOP))
        assert [chunk.token_ids for chunk in await collect(after)] == [[2]]
    finally:
        client.detach()
        context.destroy(linger=0)


async def test_prompt_tokens_that_wait_have_a_limit(engine: Engine) -> None:
    client = EngineClient(slots=2, max_queued_requests=9, beat_limit_s=30.0, max_queued_tokens=5)
    client.attach(engine.endpoint)
    client.set_state(EnginePhase.READY)
    try:
        alone = await client.submit("m", [1] * 50, PARAMS, request_id="alone")
        with pytest.raises(RateLimitError, match="50 prompt tokens are waiting"):
            await submit(client, "refused")
        await engine.receive()  # or the token would come before the request it belongs to
        engine.publish("alone", 7)  # its first token: it does not wait any more
        await anext(alone)
        first = await submit(client, "first")
        with pytest.raises(RateLimitError):
            await submit(client, "refused")
        first.abort()
        await submit(client, "second")
        client.fail_streams(EngineUnavailableError("gone"))
        await submit(client, "third")
        with pytest.raises(RateLimitError):
            await submit(client, "refused")
    finally:
        client.detach()
