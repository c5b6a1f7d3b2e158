"""EMBED plans: what the scheduler makes of embedding requests, and what the torch executor pools."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch

from configs.schema import Profile
from runners.execution.executor import Capabilities
from runners.execution.torch_executor import TorchExecutor
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.device_cache import DeviceCache
from runners.messages import AddRequest, RequestOutput, pack_ids
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import PlanKind, StepPlan
from tests.support.memory_checkpoint import random_checkpoint, small_config
from tests.support.stepping import Stepper

PROMPTS = {"a": [5, 6, 7], "b": [9], "c": [index % 90 for index in range(80)], "d": [5, 6, 7, 8]}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(random_checkpoint(small_config()), dtype="float32")


def request(name: str, pooling: str) -> AddRequest:
    params = SamplingParams(max_tokens=0 if pooling else 6, temperature=0.0, pooling=pooling)
    return AddRequest(name, "m", pack_ids(PROMPTS[name]), params, 0.0)


def scheduler_of(capabilities: Capabilities, decoder: Decoder) -> Scheduler:
    profile = Profile.model_validate(
        {"admission": {"cold_window_us": 0, "cold_silence_us": 0}, "chunk": {"tokens": 16}}
    )
    limits = SchedulerLimits(max_context=decoder.max_context, slots=4)
    return Scheduler(profile, capabilities, CacheManager(64, 16), limits, check=True)


def run(decoder: Decoder, requests: list[AddRequest]) -> tuple[dict[str, list[RequestOutput]], list[StepPlan]]:
    cache = DeviceCache(decoder.config, 64, 16, decoder.dtype)
    executor = TorchExecutor(decoder, cache, slots=4, max_context=decoder.max_context)
    scheduler = scheduler_of(executor.capabilities, decoder)
    outputs: dict[str, list[RequestOutput]] = {}
    plans = []
    for message in requests:
        scheduler.add_request(message, 0.0)
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert isinstance(plan, StepPlan)
        plans.append(plan)
        executor.launch(plan)
        scheduler.commit(executor.collect(), (), 0.0)
        for output in scheduler.take_outputs():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs, plans


def vector_of(output: RequestOutput) -> torch.Tensor:
    return torch.tensor(array("f", output.embedding).tolist())


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooled_hidden_states(decoder: Decoder, pooling: str) -> None:
    outputs, plans = run(decoder, [request(name, pooling) for name in PROMPTS])
    assert {plan.kind for plan in plans} == {PlanKind.EMBED}
    for name, prompt in PROMPTS.items():
        (output,) = outputs[name]
        assert output.finish_reason is not None
        stepper = Stepper(decoder)
        stepper.add("x", prompt)
        hidden: list[torch.Tensor] = []
        forward = decoder.forward
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder, "forward", lambda *args: hidden.append(forward(*args)) or hidden[-1])  # noqa: B023
            stepper.step({"x": None})
        rows = hidden[0]
        expected = rows[-1] if pooling == "last" else rows.mean(dim=0)
        torch.testing.assert_close(vector_of(output), expected / expected.norm(), atol=1e-6, rtol=1e-5)


def test_embeddings_beside_tokens_change_neither(decoder: Decoder) -> None:
    alone = {name: run(decoder, [request(name, pooling)])[0][name] for name, pooling in zip("abcd", MIX, strict=True)}
    together, plans = run(decoder, [request(name, pooling) for name, pooling in zip("abcd", MIX, strict=True)])
    for plan in plans:
        if plan.kind is PlanKind.EMBED:
            assert not plan.decode_rows
            assert all(MIX["abcd".index(chunk.request_id)] for chunk in plan.chunks)
            assert all(chunk.start == 0 for chunk in plan.chunks)
    for name, outputs in together.items():
        assert [output.token_ids for output in outputs] == [output.token_ids for output in alone[name]]
        if outputs[-1].embedding:
            torch.testing.assert_close(vector_of(outputs[-1]), vector_of(alone[name][-1]), atol=1e-6, rtol=1e-5)


MIX = ["mean", "", "mean", ""]


def test_an_executor_without_embeddings_refuses_them(decoder: Decoder) -> None:
    scheduler = scheduler_of(replace(Capabilities(), embed=False), decoder)
    scheduler.add_request(request("a", "mean"), 0.0)
    (output,) = scheduler.take_outputs()
    assert output.error is not None
    assert "embeddings" in output.error.message
    assert not scheduler.has_work
