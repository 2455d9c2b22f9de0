"""Compare runs by their logs: do two groups differ, by how much, and could it be chance?

    python records/compare.py base='logs/base_*.txt' wide=logs/wide      statistics, losses, step times, warnings
    python records/compare.py --diff logs/base_1.txt logs/wide_1.txt     what was changed: settings, machine, source
    python records/compare.py --exchange=base,long base='logs/base_*.txt' long='logs/long_*.txt' wide='logs/wide_*.txt'
    python records/compare.py -a-b=logs/none +a-b=logs/a -a+b=logs/b +a+b=logs/both
    python records/compare.py --help                                     the options

A group is a label and its logs: files, folders (their *.txt and *.log) or patterns; logs without a label join the group
before them. The program reads the logs of train_gpt.py and of the public speedrun, which have step lines after the
sources. It names runs without a last step, and files with two mixed runs, and leaves them out of all numbers. It counts
a copy of a log once, and names it.

sd is the standard deviation over runs (n - 1), ± half the 95 % confidence interval of the mean. p(loss ≤ target) is
the speedrun's one-sided t-test: the chance of losses this low if their true mean were the target. Welch's two-sided
t-test compares groups. Where two or more seeds are in both groups, a line "by seed" has the mean difference of a seed
and Student's t-test of these differences (pairs - 1 degrees of freedom; the mean counts if a group has a seed twice). A
seed shifts both groups alike, so this test often tells more. Choose one of the two before you see them.

--exchange=SHORT,LONG says what a change is worth in tokens and in seconds (records/README.md). Two groups with the same
settings and different lengths give the baseline: its loss is linear in the logarithm of the tokens, its seconds are
linear in the tokens. Every other group (arm) is compared with the baseline at the arm's own number of tokens. Tokens
saved: the share of its tokens that the arm can omit and still reach the baseline's loss. Net seconds: the arm's
seconds, reduced by this share, minus the baseline's. All 95 % intervals include the uncertainty of the rate.

Labels of signed factors, such as +a-b above, make a factorial set. Two or more such labels add a table of main effects:
the mean with the factor minus the mean without it, by least squares over all runs of the set, so the set may be
incomplete or uneven. Effects are assumed to add up. All runs count as independent: if a seed shifts the loss of all
labels equally, the intervals are too wide, not too narrow.

Needs only Python's standard library.
"""

import argparse
import cmath
import difflib
import glob
import hashlib
import math
import os
import re
import shutil
import sys
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise, product, takewhile
from pathlib import Path
from statistics import mean, stdev  # exact: equal numbers have a standard deviation of 0
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.run.program import UserError, atomic_write, run_program, user_error, user_path

RECORD_P, CHANCE = 0.01, 0.05  # a record needs p below the first, a significant difference p below the second
FIRST_STEPS = 10  # slower, in a row of their own; in short runs a tenth of the run
ROWS = 12  # of the table of losses, at most
FINALS = {"time s": 3, "loss": 4}  # the results in the tables, and their digits
# Settings that may differ between the runs of a group. Runs on several GPUs have their own caches.
OWN = {"seed", "run_label", "log_dir", "command", "env.TORCHINDUCTOR_CACHE_DIR", "env.TRITON_CACHE_DIR",
       "save", "save_every", "keep", "plot", "sample_tokens", "sample_prompt"}
TEXT = {"vocab_size", "val_tokens", "val_sha256"}  # on which a validation loss depends; older logs lack the last
SIGNED = re.compile(r"([+-]\w+)+")  # label of a factorial set
LENGTH = {"scheduled_steps", "extension_steps", "train_tokens"}  # settings in which --exchange's two groups may differ


# ---- Logs ------------------------------------------------------------------------------------------------------------

# The dumped sources may contain any text, even a log, so the last header counts. After the header come versions and
# nvidia-smi, then a rule; our logs continue with `key: value` settings and another rule.
HEADER = re.compile(r"^={100}\n(?=Running [Pp]y)", re.M)
SECTIONS = re.compile(r"(?P<machine>.*?)(?:^={100}$\n?|\Z)(?:(?P<settings>hardware: .*?)(?:^={100}$\n?|\Z))?",
                      re.M | re.S)
MACHINE = {
    "python": r"Running Python (\S+)", "torch": r"Running [Pp]y[Tt]orch (\S+)", "cuda": r"compiled for CUDA (\S+)",
    "triton": r"Running Triton version (\S+)", "driver": r"Driver Version: (\S+)"}
GPU = re.compile(r"^\| +\d+ +(\S.*?) +(?:On|Off) +\|", re.M)
# In our logs, a line of the loss comes before the line of the time. The public logs, and ours of before, have both on
# one line. The public logs of 2024 also have nan for the average of the first steps.
STEP = re.compile(r"step:(\d+)/(\d+)(?= \w+_(?:loss|time):)(?: val_loss:([\d.]+|nan|inf))?"
                  r"(?: train_loss:([\d.]+|nan|inf))?(?: train_time:(\d+)ms step_avg:(?:[\d.]+|nan|inf)ms|$)")
# All other lines: `name: value` (older logs have `average_blend:0.5 val_loss:3.4`), and words of the public logs.
OTHER = re.compile(r"\s*$|={100}$|[a-z][\w ,-]*:[ \d]|(Compiling|Sampling|Resetting|Training|Validation) ")
TRACE = re.compile(r"^steps \d+ to \d+, rank .*?^trace\b.*?$", re.M | re.S)  # the tables of --profile


