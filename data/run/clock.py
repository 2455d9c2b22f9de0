"""How a run measures its time: phases of the start, training time, ranges in a trace."""

import time
from contextlib import contextmanager, nullcontext

import torch


class Stopwatch(dict):
    """{phase of the start: seconds}, in order."""

    def __init__(self, import_seconds):
        self.last = time.perf_counter()
        self["imports"] = import_seconds

    def lap(self, phase):
        """Set `phase` to the time since the last call."""
        now = time.perf_counter()
        self[phase], self.last = now - self.last, now


class Clock:
    """Training time in seconds, without pauses, and the seconds of the pauses by their phase."""

    def __init__(self, seconds=0.0):
        self.counted, self.paused_seconds, self.began = seconds, {}, time.perf_counter()

    def seconds(self) -> float:
        return self.counted + time.perf_counter() - self.began

    @contextmanager
    def paused(self, phase):
        """Context manager: a pause. Yields the training time until now; inside the pause, `seconds` is wrong."""
        self.counted, pause = self.seconds(), time.perf_counter()
        yield self.counted
        self.began = time.perf_counter()
        self.paused_seconds[phase] = self.paused_seconds.get(phase, 0.0) + self.began - pause


def trace_range(name):
    """Context manager: mark a range of host time in the trace of a profiled step; do nothing in other steps."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def trace_mark(name):
    """Mark a moment in the trace by an empty range. Compiled code makes no marks."""
    if not torch.compiler.is_compiling():
        with trace_range(name):
            pass
