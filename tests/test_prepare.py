"""data/prepare.py: what it writes, what it refuses, and that nothing unfinished ever carries a shard's name."""

import hashlib
import http.server
import math
import os
import pickle
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
import threading
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "data"), str(ROOT)]
import prepare  # noqa: E402
import train_gpt  # noqa: E402
from data import loader as L  # noqa: E402


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty folder that takes the place of data/. On every machine there is no GPU."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    monkeypatch.setattr(prepare.torch.cuda, "is_available", lambda: False)
    return folder


def shard_bytes(tokens) -> bytes:
    """A shard written down from the format's description, not by the code under test."""
    return struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens)


def tokens_of(folder: Path, part: str) -> np.ndarray:
    paths = sorted(folder.glob(f"*_{part}_*.bin"))
    for path in paths:
        L.read_shard_header(path)
    return np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths])


def documents_of(folder: Path, part: str, separator: int = 256) -> list[np.ndarray]:
    tokens = tokens_of(folder, part)
    assert tokens[0] == separator
    return [d[1:] for d in np.split(tokens, np.flatnonzero(tokens == separator)[1:])]


def texts_of(folder: Path, part: str) -> list[str]:
    return [bytes(d.astype(np.uint8)).decode() for d in documents_of(folder, part)]


def one_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("error: "), err
    return err


# ---------------------------------------------------------------------------------------------------------------------
# FineWeb, from a hub that does what it is told

class Hub:
    """Stands in for hub_metadata and hub_fetch. `act[name]` replaces what the second does for one file."""

    def __init__(self):
        self.asked, self.act, self.has = [], {}, {}

    def content(self, name: str) -> bytes:
        return self.has.get(name) or shard_bytes([50256, 7, int(name[-7:-4]), 50256, 9])

    def metadata(self, name):
        return len(self.content(name)), hashlib.sha256(self.content(name)).hexdigest()

    def fetch(self, name, folder):
        self.asked.append(name)
        folder.mkdir(parents=True, exist_ok=True)
        if name in self.act:
            self.act[name](folder / name)
        else:
            (folder / name).write_bytes(self.content(name))
        return folder / name


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(prepare, "hub_metadata", hub.metadata)
    monkeypatch.setattr(prepare, "hub_fetch", hub.fetch)
    return hub


def offline(*args):
    raise ConnectionError("name or service\nnot known")


def fineweb_names(shards):
    return ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def test_fineweb_fetches_validation_first_then_nothing_twice(data, hub, capsys):
    assert prepare.main(["fineweb"]) == 0
    assert hub.asked == fineweb_names(9)
    assert visible(data / "fineweb10B") == sorted(fineweb_names(9))
    for name in fineweb_names(9):
        assert (data / "fineweb10B" / name).read_bytes() == hub.content(name)
    assert "fineweb10B: 20 documents, 45 training and 5 validation tokens in 9 + 1 shards" in capsys.readouterr().out
    assert prepare.main(["fineweb"]) == 0
    assert len(hub.asked) == 10
    assert capsys.readouterr().out.count("already there, as on the hub\n") == 10


def test_fineweb_continues_after_an_interruption(data, hub, capsys):
    def interrupted(path):
        path.write_bytes(hub.content(path.name)[:-4])
        raise KeyboardInterrupt
    hub.act["fineweb_train_000002.bin"] = interrupted
    assert prepare.main(["fineweb", "--shards", "3"]) == 130
    folder = data / "fineweb10B"
    assert sorted(p.name for p in folder.glob("*.bin")) == sorted(fineweb_names(1))
    hub.act.clear()
    hub.asked.clear()
    assert prepare.main(["fineweb", "--shards", "3"]) == 0
    assert hub.asked == fineweb_names(3)[2:]
    assert visible(folder) == sorted(fineweb_names(3))


BOMB = b"cos\nmkdir\n(Vexecuted\ntR."  # as a pickle it makes a folder


@pytest.mark.parametrize("promised, content, expected", [
    # Its header agrees with its length, so only the hub's size tells that tokens are missing.
    (shard_bytes([50256, 1, 2]), shard_bytes([50256, 1]), "1028 bytes, the hub has 1030"),
    # It is a shard of the right size, so only the checksum tells.
    (shard_bytes([50256, 1, 2]), shard_bytes([50256, 1, 3]), "SHA-256 [0-9a-f]{64}, the hub has [0-9a-f]{64}"),
    # Just what the hub has, and yet no data.
    (b"<html>" + bytes(2000), None, "magic number"), (BOMB + bytes(2000), None, "magic number"),
    (BOMB, None, "magic number"),
    (shard_bytes([50256, 1])[:-1], None, "header promises 2 tokens"), (shard_bytes([50256, 50257]), None, "token 50257"),
])
def test_fineweb_refuses_a_damaged_download(data, hub, capsys, monkeypatch, promised, content, expected):
    monkeypatch.chdir(data.parent)
    name = "fineweb_train_000001.bin"
    hub.has[name] = promised
    hub.act[name] = lambda path: path.write_bytes(content or promised)
    assert prepare.main(["fineweb", "--shards", "1"]) == 1
    error = one_line(capsys)
    assert name in error and re.search(expected, error) and "run this again" in error
    assert not list(data.rglob(name)), "neither under its name nor where the hub's client would take it for finished"
    assert not Path("executed").exists()
    if content:
        hub.act.clear()
        assert prepare.main(["fineweb", "--shards", "1"]) == 0 and (data / "fineweb10B" / name).read_bytes() == promised


