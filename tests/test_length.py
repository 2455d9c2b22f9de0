"""The length of a run as one number: --train_tokens and --minutes."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

import train_gpt as T
from data.run.config import with_knobs
from data.run.length import SECONDS_PER_TOKEN, stage_starts, total_tokens, with_minutes
from records import compare, rerun
from test_checkpoint import train
from test_run import corpus, finish, start  # noqa: F401 (corpus is a fixture)

TOKENS = [int(x) for x in np.geomspace(1e6, 1e10, 60)]
# On rank 0 a step of stage n takes n seconds, a step with Adam takes one second more, and a softmax over all classes
# doubles the time. On rank 1 every step takes three times as long.
FAKE_CLOCK = """
now, step = [T.started], T.Trainer.step
from data.run import log, warmup
T.time = log.time = warmup.time = type("FakeTime", (), {"perf_counter": lambda: now[0]})
def slow(self, loader, plan, *rest, **eager):
    now[0] += (1 + plan.stage + plan.adam) * (1 if plan.candidates else 2) * (1 + 2 * self.rt.rank)
    return step(self, loader, plan, *rest, **eager)
T.Trainer.step = slow
"""


def schedule(*args, world=1):
    return T.parse_config(args, world).schedule


@pytest.mark.parametrize("preset, world", [("record", 8), ("record", 1), ("record", 16), ("short", 1), ("cpu", 1)])
def test_rule(preset, world):
    """As many tokens as an even number of steps allows. Batches and rates grow with the root of the tokens."""
    args = f"--preset={preset}", f"--micro_batches={world}"
    found = [schedule(*args, f"--train_tokens={tokens}", world=world) for tokens in TOKENS]
    for tokens, s in zip(TOKENS, found):
        assert abs(total_tokens(s) - tokens) <= 1.5 * max(stage.batch_tokens for stage in s.stages)
        assert s.train_tokens == total_tokens(s) and (s.scheduled_steps + s.extension_steps) % 2 == 0
    for shorter, longer in zip(found, found[1:]):
        for a, b in zip(shorter.stages, longer.stages):
            assert a.batch_tokens <= b.batch_tokens and a.lr_mul <= b.lr_mul
            assert b.lr_mul / a.lr_mul == pytest.approx((b.batch_tokens / a.batch_tokens) ** 0.35, rel=1e-3)
        assert longer.lr_floor / shorter.lr_floor == pytest.approx(b.lr_mul / a.lr_mul, rel=5e-3)
    assert 0.8 < found[-1].stages[0].batch_tokens / found[0].stages[0].batch_tokens / (1e10 / 1e6) ** 0.5 < 1.3


@pytest.mark.parametrize("preset, world", [("record74", 8), ("record", 8), ("short", 1), ("cpu", 1)])
def test_own_length_changes_nothing(preset, world):
    config = T.PRESETS[preset].config
    tokens = total_tokens(config.schedule)
    fitted = T.parse_config([f"--preset={preset}", f"--train_tokens={tokens}"], world)
    plans = [[T.make_plan(with_knobs(c, micro_batches=8), step) for step in range(stage_starts(c.schedule)[-1] + 1)]
             for c in (config, fitted)]
    assert plans[0] == plans[1]
    # Muon's warm-up and cool-down in steps become parts of the run, which are the same numbers of steps.
    own = {key: getattr(config.schedule, key) for key in ("muon_warmup", "muon_cooldown", "train_tokens")}
    assert dataclasses.replace(fitted, schedule=dataclasses.replace(fitted.schedule, **own)) == config


@pytest.mark.parametrize("preset, world", [("record74", 1), ("record", 8), ("short", 1)])
def test_minutes_on_a_slow_machine(preset, world):
    """Muon's momentum rises and falls over the same parts of the run, however few steps the measured time allows."""
    args = f"--preset={preset}", "--micro_batches=8"

    def course(config):  # highest and last momentum; parts of the run at which the highest begins and ends
        total = stage_starts(config.schedule)[-1]
        momenta = [T.make_plan(config, step).momentum for step in range(total + 1)]
        peak = max(momenta)
        return peak, momenta[-1], momenta.index(peak) / total, 1 - momenta[::-1].index(peak) / total
    def slow(*more):  # 6.3 times slower than the machine of the estimate
        config = T.parse_config([*args, "--minutes=5", *more], world)
        per_token = 6.3 * SECONDS_PER_TOKEN["cuda"] / world
        return with_minutes(config, [stage.batch_tokens * per_token for stage in config.schedule.stages])
    assert slow().schedule.scheduled_steps < 800
    assert course(slow()) == pytest.approx(course(T.parse_config([*args, "--train_tokens=0"], world)), abs=2e-3)
    by_hand = slow("--muon_warmup=100", "--muon_cooldown=9").schedule
    assert (by_hand.muon_warmup, by_hand.muon_cooldown) == (100, 9)


