"""Checkpoint files. A checkpoint is a dictionary of plain values and tensors."""

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


def load_checkpoint(path) -> dict:
    """The dictionary that `write_checkpoint` wrote. Tensors are on the CPU and are read from the file on first use.

    Executes nothing in the file. Raises UserError when the file is no checkpoint.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        complete = isinstance(state, dict) and state.keys() >= KEYS
    except OSError as error:
        raise UserError(f"{path} is no checkpoint of this trainer: {error.strerror or 'it cannot be read'}") from None
    except Exception:  # a damaged file may raise any error, and torch's message would mislead the user
        complete = False
    if not complete:
        raise UserError(f"{path} is no checkpoint of this trainer: another kind of file, or damaged")
    return state


def check_weights(state, model, table):
    """Raises UserError when a checkpoint has other tensors than the model of a config and its `param_table`."""
    saved = {label: x.shape for label, x in state["model"].items()}
    expected = {param.label: param.shape for param in table}
    expected |= {"hash_ids": (model.padded_vocab,)} if model.bigram_normal else {}
    if differing := sorted(label for label in expected | saved if expected.get(label) != saved.get(label)):
        raise UserError(f"the checkpoint has other parameters than this train_gpt.py: {', '.join(differing)}")
