"""records/compare.py: made-up logs and one of the public speedrun, and statistics against independent formulas."""

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.run.program import UserError
from records import compare
from records.compare import Estimate, estimate, read_run, sample, shown, student_cdf, student_t95, welch

PUBLIC = Path(__file__).parent / "fixtures/speedrun_log.txt"
RULE = "=" * 100 + "\n"
# The losses and seconds of PR 233's logs.
BASE, NEW = (3.2764, 3.2799, 3.2773, 3.2793), (3.2783, 3.2789, 3.2795, 3.2786)
BASE_S, NEW_S = (89.803, 89.711, 89.835, 89.849), (88.821, 88.809, 88.806, 88.900)
SHORT, LONG = (3.412, 3.408, 3.415, 3.405), (3.131, 3.126, 3.135)  # losses and seconds for --exchange
SHORT_S, LONG_S = (10.0, 10.2, 10.1, 10.1), (20.2, 20.0, 20.4)


def header(source="x = 1\n", kernels="torch", **facts):
    """Sources, machine and settings as train_gpt.py writes them, which has more settings."""
    facts = {"hardware": "x86_64", "hardware_fp8": "no", "ranks": 1, "muon_lr": 0.023, "seed": 1, "resume": ""} | facts
    return "\n".join([
        f"{source}\n\n{'-' * 40}\n# triton_kernels.py\n{'-' * 40}\n\ny = 2\n",
        RULE + "Running Python 3.11.7 (main, Jan  1 2024) [GCC 12.2.0]",
        "Running PyTorch 2.13.0+cpu compiled for CUDA None",
        "Running Triton version 3.7.1\nnvidia-smi: not found\n" + RULE.strip(),
        *(f"{key}: {value}" for key, value in facts.items()),
        f"{RULE}kernels: XXT:{kernels} head:float32\ntokens per micro-batch: 4096; micro-batches per rank: 1\n"])


def steps(losses, ms=30):
    """The lines of a run of {step: validation loss}, with `ms` a step; the training loss of step k is 5.k."""
    total, lines = max(losses), []
    for step in range(total + 1):
        times = f"train_time:{ms * step:.0f}ms step_avg:{ms:.2f}ms"
        lines += [f"train_loss:5.{step}000", times] if step else []
        lines += [f"val_loss:{losses[step]:.4f}", times] if step in losses else []
        lines = [line if line[0] == "s" else f"step:{step}/{total} {line}" for line in lines]
    return "\n".join(lines) + "\npeak memory allocated: 9 MiB reserved: 9 MiB\n"


def made(losses, seconds=None, tokens=0, **facts):
    """Finished runs of 20 steps, as if read from logs."""
    return [compare.Run(f"run_{i}", total=20, losses={0: 10.8, 10: loss + 1, 20: loss},
                        seconds={0: 0.0, 10: time / 2, 20: time}, ms={step: 50 * time * step for step in range(21)},
                        facts={"seed": str(i)} | facts, tokens=tokens)
            for i, (loss, time) in enumerate(zip(losses, seconds or [0.6] * len(losses)))]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, *texts) -> Path:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("".join(texts), encoding="utf-8")
    return Path(name)


def lines_of(report) -> set[str]:
    """The lines of a report, with single spaces."""
    return {re.sub(" +", " ", line) for line in report.splitlines()}


@pytest.fixture
def call(capsys):
    """call(arguments) -> the output, or the line of the error."""
    def call(*argv):
        try:
            assert compare.main([*argv]) == 0
        except UserError as error:
            assert "\n" not in str(error)
            print(error)
        return capsys.readouterr().out
    return call


def test_public_log():
    """The source quotes another log."""
    run = read_run(PUBLIC)
    assert run.finished and run.total == 20
    assert run.losses == {0: 10.8268, 10: 4.5141, 20: 3.2789} and run.seconds == {0: 0.0, 10: 0.352, 20: 0.892}
    assert sorted(run.ms) == list(range(21)) and [run.ms[k] for k in (0, 1, 2, 20)] == [0, 80, 115, 880]
    assert run.facts == {"python": "3.12.12", "torch": "2.11.0+cu130", "cuda": "13.0", "triton": "3.6.0",
                         "driver": "580.65.06", "gpus": "2 × NVIDIA H100 80GB HBM3"}
    assert run.source.startswith('"""Source of a trainer') and run.source.endswith("BLOCK = 64\n\n") and run.tokens == 0
    assert compare.step_ms(run, 0, 2) == 57.5 and compare.step_ms(run, 2, 20) == (880 - 115) / 18