def test_the_pickle_above_works(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    pickle.loads(BOMB)
    assert Path("executed").exists()


def test_a_checksum_that_is_no_sha256_is_not_compared(data, hub, monkeypatch):
    """For small files the hub has another kind; the size counts all the same."""
    monkeypatch.setattr(prepare, "hub_metadata", lambda name: (len(hub.content(name)), "0" * 40))
    assert prepare.main(["fineweb", "--shards", "1"]) == 0


DAMAGE = [lambda b: b[:-2], lambda b: b"\0" + b[1:], lambda b: b[:100], lambda b: b[:-2] + b"\xff\xff"]


@pytest.mark.parametrize("damage", [*DAMAGE, lambda b: b[:-2] + b"\x08\0"])  # the last is another token, as good as any
def test_fineweb_names_and_replaces_a_corrupted_file(data, hub, capsys, damage):
    assert prepare.main(["fineweb", "--shards", "2"]) == 0
    path = data / "fineweb10B" / "fineweb_train_000001.bin"
    path.write_bytes(damage(path.read_bytes()))
    hub.asked.clear()
    capsys.readouterr()
    assert prepare.main(["fineweb", "--shards", "2"]) == 0
    assert hub.asked == [path.name]
    assert path.read_bytes() == hub.content(path.name)
    out = capsys.readouterr().out
    assert "damaged, fetching it again" in out and str(path) in out


def test_fineweb_without_network_is_one_clear_line(data, hub, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "hub_metadata", offline)
    assert prepare.main(["fineweb"]) == 1
    error = one_line(capsys)
    assert "fineweb_val_000000.bin: cannot be fetched" in error and "see to the network" in error and "not known" in error
    assert not hub.asked and not list(data.rglob("*.bin"))


def test_a_failing_download_is_one_clear_line(data, hub, capsys):
    hub.act["fineweb_val_000000.bin"] = offline
    assert prepare.main(["fineweb"]) == 1
    assert "fineweb_val_000000.bin: cannot be fetched from the hub (ConnectionError: name or service not known)" in one_line(capsys)
    assert hub.asked == ["fineweb_val_000000.bin"] and not list(data.rglob("*.bin"))


def test_fineweb_that_is_there_needs_no_network(data, hub, capsys, monkeypatch):
    assert prepare.main(["fineweb", "--shards", "2"]) == 0
    asked = []
    monkeypatch.setattr(prepare, "hub_metadata", lambda name: asked.append(name) or offline())
    capsys.readouterr()
    assert prepare.main(["fineweb", "--shards", "2"]) == 0
    expected = "already there, not compared with the hub (ConnectionError: name or service not known)\n"
    assert capsys.readouterr().out.count(expected) == 3
    assert len(asked) == 1, "a network that swallows everything costs one wait only"
    path = data / "fineweb10B" / "fineweb_train_000002.bin"
    for damage in DAMAGE:
        path.write_bytes(damage(hub.content(path.name)))
        assert prepare.main(["fineweb", "--shards", "2"]) == 1
        out, err = capsys.readouterr()
        assert f"damaged, fetching it again: {path}" in out and not path.exists()
        assert err.startswith(f"error: {path.name}: cannot be fetched") and err.count("\n") == 1


@pytest.mark.parametrize("shards", ["0", "104", "-1"])
def test_fineweb_knows_how_many_shards_there_are(data, hub, capsys, shards):
    assert prepare.main(["fineweb", f"--shards={shards}"]) == 1
    assert "1 to 103" in one_line(capsys) and not hub.asked


def test_the_real_client_resumes_and_what_it_brings_is_verified(data, tmp_path):
    """A server on this machine speaks the hub's protocol to the real client, breaks one connection and damages one file, once each."""
    pytest.importorskip("huggingface_hub")
    content = {name: shard_bytes([50256, *range(2000 * i, 2000 * (i + 10))]) for i, name in enumerate(fineweb_names(2))}
    requests, trouble = [], {"fineweb_train_000001.bin": "break", "fineweb_train_000002.bin": "damage"}

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            assert self.path == f"/datasets/kjj0/fineweb10B-gpt2/resolve/main/{name}"
            body, first = content[name], int(self.headers.get("Range", "bytes=0-")[6:-1])
            self.send_response(206 if first else 200)
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("X-Linked-ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Linked-Size", str(len(body)))
            self.send_header("Content-Length", str(len(body) - first))
            self.end_headers()
            if self.command == "GET":
                requests.append((name, first))
                do = trouble.pop(name, "")
                if do == "damage":
                    body = body[:-1] + bytes([body[-1] ^ 1])
                self.wfile.write(body[first:5000] if do == "break" else body[first:])
        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | {"NO_PROXY": "127.0.0.1", "HF_HOME": str(tmp_path)}
        env["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, str(ROOT / "data" / "prepare.py"), "fineweb", "--shards", "2"]
        runs = [subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True) for _ in range(2)]
        server.shutdown()
    first, second = runs
    assert first.returncode == 1, first.stderr
    damaged = r"^error: fineweb_train_000002.bin: the download is damaged \(.* SHA-256 .*\); run this again$"
    assert re.search(damaged, first.stderr, re.M)
    assert second.returncode == 0 and second.stdout.count("already there, as on the hub") == 2, (second.stdout, second.stderr)
    val, one, two = content
    sent = [first for name, first in requests if name == one]
    assert [name for name, _ in requests] == [val, *[one] * len(sent), two, two]
    assert sent[0] == 0 and len(sent) == 2 and sent[1] in (0, 5000)  # an older client starts the file again
    assert {p.name: p.read_bytes() for p in (data / "fineweb10B").iterdir()} == content


# ---------------------------------------------------------------------------------------------------------------------
# Text

@pytest.fixture
def corpus(tmp_path):
    """Thirty small documents in nested folders, with letters of several alphabets and both kinds of line ends."""
    rng = random.Random(0)
    root = tmp_path / "corpus"
    for i in range(30):
        path = root / ("abc"[i % 3] + "/deep" * (i % 2)) / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes("".join(rng.choices("abc éß漢\r\n", k=rng.randint(20, 200))).encode() + b"x%d" % i)
    return root


def sources(root: Path) -> list[str]:
    """The texts in the order of their names, written without the code under test."""
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.txt"))
    return [(root / name).read_bytes().decode() for name in names]


def prepare_text(*argv) -> int:
    return prepare.main(["text", *map(str, argv)])


def test_bytes_round_trip_in_order_and_split_by_document(data, corpus, capsys):
    assert prepare_text(corpus, "--out", "mine", "--tokenizer", "bytes", "--shard-tokens", 700, "--val-fraction", 0.2) == 0
    folder = data / "mine"
    train, val, all_texts = texts_of(folder, "train"), texts_of(folder, "val"), sources(corpus)
    assert len(val) >= 2 and not set(train) & set(val)
    assert train == [t for t in all_texts if t not in val]
    assert val == [t for t in all_texts if t in val]
    assert len(train) + len(val) == 30
    share = sum(map(len, val)) / sum(map(len, all_texts))
    assert 0.2 <= share < 0.2 + 206 / sum(map(len, all_texts)), "at least the share asked for, by less than one document"
    sizes = [L.read_shard_header(p) for p in sorted(folder.glob("*_train_*"))]
    assert len(sizes) > 2 and set(sizes[:-1]) == {700} and 0 < sizes[-1] <= 700
    assert visible(folder) == [f"mine_train_{i:06d}.bin" for i in range(1, len(sizes) + 1)] + ["mine_val_000000.bin"]
    assert visible(data) == ["mine"]
    out = capsys.readouterr().out
    count = Counter(int(t) for t in tokens_of(folder, "train"))
    entropy = -sum(n / count.total() * math.log(n / count.total()) for n in count.values())
    assert f"unigram entropy: {entropy:.4f} nats/token" in out
    assert (f"mine: 30 documents, {count.total():,} training and {len(tokens_of(folder, 'val')):,} validation tokens "
            f"in {len(sizes)} + 1 shards") in out


def test_shards_are_what_the_format_says(data, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("hi " + name)
    assert prepare_text(tmp_path / "a.txt", tmp_path / "b.txt", "--out", "n", "--tokenizer", "bytes") == 0
    built = {(data / "n" / f"n_{part}.bin").read_bytes() for part in ("train_000001", "val_000000")}
    assert built == {shard_bytes([256, *b"hi a.txt"]), shard_bytes([256, *b"hi b.txt"])}


def test_gpt2_round_trip(data, corpus):
    tiktoken = pytest.importorskip("tiktoken")
    try:
        bpe = tiktoken.get_encoding("gpt2")
    except Exception as error:
        pytest.skip(f"GPT-2's BPE files cannot be had here: {type(error).__name__}")
    (corpus / "a" / "special.txt").write_text("not a separator: <|endoftext|>")
    assert prepare_text(corpus, "--out", "g", "--tokenizer", "gpt2", "--shard-tokens", 300) == 0
    texts = [bpe.decode(d) for part in ("train", "val") for d in documents_of(data / "g", part, 50256)]
    assert sorted(texts) == sorted(sources(corpus))


def fake_tiktoken(monkeypatch, get_encoding):
    module = types.ModuleType("tiktoken")
    module.get_encoding = get_encoding
    monkeypatch.setitem(sys.modules, "tiktoken", module)
    monkeypatch.setattr(prepare.torch.cuda, "is_available", lambda: True)


def test_gpt2_ids_above_the_signed_range_survive(data, corpus, monkeypatch, capsys):
    def get_encoding(name):
        assert name == "gpt2"
        return types.SimpleNamespace(encode_ordinary=lambda text: [50255, len(text)])
    fake_tiktoken(monkeypatch, get_encoding)
    assert prepare_text(corpus, "--out", "g") == 0
    documents = [d.tolist() for part in ("train", "val") for d in documents_of(data / "g", part, 50256)]
    assert sorted(documents) == sorted([50255, len(t)] for t in sources(corpus))
    assert "entropy" not in capsys.readouterr().out


def test_without_the_bpe_auto_says_so_and_gpt2_fails(data, corpus, monkeypatch, capsys):
    def get_encoding(name):
        raise ConnectionError
    fake_tiktoken(monkeypatch, get_encoding)
    assert prepare_text(corpus, "--out", "auto") == 0
    assert capsys.readouterr().out.count("GPT-2's tokenizer cannot be had (ConnectionError): using bytes instead") == 1
    assert sorted(texts_of(data / "auto", "train") + texts_of(data / "auto", "val")) == sorted(sources(corpus))
    assert prepare_text(corpus, "--out", "strict", "--tokenizer", "gpt2") == 1
    assert "use --tokenizer bytes" in one_line(capsys)
    assert visible(data) == ["auto"]


def test_same_text_elsewhere_gives_the_same_shards(data, corpus, tmp_path):
    elsewhere = tmp_path / "else" / "where"
    elsewhere.parent.mkdir()
    for path in sorted(corpus.rglob("*.txt"), reverse=True):  # made in another order, too
        copy = elsewhere / path.relative_to(corpus)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    built = []
    for root in (corpus, elsewhere):
        assert prepare_text(root, "--out", "n", "--tokenizer", "bytes", "--shard-tokens", 500) == 0
        built.append({p.name: p.read_bytes() for p in (data / "n").iterdir()})
    assert built[0] == built[1] and len(built[0]) > 3


def test_a_second_build_leaves_no_shard_of_the_first(data, corpus):
    for limit in (300, 3000):
        assert prepare_text(corpus, "--out", "n", "--tokenizer", "bytes", "--shard-tokens", limit) == 0
    assert sorted(texts_of(data / "n", "train") + texts_of(data / "n", "val")) == sorted(sources(corpus))


def test_a_file_named_twice_is_one_document(data, corpus):
    assert prepare_text(corpus / "a", corpus, corpus / "a" / "0.txt", "--out", "n", "--tokenizer", "bytes") == 0
    assert sorted(texts_of(data / "n", "train") + texts_of(data / "n", "val")) == sorted(sources(corpus))


def test_files_of_one_name_in_two_folders_are_two_documents(data, tmp_path):
    for i in range(4):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "same.txt").write_text(f"text {i}")
    assert prepare_text(*(tmp_path / str(i) for i in range(4)), "--out", "n", "--tokenizer", "bytes") == 0
    assert sorted(texts_of(data / "n", "train") + texts_of(data / "n", "val")) == [f"text {i}" for i in range(4)]


def test_what_is_no_text_is_skipped_and_counted(data, corpus, capsys):
    (corpus / "binary.bin").write_bytes(b"\xff\xfe\x00")
    (corpus / "latin1.txt.old").write_bytes("é".encode("latin-1"))
    (corpus / "nothing").write_bytes(b"")
    (corpus / "blank").write_bytes(b" \n\t\n")
    (corpus / "spaces").write_bytes(b"\n")
    (corpus / ".hidden").write_text("hidden")
    (corpus / ".git").mkdir()
    (corpus / ".git" / "HEAD").write_text("ref")
    assert prepare_text(corpus, "--out", "n", "--tokenizer", "bytes") == 0
    assert "warning: skipped 5 files (2 not UTF-8, 3 empty)" in capsys.readouterr().out
    assert sorted(texts_of(data / "n", "train") + texts_of(data / "n", "val")) == sorted(sources(corpus))


@pytest.mark.parametrize("argv, expected", [
    (["{}/missing", "--out", "n"], "missing: no such file or folder"),
    (["{}/empty", "--out", "n"], "0 characters of text in 0 usable files"),
    (["{}/binary", "--out", "n"], "0 characters of text in 0 usable files"),
    (["{}/one.txt", "--out", "n"], "3 characters of text in 1 usable files: two files at least"),
    (["{}/line.txt", "--out", "n"], "5000 characters of text in 1 usable files: .* in several lines"),
    (["{}", "--out", "stdlib"], "--out stdlib: .* take another"),
    (["{}", "--out", "fineweb10B"], "--out fineweb10B"),
    (["{}", "--out", "../n"], "--out ../n"),
    (["{}", "--out", ""], "--out "),
    (["{}", "--out", "n", "--val-fraction", "0"], "--val-fraction 0.0"),
    (["{}", "--out", "n", "--val-fraction", "nan"], "--val-fraction nan"),
    (["{}", "--out", "n", "--val-fraction", "1"], "--val-fraction 1.0"),
    (["{}", "--out", "n", "--shard-tokens", "0"], "--shard-tokens 0"),
    (["{}", "--out", "n", "--shard-tokens", str(2**31)], "--shard-tokens 2147483648"),
])
def test_mistakes_get_one_line_and_leave_nothing(data, tmp_path, capsys, argv, expected):
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "binary").mkdir()
    (source / "binary" / "x").write_bytes(b"\xff")
    (source / "one.txt").write_text("one")
    (source / "line.txt").write_text("x" * 5000)
    assert prepare_text(*(a.format(source) for a in argv), "--tokenizer", "bytes") == 1
    assert re.search(expected, one_line(capsys))
    assert visible(data) == [] and not (tmp_path / "n").exists()


