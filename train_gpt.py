from pathlib import Path

import numpy as np


class UserError(Exception):
    """A mistake the user can fix. `main` prints its one line and exits with status 1."""


SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024


def read_shard_header(path: Path) -> int:
    """Number of tokens that the shard at `path` holds.

    A shard is 256 int32 (magic, version, token count, then unused) followed by one uint16 per token.
    Raises UserError when the file is not a shard, has another version, or is shorter or longer than it says.
    """
    size = path.stat().st_size
    if size < SHARD_HEADER_BYTES:
        raise UserError(f"{path}: {size} bytes is too short for a shard header; delete the file and fetch it again")
    magic, version, count = (int(v) for v in np.fromfile(path, "<i4", 3))
    if magic != SHARD_MAGIC:
        raise UserError(f"{path}: magic number {magic} instead of {SHARD_MAGIC}; not a token shard, make one with data/prepare.py")
    if version != SHARD_VERSION:
        raise UserError(f"{path}: shard version {version}, this script reads version {SHARD_VERSION}; make it again with data/prepare.py")
    if size != SHARD_HEADER_BYTES + 2 * count:
        raise UserError(f"{path}: header promises {count} tokens but the file holds {(size - SHARD_HEADER_BYTES) // 2};"
                        " truncated or damaged, delete it and fetch it again")
    return count
