"""The length of a run as one number: --train_tokens and --minutes."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

import train_gpt as T
from data.run.config import System, flatten, with_knobs
from data.run.length import (
    CPU_SECONDS_PER_TOKEN, Size, h100s, needed_tokens, seconds, stage_starts, total_tokens, validations, with_minutes)
from data.run.program import UserError
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


def batches(schedule):
    return [stage.batch_tokens for stage in schedule.stages]


@pytest.mark.parametrize("preset, world", [("record", 8), ("record", 1), ("record", 16), ("single", 1), ("single", 8),
                                           ("cpu", 1)])
def test_rule(preset, world):
    """As many tokens as an even number of steps allows. The batch is the 2 ** k or 3 * 2 ** k next to what a root of
    tokens * GPUs ** .8 makes of the preset's; the rates grow with batch ** .35."""
    args, own = (f"--preset={preset}", f"--micro_batches={world}"), T.PRESETS[preset]
    for tokens in TOKENS:
        s, known = schedule(*args, f"--train_tokens={tokens}", world=world), own.config.schedule
        if preset == "single":  # the recipe begins with its batches of 27M tokens
            known = T.recipe(27e6).schedule
        assert abs(total_tokens(s) - tokens) <= 1.5 * max(batches(s))
        assert s.train_tokens == total_tokens(s) and (s.scheduled_steps + s.extension_steps) % 2 == 0
        growth = (tokens / total_tokens(known) * (world / own.gpus) ** 0.8) ** 0.5
        for new, old in zip(s.stages, known.stages):
            assert 1.5**-0.5 <= new.batch_tokens / old.batch_tokens / growth * 1.00001 and new.batch_tokens % 16 == 0
            assert new.batch_tokens / old.batch_tokens / growth <= 1.5**0.5 * 1.00001
            assert new.batch_tokens // (new.batch_tokens & -new.batch_tokens) in (1, 3)
            factor = (new.batch_tokens / old.batch_tokens) ** 0.35
            assert new.lr_mul == pytest.approx(old.lr_mul * factor, abs=6e-5)
        assert s.lr_floor == pytest.approx(known.lr_floor * factor, abs=6e-5)


def test_recipe():
    """Known numbers of two lengths, and what falls as runs get longer."""
    def numbers(tokens, gpus=1):
        config = T.recipe(tokens, gpus)
        s, optim = config.schedule, config.optim
        assert optim.adam_every == 1 and config.model.layers == T.LAYERS and T.LAYERS[-1].mix  # at every length
        return (batches(s)[0], s.scheduled_steps, s.extension_steps, s.stages[0].lr_mul, s.lr_floor, optim.table_beta2,
                optim.adam_lr, optim.table_lr, optim.muon_wd, config.model.width_lr_power)
    assert numbers(27e6) == (32768, 800, 24, 0.75, 0.15, 0.98, 0.00875, 0.0104, 2.4, 0.5)
    assert numbers(340e6) == (131072, 2518, 76, 1.2184, 0.2437, 0.9224, 0.00714, 0.00849, 1.211, 0.0)
    assert numbers(1e8)[-1] == 0.12
    assert T.PRESETS["single"].config == T.recipe(340e6) and T.recipe(340e6).schedule.train_tokens == 340_000_000
    assert batches(schedule("--preset=single", world=4)) == [196608] * 4  # GPUs count at the preset's own length, too
    # Nothing jumps at 27M tokens. Below, only batches differ, and what follows from them.
    assert numbers(26.9e6)[3:] == numbers(27e6)[3:] == pytest.approx(numbers(27.1e6)[3:], rel=3e-3)
    assert numbers(1e6)[6:] == numbers(1e6, 8)[6:] == numbers(27e6)[6:]
    for shorter, longer in zip(TOKENS, TOKENS[1:]):
        (*old, a), (*new, b) = numbers(shorter)[6:], numbers(longer)[6:]
        assert a - 0.05 < b <= a and all(0.95 * x < y <= x for x, y in zip(old, new))


@pytest.mark.parametrize("preset, world", [("record74", 8), ("record", 8), ("single", 1), ("cpu", 1)])
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


