"""Kernels of the optimizer and transposes against fp64: compiled on a GPU, in Triton's interpreter without a GPU.

Operands are views inside larger buffers of NaN. A read outside an operand makes results NaN, a write outside a result
changes the buffer around it, and an unwritten element stays NaN.
"""

import math
from functools import partial

import pytest
import torch

import oracles
import triton_kernels as tk
from oracles import ON_GPU, assert_only_view_written, bf16, framed, gpu

FP32, BF16, INT16 = torch.float32, torch.bfloat16, torch.int16
OPS = ("XXT", "XTX", "ba_plus_cAA", "fused_momentum", "normuon_tail", "transpose_copy", "transpose_add")
REF = {name: getattr(tk, name + "_ref") for name in OPS}
A0, B, C = 8.156554524902461, -22.48329292557795, 15.878769915207462  # first Polar Express step
SCALARS = {"XXT": (), "XTX": (), "ba_plus_cAA": (C, B)}


@pytest.fixture(autouse=True)
def no_reference(monkeypatch):
    """A wrapper that falls back to its reference fails the test, so no reference is compared with itself."""
    for name in OPS:
        monkeypatch.setattr(tk, name + "_ref", None)


def framed_matrix(values, columns=False):
    """(buffer, view) of `values`, not aligned, with contiguous rows or contiguous columns."""
    buffer, view = framed(values.mT if columns else values, (2, 4), (2, 3))
    return buffer, view.mT if columns else view


def framed_flat(values):
    """(buffer, view) of `values` with a contiguous view; the buffer of integers holds -12345."""
    fill = math.nan if values.is_floating_point() else -12345
    buffer = values.new_full((values.numel() + 8,), fill)
    return buffer, buffer[3:-5].view(values.shape).copy_(values)


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
    ("ba_plus_cAA", (2, 37, 37), (1, 0)),  # integers, on which Triton would specialize; default of a
])
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
    *[("ba_plus_cAA", (n, 768, 768)) for n in (3, 6, 24, 40)],
])
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


# ---- NorMuon around the products -------------------------------------------------------------------------------------

MOMENTUM_SHAPES = [(1, 1, 1), (2, 37, 130), (3, 64, 64), (0, 3, 3)]  # a program takes 1024 elements


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape, mu", [
    *[(shape, 0.95) for shape in MOMENTUM_SHAPES], ((2, 37, 130), 1),
    *[pytest.param(shape, 0.95, marks=gpu) for shape in [(5, 768, 768), (24, 3072, 768)]],
])
def test_fused_momentum(shape, mu, dtype, device, poisoned_empty):
    grad_buffer, grad = framed_flat(torch.randn(shape).to(device, dtype))
    start = torch.randn(shape).to(device)
    buffer, momentum = framed_flat(start)
    X, scale = tk.fused_momentum(grad, momentum, mu, 1.02)
    assert_only_view_written(buffer, momentum)
    assert_only_view_written(grad_buffer, grad)
    assert X.dtype == dtype and scale.dtype == FP32 and X.shape == shape and scale.shape == shape[:1]
    _, again = framed_flat(start)
    assert all(map(torch.equal, tk.fused_momentum(grad, again, mu, 1.02), (X, scale))) and torch.equal(again, momentum)
    if shape[0] == 0:
        return

    ref_momentum = start.clone()
    ref_X, _ = REF["fused_momentum"](grad, ref_momentum, mu, 1.02)
    g, mu = grad.double(), float(torch.as_tensor(mu, dtype=FP32))
    m = start.double() + (1 - mu) * (g - start.double())
    assert_as_good(momentum, ref_momentum, m)
    assert_as_good(X, ref_X, g + mu * (m - g))
    assert_scale(scale, X)


def assert_scale(scale, X):
    """It is computed from the rounded X, by a root, a product, a sum and a quotient. Largest error: 1 eps (CPU)."""
    want = 1 / (1.02 * X.double().square().sum((-2, -1)).sqrt() + 1e-6)
    torch.testing.assert_close(scale.double(), want, rtol=4 * torch.finfo(FP32).eps, atol=0)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(2, 37, 130), pytest.param((24, 2560, 768), marks=gpu)])
