"""Folders, room on the disk, files that appear only when they are complete, bytecode and compiled kernels."""

import importlib.util
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

from data.run.errors import UserError, one_line, user_error

ROOT = Path(__file__).resolve().parents[2]  # the folder of train_gpt.py


def user_path(text) -> Path:
    """A path that the user has written; ~ is the home folder, also where no shell has replaced it."""
    return Path(os.path.expanduser(text))


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # Path.exists may raise an error


def is_writable(folder: Path) -> bool:
    """Whether this process can make files in the folder. The folder need not exist yet."""
    return os.access(existing_folder(folder), os.W_OK | os.X_OK)


def require_room(folder: Path, size: int, purpose: str) -> str:
    """A line about free and required disk space. Raises UserError when fewer than `size` bytes are free, or when the
    system does not let this process write."""
    place = existing_folder(folder)
    with user_error(f"cannot write a log in {folder}; choose another --log_dir"), tempfile.TemporaryFile(dir=place):
        pass
    free = shutil.disk_usage(place).free
    found = f"{folder.name}: {free // 2**20} MiB free, {size // 2**20} needed for {purpose}"
    if free < size:
        raise UserError(f"cannot write a log in {found}; make room, or choose another --log_dir")
    return found


@contextmanager
def atomic_write(path):
    """Opens a binary file for writing. The file appears at `path` only when it is complete and on the disk.

    Raises UserError when the file cannot be written.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and error.__context__:  # torch.save raises its own error over the real one
            error = error.__context__
        if not isinstance(error, Exception):
            raise error from None  # Ctrl-C
        raise UserError(f"cannot write {path}: {one_line(error)}; make room, or choose another folder") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def keep_bytecode():
    """Keep the bytecode of imported modules in this repository, if PyTorch was installed without bytecode.

    This must run before torch is imported.
    Some container images contain PyTorch without bytecode, and do not let Python write bytecode. Every start would then
    translate 2300 files. The processes of the compiler read the environment variable.
    """
    spec = importlib.util.find_spec("torch")
    if sys.pycache_prefix is None and spec and not os.path.exists(spec.cached or ""):
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(ROOT / "__pycache__")
        sys.dont_write_bytecode = False


def compiled_folder() -> Path | None:
    """~/.cache/speedrun, where all copies of this repository keep what the compilers make; None if this process cannot
    write there. A reboot deletes PyTorch's own folder in /tmp, but not this one."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "speedrun")
    return folder if folder.is_absolute() and is_writable(folder) else None


def keep_compiled():
    """Tell the compilers to use `compiled_folder`, unless the environment names other folders.

    This must run before torch is imported.
    """
    if folder := compiled_folder():
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        if "TRITON_HOME" not in os.environ:
            os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
