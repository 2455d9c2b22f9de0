"""Head and loss, without the pointer head's copies and with them, against the dense fp64 code of oracles.py: compiled
on a GPU, in Triton's interpreter without a GPU."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch

import oracles
import triton_kernels as tk
from data.loader import sample_candidates
from oracles import ON_GPU, assert_only_view_written, framed, gpu, leaves, only_gpu
from test_pointer import borders, operands

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE_X, SCALE_W, SCALE_G = 100 / 448, 1.6 / 448, 0.75 / 448
fp8 = pytest.mark.skipif(ON_GPU and torch.cuda.get_device_capability() < (8, 9),
                         reason="FP8 products need sm_89 or a CPU")
fp32_and_fp8 = pytest.mark.parametrize("dtype, use_fp8", [(FP32, False), pytest.param(BF16, True, marks=fp8)])

WEIGHTS = (1.0, 0.5, 0.25, 0.125)
LOSS_SCALE = 0.25


# ---- Cross-entropy of rows -------------------------------------------------------------------------------------------
def softcap(logits):
    return 23 * torch.sigmoid((logits + 5) / 7.5)


def rows_oracle(logits, targets, weights, copies=None):
    """(losses, gradients of the logits and, with copies, of mass and sink_mass) in fp64; targets (n, K), -1 = none."""
    logits, *masses = leaves((logits, *(copies[:2] if copies else ())), FP64)
    gate = (copies.gate,) if copies else ()
    losses = LOSS_SCALE * oracles.target_losses(softcap(logits), targets, weights, *gate, *masses)
    return losses.detach(), *torch.autograd.grad(losses.sum(), (logits, *masses))


def empty(rows, columns, dtype, device):
    """(buffer, view of NaN (rows, columns)); only each row of the view is contiguous."""
    return framed(torch.full((rows, columns), math.nan, device=device).to(dtype), (1, 1), (8, 8))


def without_gradients(copies):
    """The copies; their gradients are NaN until they are written."""
    return copies and copies._replace(**{f"d{name}": torch.full_like(getattr(copies, name), math.nan)
                                         for name in ("mass", "sink_mass")})


def random_rows(n, classes, count, dtype, device, gate=None):
    """(logits in a buffer of NaN, targets, weights, Copies or None). Some rows have coinciding targets, others have
    fewer or none. The second of four weights is 0. In three rows the gate, which is no target, has most of the
    probability, or next to none."""
    logits = empty(n, classes, dtype, device)[1].copy_(4 * torch.randn(n, classes) - 2)
    targets = torch.randint(0, classes - (gate is not None), (n, count))
    targets[0] = classes - 1 - (gate is not None)
    targets[1] = targets[1, 0]
    weights, copies = torch.tensor(WEIGHTS[:count], device=device), None
    weights[1:2] *= count < 4
    if gate is not None:
        targets[targets >= gate] += 1
        for row, value in (2, 9.0), (3, 16.0), (4, -40.0):
            logits[row, gate] = value
        shares = torch.softmax(3 * torch.randn(n, count + 2), 1)
        mass, sink_mass = shares[:, :count].contiguous(), shares[:, count].contiguous()
        mass[4, 0], mass[2], sink_mass[2] = 0, 0, 1  # no copy; no key
        copies = without_gradients(tk.Copies(mass.to(device), sink_mass.to(device), gate))
    targets[-1, 1:] = -1
    targets[-2] = -1
    return logits, targets.to(device).t().contiguous().t(), weights, copies  # each column of targets contiguous


FEW_ROWS = [(4, 2, 1), (5, 130, 1), (6, 256, 3), (4, 2048, 2), (5, 4999, 3)]
MANY_ROWS = [(300, classes, count) for classes in (14336, 50304) for count in (1, 3)]
ROWS_WITH_COPIES = [(6, 3, 1, 2), (6, 130, 2, 0), (7, 130, 4, 129), (7, 256, 3, 0), (6, 2048, 4, 2047),
                    (7, 4999, 3, 1234)]
NAMES = "dh", "dW", "dq", "dk", "dsink"


@pytest.mark.parametrize("n, classes, count, gate, dtype", [
    *[(*row, None, FP32) for row in FEW_ROWS], *[(*row, FP32) for row in ROWS_WITH_COPIES],
    *[only_gpu(*row, None, BF16) for row in FEW_ROWS + MANY_ROWS], *[only_gpu(*row, None, FP32) for row in MANY_ROWS],
    *[only_gpu(300, *row, FP32) for row in ((14336, 3, 0), (50304, 3, 50257))]])
def test_cross_entropy(n, classes, count, gate, dtype, device, monkeypatch):
    """Kernel and reference: losses, all gradients, losses of the first targets without their weights."""
    logits, targets, weights, copies = random_rows(n, classes, count, dtype, device, gate)
    weights[0] = 0.7
    losses, grad, *others = rows_oracle(logits, targets, weights, copies)
    first, *_ = rows_oracle(logits, targets[:, :1], torch.ones(1, device=device),
                            copies and copies._replace(mass=copies.mass[:, :1]))
    wanted, results = (losses, first, grad / 2, *others), []
    for function in tk.cross_entropy_ref, tk.cross_entropy:
        (buffer, grad), (next_buffer, next_losses) = empty(n, classes, dtype, device), empty(1, n, FP32, device)
        written = without_gradients(copies)
        losses = function(logits, targets, weights, LOSS_SCALE, 2.0, grad, written, next_losses[0])
        assert_only_view_written(buffer, grad)
        assert_only_view_written(next_buffer, next_losses)
        results.append((losses, next_losses[0], grad, *(written[3:] if copies else ())))
        monkeypatch.setattr(tk, "cross_entropy_ref", None)  # a wrapper that falls back to it fails the test
    ref, got = results
    assert ref[0].dtype == got[0].dtype == FP32
    # When alpha is near 1, 1 - alpha loses digits: at alpha = 0.9996 the largest error of a gradient was 2e-3.
    lost = 1 / (1 - torch.softmax(softcap(logits.double()), 1)[:, gate]) if copies else 0
    for name, a, b, c in zip(("loss", "next loss", "dlogits", "dmass", "dsink_mass"), ref, got, wanted):
        size = c.reshape(n, -1).norm(dim=1)  # also of rows with small gradients
        bound = 1e-5 * size + 1e-6 + 5e-8 * lost if name.endswith("loss") else (1e-5 + 4e-6 * lost) * size
        for x in (a, b) if copies or name != "dlogits" else ():
            assert ((x.double() - c).reshape(n, -1).norm(dim=1) <= bound).all(), name
    if not copies:
        assert_as_good(got[2], ref[2], wanted[2], "gradient", slack=2)
    assert got[0][-2] == got[1][-2] == 0 and not got[2][-2].any()
    assert not copies or not got[3][targets < 0].any() and got[4][-2] == 0
    # Without a gradient, the losses are the same; the gradient may overwrite the logits.
    near = 1e-6 if copies else 0
    torch.testing.assert_close(tk.cross_entropy(logits, targets, weights, LOSS_SCALE, copies=copies and copies._replace(
        dmass=None, dsink_mass=None)), got[0], rtol=near, atol=near)
    written = without_gradients(copies)
    assert torch.equal(tk.cross_entropy(logits, targets, weights, LOSS_SCALE, 2.0, logits, written), got[0])
    assert all(map(torch.equal, (logits, *(written[3:] if copies else ())), got[2:]))


@gpu
@pytest.mark.parametrize("n, classes, count, gate", [
    *[(*row, None) for row in FEW_ROWS + MANY_ROWS], (50, 130, 3, 0), (50, 14336, 3, 0), (50, 50304, 3, 50257)])
def test_gradient_codes(n, classes, count, gate, device):
    """Within half a step of e5m2 of the exact gradient, saturated; loss_scale does not change them."""
    logits, targets, weights, copies = random_rows(n, classes, count, BF16, device, gate)
    for scale in (SCALE_G, 1e-6) if gate is None else (SCALE_G,):  # the second puts the largest codes above 57344
        (buffer, codes), copies = empty(n, classes, E5M2, device), without_gradients(copies)
        losses = tk.cross_entropy(logits, targets, weights, LOSS_SCALE, LOSS_SCALE * scale, codes, copies)
        wanted, grad, *masses = rows_oracle(logits, targets, weights, copies)
        exact = (grad / (LOSS_SCALE * scale)).clamp(-57344, 57344)
        assert ((losses - wanted).abs() <= 1e-5 * wanted.abs() + 1e-6).all()
        # The gradients that wait for the sum of the row are rounded to fp16, by 2^-11, before. Seen: 1.003.
        slack, rest = (1.01, 2**-23 * exact.norm(dim=1, keepdim=True)) if copies else (1.005, 0)
        assert ((codes.double() - exact).abs() <= slack * exact.abs() / 8 + 2**-17 * slack + rest).all()
        assert scale == SCALE_G or exact.abs().max() == 57344
        assert_only_view_written(buffer, codes)
        for a, b in zip(copies[3:] if copies else (), masses, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)
        if not copies:
            others = torch.empty_like(codes)
            tk.cross_entropy(logits, targets, weights, 2.0**-20, 2.0**-20 * scale, others)
            assert torch.equal(codes.float(), others.float())


@pytest.mark.parametrize("dtype", [FP32, only_gpu(BF16)])
def test_extreme_logits(dtype, device):
    """Huge and infinite logits of either sign are capped. NaN stays in its row and is not hidden."""
    logits = torch.randn(8, 70).to(device, dtype)
    for row, value in enumerate((1e4, -1e4, math.inf, -math.inf)):
        logits[row, 3:60:2] = value
    logits[4], logits[5], logits[6, 5] = -1e30, 1e30, math.nan
    targets, weights = torch.full((8, 1), 7, device=device), torch.ones(1, device=device)
    grad = torch.full_like(logits, math.nan)
    losses = tk.cross_entropy(logits, targets, weights, LOSS_SCALE, 1.0, grad)
    wanted, wanted_grad = rows_oracle(logits, targets, weights)
    sound = torch.arange(8) != 6
    assert losses[6].isnan() and grad[6].isnan().all()
    torch.testing.assert_close(losses[sound].double(), wanted[sound], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(grad[sound].double(), wanted_grad[sound], rtol=torch.finfo(dtype).eps, atol=2e-6)


@gpu
def test_rows_beyond_32_bits(device):
    """The second row of logits and gradient lies more than 2^31 elements after the first."""
    stride, classes = 2**31 + 16, 4096
    logits, codes = (torch.empty(stride + classes, dtype=dtype, device=device).as_strided((2, classes), (stride, 1))
                     for dtype in (BF16, E5M2))
    logits.copy_(torch.randn(2, classes))
    targets, weights = torch.randint(0, classes, (2, 1)).to(device), torch.ones(1, device=device)
    near = torch.empty(2, classes, dtype=E5M2, device=device)
    losses = tk.cross_entropy(logits, targets, weights, LOSS_SCALE, SCALE_G, codes)
    assert torch.equal(losses, tk.cross_entropy(logits.clone(), targets, weights, LOSS_SCALE, SCALE_G, near))
    assert torch.equal(codes.float(), near.float())


@pytest.mark.parametrize("shape", [(1, 1), (70, 130), only_gpu((768, 50304))])
def test_codes_of_the_weight(shape, device):
    """Static scale: the bits of the reference, in both layouts, saturated; NaN stays NaN; the scale stays."""
    x = (0.6 * torch.randn(shape)).to(device, BF16)
    x.view(-1)[:3] = torch.tensor([1e4, -math.inf, math.nan])[:x.numel()]
    head = tk.HeadLoss(torch.nn.Parameter(x), BF16, True)
    exact = (x.double() / tk.W_SCALE).clamp(-448, 448)
    assert head.codes.dtype == E4M3 and head.codes_t.is_contiguous() and head.scale_w == torch.tensor(tk.W_SCALE)
    reference, _ = tk.both_layouts(x, tk.W_SCALE, E4M3)
    assert torch.equal(head.codes.view(torch.uint8), reference.view(torch.uint8))
    value = head.codes.double()
    assert torch.equal(value.isnan(), exact.isnan())
    assert ((value - exact).abs() <= exact.abs() / 16 * (1 + 1e-6) + 2**-10).logical_or(exact.isnan()).all()
    assert torch.equal(head.codes_t.view(torch.uint8), head.codes.view(torch.uint8).T)


# ---- Head and loss ---------------------------------------------------------------------------------------------------
class Inputs(NamedTuple):
    h: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    gate: int | None
    point: tk.Point | None
    cu: list[int]


def head_inputs(n, width, classes, device, dtype, count=3, gate=None, words=None):
    """h is normalised. Targets come from all classes, or they are words; with a gate they often are the next token."""
    h = tk.rms_norm(torch.randn(n, width, dtype=FP64)).to(device, dtype)
    weight = torch.nn.Parameter((0.1 * torch.randn(width, classes, dtype=FP64)).to(device, dtype))
    words, point = words or (classes if gate is None else 12), None
    targets = torch.randint(words, (n,)).to(device)
    lengths = [1, n // 3, n - 1 - n // 3] if n > 3 else [n]
    if gate is not None:
        q, k, sink, tokens, start, end, _ = operands(lengths, 16, count, device, dtype, words)
        targets[:-1] = torch.where(torch.rand(n - 1).to(device) < 0.7, tokens[1:].long(), targets[:-1])
        weight.data[:, gate] *= 3  # the gate varies
        point = tk.Point(q / 2, k / 2, sink, tokens, start, end, n // 2, 0.21)
    return Inputs(h, weight, targets, torch.tensor(WEIGHTS[:count], device=device), gate, point, borders(lengths))


def gradients(loss_of, x):
    """(loss, gradients of h, of the weight (None: of its own accord), and with a gate of q, k, sink)."""
    h, *rest = leaves((x.h, *(x.point[:3] if x.point else ())))
    loss = loss_of(h, x.point and x.point._replace(**dict(zip(("q", "k", "sink"), rest))))
    return loss.detach(), *torch.autograd.grad(loss, (h, x.weight, *rest), allow_unused=True)


def run_head(head, x, loss_scale=LOSS_SCALE, **options):
    return gradients(lambda h, point: head(h, x.targets, x.weights, loss_scale, point=point, **options), x)


def plain_losses(x, h=None, point=None, loss_scale=LOSS_SCALE):
    """Losses of the references, without HeadLoss; differentiable."""
    h, point, shifted = x.h if h is None else h, point or x.point, tk.multi_token_targets(x.targets, len(x.weights))
    copies = point and tk.Copies(*tk.pointer_ref(*point, shifted), x.gate)
    return tk.cross_entropy_ref(h @ x.weight, shifted, x.weights, loss_scale, copies=copies)


def quantised(x, scale, dtype):
    return (x.double() / scale).clamp(-57344, 57344).float().to(dtype).double()


def head_oracle(x, quantise=False):
    """gradients() in fp64; quantise: with the quantisers of the FP8 head. Targets are tokens and columns."""
    shifted, h, weight = oracles.later_targets(x.targets, len(x.weights)), x.h, x.weight.detach()
    x = x._replace(h=h.double(), weight=weight.double().requires_grad_(), point=x.point and x.point._replace(
        q=x.point.q.double(), k=x.point.k.double(), sink=x.point.sink.double()))
    def loss_of_logits(logits, point):
        copies = ()
        if point:
            attn = oracles.pointer_attention(point.q, point.k, point.sink, x.cu, point.window, point.scale)
            copies = x.gate, *oracles.copy_masses(attn, oracles.pointer_hits(point.tokens, shifted))
        return LOSS_SCALE * oracles.target_losses(softcap(logits), shifted, x.weights, *copies).sum()
    if not quantise:
        return gradients(lambda h, point: loss_of_logits(h @ x.weight, point), x)
    hq, Wq = quantised(h, SCALE_X, E4M3), quantised(weight, SCALE_W, E4M3)
    logits = (SCALE_X * SCALE_W * (hq @ Wq)).to(BF16).double()
    loss, grad, _, *rest = gradients(loss_of_logits, x._replace(h=logits))
    gq = quantised(grad, LOSS_SCALE * SCALE_G, E5M2)
    return loss, LOSS_SCALE * SCALE_G * SCALE_W * gq @ Wq.T, SCALE_X * LOSS_SCALE * SCALE_G * hq.T @ gq, *rest


def next_loss(x, quantise=False):
    """The oracle's loss of the next tokens alone, with weight 1."""
    return head_oracle(x._replace(weights=torch.ones_like(x.weights[:1])), quantise)[0].item()


