"""The programs in odd shells: closed outputs and pipes, an ASCII locale, safe paths, ~ in paths, a busy machine."""

import os
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

import train_gpt as T
from data.run import launch
from data.run import machine as machine_of_run
from oracles import write_library
from records import evaluate

ROOT = Path(T.__file__).parent
TINY = ["--preset=cpu", "--model_dim=48", "--scheduled_steps=4", "--extension_steps=0", "--val_tokens=1024",
        "--val_batch_tokens=512", "--val_every=0", "--sample_tokens=0",
        *(f"--stage{i}.batch_tokens=512" for i in range(1, 5))]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home folder with data and logs, in which nobody but Python knows the encoding of the names."""
    return write_library(tmp_path_factory.mktemp("program") / "Länge 'ü'")


@pytest.fixture(scope="module")
def run(home):
    """A run from another folder, with safe paths, in an ASCII locale and with a closed output: the finished process."""
    odd = {"HOME": str(home), "DATA_PATH": "~", "PYTHONSAFEPATH": "1", "LC_ALL": "C", "PYTHONUTF8": "0",
           "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    argv = [sys.executable, "-X", "warn_default_encoding", str(ROOT / "train_gpt.py"), *TINY, "--log_dir=~/logs",
            "--save=true"]
    command = f"exec {shlex.join(argv)} >&-"
    return subprocess.run(["bash", "-c", command], env=ENV | odd, cwd=home, stderr=subprocess.PIPE, text=True)


def test_a_run_in_an_odd_shell(run, home):
    assert run.returncode == 0, run.stderr
    # .venv may lie in ROOT.
    ours = [line for line in run.stderr.splitlines() if str(ROOT) in line and sys.prefix not in line]
    assert not [line for line in ours if "EncodingWarning" in line]
    log, = home.glob("logs/*.txt")
    assert re.search("^final_val_loss: ", log.read_text(encoding="utf-8"), re.M)


def test_a_tilde_is_the_home_folder(run, home, monkeypatch, capsys):
    """In every knob that is a path; no shell has replaced it."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DATA_PATH", "~")
    monkeypatch.setattr(T, "train", lambda config, *_: print("trains with", config.system.init_from))
    checkpoint = f"~/{next(home.glob('logs/*/*.pt')).relative_to(home)}"
    assert T.main([f"--sample={checkpoint}", "--tokens=2"]) == 0
    files = [f"--{part}_files=~/data/stdlib/stdlib_{part}_*.bin" for part in ("train", "val")]
    assert T.main([f"--init_from={checkpoint}", "--log_dir=~/logs", *files]) == 0
    assert T.main([f"--resume={checkpoint}"]) == 1
    out, err = capsys.readouterr()
    assert f"trains with {checkpoint}\n" in out and "that run is finished" in err
    assert evaluate.main([checkpoint, "--export=~/x.safetensors"]) == 0 and (home / "x.safetensors").exists()
    assert not Path("~").exists() and not (ROOT / "~").exists()


PROGRAMS = [*(f"records/{name}.py --help" for name in ("compare", "evaluate", "pack", "rerun", "trace")),
            "records/repeat.py --repeat 1", "data/prepare.py --help", "data/prepare.py text nothing --help",
            "train_gpt.py --help", "train_gpt.py --check --preset=cpu"]


def test_a_pipe_that_nobody_reads_ends_every_program_without_a_word(home):
    def status_and_words(command):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=ENV | {"DATA_PATH": str(home)},
                              stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        return done.returncode, done.stderr
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(PROGRAMS, pool.map(status_and_words, PROGRAMS)))
    assert {status for status, _ in found.values()} <= {0, 1, 141}  # argparse looks away
    assert {name: words for name, (_, words) in found.items() if words} == {
        "records/repeat.py --repeat 1": "error: --label and a name for the runs are missing, or several values for a"
                                        " knob (--muon_lr=.02,.023)\n"}


def test_what_needs_no_torch(tmp_path):
    """--help and wrong arguments are answered before PyTorch is imported, which takes seconds."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    for argument, status, words in (
            ("--help", 0, "Knobs with the values of "), ("--muon_lrr=1", 1, "nearest is --muon_lr "),
            ("--model_dim=100", 1, "a multiple of 8"), ("--seed=2", 1, "torch is imported")):
        done = subprocess.run([sys.executable, str(ROOT / "train_gpt.py"), argument], capture_output=True, text=True,
                              env=ENV | {"PYTHONPATH": str(tmp_path)})
        assert done.returncode == status and re.search(words, done.stdout + done.stderr), argument


def test_a_run_that_nobody_reads_says_what_helps(home):
    """And that helps."""
    argv = shlex.join([sys.executable, "train_gpt.py", *TINY, f"--log_dir={home}/logs"])
    command = f"set -o pipefail; {argv} %s"
    env = ENV | {"DATA_PATH": str(home)}
    done = subprocess.run(["bash", "-c", command % "| head -n 2"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and re.fullmatch("error: the run ends, since nobody .* > /dev/null, .*\n", done.stderr)
    done = subprocess.run(["bash", "-c", command % re.search(">.*null", done.stderr)[0]], cwd=ROOT, env=env,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_outputs_do_not_end_up_in_a_file(tmp_path, closed):
    """The next file that a program opens would be its output."""
    (tmp_path / "program.py").write_text(f"""import subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from data.run.program import run_program
def main(argv):
    with open("file", "w", encoding="utf-8") as file:
        subprocess.run(["sh", "-c", "echo a; echo b >&2"], check=True)
        print("c"), print("d", file=sys.stderr), file.write("all")
    return 7
