"""data/prepare.py: what it writes, what it refuses, and that nothing unfinished ever has a shard's name."""

import hashlib
import http.server
import math
import os
import random
import re
import shlex
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import train_gpt
from data import loader as L
from data import prepare
from data.run.errors import UserError
from data.run.knobs import with_system
from data.run.length import stage_starts
from data.run.machine import Runtime
from data.run.memory import possible_micro_batches
from data.run.start import survey_training_data, tokens_and_passes
from data.shards import read_shard_header

ROOT = Path(prepare.__file__).resolve().parents[1]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty folder that takes the place of data/; prepare.py sees no GPU, whatever machine runs the tests."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    # The test replaces torch in prepare.py alone: the trainer that it then starts must see the machine as it is.
    monkeypatch.setattr(prepare, "torch", types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False)))
    return tmp_path / "data"


def shard_bytes(tokens) -> bytes:
    """A shard as the description of the format says, without the code under test."""
    return struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens)


def tokens_of(folder: Path, part: str) -> np.ndarray:
    paths = sorted(folder.glob(f"*_{part}_*.bin"))
    for path in paths:
        read_shard_header(path)
    return np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths])


def documents_of(folder: Path, parts=("train", "val"), separator: int = 256) -> list[list[int]]:
    documents = []
    for part in parts:
        tokens = tokens_of(folder, part)
        assert tokens[0] == separator
        documents += [d[1:].tolist() for d in np.split(tokens, np.flatnonzero(tokens == separator)[1:])]
    return documents


def texts_of(folder: Path, parts=("train", "val")) -> list[str]:
    return [bytes(document).decode() for document in documents_of(folder, parts)]


