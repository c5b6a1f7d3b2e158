"""Two models on one pool tensor in one engine loop: each request gets the ids that its model gives it alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from runners.execution.cuda_executor import CudaExecutor
from runners.execution.device_streams import HostStreams
from runners.execution.executor import Executor
from runners.execution.step_graphs import EagerSteps
from runners.execution.torch_executor import TorchExecutor
from runners.kv_cache.device_cache import DeviceCache
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from tests.support.memory_checkpoint import random_checkpoint, small_config
from tests.support.running_models import RunningModels, read

SLOTS = 4
MAX_CONTEXT = 160
# Blocks of the same size, cut differently: 4 layers of 2 heads, and 2 layers of 4.
SHAPES = ({"num_layers": 4, "num_kv_heads": 2}, {"num_layers": 2, "num_kv_heads": 4})


@pytest.fixture(scope="module")
def decoders() -> list[Decoder]:
    return [
        build_decoder(
            random_checkpoint(small_config(max_context=MAX_CONTEXT, **shape), seed),  # type: ignore[arg-type]
            dtype="float32",
            device="cpu",
            quantization="none",
        )
        for seed, shape in enumerate(SHAPES)
    ]


def executors(kind: str, decoders: list[Decoder], num_blocks: int) -> list[Executor]:
    """One executor a model, on one pool tensor and one set of streams."""
    storage: torch.Tensor | None = None
    streams = HostStreams()
    made: list[Executor] = []
    for decoder in decoders:
        cache = DeviceCache(decoder.config, num_blocks, 16, decoder.dtype, storage=storage)
        storage = cache.pool
        if kind == "torch":
            made.append(TorchExecutor(decoder, cache, slots=SLOTS, max_context=MAX_CONTEXT))
        else:
            made.append(CudaExecutor(decoder, cache, streams, EagerSteps(), slots=SLOTS, max_context=MAX_CONTEXT))
    return made


async def generate(
    folder: Path, made: list[Executor], num_blocks: int, cases: list[tuple[str, list[int], int]]
) -> tuple[list[list[int]], int]:
    """(the ids of each case, preemptions)."""
    await asyncio.to_thread(folder.mkdir)
    running = RunningModels(folder, made, num_blocks, slots=SLOTS, max_context=MAX_CONTEXT)
    streams = [
        await running.submit(model, f"r{index}", prompt, count) for index, (model, prompt, count) in enumerate(cases)
    ]
    results = await asyncio.wait_for(asyncio.gather(*map(read, streams)), 60)
    await running.close()
    running.check_pool()
    preemptions = sum(model.scheduler.stats().preemptions for model in running.models)
    return [ids for ids, _ in results], preemptions


@pytest.mark.parametrize("kind", ["torch", "cuda"])
async def test_two_models_on_one_tensor_do_not_touch_each_others_blocks(
    tmp_path: Path, decoders: list[Decoder], kind: str
) -> None:
    rng = random.Random(7)
    cases = [
        (str(index % 2), [rng.randrange(97) for _ in range(rng.randint(3, 70))], rng.randint(10, 60))
        for index in range(14)
    ]
    together, preemptions = await generate(tmp_path / "both", executors(kind, decoders, 14), 14, cases)
    assert preemptions > 0  # so blocks went to and fro
    for index, case in enumerate(cases):
        model = int(case[0])
        (alone,), _ = await generate(
            tmp_path / str(index), executors(kind, [decoders[model]], 20), 20, [("0", *case[1:])]
        )
        assert together[index] == alone