def test_our_log():
    """Neither the source nor the sample counts as lines of the run. The results come after the sample."""
    fake = f'"""\n{RULE}Running Python 2\n{RULE}step:1/2 train_time:1ms step_avg:1.00ms\n"""\n'
    run = read_run(write(
        "a.txt", header(fake, seed=7).replace("resume: \n", "resume:\n"), "Resetting Model\nhash_ids: sha256 0f\n"
        "prefixes: a1\nwarning: over\ntrain_loss: over sampled\nnats per token: 1\n", steps({0: 5.9, 3: 4.5, 5: 4.25}),
        f"sample:\ndef step:9/9\n{RULE}step:4/5 train_time:1ms step_avg:1.00ms\ntokens: 7\nx: y\n",
        "final_val_loss: 4.2500\ngpu_seconds: 0.150\ntokens: 1234\ncheckpoint: a/b\n"))
    assert run.finished and run.losses == {0: 5.9, 3: 4.5, 5: 4.25} and run.ms == {k: 30 * k for k in range(6)}
    assert (run.tokens, run.loss) == (1234, 4.25)
    assert run.facts == {"python": "3.11.7", "torch": "2.13.0+cpu", "cuda": "None", "triton": "3.7.1", "gpus": "none",
                         "hardware": "x86_64", "hardware_fp8": "no", "ranks": "1", "muon_lr": "0.023", "seed": "7",
                         "resume": "", "kernels.XXT": "torch", "kernels.head": "float32"}
    assert run.source.startswith(fake) and run.source.endswith("y = 2\n\n")
    assert run.training == {k: 5 + k / 10 for k in range(1, 6)} and run.seconds == {0: 0, 3: 0.09, 5: 0.15}
    older = read_run(write("a.txt", re.sub(  # as before November 28, 2026: one line for both, no training loss
        r"step:\S+ train_loss:.*\n|(?<=val_loss:\d.\d{4})\nstep:\S+", "", run.path.read_text())))
    assert replace(older, text=run.text, training=run.training) == run and not older.training


@pytest.mark.parametrize("ranks, device, gpus", [
    (1, "cuda", "1 × NVIDIA H200"), (2, "cuda", "2 × NVIDIA H200"), (1, "cpu", "none")])
def test_gpus(ranks, device, gpus):
    """nvidia-smi lists all GPUs of the machine; a run has one for each rank, or none."""
    listed = "".join(f"|   {i}  NVIDIA H200        On  |   00000000:00:06.0 Off |\n" for i in range(2))
    text = header(ranks=ranks, device=device).replace("nvidia-smi: not found\n", listed)
    assert read_run(write("a.txt", text, steps({0: 5.9, 3: 4.5}))).facts["gpus"] == gpus


def test_validations_on_few_tokens():
    """Curves end with the loss on the same tokens, the run with that on all."""
    text = re.sub(r"(step:(\d)/5) val_loss:\S+",
                  lambda m: f"{m[1]} val_tokens:9{' val_loss:4.5000' * (m[2] == '5')}\n{m[0]}", header() + steps(
                      {0: 5.9, 3: 4.5, 5: 4.25}))
    run, stopped = (read_run(write("a.txt", each)) for each in (text, text.partition("step:5/5 val_loss")[0]))
    assert run.curve == {0: 5.9, 3: 4.5, 5: 4.5} and run.loss == 4.25 and run.facts["val_tokens.few"] == "9"
    assert stopped.curve == {0: 5.9, 3: 4.5} and compare.seconds_to(stopped, 5.2) == pytest.approx(0.045)
    assert compare.seconds_to(run, 4.95) == pytest.approx(0.045)


@pytest.mark.parametrize("end, more, kept, problem", [
    ("step:20/20 val_loss", "", 2, "it stopped at step 20 of 20"),
    ("\nstep:20/20 train_time:600ms step_avg:30.00ms\npeak", "", 2, "it stopped at step 20 of 20"),  # 3.3 may be cut
    ("70ms step_avg:30.00ms\nstep:20/20 train", "", 2, "it stopped at step 18 of 20"),
    ("hardware_fp8", "", 0, "it stopped at step 0 of ?"), ("hardware_fp8", "ranks: ", 0, "it stopped at step 0 of ?"),
    ("peak", "step:5/20 train_time:9ms step_avg:1.0ms\n", 3, "two runs are mixed: step 5 "),
    ("peak", "step:21/30 train_time:9ms step_avg:1.0ms\n", 3, "two runs are mixed: step 21 "),
    ("step:20/20 val_loss", "step:20/20 val_loss:nan\nstep:20/20 train_time:600ms step_avg:30.00ms\n", 3,
     "its loss is nan")])
def test_runs_that_do_not_count(end, more, kept, problem):
    run = read_run(write("a.txt", (header() + steps({0: 10.8, 10: 4.0, 20: 3.3})).partition(end)[0], more))
    assert not run.finished and run.problem.startswith(problem) and len(run.losses) == kept


