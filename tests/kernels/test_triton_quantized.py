"""Weights in planes: the repacking, and products, rows and embeddings made from them, against the decoded blocks."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.weights import QuantizedWeight
from tests.support.gguf_blocks import random_weight
from tests.support.tensors import HALF_DTYPE, random_tensor, relative_error

FORMATS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
SMALL = ("q4_0", "q5_0", "q4_k", "q6_k", "q8_0")


def make_weight(name: str, out: int, columns: int, device: torch.device, seed: int = 0) -> QuantizedWeight:
    return random_weight(name, out, columns, seed).to(device)


def packed(weight: QuantizedWeight) -> QuantizedWeight:
    from kernels.triton_ops.quantized_planes import pack_weight

    planes = pack_weight(weight)
    assert isinstance(planes, QuantizedWeight)
    assert planes.format == f"cuda_{weight.format}"
    return planes


@pytest.mark.parametrize("name", FORMATS)
def test_planes_hold_the_same_values(triton_device, name):
    from kernels.triton_ops.quantized_planes import dequantize_planes

    weight = make_weight(name, 6, 768, triton_device)
    planes = packed(weight)
    torch.testing.assert_close(
        dequantize_planes(planes, torch.float32), weight.dequantize(torch.float32), rtol=1e-6, atol=1e-9
    )
    assert planes.nbytes <= 1.03 * weight.nbytes


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q8_0"])
def test_rows_of_any_whole_unit(triton_device, name):
    from kernels.triton_ops.quantized_planes import dequantize_planes

    weight = make_weight(name, 5, 192, triton_device)
    torch.testing.assert_close(
        dequantize_planes(packed(weight), torch.float32), weight.dequantize(torch.float32), rtol=1e-6, atol=1e-9
    )


def test_chunks_do_not_show(triton_device, monkeypatch):
    weight = make_weight("q4_k", 9, 256, triton_device)
    whole = packed(weight)
    monkeypatch.setattr("kernels.triton_ops.quantized_planes.CHUNK_ELEMENTS", 512)
    for name, plane in packed(weight).tensors.items():
        assert torch.equal(plane, whole.tensors[name])


def test_what_has_no_planes_stays(triton_device):
    from kernels.triton_ops.quantized_planes import pack_weight

    odd = make_weight("q8_0", 4, 96, triton_device)
    assert pack_weight(odd) is odd
    plain = torch.zeros(4, 64, device=triton_device)
    assert pack_weight(plain) is plain
    with pytest.raises(ValueError, match="int8"):
        pack_weight(plain, "int8")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [256, 768])
def test_rows(triton_device, name, columns):
    from kernels.triton_ops.quantized_rows import dequantize_rows

    weight = make_weight(name, 7, columns, triton_device)
    planes = packed(weight)
    exact = weight.dequantize(torch.float32)
    out = torch.full((4, columns), torch.nan, device=triton_device)
    dequantize_rows(planes, out, 2)
    assert relative_error(out, exact[2:6]) < 1e-6
    ids = torch.tensor([6, 0, 0], dtype=torch.int32, device=triton_device)
    rows = torch.full((3, columns), torch.nan, dtype=HALF_DTYPE, device=triton_device)
    dequantize_rows(planes, rows, ids=ids, multiplier=1.5)
    assert relative_error(rows, 1.5 * exact[ids.long()]) < 3e-3


CASES = [
    # rows, in, features, norm, bias, residual, activation
    (1, 256, 37, True, False, False, ""),
    (1, 768, 20, False, True, True, ""),
    (1, 512, 12, True, True, False, "silu"),
    (3, 256, 70, True, False, True, ""),
    (8, 768, 64, False, True, False, "gelu_tanh"),
    (20, 256, 40, True, True, True, ""),
    (66, 256, 130, True, True, False, "silu"),
    (66, 256, 130, False, False, True, ""),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_linear(triton_device, case, name):
    from kernels.triton_ops.quantized_linear import quantized_fused_linear
    from kernels.triton_ops.quantized_tuning import MAX_PRODUCT_ROWS

    rows, in_features, features, has_norm, has_bias, has_residual, activation = case
    if triton_device.type == "cpu" and name not in SMALL and rows in (20, 66):
        pytest.skip("the interpreter is slow: the other formats go through the same code")
    dtype = HALF_DTYPE
    stored = 2 * features if activation else features
    weight = make_weight(name, stored, in_features, triton_device, seed=2)

    def tensor(*shape, seed, as_dtype=dtype):
        return random_tensor(*shape, dtype=as_dtype, device=triton_device, seed=seed)

    x = tensor(rows, in_features, seed=1)
    norm_weight = tensor(in_features, seed=3, as_dtype=torch.float32) if has_norm else None
    bias = tensor(stored, seed=4) if has_bias else None
    residual = tensor(rows, features, seed=5) if has_residual else None
    actual = quantized_fused_linear(
        x, packed(weight), bias, norm_weight, 1e-5, residual, activation, out_dtype=torch.float32
    )
    normed = x if norm_weight is None else reference.rms_norm(x, norm_weight, 1e-5)
    expected = normed.float() @ weight.dequantize(torch.float32).T
    if bias is not None:
        expected = expected + bias.float()
    if activation:
        expected = reference.gated_activation(expected, activation)
    if residual is not None:
        expected = expected + residual.float()
    # Many rows go through weights of two bytes.
    bound = 1e-3 if rows <= MAX_PRODUCT_ROWS and not activation else 4e-3
    assert relative_error(actual, expected) < bound


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("name", ["q4_k", "q8_0"])
def test_split_k(triton_device, name, split_k):
    from kernels.triton_ops.quantized_product import QuantizedTiling, quantized_product

    weight = make_weight(name, 40, 1024, triton_device)
    x = random_tensor(5, 1024, dtype=HALF_DTYPE, device=triton_device, seed=3)
    out = torch.full((5, 40), torch.nan, device=triton_device)
    for _ in range(2):  # counters are as they were
        quantized_product(x, packed(weight), out, None, None, "", QuantizedTiling(32, 128, split_k, 2, 4))
        assert relative_error(out, x.float() @ weight.dequantize(torch.float32).T) < 1e-3


def test_large_and_small_activations(triton_device):
    """Rows of activations beyond float16's range, and weights below it."""
    from kernels.triton_ops.quantized_linear import quantized_linear

    weight = make_weight("q8_0", 16, 256, triton_device)
    weight.tensors["blocks"].view(16, 8, 34)[..., :2] = torch.tensor(
        [2e-5], dtype=torch.float16, device=triton_device
    ).view(torch.uint8)
    x = random_tensor(4, 256, dtype=torch.float32, device=triton_device, seed=3)
    x[:, 7] = 2e5
    actual = quantized_linear(x, packed(weight))
    assert relative_error(actual, x @ weight.dequantize(torch.float32).T) < 2e-3


