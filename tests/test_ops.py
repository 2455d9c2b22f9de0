"""The plain attention against oracles.py, the choice of implementations, the model with kernels and its micro-steps."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
import triton_kernels as tk
from data import loader as L
from data.loader import sorted_pieces
from data.run.warmup import MicroStepGraphs

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ON_GPU = torch.cuda.is_available()
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def random_documents(n, longest, seed=0):
    """cu_seqlens (int32) with empty entries at the end: documents of 1 to `longest` tokens, about a quarter of one
    token."""
    rng, lengths = np.random.default_rng(seed), []
    while (left := n - sum(lengths)) > 0:
        lengths.append(min(left, 1 if rng.random() < 0.25 else int(rng.integers(1, longest + 1))))
    borders = [0, *np.cumsum(lengths).tolist()]
    return torch.tensor(borders + [n] * 5, dtype=torch.int32)


def with_gradients(function, *inputs, upstream):
    """(output, gradients of the inputs)."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, upstream)


# ---- Attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, longest, windows", [
    (300, 90, (0, 1, 127, 128, 129, 299, 10000)),  # three blocks, the last of 44
    (384, 384, (5, 128, 200)),  # documents across several blocks
    (129, 200, (3, 128, 500)),  # a block of one token
    (70, 30, (0, 7, 69, 70, 1000)),  # shorter than a block
    (1, 1, (0, 1)),
    (40, 1, (0, 16))])  # nothing but documents of one token
def test_attention_ref(n, longest, windows, device):
    cu = random_documents(n, longest, seed=n)
    q, k, v, upstream = (torch.randn(n, 2, 8, dtype=FP64).to(device) for _ in range(4))
    gate = torch.ones_like(q[..., 0])
    for window in windows:
        plain = lambda *qkv: tk.attention_ref(*qkv, gate, cu.to(device), window, 0.3)
        dense = lambda *qkv: oracles.attend(*qkv, cu.tolist(), window, 0.3)
        got, wanted = (with_gradients(f, q, k, v, upstream=upstream) for f in (plain, dense))
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=lambda text: f"{name}, window {window}: {text}")


# ---- Choice of implementations ---------------------------------------------------------------------------------------

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # naming a device needs none
OPS = ("XXT", "XTX", "ba_plus_cAA", "transpose_copy", "transpose_add", "attention", "mlp", "pointer", "pointer_inputs",
       "cross_entropy", "update_rows", "update_few_rows", "signed_rows", "embedding_grad", "fused_momentum",
       "normuon_update", "adam_update", "replicated_update", "mix")
FAST = dict.fromkeys(OPS, "triton")