def contents(folder: Path) -> dict[str, bytes]:
    """{name: bytes} of all files, also hidden ones."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("error: "), err
    return err


# ---------------------------------------------------------------------------------------------------------------------
# FineWeb, from a stand-in for the hub

OFFLINE = ConnectionError("name or service\nnot known")
REASON = "(ConnectionError: name or service not known)"
NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in (1, 2))]
FINEWEB = ["fineweb", "--shards", "2"]


@pytest.fixture
def hub(monkeypatch):
    """Stands in for hub_metadata, hub_fetch and gpt2_bpe. has: contents that differ from `shard`; sends: what arrives
    in place of a file, bytes or an error in the middle; asked: the files that were fetched."""
    hub = types.SimpleNamespace(has={}, sends={}, asked=[], tokenizer=Mock())
    hub.shard = lambda name: hub.has.get(name) or shard_bytes([50256, 7, int(name[-7:-4]), 50256, 9])

    def fetch(name, folder):
        hub.asked.append(name)
        folder.mkdir(parents=True, exist_ok=True)
        sent = hub.sends.get(name, hub.shard(name))
        (folder / name).write_bytes(sent if isinstance(sent, bytes) else hub.shard(name)[:1000])
        if not isinstance(sent, bytes):
            raise sent
        return folder / name
    monkeypatch.setattr(prepare, "gpt2_bpe", hub.tokenizer)
    monkeypatch.setattr(prepare, "hub_fetch", fetch)
    monkeypatch.setattr(prepare, "hub_metadata", lambda name: (
        len(hub.shard(name)), hashlib.sha256(hub.shard(name)).hexdigest()))
    return hub


def test_fineweb_continues_where_it_stopped(data, hub, capsys):
    """After Ctrl-C in the second file, the next call fetches only the missing files."""
    hub.sends = {NAMES[1]: KeyboardInterrupt()}
    assert prepare.main(FINEWEB) == 130 and capsys.readouterr().err == "interrupted; run the same command again\n"
    assert [path.name for path in (data / "fineweb10B").glob("*.bin")] == NAMES[:1]
    hub.sends, hub.asked = {}, []
    assert prepare.main(FINEWEB) == 0 and hub.asked == NAMES[1:] and hub.tokenizer.call_count == 1
    assert contents(data / "fineweb10B") == {name: hub.shard(name) for name in NAMES}
    assert "6 documents, 10 training and 5 validation tokens in 2 + 1 shards" in capsys.readouterr().out


@pytest.mark.parametrize("has, sends, expected", [
    (shard_bytes([50256, 1, 2]), shard_bytes([50256, 1]), "1028 bytes, the hub has 1030"),
    (shard_bytes([50256, 1, 2]), shard_bytes([50256, 1, 3]), "SHA-256 [0-9a-f]{64}, the hub has [0-9a-f]{64}"),
    # The bytes that the hub has, but no shard.
    (b"<html>" + bytes(2000), None, "magic number"), (shard_bytes([50256, 1])[:-1], None, "header promises 2 tokens"),
    (shard_bytes([50256, 50257]), None, "token 50257")])
def test_fineweb_refuses_a_damaged_download(data, hub, capsys, has, sends, expected):
    hub.has[NAMES[1]], hub.sends[NAMES[1]] = has, sends or has
    assert prepare.main(["fineweb", "--shards", "1"]) == 1
    assert re.match(rf"error: {NAMES[1]}: the download is damaged .*{expected}.*; run this again$", one_line(capsys))
    assert not list(data.rglob(NAMES[1]))  # the hub's client would take a file under this name for finished


@pytest.mark.parametrize("damage, visible", [
    (lambda b: b[:-2], True), (lambda b: b"\0" + b[1:], True), (lambda b: b[:100], True),
    (lambda b: b[:-2] + b"\xff\xff", True), (lambda b: b[:-2] + b"\x08\0", False)])  # the last: another valid token
def test_fineweb_replaces_a_damaged_file(data, hub, capsys, monkeypatch, damage, visible):
    """Without a network, a file with visible damage is an error."""
    path = data / "fineweb10B" / NAMES[2]
    assert prepare.main(FINEWEB) == 0
    path.write_bytes(damage(path.read_bytes()))
    hub.asked = []
    assert prepare.main(FINEWEB) == 0 and hub.asked == [path.name] and path.read_bytes() == hub.shard(path.name)
    assert f"damaged, fetching it again: {path}" in capsys.readouterr().out
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr(prepare, "hub_metadata", Mock(side_effect=OFFLINE))
    assert prepare.main(FINEWEB) == int(visible) and path.exists() != visible
    assert not visible or f"error: {path.name}: cannot be fetched" in one_line(capsys)


def test_fineweb_without_network(data, hub, capsys, monkeypatch):
    """Finished files are checked by their content. The program waits for the network only once."""
    hub.sends[NAMES[0]] = OFFLINE
    assert prepare.main(["fineweb"]) == 1 and not list(data.glob("*/*.bin"))
    assert one_line(capsys) == (f"error: {NAMES[0]}: cannot be fetched from the hub {REASON}; see to the network and"
                                " run this again, what is finished is kept\n")
    hub.sends, hub.tokenizer.side_effect = {}, UserError("no GPT-2 tokenizer")
    assert prepare.main(FINEWEB) == 0 and capsys.readouterr().err == "warning: no GPT-2 tokenizer; a run needs it\n"
    monkeypatch.setattr(prepare, "hub_metadata", metadata := Mock(side_effect=OFFLINE))
    assert prepare.main(FINEWEB) == 0 and metadata.call_count == 1
    there = [f"{name}: already there, not compared with the hub {REASON}" for name in NAMES]
    assert capsys.readouterr().out.splitlines()[:3] == there


def test_the_real_client_resumes_and_what_it_brings_is_verified(data, tmp_path):
    """A local server speaks the hub's protocol to the real client. It breaks one connection and damages one file."""
    pytest.importorskip("huggingface_hub")
    content = {name: shard_bytes([50256, *range(i, i + 20000)]) for i, name in enumerate(NAMES)}
    val, one, two = NAMES
    requests, trouble = [], {one: "break", two: "damage"}

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            assert self.path == f"/datasets/kjj0/fineweb10B-gpt2/resolve/main/{name}"
            body, first = content[name], int(self.headers.get("Range", "bytes=0-")[6:-1])
            self.send_response(206 if first else 200)
            for key, value in {"X-Repo-Commit": "0" * 40, "X-Linked-ETag": f'"{hashlib.sha256(body).hexdigest()}"',
                               "X-Linked-Size": len(body), "Content-Length": len(body) - first}.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                requests.append((name, first))
                sent = {"damage": body[first:-1] + bytes([body[-1] ^ 1]), "break": body[first:5000], "": body[first:]}
                self.wfile.write(sent[trouble.pop(name, "")])
        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path),
                            "NO_PROXY": "127.0.0.1", "HTTPS_PROXY": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0",
                            "TIKTOKEN_CACHE_DIR": str(tmp_path)}  # DATA_PATH is this folder
        argv = [sys.executable, prepare.__file__, "fineweb", "--shards=2"]
        first, second = (subprocess.run(argv, env=env, capture_output=True, text=True) for _ in range(2))
        server.shutdown()
    damaged = rf"^error: {two}: the download is damaged \(.* SHA-256 .*\); run this again$"
    assert first.returncode == 1 and re.search(damaged, first.stderr, re.M), first
    assert "warning: no GPT-2 tokenizer" in second.stderr
    assert second.returncode == 0 and second.stdout.count("already there, as on the hub") == 2, second
    sent = [first for name, first in requests if name == one]
    assert [name for name, _ in requests] == [val, *[one] * len(sent), two, two]
    assert sent[0] == 0 and len(sent) == 2 and sent[1] in (0, 5000)  # an older client starts the file again
    assert contents(data / "fineweb10B") == content