def test_slow_average(shape, dtype, device, poisoned_empty):
    """The input is a mixture of the gradient, a fast and a slow average, here after two steps."""
    decay, rate, share, mu = 0.85, 0.02, 0.5625, 0.9
    (buffer, momentum), (slow_buffer, slow) = (framed_flat(torch.randn(shape).to(device)) for _ in range(2))
    m, s = momentum.double(), slow.double()
    ref_momentum, ref_slow = momentum.clone(), slow.clone()
    for _ in range(2):
        grad = torch.randn(shape).to(device, dtype)
        X, scale = tk.fused_momentum(grad, momentum, mu, 1.02, slow, decay, rate, share)
        ref_X, _ = REF["fused_momentum"](grad, ref_momentum, mu, 1.02, ref_slow, decay, rate, share)
        g = grad.double()
        m, s = decay * m + (1 - decay) * g, (1 - rate) * s + rate * g
    assert_only_view_written(buffer, momentum)
    assert_only_view_written(slow_buffer, slow)
    assert_as_good(momentum, ref_momentum, m)
    assert_as_good(slow, ref_slow, s)
    assert_as_good(X, ref_X, (1 - mu) * g + mu * ((1 - share) * m + share * s))
    assert_scale(scale, X)


def test_scale_of_a_zero_matrix(device):
    X, scale = tk.fused_momentum(torch.zeros(2, 3, 4, device=device), torch.zeros(2, 3, 4, device=device), 0.95, 1.02)
    assert not X.any()
    torch.testing.assert_close(scale, torch.full_like(scale, 1e6), rtol=1e-6, atol=0)


def tail_input(shape, dtype, device):
    """p_bits, mantissa, v, y, matrix_lr; weights are as large as y, so that all bits of the update matter."""
    n, R, C = shape
    bits = torch.randn(shape).view(torch.int32)
    y = torch.randn(shape) * torch.rand(n, R, 1)
    y[:, :, :1] = 0
    halves = (bits >> 16).to(INT16), bits.to(INT16)
    return tuple(x.to(device) for x in (*halves, torch.rand(n, R, 1), y.to(dtype), torch.rand(n, 1, 1) + 1))


def join(p_bits, mantissa):
    return ((p_bits.int() << 16) | (mantissa.int() & 0xFFFF)).view(FP32)


def tail_oracle(w, v, y, lr, matrix_lr, weight_decay, beta2):
    """(w, v, update) in fp64, except for the one rounding of y in the rule, from nearly the same number."""
    w, v, lr, dtype, y = w.double(), v.double(), lr * matrix_lr.double(), y.dtype, y.double()
    q = y.square().mean(-1, keepdim=True)
    v = v + (1 - beta2) * (q - v)
    scaled = y / v.clamp(min=1e-10).sqrt()
    norm, scaled_norm = (torch.linalg.matrix_norm(x, keepdim=True) for x in (y, scaled))
    scaled *= norm / scaled_norm.clamp(min=1e-10)
    update = scaled.to(dtype).double() * lr
    return w - torch.where(update * w >= 0, w, 0) * weight_decay * lr - update, v, update


TAIL_SHAPES = [(1, 1, 1), (2, 37, 30), (3, 64, 64), (1, 300, 257), (0, 3, 3),
               *[pytest.param(shape, marks=gpu) for shape in [(5, 768, 768), (24, 3072, 768)]]]


