"""From shard files to batches, compared with the plain loops of oracles.py. All values are integers: exact equality."""

import contextlib
import hashlib
import json
import os
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
from data import loader as L
from data.run.machine import Runtime
from data.run.memory import possible_micro_batches
from data.run.program import UserError
from data.run.start import survey_training_data, survey_validation_data
from data.run.warmup import MicroStepGraphs
from data.shards import Shards, find_files, read_shard, read_shard_header
from oracles import write_shard

CPU = torch.device("cpu")
MODEL = T.Model(vocab_size=50, model_dim=96)
SEP = MODEL.bos_id
BIGRAM_ROWS = 5 * 128
WORLDS = [1, 2, 4, 8]
SHAPES = [(16, 7), (64, 20), (48, 1000), (33, 12)]  # (tokens per row, longest document)
SOME = 30  # candidates of 128 classes; a row of 64 tokens has more targets


def random_shard(rng, documents, headless=False):
    """Documents of 1 to 60 tokens, a tenth only a separator. headless: it starts inside a document."""
    parts = [rng.integers(0, SEP, 10)] if headless else []
    for length in rng.integers(0, 60, documents) * (rng.random(documents) > 0.1):
        parts += [[SEP], rng.integers(0, SEP, length)]
    return np.concatenate(parts).astype(np.uint16)


class Corpus:
    """Shards on disk, and the oracle's micro-batches. spec: (tokens of a micro-batch, max_doc_len) of every step.
    candidates: classes in the loss of a micro-batch, 0: all."""

    def __init__(self, folder, shards, spec, micro_batches=8, candidates=0, **data):
        self.shards, self.spec, self.micro_batches, self.candidates = shards, spec, micro_batches, candidates
        for i, tokens in enumerate(shards):
            write_shard(folder / f"train_{i:03}.bin", tokens)
        self.config = T.Config(model=MODEL, data=T.Data(train_files=f"{folder}/train_*.bin", **data),
                               system=T.System(micro_batches=micro_batches))
        self.warnings = []

    def loader(self, rank=0, world=1, device=CPU):
        plans = [SimpleNamespace(step=step, micro_batch_tokens=tokens, max_doc_len=longest, candidates=self.candidates)
                 for step, (tokens, longest) in enumerate(self.spec)]
        return L.Loader(self.config, Runtime(rank, world, device), plans, warn=self.warnings.append)

    def expected(self, *more_shards):
        """(inputs, targets, document lengths, sample) of all micro-batches in order. The oracle packs them as on one
        rank. sample: sample_candidates for the number of the micro-batch, or None."""
        calls = [spec for spec in self.spec for _ in range(self.micro_batches)]
        packed = oracles.pack_documents([*self.shards, *more_shards], SEP, calls)
        return [(*row, L.sample_candidates(row[1], MODEL.padded_vocab, self.candidates, number))
                for number, row in enumerate(packed)]

    def rows_before_the_end(self):
        """Number of micro-batches before the data starts again. One more shard, only of separators, shows the end."""
        rows = self.expected(np.full(20000, SEP, np.uint16))
        return next((i for i, (inputs, *_) in enumerate(rows) if (inputs == SEP).all()), len(rows))

    def assert_served(self, rank=0, world=1):
        """The loader of a rank serves the oracle's micro-batches rank, rank + world, ..., and is returned."""
        loader = self.loader(rank, world)
        for row in self.expected()[rank::world]:
            batch = loader.next_batch()
            assert_batch(batch, row)
            assert batch.pieces
        return loader


def random_corpus(folder, seed, steps=24, **options):
    """Three shards, of which the second starts inside a document, for more than two passes."""
    rng = np.random.default_rng(seed)
    shards = [random_shard(rng, documents, headless) for documents, headless in [(90, False), (120, True), (70, False)]]
    return Corpus(folder, shards, [SHAPES[i] for i in rng.integers(0, len(SHAPES), steps)], **options)


def tensors(batch):
    """All tensors of a batch but those of its exchange."""
    candidates = [] if batch.candidates is None else [batch.candidates]
    return [batch.tokens, batch.targets, *batch.documents.values(), *batch.row_ids.values(), *candidates,
            *batch.pieces.values()]


