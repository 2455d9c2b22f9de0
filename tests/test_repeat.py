"""records/repeat.py with a ./run.sh, a train_gpt.py and a compare.py that record their arguments."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from records import compare, repeat

# Stands for ./run.sh, compare.py and train_gpt.py, which does many runs in one process if PROCS is 1. A run, which is
# label.seed, executes BEFORE, writes a log and executes TRAIN, unless it is among FAILS or HANGS. The last of each
# argument counts, as for the trainer. The log gets a name that sorts before or after the names of other logs.
FAKE = r"""
import json, os, random, signal, sys, time
from pathlib import Path
signal.alarm(60)
calls, variable = Path(os.environ["CALLS"]), lambda name, default="": os.environ.get(name, default)
def tell(**what):
    with open(calls, "a") as file:
        file.write(json.dumps(what | {name: os.environ.get(name) for name in os.environ["NAMES"].split()}) + "\n")
def wait(count, what):  # for calls
    while calls.read_text().count('{"%s"' % what) < count:
        time.sleep(0.01)
def log(label, seed):
    path = Path(given["log_dir"], f"{label}_{random.random()}.txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = "".join(f"step:{i}/2 val_loss:3.{4 - i} train_time:{i}ms step_avg:1.00ms\n" for i in range(3))
    path.write_text(f"run_label: {label}\nseed: {seed}\n{steps}final_val_loss: 3.2\ntrain_seconds: 7.5\n")
    return str(path)
def train(argv):
    global given
    given = dict(word[2:].split("=", 1) for word in argv if word.startswith("--") and "=" in word)
    run = f"{given['run_label']}.{given['seed']}"
    tell(run=run, argv=argv, pid=os.getpid())
    exec(variable("BEFORE"))
    tell(log=log(given["run_label"], given["seed"]), of=run)
    if run in variable("FAILS"):
        sys.exit(print("error: no", file=sys.stderr) or 3)
    if run in (hanging := variable("HANGS").split()):  # Ctrl-C ends it with STATUS, or it ignores Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tell(hangs=run)
        wait(len(hanging), "hangs")
        if run == hanging[-1]:
            os.kill(os.getppid(), int(variable("SIGNAL")))
        os._exit(int(variable("STATUS"))) if variable("STATUS") else signal.pause()
    exec(variable("TRAIN"))
    tell(end=run)
if sys.argv[0].endswith("compare.py"):
    sys.exit(tell(compare=sys.argv[1:]) or int(variable("COMPARE_STATUS", 0)))
if sys.argv[1] == "plan":
    tell(plan=sys.argv[2:])
    print(variable("PROCS", "1"), variable("THREADS"), *sys.argv[2:], sep="\0", end="\0")
    sys.exit(int(variable("DATA_STATUS", 0)))
if sys.argv[1] == "-":
    for line in sys.stdin:
        train(json.loads(line))
        os.write(0, b".")
else:
    train(sys.argv[1:])
"""
NAMES = "CUDA_VISIBLE_DEVICES", "NPROC", "OMP_NUM_THREADS"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stands for the repository."""
    folder = tmp_path / "my repo"
    for name in "run.sh", "train_gpt.py", "records/compare.py":
        script(folder / name, f"#!{sys.executable} -S\n{FAKE}")
    monkeypatch.setattr(repeat, "ROOT", folder)
    return folder


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def train(folder, monkeypatch, capfd):
    """train(arguments, variables) -> an object with status, out, err; calls of FAKE; runs, in the order of their start;
    compared, the runs whose logs were compared; options of the comparison."""
    calls = folder.parent / "calls"

    def train(argv, **env):
        calls.write_text("")
        # A signal that repeat.py does not handle would end the tests.
        handlers = {number: signal.signal(number, lambda *_: None) for number in repeat.SIGNALS}
        with monkeypatch.context() as patch:
            for name in NAMES:
                patch.delenv(name, raising=False)
            for name, value in (dict(CALLS=str(calls), NAMES=" ".join(NAMES)) | env).items():
                patch.setenv(name, value)
            try:
                status = repeat.main(["--repeat", *(argv.split() if isinstance(argv, str) else argv)])
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        told, compared, options = [json.loads(line) for line in calls.read_text().splitlines()], [], []
        if comparisons := [call for call in told if "compare" in call]:
            assert comparisons == told[-1:]  # once, and last
            argv = comparisons[0]["compare"]
            options, logs = argv[:argv.index("--")], [log.split("=", 1) for log in argv[argv.index("--") + 1:]]
            writers = {call["log"]: call["of"] for call in told if "log" in call}
            compared = [writers[path] for _, path in logs]
            assert [run.rpartition(".")[0] for run in compared] == [label for label, _ in logs]
        out, err = capfd.readouterr()
        return SimpleNamespace(status=status, out=out, err=err, calls=told, compared=" ".join(compared),
                               runs=[call["run"] for call in told if "run" in call], options=options)
    return train


def test_labels_take_turns_with_the_same_seeds(train):
    """Each label has its own arguments after those of all. Of equal options the last counts."""
    common, own = ["--x=a  b*", ""], ["--y=$HOME", "--x='\"'"]
    done = train(["5", "--repeat=2", *common, "--label", "a", "--seed=7", "--label=b.1", *own, "--z", "-1"])
    assert (done.status, done.compared, done.options) == (0, "a.7 a.8 b.1.7 b.1.8", [])
    assert [call["argv"] for call in done.calls if "run" in call] == [
        [f"--run_label={label}", f"--seed={seed}", "--log_dir=logs", *common, *rest]
        for seed in (7, 8) for label, rest in (("a", []), ("b.1", [*own, "--z=-1"]))]
    assert done.err == "".join(
        f"run.sh: {label}, run {i} of 2, seed {i + 6}\n" for i in (1, 2) for label in ("a", "b.1"))


@pytest.mark.parametrize("parallel", [[], ["--parallel"]])
def test_only_the_logs_of_this_call_are_compared(folder, train, parallel):
    """Other calls write logs of the same label, of a label that begins alike, or of the same label and seed before. A
    run that ran out of memory and started again has logs without a loss."""
    others = """log('a', 9), log('a_b', 9), log('a_' + given['run_label'], given['seed'])
for i in range(9):
    path = Path(log(given['run_label'], given['seed']))
    path.write_text(path.read_text().partition('final')[0])"""
    argv = ["1", "--log_dir", "my [logs]", "--label=a", *parallel, f"--log_dir={folder}/there", "--label=a_b"]
    for _ in range(2):
        assert train(argv, BEFORE=others, CUDA_VISIBLE_DEVICES="0,1").compared == "a.1 a_b.1"
    assert (folder / "there").is_dir() and (folder / "my [logs]").is_dir()


@pytest.mark.parametrize("argv, env, status, runs, compared, message", [
    ("2 --label a --label b", dict(FAILS="b.1"), 3, "a.1 a.2 b.1 b.2", "a.1 a.2 b.2",
     "b, run 1 of 2, seed 1: failed with status 3"),
    ("2 --label a --label b", dict(FAILS="a.1 a.2", PROCS="2"), 3, "a.1 a.2 b.1 b.2", "b.1 b.2",
     "a, run 2 of 2, seed 2: failed with status 3"),
    ("2 --label a --label b --parallel", dict(FAILS="a.1"), 3, "a.1 a.2 b.1 b.2", "a.2 b.1 b.2",
     "a, run 1 of 2, seed 1, GPU 0: failed with status 3"),
    ("2 --label a", dict(DATA_STATUS="7"), 7, "", "", "a: no run of the series starts; the lines above say why"),
    ("2 --label a", dict(TRAIN="Path('data').mkdir(exist_ok=True); Path('data/new.py').touch()"), 0, "a.1 a.2",
     "a.1 a.2", ""),  # no edit
    ("2 --label a", dict(TRAIN="Path('train_gpt.py').write_text('edited')"), 1, "a.1", "a.1",
     "a, run 2 of 2, seed 2: does not start, as somebody has edited the code since the series began"),
    ("1 --label a --help", dict(BEFORE="sys.exit()"), 1, "a.1", "", "seed 1: ended without a log in logs"),
    ("1 --label a", dict(TRAIN="os.kill(os.getpid(), 9)"), 137, "a.1", "", "seed 1: failed with status 137"),
    ("1 --label a", dict(COMPARE_STATUS="5"), 5, "a.1", "a.1", "run.sh: a, run 1 of 1, seed 1")])
def test_failures(train, argv, env, status, runs, compared, message):
    """Of runs, after which the others go on; of the data; an edit between two runs; without a log; by a signal; of the
    comparison."""
    done = train(argv, CUDA_VISIBLE_DEVICES="0,1,2", **env)
    assert (done.status, sorted(done.runs), done.compared) == (status, runs.split(), compared)
    assert "error: no\nrun.sh: " * ("FAILS" in env) + f"{message}\n" * bool(message) in done.err


@pytest.mark.parametrize("preset, procs, env, count", [
    ("single", "1", {}, 1), ("single", "1", {"FAILS": "b.1"}, 2), ("single", "2", {}, 6), ("cpu", "1", {}, 6)])
def test_runs_of_one_process_share_it(train, preset, procs, env, count):
    """With the number of threads that run.sh has chosen. After a failure the next run has a new process, as each has on
    the CPU: the trainer decides before it knows the run how threads wait, and there otherwise than on a GPU."""
    done = train(f"3 --label a --label b --preset={preset}", PROCS=procs, THREADS="5", **env)
    runs = [call for call in done.calls if "run" in call]
    assert len(runs) == 6 and len({call["pid"] for call in runs}) == count
    assert {call["OMP_NUM_THREADS"] for call in runs} == {"5"}


@pytest.mark.parametrize("argv, hangs, status, number, compared", [
    # torchrun ends with a status of its own; a run may have finished when the signal came
    ("2 --label a --label b", "b.1", "1", signal.SIGINT, "a.1"),
    ("2 --label a --label b", "b.1", "0", signal.SIGTERM, "a.1 b.1"),
    # side by side, though the runs ignore Ctrl-C. GPU 0: a.1, then b.2; GPU 1: b.1
    ("3 --parallel --label a --label b", "b.1 b.2", "", signal.SIGINT, "a.1"),
    ("3 --parallel --label a --label b", "b.1 b.2", "", signal.SIGTERM, "a.1")])
def test_ctrl_c_ends_the_runs_and_keeps_the_finished_ones(train, argv, hangs, status, number, compared):
    done = train(argv, CUDA_VISIBLE_DEVICES="0,1", HANGS=hangs, STATUS=status, SIGNAL=str(int(number)))
    assert (done.status, {*done.runs}, done.compared) == (130, {"a.1", *hangs.split()}, compared)
    assert "failed" not in done.err and done.err.count(": stopped\n") == 2 * ("--parallel" in argv)
    for call in done.calls:
        if "pid" in call:
            with pytest.raises(ProcessLookupError):
                os.kill(call["pid"], 0)


def test_exchange_and_signed_labels_reach_the_comparison(folder, train):
    """--exchange is left out where one of its labels has no finished run, because compare.py refuses such labels.
    Signed labels and file names look like options of compare.py."""
    for fails, options in ("x.1", ["--exchange=short,long"]), ("short.1", []):
        assert train("1 --label long --exchange=short,long --label short --label x", FAILS=fails).options == options
    root = Path(repeat.__file__).parents[1]
    shutil.copytree(root / "data/run", folder / "data/run")
    shutil.copy(root / "records/compare.py", folder / "records")
    done = train("2 --log_dir=. --label -a --label=+a --x=1")
    assert [call for call in done.calls if "run" in call][1]["argv"] == [
        "--run_label=+a", "--seed=1", "--log_dir=logs", "--log_dir=.", "--x=1"]
    assert re.findall(r"^\| (\S+) +\| +2 ", done.out, re.M)[:2] == ["-a", "+a"]


@pytest.mark.parametrize("argv, error", {
    "2 --muon_momentum=0.8,0.9": "--label and a name", "1 --race --preset=x": "--preset=x: --race has",
    "1 --race": "--race needs a GPU", "1 --race --label x": "--label=x: --race has",
    "": "--repeat ''", "two --label a": "--repeat 'two'", "0 --label a": "--repeat '0'",
    "2 --x=1": "--label and a name", "2 --label --x=1": "--label ''", "2 --label a/b": "--label 'a/b'",
    "2 --label -a+-b": "--label '-a+-b'", "2 --label a --label b --label a": "--label a: there is one",
    "2 --run_label b --label a": "--run_label=b: with", "2 --label a --seed=1 --seed=2": "--seed=2: there is one",
    "2 --label a --seed=010": "--seed=010: write", "2 --label a --label b --exchange=a,c": "--exchange=a,c: write two",
    "2 --label a --exchange=a,a": "--exchange=a,a: write two",
    "2 --label a --parallel": "--parallel needs GPUs"}.items())
def test_errors_are_one_line_before_anything_is_done(argv, error):
    done = subprocess.run([sys.executable, repeat.__file__, "--repeat", *argv.split()], capture_output=True, text=True,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1 and re.fullmatch(f"error: {re.escape(error)}.*\n", done.stderr)


# ---- Side by side ----------------------------------------------------------------------------------------------------
def test_each_gpu_has_a_queue_of_its_own(folder, train):
    """At most one run at a time on each GPU, and as many at once as there are GPUs. The data comes before the runs."""
    argv = "4 --label a --parallel --label b --train_files x --y=2 --train_tokens=1e9"
    done = train(argv, CUDA_VISIBLE_DEVICES="5, 3,GPU-x", NPROC="2", BEFORE="wait(3, 'run')")
    assert done.compared == "a.1 a.2 a.3 a.4 b.1 b.2 b.3 b.4"
    queues = {}
    for call in done.calls[:-1]:
        if "log" not in call:
            queues.setdefault(tuple(call[name] for name in NAMES), []).append(next(iter(call.values())))

    def starts_and_ends(runs):
        return [run for run in runs.split() for _ in range(2)]
    data = [["--log_dir=logs"], ["--log_dir=logs", "--train_files=x", "--y=2", "--train_tokens=1e9"]]
    assert {key[:2]: calls for key, calls in queues.items()} == {
        ("5", "1"): [*data, *starts_and_ends("a.1 b.2")], ("3", "1"): starts_and_ends("b.1 a.3 a.4"),
        ("GPU-x", "1"): starts_and_ends("a.2 b.3 b.4")}
    assert "plan" in done.calls[0] and "plan" in done.calls[1]
    assert len({call["pid"] for call in done.calls if "pid" in call}) == 3
    title = "run.sh: b, run 3 of 4, seed 3, GPU GPU-x"
    told = [line for line in done.err.splitlines() if line.startswith(title)]
    assert told == [title, title + ": final_val_loss: 3.2, train_seconds: 7.5"] and done.err.count("\n") == 16
    # nvidia-smi lists the GPUs. No run starts without data.
    script(folder / "bin/nvidia-smi", "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-a)\nGPU 1: H200'")
    done = train(argv, DATA_STATUS="7", PATH=f"{folder}/bin:{os.environ['PATH']}")
    assert (done.status, len(done.calls), done.calls[0]["CUDA_VISIBLE_DEVICES"]) == (7, 1, "0")


# ---- Search and race -------------------------------------------------------------------------------------------------
def test_several_values_of_a_knob_are_a_search(capfd):
    """A knob of several numbers is not searched; two knobs of two values have signed labels for compare.py."""
    words = ["--preset=cpu", "--muon_momentum=0.8,0.9", "--stage1.lr_mul=1,1.2"]
    rest = words[:2]
    assert repeat.search(words) == {f"stage1.lr_mul_{x}": [*rest, f"--stage1.lr_mul={x}"] for x in ("1", "1.2")}
    assert repeat.search([*rest, "--sample_prompt=1,2"]) == {} and capfd.readouterr().err == ""
    found = repeat.search([*words, "--pointer=false,true"])
    assert list(found) == ["-stage1_lr_mul-pointer", "-stage1_lr_mul+pointer", "+stage1_lr_mul-pointer",
                           "+stage1_lr_mul+pointer"]
    assert found["+stage1_lr_mul-pointer"] == [*rest, "--stage1.lr_mul=1.2", "--pointer=false"]
    assert all(compare.SIGNED.fullmatch(label) and repeat.LABEL.fullmatch(label) for label in found)
    assert capfd.readouterr().err == (
        "run.sh: search: +stage1.lr_mul is 1.2, -stage1.lr_mul 1, +pointer is true, -pointer false\n")
    three = repeat.search(["--muon_lr=.02,.03,1e-2", "--seed=1", "--fp8=true,false"])
    assert len(three) == 6 and three["muon_lr_1e-2_fp8_false"] == ["--seed=1", "--muon_lr=1e-2", "--fp8=false"]
    for twice in ["--muon_lr=.02,.03", "--muon_lr=.05"], ["--muon_lr=.02,.02"]:
        with pytest.raises(repeat.UserError, match="a search takes each knob once, with values that differ"):
            repeat.search(twice)


def test_a_race(folder, train):
    """The times to the loss at which the slower one of a pair ends: of ours, between two validations. No table if each
    seed has but one finished run."""
    log = """def log(label, seed):
    path, fast = Path(given["log_dir"], f"{label}_{seed}.txt"), label == "ours"
    path.parent.mkdir(exist_ok=True)
    losses = [5, 4, 3 - int(seed) / 10] if fast else [5, 4.5, 4.25]
    steps = "".join(f"step:{i}/2 val_loss:{x} train_time:{i * 4000}ms step_avg:1.00ms\\n"
                    for i, x in enumerate(losses))
    rule, settings = "=" * 100 + "\\n", f"hardware: x\\nseed: {seed}\\nrun_label: {label}\\ntrain_files: x.bin\\n"
    settings += f"{rule}warning: 2 files; 3.25 passes; a second pass\\n" if fast else rule
    path.write_text(f"{rule}Running Python\\n{rule}{settings}{steps}final_val_loss: {losses[-1]}\\n"
                    "train_seconds: 8\\n")
    return str(path)
globals()["log"] = log"""
    done = train(["", "--race", "--repeat=2", "--depth=4"], CUDA_VISIBLE_DEVICES="0", BEFORE=log)
    assert done.status == 0 and done.runs == ["record74.1", "ours.1", "record74.2", "ours.2"]
    words = "--log_dir=logs --minutes=1 --micro_batches=0 --val_every=.05 --val_share=0 --val_tokens=2097152".split()
    assert [call["plan"] for call in done.calls[:2]] == [
        [*words, "--depth=4", f"--preset={preset}"] for preset in ("record74", "single")]
    assert [line.replace("|", "").split() for line in done.out.splitlines()[2:4]] == [
        [seed, "8.0", "4.2500", "8.0", loss, "4.2500", "8.0", "3.0", "0.375"]
        for seed, loss in (("1", "2.9000"), ("2", "2.8000"))]
    assert "<svg" in (folder / "logs/ours_2.svg").read_text() and "picture: logs/ours_2.svg" in done.out
    assert re.findall("warning: .* read its data .* times", done.out) == ["warning: ours read its data 3.25 times"]
    assert "ours takes 0.375 of record 74's time" in done.out and "(n = 2)" in done.out
    done = train("--race --repeat=2", CUDA_VISIBLE_DEVICES="0", FAILS="record74.1 ours.2")
    assert done.status == 3 and len(done.runs) == 4 and done.out == ""