@dataclass
class Run:
    """One log."""

    name: str
    path: Path = Path()
    source: str = ""  # all dumped files
    facts: dict[str, str] = field(default_factory=dict)  # settings, machine, kernel choices
    total: int = 0  # steps of the whole run
    losses: dict[int, float] = field(default_factory=dict)  # step -> validation loss
    training: dict[int, float] = field(default_factory=dict)  # step -> training loss, which older logs lack
    seconds: dict[int, float] = field(default_factory=dict)  # step -> time inside the clock at validations
    ms: dict[int, float] = field(default_factory=dict)  # step -> clock at training lines, which the host writes early
    tokens: int = 0  # training tokens; 0 if the log does not say
    content: str = ""  # SHA-256 of the text of the log, whatever its line ends
    notes: list[str] = field(default_factory=list)  # problems of the log
    finished: bool = False

    @property
    def loss(self) -> float:
        """Last validation loss of a finished run."""
        return self.losses[self.total]

    @property
    def time(self) -> float:
        """Seconds inside the clock of a finished run."""
        return self.seconds[self.total]


def read_run(path: Path) -> Run:
    """Reads a log. Raises UserError when the file cannot be read or is not a log; `notes` has smaller problems."""
    with user_error(f"cannot read {path}"):
        data = path.read_bytes()
    if b"\0" in data[:4096]:
        raise UserError(f"{path}: not a log but binary data")
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    name = re.sub(r"([0-9a-f]{8})-[0-9a-f-]{27}", r"\1", path.stem)  # the first eight digits of a UUID
    run = Run(name, path, content=hashlib.sha256(text.strip().encode()).hexdigest())
    headers, body = list(HEADER.finditer(text)), 0
    if headers:
        run.source = text[:headers[-1].start()].removeprefix("=" * 100 + "\n")
        sections = SECTIONS.match(text, headers[-1].end())
        body, machine = sections.end(), sections["machine"]
        run.facts = {key: match[1] for key, pattern in MACHINE.items() if (match := re.search(pattern, machine))}
        run.facts["gpus"] = ", ".join(f"{n} × {name}" for name, n in Counter(GPU.findall(machine)).items()) or "none"
        run.facts |= re.findall(r"^([\w.]+): ?(.*)$", sections["settings"] or "", re.M)

    unread, misfits, pending = [], [], None
    lines = TRACE.sub(lambda match: "\n" * match[0].count("\n"), text[body:]).split("\n")
    for number, line in enumerate(lines, 1 + text.count("\n", 0, body)):
        if line == "sample:":  # generated text may look like step lines; no steps follow it
            break
        if line.startswith("kernels: "):
            run.facts |= {f"kernels.{op}": name for op, name in re.findall(r" ([^\s:]+):(\S*)", line)}
        elif line.startswith(("length: ", "shards: ")):  # what --minutes has chosen, and checksums
            run.facts |= re.findall(r"([^\s=]+)=(\S*)", line)
        elif "step:" in STEP.sub("", line) or not (STEP.search(line) or OTHER.match(line)):
            unread.append(f"{number} '{line.strip()[:60]}'")
        for step, total, loss, trained, ms in STEP.findall(line):
            if not ms:  # it follows on a line of its own
                pending = step, total, loss, trained
                continue
            if pending and pending[:2] == (step, total) and not loss + trained:
                loss, trained = pending[2:]
            step, total, ms, pending = int(step), int(total), int(ms), None
            if step in (run.losses if loss else run.ms) or run.total not in (0, total):
                misfits.append(number)
                continue
            run.total = total
            if loss:
                run.losses[step], run.seconds[step] = float(loss), ms / 1000
            if not loss or step == 0:
                run.ms[step] = ms
            if trained:
                run.training[step] = float(trained)
    if not headers and len(unread) >= len(run.ms) + len(run.losses):
        raise UserError(f"{path}: not the log of a run"
                        " (few or no lines like 'step:1/1490 train_time:80ms step_avg:79.63ms')")

    # The results come after a sample, whose text may look like a result, so the last such line counts.
    run.tokens = int([0, *re.findall(r"^tokens: (\d+)$", text[body:], re.M)][-1])
    final = run.losses.get(run.total)
    run.finished = not misfits and final is not None and math.isfinite(final)
    if len(headers) > 1:
        line = text.count("\n", 0, headers[-1].end())
        run.notes.append(f"{len(headers)} headers, read from the last, line {line}")
    if unread:
        run.notes.append(f"{len(unread)} line(s) not read: {', '.join(unread[:3])}{', ...' * (len(unread) > 3)}")
    if misfits:
        run.notes.append(f"left out, two runs are mixed: line {misfits[0]} is the first that does not fit")
    elif final is None:
        run.notes.append(f"left out, it stopped at step {max([*run.ms, *run.losses], default=0)} of {run.total or '?'}")
    elif not run.finished:
        run.notes.append(f"left out, its loss is {final}")
    return run


