"""Train variants in alternation, several times each, then compare the runs. `./run.sh --repeat` starts this program.

    ./run.sh --repeat 3 --label base --label low --muon_lr=0.02               six runs, seeds 1, 2, 3, one by one
    ./run.sh --repeat 4 --parallel --label base --label low --muon_lr=0.02    eight runs, one per GPU at a time

Each run is a ./run.sh of its own. The labels take turns, so that machine drift cancels; with --parallel also on every
GPU, which does its runs in order. Needs only Python's standard library.
"""

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.run.program import ROOT, UserError, run_program, user_path

LABEL = re.compile(r"[\w.+][\w.+-]*|-[\w.]+([+-][\w.]+)*", re.ASCII)  # after a leading -, only signed factors: -a+b
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def say(text, before=""):
    print(f"{before}run.sh: {text}\n", end="", file=sys.stderr, flush=True)  # in one piece: several runs speak


# ---- Arguments -------------------------------------------------------------------------------------------------------

def joined(argv) -> list[str]:
    """The arguments with `--key value` as `--key=value`. `read_arguments` of data/run/config.py would merge the labels'
    settings."""
    arguments = []
    for argument in argv:
        key = arguments[-1] if arguments else ""
        if re.fullmatch(r"--[\w.]+", key) and key != "--parallel" and not argument.startswith("--"):
            arguments[-1] = f"{key}={argument}"
        else:
            arguments.append(argument)
    return arguments


def parse(argv):
    """(runs of each label, first seed, --exchange or "", whether --parallel, label -> the trainer's arguments)"""
    given, labels = {"--repeat": "", "--exchange": "", "--seed": ""}, {}
    common = own = ["--log_dir=logs"]
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
        elif key == "--label":
            if not LABEL.fullmatch(value):
                raise UserError(f"--label '{value}': write a name of letters, digits and _ . + -, or signed factors"
                                " like -a+b")
            if value in labels:
                raise UserError(f"--label {value}: there is one already")
            own = labels[value] = []
        elif argument != "--parallel":
            own.append(argument)
    times, exchange, seed = given.values()
    if not re.fullmatch("[1-9][0-9]*", times):
        raise UserError(f"--repeat '{times}': write how many runs of each label, 1 or more")
    if not labels:
        raise UserError("--label and a name for the runs are missing")
    if exchange and (exchange.count(",") != 1 or len(labels.keys() & {*exchange.split(",")}) != 2):
        raise UserError(f"--exchange={exchange}: write two of the labels with a comma between them"
                        f" ({', '.join(labels)})")
    arguments = {label: common + own for label, own in labels.items()}
    return int(times), int(seed or 1), exchange, "--parallel" in argv, arguments


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


# ---- Runs ------------------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Run:
    label: str
    seed: int
    arguments: list[str]
    title: str
    gpu: int  # index in the list of GPUs
    process: subprocess.Popen | None = None  # set when the run has started
    log: Path | None = None  # set when the run has finished

    def stop(self):
        """Ends the processes of a parallel run, if they run."""
        if self.process and self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)

    def execute(self, env, caught) -> int:
        """Does the run, finds its log and says how it ended; returns the exit status, 0 if a signal was `caught`.

        With `env` the run is parallel: it has its own process group, and prints nothing but, if it fails, its stderr.
        """
        folder = user_path([word.partition("=")[2] for word in self.arguments if word.startswith("--log_dir=")][-1])
        before, null, results = set((ROOT / folder).glob("*.txt")), subprocess.DEVNULL, []
        command = ["./run.sh", f"--run_label={self.label}", f"--seed={self.seed}", *self.arguments]
        with tempfile.TemporaryFile() as errors:
            options = dict(env=env, start_new_session=True, stdin=null, stdout=null, stderr=errors) if env else {}
            say(self.title)
            self.process = subprocess.Popen(command, cwd=ROOT, **options)
            if caught and env:
                self.stop()
            code = self.process.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace")
        time.sleep(0.1)  # a signal that ended the run has then also reached this process
        for path in set((ROOT / folder).glob("*.txt")) - before if code == 0 else ():
            text = path.read_text(encoding="utf-8", errors="replace")  # another program may train other seeds of it
            started = {f"run_label: {self.label}", f"seed: {self.seed}"} <= set(text.splitlines())
            if started and "\nfinal_val_loss: " in text:  # else it ran out of memory and started again
                self.log = folder / path.name
                results = re.findall(r"^((?:final_val_loss|train_seconds): .*)$", text, re.M)
        if self.log or caught:
            if env:
                say(f"{self.title}: {', '.join(results) or 'stopped'}")
            return 0
        code = 128 - code if code < 0 else code
        say(f"{self.title}: " + (f"failed with status {code}" if code else f"ended without a log in {folder}"), said)
        return code or 1


def train(runs, gpus, caught) -> int:
    """Does all runs, until one fails or a signal is `caught`; returns the exit status. gpus: of --parallel, or []."""
    statuses = []

    def work(index):
        for run in runs:
            if run.gpu == index and not (caught or any(statuses)):
                statuses.append(run.execute(environment(gpus[index]) if gpus else None, caught))

    with ThreadPoolExecutor(len(gpus) or 1) as pool:
        list(pool.map(work, range(len(gpus) or 1)))
    return 130 if caught else next(filter(None, statuses), 0)


def main(argv) -> int:
    times, first, exchange, parallel, labels = parse(argv)
    caught, runs = [], []

    def stop(number, frame):
        """A single run gets Ctrl-C from the terminal, as this process does."""
        caught.append(number)
        for run in runs if parallel else ():
            run.stop()

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    gpus = visible_gpus() if parallel else []
    if parallel and not gpus:
        raise UserError("--parallel needs GPUs, but CUDA_VISIBLE_DEVICES or nvidia-smi -L names none; leave --parallel"
                        " out")
    for k, (i, label) in enumerate(product(range(times), labels)):
        # One GPU further whenever the first label would return to the first GPU.
        index = (k + k // math.lcm(len(labels), len(gpus))) % len(gpus) if gpus else 0
        title = f"{label}, run {i + 1} of {times}, seed {first + i}" + (f", GPU {gpus[index]}" if gpus else "")
        runs.append(Run(label, first + i, labels[label], title, index))
    status = 0
    for arguments in labels.values() if gpus else ():  # runs that start together would all fetch the data
        command = ["./run.sh", "data", *arguments]
        status = status or subprocess.call(command, cwd=ROOT, env=environment(gpus[0]))
    if caught or not status:
        status = train(runs, gpus, caught)
    # compare.py compares with the first label, so the order is that of the labels. Labels may look like options.
    finished = [run for label in labels for run in runs if run.label == label and run.log]
    if not finished:
        return status
    logs = [f"{run.label}={run.log}" for run in finished]
    both = exchange and {run.label for run in finished}.issuperset(exchange.split(","))
    command = [sys.executable, "records/compare.py", *[f"--exchange={exchange}"] * bool(both), "--", *logs]
    return subprocess.call(command, cwd=ROOT) or status


if __name__ == "__main__":
    run_program(main)
