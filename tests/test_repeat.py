"""records/repeat.py with a ./run.sh and a compare.py that record their arguments."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A run executes BEFORE, writes a log and executes TRAIN; `run` is label.seed. The last of each argument counts, as for
# the trainer. The log gets a name that sorts before or after the names of other logs.
RUN = r"""
import json, os, random, signal, sys, time
from pathlib import Path
def write(**what):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(what) + "\n")
def log(label, seed):
    folder = Path(given["log_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{label}_{random.randrange(10)}-{os.getpid()}-{random.random()}.txt"
    steps = "".join(f"step:{i}/2 val_loss:3.{4 - i} train_time:{i}ms step_avg:1.00ms\n" for i in range(3))
    path.write_text(f"run_label: {label}\nseed: {seed}\n{steps}final_val_loss: 3.2\ntrain_seconds: 7.5\n")
    return str(path)
def others(count):  # waits until so many runs have been started
    for _ in range(3000):
        if Path(os.environ["CALLS"]).read_text().count('{"run"') >= count:
            return
        time.sleep(0.01)
    sys.exit("nobody else was started")
env = {name: os.environ.get(name) for name in os.environ["NAMES"].split()}
if sys.argv[1] == "data":
    write(data=sys.argv[2:], **env)
    sys.exit(int(os.environ.get("DATA_STATUS", 0)))
given = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
run = f"{given['run_label']}.{given['seed']}"
write(run=run, rest=sys.argv[1:], pid=os.getpid(), time=time.monotonic(), **env)
exec(os.environ.get("BEFORE", ""))
write(log=log(given["run_label"], given["seed"]), of=run)
exec(os.environ.get("TRAIN", ""))
write(end=run, time=time.monotonic())
"""
COMPARE = """
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps({"compare": sys.argv[1:]}) + "\\n")
sys.exit(int(os.environ.get("COMPARE_STATUS", 0)))
"""
FAIL = "if run == os.environ['BAD']: sys.exit(print('error: no', file=sys.stderr) or 3)"
# Ctrl-C ends a run with a status, or finds it finished, or is ignored.
HANG = """
if run in os.environ["BAD"].split():
    status = os.environ.get("STATUS")
    signal.signal(signal.SIGINT, (lambda *_: os._exit(int(status))) if status else signal.SIG_IGN)
    write(hangs=run)
    time.sleep(60)
"""
NAMES = "CUDA_VISIBLE_DEVICES", "NPROC", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


class Place:
    """A folder with a space in its name, in which repeat.py finds its surroundings."""

    def __init__(self, folder: Path):
        self.folder, self.calls = folder / "my repo", folder / "calls"
        self.executable(self.folder / "run.sh", f"#!{sys.executable} -S\n{RUN}")
        self.executable(self.folder / "records/compare.py", COMPARE)
        (self.folder / "data/run").mkdir(parents=True)
        for name in "records/repeat.py", *(f"data/{part}.py" for part in ("__init__", "run/__init__", "run/disk",
                                                                         "run/errors")):
            shutil.copy(ROOT / name, self.folder / name)
        self.env = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": os.path.expanduser("~"), "NAMES": " ".join(NAMES),
                    "CALLS": str(self.calls)}

    def executable(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *argv, **env):
        self.calls.write_text("")
        argv = [sys.executable, str(self.folder / "records/repeat.py"), "--repeat", *argv]
        return subprocess.Popen(
            argv, env=self.env | env, cwd=self.folder.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # & has it ignored

    def run(self, *argv, status=0, **env) -> tuple[list, str]:
        """(runs as (label, seed, other arguments) in the order of their start, what was compared)"""
        process = self.start(*argv, **env)
        self.out, self.err = process.communicate(timeout=60)
        assert process.returncode == status, (process.returncode, self.out, self.err)
        return self.runs(), self.compared()

    def told(self, what="") -> list[dict]:
        return [call for call in map(json.loads, self.calls.read_text().splitlines()) if what in [*call, ""]]

    def runs(self) -> list[tuple]:
        ours = "--run_label=", "--seed=", "--log_dir=logs"
        return [(*call["run"].rsplit(".", 1), *(text for text in call["rest"] if not text.startswith(ours)))
                for call in self.told("run")]

    def compared(self) -> str:
        """label.seed of the runs whose logs were compared, which happens once, last, and with their labels."""
        if not (calls := self.told("compare")):
            return ""
        assert calls == self.told()[-1:]
        *self.options, _ = before = calls[0]["compare"][:calls[0]["compare"].index("--") + 1]
        logs = [log.split("=", 1) for log in calls[0]["compare"][len(before):]]
        writers = {call["log"]: call["of"] for call in self.told("log")}
        assert [writers[path].rsplit(".", 1)[0] for _, path in logs] == [label for label, _ in logs]
        return " ".join(writers[path] for _, path in logs)

    def interrupt(self, process, hanging, to=os.killpg, number=signal.SIGINT):
        """Signals the process, by default its whole group as a terminal does. Afterwards no run is left."""
        while len(self.told("hangs")) < hanging:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        to(process.pid, number)
        _, self.err = process.communicate(timeout=15)
        for call in self.told("run"):
            with pytest.raises(ProcessLookupError):
                os.kill(call["pid"], 0)
        assert process.returncode == 130 and "failed" not in self.err


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_labels_take_turns_with_the_same_seeds(place):
    """Each label has its own arguments after those of all. Of equal options the last counts."""
    common, own = ["--x=a  b*", ""], ["--y=$HOME", "--x='\"'"]
    argv = "5", "--repeat=2", *common, "--label", "a", "--seed=7", "--label=b.1", *own, "--z", "-1"
    runs, compared = place.run(*argv)
    a, b = common, [*common, *own, "--z=-1"]
    assert runs == [("a", "7", *a), ("b.1", "7", *b), ("a", "8", *a), ("b.1", "8", *b)]
    assert compared == "a.7 a.8 b.1.7 b.1.8" and place.options == []
    starts = zip("1122", runs)
    assert place.err.splitlines() == [f"run.sh: {label}, run {i} of 2, seed {seed}" for i, (label, seed, *_) in starts]


@pytest.mark.parametrize("parallel", [[], ["--parallel"]])
def test_only_the_logs_of_this_call_are_compared(place, parallel):
    """Other calls write logs of the same label, of a label that begins alike, or of the same label and seed before."""
    others = "log('a', 9), log('a_b', 9), log('a_' + given['run_label'], given['seed'])"
    for _ in range(2):
        argv = "1", "--log_dir", "my [logs]", "--label=a", *parallel, f"--log_dir={place.folder}/there", "--label=a_b"
        _, compared = place.run(*argv, BEFORE=others, CUDA_VISIBLE_DEVICES="0,1")
        assert compared == "a.1 a_b.1"
    assert (place.folder / "there").is_dir() and (place.folder / "my [logs]").is_dir()


@pytest.mark.parametrize("bad, compared", [("b.1", "a.1"), ("a.1", "")])
def test_a_failure_is_named_and_the_last_run(place, bad, compared):
    runs, logs = place.run("2", "--label", "a", "--label", "b", status=3, TRAIN=FAIL, BAD=bad)
    label, seed = runs[-1]
    assert f"{label}.{seed}" == bad and logs == compared
    assert place.err.endswith(f"error: no\nrun.sh: {label}, run {seed} of 2, seed {seed}: failed with status 3\n")


def test_other_failures(place):
    """Without a log, by a signal, of the comparison."""
    place.run("2", "--label", "a", "--help", status=1, BEFORE="sys.exit()")
    assert place.err.endswith("run.sh: a, run 1 of 2, seed 1: ended without a log in logs\n")
    assert len(place.run("2", "--label", "a", status=137, TRAIN="os.kill(os.getpid(), 9)")[0]) == 1
    place.run("1", "--label", "a", status=5, COMPARE_STATUS="5")


@pytest.mark.parametrize("status, compared", [("1", "a.1"), ("0", "a.1 b.1")])
def test_ctrl_c_ends_the_run_and_keeps_the_finished_ones(place, status, compared):
    """Also a run that had finished when the signal came. torchrun ends with a status of its own."""
    place.interrupt(place.start("2", "--label", "a", "--label", "b", TRAIN=HANG, BAD="b.1", STATUS=status), 1)
    assert place.runs()[-1] == ("b", "1") and place.compared() == compared


@pytest.mark.parametrize("argv, error", {
    "": "--repeat ''", "two --label a": "--repeat 'two'", "0 --label a": "--repeat '0'",
    "2 --x=1": "--label and a name", "2 --label --x=1": "--label ''", "2 --label a/b": "--label 'a/b'",
    "2 --label -a+-b": "--label '-a+-b'", "2 --label a --label b --label a": "--label a: there is one",
    "2 --run_label b --label a": "--run_label=b: with", "2 --label a --seed=1 --seed=2": "--seed=2: there is one",
    "2 --label a --seed=010": "--seed=010: write", "2 --label a --label b --exchange=a,c": "--exchange=a,c: write two",
    "2 --label a --parallel": "--parallel needs GPUs"}.items())
def test_errors_are_one_line_before_anything_is_done(place, argv, error):
    assert place.run(*argv.split(), status=1, CUDA_VISIBLE_DEVICES="") == ([], "")
    assert place.told() == [] and place.err.startswith("error: " + error) and place.err.count("\n") == 1


def test_signed_labels_and_exchange_reach_the_comparison(place):
    """Signed labels and file names look like options of compare.py. --exchange is left out where one of its labels has
    no finished run, because compare.py refuses such labels."""
    argv = "1 --label long --exchange=short,long --label short --label x".split()
    for bad, options in ("x.1", ["--exchange=short,long"]), ("short.1", []):
        place.run(*argv, status=3, TRAIN=FAIL, BAD=bad)
        assert place.options == options
    shutil.copy(ROOT / "records/compare.py", place.folder / "records")
    place.run("2", "--log_dir=.", "--label", "-a", "--label=+a", "--x=1")
    assert place.runs()[1] == ("+a", "1", "--log_dir=.", "--x=1")
    assert re.findall(r"^(\S+) +2  ", place.out, re.M)[:2] == ["-a", "+a"]


# ---- Side by side ----------------------------------------------------------------------------------------------------


def test_each_gpu_has_a_queue_and_caches_of_its_own(place):
    """At most one run at a time on each GPU, and as many at once as there are GPUs. Labels with the same data get the
    data once, before the runs."""
    caches = dict(zip(NAMES[2:], ("/my/a", "/my/b")))
    argv = "4 --label a --parallel --label b --train_files x --y=2".split()
    place.run(*argv, CUDA_VISIBLE_DEVICES="5, 3,GPU-x", NPROC="2", BEFORE="others(3)", **caches)
    assert [call.get("data") for call in place.told()[:3]] == [[], ["--train_files=x"], None]
    assert {(call["CUDA_VISIBLE_DEVICES"], call["NPROC"]) for call in place.told("data")} == {("5", "1")}
    queues, starts = {}, {call["run"]: call["time"] for call in place.told("run")}
    for call in place.told("run"):
        gpu = call["CUDA_VISIBLE_DEVICES"]
        queues.setdefault(gpu, []).append(call["run"])
        folder = {"5": "", "3": "/gpu1", "GPU-x": "/gpu2"}[gpu]
        assert [call[name] for name in NAMES[1:]] == ["1", f"/my/a{folder}", f"/my/b{folder}"]
    assert queues == {"5": ["a.1", "b.2"], "3": ["b.1", "a.3", "a.4"], "GPU-x": ["a.2", "b.3", "b.4"]}
    ends = {call["end"]: call["time"] for call in place.told("end")}
    assert all(ends[one] < starts[other] for queue in queues.values() for one, other in zip(queue, queue[1:]))
    assert place.compared() == " ".join(f"{label}.{seed}" for label in "ab" for seed in range(1, 5))
    title = "run.sh: b, run 3 of 4, seed 3, GPU GPU-x"
    told = [line for line in place.err.splitlines() if line.startswith(title)]
    assert told == [title, title + ": final_val_loss: 3.2, train_seconds: 7.5"] and place.err.count("\n") == 16
    # nvidia-smi lists the GPUs. No run starts without data.
    place.executable(place.folder.parent / "bin/nvidia-smi", "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-a)\nGPU 1: H200'")
    assert place.run(*argv, status=7, DATA_STATUS="7") == ([], "") and place.told()[0]["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("home, folder", [("{home}", "{home}/speedrun"), ("/dev/null", "/caches_{uid}/speedrun")])
def test_caches_of_the_second_gpu(place, home, folder):
    """Beside those of the first, which are the trainer's own; where no cache can be, in the folder for such files."""
    home, folder = (text.format(home=place.folder, uid=os.getuid()) for text in (home, folder))
    place.run("1", "--label=a", "--label=b", "--parallel", CUDA_VISIBLE_DEVICES="0,1", XDG_CACHE_HOME=home)
    first, second = sorted(place.told("run"), key=lambda call: call["CUDA_VISIBLE_DEVICES"])
    assert not any(first.get(name) for name in NAMES[2:])
    for name, part in zip(NAMES[2:], ("inductor", "triton")):
        assert second[name].endswith(f"{folder}/{part}/gpu1")


def test_a_failure_lets_the_others_finish(place):
    """The other two started runs finish. No run follows on the free GPUs."""
    runs, compared = place.run("4", "--parallel", "--label=a", "--label=b", status=3, CUDA_VISIBLE_DEVICES="0,1,2",
                               BAD="a.1", BEFORE="others(3)", TRAIN=FAIL + "\ntime.sleep(0.3)")
    assert sorted(runs) == [("a", "1"), ("a", "2"), ("b", "1")] and compared == "a.2 b.1"
    assert "\nerror: no\nrun.sh: a, run 1 of 4, seed 1, GPU 0: failed with status 3\nrun.sh: " in place.err


@pytest.mark.parametrize("to, number", [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)])
def test_no_run_is_left_side_by_side(place, to, number):
    """Whether a terminal sends the signal or this process alone gets it, and though the runs ignore Ctrl-C."""
    argv, bad = ("3", "--parallel", "--label", "a", "--label", "b"), "b.1 b.2"  # GPU 0: a.1, then b.2; GPU 1: b.1
    place.interrupt(place.start(*argv, CUDA_VISIBLE_DEVICES="0,1", TRAIN=HANG, BAD=bad), 2, to, number)
    assert place.err.count(": stopped\n") == 2 and len(place.runs()) == 3 and place.compared() == "a.1"
