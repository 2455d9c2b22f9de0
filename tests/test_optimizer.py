"""Update rules and the whole NorMuonAndAdam against the fp64 oracles; several ranks against one."""

import dataclasses
import datetime
import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import oracles
import train_gpt as T
import triton_kernels as kernels
from data.run.config import with_knobs
from data.run.machine import Runtime
from data.run.state import load_state, whole_state

CPU = torch.device("cpu")
ONE_RANK = Runtime(0, 1, CPU)
OPS, _ = kernels.choose_ops(CPU, "torch")


def test_master_split_is_bit_exact(device):
    """Joining and splitting any fp32 number is the identity, with and without the sign bit in the lower half."""
    w = np.random.default_rng(0).integers(0, 2**32, 10000, dtype=np.uint32).view(np.float32)
    w = w[np.isfinite(w)]
    upper, lower = ((w.view(np.uint32) >> shift).astype(np.uint16) for shift in (16, 0))  # upper: truncated to bf16
    joined = kernels.join_master(torch.from_numpy(upper.view(np.int16)), torch.from_numpy(lower.view(np.int16)))
    assert np.array_equal(joined.numpy().view(np.uint32), w.view(np.uint32))
    p, mantissa = (torch.from_numpy(half.view(np.int16).copy())[None, :, None].to(device) for half in (upper, lower))
    ones = torch.ones(1, len(w), 1, device=device)
    kernels.normuon_update(p, mantissa, ones, 0 * ones, 0.1, ones[:, :1], 0.0, 0.95)  # a zero update without decay
    p, mantissa = p.cpu(), mantissa.cpu()
    assert np.array_equal(p.numpy().view(np.uint16).ravel(), upper)
    assert np.array_equal(mantissa.numpy().view(np.uint16).ravel(), lower)


def singular_values(Y, X):
    """(those of Y on the singular vectors of X, which Y keeps; those of X)."""
    u, s, vh = torch.linalg.svd(X, full_matrices=False)
    reached = u.mT @ Y @ vh.mT
    diagonal = reached.diagonal(dim1=-2, dim2=-1)
    assert (reached - torch.diag_embed(diagonal)).abs().max() < 1e-6
    return diagonal, s


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 24, 60), (2, 60, 24)], ids=["square", "wide", "tall"])
@pytest.mark.parametrize("steps, least, error", [(5, 1e-3, 0.1412), (4, 3e-3, 0.2446)])
def test_polar_express_against_svd(shape, steps, least, error):
    """Singular values land in the range that the scalar map promises; in fp64."""
    X = torch.randn(shape, dtype=torch.float64)
    X = X / (1.02 * torch.linalg.matrix_norm(X, keepdim=True))
    got = kernels.polar_express(X.clone(), None, OPS, steps)
    reached, s = singular_values(got, X)
    assert (s > least).any() and ((reached[s > least] - 1).abs() < error).all()
    assert steps < 5 or torch.allclose(got, oracles.polar_express(X), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=oracles.gpu)])
def test_slow_average(dtype, device):
    """Muon's input is a mixture of the gradient, a fast and a slow average, here after two steps; in fp64."""
    decay, rate, share, mu = 0.85, 0.02, 0.5625, 0.9
    momentum, slow = (torch.randn(2, 37, 130, device=device) for _ in range(2))
    m, s = momentum.double(), slow.double()
    for _ in range(2):
        grad = torch.randn(2, 37, 130, device=device).to(dtype)
        X, scale = kernels.fused_momentum(grad, momentum, mu, 1.02, slow, decay, rate, share)
        g = grad.double()
        m, s = decay * m + (1 - decay) * g, (1 - rate) * s + rate * g
    for got, wanted in (momentum, m), (slow, s):
        assert torch.allclose(got.double(), wanted, rtol=0, atol=1e-6)
    wanted, eps = (1 - mu) * g + mu * ((1 - share) * m + share * s), torch.finfo(dtype).eps
    assert X.dtype == dtype and torch.allclose(X.double(), wanted, rtol=eps, atol=1e-6)
    of_rounded = 1 / (1.02 * X.double().square().sum((-2, -1)).sqrt() + 1e-6)
    assert scale.dtype == torch.float32 and torch.allclose(scale.double(), of_rounded, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(3, 37, 130), (2, 300, 24), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=oracles.gpu)])
