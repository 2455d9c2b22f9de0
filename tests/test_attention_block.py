"""Projection, gates and the whole attention block against fp64: on a GPU, or in Triton's interpreter without a GPU."""

import math

import pytest
import torch

import oracles
import triton_kernels as tk
from oracles import ON_GPU, framed, only_gpu, with_gradients

pytestmark = pytest.mark.usefixtures("poisoned_empty")
FP32, BF16 = torch.float32, torch.bfloat16
DTYPE = BF16 if ON_GPU else FP32
KINDS = ("plain", "value", "paired", "paired+value", "long", "long+value", "narrow", "narrow+value", "narrow+paired",
         "narrow+paired+value")
WINDOW, SCALE = 9, 0.2


def switches(kind):
    """(paired, offset, narrow), value."""
    return tuple(word in kind for word in ("paired", "long", "narrow")), "value" in kind


def rotary(rows, d, device, dtype):
    """Table (rows, d/4, 2), rounded to bf16 for every dtype, so that c² + s² is not 1."""
    angle = torch.arange(rows, device=device)[:, None] * (1 / 1024) ** torch.linspace(0, 1, d // 4, device=device)
    return torch.stack((angle.cos(), angle.sin()), -1).bfloat16().to(dtype)


def inputs(N, H, d, D, value, device, dtype, narrow=False):
    """x, weight, rotary, ve, ve_gate; ve is a slice of a larger tensor of NaN."""
    def random(*shape):
        return torch.randn(shape, device=device)
    width = d // (1 + narrow)
    ve = framed(random(N, H * d).to(dtype), (N, N), (0, 8))[1]
    ve, gate = (ve, 2 * torch.sigmoid(random(N, H)).to(dtype)) if value else (None, None)
    weight = random(H * (2 * width + d), D) * D**-0.5
    return random(N, D).to(dtype), weight.to(dtype), rotary(2 * N, d, device, dtype), ve, gate


def plain(qkv, table, ve, gate, kind, grads, dtype):
    """q, k, v and the gradients of qkv, ve, gate by the reference; its projection is the identity here."""
    eye = torch.eye(qkv.size(1), dtype=dtype, device=qkv.device)
    found = with_gradients(lambda qkv, ve, gate: tk.project_ref(qkv, eye, table.to(dtype), ve, gate, *kind),
                           (qkv, ve, gate), grads, dtype)
    return found[:3], found[3:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N, H, d, D, dtype", [  # a program takes tiles of 32 tokens and 32 of D
    (1, 2, 16, 8, FP32), (2, 2, 16, 20, FP32), (37, 6, 16, 40, FP32), (37, 5, 16, 40, FP32), (5, 1, 16, 8, FP32),
    only_gpu(129, 2, 64, 72, BF16), only_gpu(1003, 5, 64, 320, BF16), only_gpu(1003, 3, 128, 384, BF16),
    *[only_gpu(N, 6, 128, 768, BF16) for N in (1, 1003, 49152)]])
def test_project(N, H, d, D, kind, device, dtype):
    kind, value = switches(kind)
    if kind[0] and H % 2:
        pytest.skip("paired layers have even numbers of heads")
    d = max(d, 32) if kind[2] else d
    width = d // (1 + kind[2])
    x, weight, table, ve, gate = inputs(N, H, d, D, value, device, dtype, *kind[2:])
    qk, v, rstd = tk.project(x, weight, table, ve, gate, *kind)
    assert qk.shape == (2, N + 1, H, width)
    grads = [torch.randn(N + 1, H, size, device=device).to(dtype) for size in (width, width, d)]
    for grad in grads:
        grad[N] = math.nan  # the kernel must not read beyond the last token
    grads = [grad[:N] for grad in grads]
    dqkv = x.new_empty(N, weight.size(0))
    assert dqkv.isnan().all()
    dve, dgate = tk.project_backward(*grads, qk, rstd, table, ve, gate, *kind[:2], dqkv)

    wide = x.double() @ weight.double().T
    outs64, grads64 = plain(wide, table, ve, gate, kind, grads, torch.float64)
    outs, ref_grads = plain(x @ weight.T, table, ve, gate, kind, grads, dtype)
    names = "q", "k", "v", "dqkv", *(("dve", "dgate") if value else ())
    got = *qk[:, :N], v, dqkv, *((dve, dgate) if value else ())
    for name, *parts in zip(names, got, (*outs, *ref_grads), (*outs64, *grads64), strict=True):
        oracles.assert_as_good(*parts, name, worst_ref=12)  # largest seen: 4 (fp32)
    heads = wide[:, :2 * H * width].view(N, 2, H, width)
    wanted_rstd = (heads.square().mean(-1) + tk.RMS_EPS).rsqrt().transpose(0, 1)
    torch.testing.assert_close(rstd.double(), wanted_rstd, rtol=1e-5, atol=0)

    # dv may be in its part of dqkv already, then the kernel fills only q and k; a run repeats bit for bit.
    again = torch.empty_like(dqkv)
    again[:, -H * d:] = grads[2].flatten(1)
    its_part = again[:, -H * d:].view(N, H, d)
    more = tk.project_backward(*grads[:2], its_part, qk, rstd, table, ve, gate, *kind[:2], again)
    assert torch.equal(again, dqkv) and (not value or all(map(torch.equal, more, (dve, dgate))))
    qk_again, *v_and_rstd = tk.project(x, weight, table, ve, gate, *kind)
    assert torch.equal(qk_again[:, :N], qk[:, :N]) and all(map(torch.equal, v_and_rstd, (v, rstd)))