def assert_as_good(got, ref, oracle, name, slack=None):
    """Allows two roundings, and judges every element by the largest."""
    oracles.assert_as_good(got, ref, oracle, name, slack, floor=2 * oracle.abs().max(), norm_floor=2 * oracle.norm())


OPS = {"kernels": dict(cross_entropy=tk.cross_entropy, pointer=tk.pointer),
       "plain": dict(cross_entropy=tk.cross_entropy_ref, pointer=tk.pointer_ref),
       "plain pointer": dict(pointer=tk.pointer_ref)}  # --kernels=pointer:torch


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("ops, n, count, gate", [
    *itertools.product(("kernels", "plain"), (2, 16, 37), (1, 2, 3), (None,)),
    *((ops, *sizes, 129) for ops, sizes in itertools.product(OPS, ((2, 3), (16, 1), (37, 2), (37, 4))))])
def test_head_loss(ops, n, count, gate, dtype, device):
    """Blocks of 16 rows, also with later targets in the next block, or behind the last token."""
    x = head_inputs(n, 24, 130, device, dtype, count, gate)
    head = tk.HeadLoss(x.weight, dtype, False, gate=gate, **OPS[ops])
    head.block = 16
    got, wanted = run_head(head, x), head_oracle(x)
    ref = gradients(lambda h, point: plain_losses(x, h, point).sum(), x)
    assert head.next_loss.item() == pytest.approx(next_loss(x), rel=2e-6 if dtype == FP32 else 1e-3)
    assert [g.dtype for g in got] == [FP32, *[dtype] * (2 if gate is None else 4), FP32][:len(got)]
    # The loss is fp32 after the product; in bf16, kernel and reference sum the same rounded logits. Seen: 3e-7; 4e-7,
    # 2e-4.
    assert got[0].item() == pytest.approx(ref[0].item(), rel=2e-6 if dtype == FP32 else 1e-4)
    assert ref[0].item() == pytest.approx(wanted[0].item(), rel=2e-6 if dtype == FP32 else 1e-3)
    slack, worst = (2, 10) if gate is None else (None, 32)
    for name, a, b, c in zip(NAMES, got[1:], ref[1:], wanted[1:]):
        assert_as_good(a, b, c, name, slack)
        # A broken reference would excuse any head. Largest ratio seen: 5 (fp32 sigmoid and exponentials), 18 (dq).
        assert (b.double() - c).norm() <= worst * torch.finfo(dtype).eps / 2 * c.norm() + 1e-9, name


