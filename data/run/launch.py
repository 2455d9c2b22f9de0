"""torchrun, which passes signals on and ends with the status that shells give: 128 + the number of the signal.

    python -m data.run.launch --standalone --nproc_per_node=8 train_gpt.py --key=value ...
"""

import re
import signal
import socket
import subprocess
import sys

from data.run.cores import choose_waiting
from data.run.signals import STOPPING, are_default, die_at_ctrl_c


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
    """For processes of one machine. torchrun asks the network for the name of this machine, for its reports, and tries
    for two minutes to reach its own process."""
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
    try:
        names = ",".join(signal.Signals(number).name for number in handled)
        main([f"--signals_to_handle={names}", *sys.argv[1:]])
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
