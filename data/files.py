"""Files that a run reads and writes: user errors, atomic writes, token shards.

README.md beside this file describes the format of a shard.
"""

import glob
import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np


class UserError(Exception):
    """A mistake the user can fix. `main` prints its one line and returns a nonzero status."""


def one_line(error) -> str:
    """The message of an error on one line; for an OSError only the reason."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


@contextmanager
def user_error(message, *kinds):
    """Turns an OSError, or an error of `kinds`, into a UserError: the message, then the original message."""
    try:
        yield
    except (OSError, *kinds) as error:
        raise UserError(f"{message} ({one_line(error)})") from error


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


def claim_report(local) -> bool:
    """Claim to print why the run ends; True for the first process of a machine that asks. One report is enough.

    local: rank on this machine.
    """
    time.sleep(local > 0)  # the first process usually has the same message
    try:  # torchrun gives each process a folder of its own in one common folder
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1].joinpath("told").mkdir()
    except FileExistsError:
        return False
    except (KeyError, IndexError, OSError):  # no torchrun, or no folders: printing twice is better than never
        pass
    return True


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def is_writable(folder: Path) -> bool:
    """Whether this process can make files in the folder. The folder need not exist yet."""
    return os.access(existing_folder(folder), os.W_OK | os.X_OK)


SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
REMAKE = "fetch or make it again with data/prepare.py"


def read_shard_header(path: Path) -> int:
    """Number of tokens of a shard: 256 int32 (magic, version, number of tokens, then unused), then a uint16 per token.

    Raises UserError when the file is not a shard, has another version, or is shorter or longer than its header says.
    """
    if not os.path.isfile(path):
        raise UserError(f"{path}: a folder, or a link to nothing, but no shard;"
                        " give a pattern such as data/mine/mine_train_*.bin")
    with user_error(f"{path}: cannot be read"):
        size, header = os.path.getsize(path), np.fromfile(path, "<i4", 3)
    magic, version, count = (*map(int, header), 0, 0, 0)[:3]
    if magic != SHARD_MAGIC:
        raise UserError(f"{path}: magic number {magic} instead of {SHARD_MAGIC}; not a token shard"
                        " (data/prepare.py makes them)")
    if version != SHARD_VERSION:
        raise UserError(f"{path}: version {version} instead of {SHARD_VERSION}; {REMAKE}")
    if count < 0 or size != SHARD_HEADER_BYTES + 2 * count:
        raise UserError(f"{path}: header promises {count} tokens but the file holds"
                        f" {max(0, size - SHARD_HEADER_BYTES) // 2}; truncated or damaged: {REMAKE}")
    return count


def read_shard(path: Path, vocab_size: int, most=sys.maxsize) -> np.ndarray:
    """The first `most` tokens of a shard, uint16.

    Raises UserError for a damaged file or a token outside the vocabulary.
    """
    count = min(read_shard_header(path), most)
    with user_error(f"{path}: cannot be read"):
        tokens = np.fromfile(path, "<u2", count, offset=SHARD_HEADER_BYTES)
        if len(tokens) < count:
            raise OSError("it ends early")
    if count and (largest := int(tokens.max())) >= vocab_size:
        raise UserError(f"{path}: token {largest} but a vocabulary of {vocab_size}; data of another tokenizer"
                        f" (--vocab_size, --preset), or damaged: {REMAKE}")
    return tokens


def data_root() -> Path:
    """The folder to which patterns are relative."""
    return Path(os.environ.get("DATA_PATH") or Path(__file__).parents[1])


def find_files(pattern: str) -> list[Path]:
    """The files that match a pattern, in name order. Raises UserError when there are none.

    A relative pattern starts at $DATA_PATH or at this repository.
    """
    pattern = os.path.expanduser(pattern)  # if the pattern is absolute, os.path.join drops the root
    files = sorted(map(Path, glob.glob(os.path.join(glob.escape(str(data_root())), pattern))))
    if not files:
        raise UserError(f"no files match {data_root() / pattern}; fetch or build data with data/prepare.py,"
                        " or run ./run.sh")
    return files