def layout(batch):
    """(first byte, dtype, shape) of every tensor in the buffer, and the size of the buffer. Asserts that the tensors
    lie one behind the other in this one memory, the tokens first, each at the next multiple of 16 bytes."""
    start, end = batch.buffer.data_ptr(), 0
    ordered = sorted(tensors(batch), key=torch.Tensor.data_ptr)
    assert ordered[0] is batch.tokens and start % 16 == 0
    for x in ordered:
        assert x.untyped_storage().data_ptr() == start and x.data_ptr() == start + end and x.is_contiguous()
        end = -(-(end + x.nbytes) // 16) * 16
    assert end == batch.buffer.untyped_storage().nbytes() == batch.buffer.nbytes
    return [(x.data_ptr() - start, x.dtype, x.shape) for x in tensors(batch)], end


def assert_batch(batch, row):
    """A batch equals the oracle's row (inputs, targets, lengths or cu_seqlens, perhaps a sample), with dtypes."""
    inputs, targets, cu, *sample = row
    if isinstance(cu, list):
        cu = oracles.cu_seqlens(cu, len(inputs))
    rows = np.array(oracles.bigram_hash(inputs, BIGRAM_ROWS), np.int32)
    wanted = dict(tokens=inputs, targets=targets, **{
        f"documents of {n}": oracles.documents(torch.from_numpy(n * cu)).numpy() for n in (1, 2)}, row_ids=rows)
    if sample and sample[0]:
        wanted["candidates"], wanted["targets"] = sample[0]
    layout(batch)
    arrays = [tensor.cpu().numpy() for tensor in tensors(batch)]
    if batch.pieces:
        *arrays, of_tokens, of_rows = arrays
        assert list(batch.pieces) == ["tokens", "bigram_embed"]
        assert_pieces(of_tokens, inputs)
        assert_pieces(of_rows, rows)
    for (name, wanted), values in zip(wanted.items(), arrays, strict=True):
        assert values.dtype == wanted.dtype, name
        np.testing.assert_array_equal(values, wanted, err_msg=name)


def assert_pieces(pieces, ids):
    """They hold every position once, sorted by id; the pieces of an id cover its positions, all but the last with PIECE
    of them. The groups are the ids of several pieces, which come first."""
    assert pieces.dtype == np.int32 and pieces.shape == (5, len(ids) + 1)
    order, begins, ends, groups, names = pieces.tolist()
    number, counts = names.index(-1), Counter(ids.tolist())
    assert order[:-1] == sorted(range(len(ids)), key=lambda position: ids[position])
    found = {}
    for begin, end, name in zip(begins[:number], ends, names):
        found.setdefault(name, []).append(order[begin:end])
    assert {name: sum(parts, []) for name, parts in found.items()} == {
        name: np.flatnonzero(ids == name).tolist() for name in counts}
    for name, parts in found.items():
        assert {*map(len, parts[:-1])} <= {L.PIECE} and 0 < len(parts[-1]) <= L.PIECE, name
    several = sorted(name for name, count in counts.items() if count > L.PIECE)
    borders = groups[:len(several) + 1]
    assert [names[a:b] for a, b in zip(borders, borders[1:])] == [[name] * len(found[name]) for name in several]
    in_groups = sum(len(found[name]) for name in several)
    assert {*begins[number:], *ends[number:]} == {len(ids)} and {*names[number:]} == {-1}
    assert borders[0] == 0 and {*groups[len(several):]} == {in_groups} and not {*names[in_groups:]} & {*several}


@pytest.mark.parametrize("ids", [
    [3, 2**31 - 1, 65536 + 3, 3, 65535, 65536, 0, 2 * 65536 + 3] * 200, [2**20], [7] * 130, [5, 1] * L.PIECE + [1]])
def test_pieces_of_large_ids(ids):
    """Of more than 16 bits, with equal lower halves; as many as a piece may hold, and one more."""
    ids = np.array(ids, np.int32)
    assert_pieces(L.sorted_pieces(ids), ids)


# ---- Training batches ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed, micro_batches, world", [
    *[(seed, 8, world) for seed in range(4) for world in WORLDS], (5, 16, 2), (5, 4, 4), (5, 1, 1)])
