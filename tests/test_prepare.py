"""data/prepare.py: what it writes, what it refuses, and that nothing unfinished ever carries a shard's name."""

import math
import random
import struct
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "data"), str(ROOT)]
import prepare  # noqa: E402
from train_gpt import read_shard_header  # noqa: E402


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty folder that takes the place of data/."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(prepare, "DATA", folder)
    return folder


def shard_bytes(tokens) -> bytes:
    """A shard written down from the format's description, not by the code under test."""
    return struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens)


def tokens_of(folder: Path, part: str) -> np.ndarray:
    paths = sorted(folder.glob(f"*_{part}_*.bin"))
    for path in paths:
        read_shard_header(path)
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
    """Stands in for hub_fetch. `act[name]` replaces the normal answer for one file."""

    def __init__(self):
        self.asked, self.act = [], {}

    @staticmethod
    def content(name: str) -> bytes:
        return shard_bytes([50256, 7, int(name[-7:-4]), 50256, 9])

    def __call__(self, name, folder):
        self.asked.append(name)
        folder.mkdir(parents=True, exist_ok=True)
        if name in self.act:
            return self.act[name](name, folder)
        (folder / name).write_bytes(self.content(name))
        return folder / name, len(self.content(name))


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(prepare, "hub_fetch", hub)
    return hub


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
    assert capsys.readouterr().out.count("already there") == 10


def test_fineweb_continues_after_an_interruption(data, hub, capsys):
    def interrupted(name, folder):
        (folder / name).write_bytes(hub.content(name)[:-4])
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


@pytest.mark.parametrize("content, size, expected", [
    # Its header agrees with its length, so only the hub's size tells that tokens are missing.
    (shard_bytes([50256, 1]), len(shard_bytes([50256, 1, 2])), "1028 bytes arrived, the hub has 1030"),
    # The size is right, so only the header tells.
    (b"<html>" + bytes(2000), 2006, "magic number"),
    (shard_bytes([50256, 1])[:-1], 1027, "header promises 2 tokens"),
])
def test_fineweb_refuses_a_damaged_download(data, hub, capsys, content, size, expected):
    def damaged(name, folder):
        (folder / name).write_bytes(content)
        return folder / name, size
    name = "fineweb_train_000001.bin"
    hub.act[name] = damaged
    assert prepare.main(["fineweb", "--shards", "1"]) == 1
    error = one_line(capsys)
    assert name in error and expected in error and "run this again" in error
    assert not list(data.rglob(name)), "neither under its name nor where the hub's client would take it for finished"


@pytest.mark.parametrize("damage", [lambda b: b[:-2], lambda b: b"\0" + b[1:], lambda b: b[:100]])
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


def test_fineweb_without_network_is_one_clear_line(data, hub, capsys):
    def offline(name, folder):
        raise ConnectionError("name or service\nnot known")
    hub.act["fineweb_val_000000.bin"] = offline
    assert prepare.main(["fineweb"]) == 1
    error = one_line(capsys)
    assert "fineweb_val_000000.bin: cannot be fetched" in error and "see to the network" in error
    assert hub.asked == ["fineweb_val_000000.bin"]
    assert not list(data.rglob("*.bin"))


@pytest.mark.parametrize("shards", ["0", "104", "-1"])
def test_fineweb_knows_how_many_shards_there_are(data, hub, capsys, shards):
    assert prepare.main(["fineweb", f"--shards={shards}"]) == 1
    assert "1 to 103" in one_line(capsys) and not hub.asked


def test_hub_fetch_asks_for_the_public_dataset(tmp_path, monkeypatch):
    calls = []
    fake = types.ModuleType("huggingface_hub")
    fake.hf_hub_url = lambda repo, name, repo_type: (repo, name, repo_type)
    fake.get_hf_file_metadata = lambda url: types.SimpleNamespace(size=12, url=calls.append(url))

    def download(repo, name, repo_type, local_dir):
        calls.append((repo, name, repo_type))
        return str(Path(local_dir) / name)
    fake.hf_hub_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert prepare.hub_fetch("a.bin", tmp_path) == (tmp_path / "a.bin", 12)
    assert calls == [("kjj0/fineweb10B-gpt2", "a.bin", "dataset")] * 2


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
    sizes = [read_shard_header(p) for p in sorted(folder.glob("*_train_*"))]
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
    (["{}/empty", "--out", "n"], "0 usable text files"),
    (["{}/binary", "--out", "n"], "0 usable text files"),
    (["{}/one.txt", "--out", "n"], "1 usable text files: at least two"),
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
    (source / "two.txt").write_text("two")
    assert prepare_text(*(a.format(source) for a in argv), "--tokenizer", "bytes") == 1
    assert expected in one_line(capsys)
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
    for damage in (lambda: shard.write_bytes(first[shard.name][:-2]), (folder / "stdlib_val_000000.bin").unlink):
        damage()
        assert prepare.main(["stdlib"]) == 0
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == first
    assert "damaged, building it again" in capsys.readouterr().out


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
    assert prepare.main(["text", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--out", "long", "--tokenizer", "bytes"]) == 0
    tokens = np.fromfile(prepare.DATA / "long" / "long_train_000001.bin", "<u2", offset=1024)
    lengths = np.diff(np.flatnonzero(tokens == 256), append=len(tokens))
    assert len(lengths) == 4 and lengths.max() <= 1001 + 31 and lengths.sum() == 3100 + 4
