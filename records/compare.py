"""Compare runs by their logs: do two groups differ, by how much, and could it be chance?

    python records/compare.py base='logs/base_*.txt' wide=logs/wide      statistics, losses, step times, warnings
    python records/compare.py --diff logs/base_1.txt logs/wide_1.txt     what was changed: settings, machine, source
    python records/compare.py --exchange=base,long base='logs/base_*.txt' long='logs/long_*.txt' wide='logs/wide_*.txt'
    python records/compare.py -a-b=logs/none +a-b=logs/a -a+b=logs/b +a+b=logs/both
    python records/compare.py base='logs/base_*.txt' --csv=curves.csv    also a table of all curves for other programs
    python records/compare.py --help                                     the options

A group is a label and its logs: files, folders (their *.txt and *.log) or patterns; logs without a label join the group
before them. Logs are those of train_gpt.py and of the public speedrun. Runs that did not finish are named and left out.
Tables are Markdown. The program needs only Python's standard library.

sd is the standard deviation over runs (n - 1), ± half the 95 % confidence interval of the mean. p(loss ≤ target) is the
speedrun's one-sided t-test: the chance of losses this low if their true mean were the target. Welch's two-sided t-test
compares groups. Where two or more seeds are in both groups, a line "by seed" has Student's t-test of the differences of
equal seeds, which often tells more, since a seed shifts both groups alike. Choose one of the two before you see them.

--exchange=SHORT,LONG says what a change is worth in tokens and in net seconds, against a baseline of two lengths whose
loss is linear in the logarithm of the tokens. Signed labels such as +a-b make a factorial set, which may be incomplete
or uneven: a table has the effects by least squares over all runs, which assumes that effects add up. If each seed has
several runs, it counts as one more factor, so that its shift is no scatter. records/README.md explains both.
"""

import argparse
import csv
import difflib
import glob
import io
import math
import os
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import pairwise, product
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
FEW = "val_tokens.few"
# A validation loss depends on these facts; older logs lack val_sha256.
TEXT = {"vocab_size", "val_tokens", FEW, "val_sha256"}
SIGNED = re.compile(r"([+-]\w+)+")  # label of a factorial set
LENGTH = {"scheduled_steps", "extension_steps", "train_tokens"}  # settings in which --exchange's two groups may differ


# ---- Logs ------------------------------------------------------------------------------------------------------------

# The dumped sources may contain any text, even a log, so the last header counts. After the header come versions and
# nvidia-smi, then a rule; our logs continue with `key: value` settings and another rule.
HEADER, RULE = re.compile(r"^={100}\n(?=Running [Pp]y)", re.M), "\n" + "=" * 100
MACHINE = {
    "python": r"Running Python (\S+)", "torch": r"Running [Pp]y[Tt]orch (\S+)", "cuda": r"compiled for CUDA (\S+)",
    "triton": r"Running Triton version (\S+)", "driver": r"Driver Version: (\S+)"}
GPU = re.compile(r"^\| +\d+ +(\S.*?) +(?:On|Off) +\|", re.M)
# A public log has the loss and the time of a step on one line. In a public log of 2024, step_avg is nan in the first
# steps. Our logs have two lines for a step, which read_run joins.
NUMBER = r"\d+(?:\.\d+)?"
STEP = re.compile(rf"step:(\d+)/(\d+)(?= \w+_(?:loss|time):)(?: val_loss:({NUMBER}|nan|inf))?"
                  rf"(?: train_loss:({NUMBER}|nan|inf))?(?: train_time:(\d+)ms step_avg:(?:[\d.]+|nan|inf)ms|$)", re.M)
TWO_LINES = re.compile(r"(step:\d+/\d+)( \w+_loss:\S+)\n\1( train_time:\d+ms step_avg:\S+)$", re.M)


@dataclass
class Run:
    """One log."""

    name: str
    path: Path = Path()
    text: str = ""  # of the log, whatever its line ends
    source: str = ""  # all dumped files
    facts: dict[str, str] = field(default_factory=dict)  # settings, machine, kernel choices
    total: int = 0  # steps of the whole run
    losses: dict[int, float] = field(default_factory=dict)  # step -> validation loss
    few: float = math.nan  # loss at the end on the few tokens on which the run validated before, if it did
    training: dict[int, float] = field(default_factory=dict)  # step -> training loss, which older logs lack
    seconds: dict[int, float] = field(default_factory=dict)  # step -> time inside the clock at validations
    ms: dict[int, float] = field(default_factory=dict)  # step -> clock at training lines, which the host writes early
    tokens: int = 0  # training tokens; 0 if the log does not say
    problem: str = ""  # why no number of this run counts

    finished = property(lambda self: not self.problem)
    # step -> validation loss, always on the same tokens.
    curve = property(lambda self: self.losses | ({self.total: self.few} if self.few > 0 else {}))
    # Of a finished run: the last validation loss, and the seconds inside the clock.
    loss = property(lambda self: self.losses[self.total])
    time = property(lambda self: self.seconds[self.total])


