"""Token shards: which files a pattern names, what is in a file, and whether it changes during a run. README.md beside
this file describes the format."""

import functools
import glob
import hashlib
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.run.program import ROOT, UserError, user_error, user_path

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
REMAKE = "fetch or make it again with data/prepare.py"


def read_shard_header(path: Path) -> int:
    """Number of tokens of a shard: 256 int32 (magic, version, number of tokens, then unused), then a uint16 per token.
    Raises UserError when the file is not a shard, has another version, or is shorter or longer than its header says."""
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
    """The first `most` tokens of a shard, uint16. Raises UserError for a damaged file, a token outside the vocabulary,
    and tokens without a separator, the last token of the vocabulary."""
    count = min(read_shard_header(path), most)
    with user_error(f"{path}: cannot be read"):
        tokens = np.fromfile(path, "<u2", count, offset=SHARD_HEADER_BYTES)
        if len(tokens) < count:
            raise OSError("it ends early")
    if (largest := int(tokens.max(initial=0))) >= vocab_size:
        raise UserError(f"{path}: token {largest} but a vocabulary of {vocab_size}; data of another tokenizer"
                        f" (--vocab_size, --preset), or damaged: {REMAKE}")
    if not (tokens == vocab_size - 1).any():
        raise UserError(f"{path}: no document separator (token {vocab_size - 1}); data of another tokenizer?"
                        " (--vocab_size, --preset)")
    return tokens


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises UserError."""
    found = hashlib.sha256()
    with user_error(f"{path}: cannot be read"), open(path, "rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()


@functools.cache
def digest_at(path: Path, stamp) -> str:
    """`digest` of a file with this stamp, for all runs of a process: each file is read once."""
    return digest(path)


def data_root() -> Path:
    """The folder to which patterns are relative, an absolute path."""
    return user_path(os.environ.get("DATA_PATH") or ROOT).absolute()


def matching_files(pattern: str) -> list[Path]:
    """The files that match a pattern, in name order. A relative pattern starts at $DATA_PATH or at this repository."""
    pattern = os.path.expanduser(pattern)  # if the pattern is absolute, os.path.join drops the root
    return sorted(map(Path, glob.glob(os.path.join(glob.escape(str(data_root())), pattern))))


def find_files(pattern: str) -> list[Path]:
    """`matching_files`. Raises UserError when there are none."""
    if files := matching_files(pattern):
        return files
    raise UserError(f"no files match {data_root() / user_path(pattern)}; fetch or build data with data/prepare.py, or"
                    " run ./run.sh")


def stamp(path: Path):
    """(bytes, time of the last change in ns, inode) of a file; None if there is no regular file. Other bytes have
    another stamp."""
    with suppress(OSError):
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode):  # no pipe, which nobody can read without waiting
            return found.st_size, found.st_mtime_ns, found.st_ino
    return None


class Shards:
    """The shards that match a pattern, as they were when this object was made: at the start of a run. Raises UserError
    for a bad header, and when there are no tokens.

    files: {path: its stamp}, in name order, without shards of no tokens. counts: their tokens. warnings: lines about
    shards without tokens. digests: {path: SHA-256}, as far as they are known. expected: {path: SHA-256} in the run that
    this one continues; `read` compares them.
    """

    def __init__(self, pattern):
        found = [(path, stamp(path), read_shard_header(path)) for path in find_files(pattern)]
        self.files = {path: before for path, before, count in found if count}
        self.counts = [count for *_, count in found if count]
        self.warnings = [f"{path} holds no tokens and is passed over" for path, _, count in found if not count]
        self.digests, self.expected = {}, {}
        if not self.files:
            raise UserError(f"{pattern}: no file holds a token; {REMAKE}")

    def __str__(self):
        return " ".join(f"{path.name}:{size}" for path, (size, *_) in self.files.items())

    def read(self, path, vocab_size, most=sys.maxsize):
        """`read_shard`. Raises UserError also when the file has changed, or has other tokens than expected."""
        try:
            return read_shard(path, vocab_size, most)
        finally:
            self.require_same(path)
            if path in self.expected and self.digest(path) != self.expected[path]:
                raise UserError(f"{path} has other tokens than the shard of the checkpoint: bring that back (DATA_PATH"
                                " may name its folder), or go on with --other_data=true")

    def require_same(self, path):
        """Raises UserError when a file has changed, unless its SHA-256 is known to be the same."""
        if (now := stamp(path)) != self.files[path]:
            if now is None or digest(path) != (self.digests.get(path) or self.expected.get(path)):
                raise UserError(f"{path}: changed, exchanged or deleted since the run began; put it back and start"
                                " again, or --resume a checkpoint")
            self.files[path] = now  # touched, or exchanged for a copy

    def digest(self, path) -> str:
        """SHA-256 of a shard, which is read for it once. Raises UserError when the file has changed."""
        if path not in self.digests:
            found = digest_at(path, self.files[path])
            self.require_same(path)
            self.digests[path] = found
        return self.digests[path]

    def table(self, read=None) -> list[tuple]:
        """(name, bytes, SHA-256) of every shard. The SHA-256 is None where nobody knows it: of shards behind the first
        `read` ones (None: all), and of a file that has changed or has other tokens than expected."""
        for path in [*self.files][:read]:
            with suppress(UserError):
                self.digest(path)
        known = {path: found for path, found in self.digests.items() if self.expected.get(path, found) == found}
        return [(path.name, size, known.get(path)) for path, (size, *_) in self.files.items()]


def run_shards(config) -> dict[str, Shards]:
    """The training ("train") and the validation shards ("val") of a run."""
    return {part: Shards(getattr(config.data, f"{part}_files")) for part in ("train", "val")}
