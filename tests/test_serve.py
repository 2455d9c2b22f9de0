"""Many runs in one process: the logs are those that processes of their own would have written."""

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

import train_gpt as T
from data.run.program import UserError
from forks import Forks
from test_guard import ALSO, KNOBS, make_corpus, other_values
from test_run import ENV, HOOKED, ROOT, finish


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
