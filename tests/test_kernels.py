"""Every kernel against fp64: compiled where there is a GPU, in Triton's interpreter where there is none.

Operands are views inside larger buffers of NaN, off their alignment, with rows or columns contiguous: a read outside
an operand turns what it enters into NaN, a write outside a result shows in its frame, and an unwritten element stays NaN.
"""

import math

import pytest
import torch

import triton_kernels as tk

ON_GPU = torch.cuda.is_available()
FP32, BF16 = torch.float32, torch.bfloat16
production = pytest.mark.skipif(not ON_GPU, reason="production shapes take minutes in Triton's interpreter")
bf16_dot = pytest.param(BF16, marks=pytest.mark.skipif(not ON_GPU, reason="interpreter gets tl.dot on bf16 wrong"))

OPS = ("XXT", "XTX", "ba_plus_cAA", "fused_momentum", "transpose_copy", "transpose_add")
REF = {name: getattr(tk, name + "_ref") for name in OPS}
C, B = 15.878769915207462, -22.48329292557795  # first Polar Express step: out = C A Aᵀ + B A
SCALARS = {"XXT": (), "XTX": (), "ba_plus_cAA": (C, B)}


@pytest.fixture(autouse=True)
def no_reference(monkeypatch):
    """A wrapper that falls back to its reference fails the test, so no reference is compared with itself."""
    def refuse(*args):
        raise AssertionError("took the reference instead of the kernel")
    for name in OPS:
        monkeypatch.setattr(tk, name + "_ref", refuse)


