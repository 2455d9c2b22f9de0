"""What can go wrong around a run: killed and hanging processes, a full disk, no home, addresses and ports. Each ends
with one line, and no process is left. Where torchrun or the interpreter takes part they are real; other runs are forks
(forks.py)."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

import train_gpt as T
from data.run import log
from data.run.errors import error_message
from data.run.machine import Runtime
from forks import free_port, rank_variables
from test_run import ROOT, VAL_BATCH, corpus, fails, finish, ready, start, start_interpreter  # noqa: F401 (fixtures)

SAY_PID = 'say(f"pid {os.getpid()}\\nrank {os.environ[\'RANK\']} is {os.getpid()}")'
ENDLESS = "--scheduled_steps=9000"
TWO_RANKS = ["--standalone", "--nproc_per_node=2"]
IMPATIENT = """
from datetime import timedelta
init = T.dist.init_process_group
T.dist.init_process_group = lambda *args, **options: init(*args, **options | {"timeout": timedelta(seconds=3)})"""


def pid(seen, rank):
    return int(re.search(rf"^rank {rank} is (\d+)", seen, re.M)[1])


def one_line(err, pattern):
    """The only line of ours is this one."""
    ours = "\n".join(re.findall("^error: .*$", err, re.M))
    assert re.fullmatch(f"error: .*{pattern}.*", ours) and 'train_gpt.py", line' not in err, err


def as_run_sh_shows(err):
    program = re.search(r"^errors='(.*?)'$", (ROOT / "run.sh").read_text(), re.M | re.S)[1]
    return subprocess.run(["awk", program], input=err, text=True, capture_output=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("victim, moment", [(0, "^step:3/"), (1, "^rank 0")])
def test_a_killed_process_ends_all(corpus, tmp_path, victim, moment):
    process = start_interpreter(corpus, f"--log_dir={tmp_path}", ENDLESS, torchrun=TWO_RANKS, hook=SAY_PID)
    seen = ready(process, "^rank 0.*\n", "^rank 1.*\n", moment)
    os.kill(pid(seen, victim), signal.SIGKILL)
    out, err, status = finish(process, 25, seen)
    assert status != 0 and out.count("pid ") == 2
    # The other is ended by torchrun, in silence, unless its connection tells it before; then torchrun may take it for
    # the cause.
    errors = re.findall("^error: .*$", err, re.M)
    assert all(re.search("lost the connection|do not come together", line) for line in errors), err
    assert 'train_gpt.py", line' not in err, err
    # gloo may have something to say as well
    told = [line for line in as_run_sh_shows(err) if line.startswith("run.sh: ")]
    wanted = [f"run.sh: process {victim} was ended by signal 9: by hand, or no memory left"]
    assert told == wanted or told == [] and len(errors) == 1, err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_node(corpus, tmp_path, victim):
    """Without torchrun, which on another node knows nothing of it."""
    nodes = [start(corpus, f"--log_dir={tmp_path}", ENDLESS, variables=[node]) for node in rank_variables(2, nodes=2)]
    seen = ready(nodes[0], "^step:3/")
    nodes[victim].kill()
    ended = [finish(node, 25, text) for node, text in zip(nodes, (seen, ""))]
    assert [status for _, _, status in ended] == ([-signal.SIGKILL, 1] if victim == 0 else [1, -signal.SIGKILL])
    one_line(ended[1 - victim][1], "lost the connection to another process")
    assert ended[victim][1] == ""


@pytest.mark.parametrize("signum, lines", [
    (signal.SIGTERM, ["run.sh: ended by signal 15, from outside"]),
    (signal.SIGINT, ["run.sh: ended by signal 2: Ctrl-C"]), (signal.SIGKILL, None)])
def test_a_signal_to_torchrun_ends_all(corpus, tmp_path, signum, lines):
    """With one line, and the log has all that was done. Nobody can catch SIGKILL, but then no process survives."""
    process = start_interpreter(corpus, f"--log_dir={tmp_path}", ENDLESS, torchrun=TWO_RANKS)
    seen = ready(process, "^step:2/.*\n")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signum)
    out, err, status = finish(process, 25, "".join(f"pid {child}\n" for child in children) + seen)
    assert status == (128 + signum if lines else -signum) and out.count("pid ") == 2
    assert ("ended by Ctrl-C; there is no checkpoint" in out) == (signum == signal.SIGINT)
    if lines:
        assert as_run_sh_shows(err) == lines and 'train_gpt.py", line' not in err, err
        log = next(tmp_path.glob("*.txt")).read_text()
        assert set(re.findall("^step:.*$", seen, re.M)) <= set(log.splitlines())


def test_a_signal_as_each_python_spells_it():
    """3.10 by its name; test_a_signal_to_torchrun_ends_all has the spelling of this Python."""
    err = "W1121 20:00:00.1 9 torch/distributed/elastic/agent/server/api.py:7] Received {} death signal\nTraceback\n"
    assert as_run_sh_shows(err.format("Signals.SIGINT")) == ["run.sh: ended by signal SIGINT: Ctrl-C"]
    assert as_run_sh_shows(err.format("15")) == ["run.sh: ended by signal 15, from outside"]


def test_a_process_that_hangs_on_gpus():
    """One line in place of the stack traces of NCCL, whose thread ends the process that waits."""
    nccl = "[rank0]:[E1127 15:33:30.858602164 ProcessGroupNCCL.cpp:{}] [Rank 0] {}\n"
    err = (nccl.format(1914, "Received a dump signal due to a collective timeout from this local rank and we will")
           + nccl.format(689, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=742, OpType=ALLREDUCE)")
           + "frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout\nterminate called\n"
           + "E1127 15:34:31.1 9 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: -6) local_rank"
           + ": 0 (pid: 17934) of binary: python3\n")
    assert as_run_sh_shows("warning: first\n" + err) == [
        "warning: first", "run.sh: a process hangs: the others have waited for it until their time was over",
        "run.sh: process 0 was ended by signal 6"]


def test_a_step_that_does_not_end():
    """NCCL does not watch the collectives of a CUDA graph, so the host does, with several ranks."""
    event = SimpleNamespace(query=lambda: False)
    with pytest.raises(RuntimeError) as error:
        T.wait_for(event, world=2, limit=0.01)
    assert error_message(error.value).startswith("lost the connection to another process")
    T.wait_for(SimpleNamespace(query=lambda: True), world=2, limit=0)
    event.synchronize = lambda: setattr(event, "query", lambda: True)
    T.wait_for(event, world=1, limit=0)


def test_waiting_for_all_work_of_a_gpu_has_a_limit(monkeypatch):
    calls = Mock()
    monkeypatch.setattr(T, "wait_for", calls.wait_for)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: "event"))
    monkeypatch.setattr(torch.cuda, "synchronize", calls.synchronize)
    T.Trainer.synchronize(SimpleNamespace(rt=Runtime(0, 2, torch.device("cuda"))))
    assert calls.mock_calls == [call.wait_for("event", 2), call.synchronize()]


@pytest.mark.parametrize("impatient", [False, True])
def test_waiting_for_a_process_that_hangs_can_be_ended(corpus, tmp_path, impatient):
    """By SIGTERM at once, although the main thread waits in the collective; by the timeout in any case. Without
    torchrun, as Slurm starts processes."""
    one, other = (start(corpus, ENDLESS, f"--log_dir={tmp_path}", hook=IMPATIENT * impatient, variables=[rank])
                  for rank in rank_variables(2))
    seen = ready(one, "^step:3/")
    try:
        other.send_signal(signal.SIGSTOP)
        last, end = "", time.monotonic() + 10
        while last != (last := Path(f"/proc/{one.pids[0]}/stat").read_text().split()[13]) and time.monotonic() < end:
            time.sleep(0.5)  # until it takes no more time: it waits
        if not impatient:
            one.terminate()
        out, err, status = finish(one, 20, seen)
    finally:
        other.kill()
        finish(other)
    if impatient:
        one_line(err, "lost the connection to another process.*Timed out waiting")
    steps = set(re.findall("^step:.*$", out, re.M))
    assert status == (1 if impatient else -signal.SIGTERM)
    assert steps <= set(next(tmp_path.glob("*.txt")).read_text().splitlines())


ADDRESS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
PLACES = {  # environment -> what the message says; a port that is missing here is one that is taken
    "WORLD_SIZE=two": "WORLD_SIZE=two.*torchrun", "RANK=2": "RANK=2 WORLD_SIZE=2.*torchrun",
    "": "2 processes do not come together, .*MASTER_PORT=[0-9]+ .*address already in use",
    "MASTER_PORT=None": "MASTER_PORT expected", "MASTER_PORT=70000": "MASTER_PORT=70000.*65535",
    "MASTER_ADDR=nowhere": "MASTER_ADDR=nowhere .*not known", "MASTER_PORT=free": "1/2 clients joined"}


@pytest.mark.parametrize("variable", PLACES)
def test_processes_that_cannot_meet(corpus, tmp_path, fails, monkeypatch, variable):
    resolve, init = socket.getaddrinfo, T.dist.init_process_group

    def resolved(name, port):
        if name == "nowhere":  # the resolver of this machine may take its time
            raise socket.gaierror(-2, "Name or service not known")
        return resolve(name, port)
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    short = {"timeout": timedelta(seconds=1)}
    monkeypatch.setattr(T.dist, "init_process_group", lambda *args, **options: init(*args, **options | short))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        key, _, value = variable.partition("=")
        env = ADDRESS | {"MASTER_PORT": str(taken.getsockname()[1])} | ({key: value} if key else {})
        for key, value in env.items():
            monkeypatch.setenv(key, str(free_port()) if value == "free" else value)
            if value == "None":
                monkeypatch.delenv(key)
        fails([*corpus.args, f"--log_dir={tmp_path}"], PLACES[variable])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_full_from_the_start(corpus, tmp_path, fails, monkeypatch):
    monkeypatch.setattr(log.uuid, "uuid4", lambda: "full")
    (tmp_path / "run_full.txt").symlink_to("/dev/full")
    fails([*corpus.args, f"--log_dir={tmp_path}", f"--val_tokens={VAL_BATCH}"],
          "cannot write .*run_full.txt.*--log_dir .No space left")


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device", "/cache/kernel"), RuntimeError("OSError: [Errno 122] Disk quota exceeded")])
def test_a_disk_without_room_for_compiled_kernels(corpus, tmp_path, fails, monkeypatch, error):
    """Triton lets the error through, PyTorch's compiler puts it into its own."""
    monkeypatch.setattr(T, "Trainer", Mock(side_effect=error))
    fails([*corpus.args, f"--log_dir={tmp_path}"], "a disk is full.*TRITON_CACHE_DIR.*(/cache/kernel|quota exceeded)")


