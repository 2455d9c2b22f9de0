"""records/compare.py: made-up logs and one of the public speedrun, and statistics against independent formulas."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.run.length import stage_starts
from records import compare

PUBLIC = Path(__file__).parent / "fixtures/speedrun_log.txt"
RULE = "=" * 100 + "\n"
# The losses and seconds of PR 233's logs. Its table says p = 0.0601 and 0.0097.
FIELD_BASE, FIELD_NEW = (3.2764, 3.2799, 3.2773, 3.2793), (3.2783, 3.2789, 3.2795, 3.2786)
TIMES_BASE, TIMES_NEW = (89.803, 89.711, 89.835, 89.849), (88.821, 88.809, 88.806, 88.900)
SETTINGS = {  # of a short run; a real header has more
    "layers": "2", "scheduled_steps": "90", "extension_steps": "6", "muon_lr": "0.023", "muon_warmup": "20",
    **{f"stage{i}.{key}": value for i in range(1, 5) for key, value in (("batch_tokens", "4096"), ("share", "1.0"))},
    "stage4.share": "0.0", "run_label": "run", "seed": "1337", "resume": "", "sample_prompt": ""}


def header(*args, source="x = 1\n", choices="torch", **facts):
    """A header as train_gpt.py writes it; args: --key=value; facts: other lines."""
    facts = {"hardware": "x86_64", "hardware_fp8": "no", "ranks": "1", "command": " ".join(["train_gpt.py", *args]),
             "commit": "5eb70881e2f4 clean", "env.OMP_NUM_THREADS": "2"} | facts
    facts |= SETTINGS | dict(arg.removeprefix("--").split("=", 1) for arg in args)
    return "\n".join([
        source, f"\n{'-' * 40}\n# triton_kernels.py\n{'-' * 40}\n\ny = 2\n",
        RULE + "Running Python 3.11.7 (main, Jan  1 2024) [GCC 12.2.0]",
        "Running PyTorch 2.13.0+cpu compiled for CUDA None", "Running Triton version 3.7.1", "nvidia-smi: not found",
        RULE + "\n".join(f"{key}: {value}" for key, value in facts.items()),
        RULE + f"kernels: XXT:{choices} head:float32", "tokens per micro-batch: 4096; micro-batches per rank: 1", ""])


def steps(losses, ms=lambda step: 30):
    """The lines of a run. losses: {step: validation loss}, the last step ends the run. ms(step): duration of a step."""
    total, clock, lines = max(losses), 0.0, []
    for step in range(total + 1):
        clock += ms(step) if step else 0
        times = f"train_time:{clock:.0f}ms step_avg:{clock / max(1, step):.2f}ms"
        lines += [f"step:{step}/{total} {times}"] if step else []
        lines += [f"step:{step}/{total} val_loss:{losses[step]:.4f} {times}"] if step in losses else []
    return "\n".join(lines) + "\npeak memory allocated: 9 MiB reserved: 9 MiB\n"


def cut(losses):
    """The lines of a run that stopped before its last validation."""
    return steps(losses).partition(f"step:{max(losses)}/{max(losses)} val")[0]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(name, texts) -> path; the working directory is the folder of the files."""
    def write(name, *texts):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("".join(texts), encoding="utf-8")
        return Path(name)
    monkeypatch.chdir(tmp_path)
    return write


@pytest.fixture
def read(write):
    """read(texts) -> the Run of a log."""
    return lambda *texts: compare.read_run(write("read.txt", *texts))


@pytest.fixture
def call(capsys):
    """call(arguments) -> (output, one line of error or "")."""
    def call(*argv):
        status = compare.main([*map(str, argv)])
        out, err = capsys.readouterr()
        assert status == (1 if err else 0) and err.count("\n") == len(err[:1]) and not (err and out)
        assert not err or err.startswith("error: ")
        return out, err
    return call


def group(write, label, losses, times=None, tokens=None, args=()):
    """One log of 20 steps per loss; times: seconds of the whole run; with `tokens` also a header with these args."""
    for i, loss in enumerate(losses):
        ms = (times or [0.6] * len(losses))[i] * 1000 / 20
        text = steps({0: 10.8, 10: loss + 1, 20: loss}, lambda step: ms)
        write(f"{label}_{i}.txt", f"{header(f'--seed={i}', *args)}{text}tokens: {tokens}\n" if tokens else text)
    return f"{label}={label}_*.txt"


def cells(text):
    """The table cells of a report in markdown: {first cell: [others]}."""
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


# ---- Reading ---------------------------------------------------------------------------------------------------------


