"""The projection of the attention block in FP8. The reference is held against fp64, the kernels against the reference.

Triton's interpreter rounds to FP8 and bf16 wrongly. So on a CPU the kernels read real codes, compute in fp32, and
write fp32 numbers where a GPU writes codes. Oracles are those of test_fp8.py."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train_gpt as T
import triton_kernels as tk
from oracles import ON_GPU, documents, gpu, with_gradients
from test_attention_block import KINDS, SCALE, WINDOW, gate_weights, plain, rotary, switches
from test_checkpoint import differing, train
from test_fp8 import BF16, E4M3, E5M2, FP32, FP64, LOSS_SCALE, bits, pytestmark, rounded  # noqa: F401
from test_guard import KNOBS, make_corpus

H, FACTOR = (6 if ON_GPU else 4), -0.5
DTYPE = BF16 if ON_GPU else FP32
GRADS = "dx", "dweight", "dve", "dw_ve", "dw_out"


@pytest.fixture
def unrounded(monkeypatch):
    """In the interpreter, the gradient's codes are fp32 numbers up to the largest code, and so are its products."""
    if not ON_GPU:
        monkeypatch.setattr(tk, "E5M2", FP32)
        monkeypatch.setitem(tk.FP8_MAX, FP32, 57344.0)
        monkeypatch.setattr(tk, "scaled_product", lambda a, b, scale_a, scale_b, out=None, dtype=None: (
            a.float() @ b.float().mT * scale_a * scale_b))


