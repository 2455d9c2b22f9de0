"""How signals end a run. This module needs no package, so programs call it before slow imports."""

import ctypes
import os
import signal
import sys
import threading


def die_at_ctrl_c():
    """From now on, Ctrl-C ends this process at once and without a traceback. An ignored Ctrl-C stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def die_with_torchrun():
    """Let the kernel end this process when torchrun is killed, which then cannot do so itself. Only on Linux."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def speak_at_ctrl_c(say):
    """From now on, Ctrl-C calls `say` and ends this process with status 130, even while the main thread waits for
    another process. Nothing changes unless `die_at_ctrl_c` came before."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        return
    read, write = os.pipe()
    os.set_blocking(write, False)

    def wait():
        os.read(read, 1)
        speaker = threading.Thread(target=say, daemon=True)  # it hangs if the main thread waits for a full pipe
        speaker.start()
        speaker.join(2)
        os._exit(128 + signal.SIGINT)
    threading.Thread(target=wait, daemon=True).start()
    signal.set_wakeup_fd(write)  # the interpreter writes to it at once, in whatever call the main thread is
    signal.signal(signal.SIGINT, lambda *_: None)