@pytest.mark.parametrize("name", ["q6_k", "q8_0"])
def test_embedding_and_logits(triton_device, name):
    from kernels.triton_ops.quantized_linear import quantized_embedding, quantized_logits

    weight = make_weight(name, 50, 256, triton_device)
    planes, exact = packed(weight), weight.dequantize(torch.float32)
    ids = torch.tensor([3, 49, 0], dtype=torch.int32, device=triton_device)
    rows = quantized_embedding(ids, planes, 2.0, HALF_DTYPE)
    assert rows.dtype == HALF_DTYPE
    assert relative_error(rows, 2 * exact[ids.long()]) < 3e-3
    hidden = random_tensor(2, 256, dtype=HALF_DTYPE, device=triton_device, seed=1)
    scores = quantized_logits(0.01 * hidden, planes, 30.0)
    expected = 30 * torch.tanh((0.01 * hidden).float() @ exact.T / 30)
    assert scores.dtype == torch.float32
    assert relative_error(scores, expected) < 1e-3


@pytest.mark.parametrize("name", ["q4_k", "q5_0"])
def test_norm_inside_the_gemv(triton_device, name, monkeypatch):
    from kernels.triton_ops import quantized_tuning
    from kernels.triton_ops.quantized_linear import quantized_fused_linear

    weight = make_weight(name, 12, 768, triton_device)
    x = random_tensor(1, 768, dtype=HALF_DTYPE, device=triton_device, seed=1)
    norm_weight = random_tensor(768, dtype=torch.float32, device=triton_device, seed=2)
    monkeypatch.setattr(quantized_tuning, "NORM_IN_GEMV", True)
    actual = quantized_fused_linear(x, packed(weight), None, norm_weight, 1e-5, out_dtype=torch.float32)
    expected = reference.rms_norm(x, norm_weight, 1e-5).float() @ weight.dequantize(torch.float32).T
    assert relative_error(actual, expected) < 1e-3
