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
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import train_gpt as T
from data.run import launch, log
from data.run.state import load_checkpoint
from data.run.machine import all_come
from data.run.program import UserError, error_message
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


def ended(corpus, tmp_path, *args, seconds=30, **options):
    """(stdout, stderr, status, log) of a run of forks."""
    result = finish(start(corpus, f"--log_dir={tmp_path}", *args, **options), seconds)
    return *result, "".join(path.read_text() for path in tmp_path.glob("*.txt"))


def one_line(err, pattern):
    """The only line of ours is this one."""
    ours = "\n".join(re.findall("^error: .*$", err, re.M))
    assert re.fullmatch(f"error: .*{pattern}.*", ours) and 'train_gpt.py", line' not in err, err


@pytest.mark.parametrize("victim, moment", [(0, "^step:3/"), (1, "^rank 0")])
def test_a_killed_process_ends_all(corpus, tmp_path, victim, moment):
    process = start_interpreter(corpus, f"--log_dir={tmp_path}", ENDLESS, torchrun=TWO_RANKS, hook=SAY_PID)
    seen = ready(process, "^rank 0.*\n", "^rank 1.*\n", moment)
    os.kill(pid(seen, victim), signal.SIGKILL)
    out, err, status = finish(process, 25, seen)
    assert status != 0 and out.count("pid ") == 2
    # The other is ended by torchrun, in silence, unless its connection tells it before; then torchrun may take it for
    # the cause.
    errors, told = set(re.findall("^error: .*$", err, re.M)), {
        f"error: process {victim} was ended by signal 9: by hand, or no memory left"}
    assert all(re.search("lost the connection|do not come together", line) for line in errors - told), err
    assert (told <= errors or len(errors) == 1) and 'train_gpt.py", line' not in err, err
    assert "torch/distributed/elastic" not in err, err


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
    (signal.SIGTERM, []), (signal.SIGUSR1, []), (signal.SIGINT, ["error: ended by SIGINT"]), (signal.SIGKILL, None)])
def test_a_signal_to_torchrun_ends_all(corpus, tmp_path, signum, lines):
    """With one line, and the log has all that was done. What the parent ignores, as nohup does, ends nothing."""
    ignored = [signal.SIGHUP] + [signal.SIGINT, signal.SIGQUIT] * (signum == signal.SIGUSR1)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    process = start_interpreter(corpus, f"--log_dir={tmp_path}", ENDLESS, torchrun=TWO_RANKS)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    seen = ready(process, "^step:2/.*\n")
    for number in ignored:
        process.send_signal(number)
    seen = ready(process, "^step:8/.*\n", seen=seen)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signum)
    out, err, status = finish(process, 25, "".join(f"pid {child}\n" for child in children) + seen)
    assert status == (-signum if lines is None else 128 + signum) and out.count("pid ") == 2
    if lines is not None:
        assert err.splitlines() == lines
        log = next(tmp_path.glob("*.txt")).read_text()
        assert set(re.findall("^step:.*$", seen, re.M)) <= set(log.splitlines())
        place = "Ctrl-C" if lines else rf"{signum.name} after step \d+/9002"
        last = f"\nended by {place}; there is no checkpoint: --save_every=100 writes one every 100 steps\n$"
        assert re.search(last, log) and re.search(last, out), (out, log)


def test_a_step_that_does_not_end(monkeypatch):
    """NCCL does not watch the collectives of a CUDA graph, so the host does, with several ranks."""
    event = SimpleNamespace(query=lambda: False)
    with pytest.raises(RuntimeError) as error:
        T.wait_for(event, world=2, limit=0.01)
    assert error_message(error.value).startswith("lost the connection to another process")
    T.wait_for(SimpleNamespace(query=lambda: True), world=2, limit=0)
    event.synchronize = lambda: setattr(event, "query", lambda: True)
    T.wait_for(event, world=1, limit=0)


