"""records/repeat.py with a ./run.sh and a compare.py that write down what they are asked to do."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A run does what BEFORE says, writes a log and does what TRAIN says; `run` is label.seed. The last of each argument
# counts, as for the trainer. The log gets a name that sorts before or after those of other runs.
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
    signal.signal(signal.SIGINT, (lambda *_: sys.exit(int(status))) if status else signal.SIG_IGN)
    write(hangs=run)
    time.sleep(60)
"""
NAMES = "CUDA_VISIBLE_DEVICES", "NPROC", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MASTER_PORT"


class Place:
    """A folder with a space in its name, in which repeat.py finds its surroundings."""

    def __init__(self, folder: Path):
        self.folder, self.calls = folder / "my repo", folder / "calls"
        self.executable(self.folder / "run.sh", f"#!{sys.executable} -S\n{RUN}")
        self.executable(self.folder / "records/compare.py", COMPARE)
        shutil.copy(ROOT / "records/repeat.py", self.folder / "records")
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
        """label.seed of the runs that wrote the logs, which must have been given with their labels, once and last."""
        if not (calls := self.told("compare")):
            return ""
        assert calls == self.told()[-1:]
        *self.options, _ = before = calls[0]["compare"][:calls[0]["compare"].index("--") + 1]
        logs = [log.split("=", 1) for log in calls[0]["compare"][len(before):]]
        writers = {call["log"]: call["of"] for call in self.told("log")}
        assert [writers[path].rsplit(".", 1)[0] for _, path in logs] == [label for label, _ in logs]
        return " ".join(writers[path] for _, path in logs)

    def interrupt(self, process, hanging, to=os.killpg, number=signal.SIGINT):
        """As a terminal does it, the whole group of processes gets the signal. Afterwards no run is left."""
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
    runs, compared = place.run("3", "--label", "base", "--label", "wide")
    assert runs == [("base", "1"), ("wide", "1"), ("base", "2"), ("wide", "2"), ("base", "3"), ("wide", "3")]
    assert compared == "base.1 base.2 base.3 wide.1 wide.2 wide.3" and place.options == []
    assert place.err.splitlines() == [f"run.sh: {label}, run {seed} of 3, seed {seed}" for label, seed in runs]


def test_each_label_has_its_own_arguments_after_those_of_all(place):
    common, own = ["--x=a  b*", ""], ["--y=$HOME", "--x='\"'"]
    runs, _ = place.run("1", *common, "--label", "a", "--label=b.1", *own, "--label", "c", "--z", "-1")
    assert runs == [("a", "1", *common), ("b.1", "1", *common, *own), ("c", "1", *common, "--z=-1")]


@pytest.mark.parametrize("argv", [
    "2 --seed=7 --label a --label b", "2 --label a --label b --seed 7", "5 --repeat=2 --label=a --seed=7 --label=b"])
def test_a_given_seed_is_the_first(place, argv):
    assert place.run(*argv.split())[0] == [("a", "7"), ("b", "7"), ("a", "8"), ("b", "8")]


@pytest.mark.parametrize("parallel", [[], ["--parallel"]])
def test_only_the_logs_of_this_call_are_compared(place, parallel):
    """Not those of an earlier call, of a label that begins alike, or of another call that has the label meanwhile."""
    others = "log('a', 9), log('a_b', 9), log('a_' + given['run_label'], given['seed'])"
    for _ in range(4):  # the same names and seeds, whichever way they sort
        _, compared = place.run("2", "--label=a", *parallel, "--label=a_b", BEFORE=others, CUDA_VISIBLE_DEVICES="0,1")
        assert compared == "a.1 a.2 a_b.1 a_b.2"


def test_logs_are_found_where_they_are_written(place):
    there = place.folder.parent / "there"
    argv = "1", "--log_dir", "my [logs]", "--label", "a", "--label", "b", f"--log_dir={there}"
    assert place.run(*argv)[1] == "a.1 b.1"
    assert [path.name[0] for folder in (place.folder / "my [logs]", there) for path in folder.iterdir()] == ["a", "b"]


@pytest.mark.parametrize("bad, compared", [("b.2", "a.1 a.2 b.1"), ("b.1", "a.1"), ("a.1", "")])
def test_a_failure_is_named_and_the_last_run(place, bad, compared):
    runs, logs = place.run("2", "--label", "a", "--label", "b", status=3, TRAIN=FAIL, BAD=bad)
    label, seed = runs[-1]
    assert f"{label}.{seed}" == bad and logs == compared
    assert place.err.endswith(f"error: no\nrun.sh: {label}, run {seed} of 2, seed {seed}: failed with status 3\n")


def test_other_failures(place):
    """Without a log, by a signal, of the comparison."""
    assert place.run("2", "--label", "a", "--help", status=1, BEFORE="sys.exit()")[0] == [("a", "1", "--help")]
    assert place.err.endswith("run.sh: a, run 1 of 2, seed 1: ended without a log in logs\n")
    assert len(place.run("2", "--label", "a", status=137, TRAIN="os.kill(os.getpid(), 9)")[0]) == 1
    place.run("1", "--label", "a", status=5, COMPARE_STATUS="5")


