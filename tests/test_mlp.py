"""The ReLU² MLP against fp64. Operands lie in buffers of NaN; weights are views of a bank, as in the trainer."""

import itertools
import math

import pytest
import torch

import oracles
import triton_kernels as tk
from oracles import bf16, framed, gpu

FP32, BF16 = torch.float32, torch.bfloat16
MLP_REF, NO_REFERENCE = tk.mlp_ref, ["mlp_ref"]
both_dtypes = pytest.mark.parametrize("dtype", [FP32, bf16])


def operands(N, D, F, dtype, device):
    """x and g (N, D) between rows of NaN, W1 and W2 (F, D) from a bank of NaN; the same numbers on every machine."""
    rows, bank = torch.randn(2, N, D).to(device, dtype), (torch.randn(2, F, D) * D**-0.5).to(device, dtype)
    return *framed(rows, (1, 1), (0, 0))[1], *framed(bank, (2, 2), (0, 0), (0, 0))[1]


def run(mlp, x, g, W1, W2):
    return oracles.with_gradients(mlp, (x, W1, W2), [g])


@both_dtypes
@pytest.mark.parametrize("N, D, F", [(1, 8, 8), (70, 40, 136),
                                     *[pytest.param(N, 768, F, marks=gpu) for N, F in itertools.product(
                                         (1000, 16384, 49152), (2816, 3072))]])
def test_mlp(N, D, F, dtype, device, either_kernel):
    if dtype == FP32 and N > 100:
        pytest.skip("fp32 is for tests")
    args = operands(N, D, F, dtype, device)
    for parts in zip(run(tk.mlp, *args), run(MLP_REF, *args), run(MLP_REF, *(t.double() for t in args))):
        oracles.assert_as_good(*parts, worst_ref=8)


@both_dtypes
@pytest.mark.parametrize("N, D, F", [(70, 40, 136), *[pytest.param(1000, 768, F, marks=gpu) for F in (2816, 3072)]])
def test_bits(N, D, F, dtype, device, either_kernel, poisoned_empty):
    """Sums of products of small integers, and roots of their squares, are exact: the bits of mlp_ref."""
    x, g, W1, W2 = (torch.randint(-2, 3, shape).to(device, dtype) for shape in ((N, D), (N, D), (F, D), (F, D)))
    pre, dpost = x @ W1.mT, g @ W2.mT
    (post, _), (dpre, _) = tk._relu_square(x, W1), tk._relu_square(g, W2, pre.relu().square())
    assert torch.equal(post, pre.relu().square()) and torch.equal(dpre, 2 * dpost * pre.relu())


@pytest.fixture
def positive_values():
    """The positive bf16 values whose squares neither overflow nor are subnormal."""
    values = torch.arange(0x7F80, dtype=torch.int16).view(BF16)
    return values[(values.square() >= 2.0**-126) & values.square().isfinite()]


def test_square_can_be_undone(positive_values):
    squares = positive_values.square().float()
    assert squares.numel() == 127 * 128 and torch.equal(squares.sqrt().to(BF16), positive_values)


@gpu
def test_root_is_exact(device, either_kernel, positive_values):
    """Every positive value through the kernel: 2 (a bᵀ) √post with a bᵀ = 1/2. A zero stays zero."""
    values = torch.cat([torch.zeros(128, dtype=BF16), positive_values]).view(64, -1).to(device)
    a, b = (torch.zeros(n, 8, dtype=BF16, device=device) for n in values.shape)
    a[:, 0], b[:, 0] = 0.5, 1
    assert torch.equal(tk._relu_square(a, b, values.square())[0], values)


@both_dtypes
def test_nan_stays(dtype, device, either_kernel):
    x, g, W1, W2 = operands(70, 40, 136, dtype, device)
    x[3, 5] = math.nan
    y, dx, *_ = run(tk.mlp, x, g, W1, W2)
    assert y[3].isnan().all() and y.isnan().sum() == y.size(1) and dx.isnan().sum() == dx.size(1)


@gpu
def test_repeats(device):
    """A race would change a result."""
    x, g, W1, W2 = operands(16384, 768, 3072, BF16, device)
    post, _ = tk._relu_square(x, W1)
    dpre, _ = tk._relu_square(g, W2, post)
    for _ in range(50):
        assert torch.equal(tk._relu_square(x, W1)[0], post) and torch.equal(tk._relu_square(g, W2, post)[0], dpre)


@both_dtypes
def test_gradient_not_contiguous(dtype, device):
    x, _, W1, W2 = operands(70, 40, 136, dtype, device)
    g = torch.ones(1, 1, device=device, dtype=dtype).expand(70, 40)
    assert all(map(torch.equal, run(tk.mlp, x, g, W1, W2), run(tk.mlp, x, g.contiguous(), W1, W2)))


@gpu
def test_misaligned(device):
    W = torch.ones(16, 8, device=device, dtype=BF16)
    with pytest.raises(ValueError, match="start at multiples of 16"):
        tk.mlp(torch.ones(6 * 8 + 1, device=device, dtype=BF16)[1:].view(6, 8), W, W)
