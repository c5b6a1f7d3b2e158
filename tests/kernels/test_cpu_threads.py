from __future__ import annotations

import os
import threading

import pytest
import torch

from kernels import ops
from kernels.cpu_ops.library import load_library
from tests.support.gguf_blocks import random_weight

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")


@pytest.fixture
def _several_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_several_threads")
def test_the_number_of_threads_changes_nothing() -> None:
    weight, x = ops.pack_weight(random_weight("q4_1", 1000, 576)), torch.randn(150, 576)
    expected = ops.linear(x, weight)
    torch.set_num_threads(1)
    assert torch.equal(ops.linear(x, weight), expected)


@pytest.mark.usefixtures("_several_threads")
def test_short_batches_one_after_another() -> None:
    weight, x = ops.pack_weight(random_weight("q4_1", 1024, 128)), torch.randn(1, 128)
    expected = ops.linear(x, weight)
    assert all(torch.equal(ops.linear(x, weight), expected) for _ in range(3000))


@pytest.mark.usefixtures("_several_threads")
def test_callers_on_several_threads() -> None:
    weight = ops.pack_weight(random_weight("q4_1", 1024, 128))
    inputs = [torch.randn(2, 128) for _ in range(4)]
    expected = [ops.linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        wrong.extend(index for _ in range(500) if not torch.equal(ops.linear(inputs[index], weight), expected[index]))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.usefixtures("_several_threads")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    weight, x = ops.pack_weight(random_weight("q4_1", 1024, 128)), torch.randn(1, 128)
    expected = ops.linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(ops.linear(x, weight), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
