"""Checkpoint files. A checkpoint is a dictionary of plain values and tensors."""

import functools
import os
import zipfile
from pathlib import Path

import torch

from data.run.disk import atomic_write
from data.run.errors import UserError

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
    damaged = None
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


def check_weights(state, model, table):
    """Raises UserError when a checkpoint has other tensors than the model of a config and its `param_table`."""
    saved = {label: x.shape for label, x in state["model"].items()}
    expected = {param.label: param.shape for param in table}
    expected |= {"hash_ids": (model.padded_vocab,)} if model.bigram_normal else {}
    if differing := sorted(label for label in expected | saved if expected.get(label) != saved.get(label)):
        raise UserError(f"the checkpoint has other parameters than this train_gpt.py: {', '.join(differing)}")