@pytest.mark.parametrize("bad, status, compared", [("b.1", "1", "a.1"), ("a.1", "1", ""), ("b.1", "0", "a.1 b.1")])
def test_ctrl_c_ends_the_run_and_keeps_the_finished_ones(place, bad, status, compared):
    """Also one that Ctrl-C found finished. torchrun ends with a status of its own."""
    place.interrupt(place.start("2", "--label", "a", "--label", "b", TRAIN=HANG, BAD=bad, STATUS=status), 1)
    assert ".".join(place.runs()[-1]) == bad and place.compared() == compared


@pytest.mark.parametrize("argv, error", {
    "": "--repeat ''", "--label a": "--repeat ''", "two --label a": "--repeat 'two'", "0 --label a": "--repeat '0'",
    "-1 --label a": "--repeat '-1'", "2": "--label and a name", "2 --x=1": "--label and a name",
    "2 --label": "--label ''", "2 --label=": "--label ''", "2 --label a/b": "--label 'a/b'",
    "2 --label a*": "--label 'a*'", "2 --label --x=1": "--label ''", "2 --label=--x": "--label '--x'",
    "2 --label -a-": "--label '-a-'", "2 --label -a+-b": "--label '-a+-b'",
    "2 --label a --label b --label a": "--label a: there is one",
    "2 --run_label b --label a": "--run_label=b: with", "2 --label a --seed=1 --seed=2": "--seed=2: there is one",
    "2 --label a --seed x": "--seed=x: write", "2 --label a --seed=010": "--seed=010: write",
    "2 --label a --seed=": "--seed=: write", "2 --label a --label b --exchange=a,c": "--exchange=a,c: write two",
    "2 --label a --exchange a": "--exchange=a: write two", "2 --label a --parallel": "--parallel needs GPUs",
}.items())
def test_mistakes_are_named_before_anything_is_done(place, argv, error):
    assert place.run(*argv.split(), status=1, CUDA_VISIBLE_DEVICES="") == ([], "")
    assert place.told() == [] and place.err.startswith("error: " + error) and place.err.count("\n") == 1


def test_signed_labels_and_the_real_comparison(place):
    """Their logs have names that begin with -, and so has what compare.py gets."""
    shutil.copy(ROOT / "records/compare.py", place.folder / "records")
    place.run("2", "--log_dir=.", "--label", "-a-b", "--label=+a-b", "--label", "-a+b", "--label=+a+b", "--x=1")
    assert place.runs()[3] == ("+a+b", "1", "--log_dir=.", "--x=1")
    assert re.findall(r"^(\S+) +2  ", place.out, re.M) == ["-a-b", "+a-b", "-a+b", "+a+b"]


def test_exchange_is_for_the_comparison(place):
    argv = "1 --label long --exchange=short,long --label short --label x".split()
    assert place.run(*argv)[0] == [("long", "1"), ("short", "1"), ("x", "1")]
    for bad, options in ("x.1", ["--exchange=short,long"]), ("short.1", []):  # compare.py refuses labels without runs
        place.run(*argv, status=3, TRAIN=FAIL, BAD=bad)
        assert place.options == options