def test_normuon_update_against_fp64(shape, dtype, device):
    """Matrices of several blocks of rows with an end that is not full, numbers from memory as a graph has them."""
    start, y, old = torch.randn(shape, device=device), torch.randn(shape, device=device).to(dtype), torch.rand(shape)
    v, rates = torch.rand(*shape[:2], 1, device=device), torch.rand(shape[0], 1, 1, device=device) + 1
    p, mantissa = (half.to(torch.int16) for half in (start.view(torch.int32) >> 16, start.view(torch.int32)))
    average = old.clone().to(device)
    oracle, steps = (dict(w=w.double(), v=v.double()) for w in (start, 0 * start))
    for state, wd in (oracle, 0.5), (steps, 0.0):
        oracles.normuon_update(state, y.double(), 0.02 * rates.double(), wd)
    lr, decay, rate = (torch.tensor(x, device=device) for x in (0.02, 0.5, 0.25))
    kernels.normuon_update(p, mantissa, v, y, lr, rates, decay, oracles.NORMUON_BETA2, average, rate)
    got = kernels.join_master(p, mantissa).double()
    assert torch.allclose(v.double(), oracle["v"], rtol=1e-6, atol=0)
    limit = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps * steps["w"].abs().max()
    assert (got - oracle["w"]).abs().max() <= limit, (got - oracle["w"]).abs().max()
    assert torch.allclose(average.double(), old.to(device).double().lerp(got, 0.25), rtol=0, atol=1e-6)


@pytest.mark.parametrize("vectors", [False, True], ids=["numbers", "vectors"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=oracles.gpu)])
def test_adam_against_fp64(vectors, dtype, device):
    """Both forms of Adam in three updates: every weight decays if its update moves it towards zero, and only then."""
    size = 2500  # the last block is not full
    p, grads = torch.randn(size, device=device).to(dtype), torch.randn(3, size, device=device).to(dtype)
    m, v, average = (torch.zeros(size, device=device) for _ in range(3))
    beta1, beta2, lr_mul, wd_mul = (low + (high - low) * torch.rand(size, device=device) for low, high in (
        (0.5, 0.9), (0.9, 0.99), (0.1, 2.0), (0.0, 100.0)))
    if not vectors:
        beta1, beta2, lr_mul, wd_mul = 0.9, 0.99, 1.5, 50.0
    b1, b2, lr, wd = (x.double() if vectors else x for x in (beta1, beta2, lr_mul, wd_mul))
    oracle, average64 = dict(p=p.double(), m=m.double(), v=v.double(), t=0), average.double()
    for t, grad in enumerate(grads, 1):
        if vectors:
            number = functools.partial(torch.tensor, device=device)
            kernels.replicated_update(p, m, v, grad, number(0.01), number(float(t)), beta1, beta2, lr_mul, wd_mul,
                                      200 * oracles.ADAM_WD, oracles.ADAM_EPS)
        else:
            decay = (0.01 * lr)**2 * oracles.ADAM_WD * 200 * wd
            kernels.adam_update(p, m, v, grad, kernels.adam_step_size(0.01 * lr, t, b1, b2), decay, b1, b2,
                                oracles.ADAM_EPS, average, 0.25)
        oracles.adam_step(oracle, grad.double(), 0.01 * lr, b1, b2, 200 * wd)
        average64 = average64 if vectors else average64.lerp(oracle["p"], 0.25)
        w = oracle["p"].clone()
        if dtype != torch.float32:
            oracle["p"] = p.double()  # each update rounds
    eps = 4 * torch.finfo(dtype).eps  # three updates; largest seen in fp32: 4.8e-7
    for got, wanted, limit in ((p, w, eps), (m, oracle["m"], 1e-6), (v, oracle["v"], 1e-6), (average, average64, eps)):
        assert torch.allclose(got.double(), wanted, rtol=limit, atol=limit), (got - wanted).abs().max()


def test_zero_updates_decay():
    """A zero update decays the weight, also in a zero matrix, whose orthogonalisation has no NaN."""
    w = torch.tensor([0.5, -0.5]).repeat(1, 8, 1).bfloat16()
    p, mantissa = w.view(torch.int16).clone(), torch.zeros(1, 8, 2, dtype=torch.int16)
    X, scale = kernels.fused_momentum(torch.zeros_like(w), torch.zeros(1, 8, 2), 0.95, kernels.POLAR_SAFETY)
    y = kernels.polar_express(X, scale, OPS)
    kernels.normuon_update(p, mantissa, torch.zeros(1, 8, 1), y, 0.5, torch.ones(1, 1, 1), 0.25, 0.95)
    assert not y.any() and torch.equal(kernels.join_master(p, mantissa), w.float() * (1 - 0.5 * 0.25))