@pytest.mark.parametrize("device, wanted, changed", [
    (CPU, "auto", dict.fromkeys(OPS, "torch")),
    (CUDA, "auto", FAST),
    (CUDA, "torch", dict.fromkeys(OPS, "torch")),
    (CUDA, "XXT:torch,transpose_add:torch", FAST | {"XXT": "torch", "transpose_add": "torch"}),
    pytest.param(CPU, "XTX:triton", dict.fromkeys(OPS, "torch") | {"XTX": "triton"},
                 marks=pytest.mark.skipif(ON_GPU, reason="kernels take CPU tensors in Triton's interpreter only")),
])
def test_choose_ops(device, wanted, changed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    ops, names = tk.choose_ops(device, wanted)
    assert names == changed and set(vars(ops)) == set(OPS)
    for op, name in names.items():
        function = op.replace("attention", "attention_block") + {"triton": "", "torch": "_ref"}[name]
        assert getattr(ops, op) is getattr(tk, function)


@pytest.mark.parametrize("wanted, message", [
    ("attention:flash", "'attention:flash' is not one of .*attention:triton.torch, .*XXT:triton.torch"),
    ("mlp:torch,XXT:cuda", "'XXT:cuda' is not one of"), ("attention", "'attention' is not one of")])
def test_implementations_that_do_not_exist(wanted, message, monkeypatch):
    """Each is refused before anything runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(ValueError, match=f"kernels: {message}"):
        tk.choose_ops(CUDA, wanted)


# ---- The model with kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record74", [pytest.param(True, marks=gpu), False])
def test_model_with_all_kernels(record74, device):
    """Kernels and plain operations, judged by the same model in fp64. On a GPU in bf16, with production widths; in the
    interpreter small."""
    dtype, n, D, H, depth = (BF16, 1008, 768, 6, 11) if ON_GPU else (FP32, 40, 64, 2, 3)
    config = T.Model(257, D, H) if record74 else T.Model(257, D, H, pointer=True, backout_layer=depth // 2,
                                                         layers=T.wire(depth))
    fast, _ = tk.choose_ops(device, ",".join(f"{op}:triton" for op in tk.IMPLEMENTATIONS))
    plain, _ = tk.choose_ops(device, "torch")
    model, reference, exact = (T.GPT(config, *each, device) for each in ((fast, dtype), (plain, dtype), (plain, FP64)))
    model.init_weights(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.1 if p.numel() < 1000 else 0.02))
    exact.double()
    for other in reference, exact:
        other.load_state_dict(model.state_dict())

    cu = random_documents(n, n // 5).to(device)
    tokens = torch.randint(0, 257, (n,), dtype=torch.int32)
    rows = {"bigram_embed": torch.from_numpy(L.ngram_hash(tokens.numpy(), *config.ngrams[0])).to(device)}
    ids = {"tokens": tokens, "bigram_embed": rows["bigram_embed"].cpu()}
    pieces = {name: torch.from_numpy(sorted_pieces(x.numpy())).to(device) for name, x in ids.items()}
    tokens = tokens.to(device)

    def run(model, dtype):
        settings = []
        for turning in 1.0, T.NARROW_SCALE:
            frequencies, scale = T.rotary_states(config.head_dim, [896], turning)[0]
            settings += T.rotary_table(frequencies, 2 * n, device, BF16).to(dtype), scale  # rounded alike for all
        table, scale, *narrow = settings
        out = model(tokens, cu, rows, T.AttentionSettings(table, n // 30, n // 10, scale, n // 4, *narrow), pieces)
        read = [out.h, *(out.point[:3] if out.point else ())]
        torch.manual_seed(1)
        torch.autograd.backward(read, [torch.randn(x.shape).bfloat16().to(x) for x in read])
        grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        return {"h": out.h.detach().double()} | grads

    wanted, (fused, unfused) = run(exact, FP64), (
        {name: x for name, x in run(each, dtype).items()} for each in (model, reference))
    for errors in fused, unfused:
        assert errors.keys() == wanted.keys()
        for name, x in errors.items():
            errors[name] = ((x - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-30)).item()
    print({name: f"{unfused[name]:.1e} {fused[name]:.1e}" for name in wanted})
    small, rounding = [name for name in wanted if wanted[name].numel() < 1000], 2 * torch.finfo(BF16).eps
    for name in wanted.keys() - set(small):
        assert fused[name] <= 2 * unfused[name] + rounding / 4, name
    # Few numbers each, so that one may be exact by luck: together.
    total, allowed = (math.hypot(*(each[name] for name in small)) for each in (fused, unfused))
    assert total <= 2 * allowed + rounding
    assert max(unfused[name] for name in wanted.keys() - set(small)) < 0.4, "bf16 is not that bad"  # seen: 0.12


# ---- Micro-steps -----------------------------------------------------------------------------------------------------


def micro_steps(device, record, pointer, rows=(320, 208, 320, 208, 320, 208, 208), apart=False, few_rows=False):
    """Losses of micro-steps of two stages in turn, fresh data each, the head changed on the way; and the gradients.

    The stage with 320 tokens takes 256 of 384 classes. Micro-step 4 has too many targets for the 128 that it may take.
    apart: the gradients of each micro-step start from zero and are added up in fp64. few_rows: bigrams and trigrams
    have a table whose gradients are FewRows."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    config = T.Model(vocab_size=257, model_dim=768 if on_gpu else 96, pointer=pointer, bigram_signs=few_rows,
                     ngram_rows=(900.0, 1100.0) if few_rows else (0.0,))
    ops, _ = tk.choose_ops(device, "auto")
    dtype = BF16 if on_gpu else FP32
    model = T.GPT(config, ops, dtype, device)
    model.init_weights(0)
    head = tk.HeadLoss(model.lm_head, dtype, on_gpu, ops.cross_entropy, model.embed, ops.pointer, config.gate_id)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    table, few = config.ngram_table, None
    if few_rows:
        few = model.tables[table].few = tk.FewRows(model.get_parameter(table).detach(), 2 * sum(rows))
    sums = {name: torch.zeros_like(param, dtype=FP64) for name, param in model.named_parameters()}
    trainer = SimpleNamespace(head=head, micro_steps=4, model=model, shared=[])
    step = MicroStepGraphs(lambda *args: T.Trainer.micro_step(trainer, *args), record)
    frequencies, scale = T.rotary_states(config.head_dim, [128])[0]
    views = {n: T.AttentionSettings(T.rotary_table(frequencies, 640, device, dtype), n // 10, n // 5,
                                    scale, n)
             for n in set(rows)}
    losses = []
    for i, n in enumerate(rows):
        tokens = torch.randint(257, (n + 1,)).numpy()
        cu = np.array([0, 50 + 10 * i, n, n, n], np.int32)
        count = 0 if n != 320 else 128 if i == 4 else 256
        batch = L.make_batch(tokens, cu, SimpleNamespace(model=config), device, row=i, count=count)
        assert (batch.candidates is None) == (i == 4 or n == 208)
        losses.append(step(batch, torch.tensor([1.0, 0.1 * i], device=device), views[n], stage=n).item())
        with torch.no_grad():
            model.lm_head.mul_(1.5)
            if apart or i == len(rows) - 1:
                if few:
                    n = few.count.item()
                    model.get_parameter(table).grad[few.rows[:n].long()] = few.grad[:n]
                    few.load(few.rows[:0], few.grad[:0])
                for name, param in model.named_parameters():
                    sums[name] += param.grad
                    param.grad.zero_()
        if on_gpu:
            head.refresh()
    return [*losses, head.next_loss.item()], sums


