"""How signals end a run. This module needs no package, so programs call it before slow imports.

A signal that the starting program has set to be ignored, as nohup does, stays ignored.
"""

import ctypes
import os
import signal
import sys
import threading
import time

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
    """What signals ask of a run. number: the first of STOPPING that has come, or 0; the run is then to end after its
    step. waits: whether the run looks at it; before that, a signal ends the process at once."""

    number, waits = 0, False


def watch_signals(say, is_over=lambda: False) -> Stop:
    """From now on, signals end the run, even while the main thread waits for another process: at once, after
    `say(number)`, or by the Stop, which is returned. A second SIGTERM ends it at once, and so do Ctrl-C and what comes
    when `is_over()`. The same signal within a second is no second one: a scheduler may send it to torchrun, which
    passes it on, and to this process. Nothing changes unless `die_at_ctrl_c` came before."""
    stop, first = Stop(), {}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler or sys.platform == "win32":
        return stop
    numbers = are_default((signal.SIGINT, *STOPPING))
    read, write = os.pipe()
    os.set_blocking(write, False)

    def is_patient(number):
        again = time.monotonic() - first.setdefault(number, time.monotonic()) > 1
        return stop.waits and number != signal.SIGINT and not (again and number == signal.SIGTERM) and not is_over()

    def wait():
        while (number := os.read(read, 1)[0]) not in numbers or is_patient(number):
            if number in numbers:  # else it has a handler of its own
                stop.number = stop.number or number
        speaker = threading.Thread(target=say, args=[number], daemon=True)
        speaker.start()
        speaker.join(2)  # it hangs if the main thread waits for a full pipe
        os._exit(128 + number)
    threading.Thread(target=wait, daemon=True).start()
    # The interpreter writes the number to it at once, in whatever call the main thread is.
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # the run goes on, also in libraries that do not try a call again
    return stop