def test_stray_and_broken_lines():
    """Lines of other programs, two joined lines, a number that is none, a prefix, no header."""
    good = steps({0: 9.0, 4: 5.0}).splitlines()
    good[2] = "[rank0] \x1b[K" + good[2]  # the loss of step 1
    good[5] = good[5][:22] + good[7]  # step 3 cuts off step 2
    run = read_run(write("a.txt", "\r\n".join([*good[:6], "UserWarning: foo", *good[8:], "step:x", "bar",
                                              "step:1/4 val_loss:1.2.3 train_time:9ms step_avg:9ms"])))
    assert run.finished and run.losses == {0: 9.0, 4: 5.0} and run.ms == {0: 0, 1: 30, 3: 90, 4: 120}
    assert run.training == {1: 5.1, 4: 5.4}
    assert compare.step_ms(run, 0, 4) == 30  # steps 1 and 4, because the lines before the others are missing
    assert math.isnan(compare.step_ms(run, 1, 3))


@pytest.mark.parametrize("args, message", [
    ("a=short.txt b=same.txt long.txt --exchange=a,b", "the runs of b have 1000, 2000 tokens: all must have as many"),
    ("a=short.txt b=a.txt --exchange=a,b", "--exchange: the runs of b have 0 tokens: all must have as many, and 0"),
    ("a=short.txt b=same.txt --exchange=a,b", "--exchange: the rate is nan, not positive: a and b must be of"),
    ("a=short.txt b=long.txt --exchange=a,b", "--exchange: the rate is -0.1443, not positive: a and b must"),
    ("a=short.txt --exchange=a,b", "--exchange: 'b' is not a group with a finished run; there are a"),
    ("none.txt", "'none.txt': no such file, no folder with *.txt or *.log, no pattern that matches"),
    ("a.txt x=empty/../a*.txt", "empty/../a.txt and a.txt are the same log: name each run once"),
    ("a=short.txt x=x.txt --exchange=a,x", "--exchange: 'x' is not a group with a finished run"),
    ("a.txt copy.txt", "copy.txt and a.txt are the same log: name each run once"), ("empty", "'empty': no such file"),
    ("", "the following arguments are required: [label=]log (see --help)"), ("base=", "'': no such file"),
    ("x.txt --plot=a.svg", "--plot=a.svg: there are no losses to draw"), ("a.txt --plot=a.pdf", "a.pdf: draws .svg"),
    ("a=short.txt --exchange=a", "--exchange=a: takes two labels"), ("README.md", "README.md: not the log of a run"),
    ("a.txt --target=x", "--target: invalid float value: 'x'"),
    ("a.txt --plot=a.bin/a.svg", "cannot write a.bin/a.svg: "),
    ("a.txt --diff", "--diff takes two logs, or two groups"), ("a.bin", "a.bin: not the log of a run (no line like")])
def test_errors_are_one_line(call, args, message):
    """Nothing is written."""
    for name, loss, tokens in ("short", 3.3, 1000), ("same", 3.3, 1000), ("long", 3.4, 2000):
        write(f"{name}.txt", header(label=name), steps({0: 9.0, 5: loss}), f"tokens: {tokens}\n")
    write("a.txt", steps({0: 9.0, 5: 5.0}))
    write("copy.txt", Path("a.txt").read_text().replace("\n", "\r\n"), "\r\n")
    write("x.txt", header()), write("a.bin", "\0" * 99), write("README.md", "# A title")
    Path("empty").mkdir()
    before = sorted(os.walk("."))
    assert message in call(*args.split()) and sorted(os.walk(".")) == before


def test_groups():
    """Labels, files, folders, patterns. A file without a label joins the group before."""
    for i, name in enumerate(("a_1.txt", "a_2.txt", "b/1.txt", "b/2.log", "b/notes.md", "lr=2.txt")):
        write(name, steps({0: 9.0, 5: 5.0 - i / 10}))
    def names(*args):
        return {label: [run.name for run in runs] for label, runs in compare.read_groups(args).items()}
    found = {"runs": ["lr=2"], "old": ["a_2", "a_1"], "new": ["1", "2"]}  # "lr=2.txt" is a file, not a label
    assert names("lr=2.txt", "old=a_2.txt", "a_1.txt", "new=b") == found
    assert names("x=a_*.txt", "y=b/*.log", "x=b/1.txt") == {"x": ["a_1", "a_2", "1"], "y": ["2"]}
    assert names("a_1.txt", "b") == {"runs": ["a_1", "1", "2"]}
    args = compare.parse(["-h+b=a_1.txt", "a_2.txt", "+h-b=b/1.txt", "--target=3"])  # labels may look like options
    assert args.target == 3 and names(*args.logs) == {"-h+b": ["a_1", "a_2"], "+h-b": ["1"]}