# ---------------------------------------------------------------------------------------------------------------------
# Text

@pytest.fixture
def corpus(tmp_path):
    """Thirty small documents in nested folders, with letters of several alphabets and both kinds of line ends."""
    rng, root = random.Random(0), tmp_path / "corpus"
    for i in range(30):
        path = root / ("abc"[i % 3] + "/deep" * (i % 2)) / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes("".join(rng.choices("abc éß漢\r\n", k=rng.randint(20, 200))).encode() + b"x%d" % i)
    return root


def sources(root: Path) -> list[str]:
    """The texts in the order of their names, without the code under test."""
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.txt"))
    return [(root / name).read_bytes().decode() for name in names]


def prepare_text(*argv, tokenizer="bytes") -> int:
    return prepare.main(["text", *map(str, argv), "--tokenizer", tokenizer])


def test_bytes_round_trip_in_order_and_split_by_document(data, corpus, capsys):
    argv = "--out", "mine", "--shard-tokens", 700, "--val-fraction", 0.2
    assert prepare_text(corpus, *argv) == 0
    folder, texts = data / "mine", sources(corpus)
    train, val = texts_of(folder, ["train"]), texts_of(folder, ["val"])
    assert len(val) >= 2 and len(train) + len(val) == 30
    assert train == [t for t in texts if t not in val] and val == [t for t in texts if t in val]
    share, whole = sum(map(len, val)), sum(map(len, texts))
    assert 0.2 * whole <= share < 0.2 * whole + 206  # the share, plus less than one document
    sizes = [read_shard_header(p) for p in sorted(folder.glob("*_train_*"))]
    assert len(sizes) > 2 and set(sizes[:-1]) == {700} and 0 < sizes[-1] <= 700
    assert (f"mine: 30 documents, {sum(sizes):,} training and {len(tokens_of(folder, 'val')):,} validation tokens "
            f"in {len(sizes)} + 1 shards") in capsys.readouterr().out
    before = contents(data)
    assert prepare_text(corpus, corpus / "a", *argv) == 0 and contents(data) == before  # "a" is named twice
    # A second build leaves no shard of the first.
    assert prepare_text(corpus, *argv[:-4], "--shard-tokens", 7000) == 0
    assert sorted(contents(data)) == ["mine/mine_train_000001.bin", "mine/mine_val_000000.bin"]