def test_more_gpus_take_larger_batches():
    batches = [schedule("--preset=short", f"--micro_batches={world}", "--train_tokens=27e6", world=world).stages[0]
               .batch_tokens for world in (1, 2, 4, 8)]
    assert batches == [32768, 49152, 65536, 65536]
    assert schedule("--train_tokens=396e6", world=8).stages == T.RECORD74.schedule.stages
    s = schedule("--preset=record", "--train_tokens=396e6")  # on one GPU
    assert s.stages[0].batch_tokens == 65536


def test_single_is_a_longer_short():
    """The preset for the whole run on one GPU follows from the short one by the rule, but for seven settings."""
    own = ("--adam_lr=0.0085", "--adam_every=2", "--muon_beta2=0.95", "--muon_wd=1.2", "--cooldown_frac=0.8",
           "--width_lr_power=0", "--layer10.mix=false")
    for world, more in (1, []), (2, ["--train_tokens=1e8"]), (1, ["--minutes=3"]):
        single = T.parse_config(["--preset=single", *more], world)
        assert single == T.parse_config(["--preset=short", *own, *(more or ["--train_tokens=340e6"])], world)
    s = schedule("--preset=single")
    assert s.stages[0].batch_tokens == 131072 and (s.scheduled_steps, s.extension_steps) == (2518, 76)
    assert s.lr_floor == 0.2437  # as large a part of lr_mul, 1.2184, as .15 of .75
    assert T.parse_config(["--preset=short", "--train_tokens=340e6", "--table_beta2=0.9"]).optim.table_beta2 == 0.9
    by_hand = [f"--stage{i}.batch_tokens=65536" for i in range(1, 5)]
    assert T.parse_config(["--preset=short", "--train_tokens=340e6", *by_hand]).optim.table_beta2 == round(0.98**2, 4)


def test_a_run_of_many_steps_updates_the_head_in_every_second_step():
    steps = {}
    for length in 2e7, 5.89e7, 5.91e7, 3.4e8:
        config = T.parse_config(["--preset=short", f"--train_tokens={length}"])
        steps[stage_starts(config.schedule)[-1]] = config.optim.adam_every
        by_hand = T.parse_config(["--preset=short", f"--train_tokens={length}", "--adam_every=1"])
        assert by_hand.optim.adam_every == 1 and by_hand.schedule == config.schedule
    assert steps == {814: 1, 1198: 1, 1202: 2, 2594: 2}
    assert T.parse_config(["--preset=short", "--scheduled_steps=3000"]).optim.adam_every == 1  # a schedule by hand
    for minutes, every in (3, 1), (9, 2):  # of `cpu`, which has 1760 steps
        assert T.parse_config(["--preset=cpu", f"--minutes={minutes}"]).optim.adam_every == every