def read_run(path: Path) -> Run:
    """Reads a log. Raises UserError when the file cannot be read or is not a log."""
    with user_error(f"cannot read {path}"):
        text = path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
    name = re.sub(r"([0-9a-f]{8})-[0-9a-f-]{27}", r"\1", path.stem)  # the first eight digits of a UUID
    run, headers, body = Run(name, path, text.strip()), list(HEADER.finditer(text)), text
    if headers:
        run.source = text[:headers[-1].start()].removeprefix(RULE[1:] + "\n")
        (machine, _, body), settings = text[headers[-1].end():].partition(RULE), ""
        if body.startswith("\nhardware: "):
            settings, _, body = body.partition(RULE)
        run.facts = {key: match[1] for key, pattern in MACHINE.items() if (match := re.search(pattern, machine))}
        facts = dict(re.findall(r"^([\w.]+): ?(.*)$", settings, re.M))
        used = Counter(GPU.findall(machine)[:int(facts.get("ranks") or 8) * (facts.get("device", "cuda") == "cuda")])
        run.facts |= {"gpus": ", ".join(f"{n} × {name}" for name, n in used.items()) or "none"} | facts

    # Generated text may look like lines of steps and like results. No step follows it, and the results do.
    run.tokens = int([0, *re.findall(r"^tokens: (\d+)$", body, re.M)][-1])
    lines, mixed = TWO_LINES.sub(r"\1\2\3", re.split(r"^sample:$", body, maxsplit=1, flags=re.M)[0]), None
    for kind, pairs in re.findall("^(kernels|length|shards): (.*)", lines, re.M):
        # The choices of kernels; what --minutes has chosen; checksums.
        run.facts |= ({f"kernels.{op}": choice for op, choice in re.findall(r"([^\s:]+):(\S*)", pairs)}
                      if kind == "kernels" else dict(re.findall(r"([^\s=]+)=(\S*)", pairs)))
    for step, total, loss, trained, ms in STEP.findall(lines):
        step, total, ms = int(step), int(total), int(ms or -1)
        if ms < 0:  # the log ends before the time
            continue
        if step in (run.losses if loss else run.ms) or run.total not in (0, total):
            mixed = step if mixed is None else mixed
            continue
        run.total = total
        if loss:
            run.losses[step], run.seconds[step] = float(loss), ms / 1000
        if not loss or step == 0:
            run.ms[step] = ms
        if trained:
            run.training[step] = float(trained)
    few = re.search(rf"^step:(\d+)/\1 val_tokens:(\d+) val_loss:({NUMBER})$", lines, re.M)
    if few and run.total in run.losses:
        run.facts[FEW], run.few = few[2], float(few[3])
    if not (headers or run.ms or run.losses):
        raise UserError(f"{path}: not the log of a run (no line like 'step:1/1490 train_time:80ms step_avg:79.63ms')")
    if mixed is not None:
        run.problem = f"two runs are mixed: step {mixed} is there again, or has another number of steps"
    elif run.total not in run.losses:
        run.problem = f"it stopped at step {max([*run.ms, *run.losses], default=0)} of {run.total or '?'}"
    elif not math.isfinite(run.loss):
        run.problem = f"its loss is {run.loss}"
    return run


def read_groups(arguments) -> dict[str, list[Run]]:
    """{label: runs} of [label=]log arguments. Raises UserError, also for a copy of a log: a run counts once."""
    groups, label = {}, "runs"
    for argument in arguments:
        match = re.fullmatch(r"([\w.+-]+)=(.*)", argument)
        if match and not Path(argument).exists():
            label, argument = match.groups()
        argument = os.path.expanduser(argument)
        if os.path.isdir(argument):
            paths = [path for path in Path(argument).iterdir() if path.suffix in (".txt", ".log")]
        else:  # the name of a file may look like a pattern
            paths = map(Path, [argument] if os.path.isfile(argument) else glob.glob(argument, recursive=True))
        if not (paths := sorted(paths)):
            raise UserError(f"'{argument}': no such file, no folder with *.txt or *.log, no pattern that matches")
        for run in map(read_run, paths):
            if copy := next((other for runs in groups.values() for other in runs if other.text == run.text), None):
                raise UserError(f"{run.path} and {copy.path} are the same log: name each run once")
            groups.setdefault(label, []).append(run)
    return groups


