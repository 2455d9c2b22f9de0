"""Triton kernels of the trainer, each beside the plain PyTorch code that it replaces.

An operation in IMPLEMENTATIONS has three parts: a wrapper `<name>`, whose decorator `operation` says and checks what
its tensors must be; a reference `<name>_ref` in plain PyTorch; and a Triton kernel. CPU tensors take the reference.
With TRITON_INTERPRET=1 before the import, Triton's interpreter runs the kernels on CPU tensors, except those with bf16
products or FP8 codes, which it gets wrong.

Conventions
  Launch parameters are in tables; nothing is autotuned. K1 to K12 are quirks of record 74 (records/record74.md).
  Strides are in elements. Offsets into tensors of N·D elements or more are int64.
  Kernels take dtypes from their pointers. Results are rounded once unless the section says otherwise.
  In kernels, capitalised names are pointers, descriptors, tuples of a pointer and strides (X, Gate, dGate), or
  constants (BLOCK, H). Lower-case names are indices (m, n, t), strides and sizes, and values on chip (x, gate).
  Tiles are read by descriptors on GPUs with a copy engine (TMA), elsewhere by pointers.

A new operation needs what records/guide.md says, a case in data/run/trial.py, and a row in this table. Column ms: what
a section saves per step of record 74's model (572 ms, one H100) against compiled PyTorch and FlashAttention-2;
records/2026-11-25_kernels has all times.
  section                                                                                              ms   lines
  1   lookup, embedding_grad, update_rows   rows of the embedding tables, gradients and updates        42     345
  2   attend, attend_backward               sliding-window attention within packed documents           64     250
  3   attention_block                       gates, projection, norm, rotary, values, around section 2  42     565
  4   both_layouts, WeightCodes             FP8 codes; they save in sections 3, 5 and 7                       175
  5   mlp; Fp8Mlps                          ReLU² MLP, in bf16; in FP8                                 26; 97 385
  6   pointer, pointer_inputs               attention on earlier copies of the target (not in record 74)      275
  7   HeadLoss, cross_entropy               head and softcapped multi-token loss, in bf16; in FP8     69; 115 335
  8   XXT, XTX, ba_plus_cAA                 symmetric products of the Muon iteration                  1.2     150
  9   fused_momentum, normuon_update        NorMuon, and Adam: each weight is read and written once             265
  10  mix, add_later, scaled_weights        sums of streams, their norm and its FP8 codes; factors                620
  11  transpose_copy, transpose_add         copies of the tied head; transposed FP8 gradients         133      56
"""

import collections
import functools
import math
import os
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

NO_TRITON = ""  # empty, or the reason why Triton cannot be imported
try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:  # for example on macOS and Windows
    NO_TRITON = str(error)

    class Absent:
        """Stands for Triton, so that the kernels can be defined and the references can run."""
        __version__ = "absent"
        __getattr__ = lambda self, name: self
        __call__ = lambda self, decorated=None, *args, **kwargs: self if decorated is None else decorated

    triton = tl = gluon = gl = Absent()

constexpr = tl.constexpr  # of Triton's kernels and of Gluon's
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once; triton.jit reads the variable below, too
RMS_EPS = 2.0**-23  # of every RMS norm in the model
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_MAX, E5M2_MAX = 448.0, 57344.0  # the largest finite values; without saturation, e4m3 would make NaN of larger ones
FP8_MAX = {E4M3: E4M3_MAX, E5M2: E5M2_MAX}
VALUE_FLOOR = 1e-8  # least v · v of exclusive attention
WEIGHT_FLOOR = 1e-12  # least exact scale; it keeps the division by a scale finite
_RMS_EPS, _E4M3_MAX, _E5M2_MAX, _VALUE_FLOOR, _WEIGHT_FLOOR = map(
    constexpr, (RMS_EPS, E4M3_MAX, E5M2_MAX, VALUE_FLOOR, WEIGHT_FLOOR))  # for kernels
NAN_STAYS = constexpr(tl.PropagateNan.ALL)
_second_stream = functools.cache(torch.cuda.Stream)  # of a GPU


def _takes_ref(*tensors, any_dtype=False):
    """Whether an op with these tensors runs its PyTorch reference: without CUDA, unless the interpreter is on.
    Triton 3.6's interpreter gets products wrong for any dtype but fp32. any_dtype: the op has no product."""
    interpreted = INTERPRETED and (any_dtype or all(x.dtype == torch.float32 for x in tensors))
    return tensors[0].device.type in ("cpu", "mps") and not interpreted


def _sm_count(device) -> int:  # streaming multiprocessors (SMs)
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _has_tma(device) -> bool:
    """Whether kernels load tiles by the copy engine (TMA): from Hopper on. Without it, descriptors are slow."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def _is_hopper(device) -> bool:
    """Whether the device has the matrix products of Hopper, which later GPUs lack."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _shared_memory(device) -> int:
    """Bytes of shared memory that one program may use."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 2**20


def _at_least_fp32(x):  # converted if its dtype is narrower
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Function(torch.autograd.Function):
    """An operation with a gradient: forward and backward are static, and backward has no gradient."""
    def __init_subclass__(cls):
        cls.forward, cls.backward = staticmethod(cls.forward), staticmethod(once_differentiable(cls.backward))


def _summed(parts, *tensors):
    """Gradients of tensors from the parts of a launch's programs (programs, elements of all tensors), fp32."""
    sums = parts.sum(0).split([x.numel() for x in tensors])
    return [total.view(x.shape).to(x.dtype) for total, x in zip(sums, tensors)]


def rms_norm(x):
    """x / rms(x) over the last axis, in fp32 inside; no gain."""
    return F.rms_norm(x, (x.size(-1),), eps=RMS_EPS)


# ---- Contracts -------------------------------------------------------------------------------------------------------

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "bool": torch.bool,
          "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
          "e4m3": E4M3, "e5m2": E5M2}
IMPLEMENTATIONS = {}  # operation -> {name: implementation}; a GPU takes the first, a CPU "torch"


@functools.cache
def _parsed(text):
    """(axes, dtypes, layout) of the text of an argument; see `operation`."""
    axes, _, words = text.removeprefix("?").partition(":")
    dtypes = tuple(DTYPES[word] for word in words.split() if word in DTYPES)
    return axes.split(), dtypes, " ".join(word for word in words.split() if word not in DTYPES)