SIGNALLED = """step, rank = T.Trainer.step, os.environ.get("RANK", "0")
def then_signal(self, loader, plan, *args, **options):
    say(f"rank {rank} takes step {plan.step}")
    if plan.step == 3 and rank == "SENDER":
        os.kill(os.getpid(), 28), os.kill(os.getpid(), 10), time.sleep(0.3)
    return step(self, loader, plan, *args, **options)
T.Trainer.step, main = then_signal, T.main
T.main = lambda argv: [status := main(argv), say(f"rank {rank} has status {status}")][0]"""


@pytest.mark.parametrize("ranks, sender, saves", [(1, "0", "--save_every=2"), (1, "0", "--val_every=1"),
                                                  (2, "1", "--save=true")])
def test_a_signal_ends_a_run_after_a_step(corpus, tmp_path, ranks, sender, saves):
    """On all ranks after the same one; here the signal is for rank 1 alone. Signal 28 has a handler of its own."""
    hook = SIGNALLED.replace("SENDER", sender) + "\nimport signal; signal.signal(28, lambda *_: say('resized'))"
    out, err, status, log = ended(corpus, tmp_path, saves, "--keep=1", ranks=ranks, hook=hook)
    for rank in range(ranks):
        assert max(map(int, re.findall(f"rank {rank} takes step (\\d+)", out))) == 3, out
        assert f"rank {rank} has status 138\n" in out
    advice = "there is no checkpoint: --save_every=100 writes one every 100 steps"
    if "save" in saves:
        path, = tmp_path.glob("*/*.pt")
        assert load_checkpoint(path)["step"] == 4
        advice = f"go on with --resume={os.path.relpath(path)}"
    line = f"\nended by SIGUSR1 after step 4/11; {advice}\n"
    assert line in out and line in log and "resized\n" in out
    assert (status, err) == (138, "") and "final_val_loss" not in out


def test_a_signal_after_the_last_step(corpus, tmp_path):
    """The run goes on to its end, but takes no time for a sample."""
    hook = """sample = T.sample
def then_signal(*args):
    for number, text in enumerate(sample(*args)):
        if number == 5:
            os.kill(os.getpid(), 15), time.sleep(0.3)
        yield text
T.sample = then_signal"""
    out, err, status, _ = ended(corpus, tmp_path, "--save=true", "--sample_tokens=90", "--sample_prompt=the", hook=hook)
    assert (status, err) == (0, "") and 3 <= len(re.search(r"\nsample:\n(.*?)\nfinal_val_loss: ", out, re.S)[1]) < 9
    assert load_checkpoint(next(tmp_path.glob("*/*.pt")))["step"] == 11


@pytest.mark.parametrize("what, saves, message, steps", [
    ("data", "--save=true", "data is gone", [5]), ("data", "--val_every=9", "data is gone", []),
    ("log", "--save=true", "disk is full", [6]), ("one rank", "--save=true", "one is gone", []),
    ("loss", "--save_every=2", "training loss of step 6 is nan", [4]),
    ("weights", "--save_every=6", "largest weight before step 6 is nan", []),
    ("end", "--save_every=2", "validation loss before step 11 is nan", [10]),
    ("update", "--save=true", "lost the connection.*remote process exited", [])])  # half of a step is done
def test_an_error_leaves_the_last_good_state(corpus, tmp_path, fails, monkeypatch, what, saves, message, steps):
    """The screen gets one line, the log of an unforeseen error also the traceback."""
    step, update = T.Trainer.step, T.Trainer.update

    def then_fail(self, loader, plan, *args, **options):
        if plan.step == 5:
            if what in ("data", "one rank"):
                loader.next_batch = Mock(side_effect=UserError(message))
            if what == "one rank":
                self.rt = self.rt._replace(world=2)
                monkeypatch.setattr(T, "all_come", lambda rt, place: all_come(rt, place, 0.1))
            if what == "log":
                self.log.step = Mock(side_effect=UserError(message))
                self.losses.append((4, None, torch.ones(()), 0, 0))  # waits for its line, as on a GPU
        if plan.step == 10 and what == "end":
            monkeypatch.setattr(T, "validate", lambda *args: [torch.nan])
        loss = step(self, loader, plan, *args, **options)
        if plan.step == 5 and what == "weights":
            self.model.embed.data[0, 0] = torch.nan
        return loss * (torch.nan if what == "loss" and plan.step == 5 else 1)
    def fail_first(self, plan, *args):
        if plan.step == 5 and what == "update":
            raise RuntimeError("NCCL error: remote process exited")
        update(self, plan, *args)
    monkeypatch.setattr(T.Trainer, "step", then_fail)
    monkeypatch.setattr(T.Trainer, "update", fail_first)
    fails([*corpus.args, f"--log_dir={tmp_path}", "--keep=1", saves], message)
    assert sorted(int(path.stem[-6:]) for path in tmp_path.glob("*/state_step*.pt")) == steps
    for path in tmp_path.glob("*/*.pt"):
        assert load_checkpoint(path)["loader"]["index"] == steps[0]
    last = (r'\nerror: lost the connection.*\nTraceback .*\n  File "train_gpt.py", line \d+, in step\n.*'
            r"\nRuntimeError: NCCL error: remote process exited\n$")
    assert what != "update" or re.search(last, next(tmp_path.glob("*.txt")).read_text(), re.S)