@fp32_and_fp8
@pytest.mark.parametrize("gate", [None, 127])
def test_gradients_accumulate_and_follow_the_upstream_gradient(gate, dtype, use_fp8, device):
    x = head_inputs(48, 32, 128, device, dtype, 2, gate)
    head = tk.HeadLoss(x.weight, dtype, use_fp8, gate=gate)
    once, four = run_head(head, x), gradients(lambda h, point: 4 * head(h, x.targets, x.weights, LOSS_SCALE,
                                                                        point=point), x)
    assert all(torch.equal(4 * a, b) and a.any() for a, b in zip(once, four, strict=True))
    for factor in 1, 4:
        (factor * head(x.h, x.targets, x.weights, LOSS_SCALE, point=x.point)).backward()
    assert torch.equal(x.weight.grad, once[2] + 4 * once[2])


def test_weight_must_not_change_before_backward(device):
    x = head_inputs(16, 24, 130, device, FP32)
    loss = tk.HeadLoss(x.weight, FP32, fp8=False)(x.h.requires_grad_(), x.targets, x.weights, LOSS_SCALE)
    with torch.no_grad():
        x.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@fp32_and_fp8
@pytest.mark.parametrize("gate", [None, 120])
def test_losses_without_gradients(gate, dtype, use_fp8, device):
    """Of each token, of some tokens, and their sum (exact=True): unquantised and outside autograd; a change of the
    weight counts at once, and in training, too, if it has no codes. `next_loss` is the loss of training and adds up."""
    x, rows = head_inputs(48, 32, 128, device, dtype, 2, gate), torch.tensor([47, 3, 3, 20, 0, 46], device=device)
    head = tk.HeadLoss(x.weight, dtype, use_fp8, gate=gate)
    head.block = 16
    x.h.requires_grad_()
    close = dict(rtol=1e-2, atol=1e-2) if dtype == BF16 else dict(rtol=1e-5, atol=1e-5)  # other products of blocks
    for _ in range(2):
        losses = head.losses(x.h, x.targets, x.weights, x.point)
        total = head(x.h, x.targets, x.weights, LOSS_SCALE, exact=True, point=x.point)
        assert losses.shape == (48,) and losses.dtype == total.dtype == FP32
        assert not losses.requires_grad and not total.requires_grad
        assert total.item() == pytest.approx(LOSS_SCALE * losses.sum().item(), rel=1e-6)
        assert total.item() == pytest.approx(plain_losses(x).sum().item(), rel=1e-5)
        torch.testing.assert_close(head.losses(x.h, x.targets, x.weights, x.point, rows), losses[rows], **close)
        with torch.no_grad():
            x.weight.mul_(3)
    assert x.weight.grad is None and head.next_loss == 0
    one = x._replace(weights=torch.ones(1, device=device))
    losses = [run_head(head, one, scale)[0].item() for scale in (0.5, 0.25)]
    assert head.next_loss.item() == pytest.approx(sum(losses), rel=1e-6)
    assert use_fp8 or losses[1] == pytest.approx(plain_losses(one).sum().item(), rel=2e-6)