def student(t, df):
    """P(T ≤ t): the integral of cos(x)^(df − 1) from −π/2 to atan(t/√df), scaled, by Gauss and Legendre."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    half = math.atan(t / df ** 0.5) / 2
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    return 0.5 + scale * half * (weights * np.cos(half + half * nodes) ** (df - 1)).sum()


@pytest.mark.parametrize("df, t975", [(1, 12.706205), (2, 4.302653), (3, 3.182446), (10, 2.228139), (999, 1.962341),
                                      (1.3, None), (5.02, None)])
def test_student(df, t975):
    """Against the integral for both signs and for small and large t, and against printed quantiles."""
    for t in (-40, -3, -0.3, -1e-6, 0, 0.01, 0.7, 2.5, 12):
        assert student_cdf(t, df) == pytest.approx(student(t, df), abs=3e-13)  # seen: 1e-13
    assert t975 is None or student_t95(df) == pytest.approx(t975, abs=6e-7)
    tail = 1 / (1e12 + 2 + 1e6 * math.sqrt(1e12 + 2))  # of df = 2, which 0.5 + t / ... loses to rounding
    assert student_cdf(-1e6, 2) == pytest.approx(tail, rel=1e-12)


def numbers(e):
    return e.value, e.half, e.p


def test_welch():
    """Worked by hand: variances 4 and 1, n = 3 and 5, means 9 and 6."""
    error, df = math.sqrt(4 / 3 + 1 / 5), (4 / 3 + 1 / 5) ** 2 / ((4 / 3) ** 2 / 2 + (1 / 5) ** 2 / 4)
    expected = -3, student_t95(df) * error, 2 * student(-3 / error, df)
    assert numbers(welch(Estimate(9.0, 4 / 3, 2), Estimate(6.0, 1 / 5, 4))) == pytest.approx(expected)
    # Without variation p is unknown, not 0, also where the mean of equal floats would round to another float.
    same, one = sample([3.2789] * 3), sample([3.0])
    assert same.sd == 0 and math.isnan(same.p_below(3.28)) and math.isnan(welch(same, same).p)
    assert one.value == 3 and math.isnan(one.sd) and math.isnan(one.p_below(3.28))
    assert welch(one, same).value == pytest.approx(0.2789) and math.isnan(welch(one, same).half)


def test_by_seed():
    """Worked by hand: the differences of seeds 2, 3 and 5 are 1, 2 and 3, so t = 2 √3 with 2 degrees of freedom, for
    which P(|T| > t) = 1 - t / √(2 + t²). Of a seed that a group has twice the mean counts."""
    old = {"1": 8.0, "2": 6.0, "3": 2.0, "5": 4.0}
    new = [("5", 6.0), ("3", 4.0), ("2", 7.0), ("5", 8.0), ("9", 1.0)]
    groups = {label: [replace(made([loss], [100 * loss])[0], facts={"seed": seed}) for seed, loss in values]
              for label, values in (("old", old.items()), ("new", new))}
    expected = 2, 4.302653 / 3 ** 0.5, 1 - 12 ** 0.5 / 14 ** 0.5
    for what, scale in ("loss", 1), ("time", 100):
        found = compare.by_seed(*groups.values(), what)
        assert found.n == 3 and numbers(found.times(1 / scale)) == pytest.approx(expected)
    assert {"| by seed, 3 pairs | +2.0000 (-0.4841 to +4.4841) | 0.0742 |",
            "| by seed, 3 pairs | +200.000 (-48.414 to +448.414) | 0.0742 |"} <= lines_of(compare.report(groups, None))
    del groups["new"][1:3]  # one pair is left
    assert "by seed" not in compare.report(groups, None)
    public = [read_run(PUBLIC)]  # which names no seed
    assert compare.by_seed(public, public, "loss").n == 0


def test_report():
    """PR 233's table says p = 0.0601 and 0.0097. The last group has unlike runs, and one that is left out."""
    groups = {"base": made(BASE, BASE_S), "new": made(NEW, NEW_S, ranks="8"), "odd": made((3.1, 3.1, 3.0))}
    short, long, left_out = groups["odd"]
    short.source, short.facts["muon_lr"] = "x = 1", "1"
    long.total, long.losses, long.seconds = 30, {0: 10.8, 30: 3.1}, {0: 0.0, 30: 0.9}
    left_out.problem = "it stopped at step 20 of 20"
    assert compare.report(groups, 3.28) == """\
|      | runs | steps | time s |    sd |     ± |   loss |     sd |      ± | p(loss ≤ 3.28) |
| ---- | ---- | ----- | ------ | ----- | ----- | ------ | ------ | ------ | -------------- |
| base |    4 |    20 | 89.799 | 0.062 | 0.099 | 3.2782 | 0.0016 | 0.0026 |         0.0601 |
| new  |    4 |    20 | 88.834 | 0.044 | 0.071 | 3.2788 | 0.0005 | 0.0008 |         0.0097 |
| odd  |    2 | 20/30 |  0.750 | 0.212 | 1.906 | 3.1000 | 0.0000 |      – |              – |

| difference (95 %)  |                              |      p |
| ------------------ | ---------------------------- | ------ |
| new − base, time s |    -0.965 (-1.061 to -0.870) |  8e-07 |
|   by seed, 4 pairs |    -0.965 (-1.051 to -0.880) |  5e-05 |
| new − base, loss   | +0.0006 (-0.0019 to +0.0031) | 0.5294 |
|   by seed, 4 pairs | +0.0006 (-0.0021 to +0.0033) | 0.5274 |
| odd − base, time s | -89.049 (-90.664 to -87.435) | 0.0006 |
|   by seed, 2 pairs | -89.007 (-91.497 to -86.517) | 0.0014 |
| odd − base, loss   | -0.1782 (-0.1808 to -0.1756) |  2e-07 |
|   by seed, 2 pairs | -0.1782 (-0.2004 to -0.1559) | 0.0063 |

| validation loss at step |             base |              new |              odd |   new − base (p) | odd − base (p) |
| ----------------------- | ---------------- | ---------------- | ---------------- | ---------------- | -------------- |
| 0                       | 10.8000 (0.0000) | 10.8000 (0.0000) | 10.8000 (0.0000) |      +0.0000 (–) |    +0.0000 (–) |
| 10                      |  4.2782 (0.0016) |  4.2788 (0.0005) |           4.1000 | +0.0006 (0.5294) |    -0.1782 (–) |
| 20                      |  3.2782 (0.0016) |  3.2788 (0.0005) |           3.1000 | +0.0006 (0.5294) |    -0.1782 (–) |
| 30                      |                – |                – |           3.1000 |            – (–) |          – (–) |

| ms per step          |           base |            new |          odd |
| -------------------- | -------------- | -------------- | ------------ |
| first steps          | 4489.98 (3.10) | 4441.70 (2.22) | 30.00 (0.00) |
| later steps          | 4489.98 (3.10) | 4441.70 (2.22) | 30.00 (0.00) |
| seconds to loss 3.28 |   89.72 (0.07) |   88.78 (0.04) |  0.71 (0.24) |

* base, time s: 89.803, 89.711, 89.835, 89.849
* base, loss: 3.2764, 3.2799, 3.2773, 3.2793
* new, time s: 88.821, 88.809, 88.806, 88.900
* new, loss: 3.2783, 3.2789, 3.2795, 3.2786
* odd, time s: 0.600, 0.900
* odd, loss: 3.1000, 3.1000

* run_0 and run_0: losses apart from step 10 on (4.2764 and 4.2783)
* run_0 and run_0: losses apart from step 10 on (4.2764 and 4.1000)

* warning: odd, run_2: left out, it stopped at step 20 of 20
* warning: base: n = 4 is too small to tell that the loss is below 3.28 (p = 0.0601; p < 0.01 would take 8 runs of\
 this mean and sd)
* warning: odd: its runs are not alike, they differ in muon_lr, source
* warning: odd: equal losses (one seed?) say nothing about chance
* warning: new − base, loss: p = 0.5274; p < 0.05 would take 33 pairs with this mean and scatter
* warning: ranks differ between the groups and may be why the times do"""
    near = {"near": made((3.2799, 3.28, 3.2803, 3.2796))}
    assert "p < 0.01 would take over 100 runs of" in compare.report(near, 3.28)


