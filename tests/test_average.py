"""Averages of the weights at the end of a run: their rates, their values, and the weights that a run, its checkpoints
and its evaluation use."""

import re

import pytest
import torch

import train_gpt as T
import triton_kernels
from records import evaluate
from test_checkpoint import differing, read_logs, train
from test_run import STEPS, corpus, finish, start  # noqa: F401 (corpus is a fixture)

BLENDS = "--average_blend=0.5,0,1"
LONGER = """table = T.param_table  # four times the time constants, since the runs are short
T.param_table = lambda model: tuple(row._replace(average=4 * row.average) for row in table(model))"""


def blend_losses(text):
    return dict(re.findall(r"^average_blend:(\S+) val_loss:(\S+)$", text, re.M))


def test_rates():
    """Windows of three time constants; the first movement copies; head and embeddings move at odd steps."""
    config = T.parse_config(["--preset=record74", BLENDS])
    plans, total = [T.make_plan(config, step) for step in range(1491)], 1490
    assert not any(T.make_plan(T.RECORD74, step).average_rates for step in (1000, 1489))
    for label, fraction, period in ("attn_bank", 0.12, 1), ("mlp_bank", 0.06, 1), ("lm_head", 0.12, 2):
        rates = {plan.step: plan.average_rates[label] for plan in plans[:-1] if label in plan.average_rates}
        start = -(-total * (1 - 3 * fraction) // 1)
        assert list(rates) == [step for step in range(int(start), total) if period == 1 or step % 2]
        first, *others = rates.values()
        assert first == 1 and others == pytest.approx([1 - (1 - 1 / (fraction * total)) ** period] * len(others))


def test_values(corpus, tmp_path, monkeypatch):
    """The averages equal fp64 recursions over the weights; a blend lies between, with the norm of the last weights."""
    step, expected = T.NorMuonAndAdam.step, {}

    def full(optimizer, label):
        shard, state = optimizer.shards[label], optimizer.state[label]
        if "mantissa" not in state:
            return shard.double()
        return triton_kernels.join_master(shard.view(torch.int16), state["mantissa"]).double()

    def followed(optimizer, plan):
        step(optimizer, plan)
        for label, rate in plan.average_rates.items():
            if label != "embed" or not plan.tied:
                old = expected.get(label, torch.zeros(()))
                expected[label] = old + rate * (full(optimizer, label) - old)
        if plan.step == STEPS - 1:
            check(optimizer, plan)

    def check(optimizer, plan):
        assert expected.keys() == {label for label, state in optimizer.state.items() if "average" in state}
        last = {label: shard.clone() for label, shard in optimizer.shards.items()}
        for label, average in expected.items():
            got, exact = optimizer.state[label]["average"].double(), "mantissa" in optimizer.state[label]
            assert (got - average).norm() <= (1e-6 if exact else 2**-8) * average.norm()  # tables are rounded to bf16
        for factor in 0.5, 1.0, 0.0:
            weights = {label: full(optimizer, label) for label in expected}
            optimizer.blend(plan, factor)
            for label, average in expected.items():
                blended = weights[label].lerp(average, factor) if factor == 0.5 else average
                got = optimizer.shards[label].double()
                if factor == 0:
                    assert torch.equal(optimizer.shards[label], last[label])
                else:
                    direction = torch.cosine_similarity(got.flatten(), blended.flatten(), 0)
                    norm = got.norm() / last[label].double().norm()  # the bf16 weights of banks are truncated
                    assert direction > 1 - 1e-5 and norm == pytest.approx(1, abs=0.006)

    monkeypatch.setattr(T.NorMuonAndAdam, "step", followed)
    train(corpus, tmp_path, BLENDS, "--split_stage=2")


def test_runs_checkpoints_and_evaluation(corpus, tmp_path, capsys, monkeypatch):
    """A run ends with the first blend; a resumed run is the same bit for bit; the last checkpoint holds the last
    weights, and its evaluation the blended ones; two ranks agree with one."""
    monkeypatch.setattr(T, "param_table", T.param_table)  # undoes the next line at the end
    exec(LONGER, {"T": T})
    whole = train(corpus, tmp_path / "whole", BLENDS, "--save_every=1", "--keep=0")
    plain = train(corpus, tmp_path / "plain", "--save=true")
    losses, (final, last) = blend_losses(whole.text), (run.val[str(STEPS)] for run in (whole, plain))
    assert losses.keys() == {"0", "1"} and losses["0"] == last and len({final, *losses.values()}) == 3
    model, raw = (torch.load(run.saved[STEPS], weights_only=True)["model"] for run in (whole, plain))
    assert all(torch.equal(model[label], raw[label]) for label in raw)

    resumed = train(corpus, tmp_path / "resumed", BLENDS, f"--resume={whole.saved[9]}", "--save_every=0", "--save=true")
    assert differing(resumed.saved[STEPS], whole.saved[STEPS]) == []
    assert resumed.val[str(STEPS)] == final and blend_losses(resumed.text) == losses

    capsys.readouterr()
    assert evaluate.main([str(whole.saved[STEPS])]) == 0
    assert f"val_loss: {final}" in capsys.readouterr().out

    out, err, status = finish(start(corpus, BLENDS, f"--log_dir={tmp_path}/two", ranks=2, hook=LONGER))
    assert status == 0, err
    two = read_logs(tmp_path / "two")
    assert float(two.val[str(STEPS)]) == pytest.approx(float(final), abs=2e-3)
    assert [float(x) for x in blend_losses(two.text).values()] == pytest.approx([float(x) for x in losses.values()],
                                                                               abs=2e-3)
