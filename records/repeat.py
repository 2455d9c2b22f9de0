"""Train variants by turns, each several times, then compare the runs that finished. `./run.sh --repeat` starts this.

    ./run.sh --repeat 3 --label base --label low --muon_lr=0.02               six runs, seeds 1, 2, 3, one by one
    ./run.sh --repeat 4 --parallel --label base --label low --muon_lr=0.02    eight runs, one per GPU at a time

Each run is a ./run.sh of its own. The labels take turns, so that a drift of the machine cancels. With --parallel they
also take turns on every GPU: run number k of all goes to GPU k, counted around, and one further whenever the labels would
begin again on the GPU on which they began. Each GPU does its runs in order. Needs Python's standard library only.
"""

import getpass
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

ROOT = Path(__file__).resolve().parents[1]
LABEL = re.compile(r"[\w.+][\w.+-]*|-[\w.]+([+-][\w.]+)*", re.ASCII)  # if it begins with -, signed factors: -a+b
DATA = "--preset=", "--train_files=", "--resume="  # arguments by which ./run.sh decides what data to get
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def say(text):
    print(f"run.sh: {text}", file=sys.stderr, flush=True)


def die(text):
    sys.exit(f"error: {text}")


# ---- Arguments -------------------------------------------------------------------------------------------------------


