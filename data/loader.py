"""Reads token shards, packs documents into micro-batches, and copies them to the device.

Shape letters: N tokens of one forward pass, G ranks. records/record74.md has the quirks K1, K2.
"""

import copy
import dataclasses
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data import NGRAM_FACTORS, SIGN_FACTORS, SIGN_ROWS
from data.run.program import UserError
from data.shards import Shards, read_shard


def ngram_hash(tokens: np.ndarray, order: int, factors, modulus: int, rest: int) -> np.ndarray:
    """A number below `modulus` for each token and the order - 1 tokens before it, (N,) int32; `rest` for the first
    order - 1 tokens. K1."""
    # The products of 16-bit tokens and factors fit in 32 bits. NumPy takes `//` of these five times as fast as `%`.
    hashed, tokens = np.full(len(tokens), rest, np.int32), tokens.astype(np.uint32)
    whole = max(0, len(tokens) - order + 1)  # n-grams
    parts = (factor * tokens[order - 1 - i:][:whole] for i, factor in enumerate(factors[:order]))
    mixed = functools.reduce(np.bitwise_xor, parts)
    hashed[order - 1:] = mixed - mixed // modulus * modulus
    return hashed


def ngram_rows(tokens: np.ndarray, ngrams) -> np.ndarray:
    """Rows of the n-grams of all orders, (orders * N,) int32: those of the first order, then those of the next, as the
    parts of the table lie. The last row of a part is for tokens without a whole n-gram. ngrams: `Model.ngrams`."""
    starts = accumulate((rows for _, rows in ngrams), initial=0)
    return np.concatenate([start + ngram_hash(tokens, order, NGRAM_FACTORS, rows - 1, rows - 1)
                           for start, (order, rows) in zip(starts, ngrams)])


def sign_rows(tokens: np.ndarray, ngrams) -> np.ndarray:
    """Rows of signs of the same n-grams, in the same order; row 0 for tokens without a whole n-gram."""
    return np.concatenate([ngram_hash(tokens, order, SIGN_FACTORS, SIGN_ROWS, 0) for order, _ in ngrams])


SWEEP_STRIDE = 20011  # a prime that divides no padded vocabulary, so a sweep in these steps visits every class


@functools.cache
def two_sweeps(classes: int) -> np.ndarray:
    """All classes in steps of SWEEP_STRIDE, twice: a sweep that begins anywhere is a part of it."""
    return np.arange(2 * classes) * SWEEP_STRIDE % classes


def sample_candidates(targets: np.ndarray, classes: int, count: int, row: int, gate: int | None = None):
    """(`count` distinct classes, int64; positions of the targets among them, int64) for a sampled softmax, which
    normalises over these classes (candidates) alone. None when gate and targets are more than `count`. PR 360,
    devenpzak.

    The candidates are the gate, if there is one, all targets, and the next others of a sweep through all classes. Its
    start depends only on `row`, the number of the micro-batch in the run, so any number of ranks takes the same.
    """
    taken = np.zeros(classes, bool)
    taken[targets] = True
    ids = np.flatnonzero(taken)
    ids = ids if gate is None else np.append(gate, ids)
    taken[ids] = True
    if len(ids) > count:
        return None
    start = row * (int(0.618 * classes) | 1) % classes  # the golden ratio spreads the starts evenly
    sweep = two_sweeps(classes)[start:start + count]  # at most len(ids) of these classes are taken
    ids = np.concatenate([ids, sweep[~taken[sweep]][:count - len(ids)]])
    positions = np.empty(classes, np.int64)
    positions[ids] = np.arange(count)
    return ids, positions.take(targets)


def document_of_tokens(ends: np.ndarray, N: int) -> np.ndarray:
    """Start and end of the document of every token, (2, N) int32. ends (documents,): the tokens up to the end of each;
    what is behind the last end is a document, too."""
    borders = np.concatenate([[0], ends, [N]]).astype(np.int32)
    return np.repeat([borders[:-1], borders[1:]], np.diff(borders), axis=1)


PIECE = 16  # most tokens of one id that a program of `embedding_grad` sums; some ids occur thousands of times


