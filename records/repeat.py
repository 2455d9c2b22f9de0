"""Train variants in alternation, several times each, then compare the runs. `./run.sh --repeat` starts this program.

    ./run.sh --repeat 3 --label base --label low --muon_lr=0.02               six runs, seeds 1, 2, 3, one by one
    ./run.sh --repeat 4 --parallel --label base --label low --muon_lr=0.02    eight runs, one per GPU at a time
    ./run.sh --repeat 3 --muon_lr=.02,.023,.026                               nine runs: a search over a knob's values
    ./run.sh --race --minutes=1                                               record 74's settings against ours

The labels take turns, so that a drift of the machine cancels. With --parallel each GPU has a queue of runs, and the
labels take turns in it.
The runs of a GPU, or of a CPU, share one process, which starts once (`serve` in data/run/program.py). A run of several
processes, and a run after a failed one, starts its own. A run that fails ends alone. The logs are those that processes
of their own would have written, but for the seconds of the start. Needs only Python's standard library.
"""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.run.program import ROOT, UserError, run_program, user_path

LABEL = re.compile(r"[\w.+][\w.+-]*|-[\w.]+([+-][\w.]+)*", re.ASCII)  # after a leading -, only signed factors: -a+b
VALUES = re.compile(r"--([\w.]+)=((?:true|false|none|[-+.\de]+)(?:,(?:true|false|none|[-+.\de]+))+)", re.ASCII)
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
RACE = {"record74": ["--preset=record74"], "ours": ["--preset=single"]}


def say(text, before=""):
    print(f"{before}run.sh: {text}\n", end="", file=sys.stderr, flush=True)  # in one piece: several runs speak


# ---- Arguments -------------------------------------------------------------------------------------------------------

class Series(NamedTuple):
    """What to train: so many runs of each label, with seeds from `first` on, and the trainer's arguments of a label."""

    times: int
    first: int
    exchange: str
    parallel: bool
    race: bool
    labels: dict[str, list[str]]


def joined(argv) -> list[str]:
    """The arguments with `--key value` as `--key=value`. `read_arguments` of data/run/config.py would merge the labels'
    settings."""
    arguments = []
    for argument in argv:
        key = arguments[-1] if arguments else ""
        if (re.fullmatch(r"--[\w.]+", key) and key not in ("--parallel", "--race")
                and not argument.startswith("--")):
            arguments[-1] = f"{key}={argument}"
        else:
            arguments.append(argument)
    return arguments


def search(arguments) -> dict[str, list[str]]:
    """{label: arguments} of all combinations of the values of knobs that take one number each, but have several. Two or
    more knobs of two values each get signed labels: compare.py has a table of their effects."""
    code = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("train_gpt.py", "data/run/config.py"))
    others = {*re.findall(r"^    (\w+): (?:tuple\[|str\b)", code, re.M)}  # a list or a text is one value of these
    lists = {argument: [match[1], match[2].split(",")] for argument in arguments
             if (match := VALUES.fullmatch(argument)) and match[1].split(".")[-1] not in others}
    rest = [argument for argument in arguments if argument not in lists]
    keys = [argument.partition("=")[0] for argument in arguments]
    for argument, (key, values) in lists.items():
        if keys.count(f"--{key}") > 1 or len({*values}) < len(values):
            raise UserError(f"{argument}: a search takes each knob once, with values that differ")
    signed = len(lists) > 1 and all(len(values) == 2 for _, values in lists.values())
    labels = {}
    for choice in product(*([(key, i, value) for i, value in enumerate(values)] for key, values in lists.values())):
        name = "".join(f"{'-+'[i]}{key.replace('.', '_')}" if signed else f"_{key}_{value}" for key, i, value in choice)
        labels[name.removeprefix("_")] = rest + [f"--{key}={value}" for key, _, value in choice]
    if signed:
        say("search: " + ", ".join(f"+{key} is {more}, -{key} {less}" for key, (less, more) in lists.values()))
    return labels if lists else {}


