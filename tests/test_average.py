"""Averages of the weights at the end of a run: their rates, their values, and the weights that a run, its checkpoints
and its evaluation use."""

import pytest
import torch

import train_gpt as T
import triton_kernels
from records import evaluate
from test_checkpoint import train
from test_run import STEPS, corpus  # noqa: F401 (a fixture)

BLEND = "--average_blend=0.5"


@pytest.fixture
def longer(monkeypatch):
    """Four times the time constants, since the runs are short."""
    table = T.param_table
    monkeypatch.setattr(T, "param_table", lambda model: tuple(
        row._replace(average=4 * row.average) for row in table(model)))


@pytest.mark.parametrize("adam_every", [1, 2])
def test_rates(adam_every):
    """A window has three time constants. The first movement copies. Head and embeddings move when they are updated."""
    config = T.parse_config(["--preset=record74", BLEND, f"--adam_every={adam_every}"])
    plans, total = [T.make_plan(config, step) for step in range(1491)], 1490
    assert not any(T.make_plan(T.RECORD74, step).average_rates for step in (1000, 1489))
    for label, fraction, period in ("vo_bank", 0.12, 1), ("mlp_bank", 0.06, 1), ("lm_head", 0.12, adam_every):
        rates = {plan.step: plan.average_rates[label] for plan in plans[:-1] if label in plan.average_rates}
        start = -(-total * (1 - 3 * fraction) // 1)
        assert list(rates) == [step for step in range(int(start), total) if period == 1 or step % 2]
        first, *others = rates.values()
        assert first == 1 and others == pytest.approx([1 - (1 - 1 / (fraction * total)) ** period] * len(others))


def blended(last, average, *args):
    T.blend_weights(p := last.clone(), {"average": average}, *args)
    return p


def test_a_blend_keeps_the_norm():
    """In fp64; two ranks with a part each give the same, and zeros stay zeros."""
    last, average = torch.randn(8, 6).bfloat16(), torch.randn(8, 6)
    mixed = last.double().lerp(average.double(), 0.25)
    expected = mixed * (last.double().norm() / mixed.norm())
    assert (blended(last, average, 0.25).double() - expected).abs().max() <= 2**-8 * expected.abs().max()
    squares = torch.stack((last.double().square().sum(), mixed.square().sum())).float()
    parts = [blended(last[rows], average[rows], 0.25, lambda x: x.copy_(squares))
             for rows in (slice(0, 3), slice(3, 8))]
    assert torch.equal(torch.cat(parts), blended(last, average, 0.25))
    last, average = torch.randn(3, 2**23), torch.randn(3, 2**23)  # two parts, which alone would have other norms
    average[2] *= 4
    mixed = last.lerp(average, 0.25)
    expected = mixed * (last.double().norm() / mixed.double().norm()).float()
    assert torch.allclose(blended(last, average, 0.25), expected, rtol=1e-3)  # torch sums norms in fp32
    zeros = torch.zeros(2, 2)
    assert torch.equal(blended(zeros, zeros, 0.5), zeros)


@pytest.mark.parametrize("split_stage", [2, 3])
def test_values(corpus, tmp_path, longer, monkeypatch, split_stage):
    """The averages equal fp64 recursions over the weights. The embedding inherits that of the head at the split."""
    step, expected = T.NorMuonAndAdam.step, {}

    def followed(optimizer, plan, *others):
        step(optimizer, plan, *others)
        for label, rate in plan.average_rates.items():
            if label != "embed" or not plan.tied:
                shard, state = optimizer.sharded[label].part, optimizer.state[label]
                if "mantissa" in state:
                    shard = triton_kernels.join_master(shard.view(torch.int16), state["mantissa"])
                old = expected.get(label, torch.zeros(()))
                expected[label] = old + rate * (shard.double() - old)
        if plan.split:
            expected["embed"] = expected["lm_head"].t()
        if plan.step == STEPS - 1:
            assert expected.keys() == {label for label, state in optimizer.state.items() if "average" in state}
            for label, average in expected.items():
                error = (optimizer.state[label]["average"].double() - average).norm() / average.norm()
                assert error <= (1e-6 if "mantissa" in optimizer.state[label] else 2**-8)  # tables are rounded to bf16
            last = {label: sharded.part.clone() for label, sharded in optimizer.sharded.items()}
            optimizer.blend(plan)
            changed = {label for label, part in last.items() if not torch.equal(optimizer.sharded[label].part, part)}
            assert changed == expected.keys()
    monkeypatch.setattr(T.NorMuonAndAdam, "step", followed)
    train(corpus, tmp_path, BLEND, f"--split_stage={split_stage}")
    assert expected


def assert_evaluated(run, step, capsys):
    """The checkpoint has the weights whose loss the run logged."""
    capsys.readouterr()
    assert evaluate.main([str(run.saved[int(step)]), "--device=cpu"]) == 0
    assert f"val_loss: {run.val[step]}" in capsys.readouterr().out


def test_runs_checkpoints_and_evaluation(corpus, tmp_path, capsys, longer):
    """A run ends with the blend, which changes no step before the end, and the last checkpoint holds the weights that
    the run validated. Ranks agree: test_run.py. A resumed run is the same: test_checkpoint.py."""
    whole = train(corpus, tmp_path / "whole", BLEND, f"--save_every={STEPS - 1}")
    plain = train(corpus, tmp_path / "plain", f"--save_every={STEPS - 1}")
    final, last = (run.val[str(STEPS)] for run in (whole, plain))
    assert final != last
    before, same = (torch.load(run.saved[STEPS - 1], weights_only=True)["model"] for run in (whole, plain))
    assert all(torch.equal(before[label], same[label]) for label in same)
    assert_evaluated(whole, str(STEPS), capsys)


def test_tied_to_the_end(corpus, tmp_path, capsys, longer):
    """The embedding stays the transposed head, in the run and in the evaluation of its checkpoint."""
    run = train(corpus, tmp_path, "--average_blend=1", "--split_stage=4", "--extension_steps=0", "--save=true")
    assert T.make_plan(T.parse_config([*corpus.args, "--split_stage=4", "--extension_steps=0"]), 9).tied
    assert_evaluated(run, "9", capsys)