def test_seconds_to_a_loss():
    """Linear between validations: 0.55 and 0.65 of the way from 0.3 s to 0.6 s. The third run resumed at step 10."""
    runs = [*made((3.0, 3.1)), compare.Run("", losses={10: 3.4, 20: 3.2}, seconds={10: 0.3, 20: 0.6}, problem="x")]
    assert [compare.seconds_to(run, 3.45) for run in runs] == pytest.approx([0.465, 0.495, 0.3])
    lines = lines_of(compare.report({"a": runs[:2], "none": runs[2:]}, 3.05))
    assert {"| a | 2 | 20 | 0.600 | 0.000 | – | 3.0500 | 0.0707 | 0.6353 | 0.5000 |",
            "| none | 0 | | – | – | – | – | – | – | – |", "| first steps | 30.00 (0.00) | – |",
            "| seconds to loss 3.05 | 1 of 2 runs | – |", "* warning: none: n = 0 says nothing about chance"} <= lines


def test_the_target_of_the_track_is_not_one_for_bytes(capsys):
    """Nor can their losses be compared with those of tokens; one log names no checksum."""
    for size, has_target in (50257, True), (257, False):
        groups = {"a": made((3.1, 3.2), vocab_size="257", val_sha256="0a"), "b": made((3.1, 3.2), vocab_size=str(size))}
        warning = "vocab_size differ between the groups: their losses are not of the same text"
        assert (warning in compare.report(groups, None)) == has_target
        few = compare.report({"a": made((3.1, 3.2)), "b": made((3.1, 3.2), **{compare.FEW: "9"})}, None)
        assert "val_tokens.few differ between the groups: their losses before the end are not of the same text" in few
        for i, loss in enumerate((1.1, 1.2)):
            Path(f"{i}.txt").write_text(header(vocab_size=size) + steps({0: 5.0, 4: 2.0, 8: loss}))
        for option, shown in ((), has_target and "3.28"), (("--target=1.5",), "1.5"):
            assert compare.main(["0.txt", "1.txt", *option, "--plot=x.svg"]) == 0
            out = capsys.readouterr().out
            found = re.findall("loss ≤ (.*?)\\)|seconds to loss ([^ ]*)", out)
            assert found == [(shown, ""), ("", shown)] * bool(shown)
            assert ("stroke-dasharray" in Path("x.svg").read_text()) == (option == ("--target=1.5",))  # 3.28 is above


