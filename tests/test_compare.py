"""records/compare.py: reading logs, statistics against closed forms and published figures, report, diff, plot, errors. Logs are
made here, except one in the public speedrun's format (fixtures/); test_run.py reads those of real runs."""

import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from records import compare

ROOT = Path(__file__).parent.parent
PUBLIC = Path(__file__).parent / "fixtures/speedrun_log.txt"
RULE = "=" * 100 + "\n"
FIELD_BASE, FIELD_NEW = (3.2764, 3.2799, 3.2773, 3.2793), (3.2783, 3.2789, 3.2795, 3.2786)  # PR 233's logs: p 0.0601, 0.0097
TIMES_BASE, TIMES_NEW = (89.803, 89.711, 89.835, 89.849), (88.821, 88.809, 88.806, 88.900)


SETTINGS = {  # of a short run; the header has more
    "vocab_size": "257", "layers": "2", "layer0": "paired", "layer1": "default",
    "scheduled_steps": "90", "extension_steps": "6", "stages": "4",
    **{f"stage{i}.{key}": value for i in range(1, 5) for key, value in (("batch_tokens", "4096"), ("share", "1.0"))},
    "stage4.share": "0.0", "muon_lr": "0.023", "muon_warmup": "20",
    "run_label": "run", "seed": "1337", "log_dir": "logs", "resume": "", "sample_prompt": ""}


def header(*args, source="x = 1\n", choices="torch", **facts):
    """As train_gpt.py writes it (test_run.py reads real ones); args: --key=value; facts: lines before the knobs."""
    others = {"data/loader.py": "z = 3\n", "triton_kernels.py": "y = 2\n"}
    facts = {"hardware": "x86_64", "hardware_fp8": "no", "hardware_tma": "no", "ranks": "1", "cores": "2",
             "platform": "Linux-6-x86_64", "command": " ".join(["train_gpt.py", "--preset=cpu", *args]),
             "commit": "5eb70881e2f4 clean", "sources": " ".join(["train_gpt.py", *others]),
             "train_shards": "a_train_000000.bin:5000000 a_train_000001.bin:400000",
             "val_shards": "a_val_000000.bin:892044", "env.OMP_NUM_THREADS": "2"} | facts
    facts |= SETTINGS | dict(arg.removeprefix("--").split("=", 1) for arg in args)
    return "\n".join([
        source, *(f"\n{'-' * 40}\n# {name}\n{'-' * 40}\n\n{text}" for name, text in others.items()),
        RULE + "Running Python 3.11.7 (main, Jan  1 2024) [GCC 12.2.0]",
        "Running PyTorch 2.13.0+cpu compiled for CUDA None", "Running Triton version 3.7.1", "nvidia-smi: not found",
        RULE + "\n".join(f"{key}: {value}" for key, value in facts.items()),
        RULE + f"kernels: XXT:{choices} head:float32", "tokens per micro-batch: 4096; micro-batches per rank: 1", ""])


def steps(losses, ms=lambda step: 30):
    """The lines of a run: losses is {step: validation loss}, its last step the run's; ms(step) the duration of a step, from 1."""
    total, clock, lines = max(losses), 0.0, []
    for step in range(total + 1):
        if step:
            clock += ms(step)
            lines.append(f"step:{step}/{total} train_time:{clock:.0f}ms step_avg:{clock / step:.2f}ms")
        if step in losses:
            lines.append(f"step:{step}/{total} val_loss:{losses[step]:.4f} train_time:{clock:.0f}ms step_avg:{clock / max(1, step):.2f}ms")
    return "\n".join(lines) + "\npeak memory allocated: 9 MiB reserved: 9 MiB\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(name, text) -> its path as a string; the working directory is where the files are."""
    monkeypatch.chdir(tmp_path)

    def write(name, *texts):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("".join(texts), encoding="utf-8")
        return name
    return write


@pytest.fixture
def call(capsys):
    """call(arguments) -> (what is printed, one line of error or "")."""
    def call(*argv):
        status = compare.main([*map(str, argv)])
        out, err = capsys.readouterr()
        assert status == (1 if err else 0) and err.count("\n") == len(err[:1]) and not (err and out)
        assert not err or err.startswith("error: ")
        return out, err
    return call


def group(write, label, losses, times=None, tokens=None, args=()):
    """One log per loss, of 20 steps; times: seconds of the whole run; with tokens also a header with these args."""
    for i, loss in enumerate(losses):
        ms = (times or [0.6] * len(losses))[i] * 1000 / 20
        text = steps({0: 10.8, 10: loss + 1, 20: loss}, lambda step: ms)
        if tokens:
            text = header(f"--seed={i}", *args) + text + f"tokens: {tokens}\ngpu_seconds: 1.234\n"
        write(f"{label}_{i}.txt", text)
    return f"{label}={label}_*.txt"


def cells(text):
    """Table cells of a report in markdown: {first cell: [others]}."""
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


# ---- Reading ---------------------------------------------------------------------------------------------------------


def test_public_log():
    """The committed fixture; the log quoted in its source is no part of the run."""
    run = compare.read_run(PUBLIC)
    assert run.finished and run.total == 20 and run.notes == ["2 headers, read from the last, line 23"]
    assert run.losses == {0: 10.8268, 10: 4.5141, 20: 3.2789} and run.seconds == {0: 0.0, 10: 0.352, 20: 0.892}
    assert sorted(run.ms) == list(range(21)) and [run.ms[k] for k in (0, 1, 2, 10, 20)] == [0, 80, 115, 340, 880]
    assert run.facts == {"python": "3.12.12", "torch": "2.11.0+cu130", "cuda": "13.0", "triton": "3.6.0", "driver": "580.65.06",
                         "gpus": "2 × NVIDIA H100 80GB HBM3"}
    assert run.source.startswith('"""Source of a trainer') and run.source.endswith("BLOCK = 64\n\n")
    assert compare.spans(run) == {"first steps": (0, 2), "later steps": (2, 20)}
    assert compare.step_ms(run, 0, 2) == 57.5 and compare.step_ms(run, 2, 20) == (880 - 115) / 18


def test_our_log(write):
    """A sample that looks like a log, and the closing lines."""
    fake = f'"""\n{RULE}Running Python 2\n{RULE}step:1/2 train_time:1ms step_avg:1.00ms\n"""\n'
    body = "Resetting Model\nwarning: the data starts over\n" + steps({0: 5.9, 3: 4.5, 5: 4.25})
    sample = f"sample:\ndef step:9/9\n{RULE}step:4/5 train_time:1ms step_avg:1.00ms\nx: y\n"
    run = compare.read_run(Path(write("a.txt", header("--seed=7", "--sample_prompt=def ", source=fake), body, sample,
                                      "tokens: 7\nfinal_val_loss: 4.2500\ntrain_seconds: 0.150\ntokens: 1234\n",
                                      "checkpoint: a/b\n")))
    assert run.finished and run.losses == {0: 5.9, 3: 4.5, 5: 4.25} and run.ms == {k: 30 * k for k in range(6)}
    assert run.notes == ["2 headers, read from the last, line 22"]
    settings = SETTINGS | {"seed": "7", "sample_prompt": "def ", "commit": "5eb70881e2f4 clean",
                           "env.OMP_NUM_THREADS": "2", "val_shards": "a_val_000000.bin:892044",
                           "command": "train_gpt.py --preset=cpu --seed=7 --sample_prompt=def "}
    assert settings.items() <= run.facts.items() and run.facts["kernels.XXT"] == "torch" and run.facts["kernels.head"] == "float32"
    assert run.facts["gpus"] == "none" and run.facts["torch"] == "2.13.0+cpu" and "driver" not in run.facts
    assert (run.tokens, run.loss, run.time) == (1234, 4.25, 0.15)  # the sample's "tokens: 7" comes before
    assert run.source.startswith(fake) and run.source.endswith("y = 2\n\n")
    assert run.source.index("\n# data/loader.py\n") < run.source.index("z = 3\n") < run.source.index("\n# triton_kernels.py\n")


