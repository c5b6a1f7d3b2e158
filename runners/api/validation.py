"""Checks of field values before anything reaches the engine, and the `SamplingParams` that result."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from runners.api.protocol import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, GenerationFields
from runners.api.settings import ApiSettings
from runners.errors import ContextLengthError, InvalidRequestError
from runners.messages import ModelInfo
from runners.request import SamplingParams

MAX_STOPS = 16
# The table that finds them is built on the event loop: a megabyte would hold everyone up for a second.
MAX_STOP_CHARS = 1000
MAX_CHOICES_PER_PROMPT = 128
MAX_CHOICES = 4096
MAX_LOGPROBS = 20
MAX_SESSION_ID_CHARS = 256
_MAX_PRIORITY = 2**31 - 1
# Below this the division by the temperature overflows float32; the result is the argmax anyway.
_GREEDY_BELOW = 1e-5
_SEED_MASK = 2**63 - 1


def unsupported(param: str, what: str) -> InvalidRequestError:
    """A field that is known and valid but that this server cannot honour."""
    return InvalidRequestError(f"{what} is not supported.", param=param, code="unsupported_parameter")


def _number(
    name: str, value: float | None, default: float, low: float, high: float, *, low_excluded: bool = False
) -> float:
    """`value` or the default; InvalidRequestError outside [low, high] ((low, high] if `low_excluded`). NaN fails."""
    if value is None:
        return default
    if low <= value <= high and not (low_excluded and value == low):
        return value
    between = f"over {low:g} and at most {high:g}" if low_excluded else f"from {low:g} to {high:g}"
    raise InvalidRequestError(f"Invalid value for '{name}': {value:g} must be {between}.", param=name)


def _integer(name: str, value: int | None, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if low <= value <= high:
        return value
    raise InvalidRequestError(f"Invalid value for '{name}': must be an integer from {low} to {high}.", param=name)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """InvalidRequestError on the first id outside 0 … vocab_size - 1."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            # A JSON integer may have more digits than Python prints.
            f"Invalid value for '{param}': token id {wrong if abs(wrong) < 2**63 else 'over 63 bits'} "
            f"is outside the vocabulary (0 to {vocab_size - 1}).",
            param=param,
        )


def check_fields(request: GenerationFields) -> None:
    """InvalidRequestError for a field whose feature this server lacks, and for one that needs another."""
    if isinstance(request, CompletionRequest) and request.suffix:
        raise unsupported("suffix", "suffix (insertion)")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("'stream_options' is only allowed with 'stream': true.", param="stream_options")


def stop_strings(request: GenerationFields) -> list[str]:
    """The stop strings, possibly none. InvalidRequestError for an empty or very long one and for more than 16."""
    stops = [request.stop] if isinstance(request.stop, str) else (request.stop or [])
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(
            f"Invalid value for 'stop': {len(stops)} strings, at most {MAX_STOPS} are allowed.", param="stop"
        )
    if any(not stop for stop in stops):
        raise InvalidRequestError("Invalid value for 'stop': a stop string must not be empty.", param="stop")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise InvalidRequestError(
            f"Invalid value for 'stop': a stop string may have at most {MAX_STOP_CHARS} characters.", param="stop"
        )
    return stops


def choices_per_prompt(request: GenerationFields, num_prompts: int = 1) -> tuple[int, int]:
    """(choices to answer with, choices to generate) of each prompt."""
    n = _integer("n", request.n, 1, 1, MAX_CHOICES_PER_PROMPT)
    if n * num_prompts > MAX_CHOICES:
        raise InvalidRequestError(
            f"Invalid value for 'n': {n} choices of {num_prompts} prompts, at most {MAX_CHOICES} in all.", param="n"
        )
    best_of = _integer("best_of", request.best_of, n, n, MAX_CHOICES_PER_PROMPT)
    if best_of * num_prompts > MAX_CHOICES:
        raise InvalidRequestError(
            f"Invalid value for 'best_of': {best_of} choices of {num_prompts} prompts, at most {MAX_CHOICES} in all.",
            param="best_of",
        )
    if best_of > n and request.stream:
        raise InvalidRequestError("'best_of' over n cannot be streamed.", param="best_of")
    if request.session_id is not None and best_of * num_prompts > 1:
        raise InvalidRequestError("A session takes one prompt and one choice at a time.", param="session_id")
    return n, best_of


def session_id(request: GenerationFields) -> str | None:
    """InvalidRequestError for an empty or an overlong one."""
    if request.session_id is not None and not 0 < len(request.session_id) <= MAX_SESSION_ID_CHARS:
        raise InvalidRequestError(
            f"Invalid value for 'session_id': must have 1 to {MAX_SESSION_ID_CHARS} characters.", param="session_id"
        )
    return request.session_id