def test_decay_of_a_table():
    """The square of the rate of the parameter times its factor; the tables of values and n-grams have a rate of their
    own."""
    config = dataclasses.replace(small_config(), optim=T.Optim(adam_lr=0.5, table_lr=1.0, adam_wd=4.0))
    config = with_knobs(config, ngram_rows=(300.0,))
    numbers = T.update_numbers(config, T.make_plan(config, 1)._replace(lr_factor=0.5))
    for row in (row for row in T.param_table(config.model) if row.optim in ("adam", "rows")):
        rate = {"lm_head": 0.25, "embed": 0.25, "value_embeds": 0.5, "ngram_embed": 0.5}[row.label] * row.lr_mul
        assert numbers[f"{row.label} weight_decay"] == rate**2 * 4 * row.wd_mul


def small_config(head_pairs=False, lazy_tables=False, slow_momentum=0.0, num_heads=6, adam_every=2):
    schedule = dataclasses.replace(T.Schedule(), scheduled_steps=8, extension_steps=2, muon_warmup=20, muon_cooldown=6)
    model = T.Model(vocab_size=120, model_dim=48, num_heads=num_heads, head_pairs=head_pairs)
    optim = T.Optim(table_lr=0.005, lazy_tables=lazy_tables, slow_momentum=slow_momentum, adam_every=adam_every)
    return dataclasses.replace(T.Config(), model=model, schedule=schedule, optim=optim)


def make_optimizer(config, rt=ONE_RANK, ops=OPS, dtype=torch.float32):
    """(model, its optimizer)."""
    model = T.GPT(config.model, ops, dtype, rt.device)
    model.init_weights(0)
    return model, T.NorMuonAndAdam(model, config, rt, ops)


@pytest.mark.parametrize("head_pairs, lazy_tables, slow_momentum, num_heads, adam_every", [
    (False, False, 0.0, 6, 2), (True, True, 0.5, 3, 2), (False, True, 0.0, 6, 1), (False, False, 0.0, 6, 1)])
def test_ten_steps_across_the_split_against_the_oracle(head_pairs, lazy_tables, slow_momentum, num_heads, adam_every,
                                                       monkeypatch):
    """All parameters, even and odd steps, tied, the split with its state transfer, untied; the oracle does not round.
    Half of the rows of tables have no gradient. Slow averages have 3 steps here, and are used from step 5 on."""
    config = small_config(head_pairs, lazy_tables, slow_momentum, num_heads, adam_every)
    tables = "value_embeds", "bigram_embed"
    for label in tables if lazy_tables else ():
        monkeypatch.setitem(oracles.ADAM_TABLE, label, (0.0, *oracles.ADAM_TABLE[label][1:]))
    monkeypatch.setattr(T, "SLOW_PERIOD", 0.3)
    plans = [T.make_plan(config, step) for step in range(10)]
    assert [p.step for p in plans if p.split] == [5]
    assert [p.slow_share for p in plans] == [0.0] * 5 + [slow_momentum] * 5
    model, optimizer = make_optimizer(config)
    oracle = oracles.OracleOptimizer({k: p.detach().clone() for k, p in model.named_parameters()})
    start = {k: p.detach().double().clone() for k, p in model.named_parameters()}
    for plan in plans:
        grads = {k: torch.randn_like(p, dtype=torch.float32).to(p.dtype) * 0.1 for k, p in model.named_parameters()}
        for label in tables:
            grads[label][torch.rand(len(grads[label])) < 0.5] = 0
        for label, param in model.named_parameters():
            param.grad += grads[label]
            if label in optimizer.sharded and optimizer.sharded[label].touched is not None:
                optimizer.tables[label].touched |= grads[label].any(1)
        numbers = T.update_numbers(config, plan)
        if adam_every == 1:  # from memory, as in a graph
            numbers = {name: torch.tensor(float(x)) for name, x in numbers.items()}
        optimizer.step(plan, numbers)
        oracle.step({k: g.double() for k, g in grads.items()}, plan.step, plan.lr_factor, plan.momentum, split_step=5,
                    slow=slow_momentum and (0.85 if plan.step > 4 else plan.momentum, 1 / 3, plan.slow_share),
                    every=adam_every, table_lr=config.optim.table_lr)
        if plan.tied and plan.adam:
            assert torch.equal(model.embed, model.lm_head.t())
    assert not torch.equal(model.embed, model.lm_head.t())  # they have parted
    for label, param in model.named_parameters():
        got, want = param.detach().double() - start[label], oracle.params[label].double() - start[label]
        error = torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)
        # bf16 parameters: rounding of sums of gradients, of X, P, Q and of the stored weight; fp32 ones: rounding of
        # fp32 only. Largest seen: 0.014 and 3e-6.
        bound = 0.03 if param.dtype == torch.bfloat16 else 1e-5
        print(label, error.item())
        assert error < bound, f"{label}: relative error {error:.1e}"