def test_shards_are_what_the_format_says(data, tmp_path):
    """And two files of one name in two folders are two documents."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("hi " + folder)
    assert prepare_text(tmp_path / "a", tmp_path / "b", "--out", "n") == 0
    assert {*contents(data / "n").values()} == {shard_bytes([256, *b"hi a"]), shard_bytes([256, *b"hi b"])}


def test_gpt2_round_trip(data, corpus):
    tiktoken = pytest.importorskip("tiktoken")
    try:
        bpe = tiktoken.get_encoding("gpt2")
    except Exception as error:
        pytest.skip(f"GPT-2's BPE files cannot be had here: {type(error).__name__}")
    (corpus / "a" / "special.txt").write_text("not a separator: <|endoftext|>")
    assert prepare_text(corpus, "--out", "g", "--shard-tokens", 300, tokenizer="gpt2") == 0
    assert sorted(map(bpe.decode, documents_of(data / "g", separator=50256))) == sorted(sources(corpus))


def test_tokenizers(data, corpus, monkeypatch, capsys):
    """auto: bytes without a GPU or without GPT-2's files. Ids above the signed range survive."""
    gpt2 = types.SimpleNamespace(encode_ordinary=lambda text: [50255, len(text)])
    tiktoken = types.SimpleNamespace(get_encoding={"gpt2": gpt2}.get)
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken)
    argv, texts = (corpus, "--out", "n"), sorted(sources(corpus))
    assert prepare_text(*argv, tokenizer="auto") == 0 and sorted(texts_of(data / "n")) == texts
    assert "no GPU here: using bytes, for --preset=cpu" in capsys.readouterr().out
    monkeypatch.setattr(prepare.torch.cuda, "is_available", lambda: True)
    assert prepare_text(*argv, tokenizer="auto") == 0
    assert sorted(documents_of(data / "n", separator=50256)) == sorted([50255, len(t)] for t in texts)
    tiktoken.get_encoding = Mock(side_effect=OFFLINE)
    assert prepare_text(*argv, tokenizer="auto") == 0 and sorted(texts_of(data / "n")) == texts
    none = "no GPT-2 tokenizer (ConnectionError): tiktoken fetches it once, online"
    assert f"{none}; using bytes instead, separator 256\n" in capsys.readouterr().out
    assert prepare_text(*argv, tokenizer="gpt2") == 1
    assert one_line(capsys) == f"error: {none}; or use --tokenizer bytes\n"


@pytest.mark.parametrize("texts, length, chosen, one_gpu", [
    (500, 1000, "--preset=short --train_tokens=", False),  # a shard fills a row of the largest batch: the GPU chooses
    (100, 300, "--preset=short --train_tokens=", True),  # too few steps for several GPUs
    (100, 50, "--preset=short '--train_files=", False),  # less than the shortest run
])
def test_the_command_for_large_and_small_texts(data, tmp_path, monkeypatch, capsys, texts, length, chosen, one_gpu):
    gpt2 = types.SimpleNamespace(encode_ordinary=lambda text: [int(text)] * length)
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding={"gpt2": gpt2}.get))
    (tmp_path / "texts").mkdir()
    for i in range(texts):
        (tmp_path / "texts" / f"{i}.txt").write_text(str(i))
    assert prepare_text(tmp_path / "texts", "--out", "n", tokenizer="gpt2") == 0
    *_, title, command = capsys.readouterr().out.splitlines()
    assert f"/run.sh {chosen}" in command and ("micro_batches" in command) is (length < 100)
    assert command.startswith("NPROC=1 ") is one_gpu and ("several GPUs" in title) is not one_gpu
    assert re.fullmatch("train on it, with a sample at the end;.* it needs DATA_PATH=.*:", title)


def test_the_command_for_many_tiny_documents_together(data, tmp_path, monkeypatch, capsys):
    """The micro-batches hold them, whatever number of micro-batches the GPU gets."""
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=lambda name: types.SimpleNamespace(
        encode_ordinary=lambda text: [7] * int(text))))
    (tmp_path / "texts").mkdir()
    for i in range(1000):
        (tmp_path / "texts" / f"{i:04d}.txt").write_text("1" if i < 400 else "1000")
    assert prepare_text(tmp_path / "texts", "--out", "n", "--val-fraction", "0.1", tokenizer="gpt2") == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])[1:]
    config = train_gpt.parse_config([*command, "--bigram_normal=false"])  # which would need GPT-2's tokenizer
    assert config.system.micro_batches == 0
    for count in possible_micro_batches(config, 1):
        given = with_system(config, micro_batches=count)
        plans = [train_gpt.make_plan(given, 0)] * 3
        loader = L.Loader(given, Runtime(0, 1, torch.device("cpu")), plans, warn=print, hash_ids=None)
        for _ in range(3 * count):
            loader.next_batch()


