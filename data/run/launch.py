"""The processes of a run: torchrun, which passes signals on and ends with the status that shells give (128 + the number
of the signal); how a signal ends a run; and the cores that other programs leave to it.

    python -m data.run.launch --standalone --nproc_per_node=8 train_gpt.py --key=value ...

This module needs no package, so programs use it before slow imports. OpenMP reads its variables when PyTorch is
imported. A signal that the starting program has set to be ignored, as nohup does, stays ignored.
"""

import ctypes
import importlib.util
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

# Schedulers send them; Windows has only the first.
STOPPING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
            if hasattr(signal, name)]


def are_default(numbers) -> list[int]:
    """Those of the signals that nobody has a handler for, nor ignores."""
    return [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]


def die_at_ctrl_c():
    """From now on, Ctrl-C ends this process at once and without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def die_with_torchrun():
    """Let the kernel end this process when torchrun is killed, which then cannot do so itself. Only on Linux."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Stopped(Exception):
    """A signal has ended the run after a step; status: the exit status that shells give, 128 + its number."""

    def __init__(self, number):
        self.status = 128 + number


class Stop:
    """number: the first of STOPPING that has come, or 0; the run is then to end after its step. waits: whether the run
    looks at it; before that, a signal ends the process at once. say, is_over: see `watch_signals`."""

    number, waits = 0, False

    def __init__(self, say=print, is_over=lambda: False):
        self.say, self.is_over = say, is_over


current = None  # the Stop of the run of this process, once signals are watched


def watch_signals(say, is_over=lambda: False) -> Stop:
    """From now on, signals end the run, even while the main thread waits for another process. Returns a Stop, by which
    the run ends after its step. It ends at once, after `say(number)`, at Ctrl-C, at a second SIGTERM, when `is_over()`,
    and before the run looks at the Stop. The same signal within a second is no second one: a scheduler may send it to
    torchrun, which passes it on, and to this process. Nothing changes unless `die_at_ctrl_c` came before. The next run
    of a process watches anew."""
    global current
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler or sys.platform == "win32":
        return Stop()
    is_watching, current, first = current is not None, Stop(say, is_over), {}
    if is_watching:
        return current
    numbers = are_default((signal.SIGINT, *STOPPING))
    read, write = os.pipe()
    os.set_blocking(write, False)

    def is_patient(number):
        again = time.monotonic() - first.setdefault(number, time.monotonic()) > 1
        return (current.waits and number != signal.SIGINT and not (again and number == signal.SIGTERM)
                and not current.is_over())

    def wait():
        while (number := os.read(read, 1)[0]) not in numbers or is_patient(number):
            if number in numbers:  # else it has a handler of its own
                current.number = current.number or number
        speaker = threading.Thread(target=current.say, args=[number], daemon=True)
        speaker.start()
        speaker.join(2)  # it hangs if the main thread waits for a full pipe
        os._exit(128 + number)
    threading.Thread(target=wait, daemon=True).start()
    # Python writes the number of a signal to the pipe at once, even while the main thread is inside a call.
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # the run goes on, also in libraries that do not try a call again
    return current


def gpu_count() -> int:
    """How many GPUs CUDA offers to this process; 0 for a PyTorch that is built for the CPU. PyTorch itself would take
    seconds to import."""
    folder, count = importlib.util.find_spec("torch").submodule_search_locations[0], ctypes.c_int()
    if not re.search("^cuda\\b.*=.*'", Path(folder, "version.py").read_text(encoding="utf-8"), re.M):
        return 0
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return 0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) else count.value


# ---- The cores -------------------------------------------------------------------------------------------------------

CHOICES = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"  # variables that say how threads wait


