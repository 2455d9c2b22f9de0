"""Many runs in one process: the logs are those that processes of their own would have written."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

import train_gpt as T
from data.run.program import UserError
from forks import Forks
from test_guard import ALSO, KNOBS, make_corpus, other_values
from test_run import ENV, HOOKED, NO_MEMORY, ROOT, SHORT, corpus, finish  # noqa: F401 (corpus is a fixture)


class Server:
    """A train_gpt.py that does the runs it gets."""

    def __init__(self, hook=""):
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-c", HOOKED, hook, "-"], env=ENV, cwd=ROOT, text=True,
                                            stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def do(self, argv) -> bool:
        """Whether the run has ended well."""
        self.socket.sendall(json.dumps(argv).encode() + b"\n")
        return self.socket.recv(1) == b"\n"

    def end(self) -> tuple[str, int]:
        """(what it has printed, exit status)"""
        self.socket.close()
        return self.process.communicate(timeout=100)[0], self.process.returncode


def sets_of_other_values(corpus, folder):
    """Arguments of eight runs, in which every learned knob has another value. The shortest that accepts a knob gets
    it."""
    base, sets = [*KNOBS, *corpus], [[] for _ in range(8)]
    for key, text in other_values(T.parse_config(base)):
        words = [f"--{key}={text.format(folder=folder)}", *ALSO.get(key, [])]
        for taken in sorted(sets, key=len):
            with suppress(UserError):
                T.parse_config([*base, *taken, *words])
                taken += words
                break
    return sets


def content(log):
    """The text of a log without times and the names of its files."""
    text = re.sub(r"train_time:\S+ step_avg:\S+", "", log.read_text())
    text = re.sub(r"^(startup, seconds|plot|\w+_seconds): .*$", "", text, flags=re.M)
    return re.sub(r"[-0-9a-f]{36}", "", text)


def test_logs_are_those_of_own_processes(tmp_path):
    """After runs in which every learned knob had another value, of a picture and of a profile, whose modules a log must
    not name; the same run again is equal, too."""
    corpus = make_corpus(tmp_path, bos=512)
    sets = sets_of_other_values(corpus, tmp_path)
    assert sum(map(len, sets)) > 80

    def arguments(place, more):
        return [*KNOBS, *corpus, *more, f"--log_dir={tmp_path}/{place}/logs"]

    for i, more in enumerate([*sets, []]):
        assert finish(Forks(HOOKED, ["", *arguments(f"own{i}", more)]))[2] == 0
    server = Server()
    for i, more in enumerate([*sets, ["--plot=true", "--profile=1:2"], []]):
        assert server.do(arguments(f"here{i}", more)), server.end()
    assert server.end()[1] == 0
    own, here = ([content(*tmp_path.glob(f"{place}{i}/logs/*.txt")) for i in range(len(sets) + 1)] for place in
                 ("own", "here"))
    here[-1] = content(*tmp_path.glob(f"here{len(sets) + 1}/logs/*.txt"))
    assert own == here and len({*own}) == len(own)


def test_a_run_that_fails_ends_the_process(tmp_path):
    arguments = [*KNOBS, *make_corpus(tmp_path, bos=512), f"--log_dir={tmp_path}"]
    server = Server()
    assert server.do(arguments) and not server.do([*arguments, "--muon_lr=x"])
    out, status = server.end()
    assert status == 1 and re.search("\nerror: --muon_lr=x: .*\n$", out)


def test_a_run_without_memory_continues_as_a_process_of_its_own(corpus, tmp_path):
    """With its own arguments."""
    hook = NO_MEMORY.replace("ENOUGH", "2").replace("MESSAGE", "T.torch.OutOfMemoryError('Tried 2 GiB')")
    server, arguments = Server(hook), [*corpus.args, *SHORT, f"--log_dir={tmp_path}"]
    assert server.do(arguments) and not server.do([*arguments, "--micro_batches=0"])
    out, status = server.end()
    assert status == 0 and "starting again with --micro_batches=2" in out and out.count("final_val_loss") == 2


def test_the_word_of_repeat_is_not_for_people():
    done = subprocess.run([sys.executable, "train_gpt.py", "-"], env=ENV, cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
                          capture_output=True)
    assert done.returncode == 1 and re.fullmatch("error: - is for .*--repeat.*\n", done.stderr)


@pytest.mark.parametrize("number, within", [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGTERM, False)])
def test_signals(corpus, tmp_path, number, within):
    """In the second run, whose log says it, or between two runs, of which no log says it."""
    hook = """from data.run.launch import die_at_ctrl_c
die_at_ctrl_c()
step, logs = T.Trainer.step, []
def slow(self, *rest, **eager):
    if self.log not in logs:
        logs.append(self.log)
    if len(logs) == 2:
        time.sleep(1)
    return step(self, *rest, **eager)
T.Trainer.step = slow"""
    server, arguments = Server(hook), [*corpus.args, *SHORT, f"--log_dir={tmp_path}"]
    assert server.do(arguments)
    if within:
        server.socket.sendall(json.dumps(arguments).encode() + b"\n")
        lines = (line for line in server.process.stdout if line.startswith("step:1/4 train_time"))
        next(lines), next(lines)
    server.process.send_signal(number)
    assert server.socket.recv(1) == b"" and server.end()[1] == 128 + number
    logs = sorted(tmp_path.glob("*.txt"), key=os.path.getmtime)
    ends = [re.findall(r"^ended by .*$", log.read_text(), re.M) for log in logs]
    assert [*map(len, ends)] == [0, 1] if within else ends == [[]]