def read_groups(arguments) -> dict[str, list[Run]]:
    """{label: runs} of [label=]log arguments, without logs that are copies of others. Raises UserError."""
    groups, label, seen, again = {}, "runs", {}, {}
    for argument in arguments:
        match = re.fullmatch(r"([\w.+-]+)=(.*)", argument)
        if match and not Path(argument).exists():
            label, argument = match.groups()
        argument = os.path.expanduser(argument)
        if os.path.isdir(argument):
            paths = sorted(path for path in Path(argument).iterdir() if path.suffix in (".txt", ".log"))
        else:  # the name of a file may look like a pattern
            paths = sorted(map(Path, [argument] if os.path.isfile(argument) else glob.glob(argument, recursive=True)))
        if not paths:
            raise UserError(f"'{argument}': no such file, no folder with *.txt or *.log, no pattern that matches")
        for path in paths:
            run, group = read_run(path), groups.setdefault(label, [])
            if (first := seen.setdefault(run.content, run)) is run:
                group.append(run)
            else:
                again[label] = f"{path} is the same log as {first.path}, and a run counts once"
                first.notes.append(again[label])
    if empty := [label for label, runs in groups.items() if not runs]:
        raise UserError(f"{empty[0]}: {again[empty[0]]}")
    return groups


def changes(old: Run, new: Run) -> list[list[str]]:
    """Rows [key, old value, new value] of all settings that differ."""
    rows = [[key, old.facts.get(key, "–"), new.facts.get(key, "–")] for key in old.facts | new.facts]
    return [row for row in rows if row[1] != row[2]]


def unlike_settings(old: Run, new: Run) -> set[str]:
    """The settings that differ, without those in OWN; "source" if the sources differ."""
    return {key for key, *_ in changes(old, new)} - OWN | ({"source"} if old.source != new.source else set())


def pairs(groups) -> list[tuple[Run, Run]]:
    """The first run with a run of each other group, if possible of the same seed; in a single group with all others."""
    (old, *rest), *others = groups.values()
    return [(old, min(runs, key=lambda run: run.facts.get("seed") != old.facts.get("seed")))
            for runs in others or zip(rest)]


# ---- Statistics ------------------------------------------------------------------------------------------------------

def student_cdf(t: float, df: float) -> float:
    """P(T ≤ t) of Student's t, by the continued fraction of the incomplete beta function (DLMF 8.17.22)."""
    def beta(a, b, x):  # regularised; converges fast for x < (a + 1) / (a + b + 2)
        fraction = 1.0
        for k in range(200, 0, -1):
            top = -(a + k // 2) * (a + b + k // 2) if k % 2 else k // 2 * (b - k // 2)
            fraction = 1 + top * x / ((a + k - 1) * (a + k)) / fraction
        log_scale = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        return math.exp(log_scale) / a / fraction

    if t == 0:
        return 0.5
    x = df / (df + t * t)
    two_sided = beta(df / 2, 0.5, x) if x < (df + 2) / (df + 5) else 1 - beta(0.5, df / 2, t * t / (df + t * t))
    return two_sided / 2 if t < 0 else 1 - two_sided / 2  # two_sided: P(|T| > |t|)


@cache  # a report repeats few values of df
def student_t95(df: float) -> float:
    """The t for which P(|T| ≤ t) = 95 % in Student's distribution, by bisection."""
    low, high = 1.9, 12.8  # df = infinity and 1
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, df) < 0.975 else (low, middle)
    return low


class Sample(NamedTuple):
    """Statistics of n values."""

    n: int
    mean: float = math.nan
    sd: float = math.nan  # unknown for n = 1
    half: float = math.nan  # of the 95 % confidence interval of the mean

    @property
    def part(self) -> tuple[float, float]:
        """Variance of the mean and its degrees of freedom, for `estimate`."""
        return self.sd ** 2 / max(1, self.n), self.n - 1


def sample(values) -> Sample:
    """Statistics of the finite values."""
    n = len(values := [value for value in values if math.isfinite(value)])
    if n < 2:
        return Sample(n, *values)
    return Sample(n, mean(values), sd := stdev(values), student_t95(n - 1) * sd / n ** 0.5)


def p_below(s: Sample, target: float) -> float:
    """One-sided p of mean ≤ target; nan if the runs do not vary."""
    return student_cdf((s.mean - target) / (s.sd / s.n ** 0.5), s.n - 1) if s.sd > 0 else math.nan


class Estimate(NamedTuple):
    """An estimated value."""

    value: float
    half: float  # half the 95 % confidence interval
    p: float  # two-sided, for a true value of 0


def estimate(value: float, *parts: tuple[float, float]) -> Estimate:
    """Estimate of a sum of independent values, whose `parts` are (variance, degrees of freedom) of each value, by Welch
    and Satterthwaite. `half` and `p` are nan if nothing varies or a variance is unknown."""
    variance = sum(part for part, _ in parts)
    if not variance > 0:
        return Estimate(value, math.nan, math.nan)
    df = variance ** 2 / sum(part ** 2 / df for part, df in parts)
    return Estimate(value, student_t95(df) * variance ** 0.5, 2 * student_cdf(-abs(value) / variance ** 0.5, df))


def welch(old: Sample, new: Sample) -> Estimate:
    """Difference of the means, new - old."""
    return estimate(new.mean - old.mean, old.part, new.part)


