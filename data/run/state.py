"""The state of NorMuonAndAdam in whole tensors, for a checkpoint, and in the parts of the ranks."""

import torch
import torch.distributed as dist

from data.run.machine import all_reduce


def whole_state(optimizer) -> dict:
    """{label: its entries of optimizer.state, and "grad"}: full tensors on the CPU, which fit any number of ranks.

    All ranks must call this; only rank 0 gets the tensors. "grad" is the average over ranks. It is present when a
    parameter of Adam waits for the second of its two gradients, that is before an odd step; of a table in few_rows it
    has few rows, and "rows" are their numbers.
    """
    full, rt = {}, optimizer.rt
    for label, param in optimizer.params.items():
        if label in optimizer.few_rows:
            full[label] = state_of_rows(optimizer, label)
            continue
        tensors = {key: optimizer._unshard(label, part) for key, part in optimizer.state[label].items()}
        grad = param.grad.clone()
        all_reduce(grad, rt, dist.ReduceOp.AVG)
        tensors |= {"grad": grad} if grad.any() else {}
        full[label] = {key: x.to("cpu", copy=True) for key, x in tensors.items() if rt.rank == 0}
    return full


def joined(part, lengths, rt):
    """The parts of all ranks in one tensor on the CPU of rank 0, elsewhere an empty one; lengths: of the parts, one for
    each rank. All ranks must call this."""
    parts = [part.new_empty(0, *part.shape[1:], device="cpu")]
    for rank, length in enumerate(lengths):  # one part at a time: a GPU may lack the memory for all
        piece = part.contiguous() if rank == rt.rank else part.new_empty(length, *part.shape[1:])
        if rt.world > 1:
            dist.broadcast(piece, rank)
        parts += [piece.cpu()] if rt.rank == 0 else []
    return torch.cat(parts)


def whole_rows(optimizer, label, part):
    """`joined` parts of a tensor (R, ...), of which every rank has as many rows."""
    return joined(part, [len(part)] * optimizer.rt.world, optimizer.rt)[:optimizer.table[label].shape[0]]


def own_rows(optimizer, label, whole):
    """This rank's part of a tensor (R, ...), padded with zeros."""
    size = len(optimizer.params[label])
    part = whole[optimizer.rt.rank * size:(optimizer.rt.rank + 1) * size]
    return torch.cat((part, part.new_zeros(size - len(part), *part.shape[1:]))) if len(part) < size else part


def state_of_rows(optimizer, label):
    """`whole_state` of a table in few_rows."""
    tensors = {key: whole_rows(optimizer, label, part) for key, part in optimizer.state[label].items()}
    rt, few = optimizer.rt, optimizer.few_rows[label]
    counts = torch.zeros(rt.world, dtype=torch.int32, device=rt.device)
    counts[rt.rank] = few.count[0]
    all_reduce(counts, rt)
    counts = counts.tolist()
    waiting = slice(counts[rt.rank])
    rows = joined(few.rows[waiting] + rt.rank * len(few.place), counts, rt)
    grad, order = joined(few.grad[waiting], counts, rt), rows.argsort()  # the order of places varies
    tensors |= {"rows": rows[order], "grad": grad[order]} if any(counts) else {}
    return tensors if rt.rank == 0 else {}


@torch.no_grad()
def load_state(optimizer, full):
    """Load the result of `whole_state`. A missing tensor becomes zero, so {} restores the state of step 0."""
    for label, param in optimizer.params.items():
        tensors, targets = full.get(label, {}), optimizer.state[label]
        if label in optimizer.few_rows:
            rows = tensors.get("rows", torch.zeros(0)) - optimizer.rt.rank * len(param)
            mine = (rows >= 0) & (rows < len(param))
            optimizer.few_rows[label].load(rows[mine], tensors.get("grad", torch.zeros(0, param.size(1)))[mine])
        else:
            targets = targets | {"grad": param.grad}
        for key, target in targets.items():
            if (tensor := tensors.get(key)) is None:
                target.zero_()
            elif label in optimizer.few_rows:
                target.copy_(own_rows(optimizer, label, tensor))
            else:  # every rank gets the averaged gradient, so the average of the ranks stays the same
                target.copy_(tensor if key == "grad" else optimizer._shard(label, tensor))
        if label in optimizer.touched:
            optimizer.touched[label].copy_(param.grad.any(1))
