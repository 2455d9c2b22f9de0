"""Token shards -> packed documents -> batches on the device: what `train_gpt.py` trains and validates on.

Contents: errors; files and shards (README.md beside this has their format); what a forward pass takes; Loader; ValidationData.
Shape letters: N tokens of one forward pass, G ranks. K1, K2 mark quirks of the reference that the learned function depends on.
"""

import glob
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class UserError(Exception):
    """A mistake the user can fix. `main` prints its one line and returns a nonzero status."""


def one_line(error) -> str:
    """What an error says, without line ends; of an OSError only the reason."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


@contextmanager
def user_error(message, *kinds):
    """An OSError or one of `kinds` becomes a UserError: the message, and what the error said."""
    try:
        yield
    except (OSError, *kinds) as error:
        raise UserError(f"{message} ({one_line(error)})") from error


SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
REMAKE = "fetch or make it again with data/prepare.py"


def read_shard_header(path: Path) -> int:
    """Number of tokens of a shard: 256 int32 (magic, version, number of tokens, then unused), then one uint16 per token.

    Raises UserError when the file is not a shard, has another version, or is shorter or longer than it says.
    """
    if not os.path.isfile(path):
        raise UserError(f"{path}: a folder, or a link to nothing, but no shard; give a pattern such as data/mine/mine_train_*.bin")
    with user_error(f"{path}: cannot be read"):
        size, header = os.path.getsize(path), np.fromfile(path, "<i4", 3)
    magic, version, count = (*map(int, header), 0, 0, 0)[:3]
    if magic != SHARD_MAGIC:
        raise UserError(f"{path}: magic number {magic} instead of {SHARD_MAGIC}; not a token shard (data/prepare.py makes them)")
    if version != SHARD_VERSION:
        raise UserError(f"{path}: version {version} instead of {SHARD_VERSION}; {REMAKE}")
    if count < 0 or size != SHARD_HEADER_BYTES + 2 * count:
        raise UserError(f"{path}: header promises {count} tokens but the file holds {max(0, size - SHARD_HEADER_BYTES) // 2};"
                        f" truncated or damaged: {REMAKE}")
    return count


def read_shard(path: Path, vocab_size: int, most=sys.maxsize) -> np.ndarray:
    """The tokens of a shard, the first `most` of them, uint16, checked against the vocabulary."""
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
    """Where relative patterns begin."""
    return Path(os.environ.get("DATA_PATH") or Path(__file__).parents[1])


def find_files(pattern: str) -> list[Path]:
    """Files that match, in name order; relative to $DATA_PATH or this folder. UserError when there are none."""
    pattern = os.path.expanduser(pattern)  # an absolute one drops the root below
    files = sorted(map(Path, glob.glob(os.path.join(glob.escape(str(data_root())), pattern))))
    if not files:
        raise UserError(f"no files match {data_root() / pattern}; fetch or build data with data/prepare.py, or run ./run.sh")
    return files


def bigram_rows(tokens: np.ndarray, rows: int) -> np.ndarray:
    """Row of the bigram table for each token and its predecessor, int32; the first token has the last row (PR 201, classiclarryd).

    K1: the predecessor may belong to the previous document.
    """
    tokens = tokens.astype(np.int32)
    hashed = np.empty_like(tokens)
    hashed[0] = rows - 1
    hashed[1:] = (36313 * tokens[1:] ^ 27191 * tokens[:-1]) % (rows - 1)  # below 2**31 for ids up to 59138
    return hashed


def cu_seqlens_size(tokens: int, tokens_per_doc: int) -> int:
    """Fixed length of cu_seqlens for a row of `tokens`: compiled shapes must not depend on the documents."""
    return max(128, -(-(tokens // tokens_per_doc) // 128) * 128)


def cu_seqlens(borders: np.ndarray, tokens: int, size: int) -> np.ndarray:
    """[0, borders..., tokens, tokens, ...] of length `size`, int32: cumulative document lengths, the rest empty documents."""
    if len(borders) >= size:
        raise UserError(f"{len(borders)} documents in {tokens} tokens, but cu_seqlens holds {size - 1}: lower --tokens_per_doc")
    cu = np.full(size, tokens, np.int32)
    cu[0] = 0
    cu[1:1 + len(borders)] = borders
    return cu


class Batch(NamedTuple):
    """One row of packed documents: what a forward pass takes."""

    tokens: Tensor  # (N,) int32
    targets: Tensor  # (N,) int64, the next tokens
    cu_seqlens: Tensor  # (K,) int32
    bigram_rows: Tensor  # (N,) int32
    bigram_rows_cpu: np.ndarray  # the same on the host, for the exchange of touched rows


def make_batch(run_of_tokens: np.ndarray, cu: np.ndarray, config, device) -> Batch:
    """N + 1 consecutive tokens -> a Batch on the device; through pinned memory when that is a GPU."""
    inputs, targets = run_of_tokens[:-1], run_of_tokens[1:]
    hashed = bigram_rows(inputs, config.model.bigram_rows)
    host = [torch.from_numpy(a) for a in (inputs.astype(np.int32), targets.astype(np.int64), cu, hashed)]
    if device.type == "cuda":
        host = [t.pin_memory().to(device, non_blocking=True) for t in host]
    return Batch(*host, hashed)


class Shard:
    """One training shard: tokens, and where its documents start."""

    def __init__(self, path, model, most=sys.maxsize):
        self.tokens = read_shard(path, model.vocab_size, most)
        self.starts = np.flatnonzero(self.tokens == model.separator)
        if not len(self.starts):
            raise UserError(f"{path}: no document separator (token {model.separator}); data of another tokenizer?"
                            " (--vocab_size, --preset)")
        self.lengths = np.diff(self.starts, append=len(self.tokens))

    def pack(self, cursor, tokens, max_doc_len):
        """Documents from number `cursor` on that fill tokens + 1 places -> (starts, lengths, next cursor), None if they run out.

        Documents are cut at max_doc_len, the last one also where the row is full; what is cut off is never seen.
        """
        lengths = np.minimum(self.lengths[cursor:cursor + tokens + 1], max_doc_len)
        total = np.cumsum(lengths)
        last = int(np.searchsorted(total, tokens + 1))
        if last == len(total):
            return None
        lengths[last] -= total[last] - (tokens + 1)
        return self.starts[cursor:cursor + last + 1], lengths[:last + 1], cursor + last + 1


class Loader:
    """Training batches of one rank; all numbers of ranks see the same documents in the same order.

    A step takes `micro_batches` rows of documents; row j goes to rank j mod G as micro-step j div G. A row that does not fit into
    the rest of a shard starts on the next one. (The reference repeats all G rows of a micro-step there, so its order depends on G
    after the first shard; this is its order on one rank.) A thread builds one batch ahead, another reads one shard ahead.

    plans: of the steps to serve, in order.
    """

    def __init__(self, config, rt, plans, warn=print):
        self.config, self.rt, self.plans, self.warn = config, rt, plans, warn
        self.files = find_files(config.data.train_files)
        self.stream = torch.cuda.Stream(rt.device) if rt.device.type == "cuda" else None
        self.builder, self.reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.load_state_dict({"index": 0, "part": 0, "shard": 0, "cursor": 0})

    def state_dict(self):
        """index, part: step (place in `plans`) and micro-step that come next; shard, cursor: document that comes next.

        It describes what `next_batch` has handed out, not what was read ahead.
        """
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)
        self.batches = self._batches(**state)
        self.ready = self.builder.submit(next, self.batches, None)

    def next_batch(self) -> Batch:
        batch, copied, self.state = self.ready.result()
        if copied is not None:  # the copies ran on a side stream
            current = torch.cuda.current_stream()
            current.wait_event(copied)
            for tensor in batch[:4]:
                tensor.record_stream(current)
        self.ready = self.builder.submit(next, self.batches, None)
        return batch

    def _shard(self, index):
        return Shard(self.files[index % len(self.files)], self.config.model)

    def _batches(self, index, part, shard, cursor):
        """Yields (batch, event after its copies, state after it), from a state on."""
        current, coming = self._shard(shard), self.reader.submit(self._shard, shard + 1)
        while index < len(self.plans):
            tokens, max_doc_len = self.plans[index].row_tokens, self.plans[index].max_doc_len
            for rank in range(self.rt.world):
                tried = 0
                while (row := current.pack(cursor, tokens, max_doc_len)) is None:
                    shard, cursor, tried = shard + 1, 0, tried + 1
                    if tried > len(self.files):
                        raise UserError(f"no training shard fills a row of {tokens} tokens with documents cut at {max_doc_len};"
                                        " use more data or a smaller batch (--stage1.batch_tokens ...)")
                    if shard % len(self.files) == 0 and self.config.data.data_end == "stop":
                        raise UserError(f"training data exhausted: {len(self.files)} shards; add shards or use --data_end=wrap")
                    if shard == len(self.files):
                        self.warn("training data exhausted: starting again with the first shard")
                    current, coming = coming.result(), self.reader.submit(self._shard, shard + 1)
                starts, lengths, cursor = row
                if rank == self.rt.rank:
                    batch = self._batch(current, starts, lengths, tokens)
            index, part = (index, part + 1) if part + 1 < self.config.run.micro_batches // self.rt.world else (index + 1, 0)
            yield *batch, {"index": index, "part": part, "shard": shard, "cursor": cursor}

    def _batch(self, shard, starts, lengths, tokens):
        """One row -> (Batch on the device, event after its copies). K2: a cut document's last target is the next separator."""
        run_of_tokens = np.concatenate([shard.tokens[s:s + n] for s, n in zip(starts, lengths)])
        borders = np.minimum(np.cumsum(lengths), tokens)
        cu = cu_seqlens(borders, tokens, cu_seqlens_size(tokens, self.config.data.tokens_per_doc))
        if self.stream is None:
            return make_batch(run_of_tokens, cu, self.config, self.rt.device), None
        torch.cuda.set_device(self.rt.device)  # the current device belongs to the thread
        with torch.cuda.stream(self.stream):
            return make_batch(run_of_tokens, cu, self.config, self.rt.device), self.stream.record_event()


def require_validation_tokens(config, have):
    """UserError when the validation files hold fewer than validation takes: one more than it predicts."""
    need = config.data.val_tokens + 1
    if have < need:
        raise UserError(f"{config.data.val_files} holds {have} tokens, validation needs {need}: lower --val_tokens")


class ValidationData:
    """The first `val_tokens` of the validation files in pieces of `val_batch_tokens`; documents cut only between pieces."""

    def __init__(self, config, rt):
        self.config, self.rt = config, rt
        need, have, parts = config.data.val_tokens + 1, 0, []
        for path in find_files(config.data.val_files):
            parts.append(read_shard(path, config.model.vocab_size, need - have))
            have += len(parts[-1])
        require_validation_tokens(config, have)
        self.tokens = np.concatenate(parts)

    def __iter__(self):
        n = self.config.data.val_batch_tokens
        size = cu_seqlens_size(n, self.config.data.tokens_per_doc)
        for start in range(self.rt.rank * n, self.config.data.val_tokens, self.rt.world * n):
            piece = self.tokens[start:start + n + 1]
            borders = np.append(np.flatnonzero(piece[:-1] == self.config.model.separator), n)
            yield make_batch(piece, cu_seqlens(borders, n, size), self.config, self.rt.device)