@pytest.mark.parametrize("stop, status", [(KeyboardInterrupt, 130), (OSError("disk full"), 1)])
@pytest.mark.parametrize("earlier", [False, True])
def test_an_interrupted_build_leaves_what_was_there(data, corpus, monkeypatch, stop, status, earlier):
    argv = [corpus, "--out", "n", "--tokenizer", "bytes", "--shard-tokens"]
    if earlier:
        assert prepare_text(*argv, 900) == 0
    before = {p: p.read_bytes() for p in data.rglob("*.bin")}
    write, written = prepare.write_shard, []

    def interrupted(path, tokens):
        write(path, tokens)
        written.append(path)
        if len(written) == 3:
            raise stop
    monkeypatch.setattr(prepare, "write_shard", interrupted)
    assert prepare_text(*argv, 400) == status
    assert len(written) == 3
    assert {p: p.read_bytes() for p in data.rglob("*.bin")} == before
    assert visible(data) == (["n"] if earlier else [])


def test_validation_gets_its_name_last_and_loses_it_first(data, corpus, monkeypatch):
    """Whoever finds the validation shard, finds a complete set: stopped between any two renames there is none."""
    argv = [corpus, "--out", "n", "--tokenizer", "bytes", "--shard-tokens", 400]
    assert prepare_text(*argv) == 0
    complete = len(visible(data / "n"))
    replace = prepare.os.replace
    for stop in range(complete):
        done = []

        def interrupted(source, target):
            if len(done) == stop:
                raise KeyboardInterrupt
            replace(source, target)
            done.append(target)
        monkeypatch.setattr(prepare.os, "replace", interrupted)
        assert prepare_text(*argv) == 130
        assert not (data / "n" / "n_val_000000.bin").exists() and len(visible(data / "n")) == stop


