"""Grammars through the executor: only allowed tokens, neighbours untouched, state rebuilt after a preemption."""

from __future__ import annotations

import json
import random
import re
import sys

import pytest

from runners.grammar import grammars
from runners.grammar.compiler import GrammarCompiler
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from runners.models.fused_forward import FusedForward
from runners.scheduling.scheduler_output import DecodeRow, PlanKind, StepPlan
from runners.text.assets import load_text
from tests.support.cuda_stepping import CudaStepper
from tests.support.memory_checkpoint import random_checkpoint, small_config
from tests.support.stepping import Stepper
from tests.support.tiny_tokenizers import EOS, write_byte_level

VOCAB_SIZE = 270
PROMPT = [72, 105]
NUM_TOKENS = 24
WORD = grammars.from_regex("[a-c]{40}")
OBJECT = grammars.from_json_schema(
    {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["id", "ok"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(random_checkpoint(small_config(vocab_size=VOCAB_SIZE)), dtype="float32")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = load_text(write_byte_level(tmp_path_factory.mktemp("byte_level"))).tokenizer
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])


@pytest.fixture(params=[Stepper, CudaStepper], autouse=True)
def executor_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the torch executor and on the cuda executor's form for a CPU."""
    monkeypatch.setattr(sys.modules[__name__], "stepper_kind", request.param)


stepper_kind = Stepper


def stepper_of(decoder: Decoder, compiler: GrammarCompiler | None) -> Stepper:
    return stepper_kind(decoder, eos_token_ids=[EOS], grammars=compiler)


def text_of(token_ids: list[int]) -> str:
    return bytes(token_id for token_id in token_ids if token_id < 256).decode()


def run(decoder: Decoder, compiler: GrammarCompiler, num_tokens: int, **sampling: object) -> list[int]:
    stepper = stepper_of(decoder, compiler)
    stepper.add("a", PROMPT, **sampling)
    return stepper.run_alone("a", num_tokens)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_only_what_the_grammar_allows(decoder: Decoder, compiler: GrammarCompiler, seed: int | None) -> None:
    sampling: dict[str, object] = {} if seed is None else {"temperature": 1.5, "seed": seed}
    assert re.fullmatch("[a-c]{24}", text_of(run(decoder, compiler, NUM_TOKENS, grammar=WORD, **sampling)))
    tokens = run(decoder, compiler, NUM_TOKENS, grammar=OBJECT, **sampling)
    end = tokens.index(EOS)
    assert set(json.loads(text_of(tokens[:end]))) == {"id", "ok"}
    assert set(tokens[end:]) == {EOS}  # a row that runs on after its end has nothing else to say


def test_a_complete_grammar_ends_before_min_tokens(decoder: Decoder, compiler: GrammarCompiler) -> None:
    tokens = run(decoder, compiler, 4, grammar=grammars.from_choices(["ab"]), min_tokens=4)
    assert tokens == [ord("a"), ord("b"), EOS, EOS]
    held = run(decoder, compiler, 4, grammar=grammars.from_regex("a*"), min_tokens=4, logit_bias={EOS: 100.0})
    assert held == [ord("a")] * 4


def test_logprobs_are_the_models_own(decoder: Decoder, compiler: GrammarCompiler) -> None:
    free, bound = stepper_of(decoder, compiler), stepper_of(decoder, compiler)
    free.add("a", PROMPT, logprobs=3)
    bound.add("a", PROMPT, logprobs=3, grammar=WORD)
    expected, got = (stepper.step({"a": None}).logprobs["a"] for stepper in (free, bound))
    assert got.top_ids == expected.top_ids
    assert got.token_id in b"abc"
    assert got.logprob <= expected.top_logprobs[0]


def test_rows_with_and_without_grammars_in_mixed_plans_get_what_each_gets_alone(
    decoder: Decoder, compiler: GrammarCompiler
) -> None:
    """Waves, decode steps and preemptions in random order change no token."""
    rng = random.Random(3)
    requests: dict[str, dict[str, object]] = {}
    for index in range(12):
        sampling: dict[str, object] = {"temperature": 0.9, "seed": index} if index % 2 else {}
        if index % 3:
            sampling["grammar"] = (WORD, OBJECT)[index % 3 - 1]
        if index % 4 == 0:
            sampling |= {"repetition_penalty": 1.3}
        requests[f"r{index}"] = sampling
    alone = {name: run(decoder, compiler, NUM_TOKENS, **sampling) for name, sampling in requests.items()}
    stepper = stepper_of(decoder, compiler)
    for name, sampling in requests.items():
        stepper.add(name, PROMPT, **sampling)
    while unfinished := [n for n, request in stepper.requests.items() if len(request.generated) < NUM_TOKENS]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        for name in chosen:
            if rng.random() < 0.1:
                stepper.preempt(name)
        prefill: dict[str, int | None] = {}
        decode = []
        for name in chosen:
            request = stepper.requests[name]
            if request.generated and request.num_computed == len(PROMPT) + len(request.generated) - 1:
                decode.append(name)
            else:
                prefill[name] = None
        stepper.step(prefill, decode)
    assert {name: stepper.requests[name].generated[:NUM_TOKENS] for name in requests} == alone


def test_a_grammar_that_cannot_be_used_fails_its_own_row(decoder: Decoder, compiler: GrammarCompiler) -> None:
    stepper = stepper_of(decoder, None)
    stepper.add("bound", PROMPT, grammar=WORD)
    stepper.add("free", PROMPT)
    result = stepper.step({"bound": None, "free": None})
    assert list(result.failures) == ["bound"]
    assert "grammar" in result.failures["bound"].message
    stepper = stepper_of(decoder, compiler)
    stepper.add("wrong", PROMPT, grammar=WORD)
    stepper.requests["wrong"].generated.append(ord("x"))  # as if resumed with a token that the grammar forbids
    assert list(stepper.step({"wrong": None}).failures) == ["wrong"]


def test_every_allowed_token_banned_fails_the_row(decoder: Decoder, compiler: GrammarCompiler) -> None:
    stepper = stepper_of(decoder, compiler)
    stepper.add("a", PROMPT, grammar=WORD, logit_bias={ord(letter): float("-inf") for letter in "abc"})
    assert "banned" in stepper.step({"a": None}).failures["a"].message


def test_a_step_that_failed_may_run_again(
    decoder: Decoder, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = stepper_of(decoder, compiler)
    stepper.add("a", PROMPT, grammar=WORD)
    stepper.step({"a": None})
    plan = stepper.plan(decode=["a"])

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(type(decoder), "forward", broken)
        patch.setattr(FusedForward, "hidden", broken)
        with pytest.raises(RuntimeError, match="broken"):
            stepper.executor.launch(plan)
    stepper.executor.launch(plan)
    stepper.commit(plan, stepper.executor.collect())
    assert stepper.requests["a"].generated == run(decoder, compiler, 2, grammar=WORD)


def test_steps_launched_ahead_follow_the_grammar(decoder: Decoder, compiler: GrammarCompiler) -> None:
    """The cuda executor launches a step before the one before it was read; the matcher must have seen its token."""
    expected = run(decoder, compiler, 8, grammar=OBJECT)
    stepper = CudaStepper(decoder, eos_token_ids=[EOS], grammars=compiler)
    stepper.add("a", PROMPT, grammar=OBJECT)
    stepper.add("free", PROMPT, temperature=0.5, seed=1)
    stepper.step(dict.fromkeys(("a", "free")))
    slots = [stepper.requests[name].slot for name in ("a", "free")]
    first = [*stepper.requests["a"].generated]
    for step in range(7):
        rows = tuple(DecodeRow(name, slot, len(PROMPT) + step) for name, slot in zip(("a", "free"), slots, strict=True))
        stepper.executor.launch(StepPlan(100 + step, PlanKind.DECODE, rows, width=2))
        if step:
            first.append(stepper.executor.collect().token_ids[0])
    first.append(stepper.executor.collect().token_ids[0])
    assert first == expected