def test_commands_with_repeat_in_the_readme(place):
    """Each label trains something else, with knobs that exist."""
    import train_gpt
    commands = re.findall(r"^ *\./run\.sh --repeat .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) > 1
    for command in commands:
        argv = shlex.split(command, comments=True)[2:]
        runs, compared = place.run(*argv, CUDA_VISIBLE_DEVICES="0,1")
        assert len(runs) == len(compared.split()) == int(argv[0]) * argv.count("--label") > 2
        assert len({(run[0], *run[2:]) for run in runs}) == len({run[2:] for run in runs}) > 1
        for label, seed, *arguments in runs:
            config = train_gpt.parse_config([f"--run_label={label}", f"--seed={seed}", *arguments])
            assert config.system.run_label == label


# ---- Side by side ----------------------------------------------------------------------------------------------------


def test_each_gpu_has_a_queue_of_its_own(place):
    """At most one run at a time on each, and as many at once as there are GPUs."""
    place.run(*"6 --label a --parallel --label b".split(), CUDA_VISIBLE_DEVICES="5, 3,GPU-x", NPROC="2",
              BEFORE="others(3)", TRAIN="time.sleep(random.random() / 3)")
    queues, starts = {}, {call["run"]: call["time"] for call in place.told("run")}
    for call in place.told("run"):
        queues.setdefault(call["CUDA_VISIBLE_DEVICES"], []).append(call["run"])
        assert call["NPROC"] == "1"
    assert queues == {"5": ["a.1", "b.2", "a.5", "b.6"], "3": ["b.1", "a.3", "a.4", "b.5"],
                      "GPU-x": ["a.2", "b.3", "b.4", "a.6"]}
    ends = {call["end"]: call["time"] for call in place.told("end")}
    assert all(ends[one] < starts[other] for queue in queues.values() for one, other in zip(queue, queue[1:]))
    assert place.compared() == " ".join(f"{label}.{seed}" for label in "ab" for seed in range(1, 7))
    title = "run.sh: b, run 3 of 6, seed 3, GPU GPU-x"
    told = [line for line in place.err.splitlines() if line.startswith(title)]
    assert told == [title, title + ": final_val_loss: 3.2, train_seconds: 7.5"] and place.err.count("\n") == 24


def test_each_gpu_has_caches_of_its_own(place):
    """Within the folders that torch and Triton, or the environment, would use."""
    default = ("from torch._inductor.runtime.cache_dir_utils import default_cache_dir\n"
               "from triton.knobs import cache\nprint(default_cache_dir(), cache.dir)")
    usual = subprocess.check_output([sys.executable, "-c", default], env=place.env, text=True).split()
    for env, first in (dict(zip(NAMES[2:4], ("/my/a", "/my/b"))), ["/my/a", "/my/b"]), ({}, usual):
        place.run("1", "--label=a", "--label=b", "--parallel", CUDA_VISIBLE_DEVICES="4,7", **env)
        calls = sorted(place.told("run"), key=lambda call: call["CUDA_VISIBLE_DEVICES"])
        folders = [[call[name] for name in NAMES[2:4]] for call in calls]
        assert folders == [[env.get(name) for name in NAMES[2:4]], [folder + "/gpu1" for folder in first]]


def test_gpus_are_those_of_nvidia_smi_unless_named(place):
    place.executable(place.folder.parent / "bin/nvidia-smi", "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-a)\nGPU 1: H200'")
    place.run("2", "--parallel", "--label", "a")
    assert {call["CUDA_VISIBLE_DEVICES"] for call in place.told("run")} == {"0", "1"}
    for none in "", "-1":
        place.run("2", "--parallel", "--label", "a", status=1, CUDA_VISIBLE_DEVICES=none)


def test_data_is_there_before_runs_start_side_by_side(place):
    """It is got once for labels that need the same, as for a run on one GPU."""
    argv = "2 --parallel --x=1 --label a --label b --train_files x --y=2 --label c".split()
    place.run(*argv, CUDA_VISIBLE_DEVICES="1,2")
    assert [call.get("data") for call in place.told()[:3]] == [[], ["--train_files=x"], None]
    assert [(call["CUDA_VISIBLE_DEVICES"], call["NPROC"]) for call in place.told("data")] == 2 * [("1", "1")]
    assert place.run(*argv, status=7, DATA_STATUS="7", CUDA_VISIBLE_DEVICES="1,2") == ([], "")


def test_a_failure_lets_the_others_finish(place):
    """Here the three that were started; none follows on the GPUs that are free."""
    runs, compared = place.run("4", "--parallel", "--label=a", "--label=b", status=3, CUDA_VISIBLE_DEVICES="0,1,2",
                               BAD="a.1", BEFORE="others(3)", TRAIN=FAIL + "\ntime.sleep(0.5)")
    assert sorted(runs) == [("a", "1"), ("a", "2"), ("b", "1")] and compared == "a.2 b.1"
    assert "\nerror: no\nrun.sh: a, run 1 of 4, seed 1, GPU 0: failed with status 3\nrun.sh: " in place.err


@pytest.mark.parametrize("to, number", [
    (os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM), (os.kill, signal.SIGHUP)])
def test_no_run_is_left_side_by_side(place, to, number):
    """Whether the signal comes from a terminal or for this process alone, and though the runs ignore Ctrl-C."""
    argv, bad = ("3", "--parallel", "--label", "a", "--label", "b"), "b.1 b.2"  # GPU 0: a.1, then b.2; GPU 1: b.1
    place.interrupt(place.start(*argv, CUDA_VISIBLE_DEVICES="0,1", TRAIN=HANG, BAD=bad), 2, to, number)
    assert place.err.count(": stopped\n") == 2 and len(place.runs()) == 3 and place.compared() == "a.1"


def test_runs_side_by_side_have_ports_of_their_own(place):
    """By the real torchrun, as run.sh starts it; what it starts ends when both are there."""
    (place.folder / "train.py").write_text(RUN)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node=1"
    place.executable(place.folder / "run.sh", f'#!/bin/sh\n[ "$1" = data ] || exec {torchrun} train.py "$@"\n')
    place.run("1", "--parallel", "--label", "a", "--label", "b", CUDA_VISIBLE_DEVICES="0,1", TRAIN="others(2)")
    assert len({call["MASTER_PORT"] for call in place.told("run")}) == 2 and place.compared() == "a.1 b.1"
