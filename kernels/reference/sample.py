"""Sampling: temperature, then top-k, then top-p, then min-p, then the Gumbel-max choice among the tokens kept.

With p = softmax(logits / temperature): top-k keeps every token whose logit reaches the k-th largest; top-p (nucleus,
arXiv:1904.09751) keeps, of what is left and renormalised, every token at least as likely as the last one of the
shortest likeliest-first prefix whose mass reaches top_p; min-p (arXiv:2407.01082) keeps tokens with
p ≥ min_p · max p. All three are thresholds: equals of the last token kept are kept too.

The token drawn has the largest log p + Gumbel noise, which follows p renormalised over the tokens kept (Gumbel 1954;
arXiv:1411.0030). Each token has noise of its own, so a logit that moves by a rounding error changes the choice only
where two sums are that close; a draw by inverse CDF shifts every token behind the one that moved.
"""

from __future__ import annotations

import torch

from kernels.reference.gumbel_noise import gumbel_noise
from kernels.sampling import SamplingTensors

# A nucleus is mostly short: look at a few of the likeliest tokens before sorting the whole vocabulary.
NUCLEUS_PREFIXES = (64, 2048)


def sample(logits: torch.Tensor, best_ids: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """logits [n, V] float32, best_ids [n] int64, their argmax → [n] int64. Rows of temperature 0 take the argmax."""
    is_greedy = params.temperature == 0
    scaled = scaled_logits(logits, best_ids, params.temperature)
    is_dropped = filtered_probabilities(scaled, params) == 0
    scores = scaled + gumbel_noise(params.seeds, params.positions, logits.shape[1])
    drawn = scores.masked_fill_(is_dropped, float("-inf")).argmax(dim=-1)
    return torch.where(is_greedy, best_ids, drawn)


def scaled_logits(logits: torch.Tensor, best_ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - max) / temperature [n, V]: dividing by a tiny temperature must not overflow. 0 divides by 1."""
    divisor = torch.where(temperature == 0, 1.0, temperature).unsqueeze(1)
    return (logits - logits.gather(1, best_ids.unsqueeze(1))) / divisor


def filtered_probabilities(scaled: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Kept probabilities [n, V] float32 of `scaled_logits`, not renormalised after top-p and min-p; dropped: 0."""
    if params.any_top_k:
        scaled = scaled.masked_fill(scaled < _top_k_threshold(scaled, params.top_k), float("-inf"))
    probabilities = torch.softmax(scaled, dim=-1)
    threshold = torch.zeros_like(probabilities[:, :1])
    if params.any_top_p:
        threshold = _top_p_threshold(probabilities, params.top_p)
    if params.any_min_p:
        threshold = torch.maximum(threshold, params.min_p.unsqueeze(1) * probabilities.amax(dim=-1, keepdim=True))
    if params.any_top_p or params.any_min_p:
        probabilities = probabilities.masked_fill(probabilities < threshold, 0.0)
    return probabilities


def _top_k_threshold(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The k-th largest value of each row [n, 1]; -inf where top_k is 0."""
    ranks = top_k.clamp(max=scaled.shape[1]).long()
    largest = scaled.topk(max(1, int(ranks.max())), dim=-1).values
    threshold = largest.gather(1, (ranks - 1).clamp(min=0).unsqueeze(1))
    return torch.where(ranks.unsqueeze(1) == 0, float("-inf"), threshold)


def _top_p_threshold(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Probability of the last token of each row's nucleus [n, 1]; 0 where top_p is 1."""
    vocab_size = probabilities.shape[1]
    wanted = top_p.unsqueeze(1)
    for length in (*NUCLEUS_PREFIXES, vocab_size):
        likeliest = probabilities.topk(min(length, vocab_size), dim=-1).values
        mass = likeliest.cumsum(dim=-1, dtype=torch.float64)
        if length >= vocab_size or bool(((mass[:, -1:] >= wanted) | (wanted >= 1)).all()):
            break
    nucleus_size = (mass - likeliest < wanted).sum(dim=-1, keepdim=True)
    threshold = likeliest.gather(1, (nucleus_size - 1).clamp(min=0))
    return torch.where(wanted >= 1, 0.0, threshold)