@pytest.mark.parametrize("dtype", [FP32, bf16])
@pytest.mark.parametrize("shape", TAIL_SHAPES)
def test_normuon_tail(shape, dtype, device, poisoned_empty):
    start = tail_input(shape, dtype, device)
    scalars = dict(lr=0.25, weight_decay=0.5, beta2=0.95)
    buffers, (p_bits, mantissa, v, y, matrix_lr) = zip(*map(framed_flat, start))
    tk.normuon_tail(p_bits, mantissa, v, y, matrix_lr=matrix_lr, **scalars)
    assert_only_view_written(buffers[2], v)
    for buffer in buffers[:2]:
        assert (buffer[:3] == -12345).all() and (buffer[-5:] == -12345).all()
    assert torch.equal(y, start[3]) and torch.equal(matrix_lr, start[4])
    _, again = zip(*map(framed_flat, start))
    tk.normuon_tail(*again[:4], matrix_lr=again[4], **scalars)
    assert all(map(torch.equal, again, (p_bits, mantissa, v, y, matrix_lr)))
    if shape[0] == 0:
        return
    ref = [x.clone() for x in start]
    REF["normuon_tail"](*ref[:4], matrix_lr=ref[4], **scalars)
    w, new_v, update = tail_oracle(join(*start[:2]), *start[2:4], matrix_lr=start[4], **scalars)
    assert_as_good(v, ref[2], new_v)
    for name, halves in (("kernel", (p_bits, mantissa)), ("reference", ref)):
        error = (join(*halves[:2]).double() - w).abs()
        # The oracle may round y to bf16 the other way. Largest share seen: 1e-5 (H200, fp32 before rounding).
        step = 0 if dtype == FP32 else 2 * torch.finfo(dtype).eps * update.abs()
        exact = 1e-6 * (w.abs() + 1)
        assert (error <= exact + step).all(), name
        assert (error > exact).sum() <= 1e-4 * w.numel(), name


def test_normuon_tail_moves_the_average(device, poisoned_empty):
    """Towards the new weights; the weights are the same bits as without an average."""
    start = tail_input((2, 24, 10), BF16 if ON_GPU else FP32, device)
    scalars = dict(lr=0.25, weight_decay=0.5, beta2=0.95)
    plain = [x.clone() for x in start]
    tk.normuon_tail(*plain[:4], matrix_lr=plain[4], **scalars)
    _, (p_bits, mantissa, v, y, matrix_lr) = zip(*map(framed_flat, start))
    old = torch.randn(2, 24, 10, device=device)
    buffer, average = framed_flat(old)
    tk.normuon_tail(p_bits, mantissa, v, y, matrix_lr=matrix_lr, **scalars, average=average, average_rate=0.25)
    assert_only_view_written(buffer, average)
    assert all(map(torch.equal, plain, (p_bits, mantissa, v, y, matrix_lr)))
    expected = old.double().lerp(join(p_bits, mantissa).double(), 0.25)
    assert (average.double() - expected).abs().max() <= 4 * torch.finfo(FP32).eps * expected.abs().max()


def test_normuon_tail_ties_and_truncation(device):
    """A zero update decays the weight, also in a zero matrix; an update that increases |w| does not. Bits truncate."""
    w = torch.tensor([[[0.5, -0.5], [0.5, 0.5]], [[1.0, 1.0], [1.0, 1.0]]], device=device)
    y = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[1.0, -1.0], [1.0, 1.0]]], device=device)
    bits = w.view(torch.int32)
    p_bits, mantissa = (bits >> 16).to(INT16), bits.to(INT16)
    v = torch.ones(2, 2, 1, device=device)
    tk.normuon_tail(p_bits, mantissa, v, y, 0.5, torch.ones(2, 1, 1, device=device), 0.25, 0.95)
    got = join(p_bits, mantissa)
    assert torch.equal(got[0], w[0] * (1 - 0.125))
    assert torch.allclose(got[1], torch.tensor([[0.375, 1.5], [0.375, 0.375]], device=device), rtol=1e-6)
    # p = 1.0, mantissa 0, y = 1, rate 2^-10, no decay: w = 0x3F7FC000. p is truncated to 0x3F7F, not rounded.
    p_bits, mantissa = (torch.full((1, 1, 1), x, dtype=INT16, device=device) for x in (0x3F80, 0))
    one = torch.ones(1, 1, 1, device=device)
    tk.normuon_tail(p_bits, mantissa, one.clone(), one, 2.0**-10, one, 0.0, 0.95)
    assert p_bits.item() == 0x3F7F and mantissa.item() == 0xC000 - 0x10000