def changes(old: Run, new: Run) -> list[list[str]]:
    """Rows [key, old value, new value] of all settings that differ."""
    rows = [[key, old.facts.get(key, "–"), new.facts.get(key, "–")] for key in old.facts | new.facts]
    return [row for row in rows if row[1] != row[2]]


def unlike_settings(old: Run, new: Run) -> set[str]:
    """The settings that differ, without those in OWN; "source" if the sources differ."""
    return {key for key, *_ in changes(old, new)} - OWN | ({"source"} if old.source != new.source else set())


def of_one_seed(old: list[Run], new: list[Run]) -> list[tuple[Run, Run]]:
    """All pairs of the same seed. The public logs name none."""
    return [(a, b) for a in old for b in new if a.facts.get("seed", 0) == b.facts.get("seed")]


def pairs(groups) -> list[tuple[Run, Run]]:
    """The first run with a run of each other group, if possible of the same seed; in a single group with all others."""
    (old, *rest), *others = groups.values()
    return [[*of_one_seed([old], runs), (old, runs[0])][0] for runs in others or zip(rest)]


def step_ms(run: Run, start: int, end: int) -> float:
    """Mean time of the steps with lines at both ends. The public logs of 2024 restart the clock after ten steps."""
    times = [run.ms[k] - run.ms[k - 1] for k in range(start + 1, end + 1)
             if run.ms.get(k, -1) >= run.ms.get(k - 1, math.inf)]
    return mean(times or [math.nan])


def seconds_to(run: Run, loss: float) -> float:
    """Seconds until the validation loss reaches `loss`, linear between validations; nan if it never does. A resumed run
    may have reached it before its first validation, whose time it then gets. A curve on few tokens is shifted to end at
    the loss on all."""
    shift = run.few - run.loss if run.few > 0 else 0.0
    losses = {step: value - shift for step, value in run.curve.items()}
    steps = sorted(losses)
    if steps and losses[steps[0]] <= loss:
        return run.seconds[steps[0]]
    for a, b in pairwise(steps):
        if losses[b] <= loss < losses[a]:
            part = (losses[a] - loss) / (losses[a] - losses[b])
            return run.seconds[a] + part * (run.seconds[b] - run.seconds[a])
    return math.nan


def divergence(old: Run, new: Run) -> str:
    """A line about the step from which the losses of two runs differ, in training if both logs have them."""
    kind, ours, theirs = ("training losses", old.training, new.training) if old.training and new.training else (
        "losses", old.losses, new.losses)
    common = sorted(ours.keys() & theirs.keys())
    apart = next((step for step in common if ours[step] != theirs[step]), None)
    return f"{old.name} and {new.name}: {kind} " + (
        f"equal at {len(common)} common steps" if apart is None else
        f"apart from step {apart} on ({ours[apart]:.4f} and {theirs[apart]:.4f})")


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


class Estimate(NamedTuple):
    """A mean over runs, or a number that follows from means."""

    value: float = math.nan
    variance: float = math.nan  # unknown if a mean is that of one run
    df: float = 0  # degrees of freedom of the variance

    n = property(lambda self: self.df + 1)  # of a mean: the number of values and their standard deviation
    sd = property(lambda self: (self.variance * self.n) ** 0.5)

    @property
    def half(self) -> float:
        """Half the 95 % confidence interval; nan if nothing varies or the variance is unknown."""
        return student_t95(self.df) * self.variance ** 0.5 if self.variance > 0 else math.nan

    def p_below(self, target: float) -> float:
        """One-sided p of a true value ≤ target; nan like `half`."""
        return student_cdf((self.value - target) / self.variance ** 0.5, self.df) if self.variance > 0 else math.nan

    @property
    def p(self) -> float:
        """Two-sided, for a true value of 0."""
        return 2 * self._replace(value=-abs(self.value)).p_below(0)

    def times(self, factor: float):
        return Estimate(self.value * factor, self.variance * factor ** 2, self.df)

    def of(self, n: int):
        """The mean of n values with this mean and standard deviation."""
        return Estimate(self.value, self.variance * self.n / n, n - 1)


def sample(values) -> Estimate:
    """The mean of the finite values."""
    n = len(values := [value for value in values if math.isfinite(value)])
    return Estimate(mean(values or [math.nan]), stdev(values) ** 2 / n if n > 1 else math.nan, n - 1)


