"""Checkpoint files: a dictionary of plain values and tensors goes in, the same dictionary comes out."""

import shutil
from pathlib import Path

import torch

from data.files import UserError, atomic_write, existing_folder, is_writable

KEYS = {"step", "seconds", "config", "rng", "loader", "optimizer", "model"}


def write_checkpoint(state: dict, path: Path, keep: int):
    """Writes a checkpoint; then the older checkpoints of its folder go, but for the newest `keep` (0: all stay)."""
    with atomic_write(path) as file:
        torch.save(state, file)
    for old in sorted(path.parent.glob("state_step*.pt"))[:-keep]:
        old.unlink(missing_ok=True)


def load_checkpoint(path) -> dict:
    """What `write_checkpoint` wrote, tensors on the CPU and read when used; nothing in the file is executed.

    Raises UserError when the file is something else.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        complete = isinstance(state, dict) and state.keys() >= KEYS
    except OSError as error:
        raise UserError(f"{path} is no checkpoint of this trainer: {error.strerror or 'it cannot be read'}") from None
    except Exception:  # a damaged file may raise anything, and torch's advice is about other mistakes
        complete = False
    if not complete:
        raise UserError(f"{path} is no checkpoint of this trainer: another kind of file, or damaged")
    return state


def require_room(folder: Path, size: int, purpose: str) -> str:
    """How much room the disk of `folder` has for `size` bytes; UserError when that is too little."""
    place = existing_folder(folder)
    free = shutil.disk_usage(place).free
    found = f"{folder.name}: {free // 2**20} MiB free, {size // 2**20} needed for {purpose}"
    if free < size or not is_writable(place):
        raise UserError(f"cannot write a log in {found}; make room, or choose another --log_dir")
    return found