def train(rt, steps, saved=None, head_pairs=False):
    """{"model", "optimizer"} after these steps on the ranks of `rt`, from `saved` on. Two ranks have gradients, small
    integers times G, so that the average is exact in any order: it is the same for every G."""
    config = small_config(head_pairs, head_pairs, 0.5 * head_pairs, adam_every=2 - head_pairs)
    config = dataclasses.replace(config, system=dataclasses.replace(config.system, micro_batches=rt.world))
    model, optimizer = make_optimizer(config, rt)
    if saved is not None:
        model.load_state_dict(saved["model"])
        load_state(optimizer, saved["optimizer"])
    for plan in (T.make_plan(config, step) for step in steps):
        for part in (0, 1):
            generator = torch.Generator().manual_seed(2 * plan.step + part)
            for label, param in model.named_parameters():
                grad = torch.randint(-2, 3, param.shape, generator=generator) * rt.world
                if label == "bigram_embed":
                    rows = torch.randint(len(param), (300,), generator=generator).unique()
                    grad[torch.isin(torch.arange(len(param)), rows, invert=True)] = 0
                if (plan.step + part) % rt.world == rt.rank:
                    param.grad += grad
                    if label in optimizer.sharded and optimizer.sharded[label].touched is not None:
                        optimizer.tables[label].touched |= grad.any(1)
        optimizer.step(plan, T.update_numbers(config, plan))
    for label, sharded in optimizer.sharded.items():  # what is behind a parameter
        size = model.get_parameter(label).numel()
        assert not any(x.flatten()[size:].any() for x in (sharded.whole, *sharded.grads)), label
    return {"model": model.state_dict(), "optimizer": whole_state(optimizer)}


def train_as_rank(rank, world, folder, steps, head_pairs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", datetime.timedelta(seconds=60), world, rank)
    state = train(Runtime(rank, world, CPU), steps, torch.load(folder / "saved.pt"), head_pairs)
    torch.save(state, folder / f"rank{rank}.pt")


def assert_same(state, other):
    named = [{f"{key} {label}": x for label, p in s["model"].items()
              for key, x in {"p": p, **s["optimizer"][label]}.items()} for s in (state, other)]
    assert named[0].keys() == named[1].keys()
    assert [name for name, tensor in named[0].items() if not torch.equal(tensor, named[1][name])] == []


@pytest.mark.parametrize("world, head_pairs", [(7, True), (11, False)])
def test_any_number_of_ranks_equals_one_bit_for_bit(tmp_path, world, head_pairs):
    """From a state of one rank, across the split with its state transfer (step 5), and back to one rank.

    7 ranks divide no sharded parameter. Of the banks' 40 and 22 matrices they own 6 and 4 each; of the second bank the
    sixth rank owns 2 and the last one none: the rest is padding. Of 11 ranks, which own 4 and 2, one owns padding only.
    """
    run = functools.partial(train, ONE_RANK, head_pairs=head_pairs)
    states = [run(range(3))]
    assert "grad" in states[0]["optimizer"]["bigram_embed"]  # waits for the next step
    torch.save(states[0], tmp_path / "saved.pt")
    torch.multiprocessing.start_processes(train_as_rank, (world, tmp_path, range(3, 8), head_pairs), world,
                                          start_method="fork")
    one = run(range(3, 8), states[0])
    assert_same(one, run(range(8)))  # nobody has noticed the break
    saved = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(world)]
    assert_same(one, saved[0])
    for state in saved[1:]:
        assert all(torch.equal(p, state["model"][label]) for label, p in one["model"].items())
        assert state["optimizer"] == {label: {} for label in one["model"]}  # for rank 0 only
    assert_same(run(range(8, 10), one), run(range(8, 10), saved[0]))
