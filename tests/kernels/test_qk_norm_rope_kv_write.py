from __future__ import annotations

import pytest
import torch

from kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 256), (2, 2, 6)])
def test_equals_its_pieces_in_float64(
    num_heads: int, num_kv_heads: int, head_dim: int, has_norms: bool, dtype: torch.dtype, tolerance: float
) -> None:
    num_tokens, block_tokens, eps = 7, 4, 1e-6
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    q_norm = torch.randn(head_dim) if has_norms else None
    k_norm = torch.randn(head_dim) if has_norms else None
    angles = torch.rand(40, head_dim // 2, dtype=torch.float64) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    position_ids = torch.randint(0, 40, (num_tokens,), dtype=torch.int32)
    slot_mapping = torch.randperm(5 * block_tokens)[:num_tokens]
    slot_mapping[3] = -1
    pool = torch.zeros(5, 1, 2, num_kv_heads, block_tokens, head_dim, dtype=dtype)

    q = ops.qk_norm_rope_kv_write(
        qkv, q_norm, k_norm, eps, cos_sin, position_ids, pool[:, 0, 0], pool[:, 0, 1], slot_mapping,
        num_heads, num_kv_heads, head_dim,
    )  # fmt: skip

    def norm_and_turn(heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            heads = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
        first, second = heads.chunk(2, dim=-1)
        turn = torch.polar(torch.ones_like(angles), angles)[position_ids.long()].unsqueeze(1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    heads = qkv.double().view(num_tokens, -1, head_dim)
    expected_q = norm_and_turn(heads[:, :num_heads], q_norm)
    expected_k = norm_and_turn(heads[:, num_heads : num_heads + num_kv_heads], k_norm)
    expected_v = heads[:, num_heads + num_kv_heads :]
    assert q.shape == (num_tokens, num_heads, head_dim)
    torch.testing.assert_close(q.double(), expected_q, rtol=tolerance, atol=tolerance)
    written = torch.zeros(5, block_tokens, dtype=torch.bool)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_tokens)
        written[block, offset] = True
        key, value = pool[block, 0, 0, :, offset].double(), pool[block, 0, 1, :, offset].double()
        torch.testing.assert_close(key, expected_k[token], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(value, expected_v[token], rtol=tolerance, atol=tolerance)
    untouched = pool[:, 0].permute(0, 3, 1, 2, 4)[~written]
    assert not untouched.any()


def test_width_that_does_not_match_the_heads_is_refused() -> None:
    cache = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ops.ShapeError, match="2/1 heads of 8"):
        ops.qk_norm_rope_kv_write(
            torch.zeros(1, 40), None, None, 1e-6, torch.zeros(4, 8), torch.zeros(1, dtype=torch.int32),
            cache, cache, torch.tensor([0]), 2, 1, 8,
        )  # fmt: skip