def joined(argv) -> list[str]:
    """`--key value` as `--key=value`."""
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
    if exchange and (exchange.count(",") != 1 or not set(exchange.split(",")) <= labels.keys()):
        die(f"--exchange={exchange}: write two of the labels with a comma between them ({', '.join(labels)})")
    return int(times), int(seed or 1), exchange, parallel, {label: common + own for label, own in labels.items()}


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def visible_gpus() -> list[str]:
    """The GPUs, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return list(takewhile(lambda gpu: gpu not in ("", "-1"), map(str.strip, given.split(","))))  # as CUDA does
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return []
    return re.findall(r"^GPU (\d+)", listed, re.M)


def environment(gpus, place) -> dict[str, str]:
    """For a run on GPU number `place` of several.

    To each run its GPU is number 0, so runs that start together compile the same kernels into the same files at the
    same time. With folders of its own no run waits for what another one writes, or reads half of it. The first GPU
    keeps the usual folders.
    """
    env = os.environ | {"CUDA_VISIBLE_DEVICES": gpus[place], "NPROC": "1"}
    if place:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a user without a name, as in a container
            user = f"uid_{os.getuid()}"
        home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
        usual = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{user}"),
                 "TRITON_CACHE_DIR": os.path.join(home, ".triton", "cache")}
        env |= {name: os.path.join(os.environ.get(name) or folder, f"gpu{place}") for name, folder in usual.items()}
    return env


def get_data(labels, env) -> int:
    """Gets what the runs need, since runs that start together would all fetch the same; returns the exit status."""
    needed = (tuple(text for text in arguments if text.startswith(DATA)) for arguments in labels.values())
    for needs in dict.fromkeys(needed):
        if status := subprocess.call(["./run.sh", "data", *needs], cwd=ROOT, env=env):
            return status
    return 0


# ---- Runs ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Run:
    label: str
    seed: int
    arguments: list[str]
    title: str
    gpu: int = 0  # its place in the list of GPUs
    log: Path | None = None  # of a run that has finished

    def start(self, env):
        """With `env`, beside others: in a process group of its own; its log has what it prints, errors are kept."""
        folders = [argument.partition("=")[2] for argument in self.arguments if argument.startswith("--log_dir=")]
        self.folder, self.errors = Path(folders[-1]), tempfile.TemporaryFile()
        self.before = set((ROOT / self.folder).glob("*.txt"))
        command = ["./run.sh", f"--run_label={self.label}", f"--seed={self.seed}", *self.arguments]
        null = subprocess.DEVNULL
        apart = dict(env=env, start_new_session=True, stdin=null, stdout=null, stderr=self.errors) if env else {}
        say(self.title)
        self.process = subprocess.Popen(command, cwd=ROOT, **apart)

    def stop(self):
        os.killpg(self.process.pid, signal.SIGTERM)

    def finish(self, stopped, beside) -> int:
        """Finds the log and says how the run ended; returns its status. `beside` others it has shown nothing itself."""
        code = self.process.returncode
        self.errors.seek(0)
        errors = self.errors.read().decode(errors="replace")
        self.errors.close()
        new = set((ROOT / self.folder).glob("*.txt")) - self.before if code == 0 else ()
        for path in new:  # another call may have this label, too, with other seeds
            text = path.read_text(errors="replace")
            if {f"run_label: {self.label}", f"seed: {self.seed}"} <= set(text.splitlines()):
                self.log = self.folder / path.name
                results = re.findall(r"^((?:final_val_loss|train_seconds): .*)$", text, re.M)
        if self.log or stopped:
            if beside:
                say(f"{self.title}: " + (", ".join(results) or "finished" if self.log else "stopped"))
            return 0
        sys.stderr.write(errors)
        code = 128 - code if code < 0 else code
        say(f"{self.title}: " + (f"failed with status {code}" if code else f"ended without a log in {self.folder}"))
        return code or 1


def train(runs, gpus, caught) -> int:
    """Does all runs, until one fails or a signal is in `caught`; returns the exit status. `gpus`: with --parallel.

    On Ctrl-C a single run gets the signal from the terminal, as we do. Runs side by side are ended from here.
    """
    queues = [[run for run in runs if run.gpu == place] for place in range(len(gpus) or 1)]
    running, status, stopped = [], 0, False
    try:
        while True:
            for place, queue in enumerate(queues):
                if queue and not (status or stopped or caught) and place not in [run.gpu for run in running]:
                    queue[0].start(environment(gpus, place) if gpus else None)
                    running.append(queue.pop(0))
            if not running:
                return 130 if caught or stopped else status
            time.sleep(0.1)
            ended = [run for run in running if run.process.poll() is not None]
            running = [run for run in running if run not in ended]
            if caught:  # looked at after poll, since the signal that ended a run has come here as well
                stopped = True
                caught.clear()
                for run in running if gpus else ():
                    run.stop()
            for run in ended:
                code = run.finish(stopped, beside=bool(gpus))
                status = status or code
    finally:  # with runs under way only if this program itself fails, as when its terminal is gone
        for run in running if gpus else ():
            run.stop()


def main(argv) -> int:
    times, first, exchange, parallel, labels = parse(argv)
    caught = []
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has set it
            signal.signal(number, lambda number, frame: caught.append(number))
    gpus = visible_gpus() if parallel else []
    if parallel and not gpus:
        die("--parallel needs GPUs, but CUDA_VISIBLE_DEVICES or nvidia-smi -L names none; leave --parallel out")
    runs = []
    for i in range(times):
        for j, (label, arguments) in enumerate(labels.items()):
            k = i * len(labels) + j
            place = (k + k // math.lcm(len(labels), len(gpus))) % len(gpus) if gpus else 0
            title = f"{label}, run {i + 1} of {times}, seed {first + i}" + (f", GPU {gpus[place]}" if gpus else "")
            runs.append(Run(label, first + i, arguments, title, place))
    status = get_data(labels, environment(gpus, 0)) if gpus else 0
    if caught or not status:
        status = train(runs, gpus, caught)
    # The first label is what the others are compared with, whichever run finished first. Labels may look like options.
    finished = [run for label in labels for run in runs if run.label == label and run.log]
    if not finished:
        return status
    logs = [f"{run.label}={run.log}" for run in finished]
    both = exchange and {run.label for run in finished}.issuperset(exchange.split(","))
    command = [sys.executable, "records/compare.py", *([f"--exchange={exchange}"] if both else []), "--", *logs]
    return subprocess.call(command, cwd=ROOT) or status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