def test_a_long_line_is_cut(data, tmp_path):
    for text, pieces in (("a" * 3000, [1400, 1400, 200]), ("a" * 400 + "\n" + "b" * 300, [401, 300])):
        assert list(map(len, prepare.cut(text, 350))) == pieces and "".join(prepare.cut(text, 350)) == text


def test_a_small_file_is_not_all_that_validates(data, tmp_path):
    """If whole files make up too small a share, documents do."""
    (tmp_path / "texts").mkdir()
    for name, lines in ("todo", 1), ("a", 4000):
        (tmp_path / "texts" / f"{name}.txt").write_text("some words here\n" * lines)
    assert prepare_text(tmp_path / "texts", "--out", "n", "--val-fraction", "0.25") == 0
    train, val = (len(tokens_of(data / "n", part)) for part in ("train", "val"))
    assert 0.24 < val / (train + val) < 0.27


def test_what_is_no_text_is_skipped_and_counted(data, corpus, capsys):
    (corpus / ".git").mkdir()
    for name, content in {"binary.bin": b"\xff\xfe\x00", "latin1.txt.old": b"\xe9", "nothing": b"", "blank": b" \n\t\n",
                          ".hidden": b"hidden", ".git/HEAD": b"ref"}.items():
        (corpus / name).write_bytes(content)
    assert prepare_text(corpus, "--out", "n") == 0 and sorted(texts_of(data / "n")) == sorted(sources(corpus))
    skipped = "warning: skipped 4 files (2 not UTF-8, such as binary.bin; 2 empty, such as blank)\n"
    assert skipped in capsys.readouterr().out


@pytest.mark.parametrize("argv, expected", [
    ("text {}/missing --out n", "missing: no such file or folder"),
    ("text {}/empty --out n", "0 characters of text in 0 usable files"),
    ("text {}/one.txt --out n", "3 characters of text in 1 usable files: two files at least"),
    ("text {}/line.txt --out n", "1000 characters of text in 1 usable files: .* in several lines"),
    ("text {} --out stdlib", "--out stdlib: .* take another"), ("text {} --out ../n", "--out ../n"),
    ("text {} --out n --val-fraction nan", "--val-fraction nan"), ("text {} --out n --val-fraction 1", "--val-f"),
    ("text {} --out n --shard-tokens 0", "--shard-tokens 0"), ("fineweb --shards=104", "1 to 103"),
    ("text {} --out n --shard-tokens 2147483648", "--shard-tokens 2147483648"),
    ("stdlib", "only 0 bytes of library sources")])
def test_errors_are_one_line_and_leave_nothing(data, tmp_path, capsys, monkeypatch, argv, expected):
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "one.txt").write_text("one"), (source / "line.txt").write_text("x" * 1000)
    monkeypatch.setattr(prepare.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    assert prepare.main(argv.format(source).split() + ["--tokenizer", "bytes"] * argv.startswith("text")) == 1
    assert re.search(expected, one_line(capsys)) and not contents(data) and not (tmp_path / "n").exists()


@pytest.mark.parametrize("stop, status", [(KeyboardInterrupt, 130), (OSError("disk full"), 1)])
def test_an_interrupted_build_leaves_what_was_there(data, corpus, monkeypatch, stop, status):
    """No shard changes before all are written. Then the validation shard loses its name first and gets it last."""
    argv = [corpus, "--out", "n", "--shard-tokens"]
    assert prepare_text(*argv, 900) == 0
    before = contents(data)

    def build(tokens, where, name, after):
        """The files that are left by a build that stops in call number `after` of a function, counted from 0."""
        call, calls = getattr(where, name), iter(range(after))

        def interrupted(*args):
            if next(calls, None) is None:
                raise stop
            call(*args)
        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupted)
            assert prepare_text(*argv, tokens) == status and list(calls) == []
        return contents(data)

    assert build(400, prepare, "write_shard", 3) == before
    assert "n/n_val_000000.bin" not in build(900, Path, "unlink", 1)
    for after in range(4):
        left = build(900, os, "replace", after)
        assert len(left) == after and "n/n_val_000000.bin" not in left