def by_seed(old: list[Run], new: list[Run], what: str) -> tuple[int, Estimate]:
    """Number of seeds in both groups, and the mean difference new - old of the values `what` of a seed."""
    groups = defaultdict(list), defaultdict(list)  # each: seed -> values
    for group, runs in zip(groups, (old, new)):
        for run in runs:
            group[run.facts.get("seed")].append(getattr(run, what))
    both = groups[0].keys() & groups[1].keys() - {None}  # the public logs name no seed
    found = sample(mean(groups[1][seed]) - mean(groups[0][seed]) for seed in both)
    return found.n, estimate(found.mean, found.part)


def enough(p_of_n, level: float) -> str:
    """The number of runs at which p falls below `level`, in words."""
    return next((f"{n} runs" for n in range(2, 101) if p_of_n(n) < level), "over 100 runs")


# ---- Exchange of loss for tokens -------------------------------------------------------------------------------------

def exchange_rate(short, long) -> tuple[float, list[tuple[float, float]]]:
    """Loss per e-fold of tokens between two groups of runs, with its parts for `estimate`."""
    span = math.log(long[0].tokens / short[0].tokens)
    ends = [sample(run.loss for run in runs) for runs in (short, long)]
    return (ends[0].mean - ends[1].mean) / span, [(variance / span ** 2, df) for variance, df in (s.part for s in ends)]


def growth(log_ratio):
    """exp, also of complex numbers; infinite for a diverged arm, whose numbers would be too long for a table."""
    return math.inf if log_ratio.real > 20 else cmath.exp(log_ratio)


def saved(log_ratio: float) -> float:
    """Percent of tokens saved if the share exp(log_ratio) remains."""
    return 100 * (1 - growth(log_ratio).real)


def against(short, long, arm) -> list[Estimate]:
    """Compares a group of runs with the baseline through `short` and `long`, at the group's own number of tokens.

    Returns the difference in loss; the difference in seconds; the logarithm of the share of its tokens that the group
    needs for the baseline's loss; the net seconds with this share of tokens.
    """
    groups, tokens = (arm, short, long), [runs[0].tokens for runs in (arm, short, long)]
    span = math.log(tokens[2] / tokens[1])
    x = math.log(tokens[0] / tokens[1]) / span  # position of the arm: 0 at short, 1 at long
    y = (tokens[0] - tokens[1]) / (tokens[2] - tokens[1])

    def results(loss, short_loss, long_loss, time, short_time, long_time):
        above, baseline = loss - short_loss - x * (long_loss - short_loss), short_time + y * (long_time - short_time)
        log = above * span / (short_loss - long_loss)
        return above, time - baseline, log, time * growth(log) - baseline

    means = [mean(getattr(run, what) for run in runs) for what in ("loss", "time") for runs in groups]
    # A result at a mean + ih is, but for h², the result + ih times its derivative by this mean.
    slopes = [[result.imag / 1e-20 for result in results(*means[:k], means[k] + 1e-20j, *means[k + 1:])]
              for k in range(6)]
    return [estimate(value.real, *(  # the loss and the seconds of one run may depend on each other
        sample(a * run.loss + b * run.time for run in runs).part for runs, a, b in zip(groups, by, by[3:]) if a or b))
        for value, *by in zip(results(*means), *slopes)]


# ---- Factors ---------------------------------------------------------------------------------------------------------

def least_squares(columns, values) -> tuple[list[tuple[float, float]], int, list[set[int]]]:
    """Fits the values by columns of whole numbers. Returns (coefficient, its variance) of each column, nan if the
    coefficient is not determined; residual degrees of freedom; the sets of columns that depend on each other.

    Sweeps the matrix of products (Goodnight 1979), in fractions, so that rounding cannot hide a dependence.
    """
    count, columns = len(columns), [*columns, [Fraction(str(value)) for value in values]]  # decimal, as in the log
    m = [[Fraction(sum(a * b for a, b in zip(one, two))) for two in columns] for one in columns]
    swept = []
    for k in range(count):
        if pivot := m[k][k]:  # 0: the column is a linear combination of swept columns
            swept.append(k)
            m[k] = [a / pivot for a in m[k]]
            for i in {*range(count + 1)} - {k}:
                factor, m[i] = m[i][k], [a - m[i][k] * b for a, b in zip(m[i], m[k])]
                m[i][k] = -factor / pivot
            m[k][k] = 1 / pivot
    df = len(values) - len(swept)
    tied = [{k, *(i for i in swept if m[i][k])} for k in range(count) if k not in swept]
    error = m[count][count] / df if df else math.nan
    return [(math.nan, math.nan) if any(k in ties for ties in tied) else (float(m[k][count]), float(m[k][k] * error))
            for k in range(count)], df, tied


# ---- Steps -----------------------------------------------------------------------------------------------------------

