"""Sampling parameters through the executor: bias, penalties, min_tokens, log-probabilities."""

from __future__ import annotations

import pytest
import torch

from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from tests.support.forward import logits_in_pieces
from tests.support.memory_checkpoint import random_checkpoint, small_config
from tests.support.stepping import Stepper

PROMPT = [5, 9, 9, 40, 77, 3]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(random_checkpoint(small_config()), dtype="float32")


def run(decoder: Decoder, num_tokens: int, *, eos_token_ids: tuple[int, ...] = (), **sampling: object) -> list[int]:
    stepper = Stepper(decoder, eos_token_ids=eos_token_ids)
    stepper.add("a", PROMPT, **sampling)
    return stepper.run_alone("a", num_tokens)


def next_logits(decoder: Decoder, token_ids: list[int]) -> torch.Tensor:
    return logits_in_pieces(decoder, token_ids, [len(token_ids)])[-1]


def test_logit_bias_forces_and_forbids(decoder: Decoder) -> None:
    assert run(decoder, 4, logit_bias={61: 100.0}) == [61] * 4
    free = run(decoder, 1)[0]
    assert run(decoder, 1, logit_bias={free: -100.0})[0] != free
    assert run(decoder, 3, logit_bias={61: 100.0}, temperature=1.0, seed=2) == [61] * 3


def test_penalties_follow_the_formula_step_by_step(decoder: Decoder) -> None:
    presence, frequency, repetition = 0.7, 0.4, 1.5
    generated = run(decoder, 10, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    for step, token_id in enumerate(generated):
        logits = next_logits(decoder, PROMPT + generated[:step]).tolist()
        for seen in set(PROMPT + generated[:step]):
            logits[seen] = logits[seen] / repetition if logits[seen] > 0 else logits[seen] * repetition
        for seen in set(generated[:step]):
            logits[seen] -= frequency * generated[:step].count(seen) + presence
        assert token_id == max(range(len(logits)), key=logits.__getitem__)


def test_penalty_counts_do_not_leak_into_the_next_request_of_a_slot(decoder: Decoder) -> None:
    stepper = Stepper(decoder, slots=1)
    stepper.add("a", PROMPT, frequency_penalty=2.0, repetition_penalty=2.0)
    first = list(stepper.run_alone("a", 8))
    stepper.free_slots.append(0)
    stepper.add("b", PROMPT, frequency_penalty=2.0, repetition_penalty=2.0)
    assert stepper.run_alone("b", 8) == first


def test_min_tokens_holds_back_every_end(decoder: Decoder) -> None:
    free = run(decoder, 8)
    ends, stops = (free[0],), (free[1],)
    held = run(decoder, 8, eos_token_ids=ends, stop_token_ids=stops, min_tokens=5)
    assert not {*ends, *stops} & set(held[:5])
    # From the sixth token on nothing is held back any more.
    expected = int(next_logits(decoder, PROMPT + held[:5]).argmax())
    assert held[5] == expected
    assert run(decoder, 8, eos_token_ids=ends, ignore_eos=True, min_tokens=5) == free


def test_logprobs_are_the_models_own(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    stepper.add("a", PROMPT, temperature=0.5, top_k=2, seed=4, logit_bias={61: 100.0}, logprobs=3)
    result = stepper.step({"a": None})
    entry = result.logprobs["a"]
    expected = torch.log_softmax(next_logits(decoder, PROMPT).double(), -1)
    best = expected.topk(3)
    assert entry.token_id == result.token_ids[0] == 61
    assert entry.logprob == pytest.approx(expected[61].item(), abs=1e-4)
    assert entry.top_ids == best.indices.tolist()
    assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


def test_each_row_reports_as_many_alternatives_as_it_asked_for(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    stepper.add("none", PROMPT)
    stepper.add("chosen", PROMPT, logprobs=0)
    stepper.add("five", PROMPT, logprobs=5)
    result = stepper.step(dict.fromkeys(("none", "chosen", "five")))
    assert set(result.logprobs) == {"chosen", "five"}
    assert result.logprobs["chosen"].top_ids == []
    assert result.logprobs["five"].top_ids[0] == result.token_ids[2]
    assert len(result.logprobs["five"].top_logprobs) == 5
    assert len(set(result.token_ids)) == 1


@pytest.mark.parametrize("chunks", [[40], [16, 24], [1, 38, 1]])
def test_prompt_logprobs_cover_every_prompt_token_but_the_first(decoder: Decoder, chunks: list[int]) -> None:
    prompt = [(7 * index) % 97 for index in range(40)]
    stepper = Stepper(decoder)
    stepper.add("a", prompt, prompt_logprobs=2)
    entries = [entry for count in chunks for entry in stepper.step({"a": count}).prompt_logprobs["a"]]
    expected = torch.log_softmax(logits_in_pieces(decoder, prompt, [40]).double(), -1)
    assert [entry.token_id for entry in entries] == prompt[1:]
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[position, prompt[position + 1]].item(), abs=1e-4)
        assert entry.top_ids == expected[position].topk(2).indices.tolist()
    assert stepper.step(decode=["a"]).prompt_logprobs == {}


def test_every_token_banned_fails_the_request(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    stepper.add("a", PROMPT, logit_bias=dict.fromkeys(range(97), float("-inf")))
    stepper.add("b", PROMPT)
    result = stepper.step(dict.fromkeys("ab"))
    assert set(result.failures) == {"a"}


def test_seeds_of_all_64_bits_are_taken_and_told_apart(decoder: Decoder) -> None:
    seeds = [0, 2**32, 2**63, 2**64 - 1, -1]
    runs = [run(decoder, 10, temperature=1.5, seed=seed) for seed in seeds]
    assert runs[3] == runs[4]
    assert len({tuple(ids) for ids in runs}) == 4