@pytest.mark.parametrize("text, start", [
    ("NCCL error: remote process exited or there was a network error", "lost the connection"),
    ("NCCL watchdog: CUDA error: an illegal memory access was encountered", None),
    ("NCCL error in: x.cpp:9, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.", None),
    ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", None),
    ("ncclUnhandledCudaError: Last error:\nCuda failure 2 'out of memory'", "out of GPU memory")])
def test_what_is_a_lost_connection(text, start):
    """A fault of a kernel, which NCCL has noticed, is none, and keeps its traceback on the screen."""
    message = error_message(RuntimeError(text))
    assert message is None if start is None else message.startswith(start)


@pytest.mark.parametrize("rank, error", [(0, "RuntimeError"), (1, "RuntimeError"), (1, "T.UserError")])
def test_an_error_of_one_rank_is_the_only_one_told(corpus, tmp_path, rank, error):
    """The other rank, left in a collective, says nothing. The traceback of an unforeseen error is in the log."""
    hook = f"""def stop(*args, **options):
    raise {error}("NCCL watchdog: CUDA error: an illegal memory access")
T.Trainer.step = stop if os.environ["RANK"] == "{rank}" else T.Trainer.step"""
    _, err, status, text = ended(corpus, tmp_path, ranks=2, hook=hook)
    line = "error: " + "rank 1: " * rank + "NCCL watchdog: CUDA error: an illegal memory access"
    if error == "RuntimeError":
        assert re.search(f"\n{line}.*\nTraceback .*, in stop\n", text, re.S)
        assert err.count("Traceback") == 1 and "error: lost" not in err, err
    assert status == 1 and (error == "RuntimeError" or err == f"{line}\n"), err


WATCH = """import os, signal, sys, time
from pathlib import Path
from data.run.launch import die_at_ctrl_c, watch_signals
die_at_ctrl_c()
over = []
stop = watch_signals(lambda number: print("ended by", number, flush=True), lambda: bool(over))
send = lambda number: [os.kill(os.getpid(), number), time.sleep(0.1)]
"""


@pytest.mark.parametrize("code, end", [
    ("send(10)", 138), ("send(2)", 130), ("stop.waits = True; send(2)", 130),
    ("stop.waits = True; [send(number) for number in (24, 15, 15, 10, 1)]; print(stop.number)", "24"),
    ("stop.waits = True; send(15); time.sleep(1); send(15)", 143),
    ("stop.waits = True; over.append(1); send(15)", 143)])
def test_signals_before_steps_between_them_and_twice(code, end):
    done = subprocess.run([sys.executable, "-c", WATCH + code], cwd=ROOT, text=True, capture_output=True)
    found = f"{end}\n" if isinstance(end, str) else f"ended by {end - 128}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0 if isinstance(end, str) else end, found, "")


def test_a_signal_before_torchrun_has_processes(capfd, monkeypatch):
    for running, words in ([Mock(**{"poll.return_value": None})], ""), ([Mock()], "error: ended by SIGTERM before"):
        monkeypatch.setattr(launch.Process, "all", running)
        with nullcontext() if not words else pytest.raises(SystemExit) as end:
            launch.pass_on(signal.SIGTERM, None)
        assert capfd.readouterr().err.startswith(words) and running[0].send_signal.called == (not words)
    assert end.value.code == 143


