"""The transport: flow control alone, and both ends over real sockets."""

from __future__ import annotations

import asyncio
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from runners.engine_io import EngineIO
from runners.ipc import FrontEndSocket, OutputWindow, decode_input, decode_output, encode, make_socket_folder
from runners.messages import (
    AbortRequests,
    Acknowledge,
    AddRequest,
    Beat,
    EngineOutput,
    Hello,
    OutputError,
    Progress,
    RequestOutput,
    Shutdown,
    StepOutputs,
    TokenLogprobs,
    pack_ids,
    unpack_ids,
)
from runners.request import FinishReason, SamplingParams


def output(request_id: str, *ids: int, finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id, pack_ids(ids), finish_reason=finish)


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, [token_id], [-0.5])


def add_request(request_id: str) -> AddRequest:
    return AddRequest(request_id, "m", pack_ids([1, 2]), SamplingParams(max_tokens=4), arrival_time=1.0)


# --- messages ------------------------------------------------------------------------------------------------------


def test_messages_survive_the_wire() -> None:
    request = add_request("a")
    assert decode_input(encode(request)) == request
    step = StepOutputs(3, [RequestOutput("a", pack_ids([7]), FinishReason.STOP, logprobs=[logprob(7)])])
    assert decode_output(encode(step)) == step


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x81\xa4type\xa5Hellx", encode(Hello())[:-1], b"\xc1" * 64])
def test_garbage_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_input(data)
    with pytest.raises(msgspec.DecodeError):
        decode_output(data)


def test_socket_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_socket_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = make_socket_folder()
    assert len(str(folder)) < 90
    folder.rmdir()


# --- the window ----------------------------------------------------------------------------------------------------


def test_a_full_window_merges_and_an_acknowledgement_releases() -> None:
    window = OutputWindow(window_messages=2)
    assert window.send_now([output("a", 1)]) == StepOutputs(1, [output("a", 1)])
    assert window.send_now([output("a", 2)]) == StepOutputs(2, [output("a", 2)])
    for step in ([output("a", 3), output("b", 10)], [output("b", 11), output("a", 4, finish=FinishReason.LENGTH)]):
        assert window.send_now(step) is None
        assert window.offer(step) == []
    assert window.take() is None
    window.acknowledge(1)
    message = window.take()
    assert message == StepOutputs(3, [output("a", 3, 4, finish=FinishReason.LENGTH), output("b", 10, 11)])
    window.acknowledge(3)
    assert window.take() is None


def test_merging_keeps_logprobs_prompt_logprobs_and_cached_tokens() -> None:
    window = OutputWindow(window_messages=1)
    window.send_now([output("other", 0)])
    window.offer([RequestOutput("a", pack_ids([1]), None, None, [logprob(1)], [None, logprob(9)], 16)])
    window.offer([RequestOutput("a", pack_ids([2]), logprobs=[logprob(2)])])
    window.acknowledge(1)
    message = window.take()
    assert message is not None
    (merged,) = message.outputs
    assert merged.logprobs == [logprob(1), logprob(2)]
    assert merged.prompt_logprobs == [None, logprob(9)]
    assert merged.cached_tokens == 16


def test_a_reader_too_slow_loses_its_request_and_only_it() -> None:
    window = OutputWindow(window_messages=1, max_buffered_tokens=8)
    window.send_now([output("a", 0)])
    given_up: list[str] = []
    for token in range(20):
        step = [output("a", token)] + ([output("b", token)] if token < 5 else [])
        given_up += window.offer(step)
    assert given_up == ["a"]
    window.acknowledge(1)
    message = window.take()
    assert message is not None
    by_id = {item.request_id: item for item in message.outputs}
    assert by_id["a"].error is not None
    assert by_id["a"].error.code == "reader_too_slow"
    assert by_id["b"].token_ids == pack_ids(range(5))
    assert by_id["b"] == output("b", 0, 1, 2, 3, 4)


def test_a_message_the_socket_refused_goes_out_before_newer_outputs() -> None:
    window = OutputWindow(window_messages=1)
    message = window.send_now([output("a", 1)])
    assert message is not None
    window.take_back(message)
    window.offer([output("a", 2)])
    assert window.take() == StepOutputs(1, [output("a", 1, 2)])


def test_acknowledgements_of_unsent_or_old_numbers_change_nothing() -> None:
    window = OutputWindow(window_messages=1)
    window.send_now([output("a", 1)])
    window.acknowledge(99)
    assert not window.is_open
    window.acknowledge(1)
    window.acknowledge(0)
    assert window.is_open