def test_every_line_of_our_logs_is_known(write):
    """Sections, empty settings (also without the space after them), results."""
    clocks = "train", "setup", "warmup", "validation", "total", "gpu"
    results = ["final_val_loss: 4.2500", *(f"{what}_seconds: 1.234" for what in clocks),
               "steps: 5", "tokens: 20480", "peak_memory_mib: 0", ""]
    bare = header().replace("resume: \n", "resume:\n")
    run = compare.read_run(Path(write("a.txt", bare, steps({0: 5.9, 5: 4.25}), "\n".join(results))))
    assert run.finished and not run.notes and run.tokens == 20480
    assert run.facts["resume"] == run.facts["sample_prompt"] == ""
    assert compare.read_run(PUBLIC).tokens == 0


def test_log_of_2024(write):
    """A rule also before the source, another spelling, losses in training lines, averages that are nan, a clock that restarts."""
    lines = [f"step:{k}/12 train_loss:9.1234 train_time:{1000 * k if k < 11 else 40 * (k - 10)}ms step_avg:nanms" for k in range(1, 13)]
    run = compare.read_run(Path(write("a.log", RULE, "x = 1\n", RULE, "Running pytorch 2.5.0+cu124 compiled for CUDA 12.4\nnvidia-smi:\n",
                                      RULE, "Training DataLoader: total number of tokens: 3\n", RULE,
                                      "step:0/12 val_loss:15.9968 train_time:0ms step_avg:nanms\n", "\n".join(lines),
                                      "\nstep:12/12 val_loss:3.2700 train_time:85ms step_avg:42.50ms\n")))
    assert run.finished and not run.notes and run.source == "x = 1\n" and run.facts["torch"] == "2.5.0+cu124"
    assert run.losses == {0: 15.9968, 12: 3.27} and run.seconds[12] == 0.085
    assert compare.step_ms(run, 0, 12) == (10 * 1000 + 40) / 11  # step 11, at which it restarts, does not count


@pytest.mark.parametrize("cut, losses, note", [
    ("step:20/20 val_loss", {0: 10.8, 10: 4.0}, "left out, it stopped at step 20 of 20"),
    ("step:10/20 val", {0: 10.8}, "left out, it stopped at step 10 of 20"),
    ("7ms step_avg:30.00ms\nstep:20/20 train", {0: 10.8, 10: 4.0}, "left out, it stopped at step 18 of 20"),
    ("Resetting", {}, "left out, it stopped at step 0 of ?"),
    ("hardware_tma", {}, "left out, it stopped at step 0 of ?"),
    ("Running Triton", {}, "left out, it stopped at step 0 of ?"),
])
def test_truncated(write, cut, losses, note):
    """Also inside the header, in whatever part."""
    text = header() + "Resetting Model\n" + steps({0: 10.8, 10: 4.0, 20: 3.3}).replace("570ms", "577ms")
    run = compare.read_run(Path(write("a.txt", text[:text.index(cut)])))
    assert not run.finished and run.losses == losses and run.notes[-1] == note
    assert len(run.notes) == 1 or run.notes[0].startswith("1 line(s) not read: ") and "'step:19/20 train_time:57'" in run.notes[0]


def test_stray_and_broken_lines(write):
    """Lines of other programs, two lines run together, a prefix: what can be read is, the rest is named with its line number."""
    good = steps({0: 9.0, 4: 5.0}).splitlines()
    good[1] = "[rank0] \x1b[K" + good[1]  # step 1
    good[2] = good[2][:22] + good[3]  # step 2 is cut off by step 3
    text = "\n".join([*good[:3], "UserWarning: foo", *good[4:], "step:x", "bar", "baz"])
    run = compare.read_run(Path(write("a.txt", header(), text)))
    at = header().count("\n")
    assert run.finished and run.losses == {0: 9.0, 4: 5.0} and run.ms == {0: 0, 1: 30, 3: 90, 4: 120}
    assert run.notes == [f"5 line(s) not read: {at + 3} '{good[2][:60]}', {at + 4} 'UserWarning: foo', {at + 8} 'step:x', ..."]
    assert compare.step_ms(run, 0, 4) == 30  # steps 1 and 4: the others have no line before them


def test_windows_line_ends_and_console_output(write):
    """Console output is without a header."""
    run = compare.read_run(Path(write("b.txt", (header() + steps({0: 9.0, 5: 5.0})).replace("\n", "\r\n"))))
    assert run.finished and not run.notes and run.facts["muon_lr"] == "0.023" and run.source.startswith("x = 1\n")
    run = compare.read_run(Path(write("a.txt", "logs/run_1.txt\n", steps({0: 9.0, 5: 5.0}).replace("\n", "\r\n"))))
    assert run.finished and run.ms[5] == 150 and run.source == "" and run.facts == {} and "1 'logs/run_1.txt'" in run.notes[0]


@pytest.mark.parametrize("second", [steps({0: 9.1, 5: 5.1}), "step:6/9 train_time:180ms step_avg:30.00ms\n"])
def test_two_runs_mixed_in_one_file(write, second):
    """Lines that repeat a step or have another total: no number of such a file is to be trusted."""
    first = header() + steps({0: 9.0, 5: 5.0})
    run = compare.read_run(Path(write("a.txt", first, second)))
    assert not run.finished and run.notes == [f"left out, two runs are mixed: line {first.count(chr(10)) + 1} is the first that does not fit"]


def test_a_loss_that_is_no_number(write):
    run = compare.read_run(Path(write("a.txt", header(), steps({0: 9.0, 3: 5.0, 5: math.nan}))))
    assert not run.finished and run.notes == ["left out, its loss is nan"]


@pytest.mark.parametrize("name, text", [("a.txt", "hello\n"), ("a.txt", ""), ("train_gpt.py", None), ("README.md", None)])
def test_files_that_are_no_logs(write, call, name, text):
    """Also a README that quotes a few step lines, and a script that prints them."""
    write(name, (ROOT / name).read_text() if text is None else text)
    assert call(name)[1].startswith(f"error: {name}: not the log of a run (few or no lines like 'step:1/1490 ")
    assert call(write("a.bin", "\0" * 99))[1] == "error: a.bin: not a log but binary data\n"


@pytest.mark.parametrize("args, message", [
    (["none.txt"], "'none.txt': no such file, no folder with *.txt or *.log, no pattern that matches"),
    (["base=none_*"], "'none_*': no such file"), (["base="], "'': no such file"), (["empty"], "'empty': no such file"),
    ([], "the following arguments are required: [label=]log (see --help)"), (["a.txt", "--mark"], "unrecognized arguments: --mark"),
    (["a.txt", "--target=x"], "argument --target: invalid float value: 'x'"),
    (["a.txt", "x=a*.txt"], "a.txt: named twice, but a run counts once"), (["a.txt", "empty/../a.txt"], "named twice"),
    (["a.txt", "--diff"], "--diff takes two logs, or two groups"), (["a.txt", "b.txt", "c.txt", "--diff"], "--diff takes two logs"),
    (["em*"], "cannot read empty: Is a directory"),
    (["a.txt", "--plot=a.pdf"], "--plot=a.pdf: draws .svg or .png"), (["a.txt", "--plot=none/a.svg"], "cannot write none/a.svg: No such file"),
    (["a.txt", "--plot=d.svg"], "cannot write d.svg: Is a directory"), (["x.txt", "--plot=a.svg"], "--plot=a.svg: there are no losses to draw"),
])
def test_errors_are_one_line(write, call, args, message):
    for name in "abc":
        write(f"{name}.txt", steps({0: 9.0, 5: 5.0}))
    write("x.txt", header()) if "x.txt" in args else None
    Path("empty").mkdir(), Path("d.svg").mkdir()
    before = sorted(os.listdir())
    assert message in call(*args)[1] and sorted(os.listdir()) == before


def test_groups(write):
    """Labels, files, folders, patterns; no label: the group before; a file whose name has a = is a file."""
    for name in ("a_1.txt", "a_2.txt", "b/1.txt", "b/2.log", "b/notes.md", "lr=2.txt"):
        write(name, steps({0: 9.0, 5: 5.0}))
    groups = compare.read_groups(["lr=2.txt", "old=a_2.txt", "a_1.txt", "new=b"])
    assert {label: [run.name for run in runs] for label, runs in groups.items()} == {"runs": ["lr=2"], "old": ["a_2", "a_1"], "new": ["1", "2"]}
    groups = compare.read_groups(["x=a_*.txt", "y=b/*.log", "x=b/1.txt"])
    assert {label: [run.name for run in runs] for label, runs in groups.items()} == {"x": ["a_1", "a_2", "1"], "y": ["2"]}
    name = write("run_58c93daf-f8bd-4abd-8dfc-28f2654c789b.txt", steps({0: 9.0, 5: 5.0}))
    assert compare.read_run(Path(name)).name == "run_58c93daf"