def test_pack_keeps_every_token_in_order():
    rng = np.random.default_rng(0)
    for limit in (1, 7, 64, 10_000):
        documents = [rng.integers(0, 257, n).astype(np.uint16) for n in rng.integers(1, 200, 50)]
        pieces = list(prepare.pack(iter(documents), limit))
        assert np.array_equal(np.concatenate(pieces), np.concatenate(documents))
        assert all(len(p) == limit for p in pieces[:-1]) and 0 < len(pieces[-1]) <= limit
    assert list(prepare.pack(iter([]), 5)) == []


def test_pack_reads_no_further_than_the_shard_needs():
    read = []

    def documents():
        for i in range(100):
            read.append(i)
            yield np.zeros(10, np.uint16)
    next(prepare.pack(documents(), 35))
    assert len(read) == 4


def test_split_leaves_a_document_on_both_sides():
    for n in (2, 3, 10):
        sizes = {f"f{i}": 10**i for i in range(n)}
        for fraction in (1e-9, 0.5, 1 - 1e-9):
            assert 0 < len(prepare.split(sizes, fraction)) < n


def test_command_line_from_another_folder(tmp_path):
    run = subprocess.run([sys.executable, str(ROOT / "data" / "prepare.py"), "text", "missing", "--out", "x"],
                         cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr == "error: missing: no such file or folder\n"


# ---------------------------------------------------------------------------------------------------------------------
# The embedded default

def test_stdlib_is_complete_deterministic_and_not_built_twice(data, monkeypatch, capsys):
    given = {}
    build = prepare.build
    monkeypatch.setattr(prepare, "build", lambda name, files, *rest: given.update(files) or build(name, files, *rest))
    assert prepare.main(["stdlib"]) == 0
    folder = data / "stdlib"
    first = {p.name: p.read_bytes() for p in folder.iterdir()}
    out = capsys.readouterr().out

    train, val = tokens_of(folder, "train"), tokens_of(folder, "val")
    assert len(list(folder.glob("*_train_*"))) >= 2 and len(val) >= 300_000
    assert 0.9 * prepare.STDLIB_BYTES < len(train) + len(val) < 1.1 * prepare.STDLIB_BYTES
    p = np.bincount(train) / len(train)
    entropy = -sum(x * math.log(x) for x in p if x)
    assert f"unigram entropy: {entropy:.4f} nats/token" in out and 2.5 < entropy < 4

    # Files are whole and on one side, in the order of their names.
    assert list(given) == sorted(given) and not any("test" in Path(k).parts or "site-packages" in k for k in given)
    rest = {part: bytes(t[t < 256].astype(np.uint8)) for part, t in (("train", train), ("val", val))}
    count = Counter()
    for key in given:
        content = given[key].read_bytes()
        part = next(part for part in ("val", "train") if rest[part].startswith(content))
        rest[part] = rest[part][len(content):]
        count[part] += 1
    assert rest == {"train": b"", "val": b""} and count["val"] > 10

    # Documents fit the loader: see the comment at DOCUMENT_CHARACTERS.
    lengths = np.diff(np.append(np.flatnonzero(train == 256), len(train)))
    assert np.minimum(lengths, 1024).sum() > 0.98 * len(train) and lengths.mean() > 300

    def must_not(*args):
        raise AssertionError("built again")
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "build", must_not)
        assert prepare.main(["stdlib"]) == 0
        out = capsys.readouterr().out
        assert "already there" in out and f"unigram entropy: {entropy:.4f}" in out

    # Damaged or incomplete, it is built again, to the same bytes.
    shard = folder / "stdlib_train_000002.bin"
    for damage in (lambda: shard.write_bytes(first[shard.name][:-2]), (folder / "stdlib_val_000000.bin").unlink,
                   lambda: shard.write_bytes(first[shard.name][:-2] + b"\x01\x01")):
        damage()
        assert prepare.main(["stdlib"]) == 0
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == first
    assert capsys.readouterr().out.count("damaged, building it again") == 2


