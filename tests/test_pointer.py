"""The pointer head against the fp64 code of oracles.py: kernels compiled on a GPU, in Triton's interpreter without one.
Each operand lies inside a buffer of NaN. Integers lie between integers that no kernel may read. torch.empty returns
NaN."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
import triton_kernels as tk
from data import loader as L
from data.run.sample import forward, log_probabilities
from oracles import framed, gpu, leaves, only_gpu, with_gradients
from records import evaluate as E
from test_checkpoint import train
from test_run import corpus  # noqa: F401 (a fixture)

SCALE = 0.21
BF16, FP32 = torch.bfloat16, torch.float32


def borders(lengths):
    return [0, *itertools.accumulate(lengths)]


def final_attention(config, model):
    """The AttentionSettings of the last validation."""
    return T.attention_settings(config, model.embed.device, model.dtype)[-1]


# ---- Attention on copies ---------------------------------------------------------------------------------------------
def operands(lengths, d, count, device, dtype, words=5):
    """q, k, sink, tokens, start, end, targets: of few words the next, a fifth of them another and a tenth none."""
    N, cu = sum(lengths), torch.tensor(borders(lengths) + [sum(lengths)] * 3, dtype=torch.int32, device=device)
    q, k = (framed((2 * torch.randn(N, d)).to(device, dtype), (1, 1), (0, 0))[1] for _ in range(2))
    sink = framed(torch.randn(N).to(device), (1, 1))[1]
    text = torch.randint(words, (N + 6,))
    tokens = text.int().to(device)[3:N + 3]
    targets = oracles.later_targets(text[4:N + 4], count)
    targets = torch.where(torch.rand(targets.shape) < 0.2, torch.randint(words, targets.shape), targets)
    targets[torch.rand(targets.shape) < 0.1] = -1
    room = torch.zeros(N + 4, count + 3, dtype=torch.int64, device=device)
    room[2:-2, 1:-2] = targets.to(device)
    return q, k, sink, tokens, *oracles.documents(cu), room[2:-2, 1:-2]


def run(function, x, window, upstream):
    """(mass, sink_mass, dq, dk, dsink)."""
    q, k, sink, tokens, start, end, targets = x
    return with_gradients(lambda *inputs: function(*inputs, tokens, start, end, window, SCALE, targets), (q, k, sink),
                          upstream)


def dense(x, cu, window, upstream):
    """As run(), in fp64 with dense matrices, and the sizes of the terms of the gradients before they cancel."""
    q, k, sink, tokens, _, _, targets = x
    q, k, sink = leaves((q, k, sink), torch.float64)
    attn = oracles.pointer_attention(q, k, sink, cu, window, SCALE)
    hits = oracles.pointer_hits(tokens, targets).to(q.device)
    out = oracles.copy_masses(attn, hits)
    grads = torch.autograd.grad(out, (q, k, sink), [y.double() for y in upstream])
    (dmass, dsink_mass), (mass, sink_mass), attn = upstream, (y.detach() for y in out), attn.detach()
    dot = (dmass.abs() * mass).sum(1) + dsink_mass.abs() * sink_mass
    reach = torch.einsum("nk,knm->nm", dmass.double().abs(), hits.double()) + dot[:, None]
    terms = SCALE * attn[:, 1:] * reach
    return [*(y.detach() for y in out), *grads], {
        "dq": terms @ k.detach().abs(), "dk": terms.T @ q.detach().abs(), "dsink": sink_mass * (dsink_mass.abs() + dot)}


CASES = [  # document lengths, windows, numbers of targets
    ((75,), (0, 1, 31, 32, 33, 1000), (1, 5)),  # longer than two tiles, ragged end
    ((1, 29, 2, 1, 31, 6, 5), (5, 10**6), (2, 3)),  # borders on and off tiles, documents of one token
    ((80, 20), (63, 1000), (3,)),  # a border within a tile, blocks on both sides
    ((2, 126), (62, 94), (4,)),  # full tiles; the last row of a block is the first that does not see the first key
    ((1,) * 7, (0, 100), (1,)), ((1,), (1,), (4,))]
NAMES = "mass", "sink_mass", "dq", "dk", "dsink"


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("lengths, windows, counts", CASES)
def test_attention_on_copies(lengths, windows, counts, device):
    """The fp64 reference is exact; the fp32 kernel is as good as the fp32 reference, and repeats bit for bit."""
    for window, count in itertools.product(windows, counts):
        x = operands(lengths, 16, count, device, FP32)
        upstream = torch.randn(sum(lengths), count, device=device), torch.randn(sum(lengths), device=device)
        wanted, terms = dense(x, borders(lengths), window, upstream)
        exact = run(tk.pointer_ref, [y.double() if y.is_floating_point() else y for y in x], window,
                    [y.double() for y in upstream])
        got, ref = (run(function, x, window, upstream) for function in (tk.pointer, tk.pointer_ref))
        alone = wanted[1] == 1  # no key: all is left to the sink
        assert alone.any() and not any(x[0][alone].any() or (x[1][alone] != 1).any() for x in (got, ref))
        for name, a, b, c, d in zip(NAMES, got, ref, exact, wanted, strict=True):
            torch.testing.assert_close(c, d, rtol=0, atol=1e-12)
            oracles.assert_as_good(a, b, d, f"{name}, window {window}", floor=4 * (d.abs().max() + terms.get(name, 0)))
            assert (b.double() - d).norm() <= 20 * 2**-24 * (d.norm() + torch.as_tensor(terms.get(name, 0.0)).norm())
        assert all(map(torch.equal, got, run(tk.pointer, x, window, upstream)))


@gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("lengths, window", [
    ((1000, 1, 1, 300, 234), 384), ((64, 63, 65, 128, 5), 64), ((700,), 10**6)])
@pytest.mark.parametrize("count", [1, 3])
def test_attention_on_copies_in_bf16(lengths, window, count, device):
    """Production width. The sums are fp32; gradients of scores are rounded to bf16 before their products."""
    x = operands(lengths, 128, count, device, BF16)
    x = x[0] / 4, *x[1:]
    upstream = torch.randn(sum(lengths), count, device=device), torch.randn(sum(lengths), device=device)
    wanted, terms = dense(x, borders(lengths), window, upstream)
    got, ref = (run(function, x, window, upstream) for function in (tk.pointer, tk.pointer_ref))
    for name, a, b, c in zip(NAMES, got, ref, wanted, strict=True):
        floor = c.abs() + terms[name] if name in ("dq", "dk") else 32 * c.abs().max()
        oracles.assert_as_good(a, b, c, name, floor=floor)
    assert all(map(torch.equal, got, run(tk.pointer, x, window, upstream)))


@pytest.mark.parametrize("function", [tk.pointer, tk.pointer_ref])
def test_large_scores(function, device):
    """Scores of some hundreds, of keys and of the sink: the softmax is that of the oracle and gradients are finite."""
    x = operands((40, 30), 16, 2, device, FP32)
    x = 10 * x[0], 3 * x[1], 50 * x[2], *x[3:]
    upstream = torch.randn(70, 2, device=device), torch.randn(70, device=device)
    got, (wanted, _) = run(function, x, 50, upstream), dense(x, [0, 40, 70], 50, upstream)
    for name, a, b in zip(NAMES, got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-3, atol=2e-3 * b.abs().max().item(),
                                   msg=lambda text: f"{name}: {text}")


# ---- What the pointer reads ------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("lengths, d", [((1,), 16), ((16, 1, 20), 32), ((3, 1, 1, 27), 128), ((40,), 64),
                                        *[pytest.param(x, 128, marks=gpu) for x in ((1000, 1, 7), (49152,))]])
@pytest.mark.parametrize("dtype", [FP32, only_gpu(BF16)])
def test_inputs_of_the_pointer(lengths, d, dtype, device, monkeypatch):
    """With an identity in place of weights, between rows of NaN, in blocks of 16 tokens."""
    N, cu = sum(lengths), torch.tensor(borders(lengths) + [sum(lengths)] * 2, dtype=torch.int32, device=device)
    start, _ = oracles.documents(cu)
    projected = framed(torch.randn(N, 3 * d).to(device, dtype), (1, 1), (0, 0))[1]
    gain, weights = torch.tensor([1.7], device=device), torch.randn(d, device=device)
    upstream = [torch.randn(shape, device=device) for shape in ((N, d), (N, d), (N,))]
    upstream = [framed(u.to(dtype), (1, 1), (0, 0))[1] for u in upstream[:2]] + [framed(upstream[2], (1, 1))[1]]

    def oracle(projected, gain, weights, start):
        return oracles.pointer_inputs(dict(
            pointer_weights=torch.eye(3 * d, device=device).double().view(3, d, 3 * d), pointer_gain=gain,
            pointer_sink=weights), projected, borders(lengths))
    def run(function, dtype=None):
        return with_gradients(lambda *inputs: function(*inputs, start), (projected, gain, weights), upstream, dtype)
    ref, exact, wanted = run(tk.pointer_inputs_ref), *(run(f, torch.float64) for f in (tk.pointer_inputs_ref, oracle))
    for a, b in zip(exact, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    monkeypatch.setattr(tk, "pointer_inputs_ref", None)  # a fallback of the wrapper fails
    got = run(tk.pointer_inputs)
    for name, *parts in zip(("q", "k", "sink", "dprojected", "dgain", "dweights"), got, ref, exact, strict=True):
        # The gradients of gain and weights are sums of many products, which may cancel.
        floor = {"sink": 40, "dgain": 40 * (N * d)**0.5, "dweights": 40 * N**0.5}.get(name)
        oracles.assert_as_good(*parts, name, floor=floor and torch.full_like(parts[2], floor))
    assert all(map(torch.equal, got, run(tk.pointer_inputs)))


TINY = ["--preset=cpu", "--model_dim=48", "--num_heads=6", "--pointer=true", "--val_batch_tokens=128",
        "--dtype=float32", "--device=cpu", "--fp8=false"]


def tiny_model(*args):
    """(config, model): every parameter random, so that gate, copies and keys of the token before matter."""
    torch.manual_seed(8)
    config = T.parse_config([*TINY, *args])
    ops, _ = tk.choose_ops(torch.device("cpu"), "torch")
    model = T.GPT(config.model, ops, FP32, torch.device("cpu"))
    model.init_weights(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * (0.3 if param.numel() < 1000 else 0.1))
        model.pointer_gain.fill_(3.0)
        model.lm_head[:, config.model.gate_id] *= 20  # the gate is sometimes wide open
    return config, model.requires_grad_(False)


def mixture(model, rows, h):
    """(p (N, V) without copies, p' (N, V)) of the oracle in fp64 for documents `rows`, from the final stream."""
    params = {name: tensor.double() for name, tensor in model.state_dict().items()}
    h, cu, gate = h.double(), borders(map(len, rows)), model.config.gate_id
    attn = oracles.pointer_attention(*oracles.pointer_inputs(params, h, cu), cu, len(h), 128**-0.5)
    p = torch.softmax(oracles.softcapped_logits(params, h), 1)
    mixed = p * (1 + p[:, gate, None] * attn[:, :1] / (1 - p[:, gate, None]))
    mixed[:, gate] = 0
    return p, mixed.index_add(1, torch.tensor(sum(rows, [])), p[:, gate, None] * attn[:, 1:])


@pytest.mark.parametrize("size", [257, 120, 128])
def test_probabilities(size):
    """p' sums to 1 without the gate's class, which has nothing, and is what the loss measures at every token."""
    config, model = tiny_model(f"--vocab_size={size}", "--bigram_normal=false")
    gate, classes = config.model.gate_id, config.model.padded_vocab
    assert gate == size and classes == {257: 384, 120: 128, 128: 256}[size] == model.lm_head.size(1)
    words = torch.randint(8, (90,)).tolist()
    documents = [[size - 1, *words[:50]], [size - 1], [size - 1, *words[50:]]]
    output, targets = forward(model, config, documents, final_attention(config, model))
    losses = E.head(model).losses(output.h, targets, torch.ones(1), output.point)
    tokens = [documents[0][0], *targets.tolist()]
    p, wanted = mixture(model, [tokens[:51], tokens[51:52], tokens[52:93], tokens[93:128]], output.h)
    alphas = p[:, gate]
    for t in (0, 1, 2, 30, 50, 51, 52, 53, 92, 93, 127):
        found = log_probabilities(model, output, t).exp()
        assert found[gate] == 0 and found.sum().item() == pytest.approx(1, abs=1e-5)
        torch.testing.assert_close(found.double(), wanted[t], rtol=1e-4, atol=1e-7)
        assert -found[tokens[t + 1]].log().item() == pytest.approx(losses[t].item(), abs=1e-4)
        if t in (0, 51, 52, 93):  # nothing to copy: the language model without the gate's class
            assert losses[t].item() == pytest.approx(-(p[t, tokens[t + 1]] / (1 - alphas[t])).log().item(), abs=1e-4)
    assert alphas.max() > 0.2 and alphas.max() > 2 * alphas.min()


def test_validation_points_into_whole_documents():
    """However short the longest document of training is: the loss is the oracle's without a window."""
    config, model = tiny_model()
    tokens = np.array([256, *torch.randint(9, (63,)).tolist(), 256, *torch.randint(9, (48,)).tolist()], np.uint16)
    batch = L.make_batch(tokens, np.array([64]), config, torch.device("cpu"))
    view = final_attention(config, model)._replace(pointer_window=8)
    loss = T.summed_loss(model, E.head(model), batch, view).item() / 112
    h, *_ = model(batch.tokens, batch.documents, batch.row_ids, view)
    params = {name: tensor.double() for name, tensor in model.state_dict().items()}
    whole, short = (oracles.losses_of_head(params, h.double(), batch.tokens, batch.targets, [0, 64, 112], [1.0],
                                           (257, window))[0].mean().item() for window in (112, 8))
    assert loss == pytest.approx(whole, rel=1e-5) and abs(whole - short) > 1e-3


@pytest.mark.parametrize("rows", ["500", "500,300", "500,300,200", "0,0,200"])
def test_losses_of_endings_do_not_depend_on_the_packing(rows):
    """They are the oracle's of each pair alone: no question sees the one before."""
    config, model = tiny_model(f"--ngram_rows={rows}", "--bigram_signs=true")
    text = b"a rose is a rose is a rose"
    pairs = [(text[:9 + i], text[9 + i:20 + 2 * (i % 3)]) for i in range(6)]
    found = [list(E.ending_losses(model, dataclasses.replace(config, data=dataclasses.replace(
        config.data, val_batch_tokens=tokens)), final_attention(config, model), pairs)) for tokens in (64, 512)]
    for (context, ending), *losses in zip(pairs, *found, strict=True):
        rows = [*max(order for order, _ in config.model.ngrams) * [[256]], [256, *context, *ending]]
        output, _ = forward(model, config, rows, final_attention(config, model))
        n = len(sum(rows, []))
        p = mixture(model, [*rows, [256] * (128 - n)], output.h)[1][n - len(ending) - 1:n - 1]
        wanted = -p.gather(1, torch.tensor(list(ending))[:, None])[:, 0].log()
        for got in losses:
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_sampled_classes_begin_with_the_gate():
    config, tokens = T.Config(model=T.Model(vocab_size=120, model_dim=48, pointer=True)), np.arange(41) % 30
    batch = L.make_batch(tokens.astype(np.uint16), np.array([40]), config, torch.device("cpu"), count=60, row=2)
    assert batch.candidates[0] == 120 and batch.candidates[batch.targets].tolist() == tokens[1:].tolist()


def test_sampling_and_hellaswag_of_a_checkpoint(corpus, tmp_path, capsys):  # noqa: F811
    """From the command line."""
    trained = train(corpus, tmp_path / "logs", "--pointer=true", "--scheduled_steps=4", "--extension_steps=1",
                    "--val_every=99", "--save=true")
    path = str(trained.saved[5])
    capsys.readouterr()
    assert T.main([f"--sample={path}", "--device=cpu", "--tokens=8", "--prompt=the "]) == 0
    assert capsys.readouterr().out.startswith("the ")
    (tmp_path / "made.jsonl").write_text(
        '{"ctx": "the sun", "endings": ["rise", "set it", "shone", "is"], "label": 1, "activity_label": "x"}\n')
    assert E.main([path, "--device=cpu", f"--hellaswag={tmp_path}/made.jsonl"]) == 0
    out = capsys.readouterr().out
    assert f"val_loss: {trained.val['5']}\n" in out and "hellaswag_acc_norm: " in out
