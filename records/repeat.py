"""Train variants in turn, each several times, then compare the finished runs. `./run.sh --repeat` starts this program.

    ./run.sh --repeat 3 --label base --label low --muon_lr=0.02               six runs, seeds 1, 2, 3, one by one
    ./run.sh --repeat 4 --parallel --label base --label low --muon_lr=0.02    eight runs, one per GPU at a time

Each run is a ./run.sh of its own. The labels take turns, so that machine drift cancels. With --parallel the labels also
take turns on every GPU: run k goes to GPU k modulo the number of GPUs, shifted by one more GPU whenever the first label
would return to the first GPU. Each GPU does its runs in order. Needs only Python's standard library.
"""

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.run.program import ROOT, compiled_folder, run_program, user_path

LABEL = re.compile(r"[\w.+][\w.+-]*|-[\w.]+([+-][\w.]+)*", re.ASCII)  # after a leading -, only signed factors: -a+b
# Arguments that tell ./run.sh which data the run reads, and how much.
DATA = re.compile(r"--(preset|train_files|resume|init_from|minutes|stages|stage\w*\.share|\S*tokens|\S*steps)=")
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def say(text):
    print(f"run.sh: {text}", file=sys.stderr, flush=True)


def die(text):
    sys.exit(f"error: {text}")


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
    times, seed, exchange, parallel, labels = "", "", "", False, {}
    common = own = ["--log_dir=logs"]
    for argument in joined(argv):
        key, _, value = argument.partition("=")
        if argument == "--parallel":
            parallel = True
        elif key == "--repeat":
            times = value
        elif key == "--exchange":
            exchange = value
        elif key == "--seed":
            if seed:
                die(f"--seed={value}: there is one already, and all labels have the same seeds")
            if not re.fullmatch("0|[1-9][0-9]*", value):
                die(f"--seed={value}: write a whole number")
            seed = value
        elif key == "--run_label":
            die(f"{argument}: with --repeat it is --label that names the runs")
        elif key == "--label":
            if not LABEL.fullmatch(value):
                die(f"--label '{value}': write a name of letters, digits and _ . + -, or signed factors like -a+b")
            if value in labels:
                die(f"--label {value}: there is one already")
            own = labels[value] = []
        else:
            own.append(argument)
    if not re.fullmatch("[1-9][0-9]*", times):
        die(f"--repeat '{times}': write how many runs of each label, 1 or more")
    if not labels:
        die("--label and a name for the runs are missing")
    if exchange and (exchange.count(",") != 1 or len(labels.keys() & {*exchange.split(",")}) != 2):
        die(f"--exchange={exchange}: write two of the labels with a comma between them ({', '.join(labels)})")
    return int(times), int(seed or 1), exchange, parallel, {label: common + own for label, own in labels.items()}


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


def environment(gpus, index) -> dict[str, str]:
    """The variables of a run on gpus[index].

    Each run sees its GPU as number 0. So runs that start together would compile the same kernels into the same files,
    and one run might wait for another or read half a file. Each GPU therefore has its own cache folders; the first GPU
    has the default folders.
    """
    env = os.environ | {"CUDA_VISIBLE_DEVICES": gpus[index], "NPROC": "1"}
    if index:
        home = compiled_folder() or Path(tempfile.gettempdir(), f"caches_{os.getuid()}", "speedrun")
        folders = {"TORCHINDUCTOR_CACHE_DIR": home / "inductor", "TRITON_CACHE_DIR": home / "triton"}
        env |= {name: os.path.join(os.environ.get(name) or folder, f"gpu{index}") for name, folder in folders.items()}
    return env


def get_data(labels, env) -> int:
    """Gets the data of all runs once, since runs that start together would all fetch it; returns the exit status."""
    choices = {tuple(filter(DATA.match, arguments)): arguments for arguments in labels.values()}
    for arguments in choices.values():
        if status := subprocess.call(["./run.sh", "data", *arguments], cwd=ROOT, env=env):
            return status
    return 0