def spans(run: Run) -> dict[str, tuple[int, int]]:
    """{part of the run: (first step, step after the last)}."""
    first = max(1, min(FIRST_STEPS, run.total // 10))
    parts = {"first steps": (0, first), "later steps": (first, run.total)}
    # This computes from a log what stage_starts in data/run/length.py computes. The public logs lack stages. Our older
    # logs lack the shares: the last stage had no scheduled steps, and the others had equal shares.
    count = sum(re.fullmatch(r"stage\d+\.batch_tokens", key) is not None for key in run.facts)
    shares = [float(run.facts.get(f"stage{i}.share", i < count)) for i in range(1, count + 1)]
    *sums, whole = accumulate(shares, initial=0)
    if whole and "scheduled_steps" in run.facts:
        borders = [*(round(int(run.facts["scheduled_steps"]) * part / whole) for part in sums), run.total]
        stages = enumerate(pairwise(max(first, border) for border in borders), 1)
        parts |= {f"stage {i}": (start, end) for i, (start, end) in stages if start < end}
    return parts


def step_ms(run: Run, start: int, end: int) -> float:
    """Mean time of the steps with lines at both ends. The public logs of 2024 restart the clock after ten steps."""
    times = [run.ms[k] - run.ms[k - 1] for k in range(start + 1, end + 1)
             if run.ms.get(k, -1) >= run.ms.get(k - 1, math.inf)]
    return mean(times or [math.nan])


def seconds_to(run: Run, loss: float) -> float:
    """Seconds until the validation loss reaches `loss`, linear between validations; nan if it never does. A resumed run
    may have reached it before its first validation, whose time it then gets."""
    steps = sorted(run.losses)
    if steps and run.losses[steps[0]] <= loss:
        return run.seconds[steps[0]]
    for a, b in pairwise(steps):
        if run.losses[b] <= loss < run.losses[a]:
            part = (run.losses[a] - loss) / (run.losses[a] - run.losses[b])
            return run.seconds[a] + part * (run.seconds[b] - run.seconds[a])
    return math.nan


def divergence(old: Run, new: Run) -> str:
    """A line about the step from which the losses of two runs differ, in training if both logs have them."""
    kind, ours, theirs = "training losses", old.training, new.training
    if not (ours and theirs):
        kind, ours, theirs = "losses", old.losses, new.losses
    common = sorted(ours.keys() & theirs.keys())
    equal = list(takewhile(lambda step: ours[step] == theirs[step], common))
    words = [f"equal up to step {equal[-1]}"] if equal else []
    for step in common[len(equal):][:1]:
        words.append(f"apart from step {step} on ({ours[step]:.4f} and {theirs[step]:.4f})")
    return f"{old.name} and {new.name}: {kind} {', '.join(words) or 'at no common step'}"


# ---- Report ----------------------------------------------------------------------------------------------------------

def number(value: float, digits: int, sign="") -> str:
    return "–" if math.isnan(value) else f"{value:{sign}.{digits}f}"


def chance(p: float) -> str:
    return f"{p:.0e}" if p < 1e-4 else number(p, 4)


def spread(values, digits: int) -> str:
    """mean (sd)"""
    s = sample(values)
    return number(s.mean, digits) + (f" ({s.sd:.{digits}f})" if s.n > 1 else "")


def shown(e: Estimate, digits: int, scale=lambda value: value) -> str:
    """value (low to high)"""
    low, high = sorted(scale(e.value + edge) for edge in (-e.half, e.half))
    edges = "–" if math.isnan(e.half) else f"{number(low, digits, '+')} to {number(high, digits, '+')}"
    return number(scale(e.value), digits, "+") + f" ({edges})" * math.isfinite(e.value)


def table(rows, markdown) -> str:
    if markdown:
        return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def lengths(runs) -> str:
    """The numbers of tokens of these runs, each once, with commas between them."""
    return ", ".join(map(str, sorted({run.tokens for run in runs})))


def exchange(used, names, warnings):
    """--exchange: (rate, its parts), the line about the rate, rows of the arms. Adds warnings. Raises UserError."""
    for name in names:
        if not used.get(name):
            raise UserError(f"--exchange: '{name}' " + ("has no finished run" if name in used else
                                                        f"is not one of the groups, {', '.join(used)}"))
    for label, runs in used.items():
        if unknown := [run.name for run in runs if not run.tokens]:
            raise UserError(f"--exchange: {label}, {unknown[0]}: its log has no line 'tokens: N', as train_gpt.py"
                            " writes it")
        if "," in lengths(runs):
            raise UserError(f"--exchange: the runs of {label} differ in tokens ({lengths(runs)})")
    short, long = (used[name] for name in names)
    if short[0].tokens == long[0].tokens:
        raise UserError(f"--exchange: {' and '.join(names)} are of one length, {short[0].tokens} tokens: it takes two")
    value, parts = exchange_rate(short, long)
    if not value > 0:
        raise UserError(f"--exchange: the rate is {value:.4f}, not positive: the longer of {' and '.join(names)} must"
                        " have the lower loss")
    rate = estimate(value, *parts)

    rows = [["against the baseline (95 %)", "tokens", "loss", "time s", "tokens saved %", "net time s"]]
    for label, runs in used.items():
        if runs and label not in names:
            loss, time, log, net = against(short, long, runs)
            rows.append([label, lengths(runs), shown(loss, 4), shown(time, 3), shown(log, 2, saved), shown(net, 3)])

    if unlike := unlike_settings(short[0], long[0]) - LENGTH:
        warnings.append(f"exchange: {' and '.join(names)} differ not only in length but in {', '.join(sorted(unlike))}")
    if single := [label for label, runs in used.items() if len(runs) == 1]:
        warnings.append(f"exchange: n = 1 of {', '.join(single)} leaves intervals unknown (–)")
    if rate.p >= CHANCE:
        warnings.append("exchange: the rate cannot be told from 0, so the savings mean nothing; it takes more runs, or"
                        " lengths that are further apart")
    line = f"exchange rate, {' to '.join(names)}: {shown(rate, 4)} of loss per e-fold of tokens"
    return (value, parts), line, rows


def main_effects(used, rate, warnings):
    """Rows of the factorial set among the groups, if any. Adds warnings. rate: of `exchange_rate`, or None."""
    words = {label: re.findall(r"[+-]\w+", label) for label, runs in used.items() if runs and SIGNED.fullmatch(label)}
    if len(words) < 2:
        return []
    first, *_ = words
    factors = list(dict.fromkeys(word[1:] for word in words[first]))
    for label in words:
        if sorted(word[1:] for word in words[label]) != sorted(factors):
            warnings.append(f"no table of effects: {first} and {label} do not name the same factors, each once")
            return []

    runs = [(run, words[label]) for label in words for run in used[label]]
    columns = [[1] * len(runs), *([1 if f"+{factor}" in signs else -1 for _, signs in runs] for factor in factors)]
    loss, df, tied = least_squares(columns, [run.loss for run, _ in runs])
    time, _, _ = least_squares(columns, [run.time for run, _ in runs])
    rows = [["effect of (95 %)", "runs +", "runs −", "loss", "p", "time s", "p"] + ["tokens saved %"] * bool(rate)]
    for i, factor in enumerate(factors, 1):
        # The signs are 2 apart: an effect is twice its coefficient.
        on_loss, on_time = (estimate(2 * value, (4 * variance, df)) for value, variance in (loss[i], time[i]))
        rows.append([factor, str(columns[i].count(1)), str(columns[i].count(-1)),
                     shown(on_loss, 4), chance(on_loss.p), shown(on_time, 3), chance(on_time.p)])
        if rate:  # counted as independent of the effect, even if the set contains SHORT or LONG
            per_efold, parts = rate
            log = on_loss.value / per_efold
            of_rate = [(variance * (log / per_efold) ** 2, df) for variance, df in parts]
            rows[-1].append(shown(estimate(log, (4 * loss[i][1] / per_efold ** 2, df), *of_rate), 2, saved))

    if tied:
        names = [" and ".join(factors[i - 1] for i in sorted(ties) if i) for ties in tied]
        warnings.append("effects: the labels cannot separate " + "; ".join(
            name if len(ties - {0}) > 1 else f"{name} from the mean" for name, ties in zip(names, tied)))
    if "," in (tokens := lengths(run for run, _ in runs)):
        warnings.append(f"effects: the runs differ in tokens ({tokens}), so the effects are not at equal tokens")
    return rows


def report(groups, target, markdown, names=None) -> str:
    """All tables, lists and warnings. target: None, or a loss. names: the two labels of --exchange."""
    used = {label: [run for run in runs if run.finished] for label, runs in groups.items()}
    values = {(label, what): [getattr(run, what.removesuffix(" s")) for run in runs]
              for label, runs in used.items() for what in FINALS}
    finals = {key: sample(results) for key, results in values.items()}
    warnings = [f"{label}, {run.name}: {note}" for label, runs in groups.items() for run in runs for note in run.notes]

    summary = [["", "runs", "steps", "time s", "sd", "±", "loss", "sd", "±"]]
    if target:
        summary[0].append(f"p(loss ≤ {target:g})")
    for label, runs in used.items():
        loss = finals[label, "loss"]
        p, totals = target and p_below(loss, target), "/".join(map(str, sorted({run.total for run in runs})))
        cells = (number(x, digits) for what, digits in FINALS.items() for x in finals[label, what][1:])
        summary.append([label, str(loss.n), totals, *cells, *([chance(p)] if target else [])])
        if unlike := {key for run in runs[1:] for key in unlike_settings(runs[0], run)}:
            warnings.append(f"{label}: its runs are not alike, they differ in {', '.join(sorted(unlike))}")
        if loss.n < 2:
            warnings.append(f"{label}: n = {loss.n} says nothing about chance")
        elif loss.sd == 0:
            warnings.append(f"{label}: equal losses (one seed?) say nothing about chance")
        elif target and loss.mean < target and p >= RECORD_P:
            required = enough(lambda n: p_below(loss._replace(n=n), target), RECORD_P)
            warnings.append(f"{label}: n = {loss.n} is too small to tell that the loss is below {target:g}"
                            f" (p = {p:.4f}; p < {RECORD_P} would take {required} of this mean and sd)")

    base, *others = used
    differences = [["difference", "", "95 % interval", "p"]]
    for label, (what, digits) in product(others, FINALS.items()):
        old, new = finals[base, what], finals[label, what]
        count, paired = by_seed(used[base], used[label], what.removesuffix(" s"))
        tests = [(f"{label} − {base}, {what}", welch(old, new)), (f"  by seed, {count} pairs", paired)]
        for name, (value, half, p) in tests[:1 + (count > 1)]:
            interval = " to ".join(number(value + edge, digits, "+") for edge in (-half, half))
            differences.append([name, number(value, digits, "+"), interval, chance(p)])
        value, _, p = tests[0][1]
        if p >= CHANCE:
            required = enough(lambda n: welch(old._replace(n=n), new._replace(n=n)).p, CHANCE)
            warnings.append(f"{label} − {base}, {what}: n = {old.n} and {new.n} are too few to tell"
                            f" {value:+.{digits}f} from chance (p = {p:.4f}; p < {CHANCE} would take {required} each of"
                            " these means and sds)")

    differing = [row for pair in pairs(groups) for row in changes(*pair)] if others else []
    if text := sorted({key for key, old, new in differing if key in TEXT and "–" not in (old, new)}):
        warnings.append(f"{', '.join(text)} differ between the groups: their losses are not of the same text")
    if machine := {key for key, *_ in differing} & {*MACHINE, "gpus", "ranks"}:
        warnings.append(f"{', '.join(sorted(machine))} differ between the groups and may be why the times do")

    curve = [["validation loss at step", *used, *(f"{label} − {base} (p)" for label in others)]]
    steps = sorted({step for runs in used.values() for run in runs for step in run.losses})
    if len(steps) > ROWS:
        steps = [steps[i * (len(steps) - 1) // (ROWS - 1)] for i in range(ROWS)]
    for step in steps:
        losses = [[run.losses.get(step, math.nan) for run in runs] for runs in used.values()]
        changed = [welch(sample(losses[0]), sample(values)) for values in losses[1:]]
        curve.append([str(step), *(spread(values, 4) for values in losses),
                      *(f"{number(change.value, 4, '+')} ({chance(change.p)})" for change in changed)])

    clock = [["ms per step", *used]]
    parts = {part for runs in used.values() for run in runs for part in spans(run).items()}
    for name in sorted({name for name, _ in parts}):  # first steps, later steps, stage 1, ...
        ranges = [f", {start + 1} to {end}" for part, (start, end) in parts if part == name]
        cells = [[step_ms(run, *spans(run)[name]) for run in runs if name in spans(run)] for runs in used.values()]
        clock.append([name + ranges[0] * (len(ranges) == 1), *(spread(cell, 2) for cell in cells)])
    if target:
        cells = [[seconds_to(run, target) for run in runs] for runs in used.values()]
        clock.append([f"seconds to loss {target:g}", *(spread(cell, 2) if all(map(math.isfinite, cell)) else
                                                       f"{sample(cell).n} of {len(cell)} runs" for cell in cells)])

    raw = [f"{label}, {what}: {', '.join(f'{x:.{FINALS[what]}f}' for x in results)}"
           for (label, what), results in values.items() if results]
    rate, line, arms = exchange(used, names, warnings) if names else (None, "", [])
    sections = summary, differences, line, arms, main_effects(used, rate, warnings), curve, clock
    tables = [part if part is line else table(part, markdown) for part in sections if len(part) > 1]
    lists = raw, [divergence(*pair) for pair in pairs(groups)], [f"warning: {text}" for text in warnings]
    return "\n\n".join(tables + ["\n".join(f"* {line}" for line in lines) for lines in lists if lines])


def diff(groups, markdown) -> str:
    """The changed settings and the diff of the sources of two logs. Below the table, in lines as wide as the terminal:
    the command, and rows for which the table is too narrow. Raises UserError for another number of logs."""
    if len(found := pairs(groups)) != 1:
        raise UserError("--diff takes two logs, or two groups, of which it takes one log each")
    (old, new), = found
    lines = list(difflib.unified_diff(old.source.split("\n"), new.source.split("\n"), old.name, new.name, lineterm=""))
    source = "\n".join(["```diff", *lines, "```"] if markdown else lines) if lines else "the sources are equal"
    changed, width = changes(old, new), shutil.get_terminal_size((120, 24)).columns
    rows = [row for row in changed if markdown or row[0] != "command"]
    titles = ["", old.name, new.name]
    while rows and not markdown and sum(max(map(len, column)) for column in zip(titles, *rows)) + 4 > width:
        rows.remove(max(rows, key=lambda row: len("".join(row))))
    parts = [table([titles, *rows], markdown)] if rows else []
    for key, *values in [row for row in changed if row not in rows]:
        parts.append("\n".join([key, *(line for sign, value in zip("-+", values) for line in textwrap.wrap(
            value, width, initial_indent=f"{sign} ", subsequent_indent="  ", break_on_hyphens=False) or [sign])]))
    return "\n\n".join([*(parts or ["settings and machine are equal"]), source])


# ---- Plot ------------------------------------------------------------------------------------------------------------

# Okabe and Ito: colour-blind safe
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
TARGET = 3.28  # loss of the track on FineWeb


def track_target(groups) -> float | None:
    """TARGET, if all runs have GPT-2's tokens: a loss per byte cannot be compared with it."""
    sizes = {run.facts.get("vocab_size", "50257") for runs in groups.values() for run in runs}
    return TARGET if sizes == {"50257"} else None


def plot_lines(groups) -> list[tuple[str, str, list]]:
    """(label, colour, points) of every run (label ""), then of the mean of each group's finished runs.

    A point is (step, seconds, loss).
    """
    thin, thick = [], []
    for colour, (label, runs) in zip(COLOURS * len(groups), groups.items()):
        curves = [{k: (k, run.seconds[k], run.losses[k]) for k in sorted(run.losses) if math.isfinite(run.losses[k])}
                  for run in runs]
        thin += [("", colour, [*curve.values()]) for curve in curves if curve]
        used = [curve for curve, run in zip(curves, runs) if run.finished]
        shared = sorted(set.intersection(*map(set, used))) if used else ()
        means = [tuple(map(mean, zip(*(curve[k] for curve in used)))) for k in shared]
        thick += [(f"{label} (n = {len(used)})", colour, means)] if means else []
    return thin + thick


def ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers."""
    rough = (high - low) / 4
    unit = max(m * 10 ** e for e in [math.floor(math.log10(rough))] for m in (1, 2, 5) if m * 10 ** e <= rough)
    return [i * unit for i in range(math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9) + 1)]


def svg(lines, box, target) -> str:
    """The picture. lines: as from `plot_lines`. box: (least, largest) step, seconds and loss."""
    width, height, top, bottom = 460, 300, 48, 348
    low, high = box[2]
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1060 400" font-family="sans-serif" font-size="15">',
           '<rect width="1060" height="400" fill="white"/>', '<text x="8" y="30">validation loss</text>']

    def text(x, y, label, anchor="middle"):
        out.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{label}</text>')

    def path(data, style):
        out.append(f'<path d="{data}" {style}/>')

    for axis, left, title in (0, 60, "step"), (1, 585, "seconds inside the clock"):
        start, end = box[axis]

        def place(x, y):
            return left + (x - start) / (end - start) * width, bottom - (y - low) / (high - low) * height

        panel = f'<rect x="{left}" y="{top}" width="{width}" height="{height}"/>'
        out.append(f'<clipPath id="panel{axis}">{panel}</clipPath>')
        for y in ticks(low, high):
            path(f"M{left} {place(start, y)[1]:.1f}h{width}", 'stroke="#e4e4e4"')
            text(left - 6, place(start, y)[1] + 5, f"{y:g}", "end")
        for x in ticks(start, end):
            text(place(x, low)[0], bottom + 20, f"{x:g}")
        text(left + width / 2, bottom + 42, title)
        if target and low < target < high:
            path(f"M{left} {place(start, target)[1]:.1f}h{width}", 'stroke="black" stroke-dasharray="6 4"')
        for label, colour, points in lines:
            places = [place(point[axis], point[2]) for point in points]
            style = 'stroke-width="2.5"' if label else 'stroke-opacity="0.6"'
            out.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" fill="none"'
                       f' stroke="{colour}" {style} clip-path="url(#panel{axis})"/>')
            if len(places) == 1:
                out.append('<circle cx="{:.1f}" cy="{:.1f}" r="5" fill="{}"/>'.format(*places[0], colour))
        path(f"M{left} {top}V{bottom}h{width}", 'fill="none" stroke="black"')
    for i, (label, colour, _) in enumerate(line for line in lines if line[0]):  # legend, above falling curves
        path(f"M484 {top + 15 + 22 * i}h30", f'stroke="{colour}" stroke-width="2.5"')
        text(478, top + 20 + 22 * i, label, "end")
    return "\n".join([*out, "</svg>"]) + "\n"


def plot_run(log: Path) -> Path:
    """Draws the losses of a run into an .svg file beside its log; returns its path. Raises UserError."""
    picture, groups = log.with_suffix(".svg"), read_groups([str(log)])
    plot(picture, groups, track_target(groups))
    return picture


def plot(path: Path, groups, target):
    """Draws the losses by step and by time into an .svg file, complete or not at all. Raises UserError."""
    lines, is_svg = plot_lines(groups), path.suffix == ".svg"
    if not is_svg or not lines:
        raise UserError(f"--plot={path}: " + ("there are no losses to draw" if is_svg else "draws .svg"))
    # The picture omits the first third of a run, where the loss falls from 10.8: it would flatten the rest.
    longest = max(points[-1][0] for _, _, points in lines)
    late = [point for _, _, points in lines for point in points if 3 * point[0] >= longest]
    box = [(min(v), max(v) if max(v) > min(v) else min(v) + 1) for v in zip(*late)]
    margin = 0.05 * (box[2][1] - box[2][0])
    box[2] = box[2][0] - margin, box[2][1] + margin
    with atomic_write(path) as file:
        file.write(svg(lines, box, target).encode())


# ---- Main ------------------------------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (see --help)")


def parse(argv):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("logs", nargs="+", metavar="[label=]log", help="file, folder or pattern")
    parser.add_argument("--target", type=float, help="target loss: for p, for the time to reach it, and as a line in"
                        f" the plot; {TARGET} for GPT-2's tokens")
    parser.add_argument("--markdown", action="store_true", help="tables for the README of a record")
    parser.add_argument("--diff", action="store_true", help="instead of statistics, what changed between two logs")
    parser.add_argument("--exchange", type=lambda text: text.split(","), metavar="SHORT,LONG",
                        help="two groups of different lengths: what the others save, in tokens and seconds")
    parser.add_argument("--plot", type=user_path, metavar="FILE", help="also draw loss by step and by time: .svg")
    # argparse would read a label with a leading dash as an option. Arguments never contain a null character.
    args = parser.parse_args(["\0" + word if re.match(SIGNED.pattern + "=", word) else word for word in argv])
    args.logs = [word.lstrip("\0") for word in args.logs]
    if args.exchange and len(args.exchange) != 2:
        raise UserError(f"--exchange={','.join(args.exchange)}: takes two labels, --exchange=SHORT,LONG")
    return args


def main(argv) -> int:
    args = parse(argv)
    groups = read_groups(args.logs)
    target = args.target or track_target(groups)
    text = diff(groups, args.markdown) if args.diff else report(groups, target, args.markdown, args.exchange)
    if args.plot:
        plot(args.plot, groups, target)
    print(text, flush=True)
    return 0


if __name__ == "__main__":
    run_program(main)