def estimate(value: float, *parts: Estimate) -> Estimate:
    """Estimate of a sum of independent values, whose variances are those of the `parts`, by Welch and Satterthwaite."""
    variance = sum(part.variance for part in parts)
    df = variance ** 2 / sum(part.variance ** 2 / part.df for part in parts) if variance > 0 else 0
    return Estimate(value, variance, df)


def welch(old: Estimate, new: Estimate) -> Estimate:
    """Difference of the means, new - old."""
    return estimate(new.value - old.value, old, new)


def by_seed(old: list[Run], new: list[Run], what: str) -> Estimate:
    """Mean over the seeds in both groups: the mean difference new - old of the values `what` of a seed."""
    differences = defaultdict(list)  # seed -> those of its pairs
    for a, b in of_one_seed(old, new):
        differences[a.facts["seed"]].append(getattr(b, what) - getattr(a, what))
    return sample(map(mean, differences.values()))


def enough(p_of, level=CHANCE) -> str:
    """The number of runs at which p_of(number) falls below the level."""
    return next((str(n) for n in range(2, 101) if p_of(n) < level), "over 100")


# ---- Exchange of loss for tokens, factors ----------------------------------------------------------------------------

def growth(log_ratio: float) -> float:
    """exp; infinite for a diverged arm, whose numbers would be too long for a table."""
    return math.exp(log_ratio) if log_ratio < 20 else math.inf


def saved(log_ratio: float) -> float:
    """Percent of tokens saved if the share exp(log_ratio) remains."""
    return 100 * (1 - growth(log_ratio))


def against(short, long, arm) -> list[Estimate]:
    """Compares a group of runs with the baseline through `short` and `long`, at the group's own number of tokens.

    Returns the difference in loss; the difference in seconds; the logarithm of the share of its tokens that the group
    needs for the baseline's loss; the net seconds with this share of tokens.
    """
    tokens, start, end = (runs[0].tokens for runs in (arm, short, long))
    span = math.log(end / start)
    x, y = math.log(tokens / start) / span, (tokens - start) / (end - start)  # of the arm: 0 at short, 1 at long
    # Factors of each group's mean loss in the difference and in the rate, and of its mean seconds.
    groups = (arm, 1, 0, 1), (short, x - 1, 1 / span, y - 1), (long, -x, -1 / span, -y)

    def total(column, what):
        return sum(group[column] * mean(getattr(run, what) for run in group[0]) for group in groups)
    above, rate, slower, seconds = total(1, "loss"), total(2, "loss"), total(3, "time"), mean(run.time for run in arm)
    log = above / rate
    share = growth(log)
    results = above, slower, log, slower + (share - 1) * seconds
    parts = [[] for _ in results]
    for runs, a, c, b in groups:  # the loss and the seconds of one run may depend on each other
        by_loss = (a - log * c) / rate
        slopes = (a, 0), (0, b), (by_loss, 0), (share * seconds * by_loss, share if runs is arm else b)
        for part, (of_loss, of_time) in zip(parts, slopes):
            part.append(sample(of_loss * run.loss + of_time * run.time for run in runs))
    return [estimate(value, *part) for value, part in zip(results, parts)]


def least_squares(columns, values) -> tuple[list[Estimate], list[set[int]]]:
    """Fits the values by columns of whole numbers. Returns the coefficient of each column, nan if it is not determined,
    and the sets of columns that depend on each other.

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
    return [Estimate() if any(k in ties for ties in tied) else
            Estimate(float(m[k][count]), float(m[k][k] * error), df) for k in range(count)], tied


# ---- Report ----------------------------------------------------------------------------------------------------------

def number(value: float, digits: int, sign="") -> str:
    return "–" if math.isnan(value) else f"{value:{sign}.{digits}f}"


def chance(p: float) -> str:
    return f"{p:.0e}" if p < 1e-4 else number(p, 4)


def spread(e: Estimate, digits: int) -> str:
    """mean (sd)"""
    return number(e.value, digits) + (f" ({e.sd:.{digits}f})" if e.n > 1 else "")


def shown(e: Estimate, digits: int, scale=lambda value: value) -> str:
    """value (low to high)"""
    low, high = sorted(scale(e.value + edge) for edge in (-e.half, e.half))
    edges = "–" if math.isnan(e.half) else f"{number(low, digits, '+')} to {number(high, digits, '+')}"
    return number(scale(e.value), digits, "+") + f" ({edges})" * math.isfinite(e.value)


def table(rows) -> str:
    """Markdown, in columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(f"| {' | '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])} |"
                     for row in [rows[0], ["-" * width for width in widths], *rows[1:]])