def parse(argv) -> Series:
    given, labels = {"--repeat": "", "--exchange": "", "--seed": ""}, {}
    race = "--race" in argv
    settings = ["--minutes=1", "--micro_batches=0", "--val_every=.05", "--val_share=0", "--val_tokens=2097152"] * race
    common = own = ["--log_dir=logs", *settings]
    for argument in joined(argv):
        key, _, value = argument.partition("=")
        if key == "--seed" and given[key]:
            raise UserError(f"--seed={value}: there is one already, and all labels have the same seeds")
        if key == "--seed" and not re.fullmatch("0|[1-9][0-9]*", value):
            raise UserError(f"--seed={value}: write a whole number")
        if key in given:
            given[key] = value
        elif key == "--run_label":
            raise UserError(f"{argument}: with --repeat it is --label that names the runs")
        elif race and key in ("--label", "--preset"):
            raise UserError(f"{argument}: --race has its own two; --repeat and labels compare others")
        elif key == "--label":
            if not LABEL.fullmatch(value):
                raise UserError(f"--label '{value}': write a name of letters, digits and _ . + -, or signed factors"
                                " like -a+b")
            if value in labels:
                raise UserError(f"--label {value}: there is one already")
            own = labels[value] = []
        elif argument not in ("--parallel", "--race"):
            own.append(argument)
    times, exchange, seed = given.values()
    if race and not times:
        times = "1"
    if not re.fullmatch("[1-9][0-9]*", times):
        raise UserError(f"--repeat '{times}': write how many runs of each label, 1 or more")
    labels = {label: common + own for label, own in (RACE if race else labels).items()} or search(common)
    if not labels:
        raise UserError("--label and a name for the runs are missing, or several values for a knob"
                        " (--muon_lr=.02,.023)")
    if exchange and (exchange.count(",") != 1 or len(labels.keys() & {*exchange.split(",")}) != 2):
        raise UserError(f"--exchange={exchange}: write two of the labels with a comma between them"
                        f" ({', '.join(labels)})")
    return Series(int(times), int(seed or 1), exchange, "--parallel" in argv, race, labels)


# ---- GPUs ------------------------------------------------------------------------------------------------------------

def visible_gpus() -> list[str]:
    """The GPUs, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return list(takewhile(lambda gpu: gpu not in ("", "-1"), map(str.strip, visible.split(","))))  # as CUDA does
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, encoding="utf-8").stdout
    except OSError:
        return []
    return re.findall(r"^GPU (\d+)", listed, re.M)


def environment(gpu) -> dict[str, str]:
    """The variables of a run on this GPU. Runs can share compiled kernels, as Triton writes files complete or not."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "NPROC": "1"}


# ---- Processes -------------------------------------------------------------------------------------------------------

class Start(NamedTuple):
    """How the runs of a label start, from `./run.sh plan`, which has also fetched the data."""

    processes: str
    threads: str  # OMP_NUM_THREADS; "": not set
    arguments: tuple  # with the preset that run.sh chooses

    @property
    def kind(self) -> str:
        """Runs of one kind can share a process; "": none can. A run on a CPU cannot share that of a GPU:
        `choose_waiting` of data/run/launch.py, which tells them by this word, decides for a whole process."""
        where = "CPU" if "cpu" in " ".join(self.arguments) else "GPU"
        return f"{where}, threads {self.threads}" if self.processes == "1" else ""


