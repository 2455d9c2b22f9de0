"""The prefix loss: the longest other token that begins the next token is a second target."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
import triton_kernels as tk
from data import tokenizer
from data.files import UserError
from test_guard import KNOBS, make_corpus
from test_head import FP32, FP64, LOSS_SCALE, sampled_head
from test_pointer import head_gradients, head_operands
from test_run import fails  # noqa: F401 (a fixture)
from test_tokenizer import train_and_resume_without_tokenizer

GATE, CLASSES = 129, 130


def test_table():
    """Bytes decide: a space belongs to a token, and part of a character is a token. BOS and the padding have none."""
    tokens = [b"a", b"abc", b"ab", b" a", b" ", b"\xe2", b"\xe2\x82", b"bc", b"abcde"]
    ids = tokenizer.prefixes(tokens.__getitem__, T.Model(vocab_size=10))
    assert ids.dtype == np.int64 and ids.tolist() == [-1, 2, 0, 4, -1, -1, 5, -1, 1, *[-1] * 119]
    rng = np.random.default_rng(0)
    tokens = sorted({bytes(rng.integers(97, 99, rng.integers(1, 9)).tolist()) for _ in range(200)})
    ids = tokenizer.prefixes(tokens.__getitem__, T.Model(vocab_size=len(tokens) + 1))
    for token, id in zip(tokens, ids):
        shorter = [other for other in tokens if token.startswith(other) and other != token]
        assert (tokens[id] if id >= 0 else None) == max(shorter, key=len, default=None)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("pointing", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_head(sampled, pointing, count, device):
    """Loss and all gradients in fp64. A prefix that is no candidate has no term; a copy of the target is a copy of its
    prefix, too."""
    h, weight, point, targets, weights, cu = head_operands(37, 32, CLASSES, GATE, device, FP32, count)
    weights = torch.cat((weights, torch.tensor([0.25], device=device)))
    prefixes = torch.randint(12, 60, (CLASSES,)).to(device)
    prefixes[[2, 5]] = -1
    chosen = torch.tensor([GATE, *range(12), *prefixes[[0, 1, 3]].unique().tolist()], device=device)
    chosen, positions = (chosen, targets + 1) if sampled else (None, targets)
    head = sampled_head(weight, FP32, False)
    head.gate, head.prefixes, head.block = GATE, prefixes, 16

    def loss_of(h, point):
        return head(h, positions, weights, LOSS_SCALE, candidates=chosen, point=point if pointing else None)

    columns = torch.arange(CLASSES, device=device) if chosen is None else chosen
    allowed = torch.isin(prefixes[targets], columns)
    second = torch.where(allowed, prefixes[targets], -1)
    shifted = torch.cat((oracles.later_targets(targets, count).to(device), second[:, None]), 1)
    W = weight.detach().double().requires_grad_()

    def expected(h, point):
        z = 23 * torch.sigmoid((h @ W[:, columns] + 5) / 7.5)
        places = torch.full((CLASSES,), -1, device=device)
        places[columns] = torch.arange(len(columns), device=device)
        wanted = torch.where(shifted >= 0, places[shifted], -1)
        if not pointing:
            log_p = torch.log_softmax(z, 1).gather(1, wanted.clamp(min=0))
            return -LOSS_SCALE * (weights.double() * (wanted >= 0) * log_p).sum()
        attn = oracles.pointer_attention(point.q, point.k, point.sink, cu, point.window, point.scale)
        hits = oracles.pointer_hits(point.tokens, shifted[:, :count]).to(device)
        mass, sink_mass = oracles.copy_masses(attn, hits)
        mass = torch.cat((mass, mass[:, :1]), 1)
        return LOSS_SCALE * oracles.copy_losses(z, int(places[GATE]), mass, sink_mass, wanted, weights).sum()

    loss, dh, dW, *rest = head_gradients(loss_of, h, weight, point)
    exact = point._replace(q=point.q.to(FP64), k=point.k.to(FP64), sink=point.sink.to(FP64))
    wanted_loss, wanted_dh, _, *wanted = head_gradients(expected, h.to(FP64), W, exact)
    wanted_dW = torch.autograd.grad(expected(h.to(FP64), exact), W)[0]
    assert (second >= 0).any() and (second < 0).any()
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=2e-6)
    dW = head.embedding.grad.T if sampled else dW
    for name, a, b in zip(("dh", "dW", "dq", "dk", "dsink"), (dh, dW, *rest), (wanted_dh, wanted_dW, *wanted)):
        assert (a is None) == (b is None) == (not pointing and name not in ("dh", "dW"))
        assert a is None or (a.double() - b).norm() <= 1e-5 * b.norm(), name
    exact_loss = head(h, targets, torch.ones(1, device=device), 1.0, exact=True, point=point if pointing else None)
    head.prefixes = None  # the loss of validation does not know prefixes
    assert torch.equal(exact_loss, head(h, targets, torch.ones(1, device=device), 1.0, exact=True,
                                        point=point if pointing else None))


def test_weights_of_the_steps():
    config = T.parse_config(["--preset=record74", "--stage1.prefix=.25,.25", "--stage2.prefix=.25,0"])
    starts = T.stage_starts(config.schedule)
    middle = (starts[1] + starts[2]) // 2
    for step, weights in (0, (1, 0.5, 0.25, 0.25)), (starts[1], (1, 0.5, 0.25)), (middle, (1, 0.25, 0.125)), (
            starts[2], (1, 0)), (starts[4], (1, 0)):
        assert T.make_plan(config, step).target_weights == pytest.approx(weights, abs=2e-3)
    assert T.make_plan(T.RECORD74, 0).target_weights == (1.0, 0.5, 0.25)


def test_reaches_the_loss_and_the_checkpoint(tmp_path, monkeypatch, fails):
    """Token 10 n + d begins with token n here, unless it is BOS. A resumed run needs no tokenizer; a new run does."""
    args = ["--preset=record74", *KNOBS, *make_corpus(tmp_path, bos=50256), "--vocab_size=50257", "--sampled_frac=.5",
            "--stage1.prefix=.25,.25", "--stage2.prefix=.25,0", "--save_every=2", "--keep=0", "--pointer=true"]
    corpus, seen, prefix_targets = SimpleNamespace(args=args), [], tk.HeadLoss.prefix_targets

    def watched(head, ids, candidates):
        found = prefix_targets(head, ids, candidates)
        seen.append((ids, candidates, found))
        return found

    monkeypatch.setattr(tk.HeadLoss, "prefix_targets", watched)
    whole, resumed = train_and_resume_without_tokenizer(corpus, tmp_path, monkeypatch, lambda id: str(id).encode())
    (line,) = (line for line in whole.text.splitlines() if line.startswith("prefixes: sha256 "))
    assert line in resumed.text.splitlines() and {candidates is None for _, candidates, _ in seen} == {True, False}
    for ids, candidates, found in seen:
        shorter = torch.where((ids > 9) & (ids < 50256), ids // 10, -1)
        if candidates is not None:  # all prefixes are among them
            found = torch.where(found < 0, found, candidates[found])
        assert torch.equal(found, shorter)
    assert len(seen) >= 4 and any((found >= 0).any() for *_, found in seen)
    fails([*args, f"--log_dir={tmp_path}"], "no GPT-2 tokenizer")


@pytest.mark.parametrize("args, message", [
    (["--preset=short", "--stage1.prefix=.25"], "--stage1.prefix=0.25: two numbers from 0 on"),
    (["--preset=short", "--stage2.prefix=.25,-1"], "--stage2.prefix=0.25,-1.0: two numbers from 0 on"),
    (["--preset=cpu", "--stage1.prefix=.25,0"], "a prefix loss needs the tokens of GPT-2")])
def test_refused(args, message):
    with pytest.raises(UserError, match=message):
        T.parse_config(args)