run_program(main)""")
    command = f"exec {sys.executable} program.py {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True)
    assert done.returncode == 7 and (tmp_path / "file").read_text() == "all"
    assert b"Traceback" not in done.stderr


def test_the_command_of_prepare_runs_where_it_is_printed(tmp_path):
    """In another folder, with a relative DATA_PATH that the shell does not keep."""
    folder = tmp_path / "it's here"
    folder.mkdir()
    (folder / "a.txt").write_text("".join(f"line {i} of a text\n" for i in range(20_000)))
    env = ENV | {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    prepare = [sys.executable, ROOT / "data/prepare.py", "text", "a.txt", "--out", "mine", "--tokenizer", "bytes"]
    done = subprocess.run(prepare, cwd=folder, env=env | {"DATA_PATH": "."}, capture_output=True, text=True)
    command = done.stdout.splitlines()[-1] + " --check"
    done = subprocess.run(["sh", "-c", command], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and re.search("^training data .* yes$", done.stdout, re.M), (done.stdout, done.stderr)


def test_no_process_asks_the_network(monkeypatch):
    """One alone makes no process group. Several say what is wrong where they cannot reach each other."""
    monkeypatch.setattr(T.dist, "init_process_group", Mock(side_effect=AssertionError("it makes a process group")))
    assert machine_of_run.init_runtime(T.PRESETS["cpu"].config) == machine_of_run.Runtime(0, 1, T.torch.device("cpu"))
    monkeypatch.setattr(socket, "getfqdn", Mock(side_effect=AssertionError("it asks the network")))
    launch.stay_here()
    assert socket.getfqdn() == socket.getfqdn("node17") == "localhost"
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=OSError(101, "Network is unreachable")))
    with pytest.raises(SystemExit, match="error: .*Network is unreachable.*NPROC=1"):
        launch.stay_here()


@pytest.fixture
def machine(monkeypatch):
    """machine(cores, those that other programs use, quota): what this process finds."""
    def set(count, used, limit=99.0):
        monkeypatch.setattr(launch, "core_numbers", lambda: {*range(count)})
        monkeypatch.setattr(launch, "allowed_cores", lambda: min(count, limit))
        monkeypatch.setattr(launch, "cores_of_others", lambda: used)
    for name in *launch.CHOICES, "OMP_NUM_THREADS", "RANK":
        monkeypatch.setenv(name, "x")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    return set


@pytest.mark.parametrize("count, used, limit, env, policy", [
    (2, 0.2, 99, {}, None), (2, 1.9, 99, {}, "passive"), (8, 2.0, 99, {}, "passive"), (2, 1.9, 1, {}, None),
    (8, 2.0, 99, {"OMP_NUM_THREADS": "6"}, None), (8, 2.0, 99, {"OMP_NUM_THREADS": "none"}, "passive"),
    (2, 1.9, 99, {"OMP_NUM_THREADS": "1"}, None), (2, 1.9, 99, {"OMP_WAIT_POLICY": "active"}, "active"),
    (2, 1.9, 99, {"GOMP_SPINCOUNT": "9"}, None), (2, 1.9, 99, {"RANK": "0"}, None),
    (64, 9.0, 2, {}, None), (64, 9.0, 2, {"OMP_NUM_THREADS": "64"}, "passive")])
def test_threads_wait_asleep_where_others_use_the_cores(machine, monkeypatch, capsys, count, used, limit, env, policy):
    machine(count, used, limit)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    launch.choose_waiting(["--preset=cpu"])
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    assert ("they wait asleep (OMP_WAIT_POLICY=passive)\n" in capsys.readouterr().err) is (policy == "passive")
    assert os.environ.get("OMP_NUM_THREADS") == env.get("OMP_NUM_THREADS", str(limit) if limit < count else None) or (
        "RANK" in env)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not Linux")
def test_what_other_programs_use_is_measured():
    """One of them, which counts only on a core of this process."""
    before = os.sched_getaffinity(0)
    core = max(before)
    hog = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    try:
        os.sched_setaffinity(0, {core})
        assert launch.cores_of_others(1) > 0.5
    finally:
        os.sched_setaffinity(0, before)
        hog.kill()


def test_what_is_no_work_of_others(tmp_path, monkeypatch):
    """That on a core of others, and that of this process."""
    monkeypatch.setattr(launch, "core_numbers", lambda: {1})
    (tmp_path / "stat").write_text("cpu0 70 9 9 9 9 9 9 9 9 9\ncpu1 100 20 3 900 800 4 5 6 70 0\n")
    assert launch.busy_seconds(tmp_path / "stat") == 138 / os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(launch, "busy_seconds", launch.time.process_time)  # nobody else works
    def work(seconds):
        end = launch.time.process_time() + seconds
        while launch.time.process_time() < end:
            pass
    monkeypatch.setattr(launch.time, "sleep", work)
    assert abs(launch.cores_of_others()) < 0.1


@pytest.mark.parametrize("files, cgroup, limit", [
    ({"cpu.max": "150000 100000"}, "0::/", 1.5), ({"cpu.max": "max 100000"}, "0::/", None),
    ({"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 0.5),
    ({"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "50000"}, "3:cpu,cpuacct:/x\n0::/", 2),
    ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/docker/x", 1),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/", None), ({}, "", None)])
def test_the_quota_of_a_container(tmp_path, monkeypatch, files, cgroup, limit):
    monkeypatch.setattr(launch, "core_numbers", lambda: {*range(8)})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(cgroup + "\n")
    assert launch.allowed_cores(tmp_path / "own", tmp_path) == (limit or 8)