# ---- Transposes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("programs", [1, 3, 132])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (37, 300), (300, 64), (0, 3)])
@pytest.mark.parametrize("name", ["transpose_copy", "transpose_add"])
def test_transpose(name, shape, columns, dtype, programs, device, monkeypatch):
    monkeypatch.setattr(tk, "_sm_count", lambda device: programs)
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


@pytest.mark.parametrize("dtype, bits", [(BF16, INT16), (FP32, torch.int32), (torch.int32, torch.int32)])
def test_transpose_copy_moves_bits(dtype, bits, device):
    src = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, (70, 9), dtype=bits, device=device)
    dst = tk.transpose_copy(src.view(dtype), torch.zeros(9, 70, dtype=dtype, device=device))
    assert torch.equal(dst.view(bits), src.mT)


@gpu
@pytest.mark.parametrize("shape", [(768, 50304), (50304, 768), (49152, 50304)])  # the last needs 64-bit offsets
def test_transpose_production(shape, device):
    src = torch.randn(shape, device=device, dtype=BF16)
    dst = tk.transpose_copy(src, torch.full(shape[::-1], math.nan, device=device, dtype=BF16))
    assert torch.equal(dst, src.mT)
    assert torch.equal(tk.transpose_add(src, dst), 2 * src.mT)


# ---- Arguments -------------------------------------------------------------------------------------------------------


def t(*shape, dtype=FP32):
    return torch.zeros(shape, dtype=dtype)


SQUARE = t(4, 4)


def tail_arguments(**changes):
    arguments = dict(p_bits=t(1, 3, 2, dtype=INT16), mantissa=t(1, 3, 2, dtype=INT16), v=t(1, 3, 1), y=t(1, 3, 2),
                     lr=1.0, matrix_lr=t(1, 1, 1), weight_decay=0.0, beta2=0.9) | changes
    return tuple(arguments.values())