def test_ranks_together_serve_the_rows_of_the_oracle(tmp_path, seed, micro_batches, world):
    """Micro-batch j of a step is micro-step j div G of rank j mod G for all G, with cuts, shard changes and wraps. With
    seed 0 for a sampled softmax; some micro-batches have too many targets."""
    corpus = random_corpus(tmp_path, seed, micro_batches=micro_batches, candidates=SOME if seed == 0 else 0)
    assert seed or {sample is None for *_, sample in corpus.expected()} == {True, False}
    assert micro_batches < 8 or corpus.rows_before_the_end() < len(corpus.expected()) / 2
    for rank in range(world):
        corpus.assert_served(rank, world)


def test_a_graph_gets_its_batch_by_one_copy(tmp_path):
    """Batches of one key have the layout of the graph's own; a replay calls the function again."""
    corpus, layouts = random_corpus(tmp_path, 0, candidates=SOME), set()
    loader, graphs = corpus.loader(), MicroStepGraphs(lambda batch, weights, attn: weights @ batch.tokens[-2:], False)
    graphs.enabled, graphs.run_eagerly = True, lambda run, *args: run(*args)
    graphs.capture = lambda run, *args: (SimpleNamespace(replay=lambda: run(*args)), None)
    for i, row in enumerate(corpus.expected()):
        batch, weights = loader.next_batch(), torch.tensor([1, i], dtype=torch.int32)
        batch = batch._replace(exchange=L.Exchange([1], [1], batch.tokens[:1], None))
        assert graphs(batch, weights, None, stage=len(batch.tokens)) == row[0][-2] + i * row[0][-1]
        own = graphs.graphs[len(batch.tokens), 0 if row[3] is None else SOME][1]
        assert own.exchange is None and own.buffer.data_ptr() != batch.buffer.data_ptr()
        assert layout(own) == layout(batch)
        layouts.add(str(layout(own)))
        batch.buffer.zero_()
        assert_batch(own, row)
    assert len(SHAPES) < len(graphs.graphs) == len(layouts) < len(corpus.expected()) / 8


def document(length, first):
    return [SEP, *range(first, first + length - 1)]


@pytest.mark.parametrize("small", [0, 1, 2])
def test_shard_too_small_for_a_row_is_passed_over(tmp_path, small):
    """Micro-batches take 65 or 17 tokens; the small shard fills none of the first and one of the second."""
    rng = np.random.default_rng(7)
    shards = [random_shard(rng, 80) for _ in range(3)]
    shards[small] = np.array(document(20, 0) + document(25, 20), np.uint16)
    corpus = Corpus(tmp_path, shards, [(64, 30), (16, 9)] * 30, micro_batches=1)
    corpus.assert_served()
    assert len(corpus.warnings) == 1


# ---- State -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 2, 8])
def test_resumes_after_any_number_of_batches(tmp_path, world):
    """Also inside a step, inside a step with a shard change, and after a wrap. The state survives JSON."""
    corpus, rank = random_corpus(tmp_path, 1, steps=12, candidates=SOME), world - 1
    assert corpus.rows_before_the_end() < 12 * 8
    rows = corpus.expected()[rank::world]
    loader, resumed = corpus.loader(rank, world), corpus.loader(rank, world)
    for taken in range(len(rows) + 1):
        state, text = loader.state_dict(), json.dumps(loader.state_dict())
        resumed.load_state_dict(json.loads(text))  # into a loader with another state
        for row in rows[taken:taken + 12]:
            assert_batch(resumed.next_batch(), row)
        if taken < len(rows):
            assert_batch(loader.next_batch(), rows[taken])  # state_dict changes nothing
            assert json.dumps(state) == text != json.dumps(loader.state_dict())