# ---- Runs ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Run:
    label: str
    seed: int
    arguments: list[str]
    title: str
    gpu: int = 0  # index in the list of GPUs
    log: Path | None = None  # set when the run has finished

    def start(self, env):
        """Starts ./run.sh. With `env` the run is parallel: it has its own process group and prints nothing;
        self.errors keeps its stderr."""
        folders = [argument.partition("=")[2] for argument in self.arguments if argument.startswith("--log_dir=")]
        self.folder, self.errors = user_path(folders[-1]), tempfile.TemporaryFile()
        self.before = set((ROOT / self.folder).glob("*.txt"))
        command = ["./run.sh", f"--run_label={self.label}", f"--seed={self.seed}", *self.arguments]
        null = subprocess.DEVNULL
        options = dict(env=env, start_new_session=True, stdin=null, stdout=null, stderr=self.errors) if env else {}
        say(self.title)
        self.process = subprocess.Popen(command, cwd=ROOT, **options)

    def stop(self):
        os.killpg(self.process.pid, signal.SIGTERM)

    def finish(self, stopped, parallel) -> int:
        """Finds the log and says how the run ended; returns its exit status."""
        code = self.process.returncode
        self.errors.seek(0)
        errors = self.errors.read().decode(errors="replace")
        self.errors.close()
        new = set((ROOT / self.folder).glob("*.txt")) - self.before if code == 0 else ()
        for path in new:  # another program may train this label with other seeds
            text = path.read_text(encoding="utf-8", errors="replace")
            started = {f"run_label: {self.label}", f"seed: {self.seed}"} <= set(text.splitlines())
            if started and "\nfinal_val_loss: " in text:  # else it ran out of memory and started again
                self.log = self.folder / path.name
                results = re.findall(r"^((?:final_val_loss|train_seconds): .*)$", text, re.M)
        if self.log or stopped:
            if parallel:
                say(f"{self.title}: " + (", ".join(results) or "finished" if self.log else "stopped"))
            return 0
        sys.stderr.write(errors)
        code = 128 - code if code < 0 else code
        say(f"{self.title}: " + (f"failed with status {code}" if code else f"ended without a log in {self.folder}"))
        return code or 1


def train(runs, gpus, caught) -> int:
    """Does all runs, until a run fails or a signal is in `caught`; returns the exit status.

    gpus: GPUs of --parallel, or []. On Ctrl-C, a single run gets the signal from the terminal, as this process does;
    this process ends parallel runs.
    """
    queues = [[run for run in runs if run.gpu == index] for index in range(len(gpus) or 1)]
    running, status, stopped = [], 0, False
    try:
        while True:
            for index, queue in enumerate(queues):
                if queue and not (status or stopped or caught) and index not in [run.gpu for run in running]:
                    queue[0].start(environment(gpus, index) if gpus else None)
                    running.append(queue.pop(0))
            if not running:
                return 130 if caught or stopped else status
            time.sleep(0.1)
            ended = [run for run in running if run.process.poll() is not None]
            running = [run for run in running if run not in ended]
            if caught:  # tested after poll: a signal that ended a run has also reached this process
                stopped = True
                caught.clear()
                for run in running if gpus else ():
                    run.stop()
            for run in ended:
                code = run.finish(stopped, parallel=bool(gpus))
                status = status or code
    finally:  # runs are left only if this program itself fails, for example because its terminal is gone
        for run in running if gpus else ():
            run.stop()


def main(argv) -> int:
    times, first, exchange, parallel, labels = parse(argv)
    caught = []
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, frame: caught.append(number))
    gpus = visible_gpus() if parallel else []
    if parallel and not gpus:
        die("--parallel needs GPUs, but CUDA_VISIBLE_DEVICES or nvidia-smi -L names none; leave --parallel out")
    runs = []
    for i in range(times):
        for j, (label, arguments) in enumerate(labels.items()):
            k = i * len(labels) + j
            index = (k + k // math.lcm(len(labels), len(gpus))) % len(gpus) if gpus else 0
            title = f"{label}, run {i + 1} of {times}, seed {first + i}" + (f", GPU {gpus[index]}" if gpus else "")
            runs.append(Run(label, first + i, arguments, title, index))
    status = get_data(labels, environment(gpus, 0)) if gpus else 0
    if caught or not status:
        status = train(runs, gpus, caught)
    # compare.py compares with the first label, so the order is that of the labels. Labels may look like options.
    finished = [run for label in labels for run in runs if run.label == label and run.log]
    if not finished:
        return status
    logs = [f"{run.label}={run.log}" for run in finished]
    both = exchange and {run.label for run in finished}.issuperset(exchange.split(","))
    options = [f"--exchange={exchange}"] if both else []
    command = [sys.executable, "records/compare.py", *options, "--", *logs]
    return subprocess.call(command, cwd=ROOT) or status


if __name__ == "__main__":
    run_program(main)