# ---- Statistics ------------------------------------------------------------------------------------------------------


def closed_form(t, df):
    """P(T ≤ t) for whole df: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle, total, term = math.atan(t / df ** 0.5), 0.0, 1.0
    for k in range(1 + df % 2, df, 2):
        total, term = total + term, term * k / (k + 1) * math.cos(angle) ** 2
    if df % 2:
        return 0.5 + (angle + math.sin(angle) * math.cos(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 10, 31, 100, 999])
def test_student_against_closed_forms(df):
    """Both continued fractions (t small and large) and both signs; the far tail in relative terms."""
    assert closed_form(1.7, 1) == pytest.approx(0.5 + math.atan(1.7) / math.pi, rel=1e-14)
    assert closed_form(1.7, 2) == pytest.approx(0.5 + 1.7 / (2 * math.sqrt(2 + 1.7 ** 2)), rel=1e-14)
    for t in (-40, -6, -3, -1.5, -0.3, -1e-6, 0, 0.01, 0.7, 1.2, 2.5, 12):
        assert compare.student_cdf(t, df) == pytest.approx(closed_form(t, df), abs=1e-14, rel=3e-12)  # seen: 1.2e-12, at df = 999
    if df == 2:  # 0.5 + t / ... loses the tail to rounding; this does not
        assert compare.student_cdf(-1e6, 2) == pytest.approx(1 / (1e12 + 2 + 1e6 * math.sqrt(1e12 + 2)), rel=1e-12)


@pytest.mark.parametrize("df, t975", [(1, 12.706205), (2, 4.302653), (3, 3.182446), (5, 2.570582), (10, 2.228139), (30, 2.042272),
                                      (120, 1.979930), (10000, 1.960201)])
def test_student_quantiles(df, t975):
    """Printed tables."""
    assert compare.student_t95(df) == pytest.approx(t975, abs=6e-7)


def test_student_between_whole_degrees_of_freedom():
    """Welch's df are no whole numbers: integrate the density."""
    for df in (1.3, 3.7, 5.02):
        x = np.linspace(0, 2.2, 20001)
        density = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2) * (1 + x * x / df) ** (-(df + 1) / 2)
        area = (density.sum() - (density[0] + density[-1]) / 2) * (x[1] - x[0])
        assert compare.student_cdf(2.2, df) == pytest.approx(0.5 + area, abs=1e-9)


def test_published_figures():
    for losses, sd, p in ((FIELD_BASE, 0.0016, 0.0601), (FIELD_NEW, 0.0005, 0.0097)):
        s = compare.sample(losses)
        assert (s.n, round(s.sd, 4), round(compare.p_below(s, 3.28), 4)) == (4, sd, p)
        assert s.half == pytest.approx(3.182446 * s.sd / 2, rel=1e-6)
        t = (s.mean - 3.28) / (s.sd / 2)
        assert compare.p_below(s, 3.28) == pytest.approx(closed_form(t, 3), rel=1e-12)


def test_welch():
    """Equal sds and n: df = 2n − 2 and the textbook's t. And a case worked by hand: variances 4 and 1, n = 3 and 5, means 9 and 6."""
    old, new = compare.Sample(4, 10.0, 1.0), compare.Sample(4, 11.0, 1.0)
    difference, half, p = compare.welch(old, new)
    assert difference == 1 and p == pytest.approx(2 * closed_form(-math.sqrt(2), 6)) and half == pytest.approx(2.446912 * math.sqrt(0.5), rel=1e-6)
    difference, half, p = compare.welch(compare.Sample(3, 9.0, 2.0), compare.Sample(5, 6.0, 1.0))
    df = (4 / 3 + 1 / 5) ** 2 / ((4 / 3) ** 2 / 2 + (1 / 5) ** 2 / 4)
    assert difference == -3 and p == pytest.approx(2 * compare.student_cdf(-3 / math.sqrt(4 / 3 + 1 / 5), df))
    assert 2 * closed_form(-2.42281, 3) < p < 2 * closed_form(-2.42281, 2)
    assert half == pytest.approx(compare.student_t95(df) * math.sqrt(4 / 3 + 1 / 5))


def test_runs_that_do_not_vary_say_nothing():
    """Even where the mean of equal floats would round to another float."""
    same = compare.sample([3.2789] * 3)
    assert same.sd == 0 and math.isnan(compare.p_below(same, 3.28)) and math.isnan(compare.welch(same, same)[2])
    one = compare.sample([3.0])
    assert one.mean == 3 and math.isnan(one.sd) and math.isnan(one.half) and math.isnan(compare.p_below(one, 3.28))
    assert compare.welch(one, same)[0] == pytest.approx(0.2789) and math.isnan(compare.welch(one, same)[1])
    assert math.isnan(compare.sample([]).mean)