ROOM = """import resource
header = T.write_header
def limited(log, *args):
    header(log, *args)
    room = os.path.getsize(log.path) + 1200 if log.is_main else 1000
    say(f"room {room}"), resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
T.write_header = limited"""


def test_ranks_with_other_settings_or_code(corpus, tmp_path):
    """As when somebody starts a second machine with another command. Paths may differ. A prompt may have bytes that are
    no UTF-8."""
    hook = """sys.argv[-1] += os.environ["RANK"]
if os.environ["RANK"] == "1":
    sys.argv += ["--muon_lr=0.01", "--layer0.dynamic=true"]
    sources = T.loaded_sources
    T.loaded_sources = lambda: {name: text + "#" * (name == "data/loader.py") for name, text in sources().items()
                                if name != "data/facts.py"}"""
    _, err, status = finish(start(corpus, "--sample_prompt=\udce9", f"--log_dir={tmp_path}/", ranks=2, hook=hook))
    one_line(err, "rank 1 differs from rank 0 in --layer0, --muon_lr, data/facts.py, data/loader.py: start all")
    assert status == 1


def test_a_disk_that_fills_during_the_run(corpus, tmp_path):
    """Here a limit on the size of files. It stops at once, and what fits is in the log."""
    out, err, status = finish(start(corpus, f"--log_dir={tmp_path}", ENDLESS, ranks=2, hook=ROOM), 60)
    one_line(err, f"cannot write {tmp_path}/run_.*make room, or choose another --log_dir .File too large")
    log, last = next(tmp_path.glob("*.txt")), int(re.findall(r"^step:(\d+)/", out, re.M)[-1])
    assert status == 1 and f"room {log.stat().st_size}\n" in out
    assert re.search("^step:3/.* val_loss:", log.read_text(), re.M) and last < 100, last


def test_no_home_and_no_name(corpus, tmp_path):
    """As in a container: nothing in the environment but a home that is no folder."""
    env = {"PATH": os.environ["PATH"], "HOME": "/dev/null", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "train_gpt.py", *corpus.args, f"--log_dir={tmp_path}", "--scheduled_steps=3",
               "--val_every=9"]
    result = subprocess.run(command, env=env, text=True, capture_output=True)
    assert (result.returncode, result.stderr) == (0, "") and "\nfinal_val_loss: " in result.stdout