def test_exchange():
    """The rate, an arm and a single run, whose intervals are unknown. Only the lengths of SHORT and LONG may differ."""
    used = {"short": made(SHORT, SHORT_S, 1000000, scheduled_steps="90", muon_warmup="20"),
            "long": made(LONG, LONG_S, 2000000, scheduled_steps="180", muon_warmup="40"),
            "wide": made((3.37, 3.376, 3.374), (11.0, 11.2, 11.4), 1000000), "one": made([3.2], [11.0], 1000000)}
    found, line, rows = compare.exchange(used, ["short", "long"], warnings := [])
    rate, of_means = (np.mean(SHORT) - np.mean(LONG)) / math.log(2), welch(sample(LONG), sample(SHORT))
    assert numbers(found) == pytest.approx((rate, of_means.half / math.log(2), of_means.p))
    assert line == "exchange rate, short to long: +0.4030 (+0.3898 to +0.4162) of loss per e-fold of tokens"
    assert rows == [
        ["against the baseline (95 %)", "tokens", "loss", "time s", "tokens saved %", "net time s"],
        ["wide", "1000000", "-0.0367 (-0.0439 to -0.0294)", "+1.100 (+0.663 to +1.537)", "+8.70 (+7.17 to +10.20)",
         "+0.126 (-0.396 to +0.648)"],
        ["one", "1000000", "-0.2100 (–)", "+0.900 (–)", "+40.61 (–)", "-3.567 (–)"]]
    assert f"\n\n{line}\n\n| against the baseline" in compare.report(used, 3.28, ["short", "long"])
    assert warnings == ["exchange: short and long differ not only in length but in muon_warmup"]
    compare.exchange({"a": made((3.4, 3.1), None, 10), "b": made((3.3, 3.1), None, 20)}, "ab", warnings := [])
    assert re.fullmatch("exchange: the rate cannot be told from 0, so the savings mean nothing; .*", *warnings)


def exchanged(arm, short, long):
    """The four numbers of `against`, worked out by hand. Each group: tokens, mean loss, mean seconds."""
    rate = (short[1] - long[1]) / math.log(long[0] / short[0])
    loss = arm[1] - (short[1] - rate * math.log(arm[0] / short[0]))
    seconds = short[2] + (long[2] - short[2]) * (arm[0] - short[0]) / (long[0] - short[0])
    return np.array([loss, arm[2] - seconds, loss / rate, arm[2] * np.exp(loss / rate) - seconds])


@pytest.mark.parametrize("tokens", [1000, 1400, 4000, 600])
def test_intervals_of_an_exchange(tokens):
    """Against derivatives by complex steps, along each run's distance from its mean: loss and seconds go together."""
    rng = np.random.default_rng(0)
    shapes = (tokens, 3.1, 12.0, 4), (1000, 3.4, 10.0, 3), (2500, 3.0, 26.0, 5)
    data = [rng.multivariate_normal([loss, time], [[1e-4, 8e-3], [8e-3, 1.0]], n) for _, loss, time, n in shapes]
    means = [values.mean(0) for values in data]

    def results(means):
        return exchanged(*((shape[0], *mean) for shape, mean in zip(shapes, means)))
    parts = []
    for i, values in enumerate(data):
        n, moved = len(values), 1e-20j * (values - means[i])
        spread = [results([*means[:i], means[i] + run, *means[i + 1:]]).imag / 1e-20 for run in moved]
        parts.append([Estimate(0, variance, n - 1) for variance in np.square(spread).sum(0) / n / (n - 1)])
    arm, short, long = (made(*values.T.tolist(), shape[0]) for shape, values in zip(shapes, data))
    for found, value, *variances in zip(compare.against(short, long, arm), results(means), *parts):
        assert found == pytest.approx(estimate(value, *variances), rel=1e-9)


