"""The FP8 MLP. The references are held against fp64; on a GPU, the kernels are held against the references.

Triton's interpreter rounds to bf16 and FP8 wrongly. On a CPU it runs the kernels on numbers that need no rounding,
which covers layouts, edges, scales and maxima. Oracles are in fp64 and round with `rounded`, which knows the formats only
by their definition.
"""

import math

import pytest
import torch

import oracles
import triton_kernels as tk
from oracles import ON_GPU, framed, gpu

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# bits of the mantissa, exponent of the smallest normal value, largest value
FORMATS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0), BF16: (7, -126, torch.finfo(BF16).max)}
pytestmark = pytest.mark.skipif(ON_GPU and torch.cuda.get_device_capability() < (8, 9),
                                reason="FP8 products need sm_89 or a CPU")
both_formats = pytest.mark.parametrize("dtype", [E4M3, E5M2])


def rounded(x, dtype):
    """x (fp64), saturated and rounded to the nearest value of the format, ties to even, in fp64."""
    bits, smallest, limit = FORMATS[dtype]
    x = x.clamp(-limit, limit)
    spacing = torch.exp2(torch.frexp(x)[1].double().sub(1).clamp(min=smallest) - bits)
    return (x / spacing).round() * spacing


def bits(codes):
    return codes.view(torch.uint8)


def scalar(value, device):
    return torch.tensor(value, dtype=FP32, device=device)


# ---- Codes of both layouts -------------------------------------------------------------------------------------------


@both_formats
def test_formats(dtype):
    """Every finite code keeps its value, and every value between two codes goes to the nearest, ties to even."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    values = values[values.isfinite()].sort().values
    between = torch.cat([values, (values[1:] + values[:-1]) / 2, values * (1 + 2**-5), values * 1.5])
    assert torch.equal(rounded(values, dtype), values)
    codes = tk.quantise_both_ref(between[None].float(), scalar(1.0, "cpu"), dtype)[0][0]
    assert torch.equal(codes.double(), rounded(between, dtype))


@both_formats
@pytest.mark.parametrize("shape", [(1, 16), (70, 130), (3, 70, 48)])
def test_reference_of_the_codes(shape, dtype):
    """The codes of the exact quotient, except where the two roundings of the fp32 quotient meet a tie."""
    x = (100 * torch.randn(shape)).to(BF16)
    x.view(-1)[:4] = torch.tensor([1e6, -math.inf, 0, -0.0])
    scale = torch.rand(shape[:-2]) + 0.01
    codes, codes_t = tk.quantise_both(x, scale, dtype)
    assert codes.dtype == codes_t.dtype == dtype and codes_t.is_contiguous() and codes_t.shape == x.mT.shape
    assert torch.equal(bits(codes_t), bits(codes).mT)
    exact = x.double() / scale.double()[..., None, None]
    near = codes.double() == rounded(exact, dtype)
    slack = [rounded(exact * (1 + sign * 2**-22), dtype) for sign in (-1, 1)]
    assert (near | (codes.double() == slack[0]) | (codes.double() == slack[1])).all() and near.double().mean() > 0.99
    x.view(-1)[5] = math.nan
    assert tk.quantise_both(x, scale, dtype)[0].double().isnan().sum() == 1


@both_formats
@pytest.mark.parametrize("shape", [(1, 1), (70, 130), (128, 64), (3, 70, 48)])
def test_layouts(shape, dtype, device):
    """The kernel on values that FP8 holds: both layouts, nothing else written, one scale per matrix."""
    x = framed((4 * torch.randint(-7, 8, shape)).to(device, BF16), *[(1, 1)] + [(0, 0)] * (len(shape) - 1))[1]
    scale = torch.full((3, 4), math.nan, device=device)[:, 0] if len(shape) == 3 else scalar(2.0, device)
    scale.copy_(torch.tensor([2.0, 4.0, 0.5]) if len(shape) == 3 else scale)
    frames = [framed(torch.full(s, math.nan, device=device).to(dtype), *[(1, 1)] + [(0, 0)] * (len(shape) - 1))
              for s in (x.shape, x.mT.shape)]
    codes, codes_t = tk._quantise_both(x, scale, *(view for _, view in frames))
    wanted = (x / scale[..., None, None]).to(dtype)
    assert torch.equal(bits(codes), bits(wanted)) and torch.equal(bits(codes_t), bits(wanted).mT)
    for buffer, view in frames:
        oracles.assert_only_view_written(buffer, view)


@gpu
@both_formats
@pytest.mark.parametrize("shape", [(70, 130), (49152, 768), (22, 3072, 768)])
def test_codes_bit_for_bit(shape, dtype, device):
    x = (100 * torch.randn(shape, device=device)).to(BF16)
    x.view(-1)[:4] = torch.tensor([1e6, -math.inf, math.nan, -0.0])
    scale = torch.rand(shape[:-2], device=device) + 0.01
    for got, wanted in zip(tk.quantise_both(x, scale, dtype), tk.quantise_both_ref(x, scale, dtype)):
        assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("change, message", [
    (dict(x=torch.ones(16, dtype=BF16)), r"x must be \(M, N\) or \(matrices, M, N\), got \(16,\)"),
    (dict(x=torch.ones(8, 16)), "x must be contiguous torch.bfloat16 .* got torch.float32"),
    (dict(x=torch.ones(16, 8, dtype=BF16).mT), r"x must be contiguous .* strides \(1, 8\)"),
    (dict(scale=torch.ones(2)), r"scale must be .* shape \(\) .* got .* shape \(2,\)"),
    (dict(out=(torch.ones(8, 16).to(E4M3), torch.ones(8, 16).to(E4M3))), r"codes_t must be .* shape \(16, 8\)"),
    (dict(dtype=E5M2, out=(torch.ones(8, 16).to(E4M3),) * 2), "codes must be contiguous torch.float8_e5m2")])
def test_quantise_both_refuses(change, message):
    arguments = dict(x=torch.ones(8, 16, dtype=BF16), scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match=f"quantise_both: {message}"):
        tk.quantise_both(**arguments | change)