@pytest.mark.parametrize("sizes", [[60_000], [60_000, 3_000], [30_000, 30_000, 30_000]])
def test_few_large_files_are_divided_by_documents(data, tmp_path, sizes):
    """A division by files cannot divide a single file, and could validate on the large one of two. Documents end at
    line ends after 350 characters, because the loader drops all but the head of a long document."""
    texts = ["".join(f"file {i}, line {j}\n" for j in range(size))[:size] for i, size in enumerate(sizes)]
    for i, content in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(content)
    assert prepare_text(*(tmp_path / f"{i}.txt" for i in range(len(sizes))), "--out", "n") == 0
    train, val = texts_of(data / "n", ["train"]), texts_of(data / "n", ["val"])
    lengths = sorted(map(len, train + val))
    assert 350 < lengths[len(sizes)] and lengths[-1] < 380  # the last document of each file is shorter
    whole = "".join(sorted(train + val, key=lambda d: [int(x) for x in re.findall(r"\d+", d)[:2]]))
    assert whole == "".join(texts) and 0.05 <= sum(map(len, val)) / len(whole) < 0.05 + 370 / len(whole)


@pytest.mark.parametrize("letter, size", [("d", 1), ("д", 2), ("的", 3)])
def test_documents_of_any_language_are_equally_long(data, tmp_path, letter, size):
    (tmp_path / "text.txt").write_text(f"{letter * 5}\n" * 9000, encoding="utf-8")
    assert prepare_text(tmp_path / "text.txt", "--out", "n") == 0
    *whole, _ = sorted(map(len, documents_of(data / "n")), reverse=True)
    assert all(345 < length < 355 + 5 * size + 1 for length in whole)


# ---------------------------------------------------------------------------------------------------------------------
# The embedded default

def test_stdlib_is_complete_deterministic_and_not_built_twice(data, monkeypatch, capsys):
    files, build, folder = {}, prepare.build, data / "stdlib"
    monkeypatch.setattr(prepare, "build", lambda name, found, *rest: files.update(found) or build(name, found, *rest))
    assert prepare.main(["stdlib"]) == 0
    first, train, val = contents(folder), tokens_of(folder, "train"), tokens_of(folder, "val")
    assert len(list(folder.glob("*_train_*"))) >= 2 and len(val) >= 300_000
    assert 0.9 * prepare.STDLIB_BYTES < len(train) + len(val) < 1.1 * prepare.STDLIB_BYTES
    p = np.bincount(train) / len(train)
    entropy = -sum(x * math.log(x) for x in p if x)
    assert f"unigram entropy: {entropy:.4f} nats/token" in capsys.readouterr().out and 2.5 < entropy < 4

    # Each file is whole and on one side, in the order of the names. The files are spread over the library.
    assert list(files) == sorted(files) and not any({"test", "site-packages"} & {*Path(key).parts} for key in files)
    rest = {part: bytes(t[t < 256].astype(np.uint8)) for part, t in (("train", train), ("val", val))}
    for path in files.values():
        part = next(part for part in ("val", "train") if rest[part].startswith(path.read_bytes()))
        rest[part] = rest[part][path.stat().st_size:]
    assert rest == {"train": b"", "val": b""} and len({key.split("/")[0] for key in files}) > 100

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "build", None)
        assert prepare.main(["stdlib"]) == 0 and "already there" in capsys.readouterr().out
    shard = folder / "stdlib_train_000002.bin"
    shard.write_bytes(first[shard.name][:-2] + b"\x01\x01")
    assert prepare.main(["stdlib"]) == 0 and contents(folder) == first
    assert "damaged, building it again" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# From text to a sample