@given(
    st.lists(
        st.one_of(
            st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2**31 - 1)), min_size=1, max_size=5),
            st.integers(0, 3),
        ),
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_nothing_is_lost_and_nothing_overtakes(actions: list[list[tuple[str, int]] | int], size: int) -> None:
    """Steps (lists) and acknowledgements (numbers) in any order: ids arrive whole, in order, at most `size` unread."""
    window = OutputWindow(window_messages=size)
    expected: dict[str, list[int]] = defaultdict(list)
    received: dict[str, list[int]] = defaultdict(list)
    unread: list[StepOutputs] = []
    last = 0

    def receive(message: StepOutputs | None) -> None:
        if message is not None:
            unread.append(message)
            assert len(unread) <= size

    for action in actions:
        if isinstance(action, int):
            for message in unread[:action]:
                assert message.sequence == last + 1
                last = message.sequence
                for item in message.outputs:
                    received[item.request_id] += unpack_ids(item.token_ids)
            del unread[:action]
            window.acknowledge(last)
            receive(window.take())
            continue
        step = [output(request_id, token) for request_id, token in action]
        for request_id, token in action:
            expected[request_id].append(token)
        message = window.send_now(step)
        if message is None:
            window.offer(step)
            message = window.take()
        receive(message)
    while unread:
        message = unread.pop(0)
        for item in message.outputs:
            received[item.request_id] += unpack_ids(item.token_ids)
        window.acknowledge(message.sequence)
        receive(window.take())
    assert received == expected


# --- over sockets --------------------------------------------------------------------------------------------------


@pytest.fixture
def engine_io(tmp_path: Path) -> Iterator[EngineIO]:
    io = EngineIO(tmp_path / "e.sock", beat_interval_s=0.05)
    io.start()
    yield io
    io.stop()