@pytest.mark.parametrize("preset, world", [("record74", 1), ("record", 8), ("single", 1)])
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
        per_token = 6.3 * seconds(Size(768, 11), 1, h100s(1.0, world))
        return with_minutes(config, [batch * per_token for batch in batches(config.schedule)])
    assert slow().schedule.scheduled_steps < 800
    assert course(slow()) == pytest.approx(course(T.parse_config([*args, "--train_tokens=0"], world)), abs=2e-3)
    by_hand = slow("--muon_warmup=100", "--muon_cooldown=9").schedule
    assert (by_hand.muon_warmup, by_hand.muon_cooldown) == (100, 9)


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("slower, size", [(1, Size(384, 4)), (1, Size(768, 11)), (9, Size(512, 6)), (1, None)])
def test_minutes_have_the_settings_of_as_many_tokens(world, slower, size):
    """Of those that a size and a GPU (by default an H100), or the preset for a CPU, takes in that time, roughly."""
    knobs = {"preset": "single"} | size.knobs if size else {"preset": "cpu"}
    words = [f"--{key}={value}" for key, value in knobs.items()]
    tokens = 120 / (seconds(size, 1, h100s(1 / slower, world)) if size else CPU_SECONDS_PER_TOKEN / world)
    wanted = T.parse_config([*words, f"--train_tokens={tokens}"], world)
    found = T.parse_config([*words, "--minutes=2"], world, 1 / slower)
    assert found.schedule.train_tokens == 0
    assert wanted == with_knobs(found, minutes=0.0, train_tokens=wanted.schedule.train_tokens)


def test_tokens_to_download():
    """More than twice those of the run; with --minutes those of the best size on as many H100s."""
    for args, world, tokens in (
            (["--preset=single"], 1, 340e6), (["--preset=single", "--minutes=1"], 1, 60 / seconds(Size(512, 6), 1)),
            (["--minutes=1"], 4, 60 / seconds(Size(640, 8), 1, 4**0.9))):
        assert needed_tokens(T.parse_config(args, world), world) == pytest.approx(2.2 * tokens, rel=1e-4)


def test_validations():
    """About ten, evenly, the last on all tokens, the others on few; or all after so many steps, as in record 74."""
    for total in 20, 21, 99, 824, 10**5 + 7:
        gaps = np.diff([*sorted(System(val_every=0.1).val_steps(total)), total])
        assert len(gaps) == 10 and sum(gaps) == total and max(gaps) - min(gaps) <= 1
    assert [System(val_every=every).val_steps(9) for every in (4, 0, 1e-9)] == [{0, 4, 8}, set(), {*range(9)}]
    for words, every, tokens in (
            ("record74", 250, [10485760]), ("record", 250, [10485760]), ("cpu", 0.1, [24576, 65536]),
            ("cpu --train_tokens=1e7", 0.1, [65536]), ("cpu --val_share=0", 0.1, [65536]),
            ("cpu --val_every=0", 0, [65536]), ("single --train_tokens=20e6", 0.1, [2 * 65536, 10485760])):
        config = T.parse_config(f"--preset={words}".split())
        assert (config.system.val_every, [count for _, count in validations(config, 1)]) == (every, tokens), words
    assert validations(T.parse_config(["--preset=cpu", "--micro_batches=2"], 2), 2) == [(2, 4 * 8192), (None, 65536)]


def test_what_is_set_by_hand_stays():
    """And changes nothing else but the steps, which take the tokens with the batches by hand."""
    words = "--preset=single", "--train_tokens=50e6"
    by_hand = {"stage2.batch_tokens": 8192, "stage3.lr_mul": 0.123456, "lr_floor": 0.0, "extension_steps": 6,
               "adam_lr": 0.01, "table_lr": 0.02, "muon_wd": 1.0, "table_beta2": 0.9, "width_lr_power": 0.25}
    free = T.parse_config(words)
    found = T.parse_config([*words, *(f"--{key}={value}" for key, value in by_hand.items())])
    differing = {key: value for key, value in flatten(found).items() if flatten(free)[key] != value}
    assert differing == by_hand | {key: getattr(found.schedule, key) for key in ("scheduled_steps", "train_tokens")}
    assert abs(total_tokens(found.schedule) - 50e6) < 65536 and batches(free.schedule) == [49152] * 4
    s = schedule(*words, "--scheduled_steps=300")
    assert s.scheduled_steps == 300 and s.train_tokens == total_tokens(s)  # which the log shows


def test_a_micro_batch_has_a_multiple_of_16_tokens():
    """Batches of the length grow for that; one by hand is refused."""
    words = "--preset=single", "--train_tokens=1e8"
    assert batches(schedule(*words)) == [65536] * 4
    s = schedule(*words, "--micro_batches=5")
    assert batches(s) == [65600] * 4 and abs(total_tokens(s) - 1e8) <= 65600
    assert s.stages[0].lr_mul == schedule(*words).stages[0].lr_mul
    assert batches(schedule("--preset=single", world=5)) == [196640] * 4  # one micro-batch for each rank
    with pytest.raises(UserError, match="^--stage2.batch_tokens=8192: must be a multiple of 16 . --micro_batches=5"):
        schedule(*words, "--micro_batches=5", "--stage2.batch_tokens=8192")


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
    begins = r"^about 2 min of training follow, and validations; the run ends after \d\d:\d\d$"
    assert len(re.findall(begins, out, re.M)) == 1
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
                 if re.fullmatch(r"stage\d.(batch_tokens|lr_mul)|muon_(warmup|cooldown)|lr_floor|table_beta2", key)]
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