def plan(arguments, env) -> Start | int:
    """How the runs start, or the exit status of a run.sh that refuses them."""
    done = subprocess.run(["./run.sh", "plan", *arguments], cwd=ROOT, env=env, stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        return done.returncode
    processes, threads, *words = done.stdout.split("\0")[:-1]
    return Start(processes, threads, tuple(words))


class Process:
    """One process for many runs or, for a Start without a kind, a ./run.sh for one. quiet: it prints nothing, and has
    its own process group."""

    def __init__(self, start, arguments, env, quiet):
        ours, theirs = socket.socketpair()
        self.kind, self.socket, self.errors, self.read = start.kind, ours, tempfile.TemporaryFile(), 0
        env = (env or os.environ) | ({"OMP_NUM_THREADS": start.threads} if start.threads else {})
        null = subprocess.DEVNULL
        options = dict(start_new_session=True, stdin=null, stdout=null, stderr=self.errors) if quiet else {}
        command = ["./run.sh", *arguments]
        if self.kind:
            command, options["stdin"] = [sys.executable, "train_gpt.py", "-", *arguments], theirs
        with theirs:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, **options)

    def do(self, arguments) -> int:
        """Does a run; returns its exit status. Another status than 0 is also that of the process."""
        if self.kind:
            with suppress(OSError):  # the process has ended
                self.socket.sendall(json.dumps(arguments).encode() + b"\n")
                if self.socket.recv(1):
                    return 0
        return self.process.wait()

    def said(self) -> str:
        """What a quiet process has written on stderr since the last call."""
        text = os.pread(self.errors.fileno(), 2**20, self.read)
        self.read += len(text)
        return text.decode(errors="replace")

    def stop(self):
        with suppress(ProcessLookupError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGTERM)

    def close(self):
        self.socket.close()  # the process ends
        self.errors.close()
        self.process.wait()


# ---- Runs ------------------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Run:
    label: str
    seed: int
    title: str
    gpu: int  # index in the list of GPUs
    log: Path | None = None  # set when the run has finished

    def arguments(self, words):
        return [f"--run_label={self.label}", f"--seed={self.seed}", *words]

    def execute(self, process, words, quiet, caught) -> int:
        """Does the run, finds its log and says how it ended; returns the exit status, 0 if a signal was `caught`. A
        quiet run prints nothing but, if it fails, its stderr."""
        folder = user_path([word.partition("=")[2] for word in words if word.startswith("--log_dir=")][-1])
        before, results = set((ROOT / folder).glob("*.txt")), []
        code = process.do(self.arguments(words))
        said = process.said()
        time.sleep(0.02)  # a signal that ended the run has then also reached this process
        for path in set((ROOT / folder).glob("*.txt")) - before if code == 0 else ():
            text = path.read_text(encoding="utf-8", errors="replace")  # another program may train other seeds of it
            started = {f"run_label: {self.label}", f"seed: {self.seed}"} <= set(text.splitlines())
            if started and "\nfinal_val_loss: " in text:  # else it ran out of memory and started again
                self.log = folder / path.name
                results = re.findall(r"^((?:final_val_loss|train_seconds): .*)$", text, re.M)
        if self.log or caught:
            if quiet:
                say(f"{self.title}: {', '.join(results) or 'stopped'}")
            return 0
        code = 128 - code if code < 0 else code
        say(f"{self.title}: " + (f"failed with status {code}" if code else f"ended without a log in {folder}"), said)
        return code or 1


def code_of_trainer() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (*ROOT.glob("*.py"), *(ROOT / "data").rglob("*.py"))}


def train(runs, starts, gpus, caught, processes) -> int:
    """Does all runs, until a signal is `caught`; returns the exit status. starts: {label: Start}; gpus: of --parallel,
    or []; processes: gets those that are started."""
    code, statuses = code_of_trainer(), []

    def work(index):
        process, env = None, environment(gpus[index]) if gpus else None
        for run in runs:
            start = starts[run.label]
            if caught or run.gpu != index:
                continue
            if not code.items() <= code_of_trainer().items():  # a new file is no edit
                say(f"{run.title}: does not start, as somebody has edited the code since the series began")
                statuses.append(1)
                continue
            if process and (process.process.poll() is not None or process.kind != start.kind):
                process.close()
                process = None
            if not process:
                process = Process(start, run.arguments(start.arguments), env, quiet=bool(gpus))
                processes.append(process)
            say(run.title)
            if caught and gpus:
                process.stop()
            statuses.append(run.execute(process, start.arguments, bool(gpus), caught))
        if process:
            process.close()

    with ThreadPoolExecutor(len(gpus) or 1) as pool:
        list(pool.map(work, range(len(gpus) or 1)))
    return 130 if caught else next(filter(None, statuses), 0)