def lengths(runs) -> str:
    """The numbers of tokens of these runs, each once, with commas between them."""
    return ", ".join(map(str, sorted({run.tokens for run in runs})))


def exchange(used, names, warnings):
    """--exchange: the rate in loss per e-fold of tokens, a line about it, rows of the arms. Adds warnings. Raises
    UserError."""
    for label in dict.fromkeys([*names, *used]):
        if not used.get(label) and label in names:
            raise UserError(f"--exchange: '{label}' is not a group with a finished run; there are {', '.join(used)}")
        if "," in lengths(used[label]) or lengths(used[label]) == "0":
            raise UserError(f"--exchange: the runs of {label} have {lengths(used[label])} tokens: all must have as"
                            " many, and 0 means that a log has no line 'tokens: N'")
    short, long = (used[name] for name in names)
    span = math.log(long[0].tokens / short[0].tokens)
    rate = welch(*(sample(run.loss for run in runs) for runs in (long, short))).times(1 / (span or math.nan))
    if not rate.value > 0:
        raise UserError(f"--exchange: the rate is {rate.value:.4f}, not positive: {' and '.join(names)} must be of two"
                        " lengths, and the longer one must have the lower loss")

    rows = [["against the baseline (95 %)", "tokens", "loss", "time s", "tokens saved %", "net time s"]]
    for label, runs in used.items():
        if runs and label not in names:
            loss, time, log, net = against(short, long, runs)
            rows.append([label, lengths(runs), shown(loss, 4), shown(time, 3), shown(log, 2, saved), shown(net, 3)])
    if unlike := unlike_settings(short[0], long[0]) - LENGTH:
        warnings.append(f"exchange: {' and '.join(names)} differ not only in length but in {', '.join(sorted(unlike))}")
    if rate.p >= CHANCE:
        warnings.append("exchange: the rate cannot be told from 0, so the savings mean nothing; it takes more runs, or"
                        " lengths that are further apart")
    return rate, f"exchange rate, {' to '.join(names)}: {shown(rate, 4)} of loss per e-fold of tokens", rows


def main_effects(used, rate, warnings):
    """Rows of the factorial set among the groups, if any. Adds warnings. rate: of `exchange`, or None."""
    words = {label: re.findall(r"[+-]\w+", label) for label, runs in used.items() if runs and SIGNED.fullmatch(label)}
    if len(words) < 2:
        return []
    first, *_ = words
    factors = list(dict.fromkeys(word[1:] for word in words[first]))
    if any(sorted(sign[1:] for sign in signs) != sorted(factors) for signs in words.values()):
        warnings.append(f"no table of effects: {', '.join(words)} do not name the same factors, each once")
        return []
    runs = [(run, signs) for label, signs in words.items() for run in used[label]]
    columns = [[1] * len(runs), *([1 if f"+{factor}" in signs else -1 for _, signs in runs] for factor in factors)]
    seeds, losses = [run.facts.get("seed", "") for run, _ in runs], [run.loss for run, _ in runs]
    of_seeds = [[int(seed == other) for other in seeds] for seed in sorted({*seeds})[1:]]
    loss, tied = least_squares(columns + of_seeds, losses)
    if min(map(seeds.count, seeds)) < 2 or any(max(ties) > len(factors) for ties in tied):
        of_seeds = []  # a seed of one run takes it away; others cannot be told from a factor
        loss, tied = least_squares(columns, losses)
    time, _ = least_squares(columns + of_seeds, [run.time for run, _ in runs])
    rows = [["effect of" + ", by seed" * bool(of_seeds) + " (95 %)", "runs +", "runs −", "loss", "p", "time s", "p"]
            + ["tokens saved %"] * bool(rate)]
    for factor, column, *halves in zip(factors, columns[1:], loss[1:], time[1:]):
        on_loss, on_time = (half.times(2) for half in halves)  # the signs are 2 apart
        rows.append([factor, str(column.count(1)), str(column.count(-1)),
                     shown(on_loss, 4), chance(on_loss.p), shown(on_time, 3), chance(on_time.p)])
        if on_loss.p >= CHANCE:
            def p_of(each):
                """p with the same mean and scatter, and so many runs of each label."""
                count = each * len(words)
                df = count - 1 - len(factors) - (each - 1) * bool(of_seeds)
                return Estimate(on_loss.value, on_loss.variance * len(runs) / count, df).p
            warnings.append(f"effect of {factor}, loss: p = {on_loss.p:.4f}; p < {CHANCE} would take {enough(p_of)}"
                            " runs of each label with this mean and scatter")
        if rate:  # counted as independent of the effect, even if the set contains SHORT or LONG
            log = on_loss.times(1 / rate.value)
            rows[-1].append(shown(estimate(log.value, log, rate.times(log.value / rate.value)), 2, saved))
    if tied:
        names = [" and ".join(factors[i - 1] for i in sorted(ties) if i) for ties in tied]
        warnings.append("effects: the labels cannot separate " + "; ".join(
            name if len(ties - {0}) > 1 else f"{name} from the mean" for name, ties in zip(names, tied)))
    if "," in (tokens := lengths(run for run, _ in runs)):
        warnings.append(f"effects: the runs differ in tokens ({tokens}), so the effects are not at equal tokens")
    return rows