@pytest.mark.parametrize("world", WORLDS)
def test_resumes_on_another_number_of_ranks(tmp_path, world):
    """Between steps all ranks have the same state, which fits any number of ranks."""
    corpus = random_corpus(tmp_path, 2, steps=12, candidates=SOME)
    expected = corpus.expected()
    for done in range(0, 12, 3):
        states = []
        for rank in range(world):
            loader = corpus.loader(rank, world)
            for _ in range(done * 8 // world):
                loader.next_batch()
            states.append(loader.state_dict())
        assert states == states[:1] * world
        for other in WORLDS:
            loader = corpus.loader(other - 1, other)
            loader.load_state_dict(states[0])
            for row in expected[8 * done + other - 1:8 * done + 24:other]:
                assert_batch(loader.next_batch(), row)


# ---- The end of the data ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 8])
def test_nothing_is_read_beyond_the_given_steps(tmp_path, world):
    """If the data ends with the last step, reading ahead does not warn."""
    corpus = random_corpus(tmp_path, 4)
    corpus.spec = corpus.spec[:corpus.rows_before_the_end() // 8]
    for rank in range(world):
        loader = corpus.assert_served(rank, world)
        loader.load_state_dict(loader.state_dict())  # nothing is left to build
    assert not corpus.warnings


def test_wrap_warns_once(tmp_path):
    corpus = random_corpus(tmp_path, 4)
    loader, early = corpus.loader(), corpus.rows_before_the_end() // 8 * 8 - 1
    for _ in range(early):  # the loader builds one batch ahead, and chooses the documents of a step at once
        loader.next_batch()
    assert early and not corpus.warnings
    for _ in range(8 * len(corpus.spec) - early):
        loader.next_batch()
        if loader.state_dict()["shard"] == 4:
            wrapped = loader.state_dict()
    assert loader.state_dict()["shard"] >= 6, "two passes"
    assert len(corpus.warnings) == 1 and "exhausted" in corpus.warnings[0]
    resumed = corpus.loader()
    resumed.load_state_dict(wrapped)
    for _ in range(8 * (len(corpus.spec) - wrapped["index"]) - wrapped["part"]):
        resumed.next_batch()
    assert len(corpus.warnings) == 1


def test_shards_are_used_to_their_last_token(tmp_path):
    """Each shard has one token less than a micro-batch takes; the last micro-batch of a step is the whole last document
    of the shard."""
    corpus = Corpus(tmp_path, [np.array(document(32, 0), np.uint16)] * 3, [(32, 100)])
    with pytest.raises(UserError, match="no training shard fills a row"):
        corpus.loader().next_batch()
    shard = np.array([token for first in range(8) for token in document(17, first)], np.uint16)
    (tmp_path / "last").mkdir()
    corpus = Corpus(tmp_path / "last", [shard], [(16, 100)] * 3)
    assert corpus.expected()[7][0].tolist() == [SEP, *range(7, 22)]
    corpus.assert_served()


@pytest.mark.parametrize("tokens", [126, 127, 128, 200])
def test_documents_of_one_token(tmp_path, tokens):
    Corpus(tmp_path, [np.full(8 * 201, SEP, np.uint16)], [(tokens, 9)]).assert_served()


# ---- Shard files -----------------------------------------------------------------------------------------------------
TOKENS = np.array([SEP, 1, 2, SEP, 48, 3])


def shard_file(tokens=TOKENS, **header):
    """The bytes of a shard, with another number in its header."""
    header = {"magic": 20240520, "version": 1, "count": len(tokens)} | header
    return np.array([*header.values()], "<i4").tobytes() + bytes(1012) + np.array(tokens, "<u2").tobytes()


@pytest.mark.parametrize("content, message", [
    (shard_file(magic=20240521), "magic number 20240521"), (shard_file(version=2), "version 2"),
    (shard_file(count=5), "promises 5 tokens but the file holds 6"), (shard_file(count=-1), "promises -1 tokens"),
    (shard_file()[:-1], "promises 6 tokens but the file holds 5"), (shard_file() + b"x", "promises 6 tokens"),
    (shard_file()[:1000], "promises 6 tokens but the file holds 0"), (shard_file()[:11], "version 1|promises|count"),
    (b"", "magic number 0"), (shard_file([SEP, 50, 1]), "token 50 .*vocabulary of 50"),
    (shard_file([1, 2, 3]), "no document separator")])
def test_no_damage_gets_past_the_checks(tmp_path, content, message):
    """Every reader names the file in one line, the loader after the batches of the shard before it."""
    write_shard(tmp_path / "a_0.bin", np.resize([SEP, *range(9)], 200))
    path = tmp_path / "a_1.bin"
    path.write_bytes(content)
    both = dict(train_files=f"{tmp_path}/a_*.bin", val_files=f"{tmp_path}/a_*.bin")
    config = T.Config(model=MODEL, data=T.Data(val_tokens=203, val_batch_tokens=29, **both))
    plans = [SimpleNamespace(step=0, micro_batch_tokens=16, max_doc_len=16, candidates=0)] * 40

    def train():
        loader = L.Loader(config, Runtime(0, 1, CPU), plans, warn=print)
        for _ in range(40 * 8):
            assert max(int(loader.next_batch().tokens.max()), 0) <= SEP
    for reader in (lambda: read_shard(path, 50), lambda: L.Shard(path, MODEL), train,
                   lambda: L.ValidationData(config, Runtime(0, 1, CPU))):
        with pytest.raises(UserError, match=f"^{path}: [^\n]*({message})[^\n]*$"):
            reader()


def test_what_is_no_file_is_named(tmp_path):
    """A folder, a link to nothing or to itself, a pipe (on which a reader would wait), a file that vanishes."""
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "link.bin").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop.bin").symlink_to(tmp_path / "loop.bin")
    os.mkfifo(tmp_path / "pipe.bin")
    for name in ("folder.bin", "link.bin", "loop.bin", "pipe.bin", "*.bin", "**"):
        path = find_files(f"{tmp_path}/{name}")[0]
        config = T.Config(data=T.Data(train_files=f"{tmp_path}/{name}", val_files=f"{tmp_path}/{name}"))
        for survey in survey_training_data, survey_validation_data:
            with pytest.raises(UserError, match=f"{path}: .*no shard"):
                survey(config)
    with pytest.raises(UserError, match="gone.bin: .*no shard"):
        read_shard(tmp_path / "gone.bin", 50)


def test_a_file_is_read_or_named(tmp_path, monkeypatch):
    path, read = write_shard(tmp_path / "a.bin", values := [65535, 0, 32768, 1, 2, 3]), np.fromfile
    tokens = read_shard(path, 65536)
    assert tokens.dtype == np.uint16 and tokens.tolist() == values and read_shard_header(path) == 6
    for failing in ("<i4", "<u2"):  # the header, the tokens
        fails = Mock(side_effect=OSError(5, "Input/output error"))
        monkeypatch.setattr(L.np, "fromfile", lambda path, dtype, *args, **kwargs: (
            fails if dtype == failing else read)(path, dtype, *args, **kwargs))
        with pytest.raises(UserError, match=r"a.bin: cannot be read \(Input/output error\)"):
            read_shard(path, 50)
    monkeypatch.setattr(L.np, "fromfile", lambda *args, **kwargs: read(*args, **kwargs)[:4])  # a short read
    with pytest.raises(UserError, match=r"a.bin: cannot be read \(it ends early\)"):
        read_shard(path, 50)


def test_shards_without_tokens_are_passed_over(tmp_path):
    corpus, empty = random_corpus(tmp_path, 4), tmp_path / "train_000b.bin"
    write_shard(empty, [])
    corpus.assert_served()
    assert Shards(corpus.config.data.train_files).warnings == [f"{empty} holds no tokens and is passed over"]
    val = random_shard(np.random.default_rng(3), 40)[:513]
    assert np.array_equal(validation(tmp_path, [[], val[:200], [], val[200:]], 1).tokens, val)
    with pytest.raises(UserError, match="train_000b.bin: no file holds a token"):
        Shards(str(empty))


def change_shard(path, how):
    """The shard becomes a file of other tokens, or of the same ones ("touched", "copied")."""
    tokens, before, other = read_shard(path, 50), path.stat(), path.with_name("other")
    write_shard(other, tokens if how == "copied" else [*tokens[:-1], (tokens[-1] + 1) % SEP])
    if how == "exchanged":  # for a file of the same size and time
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    if how in ("exchanged", "copied"):
        other.rename(path)
    elif how in ("relinked", "deleted"):
        path.unlink()
        if how == "relinked":
            path.symlink_to(other)
    elif how in ("grown", "emptied"):
        write_shard(path, [*tokens, 7] if how == "grown" else [])
    else:
        path.write_bytes({"cut": path.read_bytes()[:-1], "overwritten": other.read_bytes()}.get(how, path.read_bytes()))
        os.utime(path, ns=(1, 1))  # two writes may fall into one tick of the clock


OTHERS = "grown", "cut", "emptied", "exchanged", "overwritten", "relinked", "deleted"


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("change", [*OTHERS, "touched", "copied"])
def test_a_shard_that_changes_during_the_run(tmp_path, change, known):
    """The first shard, on the second pass, on each rank; the same bytes are welcome if their checksum is known."""
    corpus = random_corpus(tmp_path, 6)
    expected, end = corpus.expected(), corpus.rows_before_the_end() // 2
    for rank in (0, 1):
        random_corpus(tmp_path, 6)  # the shards as they were
        loader, rows = corpus.loader(rank, 2), expected[rank::2]
        for row in rows[:end]:
            assert_batch(loader.next_batch(), row)
        path = loader.files[0]
        if known:
            loader.shards.table()
        change_shard(path, change)
        if known and change not in OTHERS:
            for row in rows[end:]:
                assert_batch(loader.next_batch(), row)
        else:
            with pytest.raises(UserError, match=f"^{path}: changed, exchanged or deleted since the run began; [^\n]*$"):
                for _ in rows:
                    loader.next_batch()
        (tmp_path / path.name).unlink(missing_ok=True)


@pytest.mark.parametrize("change", OTHERS)
def test_validation_holds_what_it_has_read(tmp_path, change):
    val = random_shard(np.random.default_rng(3), 40)[:513]
    data, path = validation(tmp_path, [val], 1), tmp_path / "val_0.bin"
    before = [batch.tokens.tolist() for batch in data]
    shards = Shards(str(path))
    change_shard(path, change)
    assert [batch.tokens.tolist() for batch in data] == before
    with pytest.raises(UserError, match="val_0.bin: changed"):  # between the start and the reading
        L.ValidationData(data.config, data.rt, shards=shards)


BIG = 2**20


@pytest.mark.parametrize("places, message", [
    ({0: SEP}, None), ({BIG: SEP}, None), ({}, "no document separator .token 49"), ({0: SEP, BIG: 50}, "token 50 but"),
    ({0: 50, 9: SEP}, "token 50 but")])
def test_reading_checks_all_tokens(tmp_path, places, message):
    """The first and the last one."""
    tokens = np.zeros(BIG + 1, np.uint16)
    tokens[[*places]] = [*places.values()]
    path = write_shard(tmp_path / "a.bin", tokens)
    with pytest.raises(UserError, match=f"^{path}: {message}") if message else contextlib.nullcontext():
        assert np.array_equal(read_shard(path, 50), tokens)


def test_checksums_are_those_of_the_files_that_were_read(tmp_path):
    """A run that continues another one refuses the first shard that differs, when it reads it."""
    sums, paths = [], [write_shard(tmp_path / f"{i}.bin", np.full(BIG + i, SEP)) for i in range(3)]
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    shards, later = (Shards(f"{tmp_path}/*.bin") for _ in range(2))
    tables = [[(path.name, os.path.getsize(path), known) for path, known in zip(paths, found)]
              for found in ([None] * 3, [sums[0], None, None], sums)]
    assert [shards.table(0), shards.table(1), shards.table()] == tables
    later.expected = {paths[0]: sums[0]}
    change_shard(paths[0], "copied")
    for path in paths:
        later.read(path, 50)
    assert later.table() == tables[2]
    change_shard(paths[0], "overwritten")
    after = Shards(f"{tmp_path}/*.bin")
    for found, words in (later, ": changed, .* began"), (after, " has other tokens than the shard of the checkpoint"):
        found.expected = {paths[0]: sums[0]}
        with pytest.raises(UserError, match=f"^{paths[0]}{words}[^\n]*$"):
            found.read(paths[0], 50)
    change_shard(paths[1], "overwritten")
    assert after.table() == [(*tables[2][i][:2], None) for i in (0, 1)] + tables[2][2:]  # nobody knows what was read


def test_where_files_are_looked_for(tmp_path, monkeypatch):
    for name in ("b.bin", "a.bin", "c.txt", "c.bin"):
        (tmp_path / name).touch()
    wanted, source = [tmp_path / name for name in ("a.bin", "b.bin", "c.bin")], [T.Path(T.__file__)]
    odd = tmp_path / "[a] *"  # the name of the root is no pattern
    odd.mkdir()
    (odd / "d.bin").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DATA_PATH", raising=False)
    assert find_files("train_g*.py") == source and find_files(f"{tmp_path}/*.bin") == wanted  # in order
    for root, pattern, found in [(tmp_path.parent, f"{tmp_path.name}/*.bin", wanted), (odd, "*.bin", [odd / "d.bin"]),
                                 ("/nothing", "~/*.bin", wanted), ("", "train_g*.py", source)]:
        monkeypatch.setenv("DATA_PATH", str(root))
        assert find_files(pattern) == found
    monkeypatch.setenv("DATA_PATH", str(tmp_path.parent))
    with pytest.raises(UserError, match=f"no files match {tmp_path.parent}/nothing.*prepare.py"):
        find_files("nothing*.bin")
    for pattern in ("", "a**b", "[", "/nothing/**"):
        with pytest.raises(UserError):
            read_shard_header(find_files(pattern)[0])


# ---- Validation ------------------------------------------------------------------------------------------------------
def validation(folder, files, world, rank=0, pieces=8, n=64):
    for i, tokens in enumerate(files):
        write_shard(folder / f"val_{i}.bin", tokens)
    data = T.Data(val_files=f"{folder}/val_*.bin", val_tokens=pieces * n, val_batch_tokens=n)
    return L.ValidationData(T.Config(model=MODEL, data=data), Runtime(rank, world, CPU))


def test_validation_shards_of_another_tokenizer(tmp_path):
    """Those that are read; a separator may come behind the tokens that are used."""
    good = [SEP, *[3] * 400]
    assert len(validation(tmp_path, [good, [3] * 200 + [SEP]], 1).tokens) == 513
    assert len(validation(tmp_path, [good * 2, [3] * 200, [50] * 200], 1).tokens) == 513
    for i, bad, message in (0, [3] * 600, "no document separator .token 49"), (1, [3] * 200, "no document separator"), (
            1, [SEP, *[3] * 198, 50], "token 50 but a vocabulary of 50"):
        with pytest.raises(UserError, match=f"val_{i}.bin: {message}"):
            validation(tmp_path, [good, good][:i] + [bad], 1)
    with pytest.raises(UserError, match="holds 401 tokens, validation needs 513"):
        validation(tmp_path, [good, [], []], 1)


@pytest.mark.parametrize("world", [1, 2, 4, 3, 16])  # 3 does not divide 8 pieces, and of 16 ranks 8 have no piece
def test_validation_pieces(tmp_path, world):
    """The pieces of all ranks are the oracle's, and hold all tokens from 0 to val_tokens, from two files."""
    stream = random_shard(np.random.default_rng(3), 40)[:600]
    stream[64] = SEP  # a document starts exactly with a piece
    pieces = {}
    for rank in range(world):
        data = validation(tmp_path, [stream[:150], stream[150:]], world, rank)
        for i, batch in enumerate(data):
            piece = i * world + rank
            assert_batch(batch, oracles.validation_piece(stream, 64 * piece, 64, SEP))
            assert not batch.pieces
            pieces[piece] = batch
        again = [batch.tokens.tolist() for batch in data]
        assert again == [pieces[i].tokens.tolist() for i in range(rank, 8, world)]
    assert sorted(pieces) == list(range(8))
    assert torch.cat([pieces[i].tokens for i in range(8)]).tolist() == stream[:512].tolist()
    assert torch.cat([pieces[i].targets for i in range(8)]).tolist() == stream[1:513].tolist()


@pytest.mark.parametrize("available, batch, tokens, piece", [
    (512, 64, 512, 64), (513, 64, 512, 64), (9999, 64, 512, 64), (511, 64, 384, 48), (63, 64, 48, 48), (64, 64, 64, 64),
    (17, 16, 16, 16), (16, 512, 16, 16), (511, 512, 496, 496), (300, 128, 288, 96), (15, 64, 512, 64)])
def test_fewer_validation_tokens_than_asked_for(tmp_path, available, batch, tokens, piece):
    """Nearly all are used, in no more pieces than they need; too few change nothing, so the start refuses them."""
    write_shard(tmp_path / "val_0.bin", np.resize(document(9, 0), available + 1))
    data = T.Data(val_files=f"{tmp_path}/val_*.bin", val_tokens=512, val_batch_tokens=batch)
    fitted = L.fit_validation(T.Config(model=MODEL, data=data))
    assert (fitted.data.val_tokens, fitted.data.val_batch_tokens) == (tokens, piece)
    assert available == 15 or sum(len(b.tokens) for b in L.ValidationData(fitted, Runtime(0, 1, CPU))) == tokens


@pytest.mark.parametrize("tokens, least", [(2**18 + 20, 1), (2**18 - 999, 2), (2**15, 8), (2**14, 16), (2**12, 16)])
def test_small_shards_get_short_rows(tmp_path, tokens, least):
    """An eighth of the longest shard, or 2048 tokens; tokens that the loader cuts off do not count."""
    write_shard(tmp_path / "train_0.bin", np.resize([SEP, *[3] * 9], 2000))
    write_shard(tmp_path / "train_1.bin", np.append(np.resize([SEP, *[3] * 9], tokens), [3] * 2000))
    schedule = T.recipe(27e6).schedule
    config = T.Config(model=MODEL, schedule=schedule, data=T.Data(train_files=f"{tmp_path}/train_*.bin"))
    assert possible_micro_batches(config, 1)[0] == least and max(possible_micro_batches(config, 2)) == 128


def test_a_start_tells_of_documents_that_fill_no_row(tmp_path):
    config = T.Config(model=MODEL, system=T.System(micro_batches=128), data=T.Data(train_files=f"{tmp_path}/*.bin"))
    write_shard(tmp_path / "1.bin", np.array([SEP] + [3] * 9000, np.uint16))
    with pytest.raises(UserError, match="no training shard fills a row of 1024 tokens with documents cut at 896"):
        survey_training_data(config)
    write_shard(tmp_path / "2.bin", np.resize([SEP, *[3] * 9], 4000))
    survey_training_data(config)


@pytest.mark.parametrize("classes, count, tokens, most, rows", [
    (128, 30, 4, 128, 15), (640, 256, 20, 640, 9), (50304, 8192, 16, 50304, 21),
    (640, 256, 2000, 200, 60), (32768, 8192, 40000, 4000, 60)])  # few negatives; sizes with a large common factor
def test_candidates_sweep_through_all_classes(classes, count, tokens, most, rows):
    """None twice, all targets among them; in these rows, each class once at least. most: targets are below it. The gate
    of a pointer, which is no target, is the first."""
    for gate in (None, *[most] * (most < classes)):
        rng, left = np.random.default_rng(0), np.ones(classes, bool)
        for row in range(rows):
            targets = rng.integers(0, most, tokens)
            targets[-1] = targets[0]
            candidates, positions = L.sample_candidates(targets, classes, count, row, gate)
            assert len(np.unique(candidates)) == len(candidates) == count and (candidates[positions] == targets).all()
            assert candidates.dtype == positions.dtype == np.int64 and gate in (None, candidates[0])
            left[candidates] = False
        assert not left.any()
        ids = [*[gate] * (gate is not None), *np.unique(targets)]  # as many targets as candidates, and one more
        assert sorted(L.sample_candidates(targets, classes, len(ids), 5, gate)[0]) == sorted(ids)
        assert L.sample_candidates(targets, classes, len(ids) - 1, 5, gate) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned copies on a side stream need a GPU")
def test_batches_on_the_gpu(tmp_path):
    """Batches arrive through the side stream while the main stream is busy and earlier batches are freed at once."""
    corpus = random_corpus(tmp_path, 0, candidates=SOME)
    device = torch.device("cuda", 0)
    loader, busy = corpus.loader(device=device), torch.randn(2000, 2000, device=device)
    for row in corpus.expected():
        batch = loader.next_batch()
        assert {tensor.device for tensor in (batch.buffer, *tensors(batch))} == {device}
        copy = batch.clone()  # in the main stream, before the host waits for anything
        del batch
        busy = (busy @ busy).clamp(-1, 1)
        assert_batch(copy, row)