def test_documents_join_to_the_file():
    text = "".join(f"line {i} {'é' * (i % 90)}\n" for i in range(500)) + "no line end"
    documents = prepare.cut(text, 1000)
    assert "".join(documents) == text and len(documents) > 10
    assert all(1000 < len(d) < 1110 and d.endswith("\n") for d in documents[:-1])


def test_stdlib_takes_evenly_when_there_is_more_than_the_cap(data, tmp_path, monkeypatch):
    library = tmp_path / "library"
    for i in range(400):
        path = library / f"package{i // 20:02d}" / f"m{i:03d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 999 + "\n")
    monkeypatch.setattr(prepare.sysconfig, "get_path", lambda name: str(library))
    monkeypatch.setattr(prepare, "STDLIB_BYTES", 200_000)
    given = {}
    monkeypatch.setattr(prepare, "build", lambda name, files, *rest: given.update(files))
    prepare.stdlib()
    assert 150 < len(given) < 250
    assert len({k.split("/")[0] for k in given}) == 20, "every package has its share"


def test_stdlib_without_sources_is_an_error(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    assert prepare.main(["stdlib"]) == 1
    assert "only 0 bytes of library sources" in one_line(capsys) and visible(data) == []


def test_long_texts_become_several_documents(data, tmp_path):
    """The loader would drop all but the head of a long document."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("a line of thirty characters...\n" * 100)
    assert prepare_text(tmp_path / "a.txt", tmp_path / "b.txt", "--out", "long", "--tokenizer", "bytes", "--val-fraction", 0.5) == 0
    tokens = tokens_of(data / "long", "train")
    lengths = np.diff(np.flatnonzero(tokens == 256), append=len(tokens))
    assert len(lengths) == 4 and lengths.max() <= 1001 + 31 and lengths.sum() == 3100 + 4


@pytest.mark.parametrize("sizes", [[60_000], [60_000, 3_000], [30_000, 30_000, 30_000]])
def test_few_large_files_are_divided_by_documents(data, tmp_path, sizes):
    """By files, a single one could not be divided at all, and of a large and a small one the large one might validate."""
    texts = ["".join(f"file {i}, line {j}\n" for j in range(size))[:size] for i, size in enumerate(sizes)]
    for i, content in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(content)
    paths = [tmp_path / f"{i}.txt" for i in range(len(sizes))]
    assert prepare_text(*paths, "--out", "few", "--tokenizer", "bytes") == 0
    train, val = texts_of(data / "few", "train"), texts_of(data / "few", "val")
    documents = [d for content in texts for d in prepare.cut(content, 1000)]
    assert not set(train) & set(val)
    assert train == [d for d in documents if d in set(train)] and val == [d for d in documents if d in set(val)]
    assert sum(map(len, train + val)) == sum(sizes) and 0.05 <= sum(map(len, val)) / sum(sizes) < 0.05 + 1020 / sum(sizes)


# ---------------------------------------------------------------------------------------------------------------------
# From text to a sample

def printed_command(out: str) -> list[str]:
    """The trainer's arguments in the last line of prepare.py."""
    script, *arguments = shlex.split(out.splitlines()[-1])
    assert (Path.cwd() / script).resolve() == ROOT / "run.sh"
    return arguments


@pytest.mark.parametrize("count, size", [
    (2, 1_500), (1, 20_000), (30, 2_000), (3_000, 30), (400, 250), (2_000, 1_000)])  # files and characters of each
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_the_printed_command_fits_the_text(data, tmp_path, monkeypatch, capsys, tokenizer, count, size):
    """Batches of all stages, to the end of the shards and on, and all of validation."""
    fake_tiktoken(monkeypatch, lambda name: types.SimpleNamespace(encode_ordinary=lambda text: [ord(c) for c in text]))
    rng = random.Random(count)
    (tmp_path / "source").mkdir()
    for i in range(count):
        content = "".join(rng.choices("etaoin \n", (20, 1, 1, 1, 1, 1, 3, 1), k=rng.randint(size // 2, size * 3 // 2)))
        (tmp_path / "source" / f"{i}.txt").write_text("x" + content)
    assert prepare_text(tmp_path / "source", "--out", "m", "--tokenizer", tokenizer) == 0
    out = capsys.readouterr().out
    have = len(tokens_of(data / "m", "train"))
    if count == 2:  # no row of 1536 can be filled with 448 tokens of each document
        assert "\nwarning: no run can start on this: " in out and "more text is needed" in out and "run.sh" not in out
        return
    arguments = printed_command(out)
    assert f"--preset={'cpu' if tokenizer == 'bytes' else 'record'}" in arguments
    config = train_gpt.parse_config(arguments)
    assert config.system.sample_tokens == 200 and config.system.sample_prompt == ""
    usual = train_gpt.PRESETS["cpu" if tokenizer == "bytes" else "record"]
    assert L.survey_training_data(config, np.diff(train_gpt.stage_starts(config.schedule)))[0] in out
    runtime = train_gpt.Runtime(0, 1, torch.device("cpu"))
    for stage in config.schedule.stages:
        row = stage.batch_tokens // config.system.micro_batches
        assert row <= max(2048, have // 8) or config.system.micro_batches == usual.system.micro_batches
        plans = [types.SimpleNamespace(micro_batch_tokens=row, max_doc_len=stage.max_doc_len)] * min(20, 2 + 2 * have // stage.batch_tokens)
        loader = L.Loader(config, runtime, plans, warn=lambda line: None)
        for _ in range(len(plans) * config.system.micro_batches):
            assert len(loader.next_batch().tokens) == row
    pieces = list(L.ValidationData(config, runtime))
    seen, val = sum(len(piece.tokens) for piece in pieces), len(tokens_of(data / "m", "val"))
    assert seen == usual.data.val_tokens or 0 < val - seen <= 16 * len(pieces)
    assert len(pieces) == -(-seen // usual.data.val_batch_tokens), "long pieces: a token's context ends where its piece begins"


def test_too_little_to_validate_on(data, tmp_path, capsys):
    short, long = sorted((tmp_path / "a.txt", tmp_path / "b.txt"), key=lambda path: prepare.rank(path.name))  # the first validates
    short.write_text("short")
    long.write_text("a line of thirty characters...\n" * 3_000)
    assert prepare_text(short, long, "--out", "m", "--tokenizer", "bytes", "--val-fraction", 5e-5) == 0
    assert "no run can start on this: 6 validation tokens, at least 17 are needed" in capsys.readouterr().out


def test_enough_text_changes_nothing_but_the_sample(data, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("a line of thirty characters...\n" * 45_000)
    assert prepare_text(tmp_path / "book.txt", "--out", "m", "--tokenizer", "bytes") == 0
    files = [f"--{part}_files=data/m/m_{part}_*.bin" for part in ("train", "val")]
    assert printed_command(capsys.readouterr().out) == ["--preset=cpu", *files, "--sample_prompt="]


def test_auto_is_what_this_machine_can_train(data, corpus, monkeypatch, capsys):
    assert prepare_text(corpus, "--out", "n") == 0
    assert "no GPU here: using bytes, for --preset=cpu" in capsys.readouterr().out
    assert sorted(texts_of(data / "n", "train") + texts_of(data / "n", "val")) == sorted(sources(corpus))
    fake_tiktoken(monkeypatch, lambda name: types.SimpleNamespace(encode_ordinary=lambda text: [len(text)]))
    assert prepare_text(corpus, "--out", "n") == 0
    assert (tokens_of(data / "n", "train") == 50256).any()


@pytest.fixture
def copy(tmp_path):
    """copy(command, *more arguments) runs a command in a copy of the trainer; `python` and `python3` are this one."""
    for module in ("tiktoken", "huggingface_hub", "triton"):
        pytest.importorskip(module)  # run.sh would install it
    repo = tmp_path / "repo"
    (repo / "data").mkdir(parents=True)
    for name in ("run.sh", "train_gpt.py", "triton_kernels.py", *(f"data/{name}.py" for name in ("__init__", "checkpoint", "files", "knobs", "loader", "log", "prepare"))):
        shutil.copy(ROOT / name, repo / name)
    (repo / "records").mkdir()
    for module in (ROOT / "records").glob("*.py"):
        shutil.copy(module, repo / "records")
    (tmp_path / "bin").mkdir()
    for name in ("python", "python3"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in ("DATA_PATH", "VIRTUAL_ENV", "TRITON_INTERPRET", "NPROC")}
    env |= {"PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "CUDA_VISIBLE_DEVICES": ""}

    def run(command, *more):
        done = subprocess.run(["bash", "-c", f"{command} {shlex.join(more)}"], cwd=repo, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout
    run.repo = repo
    return run


def readme_commands(file: str, section: str) -> list[str]:
    """The commands of the first bash block after `section`, without comments."""
    block = (ROOT / file).read_text().partition(section)[2].partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    return [line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()]


def test_commands_of_the_other_readme(data, hub, monkeypatch):
    monkeypatch.chdir(data.parent)
    Path("my_folder/deep").mkdir(parents=True)
    for i in range(2):
        Path(f"my_folder/deep/{i}.txt").write_text("a line of thirty characters...\n" * 100)
    commands = readme_commands("data/README.md", "# Token shards")
    for command in commands:
        assert command.startswith("python data/prepare.py ") and prepare.main(shlex.split(command)[2:]) == 0
    assert visible(data) == ["fineweb10B", "mine", "stdlib"] and len(visible(data / "fineweb10B")) == 10
    assert 17e6 < sum(p.stat().st_size for p in (data / "stdlib").iterdir()) < 19e6


def test_the_shard_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec((ROOT / "data/README.md").read_text().partition("```python\n")[2].partition("```")[0], {})
    shard = L.Shard(Path("own_train_000001.bin"), train_gpt.PRESETS["cpu"].model)
    documents = [shard.tokens[start + 1:start + length] for start, length in zip(shard.starts, shard.lengths)]
    assert [bytes(document.astype(np.uint8)) for document in documents] == [b"The first document.\n" * 90, b"The second.\n" * 90]


def test_numbers_of_the_readme():
    """Of the format and of the trainer, where they live."""
    readme = " ".join((ROOT / "data/README.md").read_text().split())
    record, cpu = (train_gpt.PRESETS[name] for name in ("record", "cpu"))
    lengths = [sorted({stage.max_doc_len for stage in config.schedule.stages}) for config in (record, cpu)]
    characters = [prepare.DOCUMENT_CHARACTERS[config.model.bos_id] for config in (record, cpu)]
    for text in ("(%d, later %d; `--preset=cpu`: %d, later %d)" % (*lengths[0], *lengths[1]), f"0 to 3 | {prepare.SHARD_MAGIC},",
                 f"4 to 7 | {prepare.SHARD_VERSION},", f"| {prepare.SHARD_HEADER_BYTES} to 1023 + 2n |",
                 f"0 to 50255 | {record.model.bos_id}, ", f"0 to 255 | {cpu.model.bos_id} |",
                 "%d characters (GPT-2) or %d (bytes)" % tuple(characters), f"there are {prepare.HUB_SHARDS} (",
                 f"data/fineweb10B: {prepare.FINEWEB_SHARDS} training", prepare.HUB_DATASET):
        assert text in readme, text


def test_own_text_to_a_sample_in_the_two_commands_of_the_readme(copy):
    words = random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat", "and", "slept.\n"], k=60_000)
    for i in range(20):
        path = copy.repo / "my_folder" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(words[3000 * i:3000 * (i + 1)]))
    prepare_command, train_command = readme_commands("README.md", "**Your own text**")
    out = copy(prepare_command)
    same = [[arg.partition("=")[0] for arg in shlex.split(line)] for line in (out.splitlines()[-1], train_command)]
    assert same[0] == same[1] and out.splitlines()[-1].startswith("./run.sh --preset=cpu ")
    short = [f"--stage{i}.batch_tokens=1024" for i in (1, 2, 3, 4)]
    short += ["--scheduled_steps=6", "--extension_steps=1", "--sample_tokens=30", "--log_dir=made"]
    for command, prompt in ((out.splitlines()[-1], ""), (train_command, "Once upon")):
        out = copy(command, *short, *([f"--sample_prompt={prompt}"] if prompt else []))
        losses = [float(x) for x in re.findall(r"^step:\d+/7 val_loss:([0-9.]+)", out, re.M)]
        assert len(losses) == 2 and losses[1] < losses[0] - 0.5
        sample = out.partition("\nsample:\n")[2].partition("\nfinal_val_loss:")[0]
        assert sample.startswith(prompt) and len(sample) > 10
    assert len(list((copy.repo / "made").glob("*.txt"))) == 2