@pytest.fixture
def poisoned_empty():
    """torch.empty returns NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def framed(values, columns=False):
    """(buffer, view): `values` inside a buffer of NaN, with contiguous rows or contiguous columns."""
    *batch, rows, cols = values.shape
    buffer = values.new_full((*batch, cols + 5, rows + 3) if columns else (*batch, rows + 3, cols + 5), math.nan)
    view = (buffer.mT if columns else buffer)[..., 1:rows + 1, 2:cols + 2]
    return buffer, view.copy_(values)


def framed_flat(values):
    """The same for an operand that must be contiguous."""
    buffer = values.new_full((values.numel() + 8,), math.nan)
    return buffer, buffer[3:-5].view(values.shape).copy_(values)


def assert_only_view_written(buffer, view):
    assert not view.isnan().any()
    assert buffer.isnan().sum() == buffer.numel() - view.numel()


def assert_as_good(got, ref, oracle):
    """At most twice the error of plain PyTorch in the same dtype, plus one rounding: per element and in norm."""
    rounding = torch.finfo(got.dtype).eps / 2
    # fp32 is for tests only; its sums run in another order than the library's. Largest ratio seen: 3.4 (H200).
    slack = 4 if got.dtype == FP32 else 2
    assert got.dtype == ref.dtype and got.shape == oracle.shape
    got_error, ref_error = got.double() - oracle, ref.double() - oracle
    assert (got_error.abs() <= slack * ref_error.abs().max() + rounding * oracle.abs()).all()
    assert got_error.norm() <= slack * ref_error.norm() + rounding * oracle.norm()
    # A broken reference would excuse any kernel. Largest ratio seen: 3.4 (fp32 products, CPU).
    assert ref_error.norm() <= 8 * rounding * oracle.norm()


def gram_input(name, shape, dtype, device):
    X = torch.randn(shape)  # on the CPU: the same numbers on every machine
    return (X + X.mT if name == "ba_plus_cAA" else X).to(device, dtype)


def gram_oracle(name, X, scalars):
    X = X.double()
    if name == "ba_plus_cAA":
        return scalars[0] * X @ X.mT + scalars[1] * X
    return X.mT @ X if name == "XTX" else X @ X.mT


def check_gram(name, X, out, scalars):
    assert getattr(tk, name)(X, *scalars, out) is out
    assert torch.equal(out, out.mT)
    ref = REF[name](X, *scalars, torch.full_like(out, math.nan))
    assert torch.equal(ref, ref.mT)
    assert_as_good(out, ref, gram_oracle(name, X, scalars))


@pytest.mark.parametrize("dtype", [FP32, bf16_dot])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("name, shape, scalars", [
    *[(name, shape, ()) for name in ("XXT", "XTX") for shape in [(1, 1), (37, 130), (2, 130, 37), (3, 65, 64)]],
    *[("ba_plus_cAA", shape, (C, B)) for shape in [(1, 1), (130, 130), (2, 65, 65)]],
    ("ba_plus_cAA", (37, 37), (1, 0)),  # integers, which Triton would specialize on
])
def test_gram(name, shape, scalars, columns, dtype, device):
    X_buffer, X = framed(gram_input(name, shape, dtype, device), columns)
    side = shape[-1] if name == "XTX" else shape[-2]
    buffer, out = framed(X.new_full((*shape[:-2], side, side), math.nan), columns=not columns)
    check_gram(name, X, out, scalars)
    assert_only_view_written(buffer, out)
    assert_only_view_written(X_buffer, X)


@pytest.mark.parametrize("dtype", [FP32, bf16_dot])
def test_symmetry_does_not_depend_on_the_input(dtype, device):
    """The addend of an asymmetric A differs above the diagonal, also within the tiles on it: the lower half is mirrored."""
    A = torch.randn(2, 130, 130).to(device, dtype)
    out = tk.ba_plus_cAA(A, C, B, torch.full_like(A, math.nan))
    ref = REF["ba_plus_cAA"](A, C, B, torch.full_like(A, math.nan))
    lower = gram_oracle("ba_plus_cAA", A, (C, B)).tril()
    assert torch.equal(out, out.mT) and torch.equal(ref, ref.mT)
    assert_as_good(out.tril(), ref.tril(), lower)


@production
@pytest.mark.parametrize("name, shape", [
    ("XXT", (5, 768, 768)), ("XXT", (40, 768, 768)), ("XTX", (3, 3072, 768)), ("XTX", (24, 3072, 768)),
    ("ba_plus_cAA", (3, 768, 768)), ("ba_plus_cAA", (40, 768, 768)),
])
def test_gram_production(name, shape, device):
    X = gram_input(name, shape, BF16, device)
    out = X.new_full((shape[0], 768, 768), math.nan)
    check_gram(name, X, out, SCALARS[name])
    again = getattr(tk, name)(X, *SCALARS[name], torch.full_like(out, math.nan))
    assert torch.equal(out, again)


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 0)])
@pytest.mark.parametrize("name", SCALARS)
def test_gram_without_elements(name, shape, device):
    X = torch.empty(shape, device=device)
    assert getattr(tk, name)(X, *SCALARS[name], torch.empty_like(X)).shape == shape


def test_gram_without_summands(device):
    out = torch.full((2, 5, 5), math.nan, device=device)
    assert torch.equal(tk.XXT(torch.empty(2, 5, 0, device=device), out), torch.zeros_like(out))


MOMENTUM_SHAPES = [(1, 1, 1), (2, 37, 130), (3, 64, 64), (0, 3, 3)]  # a program takes 4096 elements


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape, mu", [
    *[(shape, 0.95) for shape in MOMENTUM_SHAPES], ((2, 37, 130), torch.tensor(0.85)), ((2, 37, 130), 1),
    *[pytest.param(shape, 0.95, marks=production) for shape in [(5, 768, 768), (24, 3072, 768)]],
])
def test_fused_momentum(shape, mu, dtype, device, poisoned_empty):
    grad_buffer, grad = framed_flat(torch.randn(shape).to(device, dtype))
    start = torch.randn(shape).to(device)
    buffer, momentum = framed_flat(start)
    X, sumsq = tk.fused_momentum(grad, momentum, mu)
    assert_only_view_written(buffer, momentum)
    assert_only_view_written(grad_buffer, grad)
    assert X.dtype == dtype and sumsq.dtype == FP32 and X.shape == shape and sumsq.shape == shape[:1]
    again = start.clone()
    assert all(map(torch.equal, tk.fused_momentum(grad, again, mu), (X, sumsq))) and torch.equal(again, momentum)
    if shape[0] == 0:
        return

    ref_momentum = start.clone()
    ref_X, ref_sumsq = REF["fused_momentum"](grad, ref_momentum, mu)
    g, mu = grad.double(), float(torch.as_tensor(mu, dtype=FP32))
    m = start.double() + (1 - mu) * (g - start.double())
    assert_as_good(momentum, ref_momentum, m)
    assert_as_good(X, ref_X, g + mu * (m - g))
    assert torch.equal(ref_sumsq, ref_X.float().square().sum((-2, -1)))
    assert_as_good(sumsq, X.float().square().sum((-2, -1)), X.double().square().sum((-2, -1)))  # of the rounded X


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (37, 130), (130, 64), (0, 3)])
@pytest.mark.parametrize("name", ["transpose_copy", "transpose_add"])
def test_transpose(name, shape, columns, dtype, device):
    values, addend = torch.randn(shape), torch.randn(shape[::-1])
    if not ON_GPU:  # the interpreter cuts fp32 down to bf16 instead of rounding: there, sums that need no rounding
        values, addend = (20 * values).round(), (20 * addend).round()
    addend = addend.to(device, dtype)
    src_buffer, src = framed(values.to(device, dtype), columns)
    buffer, dst = framed(addend if name == "transpose_add" else torch.full_like(addend, math.nan))
    want = (addend.float() + src.mT.float()).to(dtype) if name == "transpose_add" else src.mT
    assert torch.equal(REF[name](src, dst.clone()), want)
    assert getattr(tk, name)(src, dst) is dst
    assert torch.equal(dst, want)
    assert_only_view_written(buffer, dst)
    assert_only_view_written(src_buffer, src)


@pytest.mark.parametrize("dtype, bits", [(BF16, torch.int16), (FP32, torch.int32), (torch.int32, torch.int32)])
def test_transpose_copy_moves_bits(dtype, bits, device):
    src = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, (70, 9), dtype=bits, device=device)
    dst = tk.transpose_copy(src.view(dtype), torch.zeros(9, 70, dtype=dtype, device=device))
    assert torch.equal(dst.view(bits), src.mT)


@production
@pytest.mark.parametrize("shape", [(768, 50304), (50304, 768), (49152, 50304)])  # the last needs 64-bit offsets
def test_transpose_production(shape, device):
    src = torch.randn(shape, device=device, dtype=BF16)
    dst = tk.transpose_copy(src, torch.full(shape[::-1], math.nan, device=device, dtype=BF16))
    assert torch.equal(dst, src.mT)
    assert torch.equal(tk.transpose_add(src, dst), 2 * src.mT)


def t(*shape, dtype=FP32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("call, message", [
    (lambda: tk.XXT(t(4), t(4, 4)), r"XXT: input must have 2 or 3 dimensions, got shape \(4,\)"),
    (lambda: tk.XXT(t(4, 5, dtype=torch.float64), t(4, 4)), "must be bfloat16 or float32, got torch.float64"),
    (lambda: tk.XXT(t(2, 4, 5), t(2, 5, 5)), r"out must have shape \(2, 4, 4\), got \(2, 5, 5\)"),
    (lambda: tk.XTX(t(4, 5), t(4, 4)), r"XTX: out must have shape \(5, 5\), got \(4, 4\)"),
    (lambda: tk.XTX(t(4, 5), t(5, 5, dtype=BF16)), "out is torch.bfloat16 on cpu, input is torch.float32"),
    (lambda: tk.ba_plus_cAA(t(4, 5), 1.0, 1.0, t(5, 5)), r"A must be square, got shape \(4, 5\)"),
    (lambda: (lambda A: tk.ba_plus_cAA(A, 1.0, 1.0, A))(t(4, 4)), "out must not be the input"),
    (lambda: tk.fused_momentum(t(4, 4), t(4, 4), 0.9), r"one shape \(n, R, C\), got \(4, 4\)"),
    (lambda: tk.fused_momentum(t(1, 2, 3), t(1, 2, 3, dtype=BF16), 0.9), "momentum float32, got .* torch.bfloat16"),
    (lambda: tk.fused_momentum(t(1, 3, 2).mT, t(1, 2, 3), 0.9), r"must be contiguous, their strides are \(6, 1, 2\)"),
    (lambda: tk.fused_momentum(t(1, 2, 3), t(1, 2, 3), t(1)), r"mu must be .* 0-D CPU tensor .* got shape \(1,\)"),
    (lambda: tk.transpose_copy(t(2, 3), t(2, 3)), r"src must be \(M, N\) and dst \(N, M\), got \(2, 3\) and \(2, 3\)"),
    (lambda: tk.transpose_copy(t(2, 3), t(3, 2, dtype=BF16)), "dst is torch.bfloat16"),
    (lambda: (lambda A: tk.transpose_copy(A, A))(t(4, 4)), "dst must not be src"),
    (lambda: tk.transpose_copy(*[t(2, 2, dtype=torch.int64) for _ in "sd"]), "2 or 4 bytes .* got torch.int64"),
    (lambda: tk.transpose_add(*[t(2, 2, dtype=torch.int32) for _ in "sd"]), "transpose_add: dtype .* got torch.int32"),
])
def test_errors_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


ARGUMENTS = {
    **{name: lambda dtype, s=SCALARS[name]: (t(2, 4, 4, dtype=dtype), *s, t(2, 4, 4, dtype=dtype)) for name in SCALARS},
    "fused_momentum": lambda dtype: (t(1, 2, 3, dtype=dtype), t(1, 2, 3), 0.9),
    "transpose_copy": lambda dtype: (t(2, 3, dtype=dtype), t(3, 2, dtype=dtype)),
    "transpose_add": lambda dtype: (t(2, 3, dtype=dtype), t(3, 2, dtype=dtype)),
}


@pytest.mark.parametrize("name, interpreted, dtype", [
    *[(name, False, dtype) for name in OPS for dtype in (FP32, BF16)], *[(name, True, BF16) for name in SCALARS]])
def test_reference_on_cpu(name, interpreted, dtype, monkeypatch):
    """CPU tensors take the reference without the interpreter; with it, so do the products of bf16."""
    monkeypatch.setattr(tk, "INTERPRETED", interpreted)
    monkeypatch.setattr(tk, name + "_ref", lambda *args: "reference")
    assert getattr(tk, name)(*ARGUMENTS[name](dtype)) == "reference"
