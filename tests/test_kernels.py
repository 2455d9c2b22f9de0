"""Kernels of the optimizer and transposes against fp64: compiled on a GPU, in Triton's interpreter without a GPU.
Operands lie in buffers of NaN, which show reads outside operands, writes outside results, and unwritten elements."""

import itertools
import math
from functools import partial

import pytest
import torch

import oracles
import triton_kernels as tk
from oracles import ON_GPU, assert_only_view_written, bf16, framed, gpu, only_gpu

FP32, BF16 = torch.float32, torch.bfloat16
OPS = ("XXT", "XTX", "ba_plus_cAA", "transpose_copy", "transpose_add")
REF = {name: getattr(tk, name + "_ref") for name in OPS}
NO_REFERENCE = [name + "_ref" for name in OPS]
A0, B, C = 8.156554524902461, -22.48329292557795, 15.878769915207462  # first Polar Express step
SCALARS = {"XXT": (), "XTX": (), "ba_plus_cAA": (C, B)}


def framed_matrix(values, columns=False):
    """(buffer, view) of `values`, not aligned, with contiguous rows or contiguous columns."""
    buffer, view = framed(values.mT if columns else values, (2, 4), (2, 3))
    return buffer, view.mT if columns else view


assert_as_good = partial(oracles.assert_as_good, worst_ref=8)  # largest seen: 3.4 (fp32 products, CPU)


# ---- Symmetric products ----------------------------------------------------------------------------------------------
def gram_input(name, shape, dtype, device):
    X = torch.randn(shape)  # on the CPU: the same numbers on every machine
    return (X + X.mT if name == "ba_plus_cAA" else X).to(device, dtype)


def gram_oracle(name, X, scalars, scale=None):
    X = X.double()
    scale = 1.0 if scale is None else scale.double().view(*X.shape[:-2], 1, 1)
    if name == "ba_plus_cAA":
        c, b, a = (*scalars, 0.0)[:3]
        return scale * (c * X @ X.mT + b * X + a * torch.eye(X.shape[-1], dtype=X.dtype, device=X.device))
    return scale**2 * (X.mT @ X if name == "XTX" else X @ X.mT)


def gram(name, X, scalars, out, scale, function=None):
    args = scalars[:2] + (out,) + scalars[2:]
    return (function or getattr(tk, name))(X, *args, **({} if scale is None else {"scale": scale}))


def check_gram(name, X, out, scalars, scale=None):
    assert gram(name, X, scalars, out, scale) is out
    assert torch.equal(out, out.mT)
    ref = gram(name, X, scalars, torch.full_like(out, math.nan), scale, REF[name])
    assert torch.equal(ref, ref.mT)
    assert_as_good(out, ref, gram_oracle(name, X, scalars, scale))


@pytest.mark.parametrize("dtype", [FP32, bf16])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("name, shape, scalars", [
    *[(name, shape, ()) for name in ("XXT", "XTX") for shape in [(1, 1), (37, 130), (2, 130, 37), (3, 65, 64)]],
    *[("ba_plus_cAA", shape, (C, B, A0)) for shape in [(1, 1), (130, 130), (2, 65, 65)]],
    ("ba_plus_cAA", (2, 37, 37), (1, 0))])  # integers, on which Triton would specialize; default of a
def test_gram(name, shape, scalars, columns, dtype, device):
    X_buffer, X = framed(gram_input(name, shape, dtype, device), (1, 2), (8, -shape[-1] % 8))  # rows at 16 bytes
    side = shape[-1] if name == "XTX" else shape[-2]
    for scale in (None, torch.rand(shape[:-2]).to(device)) if len(shape) == 3 else (None,):
        buffer, out = framed_matrix(X.new_full((*shape[:-2], side, side), math.nan), columns)
        check_gram(name, X, out, scalars, scale)
        assert_only_view_written(buffer, out)
        assert_only_view_written(X_buffer, X)


@pytest.mark.parametrize("dtype", [FP32, bf16])
def test_symmetry_does_not_depend_on_the_input(dtype, device):
    """For an asymmetric A the lower half of the result is mirrored, also within the tiles on the diagonal."""
    A = torch.randn(2, 136, 136).to(device, dtype)
    out = tk.ba_plus_cAA(A, C, B, torch.full_like(A, math.nan))
    ref = REF["ba_plus_cAA"](A, C, B, torch.full_like(A, math.nan))
    lower = gram_oracle("ba_plus_cAA", A, (C, B)).tril()
    assert torch.equal(out, out.mT) and torch.equal(ref, ref.mT)
    assert_as_good(out.tril(), ref.tril(), lower)


@gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name, shape", [
    *[("XXT", (n, 768, 768)) for n in (5, 10, 20, 40)], *[("XTX", (n, 3072, 768)) for n in (3, 6, 12, 24)],
    *[("ba_plus_cAA", (n, 768, 768)) for n in (3, 6, 24, 40)]])
def test_gram_production(name, shape, scaled, device):
    X = gram_input(name, shape, BF16, device)
    scalars = (C, B, A0) if name == "ba_plus_cAA" else ()
    scale = torch.rand(shape[0], device=device) if scaled else None
    out = X.new_full((shape[0], 768, 768), math.nan)
    check_gram(name, X, out, scalars, scale)
    assert torch.equal(out, gram(name, X, scalars, torch.full_like(out, math.nan), scale))


@gpu
def test_gram_beyond_32_bits(device):
    """The last of 4000 matrices begins at element 3999·768² > 2³¹."""
    X = torch.randn(4000, 768, 768, device=device, dtype=BF16)
    X = X + X.mT
    out = torch.empty_like(X)
    for name in ("XXT", "XTX", "ba_plus_cAA"):
        scalars = SCALARS[name]
        gram(name, X, scalars, out, None)
        check_gram(name, X[-1:].clone(), torch.empty_like(X[-1:]), scalars)
        assert torch.equal(out[-1:], gram(name, X[-1:].clone(), scalars, torch.empty_like(X[-1:]), None))


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 0), (2, 5, 0)])
@pytest.mark.parametrize("name", SCALARS)
def test_gram_without_elements(name, shape, device):
    if name != "XXT" and shape == (2, 5, 0):
        pytest.skip("only XXT sums over nothing")
    out = torch.full((*shape[:2], shape[1]), math.nan, device=device)
    assert not getattr(tk, name)(torch.empty(shape, device=device), *SCALARS[name], out).any()


# ---- Transposes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (37, 300), (300, 64), (0, 3)])
@pytest.mark.parametrize("name", ["transpose_copy", "transpose_add"])
def test_transpose(name, shape, columns, dtype, device):
    values, addend = torch.randn(shape), torch.randn(shape[::-1])
    if not ON_GPU:  # the interpreter truncates fp32 to bf16 instead of rounding, so it gets sums without rounding
        values, addend = (20 * values).round(), (20 * addend).round()
    addend = addend.to(device, dtype)
    src_buffer, src = framed_matrix(values.to(device, dtype), columns)
    buffer, dst = framed_matrix(addend if name == "transpose_add" else torch.full_like(addend, math.nan))
    want = (addend.float() + src.mT.float()).to(dtype) if name == "transpose_add" else src.mT
    assert torch.equal(REF[name](src, dst.clone()), want)
    assert getattr(tk, name)(src, dst) is dst
    assert torch.equal(dst, want)
    assert_only_view_written(buffer, dst)
    assert_only_view_written(src_buffer, src)


@pytest.mark.parametrize("dtype, shape", [
    (BF16, (70, 9)), (FP32, (70, 9)), (torch.int32, (70, 9)), only_gpu(torch.uint8, (49152, 50304)), *itertools.product(
        (torch.float8_e5m2, torch.uint8), [(1, 1), (64, 128), (65, 130), (100, 300), (0, 4)])])
def test_transpose_copy_moves_bits(dtype, shape, device):
    """Of codes, too. Nothing around the result is written."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    src = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, shape, dtype=bits, device=device)
    buffer = torch.full((shape[1] + 2, shape[0] + 16), 77, dtype=bits, device=device)
    dst = buffer[1:-1, 8:-8]
    assert tk.transpose_copy(src.view(dtype), dst.view(dtype)).data_ptr() == dst.data_ptr()
    assert torch.equal(dst, src.mT)
    dst.fill_(77)
    assert (buffer == 77).all()


@gpu
@pytest.mark.parametrize("shape", [(768, 50304), (50304, 768), (49152, 50304)])  # the last needs 64-bit offsets
def test_transpose_production(shape, device):
    src = torch.randn(shape, device=device, dtype=BF16)
    dst = tk.transpose_copy(src, torch.full(shape[::-1], math.nan, device=device, dtype=BF16))
    assert torch.equal(dst, src.mT)
    assert torch.equal(tk.transpose_add(src, dst), 2 * src.mT)


@pytest.mark.parametrize("view", [lambda x: x[:32].view(4, 8)[:, :7].contiguous(), lambda x: x[:32].view(4, 8).mT,
                                  lambda x: x[:72].view(8, 9)[:, 1:], lambda x: x[1:65].view(8, 8)])
def test_products_refuse_rows_off_16_bytes(view, device):
    X = view(torch.zeros(100, device=device))
    with pytest.raises(ValueError, match="rows of the input must be contiguous and begin at multiples of 16 bytes"):
        tk.XXT(X, torch.empty(X.shape[0], X.shape[0], device=device))