def test_pieces_set_by_hand_stay():
    s = schedule("--preset=short", "--train_tokens=50e6", "--stage2.batch_tokens=8192", "--stage3.lr_mul=0.123456",
                 "--extension_steps=6")
    assert [stage.batch_tokens for stage in s.stages] == [49152, 8192, 49152, 49152]
    assert s.stages[1].lr_mul == 0.75 and s.stages[2].lr_mul == 0.123456 and s.extension_steps == 6
    assert abs(total_tokens(s) - 50e6) < 65536
    for knob, floor in {"lr_floor=0": 0, "stage4.lr_mul=0.75": 0.2437, "stage4.batch_tokens=65536": 0.15}.items():
        assert schedule("--preset=short", "--train_tokens=340e6", f"--{knob}").lr_floor == floor
    s = schedule("--preset=short", "--train_tokens=50e6", "--scheduled_steps=300")
    assert s.scheduled_steps == 300 and s.train_tokens == total_tokens(s)  # which the log shows


@pytest.fixture
def free(corpus):  # noqa: F811
    """A corpus whose arguments leave the number of steps open, with a small model."""
    args = [arg for arg in corpus.args if not arg.startswith(("--scheduled_steps", "--extension_steps"))]
    args += ["--sample_tokens=0", "--layers=3", "--backout_layer=none"]
    return SimpleNamespace(folder=corpus.folder, args=args)


@pytest.mark.parametrize("ranks", [1, 2])
def test_minutes(free, tmp_path, ranks):
    """Within 3 % of the clock of rank 0, with its length in log and checkpoint. All ranks take the same steps."""
    args = f"--log_dir={tmp_path}", "--minutes=2", "--save_every=20", "--keep=99"
    out, err, status = finish(start(free, *args, ranks=ranks, hook=FAKE_CLOCK))
    assert status == 0 and err == "", err
    assert len(re.findall(r"^about 2 min of training follow; the run ends at about \d\d:\d\d$", out, re.M)) == 1
    (log,) = tmp_path.glob("*.txt")
    run, text = compare.read_run(log), log.read_text().split("=" * 100 + "\n")[-1]
    length = re.search(r"^length: minutes=0.0 (.*)$", text, re.M)[1].split()
    assert float(re.search("^train_seconds: (.*)$", text, re.M)[1]) == pytest.approx(120, rel=0.03)
    tokens, scheduled, extension = (int(pair.partition("=")[2]) for pair in length)
    assert tokens == run.tokens and scheduled + extension == run.total > 20 and run.total % 2 == 0
    assert {"minutes=0.0", *length} <= {f"{key}={value}" for key, value in rerun.settings(run, {}).items()}
    assert run.finished, run.problem
    if ranks == 1:  # the timed steps leave no trace, and a resumed run goes on to the same end
        knobs = [f"--{key}={value}" for key, value in run.facts.items()
                 if re.fullmatch(r"stage\d.(batch_tokens|lr_mul)|muon_(warmup|cooldown)", key)]
        plain = train(free, tmp_path / "plain", *knobs, *(f"--{pair}" for pair in length), "--save_every=20")
        assert run.losses == {int(step): float(loss) for step, loss in plain.val.items()}
        (first,) = tmp_path.glob("*/state_step000020.pt")
        resumed = train(SimpleNamespace(args=[]), tmp_path / "resumed", f"--resume={first}")
        assert f"\nstep:{run.total}/{run.total} val_loss:{run.loss:.4f}\n" in resumed.text


@pytest.mark.parametrize("args, message", [
    (["--minutes=0.6"], "--minutes=0.6: this machine makes only [0-9]+ steps in that time; a run needs 20"),
    (["--minutes=2", "--profile=1000:2", "--val_every=5000"], "--profile=1000:2: the run has steps 0 to [0-9]+")])
def test_a_machine_that_is_too_slow(free, tmp_path, args, message):
    """For a run of --minutes, or for the steps of --profile."""
    _, err, status = finish(start(free, f"--log_dir={tmp_path}", *args, hook=FAKE_CLOCK))
    assert status == 1 and re.fullmatch(f"error: {message}\n", err), err