def core_numbers() -> set[int]:
    """The cores on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def allowed_cores(own=Path("/proc/self/cgroup"), root=Path("/sys/fs/cgroup")) -> float:
    """How many cores this process may use: those of its affinity, or fewer by the quota of a container, whose control
    groups are of version 1 or 2."""
    groups, least = {root, root / "cpu"}, float(len(core_numbers()))  # a container may not see the rest of its path
    with suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if {"", "cpu"} & {*controllers.split(",")}:
                place = root / ("cpu" if controllers else "") / path.lstrip("/")
                groups |= {place, *place.parents}
    for group, names in product(groups, (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])):
        with suppress(OSError, ValueError):
            most, period = map(int, " ".join((group / name).read_text(encoding="utf-8") for name in names).split())
            least = min(least, most / period) if most > 0 else least
    return least


def busy_seconds(stat=Path("/proc/stat")) -> float:
    """Seconds for which programs have used the cores of this process since the machine started, summed over cores.
    Raises OSError on systems without /proc/stat."""
    cores, ticks = core_numbers(), 0
    for core, numbers in re.findall(r"^cpu(\d+) (.*)", stat.read_text(encoding="utf-8"), re.M):
        user, nice, system, _, _, *others = map(int, numbers.split()[:8])  # without idle time and waiting for disks
        ticks += (user + nice + system + sum(others)) * (int(core) in cores)
    return ticks / os.sysconf("SC_CLK_TCK")


def cores_of_others(seconds=0.1) -> float:
    """How many cores other programs use in the next `seconds`; on systems without /proc/stat, the load of the last
    minute."""
    try:
        began, before = time.perf_counter(), busy_seconds() - time.process_time()
        time.sleep(seconds)
        return (busy_seconds() - time.process_time() - before) / (time.perf_counter() - began)
    except OSError:
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def choose_waiting(argv, processes=1):
    """Makes the threads of a CPU run wait asleep if other programs use the cores. Threads that wait busily are twice as
    fast on a quiet machine, and twenty times as slow on a busy one. What the user has set stays. Call this before
    PyTorch is imported. processes: how many share the cores; the launcher chooses for its processes."""
    on_gpu = os.path.exists("/dev/nvidia0") and not any("cpu" in argument for argument in argv)
    if on_gpu or "RANK" in os.environ or {"--help", "-h"} & {*argv}:
        return
    limit, cores = allowed_cores(), len(core_numbers())
    allowed = max(1, int(limit) // processes)
    if limit < cores:  # PyTorch does not know the limit
        os.environ.setdefault("OMP_NUM_THREADS", str(allowed))
    threads = re.match(r"[1-9]\d*", os.environ.get("OMP_NUM_THREADS", ""))
    threads = int(threads[0]) if threads else allowed
    if threads == 1 or any(name in os.environ for name in CHOICES):
        return
    free, threads = max(0.0, min(limit, cores - cores_of_others())), threads * processes
    if threads > free + 0.5:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        print(f"other programs, or a limit, leave {free:.1f} cores for {threads} threads: they wait asleep"
              " (OMP_WAIT_POLICY=passive)", file=sys.stderr, flush=True)


# ---- torchrun --------------------------------------------------------------------------------------------------------

class Process(subprocess.Popen):
    """Every process that torchrun starts is in `all`."""

    all = []

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.all.append(self)


def pass_on(number, frame):
    """A run ends after its step, which takes as long as it takes; torchrun would kill it after 30 s."""
    running = [process for process in Process.all if process.poll() is None]
    for process in running:
        process.send_signal(number)
    if not running:
        print(f"error: ended by {signal.Signals(number).name} before the start", file=sys.stderr)
        sys.exit(128 + number)


def stay_here():
    """Keeps torchrun off the network when all processes are on one machine. For its reports, it would ask for the name
    of this machine, and it would try for two minutes to reach its own process."""
    socket.getfqdn = lambda name="": "localhost"
    try:
        with socket.create_server(("localhost", 0)) as server:
            socket.create_connection(server.getsockname(), 5).close()
    except OSError as error:
        sys.exit(f"error: processes cannot reach each other on this machine ({error.strerror or error}): start one"
                 " alone (NPROC=1), or start the loopback device (ip link set lo up)")


if __name__ == "__main__":
    die_at_ctrl_c()  # until torchrun handles signals; its import takes seconds
    handled = are_default((signal.SIGINT, signal.SIGQUIT)) or [signal.SIGVTALRM]  # nobody sends it; torchrun wants one
    for number in are_default(STOPPING):
        signal.signal(number, pass_on)
    subprocess.Popen = Process
    processes = re.search(r"--nproc_per_node=(\d+)", " ".join(sys.argv))
    choose_waiting(sys.argv, int(processes[1]) if processes else 1)
    if "--standalone" in sys.argv:
        stay_here()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main
    logging.disable(logging.ERROR)  # forty lines about a failure of which the trainer, or a line below, has told
    try:
        names = ",".join(signal.Signals(number).name for number in handled)
        main([f"--signals_to_handle={names}", *sys.argv[1:]])
    except SignalException as error:
        print(f"error: ended by {signal.Signals(error.sigval).name}", file=sys.stderr)
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code < 0:  # it has told nothing
            reasons = {9: ": by hand, or no memory left", 6: ": after a collective timeout, because another one hangs"}
            print(f"error: process {rank} was ended by signal {-code}{reasons.get(-code, '')}", file=sys.stderr)
        sys.exit(code if code > 0 else 128 - code)
