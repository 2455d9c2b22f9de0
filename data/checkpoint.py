"""Checkpoint files. A checkpoint is a dictionary of plain values and tensors."""

import shutil
from pathlib import Path

import torch

from data.files import UserError, atomic_write, existing_folder, is_writable

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


def check_weights(state, model):
    """Raises UserError when a checkpoint has other weights than `model`, as from another version of train_gpt.py."""
    saved, expected = ({label: x.shape for label, x in part.items()} for part in (state["model"], model.state_dict()))
    if differing := sorted(label for label in expected | saved if expected.get(label) != saved.get(label)):
        raise UserError(f"the checkpoint has other parameters than this train_gpt.py: {', '.join(differing)}")


def require_room(folder: Path, size: int, purpose: str) -> str:
    """A line about free and required disk space. Raises UserError when fewer than `size` bytes are free."""
    place = existing_folder(folder)
    free = shutil.disk_usage(place).free
    found = f"{folder.name}: {free // 2**20} MiB free, {size // 2**20} needed for {purpose}"
    if free < size or not is_writable(place):
        raise UserError(f"cannot write a log in {found}; make room, or choose another --log_dir")
    return found