def test_public_log():
    """The source quotes another log."""
    run = compare.read_run(PUBLIC)
    assert run.finished and run.total == 20 and run.notes == ["2 headers, read from the last, line 23"]
    assert run.losses == {0: 10.8268, 10: 4.5141, 20: 3.2789} and run.seconds == {0: 0.0, 10: 0.352, 20: 0.892}
    assert sorted(run.ms) == list(range(21)) and [run.ms[k] for k in (0, 1, 2, 20)] == [0, 80, 115, 880]
    assert run.facts == {"python": "3.12.12", "torch": "2.11.0+cu130", "cuda": "13.0", "triton": "3.6.0",
                         "driver": "580.65.06", "gpus": "2 × NVIDIA H100 80GB HBM3"}
    assert run.source.startswith('"""Source of a trainer') and run.source.endswith("BLOCK = 64\n\n") and run.tokens == 0
    assert compare.step_ms(run, 0, 2) == 57.5 and compare.step_ms(run, 2, 20) == (880 - 115) / 18


def test_our_log(read):
    """Neither the source nor the sample counts as lines of the run. The results come after the sample."""
    fake = f'"""\n{RULE}Running Python 2\n{RULE}step:1/2 train_time:1ms step_avg:1.00ms\n"""\n'
    sample = f"sample:\ndef step:9/9\n{RULE}step:4/5 train_time:1ms step_avg:1.00ms\ntokens: 7\nx: y\n"
    run = read(header("--seed=7", source=fake).replace("resume: \n", "resume:\n"), "Resetting Model\n",
               "hash_ids: sha256 0f\nprefixes: sha256 a1\n",
               "warning: the data starts over\n", steps({0: 5.9, 3: 4.5, 5: 4.25}), sample,
               "final_val_loss: 4.2500\ngpu_seconds: 0.150\ntokens: 1234\n", "checkpoint: a/b\n")
    assert run.finished and run.losses == {0: 5.9, 3: 4.5, 5: 4.25} and run.ms == {k: 30 * k for k in range(6)}
    assert run.notes == ["2 headers, read from the last, line 15"] and (run.tokens, run.loss) == (1234, 4.25)
    facts = SETTINGS | {"seed": "7", "commit": "5eb70881e2f4 clean", "kernels.XXT": "torch", "gpus": "none"}
    assert (facts | {"torch": "2.13.0+cpu"}).items() <= run.facts.items() and "driver" not in run.facts
    assert run.source.startswith(fake) and run.source.endswith("y = 2\n\n")


@pytest.mark.parametrize("end, more, kept, note", [
    ("step:20/20 val_loss", "", 2, "it stopped at step 20 of 20"),
    ("70ms step_avg:30.00ms\nstep:20/20 train", "", 2, "it stopped at step 18 of 20"),
    ("hardware_fp8", "", 0, "it stopped at step 0 of ?"),
    ("peak", "step:5/20 train_time:9ms step_avg:1.0ms\n", 3, "two runs are mixed"),
    ("peak", "step:21/30 train_time:9ms step_avg:1.0ms\n", 3, "two runs are mixed"),
    ("step:20/20 val_loss", "step:20/20 val_loss:nan train_time:600ms step_avg:30.00ms\n", 3, "its loss is nan")])
def test_runs_that_do_not_count(read, end, more, kept, note):
    run = read((header() + steps({0: 10.8, 10: 4.0, 20: 3.3})).partition(end)[0], more)
    assert not run.finished and f"left out, {note}" in run.notes[-1] and len(run.losses) == kept


def test_stray_and_broken_lines(read):
    """Lines of other programs, two joined lines, a prefix, no header. The notes name each unread line."""
    good = steps({0: 9.0, 4: 5.0}).splitlines()
    good[1] = "[rank0] \x1b[K" + good[1]  # step 1
    good[2] = good[2][:22] + good[3]  # step 3 cuts off step 2
    run = read("\r\n".join([*good[:3], "UserWarning: foo", *good[4:], "step:x", "bar"]))
    assert run.finished and run.losses == {0: 9.0, 4: 5.0} and run.ms == {0: 0, 1: 30, 3: 90, 4: 120}
    assert run.notes == [f"4 line(s) not read: 3 '{good[2][:60]}', 4 'UserWarning: foo', 8 'step:x', ..."]
    assert compare.step_ms(run, 0, 4) == 30  # steps 1 and 4, because the lines before the others are missing


