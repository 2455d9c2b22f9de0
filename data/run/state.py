"""The state of a run: checkpoint files, and the state of NorMuonAndAdam in whole tensors and in the parts of the ranks.

A checkpoint is a dictionary of plain values and tensors.
"""

import functools
import os
import zipfile
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist

from data.run.program import UserError, atomic_write, require_finite, user_path

KEYS = {"step", "seconds", "config", "rng", "loader", "optimizer", "model"}


def write_checkpoint(state: dict, path: Path, keep: int):
    """Writes a checkpoint, then deletes all but the newest `keep` checkpoints of its folder."""
    with atomic_write(path) as file:
        torch.save(state, file)
    for old in sorted(path.parent.glob("state_step*.pt"))[:-keep]:
        old.unlink(missing_ok=True)


@functools.lru_cache
def damaged_part(path, size, modified) -> str | None:
    """Name of the first part of the file that differs from its checksum, which torch.save wrote, or None. Reads the
    whole file, at about 2 GB/s, once for each size and time of modification."""
    with zipfile.ZipFile(path) as file:
        return file.testzip()


def load_checkpoint(path) -> dict:
    """The dictionary that `write_checkpoint` wrote. Tensors are on the CPU and are read from the file on first use.
    Executes nothing in the file. One process of a machine compares it with its checksums. Raises UserError when the
    file is no checkpoint, or damaged."""
    damaged, path = None, user_path(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            file = os.stat(path)
            damaged = damaged_part(str(path), file.st_size, file.st_mtime_ns)
        complete = isinstance(state, dict) and state.keys() >= KEYS
    except OSError as error:
        raise UserError(f"{path} is no checkpoint of this trainer: {error.strerror or 'it cannot be read'}") from None
    except Exception:  # a damaged file may raise any error, and torch's message would mislead the user
        complete = False
    if not complete:
        raise UserError(f"{path} is no checkpoint of this trainer: another kind of file, or damaged")
    if damaged:
        raise UserError(f"{path} is damaged: a part of it differs from its checksum; take another checkpoint")
    return state


def save(trainer, step, seconds):
    """Write a checkpoint of the state before this step, beside the log. After the last step, it holds the weights that
    the run validated. Every rank must call this. Raises NotFinite at a weight that is none."""
    trainer.whole = None  # an error in here would come again
    optimizer, model, shards = trainer.optimizer, trainer.model, trainer.shards
    state = {"step": step, "seconds": seconds, "sources": trainer.sources, "config": asdict(trainer.config),
             "rng": torch.get_rng_state(),  # nothing here uses it, but code that you add may
             "loader": trainer.loader.state_dict(), "optimizer": whole_state(optimizer)}
    whole = {label: join_parts(sharded, sharded.part) for label in optimizer.of_rows
             for sharded in [optimizer.sharded[label]]}
    if trainer.rt.rank:
        return
    state["shards"] = {"train": shards["train"].table(state["loader"]["shard"] + 1), "val": shards["val"].table()}
    if mlps := model.codes.get("mlp_bank"):
        state["fp8_mlps"] = mlps.state_dict()
    # The tensors are copied, since a view would bring the whole padded buffer into the file.
    state["model"] = {label: x.to("cpu", copy=True) for label, x in model.state_dict().items() if label not in whole}
    state["model"] |= whole
    numbers = [*state["model"].values(), *(x for each in state["optimizer"].values() for x in each.values())]
    for bound in (bound for x in numbers if x.numel() and x.is_floating_point() for bound in x.aminmax()):
        require_finite(bound.item(), f"largest weight before step {step}")
    path = trainer.log.path.with_suffix("") / f"state_step{step:06d}.pt"
    write_checkpoint(state, path, trainer.config.system.keep)
    trainer.log.saved(path)


def load(trainer, state):
    """Load a checkpoint of `save`, on any number of ranks, in place: CUDA graphs have captured the tensors."""
    load_state(trainer.optimizer, state["optimizer"])
    load_weights(trainer, state)
    trainer.loader.load_state_dict(state["loader"])
    torch.set_rng_state(state["rng"])


def load_weights(trainer, state):
    """Load the weights alone, and the scales of their FP8 codes."""
    sharded = trainer.optimizer.sharded
    parts = {label: sharded[label].own(state["model"][label]) for label in trainer.optimizer.of_rows}
    trainer.model.load_state_dict(state["model"] | parts)
    trainer.quantise_weights(state.get("fp8_mlps"))  # None: the checkpoint is of a run in bf16


def check_weights(state, model):
    """Raises UserError when a checkpoint has other tensors than the model of a config."""
    saved = {label: x.shape for label, x in state["model"].items()}
    expected = {param.label: param.shape for param in model.table}
    expected |= {"hash_ids": (model.padded_vocab,)} if model.bigram_normal else {}
    if differing := sorted(label for label in expected | saved if expected.get(label) != saved.get(label)):
        raise UserError(f"the checkpoint has other parameters than this train_gpt.py: {', '.join(differing)}")


def compare_shards(state, config, shards) -> str:
    """A warning about the shards of a run that resumes the checkpoint `state`, or "". Raises UserError when their names
    or sizes are not those of the checkpoint, unless --other_data is set. Without it, reading a shard will compare its
    SHA-256. shards: part of the data -> Shards."""
    def named(shard):
        return "{} of {} bytes".format(*shard) if shard else "nothing"

    if (saved := state.get("shards")) is None:
        return "the checkpoint is an older one that does not say which shards it has read, so nobody compares them"
    pairs = [pair for part, each in shards.items() for pair in zip_longest(saved[part], each.table(0))]
    differing = [f"the shards are not those of the checkpoint: {named(new)} is in the place of {named(old)}"
                 for old, new in pairs if named(old) != named(new)]
    if config.system.other_data:
        return f"{differing[0]}; the run goes on at the same place, as --other_data=true says" if differing else ""
    if differing:
        raise UserError(f"--resume={config.system.resume}: {differing[0]}; bring those back (DATA_PATH may name their"
                        " folder), or go on with --other_data=true")
    for part, each in shards.items():
        each.expected = {path: known for path, (*_, known) in zip(each.files, saved[part]) if known}
    return ""


# ---- The optimizer's state -------------------------------------------------------------------------------------------

def joined(part, lengths, rt, most=2**18):
    """The parts of all ranks in one tensor on the CPU of rank 0, elsewhere an empty one; lengths: of the parts, one for
    each rank. All ranks must call this. They exchange `most` rows at a time: a table may fill GPU and machine."""
    if part.dtype == torch.int16:  # NCCL does not know it
        return joined(part.view(torch.uint8), lengths, rt, most).view(part.dtype)
    whole, done = part.new_empty(0 if rt.rank else sum(lengths), *part.shape[1:], device="cpu"), 0
    for rank, length in enumerate(lengths):
        for start in range(0, length, most):
            rows = min(most, length - start)
            piece = part[start:start + rows].contiguous() if rank == rt.rank else part.new_empty(rows, *part.shape[1:])
            if rt.world > 1:
                dist.broadcast(piece, rank)
            if rt.rank == 0:
                whole[done:done + rows], done = piece, done + rows
    return whole


def join_parts(sharded, part):
    """`joined` parts of a tensor of a Sharded, without padding."""
    return joined(part, [len(part)] * sharded.rt.world, sharded.rt)[:sharded.count]


def whole_state(optimizer) -> dict:
    """{label: its entries of optimizer.state, and "grad"}: full tensors on the CPU, which fit any number of ranks.

    All ranks must call this; only rank 0 gets the tensors. "grad" is the average over ranks. It is present when a
    parameter of Adam waits for the second of its two gradients, that is before an odd step; of a table of `rows` it
    has few rows, and "rows" are their numbers."""
    full, rt = {}, optimizer.rt
    for label, param in optimizer.params.items():
        sharded = optimizer.sharded.get(label)
        tensors = {key: join_parts(sharded, part) if sharded else part.clone()
                   for key, part in optimizer.state[label].items()}
        if label in optimizer.of_rows:
            few = optimizer.tables[label].few
            counts = [int(few.count[0])] * rt.world
            if rt.world > 1:
                dist.all_gather_object(counts, counts[0])
            waiting = slice(counts[rt.rank])
            rows, grad = (joined(x[waiting], counts, rt) for x in (few.rows + rt.rank * len(param), few.grad))
            order = rows.argsort()  # the order of places varies
            tensors |= {"rows": rows[order], "grad": grad[order]} if any(counts) else {}
        else:
            grad = param.grad.clone()
            if rt.world > 1:
                dist.all_reduce(grad, op=dist.ReduceOp.AVG)
            tensors |= {"grad": grad} if grad.any() else {}
        full[label] = {key: x.cpu() for key, x in tensors.items() if rt.rank == 0}
    return full


@torch.no_grad()
def load_state(optimizer, full):
    """Load the result of `whole_state`. A missing tensor becomes zero, so {} restores the state of step 0."""
    for label, param in optimizer.params.items():
        tensors, targets, sharded = full.get(label, {}), optimizer.state[label], optimizer.sharded.get(label)
        if label in optimizer.of_rows:
            rows = tensors.get("rows", torch.zeros(0)) - optimizer.rt.rank * len(param)
            mine = (rows >= 0) & (rows < len(param))
            sharded.table.few.load(rows[mine], tensors.get("grad", torch.zeros(0, param.size(1)))[mine])
        else:
            targets = targets | {"grad": param.grad}
        for key, target in targets.items():
            if (tensor := tensors.get(key)) is None:
                target.zero_()
            else:  # every rank gets the averaged gradient, so the average of the ranks stays the same
                target.copy_(sharded.own(tensor) if sharded and key != "grad" else tensor)
        if sharded and sharded.touched is not None:
            sharded.touched.copy_(param.grad.any(1))