@gpu
@fp8
def test_memory(device):
    """At the record's shapes, validation allocates one block of logits, and training also the codes of the gradient."""
    n, classes = 49152, 50304
    h = torch.randn(n, 768, dtype=BF16, device=device)
    weight = torch.nn.Parameter(torch.randn(768, classes, dtype=BF16, device=device) / 20)
    targets, one = torch.randint(0, classes, (n,), device=device), torch.ones(1, device=device)
    head = tk.HeadLoss(weight, BF16, True)
    peaks = []
    for exact in (True, False):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = head(h.requires_grad_(), targets, one, LOSS_SCALE, exact=exact)
        if not exact:
            loss.backward()
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
    print(peaks)
    assert peaks[0] < 3.5 and peaks[1] < 6


# ---- FP8 head --------------------------------------------------------------------------------------------------------
def assert_as_quantised(got, wanted, exact):
    """The results agree with those of quantised arithmetic, much better than these agree with the exact ones."""
    # Seen on a CPU: 5e-4 from the quantised loss, 8e-4 from the exact one.
    assert got[0].item() == pytest.approx(wanted[0].item(), rel=2e-3)
    assert got[0].item() == pytest.approx(exact[0].item(), rel=5e-3)
    for name, a, b, c in zip(NAMES, got[1:], wanted[1:], exact[1:]):
        assert a.dtype == (FP32 if name == "dsink" else BF16) and a.isfinite().all(), name
        ratio, resolution = (a.double() - b).norm() / (b - c).norm(), (b - c).norm() / c.norm()
        print(f"{name}: {ratio:.3f} {resolution:.3f}")
        # Seen: 0.03; 0.56 when the quotients are rounded to bf16 before they become codes.
        # q, k and sink have no codes, but their bf16 roundings.
        bound = 0.15 if name in ("dh", "dW") else 2**-7 * b.norm() / (b - c).norm()
        assert ratio < bound, f"{name}: {ratio:.2f} of the error of quantisation"
        assert resolution < 0.1, f"{name}: the quantised gradient is off by {resolution:.2f}"  # seen: 0.06


