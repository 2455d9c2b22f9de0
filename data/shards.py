"""Token shards: which files a pattern names, what is in a file, and whether it changes during a run. README.md beside
this file describes the format."""

import glob
import hashlib
import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
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


def require_tokens(path, largest, separated, vocab_size):
    """Raises UserError when the largest token of a shard is outside the vocabulary, or unless the last token of the
    vocabulary has `separated` its documents."""
    if largest >= vocab_size:
        raise UserError(f"{path}: token {largest} but a vocabulary of {vocab_size}; data of another tokenizer"
                        f" (--vocab_size, --preset), or damaged: {REMAKE}")
    if not separated:
        raise UserError(f"{path}: no document separator (token {vocab_size - 1}); data of another tokenizer?"
                        " (--vocab_size, --preset)")


def read_shard(path: Path, vocab_size: int, most=sys.maxsize) -> np.ndarray:
    """The first `most` tokens of a shard, uint16. Raises UserError for a damaged file, a token outside the vocabulary,
    and tokens without a separator."""
    count = min(read_shard_header(path), most)
    with user_error(f"{path}: cannot be read"):
        tokens = np.fromfile(path, "<u2", count, offset=SHARD_HEADER_BYTES)
        if len(tokens) < count:
            raise OSError("it ends early")
    require_tokens(path, int(tokens.max(initial=0)), (tokens == vocab_size - 1).any(), vocab_size)
    return tokens


def token_blocks(path: Path, seen=lambda block: None):
    """Yields the tokens of a shard, half a million at a time. `seen` gets all bytes of the file, a mebibyte at a time.
    Checks nothing. Raises UserError."""
    with user_error(f"{path}: cannot be read"), open(path, "rb") as file:
        skip = SHARD_HEADER_BYTES
        while block := file.read(2**20):
            seen(block)
            yield np.frombuffer(block[skip:len(block) // 2 * 2], "<u2")  # a file that is cut now may end anywhere
            skip = 0


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    for _ in token_blocks(path, found.update):
        pass
    return found.hexdigest()


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
    shards without tokens. digests: {path: SHA-256}, as far as they are known. checks: {path: Future of the error of
    `inspect`, or of None}, once `inspect_all` has begun.
    """

    def __init__(self, pattern, vocab_size):
        self.vocab_size, self.digests, self.checks = vocab_size, {}, {}
        found = [(path, stamp(path), read_shard_header(path)) for path in find_files(pattern)]
        self.files = {path: before for path, before, count in found if count}
        self.counts = [count for *_, count in found if count]
        self.warnings = [f"{path} holds no tokens and is passed over" for path, _, count in found if not count]
        if not self.files:
            raise UserError(f"{pattern}: no file holds a token; {REMAKE}")

    def read(self, path, vocab_size, most=sys.maxsize):
        """`read_shard`. Raises UserError also when the file has changed."""
        try:
            return read_shard(path, vocab_size, most)
        finally:
            self.require_same(path)

    def require_same(self, path):
        """Raises UserError when a file has changed since the start, unless its bytes are known to be the same."""
        if (now := stamp(path)) != self.files[path]:
            if now is None or path not in self.digests or digest(path) != self.digests[path]:
                raise UserError(f"{path}: changed, exchanged or deleted since the run began; put it back and start"
                                " again, or --resume a checkpoint")
            self.files[path] = now  # touched, or exchanged for a copy

    def inspect(self, path) -> UserError | None:
        """Reads a shard once, for its SHA-256 and for the checks of its tokens; what is wrong with it."""
        largest, separated, found = 0, False, hashlib.sha256()
        try:
            self.require_same(path)
            for tokens in token_blocks(path, found.update):
                largest = max(largest, int(tokens.max(initial=0)))
                separated = separated or (tokens == self.vocab_size - 1).any()
            self.require_same(path)
            self.digests[path] = found.hexdigest()
            require_tokens(path, largest, separated, self.vocab_size)
        except UserError as error:
            return error


def run_shards(config) -> dict[str, Shards]:
    """The training ("train") and the validation shards ("val") of a run."""
    return {part: Shards(getattr(config.data, f"{part}_files"), config.model.vocab_size) for part in ("train", "val")}


def inspect_all(shards: dict[str, Shards]):
    """Inspect all shards in a thread, those of the validation first, since every run reads them, the others in the
    order in which a run reads them."""
    thread = ThreadPoolExecutor(1)
    for each in shards["val"], shards["train"]:
        each.checks = {path: thread.submit(each.inspect, path) for path in each.files}