def block_inputs(kind, N, device, dtype):
    """(arguments of attention_block without codes, Fp8Projections, ProjectionCodes); weight: FACTOR times layer 1."""
    kind, value = switches(kind)
    d = 128 if ON_GPU else 32 if kind[2] else 16
    D = H * d
    weights = (torch.randn(1, 2 * D // (1 + kind[2]) + D, D) * D**-0.5).to(device, BF16)
    weights[:, 0, 0] = 0.875  # the largest value, so that the scale is a power of two and ties are ties
    projections = tk.Fp8Projections(lambda: weights, LOSS_SCALE)
    weight = (FACTOR * weights[0]).to(dtype)
    x = F.rms_norm(torch.randn(N, D, device=device), (D,)).to(dtype)
    ve = torch.randn(N, D, device=device).to(dtype) if value else None
    cu = torch.tensor([0, N // 3, N // 2, *[N] * 5], dtype=torch.int32, device=device)
    args = (x, weight, rotary(2 * N, d, device, dtype), ve, *gate_weights(H, 12, value, device, dtype),
            documents((1 + kind[0]) * cu), WINDOW, SCALE, *kind)
    return args, projections, codes_of(projections, x)


def codes_of(projections, x):
    x8, x8_t = tk.both_layouts(x.detach(), tk.x8_scale(x.size(1)), E4M3)
    [codes] = projections.of_layers(torch.full((1,), FACTOR, device=x.device))
    return codes._replace(x8=x8, x8_t=x8_t)


def block_run(block, args, codes, grad, dtype):
    """{name: y and the gradients}; that of the weight contains the factor, as the kernels' codes make it."""
    x, weight, table, ve, w_ve, w_out, *others = args
    inputs = x, weight, ve, w_ve, w_out
    found = with_gradients(lambda x, weight, *gates: block(x, weight, table.to(dtype), *gates, *others, codes), inputs,
                           [grad], dtype)
    found = dict(zip(["y", *(name for name, u in zip(GRADS, inputs) if u is not None)], found, strict=True))
    return found if codes else found | {"dweight": FACTOR * found["dweight"]}


def upstream(args, scale=0.01 * LOSS_SCALE):
    """A gradient of y of the size that loss_scale makes."""
    shape = args[0].size(0), H, 4 * args[2].size(1)
    return (scale * torch.randn(shape, device=args[0].device)).to(args[0].dtype)


class Rounded(torch.autograd.Function):
    """_ProductOfCodes in fp64, from x and the weight instead of codes."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = (weight.abs().max() / -FACTOR / 448).float().double() * -FACTOR
        x8, w8 = rounded(x * 16, E4M3) / 16, rounded(weight / scale, E4M3) * scale
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, grad):
        (x8, w8), scale = ctx.saved_tensors, LOSS_SCALE / 64
        g = grad if tk.E5M2 == FP32 else rounded(grad / scale, E5M2) * scale
        return g @ w8, g.T @ x8


def oracle(args, grad, monkeypatch):
    """block_run in fp64: the plain block, but for the product of codes."""
    with monkeypatch.context() as patch:
        patch.setattr(tk, "_ProductOfCodes", SimpleNamespace(apply=lambda x, w, *codes: Rounded.apply(x, w)))
        return block_run(tk.attention_block_ref, args, (), grad, FP64)


def assert_near(got, wanted, tolerance):
    assert got.keys() == wanted.keys()
    for name, a in got.items():
        error = ((a.double() - wanted[name]).norm() / wanted[name].double().norm()).item()
        print(f"{name} {error:.6f}")
        assert error < tolerance, (name, error)


# ---- The block -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_against_the_definition(kind, dtype, monkeypatch):
    """With activations in fp32 only FP8 rounds, and dx and dweight are rounded to bf16. In bf16 other codes follow."""
    args, _, codes = block_inputs(kind, 48, torch.device("cpu"), dtype)
    grad = upstream(args)
    monkeypatch.setattr(tk, "INTERPRETED", False)
    monkeypatch.setattr(tk, "project", None)
    got, ref = (block_run(f, args, codes, grad, dtype) for f in (tk.attention_block, tk.attention_block_ref))
    assert all(torch.equal(got[name], ref[name]) for name in ref)
    assert_near(got, oracle(args, grad, monkeypatch), 2**-8 if dtype == FP32 else 2**-4)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_the_block(kind, device, unrounded, monkeypatch):
    """Kernels against the reference, and against fp64. On a GPU, bf16 and other sums make other codes."""
    args, _, codes = block_inputs(kind, 1008 if ON_GPU else 80, device, DTYPE)
    grad = upstream(args)
    ref, wanted = block_run(tk.attention_block_ref, args, codes, grad, DTYPE), oracle(args, grad, monkeypatch)
    monkeypatch.setattr(tk, "attention_block_ref", None)  # a fallback of the wrapper fails
    got = block_run(tk.attention_block, args, codes, grad, DTYPE)
    assert_near(got, ref, 2**-4 if ON_GPU else 1e-5)
    assert_near(got, wanted, 2**-4 if ON_GPU else 1e-4)
    if ON_GPU:  # a race would change a result
        again = block_run(tk.attention_block, args, codes, grad, DTYPE)
        assert all(torch.equal(again[name], got[name]) for name in got)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N, tma", [
    *([] if ON_GPU else [(16, False), (80, True)]),
    *[pytest.param(*case, marks=gpu) for case in ((1008, False), (1008, True), (16384, True))]])
def test_kernels_of_the_projection(kind, N, tma, device, monkeypatch):
    """Both kernels alone: values, codes of both layouts, saturation, and nothing read beyond the last token."""
    monkeypatch.setattr(tk, "_has_tma", lambda device: tma)
    args, _, codes = block_inputs(kind, N, device, DTYPE)
    (kind, value), (x, weight, table, ve) = switches(kind), args[:4]
    gate = 2 * torch.sigmoid(torch.randn(N, H, device=device)).to(DTYPE) if value else None
    d = 4 * table.size(1)
    width = d // (1 + kind[2])
    poison, operands = torch.full_like(x, torch.nan), (codes.x8, codes.w8, codes.x_scale, codes.w_scale)
    qk, v, rstd = tk.project(poison, weight, table, ve, gate, *kind, operands)
    grads = [torch.randn(N + 1, H, size, device=device).to(DTYPE) for size in (width, width, d)]
    for grad in grads:
        grad[N] = torch.nan
    grads = [grad[:N] for grad in grads]
    dtype, limit = E5M2 if ON_GPU else FP32, 57344.0
    scale = codes.grad_scale * (1 if ON_GPU else 40 / limit)  # on a CPU, some fp32 codes saturate
    dqkv, dqkv_t = (torch.empty(shape, device=device).to(dtype) for shape in ((N, len(weight)), (len(weight), N)))
    dve, dgate = tk.project_backward(*grads, qk, rstd, table, ve, gate, *kind[:2], dqkv, dqkv_t, scale)
    assert torch.equal(dqkv.float(), dqkv_t.float().T)

    qkv = (codes.x8.double() * codes.x_scale.double()) @ (codes.w8.double() * codes.w_scale.double()).T
    outs, (wanted, *others) = plain(qkv, table, ve, gate, kind, grads, FP64)
    wanted = (wanted / scale.double()).clamp(-limit, limit)
    assert ON_GPU or 0.01 < (wanted.abs() == limit).double().mean() < 0.99
    got = dict(q=qk[0, :N], k=qk[1, :N], v=v) | (dict(dve=dve, dgate=dgate) if value else {})
    assert_near(got, dict(zip(got, (*outs, *others))), 2**-6 if ON_GPU else 1e-5)
    if not ON_GPU:
        return assert_near({"dqkv": dqkv}, {"dqkv": wanted}, 1e-5)
    same = (dqkv.double() == rounded(wanted, E5M2)).double().mean().item()
    print(f"{same:.4f} of the codes are the same")
    assert same > 0.9
    step = 1.01 * 2.0**-2  # to the next code, at most
    torch.testing.assert_close(dqkv.double(), wanted, rtol=step, atol=step * 1e-2 * wanted.abs().max().item())


@pytest.mark.parametrize("kind", ["value", "narrow+paired"])
def test_codes_that_need_no_rounding(kind, device):
    """The real format: gradients of v that e5m2 holds, in both layouts, and zeros for q and k."""
    N, (args, _, codes) = 80, block_inputs(kind, 80, device, DTYPE)
    (kind, value), (x, weight, table, ve) = switches(kind), args[:4]
    gate = torch.ones(N, H, device=device, dtype=DTYPE) if value else None
    d = 4 * table.size(1)
    width = d // (1 + kind[2])
    qk, _, rstd = tk.project(x, weight, table, ve, gate, *kind, codes[:4])
    zeros, dv = torch.zeros(N, H, width, device=device, dtype=DTYPE), torch.randint(-4, 5, (N, H, d))
    dqkv, dqkv_t = (torch.full(shape, 7.0, device=device).to(E5M2) for shape in ((N, len(weight)), (len(weight), N)))
    tk.project_backward(zeros, zeros, dv.to(device, DTYPE), qk, rstd, table, ve, gate, *kind[:2], dqkv, dqkv_t,
                        torch.tensor(0.5, device=device))
    wanted = F.pad(2.0 * dv.flatten(1), (2 * H * width, 0))
    assert torch.equal(dqkv.float().cpu(), wanted) and torch.equal(dqkv_t.float().cpu(), wanted.T)


@gpu
def test_graph(device):
    """A captured block replays with the codes of its time."""
    args, projections, codes = block_inputs("value", 1008, device, BF16)
    grad = upstream(args)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    block_run(tk.attention_block, args, codes, grad, BF16)  # compiles the kernels

    def step():
        return block_run(tk.attention_block, args, codes_of(projections, args[0]), grad, BF16)
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for _ in range(3):
        graph.replay()
        wanted = step()
        assert all(torch.equal(results[name], wanted[name]) for name in wanted)
        projections.weights().mul_(1.1)
        projections.refresh()


def test_bank_must_not_be_quantised_before_backward(device):
    args, projections, codes = block_inputs("plain", 48, device, DTYPE)
    y = tk.attention_block(args[0].requires_grad_(), *args[1:], codes)
    projections.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


LAYERS = ["--layer0=paired value_embed narrow", "--layer4=two_lanes paired narrow input_from=3",
          "--layer5=two_lanes long value_embed input_from=3"]


def test_trainer(tmp_path, monkeypatch, fp8_training):
    """Two steps with MLPs and projections in FP8 learn nearly what bf16 learns, and only training is in FP8. Layers of
    the same input share its codes. A resumed run goes on with the same scales, digit for digit; a checkpoint without
    scales will do. The warm-up leaves no trace."""
    corpus = SimpleNamespace(args=["--preset=record74", *KNOBS, *LAYERS, *make_corpus(tmp_path, bos=512),
                                   "--dtype=bfloat16", "--save_every=2", "--keep=99"])
    both = "--fp8_mlp=true", "--fp8_qkv=true"
    pad, made, seen, mlps = T.Sharded.padded, [], [], []
    make, block, mlp = tk.both_layouts, tk.attention_block_ref, tk.Fp8Mlps.__call__

    # The optimizer moves a bank that the ranks do not divide. Here it moves the bank always, and the codes must follow.
    def moved(x, length):
        return pad(x, length).clone()

    def counted(x, scale, dtype):
        result = make(x, scale, dtype)
        if not isinstance(scale, torch.Tensor):  # not the codes of weights and gradients
            made.append(result)  # keeps the codes, so that each has an id of its own
        return result
    def watched(x, weight, *args):
        codes = next((arg for arg in args if isinstance(arg, tk.ProjectionCodes)), None)
        seen.append((codes and id(codes.x8), torch.is_grad_enabled()))
        if codes:
            assert torch.equal(bits(codes.x8), bits(make(x, codes.x_scale, E4M3)[0]))
            wanted = weight.detach().float() * (codes.dw_scale / codes.x_scale)  # with the factor
            error = (codes.w8.float() * codes.w_scale - wanted).abs()
            assert (error <= wanted.abs() * 0.07 + codes.w_scale.abs() * 2**-9).all()
        return block(x, weight, *args)
    def watched_mlp(self, i, x, W1, *args):
        mlps.append((i, torch.is_grad_enabled()))
        assert torch.equal(bits(make(W1.detach(), self.scales[i, 1, 0], E4M3)[0]), bits(self.codes[i, 0]))
        return mlp(self, i, x, W1, *args)

    monkeypatch.setattr(T.Sharded, "padded", staticmethod(moved))
    monkeypatch.setattr(tk, "both_layouts", counted)
    monkeypatch.setitem(tk.IMPLEMENTATIONS["attention"], "torch", watched)
    monkeypatch.setattr(tk.Fp8Mlps, "__call__", watched_mlp)
    plain = train(corpus, tmp_path / "plain")
    assert not made and {x8 for x8, _ in seen} == {None} and not mlps
    seen.clear()
    fp8 = train(corpus, tmp_path / "fp8", *both)
    assert "qkv_training:fp8" in fp8.text and all(training == (x8 is not None) for x8, training in seen)
    assert {i for i, _ in mlps} == {*range(6)} and all(training for _, training in mlps)
    trained = [x8 for x8, training in seen if training]
    passes = [trained[i:i + 5] for i in range(0, len(trained), 5)]  # layer 2 has no attention
    # Inputs of the attention of layers 0, 1 and 3, one of 4 and 5; inputs and gradients of six MLPs.
    assert len(made) == (4 + 2 * 6) * len(passes) > 0
    for first, second, third, *shared in passes:
        assert len({first, second, third, *shared}) == 4 and len(set(shared)) == 1
    losses = [[float(x) for x in re.findall(r"val_loss:([\d.]+)", run.text)] for run in (plain, fp8)]
    assert losses[0][0] == losses[1][0] and {"p vo_bank", "p mlp_bank"} <= {*differing(fp8.saved[4], plain.saved[4])}
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    resumed = train(corpus, tmp_path / "resumed", *both, f"--resume={fp8.saved[2]}")
    assert differing(resumed.saved[4], fp8.saved[4]) == []
    first, last, again = (torch.load(path, weights_only=True)["fp8_mlps"]
                          for path in (fp8.saved[2], fp8.saved[4], resumed.saved[4]))
    assert (first["post_scale"] < 1).all() and (first["dpre_scale"] > 0).all()
    assert all(torch.equal(last[key], again[key]) for key in ("post_scale", "dpre_scale"))
    train(corpus, tmp_path / "other", *both, f"--resume={plain.saved[2]}")
    run = T.Trainer.run
    monkeypatch.setattr(T.Trainer, "run", lambda self: T.warm_up(self) or run(self))
    warm = train(corpus, tmp_path / "warm", *both)
    assert "Resetting Model" in warm.text and differing(warm.saved[4], fp8.saved[4]) == []