@pytest.mark.parametrize("count, size", [(2, 340), (1, 20_000), (300, 300), (1, 1_500_000)])
def test_the_printed_command_fits_the_text(data, tmp_path, capsys, count, size):
    """The loader gives batches of all stages to the end of the shards and on. size: characters of each file."""
    (tmp_path / "source").mkdir()
    for i in range(count):
        (tmp_path / "source" / f"{i}.txt").write_text((f"line {i}\n" * size)[:size])
    assert prepare_text(tmp_path / "source", "--out", "m") == 0
    out, available = capsys.readouterr().out, len(tokens_of(data / "m", "train"))
    if count == 2:  # 340 tokens cannot fill a micro-batch of 1024
        assert "\nwarning: no run can start on this: " in out and "more text is needed" in out and "run.sh" not in out
        return
    script, *arguments = shlex.split(out.splitlines()[-1])
    assert (Path.cwd() / script).resolve() == ROOT / "run.sh" and "--preset=cpu" in arguments
    # Enough text: only the preset, the length of one pass, the files and the prompt. Without enough for the shortest
    # run, the run is that of the preset.
    assert size < 10**6 or [arg.partition("=")[0] for arg in arguments] == [
        "--preset", "--train_tokens", "--train_files", "--val_files", "--sample_prompt"]
    config = train_gpt.parse_config(arguments)
    _, passes, _ = tokens_and_passes(config, sorted((data / "m").glob("*_train_*")), available)
    assert 0.85 < passes < 1.1
    assert survey_training_data(config)[0] in out
    runtime = Runtime(0, 1, torch.device("cpu"))
    for stage, start in zip(config.schedule.stages, stage_starts(config.schedule)):
        plan = train_gpt.make_plan(config, start)
        plans = [plan] * min(20, 2 + 2 * available // stage.batch_tokens)
        loader = L.Loader(config, runtime, plans, warn=lambda line: None)
        for _ in range(len(plans) * config.system.micro_batches):
            assert len(loader.next_batch().tokens) == plan.micro_batch_tokens
    assert sum(len(piece.tokens) for piece in L.ValidationData(config, runtime)) > 0


def test_the_shard_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec((ROOT / "data/README.md").read_text().partition("```python\n")[2].partition("```")[0], {})
    shard = L.Shard(Path("own_train_000001.bin"), train_gpt.PRESETS["cpu"].model)
    documents = [bytes(shard.tokens[start + 1:start + length].astype(np.uint8))
                 for start, length in zip(shard.starts, shard.lengths)]
    assert documents == [b"The first document.\n" * 90, b"The second.\n" * 90]


def test_own_text_to_a_sample(data, tmp_path, capsys):
    """With the command that prepare.py prints, and a small model."""
    words = random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat", "and", "slept.\n"], k=60_000)
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(" ".join(words[3000 * i:3000 * (i + 1)]))
    assert prepare.main(["text", *map(str, tmp_path.glob("*.txt")), "--out", "mine"]) == 0
    _, *arguments = shlex.split(capsys.readouterr().out.splitlines()[-1])
    small = ["--model_dim=32", "--num_heads=2", "--layers=2", "--backout_layer=none", "--scheduled_steps=6",
             *(f"--stage{i}.batch_tokens=1024" for i in (1, 2, 3, 4)), "--sample_tokens=30",
             "--sample_prompt=Once upon", f"--log_dir={tmp_path}/logs"]
    assert train_gpt.main([*arguments, *small]) == 0
    out = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"^step:\d+/\d+ val_loss:([0-9.]+)", out, re.M)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.1
    sample = out.partition("\nsample:\n")[2].partition("\nfinal_val_loss:")[0]
    assert sample.startswith("Once upon") and len(sample) > 10


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no file that is always full")
def test_a_full_disk_names_the_file():
    with pytest.raises(UserError, match=r"cannot write /dev/full \(No space left on device\)"):
        prepare.write_shard(Path("/dev/full"), np.zeros(9, np.uint16))