@pytest.fixture
def dealer(engine_io: EngineIO, tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """A front end that does only what the test says."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVTIMEO, 10_000)
    socket.connect(f"ipc://{tmp_path / 'e.sock'}")
    socket.send(encode(Hello()))
    yield socket
    context.destroy(linger=0)


def receive_outputs(socket: zmq.Socket[bytes]) -> StepOutputs:
    while True:
        message = decode_output(socket.recv())
        if isinstance(message, StepOutputs):
            return message


def open_request(engine_io: EngineIO, socket: zmq.Socket[bytes], request_id: str) -> None:
    socket.send(encode(add_request(request_id)))
    assert engine_io.inbox.get(timeout=10) == add_request(request_id)


async def test_messages_both_ways_and_an_announcement_for_late_comers(engine_io: EngineIO, tmp_path: Path) -> None:
    engine_io.announce(Progress("loading", "x", 0.5))
    received: asyncio.Queue[EngineOutput] = asyncio.Queue()
    socket = FrontEndSocket(f"ipc://{tmp_path / 'e.sock'}", received.put_nowait)
    try:
        socket.send(Hello())
        assert await asyncio.wait_for(received.get(), 10) == Progress("loading", "x", 0.5)
        assert isinstance(await asyncio.wait_for(received.get(), 10), Beat)
        socket.send(add_request("a"))
        await asyncio.to_thread(engine_io.inbox.get, True, 10)
        engine_io.publish([output("a", 5), output("nobody", 6)])
        while not isinstance(message := await asyncio.wait_for(received.get(), 10), StepOutputs):
            pass
        assert message == StepOutputs(1, [output("a", 5)])
        socket.send(Shutdown())
        assert await asyncio.to_thread(engine_io.inbox.get, True, 10) == Shutdown()
    finally:
        socket.close()


async def test_one_message_a_loop_iteration(engine_io: EngineIO, tmp_path: Path) -> None:
    """What a message woke runs before the next message is handled."""
    order: list[str] = []
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def on_message(message: EngineOutput) -> None:
        if isinstance(message, StepOutputs):
            order.append("message")
            loop.call_soon(order.append, "reader")
            if message.outputs[0].is_final:
                loop.call_soon(done.set)

    socket = FrontEndSocket(f"ipc://{tmp_path / 'e.sock'}", on_message)
    try:
        socket.send(Hello())
        socket.send(add_request("a"))
        engine_io.inbox.get(timeout=10)  # blocks the loop on purpose: the messages below pile up
        for token in range(8):
            engine_io.publish([output("a", token, finish=FinishReason.LENGTH if token == 7 else None)])
        await asyncio.wait_for(done.wait(), 10)
        assert order == ["message", "reader"] * 8
    finally:
        socket.close()


def test_a_front_end_that_does_not_acknowledge_gets_a_window_then_one_merged_message(
    engine_io: EngineIO, dealer: zmq.Socket[bytes]
) -> None:
    open_request(engine_io, dealer, "a")
    for token in range(1000):
        engine_io.publish([output("a", token, finish=FinishReason.LENGTH if token == 999 else None)])
    messages = [receive_outputs(dealer) for _ in range(16)]
    assert [unpack_ids(message.outputs[0].token_ids) for message in messages] == [[token] for token in range(16)]
    dealer.send(encode(Acknowledge(4)))
    merged = receive_outputs(dealer)
    assert merged.sequence == 17
    ids = unpack_ids(merged.outputs[0].token_ids)
    while merged.outputs[0].finish_reason is None:  # the acknowledgement may overtake the last tokens
        dealer.send(encode(Acknowledge(merged.sequence)))
        merged = receive_outputs(dealer)
        ids += unpack_ids(merged.outputs[0].token_ids)
    assert ids == list(range(16, 1000))


def test_a_reader_too_slow_is_aborted_in_the_scheduler(engine_io: EngineIO, dealer: zmq.Socket[bytes]) -> None:
    open_request(engine_io, dealer, "a")
    for _ in range(40):
        engine_io.publish([output("a", *range(1000))])
    assert engine_io.inbox.get(timeout=10) == AbortRequests(["a"])
    messages = [receive_outputs(dealer) for _ in range(16)]
    dealer.send(encode(Acknowledge(messages[-1].sequence)))
    last = receive_outputs(dealer)
    assert last.outputs[0].error is not None
    assert last.outputs[0].error.code == "reader_too_slow"


def test_a_corrupt_message_is_counted_and_the_next_one_works(
    engine_io: EngineIO, dealer: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    dealer.send(b"\xc1 not msgpack")
    dealer.send_multipart([b"too", b"many", b"frames"])
    dealer.send(encode(output("a", 1)))  # well-formed, but no message to an engine
    open_request(engine_io, dealer, "a")
    assert engine_io.corrupt_messages == 3
    assert "corrupt message" in caplog.text
    engine_io.publish([output("a", 1)])
    assert receive_outputs(dealer).outputs == [output("a", 1)]


def test_a_malformed_prompt_is_refused_before_the_loop_sees_it(engine_io: EngineIO, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(encode(AddRequest("bad", "m", b"\1\2\3", SamplingParams(max_tokens=1), arrival_time=1.0)))
    (refused,) = receive_outputs(dealer).outputs
    assert refused.error is not None
    assert refused.error.code == "invalid_request"
    assert engine_io.inbox.empty()
    open_request(engine_io, dealer, "good")


async def test_a_corrupt_message_does_not_stop_the_front_end(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path / 'e.sock'}")
    received: asyncio.Queue[EngineOutput] = asyncio.Queue()
    socket = FrontEndSocket(f"ipc://{tmp_path / 'e.sock'}", received.put_nowait)
    try:
        socket.send(Hello())
        identity, _ = await asyncio.to_thread(router.recv_multipart)
        for data in (b"\xc1", b"", encode(Hello()), encode(Progress("loading"))):
            router.send_multipart([identity, data])
        assert await asyncio.wait_for(received.get(), 10) == Progress("loading")
        assert socket.corrupt_messages == 3
    finally:
        socket.close()
        context.destroy(linger=0)


def test_fail_all_ends_every_request_once(engine_io: EngineIO, dealer: zmq.Socket[bytes]) -> None:
    for request_id in ("a", "b"):
        open_request(engine_io, dealer, request_id)
    engine_io.fail_all(OutputError("gone", "engine_unavailable"))
    engine_io.publish([output("a", 1)])
    engine_io.fail_all(OutputError("again", "engine_unavailable"))
    message = receive_outputs(dealer)
    assert {(item.request_id, item.error.message if item.error else "") for item in message.outputs} == {
        ("a", "gone"),
        ("b", "gone"),
    }
    engine_io.announce(Progress("loading", "x", 0.5))  # sent after what was posted before it
    while not isinstance(decode_output(dealer.recv()), Progress):
        pass
    open_request(engine_io, dealer, "c")
    engine_io.publish([output("c", 1)])
    assert receive_outputs(dealer).outputs == [output("c", 1)]


def test_outputs_after_an_abort_are_dropped(engine_io: EngineIO, dealer: zmq.Socket[bytes]) -> None:
    open_request(engine_io, dealer, "a")
    open_request(engine_io, dealer, "b")
    dealer.send(encode(AbortRequests(["a", "never seen"])))
    assert engine_io.inbox.get(timeout=10) == AbortRequests(["a", "never seen"])
    engine_io.publish([output("a", 1), output("b", 2)])
    assert receive_outputs(dealer).outputs == [output("b", 2)]


def test_a_front_end_that_has_gone_aborts_its_requests(engine_io: EngineIO, tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{tmp_path / 'e.sock'}")
    socket.send(encode(Hello()))
    open_request(engine_io, socket, "a")
    context.destroy(linger=0)
    assert engine_io.inbox.get(timeout=10) == AbortRequests(["a"])  # noticed by the next beat at the latest
