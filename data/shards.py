"""Token shards: which files a pattern names, and what is in a file.

README.md beside this file describes the format.
"""

import glob
import hashlib
import os
import sys
from pathlib import Path

import numpy as np

from data.run.disk import ROOT
from data.run.errors import UserError, user_error


SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
REMAKE = "fetch or make it again with data/prepare.py"


def read_shard_header(path: Path) -> int:
    """Number of tokens of a shard: 256 int32 (magic, version, number of tokens, then unused), then a uint16 per token.

    Raises UserError when the file is not a shard, has another version, or is shorter or longer than its header says.
    """
    if not os.path.isfile(path):
        raise UserError(f"{path}: no regular file, for example a folder or a link to nothing, so no shard;"
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


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    with user_error(f"{path}: cannot be read"), open(path, "rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()


def data_root() -> Path:
    """The folder to which patterns are relative."""
    return Path(os.environ.get("DATA_PATH") or ROOT)


def matching_files(pattern: str) -> list[Path]:
    """The files that match a pattern, in name order. A relative pattern starts at $DATA_PATH or at this repository."""
    pattern = os.path.expanduser(pattern)  # if the pattern is absolute, os.path.join drops the root
    return sorted(map(Path, glob.glob(os.path.join(glob.escape(str(data_root())), pattern))))


def find_files(pattern: str) -> list[Path]:
    """`matching_files`. Raises UserError when there are none."""
    files = matching_files(pattern)
    if not files:
        raise UserError(f"no files match {data_root() / pattern}; fetch or build data with data/prepare.py,"
                        " or run ./run.sh")
    return files