def sorted_pieces(ids: np.ndarray) -> np.ndarray:
    """Sorts ids (N,), from 0 to 2^32 - 1, for the gradient of a table -> (5, N + 1) int32, for SortedIds. On a GPU,
    this would be many small kernels.

    A piece is up to PIECE positions of one id; a group is the pieces of an id that has several. The pieces of groups
    come first, since the longest ones should not start last. The rows: positions, sorted by their ids, then 0; where
    every piece begins among them, then N; where it ends, then N; the first piece of every group, then the number of
    pieces in groups; the id of every piece, then -1.
    """
    # NumPy sorts numbers of 16 bits by radix: 65536 ids take 1.2 ms here, 3.6 as numbers of 64 bits (AMD EPYC).
    N, order, high = len(ids), np.argsort(ids.astype(np.uint16), kind="stable"), (ids >> 16).astype(np.uint16)
    if high.any():  # `take` is faster than brackets
        order = order.take(np.argsort(high.take(order), kind="stable"))
    ids = ids.take(order)
    first = np.ones(N, bool)  # whether an id begins here
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    begins = np.flatnonzero(first)
    ends = np.append(begins[1:], N)[:len(begins)]
    sizes = ends - begins
    several = sizes > PIECE
    lengths = -(-sizes[several] // PIECE)  # of the groups, in pieces
    groups = np.cumsum(lengths) - lengths
    cuts = np.repeat(begins[several] - PIECE * groups, lengths) + PIECE * np.arange(lengths.sum())
    cut_ends = np.minimum(cuts + PIECE, np.repeat(ends[several], lengths))
    begins, ends = np.append(cuts, begins[~several]), np.append(cut_ends, ends[~several])
    rows = np.empty((5, N + 1), np.int32)
    for row, values, rest in zip(rows, (order, begins, ends, groups, ids[begins]), (0, N, N, len(cuts), -1)):
        row[:len(values)], row[len(values):] = values, rest
    return rows


class Exchange(NamedTuple):
    """Which rows of the n-gram table a micro-batch takes from the ranks, and gives to them."""

    takes: list[int]  # number of rows from each rank
    gives: list[int]  # number of rows to each rank
    rows: Tensor  # (sum of gives,) int32, the rows to give, for one rank after the other, in this rank's part
    pieces: Tensor | None  # sorted_pieces of these rows; for training


class RowRouter:
    """Tells the ranks which rows of a table the others need. Each rank has `block` rows of the table, in their order.
    Every rank must make and call its routers in the same order. The lists travel between the hosts."""

    def __init__(self, rt, table_rows):
        self.rt, self.block, self.group = rt, -(-table_rows // rt.world), dist.new_group(backend="gloo")

    def __call__(self, rows: np.ndarray, on_device, training):
        """(rows (M,) int32, as numbers in the list of rows that the exchange brings; the Exchange)."""
        world, rank = self.rt.world, self.rt.rank
        wanted, numbers = np.unique(rows, return_inverse=True)
        mine = torch.full((len(rows) + 1,), len(wanted), dtype=torch.int32)
        mine[1:1 + len(wanted)] = torch.from_numpy(wanted)
        lists = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(lists, mine, group=self.group)
        borders = self.block * np.arange(world + 1)
        lists = [found[1:1 + found[0]].numpy() for found in lists]
        given = [found[slice(*np.searchsorted(found, borders[rank:rank + 2]))] - np.int32(borders[rank])
                 for found in lists]
        joined = np.concatenate(given)
        takes = np.diff(np.searchsorted(wanted, borders)).tolist()
        return numbers.astype(np.int32), Exchange(takes, list(map(len, given)), on_device(joined),
                                                  on_device(sorted_pieces(joined)) if training else None)


class Batch(NamedTuple):
    """One micro-batch of packed documents, the input of a forward pass."""

    buffer: Tensor  # (bytes,) uint8, the memory of all tensors below, but not of the exchange
    tokens: Tensor  # (N,) int32
    targets: Tensor  # (N,) int64, the next tokens; with candidates: their positions in the candidates
    documents: dict[bool, Tensor]  # whether paired -> (2, N) or (2, 2 N) int32, `document_of_tokens` of its positions
    row_ids: dict[str, Tensor]  # n-gram table, "signs" -> (orders * N,) int32, `ngram_rows` and `sign_rows`
    candidates: Tensor | None = None  # (P,) int64, the classes of a sampled softmax
    pieces: dict[str, Tensor] = {}  # "tokens" or table -> int32, sorted_pieces of its ids; for training
    exchange: Exchange | None = None  # where the rows of the n-gram table are; row_ids are then positions in its list

    def clone(self):
        """A batch whose tensors are copies, at the same places of a buffer of its own; without the exchange."""
        return copy.deepcopy(self._replace(exchange=None))  # copies memory once, and tensors share the copy


def to_device(arrays, device) -> tuple[Tensor, list[Tensor]]:
    """(buffer of bytes on the device, tensors of the arrays in it). The host launches one copy for all, since it takes
    longer to launch a small copy than the GPU takes to make it. The copy does not block the host, but on a Mac, where
    PyTorch has lost such copies."""
    # A tensor begins at a multiple of 16 bytes. For pointers without this alignment, Triton would compile more kernels.
    starts = [*accumulate((-(-x.nbytes // 16) * 16 for x in arrays), initial=0)]
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = buffer.numpy()
    for start, x in zip(starts, arrays):  # in NumPy: PyTorch would wake its threads for each copy
        memory[start:start + x.nbytes].view(x.dtype).reshape(x.shape)[:] = x
    buffer = buffer.to(device, non_blocking=device.type == "cuda")
    return buffer, [buffer[start:start + x.nbytes].view(torch.from_numpy(x).dtype).view(x.shape)
                    for start, x in zip(starts, arrays)]


def make_batch(tokens: np.ndarray, ends: np.ndarray, config, device, hash_ids=None, row=None, count=0,
               router=None) -> Batch:
    """A Batch on the device, from N + 1 consecutive tokens and the ends of documents. Copies to a GPU do not block the
    host.

    hash_ids (V,): ids that stand for the tokens in the hash of n-grams. For training, row: number of this micro-batch
    in the run; count: number of candidates (0: all classes). router: RowRouter, where several ranks share the table.
    """
    def on_device(array):
        return to_device([array], device)[1][0]

    inputs, targets = tokens[:-1], tokens[1:].astype(np.int64)
    sampled = count and sample_candidates(targets, config.model.padded_vocab, count, row, config.model.gate_id)
    *candidates, targets = sampled or [targets]
    hashed = inputs if hash_ids is None else hash_ids.take(inputs)
    rows, exchange, table = ngram_rows(hashed, config.model.ngrams), None, config.model.ngram_table
    if router is not None:
        rows, exchange = router(rows, on_device, row is not None)
    documents = {paired: document_of_tokens((1 + paired) * ends, (1 + paired) * len(inputs))
                 for paired in {False, *(layer.paired for layer in config.model.layers)}}
    row_ids = {table: rows} | ({"signs": sign_rows(hashed, config.model.ngrams)} if config.model.bigram_signs else {})
    pieces = {} if row is None else {"tokens": sorted_pieces(inputs), table: sorted_pieces(rows)}
    buffer, (inputs, targets, *rest) = to_device(
        [inputs.astype(np.int32), targets, *documents.values(), *row_ids.values(), *pieces.values(), *candidates],
        device)
    rest = iter(rest)
    documents, row_ids, pieces = (dict(zip(arrays, rest)) for arrays in (documents, row_ids, pieces))
    return Batch(buffer, inputs, targets, documents, row_ids, next(rest, None), pieces, exchange)


def make_router(config, rt) -> RowRouter | None:
    """The router of a run on several ranks that share an n-gram table."""
    shared = rt.world > 1 and any(config.model.ngram_rows)
    return RowRouter(rt, sum(rows for _, rows in config.model.ngrams)) if shared else None


class Shard:
    """The first `most` tokens of a training shard, and the starts and lengths of its documents. read: `read_shard`, or
    `Shards.read`. Raises their errors."""

    def __init__(self, path, model, most=sys.maxsize, read=read_shard):
        self.tokens = read(path, model.vocab_size, most)
        self.starts = np.flatnonzero(self.tokens == model.bos_id)
        self.lengths = np.diff(self.starts, append=len(self.tokens))

    def pack(self, cursor, tokens, max_doc_len):
        """(starts, lengths, next cursor) of the documents from number `cursor` on that fill tokens + 1 places; None if
        the documents run out. Documents are cut at max_doc_len, and the last document where the micro-batch is full.
        The loader drops the rest of a cut document."""
        lengths = np.minimum(self.lengths[cursor:cursor + tokens + 1], max_doc_len)
        total = np.cumsum(lengths)
        last = int(np.searchsorted(total, tokens + 1))
        if last == len(total):
            return None
        lengths[last] -= total[last] - (tokens + 1)
        return self.starts[cursor:cursor + last + 1], lengths[:last + 1], cursor + last + 1


def no_row(tokens, max_doc_len) -> UserError:
    return UserError(f"no training shard fills a row of {tokens} tokens with documents cut at {max_doc_len}; use more"
                     " data or a smaller batch (--stage1.batch_tokens ...)")


class Loader:
    """Training batches of one rank. The order of documents does not depend on the number of ranks.

    A step takes `micro_batches` micro-batches; number j goes to rank j mod G as micro-step j div G. A micro-batch that
    does not fit into the rest of a shard starts on the next shard. (Record 74 did so only on one rank.) One thread
    builds the next batch, another thread reads the next shard.

    plans: the plans of the steps to serve, in order. hash_ids: see make_batch. shards: the training shards as they were
    at the start of the run, for a run that makes several loaders.
    """

    def __init__(self, config, rt, plans, warn=print, hash_ids=None, shards=None):
        self.config, self.rt, self.plans, self.warn, self.hash_ids = config, rt, plans, warn, hash_ids
        self.shards = shards or Shards(config.data.train_files)
        self.files = [*self.shards.files]
        self.stream = torch.cuda.Stream(rt.device) if rt.device.type == "cuda" else None
        self.builder, self.reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.router = make_router(config, rt)
        self.load_state_dict({"index": 0, "part": 0, "shard": 0, "cursor": 0})

    def state_dict(self):
        """index, part: the next step (position in `plans`) and micro-step; shard, cursor: the next document. The state
        follows the batches that `next_batch` has returned, not the batches that were read ahead."""
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)
        self.batches = self._batches(**state)
        self.build()

    def build(self):
        """Begin to build the next batch, on a Mac while nothing else uses the GPU: MPS is not safe for threads."""
        self.ready = self.builder.submit(next, self.batches, None)
        if self.rt.device.type == "mps":
            self.ready.exception()

    def replay(self, state, count) -> list[Batch]:
        """The `count` batches that follow a state, as they were, but without an Exchange, which needs all ranks."""
        batches = [batch for batch, *_ in islice(self._batches(**state, routed=False), count)]
        if self.stream is not None:
            self.stream.synchronize()  # their copies run there
        return batches

    def next_batch(self) -> Batch:
        batch, copied, self.state = self.ready.result()
        if copied is not None:  # the copy ran on a side stream
            current = torch.cuda.current_stream()
            current.wait_event(copied)
            routed = [x for x in batch.exchange[2:] if x is not None] if batch.exchange else []
            for tensor in [batch.buffer, *routed]:
                tensor.record_stream(current)
        self.build()
        return batch

    def next_exchange(self) -> Exchange | None:
        """The exchange of the batch that `next_batch` returns next, ready on the device; None at the end of the run, or
        where `next_batch` raises an error."""
        if self.ready.exception() or not self.ready.result():
            return None
        batch, copied, _ = self.ready.result()
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)
        return batch.exchange

    def _shard(self, index):
        return Shard(self.files[index % len(self.files)], self.config.model, read=self.shards.read)

    def _batches(self, routed=True, **state):
        """Yields (batch, event after its copies or None, state after the batch), beginning at a state. K2."""
        if self.stream is not None:
            torch.cuda.set_device(self.rt.device)  # every thread has its own current device
        for rows, plan, part, state in self._rows(**state):
            shard, starts, lengths = rows[self.rt.rank]
            tokens, micro_batches = plan.micro_batch_tokens, self.config.system.micro_batches
            number = plan.step * micro_batches + part * self.rt.world + self.rt.rank
            joined = np.concatenate([shard.tokens[s:s + n] for s, n in zip(starts, lengths)])
            ends = np.minimum(np.cumsum(lengths), tokens)
            with torch.cuda.stream(self.stream):  # None: the current one
                batch = make_batch(joined, ends, self.config, self.rt.device, self.hash_ids, number, plan.candidates,
                                   self.router if routed else None)
                copied = self.stream and self.stream.record_event()
            yield batch, copied, state

    def _rows(self, index, part, shard, cursor):
        """Yields (the documents of each rank's micro-batch, plan, micro-step, state after them), beginning at a
        state. A rank's documents: (shard, their starts and lengths)."""
        current, following = self._shard(shard), self.reader.submit(self._shard, shard + 1)
        parts = self.config.system.micro_batches // self.rt.world
        while index < len(self.plans):
            plan, planned = self.plans[index], []
            tokens, max_doc_len = plan.micro_batch_tokens, plan.max_doc_len
            for now in range(part, parts):
                rows = []
                for _ in range(self.rt.world):
                    tried = 0
                    while (packed := current.pack(cursor, tokens, max_doc_len)) is None:
                        shard, cursor, tried = shard + 1, 0, tried + 1
                        if tried > len(self.files):
                            raise no_row(tokens, max_doc_len)
                        if shard == len(self.files):
                            self.warn("training data exhausted: starting again with the first shard; a second pass"
                                      " raises the validation loss")
                        current, following = following.result(), self.reader.submit(self._shard, shard + 1)
                    starts, lengths, cursor = packed
                    rows.append((current, starts, lengths))
                after = {"index": index + (now + 1) // parts, "part": (now + 1) % parts, "shard": shard,
                         "cursor": cursor}
                planned.append((rows, plan, now, after))
            yield from planned  # an error in the data comes before the first micro-batch, where a run can be saved
            index, part = index + 1, 0


def kept_tokens(config) -> int:
    """How many tokens of the longest training shard the loader uses in the stage with the shortest documents, which
    cuts most. Reads the first 4 million tokens at most."""
    shards = Shards(config.data.train_files)
    _, path = max(zip(shards.counts, shards.files))
    max_doc_len = min(stage.max_doc_len for stage in config.schedule.stages)
    return int(np.minimum(Shard(path, config.model, 2**22).lengths, max_doc_len).sum())


def fit_validation(config):
    """The config with nearly all validation tokens, in as few pieces as before, if the files hold fewer than
    --val_tokens, but 17 at least."""
    data, unit = config.data, 16
    with suppress(UserError):  # `survey_validation_data` says what is wrong with the files
        available = sum(Shards(data.val_files).counts) - 1
        if unit <= available < data.val_tokens:
            pieces = -(-available // data.val_batch_tokens)
            piece = max(unit, available // pieces // unit * unit)
            data = dataclasses.replace(data, val_tokens=min(pieces, available // piece) * piece, val_batch_tokens=piece)
    return dataclasses.replace(config, data=data)


def require_validation_tokens(config, available):
    """Raises UserError when the validation files hold too few tokens. The last target needs one token more."""
    required = config.data.val_tokens + 1
    if available < required:
        raise UserError(f"{config.data.val_files} holds {available} tokens, validation needs {required}:"
                        " lower --val_tokens")


class ValidationData:
    """The first `val_tokens` tokens of the validation files, in pieces of `val_batch_tokens`; iterating yields Batches.

    Piece i goes to rank i mod G. A document that crosses the end of a piece is cut. Ranks that share an n-gram table
    fetch its rows together. So a rank that has a piece less than another rank yields piece 0 after its own pieces,
    whose number is `pieces`. Nothing is read later. hash_ids: see make_batch; shards: see Loader. Raises UserError for
    a bad shard among those with these tokens; the first 2^22 tokens of each need a separator.
    """

    def __init__(self, config, rt, hash_ids=None, shards=None):
        self.config, self.rt, self.hash_ids, self.router = config, rt, hash_ids, make_router(config, rt)
        missing, parts = config.data.val_tokens + 1, []
        shards = shards or Shards(config.data.val_files)
        for path in shards.files:
            if missing:
                parts.append(shards.read(path, config.model.vocab_size, max(missing, 2**22))[:missing])
                missing -= len(parts[-1])
        self.tokens = np.concatenate(parts)
        require_validation_tokens(config, len(self.tokens))
        n, total = config.data.val_batch_tokens, config.data.val_tokens
        self.starts = [*range(rt.rank * n, total, rt.world * n)]
        self.pieces = len(self.starts)
        if self.router is not None and self.pieces < -(-total // (rt.world * n)):
            self.starts.append(0)

    def __iter__(self):
        n = self.config.data.val_batch_tokens
        for start in self.starts:
            piece = self.tokens[start:start + n + 1]
            ends = np.flatnonzero(piece[:-1] == self.config.model.bos_id)
            yield make_batch(piece, ends, self.config, self.rt.device, hash_ids=self.hash_ids, router=self.router)
