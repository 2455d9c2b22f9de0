"""Processes that start in milliseconds, because torch and the trainer are imported once.

A server imports them and forks for every start. The server is an interpreter of its own: the process of the tests has
imported test modules, which would be in the log of a run, has asked for Triton's interpreter, and may have started
threads.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path


ENVIRONMENT = dict(os.environ)  # before any test has changed it, as importing a profiler does


# ---- The server ------------------------------------------------------------------------------------------------------
def serve(requests):
    """Each message on the socket is a request, with descriptors for stdout, stderr and the report; ends at EOF."""
    import train_gpt  # noqa: F401
    gc.collect()
    gc.freeze()  # a run collects garbage in every pause: not among what was imported
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes supervisors that have ended
    while (message := socket.recv_fds(requests, 2**20, 3))[0]:
        if os.fork() == 0:
            requests.close()
            supervise(json.loads(message[0]), *message[1])
        for file in message[1]:
            os.close(file)


def supervise(request, out, err, report):
    """One process for each environment of the request; when one fails, the others get SIGTERM, as torchrun does.

    The report is a line with the process ids, and at the end the first status that is not 0 (-N: ended by signal N).
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    running, status = [], 0
    for env in request["environments"]:
        pid = os.fork()
        if pid == 0:
            os.dup2(out, 1), os.dup2(err, 2)
            for file in (out, err, report):
                os.close(file)
            execute(request["code"], request["argv"], env)
        running.append(pid)
    os.close(out)  # who reads stdout waits for its end
    os.write(report, f"{json.dumps(running)}\n".encode())
    while running:
        pid, code = os.wait()
        running.remove(pid)
        if not status and (status := os.waitstatus_to_exitcode(code)):
            for other in running:
                os.kill(other, signal.SIGTERM)
    os.write(report, b"%d" % status)
    os._exit(0)


def execute(code, argv, env):
    """Like `python -c code argv`, with these variables added to the environment."""
    os.environ.update(env)
    sys.argv, status = ["-c", *argv], 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


# ---- The client ------------------------------------------------------------------------------------------------------
@cache
def server():
    """(socket for requests, process): the server of this process, which ends with it."""
    root = Path(__file__).resolve().parents[1]
    env = {key: value for key, value in ENVIRONMENT.items() if key != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the borders of messages
    with theirs:  # as text: a file of the repository would be among the sources in the log of a run
        command = [sys.executable, "-c", Path(__file__).read_text(), str(theirs.fileno())]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def rank_variables(ranks, nodes=1) -> list[dict]:
    """What torchrun puts into the environment of each rank; all nodes are this machine."""
    per_node, common = ranks // nodes, {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    variables = [common | {"RANK": rank, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
                 for rank in range(ranks)]
    return [{key: str(value) for key, value in rank.items()} for rank in variables]


class Forks:
    """Processes that execute the same code, one for each environment. The interface is that of one Popen.

    They share stdout, a pipe, and stderr, a file. They have what torchrun gives its processes: a folder each, side by
    side.
    """

    def __init__(self, code, argv, environments=({},)):
        self.folder = tempfile.TemporaryDirectory()
        self.errors = Path(self.folder.name) / "stderr"
        environments = [{"TORCHELASTIC_ERROR_FILE": f"{self.folder.name}/{i}/error.json"} | env
                        for i, env in enumerate(environments)]
        request = {"code": code, "argv": list(map(str, argv)), "environments": environments}
        (stdout, out), (report, reports) = os.pipe(), os.pipe()
        with open(self.errors, "ab") as err, open(out, "wb"), open(reports, "wb"):
            socket.send_fds(server()[0], [json.dumps(request).encode()], [out, err.fileno(), reports])
        self.stdout, self.report, self.returncode = open(stdout), open(report), None
        self.pids = json.loads(self.report.readline())

    def communicate(self, timeout=None):
        """(stdout, stderr) at the end of all processes; after `timeout` seconds they are killed: TimeoutExpired."""
        timer = threading.Timer(timeout or 1000, self.kill)
        timer.start()
        with self.folder, self.stdout, self.report:
            out, err, status = self.stdout.read(), self.errors.read_text(), self.report.read()
        in_time = timer.is_alive()
        timer.cancel()
        self.returncode = int(status)
        if not in_time:
            raise subprocess.TimeoutExpired("forks", timeout, out, err)
        return out, err

    def send_signal(self, number):
        for pid in self.pids if self.returncode is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
