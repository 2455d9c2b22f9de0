"""Projection, gates and the whole attention block against fp64: on a GPU, or in Triton's interpreter without a GPU."""

import math
from functools import partial

import pytest
import torch

import oracles
import triton_kernels as tk
from oracles import ON_GPU, framed, gpu

FP32, BF16 = torch.float32, torch.bfloat16
DTYPE = BF16 if ON_GPU else FP32
KINDS = ("plain", "value", "paired", "paired+value", "long", "long+value", "narrow", "narrow+value", "narrow+paired",
         "narrow+paired+value")
WINDOW, SCALE = 9, 0.2


@pytest.fixture(autouse=True)
def poisoned_empty():
    """torch.empty returns NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


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


def leaves(tensors, dtype):
    return [None if u is None else u.detach().to(dtype).requires_grad_() for u in tensors]


def plain(qkv, table, ve, gate, kind, grads, dtype):
    """q, k, v and the gradients of qkv, ve, gate by the reference; its projection is the identity here."""
    qkv, ve, gate = inputs = leaves((qkv, ve, gate), dtype)
    eye = torch.eye(qkv.size(1), dtype=dtype, device=qkv.device)
    outs = tk.project_ref(qkv, eye, table.to(dtype), ve, gate, *kind)
    inputs = [u for u in inputs if u is not None]
    return [u.detach() for u in outs], torch.autograd.grad(outs, inputs, [g.to(dtype) for g in grads])


def only_gpu(*values):
    return pytest.param(*values, BF16, marks=gpu)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N, H, d, D, dtype", [  # a program takes tiles of 32 tokens and 32 of D
    (1, 2, 16, 8, FP32), (2, 2, 16, 20, FP32), (37, 6, 16, 40, FP32), (37, 5, 16, 40, FP32), (5, 1, 16, 8, FP32),
    only_gpu(129, 2, 64, 72), only_gpu(1003, 5, 64, 320), only_gpu(1003, 3, 128, 384),
    *[only_gpu(N, 6, 128, 768) for N in (1, 1003, 49152)]])
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


def test_rows_of_the_offset(device):
    """Half a key moves to the next token. Token 0 keeps its half; row N keeps the last half for the backward pass."""
    N, H, d = 35, 2, 16
    args = inputs(N, H, d, 24, False, device, FP32)
    still, moved = (tk.project(*args, False, offset, False)[0] for offset in (False, True))
    assert torch.equal(still[:, :N, :, :d // 2], moved[:, :N, :, :d // 2])
    assert torch.equal(still[1, :N, :, d // 2:], moved[1, 1:, :, d // 2:])
    assert torch.equal(still[1, 0], moved[1, 0])
    assert torch.equal(still[::2, :N], moved[::2, :N])


@pytest.mark.parametrize("narrow", [False, True])
def test_rotary_rows_of_paired_layers(narrow, device):
    """K4: the angle depends on the token and on the parity of the head."""
    N, H, d = 3, 6, 32
    x, weight, table, *_ = inputs(N, H, d, 24, False, device, FP32, narrow)
    still = torch.ones_like(table) * table.new_tensor([1, 0])
    plain = tk.project(x, weight, still, None, None, False, False, narrow)[0][0, :N]
    q = tk.project(x, weight, table, None, None, True, False, narrow)[0][0, :N]
    for t in range(N):
        for h in range(H):
            torch.testing.assert_close(q[t, h], tk.rotate(plain[t, h], table[2 * t + h % 2]))


def gate_weights(H, C, value, device, dtype):
    """w_ve, w_out, each (H, C)."""
    w_ve, w_out = (torch.randn(H, C, device=device).mul(C**-0.5).to(dtype) for _ in range(2))
    return w_ve if value else None, w_out


def plain_gates(args, paired, grads, dtype):
    """Gates, and the gradients of x, ve, w_ve, w_out, or without ve of x and w_out, by the reference."""
    inputs = leaves(args, dtype)
    outs = [u for u in tk.head_gates_ref(*inputs, paired) if u is not None]
    inputs, grads = [u for u in inputs if u is not None], [g.to(dtype) for g in grads]
    return [u.detach() for u in outs], torch.autograd.grad(outs, inputs, grads, materialize_grads=True)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("N, H, d, D, C, dtype", [  # a program takes 128 tokens
    (1, 2, 16, 12, 12, FP32), (130, 3, 16, 20, 4, FP32), (261, 6, 16, 40, 12, FP32),
    *[only_gpu(N, 6, 128, 768, 12) for N in (1, 129, 1003, 49152)]])
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

    outs64, grads64 = plain_gates(args, paired, upstream, torch.float64)
    outs, ref_grads = plain_gates(args, paired, upstream, dtype)
    names = ("out_gate", "ve_gate", "dx", "dve", "dw_ve", "dw_out") if value else ("out_gate", "dx", "dw_out")
    got = *gates, *inner, *dw_ve, dw_out
    for name, *parts in zip(names, got, (*outs, *ref_grads), (*outs64, *grads64), strict=True):
        oracles.assert_as_good(*parts, name, worst_ref=12)  # largest seen: 7 (fp32)

    # The gradients are added to dx and dve, rounded once; other channels stay unchanged; a run repeats bit for bit.
    after = [u.clone() for u in before]
    assert all(u is v is None or torch.equal(u, v) for u, v in zip(backward(*after), dweights))
    assert torch.equal(tk.head_gates(*args, paired), gates)
    for was, total, ref, grad64, seen in zip(before, after, ref_grads, grads64, (C, 0 if paired else C // 2)):
        assert torch.equal(total[:, seen:], was[:, seen:])
        oracles.assert_as_good(total, was + ref, was.double() + grad64, "sum", worst_ref=12)


def block_inputs(N, H, d, D, kind, device, dtype):
    kind, value = switches(kind)
    x, weight, table, ve, _ = inputs(N, H, d, D, value, device, dtype, *kind[2:])
    cu = torch.tensor([0, N // 3, N // 2, *[N] * 5], dtype=torch.int32, device=device)
    return x, weight, table, ve, *gate_weights(H, 12, value, device, dtype), cu, WINDOW, SCALE, *kind


def block_run(function, args, upstream, dtype):
    """y and the gradients of the inputs."""
    x, weight, table, ve, w_ve, w_out, *others = args
    inputs = x, weight, ve, w_ve, w_out = leaves((x, weight, ve, w_ve, w_out), dtype)
    y = function(x, weight, table.to(dtype), ve, w_ve, w_out, *others)
    return y.detach(), *torch.autograd.grad(y, [u for u in inputs if u is not None], upstream.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_block(kind, device, monkeypatch):
    """Also with the borders of the documents made before, as layers share them."""
    N, H, d, D = (261, 6, 128, 768) if ON_GPU else (29, 4, 32 if "narrow" in kind else 16, 40)
    args, upstream = block_inputs(N, H, d, D, kind, device, DTYPE), torch.randn(N, H, d, device=device).to(DTYPE)
    ref, oracle = (block_run(tk.attention_block_ref, args, upstream, dtype) for dtype in (DTYPE, torch.float64))
    monkeypatch.setattr(tk, "attention_block_ref", None)  # a fallback of the wrapper fails
    got = block_run(tk.attention_block, args, upstream, DTYPE)
    for i, parts in enumerate(zip(got, ref, oracle, strict=True)):
        oracles.assert_as_good(*parts, f"output {i}", worst_ref=12)
    *before, cu_seqlens, window, scale, paired, offset, narrow = args
    documents = tk.document_of_tokens((1 + paired) * cu_seqlens, (1 + paired) * N)
    monkeypatch.setattr(tk, "document_of_tokens", None)
    block = partial(tk.attention_block, documents=documents)
    again = block_run(block, (*before, cu_seqlens, window, scale, paired, offset, narrow), upstream, DTYPE)
    assert all(map(torch.equal, again, got))


@pytest.mark.parametrize("kind", ["long+value", "narrow"])
@pytest.mark.parametrize("per_token", [False, True])
def test_values_excluded_in_the_block(kind, per_token, device):
    """The output, and all gradients, those of the values and of the share among them."""
    args = block_inputs(21, 4, 32, 24, kind, device, DTYPE)
    share, upstream = torch.randn(21, 4, device=device) if per_token else torch.randn(4, device=device), torch.randn(
        21, 4, 32, device=device)

    def run(block, dtype):
        inputs = leaves(args[:6], dtype)
        share_leaf, = leaves([share], dtype if dtype == torch.float64 else FP32)
        y = block(*inputs[:2], inputs[2].detach(), *inputs[3:], *args[6:], share=share_leaf)
        wanted = [*(u for i, u in enumerate(inputs) if u is not None and i != 2), share_leaf]
        return y.detach(), *torch.autograd.grad(y, wanted, upstream.to(dtype))
    for part in zip(*(run(*each) for each in ((tk.attention_block, DTYPE), (tk.attention_block_ref, DTYPE),
                                              (tk.attention_block_ref, torch.float64)))):
        oracles.assert_as_good(*part, slack=8)


@pytest.mark.parametrize("kind", ["long+value", "paired+value"])
def test_gradients_beside_autograd(kind, device):
    """Rows of banks, columns and scaled matrices get the gradients of plain tensors, also those that two blocks read or
    none."""
    (x, _, table, ve, _, _, *others), H = block_inputs(21, 4, 16, 24, kind, device, FP32), 4
    shapes = (3, 1, 192, 24), (3,), (3, H, 12), (3, H, 12), (2 * H + 1, 21)
    given = [torch.randn(*shape, device=device) for shape in shapes]
    upstream = [torch.randn(21, H, 16, device=device) for _ in range(3)]

    def gradients(unbind, columns, scaled_weights):
        weights, factors, w_ves, w_outs, shares = inputs = leaves(given, FP32)
        weights, w_ves, w_outs = scaled_weights(weights, factors), unbind(w_ves), unbind(w_outs)
        shares = columns(shares, [H, 1, H])
        ys = [tk.attention_block(x, *weights[i], table, ve, w_ves[i], w_outs[i], *others, share=shares[2 * i])
              for i in (0, 1, 1)]
        return torch.autograd.grad(ys, inputs, upstream)
    for got, wanted in zip(gradients(tk.unbind, tk.columns, tk.scaled_weights),
                           gradients(torch.unbind, tk.columns_ref, tk.scaled_weights_ref), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["paired", "long+value"])
def test_any_strides_of_the_gradient(kind, device):
    args, dy = block_inputs(21, 4, 16, 24, kind, device, DTYPE), torch.randn(21, 4, 16, device=device).to(DTYPE)
    for grad in dy.transpose(0, 1).contiguous().transpose(0, 1), dy[:1, :1, :1].expand(dy.shape):
        strided, plain = (block_run(tk.attention_block, args, u, DTYPE) for u in (grad, grad.contiguous()))
        assert all(map(torch.equal, strided, plain))


def test_reference_on_cpu(monkeypatch):
    monkeypatch.setattr(tk, "INTERPRETED", False)
    monkeypatch.setattr(tk, "project", None)
    for dtype in (FP32, BF16):
        args = block_inputs(9, 2, 16, 16, "long+value", torch.device("cpu"), dtype)
        assert torch.equal(tk.attention_block(*args), tk.attention_block_ref(*args))


@pytest.mark.parametrize("change, message", [
    ({1: torch.zeros(97, 16)}, r"weight must be \(48 H, 16\), H even in paired layers, got \(97, 16\)"),
    ({1: torch.zeros(64, 16), 11: True}, "a narrow layer has no offset, and d is at least 32; got d = 16"),
    ({1: torch.zeros(64, 16), 10: True, 11: True}, "a narrow layer has no offset, .* offset=True"),
    ({1: torch.zeros(48, 16), 11: True}, r"8 \(q, k\) and 16 \(v\) weight must be \(32 H, 16\)"),
    ({4: torch.zeros(3, 12), 5: torch.zeros(3, 12)}, r"w_out must be \(2, C\), C even and at most 16, got \(3, 12\)"),
    ({4: torch.zeros(2, 18), 5: torch.zeros(2, 18)}, r"got \(2, 18\)"),
    ({4: torch.zeros(2, 11), 5: torch.zeros(2, 11)}, r"got \(2, 11\)"),
    ({2: torch.zeros(17, 4, 2)}, r"rotary must have 18 rows, got \(17, 4, 2\)"),
    ({2: torch.zeros(18, 2, 4).mT}, "rotary must be contiguous torch.float32"),
    ({4: None}, r"ve must be \(9, 32\) and w_ve \(2, 12\), or both None, got \(9, 32\) and None"),
    ({3: torch.zeros(9, 31)}, r"got \(9, 31\) and \(2, 12\)"),
    ({4: torch.zeros(2, 6)}, r"w_ve must be .* shape \(2, 12\) .* got .* shape \(2, 6\)"),
    ({0: torch.zeros(9, 18), 1: torch.zeros(96, 18)},
     "rows of x must be multiples of 16 bytes, got 18 elements of torch.float32"),
    ({0: torch.zeros(9, 16, dtype=BF16)}, "weight must be torch.bfloat16 .* got torch.float32"),
    ({1: torch.zeros(144, 16), 2: torch.zeros(18, 6, 2)}, "power of two and at least 16, got 24"),
])
def test_errors_say_what_was_wrong(change, message):
    args = list(block_inputs(9, 2, 16, 16, "paired+value", torch.device("cpu"), FP32))
    for i, value in change.items():
        args[i] = value
    with pytest.raises(ValueError, match=message):
        tk.attention_block(*args)
