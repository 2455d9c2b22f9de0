"""Checkpoint files. A checkpoint is a dictionary of plain values and tensors."""

import functools
import os
import zipfile
from itertools import zip_longest
from pathlib import Path

import torch

from data.run.program import UserError, atomic_write, user_path

KEYS = {"step", "seconds", "config", "rng", "loader", "optimizer", "model"}


def write_checkpoint(state: dict, path: Path, keep: int):
    """Writes a checkpoint, then deletes all but the newest `keep` checkpoints of its folder (0: deletes none)."""
    with atomic_write(path) as file:
        torch.save(state, file)
    for old in sorted(path.parent.glob("state_step*.pt"))[:-keep]:
        old.unlink(missing_ok=True)


@functools.lru_cache
def damaged_part(path, size, modified) -> str | None:
    """Name of the first part of the file that differs from its checksum, which torch.save wrote, or None.

    Reads the whole file, at about 2 GB/s, once for each size and time of modification.
    """
    with zipfile.ZipFile(path) as file:
        return file.testzip()


def load_checkpoint(path) -> dict:
    """The dictionary that `write_checkpoint` wrote. Tensors are on the CPU and are read from the file on first use.

    Executes nothing in the file. One process of a machine compares it with its checksums. Raises UserError when the
    file is no checkpoint, or damaged.
    """
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


def check_weights(state, model):
    """Raises UserError when a checkpoint has other tensors than the model of a config."""
    saved = {label: x.shape for label, x in state["model"].items()}
    expected = {param.label: param.shape for param in model.table}
    expected |= {"hash_ids": (model.padded_vocab,)} if model.bigram_normal else {}
    if differing := sorted(label for label in expected | saved if expected.get(label) != saved.get(label)):
        raise UserError(f"the checkpoint has other parameters than this train_gpt.py: {', '.join(differing)}")


def shard_table(shards) -> list[tuple]:
    """(name, bytes, SHA-256 or None if it is not known yet) of every file of a Shards."""
    return [(path.name, size, shards.digests.get(path)) for path, (size, *_) in shards.files.items()]


def other_shard(saved, found) -> str:
    """The first difference between two `shard_table`s in words, which name the file; "" if there is none."""
    for old, new in zip_longest(saved, found):
        if old is None:
            return f"{new[0]} is one more"
        if new is None:
            return f"{old[0]} is missing"
        if old[0] != new[0]:
            return f"{new[0]} is in the place of {old[0]}"
        if old[1] != new[1]:
            return f"{new[0]} has {new[1]} bytes instead of {old[1]}"
        if old[2] and new[2] and old[2] != new[2]:
            return f"{new[0]} has other tokens"
    return ""


def compare_shards(state, config, shards) -> str:
    """A warning about the shards of a run that resumes the checkpoint `state`, or "". shards: part of the data ->
    Shards. Raises UserError when they are not those of the checkpoint, unless --other_data is set."""
    saved = state.get("shards")
    if saved is None:
        return "the checkpoint is an older one that does not say which shards it has read, so nobody has compared them"
    found = [other_shard(saved[part], shard_table(each)) for part, each in shards.items()]
    if not any(found):
        return ""
    found = f"the shards are not those of the checkpoint: {next(filter(None, found))}"
    if not config.system.other_data:
        raise UserError(f"--resume={config.system.resume}: {found}; bring those back (DATA_PATH may name their folder),"
                        " or go on with --other_data=true")
    return f"{found}; the run goes on at the same place of these, as --other_data=true says"