@pytest.mark.parametrize("name, arguments, message", [
    ("XXT", (t(4), t(4, 4)), r"XXT: input must have 2 or 3 dimensions, got shape \(4,\)"),
    ("XXT", (t(4, 5, dtype=torch.float64), t(4, 4)), "must be bfloat16 or float32, got torch.float64"),
    ("XXT", (t(2, 4, 5), t(2, 5, 5)), r"XXT: out must be .* shape \(2, 4, 4\) .* got .* shape \(2, 5, 5\)"),
    ("XTX", (t(4, 5), t(4, 4)), r"XTX: out must be .* shape \(5, 5\) .* got .* shape \(4, 4\)"),
    ("XTX", (t(4, 5), t(5, 5, dtype=BF16)), "out must be torch.float32 .* on cpu, got torch.bfloat16 .* on cpu"),
    ("XXT", (t(2, 4, 8), t(2, 4, 4), t(3)),
     r"scale must be .* shape \(2,\) on cpu, got torch.float32 of shape \(3,\)"),
    ("XTX", (t(2, 4, 8), t(2, 8, 8), t(2, dtype=BF16)), "scale must be contiguous torch.float32 .* torch.bfloat16"),
    ("ba_plus_cAA", (t(4, 5), 1.0, 1.0, t(5, 5)), r"P must be square, got shape \(4, 5\)"),
    ("ba_plus_cAA", (SQUARE, 1.0, 1.0, SQUARE), "out must not be the input"),
    ("fused_momentum", (t(4, 4), t(4, 4), 0.9, 1.0), r"grad must be \(n, R, C\), .* got .* shape \(4, 4\)"),
    ("fused_momentum", (t(1, 2, 3), t(1, 2, 4), 0.9, 1.0),
     r"momentum must .* shape \(1, 2, 3\) .* got .* shape \(1, 2, 4\)"),
    ("fused_momentum", (t(1, 2, 3), t(1, 2, 3, dtype=BF16), 0.9, 1.0),
     "momentum must be contiguous torch.float32 .* got torch.bfloat16"),
    ("fused_momentum", (t(1, 2, 3), t(1, 2, 3), 0.9, 1.0, t(1, 2, 3, dtype=BF16)),
     "slow must be contiguous torch.float32 .* torch.bfloat16"),
    ("fused_momentum", (t(1, 3, 2).mT, t(1, 2, 3), 0.9, 1.0), r"grad must be contiguous .* strides \(6, 1, 2\)"),
    ("normuon_tail", tail_arguments(y=t(2, 3)), r"y must be \(n, R, C\), got shape \(2, 3\)"),
    ("normuon_tail", tail_arguments(v=t(1, 1, 2)), r"v must be .* shape \(1, 3, 1\) .* got .* shape \(1, 1, 2\)"),
    ("normuon_tail", tail_arguments(p_bits=t(1, 3, 2, dtype=BF16)), "p_bits must be contiguous torch.int16"),
    ("normuon_tail", tail_arguments(average=t(1, 3, 2, dtype=BF16)), "average must be contiguous torch.float32"),
    ("normuon_tail", tail_arguments(mantissa=t(1, 2, 3, dtype=INT16).mT), r"mantissa must .* strides \(6, 1, 3\)"),
    ("transpose_copy", (t(2), t(2)), r"src must be \(M, N\), got shape \(2,\)"),
    ("transpose_copy", (t(2, 3), t(2, 3)), r"dst must be .* shape \(3, 2\) on cpu, got .* shape \(2, 3\)"),
    ("transpose_copy", (t(2, 3), t(3, 2, dtype=BF16)), "dst must be torch.float32 .* got torch.bfloat16"),
    ("transpose_copy", (SQUARE, SQUARE), "dst must not be src"),
    ("transpose_copy", [t(2, 2, dtype=torch.int64) for _ in "sd"], "2 or 4 bytes .* got torch.int64"),
    ("transpose_add", [t(2, 2, dtype=torch.int32) for _ in "sd"], "transpose_add: dtype .* got torch.int32"),
])
def test_errors_say_what_was_wrong(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(tk, name)(*arguments)


@pytest.mark.parametrize("view", [lambda x: x[:32].view(4, 8)[:, :7].contiguous(), lambda x: x[:32].view(4, 8).mT,
                                  lambda x: x[:72].view(8, 9)[:, 1:], lambda x: x[1:65].view(8, 8)])
def test_products_refuse_rows_off_16_bytes(view, device):
    X = view(torch.zeros(100, device=device))
    with pytest.raises(ValueError, match="rows of the input must be contiguous and begin at multiples of 16 bytes"):
        tk.XXT(X, torch.empty(X.shape[0], X.shape[0], device=device))


ARGUMENTS = {
    **{name: lambda dtype, s=SCALARS[name]: (t(2, 4, 4, dtype=dtype), *s, t(2, 4, 4, dtype=dtype)) for name in SCALARS},
    "fused_momentum": lambda dtype: (t(1, 2, 3, dtype=dtype), t(1, 2, 3), 0.9, 1.0),
    "normuon_tail": lambda dtype: tail_arguments(y=t(1, 3, 2, dtype=dtype)),
    "transpose_copy": lambda dtype: (t(2, 3, dtype=dtype), t(3, 2, dtype=dtype)),
    "transpose_add": lambda dtype: (t(2, 3, dtype=dtype), t(3, 2, dtype=dtype)),
}


@pytest.mark.parametrize("name, interpreted, dtype", [
    *[(name, False, dtype) for name in OPS for dtype in (FP32, BF16)], *[(name, True, BF16) for name in SCALARS]])
def test_reference_on_cpu(name, interpreted, dtype, monkeypatch):
    """CPU tensors take the reference without the interpreter; products of bf16 take the reference in either case."""
    monkeypatch.setattr(tk, "INTERPRETED", interpreted)
    monkeypatch.setattr(tk, name + "_ref", lambda *args: "reference")
    assert getattr(tk, name)(*ARGUMENTS[name](dtype)) == "reference"