def gate_weights(H, C, value, device, dtype):
    """w_ve, w_out, each (H, C)."""
    w_ve, w_out = (torch.randn(H, C, device=device).mul(C**-0.5).to(dtype) for _ in range(2))
    return w_ve if value else None, w_out


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("N, H, d, D, C, dtype", [  # a program takes 128 tokens
    (1, 2, 16, 12, 12, FP32), (130, 3, 16, 20, 4, FP32), (261, 6, 16, 40, 12, FP32),
    *[only_gpu(N, 6, 128, 768, 12, BF16) for N in (1, 129, 1003, 49152)]])
def test_gates(N, H, d, D, C, paired, value, device, dtype):
    x, _, _, ve, _ = inputs(N, H, d, D, value, device, dtype)
    args = x, ve, *gate_weights(H, C, value, device, dtype)
    gates = tk.head_gates(*args, paired)
    assert gates.shape == (1 + value, N, H)
    upstream = [torch.randn(N, H, device=device).to(dtype) for _ in gates]
    before = [torch.randn(N, width, device=device).to(dtype) for width in ((D, H * d) if value else (D,))]

    def backward(dx, dve=None):
        return tk.head_gates_backward(upstream[0], upstream[-1], gates, *args, paired, dx, dve)
    inner = [torch.zeros_like(u) for u in before]
    dw_ve, dw_out = dweights = backward(*inner)
    dw_ve = [dw_ve] if value else []

    ref, exact = (with_gradients(lambda *args: tk.head_gates_ref(*args, paired), args, upstream, d)
                  for d in (dtype, torch.float64))
    names = ("out_gate", "ve_gate", "dx", "dve", "dw_ve", "dw_out") if value else ("out_gate", "dx", "dw_out")
    got = *gates, *inner, *dw_ve, dw_out
    for name, *parts in zip(names, got, ref, exact, strict=True):
        oracles.assert_as_good(*parts, name, worst_ref=12)  # largest seen: 7 (fp32)
    # The gradients are added to dx and dve, rounded once; other channels stay unchanged; a run repeats bit for bit.
    after = [u.clone() for u in before]
    assert all(u is v is None or torch.equal(u, v) for u, v in zip(backward(*after), dweights))
    assert torch.equal(tk.head_gates(*args, paired), gates)
    for was, total, dref, dexact, seen in zip(before, after, ref[len(gates):], exact[len(gates):],
                                              (C, 0 if paired else C // 2)):
        assert torch.equal(total[:, seen:], was[:, seen:])
        oracles.assert_as_good(total, was + dref, was.double() + dexact, "sum", worst_ref=12)


def block_inputs(N, H, d, D, kind, device, dtype):
    kind, value = switches(kind)
    x, weight, table, ve, _ = inputs(N, H, d, D, value, device, dtype, *kind[2:])
    cu = torch.tensor([0, N // 3, N // 2, *[N] * 5], dtype=torch.int32, device=device)
    documents = oracles.documents((1 + kind[0]) * cu)
    return x, weight, table, ve, *gate_weights(H, 12, value, device, dtype), documents, WINDOW, SCALE, *kind


def block_run(function, args, upstream, dtype):
    """y and the gradients of the inputs."""
    x, weight, table, ve, w_ve, w_out, *others = args
    return with_gradients(lambda x, weight, *gates: function(x, weight, table.to(dtype), *gates, *others),
                          (x, weight, ve, w_ve, w_out), [upstream], dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_block(kind, device, monkeypatch):
    N, H, d, D = (261, 6, 128, 768) if ON_GPU else (29, 4, 32 if "narrow" in kind else 16, 40)
    args, upstream = block_inputs(N, H, d, D, kind, device, DTYPE), torch.randn(N, H, d, device=device).to(DTYPE)
    ref, oracle = (block_run(tk.attention_block_ref, args, upstream, dtype) for dtype in (DTYPE, torch.float64))
    monkeypatch.setattr(tk, "attention_block_ref", None)  # a fallback of the wrapper fails
    got = block_run(tk.attention_block, args, upstream, DTYPE)
    for i, parts in enumerate(zip(got, ref, oracle, strict=True)):
        oracles.assert_as_good(*parts, f"output {i}", worst_ref=12)


@pytest.mark.parametrize("kind", ["long+value", "narrow"])
@pytest.mark.parametrize("per_token", [False, True])
def test_values_excluded_in_the_block(kind, per_token, device):
    """The output, and all gradients, those of the values and of the share among them."""
    args = block_inputs(21, 4, 32, 24, kind, device, DTYPE)
    share, upstream = torch.randn(21, 4, device=device) if per_token else torch.randn(4, device=device), torch.randn(
        21, 4, 32, device=device)
    def run(block, dtype):
        return with_gradients(lambda x, weight, ve, w_ve, w_out, share: block(
            x, weight, args[2].to(dtype or DTYPE), ve, w_ve, w_out, *args[6:], share=share),
            (*args[:2], *args[3:6], share), [upstream], dtype)
    for part in zip(run(tk.attention_block, None), run(tk.attention_block_ref, None),
                    run(tk.attention_block_ref, torch.float64)):
        oracles.assert_as_good(*part, slack=8)


@pytest.mark.parametrize("kind", ["paired", "long+value"])
def test_any_strides_of_the_gradient(kind, device):
    args, dy = block_inputs(21, 4, 16, 24, kind, device, DTYPE), torch.randn(21, 4, 16, device=device).to(DTYPE)
    for grad in dy.transpose(0, 1).contiguous().transpose(0, 1), dy[:1, :1, :1].expand(dy.shape):
        strided, plain = (block_run(tk.attention_block, args, u, DTYPE) for u in (grad, grad.contiguous()))
        assert all(map(torch.equal, strided, plain))