@pytest.mark.parametrize("args, message", [
    ("none.txt", "'none.txt': no such file, no folder with *.txt or *.log, no pattern that matches"),
    ("base=", "'': no such file"), ("empty", "'empty': no such file"),
    ("a.bin", "a.bin: not a log but binary data"), ("README.md", "README.md: not the log of a run (few or no lines"),
    ("", "the following arguments are required: [label=]log (see --help)"),
    ("a.txt --target=x", "--target: invalid float value: 'x'"),
    ("a.txt x=empty/../a*.txt", "named twice, but a run counts once"),
    ("a.txt --diff", "--diff takes two logs, or two groups"), ("a.txt --plot=a.pdf", "a.pdf: draws .svg"),
    ("a.txt --plot=empty/no/a.svg", "cannot write empty/no/a.svg: No such file"),
    ("x.txt --plot=a.svg", "--plot=a.svg: there are no losses to draw"),
    ("a.txt --plot=a.svg --dot=peer=1,2", "--dot takes LABEL=STEP,SECONDS,LOSS"),
    ("a.txt --plot=a.svg --dot=peer=1,2,low", "--dot takes LABEL=STEP,SECONDS,LOSS"),
    ("a=short_* --exchange=a,b", "--exchange: 'b' is not one of the groups, a"),
    ("a=short_* b=same_* --exchange=a,b", "--exchange: a and b are of one length, 1000 tokens: it takes two"),
    ("a=short_* x=x.txt --exchange=a,x", "--exchange: 'x' has no finished run"),
    ("a=short_* b=same_* long_0.txt --exchange=a,b", "the runs of b differ in tokens (1000, 2000)"),
    ("a=short_* b=a.txt --exchange=a,b", "--exchange: b, a: its log has no line 'tokens: N'"),
    ("a=short_* b=long_* --exchange=a,b", "--exchange: the rate is -0.1443, not positive: the longer of")])
def test_errors_are_one_line(write, call, args, message):
    for name, loss, tokens in (("short", 3.3, 1000), ("same", 3.3, 1000), ("long", 3.4, 2000)):
        group(write, name, (loss, loss), None, tokens)
    files = {"a.txt": steps({0: 9.0, 5: 5.0}), "x.txt": header(), "a.bin": "\0" * 99, "README.md": "# A title"}
    for name, text in files.items():
        write(name, text)
    Path("empty").mkdir()
    before = sorted(os.listdir())
    assert message in call(*args.split())[1] and sorted(os.listdir()) == before


def test_groups(write):
    """Labels, files, folders, patterns. A file without a label joins the group before it."""
    for name in "a_1.txt", "a_2.txt", "b/1.txt", "b/2.log", "b/notes.md", "lr=2.txt":
        write(name, steps({0: 9.0, 5: 5.0}))

    def names(*args):
        return {label: [run.name for run in runs] for label, runs in compare.read_groups(args).items()}
    found = {"runs": ["lr=2"], "old": ["a_2", "a_1"], "new": ["1", "2"]}  # "lr=2.txt" is a file, not a label
    assert names("lr=2.txt", "old=a_2.txt", "a_1.txt", "new=b") == found
    assert names("x=a_*.txt", "y=b/*.log", "x=b/1.txt") == {"x": ["a_1", "a_2", "1"], "y": ["2"]}
    args = compare.parse(["-h+b=a_1.txt", "a_2.txt", "+h-b=b/1.txt", "--target=3"])  # labels may look like options
    assert args.target == 3 and names(*args.logs) == {"-h+b": ["a_1", "a_2"], "+h-b": ["1"]}


# ---- Statistics ------------------------------------------------------------------------------------------------------


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
        assert compare.student_cdf(t, df) == pytest.approx(student(t, df), abs=3e-13)  # seen: 1e-13
    assert t975 is None or compare.student_t95(df) == pytest.approx(t975, abs=6e-7)
    tail = 1 / (1e12 + 2 + 1e6 * math.sqrt(1e12 + 2))  # of df = 2, which 0.5 + t / ... loses to rounding
    assert compare.student_cdf(-1e6, 2) == pytest.approx(tail, rel=1e-12)


def test_welch():
    """Worked by hand: variances 4 and 1, n = 3 and 5, means 9 and 6. With equal sds and n, df = 2n − 2."""
    difference, half, p = compare.welch(compare.Sample(3, 9.0, 2.0), compare.Sample(5, 6.0, 1.0))
    df = (4 / 3 + 1 / 5) ** 2 / ((4 / 3) ** 2 / 2 + (1 / 5) ** 2 / 4)
    assert difference == -3 and p == pytest.approx(2 * compare.student_cdf(-3 / math.sqrt(4 / 3 + 1 / 5), df))
    assert half == pytest.approx(compare.student_t95(df) * math.sqrt(4 / 3 + 1 / 5))
    difference, half, p = compare.welch(compare.Sample(4, 10.0, 1.0), compare.Sample(4, 11.0, 1.0))
    assert difference == 1 and p == pytest.approx(2 * student(-math.sqrt(2), 6))
    assert half == pytest.approx(2.446912 * math.sqrt(0.5), rel=1e-6)


def test_runs_that_do_not_vary_say_nothing():
    """Their p is unknown, not 0, also where the mean of equal floats would round to another float."""
    same, one = compare.sample([3.2789] * 3), compare.sample([3.0])
    assert same.sd == 0 and math.isnan(compare.p_below(same, 3.28)) and math.isnan(compare.welch(same, same).p)
    assert one.mean == 3 and math.isnan(one.sd) and math.isnan(compare.p_below(one, 3.28))
    assert compare.welch(one, same).value == pytest.approx(0.2789) and math.isnan(compare.welch(one, same).half)


