"""The CPU cores of a run, and what other programs take of them.

OpenMP reads its variables when PyTorch is imported, so this module needs no package.
"""

import math
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

CHOICES = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"  # variables that say how threads wait


def core_numbers() -> set[int]:
    """The cores on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def quota(group) -> float:
    """The limit of a control group, in cores; inf without a limit. group: its folder, of version 2 or 1."""
    for names in ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]:
        with suppress(OSError, ValueError):
            most, period = map(int, " ".join((group / name).read_text(encoding="utf-8") for name in names).split())
            if most > 0:
                return most / period
    return math.inf


def allowed_cores(own=Path("/proc/self/cgroup"), root=Path("/sys/fs/cgroup")) -> float:
    """How many cores this process may use: those of its affinity, or fewer by the quota of a container."""
    groups = {root, root / "cpu"}  # a container may not see the rest of its path
    with suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if {"", "cpu"} & {*controllers.split(",")}:
                place = root / ("cpu" if controllers else "") / path.lstrip("/")
                groups |= {place, *place.parents}
    return min(len(core_numbers()), *map(quota, groups))


def busy_seconds(stat=Path("/proc/stat")) -> float:
    """Seconds for which programs have used the cores of this process since the machine started, summed over cores.

    Raises OSError on systems without /proc/stat.
    """
    cores, ticks = core_numbers(), 0
    for core, numbers in re.findall(r"^cpu(\d+) (.*)", stat.read_text(encoding="utf-8"), re.M):
        user, nice, system, _, _, *others = map(int, numbers.split()[:8])  # without idle time and waiting for disks
        ticks += (user + nice + system + sum(others)) * (int(core) in cores)
    return ticks / os.sysconf("SC_CLK_TCK")


class FreeCores:
    """The cores that other programs leave to this one, from the making of this object on."""

    def __init__(self):
        self.start = self.now()

    def now(self) -> tuple[float, float] | None:
        """(time, seconds that other programs have used); None on systems without /proc/stat."""
        with suppress(OSError):
            return time.perf_counter(), busy_seconds() - time.process_time()

    def count(self) -> float:
        """Their mean number. Without /proc/stat, the load of the last minute stands for the other programs."""
        if self.start and (now := self.now()):
            used = (now[1] - self.start[1]) / (now[0] - self.start[0])
        else:
            used = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return max(0.0, min(allowed_cores(), len(core_numbers()) - max(0.0, used)))

    def line(self, threads) -> str:
        """What to say when the steps of a CPU run with so many threads are far slower than they can be, or ""."""
        free, passive = self.count(), os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
        if are_scarce(free, threads):
            return f"{shown(free, threads)}, so the steps are slow" + ("" if passive else (
                ": with OMP_WAIT_POLICY=passive in the environment they may be ten times as fast"))
        if passive and 1 < threads < free + 0.2:
            return f"{shown(free, threads)}: without OMP_WAIT_POLICY=passive the steps may be twice as fast"
        return ""


def are_scarce(free, threads) -> bool:
    """Whether threads that wait for each other have too few free cores."""
    return threads > 1 and threads > free + 0.5


def shown(free, threads) -> str:
    return f"other programs, or a limit, leave {free:.1f} cores for {threads} threads"


def choose_waiting(argv, processes=1, seconds=0.1):
    """Before PyTorch is imported: the threads of a CPU run are to wait asleep if other programs use the cores.

    Threads that wait busily are twice as fast on a quiet machine, and twenty times as slow on a busy one. What the user
    has set stays. processes: the number of processes that share the cores. The launcher chooses for its processes.
    """
    on_gpu = os.path.exists("/dev/nvidia0") and not any("cpu" in argument for argument in argv)
    if on_gpu or "RANK" in os.environ or {"--help", "-h"} & {*argv}:
        return
    allowed = max(1, int(allowed_cores()) // processes)
    if allowed_cores() < len(core_numbers()):  # PyTorch does not know the limit
        os.environ.setdefault("OMP_NUM_THREADS", str(allowed))
    threads = re.match(r"[1-9]\d*", os.environ.get("OMP_NUM_THREADS", ""))
    threads = int(threads[0]) if threads else allowed
    if threads == 1 or any(name in os.environ for name in CHOICES):
        return
    cores = FreeCores()
    time.sleep(seconds)
    if are_scarce(free := cores.count(), threads * processes):
        os.environ["OMP_WAIT_POLICY"] = "passive"
        print(f"{shown(free, threads * processes)}: they wait asleep (OMP_WAIT_POLICY=passive)",
              file=sys.stderr, flush=True)