def priority(request: GenerationFields | EmbeddingRequest, most_urgent: int) -> int:
    """Lower is more urgent. What is more urgent than the server lets its clients be counts as `most_urgent`."""
    return max(_integer("priority", request.priority, 0, -_MAX_PRIORITY, _MAX_PRIORITY), most_urgent)


def _logit_bias(request: GenerationFields, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise InvalidRequestError(
                f"Invalid value for 'logit_bias': {key[:24]!r} is no token id (0 to {vocab_size - 1}).",
                param="logit_bias",
            )
        bias[int(key)] = _number("logit_bias", value, 0.0, -100.0, 100.0)
    return bias


def _logprobs(request: GenerationFields) -> tuple[int | None, int | None]:
    """`SamplingParams.logprobs` and `.prompt_logprobs`."""
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is not None:
        _integer("prompt_logprobs", prompt_logprobs, 0, 0, MAX_LOGPROBS)
        if request.stream:
            raise InvalidRequestError("'prompt_logprobs' cannot be streamed.", param="prompt_logprobs")
    if isinstance(request, CompletionRequest):
        logprobs = request.logprobs
        if logprobs is not None:
            _integer("logprobs", logprobs, 0, 0, MAX_LOGPROBS)
            if request.echo:
                prompt_logprobs = max(logprobs, prompt_logprobs or 0)
        return logprobs, prompt_logprobs
    assert isinstance(request, ChatCompletionRequest)
    top = _integer("top_logprobs", request.top_logprobs, 0, 0, MAX_LOGPROBS)
    if top and not request.logprobs:
        raise InvalidRequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return (top if request.logprobs else None), prompt_logprobs


def sampling_params(
    request: GenerationFields, info: ModelInfo, eos_token_ids: frozenset[int] = frozenset()
) -> SamplingParams:
    """Every sampling field checked. `max_tokens` is not settled yet: it depends on the prompt (`max_tokens_for`).

    Of `eos_token_ids` those that the engine does not know as end markers become stop ids.
    """
    temperature = _number("temperature", request.temperature, 1.0, 0.0, 2.0)
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_token_ids, info.vocab_size, "stop_token_ids")
    if not request.ignore_eos:
        stop_token_ids += tuple(sorted(eos_token_ids.difference(info.eos_token_ids)))
    top_k = _integer("top_k", request.top_k, 0, -1, 2**31 - 1)
    logprobs, prompt_logprobs = _logprobs(request)
    return SamplingParams(
        max_tokens=0,
        min_tokens=_integer("min_tokens", request.min_tokens, 0, 0, 2**31 - 1),
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=_number("top_p", request.top_p, 1.0, 0.0, 1.0, low_excluded=True),
        top_k=0 if top_k >= info.vocab_size else max(top_k, 0),
        min_p=_number("min_p", request.min_p, 0.0, 0.0, 1.0),
        seed=(random.getrandbits(63) if request.seed is None else request.seed) & _SEED_MASK,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=stop_token_ids,
        presence_penalty=_number("presence_penalty", request.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", request.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=_number(
            "repetition_penalty", request.repetition_penalty, 1.0, 0.0, 100.0, low_excluded=True
        ),
        logit_bias=_logit_bias(request, info.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def requested_max_tokens(request: GenerationFields, settings: ApiSettings) -> tuple[str, int | None]:
    """The field that says it and its value, None where the client names none. InvalidRequestError out of range."""
    name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    value: int | None = getattr(request, name)
    if value is not None:
        _integer(name, value, 0, 0, 2**31 - 1)
    if value is not None and settings.max_tokens is not None and value > settings.max_tokens:
        raise InvalidRequestError(
            f"Invalid value for '{name}': this server allows at most {settings.max_tokens}.", param=name
        )
    return name, value


def max_tokens_for(
    prompt_tokens: int, requested: int | None, default: int | None, max_context: int, *, param: str
) -> int:
    """Tokens this prompt may generate: what was asked for, else the default cut to what the context leaves.

    `default` None means all that the context leaves. ContextLengthError naming context, prompt and completion.
    """
    left = max_context - prompt_tokens
    if requested is None:
        wanted = 1 if default is None else default
        fits = left >= 1
        granted = left if default is None else min(default, left)
    else:
        wanted = granted = requested
        fits = requested <= left
    if not fits:
        raise ContextLengthError(
            f"This model's maximum context length is {max_context} tokens. However, you requested "
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the prompt, {wanted} for the completion). "
            "Please shorten the prompt or the completion.",
            param=param,
        )
    return granted


def with_limits(params: SamplingParams, max_tokens: int, choice: int) -> SamplingParams:
    """The parameters of one choice: its length, and a seed of its own so that the choices of a prompt differ."""
    if params.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"Invalid value for 'min_tokens': {params.min_tokens} is over the {max_tokens} tokens it may generate.",
            param="min_tokens",
        )
    return msgspec.structs.replace(params, max_tokens=max_tokens, seed=(params.seed + choice) & _SEED_MASK)
