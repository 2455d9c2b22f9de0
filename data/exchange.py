"""Communication between ranks: collectives of old and new versions of torch under one name, and the exchange of the
gradients of a table of which a step touches few rows."""

import numpy as np
import torch
import torch.distributed as dist

from data.clock import trace_range

# torch 2.13 renamed reduce_scatter_tensor and all_gather_into_tensor.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(x, rt, op=dist.ReduceOp.SUM):
    """Replace x by its sum over the ranks, or by what another `op` makes of it."""
    if rt.world > 1:
        dist.all_reduce(x, op=op)


class SparseRows:
    """Averages the gradient of a table over ranks. Ranks send only the rows that they touched (PR 221, roeeshenberg).

    Rank r owns the rows [r·k, (r+1)·k), k = ⌈rows/G⌉. The host knows the touched rows from the batch. The ranks
    therefore exchange the row counts on the CPU (gloo) while the device computes, and the host never waits for the
    device.
    """

    def __init__(self, table, rows, rt):
        self.table, self.rt, self.owned = table, rt, -(-rows // rt.world)
        self.touched = np.zeros(rows, dtype=bool)

    def send_counts(self):
        """Tell each owner how many of its rows this rank has touched. Call this before the micro-step of an Adam
        step."""
        rows = np.flatnonzero(self.touched).astype(np.int32)
        self.touched[:] = False
        cuts = np.searchsorted(rows, np.arange(self.rt.world + 1) * self.owned)
        counts = np.diff(cuts)
        counts[self.rt.rank] = 0  # this rank keeps its own rows
        rows = torch.from_numpy(np.delete(rows, slice(cuts[self.rt.rank], cuts[self.rt.rank + 1])))
        self.rows = rows.pin_memory().to(self.rt.device, non_blocking=True) if self.rt.device.type == "cuda" else rows
        self.counts = torch.from_numpy(counts)
        self.counts_in = torch.empty_like(self.counts)
        self.work = dist.all_to_all_single(self.counts_in, self.counts, async_op=True)

    def send_rows(self):
        """Send the row indices. Call this after the launch of the micro-step: the host waits for the counts of the
        other ranks while the device computes."""
        with trace_range(f"wait {self.table}"):
            self.work.wait()
        self.counts, self.counts_in = self.counts.tolist(), self.counts_in.tolist()
        self.rows_in = self.rows.new_empty(sum(self.counts_in))
        self.work = dist.all_to_all_single(self.rows_in, self.rows, self.counts_in, self.counts, async_op=True)

    def send_values(self, grad):
        """Send the gradients of the touched rows. grad (G·k, D): this rank's sum since the last exchange."""
        values = grad[self.rows]
        self.values_in = grad.new_empty(sum(self.counts_in), grad.size(1))
        self.work_values = dist.all_to_all_single(self.values_in, values, self.counts_in, self.counts, async_op=True)

    def receive(self, grad):
        """The average over ranks of the gradients of the owned rows (k, D), written into `grad`."""
        self.work.wait()
        self.work_values.wait()
        own = grad[self.rt.rank * self.owned:(self.rt.rank + 1) * self.owned]
        # Add one rank after the other. A rank sends each row once, so the order of the sums does not depend on timing.
        for rows, values in zip(self.rows_in.split(self.counts_in), self.values_in.split(self.counts_in)):
            own.index_add_(0, rows - self.rt.rank * self.owned, values)
        return own.div_(self.rt.world)