# ---- Steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduled, extension", [(9, 2), (90, 6), (145, 4), (1450, 40), (7, 0), (1000, 1)])
@pytest.mark.parametrize("shares", [True, False])
def test_stages_are_the_trainers(write, scheduled, extension, shares):
    """Equal shares, with and without the lines that tell them."""
    import train_gpt as T
    args = f"--scheduled_steps={scheduled}", f"--extension_steps={extension}"
    total, starts = scheduled + extension, T.stage_starts(T.parse_config(["--preset=cpu", *args]).schedule)
    text = header(*args) if shares else re.sub(r"stage\d\.share: .*\n", "", header(*args))
    parts = compare.spans(compare.read_run(Path(write("a.txt", text, steps({0: 9.0, total: 5.0})))))
    first = max(1, min(10, total // 10))
    assert parts.pop("first steps") == (0, first) and parts.pop("later steps") == (first, total)
    stages = {f"stage {i}": (max(a, first), b) for i, (a, b) in enumerate(zip(starts, starts[1:]), 1)}
    assert parts == {name: part for name, part in stages.items() if part[0] < part[1]}
    assert len(parts) == (4 if extension else 3)


@pytest.mark.parametrize("shares, scheduled, borders", [
    ((1, 1, 2, 0), 100, (25, 50, 100)), ((0.5, 0.3, 0.2, 0), 1450, (725, 1160, 1450)),
    ((1, 2, 1, 0), 90, (22, 68, 90)), ((0, 1, 0, 0), 90, (0, 90, 90)),
])
def test_stages_of_unequal_shares(write, shares, scheduled, borders):
    """Borders worked by hand; 22.5 and 67.5 go to the even number."""
    args = [f"--scheduled_steps={scheduled}", *(f"--stage{i}.share={share:.1f}" for i, share in enumerate(shares, 1))]
    run = compare.read_run(Path(write("a.txt", header(*args), steps({0: 9.0, scheduled + 6: 5.0}))))
    first = min(10, run.total // 10)
    edges = [max(first, border) for border in (0, *borders, scheduled + 6)]
    stages = {f"stage {i}": (a, b) for i, (a, b) in enumerate(zip(edges, edges[1:]), 1) if a < b}
    assert compare.spans(run) == {"first steps": (0, first), "later steps": (first, run.total)} | stages


def test_time_to_a_loss():
    run = compare.Run("", losses={0: 10.0, 10: 4.0, 20: 3.0, 30: 3.5, 40: 2.0}, seconds={0: 0.0, 10: 1.0, 20: 3.0, 30: 4.0, 40: 6.0})
    assert [compare.seconds_to(run, x) for x in (7.0, 4.0, 3.25, 3.0, 2.0)] == [0.5, 1.0, 2.5, 3.0, 6.0]
    assert math.isnan(compare.seconds_to(run, 1.9)) and math.isnan(compare.seconds_to(run, 11.0))


def test_divergence():
    def text(old, new):
        return compare.divergence(compare.Run("a", losses=old), compare.Run("b", losses=new)).removeprefix("a and b: losses ")
    assert text({0: 9.0, 5: 5.0, 7: 4.0, 9: 3.0}, {0: 9.0, 5: 5.0, 9: 3.1, 8: 1.0}) == "equal up to step 5, apart from step 9 on (3.0000 and 3.1000)"
    assert text({0: 9.0, 5: 5.0}, {0: 9.1, 5: 5.0}) == "apart from step 0 on (9.0000 and 9.1000)"
    assert text({0: 9.0, 5: 5.0}, {0: 9.0, 5: 5.0, 10: 4.0}) == "equal up to step 5"
    assert text({}, {0: 1.0}) == "at no common step"


# ---- Report ----------------------------------------------------------------------------------------------------------


def test_report_of_the_published_runs(write, call):
    text, _ = call(group(write, "base", FIELD_BASE, TIMES_BASE), group(write, "new", FIELD_NEW, TIMES_NEW), "--markdown")
    rows = cells(text)
    assert rows[""] == ["runs", "steps", "time s", "sd", "±", "loss", "sd", "±", "p(loss ≤ 3.28)"]
    assert rows["base"] == ["4", "20", "89.799", "0.062", "0.099", "3.2782", "0.0016", "0.0026", "0.0601"]
    assert rows["new"] == ["4", "20", "88.834", "0.044", "0.071", "3.2788", "0.0005", "0.0008", "0.0097"]
    time, loss = (compare.welch(compare.sample(a), compare.sample(b)) for a, b in ((TIMES_BASE, TIMES_NEW), (FIELD_BASE, FIELD_NEW)))
    assert rows["new − base, time s"] == [f"{time[0]:+.3f}", f"{time[0] - time[1]:+.3f} to {time[0] + time[1]:+.3f}", f"{time[2]:.0e}"]
    assert rows["new − base, loss"] == ["+0.0006", f"{loss[0] - loss[1]:+.4f} to {loss[0] + loss[1]:+.4f}", f"{loss[2]:.4f}"]
    assert rows["validation loss at step"] == ["base", "new", "new − base (p)"] and rows["0"] == ["10.8000 (0.0000)"] * 2 + ["+0.0000 (–)"]
    assert rows["20"] == ["3.2782 (0.0016)", "3.2788 (0.0005)", f"+0.0006 ({loss[2]:.4f})"]
    assert "first steps, 1 to 2" in rows and "later steps, 3 to 20" in rows
    assert "* new, loss: 3.2783, 3.2789, 3.2795, 3.2786\n" in text and "* base, time s: 89.803, 89.711, 89.835, 89.849\n" in text
    assert "* base_0 and new_0: losses equal up to step 0, apart from step 10 on (4.2764 and 4.2783)\n" in text
    warnings = [line for line in text.splitlines() if "warning: " in line]
    assert len(warnings) == 2 and "base: n = 4 is too small to tell that the loss is below 3.28 (p = 0.0601; " in warnings[0]
    assert f"new − base, loss: n = 4 and 4 are too few to tell +0.0006 from chance (p = {loss[2]:.4f}; " in warnings[1]
    plain = call("base=base_*.txt", "new=new_*.txt")[0].splitlines()
    assert plain[1].split() == ["base", *rows["base"]] and len(plain[0]) == len(plain[1]) == len(plain[2])


def test_how_many_runs_would_do(write, call):
    """The number of runs in a warning passes, one fewer does not."""
    text, _ = call(group(write, "base", FIELD_BASE, TIMES_BASE), group(write, "new", FIELD_NEW, TIMES_NEW))
    record, apart = map(int, re.findall(r"would take (\d+) runs", text))
    base, new = compare.sample(FIELD_BASE), compare.sample(FIELD_NEW)
    assert compare.p_below(base._replace(n=record), 3.28) < 0.01 <= compare.p_below(base._replace(n=record - 1), 3.28)
    p = [compare.welch(base._replace(n=n), new._replace(n=n))[2] for n in (apart - 1, apart)]
    assert p[1] < 0.05 <= p[0]
    assert "small to tell that" not in call(group(write, "above", (3.29, 3.31)))[0]
    text, _ = call(group(write, "x", (3.0, 3.1), (1, 2)), group(write, "y", (3.0, 3.1001), (1, 2)))
    assert text.count("would take over 100 runs each") == 2
    assert compare.enough(lambda n: 0.0, 0.01) == "2 runs"


def test_target(write, call):
    rows = cells(call(group(write, "a", (3.0, 3.1)), "--target=3.45", "--markdown")[0])
    assert rows[""][-1] == "p(loss ≤ 3.45)" and rows["a"][-1] == f"{closed_form((3.05 - 3.45) / 0.05, 1):.4f}"
    assert rows["seconds to loss 3.45"] == ["0.48 (0.02)"]  # 0.55 and 0.65 of the way from 0.3 s to 0.6 s
    assert cells(call("a=a_*.txt", "--target=3.05", "--markdown")[0])["seconds to loss 3.05"] == ["1 of 2 runs"]


def test_runs_left_out_and_groups_that_are_none(write, call):
    """Interrupted runs are in no number, alone or not; one run, equal losses and unlike runs get a warning each."""
    write("a_1.txt", header(), steps({0: 9.0, 4: 6.0, 8: 3.0}))
    write("a_2.txt", header("--seed=8", "--run_label=x", "--log_dir=y"), steps({0: 9.0, 4: 6.0, 8: 3.0}))
    write("a_3.txt", header(), steps({0: 7.0, 4: 1.0, 8: 3.0}).partition("step:8/8 val")[0])
    write("b_1.txt", header("--muon_lr=1", source="x = 2\n"), steps({0: 9.0, 4: 6.0, 8: 3.0}))
    write("b_2.txt", header(), steps({0: 9.0, 4: 6.0, 9: 3.1}))
    write("c_1.txt", header(), steps({0: 9.0, 4: 6.0, 8: 3.0}))
    write("c_2.txt", header(), steps({0: 9.0, 4: 6.0, 8: 2.0}), steps({0: 9.0, 4: 6.0, 8: 2.1}))
    write("d_1.txt", header(), "step:0/8 val_loss:9.0 train_time:0ms step_avg:0.00ms\n")
    text, _ = call("a=a_*", "b=b_*", "c=c_*", "d=d_*", "--markdown")
    rows = cells(text)
    assert rows["a"] == ["2", "8", "0.240", "0.000", "0.000", "3.0000", "0.0000", "0.0000", "–"]
    assert rows["b"][:2] == ["2", "8/9"] and rows["c"] == ["1", "8", "0.240", "–", "–", "3.0000", "–", "–", "–"]
    assert rows["d"] == ["0", "", *"–" * 7] and rows["d − a, loss"] == ["–", "– to –", "–"]
    assert rows["0"][:4] == ["9.0000 (0.0000)", "9.0000 (0.0000)", "9.0000", "–"] and rows["9"][:4] == ["–", "3.1000", "–", "–"]
    assert rows["seconds to loss 3.28"] == ["0.23 (0.00)", "0.24 (0.02)", "0.23", "–"]
    assert rows["later steps"] == ["30.00 (0.00)", "30.00 (0.00)", "30.00", "–"]  # no steps named: they differ
    assert [line for line in text.splitlines() if "warning: " in line][:8] == [f"* warning: {line}" for line in (
        "a, a_3: left out, it stopped at step 8 of 8", *re.findall("c, c_2: left out, two runs are mixed: .*", text),
        "d, d_1: left out, it stopped at step 0 of 8",
        "a: equal losses (one seed?) say nothing about chance",
        "b: its runs are not alike, they differ in muon_lr, source",
        *re.findall(r"b: n = 2 is too small .*", text), "c: n = 1 says nothing about chance", "d: n = 0 says nothing about chance")]


def test_other_machines_are_named(write, call):
    write("a.txt", header(), steps({0: 9.0, 5: 5.0}))
    write("b.txt", header("--muon_lr=1"), steps({0: 9.0, 5: 5.0}))
    write("c.txt", header().replace("ranks: 1", "ranks: 2").replace("Triton version ", "Triton version 9"), steps({0: 9.0, 5: 5.0}))
    named = "* warning: ranks, triton differ between the groups and may be why the times do"
    assert named in call("a=a.txt", "b=b.txt", "c=c.txt")[0] and "between the groups" not in call("a=a.txt", "b=b.txt")[0] + call("a.txt", "c.txt")[0]


def test_stages_and_a_choice_of_losses(write, call):
    """Mean step time by stage, where the header tells the stages; the table of losses keeps the first and the last step."""
    args = "--scheduled_steps=90", "--extension_steps=10"
    for i in (0, 2):
        slow = {step: i + 10 * (1 + sum(step > border for border in (10, 30, 60, 90))) for step in range(101)}
        write(f"a_{i}.txt", header(*args), steps({k: 9 - k / 20 for k in range(0, 101, 2)}, slow.get))
    write("b.txt", steps({k: 9 - k / 20 for k in range(0, 101, 2)}, lambda step: 15))
    rows = cells(call("a=a_*", "b=b.txt", "--markdown")[0])
    assert {name: row for name, row in rows.items() if "st" in name and "," in name} == {
        "first steps, 1 to 10": ["11.00 (1.41)", "15.00"], "later steps, 11 to 100": ["34.33 (1.41)", "15.00"],
        **{f"stage {i}, {a} to {b}": [f"{10 * i + 11}.00 (1.41)", "–"] for i, (a, b) in enumerate(((11, 30), (31, 60), (61, 90), (91, 100)), 1)}}
    shown = [int(name) for name in rows if name.isdigit()]
    assert len(shown) == 12 and shown[0] == 0 and shown[-1] == 100 and shown == sorted(set(shown))


def test_pairs_prefer_one_seed(write, call):
    for name, seed in (("a_1", 7), ("b_1", 8), ("b_2", 7)):
        write(f"{name}.txt", header(f"--seed={seed}"), steps({0: float(seed), 5: 5.0}))
    assert "a_1 and b_2: losses equal up to step 5" in call("a=a_*", "b=b_*")[0]
    assert re.findall("(.*) and (.*): losses", call("b_1.txt", "b_2.txt", "a_1.txt")[0]) == [("* b_1", "b_2"), ("* b_1", "a_1")]
    write("c.txt", steps({0: 7.0, 5: 5.0}))
    assert re.findall("(.*) and (.*): losses", call("a=a_*", "c=c.txt", "b=b_*")[0]) == [("* a_1", "c"), ("* a_1", "b_2")]


def test_what_belongs_to_one_run_is_no_difference(write, call):
    """The command has the seed and the label in it; another commit is worth a warning."""
    write("a_1.txt", header("--seed=1", "--run_label=a", command="train_gpt.py --seed=1"), steps({0: 9.0, 5: 5.0}))
    write("a_2.txt", header("--seed=2", "--run_label=b", command="train_gpt.py --seed=2"), steps({0: 9.0, 5: 5.1}))
    assert "not alike" not in call("a=a_*")[0]
    other = header(commit="5eb70881e2f4 with changes", **{"env.OMP_NUM_THREADS": "1"})
    write("a_3.txt", other, steps({0: 9.0, 5: 5.1}))
    assert "warning: a: its runs are not alike, they differ in commit, env.OMP_NUM_THREADS\n" in call("a=a_*")[0]


# ---- Exchange of loss for tokens -------------------------------------------------------------------------------------


def made(tokens, losses, times):
    """Runs without logs."""
    return [compare.Run("", total=1, losses={1: loss}, seconds={1: time}, tokens=tokens)
            for loss, time in zip(losses, times)]


def exchanged(arm, short, long):
    """The four numbers of `against`, worked out by hand. Each group: tokens, mean loss, mean seconds."""
    rate = (short[1] - long[1]) / math.log(long[0] / short[0])
    loss = arm[1] - (short[1] - rate * math.log(arm[0] / short[0]))
    seconds = short[2] + (long[2] - short[2]) * (arm[0] - short[0]) / (long[0] - short[0])
    return loss, arm[2] - seconds, loss / rate, arm[2] * math.exp(loss / rate) - seconds


def interval(text):
    """Numbers of a cell like '+0.1 (-0.2 to +0.4)'."""
    return [float(x) for x in re.fullmatch(r"(\S+) \((\S+) to (\S+)\)", text).groups()]


SHORT, LONG = (3.412, 3.408, 3.415, 3.405), (3.131, 3.126, 3.135)
SHORT_S, LONG_S = (10.0, 10.2, 10.1, 10.1), (20.2, 20.0, 20.4)


def test_exchange_by_hand(write, call):
    """Arms as long as SHORT, as LONG and between; the differences to a group of the same length are Welch's."""
    ends = (group(write, "short", SHORT, SHORT_S, 1000000),
            group(write, "long", LONG, LONG_S, 2000000, ["--scheduled_steps=180"]))
    arms = {"wide": (1000000, (3.37, 3.376, 3.374), (11.0, 11.2, 11.4)), "deep": (2000000, (3.10, 3.11), (20.0, 21.0)),
            "odd": (1500000, (3.30, 3.31), (15.5, 15.7))}
    given = [group(write, label, losses, times, tokens) for label, (tokens, losses, times) in arms.items()]
    text, _ = call(*ends, *given, "--exchange=short,long", "--markdown")
    rows, rate = cells(text), (np.mean(SHORT) - np.mean(LONG)) / math.log(2)
    assert rows["against the baseline (95 %)"] == ["tokens", "loss", "time s", "tokens saved %", "net time s"]
    ends = [compare.sample(SHORT), compare.sample(LONG)]
    half = compare.welch(*ends)[1] / math.log(2)
    shown = f"{rate:+.4f} ({rate - half:+.4f} to {rate + half:+.4f}) of loss per e-fold of tokens"
    assert f"\n\nexchange rate, short to long: {shown}\n\n| against the baseline" in text
    for label, (tokens, losses, times) in arms.items():
        loss, seconds, log, net = exchanged(*((n, np.mean(l), np.mean(s)) for n, l, s in (
            (tokens, losses, times), (1e6, SHORT, SHORT_S), (2e6, LONG, LONG_S))))
        values = loss, seconds, 100 * (1 - math.exp(log)), net
        assert rows[label][0] == str(tokens)
        for cell, value, digits in zip(rows[label][1:], values, (4, 3, 2, 3)):
            middle, low, high = interval(cell)
            assert middle == round(value, digits) and low < middle < high
    for label, base, base_s in (("wide", SHORT, SHORT_S), ("deep", LONG, LONG_S)):
        for column, old, new, digits in (1, base, arms[label][1], 4), (2, base_s, arms[label][2], 3):
            value, half, _ = compare.welch(compare.sample(old), compare.sample(new))
            assert interval(rows[label][column]) == [round(value + edge, digits) for edge in (0, -half, half)]
    arms_table = text.partition("against the baseline")[2].partition("\n\n")[0]
    assert "warning: exchange" not in text and "short" not in arms_table
    swapped = cells(call("long=long_*", "short=short_*", *given, "--exchange=long,short", "--markdown")[0])
    assert all(swapped[label] == rows[label] for label in arms)


@pytest.mark.parametrize("tokens", [1000, 1400, 2500, 4000, 600])
def test_intervals_by_numerical_derivatives(tokens):
    """Each run's share of the variance, by moving the means a little: loss and seconds of a run go together."""
    rng = np.random.default_rng(0)
    shapes = (tokens, 3.1, 12.0, 4), (1000, 3.4, 10.0, 3), (2500, 3.0, 26.0, 5)
    data = [rng.multivariate_normal([loss, time], [[1e-4, 8e-3], [8e-3, 1.0]], n) for _, loss, time, n in shapes]
    arm, short, long = (made(shape[0], *values.T) for shape, values in zip(shapes, data))
    means = [values.mean(0) for values in data]

    def numbers(means):
        return np.array(exchanged(*((shape[0], *m) for shape, m in zip(shapes, means))))

    parts = []
    for i, values in enumerate(data):
        slopes = []
        for axis in np.eye(2) * 1e-5:
            up, down = ([m + sign * axis * (k == i) for k, m in enumerate(means)] for sign in (1, -1))
            slopes.append((numbers(up) - numbers(down)) / 2e-5)
        spread = (values - means[i]) @ np.array(slopes)
        parts.append((spread ** 2).sum(0) / (len(values) * (len(values) - 1)))
    found = compare.against(short, long, arm)
    for k, (got, want) in enumerate(zip(found, numbers(means))):
        variances = [part[k] for part in parts]
        df = sum(variances) ** 2 / sum(v ** 2 / (len(values) - 1) for v, values in zip(variances, data))
        assert got.value == pytest.approx(want, rel=1e-9)
        assert got.half == pytest.approx(compare.student_t95(df) * math.sqrt(sum(variances)), rel=1e-5)


def test_intervals_cover_the_truth(monkeypatch):
    """In 95 % of 500 made experiments, within four standard errors. The rate is badly known, seconds go with losses."""
    exact = compare.student_t95
    monkeypatch.setattr(compare, "student_t95", lambda df: exact(round(df, 1)))  # which it has in store
    rng, hits, experiments = np.random.default_rng(1), {}, 500
    truth = {"short": (1000, 3.4, 10.0), "long": (2000, 3.2, 20.0), "better": (1000, 3.25, 11.0),
             "worse": (1000, 3.6, 9.0), "longer": (3000, 3.0, 33.0), "shorter": (700, 3.5, 8.0)}
    covariance = [[4e-4, 3e-3], [3e-3, 0.04]]

    def count(name, estimate, value):
        hits[name] = hits.get(name, 0) + (abs(estimate.value - value) <= estimate.half)

    for _ in range(experiments):
        groups = {label: made(tokens, *rng.multivariate_normal(means, covariance, 6).T)
                  for label, (tokens, *means) in truth.items()}
        short, long, *_ = groups.values()
        rate, parts = compare.exchange_rate(short, long)
        count("rate", compare.estimate(rate, *parts), 0.2 / math.log(2))
        for label in list(truth)[2:]:
            want = exchanged(truth[label], truth["short"], truth["long"])
            found = compare.against(short, long, groups[label])
            for what, got, value in zip(("loss", "seconds", "log", "net"), found, want):
                count(f"{label}, {what}", got, value)
    slack = 4 * math.sqrt(0.95 * 0.05 / experiments)  # 0.039; seen: 0.014
    shares = {name: n / experiments for name, n in hits.items()}
    assert len(shares) == 17 and {name: share for name, share in shares.items() if abs(share - 0.95) > slack} == {}


def test_exchange_with_single_runs(write, call):
    """What LONG has no part in has its interval; the rest has none, and a warning says why. No run: no row."""
    write("none.txt", header(), steps({0: 9.0, 5: 5.0}).partition("step:5/5")[0])
    ends = group(write, "short", SHORT, SHORT_S, 1000), group(write, "long", LONG[:1], LONG_S[:1], 2000)
    arms = group(write, "wide", (3.37, 3.38), (11.0, 11.2), 1000), group(write, "one", (3.2,), (11.0,), 1000)
    text, _ = call(*ends, *arms, "none=none.txt", "--exchange=short,long", "--markdown")
    rows = cells(text)
    assert "exchange rate, short to long: +0.4025 (–) of loss" in text
    assert len(interval(rows["wide"][1])) == len(interval(rows["wide"][2])) == 3
    assert rows["wide"][3:] == ["+8.33 (–)", "+0.076 (–)"]
    assert "| none |" not in text.partition("| against")[2].partition("\n\n")[0]
    assert rows["one"][1:3] == ["-0.2100 (–)", "+0.900 (–)"]
    assert "* warning: exchange: n = 1 of long, one leaves intervals unknown (–)\n" in text


def test_exchange_of_lengths_that_are_not_alike(write, call):
    """Length is the number of steps; whatever else differs is named. And a rate that may be chance."""
    args = ["--scheduled_steps=180", "--extension_steps=12", "--muon_warmup=40", "--run_label=long"]
    ends = group(write, "short", (3.4, 3.3), None, 1000), group(write, "long", (3.3, 3.2), None, 2000, args)
    write("long_0.txt", Path("long_0.txt").read_text().replace("x = 1\n", "x = 2\n", 1))
    text, _ = call(*ends, "--exchange=short,long")
    assert "warning: exchange: short and long differ not only in length but in muon_warmup, source\n" in text
    assert "warning: exchange: the rate cannot be told from 0, " in text and "against the baseline" not in text
    group(write, "short", SHORT, None, 1000, ["--muon_warmup=40"]), group(write, "long", LONG, None, 2000, args)
    text, _ = call(*ends, group(write, "wild", (19.0, 19.1), None, 1000), "--exchange=short,long", "--markdown")
    assert "warning: exchange" not in text and "-inf" in cells(text)["wild"][3] and cells(text)["wild"][4] == "+inf"


@pytest.mark.parametrize("names, message", [
    ("short,lnog", "--exchange: 'lnog' is not one of the groups, short, long, same, cut, two, old"),
    ("short,long,same", "takes two labels, --exchange=SHORT,LONG"), ("", "takes two labels"),
    ("short", "takes two labels"),
    ("short,same", "--exchange: short and same are of one length, 1000 tokens"), ("short,short", "are of one length"),
    ("short,cut", "--exchange: 'cut' has no finished run"),
    ("short,two", "--exchange: the runs of two differ in tokens (1000, 2000)"),
    ("short,old", "--exchange: old, old_0: its log has no line 'tokens: N'"),
    ("short,long", "--exchange: the rate is -0.1443, not positive: the longer of short and long must have the lower"),
])
def test_exchange_refused(write, call, names, message):
    """In one line. Only the groups up to the one in question are given, as any other may be a reason, too."""
    groups = {"short": group(write, "short", (3.3, 3.3), None, 1000),
              "long": group(write, "long", (3.4, 3.4), None, 2000),
              "same": group(write, "same", (3.3, 3.4), None, 1000)}
    write("cut.txt", header(), steps({0: 9.0, 5: 5.0}).partition("step:5/5")[0])
    for i in (1, 2):
        write(f"two_{i}.txt", header(), steps({0: 9.0, 5: 5.0}), f"tokens: {i}000\n")
    groups |= {"cut": "cut=cut.txt", "two": "two=two_*", "old": group(write, "old", (3.3, 3.4))}
    given = [groups[name] for name in groups if "lnog" in names or name in ["short", *names.split(",")]]
    assert message in call(f"--exchange={names}", *given)[1]


# ---- Factors ---------------------------------------------------------------------------------------------------------


def factorial(write, runs, tokens=None):
    """Arguments for {label: (losses, times)}."""
    return [group(write, label, *both, tokens) for label, both in runs.items()]


def expected(runs, factors, which):
    """{factor: (effect, half of its interval, p)} by numpy; which: 0 losses, 1 times."""
    rows = [([1, *(1 if f"+{factor}" in re.findall(r"[+-]\w+", label) else -1 for factor in factors)], value)
            for label, both in runs.items() for value in both[which]]
    X, y = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    beta, df = np.linalg.lstsq(X, y, rcond=None)[0], len(y) - len(factors) - 1
    errors = np.sqrt(np.diag(np.linalg.inv(X.T @ X)) * ((y - X @ beta) ** 2).sum() / df)
    return {factor: (2 * b, 2 * e * compare.student_t95(df), 2 * compare.student_cdf(-abs(b) / e, df))
            for factor, b, e in zip(factors, beta[1:], errors[1:])}


def noisy(labels, counts, effects, rng):
    """{label: (losses, times)} with these effects on the loss (a hundred times that on the seconds) and noise."""
    runs = {}
    for label, n in zip(labels, counts):
        value = sum(effect / 2 * (1 if f"+{factor}" in label else -1) for factor, effect in effects.items())
        losses, times = (np.round(middle + scale * (value + rng.normal(0, 0.004, n)), 4 if scale == 1 else 2).tolist()
                         for middle, scale in ((3.4, 1), (20, 100)))
        runs[label] = losses, times
    return runs


@pytest.mark.parametrize("labels, counts", [
    (["-b-a", "+a-b", "-a+b", "+a+b"], (2, 2, 2, 2)),  # all, in any order
    (["-a-b", "+a-b", "-a+b", "+a+b"], (1, 4, 2, 3)),  # unbalanced: means of + and of - would mix the effects
    (["-a-b+c", "+a-b-c", "-a+b-c", "+a+b+c"], (2, 2, 2, 2)),  # half of eight
    (["-a-b-c", "+a-b-c", "-a+b-c", "-a-b+c"], (2, 1, 2, 3)),  # one factor at a time
])
def test_main_effects(write, call, labels, counts):
    """Against numpy. Other groups stay out of it, the first one with the plainest name, too."""
    effects = {factor: effect for factor, effect in (("a", -0.03), ("b", 0.01), ("c", 0.0)) if factor in labels[0]}
    runs = noisy(labels, counts, effects, np.random.default_rng(3))
    text, _ = call(group(write, "base", (9.0, 9.5), (1.0, 2.0)), *factorial(write, runs), "--markdown")
    rows, loss, time = cells(text), expected(runs, list(effects), 0), expected(runs, list(effects), 1)
    assert rows["effect of (95 %)"] == ["runs +", "runs −", "loss", "p", "time s", "p"]
    assert "warning: effects" not in text
    for factor in effects:
        plus = sum(n for label, n in zip(labels, counts) if f"+{factor}" in label)
        assert rows[factor][:2] == [str(plus), str(sum(counts) - plus)]
        row = rows[factor]
        for (value, half, p), (cell, shown), digits in (loss[factor], row[2:4], 4), (time[factor], row[4:6], 3):
            assert interval(cell) == pytest.approx([value, value - half, value + half], abs=0.6 * 10 ** -digits)
            assert float(shown) == pytest.approx(p, abs=6e-5, rel=0.06)
    assert abs(loss["a"][0] + 0.03) < loss["a"][1] < 0.03  # and the truth is there


def test_main_effects_in_tokens(write, call):
    """With --exchange, the effect as percent of the tokens, by way of the rate and with its uncertainty."""
    runs = noisy(["-a-b", "+a-b", "-a+b", "+a+b"], (3, 3, 3, 3), {"a": -0.1, "b": 0.02}, np.random.default_rng(4))
    ends = group(write, "short", SHORT, SHORT_S, 1000), group(write, "long", LONG, LONG_S, 2000)
    text, _ = call("--exchange=short,long", "--markdown", *factorial(write, runs, 1000), *ends)
    rows, X = cells(text), math.log(2)
    assert rows["effect of (95 %)"][-1] == "tokens saved %" and set(runs) <= rows.keys()
    rate = (np.mean(SHORT) - np.mean(LONG)) / X
    for factor, (effect, half, _) in expected(runs, ["a", "b"], 0).items():
        variances = [(half / compare.student_t95(9) / rate) ** 2,
                     *(np.var(v, ddof=1) / len(v) * (effect / X / rate ** 2) ** 2 for v in (SHORT, LONG))]
        df = sum(variances) ** 2 / sum(v ** 2 / k for v, k in zip(variances, (9, 3, 2)))
        reach = compare.student_t95(df) * math.sqrt(sum(variances))
        want = [100 * (1 - math.exp(effect / rate + edge)) for edge in (0, reach, -reach)]
        assert interval(rows[factor][-1]) == pytest.approx(want, abs=0.006)
    plain = call("--exchange=short,long", *factorial(write, runs, 1000), *ends)[0]
    assert re.search(r"^effect of \(95 %\) +runs \+ .*\na +6 +6 ", plain, re.M)
    assert "warning: effects" not in text
    arms = [*factorial(write, runs, 1000)[1:], group(write, "-a-b", *runs["-a-b"], 900)]
    assert "warning: effects: the runs differ in tokens (900, 1000), so the effects are not at " in call(*arms)[0]


@pytest.mark.parametrize("labels, unknown, warning", [
    (["-a-b-c", "+a+b-c", "-a-b+c", "+a+b+c"], "ab", "a and b"), (["-a+b", "+a-b"], "ab", "a and b"),
    (["-a-b+c", "+a-b+c", "-a+b+c", "+a+b+c"], "c", "c from the mean"),
    (["+a+b+c+d", "-a-b+c+d", "+a+b-c-d", "-a-b-c-d"], "abcd", "a and b; c and d"),
    (["-a-b-c", "+a+b-c", "+a-b+c"], "abc", "a and b and c"),  # a is -1 - b - c less itself: three at once
])
def test_aliased_factors(write, call, labels, unknown, warning):
    """Those that the labels cannot separate are named and have no numbers; the others have theirs."""
    runs = noisy(labels, [2] * len(labels), {"a": 0.1, "b": 0.2}, np.random.default_rng(5))
    text, _ = call(*factorial(write, runs), "--markdown")
    rows = cells(text)
    assert text.count("warning: effects: ") == 1
    assert f"* warning: effects: the labels cannot separate {warning}\n" in text
    for factor in re.findall(r"\w", labels[0]):
        assert (rows[factor][2:] == ["–"] * 4) == (factor in unknown)


def test_too_few_runs_for_an_interval(write, call):
    """As many runs as numbers to find: no residual. Effects that explain it all: none either. No runs: no table."""
    runs = {"-a": ((3.4,), (10.0,)), "+a": ((3.3,), (10.5,))}
    row = cells(call(*factorial(write, runs), "--markdown")[0])["a"]
    assert row == ["1", "1", "-0.1000 (–)", "–", "+0.500 (–)", "–"]
    runs = {"-a-b": ((3.41, 3.41), (10.0, 10.1)), "+a-b": ((3.31,), (10.5,)),
            "-a+b": ((3.34,), (11.0,)), "+a+b": ((3.24,), (11.3,))}
    assert cells(call(*factorial(write, runs), "--markdown")[0])["b"][2:4] == ["-0.0700 (–)", "–"]
    for name in "xy":
        write(f"{name}.txt", steps({0: 9.0, 5: 5.0}).partition("step:5/5")[0])
    text, _ = call("-c=x.txt", "+c=y.txt")
    assert "effect of" not in text and "warning: effects" not in text


@pytest.mark.parametrize("labels", [["+a", "+b"], ["+a-b", "+a"], ["+a-a", "+a+a"]])
def test_labels_of_other_factors(write, call, labels):
    text, _ = call(*factorial(write, {label: ((3.3, 3.4), (1.0, 1.1)) for label in labels}))
    assert f"warning: no table of effects: {labels[0]} and " in text and "effect of" not in text
    assert "effects" not in call(f"{labels[0]}={labels[0]}_*.txt", "x-y=" + labels[1] + "_*.txt")[0]


def test_signed_labels_on_the_command_line(write, call):
    """A label may begin with a dash, and be that of an option; what follows it without a label joins it."""
    for name in "abcd":
        write(f"{name}.txt", steps({0: 9.0, 5: 5.0}))
    args = compare.parse(["-h+b=a.txt", "b.txt", "+h-b=c.txt", "-x=d.txt", "--target=3"])
    assert args.target == 3 and list(compare.read_groups(args.logs)) == ["-h+b", "+h-b", "-x"]
    assert [len(runs) for runs in compare.read_groups(args.logs).values()] == [2, 1, 1]
    assert compare.parse(["--target=3", "--", "-h+b=a.txt"]).logs == ["-h+b=a.txt"]
    for option in "-x", "--x=a.txt":
        assert f"unrecognized arguments: {option}" in call("a.txt", option)[1]


# ---- Diff ------------------------------------------------------------------------------------------------------------


def test_diff(write, call):
    write("a.txt", header("--seed=1"), steps({0: 9.0, 5: 5.0}))
    write("b.txt", header("--muon_lr=0.5", "--seed=1", source="x = 3\n", choices="triton"), steps({0: 9.0, 5: 5.0}))
    text, _ = call("--diff", "a.txt", "b.txt", "--markdown")
    assert cells(text) == {
        "": ["a", "b"], "---": ["---", "---"], "muon_lr": ["0.023", "0.5"], "kernels.XXT": ["torch", "triton"],
        "command": ["train_gpt.py --preset=cpu --seed=1", "train_gpt.py --preset=cpu --muon_lr=0.5 --seed=1"]}
    assert "```diff\n--- a\n+++ b\n@@ -1,4 +1,4 @@\n-x = 1\n+x = 3\n \n \n" in text and text.endswith("\n```\n")
    assert call("--diff", "one=a.txt", "two=b.txt")[0].count("```") == 0
    text, _ = call("--diff", "a.txt", PUBLIC)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line and not line.startswith(("-", "+", " ", "@"))}
    assert rows["gpus"][0] == "none" and "2 × NVIDIA H100 80GB HBM3" in text and rows["driver"] == ["–", "580.65.06"]
    assert rows["torch"] == ["2.13.0+cpu", "2.11.0+cu130"]
    assert rows["muon_lr"] == ["0.023", "–"] and "+BLOCK = 64\n" in text
    write("c.txt", Path("a.txt").read_text())
    assert call("--diff", "a.txt", "c.txt")[0] == "settings and machine are equal\n\nthe sources are equal\n"


# ---- Plot ------------------------------------------------------------------------------------------------------------


def polylines(path):
    """(colour, thick, points) of each line in an SVG."""
    root = ElementTree.parse(path).getroot()
    return [(e.get("stroke"), e.get("stroke-width") is not None, [tuple(map(float, xy.split(","))) for xy in e.get("points").split()])
            for e in root.iter("{http://www.w3.org/2000/svg}polyline")], ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("text")]


def test_plot_svg(write, call):
    """Runs thin, means thick, a colour per group; points are where the numbers put them, in both panels."""
    write("a_1.txt", steps({0: 9.0, 10: 4.0, 20: 3.0}))
    write("a_2.txt", steps({0: 9.0, 10: 5.0, 20: 3.5}))
    write("a_3.txt", steps({0: 9.0, 10: 4.5, 20: 3.5}).partition("step:20/20")[0])  # drawn, but not in the mean
    write("b_1.txt", steps({0: 9.0, 10: 4.5, 20: 3.2}, lambda step: 60))
    write("a_4.txt", steps({0: 9.0, 10: 4.5, 16: 3.8, 20: 3.25}))  # has a validation that the others of its group have not
    out, _ = call("a=a_*", "b=b_*", "--plot=p.svg")
    assert out.startswith("   runs") and not Path("p.svg.tmp").exists()
    lines, texts = polylines("p.svg")
    blue, orange = compare.COLOURS[:2]
    assert [line[:2] for line in lines] == 2 * [*4 * [(blue, False)], (orange, False), (blue, True), (orange, True)]
    # The picture begins at a third of the run, step 10: x is 60 there and 520 at step 20. Losses 3 to 5, with a margin of 0.1.
    at = {loss: pytest.approx(348 - (loss - 2.9) / 2.2 * 300, abs=0.06) for loss in (3.0, 3.2, 3.25, 4.0, 4.5)}
    assert lines[0][2][1:] == [(60, at[4.0]), (520, at[3.0])] and lines[5][2][1:] == [(60, at[4.5]), (520, at[3.25])]
    assert len(lines[2][2]) == 2 and len(lines[3][2]) == 4 and len(lines[5][2]) == 3
    assert lines[7][2][1:] == [(585, at[4.0]), (pytest.approx(585 + 0.3 / 0.9 * 460, abs=0.06), at[3.0])]  # seconds 0.3 to 1.2
    assert lines[13][2][2] == (1045, at[3.2])
    assert {"a (n = 3)", "b (n = 1)", "validation loss", "step", "seconds inside the clock", "3.5", "5", "20", "1.2"} <= set(texts)
    svg = Path("p.svg").read_text()
    assert svg.count("stroke-dasharray") == 2 and svg.count('clip-path="url(#panel1)"') == 7 and f"M60 {348 - 0.38 / 2.2 * 300:.1f}h" in svg
    call("a=a_*", "--plot=q.svg", "--target=1")
    assert Path("q.svg").read_text().count("stroke-dasharray") == 0


@pytest.mark.parametrize("losses", [{0: 9.0}, {0: 9.0, 5: 9.0}, {0: 9.0, 5: math.nan}])
def test_plot_of_next_to_nothing(write, call, losses):
    """One point, a flat line, a loss that is no number."""
    write("a.txt", steps({**losses, 6: 3.0}).partition("step:6/6")[0])
    call("a.txt", "--plot=p.svg")
    points = [point for line in polylines("p.svg")[0] for point in line[2]]
    assert points and np.isfinite(points).all() and "nan" not in Path("p.svg").read_text()


def test_ticks():
    for low, high in ((0, 1490), (3.23, 4.2), (0, 88.9), (3.2785, 3.2791), (497, 1490), (0, 1), (0.31, 0.95)):
        marks = compare.ticks(low, high)
        assert 4 <= len(marks) <= 11 and low - 1e-9 <= marks[0] and marks[-1] <= high + 1e-9
        unit = marks[1] - marks[0]
        assert f"{unit:.0e}"[0] in "125" and np.allclose(np.diff(marks), unit) and marks[0] - unit < low and marks[-1] + unit > high


def test_plot_png(write, call, monkeypatch):
    """The same lines in the same box."""
    Figure, drawn = pytest.importorskip("matplotlib.figure").Figure, []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self) or save(self, *args, **kwargs))
    call(group(write, "a", (3.2, 3.3)), group(write, "b", (3.1,)), "--plot=p.png")
    assert Path("p.png").read_bytes().startswith(b"\x89PNG") and not Path("p.png.tmp").exists()
    for panel, xs in zip(drawn[0].axes, ([0, 10, 20], [0, 0.3, 0.6])):
        *lines, target = panel.lines
        assert [line.get_color() for line in lines] == [compare.COLOURS[i] for i in (0, 0, 1, 0, 1)]
        assert [line.get_linewidth() > 1 for line in lines] == [False, False, False, True, True]
        assert all(np.allclose(line.get_xdata(), xs) for line in lines) and np.allclose(lines[3].get_ydata(), [10.8, 4.25, 3.25])
        assert np.allclose(panel.get_xlim(), xs[1:]) and np.allclose(panel.get_ylim(), (3.1 - 0.06, 4.3 + 0.06))
        assert [text.get_text() for text in panel.get_legend().get_texts()] == ["a (n = 2)", "b (n = 1)"]
        assert list(target.get_ydata()) == [3.28, 3.28]