def report_race(runs) -> str:
    """A picture, a table and a line: how long record 74's settings and ours take to the loss at which the slower ends.
    runs: finished ones of both, with the same seeds."""
    from records import compare

    groups = compare.read_groups([f"{run.label}={ROOT / run.log}" for run in runs])
    picture = runs[-1].log.with_suffix(".svg")
    compare.plot(ROOT / picture, groups, None)
    rows, ratios = [["seed", *(f"{label}, {what}" for label in groups for what in ("s", "loss")), "equal loss",
                     *(f"{label}, s to it" for label in groups), "ratio"]], []
    for pair in compare.of_one_seed(*groups.values()):
        goal = max(run.loss for run in pair)
        base, ours = (compare.seconds_to(run, goal) for run in pair)
        ratios.append(ours / base)
        rows.append([pair[0].facts["seed"], *(f"{x:.{n}f}" for run in pair for x, n in ((run.time, 1), (run.loss, 4))),
                     f"{goal:.4f}", f"{base:.1f}", f"{ours:.1f}", f"{ratios[-1]:.3f}"])
    facts = groups["ours"][0].facts
    passes = {run.label: match[1] for run in runs if (match := re.search(
        r"^warning: .* ([\d.]+) passes", (ROOT / run.log).read_text(encoding="utf-8"), re.M))}
    warnings = [f"warning: {label} read its data {count} times, which raises its loss; a race needs more data, or fewer"
                " minutes" for label, count in passes.items()]
    return "\n".join([compare.table(rows), *warnings, f"picture: {picture}",
                      f"--preset=record74 and --preset=single trained for the same time, one after the other, on"
                      f" {facts['gpus']} and the same data ({facts['train_files']}): ours takes {mean(ratios):.3f} of"
                      f" record 74's time to the loss at which the slower one ends (n = {len(ratios)})"])


def main(argv) -> int:
    series = parse(argv)
    caught, runs, processes = [], [], []

    def stop(number, frame):
        """A single run gets Ctrl-C from the terminal, as this process does."""
        caught.append(number)
        for process in processes if series.parallel else ():
            process.stop()

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    gpus = visible_gpus() if series.parallel or series.race else []
    if series.race and not gpus:
        raise UserError("--race needs a GPU: a CPU would train record 74's model for days; try ./run.sh --preset=cpu")
    if series.parallel and not gpus:
        raise UserError("--parallel needs GPUs, but CUDA_VISIBLE_DEVICES or nvidia-smi -L names none; leave --parallel"
                        " out")
    gpus = gpus if series.parallel else []
    for k, (i, label) in enumerate(product(range(series.times), series.labels)):
        # One GPU further whenever the first label would return to the first GPU.
        index = (k + k // math.lcm(len(series.labels), len(gpus))) % len(gpus) if gpus else 0
        title = (f"{label}, run {i + 1} of {series.times}, seed {series.first + i}"
                 + (f", GPU {gpus[index]}" if gpus else ""))
        runs.append(Run(label, series.first + i, title, index))
    env = environment(gpus[0]) if gpus else None  # one label after the other: each may fetch data
    starts = {}
    for label, words in series.labels.items():
        starts[label] = plan(words, env)
        if isinstance(starts[label], int):
            caught or say(f"{label}: no run of the series starts; the lines above say why")
            return 130 if caught else starts[label]
    status = train(runs, starts, gpus, caught, processes)
    # compare.py compares with the first label, so the order is that of the labels. Labels may look like options.
    finished = [run for label in series.labels for run in runs if run.label == label and run.log]
    if not finished:
        return status
    if series.race:
        seeds = [run.seed for run in finished]
        if pairs := [run for run in finished if seeds.count(run.seed) == 2]:
            print(report_race(pairs), flush=True)
        return status
    logs = [f"{run.label}={run.log}" for run in finished]
    both = series.exchange and {run.label for run in finished}.issuperset(series.exchange.split(","))
    command = [sys.executable, "records/compare.py", *[f"--exchange={series.exchange}"] * bool(both), "--", *logs]
    result = subprocess.call(command, cwd=ROOT) or status
    for run in runs if not caught else ():
        if not run.log:
            say(f"{run.title}: did not finish, so it is not in the table")
    return result


if __name__ == "__main__":
    run_program(main)