@fp8
@pytest.mark.parametrize("n, width, classes, block, ops, gate", [
    (48, 64, 256, 16, "kernels", None), (64, 64, 256, 1024, "kernels", None), (64, 64, 256, 1024, "plain", None),
    (64, 64, 256, 16, "kernels", 250), (64, 64, 256, 16, "plain", 250),
    only_gpu(2048, 768, 50304, 1024, "kernels", None)])
@pytest.mark.parametrize("count", [1, 3])
def test_fp8_head(n, width, classes, block, ops, gate, count, device):
    """Loss and gradients agree with quantised arithmetic, much better than that agrees with exact arithmetic."""
    x = head_inputs(n, width, classes, device, BF16, count, gate)
    head = tk.HeadLoss(x.weight, BF16, True, gate=gate, **OPS[ops])
    head.block = block
    assert_as_quantised(run_head(head, x), head_oracle(x, quantise=True), head_oracle(x))


@fp8
def test_fp8_gradients_do_not_depend_on_loss_scale(device):
    """A power of two in loss_scale scales the gradients exactly, also far below the range of the codes."""
    x = head_inputs(32, 64, 128, device, BF16)
    head = tk.HeadLoss(x.weight, BF16, True)
    (loss, dh, dW), (small, small_dh, small_dW) = (run_head(head, x, scale) for scale in (1.0, 2.0**-20))
    assert small.item() * 2**20 == loss.item() and dh.any(1).all()
    assert torch.equal(small_dh * 2**20, dh) and torch.equal(small_dW * 2**20, dW)