def _require(op, texts, given, sizes, dtype, device):
    """Raise a ValueError unless the tensors {argument: tensor} are as the texts say. sizes: {letter: size}, filled."""
    for name, text in texts.items():
        tensor, (axes, dtypes, layout) = given.get(name), _parsed(text)
        if tensor is None:
            if text[0] == "?":
                continue
            raise ValueError(f"{op}: {name} must be a tensor, got None")
        shape, batch = list(tensor.shape), tensor.ndim - len(axes) + 1
        if axes[:1] == ["..."] and batch >= 0:
            shape[:batch] = [tuple(shape[:batch])]
        fits = len(shape) == len(axes) and all(
            size == int(axis) if axis.isdecimal() else sizes.setdefault(axis, size) == size
            for axis, size in zip(axes, shape))
        dense = layout == "strided" or tensor.is_contiguous() or layout == "rows" and tensor.stride(-1) == 1
        dtypes = dtypes or (dtype,)
        if not (fits and dense and tensor.device == device and tensor.dtype in dtypes):
            kind = {"": "contiguous ", "rows": "contiguous rows of ", "strided": ""}[layout]
            wanted = ", ".join(filter(None, (str(sizes.get(axis, axis)).strip("(),") for axis in axes)))
            wanted = f"({wanted})" if ", " in wanted else f"({wanted},)"
            raise ValueError(f"{op}: {name} must be {kind}{' or '.join(map(str, dtypes))} of shape {wanted} on"
                             f" {device}, got {tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                             f" on {tensor.device}")


def operation(reference, any_dtype=False, label=None, check=lambda **given: None, **texts):
    """Decorator of a function with the arguments of its `reference`, <name>_ref: it checks the tensors, sends CPU
    tensors to the reference, and registers both functions as <name>, or as `label`.
    texts {argument: "axes: dtypes layout"}; "argument.field" is a field of a named tuple. Axes: a letter is one size in
    all arguments, a number is itself, "..." is any first axes, a "?" in front allows None. Dtypes: without, that of the
    first argument. Layout: "rows" (unit stride in the last axis), "strided" (any strides), or contiguous. A wrong
    tensor raises a ValueError.
    check: a function of the given arguments, which returns what is wrong in words. any_dtype: see `_takes_ref`."""
    def decorate(wrapper):
        op, names = reference.__name__.removesuffix("_ref"), reference.__code__.co_varnames

        @functools.wraps(reference)
        def checked(*args, **options):
            given = dict(zip(names, args)) | options
            first, *others = (given[name] for name in texts if given.get(name) is not None)
            fields = {f"{name}.{field}": x for name, value in given.items() if hasattr(value, "_asdict")
                      for field, x in value._asdict().items()}
            _require(op, texts, given | fields, {}, first.dtype, first.device)
            if fault := check(**given):
                raise ValueError(f"{op}: {fault}")
            if _takes_ref(first, *(x for x in others if x.is_floating_point()), any_dtype=any_dtype):
                return globals()[reference.__name__](*args, **options)  # by name: a test replaces it
            return wrapper(*args, **options)
        checked.__name__, checked.__doc__ = op, wrapper.__doc__ or reference.__doc__
        IMPLEMENTATIONS[label or op] = {"triton": checked, "torch": reference}
        return checked
    return decorate


@triton.jit
def _number(x):
    """x, or the number to which the pointer x points: a CUDA graph reads the numbers of a step from memory."""
    if isinstance(x, tl.tensor) and x.dtype.is_ptr():  # to the interpreter, a number is a Python float
        x = tl.load(x)
    return x


@triton.jit
def _load(X, n, d, N, D):
    """Tile (rows n, columns d) of X (N, D), zeros beyond the edges. _tile: the same in fp32."""
    return tl.load(X + n.to(tl.int64)[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _tile(X, n, d, N, D):
    return _load(X, n, d, N, D).to(tl.float32)


@triton.jit
def _store(X, x, n, d, N, D):
    tl.store(X + n.to(tl.int64)[:, None] * D + d[None, :], x.to(X.dtype.element_ty),
             mask=(n < N)[:, None] & (d < D)[None, :])


@triton.jit
def _store_codes(Codes, CodesT, x, inverse_scale, m, n, M, N):
    """Codes of the tile x (rows m, columns n) of a matrix (M, N), and the transposed codes (N, M)."""
    codes = _saturate(x.to(tl.float32) * inverse_scale, Codes.dtype.element_ty)
    _store(Codes, codes, m, n, M, N)
    _store(CodesT, tl.trans(codes), n, m, N, M)


@triton.jit
def _matrix_tile(X, m, k, M, K, ROWS, COLUMNS):
    """(ROWS, COLUMNS) tile of X (M, K) from row m and column k on, zeros beyond the edges; X: see _matrix_tiles."""
    if isinstance(X, tl.tensor_descriptor):
        return X.load([m, k])
    else:
        return _load(X, m + tl.arange(0, ROWS), k + tl.arange(0, COLUMNS), M, K)


def _matrix_tiles(x, rows, columns):
    """TMA descriptor of (rows, columns) tiles of a contiguous matrix; without TMA the matrix."""
    return TensorDescriptor.from_tensor(x, [rows, columns]) if _has_tma(x.device) else x


def _strided(x):
    """What a kernel takes for a tensor whose last axis is contiguous: (x, its other strides). None stays None."""
    return x if x is None else (x, *x.stride()[:-1])


# ======================================================================================================================
# 1  Embedding tables: lookup, the gradients of its rows, and an update of some rows
#   lookup(table, num_tables, sorted_ids, ops, touched, few)   P tensors (N, D): rows ids[t] of each table
#   signed_rows(table, ids, orders, signs, sign_ids)           rows of n-grams times their signs, summed over the orders
#   embedding_grad(grad, sorted_ids, upstream, place, ...)     grad[ids[t]] += Σ_t upstream[t], or grad[place[ids[t]]]
#   update_rows(p, v, last, touched, grad, t, ...)             Adam without first moment, rows with a gradient only
#   update_few_rows(p, v, last, grad, place, rows, count, ...) the same with one v per row, for a table of n-grams
#
#   table (P·R, D): P = num_tables tables of R rows one below the other. ids (N,): 0 <= id < R, which lookup verifies
#   for tables of tokens. With n-grams of K orders, ids (K N,) has the rows of the first order for all tokens, then of
#   the next. A row and its gradient are multiplied by row sign_ids[t] of signs.
#
# The library passes over all rows, of which a batch touches a few percent. embedding_grad sums the occurrences of a row
# in a fixed order, so a run repeats bit for bit. Without a first moment (β1 = 0), Adam changes nothing in a row without
# gradient but v, which decays. The row makes up for the decay when it has a gradient again; `last` is its last update.
# A table of n-grams (PR 360, devenpzak) has millions of rows, whose gradients would not fit the memory. So FewRows has
# those of the rows that occurred. embedding_grad claims the next place for a row when it first occurs.

# A few ids (comma, "the") occur thousands of times, so the positions of an id are cut into pieces. A first launch sums
# the rows of every piece, and adds the sum to the gradient if the id has no other piece. A second launch, with columns
# cut among programs, adds up the pieces of the few other ids.
# A program waits for memory most of the time, so it sums 4 pieces at once, BLOCK rows of each, and meanwhile loads the
# begin of its next pieces. With a warp for 256 columns, a thread has the same columns of all rows.
EMBEDDING_LAUNCH = {"rows": dict(PIECES=4, BLOCK=2), "pieces": dict(ROWS=32, COLUMNS=128, num_warps=4)}
# More programs than the 8 that fit an SM (rows of 384): the first ones to end make room.
EMBEDDING_PROGRAMS_PER_SM = {"rows": 12, "pieces": 4}
SIGNED_ROWS_LAUNCH = dict(BLOCK=4, num_warps=4)
# Most rows have no gradient, so a program walks over several. Its one warp reads `last` before a thread writes it.
UPDATE_ROWS_LAUNCH = dict(ROWS=16, num_warps=1)
UPDATE_FEW_ROWS_LAUNCH = dict(ROWS=4, num_warps=4)


class SortedIds(NamedTuple):
    """ids (N,) int32; pieces (5, N + 1) int32 by `sorted_pieces` of data/loader.py, which a kernel's backward needs."""
    ids: torch.Tensor
    pieces: torch.Tensor | None = None


def signed_rows_ref(table, ids, orders=1, signs=None, sign_ids=None):
    """(N, D): the sum over the orders of table[ids[t]] · signs[sign_ids[t]], for ids and sign_ids (orders N,)."""
    rows = table.index_select(0, ids)
    rows = rows if signs is None else rows * signs[sign_ids]
    return rows if orders == 1 else rows.view(orders, -1, rows.size(1)).sum(0)


@triton.jit
def _signed_rows_kernel(Out, Table, Ids, Signs, SignIds, N, D, ORDERS: constexpr, COLUMNS: constexpr, BLOCK: constexpr):
    token, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    inside = (token < N)[:, None] & (column < D)[None, :]
    total = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    for order in tl.static_range(ORDERS):
        row = tl.load(Ids + order * N + token, mask=token < N, other=0)
        x = tl.load(Table + row.to(tl.int64)[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if Signs is not None:
            sign = tl.load(SignIds + order * N + token, mask=token < N, other=0)
            x *= tl.load(Signs + sign.to(tl.int64)[:, None] * D + column[None, :], mask=inside, other=0.0)
        total += x
    _store(Out, total, token, column, N, D)


@operation(signed_rows_ref, any_dtype=True, table="R D: bf16 fp32", ids="M: int32", signs="?S D: bf16 fp32",
           sign_ids="?M: int32", check=lambda ids, orders=1, signs=None, sign_ids=None, **others: (
               f"{len(ids)} ids for {orders} orders" if len(ids) % orders else
               (signs is None) != (sign_ids is None) and "signs and sign_ids belong together"))
def signed_rows(table, ids, orders=1, signs=None, sign_ids=None):
    N, D = len(ids) // orders, table.size(1)
    dtype = table.dtype if signs is None else torch.promote_types(table.dtype, signs.dtype)
    out = torch.empty(N, D, dtype=dtype, device=table.device)
    _signed_rows_kernel[(triton.cdiv(N, SIGNED_ROWS_LAUNCH["BLOCK"]),)](
        out, table, ids, signs, sign_ids, N, D, ORDERS=orders, COLUMNS=triton.next_power_of_2(D),
        **SIGNED_ROWS_LAUNCH)
    return out


def embedding_grad_ref(grad, sorted_ids, upstream, place=None, rows=None, count=None, signs=None, sign_ids=None):
    """Adds to grad (R, D) the sum of upstream (N, D) over the tokens of each id. place, rows, count: of FewRows, whose
    gradients grad is; None: row i of grad is that of id i."""
    ids = sorted_ids.ids
    if place is not None:  # each id without a place gets one
        listed = ids.long().sort().values
        known = place[listed]
        claims = F.pad(listed[1:] != listed[:-1], (1, 0), value=True) & (known < 0)  # the first occurrence claims
        new = count + claims.cumsum(0, dtype=torch.int32)
        places = torch.where(known < 0, new - 1, known)
        place[listed], rows[places.long()] = places, listed.int()
        count.copy_(new[-1:])
        ids = place[ids.long()]
    upstream = _at_least_fp32(upstream).repeat(len(ids) // len(upstream), 1)
    upstream = upstream if signs is None else upstream * signs[sign_ids]
    grad += torch.ops.aten.embedding_dense_backward(upstream, ids, grad.size(0), -1, False)


@triton.jit
def _load_pieces(Pieces, piece, N):
    """(first position, end, id) of pieces, from rows 1, 2 and 4 of Pieces; the id is -1 behind the last piece."""
    known = piece < N
    return (tl.load(Pieces + (N + 1) + piece, mask=known, other=0),
            tl.load(Pieces + 2 * (N + 1) + piece, mask=known, other=0),
            tl.load(Pieces + 4 * (N + 1) + piece, mask=known, other=-1))


# Ranks exchange lists of ids of any length, and Triton would compile a kernel for each kind of length.
@triton.jit(do_not_specialize=["N", "tokens"])
def _sum_rows_kernel(Grad, Sums, Src, Pieces, Place, Rows, Count, Signs, SignIds, N, D, tokens, stride_sn,
                     COLUMNS: constexpr, PIECES: constexpr, BLOCK: constexpr):
    # Pieces (5, N + 1): see sorted_pieces of data/loader.py. Pieces of groups come first; Sums (N, D) fp32 gets sums.
    column = tl.arange(0, COLUMNS)
    in_groups = tl.load(Pieces + 3 * (N + 1) + N)  # number of pieces
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    begin, end, id = _load_pieces(Pieces, piece, N)
    while tl.max(id, axis=0) >= 0:
        next_piece = piece + tl.num_programs(0) * PIECES
        next_begin, next_end, next_id = _load_pieces(Pieces, next_piece, N)
        adds = (id >= 0) & (piece >= in_groups)
        row, known = id, adds  # known: pieces whose row may have a gradient; a row that gets its place now has none
        if Place is not None:
            id_before = tl.load(Pieces + 4 * (N + 1) + piece - 1, mask=(piece > 0) & (id >= 0), other=-1)
            row = tl.load(Place + id, mask=id != id_before, other=0)  # only the first piece of an id claims
            claims = row < 0
            number = tl.cumsum(claims.to(tl.int32), axis=0)
            claimed = tl.max(number, axis=0)
            if claimed > 0:  # one addition to the counter for all pieces
                row = tl.where(claims, tl.atomic_add(Count, claimed, sem="relaxed") + number - 1, row)
                tl.store(Place + id, row, mask=claims)
                tl.store(Rows + row, id, mask=claims)
            known = adds & (claims == 0)
        target = Grad + row.to(tl.int64)[:, None] * D + column[None, :]
        within = (column < D)[None, :]
        old = tl.load(target, mask=known[:, None] & within, other=0.0)
        total = tl.zeros((PIECES, COLUMNS), dtype=tl.float32)
        for start in range(0, tl.max(end - begin, axis=0), BLOCK):
            place = (begin + start)[None, :] + tl.arange(0, BLOCK)[:, None]  # (BLOCK, PIECES)
            listed = place < end[None, :]
            position = tl.load(Pieces + place, mask=listed, other=0)
            token = (position % tokens).to(tl.int64)
            inside = listed[:, :, None] & within[None, :, :]
            x = tl.load(Src + token[:, :, None] * stride_sn + column[None, None, :], mask=inside, other=0.0)
            x = x.to(tl.float32)
            if Signs is not None:
                sign = tl.load(SignIds + position, mask=listed, other=0).to(tl.int64)
                x *= tl.load(Signs + sign[:, :, None] * D + column[None, None, :], mask=inside, other=0.0)
            total += tl.sum(x, axis=0)
        tl.store(target, (total + old).to(Grad.dtype.element_ty), mask=adds[:, None] & within)
        if tl.min(piece, axis=0) < in_groups:
            _store(Sums, total, piece, column, in_groups, D)
        piece, begin, end, id = next_piece, next_begin, next_end, next_id


@triton.jit
def _load_group(Pieces, group, N):
    """(first piece, end) of a group, the same number twice behind the last group."""
    first = Pieces + 3 * (N + 1) + tl.minimum(group, N - 1)
    return tl.load(first), tl.load(first + 1)


@triton.jit(do_not_specialize=["N"])
def _sum_pieces_kernel(Grad, Sums, Pieces, Place, N, D, COLUMNS: constexpr, ROWS: constexpr):
    # Adds the sums of the pieces of every group to its row.
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(0)
    begin, end = _load_group(Pieces, group, N)
    while begin < end:
        row = tl.load(Pieces + 4 * (N + 1) + begin)
        if Place is not None:
            row = tl.load(Place + row)
        target = Grad + row.to(tl.int64) * D + column
        old = tl.load(target, mask=column < D, other=0.0)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(begin, end, ROWS):
            total += _load(Sums, start + tl.arange(0, ROWS), column, end, D)
        tl.store(target, (tl.sum(total, axis=0) + old).to(Grad.dtype.element_ty), mask=column < D)
        group += tl.num_programs(0)
        begin, end = _load_group(Pieces, group, N)


@operation(embedding_grad_ref, any_dtype=True, grad="R D: bf16 fp32", upstream="N D: bf16 fp32 rows",
           place="?T: int32", rows="?R: int32", count="?1: int32", signs="?S D: bf16 fp32", sign_ids="?M: int32")
def embedding_grad(grad, sorted_ids, upstream, place=None, rows=None, count=None, signs=None, sign_ids=None):
    (tokens, D), N, pieces = upstream.shape, len(sorted_ids.ids), sorted_ids.pieces
    for wrong, words in (
            (N % tokens, f"{N} ids, but upstream has {tokens} rows"),
            (len({x is None for x in (place, rows, count)}) > 1, "place, rows and count belong together"),
            ((signs is None) != (sign_ids is None) or sign_ids is not None and len(sign_ids) != N,
             f"signs need a sign_id for each of the {N} ids"),
            (pieces is None or pieces.shape != (5, N + 1),
             "sorted_ids has no pieces of its ids; make them with sorted_pieces of data/loader.py")):
        if wrong:
            raise ValueError(f"embedding_grad: {words}")
    columns, launch = triton.next_power_of_2(D), EMBEDDING_LAUNCH
    programs = {name: _sm_count(grad.device) * number for name, number in EMBEDDING_PROGRAMS_PER_SM.items()}
    sums = torch.empty(N, D, dtype=torch.float32, device=grad.device)  # of pieces in groups; most rows stay unused
    _sum_rows_kernel[(programs["rows"],)](
        grad, sums, upstream, pieces, place, rows, count, signs, sign_ids, N, D, tokens, upstream.stride(0),
        COLUMNS=columns, num_warps=max(1, columns // 256), **launch["rows"])
    _sum_pieces_kernel[(programs["pieces"], triton.cdiv(D, launch["pieces"]["COLUMNS"]))](
        grad, sums, pieces, place, N, D, **launch["pieces"])


def update_rows_ref(p, v, last, touched, grad, t, step_size, weight_decay, beta2, eps):
    """Update number t (1, 2, ...) of p (R, D) in place, where a row of grad (R, D) is not zero: u = step_size · grad /
    (√v + eps), and cautious weight decay, as adam_update with beta1 = 0. Then grad becomes zero, touched False.
    v (R, D) fp32; last (R, 1) int32: number of the update at which v is right, 0 at the start; touched (R,) bool: True
    at least where a row of grad is not zero. t, step_size, weight_decay may be 0-D tensors."""
    g, w = _at_least_fp32(grad), _at_least_fp32(p)
    changes = (g != 0).any(1, keepdim=True)
    new_v = v * beta2**(t - last) + (1 - beta2) * g * g
    u = step_size * g / (new_v.sqrt() + eps)
    w = w - u - weight_decay * w * (u * w > 0)
    v.copy_(torch.where(changes, new_v, v))
    last.copy_(torch.where(changes, t, last))
    p.copy_(torch.where(changes, w, p))
    grad.zero_()
    touched.zero_()


@triton.jit(do_not_specialize=["t"])
def _update_rows_kernel(P, V, Last, Touched, Grad, R, D, t, step_size, weight_decay, beta2, log2_beta2, eps,
                        COLUMNS: constexpr, ROWS: constexpr):
    t, step_size, weight_decay = _number(t), _number(step_size), _number(weight_decay)
    first, row, column = tl.program_id(0) * ROWS, tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = column < D
    all_touched = tl.load(Touched + first + row, mask=first + row < R, other=0).to(tl.int32)
    for i in range(tl.minimum(ROWS, R - first)):
        if tl.sum(tl.where(row == i, all_touched, 0), axis=0) > 0:
            place = (first + i).to(tl.int64) * D + column
            g = tl.load(Grad + place, mask=inside, other=0.0).to(tl.float32)
            changes = tl.max((g != 0).to(tl.int32), axis=0) > 0
            last = tl.load(Last + first + i)
            v = tl.load(V + place, mask=inside & changes, other=0.0) * tl.exp2((t - last).to(tl.float32) * log2_beta2)
            v += (1 - beta2) * g * g
            w = tl.load(P + place, mask=inside & changes, other=0.0).to(tl.float32)
            u = step_size * g / (tl.sqrt(v) + eps)
            w = w - u - tl.where(u * w > 0, weight_decay * w, 0.0)
            tl.store(V + place, v, mask=inside & changes)
            tl.store(P + place, w.to(P.dtype.element_ty), mask=inside & changes)
            tl.store(Grad + place, tl.zeros_like(g).to(Grad.dtype.element_ty), mask=inside & changes)
            tl.store(Last + first + i, t, mask=changes)
    tl.store(Touched + first + row, tl.zeros_like(row).to(Touched.dtype.element_ty), mask=first + row < R)


@operation(update_rows_ref, any_dtype=True, p="R D: bf16 fp32", v="R D: fp32", last="R 1: int32", touched="R: bool",
           grad="R D")
def update_rows(p, v, last, touched, grad, t, step_size, weight_decay, beta2, eps):
    R, D = p.shape
    _update_rows_kernel[(triton.cdiv(R, UPDATE_ROWS_LAUNCH["ROWS"]),)](
        p, v, last, touched, grad, R, D, t, step_size, weight_decay, beta2,
        math.log2(beta2) if beta2 else -math.inf, eps, COLUMNS=triton.next_power_of_2(D), **UPDATE_ROWS_LAUNCH)


def update_few_rows_ref(p, v, last, grad, place, rows, count, t, step_size, weight_decay, beta2, eps):
    """As update_rows_ref, for the rows rows[:count] of p (R, D), with the gradients of FewRows, which is then empty.
    v (R, 1) fp32: average of the mean of grad² over a row."""
    n = count.item()
    listed = rows[:n].long()
    g, w = _at_least_fp32(grad[:n]), _at_least_fp32(p[listed])
    new_v = v[listed] * beta2**(t - last[listed]) + (1 - beta2) * g.square().mean(1, keepdim=True)
    u = step_size * g / (new_v.sqrt() + eps)
    p[listed] = (w - u - weight_decay * w * (u * w > 0)).to(p.dtype)
    v[listed], last[listed], place[listed] = new_v, int(t), -1
    grad[:n] = 0
    count.zero_()


@triton.jit(do_not_specialize=["t"])
def _update_few_rows_kernel(P, V, Last, Grad, Place, Rows, Count, D, t, step_size, weight_decay, beta2, log2_beta2, eps,
                            COLUMNS: constexpr, ROWS: constexpr):
    t, step_size, weight_decay = _number(t), _number(step_size), _number(weight_decay)
    first, column = tl.program_id(0) * ROWS, tl.arange(0, COLUMNS)
    inside = column < D
    for i in range(tl.minimum(ROWS, tl.load(Count) - first)):
        row = tl.load(Rows + first + i).to(tl.int64)
        gradient = Grad + (first + i).to(tl.int64) * D + column
        g = tl.load(gradient, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(P + row * D + column, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(V + row) * tl.exp2((t - tl.load(Last + row)).to(tl.float32) * log2_beta2)
        v += (1 - beta2) * tl.sum(g * g, axis=0) / D
        u = step_size * g / (tl.sqrt(v) + eps)
        w = w - u - tl.where(u * w > 0, weight_decay * w, 0.0)
        tl.store(P + row * D + column, w.to(P.dtype.element_ty), mask=inside)
        tl.store(gradient, tl.zeros_like(g).to(Grad.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # all threads have read the old values of the row
        tl.store(V + row, v)
        tl.store(Last + row, t)
        tl.store(Place + row, -1)


@operation(update_few_rows_ref, any_dtype=True, p="R D: bf16 fp32", v="R 1: fp32", last="R 1: int32", grad="M D",
           place="R: int32", rows="M: int32", count="1: int32")
def update_few_rows(p, v, last, grad, place, rows, count, t, step_size, weight_decay, beta2, eps):
    M, D = grad.shape
    _update_few_rows_kernel[(triton.cdiv(M, UPDATE_FEW_ROWS_LAUNCH["ROWS"]),)](
        p, v, last, grad, place, rows, count, D, t, step_size, weight_decay, beta2,
        math.log2(beta2) if beta2 else -math.inf, eps, COLUMNS=triton.next_power_of_2(D), **UPDATE_FEW_ROWS_LAUNCH)
    count.zero_()


class FewRows:
    """The gradients of a table (R, D) for the rows that occurred since the last update, at most `most`, unchecked.
    grad (most, D): row i is that of row rows[i], for i below count (1,) int32; place (R,) int32: the row of grad for
    each row of the table, -1 without. Only places depend on the order of programs."""
    def __init__(self, table, most):
        self.grad = torch.zeros(most, table.size(1), dtype=table.dtype, device=table.device)
        self.place, self.rows, self.count = (torch.full((size,), value, dtype=torch.int32, device=table.device)
                                             for size, value in ((len(table), -1), (most, 0), (1, 0)))

    places = property(lambda self: (self.place, self.rows, self.count))  # what embedding_grad takes beside grad

    @torch.no_grad()
    def load(self, rows, grad):
        """Start anew with these gradients (n, D) of these rows (n,)."""
        n = len(rows)
        self.place.fill_(-1)
        self.grad.zero_()
        self.grad[:n], self.rows[:n] = grad.to(self.grad), rows.to(self.rows)
        self.place[self.rows[:n].long()] = torch.arange(n, dtype=torch.int32, device=self.place.device)
        self.count.fill_(n)


class _Lookup(_Function):
    def forward(ctx, table, num_tables, sorted_ids, ops, touched, few, orders, *signs):
        ctx.table, ctx.num_tables, ctx.sorted_ids, ctx.ops = table, num_tables, sorted_ids, ops
        ctx.touched, ctx.few, ctx.signs = touched, few, signs
        if orders > 1 or signs:
            return ops.signed_rows(table, sorted_ids.ids, orders, *signs),
        return tuple(part.index_select(0, sorted_ids.ids) for part in table.chunk(num_tables))

    def backward(ctx, *upstream):
        if ctx.few is not None:
            grads, places = [ctx.few.grad], ctx.few.places
        else:
            if ctx.table.grad is None:
                ctx.table.grad = torch.zeros_like(ctx.table)
            grads, places = ctx.table.grad.chunk(ctx.num_tables), (None, None, None)
        for grad, dy in zip(grads, upstream):
            ctx.ops.embedding_grad(grad, ctx.sorted_ids, dy, *places, *ctx.signs)
        if ctx.touched is not None:
            ctx.touched.view(ctx.num_tables, -1).index_fill_(1, ctx.sorted_ids.ids.long(), True)
        return (None,) * (7 + len(ctx.signs))


def lookup(table, num_tables, sorted_ids, ops, touched=None, few=None, orders=1, signs=()):
    """`num_tables` tensors (N, D) of the rows sorted_ids.ids, or one of n-grams. signs: (), or (signs, sign_ids). The
    backward pass adds to `table.grad` or `few` itself, and sets these rows of `touched` (rows,) bool to True."""
    return _Lookup.apply(table, num_tables, sorted_ids, ops, touched, few, orders, *signs)


# ======================================================================================================================
# 2  Attention: causal softmax attention over packed documents with a sliding window and an output gate
#   out_t = Σ_s p_ts v_s,  p_t = softmax over s of  scale · q_t · k_s,  s in t's document with t - window <= s <= t
#   y_t   = gate_t · out_t          per head
#
#   q, k (N, H, d), v (N, H, dv), d and dv powers of two >= 16 with stride 1, any other strides; y (N, H, dv);
#   gate (N, H), not negative; start, end (N,) int32: borders of the document of every token
# Replaces scaled_dot_product_attention under a mask and the multiplication by the gate.
# A tile of queries (keys) meets one contiguous run of keys (queries). A block is masked only if some row does not see
# all of it. Exponentials need no running maximum as long as |scale · q · k| < 80; beyond, infinities appear. q and k
# are RMS-normed: the product is at most d · scale, 17 in the presets.
# Backward, with s_t = Σ_d dy y / gate, P' = gate · P and dP = dy vᵀ:
#   dgate = s,  dv = P'ᵀ dy,  dS = P' (dP - s),  dq = scale dS k,  dk = scale dSᵀ q
# The forward pass saves lse - log gate in base 2, so that P' takes no further product. output_grad of section 3 makes
# s. One launch has programs for tiles of queries (dq) and of keys (dk, dv), side by side because they read the same
# rows. This takes seven products instead of five, but no atomics, so a run repeats bit for bit.
# Online-softmax tiles and the recomputing backward: Dao et al., arXiv 2205.14135 and 2307.08691.

# Two or three programs share an SM, and one takes exponentials while another multiplies.
ATTENTION_LAUNCH = {
    torch.bfloat16: {
        # At d = 128: q and three stages of k and v take 64 KiB, so three programs share an SM.
        "forward": dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3),
        # Two tiles stay on chip, and two stages of two tiles pass by: 96 KiB and 255 registers, two programs per SM.
        "backward": dict(BLOCK=64, num_warps=4, num_stages=2),
        "narrow_backward": dict(BLOCK=64, num_warps=4, num_stages=3),
    },
    torch.float32: {  # for tests: no tensor cores, therefore small tiles
        "forward": dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2),
        **dict.fromkeys(("backward", "narrow_backward"), dict(BLOCK=32, num_warps=4, num_stages=2)),
    },
}
LOG2_E = constexpr(1.4426950408889634)  # kernels compute exponentials as powers of two


def attention_ref(q, k, v, gate, start, window, scale):
    """y (N, H, dv) in plain PyTorch, O(N · window) memory: a block of queries sees its own and a few earlier blocks."""
    N, H = q.shape[:2]
    block = min(128, N)
    preceding = min(-(-window // block), -(-N // block) - 1)  # key blocks before its own that the window can reach
    pad = -N % block
    blocks = (N + pad) // block
    document = F.pad(start, (preceding * block, pad), value=-1)  # padding is a document of its own
    position = torch.arange(-preceding * block, N + pad, device=q.device)

    def key_blocks(x):
        # (preceding·block + N + pad, ...) -> (blocks, (preceding + 1)·block, ...), the keys of each query block
        x = x.unflatten(0, (-1, block))
        return torch.cat([x[j:j + blocks] for j in range(preceding + 1)], 1)

    queries = slice(preceding * block, None)
    doc_q, pos_q = document[queries].view(blocks, block, 1), position[queries].view(blocks, block, 1)
    distance = pos_q - key_blocks(position)[:, None]
    mask = (doc_q == key_blocks(document)[:, None]) & (distance >= 0) & (distance <= window)
    q = F.pad(q, (0, 0, 0, 0, 0, pad)).unflatten(0, (blocks, block)).transpose(1, 2)
    k, v = (key_blocks(F.pad(x, (0, 0, 0, 0, preceding * block, pad))).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale)
    return out.transpose(1, 2).reshape(N + pad, H, -1)[:N] * gate[..., None].to(out.dtype)


@triton.jit
def _load_tile(X, head, first, N, BLOCK, D):
    """(BLOCK, D): one head of rows `first`, `first` + 1, ... of X (N, H, D), zeros beyond N. X is a descriptor (see
    _head_tiles), or a pointer with the strides of a row and of a head."""
    if isinstance(X, tl.tensor_descriptor):
        return X.load([head, first, 0]).reshape(BLOCK, D)
    else:
        x, stride_n, stride_h = X
        i = first + tl.arange(0, BLOCK)
        x += tl.cast(head, tl.int64) * stride_h
        return tl.load(x + i.to(tl.int64)[:, None] * stride_n + tl.arange(0, D)[None, :], mask=(i < N)[:, None],
                       other=0.0)


@triton.jit
def _load_scalars(X, head, first, N, BLOCK):
    """(BLOCK,): columns `first`, `first` + 1, ... of row `head` of X (H, N), zeros beyond N; X as in _load_tile."""
    if isinstance(X, tl.tensor_descriptor):
        return X.load([head, first]).reshape(BLOCK)
    else:
        x, stride_h = X
        t = first + tl.arange(0, BLOCK)
        return tl.load(x + head.to(tl.int64) * stride_h + t, mask=t < N, other=0.0)


@triton.jit
def _store_tile(X, x, head, first, N, BLOCK, D):
    """Store x (BLOCK, D) to one head of rows `first`, ... of X (N, H, D): a pointer and the stride of a row."""
    ptr, stride_n = X
    i = first + tl.arange(0, BLOCK)
    tl.store(ptr + i.to(tl.int64)[:, None] * stride_n + head * D + tl.arange(0, D)[None, :],
             x.to(ptr.dtype.element_ty), mask=(i < N)[:, None])


@triton.jit
def _keys_of_queries(Start, m0, N, window, BLOCK):
    """Keys that the queries from m0 on see: (first of each row (BLOCK,), first and last of any row, first of all)."""
    t = m0 + tl.arange(0, BLOCK)
    last = tl.minimum(m0 + BLOCK, N) - 1
    return (tl.maximum(tl.load(Start + t, mask=t < N, other=0), t - window),
            tl.maximum(tl.load(Start + m0), m0 - window), last, tl.maximum(tl.load(Start + last), last - window))


@triton.jit
def _queries_of_keys(End, n0, N, window, BLOCK):
    """Queries that see the keys from n0 on: (last for each key (BLOCK,), last for any key, last for all keys)."""
    s = n0 + tl.arange(0, BLOCK)
    last = tl.minimum(n0 + BLOCK, N) - 1
    return (tl.minimum(tl.load(End + s, mask=s < N, other=0) - 1, s + window),
            tl.minimum(tl.load(End + last) - 1, last + window), tl.minimum(tl.load(End + n0) - 1, n0 + window))


@triton.jit
def _mask_keys(x, low, m0, n0, to_all, BLOCK_M, BLOCK_N):
    """x (BLOCK_M, BLOCK_N) with -inf where row t does not see key s; unchanged where every row sees the whole block."""
    if (n0 < to_all) | (n0 + BLOCK_N - 1 > m0):
        t, s = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
        # low <= s <= t in one comparison: as uint32, a negative difference is huge.
        x = tl.where((s[None, :] - low[:, None]).to(tl.uint32) <= (t - low).to(tl.uint32)[:, None], x, float("-inf"))
    return x


@triton.jit(do_not_specialize=["window"])
def _attention_kernel(Q, K, V, Gate, Y, Lse, Start, N, H, window, scale, D: constexpr, DV: constexpr,
                      BLOCK_M: constexpr, BLOCK_N: constexpr):
    # First the heads of a tile: programs that run together share keys in L2 and read whole tokens.
    head, m0 = tl.program_id(0) % H, tl.program_id(0) // H * BLOCK_M
    scale2 = scale * LOG2_E
    low, first, last, to_all = _keys_of_queries(Start, m0, N, window, BLOCK_M)
    q = _load_tile(Q, head, m0, N, BLOCK_M, D)
    total, acc = tl.zeros((BLOCK_M,), dtype=tl.float32), tl.zeros((BLOCK_M, DV), dtype=tl.float32)
    for n0 in range(first, last + 1, BLOCK_N):
        k = _load_tile(K, head, n0, N, BLOCK_N, D)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")  # "ieee": fp32 operands are not rounded to tf32
        x = _mask_keys(x, low, m0, n0, to_all, BLOCK_M, BLOCK_N)
        p = tl.exp2(x * scale2)
        total += tl.sum(p, 1)
        # Loaded here and not together with k: the first product would wait for both.
        v = _load_tile(V, head, n0, N, BLOCK_N, DV)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    t = m0 + tl.arange(0, BLOCK_M)
    gate_ptr, stride_n, stride_gate = Gate
    gate = tl.load(gate_ptr + t.to(tl.int64) * stride_n + head * stride_gate, mask=t < N, other=1.0).to(tl.float32)
    _store_tile((Y, H * DV), acc * (gate / total)[:, None], head, m0, N, BLOCK_M, DV)
    tl.store(Lse[0] + head.to(tl.int64) * Lse[1] + t, tl.log2(total) - tl.log2(gate), mask=t < N)


@triton.jit(do_not_specialize=["window"])
def _attention_backward_kernel(Q, dY, Lse, RowDot, q_tiles, dy_tiles, k_tiles, v_tiles, lse_tiles, row_dot_tiles, Grads,
                               Start, End, N, H, window, scale, D: constexpr, DV: constexpr, BLOCK: constexpr):
    # Of one head. The gradient of the values adds to dV0, if given.
    dQ, dK, dV, dV0 = Grads
    tile = tl.program_id(0) // 2
    head, i0 = tile % H, tile // H * BLOCK
    if tl.program_id(0) % 2 == 0:  # keys and values i0 ... i0 + BLOCK - 1
        # Everything is transposed, keys along the rows: Pᵀ and dSᵀ then enter their products from registers.
        s = i0 + tl.arange(0, BLOCK)
        high, last_query, of_all = _queries_of_keys(End, i0, N, window, BLOCK)
        k = _load_tile(k_tiles, head, i0, N, BLOCK, D)
        v = _load_tile(v_tiles, head, i0, N, BLOCK, DV)
        dk = tl.zeros((BLOCK, D), dtype=tl.float32)
        if dV0 is None:
            dv = tl.zeros((BLOCK, DV), dtype=tl.float32)
        else:
            dv = _load_tile((dV0, H * DV, DV), head, i0, N, BLOCK, DV).to(tl.float32)
        for m0 in range(i0, last_query + 1, BLOCK):
            q = _load_tile(q_tiles, head, m0, N, BLOCK, D)
            dy = _load_tile(dy_tiles, head, m0, N, BLOCK, DV)
            t = m0 + tl.arange(0, BLOCK)
            lse = _load_scalars(lse_tiles, head, m0, N, BLOCK)
            row_dot = _load_scalars(row_dot_tiles, head, m0, N, BLOCK)
            x = tl.dot(k, tl.trans(q), input_precision="ieee")  # (keys, queries)
            dp = tl.dot(v, tl.trans(dy), input_precision="ieee")
            if (m0 < i0 + BLOCK - 1) | (m0 + BLOCK - 1 > of_all):
                seen = (t[None, :] - s[:, None]).to(tl.uint32) <= (high - s).to(tl.uint32)[:, None]
                x = tl.where(seen, x, float("-inf"))
            p = tl.exp2(x * (scale * LOG2_E) - lse[None, :])
            dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision="ieee")
            ds = p * (dp - row_dot[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
        _store_tile((dK, H * D), dk * scale, head, i0, N, BLOCK, D)
        _store_tile(dV, dv, head, i0, N, BLOCK, DV)
    else:  # queries i0 ... i0 + BLOCK - 1
        q = _load_tile(Q, head, i0, N, BLOCK, D)
        dy = _load_tile(dY, head, i0, N, BLOCK, DV)
        low, first_key, last_key, to_all = _keys_of_queries(Start, i0, N, window, BLOCK)
        lse, row_dot = _load_scalars(Lse, head, i0, N, BLOCK), _load_scalars(RowDot, head, i0, N, BLOCK)
        dq = tl.zeros((BLOCK, D), dtype=tl.float32)
        for n0 in range(first_key, last_key + 1, BLOCK):
            k = _load_tile(k_tiles, head, n0, N, BLOCK, D)
            v = _load_tile(v_tiles, head, n0, N, BLOCK, DV)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
            dp = tl.dot(dy, tl.trans(v), input_precision="ieee")
            x = _mask_keys(x, low, i0, n0, to_all, BLOCK, BLOCK)
            ds = tl.exp2(x * (scale * LOG2_E) - lse[:, None]) * (dp - row_dot[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        _store_tile((dQ, H * D), dq * scale, head, i0, N, BLOCK, D)


def _aligned_for_tma(x):
    """x, or a contiguous copy if TMA could not load from x: the last stride must be 1, the rest aligned to 16 bytes."""
    in_bytes = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])]
    aligned = x.stride(-1) == 1 and all(number % 16 == 0 for number in in_bytes)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _head_tiles(x, block):
    """TMA descriptor of (1, block, d) tiles of x (N, H, d) or of (1, block) tiles of x (H, N); without TMA _strided."""
    if not _has_tma(x.device):
        return _strided(x)
    x = x.transpose(0, 1) if x.ndim == 3 else x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, block, *x.shape[2:]])


def attend(q, k, v, gate, start, end, window, scale):
    """y (N, H, dv) and lse - log gate (H, N) fp32 in powers of two. attend_backward reads the latter, and `end`."""
    N, H, D = q.shape
    launch = ATTENTION_LAUNCH[q.dtype]["forward"]
    y, lse = v.new_empty(v.shape), q.new_empty(H, N + -N % 4, dtype=torch.float32)[:, :N]  # rows begin at 16 bytes
    q, k, v = (_aligned_for_tma(x) for x in (q, k, v))
    _attention_kernel[(triton.cdiv(N, launch["BLOCK_M"]) * H,)](
        _strided(q), *(_head_tiles(x, launch["BLOCK_N"]) for x in (k, v)), (gate, *gate.stride()), y, _strided(lse),
        start, N, H, window, scale, D=D, DV=v.size(2), **launch)
    return y, lse


def attend_backward(dy, q, k, v, dgate, lse, start, end, window, scale, dv=None, dv_upstream=None):
    """Gradients (dq, dk, dv); attend gives lse, output_grad gives dgate. dv (N, H, dv), if given, receives the gradient
    of v; the heads of a token are contiguous. dv_upstream (N, H, dv), contiguous: another gradient of v to add."""
    N, H, D = q.shape
    dq, dk = (x.new_empty(x.shape) for x in (q, k))
    dv = v.new_empty(v.shape) if dv is None else dv
    row_dot = lse.new_empty_strided(lse.shape, lse.stride()).copy_(dgate.t())
    q, dy, k, v = (_aligned_for_tma(x) for x in (q, dy, k, v))
    launch = ATTENTION_LAUNCH[q.dtype]["backward" if D > 64 else "narrow_backward"]
    _attention_backward_kernel[(2 * triton.cdiv(N, launch["BLOCK"]) * H,)](
        *map(_strided, (q, dy, lse, row_dot)), *(_head_tiles(x, launch["BLOCK"]) for x in (q, dy, k, v, lse, row_dot)),
        (dq, dk, (dv, dv.stride(0)), dv_upstream), start, end, N, H, window, scale, D=D, DV=v.size(2), **launch)
    return dq, dk, dv


# ======================================================================================================================
# 3  Attention block: gates, projection, QK-norm, rotary, key offset, value embedding, attention
#   y = attention_block(x, weight, rotary, ve, w_ve, w_out, documents, window, scale, paired, offset, narrow, codes,
#                       first, share)
#
#   x           (N, D)             normalised input, one row per token
#   weight      (2 H w + H d, D)   projections to q, k and v, in this order; q and k have heads of width w, v of d
#   rotary      (rows, d/4, 2)     cosine and sine side by side; rows >= N, in paired layers >= 2N
#   ve          (N, H d) or None   value embeddings
#   w_ve, w_out (H, C)             weights of the value gate, None without ve, and of the output gate; C even
#   documents   (2, N) int32       start and end in section 2; in paired layers (2, 2N), borders of the 2N positions
#   window, scale                  as in section 2; in paired layers window counts positions of the 2N
#   paired      bool               heads of a token become consecutive positions (K4)
#   offset      bool               the second half of a key comes from the token before (K1)
#   narrow      bool               w = d/2 instead of d, and all channels of q and k turn; without offset
#   codes       None               or the ProjectionCodes of x and weight (section 4): x Wᵀ and its gradients in FP8
#   first       None               or, with codes, first channels of x, (N, C), which the gates read; x is not read
#   share       None               or (H,), (N, H): how much of its value a token loses from its result (below)
#   y           (N, H, d)          gated result of attention
#
#   out_gate = σ(x[:, :C] w_outᵀ)
#   ve_gate = 2 σ(g w_veᵀ), g = x[:, :C] in paired layers, else x[:, :C/2] | ve[:, :C/2]
#   q, k, v = x Wᵀ, H heads each;  q, k ← rms_norm(q), rms_norm(k);  v ← v + ve_gate · ve
#   In the first d/2 channels of q and k, adjacent pairs turn by the angles of one row of `rotary`: row t, in paired
#   layers row 2t + (head mod 2). With `offset` the second half of key t is that of key t - 1 (key 0 keeps its own).
#   y = attention(q, k, v, out_gate); paired layers view q, k, v as (2N, H/2, w or d)
# Replaces a GEMM and about ten passes over q, k and v.
# Forward: one GEMM whose tiles are a head wide, or two narrow heads, so norm, rotation, offset and value embedding work
# on the fp32 accumulator. q and k are the contiguous planes of one tensor (2, N + 1, H, w), as the view of paired
# layers requires. Row N takes the half key that the offset moves past the end.
# Backward: x Wᵀ is not kept. The rotated y = R x̂ contain enough, with R Rᵀ = c² + s² =: ρ, nearly 1, per pair:
#   dx = rstd · Rᵀ (dy - y · mean(dy · y) / ρ),  since  mean(Rᵀdy · x̂) = mean(dy · y)
# All of this is one op, because separate ops would copy dq, dk and dv more often: in unpaired layers and in bf16, dv
# goes straight into its part of dqkv. Sums for w_out and w_ve have a fixed order. attention_block alone checks tensors.
# QK-norm: Henry et al., arXiv 2010.04245; fusing norm, rotary and offset is an open idea of the speedrun's authors.

# Three stages of 32 KiB: two programs share an SM, and one finishes its tile while the other multiplies.
PROJECT_LAUNCH = {
    torch.bfloat16: dict(BLOCK_M=128, BLOCK_K=64, num_warps=4, num_stages=3),
    torch.float32: dict(BLOCK_M=32, BLOCK_K=32, num_warps=4, num_stages=2),  # for tests: no tensor cores
    E4M3: dict(BLOCK_M=128, BLOCK_K=128, num_warps=4, num_stages=3),  # the same bytes as in bf16
}
PROJECT_PROGRAMS_PER_SM = 2
PROJECT_GRAD_LAUNCH = dict(BLOCK=16, num_warps=4)  # 16 rows of one head each
PROJECT_GRAD_CODES_LAUNCH = dict(BLOCK=32, num_warps=4)  # 32 tokens of one head
GATE_LAUNCH = dict(BLOCK=128, num_warps=4)  # fewer tokens would make more parts of dw_out and dw_ve to add up


def head_gates_ref(x, ve, w_ve, w_out, paired):
    """out_gate and ve_gate, each (N, H); ve_gate is None without ve."""
    C = w_out.size(1)
    out_gate = torch.sigmoid(F.linear(x[:, :C], w_out))
    if ve is None:
        return out_gate, None
    gate_input = x[:, :C] if paired else torch.cat((x[:, :C // 2], ve[:, :C // 2]), 1)
    return out_gate, 2 * torch.sigmoid(F.linear(gate_input, w_ve))


@triton.jit
def _gate_ptrs(X, row, num_rows, c, first, end):
    """Pointers into rows of X, a pointer and a stride, and their mask: columns first ... end - 1 are channels
    0, 1, ... of X; all others are masked."""
    x, stride = X
    ptrs = x + row.to(tl.int64)[:, None] * stride + (c - first)[None, :]
    return ptrs, (row < num_rows)[:, None] & ((c >= first) & (c < end))[None, :]


@triton.jit
def _gate_inputs(X, Ve, t, N, c, FROM_X, C):
    """What the output gate and the value gate read (tokens, channels): the latter, channels from FROM_X on of Ve."""
    x_ptrs, x_mask = _gate_ptrs(X, t, N, c, 0, C)
    x = tl.load(x_ptrs, mask=x_mask, other=0.0)
    if Ve is None:
        return x, x
    else:
        ve_ptrs, ve_mask = _gate_ptrs(Ve, t, N, c, FROM_X, C)
        return x, tl.where(ve_mask, tl.load(ve_ptrs, mask=ve_mask, other=0.0), x)


@triton.jit
def _store_gate(gate_input, W, Gate, t, N, h, c, H, C, SCALE):
    """Gate = SCALE · σ(gate_input Wᵀ), gate_input (tokens, channels)."""
    logit = tl.dot(gate_input, tl.trans(_load(W, h, c, H, C)), input_precision="ieee")
    _store(Gate, SCALE * tl.sigmoid(logit), t, h, N, H)


@triton.jit
def _head_gates_kernel(X, Ve, WVe, WOut, Gates, N, FROM_X: constexpr, H: constexpr, C: constexpr, HEADS: constexpr,
                       CHANNELS: constexpr, BLOCK: constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, c = tl.arange(0, HEADS), tl.arange(0, CHANNELS)
    x, mixed = _gate_inputs(X, Ve, t, N, c, FROM_X, C)
    _store_gate(x, WOut, Gates, t, N, h, c, H, C, 1.0)
    if Ve is not None:
        _store_gate(mixed, WVe, Gates + N * H, t, N, h, c, H, C, 2.0)


@triton.jit
def _gate_grad(gate_input, W, Gate, dGate, dW, t, N, h, c, H, C, SCALE):
    """Gradient of gate_input (tokens, channels); stores these tokens' part of the gradient of W to dW (parts, H, C)."""
    gate, dgate, w = _tile(Gate, t, h, N, H), _tile(dGate, t, h, N, H), _load(W, h, c, H, C)
    dlogit = (dgate * gate * (1 - gate / SCALE)).to(gate_input.dtype)
    dw = tl.dot(tl.trans(dlogit), gate_input, input_precision="ieee")
    _store(dW + tl.program_id(0) * H * C, dw, h, c, H, C)
    return tl.dot(dlogit, w, input_precision="ieee")


@triton.jit
def _add_to_channels(X, grad, t, N, c, first, end):
    """Adds grad (tokens, channels) to the channels of X that _gate_ptrs gives."""
    ptrs, mask = _gate_ptrs(X, t, N, c, first, end)
    total = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) + grad
    tl.store(ptrs, total.to(X[0].dtype.element_ty), mask=mask)


@triton.jit
def _head_gates_grad_kernel(dOutGate, dVeGate, Gates, X, Ve, WVe, WOut, dX, dVe, dWVe, dWOut, N, FROM_X: constexpr,
                            H: constexpr, C: constexpr, HEADS: constexpr, CHANNELS: constexpr, BLOCK: constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, c = tl.arange(0, HEADS), tl.arange(0, CHANNELS)
    x, mixed = _gate_inputs(X, Ve, t, N, c, FROM_X, C)
    grad = _gate_grad(x, WOut, Gates, dOutGate, dWOut, t, N, h, c, H, C, 1.0)
    if Ve is not None:
        ve_grad = _gate_grad(mixed, WVe, Gates + N * H, dVeGate, dWVe, t, N, h, c, H, C, 2.0)
        _add_to_channels(dVe, ve_grad, t, N, c, FROM_X, C)
        grad += tl.where((c < FROM_X)[None, :], ve_grad, 0.0)
    _add_to_channels(dX, grad, t, N, c, 0, C)


def _gate_launch(ve, w_out, paired):
    """Compile-time arguments of the two gate kernels."""
    H, C = w_out.shape
    heads, channels = (max(16, triton.next_power_of_2(n)) for n in (H, C))
    return dict(FROM_X=C if ve is None or paired else C // 2, H=H, C=C, HEADS=heads, CHANNELS=channels, **GATE_LAUNCH)


def head_gates(x, ve, w_ve, w_out, paired):
    """gates (1 or 2, N, H): the results of `head_gates_ref` in one tensor."""
    N = x.size(0)
    gates = x.new_empty(1 if ve is None else 2, N, len(w_out))
    _head_gates_kernel[(triton.cdiv(N, GATE_LAUNCH["BLOCK"]),)](
        _strided(x), _strided(ve), w_ve, w_out, gates, N, **_gate_launch(ve, w_out, paired))
    return gates


def head_gates_backward(dout_gate, dve_gate, gates, x, ve, w_ve, w_out, paired, dx, dve, of_ve=None, of_out=None):
    """Adds to dx and dve in place; returns the gradients of w_ve and w_out, or None for parts (see `unbind`)."""
    programs, parts, grads = triton.cdiv(len(x), GATE_LAUNCH["BLOCK"]), [None, None], [None, None]
    for i, (w, of_w) in enumerate(((w_ve, of_ve), (w_out, of_out))):
        if w is not None and (part := of_w and of_w(x, programs, *w.shape)) is None:
            part = grads[i] = x.new_empty(programs, *w.shape, dtype=torch.float32)
        parts[i] = None if w is None else part
    _head_gates_grad_kernel[(programs,)](
        dout_gate, dve_gate, gates, _strided(x), _strided(ve), w_ve, w_out, _strided(dx), _strided(dve), *parts, len(x),
        **_gate_launch(ve, w_out, paired))
    return [grad if grad is None else _summed(grad.flatten(1), w_out)[0] for grad in grads]


# ---- Exclusive attention ---------------------------------------------------------------------------------------------

HEADS_LAUNCH = dict(BLOCK=32, num_warps=4)  # heads of tokens


def exclude_values_ref(y, v, share):
    """z = y − tanh(share) (y · v / v · v) v, for each head, rounded once. y, v, z (N, H, d); share (H,) or (N, H)."""
    wide_y, wide_v = _at_least_fp32(y), _at_least_fp32(v)
    part = torch.tanh(share) * (wide_y * wide_v).sum(-1) / wide_v.square().sum(-1).clamp(min=VALUE_FLOOR)
    return (wide_y - part[..., None] * wide_v).to(y.dtype)


@triton.jit
def _tanh_of_heads(Share, r, rows, H):
    pointer, stride_n, stride_h = Share
    share = tl.load(pointer + r // H * stride_n + r % H * stride_h, mask=r < rows, other=0.0).to(tl.float32)
    return 2 * tl.sigmoid(2 * share) - 1


@triton.jit
def _exclude_values_kernel(Y, V, Share, Z, rows, H, D: constexpr, BLOCK: constexpr):
    r, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    y, v = _tile(Y, r, d, rows, D), _tile(V, r, d, rows, D)
    part = _tanh_of_heads(Share, r, rows, H) * tl.sum(y * v, 1) / tl.maximum(tl.sum(v * v, 1), _VALUE_FLOOR)
    _store(Z, y - part[:, None] * v, r, d, rows, D)


@triton.jit
def _output_grad_kernel(dZ, Y, V, Share, Gate, dY, dV, dShare, dGate, rows, H, D: constexpr, BLOCK: constexpr):
    # Gradients of y, v and share, and of the output gate, which has multiplied y. Without Share, dY is dZ.
    r, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    dy, y = _tile(dZ, r, d, rows, D), _tile(Y, r, d, rows, D)
    if Share is not None:
        dz, v, tanh = dy, _tile(V, r, d, rows, D), _tanh_of_heads(Share, r, rows, H)
        square = tl.sum(v * v, 1)
        cosine = tl.sum(y * v, 1) / tl.maximum(square, _VALUE_FLOOR)
        along = tl.sum(dz * v, 1)
        scaled = tanh * along / tl.maximum(square, _VALUE_FLOOR)
        dy = (dz - scaled[:, None] * v).to(dY.dtype.element_ty)
        _store(dY, dy, r, d, rows, D)
        dy = dy.to(tl.float32)
        back = tl.where(square > _VALUE_FLOOR, 2 * scaled * cosine, 0.0)
        dv = back[:, None] * v - scaled[:, None] * y - (tanh * cosine)[:, None] * dz
        _store(dV, dv, r, d, rows, D)
        pointer, stride_n, stride_h = dShare
        tl.store(pointer + r // H * stride_n + r % H * stride_h, -along * cosine * (1 - tanh * tanh), mask=r < rows)
    gate = tl.load(Gate + r, mask=r < rows, other=0.0).to(tl.float32)
    dgate = tl.where(gate > 0, tl.sum(dy * y, 1) / gate, 0.0)  # a sigmoid that underflowed passes no gradient on
    tl.store(dGate + r, dgate, mask=r < rows)


def exclude_values(y, v, share):  # see exclude_values_ref
    (N, H, d), z, share = y.shape, torch.empty_like(y), share.expand(y.shape[:2])
    _exclude_values_kernel[(triton.cdiv(N * H, HEADS_LAUNCH["BLOCK"]),)](
        y, v, (share, *share.stride()), z, N * H, H, d, **HEADS_LAUNCH)
    return z


def output_grad(dz, y, v, share, gate, of_share=None):
    """(dy, dv, dshare, dgate), dgate (N, H) fp32 of the output gate; share None: dy is dz, and dv and dshare are None.
    of_share: gives the memory for the gradient of share, as pieces of `unbind` have."""
    (N, H, d), dz = y.shape, dz.reshape(y.shape).contiguous()
    dy, dv, dshare, part, shares = dz, None, None, None, (None, None)
    if share is not None:
        dy, dv, part = torch.empty_like(y), torch.empty_like(v), of_share and of_share(y, N, H)
        dshare = y.new_empty(N, H, dtype=torch.float32) if part is None else part
        shares = [(x, *x.stride()) for x in (share.expand(N, H), dshare)]
    dgate = y.new_empty(N, H, dtype=torch.float32)
    _output_grad_kernel[(triton.cdiv(N * H, HEADS_LAUNCH["BLOCK"]),)](
        dz, y, v, shares[0], gate, dy, dv, shares[1], dgate, N * H, H, d, **HEADS_LAUNCH)
    if share is not None:
        dshare = None if part is not None else (dshare if share.ndim == 2 else dshare.sum(0)).to(share.dtype)
    return dy, dv, dshare, dgate


def rotate(x, rotary):
    """x (..., d) with its first adjacent pairs rotated by the angles of rotary (..., pairs, 2)."""
    cos, sin = rotary.unbind(-1)
    even, odd = x[..., :2 * cos.size(-1)].unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((cos * even + sin * odd, cos * odd - sin * even), -1).flatten(-2)
    return torch.cat((rotated, x[..., 2 * cos.size(-1):]), -1)


def head_sizes(weight, rotary, narrow):
    """(H, width of the heads of q and k, width of the heads of v) of a weight of attention_block."""
    d = 4 * rotary.size(1)
    width = d // 2 if narrow else d
    return weight.size(0) // (2 * width + d), width, d


def project_ref(x, weight, rotary, ve, ve_gate, paired, offset, narrow=False, codes=None):
    """q, k and v as attention takes them before the view of paired layers. With codes they are fp32 until rounded."""
    N, (H, width, d) = x.size(0), head_sizes(weight, rotary, narrow)
    qkv = F.linear(x, weight) if codes is None else _ProductOfCodes.apply(x, weight, *codes)
    q, k, v = qkv.split((H * width, H * width, H * d), 1)
    q, k = (F.rms_norm(u.view(N, H, width), (width,), eps=RMS_EPS) for u in (q, k))
    v = v.view(N, H, d)
    if ve is not None:
        v = v + ve_gate[..., None].to(v.dtype) * ve.view(v.shape)
    if paired:
        angles = rotary[:2 * N].view(N, 1, 2, d // 4, 2)
        q, k = (rotate(u.view(N, -1, 2, width), angles).view(u.shape) for u in (q, k))
    else:
        q, k = (rotate(u, rotary[:N, None]) for u in (q, k))
    if offset:
        k = torch.cat((k[..., :d // 2], torch.cat((k[:1, :, d // 2:], k[:-1, :, d // 2:]))), -1)
    return tuple(u.to(x.dtype) for u in (q, k, v))


@triton.jit
def _rotated(x, Rotary, row, inside, part, WIDTH, BLOCK):
    """x (BLOCK, WIDTH) with its adjacent pairs rotated by the angles of `row` (BLOCK,); tiles of v (part 2) stay."""
    c = tl.arange(0, WIDTH)[None, :]
    table = tl.load(Rotary + row[:, None] * WIDTH + c, mask=inside & (part < 2), other=0.0).to(tl.float32)
    cos, sin = tl.split(tl.reshape(table, (BLOCK, WIDTH // 2, 2)))
    cos = tl.where(part < 2, cos, 1.0)
    even, odd = tl.split(tl.reshape(x, (BLOCK, WIDTH // 2, 2)))
    return tl.reshape(tl.join(cos * even + sin * odd, cos * odd - sin * even), (BLOCK, WIDTH))


@triton.jit
def _head_rstd(squares, Rstd, part, h, t, N, H, D):
    """1 / rms (BLOCK, 1) of a head of D channels from its sum of squares (BLOCK,), stored for q and k; 1 for v."""
    rstd = tl.rsqrt(squares / D + _RMS_EPS)
    tl.store(Rstd + (part * N + t) * H + h, rstd, mask=(t < N) & (part < 2))
    return tl.where(part < 2, rstd, 1.0)[:, None]


@triton.jit
def _project_kernel(X, W, Scales, Qk, V, Rstd, Rotary, Ve, Gate, N, K: constexpr, PAIRED: constexpr, OFFSET: constexpr,
                    NARROW: constexpr, H: constexpr, D: constexpr, BLOCK_M: constexpr, BLOCK_K: constexpr):
    # X and W are codes if there are scales. Qk and Ve: a pointer and a stride.
    qk, stride_part = Qk
    HALF: constexpr = D // 2
    TILES: constexpr = 2 * H if NARROW else 3 * H
    c = tl.arange(0, HALF)[None, :]
    if Scales is not None:
        scale = tl.load(Scales[0]) * tl.load(Scales[1])
    # First the heads of a row block: programs that run together share rows of x in L2. One loop over tiles and K, so
    # that the first loads of a tile are under way while the tile before is finished.
    for i in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_M) * TILES, tl.num_programs(0), flatten=True):
        first = i // TILES * BLOCK_M
        tile = i % TILES
        acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            x = _matrix_tile(X, first, k, N, K, BLOCK_M, BLOCK_K)
            w = tl.trans(_matrix_tile(W, tile * D, k, TILES * D, K, D, BLOCK_K))
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if Scales is not None:
            acc *= scale
        # (part, h) is the head of the lower half of the columns, (next_part, next_h) that of the upper half. Part 0 is
        # q, 1 is k, 2 is v. Tiles of q and k in narrow layers have two heads, with odd H one tile a head of q and of k.
        if NARROW:
            part = tl.minimum(2 * tile // H, 2)
            h = tl.where(part == 2, tile - H, 2 * tile % H)
            next_part, next_h = part, h + 1
            if H % 2:
                next_part, next_h = tl.minimum((2 * tile + 1) // H, 2), (2 * tile + 1) % H
        else:
            part, h = tile // H, tile % H
        # Masks instead of branches on `part`, which would keep Triton from joining both loops into one pipelined loop.
        t = first + tl.arange(0, BLOCK_M)
        token, inside = t.to(tl.int64)[:, None], (t < N)[:, None]
        lo, hi = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        row = 2 * t + h % 2 if PAIRED else t  # of the rotary table
        if NARROW:
            rstd = _head_rstd(tl.sum(lo * lo, 1), Rstd, part, h, t, N, H, HALF)
            next_rstd = _head_rstd(tl.sum(hi * hi, 1), Rstd, next_part, next_h, t, N, H, HALF)
            lo = _rotated(lo * rstd, Rotary, row, inside, part, HALF, BLOCK_M)
            # In unpaired layers `hi` turns by the angles of `lo`. Its row is written differently, so that the compiler
            # loads the angles again: it spills 16 instead of 136 bytes (sm_90).
            row = 2 * t + 1 if PAIRED else tl.where(part < 2, t, 0)
            hi = _rotated(hi * next_rstd, Rotary, row, inside, part, HALF, BLOCK_M)
        else:
            rstd = _head_rstd(tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1), Rstd, part, h, t, N, H, D)
            lo = _rotated(lo * rstd, Rotary, row, inside, part, HALF, BLOCK_M)
            hi *= rstd
        if Ve is not None:
            gate = tl.load(Gate + t * H + h, mask=(t < N) & (part == 2), other=0.0).to(tl.float32)[:, None]
            ve = Ve[0] + token * Ve[1] + h * D + c
            lo += gate * tl.load(ve, mask=inside & (part == 2), other=0.0).to(tl.float32)
            hi += gate * tl.load(ve + HALF, mask=inside & (part == 2), other=0.0).to(tl.float32)
        width = tl.where(part == 2, D, HALF) if NARROW else D
        out = tl.where(part == 2, V, qk + part.to(tl.int64) * stride_part) + c + token * (H * width) + h * width
        tl.store(out, lo.to(V.dtype.element_ty), mask=inside)
        hi = hi.to(V.dtype.element_ty)
        out += HALF
        if NARROW and H % 2:  # the upper half may belong to k where the lower half belongs to q
            next_out = qk + next_part.to(tl.int64) * stride_part + c + (token * H + next_h) * HALF
            out = tl.where(part == 2, out, next_out)
        if OFFSET:
            tl.store(out, hi, mask=(t == 0)[:, None] & (part == 1))
            out += tl.where(part == 1, H * D, 0)
        tl.store(out, hi, mask=inside)


@triton.jit
def _store_qkv_grad(dx, dQkv, t, h, N, stride, FIRST, D):
    """Store dx (BLOCK, D), heads h of tokens t, to the columns of dQkv from FIRST on. dQkv: (matrix, None, None), or
    (codes, transposed codes, scale); for codes all h are the same."""
    out, out_t, scale = dQkv
    c = tl.arange(0, D)
    ptrs = out + FIRST + t[:, None].to(tl.int64) * stride + ((h * D)[:, None] + c[None, :])
    if out_t is None:
        tl.store(ptrs, dx.to(out.dtype.element_ty), mask=(t < N)[:, None])
    else:
        dx = dx.to(tl.float32)
        codes = _saturate(dx * tl.div_rn(1.0, tl.load(scale)), out.dtype.element_ty)
        tl.store(ptrs, codes, mask=(t < N)[:, None])
        # Made twice: of one result stored twice, the assembler of CUDA 12.8 would read every second byte of e5m2 before
        # it is computed. The compiler cannot merge the two, because each loads the scale.
        codes_t = _saturate(tl.trans(dx) * tl.div_rn(1.0, tl.load(scale)), out_t.dtype.element_ty)
        ptrs = out_t + (FIRST + (h * D)[None, :] + c[:, None]).to(tl.int64) * N + t[None, :]
        tl.store(ptrs, codes_t, mask=(t < N)[None, :])


@triton.jit
def _norm_rotary_grad(dY, Y, dQkv, Rstd, Rotary, t, h, N, stride, FIRST, PAIRED, OFFSET, TURNED, H, D, BLOCK):
    """Stores the gradient of the projection to q or k, from the gradient dY of the normed Y (N, H, D), whose first
    TURNED channels are rotated. t and h (BLOCK,) are tokens and heads."""
    dy_ptr, stride_dy = dY
    c, inside = tl.arange(0, D)[None, :], (t < N)[:, None]
    column = (h * D)[:, None] + c
    came_from = t[:, None].to(tl.int64)
    if OFFSET:
        came_from += (c >= D // 2)
    y = tl.load(Y + came_from * (H * D) + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + came_from * stride_dy + column, mask=inside & (came_from < N), other=0.0).to(tl.float32)
    if OFFSET:
        dy += tl.load(dy_ptr + column, mask=(t == 0)[:, None] & (c >= D // 2), other=0.0).to(tl.float32)
    rstd = tl.load(Rstd + t * H + h, mask=t < N, other=0.0)
    mean = tl.sum(dy * y, 1) / D
    row = 2 * t + h % 2 if PAIRED else t
    table = tl.load(Rotary + row[:, None] * TURNED + c, mask=inside & (c < TURNED), other=0.0)
    table = tl.where(c < TURNED, table.to(tl.float32), 1.0 - c % 2)  # cosine 1, sine 0: the other channels do not turn
    cos, sin = tl.split(tl.reshape(table, (BLOCK, D // 2, 2)))
    y_even, y_odd = tl.split(tl.reshape(y, (BLOCK, D // 2, 2)))
    dy_even, dy_odd = tl.split(tl.reshape(dy, (BLOCK, D // 2, 2)))
    along = mean[:, None] / (cos * cos + sin * sin)
    even = (dy_even - along * y_even) * rstd[:, None]
    odd = (dy_odd - along * y_odd) * rstd[:, None]
    dx = tl.reshape(tl.join(cos * even - sin * odd, sin * even + cos * odd), (BLOCK, D))
    _store_qkv_grad(dx, dQkv, t, h, N, stride, FIRST, D)


@triton.jit
def _project_grad_kernel(dQ, dK, dV, Q, K, dQkv, Rstd, Rotary, Ve, Gate, dVe, dGate, N, PAIRED: constexpr,
                         OFFSET: constexpr, NARROW: constexpr, COPY: constexpr, H: constexpr, D: constexpr,
                         BLOCK: constexpr):
    # dQ, dK, dV and Ve: a pointer and the stride of a row; dQkv: see _store_qkv_grad. Grid axis 0: q, k or v. Axes 1
    # and 2, which are limited to 65535 programs, have the rows.
    part = tl.program_id(0)
    block = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if dQkv[1] is None:
        row = block * BLOCK + tl.arange(0, BLOCK)  # of the matrix (N · H, D), one head of one token each
        t, h = row // H, row % H
    else:  # tokens of one head, whose transposed codes are contiguous
        t, h = block // H * BLOCK + tl.arange(0, BLOCK), tl.full((BLOCK,), block % H, tl.int32)
    WIDTH: constexpr = D // 2 if NARROW else D  # of the heads of q and k
    stride: constexpr = H * (2 * WIDTH + D)  # of dQkv
    if part == 0:
        _norm_rotary_grad(dQ, Q, dQkv, Rstd, Rotary, t, h, N, stride, 0, PAIRED, False, D // 2, H, WIDTH, BLOCK)
    elif part == 1:
        _norm_rotary_grad(dK, K, dQkv, Rstd + N * H, Rotary, t, h, N, stride, H * WIDTH, PAIRED, OFFSET, D // 2, H,
                          WIDTH, BLOCK)
    else:
        token, column = t.to(tl.int64)[:, None], (h * D)[:, None] + tl.arange(0, D)[None, :]
        dv = tl.load(dV[0] + token * dV[1] + column, mask=token < N, other=0.0)
        if COPY:
            _store_qkv_grad(dv, dQkv, t, h, N, stride, 2 * H * WIDTH, D)
        if Ve is not None:
            dv = dv.to(tl.float32)
            gate = tl.load(Gate + (t * H + h), mask=t < N, other=0.0).to(tl.float32)
            ve = tl.load(Ve[0] + token * Ve[1] + column, mask=token < N, other=0.0).to(tl.float32)
            tl.store(dVe + token * (H * D) + column, (gate[:, None] * dv).to(dVe.dtype.element_ty), mask=token < N)
            tl.store(dGate + (t * H + h), tl.sum(dv * ve, 1).to(dGate.dtype.element_ty), mask=t < N)


def project(x, weight, rotary, ve, ve_gate, paired, offset, narrow=False, codes=()):
    """qk (2, N + 1, H, w), whose planes [:N] are q and k; v (N, H, d); 1 / rms of each head of q and k (2, N, H) fp32.
    codes: those of x and weight, which are then not read, and their scales."""
    N, (H, width, d) = x.size(0), head_sizes(weight, rotary, narrow)
    a, b, *scales = codes or (x, weight)
    launch = PROJECT_LAUNCH[a.dtype]
    qk, v = x.new_empty(2, N + 1, H, width), x.new_empty(N, H, d)
    rstd = x.new_empty(2, N, H, dtype=torch.float32)
    tiles = triton.cdiv(N, launch["BLOCK_M"]) * weight.size(0) // d
    programs = min(tiles, _sm_count(x.device) * PROJECT_PROGRAMS_PER_SM)
    _project_kernel[(programs,)](
        _matrix_tiles(a, launch["BLOCK_M"], launch["BLOCK_K"]), _matrix_tiles(b, d, launch["BLOCK_K"]),
        tuple(scales) or None, (qk, qk.stride(0)), v, rstd, rotary, _strided(ve), ve_gate, N, K=b.size(1),
        PAIRED=paired, OFFSET=offset, NARROW=narrow, H=H, D=d, **launch)
    return qk, v, rstd


def project_backward(dq, dk, dv, qk, rstd, rotary, ve, ve_gate, paired, offset, dqkv, dqkv_t=None, scale=None):
    """Fills dqkv (N, 2 H w + H d), of which dv may be a part; returns the gradients of ve and ve_gate, if any.
    With dqkv_t (2 H w + H d, N), both are filled with codes of the 0-D scale."""
    N, H, d = dv.shape
    value, copy = ve is not None, dv.data_ptr() != dqkv[:, -H * d:].data_ptr()
    dve, dgate = (ve_gate.new_empty(N, H * d), torch.empty_like(ve_gate)) if value else (None, None)
    launch = PROJECT_GRAD_LAUNCH if dqkv_t is None else PROJECT_GRAD_CODES_LAUNCH
    blocks = triton.cdiv(N * H, launch["BLOCK"]) if dqkv_t is None else H * triton.cdiv(N, launch["BLOCK"])
    _project_grad_kernel[(2 + (value or copy), min(blocks, 65535), triton.cdiv(blocks, 65535))](
        *((u, u.stride(0)) for u in (dq, dk, dv)), qk[0], qk[1], (dqkv, dqkv_t, scale), rstd, rotary, _strided(ve),
        ve_gate, dve, dgate, N, PAIRED=paired, OFFSET=offset, NARROW=dq.size(2) < d, COPY=copy, H=H, D=d, **launch)
    return dve, dgate


def _pair_heads(qk, v, paired):
    """q, k, v from qk (2, N + 1, H, w) and v (N, H, d), in paired layers viewed as (2N, H/2, ...)."""
    q, k = qk[:, :-1]
    return (u.view(2 * u.size(0), u.size(1) // 2, u.size(2)) for u in (q, k, v)) if paired else (q, k, v)


class _AttentionBlock(_Function):
    def forward(ctx, first, share, x, weight, rotary, ve, w_ve, w_out, start, end, window, scale, paired, offset,
                narrow, *codes):
        ctx.settings, ctx.parts = (window, scale, paired, offset), _parts(share, weight, w_ve, w_out)
        if codes:  # of x, only the columns of the gates are read; of the weight, only the shape
            x, weight = x[:, :w_out.size(1)].contiguous() if first is None else first, codes[1]
        gates = head_gates(x, ve, w_ve, w_out, paired)
        # The kernel reads the gate only if there is a ve.
        qk, v, rstd = project(x, weight, rotary, ve, gates[-1], paired, offset, narrow, codes[:4])
        *heads, values = _pair_heads(qk, v, paired)
        y, lse = attend(*heads, values, gates[0].view(values.shape[:2]), start, end, window, scale)
        y = y.view(v.shape)
        ctx.save_for_backward(share, x, weight, rotary, ve, w_ve, w_out, start, end, y, v, lse, qk, rstd, gates,
                              *codes[3:])
        return y if share is None else exclude_values(y, v, share)

    def backward(ctx, dz):
        share, x, weight, rotary, ve, w_ve, w_out, start, end, y, v, lse, qk, rstd, gates, *codes = ctx.saved_tensors
        window, scale, paired, offset = ctx.settings
        w_scale, x8_t, w8_t, grad_scale, dw_scale = codes or [None] * 5
        (N, H, d), rows, (of_share, of_weight, *of_gates) = v.shape, weight.size(0), ctx.parts
        dy, dv, dshare, dgate = output_grad(dz, y, v, share, gates[0], of_share)
        dqkv = x.new_empty(N, rows, dtype=E5M2 if codes else x.dtype)
        dqkv_t = dqkv.new_empty(rows, N) if codes else None
        q, k, values = _pair_heads(qk, v, paired)
        heads = attend_backward(
            dy.view(values.shape), q, k, values, dgate.view(q.shape[:2]), lse, start, end, window, scale,
            dv=None if paired or codes else dqkv[:, -H * d:].view(N, H, d),
            dv_upstream=None if dv is None else dv.view(values.shape))
        dve, dve_gate = project_backward(*(u.view(N, H, -1) for u in heads), qk, rstd, rotary, ve, gates[-1], paired,
                                         offset, dqkv, dqkv_t, grad_scale)
        if codes:
            dx, dweight = scaled_products((dqkv, w8_t, grad_scale, w_scale, None, x.dtype), (
                dqkv_t, x8_t, grad_scale, dw_scale, of_weight and of_weight(x, *weight.shape)))
        else:
            dx, dweight = dqkv @ weight, torch.mm(dqkv.t(), x, out=of_weight and of_weight(x, *weight.shape))
        dw_ve, dw_out = head_gates_backward(dgate, dve_gate, gates, x, ve, w_ve, w_out, paired, dx, dve, *of_gates)
        return None, dshare, dx, dweight.to(x.dtype), None, dve, dw_ve, dw_out, *[None] * (7 + 8 * bool(codes))


def attention_block_ref(x, weight, rotary, ve, w_ve, w_out, documents, window, scale, paired, offset, narrow=False,
                        codes=None, first=None, share=None):
    """y (N, H, d); see the banner above."""
    out_gate, ve_gate = head_gates_ref(x if first is None else first, ve, w_ve, w_out, paired)
    q, k, v = project_ref(x, weight, rotary, ve, ve_gate, paired, offset, narrow, codes)
    N, H = out_gate.shape
    if not paired:
        y = attention_ref(q, k, v, out_gate, documents[0], window, scale)
    else:
        paired_heads = (u.reshape(2 * N, H // 2, *u.shape[2:]) for u in (q, k, v, out_gate))
        y = attention_ref(*paired_heads, documents[0], window, scale).reshape(v.shape)
    return y if share is None else exclude_values_ref(y, v, share)


def _check_block(x, weight, rotary, ve, w_ve, w_out, documents, paired, offset, narrow=False, codes=None, **others):
    (N, D), (H, width, d) = x.shape, head_sizes(weight, rotary, narrow)
    rows, positions, most = 2 * width + d, N * (1 + paired), min(D, H * d)
    got = [None if u is None else tuple(u.shape) for u in (weight, rotary, w_out, ve, w_ve)]
    faults = (
        (D * x.element_size() % 16, f"rows of x must be multiples of 16 bytes, got {D} elements of {x.dtype}"),
        (N == 0 or weight.shape != (H * rows, D) or paired and H % 2,
         f"for x {(N, D)}, N > 0, and heads of width {width} (q, k) and {d} (v) weight must be ({rows} H, {D}), H even"
         f" in paired layers, got {got[0]}"),
        (narrow and (offset or d < 32),
         f"a narrow layer has no offset, and d is at least 32; got d = {d}, offset={offset}"),
        (rotary.size(0) < positions, f"rotary must have {positions} rows, got {got[1]}"),
        (documents.size(1) != positions, f"documents must be (2, {positions}), got {tuple(documents.shape)}"),
        (d & (d - 1) or d < 16, f"head width must be a power of two and at least 16, got {d}"),
        (w_out.size(0) != H or w_out.size(1) > most or w_out.size(1) % 2,
         f"w_out must be ({H}, C), C even and at most {most}, got {got[2]}"),
        ((ve is None) != (w_ve is None) or ve is not None and ve.size(1) != H * d,
         f"ve must be {(N, H * d)} and w_ve {got[2]}, or both None, got {got[3]} and {got[4]}"),
        (codes is not None and any(size % 16 for size in (N, *weight.shape)),
         f"N, rows of weight and D must be multiples of 16 for codes, got {N} and {got[0]}"))
    return next((words for wrong, words in faults if wrong), None)


@operation(attention_block_ref, label="attention", check=_check_block, x="N D: bf16 fp32 strided",
           weight="R D: strided", rotary="P F 2", ve="?N V: strided", w_out="H C: strided", w_ve="?H C: strided",
           documents="2 T: int32", first="?N C", share="?... H: bf16 fp32 strided",
           **{"codes.x8": "?N D: e4m3", "codes.x8_t": "?D N: e4m3", "codes.w8": "?R D: e4m3",
              "codes.w8_t": "?D R: e4m3"})
def attention_block(x, weight, rotary, ve, w_ve, w_out, documents, window, scale, paired, offset, narrow=False,
                    codes=None, first=None, share=None):
    """y (N, H, d); differentiable in x, weight, share, ve, w_ve and w_out. See the banner above."""
    ve = ve if ve is None or ve.stride(-1) == 1 else ve.contiguous()
    weight, w_ve, w_out = (u if u is None else u.contiguous() for u in (weight, w_ve, w_out))
    x = x.contiguous() if first is None else x
    return _AttentionBlock.apply(first, share, x, weight, rotary, ve, w_ve, w_out, *documents, window, scale, paired,
                                 offset, narrow, *(codes or ()))


# ======================================================================================================================
# 4  FP8 codes
#   codes, codes_t = both_layouts(x, scale, dtype)             plain operations; mix makes codes where it makes x
#   quantise_weights(x, scales, codes, codes_t, static)        of weights, in place
#   out = scaled_product(a, b, scale_a, scale_b)               out (M, N) = scale_a scale_b a bᵀ, by the library
#   WeightCodes, Fp8Projections                                codes of weights; of section 3's projection
#
# A code is the value times 1 / scale, bounded to the largest code, and rounded once; NaN stays NaN. Operands of the
# forward pass are e4m3, gradients e5m2. FP8 products want both operands contiguous along the summed axis, so a tensor
# that enters two products is stored in both layouts.
# A scale is static (a constant), exact (the largest weight of a matrix / 448), or delayed (from the maximum of the
# last step, section 5). The static scale of gradients contains loss_scale, as the loss does.

G8_SCALE = 2.0**-6  # static, of the gradient of an output; times loss_scale
QUANTISE_WEIGHTS_LAUNCH = dict(BLOCK_M=128, BLOCK_N=64, num_warps=8)


def x8_scale(D) -> float:
    """Static scale of codes of an RMS-normed stream of D channels: the least power of two with 448 scale >= √D."""
    return 2.0**math.ceil(math.log2(D**0.5 / E4M3_MAX))


def transposed(codes):
    """A new tensor (N, M), the transpose of codes (M, N), by the kernel: the trial of FP8 finds its faults, too."""
    return transpose_copy(codes, codes.new_empty(codes.shape[::-1]))


def both_layouts(x, scale, dtype):
    """Codes of x (..., M, N) / scale in `dtype`, and their transpose (..., N, M). scale: a number or a tensor (...)."""
    limit, inverse = FP8_MAX[dtype], 1 / scale
    inverse = inverse[..., None, None] if isinstance(scale, Tensor) else inverse
    codes = (x.float() * inverse).clamp(-limit, limit).to(dtype).contiguous()
    return codes, transposed(codes) if codes.ndim == 2 else codes.mT.clone(memory_format=torch.contiguous_format)


def scaled_product(a, b, scale_a, scale_b, out=None, dtype=torch.bfloat16, fast=False):
    """a (M, K) times the transpose of b (N, K), codes with 0-D scales -> (M, N). fast: sums of fewer bits."""
    if _takes_ref(a):
        result = (a.float() @ b.float().mT * (scale_a * scale_b)).to(dtype)
        return result if out is None else out.copy_(result)
    return torch._scaled_mm(a, b.mT, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast, out=out)


def scaled_products(first, *others):
    """[scaled_product of these arguments]. On a GPU the others fill the multiprocessors that the first leaves idle."""
    if first[0].device.type != "cuda":
        return [scaled_product(*each) for each in (first, *others)]
    stream, current = _second_stream(first[0].device), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        results = [scaled_product(*each) for each in others]
    results.insert(0, scaled_product(*first))
    current.wait_stream(stream)
    return results


def _saturated(x, DTYPE):
    """x as e4m3 or e5m2, bounded to its largest value."""
    MAX: constexpr = _E4M3_MAX if DTYPE == tl.float8e4nv else _E5M2_MAX
    return tl.clamp(x, -MAX, MAX, propagate_nan=NAN_STAYS).to(DTYPE)


_saturate, _saturate_hopper = triton.jit(_saturated), gluon.jit(_saturated)


def quantise_weights_ref(x, scales=None):
    """(scales (n,) fp32, e4m3 codes (n, M, N), codes_t (n, N, M)) of x (n, M, N). scales None: exact scales."""
    if scales is None:
        largest = torch.linalg.vector_norm(x, math.inf, (-2, -1)).float()
        scales = (largest / E4M3_MAX).clamp(min=WEIGHT_FLOOR)
    return scales, *both_layouts(x, scales, E4M3)


@triton.jit
def _quantise_weights_kernel(X, Largest, Scales, Codes, CodesT, M, N, columns, stride_i, stride_j, BLOCK_M: constexpr,
                             BLOCK_N: constexpr):
    # One tile of one matrix. With Largest, the largest |x| of every matrix, Scales (n / columns, columns) is a result.
    matrix = tl.program_id(1)
    Scales += matrix // columns * stride_i + matrix % columns * stride_j
    if Largest is None:
        scale = tl.load(Scales)
    else:
        largest = tl.load(Largest + matrix).to(tl.float32)
        scale = tl.maximum(largest * (1.0 / _E4M3_MAX), _WEIGHT_FLOOR)  # as PyTorch divides by a number on a GPU
        if tl.program_id(0) == 0:
            tl.store(Scales, scale)
    tiles = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = matrix.to(tl.int64) * M * N
    x = _load(X + first, m, n, M, N)
    _store_codes(Codes + first, CodesT + first, x, tl.div_rn(1.0, scale), m, n, M, N)


# x is bf16 only, because Triton 3.6 gave wrong tiles for fp32.
WEIGHT_CODES = dict(x="n M N: bf16", scales="K L: fp32 strided", codes="n M N: e4m3", codes_t="n N M: e4m3")


def quantise_weights(x, scales, codes, codes_t, static=False):
    """quantise_weights_ref in place. scales (layers, matrices of a layer): made, or with static given."""
    given, sizes = dict(x=x, scales=scales, codes=codes, codes_t=codes_t), {"L": len(x) // len(scales)}
    _require("quantise_weights", WEIGHT_CODES, given, sizes, x.dtype, x.device)
    if _takes_ref(x):
        wanted, *both = quantise_weights_ref(x, scales.flatten() if static else None)
        for target, new in zip((scales, codes, codes_t), (wanted.view_as(scales), *both)):
            target.copy_(new)
    else:
        (matrices, M, N), launch = x.shape, QUANTISE_WEIGHTS_LAUNCH
        largest = None if static else torch.linalg.vector_norm(x, math.inf, (-2, -1))
        tiles = triton.cdiv(M, launch["BLOCK_M"]) * triton.cdiv(N, launch["BLOCK_N"])
        _quantise_weights_kernel[(tiles, matrices)](
            x, largest, scales, codes, codes_t, M, N, scales.size(1), *scales.stride(), **launch)
    torch.autograd.graph.increment_version((codes, codes_t))  # a late backward pass raises an error


class WeightCodes:
    """The e4m3 codes of weights that train in FP8: codes (..., M, N) and codes_t (..., N, M). weights: function that
    returns the weights (..., M, N) bf16; scales (layers, matrices of a layer): made, or static. Tensors keep their
    addresses for CUDA graphs. Call `refresh` after every change of the weights."""
    def __init__(self, weights, scales, static=False):
        self.weights, self.of_weights, self.static = weights, scales, static
        x = weights()
        self.codes, self.codes_t = (torch.empty(like.shape, dtype=E4M3, device=x.device) for like in (x, x.mT))
        self.load_state_dict()

    def load_state_dict(self, state=None):  # state: delayed scales; see Fp8Mlps
        self.refresh()

    @torch.no_grad()
    def refresh(self, max_over_ranks=None):
        """Make the codes again. max_over_ranks: dist.all_reduce with MAX, for delayed scales."""
        x, *codes = (x.view(-1, *x.shape[-2:]) for x in (self.weights(), self.codes, self.codes_t))
        quantise_weights(x, self.of_weights, *codes, self.static)

    def factored(self, factors):
        """For each layer the 0-D scales of its last matrix, and of the other operand of its gradient, times its factor;
        factors (layers,). They are `pairs` (layers, 2, 4)."""
        return [tuple(pair) for pair in (self.pairs * factors.detach()[:, None, None])[..., 0].unbind(0)]


# ---- The projection of the attention block ---------------------------------------------------------------------------
#   product            operands (scale)                              result
#   qkv = x Wᵀ         x e4m3 (static), W e4m3 (exact, times factor)    fp32, for norm and rotation in the kernel
#   dx = dqkv W        dqkv e5m2 (static), W                         bf16, then the gradients of the gates are added
#   dW = dqkvᵀ x       dqkv, x (static, times factor)                bf16
#
# attention_block takes the bf16 weight only to give it a gradient. `scaled_weights` makes the gradient of the factor.


class ProjectionCodes(NamedTuple):
    """Codes of x and weight of attention_block, and 0-D fp32 scales, in the order of the op's arguments."""
    x8: Tensor  # (N, D) e4m3
    w8: Tensor  # (rows, D) e4m3
    x_scale: Tensor
    w_scale: Tensor  # of the weight with its factor
    x8_t: Tensor  # (D, N) e4m3
    w8_t: Tensor  # (D, rows) e4m3
    grad_scale: Tensor  # of the e5m2 codes of the gradient of x Wᵀ
    dw_scale: Tensor  # of x in the gradient of the weight, which the factor multiplies


class _ProductOfCodes(_Function):  # x Wᵀ (N, rows) fp32 from ProjectionCodes
    def forward(ctx, x, weight, x8, w8, x_scale, w_scale, *others):
        ctx.dtype = x.dtype
        ctx.save_for_backward(w_scale, *others)
        return x8.float() @ w8.float().mT * (x_scale * w_scale)

    def backward(ctx, grad):
        w_scale, x8_t, w8_t, grad_scale, dw_scale = ctx.saved_tensors
        g, g_t = both_layouts(grad, grad_scale, E5M2)
        dx, dweight = scaled_products((g, w8_t, grad_scale, w_scale), (g_t, x8_t, grad_scale, dw_scale))
        return dx.to(ctx.dtype), dweight.to(ctx.dtype), *[None] * 8


class Fp8Projections(WeightCodes):
    """The codes of projections with one width of heads. weights: function that returns them (n, 2 H w + H d, D)."""
    def __init__(self, weights, loss_scale):
        weight = weights()
        self.x_scale, self.grad_scale = (
            torch.tensor(x, device=weight.device) for x in (x8_scale(weight.size(2)), G8_SCALE * loss_scale))
        self.pairs = self.x_scale.expand(len(weight), 2, 4).clone()  # of the weights and of x, 16 bytes apart
        super().__init__(weights, self.pairs[:, 0, :1])

    def of_layers(self, factors):
        """The ProjectionCodes of each projection times its factor, without those of x; factors (n,)."""
        return [ProjectionCodes(None, codes, self.x_scale, w_scale, None, codes_t, self.grad_scale, dw_scale)
                for codes, codes_t, (w_scale, dw_scale) in zip(self.codes, self.codes_t, self.factored(factors))]


# ======================================================================================================================
# 5  ReLU² MLP, in bf16 and in FP8
#   y = mlp(x, W1, W2)      post = relu(x W1ᵀ)²,  y = post W2          replaces F.linear(x, W1).relu().square() @ W2
#   its gradient            dpre = 2 (g W2ᵀ) relu(x W1ᵀ)
#                           dx = dpre W1,  dW1 = dpreᵀ x,  dW2 = postᵀ g
#
# Each product is rounded to the dtype, then post and dpre once more, as in mlp_ref. The square and its derivative are
# the epilogues of the products x W1ᵀ and g W2ᵀ; the library computes the other four. The forward pass keeps x and post:
# for p = relu(x W1ᵀ), bf16(√post) is p bit for bit, as long as p² is in the range of bf16.
# ReLU²: So et al., arXiv 2109.08668. Fusing with a persistent product: andrewbriand8 and Joshrav21, PR 197. Saving
# post alone: cong_ml (Recursive), PR 322. Warp groups that take turns: the ping-pong schedule of NVIDIA's CUTLASS.

# Hopper: one warp fetches, and two warp groups take turns: one multiplies while the other finishes its tile. 5 stages
# of 32 KiB (codes: 4, faster) and 32 KiB for each warp group fit the 227 KiB of an SM. num_warps: of a warp group.
MLP_HOPPER = {torch.bfloat16: dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, STAGES=5, num_warps=4),
              E4M3: dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, STAGES=4, num_warps=4)}

# On other GPUs, and for fp32, which exists for tests: plain tiles, which fit the 99 KiB of sm_89 and sm_120.
MLP_LAUNCH = {
    torch.bfloat16: dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=4),
    torch.float32: dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=2),
    E4M3: dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=4),
}


def mlp_ref(x, W1, W2):
    """x (N, D), W1 and W2 (F, D) -> (N, D), in the dtype of x."""
    return F.linear(x, W1).relu().square() @ W2


def _post_or_dpre(acc, post, scale, DTYPE):
    """relu(acc)² of a tile acc, or with the tile post 2 acc √post, in DTYPE. With the scale of acc: fp32 / `unit`."""
    if scale is None:
        # In bf16 arithmetic on purpose: one instruction for two elements, and conversions in pairs. Doubling is exact.
        if post is None:
            pre = tl.maximum(acc, 0.0, propagate_nan=NAN_STAYS).to(DTYPE)
            result = pre * pre
        else:
            root = tl.sqrt(post.to(tl.float32)).to(DTYPE)
            result = acc.to(DTYPE) * (root + root)
    elif post is None:
        pre = tl.maximum(acc * scale, 0.0, propagate_nan=NAN_STAYS).to(tl.bfloat16).to(tl.float32)
        result = pre * pre
    else:
        result = acc * tl.sqrt(post.to(tl.float32))
    return result


def _scale_and_unit(Scales):
    """(scale of a sum, factor of the results of `_post_or_dpre`, the same divided by the scale of the codes). Scales:
    pointers to the scales of A, B, the result, and of post or None."""
    a, b, out, post = Scales
    scale = tl.load(a) * tl.load(b)
    unit = tl.cast(1.0, tl.float32) if post is None else 2 * scale * tl.sqrt_rn(tl.load(post))
    return scale, unit, tl.div_rn(unit, tl.load(out))


# The same lines for Triton's tiles and for Gluon's, whose compilers differ.
_tile_result, _tile_result_hopper = triton.jit(_post_or_dpre), gluon.jit(_post_or_dpre)
_tile_scales, _tile_scales_hopper = triton.jit(_scale_and_unit), gluon.jit(_scale_and_unit)


@triton.jit
def _mlp_kernel(A, B, Post, Out, OutT, Scales, Largest, M, N, K, BLOCK_M: constexpr, BLOCK_N: constexpr,
                BLOCK_K: constexpr):
    """Out (M, N) = relu(A Bᵀ)², or with Post (M, N): 2 (A Bᵀ) √Post. A (M, K), B (N, K). With Scales A, B and Post are
    codes, Out and OutT get codes, and Largest, fp32 seen as int32, is raised to the largest absolute value."""
    columns = tl.cdiv(N, BLOCK_N)
    m0, n0 = tl.program_id(0) // columns * BLOCK_M, tl.program_id(0) % columns * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a, b = _matrix_tile(A, m0, k, M, K, BLOCK_M, BLOCK_K), _matrix_tile(B, n0, k, N, K, BLOCK_N, BLOCK_K)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    m, n = m0.to(tl.int64) + tl.arange(0, BLOCK_M), n0.to(tl.int64) + tl.arange(0, BLOCK_N)
    if Post is None:
        post: constexpr = None
    else:
        post = _load(Post, m, n, M, N)
    if OutT is None:
        _store(Out, _tile_result(acc, post, None, Out.dtype.element_ty), m, n, M, N)
    else:
        scale, unit, to_code = _tile_scales(Scales)
        value = _tile_result(acc, post, scale, tl.float32)
        largest = tl.max(tl.max(tl.abs(value).to(tl.int32, bitcast=True), axis=1), axis=0).to(tl.float32, bitcast=True)
        tl.atomic_max(Largest, (largest * tl.abs(unit)).to(tl.int32, bitcast=True), sem="relaxed")
        value *= to_code
        _store(Out, _saturate(value, Out.dtype.element_ty), m, n, M, N)
        # The kernel transposes the values and then rounds them again, for the reason that _store_qkv_grad gives.
        _store(OutT, _saturate(tl.trans(value), Out.dtype.element_ty), n, m, N, M)


# The Hopper kernel. Every program walks over tiles of Out; its warp groups 0 and 1 take the tiles by turns. The
# fetching warp copies the operands of all tiles, step by step, into a ring of STAGES stages in shared memory.
#   A, B, Post, Out, OutT   TMA descriptors of the tensors; for None and the other arguments see _mlp_kernel
#   a_ring, b_ring          (STAGES, BLOCK_M or BLOCK_N, BLOCK_K) shared memory: the operands of one step per stage
#   tiles, tiles_t          (2, BLOCK_M, BLOCK_N) and transposed: post and then the result of each warp group
#
#   barrier   who arrives                                             who waits, and why
#   full      the copy engine: both operands of the stage are there   the warp group whose step uses the stage, to read
#   free      the warp group: its product has read the stage          the fetching warp, to fill the stage again
#   turn      the other warp group: the products of its tile are      a warp group, to use the stages in the order in
#             under way                                               which they are filled
#   posts     the copy engine: the tile of post is there              the warp group that asked for it, to take the root
# A barrier counts phases 0, 1, ... and keeps the last bit of the number, the parity. A wait for a parity returns when
# its phase is complete; in a new barrier, a wait for parity 1 returns at once. Use n (0, 1, ...) of a barrier waits for
# phase n, n & 1, or where the first use must not wait for phase n - 1, n & 1 ^ 1.

@gluon.jit
def _mlp_fetch(A, B, Out, a_ring, b_ring, full, free):
    """The fetching warp: copies the operands of every step of every tile of this program into the ring."""
    STAGES: constexpr = a_ring.shape[0]
    BLOCK_M: constexpr = a_ring.shape[1]
    BLOCK_N: constexpr = b_ring.shape[1]
    BLOCK_K: constexpr = a_ring.shape[2]
    columns = gl.cdiv(Out.shape[1], BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(Out.shape[0], BLOCK_M) * columns, gl.num_programs(0)):
        for k in range(0, A.shape[1], BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), step // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(stage), A.block_type.nbytes + B.block_type.nbytes)
            tma.async_copy_global_to_shared(A, [tile // columns * BLOCK_M, k], full.index(stage), a_ring.index(stage))
            tma.async_copy_global_to_shared(B, [tile % columns * BLOCK_N, k], full.index(stage), b_ring.index(stage))
            step += 1


@gluon.jit
def _mlp_multiply(ME, args):
    """Warp group ME (0 or 1): products and epilogue of every second tile of this program."""
    A, B, Post, Out, OutT, Scales, Largest, a_ring, b_ring, tiles, tiles_t, full, free, posts, turn = args
    STAGES: constexpr = a_ring.shape[0]
    BLOCK_M: constexpr = a_ring.shape[1]
    BLOCK_N: constexpr = b_ring.shape[1]
    LAYOUT: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 256 // A.dtype.primitive_bitwidth])
    columns, steps = gl.cdiv(Out.shape[1], BLOCK_N), gl.cdiv(A.shape[1], a_ring.shape[2])
    buffer = tiles.index(ME)
    if OutT is None:
        scale: constexpr = None
    else:
        buffer_t = tiles_t.index(ME)
        scale, unit, to_code = _tile_scales_hopper(Scales)
        largest = gl.zeros((BLOCK_M,), gl.int32, gl.SliceLayout(1, LAYOUT))  # per row of a tile, over all tiles
    step = ME * steps  # counts the steps of all tiles of this program, because both warp groups share one ring
    count = 0  # counts the tiles of this warp group
    for tile in range(gl.program_id(0) + ME * gl.num_programs(0), gl.cdiv(Out.shape[0], BLOCK_M) * columns,
                      2 * gl.num_programs(0)):
        m, n = tile // columns * BLOCK_M, tile % columns * BLOCK_N
        if Post is not None:  # the copy engine loads post while the other warp group multiplies
            tma.store_wait(0)
            mbarrier.expect(posts.index(ME), Post.block_type.nbytes)
            tma.async_copy_global_to_shared(Post, [m, n], posts.index(ME), buffer)
        now = step
        # Without turns, a warp group could be two rounds ahead of a stage. Both rounds have the same parity, so the
        # wait for the stage would end too early. Warp group 0 has the first turn.
        mbarrier.wait(turn.index(ME), count & 1 ^ (1 - ME))
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
        for k in range(steps):
            stage = now % STAGES
            mbarrier.wait(full.index(stage), now // STAGES & 1)
            b = b_ring.index(stage).permute((1, 0))
            acc = warpgroup_mma(a_ring.index(stage), b, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the product of the previous step has read its stage
            mbarrier.arrive(free.index((now + STAGES - 1) % STAGES), pred=k > 0)
            now += 1
        mbarrier.arrive(turn.index(1 - ME))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((now + STAGES - 1) % STAGES))
        if Post is None:
            result = _tile_result_hopper(acc, None, scale, Out.dtype)
            tma.store_wait(0)
        else:
            mbarrier.wait(posts.index(ME), count & 1)
            post = buffer.load(LAYOUT)
            if OutT is not None:
                post = post.to(gl.float8e4nv, bitcast=True)
            result = _tile_result_hopper(acc, post, scale, Out.dtype)
        if OutT is not None:
            largest = gl.maximum(largest, gl.max(gl.abs(result).to(gl.int32, bitcast=True), axis=1))
            result = _saturate_hopper(result * to_code, Out.dtype)
            buffer_t.permute((1, 0)).store(result)
        buffer.store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(Out, [m, n], buffer)
        if OutT is not None:
            tma.async_copy_shared_to_global(OutT, [n, m], buffer_t)
        step += 2 * steps  # of this tile and of the tile of the other warp group
        count += 1
    if OutT is not None:
        most = gl.max(largest, axis=0).to(gl.float32, bitcast=True) * gl.abs(unit)
        gl.atomic_max(Largest, most.to(gl.int32, bitcast=True), sem="relaxed")
    tma.store_wait(0)


@gluon.jit
def _mlp_hopper_kernel(A, B, Post, Out, OutT, Scales, Largest, BLOCK_M: constexpr, BLOCK_N: constexpr,
                       BLOCK_K: constexpr, STAGES: constexpr):
    """Computes the same as _mlp_kernel, from descriptors of blocks of the matrices."""
    a_ring = gl.allocate_shared_memory(A.dtype, [STAGES, BLOCK_M, BLOCK_K], A.layout)
    b_ring = gl.allocate_shared_memory(B.dtype, [STAGES, BLOCK_N, BLOCK_K], B.layout)
    tiles = gl.allocate_shared_memory(Out.dtype, [2, BLOCK_M, BLOCK_N], Out.layout)
    if OutT is None:
        tiles_t: constexpr = None
    else:
        tiles_t = gl.allocate_shared_memory(Out.dtype, [2, BLOCK_N, BLOCK_M], OutT.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    posts = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(posts.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    # Registers per thread of warp group 1 and of the fetching warp; warp group 0 gets the remaining 240.
    args = (A, B, Post, Out, OutT, Scales, Largest, a_ring, b_ring, tiles, tiles_t, full, free, posts, turn)
    gl.warp_specialize([(_mlp_multiply, (0, args)), (_mlp_multiply, (1, args)),
                        (_mlp_fetch, (A, B, Out, a_ring, b_ring, full, free))], [4, 1], [240, 24])


def _relu_square(a, b, post=None, scales=None, largest=None):
    """a (M, K), b (N, K) -> (relu(a bᵀ)² (M, N), None); with post (M, N) -> (2 (a bᵀ) √post, None). With scales of a,
    b, the result, and post or None: of codes, the codes of the result and their transpose; `largest` is raised."""
    (M, K), N, dtype, out_t = a.shape, len(b), E4M3 if scales else a.dtype, None
    out = a.new_empty(M, N, dtype=a.dtype if not scales else E4M3 if post is None else E5M2)
    if scales:  # the maximum is seen as int32: bits of nonnegative numbers are ordered as the numbers; NaN is largest
        out_t, largest = out.new_empty(N, M), largest.view(torch.int32)
    hopper = dtype in MLP_HOPPER and _is_hopper(a.device)
    launch = (MLP_HOPPER if hopper else MLP_LAUNCH)[dtype]
    tiles = triton.cdiv(M, launch["BLOCK_M"]) * triton.cdiv(N, launch["BLOCK_N"])
    if not hopper:
        _mlp_kernel[(tiles,)](a, b, post, out, out_t, scales, largest, M, N, K, **launch)
        return out, out_t
    if any(t.data_ptr() % 16 for t in (a, b)):
        raise ValueError("mlp: operands must start at multiples of 16 bytes, as the tensor memory accelerator requires")
    if scales and post is not None:
        post = post.view(out.dtype)  # because its tiles share memory with those of the result; the kernel reads e4m3

    def blocks(x, rows, columns):
        swizzle = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=2)
        return GluonDescriptor.from_tensor(x, [launch[rows], launch[columns]], swizzle)
    _mlp_hopper_kernel[(min(tiles, _sm_count(a.device)),)](
        blocks(a, "BLOCK_M", "BLOCK_K"), blocks(b, "BLOCK_N", "BLOCK_K"),
        None if post is None else blocks(post, "BLOCK_M", "BLOCK_N"), blocks(out, "BLOCK_M", "BLOCK_N"),
        None if out_t is None else blocks(out_t, "BLOCK_N", "BLOCK_M"), scales, largest, **launch)
    return out, out_t


class _Mlp(_Function):
    def forward(ctx, x, W1, W2):
        post, _ = _relu_square(x, W1)
        ctx.save_for_backward(x, W1, W2, post)
        ctx.parts = _parts(W1, W2)
        return post @ W2

    def backward(ctx, grad):
        (x, W1, W2, post), grad = ctx.saved_tensors, grad.contiguous()
        dW1, dW2 = (of_w and of_w(x, *W1.shape) for of_w in ctx.parts)
        # First: a product gives a new thread of autograd the CUDA context that descriptors need.
        dW2 = torch.mm(post.mT, grad, out=dW2)
        dpre, _ = _relu_square(grad, W2, post)
        return dpre @ W1, torch.mm(dpre.mT, x, out=dW1), dW2


mlp = operation(mlp_ref, x="N D: bf16 fp32", W1="F D", W2="F D", check=lambda x, W1, **others: (
    len(x) == 0 or any(size * x.element_size() % 16 for size in W1.shape)) and (
    f"N must be above 0, and rows of F or D elements multiples of 16 bytes, got x {tuple(x.shape)} and"
    f" (F, D) = {tuple(W1.shape)}"))(_Mlp.apply)


# ---- The MLP in FP8, for training ------------------------------------------------------------------------------------
#   y = Fp8Mlps(bank, loss_scale)(i, x, W1, W2, scales)     replaces mlp(x, W1, factor · W2); scales contain the factor
#
#   product           operands (scale)                         result; N, D and F are multiples of 16
#   pre = x W1ᵀ       x e4m3 (static), W1 e4m3 (exact)            post = relu(bf16(pre))², e4m3 codes (delayed)
#   y = post W2       post, W2 e4m3 (exact, times factor)      bf16, with fast accumulation
#   dW2 = postᵀ g     post, g e5m2 (static, times factor)         bf16
#   dpost = g W2ᵀ     g, W2                                    dpre = 2 dpost √post, e5m2 codes (delayed)
#   dW1 = dpreᵀ x     dpre, x                                  bf16
#   dx = dpre W1      dpre, W1                                 bf16
#
# x is RMS-normed; W1 and W2 are the matrices i of the bank. `scaled_weights` makes the gradient of the factor.
# Hopper sums FP8 products with about 14 bits, the library only with fast accumulation. That is enough for the D terms
# of post and dpre. The epilogues write both layouts of post and dpre; `mix` makes the codes of x, g.
# The scales of post and dpre come from their maxima over all micro-steps of the last step, times HEADROOM. A scale
# stays as it is if its maximum is zero or not finite: W2 may start at 0, and then dpre is 0.
# FP8 in all six products, static scales and static e5m2 gradients, post stored in FP8 alone, codes of both layouts from
# the epilogue: PR 349 (ANVIL), record 92. Delayed scales: PR 344 (Glitchfix); maxima in the kernel: PR 363 (Warpscale).

HEADROOM = 1.25  # of the delayed scales: the maximum of a step may exceed that of the step before by this factor
POST_FLOOR, DPRE_FLOOR = 1e-6, 1e-12  # least delayed scales


def relu_square_codes_ref(a, b, scale_a, scale_b, scale_out, largest, post=None, scale_post=None):
    """Codes (M, N) and (N, M) of relu(a bᵀ)², e4m3, or with the codes `post` (M, N) of 2 (a bᵀ) √post, e5m2. a (M, K)
    and b (N, K) are codes, scales are 0-D. Raises `largest` (0-D) to the largest absolute value before the rounding."""
    acc, scale = a.float() @ b.float().mT, scale_a * scale_b
    if post is None:
        value, unit = (acc * scale).relu().to(torch.bfloat16).float().square(), torch.ones_like(scale)
    else:
        value, unit = acc * post.float().sqrt(), 2 * scale * scale_post.sqrt()
    largest.copy_(torch.maximum(largest, value.abs().max() * unit.abs()))
    dtype = E4M3 if post is None else E5M2
    codes = (value * (unit / scale_out)).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)
    return codes, codes.mT.contiguous()


def relu_square_codes(a, b, scale_a, scale_b, scale_out, largest, post=None, scale_post=None):
    """relu_square_codes_ref, or its kernel on a GPU. On Hopper, K, M and N are multiples of 16."""
    if _takes_ref(a):
        return relu_square_codes_ref(a, b, scale_a, scale_b, scale_out, largest, post, scale_post)
    return _relu_square(a, b, post, (scale_a, scale_b, scale_out, scale_post), largest)


class _MlpFp8(_Function):
    def forward(ctx, x, W1, W2, factored, mlps, i, x_codes, grad_codes):
        """factored: the scales of W2 and of g with the factor; x_codes: of x, or None."""
        (w2_scale, dw2_scale), (w1, _), (_, w2_t) = factored, mlps.codes[i], mlps.codes_t[i]
        x_scale, w1_scale, _, post_scale, *_ = mlps.scales[i, :, 0]
        x8, x8_t = x_codes or both_layouts(x, x8_scale(x.size(1)), E4M3)
        post, post_t = relu_square_codes(x8, w1, x_scale, w1_scale, post_scale, mlps.post_max[i])
        ctx.save_for_backward(w2_scale, dw2_scale, x8_t, post, post_t, mlps.codes, mlps.codes_t, mlps.scales)
        ctx.parts, ctx.shape = _parts(W1, W2), W1.shape
        ctx.i, ctx.grad_codes, ctx.g_scale = i, grad_codes, G8_SCALE * mlps.loss_scale
        ctx.dpre_max = mlps.dpre_max  # not saved: the backward pass of a later layer changes it in between
        return scaled_product(post, w2_t, post_scale, w2_scale, fast=True)

    def backward(ctx, grad):
        w2_scale, dw2_scale, x8_t, post, post_t, codes, codes_t, scales = ctx.saved_tensors
        x_scale, w1_scale, _, post_scale, g_scale, dpre_scale = scales[ctx.i, :, 0]
        g, g_t = ctx.grad_codes and ctx.grad_codes.take() or both_layouts(grad, ctx.g_scale, E5M2)
        dW1, dW2 = (of_w and of_w(grad, *ctx.shape) for of_w in ctx.parts)
        dpre, dpre_t = relu_square_codes(g, codes[ctx.i, 1], g_scale, w2_scale, dpre_scale, ctx.dpre_max[ctx.i], post,
                                         post_scale)
        return *scaled_products(
            (dpre, codes_t[ctx.i, 0], dpre_scale, w1_scale), (dpre_t, x8_t, dpre_scale, x_scale, dW1),
            (post_t, g_t, post_scale, dw2_scale, dW2)), *[None] * 5


class Fp8Mlps(WeightCodes):
    """y = mlps(i, x, W1, W2, scales): MLP i of a bank in FP8, x (N, D), W1 and W2 (F, D), y (N, D), all bf16. scales:
    with a factor of y, `factored(factors)[i]`. codes: those of x, if they exist; x is then not read. grad_codes: where
    the gradient of y comes as codes, see `mix`. bank (MLPs, 2, F, D) bf16: all W1 and W2; W1 and W2 are the views of it
    that get the gradients. Call `refresh` also after every optimizer step that changes no weights."""
    def __init__(self, bank, loss_scale):
        self.loss_scale, count, device = loss_scale, len(bank), bank.device
        self.new_grad_codes = functools.partial(GradCodes, G8_SCALE * loss_scale)  # for the gradient of one y
        # Of x, W1, W2, post, g, dpre. Scales are 16 bytes apart, because products in CUDA 13 ask for that alignment.
        self.scales = torch.ones(count, 6, 4, device=device)
        self.pairs = self.scales[:, 2:5:2]  # of W2 and g
        self.maxima = torch.zeros(2, count, device=device)
        self.post_max, self.dpre_max = self.maxima
        # A delayed scale of post or dpre is per_maximum times the maximum of the last step, and never below its floor.
        self.per_maximum = torch.tensor([[HEADROOM / E4M3_MAX], [HEADROOM / E5M2_MAX]], device=device)
        self.floors = torch.tensor([[POST_FLOOR], [DPRE_FLOOR]], device=device)
        super().__init__(bank.detach, self.scales[:, 1:3, 0])

    def state_dict(self):
        """The delayed scales, which the weights do not determine. Between steps there are no maxima to keep."""
        return {"post_scale": self.scales[:, 3, 0].cpu(), "dpre_scale": self.scales[:, 5, 0].cpu(),
                "loss_scale": self.loss_scale}

    def load_state_dict(self, state=None):
        """Load delayed scales (None: those before the first step), and make the codes of the bank, loaded before."""
        state = state or {"post_scale": 1.0, "dpre_scale": G8_SCALE, "loss_scale": 1.0}
        ratio = self.loss_scale / state["loss_scale"]  # with another number of ranks, the loss has another scale
        for column, value in ((0, x8_scale(self.codes.size(-1))), (3, state["post_scale"]),
                              (4, G8_SCALE * self.loss_scale), (5, state["dpre_scale"] * ratio)):
            self.scales[:, column, 0] = value
        self.maxima.zero_()
        self.refresh()

    @torch.no_grad()
    def refresh(self, max_over_ranks=lambda maxima: None):  # and sets the scales of the next step
        max_over_ranks(self.maxima)
        scales, maxima = self.scales[:, 3::2, 0].mT, self.maxima.nan_to_num(0.0, posinf=0.0)
        torch.where(maxima > 0, (maxima * self.per_maximum).maximum(self.floors), scales, out=scales)
        self.maxima.zero_()
        super().refresh()

    def __call__(self, i, x, W1, W2, scales=None, codes=None, grad_codes=None):
        given, sizes = dict(x=None if codes else x, W1=W1, W2=W2), dict(zip("FD", self.codes.shape[2:]))
        _require("Fp8Mlps", dict(x="?N D", W1="F D", W2="F D"), given, sizes, torch.bfloat16, x.device)
        if any(size % 16 for size in (len(x), *W1.shape)):
            raise ValueError(f"Fp8Mlps: N, F and D must be multiples of 16, got {len(x)} and {tuple(W1.shape)}")
        return _MlpFp8.apply(x, W1, W2, scales or (*self.pairs[i, :, 0],), self, i, codes, grad_codes)


# ======================================================================================================================
# 6  Pointer: how much attention falls on earlier copies of the target
#   mass, sink_mass = pointer(q, k, sink, tokens, start, end, window, scale, targets)
#
#   attn_t  = softmax over [sink_t, scale · q_t · k_s]  of the earlier tokens s of t's document, t - window <= s < t
#   mass[t, j]   = Σ_s attn_ts [tokens[s + j] = targets[t, j]],  s + j <= t
#   sink_mass[t] = attn_t of the sink
#
#   d a power of two >= 16; sink: the score of a place that copies nothing; start, end: as in section 2; targets:
#   token ids, J >= 1, -1 = no target; mass (N, J) and sink_mass (N,) fp32. Differentiable in q, k and sink.
# It replaces a (N, N) mask per column by attention whose value is a comparison: there is no (N, d) output, only J sums
# per row. The maximum begins at the sink's score, so a row without keys gives sink_mass = 1.
# Backward, with g = Σ_j dmass_j [hit_j] and D = Σ_j dmass_j mass_j + dsink_mass · sink_mass:
#   dscore = attn (g - D),  dsink = sink_mass (dsink_mass - D),  dq = scale dscore k,  dk = scale dscoreᵀ q
# Half of the programs of one launch compute dq, half dk, as in section 2.
# Pointer with a sentinel: Merity et al., arXiv 1609.07843; as a head: NathanGodey, yoavartzi (PR 379).

# The arguments of `pointer` that do not depend on the targets.
Point = collections.namedtuple("Point", "q k sink tokens start end window scale")
POINTER_BLOCK = {torch.bfloat16: 64, torch.float32: 32}
# The forward pass loads blocks of keys ahead. The backward pass loads none ahead, so more programs fit on an SM.
POINTER_LAUNCH = {"forward": dict(num_warps=4, num_stages=3), "backward": dict(num_warps=4, num_stages=1)}


def pointer_attention(q, k, sink, start, window, scale, rows):
    """(first key, attn (n, 1 + keys)): of a slice of rows, the softmax over the sink and the keys from the first on."""
    first = max(0, rows.start - window)
    t = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    s = torch.arange(first, rows.stop, device=q.device)
    scores = scale * (_at_least_fp32(q[rows]) @ _at_least_fp32(k[first:rows.stop]).t())
    seen = (s >= start[rows, None]) & (s >= t - window) & (s < t)
    scores = torch.cat((sink[rows, None].to(scores.dtype), scores.masked_fill(~seen, -math.inf)), 1)
    return first, scores.softmax(1)


def pointer_ref(q, k, sink, tokens, start, end, window, scale, targets):
    """(mass (N, J), sink_mass (N,)) in blocks of 128 rows, O(N · window) memory, differentiable by autograd."""
    (N, J), sums = targets.shape, []
    ahead = F.pad(tokens, (0, J))  # s + j <= t, so the padding is never a hit
    for first_row in range(0, N, 128):
        rows = slice(first_row, min(first_row + 128, N))
        first, attn = pointer_attention(q, k, sink, start, window, scale, rows)
        s = torch.arange(first, rows.stop, device=q.device)
        t = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        hits = [(ahead[s + j] == targets[rows, j:j + 1]) & (s + j <= t) for j in range(J)]
        sums.append(torch.stack([attn[:, 0], *(attn[:, 1:].where(hit, 0).sum(1) for hit in hits)], 1))
    sums = torch.cat(sums)
    return sums[:, 1:].contiguous(), sums[:, 0].contiguous()


@triton.jit
def _target(Targets, t, N, j):
    """targets[t, j] (BLOCK,) as int32; -1, which no token is, beyond N. Targets: a pointer and two strides."""
    targets, stride_n, stride_j = Targets
    return tl.load(targets + t.to(tl.int64) * stride_n + j * stride_j, mask=t < N, other=-1).to(tl.int32)


@triton.jit
def _mask_later(x, low, s, t):
    """x (queries, keys) with -inf except where low <= s < t."""
    # One comparison: as uint32, a negative difference is huge.
    return tl.where((s[None, :] - low[:, None]).to(tl.uint32) < (t - low).to(tl.uint32)[:, None], x, float("-inf"))


@triton.jit(do_not_specialize=["window"])
def _pointer_kernel(Q, K, Sink, Tokens, Targets, Start, Mass, SinkMass, Lse, N, window, scale, COUNT: constexpr,
                    D: constexpr, BLOCK: constexpr):
    m0 = tl.program_id(0) * BLOCK
    t = m0 + tl.arange(0, BLOCK)
    low, first, last, _ = _keys_of_queries(Start, m0, N, window, BLOCK)
    q = _load_tile((Q, D, D), 0, m0, N, BLOCK, D)
    scale2 = scale * LOG2_E
    sink = tl.load(Sink + t, mask=t < N, other=0.0) * LOG2_E
    top = sink  # the largest score so far
    total = tl.full((BLOCK,), 1.0, dtype=tl.float32)
    sums, targets = (tl.zeros((BLOCK,), dtype=tl.float32),) * COUNT, ()  # one tensor (BLOCK,) for each column
    for j in tl.static_range(COUNT):
        targets += (_target(Targets, t, N, j),)
    for n0 in range(first, last + 1, BLOCK):
        s = n0 + tl.arange(0, BLOCK)
        k = _load_tile(K, 0, n0, N, BLOCK, D)
        x = _mask_later(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2, low, s, t)
        higher = tl.maximum(top, tl.max(x, 1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(x - higher[:, None])
        total = total * fade + tl.sum(p, 1)
        new_sums = ()
        for j in tl.static_range(COUNT):
            copied = tl.load(Tokens + (s + j), mask=s + j < N, other=0)
            hit = (copied[None, :] == targets[j][:, None]) & ((s + j)[None, :] <= t[:, None])
            new_sums += (sums[j] * fade + tl.sum(tl.where(hit, p, 0.0), 1),)
        sums, top = new_sums, higher
    tl.store(Lse + t, top + tl.log2(total), mask=t < N)
    tl.store(SinkMass + t, tl.exp2(sink - top) / total, mask=t < N)
    for j in tl.static_range(COUNT):
        tl.store(Mass + t.to(tl.int64) * COUNT + j, sums[j] / total, mask=t < N)


@triton.jit
def _pointer_score_grad(x, lse, dot, hits, s, t, N, COUNT):
    """Gradient of the scores x in powers of two, -inf where masked: attn (Σ_j dmass_j [hit_j] - D). lse, dot and the
    queries t lie along one axis of x, the keys s along the other. hits: (Tokens, Targets, dMass)."""
    Tokens, Targets, dMass = hits
    grad = -dot
    for j in tl.static_range(COUNT):
        copied = tl.load(Tokens + (s + j), mask=s + j < N, other=0)
        hit = (copied == _target(Targets, t, N, j)) & (s + j <= t)
        dmass = tl.load(dMass + t.to(tl.int64) * COUNT + j, mask=t < N, other=0.0)
        grad = grad + tl.where(hit, dmass, 0.0)
    return tl.exp2(x - lse) * grad


@triton.jit(do_not_specialize=["window"])
def _pointer_backward_kernel(Q, K, q_tiles, k_tiles, Tokens, Targets, Start, End, Lse, Dot, dMass, dQ, dK, N, window,
                             scale, COUNT: constexpr, D: constexpr, BLOCK: constexpr):
    hits = Tokens, Targets, dMass
    i0 = tl.program_id(0) // 2 * BLOCK
    if tl.program_id(0) % 2 == 0:  # keys from i0 on, along the rows; queries along the columns
        s = i0 + tl.arange(0, BLOCK)
        high, last_query, _ = _queries_of_keys(End, i0, N, window, BLOCK)
        k = _load_tile((K, D, D), 0, i0, N, BLOCK, D)
        dk = tl.zeros((BLOCK, D), dtype=tl.float32)
        for m0 in range(i0, last_query + 1, BLOCK):
            t = m0 + tl.arange(0, BLOCK)
            q = _load_tile(q_tiles, 0, m0, N, BLOCK, D)
            lse, dot = tl.load(Lse + t, mask=t < N, other=0.0), tl.load(Dot + t, mask=t < N, other=0.0)
            x = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2_E)
            # s < t <= high in one comparison
            seen = (t[None, :] - s[:, None] - 1).to(tl.uint32) < (high - s).to(tl.uint32)[:, None]
            x = tl.where(seen, x, float("-inf"))
            grad = _pointer_score_grad(x, lse[None, :], dot[None, :], hits, s[:, None], t[None, :], N, COUNT)
            dk = tl.dot(grad.to(q.dtype), q, dk, input_precision="ieee")
        _store_tile((dK, D), dk * scale, 0, i0, N, BLOCK, D)
    else:  # queries from i0 on
        t = i0 + tl.arange(0, BLOCK)
        low, first_key, last_key, _ = _keys_of_queries(Start, i0, N, window, BLOCK)
        q = _load_tile((Q, D, D), 0, i0, N, BLOCK, D)
        lse, dot = tl.load(Lse + t, mask=t < N, other=0.0), tl.load(Dot + t, mask=t < N, other=0.0)
        dq = tl.zeros((BLOCK, D), dtype=tl.float32)
        for n0 in range(first_key, last_key + 1, BLOCK):
            s = n0 + tl.arange(0, BLOCK)
            k = _load_tile(k_tiles, 0, n0, N, BLOCK, D)
            x = _mask_later(tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E), low, s, t)
            grad = _pointer_score_grad(x, lse[:, None], dot[:, None], hits, s[None, :], t[:, None], N, COUNT)
            dq = tl.dot(grad.to(k.dtype), k, dq, input_precision="ieee")
        _store_tile((dQ, D), dq * scale, 0, i0, N, BLOCK, D)


class _Pointer(_Function):
    def forward(ctx, q, k, sink, tokens, start, end, window, scale, targets):
        (N, D), count, block = q.shape, targets.size(1), POINTER_BLOCK[q.dtype]
        mass, sink_mass, lse = sink.new_empty((N, count)), torch.empty_like(sink), torch.empty_like(sink)
        _pointer_kernel[(triton.cdiv(N, block),)](
            q, _head_tiles(k[:, None], block), sink, tokens, (targets, *targets.stride()), start, mass, sink_mass, lse,
            N, window, scale, COUNT=count, D=D, BLOCK=block, **POINTER_LAUNCH["forward"])
        ctx.save_for_backward(q, k, tokens, targets, start, end, mass, sink_mass, lse)
        ctx.window, ctx.scale = window, scale
        return mass, sink_mass

    def backward(ctx, dmass, dsink_mass):
        q, k, tokens, targets, start, end, mass, sink_mass, lse = ctx.saved_tensors
        dot = (dmass * mass).sum(1) + dsink_mass * sink_mass
        dq, dk, dmass, block = torch.empty_like(q), torch.empty_like(k), dmass.contiguous(), POINTER_BLOCK[q.dtype]
        _pointer_backward_kernel[(2 * triton.cdiv(len(q), block),)](
            q, k, *(_head_tiles(x[:, None], block) for x in (q, k)), tokens, (targets, *targets.stride()), start, end,
            lse, dot, dmass, dq, dk, len(q), ctx.window, ctx.scale, COUNT=targets.size(1), D=q.size(1), BLOCK=block,
            **POINTER_LAUNCH["backward"])
        return dq, dk, sink_mass * (dsink_mass - dot), *[None] * 6


pointer = operation(
    pointer_ref, q="N d: bf16 fp32", k="N d", sink="N: fp32", tokens="N: int32", start="N: int32", end="N: int32",
    targets="N J: int64 strided", check=lambda q, targets, **others: (
        q.size(1) < 16 or q.size(1) & (q.size(1) - 1) or not targets.size(1)) and (
        "d must be a power of two from 16 on, and targets must be (N, 1 or more), got"
        f" {tuple(q.shape)} and {tuple(targets.shape)}"))(_Pointer.apply)


# ---- What the pointer reads ------------------------------------------------------------------------------------------
#   q, k, sink = pointer_inputs(projected, gain, weights, start)
#
#   projected (N, 3d): of a token its query q', its key k', and n', which it adds to the key of the next token of its
#   document; gain (1,), weights (d,) fp32; q, k (N, d), sink (N,) fp32
#   q = gain q' / rms(q'),  k = κ / rms(κ) with κ_t = k'_t + n'_(t-1),  sink = q · weights / √d
# Replaces about 25 passes over (N, d). Without the norms, the scores of some seeds grew without bound (PR 379).

POINTER_INPUTS_LAUNCH = dict(BLOCK=16, num_warps=4)


def pointer_inputs_ref(projected, gain, weights, start):
    """q, k and sink in plain PyTorch; see above."""
    q, k, next_k = projected.chunk(3, 1)
    has_previous = (start < torch.arange(len(q), dtype=start.dtype, device=q.device))[:, None]
    k = k + F.pad(next_k[:-1], (0, 0, 1, 0)) * has_previous
    q, k = gain[0] * rms_norm(q), rms_norm(k)
    return q.contiguous(), k.contiguous(), q.size(1)**-0.5 * (q * weights).sum(1)


@triton.jit
def _unit(x, D):
    """x / rms(x) for each row, and 1 / rms(x)."""
    rstd = tl.rsqrt(tl.sum(x * x, 1) / D + _RMS_EPS)
    return x * rstd[:, None], rstd


@triton.jit
def _pointer_key(Projected, Start, n, d, N, D):
    """κ of the tokens n, and which of them have a token before in their document."""
    has_previous = (tl.load(Start + n, mask=n < N, other=0) < n) & (n < N)
    previous = tl.where(has_previous, n - 1, N)
    return _tile(Projected, n, D + d, N, 3 * D) + _tile(Projected, previous, 2 * D + d, N, 3 * D), has_previous


@triton.jit
def _unit_grad(dy, y, rstd, D):
    """Gradient of x, from that of y = x / rms(x)."""
    return rstd[:, None] * (dy - y * (tl.sum(dy * y, 1) / D)[:, None])


@triton.jit
def _pointer_inputs_kernel(Projected, Gain, Weights, Start, Q, K, Sink, N, scale, D: constexpr, BLOCK: constexpr):
    n, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    q, _ = _unit(_tile(Projected, n, d, N, 3 * D), D)
    q = (tl.load(Gain) * q).to(Q.dtype.element_ty)
    _store(Q, q, n, d, N, D)
    tl.store(Sink + n, scale * tl.sum(q.to(tl.float32) * tl.load(Weights + d)[None, :], 1), mask=n < N)
    k, _ = _unit(_pointer_key(Projected, Start, n, d, N, D)[0], D)
    _store(K, k, n, d, N, D)


@triton.jit
def _pointer_inputs_grad_kernel(dQ, dK, dSink, Projected, Gain, Weights, Start, dProjected, Parts, N, scale,
                                D: constexpr, BLOCK: constexpr):
    # Parts (programs, D + 1): the gradients of Weights and of Gain from these tokens.
    n, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    parts = Parts + tl.program_id(0) * (D + 1)
    gain, dsink = tl.load(Gain), scale * tl.load(dSink + n, mask=n < N, other=0.0)
    q, rstd = _unit(_tile(Projected, n, d, N, 3 * D), D)
    dq = _tile(dQ, n, d, N, D) + dsink[:, None] * tl.load(Weights + d)[None, :]
    tl.store(parts + d, gain * tl.sum(dsink[:, None] * q, 0))
    tl.store(parts + D, tl.sum(tl.sum(dq * q, 1), 0))
    _store(dProjected, _unit_grad(gain * dq, q, rstd, D), n, d, N, 3 * D)
    k, has_previous = _pointer_key(Projected, Start, n, d, N, D)
    k, rstd = _unit(k, D)
    dk = _unit_grad(_tile(dK, n, d, N, D), k, rstd, D)
    _store(dProjected, dk, n, D + d, N, 3 * D)
    previous = tl.where(n == 0, N - 1, tl.where(n < N, n - 1, N))  # nobody follows the last token: 0
    _store(dProjected, tl.where(has_previous[:, None], dk, 0.0), previous, 2 * D + d, N, 3 * D)


class _PointerInputs(_Function):
    def forward(ctx, projected, gain, weights, start):
        ctx.save_for_backward(projected, gain, weights, start)
        N, d = len(projected), projected.size(1) // 3
        q, k, sink = projected.new_empty(N, d), projected.new_empty(N, d), weights.new_empty(N)
        _pointer_inputs_kernel[(triton.cdiv(N, POINTER_INPUTS_LAUNCH["BLOCK"]),)](
            projected, gain, weights, start, q, k, sink, N, d**-0.5, D=d, **POINTER_INPUTS_LAUNCH)
        return q, k, sink

    def backward(ctx, dq, dk, dsink):
        projected, gain, weights, start = ctx.saved_tensors
        (N, d), dprojected = dq.shape, torch.empty_like(projected)
        parts = weights.new_empty(triton.cdiv(N, POINTER_INPUTS_LAUNCH["BLOCK"]), d + 1)
        _pointer_inputs_grad_kernel[(len(parts),)](
            dq.contiguous(), dk.contiguous(), dsink.contiguous(), projected, gain, weights, start, dprojected, parts, N,
            d**-0.5, D=d, **POINTER_INPUTS_LAUNCH)
        dweights, dgain = _summed(parts, weights, gain)
        return dprojected, dgain, dweights, None


pointer_inputs = operation(
    pointer_inputs_ref, any_dtype=True, projected="N E: bf16 fp32", gain="1: fp32", weights="d: fp32",
    start="N: int32", check=lambda projected, weights, **others: (
        projected.size(1) != 3 * len(weights) or len(weights) & (len(weights) - 1)) and (
        f"projected must be (N, 3 d), d a power of two, got {tuple(projected.shape)} and d = {len(weights)}"))(
    _PointerInputs.apply)


# ======================================================================================================================
# 7  Head and loss: softcapped multi-token cross-entropy of h (N, D) under the head weight W (D, V), V classes
#   ℓ = h W,  u = σ((ℓ + 5) / 7.5),  z = 23 u,  lse_t = ln Σ_v exp z
#   Loss    = loss_scale Σ_t Σ_k w_k (lse_t - z[t, target[t + k]]),  k = 0..K-1, terms with t + k >= N dropped
#             (K1: document borders are ignored)
#   ∂Loss/∂ℓ = loss_scale (S exp(z - lse) - Σ_k w_k [v = target[t + k]]) (23 / 7.5) u (1 - u),
#             S = Σ_k w_k of the terms that are not dropped
#
# Pointer head: no token has the class c, the gate. Section 6 gives mass and sink_mass. The term k of the loss becomes
#   -w_k ln p',  α = exp(z_c - lse),  p = exp(z_target - lse),
#   p' = p (1 + α sink_mass / (1 - α)) + α mass_k
# So α goes to the copies (α mass_k), and the part of α that the sink takes to the other classes. Its gradient:
#   -∂ln p'/∂z_v = (A + B) exp(z_v - lse) - [v = target] A - [v = c] B,
#   A = p (1 + α sink_mass / (1 - α)) / p',  B = α (p sink_mass / (1 - α)² + mass_k) / p',
#   -∂ln p'/∂mass_k = -α / p',  -∂ln p'/∂sink_mass = -α p / (1 - α) / p'
# The code calls w_k A `pull` and Σ_k w_k B `push`.
# Sampled softmax: a micro-batch may replace the V classes by P candidates, its distinct targets and some of the other
# classes. The sum over v is then too small; records/2026-11-22_sampled_softmax says why no factor corrects it.
# The FP8 head multiplies e4m3 codes of h (from `mix`) and W and e5m2 codes of ∂Loss/∂ℓ; all scales are static.
# HeadLoss computes the logits of some rows at a time. Only their gradient (N, V) exists for all rows at once.
# FP8 head after Andrew Briand (PR 207), its tiled transposes after samacqua (PR 240); multi-token loss in one pass over
# the logits after Soren Dunn (PR 199); loss and gradient in one kernel and the fixed maximum: Andrew Briand (PR 251).
# Sampled softmax: devenpzak (PR 360). Pointer head: NathanGodey, yoavartzi (PR 379).

CAP, CAP_SHIFT, CAP_SCALE = 23.0, 5.0, 7.5
# Scales of record 74 (PR 207), that of the gradient times loss_scale. A normed h is at most √D, so 100 is out of reach
# up to 10000 channels. Weights beyond ±W_LIMIT saturate; the log tells of many. .75 is about 23 / 7.5 / 4, the largest
# gradient that one term of the loss can have; e5m2 codes reach 128 times as far as 448.
W_LIMIT = 1.6
X_SCALE, W_SCALE, GRAD_SCALE = 100 / E4M3_MAX, W_LIMIT / E4M3_MAX, 0.75 / E4M3_MAX


def softcap(logits):
    """Logits of any shape, bounded to (0, 23), in fp32."""
    return CAP * torch.sigmoid((logits.float() + CAP_SHIFT) / CAP_SCALE)


def multi_token_targets(targets, count):
    """(N,) next-token ids -> (N, count) view: column k is the target k positions later, -1 beyond the end."""
    return F.pad(targets, (0, count - 1), value=-1).unfold(0, count, 1)


# ---- Cross-entropy of some rows --------------------------------------------------------------------------------------
#   losses = cross_entropy(logits, targets, weights, loss_scale, code_scale, grad, copies, next_losses)
#
#   targets  columns of logits, < C (not verified), -1 = no target
#   grad     None, or gets ∂Loss/∂ℓ / code_scale, rounded once to its dtype; may be `logits` itself
#   copies   None or Copies; with a gradient, copies.dmass and copies.dsink_mass get theirs
#   next_losses  None, or gets loss_scale times the loss of the first target alone, without its weight
#
# One program per row reads the row once, and writes the gradient once. The next limit is the special-function unit, 16
# results per clock and SM. exp, 1/x and exp would be three results per logit; two logits share a reciprocal
# (1/a = b · 1/(ab)), which makes 2.5. z < 23, so exp(z - 23) needs no running maximum.
# The gradient is e u (1 - u) times loss_scale S / Σ. Until Σ is known, a register holds two of these products as fp16,
# so several programs fit an SM: one reads while another computes. Columns of targets are overwritten at the end.

# (limit in columns, launch parameters); the first entry that fits is used.
CE_LAUNCH = ((16384, dict(SEGMENT=1024, num_warps=4, maxnreg=96)),
             (math.inf, dict(SEGMENT=2048, num_warps=16, maxnreg=64)))
LEAST_REST = 1e-6  # of 1 - α, which fp32 rounds to 0 when the gate takes all


class Copies(NamedTuple):
    """What the loss takes from the pointer head; all tensors fp32."""
    mass: Tensor  # (n, K)
    sink_mass: Tensor  # (n,)
    gate: int  # column of the gate's class; never a target
    dmass: Tensor | None = None  # like mass
    dsink_mass: Tensor | None = None  # like sink_mass

    def rows(self, rows):
        """The copies of some rows: a slice, or their numbers (n,) int64."""
        return Copies(*(x[rows] if isinstance(x, Tensor) else x for x in self))


def cross_entropy_ref(logits, targets, weights, loss_scale, code_scale=1.0, grad=None, copies=None, next_losses=None):
    """Losses (n,), at least fp32, of logits (n, C); fills grad (n, C) and next_losses (n,), if given."""
    u = torch.sigmoid((_at_least_fp32(logits) + CAP_SHIFT) / CAP_SCALE)
    z = CAP * u
    lse = z.logsumexp(1, keepdim=True)
    w = weights * (targets >= 0)  # (n, K)
    losses, pull, push = lse - z.gather(1, targets.clamp(min=0)), w, 0.0
    if copies is not None:
        alpha, p = torch.exp(z[:, copies.gate, None] - lse), torch.exp(-losses)
        rest = 1 / (1 - alpha).clamp(min=LEAST_REST)
        sink, ratio = copies.sink_mass[:, None] * rest, copies.mass / p
        kept = 1 + alpha * sink
        mixed = kept + alpha * ratio  # probability of the target / p
        losses, pull = losses - mixed.log(), w * kept / mixed
        push = (w * alpha * (sink * rest + ratio) / mixed).sum(1, keepdim=True)
        if grad is not None:
            copies.dmass.copy_(-loss_scale * w * alpha / p / mixed)
            copies.dsink_mass.copy_(-loss_scale * (w * alpha * rest / mixed).sum(1))
    if next_losses is not None:
        next_losses.copy_(loss_scale * (targets[:, 0] >= 0) * losses[:, 0])
    losses = loss_scale * (w * losses).sum(1)
    if grad is not None:
        dz = (pull.sum(1, keepdim=True) + push) * torch.exp(z - lse)
        columns = torch.arange(logits.size(1), device=logits.device)
        for k in range(targets.size(1)):
            dz = dz - torch.where(columns == targets[:, k:k + 1], pull[:, k:k + 1], 0.0)
        if copies is not None:
            dz = dz - torch.where(columns == copies.gate, push, 0.0)
        grad.copy_(dz * (u * (1 - u)) * (loss_scale * CAP / CAP_SCALE / code_scale))
    return losses


# e u (1 - u) <= 0.0154: times 2^21, fp16 holds it in full precision down to 2.9e-11 and at all down to 2.8e-14.
LIFT = constexpr(21.0)
_CAP, _CAP_SHIFT, _CAP_SCALE, _LEAST_REST = map(constexpr, (CAP, CAP_SHIFT, CAP_SCALE, LEAST_REST))


@triton.jit
def _exponent(x):
    """-(x + 5) / 7.5 / ln 2, so that u = 1 / (1 + 2^exponent); at most 60: products of two denominators fit fp32."""
    return tl.minimum(x.to(tl.float32) * (-LOG2_E / _CAP_SCALE) - _CAP_SHIFT * LOG2_E / _CAP_SCALE, 60.0,
                      propagate_nan=NAN_STAYS)


@triton.jit
def _lifted_exp(u):
    """2^LIFT exp(z - 23)."""
    return tl.exp2(u * (_CAP * LOG2_E) + (LIFT - _CAP * LOG2_E))


@triton.jit(do_not_specialize=["count", "gate"])
def _cross_entropy_kernel(Logits, Targets, Weights, Losses, NextLosses, Grad, Masses, dMasses, gate, loss_scale,
                          code_scale, count, C: constexpr, BLOCK_K: constexpr, SEGMENT: constexpr):
    # Logits, Targets and Grad: a pointer and strides.
    row = tl.program_id(0).to(tl.int64)
    logits = Logits[0] + row * Logits[1]
    # Σ exp(z - 23), and of each segment e u (1 - u), both times 2^LIFT. a: even columns, b: odd ones; they share 1/x.
    col, even = tl.arange(0, SEGMENT), 2 * tl.arange(0, SEGMENT // 2)
    sums, unscaled = tl.zeros((SEGMENT // 2,), dtype=tl.float32), ()
    for start in tl.static_range(0, C, SEGMENT):
        if start + SEGMENT <= C:
            x = tl.load(logits + start + col)
        else:
            x = tl.load(logits + start + col, mask=start + col < C, other=0.0)
        xa, xb = tl.split(tl.reshape(x, (SEGMENT // 2, 2)))
        da, db = 1.0 + tl.exp2(_exponent(xa)), 1.0 + tl.exp2(_exponent(xb))
        # 1 / (da db) as a squared rsqrt, because Triton's 1/x is several instructions.
        r = tl.rsqrt(da * db)
        r = r * r
        ua, ub = r * db, r * da
        ea, eb = _lifted_exp(ua), _lifted_exp(ub)
        if start + SEGMENT <= C:
            sums += ea
            sums += eb
        else:
            sums += tl.where(start + even < C, ea, 0.0)
            sums += tl.where(start + even + 1 < C, eb, 0.0)
        if Grad is not None:
            ga, gb = ea * (ua - ua * ua), eb * (ub - ub * ub)
            if logits.dtype.element_ty.primitive_bitwidth == 16:
                # In assembly, because the compiler sees through shifts and gives each half a register of its own.
                unscaled = unscaled + (tl.inline_asm_elementwise(
                    "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [ga, gb], dtype=tl.uint32, is_pure=True, pack=1),)
            else:
                unscaled = unscaled + ((ga, gb),)
    total = tl.sum(sums, axis=0)
    # The loss, from the logits of the targets.
    k = tl.arange(0, BLOCK_K)
    target = tl.load(Targets[0] + row * Targets[1] + k * Targets[2], mask=k < count, other=-1)
    is_target = target >= 0
    weight = tl.load(Weights + k, mask=is_target, other=0.0)
    u = 1.0 / (1.0 + tl.exp2(_exponent(tl.load(logits + target, mask=is_target, other=0.0))))
    loss = _CAP + (tl.log2(total) - LIFT) / LOG2_E - _CAP * u
    pull = weight
    if Masses is not None:
        gate_u = 1.0 / (1.0 + tl.exp2(_exponent(tl.load(logits + gate))))
        alpha, p = _lifted_exp(gate_u) / total, _lifted_exp(u) / total
        ratio = tl.load(Masses[0] + row * count + k, mask=is_target, other=0.0) / p
        rest = 1.0 / tl.maximum(1.0 - alpha, _LEAST_REST)
        sink = tl.load(Masses[1] + row) * rest
        kept = 1.0 + alpha * sink
        mixed = kept + alpha * ratio  # probability of the target / p
        pull = weight * kept / mixed
        push = tl.sum(weight * alpha * (sink * rest + ratio) / mixed, axis=0)
        if dMasses is not None:
            tl.store(dMasses[0] + row * count + k, -loss_scale * weight * alpha / (p * mixed), mask=k < count)
            tl.store(dMasses[1] + row, -loss_scale * alpha * rest * tl.sum(weight / mixed, axis=0))
        loss -= tl.log2(mixed) / LOG2_E
    tl.store(Losses + row, loss_scale * tl.sum(weight * loss, axis=0))
    if NextLosses is not None:
        tl.store(NextLosses + row + k, loss_scale * tl.where(is_target, loss, 0.0), mask=k == 0)
    # Scale and write the gradient of every column, then overwrite the columns of the targets.
    if Grad is not None:
        grad = Grad[0] + row * Grad[1]
        dtype = grad.dtype.element_ty
        if dtype == logits.dtype.element_ty:
            tl.debug_barrier()  # Grad may be Logits: all threads must have read the logits of targets and gate
        unit = loss_scale * (_CAP / _CAP_SCALE) / code_scale
        pulls = tl.sum(pull, axis=0)
        if Masses is not None:
            pulls += push
        factor = pulls * unit / total
        # Coinciding targets: each gets the sum of their pulls, so the order of the stores does not matter.
        summed = tl.sum(tl.where(target[:, None] == target[None, :], pull[None, :], 0.0), axis=1)
        at_target = (factor * _lifted_exp(u) - unit * summed) * (u - u * u)
        for start in tl.static_range(0, C, SEGMENT):
            if logits.dtype.element_ty.primitive_bitwidth == 16:  # packed in fp16
                pair = unscaled[start // SEGMENT]
                ga = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
                gb = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            else:
                ga, gb = unscaled[start // SEGMENT]
            g = tl.reshape(tl.join(factor * ga, factor * gb), (SEGMENT,))
            tl.store(grad + start + col, g.to(dtype), mask=start + col < C)
        tl.debug_barrier()  # all threads must have written the row
        tl.store(grad + target, at_target.to(dtype), mask=is_target)
        if Masses is not None:
            at_gate = (factor * _lifted_exp(gate_u) - unit * push) * (gate_u - gate_u * gate_u)
            tl.store(grad + gate, at_gate.to(dtype))


@operation(cross_entropy_ref, logits="n C: bf16 fp16 fp32 rows", targets="n K: int64 strided", weights="K: fp32",
           grad="?n C: bf16 fp16 fp32 e5m2 rows", next_losses="?n: fp32",
           **{"copies.mass": "?n K: fp32", "copies.sink_mass": "?n: fp32", "copies.dmass": "?n K: fp32",
              "copies.dsink_mass": "?n: fp32"})
def cross_entropy(logits, targets, weights, loss_scale, code_scale=1.0, grad=None, copies=None, next_losses=None):
    """Losses (n,) fp32 of logits (n, C); fills grad (n, C) and next_losses (n,), if given."""
    (n, C), K = logits.shape, weights.numel()
    gate = copies.gate if copies else 0
    if not 0 <= gate < C:
        raise ValueError(f"cross_entropy: copies.gate must be a column, 0 to {C - 1}, got {gate}")
    masses, grads = copies and copies[:2], (copies and copies[3:]) if grad is not None else None
    losses = torch.empty(n, device=logits.device)
    block_k = max(4, triton.next_power_of_2(K))  # up to four targets share one compiled kernel
    launch = next(launch for limit, launch in CE_LAUNCH if C <= limit)
    launch = launch | dict(SEGMENT=min(launch["SEGMENT"], triton.next_power_of_2(C)))
    _cross_entropy_kernel[(n,)](
        _strided(logits), (targets, *targets.stride()), weights, losses, next_losses, _strided(grad),
        masses, grads, gate, loss_scale, code_scale, K, C=C, BLOCK_K=block_k, **launch)
    return losses


class _HeadLoss(_Function):
    def forward(ctx, h, weight, head, targets, weights, loss_scale, candidates, codes, mass, sink_mass):
        ctx.head, ctx.loss_scale, sampled = head, loss_scale, candidates is not None
        columns = len(candidates) if sampled else weight.size(1)
        dtype = E5M2 if head.fp8 else head.dtype
        grad = torch.empty(h.size(0), columns, dtype=dtype, device=h.device)  # of the loss w.r.t. the logits
        if head.fp8:
            x, x_t = codes or both_layouts(h, X_SCALE, E4M3)
            codes_t = head.codes_t
            if sampled:  # PyTorch cannot select rows of FP8; D is a multiple of 8
                codes_t = codes_t.view(torch.int64).index_select(0, candidates).view(E4M3)
            operands = x_t, codes_t if sampled else head.codes
            logits = lambda rows: scaled_product(
                x[rows], codes_t, head.scale_x, head.scale_w, dtype=head.dtype, fast=True)
        else:
            W = (weight.index_select(1, candidates) if sampled else weight).to(head.dtype)
            operands = h, W
            logits = lambda rows: torch.mm(h[rows], W, out=grad[rows])
        copies = None if mass is None else Copies(
            mass, sink_mass, 0 if sampled else head.gate, *map(torch.empty_like, (mass, sink_mass)))
        ctx.save_for_backward(grad, *operands, candidates, *copies[3:] if copies else (None, None))
        code_scale = GRAD_SCALE * loss_scale if head.fp8 else 1.0
        next_losses = torch.empty(len(h), device=h.device)
        loss = head.blockwise(logits, targets, weights, loss_scale, code_scale, grad, copies, next_losses).sum()
        head.next_loss += next_losses.sum()
        return loss

    def backward(ctx, upstream):
        head, (grad, x, w, candidates, dmass, dsink_mass) = ctx.head, ctx.saved_tensors
        sampled = candidates is not None
        if head.fp8:
            scale_g = upstream * (GRAD_SCALE * ctx.loss_scale)
            grad_t, w = transposed(grad), transposed(w) if sampled else w
            operands = (grad_t, x, scale_g, head.scale_x) if sampled else (x, grad_t, head.scale_x, scale_g)
            grad_h, grad_w = scaled_products(
                (grad, w, scale_g, head.scale_w, None, head.dtype), (*operands, None, head.dtype))
        else:
            grad_h = upstream * (grad @ w.t())
            grad_w = upstream * (grad.t() @ x if sampled else x.t() @ grad)
        grad_w = grad_w.to(head.weight.dtype)
        if sampled:  # (P, D), rows of the tied embedding; each is written once, because no two candidates are equal
            head.embedding.grad[candidates] += grad_w
            grad_w = None
        if dmass is not None:
            dmass, dsink_mass = upstream * dmass, upstream * dsink_mass
        return grad_h, grad_w, *[None] * 6, dmass, dsink_mass


def head_rows(classes):
    """Rows per block, a power of two: 16384 for 50304 classes, 1.6 GB of bf16 logits."""
    return 1 << int(math.log2(2**30 / classes))


class HeadLoss(WeightCodes):
    """loss = head(h, targets, weights, loss_scale): the training loss, h (N, D), targets (N,) int64, weights (K,) fp32.
    weight (D, V): the parameter that gets the gradient; with fp8, these are its codes. cross_entropy, pointer: the
    functions of these names or their references. exact: take the unquantised weight (validation). codes: None, or
    both_layouts(h, X_SCALE, E4M3).
    candidates: None, or (P,) int64, distinct classes for a sampled softmax; `targets` are then positions in candidates.
    The gradient is added to rows of embedding.grad (V, D); the optimizer adds its transpose to the head's gradient, so
    embedding and head must be tied. point: None, or a Point for the pointer head, whose gate is the class `gate`, the
    first candidate. next_loss: 0-D fp32, to which each call that is not exact adds its loss of the next token alone."""
    def __init__(self, weight, dtype, fp8, cross_entropy=cross_entropy, embedding=None, pointer=pointer, gate=None):
        self.weight, self.dtype, self.fp8, self.cross_entropy = weight, dtype, fp8, cross_entropy
        self.embedding, self.pointer, self.gate = embedding, pointer, gate
        self.block, self.next_loss = head_rows(weight.size(1)), torch.zeros((), device=weight.device)
        if fp8:
            self.scale_x, self.scale_w = (torch.tensor(s, device=weight.device) for s in (X_SCALE, W_SCALE))
            super().__init__(weight.detach, self.scale_w.view(1, 1), static=True)

    def saturates(self) -> bool:
        """Whether the codes saturate for more than 1e-5 of the weights; it is under 1e-6 in runs of the presets."""
        return self.fp8 and int((self.weight.detach().abs() > W_LIMIT).sum()) > 1e-5 * self.weight.numel()

    def __call__(self, h, targets, weights, loss_scale, exact=False, candidates=None, point=None, codes=None):
        if exact:
            return loss_scale * self.losses(h, targets, weights, point).sum()
        targets = multi_token_targets(targets, weights.numel())
        # A target beyond the end is -1 and picks the last candidate. The loss ignores the mass of this candidate.
        masses = self.pointer(*point, targets if candidates is None else candidates[targets]) if point else (None, None)
        return _HeadLoss.apply(h, self.weight, self, targets, weights, loss_scale, candidates, codes, *masses)

    @torch.no_grad()
    def losses(self, h, targets, weights, point=None, rows=None):
        """Loss of each token (N,) fp32 with the unquantised weight; rows (n,) int64: only the losses of these rows."""
        W, shifted = self.weight.to(self.dtype), multi_token_targets(targets, weights.numel())
        copies = None if point is None else Copies(*self.pointer(*point, shifted), self.gate)
        if rows is not None:
            h, shifted, copies = h[rows], shifted[rows], copies and copies.rows(rows)
        return self.blockwise(lambda rows: h[rows] @ W, shifted, weights, 1.0, copies=copies)

    def blockwise(self, logits, targets, weights, loss_scale, code_scale=1.0, grad=None, copies=None, next_losses=None):
        """cross_entropy of targets (N, K), one block of rows at a time; `logits(rows)`: those of a slice of rows."""
        blocks = (slice(start, start + self.block) for start in range(0, len(targets), self.block))
        return torch.cat([self.cross_entropy(
            logits(rows), targets[rows], weights, loss_scale, code_scale, None if grad is None else grad[rows],
            copies and copies.rows(rows), None if next_losses is None else next_losses[rows]) for rows in blocks])


# ======================================================================================================================
# 8  Symmetric products
#   XXT(X, out, scale)                     out = s² X Xᵀ                    replaces X @ X.mT
#   XTX(X, out, scale)                     out = s² Xᵀ X                    replaces X.mT @ X
#   ba_plus_cAA(P, c, b, out, a, scale)    out = s (c P Pᵀ + b P + a I)     replaces torch.baddbmm; P symmetric
#
# scale: s (n,) fp32, or None for 1. The batch dimension may be absent. `out` is exactly symmetric. Rows of the input
# are contiguous and begin at multiples of 16 bytes, as the copy engine requires.
# scale normalises X without a pass over X. a makes aX + (bP + cPP)X one plain product, without a copy of X.
# Only the tiles on and below the diagonal are launched; a tile below it is stored twice, the second time transposed.
# XTX reads tiles across and transposes them on chip. tests/lesson.py builds this kernel in four steps.
# Computing half of the symmetric products of Muon and mirroring it: byronxu99, PR 109. Loading along the contiguous
# axis and transposing on chip: EmmettBicker (Aster), PR 217. The tall form: ChrisJMcCormick, PR 233.

# (limit in programs per SM, launch parameters); the first entry that fits is used. Tiles are square, so that the
# diagonal runs through whole tiles. An SM wants two programs, or deep pipelining where there are too few.
GRAM_LAUNCH = {
    torch.bfloat16: (
        # 8 GPUs: as many stages as let two or three programs share an SM.
        (2, dict(BLOCK=64, BLOCK_K=64, num_warps=4, num_stages=6)),
        (3, dict(BLOCK=64, BLOCK_K=64, num_warps=4, num_stages=4)),
        # 4 GPUs, if an SM has that much shared memory: one program per SM.
        (1, dict(BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=6)),
        # 1 or 2 GPUs: two programs per SM.
        (math.inf, dict(BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=3, maxnreg=128))),
    # Exact fp32 has no tensor cores and exists for tests.
    torch.float32: ((math.inf, dict(BLOCK=64, BLOCK_K=32, num_warps=4, num_stages=2)),),
}


def _mirror_lower(product, out, scale, power=1):
    """out = scale (n,), None for 1, to this power, times the lower half of product (n, M, M), mirrored."""
    product = product if scale is None else scale.view(-1, 1, 1)**power * product
    return out.copy_(product.tril() + product.tril(-1).mT)


def XXT_ref(X, out, scale=None):
    """out = s² X Xᵀ; returns out."""
    return _mirror_lower(_at_least_fp32(X) @ _at_least_fp32(X).mT, out, scale, 2)


def XTX_ref(X, out, scale=None):
    """out = s² Xᵀ X; returns out."""
    return _mirror_lower(_at_least_fp32(X).mT @ _at_least_fp32(X), out, scale, 2)


def ba_plus_cAA_ref(P, c, b, out, a=0.0, scale=None):
    """out = s (c P Pᵀ + b P + a I) for symmetric P, which is not verified; returns out."""
    P = _at_least_fp32(P)
    eye = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    return _mirror_lower(c * (P @ P.mT) + b * P + a * eye, out, scale)


@triton.jit
def _gram_tile(X, batch, m, k, M, K, ACROSS, BLOCK, BLOCK_K):
    """(BLOCK, BLOCK_K) tile from row m and column k on of matrix `batch` of X (n, M, K), or with ACROSS of Xᵀ, X (n, K,
    M); zeros beyond the edges. X: a descriptor, or a pointer and the strides of matrices and rows."""
    if isinstance(X, tl.tensor_descriptor):
        if ACROSS:
            return X.load([batch, k, m]).reshape(BLOCK_K, BLOCK).T
        else:
            return X.load([batch, m, k]).reshape(BLOCK, BLOCK_K)
    else:
        x, stride_b, stride = X
        m = m.to(tl.int64) + tl.arange(0, BLOCK)[:, None]
        k = (k + tl.arange(0, BLOCK_K))[None, :]
        return tl.load(x + batch.to(tl.int64) * stride_b + (k.to(tl.int64) * stride + m if ACROSS else m * stride + k),
                       mask=(m < M) & (k < K), other=0.0)


@triton.jit
def _gram_kernel(Tiles, X, Out, Scale, M, K, c, b, a, ACROSS: constexpr, ADDEND: constexpr, BLOCK: constexpr,
                 BLOCK_K: constexpr):
    # Program t of the triangle 0 | 1 2 | 3 4 5 | ... computes tile (row, col), col <= row. The first tile of a row
    # has 8t + 1 = (2 row + 1)², the tile before it 8 less. 8t + 4 lies between, so rounding does not change the row.
    t = tl.program_id(0)
    row = ((tl.sqrt((8 * t + 4).to(tl.float32)) - 1) / 2).to(tl.int32)
    col = t - row * (row + 1) // 2
    batch = tl.program_id(1)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        left = _gram_tile(Tiles, batch, row * BLOCK, k, M, K, ACROSS, BLOCK, BLOCK_K)
        right = _gram_tile(Tiles, batch, col * BLOCK, k, M, K, ACROSS, BLOCK, BLOCK_K)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")  # "ieee": fp32 operands are not rounded to tf32
    i = tl.arange(0, BLOCK)
    m, n = row.to(tl.int64) * BLOCK + i, col.to(tl.int64) * BLOCK + i  # (BLOCK,) rows and columns of Out
    in_tile = (m < M)[:, None] & (n < M)[None, :]
    if ADDEND:
        x, stride_b, stride_m = X
        x += batch.to(tl.int64) * stride_b
        addend = tl.load(x + m[:, None] * stride_m + n[None, :], mask=in_tile, other=0.0)
        acc = c * acc + b * addend.to(tl.float32)
        acc += tl.where(m[:, None] == n[None, :], a, 0.0)
    if Scale is not None:
        scale = tl.load(Scale + batch)
        acc *= scale if ADDEND else scale * scale
    out, stride_b, stride_m, stride_n = Out
    tile = acc.to(out.dtype.element_ty)
    out += batch.to(tl.int64) * stride_b
    if row == col:
        tile = tl.where(i[:, None] >= i[None, :], tile, tl.trans(tile))
    else:
        mirrored = out + n[:, None] * stride_m + m[None, :] * stride_n
        tl.store(mirrored, tl.trans(tile), mask=(n < M)[:, None] & (m < M)[None, :])
    tl.store(out + m[:, None] * stride_m + n[None, :] * stride_n, tile, mask=in_tile)


def _launch_gram(name, X, axis, out, scale, c=1.0, b=0.0, a=0.0, addend=False):
    """Sums products over the axis of X other than `axis` (-1 or -2). Returns out."""
    if X.numel() == 0:
        return out.zero_()
    X, out_3d = (X, out) if X.ndim == 3 else (X[None], out[None])
    if X.stride(2) != 1 or X.data_ptr() % 16 or any(stride * X.element_size() % 16 for stride in X.stride()[:2]):
        raise ValueError(f"{name}: rows of the input must be contiguous and begin at multiples of 16 bytes, got strides"
                         f" {X.stride()} of {X.element_size()} bytes from address {X.data_ptr()}")
    n, M, K = X.shape[0], X.shape[axis], X.shape[-3 - axis]
    for per_sm, launch in GRAM_LAUNCH[X.dtype]:
        blocks = triton.cdiv(M, launch["BLOCK"])
        tiles = blocks * (blocks + 1) // 2
        fits = 4 * launch["num_stages"] * launch["BLOCK"] * launch["BLOCK_K"] <= _shared_memory(X.device)
        if fits and n * tiles <= per_sm * _sm_count(X.device):
            break
    tiles_of_X = _strided(X)
    if _has_tma(X.device):
        block = launch["BLOCK"], launch["BLOCK_K"]
        tiles_of_X = TensorDescriptor.from_tensor(X, [1, *block] if axis == -2 else [1, *block[::-1]])
    # At M = 768 a matrix stays in L2 without any reordering of tiles.
    _gram_kernel[(tiles, n)](tiles_of_X, _strided(X), (out_3d, *out_3d.stride()), scale, M, K, c, b, a,
                             ACROSS=axis == -1, ADDEND=addend, **launch)
    return out


def _separate(**given):
    """A check: the kernel reads the first tensor, so no other one, which it writes, may be the same."""
    source, *others = (name for name, x in given.items() if isinstance(x, Tensor))
    return next((f"{name} must not be {source}, which is read while {name} is written" for name in others
                 if given[name] is given[source]), None)


XXT = operation(XXT_ref, check=_separate, X="... M K: bf16 fp32 strided", out="... M M: strided", scale="?...: fp32")(
    lambda X, out, scale=None: _launch_gram("XXT", X, -2, out, scale))
XTX = operation(XTX_ref, check=_separate, X="... M K: bf16 fp32 strided", out="... K K: strided", scale="?...: fp32")(
    lambda X, out, scale=None: _launch_gram("XTX", X, -1, out, scale))
ba_plus_cAA = operation(
    ba_plus_cAA_ref, check=_separate, P="... M M: bf16 fp32 strided", out="... M M: strided", scale="?...: fp32")(
    lambda P, c, b, out, a=0.0, scale=None: _launch_gram("ba_plus_cAA", P, -2, out, scale, c, b, a, addend=True))


# ======================================================================================================================
# 9  The updates: NorMuon around the products of section 8, and Adam
#   X, scale = fused_momentum(grad, momentum, mu, safety, slow, decay, slow_rate, slow_share)
#       m     ← m + (1 − decay)(g − m)                           in place
#       s     ← s + slow_rate (g − s)                            in place, if there is a slow average s
#       X     = round(g + mu (m + slow_share (s − m) − g))       in the dtype of grad
#       scale = 1 / (safety ‖X‖ + 1e-6)                          per matrix, of the rounded X
#
#   normuon_update(p_bits, mantissa, v, y, lr, matrix_lr, weight_decay, beta2, average, average_rate)
#       q ← row means of y²;  v ← v + (1 − beta2)(q − v);  r = 1/√max(v, 1e-10)
#       y' = round(y r ‖y‖ / max(‖r y‖, 1e-10 √C))                   rows normalised, norm of the matrix kept
#       w ← w − [y' w ≥ 0] w weight_decay lr' − y' lr',  lr' = lr matrix_lr
#       average ← average + average_rate (w − average)                    if there is an average
#
#   adam_update(p, m, v, grad, step_size, weight_decay, beta1, beta2, eps, average, average_rate)
#       m ← beta1 m + (1 − beta1) g;  v ← beta2 v + (1 − beta2) g²;  u = step_size m / (√v + eps)
#       w ← w − u − [u w > 0] w weight_decay;  average as above
#   replicated_update(...)                the same with numbers of its own for every weight
#
#   grad, y (n, R, C) bf16 or fp32; momentum, slow, average (n, R, C) fp32; scale (n,), v (n, R, 1), matrix_lr (n, 1, 1)
#   fp32; p_bits, mantissa (n, R, C) int16: upper and lower halves of the fp32 weights w, truncated. Adam: p, grad bf16
#   or fp32; m, v, average, beta1, beta2, lr_mul, wd_mul fp32, all of one shape. Numbers of a step may be 0-D tensors.
# Each weight is read and written once; the norms of normuon_update take one more pass over y. Sums have a fixed order.
# Slow average: PR 339 and the optimizer ANVIL of record 92. NorMuon: Li et al., arXiv 2510.05491. Cautious decay:
# varunneal, PR 154. Rates per matrix (K9): PR 168. Master weights in two halves: classiclarryd and YouJiacheng, PR 190.

# Elements of a program; NorMuon's programs have whole rows. Many short programs hide the memory's latency.
MOMENTUM_LAUNCH = dict(BLOCK=1024, num_warps=4)
NORMUON_LAUNCH = dict(ELEMENTS=4096, num_warps=4)
ADAM_LAUNCH = dict(BLOCK=1024, num_warps=4)


def fused_momentum_ref(grad, momentum, mu, safety, slow=None, decay=None, slow_rate=0.0, slow_share=0.0):
    """Updates `momentum` and `slow` in place; returns (X, scale). decay None: mu."""
    g = grad.float()
    momentum.add_((1 - (mu if decay is None else decay)) * (g - momentum))
    m = momentum
    if slow is not None:
        slow.add_(slow_rate * (g - slow))
        m = m + slow_share * (slow - m)
    X = (g + mu * (m - g)).to(grad.dtype)
    return X, 1 / (safety * X.float().square().sum((-2, -1)).sqrt() + 1e-6)


@triton.jit
def _momentum_kernel(Grad, M, Slow, X, Squares, size, mu, decay, slow_rate, slow_share, BLOCK: constexpr):
    # Program (b, n): block b of matrix n. Squares (n, blocks): sums of the squares of the rounded X.
    mu, decay, slow_rate, slow_share = _number(mu), _number(decay), _number(slow_rate), _number(slow_share)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    i = tl.program_id(1).to(tl.int64) * size + i
    g = tl.load(Grad + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(M + i, mask=inside, other=0.0)
    m += (1 - decay) * (g - m)
    tl.store(M + i, m, mask=inside)
    if Slow is not None:
        s = tl.load(Slow + i, mask=inside, other=0.0)
        s += slow_rate * (g - s)
        tl.store(Slow + i, s, mask=inside)
        m += slow_share * (s - m)
    x = (g + mu * (m - g)).to(X.dtype.element_ty)
    tl.store(X + i, x, mask=inside)
    x = x.to(tl.float32)
    tl.store(Squares + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(x * x, axis=0))


@triton.jit
def _momentum_scale_kernel(Squares, Scale, blocks, safety, BLOCK: constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, blocks, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(Squares + tl.program_id(0) * blocks + i, mask=i < blocks, other=0.0)
    tl.store(Scale + tl.program_id(0), 1 / (safety * tl.sqrt(tl.sum(total, axis=0)) + 1e-6))


@operation(fused_momentum_ref, any_dtype=True, grad="n R C: bf16 fp32", momentum="n R C: fp32", slow="?n R C: fp32")
def fused_momentum(grad, momentum, mu, safety, slow=None, decay=None, slow_rate=0.0, slow_share=0.0):
    n, size = len(grad), grad.shape[1:].numel()
    blocks = triton.cdiv(size, MOMENTUM_LAUNCH["BLOCK"])
    X, squares, scale = torch.empty_like(grad), momentum.new_empty(n, blocks), momentum.new_empty(n)
    _momentum_kernel[(blocks, n)](grad, momentum, slow, X, squares, size, mu, mu if decay is None else decay, slow_rate,
                                  slow_share, **MOMENTUM_LAUNCH)
    _momentum_scale_kernel[(n,)](squares, scale, blocks, safety, BLOCK=1024)
    return X, scale


def join_master(p_bits, mantissa):
    """fp32 numbers from their upper 16 bits (the bits of the bf16 parameter) and lower 16 bits, both int16."""
    return ((p_bits.int() << 16) | (mantissa.int() & 0xFFFF)).view(torch.float32)


def normuon_update_ref(p_bits, mantissa, v, y, lr, matrix_lr, weight_decay, beta2, average=None, average_rate=0.0):
    """Updates p_bits, mantissa, v and average in place."""
    q = y.float().square().mean(-1, keepdim=True)
    v.lerp_(q, 1 - beta2)
    r = v.clamp(min=1e-10).rsqrt()
    norm, new_norm = (s.sum((-2, -1), keepdim=True).sqrt() for s in (q, q * r * r))  # both divided by sqrt(C)
    y = (y.float() * (r * norm / new_norm.clamp(min=1e-10))).to(y.dtype).float()
    w = join_master(p_bits, mantissa)
    lr = lr * matrix_lr
    w = w - (y * w >= 0) * w * (weight_decay * lr) - y * lr  # K7: a zero update decays here, not in Adam
    if average is not None:
        average.add_((w - average) * average_rate)
    bits = w.view(torch.int32)
    p_bits.copy_((bits >> 16).to(torch.int16))  # K8: truncation
    mantissa.copy_(bits.to(torch.int16))


@triton.jit
def _row_norms_kernel(Y, V, Sums, R, C, beta2, ROWS: constexpr, COLUMNS: constexpr):
    # Program (b, n): block b of the rows of matrix n. Sums (n, blocks, 2): of q and of q r² over these rows.
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = row < R
    row += tl.program_id(1) * R
    y = _tile(Y, row, column, (tl.program_id(1) + 1) * R, C)
    q = tl.sum(y * y, axis=1) / C
    v = tl.load(V + row, mask=inside, other=1.0)
    v += (1 - beta2) * (q - v)
    tl.store(V + row, v, mask=inside)
    sums = Sums + 2 * (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))
    tl.store(sums, tl.sum(q, axis=0))
    tl.store(sums + 1, tl.sum(q / tl.maximum(v, 1e-10), axis=0))


@triton.jit
def _normuon_kernel(P, Mantissa, V, Y, Average, Sums, MatrixLr, lr, weight_decay, average_rate, R, C, ROWS: constexpr,
                    COLUMNS: constexpr, BLOCKS: constexpr):
    # The grid of _row_norms_kernel. Every program adds up the sums of its matrix.
    lr = _number(lr) * tl.load(MatrixLr + tl.program_id(1))
    decay = _number(weight_decay) * lr
    block = tl.arange(0, BLOCKS)
    sums, known = Sums + 2 * (tl.program_id(1) * tl.num_programs(0) + block), block < tl.num_programs(0)
    norm = tl.sqrt(tl.sum(tl.load(sums, mask=known, other=0.0), axis=0))
    new_norm = tl.sqrt(tl.sum(tl.load(sums + 1, mask=known, other=0.0), axis=0))
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < R)[:, None] & (column < C)[None, :]
    v = tl.load(V + tl.program_id(1) * R + row, mask=row < R, other=1.0)
    r = tl.rsqrt(tl.maximum(v, 1e-10)) * (norm / tl.maximum(new_norm, 1e-10))
    i = (tl.program_id(1) * R + row).to(tl.int64)[:, None] * C + column[None, :]
    y = tl.load(Y + i, mask=inside, other=0.0)
    y = (y.to(tl.float32) * r[:, None]).to(y.dtype).to(tl.float32)
    upper, lower = tl.load(P + i, mask=inside, other=0), tl.load(Mantissa + i, mask=inside, other=0)
    w = ((upper.to(tl.int32) << 16) | (lower.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    w = w - tl.where(y * w >= 0, w * decay, 0.0) - y * lr
    if Average is not None:
        average = tl.load(Average + i, mask=inside, other=0.0)
        tl.store(Average + i, average + (w - average) * _number(average_rate), mask=inside)
    bits = w.to(tl.int32, bitcast=True)
    tl.store(P + i, (bits >> 16).to(tl.int16), mask=inside)
    tl.store(Mantissa + i, bits.to(tl.int16), mask=inside)


@operation(normuon_update_ref, any_dtype=True, p_bits="n R C: int16", mantissa="n R C: int16", v="n R 1: fp32",
           y="n R C: bf16 fp32", matrix_lr="n 1 1: fp32", average="?n R C: fp32")
def normuon_update(p_bits, mantissa, v, y, lr, matrix_lr, weight_decay, beta2, average=None, average_rate=0.0):
    (n, R, C), columns = y.shape, triton.next_power_of_2(y.size(2))
    rows = max(1, NORMUON_LAUNCH["ELEMENTS"] // columns)
    blocks = triton.cdiv(R, rows)
    sums, sizes = v.new_empty(n, blocks, 2), dict(ROWS=rows, COLUMNS=columns, num_warps=NORMUON_LAUNCH["num_warps"])
    _row_norms_kernel[(blocks, n)](y, v, sums, R, C, beta2, **sizes)
    _normuon_kernel[(blocks, n)](p_bits, mantissa, v, y, average, sums, matrix_lr, lr, weight_decay, average_rate, R, C,
                                 BLOCKS=triton.next_power_of_2(blocks), **sizes)


def adam_update_ref(p, m, v, grad, step_size, weight_decay, beta1, beta2, eps, average=None, average_rate=0.0):
    """Adam with cautious weight decay, in place: it decays only weights that the update moves towards zero."""
    grad = grad.float()
    m.mul_(beta1).add_(grad * (1 - beta1))
    v.mul_(beta2).add_(grad * grad * (1 - beta2))
    w = p.float()
    u = step_size * m / (v.sqrt() + eps)
    w = w - u - weight_decay * w * (u * w > 0)
    if average is not None:
        average.add_((w - average) * average_rate)
    p.copy_(w)


def adam_step_size(lr, t, beta1, beta2):
    """The factor of m / sqrt(v) in update number t, from 1: the rate, corrected for moments that begin at zero."""
    return lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t)


def replicated_update_ref(p, m, v, grad, lr, t, beta1, beta2, lr_mul, wd_mul, adam_wd, eps):
    """`adam_update_ref` with numbers of its own for every weight. t: number of updates, this one included."""
    lr = lr * lr_mul
    adam_update_ref(p, m, v, grad, adam_step_size(lr, t, beta1, beta2), lr * lr * adam_wd * wd_mul, beta1, beta2, eps)


@triton.jit(do_not_specialize=["t"])
def _adam_kernel(P, M, V, Grad, Average, step_size, weight_decay, beta1, beta2, eps, average_rate, t, LrMul, WdMul,
                 size, BLOCK: constexpr):
    # With LrMul, beta1 and beta2 are pointers, too, step_size is the rate, and weight_decay that of all weights.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    step_size, weight_decay = _number(step_size), _number(weight_decay)
    if LrMul is not None:
        t = _number(t)
        beta1, beta2 = tl.load(beta1 + i, mask=inside, other=0.5), tl.load(beta2 + i, mask=inside, other=0.5)
        lr = step_size * tl.load(LrMul + i, mask=inside, other=0.0)
        step_size = lr * tl.sqrt(1 - tl.exp2(t * tl.log2(beta2))) / (1 - tl.exp2(t * tl.log2(beta1)))
        weight_decay = lr * lr * weight_decay * tl.load(WdMul + i, mask=inside, other=0.0)
    g = tl.load(Grad + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(M + i, mask=inside, other=0.0) * beta1 + g * (1 - beta1)
    v = tl.load(V + i, mask=inside, other=0.0) * beta2 + g * g * (1 - beta2)
    tl.store(M + i, m, mask=inside)
    tl.store(V + i, v, mask=inside)
    w = tl.load(P + i, mask=inside, other=0.0).to(tl.float32)
    u = step_size * m / (tl.sqrt(v) + eps)
    w = w - u - tl.where(u * w > 0, weight_decay * w, 0.0)
    tl.store(P + i, w.to(P.dtype.element_ty), mask=inside)
    if Average is not None:
        average = tl.load(Average + i, mask=inside, other=0.0)
        tl.store(Average + i, average + (w - average) * _number(average_rate), mask=inside)


def _launch_adam(p, *args):
    _adam_kernel[(triton.cdiv(p.numel(), ADAM_LAUNCH["BLOCK"]),)](p, *args, p.numel(), **ADAM_LAUNCH)


@operation(adam_update_ref, any_dtype=True, p="...: bf16 fp32", m="...: fp32", v="...: fp32", grad="...: bf16 fp32",
           average="?...: fp32")
def adam_update(p, m, v, grad, step_size, weight_decay, beta1, beta2, eps, average=None, average_rate=0.0):
    _launch_adam(p, m, v, grad, average, step_size, weight_decay, beta1, beta2, eps, average_rate, 0, None, None)


@operation(replicated_update_ref, any_dtype=True, p="N: bf16 fp32", m="N: fp32", v="N: fp32", grad="N: bf16 fp32",
           beta1="N: fp32", beta2="N: fp32", lr_mul="N: fp32", wd_mul="N: fp32")
def replicated_update(p, m, v, grad, lr, t, beta1, beta2, lr_mul, wd_mul, adam_wd, eps):
    _launch_adam(p, m, v, grad, None, lr, adam_wd, beta1, beta2, eps, 0.0, t, lr_mul, wd_mul)


# {steps: coefficients (a, b, c) of X <- aX + (bP + cPP)X, P = XXᵀ}, by the method of Polar Express, Amsel et al., arXiv
# 2505.16932; 5 steps are its own table. Singular values of X / ‖X‖ above 1e-3 come to 0.85 ... 1.14, in 4 steps those
# above 3e-3 to 0.74 ... 1.21.
POLAR_EXPRESS = {
    5: (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)),
    4: (
        (8.05794226063372, -22.0521864898645, 15.5407094240663),
        (3.92634907759703, -2.75379263491077, 0.497353567904462),
        (3.45447199626749, -2.48754582424883, 0.477512907264636),
        (2.51152716635273, -1.85244835608301, 0.438832635580211)),
}
POLAR_SAFETY = 1.02


def polar_express(X, scale, ops, steps=5):
    """Approximate polar factor of every matrix scale · X, as (n, R, C). steps: a key of POLAR_EXPRESS.
    X (n, R, C) is overwritten. scale (n,) fp32 makes all Frobenius norms < 1; the first products apply scale."""
    tall = X.size(1) > X.size(2)
    side = min(X.size(1), X.size(2))
    P, Q = (torch.empty(X.size(0), side, side, dtype=X.dtype, device=X.device) for _ in range(2))
    spare = torch.empty_like(X)
    for a, b, c in POLAR_EXPRESS[steps]:
        (ops.XTX if tall else ops.XXT)(X, P, scale)
        ops.ba_plus_cAA(P, c, b, Q, a, scale)  # Q = aI + bP + cPP, so that the next X is one plain product
        new = torch.bmm(X, Q, out=spare) if tall else torch.bmm(Q, X, out=spare)
        X, spare, scale = new, X, None
    return X


# ======================================================================================================================
# 10  Sums of streams, their norm and its FP8 codes
#   mixed = mix(terms, reader, added, grad_codes)
#       x      = f₁ s₁ + f₂ s₂ + ... + Σ added, rounded once   terms: pairs (f, s)
#       normed = x / rms(x), and its codes as in section 4     if the stream has a reader
#   its gradient
#       g      = dx + (dnormed − normed mean(dnormed · normed)) / rms(x);   ds = f g,   df = g · s per token
#   streams, sums = add_later(streams, factors)                replaces the sums f₁ s₁ + f₂ s₂, one for each place
#       their gradient                                         ds = Σ f g over the places, df = g · s
#
#   pieces = unbind(bank), columns(matrix, sizes)              factors, and what else gets its gradient from many tokens
#   f = token_gate(first, w, λ) = λ σ(first wᵀ)                a factor for each token
#
#   s, x, normed (N, D), contiguous. f: None (1), a number, a tensor of one number, or a column (N, 1).
# mix reads every stream once, and writes x and what its reader needs: the normed stream, or with FP8 its codes in both
# layouts in its place. Where another mix has made a stream, ds = f g is not written: that mix reads g and f.
# Many layers add the same streams (embeddings). add_later hands every layer a sum that has no memory: mix reads its
# streams, and its gradient is g, which mix writes anyway. At the end one kernel makes the gradients of all these sums.
# unbind and columns make one gradient of many small tensors. A backward pass writes the parts of a piece's gradient (df
# per token) beside autograd, and one sum takes the parts of all pieces.
# Tensors without memory, one NaN expanded, stand for what is never written: the sums of add_later, the normed stream if
# its reader takes codes, and its gradient if that travels as codes (GradCodes).

MIX_LAUNCH = {"codes": dict(BLOCK_N=32, BLOCK_D=128, num_warps=4), "plain": dict(BLOCK_N=8, BLOCK_D=128, num_warps=4)}
MIX_GRAD_LAUNCH = {"codes": dict(BLOCK_N=32, BLOCK_D=128, num_warps=8),
                   "plain": dict(BLOCK_N=8, BLOCK_D=256, num_warps=8)}
ADDED_GRAD_LAUNCH = dict(BLOCK_N=4, BLOCK_D=128, num_warps=4)  # few rows: each place and stream has a register
TOKEN_GATE_LAUNCH = dict(BLOCK=512, num_warps=4)


class Reader(NamedTuple):
    """What reads the norm of a stream."""
    scale: float | None = None  # static scale of the FP8 codes that it reads; None: it reads the normed stream
    channels: int = 0  # it reads a copy of so many first channels of the normed stream
    whole: bool = False  # with codes: it also reads the normed stream


READERS = 4  # so many gradients of a stream come to mix by themselves; autograd sums those of further readers


class _Beside:
    """What one backward pass leaves for another beside autograd."""
    left = None

    def take(self):
        left, self.left = self.left, None
        return left


class GradCodes(_Beside):
    """Where mix leaves the gradient of a stream as e5m2 codes (N, D) and (D, N) of a static scale, for its maker."""
    def __init__(self, scale):
        self.scale = scale


class _Parts(_Beside):
    """Gradients of the pieces of a tensor, which backward passes write here in place of returning them.
    new(like, *shape): the memory, for a piece that needs `shape`; pieces(memory): its pieces."""
    def __init__(self, new, pieces=lambda memory: memory):
        self.new, self.pieces, self.given = new, pieces, set()

    def part(self, i, like, *shape, adds=False):
        """Memory of piece i; None if another reader that does not add has it."""
        if self.left is None:
            self.left, self.given = self.new(like, *shape), set()
        if i in self.given and not adds:
            return None
        self.given.add(i)
        return self.pieces(self.left)[i]


def _parts(*tensors):
    """What gives memory for the gradients of pieces; None for other tensors: autograd gets their gradients."""
    return [getattr(x, "part", None) for x in tensors]


def _as_pieces(tensors, parts):
    """The tensors, whose readers find the parts of their gradients."""
    for i, x in enumerate(tensors):
        x.part = functools.partial(parts.part, i)
    return tensors


class Mixed(NamedTuple):
    """The result of mix: a stream, and what its reader reads; see `Reader`. Each use of x or normed takes one of
    READERS tensors, whose gradients mix sums. Further uses share the last one, whose gradients autograd sums, more
    slowly. To print the stream, take xs[0]."""
    xs: list[Tensor]  # one stream (N, D), for each use
    reader: Reader | None = None
    normeds: list[Tensor] | None = None  # likewise (N, D)
    first: Tensor | None = None  # (N, channels)
    codes: tuple[Tensor, Tensor] | None = None  # e4m3, (N, D) and (D, N)

    x = property(lambda self: self.xs.pop() if len(self.xs) > 1 else self.xs[0])
    normed = property(lambda self: self.normeds and (self.normeds.pop() if len(self.normeds) > 1 else self.normeds[0]))


class Added(NamedTuple):
    """A sum of streams for one place. mix reads the streams; the gradient goes through `token`."""
    token: Tensor | None  # (N, D), without memory; None: the gradient goes through streams and factors
    streams: list[Tensor]  # (N, D)
    factors: list  # as in mix
    previous: bool  # token n adds row n - 1 of the streams, the first token nothing


_nan = functools.cache(lambda device, dtype: torch.full((1, 1), math.nan, device=device, dtype=dtype))


def _without_memory(x):
    """A tensor like x whose elements are one NaN."""
    return _nan(x.device, x.dtype).expand(x.shape)


def mix_ref(terms, reader=None, added=(), grad_codes=None):
    """mix in plain PyTorch, rounded after each operation. grad_codes: not used."""
    def product(factor, s, previous=False):
        s = F.pad(s[:-1], (0, 0, 1, 0)) if previous else s
        return s if factor is None else (factor.to(s.dtype) if isinstance(factor, Tensor) else factor) * s

    x = functools.reduce(torch.add, (product(*term) for term in terms))
    for part in added:
        x = x + functools.reduce(torch.add, (product(f, s, part.previous) for f, s in zip(part.factors, part.streams)
                                             if f is not None))
    if reader is None:
        return Mixed([x])
    normed = rms_norm(x)
    codes = both_layouts(normed.detach(), reader.scale, E4M3) if reader.scale else None
    first = normed[:, :reader.channels].contiguous() if reader.channels else None
    return Mixed([x], reader, [normed], first, codes)


def add_later_ref(streams, factors, previous=False):
    """(the streams, [Added]); factors: a list for each place, None for a stream that it does not add."""
    return streams, [Added(None, streams, row, previous) for row in factors]


def columns_ref(matrix, sizes):
    """The rows of a matrix (rows, N), in groups of `sizes`, each as columns (N, size)."""
    return tuple(piece.mT for piece in matrix.split(sizes))


@triton.jit
def _times(Factor, x, n, N):
    """x (tokens n, channels) times a factor; see _per_token."""
    if Factor is not None:
        factor, stride = Factor
        if isinstance(factor, tl.tensor) and factor.dtype.is_ptr():
            x *= tl.load(factor + n * stride, mask=n < N, other=0.0).to(tl.float32)[:, None]
        else:
            x *= factor
    return x


@triton.jit
def _mix_kernel(Streams, Factors, X, Normed, First, Codes, CodesT, Rstd, N, inverse_scale, PREVIOUS: constexpr,
                D: constexpr, CHANNELS: constexpr, BLOCK_N: constexpr, BLOCK_D: constexpr):
    # Whole rows stay on chip between the sum and the norm. PREVIOUS: a bit for each stream: token n takes row n - 1.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunks, squares = (), tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for k in tl.static_range(len(Streams)):
            row = tl.where(n == 0, N, n - 1) if PREVIOUS >> k & 1 else n
            total += _times(Factors[k], _tile(Streams[k], row, d, N, D), n, N)
        x = total.to(X.dtype.element_ty)
        _store(X, x, n, d, N, D)
        chunks = chunks + (x,)
        squares += x.to(tl.float32) * x.to(tl.float32)
    if Rstd is not None:
        rstd = tl.rsqrt(tl.sum(squares, 1) / D + _RMS_EPS)
        tl.store(Rstd + n, rstd, mask=n < N)
        for i in tl.static_range(len(chunks)):
            d = i * BLOCK_D + tl.arange(0, BLOCK_D)
            normed = chunks[i].to(tl.float32) * rstd[:, None]
            if Normed is not None:
                _store(Normed, normed, n, d, N, D)
            if First is not None and i == 0:
                _store(First, normed, n, d, N, CHANNELS)
            if Codes is not None:
                _store_codes(Codes, CodesT, normed.to(tl.bfloat16), inverse_scale, n, d, N, D)


@triton.jit
def _normed_grad(dNormed, dFirst, n, N, D, CHANNELS, START, BLOCK_N, BLOCK_D):
    """Gradient of the normed stream (tokens n, channels from START on), summed over its readers."""
    d = START + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for k in tl.static_range(len(dNormed)):
        total += _tile(dNormed[k], n, d, N, D)
    if dFirst is not None and START == 0:
        total += _tile(dFirst, n, d, N, CHANNELS)
    return total


@triton.jit
def _mix_grad_kernel(dX, dXFactors, dNormed, dFirst, X, Rstd, Streams, Dots, Factors, dStreams, G, Codes, CodesT, N,
                     inverse_scale, D: constexpr, CHANNELS: constexpr, BLOCK_N: constexpr, BLOCK_D: constexpr):
    # dX with factors, dNormed: of each reader. Streams, Dots: of learned factors. Factors, dStreams: of written terms.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dots = (tl.zeros((BLOCK_N, BLOCK_D), tl.float32),) * len(Streams)
    if X is not None:
        rstd, dot = tl.load(Rstd + n, mask=n < N, other=0.0), tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for start in tl.static_range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            dot += _normed_grad(dNormed, dFirst, n, N, D, CHANNELS, start, BLOCK_N, BLOCK_D) * _tile(X, n, d, N, D)
        along = tl.sum(dot, 1) * rstd * rstd * rstd / D
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        g = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for k in tl.static_range(len(dX)):
            g += _times(dXFactors[k], _tile(dX[k], n, d, N, D), n, N)
        if X is not None:
            dnormed = _normed_grad(dNormed, dFirst, n, N, D, CHANNELS, start, BLOCK_N, BLOCK_D)
            g += rstd[:, None] * dnormed - along[:, None] * _tile(X, n, d, N, D)
        if G is not None:
            _store(G, g, n, d, N, D)
        if Codes is not None:
            _store_codes(Codes, CodesT, g.to(tl.bfloat16), inverse_scale, n, d, N, D)
        for k in tl.static_range(len(dStreams)):
            _store(dStreams[k], _times(Factors[k], g, n, N), n, d, N, D)
        sums = ()
        for k in tl.static_range(len(Streams)):
            sums = sums + (dots[k] + g * _tile(Streams[k], n, d, N, D),)
        dots = sums
    for k in tl.static_range(len(Streams)):  # no two programs of a launch add to one token, so sums repeat
        dot = tl.sum(dots[k], 1)
        tl.atomic_add(Dots[k] + n, dot, mask=n < N, sem="relaxed")


@triton.jit
def _added_grad_kernel(Grads, Streams, Factors, Passed, dStreams, Dots, N, PREVIOUS: constexpr, D: constexpr,
                       BLOCK_N: constexpr, BLOCK_D: constexpr):
    # Factors and Dots: of every place, for every stream; None: the place does not add it. Passed: from other readers.
    # Token m adds the rows n of the streams.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = n + PREVIOUS
    dots = (tl.zeros((BLOCK_N, BLOCK_D), tl.float32),) * (len(Grads) * len(Streams))
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        streams, totals = (), ()
        for k in tl.static_range(len(Streams)):
            zeros = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            streams += (_tile(Streams[k], n, d, N, D),)
            totals += (zeros if Passed[k] is None else _tile(Passed[k], n, d, N, D),)
        sums = ()
        for place in tl.static_range(len(Grads)):
            g, new = _tile(Grads[place], m, d, N, D), ()
            for k in tl.static_range(len(Streams)):
                if Factors[place][k] is None:
                    sums, new = sums + (dots[place * len(Streams) + k],), new + (totals[k],)
                else:
                    sums = sums + (dots[place * len(Streams) + k] + g * streams[k],)
                    new = new + (totals[k] + _times(Factors[place][k], g, m, N),)
            totals = new
        dots = sums
        for k in tl.static_range(len(Streams)):
            _store(dStreams[k], totals[k], n, d, N, D)
    for place in tl.static_range(len(Grads)):
        for k in tl.static_range(len(Streams)):
            if Factors[place][k] is not None:
                dot = tl.sum(dots[place * len(Streams) + k], 1)
                tl.atomic_add(Dots[place][k] + m, dot, mask=m < N, sem="relaxed")


def _per_token(factors):
    """What a kernel takes for factors: (a number or a tensor, stride from token to token). None stays None."""
    return tuple(f if f is None else (f, f.stride(0) if isinstance(f, Tensor) and f.ndim and len(f) > 1 else 0)
                 for f in factors)


def _dots(factors, like):
    """Where gradients per token of learned factors go, fp32: to the parts of `unbind` and `columns`, else to zeros."""
    own = iter(like.new_zeros(sum(not hasattr(f, "part") for f in factors), len(like), dtype=torch.float32))
    return [f.part(like, len(like), adds=True) if hasattr(f, "part") else next(own) for f in factors]


def _factor_grads(factors, dots):
    """What autograd gets."""
    return [None if hasattr(f, "part") else (u if f.numel() == len(u) else u.sum()).view(f.shape).to(f.dtype)
            for f, u in zip(factors, dots)]


def _block_d(D, launch):
    """The launch, with chunks that divide the stream."""
    return launch | {"BLOCK_D": max(16, min(launch["BLOCK_D"], D & -D))}


class _Pieces(_Function):
    def forward(ctx, tensor, parts, unbinds):
        ctx.parts, ctx.unbinds, ctx.like = parts, unbinds, tensor.detach()
        ctx.set_materialize_grads(False)
        if not unbinds:
            return parts.pieces(tensor)
        if tensor.ndim == 1:  # 16 bytes apart, since Triton compiles other kernels for pointers of another alignment
            tensor = F.pad(tensor[:, None], (0, 16 // tensor.element_size() - 1))[:, 0]
        return tensor.unbind(0)

    def backward(ctx, *grads):
        left, like = ctx.parts.take(), ctx.like
        total = torch.zeros_like(like) if left is None else (left.sum(1) if ctx.unbinds else left).to(like.dtype)
        for piece, grad in zip(ctx.parts.pieces(total), grads):  # of pieces that something else reads, too
            if grad is not None:
                piece.add_(grad)
        return total, None, None


def unbind(bank):
    """The n tensors of a bank (n, ...); those of a vector lie 16 bytes apart."""
    parts = _Parts(lambda like, *shape: like.new_zeros(len(bank), *shape, dtype=torch.float32))
    return _as_pieces(_Pieces.apply(bank, parts, True), parts)


def columns(matrix, sizes):  # see columns_ref
    parts = _Parts(lambda like, *_: like.new_zeros(matrix.shape, dtype=torch.float32),
                   functools.partial(columns_ref, sizes=sizes))
    return _as_pieces(_Pieces.apply(matrix, parts, False), parts)


class _Mix(_Function):
    def forward(ctx, factors, reader, added, grad_codes, products, *tensors):
        """products, for each use of x, then for each stream: None, or a _Beside for a reader that is a mix, which
        leaves (gradient, factor) for their product. tensors: streams, tokens of `added`, then the learned factors."""
        streams = tensors[:len(factors)]
        (N, D), new = streams[0].shape, streams[0].new_empty
        scale, channels, whole = reader or Reader()
        x, rstd = new(N, D), new(N, dtype=torch.float32) if reader else None
        codes = (new(N, D, dtype=E4M3), new(D, N, dtype=E4M3)) if scale else (None, None)
        first = new(N, channels) if channels else None
        normed = new(N, D) if reader and (whole or not scale) else None
        terms = [(f, s, False) for f, s in zip(factors, streams)]
        for part in added:
            terms += [(f, s, part.previous) for f, s in zip(part.factors, part.streams) if f is not None]
        launch = _block_d(D, MIX_LAUNCH["plain" if codes[0] is None else "codes"])
        _mix_kernel[(triton.cdiv(N, launch["BLOCK_N"]),)](
            tuple(s for _, s, _ in terms), _per_token(f for f, _, _ in terms), x, normed, first, *codes, rstd, N,
            1 / (scale or 1.0), sum(previous << k for k, (*_, previous) in enumerate(terms)), D, channels, **launch)
        ctx.learned = [i for i, f in enumerate(factors) if isinstance(f, Tensor)]
        ctx.save_for_backward(x if reader else None, rstd, *(streams[i] for i in ctx.learned))
        ctx.factors, ctx.grad_codes, ctx.products, ctx.tokens = factors, grad_codes, products, len(added)
        ctx.set_materialize_grads(False)
        if reader and normed is None:
            normed = _without_memory(x)
        ctx.mark_non_differentiable(*(c for c in codes if c is not None))
        return (*(x.view_as(x) for _ in range(READERS)),
                *(normed if normed is None else normed.view_as(normed) for _ in range(READERS)), first, *codes)

    def backward(ctx, *grads):
        x, rstd, *streams = ctx.saved_tensors
        factors, learned, channel, dfirst = ctx.factors, ctx.learned, ctx.grad_codes, grads[2 * READERS]
        pairs = []  # (gradient, factor or None)
        for u, product in zip(grads[:READERS], ctx.products):
            if u is not None:
                pairs.append(product and product.take() or (u, None))
                if pairs[-1][0] is not u and u.data_ptr() != _nan(u.device, u.dtype).data_ptr():
                    raise RuntimeError("mix: two readers took one x; each must take its own")
        dxs = [u.contiguous() for u, _ in pairs]
        dnormeds = [u.contiguous() for u in grads[READERS:2 * READERS] if u is not None]
        if not dxs and not dnormeds and dfirst is None:
            return (None,) * (5 + len(factors) + ctx.tokens + len(learned))
        if dfirst is None and not dnormeds:
            x = rstd = None
        given, of_streams = (*dxs, *dnormeds, x)[0], ctx.products[READERS:]
        (N, D), new = given.shape, given.new_empty
        left = [i for i, f in enumerate(factors) if f is not None and of_streams[i]]
        written = {i: new(N, D) for i, f in enumerate(factors) if i not in left and f is not None}
        learned_factors = [factors[i] for i in learned]
        dots = _dots(learned_factors, given)
        # Whether something takes g itself: a stream without a factor, but for one that takes codes, a token, a product.
        wanted = len(factors) - len(written) + ctx.tokens > (channel is not None)
        as_given = x is None and len(dxs) == 1 and pairs[0][1] is None  # g is the gradient of the sum
        g, codes = given, (None, None)
        if written or learned or channel or not as_given:
            g = new(N, D) if not as_given and wanted else None
            if channel:
                codes = channel.left = new(N, D, dtype=E5M2), new(D, N, dtype=E5M2)
            launch = _block_d(D, MIX_GRAD_LAUNCH["plain" if codes[0] is None else "codes"])
            _mix_grad_kernel[(triton.cdiv(N, launch["BLOCK_N"]),)](
                tuple(dxs), _per_token(f for _, f in pairs), tuple(dnormeds),
                dfirst if dfirst is None else dfirst.contiguous(), x, rstd, tuple(streams), tuple(dots),
                _per_token(factors[i] for i in written), tuple(written.values()), g, *codes, N,
                1 / channel.scale if channel else 1.0, D, 0 if dfirst is None else dfirst.size(1), **launch)
            g = given if as_given else g
        by_stream = [written.get(i, g) for i in range(len(factors))]
        for i in left:
            of_streams[i].left, by_stream[i] = (g, factors[i]), _without_memory(given)
        if channel:
            by_stream[-1] = _without_memory(given)
        return *[None] * 5, *by_stream, *[g] * ctx.tokens, *_factor_grads(learned_factors, dots)


def mix(terms, reader=None, added=(), grad_codes=None):
    """Mixed; differentiable in streams, learned factors, and what `added` sums. terms: pairs (factor, stream); reader:
    Reader or None; added: sums of add_later. grad_codes: GradCodes of the last stream, whose factor is None."""
    factors, streams = zip(*terms)
    sizes, (dtype, device) = {}, (streams[0].dtype, streams[0].device)
    for stream in (*streams, *(stream for part in added for stream in part.streams)):
        _require("mix", {"stream": "N D"}, {"stream": stream}, sizes, dtype, device)
    if grad_codes and factors[-1] is not None:
        raise ValueError("mix: the stream whose gradient becomes codes has a factor")
    if _takes_ref(*streams, any_dtype=True):
        return mix_ref(terms, reader, added)
    products = [None, *(_Beside() for _ in range(READERS - 1))]  # many may read the first one
    results = _Mix.apply(factors, reader, added, grad_codes,
                         [*products, *(getattr(s, "product", None) for s in streams)], *streams,
                         *(part.token for part in added), *(f for f in factors if isinstance(f, Tensor)))
    for x, product in zip(results, products):
        x.product = product  # a mix that reads x looks here
    first, *codes = results[2 * READERS:]
    return Mixed([*results[:READERS]], reader, [*results[READERS:2 * READERS]] if reader else None, first,
                 tuple(codes) if codes[0] is not None else None)


class _AddLater(_Function):
    def forward(ctx, factors, previous, *tensors):
        """factors: of each place for each stream. tensors: the streams, then the factors."""
        ctx.save_for_backward(*(streams := tensors[:len(factors[0])]))
        ctx.factors, ctx.previous = factors, previous
        ctx.set_materialize_grads(False)
        return *(s.view_as(s) for s in streams), *(_without_memory(streams[0]) for _ in factors)

    def backward(ctx, *grads):
        streams, count = ctx.saved_tensors, len(ctx.saved_tensors)
        passed, used = grads[:count], [p for p, g in enumerate(grads[count:]) if g is not None]
        if not used:
            return None, None, *passed, *[None] * sum(f is not None for row in ctx.factors for f in row)
        (N, D), factors = streams[0].shape, [ctx.factors[p] for p in used]
        dstreams, flat = [*map(torch.empty_like, streams)], [f for row in factors for f in row if f is not None]
        dots, launch = _dots(flat, streams[0]), _block_d(D, ADDED_GRAD_LAUNCH)
        pointers = iter(dots)
        _added_grad_kernel[(triton.cdiv(N, launch["BLOCK_N"]),)](
            tuple(grads[count + p].contiguous() for p in used), streams, tuple(map(_per_token, factors)),
            tuple(u if u is None else u.contiguous() for u in passed), tuple(dstreams),
            tuple(tuple(f if f is None else next(pointers) for f in row) for row in factors), N, int(ctx.previous), D,
            **launch)
        for dstream in dstreams:
            dstream.is_new = True  # see _FirstChannels
        dfactors = iter(_factor_grads(flat, dots))
        return None, None, *dstreams, *(next(dfactors) if p in used else None for p, row in enumerate(ctx.factors)
                                        for f in row if f is not None)


def add_later(streams, factors, previous=False):
    """(the streams for later readers, [Added of each place, for one mix]). streams (N, D); factors: for each place a
    0-D tensor or a column (N, 1) for each stream, or None for a stream that the place does not add."""
    if not factors or _takes_ref(*streams, any_dtype=True):
        return add_later_ref(streams, factors, previous)
    results = _AddLater.apply(factors, previous, *streams, *(f for row in factors for f in row if f is not None))
    kept = [s.detach() for s in streams]
    return results[:len(streams)], [
        Added(token, kept, row, previous) for token, row in zip(results[len(streams):], factors)]


class _FirstChannels(_Function):  # (x for add_later, a copy of its first channels)
    def forward(ctx, x, channels):
        ctx.width = x.size(1)
        ctx.set_materialize_grads(False)
        return x.view_as(x), x[:, :channels].contiguous()

    def backward(ctx, dx, dfirst):
        if dx is None or dfirst is None:
            dx = dx if dfirst is None else F.pad(dfirst, (0, ctx.width - dfirst.size(1)))
        else:  # in place if add_later made dx, which nobody else has
            dx = dx if hasattr(dx, "is_new") else dx.clone()
            dx[:, :dfirst.size(1)] += dfirst
        return dx, None


first_channels = _FirstChannels.apply


def token_gate_ref(first, weight, factor):
    """λ σ(first wᵀ) (N, 1) in plain PyTorch; first (N, C), w (1, C), λ one number."""
    return factor * torch.sigmoid(F.linear(first, weight))


@triton.jit
def _gate_of_tokens(First, Weight, n, c, N, C):
    x, w = _tile(First, n, c, N, C), tl.load(Weight + c, mask=c < C, other=0.0).to(tl.float32)
    return x, w, tl.sigmoid(tl.sum(x * w[None, :], 1))


@triton.jit
def _token_gate_kernel(First, Weight, Factor, Gate, N, C: constexpr, CHANNELS: constexpr, BLOCK: constexpr):
    n, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    tl.store(Gate + n, tl.load(Factor) * _gate_of_tokens(First, Weight, n, c, N, C)[2], mask=n < N)


@triton.jit
def _token_gate_grad_kernel(dGate, First, Weight, Factor, dFirst, Parts, N, C: constexpr, CHANNELS: constexpr,
                            BLOCK: constexpr):
    # Parts (programs, C + 1): the gradients of Weight and of Factor from these tokens.
    n, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    x, w, gate = _gate_of_tokens(First, Weight, n, c, N, C)
    dgate = tl.load(dGate + n, mask=n < N, other=0.0)
    dlogit = tl.load(Factor) * dgate * gate * (1 - gate)
    _store(dFirst, dlogit[:, None] * w[None, :], n, c, N, C)
    parts = Parts + tl.program_id(0) * (C + 1)
    tl.store(parts + c, tl.sum(dlogit[:, None] * x, 0), mask=c < C)
    tl.store(parts + C, tl.sum(dgate * gate, 0))


class _TokenGate(_Function):
    def forward(ctx, first, weight, factor):
        (N, C), gate = first.shape, first.new_empty(len(first), 1, dtype=torch.float32)
        ctx.save_for_backward(first, weight, factor)
        ctx.sizes = dict(N=N, C=C, CHANNELS=triton.next_power_of_2(C), **TOKEN_GATE_LAUNCH)
        _token_gate_kernel[(triton.cdiv(N, TOKEN_GATE_LAUNCH["BLOCK"]),)](first, weight, factor, gate, **ctx.sizes)
        return gate

    def backward(ctx, dgate):
        first, weight, factor = ctx.saved_tensors
        (N, C), dfirst = first.shape, torch.empty_like(first)
        parts = dgate.new_empty(triton.cdiv(N, TOKEN_GATE_LAUNCH["BLOCK"]), C + 1)
        _token_gate_grad_kernel[(len(parts),)](dgate.contiguous(), first, weight, factor, dfirst, parts, **ctx.sizes)
        return dfirst, *_summed(parts, weight, factor)


def token_gate(first, weight, factor):
    """token_gate_ref in fp32; factor fp32."""
    if _takes_ref(first, any_dtype=True):
        return token_gate_ref(first, weight, factor)
    return _TokenGate.apply(first.contiguous(), weight.contiguous(), factor)


# ---- Weights times factors -------------------------------------------------------------------------------------------
#   [matrices of a layer, ...] = scaled_weights(bank, factors, in_codes)
#
#   bank (L, P, R, K), contiguous but for its first axis; factors of the first layers. The last of the P matrices of
#   such a layer is times its factor, rounded once. With in_codes, FP8 codes contain the factor, and so does dW.
#   dbank = factor · dW, with in_codes dW;   dfactor = Σ W · dW, with in_codes over the factor
# Scaling the weights costs less than scaling x (PR 166). One launch scales the weights of all layers.

WEIGHTS_LAUNCH = dict(BLOCK=4096, num_warps=4)


def scaled_weights_ref(bank, factors, in_codes=False):
    """The matrices in plain PyTorch."""
    if in_codes:
        return scaled_weights(bank, factors, True)
    matrices, P = list(bank.flatten(0, 1).unbind(0)), bank.size(1)
    for i, factor in enumerate(factors.unbind(0)):
        matrices[i * P + P - 1] = (factor * matrices[i * P + P - 1]).to(bank.dtype)
    return [matrices[i:i + P] for i in range(0, len(matrices), P)]


@triton.jit
def _scale_weights_kernel(A, Factors, Scaled, B, Dots, K, BLOCK: constexpr):
    # Grid axis 1: matrices of K elements. A, Scaled, B: pointer and stride of a matrix. Dots (matrices, programs).
    i, k = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(A[0] + i * A[1] + k, mask=k < K, other=0.0).to(tl.float32)
    if Scaled is not None:
        scaled = a * tl.load(Factors + i).to(tl.float32)
        tl.store(Scaled[0] + i * Scaled[1] + k, scaled.to(Scaled[0].dtype.element_ty), mask=k < K)
    if B is not None:
        b = tl.load(B[0] + i * B[1] + k, mask=k < K, other=0.0).to(tl.float32)
        dot = tl.sum(a * b, 0)
        if Scaled is None:  # the gradient contains the factor
            factor = tl.load(Factors + i).to(tl.float32)
            dot = tl.where(factor == 0, 0.0, dot / factor)
        tl.store(Dots + i * tl.num_programs(0) + tl.program_id(0), dot)


def _scale_weights(a, factors, scaled=None, b=None):
    """scaled ← factors · a, if given; returns Σ a · b of each matrix (L,) fp32, if b is given; without `scaled` it is
    over the factor. a, b, scaled (L, R, K)."""
    if _takes_ref(a, any_dtype=True):
        dots = None if b is None else (a.float() * b.float()).sum((1, 2))
        if scaled is None:
            return torch.where(factors == 0, 0.0, dots / factors)
        scaled.copy_(factors[:, None, None] * a)
        return dots
    (L, R, K), block = a.shape, WEIGHTS_LAUNCH["BLOCK"]
    programs = triton.cdiv(R * K, block)
    dots = None if b is None else a.new_empty(L, programs, dtype=torch.float32)
    a, scaled, b = (u if u is None else (u, u.stride(0)) for u in (a, scaled, b))
    _scale_weights_kernel[(programs, L)](a, factors, scaled, b, dots, R * K, **WEIGHTS_LAUNCH)
    return None if dots is None else dots.sum(1)


class _ScaledWeights(_Function):
    def forward(ctx, bank, factors, in_codes, parts):
        ctx.save_for_backward(bank, factors)
        ctx.in_codes, ctx.parts = in_codes, parts
        matrices = [[*part.unbind(0)] for part in bank.unbind(1)]
        if not in_codes:
            last = bank[:len(factors), -1]
            scaled = torch.empty_like(last, memory_format=torch.contiguous_format)
            _scale_weights(last, factors.contiguous(), scaled)
            matrices[-1][:len(factors)] = scaled.unbind(0)
        return tuple(m for row in zip(*matrices) for m in row)

    def backward(ctx, *grads):
        (bank, factors), left = ctx.saved_tensors, ctx.parts.take()
        in_place = left is not None and all(u.data_ptr() == v.data_ptr() for u, v in zip(grads, left))
        grad = (left if in_place else torch.stack(grads)).view(bank.shape)
        dscaled, last = (x[:len(factors), -1] for x in (grad, bank))
        dfactors = _scale_weights(dscaled, factors.contiguous(), None if ctx.in_codes else dscaled, last)
        return grad, dfactors.to(factors.dtype), None, None


def scaled_weights(bank, factors, in_codes=False):
    """[the P matrices of each layer]; see above."""
    L, P = bank.shape[:2]
    parts = _Parts(lambda like, *shape: like.new_empty(L * P, *shape))  # the function lives on; the bank may not
    matrices = _as_pieces(_ScaledWeights.apply(bank, factors, in_codes, parts), parts)
    return [matrices[i:i + P] for i in range(0, len(matrices), P)]


mix.unbind, mix.columns, mix.first_channels = unbind, columns, first_channels
mix.add_later, mix.token_gate, mix.scaled_weights = add_later, token_gate, scaled_weights
mix_ref.unbind, mix_ref.columns, mix_ref.first_channels = torch.unbind, columns_ref, lambda x, n: (x, x[:, :n])
mix_ref.add_later, mix_ref.token_gate, mix_ref.scaled_weights = add_later_ref, token_gate_ref, scaled_weights_ref
IMPLEMENTATIONS["mix"] = {"triton": mix, "torch": mix_ref}


# ======================================================================================================================
# 11  Transposes
#   transpose_copy(src, dst)   dst = srcᵀ         1-, 2- or 4-byte dtype, bit exact   replaces dst.copy_(src.mT)
#   transpose_add(src, dst)    dst = dst + srcᵀ   bf16, fp16 or fp32, rounded once    replaces dst.add_(src.mT)
#
#   src (M, N), dst (N, M), any strides. The library walks over one side with a stride; this kernel transposes
#   tiles on chip.
# ChrisJMcCormick used transposes on the tied head (PR 233); samacqua made their tiles larger (PR 240).

TRANSPOSE_LAUNCH = dict(BLOCK_M=64, BLOCK_N=128, num_warps=8)  # for all dtypes; bytes are written in lines of 64


def transpose_copy_ref(src, dst):
    """dst = srcᵀ; returns dst."""
    return dst.copy_(src.mT)


def transpose_add_ref(src, dst):
    """dst += srcᵀ; returns dst."""
    return dst.add_(src.mT)


@triton.jit
def _transpose_kernel(Src, Dst, M, N, ADD: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr):
    # Src and Dst: a pointer and two strides. Neighbouring programs go down the rows of Src, and write contiguously.
    src, src_m, src_n = Src
    dst, dst_n, dst_m = Dst
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.load(src + m[:, None] * src_m + n[None, :] * src_n, mask=(m < M)[:, None] & (n < N)[None, :])
    ptrs = dst + n[:, None] * dst_n + m[None, :] * dst_m
    mask = (n < N)[:, None] & (m < M)[None, :]
    tile = tl.trans(tile)
    if ADD:
        tile = (tl.load(ptrs, mask=mask).to(tl.float32) + tile.to(tl.float32)).to(dst.dtype.element_ty)
    tl.store(ptrs, tile, mask=mask)


def _launch_transpose(src, dst, add):
    (M, N), launch = src.shape, TRANSPOSE_LAUNCH
    pair = (src, dst) if src.element_size() > 1 else (src.view(torch.uint8), dst.view(torch.uint8))
    if src.numel():
        _transpose_kernel[(triton.cdiv(M, launch["BLOCK_M"]), triton.cdiv(N, launch["BLOCK_N"]))](
            *((x, *x.stride()) for x in pair), M, N, ADD=add, **launch)
    return dst


transpose_copy = operation(
    transpose_copy_ref, any_dtype=True, check=_separate,
    src="M N: bf16 fp16 fp32 bool uint8 int16 int32 e4m3 e5m2 strided", dst="N M: strided")(
    lambda src, dst: _launch_transpose(src, dst, add=False))
transpose_add = operation(
    transpose_add_ref, any_dtype=True, check=_separate, src="M N: bf16 fp16 fp32 strided",
    dst="N M: strided")(lambda src, dst: _launch_transpose(src, dst, add=True))


# ======================================================================================================================
# The choice of implementation, made once at start

def choose_ops(device, wanted="auto"):
    """(namespace of callables, {operation: name of the choice}). wanted: "auto" (the first listed on CUDA, torch
    elsewhere), "torch", or "op:name,op:name" for some. Raises a ValueError for one that is unknown or cannot run."""
    names = {op: next(iter(table)) if device.type == "cuda" and wanted != "torch" else "torch"
             for op, table in IMPLEMENTATIONS.items()}
    if NO_TRITON and device.type == "cuda":
        raise ValueError(f"a GPU needs Triton ({NO_TRITON}): install what requirements.txt names, use ./run.sh, or try"
                         " --preset=cpu")
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        raise ValueError(f"{torch.cuda.get_device_name(device)}: bfloat16 needs an Ampere GPU (sm_80) or a newer one;"
                         " float16 would need scales for loss, Muon and kernels; try --preset=cpu")
    for item in wanted.split(",") if wanted not in ("auto", "torch") else ():
        op, _, name = item.partition(":")
        if name not in IMPLEMENTATIONS.get(op, {}):
            known = ", ".join(f"{o}:{'|'.join(t)}" for o, t in IMPLEMENTATIONS.items())
            raise ValueError(f"kernels: '{item}' is not one of {known}")
        if name != "torch" and device.type != "cuda" and not INTERPRETED:
            raise ValueError(f"kernels: '{item}' needs an NVIDIA GPU")
        names[op] = name
    return SimpleNamespace(**{op: IMPLEMENTATIONS[op][name] for op, name in names.items()}), names
