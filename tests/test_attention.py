"""Attention kernels against the dense fp64 oracle: compiled on a GPU, in Triton's interpreter without a GPU.
Operands lie in buffers of NaN, which show reads outside operands; torch.empty returns NaN."""

import itertools
import math

import pytest
import torch

import oracles
import triton_kernels as tk
from oracles import bf16, framed, gpu

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
NAMES = ("y", "dq", "dk", "dv", "dgate")
SCALE = 0.12
pytestmark = pytest.mark.usefixtures("poisoned_empty")
both_widths = pytest.mark.parametrize("times", [1, 2])  # width of v / width of q and k; 2 in narrow layers


def REF(q, k, v, gate, cu, *rest):
    return tk.attention_ref(q, k, v, gate, oracles.documents(cu)[0], *rest)


def out_gate_grad(dy, y, gate):
    """Gradient of the output gate (N, H) fp32, as output_grad of the attention block makes it."""
    return torch.where(gate > 0, (dy.float() * y).sum(-1) / gate, 0.0)


def attention(q, k, v, gate, dy, cu, window):
    """(y, dq, dk, dv, dgate) of the kernels."""
    rest = *oracles.documents(cu), window, SCALE
    y, lse = tk.attend(q, k, v, gate, *rest)
    dgate = out_gate_grad(dy, y, gate)
    return y, *tk.attend_backward(dy, q, k, v, dgate, lse, *rest), dgate.to(gate.dtype)


def borders(*lengths, empty=5):
    """cu_seqlens of documents of these lengths with empty entries at the end."""
    cu = [0, *itertools.accumulate(lengths)]
    return torch.tensor(cu + [cu[-1]] * empty, dtype=torch.int32)


def inputs(N, H, d, device, dtype, times=1):
    """q, k, v, gate, upstream: the middle heads of buffers of NaN; times: width of v / width of q and k."""
    q, k, v, dy = (torch.randn(N, H, width) for width in (d, d, times * d, times * d))
    parts = [x.to(device, dtype) for x in (q, k, v, torch.rand(N, H) * 0.98 + 0.01, dy)]
    return [framed(x, (1, 1), (H, H), *[(0, 0)] * (x.dim() - 2))[1] for x in parts]


def run(function, q, k, v, gate, dy, cu, window):
    """As attention(), by autograd."""
    return oracles.with_gradients(lambda *leaves: function(*leaves, cu, window, SCALE), (q, k, v, gate), [dy])


def oracle(q, k, v, gate, dy, cu, window):
    def dense(q, k, v, gate, *_):
        return oracles.attend(q, k, v, cu.tolist(), window, SCALE) * gate[..., None]
    return run(dense, *(x.double() for x in (q, k, v, gate, dy)), cu, window)


def cancelled(q, k, v, gate, dy, cu, window):
    """{name: sum of the absolute terms of dq, dk, dgate}, the size of the terms before they cancel.

    dS = P'(dP - s) is 0 where a row sees only one key, and s is computed from the rounded y (as in FlashAttention).
    """
    mask = oracles.attention_mask(cu.tolist(), q.shape[0], window).to(q.device)
    out = {name: torch.zeros_like(x, dtype=FP64) for name, x in (("dq", q), ("dk", q), ("dgate", gate))}
    for h in range(q.shape[1]):
        Q, K, V, dY = (x[:, h].double() for x in (q, k, v, dy))
        P = torch.softmax((Q @ K.T * SCALE).masked_fill(~mask, -math.inf), -1)
        dP = dY.abs() @ V.abs().T
        s = (dY.abs() * (P @ V).abs()).sum(1, keepdim=True)  # also a sum of absolute terms
        out["dgate"][:, h] = s[:, 0]  # dgate = s
        terms = SCALE * gate[:, h, None].double() * P * (dP + s)
        out["dq"][:, h], out["dk"][:, h] = terms @ K.abs(), terms.T @ Q.abs()
    return out


def assert_as_good(got, ref, wanted, name, terms=0.0, in_norm=True):
    """Allows one rounding of `terms`, too, but in the norm only with `in_norm`. fp32 sums have another order: four
    roundings of `terms`, and one of the largest element.

    Largest ratio seen: 2.1 (dgate).
    """
    floor = wanted.abs() + (4 * terms + wanted.abs().max() if got.dtype == FP32 else terms)
    oracles.assert_as_good(got, ref, wanted, name, floor=floor, norm_floor=None if in_norm else wanted.norm())


def check(x, cu, window, wanted, terms={}, in_norm=True):
    """The kernel is as good as the reference, and repeats bit for bit."""
    got = attention(*x, cu, window)
    for name, a, b, c in zip(NAMES, got, run(REF, *x, cu, window), wanted):
        assert_as_good(a, b, c.double(), f"{name}, window {window}", terms.get(name, 0.0), in_norm)
    assert all(map(torch.equal, got, attention(*x, cu, window)))