KINDS = pytest.mark.parametrize("pointer, few_rows", [(False, False), (True, False), (True, True)])


@KINDS
def test_micro_steps_add_up(pointer, few_rows, device):
    """Without CUDA graphs: gradients of two micro-steps are the sum of both, but for the rounding of the bf16
    buffers."""
    losses, together = micro_steps(device, False, pointer, (320, 208), few_rows=few_rows)
    same, apart = micro_steps(device, False, pointer, (320, 208), apart=True, few_rows=few_rows)
    assert losses == same and 0 < losses[-1] != losses[0]
    for name, wanted in apart.items():
        assert wanted.any() or name in ("smear_gate", "bigram_lambdas"), name  # these meet a zero at the start
        assert (together[name] - wanted).norm() <= 2**-8 * wanted.norm(), name


@KINDS
def test_gradients_are_those_of_autograd(pointer, few_rows, device, monkeypatch):
    """Bit for bit, after micro-steps with a sample of the classes and with all classes."""
    losses, grads = micro_steps(device, False, pointer, (320, 208), few_rows=few_rows)
    monkeypatch.setattr(T, "add_gradients", lambda loss, leaves: loss.backward())
    wanted_losses, wanted = micro_steps(device, False, pointer, (320, 208), few_rows=few_rows)
    assert losses == wanted_losses and [name for name in wanted if not torch.equal(grads[name], wanted[name])] == []


@gpu
@KINDS
def test_recorded_micro_steps(pointer, few_rows, device):
    """A CUDA graph sees the data, the loss weights and the head of each call, and adds to the same gradients."""
    losses, grads = micro_steps(device, True, pointer, few_rows=few_rows)
    wanted_losses, wanted = micro_steps(device, False, pointer, few_rows=few_rows)
    assert losses == pytest.approx(wanted_losses, rel=1e-4)
    for name, grad in wanted.items():
        assert (grads[name] - grad).norm() <= 2e-2 * grad.norm() + 1e-12, name