def report(groups, target, names=None) -> str:
    """All tables, lists and warnings. target: None, or a loss. names: the two labels of --exchange."""
    used = {label: [run for run in runs if run.finished] for label, runs in groups.items()}
    values = {(label, what): [getattr(run, what.removesuffix(" s")) for run in runs]
              for label, runs in used.items() for what in FINALS}
    finals = {key: sample(results) for key, results in values.items()}
    warnings = [f"{label}, {run.name}: left out, {run.problem}"
                for label, runs in groups.items() for run in runs if run.problem]

    summary = [["", "runs", "steps", "time s", "sd", "±", "loss", "sd", "±"]]
    if target:
        summary[0].append(f"p(loss ≤ {target:g})")
    for label, runs in used.items():
        loss = finals[label, "loss"]
        p, totals = target and loss.p_below(target), "/".join(map(str, sorted({run.total for run in runs})))
        cells = (number(x, digits) for what, digits in FINALS.items()
                 for each in [finals[label, what]] for x in (each.value, each.sd, each.half))
        summary.append([label, str(loss.n), totals, *cells, *([chance(p)] if target else [])])
        if unlike := {key for run in runs[1:] for key in unlike_settings(runs[0], run)}:
            warnings.append(f"{label}: its runs are not alike, they differ in {', '.join(sorted(unlike))}")
        if loss.n < 2:
            warnings.append(f"{label}: n = {loss.n} says nothing about chance")
        elif loss.sd == 0:
            warnings.append(f"{label}: equal losses (one seed?) say nothing about chance")
        elif target and loss.value < target and p >= RECORD_P:
            required = enough(lambda n: loss.of(n).p_below(target), RECORD_P)
            warnings.append(f"{label}: n = {loss.n} is too small to tell that the loss is below {target:g}"
                            f" (p = {p:.4f}; p < {RECORD_P} would take {required} runs of this mean and sd)")

    base, *others = used
    differences = [["difference (95 %)", "", "p"]]
    for label, (what, digits) in product(others, FINALS.items()):
        old, new = finals[base, what], finals[label, what]
        change, paired = welch(old, new), by_seed(used[base], used[label], what.removesuffix(" s"))
        differences.append([f"{label} − {base}, {what}", shown(change, digits), chance(change.p)])
        if paired.n > 1:
            differences.append([f"  by seed, {paired.n} pairs", shown(paired, digits), chance(paired.p)])
        best, kind = (paired, "pairs") if paired.n > 1 else (change, "runs of each")
        if what == "loss" and best.p >= CHANCE:
            required = enough(lambda n: paired.of(n).p if paired.n > 1 else welch(old.of(n), new.of(n)).p)
            warnings.append(f"{label} − {base}, loss: p = {best.p:.4f}; p < {CHANCE} would take {required} {kind} with"
                            " this mean and scatter")

    differing = [row for pair in pairs(groups) for row in changes(*pair)] if others else []
    # – for `FEW` means all tokens, for the others not known.
    if text := {key for key, old, new in differing if key in TEXT and (key == FEW or "–" not in (old, new))}:
        losses = "losses before the end" if text == {FEW} else "losses"
        warnings.append(f"{', '.join(sorted(text))} differ between the groups: their {losses} are not of the same text")
    if machine := {key for key, *_ in differing} & {*MACHINE, "gpus", "ranks"}:
        warnings.append(f"{', '.join(sorted(machine))} differ between the groups and may be why the times do")

    curve = [["validation loss at step", *used, *(f"{label} − {base} (p)" for label in others)]]
    steps = sorted({step for runs in used.values() for run in runs for step in run.losses})
    if len(steps) > ROWS:
        steps = [steps[i * (len(steps) - 1) // (ROWS - 1)] for i in range(ROWS)]
    for step in steps:
        cells = [sample(run.curve.get(step, math.nan) for run in runs) for runs in used.values()]
        curve.append([str(step), *(spread(cell, 4) for cell in cells),
                      *(f"{number(e.value, 4, '+')} ({chance(e.p)})" for e in (welch(cells[0], x) for x in cells[1:]))])

    def row(title, digits, of_run):
        """The mean of of_run(run) in each group. Where a run has none, the number of those that have one."""
        cells = [sample(map(of_run, runs)) for runs in used.values()]
        return [title, *(spread(cell, digits) if cell.n == len(runs) else f"{cell.n} of {len(runs)} runs"
                         for cell, runs in zip(cells, used.values()))]

    def first(run):
        return max(1, min(FIRST_STEPS, run.total // 10))
    clock = [["ms per step", *used], row("first steps", 2, lambda run: step_ms(run, 0, first(run))),
             row("later steps", 2, lambda run: step_ms(run, first(run), run.total))]
    if target:
        clock.append(row(f"seconds to loss {target:g}", 2, lambda run: seconds_to(run, target)))

    raw = [f"{label}, {what}: {', '.join(f'{x:.{FINALS[what]}f}' for x in results)}"
           for (label, what), results in values.items() if results]
    rate, line, arms = exchange(used, names, warnings) if names else (None, "", [])
    sections = summary, differences, line, arms, main_effects(used, rate, warnings), curve, clock
    tables = [part if part is line else table(part) for part in sections if len(part) > 1]
    lists = raw, [divergence(*pair) for pair in pairs(groups)], [f"warning: {text}" for text in warnings]
    return "\n\n".join(tables + ["\n".join(f"* {line}" for line in lines) for lines in lists if lines])


def diff(groups) -> str:
    """The changed settings of two logs, and the diff of their sources. Raises UserError for another number of logs."""
    if len(found := pairs(groups)) != 1:
        raise UserError("--diff takes two logs, or two groups, of which it takes one log each")
    (old, new), = found
    settings = [f"{sign}{key}: {value}" for key, *values in changes(old, new)
                for sign, value in zip("-+", values) if value != "–"]
    sources = difflib.unified_diff(old.source.split("\n"), new.source.split("\n"), old.name, new.name, lineterm="")
    return "\n\n".join(("\n".join(settings) or "settings and machine are equal",
                        "\n".join(sources) or "the sources are equal"))


def write_csv(path: Path, groups):
    """Writes the losses of all runs, finished or not, into a .csv file, complete or not at all: a line for each step
    that has one, with the seconds inside the clock. Raises UserError."""
    if path.suffix != ".csv":
        raise UserError(f"--csv={path}: writes .csv")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("label", "run", "step", "seconds", "train_loss", "val_loss"))
    for label, run in ((label, run) for label, runs in groups.items() for run in runs):
        for step in sorted(run.losses.keys() | run.training.keys()):
            seconds = run.seconds.get(step, run.ms.get(step, math.nan) / 1000)
            rows.writerow((label, run.name, step, seconds, run.training.get(step), run.curve.get(step)))
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


# ---- Plot ------------------------------------------------------------------------------------------------------------

# Okabe and Ito: colour-blind safe
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
TARGET = 3.28  # loss of the track on FineWeb


def track_target(groups) -> float | None:
    """TARGET, if all runs have GPT-2's tokens: a loss per byte cannot be compared with it."""
    sizes = {run.facts.get("vocab_size", "50257") for runs in groups.values() for run in runs}
    return TARGET if sizes == {"50257"} else None


def ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers."""
    rough = (high - low) / 4
    power = math.floor(math.log10(rough))  # which rounding may have made one too large
    unit = max(m * 10 ** e for e in (power - 1, power) for m in (1, 2, 5) if m * 10 ** e <= rough)
    return [i * unit for i in range(math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9) + 1)]


def plot_run(log: Path) -> Path:
    """Draws the losses of a run into an .svg file beside its log; returns its path. Raises UserError."""
    picture, groups = log.with_suffix(".svg"), read_groups([str(log)])
    plot(picture, groups, track_target(groups))
    return picture


def training_means(run) -> list[tuple[int, float, float]]:
    """[(step, seconds, loss)] of about sixty windows of the training losses of a run, of those over all classes."""
    sampled = re.search(r"^train_loss: over sampled classes up to step (\d+)", run.text, re.M)
    steps = [step for step in sorted(run.training.keys() & run.ms) if step > int(sampled[1] if sampled else 0)]
    width = max(1, run.total // 60)
    return [(last, run.ms[last] / 1000, mean(run.training[step] for step in (*window, last)))
            for *window, last in (steps[i:i + width] for i in range(0, len(steps), width))]


def plot(path: Path, groups, target):
    """Draws the losses of each run by step and by time into an .svg file, complete or not at all; a run alone with its
    training losses, paler. Raises UserError."""
    colours, runs = dict(zip(groups, COLOURS * len(groups))), sum(groups.values(), [])
    alone, title = len(runs) == 1, "validation loss"
    lines = [(f'"{colours[label]}"', [(step, run.seconds[step], loss) for step, loss in sorted(run.curve.items())])
             for label, each in groups.items() for run in each]
    if alone:
        lines.append((f'"{COLOURS[0]}" stroke-opacity="0.4"', training_means(*runs)))
        title += "; paler: training loss"
    lines = [(colour, [point for point in points if math.isfinite(point[2])]) for colour, points in lines]
    # The picture omits the first twentieth of a run, of several a third, where the loss falls from 10.8: it would
    # flatten the rest.
    longest = max((step for _, points in lines for step, *_ in points), default=0)
    late = [point for _, points in lines for point in points if (20 if alone else 3) * point[0] >= longest]
    if path.suffix != ".svg" or not late:
        raise UserError(f"--plot={path}: " + ("there are no losses to draw" if path.suffix == ".svg" else "draws .svg"))
    *axes, (low, high) = ((min(v), max(v) if max(v) > min(v) else min(v) + 1) for v in zip(*late))
    low, high = low - (high - low) / 20, high + (high - low) / 20
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1060 400" font-family="sans-serif" font-size="15">',
           '<rect width="1060" height="400" fill="white"/>', f'<text x="8" y="30">{title}</text>']

    def text(x, y, label, anchor="middle"):
        out.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{label}</text>')

    def draw(points, style):
        out.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" {style}/>')

    for i, (left, axis) in enumerate(((60, "step"), (585, "seconds inside the clock"))):  # each panel is 460 x 300
        start, end = axes[i]

        def place(x, y):
            return left + 460 * (x - start) / (end - start), 348 - 300 * (y - low) / (high - low)

        out.append(f'<clipPath id="panel{i}"><rect x="{left}" y="48" width="460" height="300"/></clipPath>')
        for y in ticks(low, high):
            draw([place(start, y), place(end, y)], 'stroke="#e4e4e4"')
            text(left - 6, place(start, y)[1] + 5, f"{y:g}", "end")
        for x in ticks(start, end):
            text(place(x, low)[0], 368, f"{x:g}")
        text(left + 230, 390, axis)
        if target and low < target < high:
            draw([place(start, target), place(end, target)], 'stroke="black" stroke-dasharray="6 4"')
        for colour, points in lines:
            style = f'stroke={colour} stroke-width="2" stroke-linecap="round" clip-path="url(#panel{i})"'
            # A line of no length with round ends is a dot: that of a single loss.
            draw([place(point[i], point[2]) for point in points[:1] + points], style)
        draw([(left, 48), (left, 348), (left + 460, 348)], 'stroke="black"')
    for i, (label, colour) in enumerate(colours.items()):  # legend, above falling curves
        draw([(484, 63 + 22 * i), (514, 63 + 22 * i)], f'stroke="{colour}" stroke-width="2.5"')
        text(478, 68 + 22 * i, f"{label} (n = {len(groups[label])})", "end")
    with atomic_write(path) as file:
        file.write("\n".join([*out, "</svg>\n"]).encode())


# ---- Main ------------------------------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (see --help)")


def parse(argv):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("logs", nargs="+", metavar="[label=]log", help="file, folder or pattern")
    parser.add_argument("--target", type=float, help="target loss: for p, for the time to reach it, and as a line in"
                        f" the plot; {TARGET} for GPT-2's tokens")
    parser.add_argument("--diff", action="store_true", help="instead of statistics, what changed between two logs")
    parser.add_argument("--exchange", metavar="SHORT,LONG", type=lambda text: text.split(","),
                        help="two groups of different lengths: what the others save, in tokens and seconds")
    parser.add_argument("--plot", metavar="FILE", type=user_path, help="also draw loss by step and by time: .svg")
    parser.add_argument("--csv", metavar="FILE", type=user_path, help="also write the losses of every step: .csv")
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
    text = diff(groups) if args.diff else report(groups, target, args.exchange)
    if args.plot:
        plot(args.plot, groups, target)
    if args.csv:
        write_csv(args.csv, groups)
    print(text, flush=True)
    return 0


if __name__ == "__main__":
    run_program(main)