@pytest.mark.parametrize("impatient", [False, True])
def test_waiting_for_a_process_that_hangs_can_be_ended(corpus, tmp_path, impatient):
    """By a second SIGTERM, in the middle of a collective, or by the timeout; without torchrun."""
    one, other = (start(corpus, ENDLESS, f"--log_dir={tmp_path}", hook=IMPATIENT * impatient, variables=[rank])
                  for rank in rank_variables(2))
    seen = ready(one, "^step:3/")
    try:
        other.send_signal(signal.SIGSTOP)
        last, end = "", time.monotonic() + 10
        while last != (last := Path(f"/proc/{one.pids[0]}/stat").read_text().split()[13]) and time.monotonic() < end:
            time.sleep(0.5)  # until it takes no more time: it waits
        if not impatient:
            one.terminate(), time.sleep(1.2), one.terminate()
        out, err, status = finish(one, 20, seen)
    finally:
        other.kill()
        finish(other)
    if impatient:
        one_line(err, "lost the connection to another process.*Timed out waiting")
    steps = set(re.findall("^step:.*$", out, re.M))
    assert status == (1 if impatient else 143) and ("\nended by SIGTERM; there is no" in out) == (not impatient)
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
    """Triton lets the error through; a quota has another."""
    monkeypatch.setattr(T, "Trainer", Mock(side_effect=error))
    fails([*corpus.args, f"--log_dir={tmp_path}"], "a disk is full.*TRITON_CACHE_DIR.*(/cache/kernel|quota exceeded)")


ROOM = """import resource
header = T.write_header
def limited(log, *args):
    header(log, *args)
    room = os.path.getsize(log.path) + 1200 if log.is_main else 1000
    say(f"room {room}"), resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
T.write_header = limited"""


def test_ranks_with_other_settings_code_or_shards(corpus, tmp_path):
    """As from a second machine. Paths may differ. A prompt may have bytes that are no UTF-8."""
    hook = """sys.argv[-1] += os.environ["RANK"]
if os.environ["RANK"] == "1":
    sys.argv += ["--muon_lr=0.01", "--layer0.dynamic=true", "--train_files=FOLDER/train_1.bin"]
    sources = T.loaded_sources
    T.loaded_sources = lambda: {name: text + "#" * (name == "data/loader.py") for name, text in sources().items()
                                if name != "data/facts.py"}""".replace("FOLDER", str(corpus.folder))
    _, err, status = finish(start(corpus, "--sample_prompt=\udce9", f"--log_dir={tmp_path}/", ranks=2, hook=hook))
    one_line(err, "rank 1 differs from rank 0 in --layer0, --muon_lr, data/facts.py, data/loader.py, train_shards: ")
    assert status == 1


def test_a_disk_that_fills_during_the_run(corpus, tmp_path):
    """Here a limit on the size of files. It stops at once, and what fits is in the log."""
    out, err, status, text = ended(corpus, tmp_path, ENDLESS, seconds=60, ranks=2, hook=ROOM)
    one_line(err, f"cannot write {tmp_path}/run_.*make room, or choose another --log_dir .File too large")
    last = int(re.findall(r"^step:(\d+)/", out, re.M)[-1])
    assert status == 1 and f"room {next(tmp_path.glob('*.txt')).stat().st_size}\n" in out
    assert re.search("^step:3/.* val_loss:", text, re.M) and last < 100, last


def test_no_home_and_no_name(corpus, tmp_path):
    """As in a container: nothing in the environment but a home that is no folder."""
    env = {"PATH": os.environ["PATH"], "HOME": "/dev/null", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "train_gpt.py", *corpus.args, f"--log_dir={tmp_path}", "--scheduled_steps=3",
               "--val_every=9"]
    result = subprocess.run(command, env=env, text=True, capture_output=True)
    assert (result.returncode, result.stderr) == (0, "") and "\nfinal_val_loss: " in result.stdout