def noise(labels, counts, tokens=1000):
    """{label: runs}"""
    rng = np.random.default_rng(3)
    return {label: made(*rng.normal([[3.4], [20.0]], [[0.01], [1.0]], (2, n)).tolist(), tokens)
            for label, n in zip(labels.split(), counts)}


@pytest.mark.parametrize("labels, counts, shifts", [
    ("-b-a +a-b -a+b +a+b", (1, 4, 2, 3), ()),  # unbalanced: plain means would mix the effects
    ("-a-b+c +a-b-c -a+b-c +a+b+c", (2, 2, 2, 2), ()),  # half of eight
    ("-a-b-c +a-b-c -a+b-c -a-b+c", (2, 1, 2, 3), ()),  # one factor at a time
    ("-a-b +a-b -a+b +a+b", (3, 3, 3, 3), (0.0, 0.3, -0.2))])  # by seed: the seeds' own shifts are no scatter
def test_main_effects(labels, counts, shifts):
    """Against numpy; in tokens with the uncertainty of the rate. Groups with other labels stay out."""
    groups, factors = noise(labels, counts), re.findall(r"\w", labels.split()[0])
    both = [(label, run, int(run.facts.pop("seed"))) for label in groups for run in groups[label]]
    for _, run, seed in both if shifts else ():
        run.facts["seed"], run.losses[20] = str(seed), run.loss + shifts[seed]
    X = np.array([[1, *(1 if f"+{factor}" in label else -1 for factor in factors), *(seed == i for i in (1, 2) if shifts)]
                  for label, _, seed in both], float)
    y = np.array([[run.loss, run.time] for _, run, _ in both])
    beta, df = np.linalg.lstsq(X, y, rcond=None)[0], len(X) - X.shape[1]
    variances = np.outer(np.diag(np.linalg.inv(X.T @ X)), ((y - X @ beta) ** 2).sum(0) / df)
    rate, texts = Estimate(0.4, 3e-4, 2), []
    rows = [[f"effect of{', by seed' * bool(shifts)} (95 %)", "runs +", "runs −", "loss", "p", "time s", "p",
             "tokens saved %"]]
    for factor, signs, effects, parts in zip(factors, X.T[1:], 2 * beta[1:], 4 * variances[1:]):
        loss, time = (Estimate(effect, part, df) for effect, part in zip(effects, parts))
        log = estimate(loss.value / 0.4, Estimate(0, parts[0] / 0.4 ** 2, df),
                       Estimate(0, 3e-4 * (loss.value / 0.4 ** 2) ** 2, 2))
        rows.append([factor, str((signs > 0).sum()), str((signs < 0).sum()), shown(loss, 4), f"{loss.p:.4f}",
                     shown(time, 3), f"{time.p:.4f}", shown(log, 2, lambda log: 100 * (1 - math.exp(log)))])
        needed = (n for n in range(2, 101) if Estimate(loss.value, parts[0] * len(X) / 4 / n, 4 * n - 1 - len(factors)
                                                       - (n - 1) * bool(shifts)).p < 0.05)
        texts += [f"effect of {factor}, loss: p = {loss.p:.4f}; p < 0.05 would take {next(needed, 'over 100')} runs of"
                  " each label with this mean and scatter"] * bool(loss.p >= 0.05)
    used = {"base": made((9.0, 9.5))} | groups
    assert compare.main_effects(used, rate, warnings := []) == rows and warnings == texts
    assert compare.main_effects(used, None, []) == [row[:-1] for row in rows]


@pytest.mark.parametrize("labels, unknown, warning", [
    ("-a-b-c +a+b-c -a-b+c +a+b+c", "ab", "a and b"), ("-a-b+c +a-b+c -a+b+c +a+b+c", "c", "c from the mean"),
    ("+a+b+c+d -a-b+c+d +a+b-c-d -a-b-c-d", "abcd", "a and b; c and d")])
def test_aliased_factors(labels, unknown, warning):
    """Factors that the labels cannot separate are named and have no numbers. The others have numbers."""
    _, *rows = compare.main_effects(noise(labels, [2] * 4), None, warnings := [])
    assert warnings[-1] == f"effects: the labels cannot separate {warning}"
    assert {row[0] for row in rows} == {*re.findall(r"\w", labels)}
    assert {row[0] for row in rows if row[3:] == ["–"] * 4} == {*unknown}