CASES = [
    (75, 3, 16, borders(1, 29, 2, 32, 6, 5), (0, 1, 7, 40, 75, 1000)),  # borders on and off tiles, ragged end
    (100, 1, 16, borders(80, 20), (1000,)),  # a border within a tile, with blocks on both sides of the border
    (100, 1, 16, borders(2, 98), (62, 1000)),  # the last row of a block is the first that some row must not see
    (100, 1, 16, borders(100), (94,)),  # the same for the first row of a block
    (64, 1, 32, borders(64), (31, 32, 33)),  # one document
    (96, 1, 16, borders(32, 64, empty=0), (5, 64)),  # borders at borders of tiles
    (70, 6, 16, borders(*[1] * 70), (0, 9)),  # only documents of one token
    (1, 2, 16, borders(1), (0, 3)),
    (131, 1, 16, borders(0, 3, 0, 0, 128), (34, 90)),  # empty documents; rows that see a border and a whole window
    (300, 1, 16, borders(1, 90, 209), (128, 1000))]
WIDE_CASES = [
    *[(1000, 6, d, borders(1, 299, 84, 128, 1, 63, 64, 360), (0, 1, 63, 64, 65, 128, 200, 5000)) for d in (64, 128)],
    (769, 3, 128, borders(769), (126, 128, 384, 1000)), (500, 1, 128, borders(2, 498), (126, 1000)),
    (640, 1, 64, borders(128, 256, 128, 128), (64, 128)),
    *[(333, 6, d, borders(*[1] * 133, 200), (7, 100)) for d in (32, 64)]]


@pytest.mark.parametrize("dtype", [FP32, bf16])
@pytest.mark.parametrize("N, H, d, cu, windows", [*CASES, *[pytest.param(*case, marks=gpu) for case in WIDE_CASES]])
def test_attention(N, H, d, cu, windows, device, dtype):
    """The reference, which works on blocks of 128 tokens, is exact in fp64."""
    cu = cu.to(device)
    for window, times in itertools.product(windows, (1, 2) if d < 128 else (1,)):
        x = inputs(N, H, d, device, dtype, times)
        wanted = oracle(*x, cu, window)
        for exact in zip(run(REF, *(y.double() for y in x), cu, window), wanted):
            torch.testing.assert_close(*exact, rtol=0, atol=1e-12)
        check(x, cu, window, wanted, cancelled(*x, cu, window))


@gpu
@pytest.mark.parametrize("d, dv", [(128, 128), (64, 128), (64, 64)])
@pytest.mark.parametrize("N, H, window, cap", [
    (16384, 6, 128, 896), (16384, 6, 384, 896), (32768, 6, 896, 2048), (65536, 3, 384, 4096)])
def test_attention_production(N, H, window, cap, d, dv, device):
    """Against fp32, since the dense fp64 oracle does not fit; q and k normed as in the model, v a slice of q, k, v."""
    torch.use_deterministic_algorithms(False)
    lengths = []
    while sum(lengths) < N:
        lengths.append(min(int(torch.exp(6.2 + 0.95 * torch.randn(())).clamp(64, cap)), N - sum(lengths)))
    cu = borders(*lengths, empty=40).to(device)
    q, k, dy = (torch.randn(N, H, width, device=device) for width in (d, d, dv))
    q, k = (torch.nn.functional.rms_norm(x, (d,)) for x in (q, k))
    v = torch.randn(N, 3 * H, dv, device=device).to(BF16)[:, 2 * H:]
    gate = torch.sigmoid(torch.randn(N, H, device=device))
    q, k, v, gate, dy = x = [a.to(BF16) for a in (q, k, v, gate, dy)]
    wanted = run(REF, *(a.float() for a in x), cu, window)
    # dq = scale · sum of P (gate dP - dy y) k nearly cancels where a row sees few keys, and y is rounded.
    cancelled = SCALE * (dy.float() * wanted[0]).abs().sum(-1, keepdim=True) * k.abs().max()
    check(x, cu, window, wanted, dict(dq=cancelled), in_norm=False)


def test_scores_up_to_the_bound(device):
    """|scale · q · k| just below 80: the result is right without a running maximum."""
    q, k, v, gate, dy = inputs(40, 1, 16, device, FP32)
    x = torch.full_like(q, 5.0), 8.2 * torch.randn(40, 1, 1).sign().to(device).expand(40, 1, 16), v, gate, dy
    cu = borders(10, 30).to(device)
    check(x, cu, 25, oracle(*x, cu, 25))


def test_a_gate_of_zero(device):
    x = inputs(40, 1, 16, device, FP32)
    x[3][5:9] = 0
    results = attention(*x, borders(40).to(device), 25)
    assert not any(a.isnan().any() for a in results) and not results[0][5:9].any() and not results[4][5:9].any()


@both_widths
def test_layouts(times, device):
    """Slices with other strides, an expanded gradient, and strides that TMA cannot load: the same bits."""
    N, H, d = 50, 2, 16
    cu = borders(20, 30).to(device)
    x = inputs(N, H, d, device, FP32, times)
    x[4] = torch.randn(N, 1, 1, device=device).expand(x[2].shape)
    wanted = attention(*(a.contiguous() for a in x), cu, 9)
    odd = [torch.empty(N, H, a.size(2) + 1, device=device)[..., :-1].copy_(a) for a in x[:3]]
    turned = [a.transpose(1, 2).contiguous().transpose(1, 2) for a in x[:3]]
    for y in (x, [*turned, *x[3:]], [a.transpose(0, 1).contiguous().transpose(0, 1) for a in x], [*odd, x[3], x[4]]):
        assert all(torch.equal(a, b) for a, b in zip(attention(*y, cu, 9), wanted))
