"""torchrun, which ends with the status that shells give: 128 + the number of the signal.

    python -m data.run.launch --standalone --nproc_per_node=8 train_gpt.py --key=value ...
"""

import re
import socket
import sys

from data.run.cores import choose_waiting
from data.run.signals import die_at_ctrl_c


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
    processes = re.search(r"--nproc_per_node=(\d+)", " ".join(sys.argv))
    choose_waiting(sys.argv, int(processes[1]) if processes else 1)
    if "--standalone" in sys.argv:
        stay_here()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main
    try:
        main()
    except SignalException as error:
        sys.exit(128 + error.sigval)