# ---- Steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares, scheduled, extension", [
    (None, 90, 6), ((0.5, 0.3, 0.2, 0), 1450, 40), ((1, 2, 1, 0), 90, 6)])
def test_stages_are_the_trainers(read, shares, scheduled, extension):
    """Older logs do not tell the shares, and their stages had equal ones."""
    import train_gpt as T
    args = [f"--scheduled_steps={scheduled}", f"--extension_steps={extension}"]
    args += [f"--stage{i}.share={share:.1f}" for i, share in enumerate(shares or (), 1)]
    starts = stage_starts(T.parse_config(["--preset=cpu", *args]).schedule)
    text = header(*args) if shares else re.sub(r"stage\d\.share: .*\n", "", header(*args))
    parts = compare.spans(read(text, steps({0: 9.0, scheduled + extension: 5.0})))
    first = max(1, min(10, (scheduled + extension) // 10))
    borders = [max(first, step) for step in starts]
    stages = {f"stage {i}": (a, b) for i, (a, b) in enumerate(zip(borders, borders[1:]), 1) if a < b}
    ends = {"first steps": (0, first), "later steps": (first, scheduled + extension)}
    assert parts == ends | stages


# ---- Report ----------------------------------------------------------------------------------------------------------


def test_report_of_the_published_runs(write, call):
    text, _ = call(group(write, "base", FIELD_BASE, TIMES_BASE), group(write, "new", FIELD_NEW, TIMES_NEW),
                   "--markdown")
    rows, base, new = cells(text), compare.sample(FIELD_BASE), compare.sample(FIELD_NEW)
    time, loss = compare.welch(compare.sample(TIMES_BASE), compare.sample(TIMES_NEW)), compare.welch(base, new)
    assert {
        "": ["runs", "steps", "time s", "sd", "±", "loss", "sd", "±", "p(loss ≤ 3.28)"],
        "base": ["4", "20", "89.799", "0.062", "0.099", "3.2782", "0.0016", "0.0026", "0.0601"],
        "new": ["4", "20", "88.834", "0.044", "0.071", "3.2788", "0.0005", "0.0008", "0.0097"],
        "new − base, time s": [
            f"{time[0]:+.3f}", f"{time[0] - time[1]:+.3f} to {time[0] + time[1]:+.3f}", f"{time[2]:.0e}"],
        "new − base, loss": [
            "+0.0006", f"{loss[0] - loss[1]:+.4f} to {loss[0] + loss[1]:+.4f}", f"{loss[2]:.4f}"],
        "0": ["10.8000 (0.0000)"] * 2 + ["+0.0000 (–)"],
        "later steps, 3 to 20": ["4489.97 (3.09)", "4441.69 (2.23)"],  # ms, whole in the log
        "20": ["3.2782 (0.0016)", "3.2788 (0.0005)", f"+0.0006 ({loss[2]:.4f})"]}.items() <= rows.items()
    assert "* base_0 and new_0: losses equal up to step 0, apart from step 10 on (4.2764 and 4.2783)\n" in text
    # The number of runs in a warning passes. One run fewer does not.
    record, apart = map(int, re.findall(r"would take (\d+) runs", text))
    assert compare.p_below(base._replace(n=record), 3.28) < 0.01 <= compare.p_below(base._replace(n=record - 1), 3.28)
    p = [compare.welch(base._replace(n=n), new._replace(n=n)).p for n in (apart - 1, apart)]
    assert p[1] < 0.05 <= p[0] and text.count("warning: ") == 2


def test_target(write, call):
    """p, and the seconds to the loss, linear between validations."""
    rows = cells(call(group(write, "a", (3.0, 3.1)), "--target=3.45", "--markdown")[0])
    assert rows[""][-1] == "p(loss ≤ 3.45)" and rows["a"][-1] == f"{student((3.05 - 3.45) / 0.05, 1):.4f}"
    assert rows["seconds to loss 3.45"] == ["0.48 (0.02)"]  # 0.55 and 0.65 of the way from 0.3 s to 0.6 s
    assert cells(call("a=a_*", "--target=3.05", "--markdown")[0])["seconds to loss 3.05"] == ["1 of 2 runs"]
    write("r_1.txt", steps({10: 3.4, 20: 3.2}))  # resumed at step 10
    assert cells(call("r=r_*", "--target=3.45", "--markdown")[0])["seconds to loss 3.45"][0].startswith("0.30")


def test_runs_left_out_and_groups_that_are_none(write, call):
    """Interrupted runs are in no number. Single runs, equal losses, unlike runs and machines get a warning each."""
    losses = {0: 9.0, 4: 6.0, 8: 3.0}
    write("a_1.txt", header(), steps(losses))
    write("a_2.txt", header("--seed=8", "--run_label=x"), steps(losses))  # these settings belong to a run
    write("a_3.txt", header(), cut({0: 7.0, 4: 1.0, 8: 3.0}))
    write("b_1.txt", header("--muon_lr=1", source="x = 2\n", ranks=2), steps(losses))
    write("b_2.txt", header("--seed=8", ranks=2), steps({0: 9.5, 4: 6.0, 9: 3.1}))
    write("c.txt", header(), "step:0/8 val_loss:9.0 train_time:0ms step_avg:0.00ms\n")
    text, _ = call("a=a_*", "b=b_*", "c=c*", "--markdown")
    rows = cells(text)
    assert rows["a"] == ["2", "8", "0.240", "0.000", "0.000", "3.0000", "0.0000", "0.0000", "–"]
    assert rows["b"][:2] == ["2", "8/9"] and rows["c"] == ["0", "", *"–" * 7] and rows["9"][:2] == ["–", "3.1000"]
    assert {"a, a_3: left out, it stopped at step 8 of 8", "c, c: left out, it stopped at step 0 of 8",
            "a: equal losses (one seed?) say nothing about chance", "c: n = 0 says nothing about chance",
            "b: its runs are not alike, they differ in muon_lr, source",
            "ranks differ between the groups and may be why the times do"} <= set(re.findall(r"warning: (.*)", text))


# ---- Exchange of loss for tokens -------------------------------------------------------------------------------------


def exchanged(arm, short, long):
    """The four numbers of `against`, worked out by hand. Each group: tokens, mean loss, mean seconds."""
    rate = (short[1] - long[1]) / math.log(long[0] / short[0])
    loss = arm[1] - (short[1] - rate * math.log(arm[0] / short[0]))
    seconds = short[2] + (long[2] - short[2]) * (arm[0] - short[0]) / (long[0] - short[0])
    return loss, arm[2] - seconds, loss / rate, arm[2] * np.exp(loss / rate) - seconds


def interval(text):
    """The numbers of a cell like '+0.1 (-0.2 to +0.4)'."""
    return [float(x) for x in re.fullmatch(r"(\S+) \((\S+) to (\S+)\)", text).groups()]


SHORT, LONG = (3.412, 3.408, 3.415, 3.405), (3.131, 3.126, 3.135)
SHORT_S, LONG_S = (10.0, 10.2, 10.1, 10.1), (20.2, 20.0, 20.4)


def test_exchange_by_hand(write, call):
    """An arm as long as SHORT, a longer arm and a single run, whose intervals are unknown."""
    ends = {"short": (1000000, SHORT, SHORT_S), "long": (2000000, LONG, LONG_S)}
    arms = {"wide": (1000000, (3.37, 3.376, 3.374), (11.0, 11.2, 11.4)), "one": (1000000, (3.2,), (11.0,)),
            "odd": (1500000, (3.30, 3.31), (15.5, 15.7))}
    inputs = [group(write, label, *runs, tokens, ["--scheduled_steps=180", "--muon_warmup=40"] * (label == "long"))
              for label, (tokens, *runs) in (ends | arms).items()]
    text, _ = call(*inputs, "--exchange=short,long", "--markdown")
    rows, rate = cells(text), (np.mean(SHORT) - np.mean(LONG)) / math.log(2)
    assert rows["against the baseline (95 %)"] == ["tokens", "loss", "time s", "tokens saved %", "net time s"]
    half = compare.welch(compare.sample(SHORT), compare.sample(LONG)).half / math.log(2)
    shown = f"{rate:+.4f} ({rate - half:+.4f} to {rate + half:+.4f}) of loss per e-fold of tokens"
    assert f"\n\nexchange rate, short to long: {shown}\n\n| against the baseline" in text
    for label, arm in arms.items():
        loss, seconds, log, net = exchanged(*((tokens, *map(np.mean, runs)) for tokens, *runs in (arm, *ends.values())))
        values = loss, seconds, 100 * (1 - math.exp(log)), net
        assert rows[label][0] == str(arm[0])
        for cell, value, digits in zip(rows[label][1:], values, (4, 3, 2, 3)):
            assert float(cell.split()[0]) == round(value, digits) and ("(–)" in cell) == (label == "one")
    for column, old, new, digits in (1, SHORT, arms["wide"][1], 4), (2, SHORT_S, arms["wide"][2], 3):  # Welch's test
        value, half, _ = compare.welch(compare.sample(old), compare.sample(new))
        assert interval(rows["wide"][column]) == [round(value + edge, digits) for edge in (0, -half, half)]
    assert {"exchange: n = 1 of one leaves intervals unknown (–)",
            "exchange: short and long differ not only in length but in muon_warmup"} <= set(
        re.findall(r"^\* warning: (.*)$", text, re.M))


@pytest.mark.parametrize("tokens", [1000, 1400, 4000, 600])
def test_intervals_of_an_exchange(tokens):
    """Against derivatives by complex steps, along each run's distance from its mean: loss and seconds go together."""
    rng = np.random.default_rng(0)
    shapes = (tokens, 3.1, 12.0, 4), (1000, 3.4, 10.0, 3), (2500, 3.0, 26.0, 5)
    data = [rng.multivariate_normal([loss, time], [[1e-4, 8e-3], [8e-3, 1.0]], n) for _, loss, time, n in shapes]
    arm, short, long = ([compare.Run("", total=1, losses={1: loss}, seconds={1: time}, tokens=shape[0])
                         for loss, time in values] for shape, values in zip(shapes, data))
    means = [values.mean(0) for values in data]

    def numbers(means):
        return np.array(exchanged(*((shape[0], *m) for shape, m in zip(shapes, means))))

    parts = []
    for i, values in enumerate(data):
        spread = [numbers([*means[:i], means[i] + 1e-20j * (run - means[i]), *means[i + 1:]]).imag / 1e-20
                  for run in values]
        parts.append(np.square(spread).sum(0) / (len(values) * (len(values) - 1)))
    for k, (found, value) in enumerate(zip(compare.against(short, long, arm), numbers(means))):
        variances = [part[k] for part in parts]
        df = sum(variances) ** 2 / sum(v ** 2 / (len(values) - 1) for v, values in zip(variances, data))
        assert found.value == pytest.approx(value, rel=1e-9)
        assert found.half == pytest.approx(compare.student_t95(df) * math.sqrt(sum(variances)), rel=1e-9)


# ---- Factors ---------------------------------------------------------------------------------------------------------


def groups(write, runs, tokens=None):
    """The arguments for {label: (losses, times)}."""
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


def noisy(labels, counts, effects, seed):
    """{label: (losses, times)} with these effects on the loss (a hundred times as much on the seconds) and noise."""
    rng, runs = np.random.default_rng(seed), {}
    for label, n in zip(labels, counts):
        value = sum(effect / 2 * (1 if f"+{factor}" in label else -1) for factor, effect in effects.items())
        runs[label] = [np.round(middle + scale * (value + rng.normal(0, 0.004, n)), 4 if scale == 1 else 2).tolist()
                       for middle, scale in ((3.4, 1), (20, 100))]
    return runs


@pytest.mark.parametrize("labels, counts", [
    (["-b-a", "+a-b", "-a+b", "+a+b"], (1, 4, 2, 3)),  # unbalanced: plain means would mix the effects
    (["-a-b+c", "+a-b-c", "-a+b-c", "+a+b+c"], (2, 2, 2, 2)),  # half of eight
    (["-a-b-c", "+a-b-c", "-a+b-c", "-a-b+c"], (2, 1, 2, 3)),  # one factor at a time
])
def test_main_effects(write, call, labels, counts):
    """Against numpy. Groups with other labels stay out."""
    effects = {factor: effect for factor, effect in (("a", -0.03), ("b", 0.01), ("c", 0.0)) if factor in labels[0]}
    runs = noisy(labels, counts, effects, 3)
    text, _ = call(group(write, "base", (9.0, 9.5), (1.0, 2.0)), *groups(write, runs), "--markdown")
    rows, loss, time = cells(text), expected(runs, list(effects), 0), expected(runs, list(effects), 1)
    assert rows["effect of (95 %)"] == ["runs +", "runs −", "loss", "p", "time s", "p"]
    assert "warning: effects" not in text
    for factor in effects:
        plus, row = sum(n for label, n in zip(labels, counts) if f"+{factor}" in label), rows[factor]
        assert row[:2] == [str(plus), str(sum(counts) - plus)]
        for (value, half, p), (cell, shown), digits in (loss[factor], row[2:4], 4), (time[factor], row[4:6], 3):
            assert interval(cell) == pytest.approx([value, value - half, value + half], abs=0.6 * 10 ** -digits)
            assert float(shown) == pytest.approx(p, abs=6e-5, rel=0.06)
    assert abs(loss["a"][0] + 0.03) < loss["a"][1] < 0.03  # the interval contains the truth


def test_main_effects_in_tokens(write, call):
    """With --exchange, the effect as percent of the tokens, with the uncertainty of the rate."""
    runs = noisy(["-a-b", "+a-b", "-a+b", "+a+b"], (3, 3, 3, 3), {"a": -0.1, "b": 0.02}, 4)
    ends = group(write, "short", SHORT, SHORT_S, 1000), group(write, "long", LONG, LONG_S, 2000)
    text, _ = call("--exchange=short,long", "--markdown", *groups(write, runs, 1000), *ends)
    rows, X = cells(text), math.log(2)
    assert rows["effect of (95 %)"][-1] == "tokens saved %" and "warning: effects" not in text
    rate = (np.mean(SHORT) - np.mean(LONG)) / X
    for factor, (effect, half, _) in expected(runs, ["a", "b"], 0).items():
        variances = [(half / compare.student_t95(9) / rate) ** 2,
                     *(np.var(v, ddof=1) / len(v) * (effect / X / rate ** 2) ** 2 for v in (SHORT, LONG))]
        df = sum(variances) ** 2 / sum(v ** 2 / k for v, k in zip(variances, (9, 3, 2)))
        reach = compare.student_t95(df) * math.sqrt(sum(variances))
        values = [100 * (1 - math.exp(effect / rate + edge)) for edge in (0, reach, -reach)]
        assert interval(rows[factor][-1]) == pytest.approx(values, abs=0.006)
    group(write, "-a-b", *runs["-a-b"], 900)
    assert "the runs differ in tokens (900, 1000)" in call(*(f"{label}={label}_*" for label in runs))[0]


@pytest.mark.parametrize("labels, unknown, warning", [
    (["-a-b-c", "+a+b-c", "-a-b+c", "+a+b+c"], "ab", "a and b"),
    (["-a-b+c", "+a-b+c", "-a+b+c", "+a+b+c"], "c", "c from the mean"),
    (["+a+b+c+d", "-a-b+c+d", "+a+b-c-d", "-a-b-c-d"], "abcd", "a and b; c and d")])
def test_aliased_factors(write, call, labels, unknown, warning):
    """Factors that the labels cannot separate are named and have no numbers. The others have numbers."""
    text, _ = call(*groups(write, noisy(labels, [2] * len(labels), {"a": 0.1, "b": 0.2}, 5)), "--markdown")
    assert f"* warning: effects: the labels cannot separate {warning}\n" in text
    for factor in re.findall(r"\w", labels[0]):
        assert (cells(text)[factor][2:] == ["–"] * 4) == (factor in unknown)


def test_sets_without_effects(write, call):
    """No interval where no run is left for the noise. No table where the labels name other factors."""
    text = call(group(write, "-a", (3.4,), (10.0,)), group(write, "+a", (3.3,), (10.5,)), "--markdown")[0]
    assert cells(text)["a"] == ["1", "1", "-0.1000 (–)", "–", "+0.500 (–)", "–"]
    assert "warning: no table of effects: -a and +b " in call("-a=-a_*", "+b=+a_*")[0]


# ---- Diff and plot ---------------------------------------------------------------------------------------------------


def test_diff(write, call):
    end, changed = steps({0: 9.0, 5: 5.0}), dict(source="x = 3\n", choices="triton")
    for name in "a.txt", "c.txt":
        write(name, header("--seed=1"), end)
    write("b.txt", header("--muon_lr=0.5", "--seed=1", **changed), end)
    text, _ = call("--diff", "one=a.txt", "two=b.txt", "--markdown")
    rows = cells(text)
    assert rows.keys() == {"", "---", "muon_lr", "kernels.XXT", "command"} and rows["muon_lr"] == ["0.023", "0.5"]
    assert "```diff\n--- a\n+++ b\n@@ -1,4 +1,4 @@\n-x = 1\n+x = 3\n \n \n" in text and text.endswith("\n```\n")
    assert call("--diff", "a.txt", "c.txt")[0] == "settings and machine are equal\n\nthe sources are equal\n"


def test_plot(write, call):
    """Each run and the mean of each group, by step and by time."""
    write("b_1.txt", steps({0: 9.0, 10: 4.5, 20: math.nan}))
    write("b_2.txt", steps({0: 9.0, 10: 4.0, 20: 3.2}))
    call(group(write, "a", (3.2, 3.3)), "b=b_*", "--plot=p.svg")
    svg = Path("p.svg").read_text()
    assert svg.count("<polyline") == 2 * (4 + 2) and "a (n = 2)" in svg and "b (n = 1)" in svg and "nan" not in svg
    assert "<circle" not in svg
    call("a=a_*", "--plot=p.svg", "--dot=peer=2,9,3.1")
    svg = Path("p.svg").read_text()
    assert svg.count("<circle") == 2 and ">peer<" in svg
    # The panels are 460 wide and begin at 585: nothing took longer than the dot, so it is at the right edge.
    assert 'cx="1045.0"' in svg


# ---- Command line ----------------------------------------------------------------------------------------------------


def test_script(write):
    """Without torch, into a closed pipe, and with the status of an error."""
    write("a.txt", header(), steps({0: 9.0, 20: 3.2}))
    run = f"{sys.executable} -S {compare.__file__}"
    script = f"set -eo pipefail; export PYTHONIOENCODING=ascii; {run} a.txt | head -0; {run} a.txt; ! {run} none.txt"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "p(loss" in done.stdout and re.fullmatch("error: .*\n", done.stderr), done.stderr


# ---- The folder of a record ------------------------------------------------------------------------------------------

GPU_LINE = "\n".join(f"|   {i}  NVIDIA H100 80GB HBM3          On  |   00000000:{i}" for i in range(8))
TRACK = {"train_files": "data/fineweb10B/fineweb_train_*.bin", "val_files": "data/fineweb10B/fineweb_val_*.bin",
         "val_tokens": "10485760", "combo_kernels": "False"}


def on_eight(text):
    return text.replace("nvidia-smi: not found", GPU_LINE)


def test_folder_of_a_record(write, call):
    for label, losses, source in ("base", FIELD_BASE, "x = 1\n"), ("new", FIELD_NEW, "x = 2\n"):
        for i, loss in enumerate(losses):
            text = on_eight(header(f"--seed={i}", source=source, **TRACK))
            write(f"{label}/{i}.txt", text, steps({0: 10.8, 40: loss}))
    out, err = call("--folder=2026-12-24_Two", "base=base", "new=new")
    folder = Path("2026-12-24_Two")
    text = (folder / "README.md").read_text()
    assert not err and text.startswith("# 2026-12-24_Two\n") and not Path("2026-12-24_Two.tmp").exists()
    rules = re.search(r"^\| rule .*\n\|.*\n((?:\|.*\n)+)", text, re.M)[1].splitlines()
    assert len(rules) == 7 and all(rule.endswith("| yes |") for rule in rules)
    assert "n = 4, mean 3.2788, p = 0.0097" in text and "-x = 1\n+x = 2" in text
    assert out.split()[:2] == ["runs", "steps"]
    for label in "base", "new":
        for i in range(4):
            copy = folder / label / f"{i}.txt"
            assert copy.read_bytes() == Path(label, f"{i}.txt").read_bytes() and f"* `{label}/{i}.txt`" in text
    assert call("--folder=2026-12-24_Two", "base=base")[1].endswith("there is such a folder or file already\n")
    assert (folder / "README.md").read_text() == text


@pytest.mark.parametrize("change, rule", [
    ({"val_tokens": "2097152"}, "the first 10485760 tokens of it"),
    ({"combo_kernels": "True"}, "no compiler option of our own"),
    ({"train_files": "data/mine/mine_*.bin"}, "FineWeb, in the order of its shards"),
    ({"val_files": "data/mine/val_*.bin"}, "its validation"), ({}, "8 H100s")])
def test_rules_that_a_run_breaks(write, change, rule):
    """The second of two runs; without a change, it ran on another machine."""
    headers = on_eight(header(**TRACK)), header(**TRACK | change)
    headers = headers[0], on_eight(headers[1]) if change else headers[1]
    runs = [compare.read_run(write(f"{loss}.txt", text, steps({0: 10.8, 40: loss})))
            for text, loss in zip(headers, (3.27, 3.2701))]
    assert [name for name, _, holds in compare.rules(runs, 3.28)[1:] if holds != "yes"] == [rule]


def test_rules_of_losses_and_of_a_public_log(write):
    """By Student's distribution with one degree of freedom, that of Cauchy: 1/2 - atan(2/3) / pi = .3128."""
    bodies = [*(steps({0: 10.8, 40: loss}) for loss in (3.2801, 3.2795)), cut({40: 3.2})]
    runs = [compare.read_run(write(f"{i}.txt", on_eight(header(**TRACK)), body)) for i, body in enumerate(bodies)]
    rows = compare.rules(runs, 3.28)
    assert [row[1:] for row in rows[1:3]] == [["n = 2, mean 3.2798, p = 0.3128", "no"], ["2 of 3", "no"]]
    assert [row[2] for row in compare.rules([compare.read_run(PUBLIC)], 3.28)[4:]] == ["–"] * 4


@pytest.mark.parametrize("prepare, words", [
    (lambda: Path("out").write_text("mine"), "there is such a folder or file already"),
    (lambda: Path("blocked").write_text(""), "cannot write blocked/out: Not a directory")])
def test_a_folder_that_cannot_be_written(write, call, prepare, words):
    write("a.txt", header(), steps({0: 10.8, 40: 3.2}))
    prepare()
    folder = "out" if Path("out").exists() else "blocked/out"
    assert words in call(f"--folder={folder}", "a.txt")[1]
    assert not Path("out.tmp").exists() and (folder != "out" or Path("out").read_text() == "mine")


def test_two_logs_of_one_name(write, call):
    for folder in "a", "b":
        write(f"{folder}/1.txt", header(), steps({0: 10.8, 40: 3.2}))
    err = call("--folder=out", "new=a/1.txt", "new=b/1.txt")[1]
    assert err == "error: --folder: two logs of new have the name 1.txt\n"
    assert not Path("out").exists() and not Path("out.tmp").exists()