def test_sets_without_effects():
    """No interval where no run is left for the noise. No table where the labels name other factors. No part for seeds
    where each label has its own, where each run has, or where some runs have none."""
    for seeds in ["1", "1", "2", "2"], ["1", "2", "3", "4"], ["1", "1", "1", None]:
        used = noise("-a +a", [2, 2])
        for run, seed in zip(sum(used.values(), []), seeds):
            run.facts = {"seed": seed} if seed else {}
        rows = compare.main_effects(used, None, [])
        assert rows[0][0] == "effect of (95 %)" and "–" not in rows[1]
    rows = compare.main_effects({"-a": made([3.4], [10.0]), "+a": made([3.3], [10.5])}, None, [])
    assert rows[1] == ["a", "1", "1", "-0.1000 (–)", "–", "+0.500 (–)", "–"]
    report = compare.report(noise("-a +b", [2, 2]), 3.28)
    warning = "* warning: no table of effects: -a, +b do not name the same factors, each once"
    assert warning in report and "effect of" not in report
    report = compare.report(noise("-a", [2]) | noise("+a", [2], 900), 3.28)
    warning = "* warning: effects: the runs differ in tokens (900, 1000), so the effects are not at equal tokens"
    assert warning in report and "\n\n| effect of, by seed (95 %) | runs + |" in report


def test_diff(call):
    """Settings, then sources."""
    for name, text in {"a": header(), "b": header("x = 3\n", "triton", muon_lr=0.5, command="c d"),
                       "c": header()}.items():
        write(f"{name}.txt", text, steps({0: 9.0, 5: 5.0 + (name == "c")}))
    facts = "-muon_lr: 0.023\n+muon_lr: 0.5\n-kernels.XXT: torch\n+kernels.XXT: triton\n+command: c d\n"
    changed = f"--- a\n+++ b\n@@ -1,4 +1,4 @@\n-x = 1\n+x = 3\n \n \n {'-' * 40}\n"
    assert call("--diff", "one=a.txt", "two=b.txt") == f"{facts}\n{changed}"
    assert call("--diff", "a.txt", "c.txt") == "settings and machine are equal\n\nthe sources are equal\n"


def test_plot(call):
    """Each run by step and by time."""
    assert 4 <= len(compare.ticks(0.11, 0.15)) <= 10  # a fourth of this range is a little less than .01
    for name, losses in ("a_1", (9.0, 4.2, 3.2)), ("a_2", (9.0, 4.3, 3.3)), ("b_1", (9.0, 4.0, 3.2)), (
            "b_2", (9.0, 4.5, math.nan)):
        write(f"{name}.txt", steps(dict(zip((0, 10, 20), losses))))
    call("a=a_*", "b=b_*", "--plot=p.svg")
    svg = Path("p.svg").read_text()
    assert svg.count("clip-path=") == 2 * 4 and "a (n = 2)" in svg and "b (n = 2)" in svg
    # The panels are 460 wide and begin at 585: the runs end at the right edge.
    assert "nan" not in svg and " 1045.0," in svg and "320.0,348" not in svg
    write("c.txt", steps({4: 3.0}))
    call("c.txt", "--plot=p.svg")
    dots = re.findall(r'points="(\S+) (\S+)"[^>]* stroke-linecap="round"', Path("p.svg").read_text())
    assert len(dots) == 2 and all(start == end for start, end in dots)  # a single loss
    sampled = "train_loss: over sampled classes up to step 60, which makes it lower than a val_loss\n"
    write("d.txt", sampled, steps({0: 9.0, 120: 3.2}))
    call("d.txt", "--plot=p.svg")  # alone: with its training losses over all classes, in means of two
    pale = re.findall(r'points="([^"]*)"[^>]*stroke-opacity="0.4"', Path("p.svg").read_text())
    heights = [float(point.split(",")[1]) for point in pale[0].split()[1:]]
    assert len(pale) == 2 and len(heights) == 30 and heights[0] < heights[-1]  # means: 5.615, 5.1195


def test_csv(call):
    """All runs, also one that did not finish; a step may have a loss of one kind alone."""
    write("a.txt", steps({0: 9.0, 2: 3.5})), write("b,c.txt", steps({0: 9.0, 5: 4.0}).partition("step:2/5")[0])
    call("one=a.txt", "two=b,c.txt", "--csv=curves.csv")
    assert Path("curves.csv").read_text().split("\n") == [
        "label,run,step,seconds,train_loss,val_loss", "one,a,0,0.0,,9.0", "one,a,1,0.03,5.1,", "one,a,2,0.06,5.2,3.5",
        'two,"b,c",0,0.0,,9.0', 'two,"b,c",1,0.03,5.1,', ""]


def test_script():
    """Without torch, into a closed pipe, and with the status of an error."""
    write("a.txt", header(), steps({0: 9.0, 20: 3.2}))
    run = f"{sys.executable} -S {compare.__file__}"
    script = f"export PYTHONIOENCODING=ascii; {run} a.txt | head -0; set -e; {run} a.txt; ! {run} none.txt"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "p(loss" in done.stdout and re.fullmatch("error: .*\n", done.stderr), done.stderr