def test_png_without_matplotlib(write, call, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    write("p.png", "old")
    assert call(group(write, "a", (3.2, 3.3)), "--plot=p.png")[1] == (
        "error: --plot to .png needs matplotlib (pip install matplotlib); .svg does not\n")
    assert Path("p.png").read_text() == "old" and not Path("p.png.tmp").exists()


# ---- Command line ----------------------------------------------------------------------------------------------------


def test_commands_in_the_texts(write):
    """Those of records/README.md and of the script's docstring, as typed at the root of the repository."""
    commands = re.findall(r"^ *(python records/compare\.py .*?)(?:  .*)?$", (ROOT / "records/README.md").read_text() + compare.__doc__, re.M)
    Path("logs").mkdir()
    names = ("base_1", "base_2", "wide_1", "wide_2", "wide/1", "wide/2", "long_1", "long_2",
             "none/1", "a/1", "b/1", "both/1", "both/2")
    for i, name in enumerate(names):
        long = name.startswith("long")
        losses = {0: 9.0, 10: 4.0, 20: 3.2 + i / 100 - long / 2}
        write(f"logs/{name}.txt", header(), steps(losses), f"tokens: {1000 << long}\n")
    os.symlink(ROOT / "records", "records")
    assert len(commands) >= 9
    for command in commands:
        done = subprocess.run(["bash", "-c", command.replace("python", sys.executable, 1)], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout and not done.stderr, command + done.stderr
    assert Path("logs/loss.svg").exists()


def test_as_a_script(write):
    """Exit status, a terminal without the characters, a reader that goes away."""
    write("a.txt", header(source="x\n" * 50000), steps({0: 9.0, 5: 5.0}))
    write("b.txt", header(source="y\n" * 50000), steps({0: 9.0, 5: 5.0}))
    script = [sys.executable, str(ROOT / "records/compare.py")]
    ascii_only = subprocess.run([*script, "a.txt"], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert ascii_only.returncode == 0 and b"p(loss ? 3.28)" in ascii_only.stdout and not ascii_only.stderr
    wrong = subprocess.run([*script, "c.txt"], capture_output=True, text=True)
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1
    head = subprocess.run(["bash", "-c", f"set -o pipefail; {' '.join(script)} --diff a.txt b.txt | head -1"], capture_output=True, text=True)
    assert head.returncode == 0 and head.stdout.count("\n") == 1 and not head.stderr