@fp8
def test_codes_change_only_when_refreshed(device):
    """A backward pass raises an error if the codes of its forward pass were overwritten."""
    h, weight, targets, weights, *_ = x = head_inputs(32, 64, 128, device, BF16)
    head = tk.HeadLoss(weight, BF16, True)
    before, *_ = run_head(head, x)
    with torch.no_grad():
        weight.mul_(-1.5)
    h.requires_grad_()
    late = head(h, targets, weights, LOSS_SCALE)
    assert late.item() == before.item()
    head.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(late, h)
    after = head(h, targets, weights, LOSS_SCALE).item()
    assert after != before.item() and after == tk.HeadLoss(weight, BF16, True)(h, targets, weights, LOSS_SCALE).item()


@fp32_and_fp8
@pytest.mark.parametrize("count, gate", [(1, None), (2, None), (3, None), (1, 639), (3, 639)])
def test_sampled_head(count, gate, dtype, use_fp8, device):
    """The head with 256 of 640 columns, the gate's first: positions name columns, and copies are found by ids."""
    x = head_inputs(48, 64, 640, device, dtype, count, gate, words=20)
    ids = x.targets * 7 + 3  # so that hardly an id is also the position of a target
    candidates, positions = (torch.from_numpy(part).to(device) for part in sample_candidates(
        ids.cpu().numpy(), 640, 256, 5, gate))
    # The last candidate is a token. A target of -1 is beyond the end: no copy of this token may count for it.
    candidates[1:], positions = candidates[1:].flip(0), (256 - positions) * (positions > 0)
    x = x._replace(targets=positions, point=x.point and x.point._replace(tokens=x.point.tokens * 7 + 3))
    embedding = torch.nn.Parameter(x.weight.detach().T.contiguous())
    embedding.grad = torch.zeros_like(embedding)
    head = tk.HeadLoss(x.weight, dtype, use_fp8, embedding=embedding, gate=gate)
    head.block = 16
    got = list(run_head(head, x, candidates=candidates))
    assert got[2] is None and gate in (None, candidates[0])
    got[2] = embedding.grad[candidates].T

    # The oracle's tokens are positions, too: a token is a copy of a target if they have one id.
    where = torch.full((640,), 500, dtype=torch.int32, device=device)
    where[candidates] = torch.arange(256, dtype=torch.int32, device=device)
    y = x._replace(weight=x.weight.detach()[:, candidates], gate=gate and 0,
                   point=x.point and x.point._replace(tokens=where[x.point.tokens.long()]))
    exact = head_oracle(y)
    if use_fp8:
        assert_as_quantised(got, head_oracle(y, quantise=True), exact)
    else:
        assert got[0].item() == pytest.approx(exact[0].item(), rel=2e-6)
        for name, a, b in zip(NAMES, got[1:], exact[1:]):
            # The sum over tokens has an order of the processor's own.
            rounding = (32 if name == "dsink" else 10 if gate is None else 16) * 2**-24
            assert (a.double() - b).norm() <= rounding * b.norm(), name
    assert head.next_loss.item() == pytest.approx(next_loss(y, use_fp8), rel=2e-3 if use_fp8 else 2e-6)
    # Rows of other classes have no gradient. A second gradient is added, times the upstream gradient.
    once = torch.zeros_like(embedding).index_copy(0, candidates, got[2].T)
    assert torch.equal(embedding.grad, once) and (gate is None or once[gate].any())
    (4 * head(x.h, x.targets, x.weights, LOSS_SCALE, candidates=candidates, point=x.point)).backward()
    assert torch.equal(embedding.grad, once + 4 * once)
