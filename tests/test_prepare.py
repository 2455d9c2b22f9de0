"""data/prepare.py: what it writes, what it refuses, and that nothing unfinished ever has a shard's name."""

import hashlib
import http.server
import json
import math
import os
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
import threading
import tracemalloc
import types
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import train_gpt
from data import loader as L
from data import prepare
from data.facts import facts_of_run, read_facts
from data.run.config import with_knobs
from data.run.length import stage_starts
from data.run.machine import Runtime
from data.run.memory import possible_micro_batches
from data.run.program import UserError
from data.run.start import survey_training_data, tokens_and_passes
from data.shards import read_shard_header

ROOT = Path(prepare.__file__).resolve().parents[1]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty folder that takes the place of data/; prepare.py sees no GPU, whatever machine runs the tests."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tmp_path / "data"


@pytest.fixture
def tiny(data, monkeypatch):
    """`data`, for texts that are too small for a run."""
    monkeypatch.setattr(prepare, "training_command", lambda *arguments: "")
    return data


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


# ---- FineWeb, from a stand-in for the hub ----------------------------------------------------------------------------
OFFLINE = ConnectionError("name or service\nnot known")
NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in (1, 2))]
FINEWEB = ["fineweb", "--shards", "2"]


@pytest.fixture
def hub(monkeypatch):
    """Stands in for hub_fetch and gpt2_bpe. has: contents that differ from `shard`; sends: what arrives in place of a
    file, bytes or an error in the middle; asked: the files that were fetched."""
    hub = types.SimpleNamespace(has={}, sends={}, asked=[], tokenizer=Mock())
    hub.shard = lambda name: hub.has.get(name) or shard_bytes([50256, 7, int(name[-7:-4]), 50256, 9])

    def fetch(name, folder):
        hub.asked.append(name)
        folder.mkdir(parents=True, exist_ok=True)
        sent = hub.sends.get(name, hub.shard(name))
        (folder / name).write_bytes(sent if isinstance(sent, bytes) else hub.shard(name)[:1000])
        if not isinstance(sent, bytes):
            raise sent
        return folder / name, hashlib.sha256(hub.shard(name)).hexdigest()
    monkeypatch.setattr(prepare, "gpt2_bpe", hub.tokenizer)
    monkeypatch.setattr(prepare, "hub_fetch", fetch)
    return hub


def test_fineweb_continues_where_it_stopped(data, hub, capsys):
    """Only missing files are fetched again. Without a tokenizer there is a warning."""
    hub.sends = {NAMES[1]: KeyboardInterrupt()}
    assert prepare.main(FINEWEB) == 130 and capsys.readouterr().err == "interrupted; run the same command again\n"
    assert [path.name for path in (data / "fineweb10B").glob("*.bin")] == NAMES[:1]
    hub.sends, hub.asked = {}, []
    assert prepare.main(FINEWEB) == 0 and hub.asked == NAMES[1:] and hub.tokenizer.call_count == 1
    assert contents(data / "fineweb10B") == {name: hub.shard(name) for name in NAMES}
    assert "6 documents, 10 training and 5 validation tokens in 2 + 1 shards" in capsys.readouterr().out
    hub.sends, hub.tokenizer.side_effect = dict.fromkeys(NAMES, OFFLINE), UserError("no GPT-2 tokenizer")
    assert prepare.main(FINEWEB) == 0 and capsys.readouterr().err == "warning: no GPT-2 tokenizer; a run needs it\n"


@pytest.mark.parametrize("has, sends, expected", [
    (shard_bytes([50256, 1, 2]), shard_bytes([50256, 1, 3]), "SHA-256 [0-9a-f]{64}, the hub has [0-9a-f]{64}"),
    # The bytes that the hub has, but no shard.
    (b"<html>" + bytes(2000), None, "magic number"), (shard_bytes([50256, 1])[:-1], None, "header promises 2 tokens"),
    (shard_bytes([50256, 50257]), None, "token 50257")])
def test_fineweb_refuses_a_damaged_download(data, hub, capsys, has, sends, expected):
    hub.has[NAMES[1]], hub.sends[NAMES[1]] = has, sends or has
    assert prepare.main(["fineweb", "--shards", "1"]) == 1
    assert re.match(rf"error: {NAMES[1]}: the download is damaged .*{expected}.*; run this again$", one_line(capsys))
    assert not list(data.rglob(NAMES[1]))  # the hub's client would take a file under this name for finished


@pytest.mark.parametrize("damage", [
    lambda b: b[:-2], lambda b: b"\0" + b[1:], lambda b: b[:100], lambda b: b[:-2] + b"\xff\xff"])
def test_fineweb_replaces_a_damaged_file(data, hub, capsys, damage):
    """Without a network, the damage is an error, and the file is gone."""
    path = data / "fineweb10B" / NAMES[2]
    assert prepare.main(FINEWEB) == 0
    for sends, status in ({}, 0), ({path.name: OFFLINE}, 1):
        path.write_bytes(damage(path.read_bytes()))
        hub.sends, hub.asked = sends, []
        assert prepare.main(FINEWEB) == status and hub.asked == [path.name] and path.exists() == (status == 0)
        out, err = capsys.readouterr()
        assert f"damaged, fetching it again: {path}" in out and f"{NAMES[0]}: already there\n" in out
    assert err == (f"error: {path.name}: cannot be fetched from the hub (ConnectionError: name or service not known);"
                   " see to the network and run this again, what is finished is kept\n")


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
    assert second.returncode == 0 and second.stdout.count("already there") == 2, second
    sent = [first for name, first in requests if name == one]
    assert [name for name, _ in requests] == [val, *[one] * len(sent), two, two]
    assert sent[0] == 0 and len(sent) == 2 and sent[1] in (0, 5000)  # an older client starts the file again
    assert contents(data / "fineweb10B") == content


# ---- Text ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def corpus(tmp_path):
    """Thirty small documents in nested folders, with letters of several alphabets and both kinds of line ends."""
    rng, root = random.Random(0), tmp_path / "corpus"
    for i in range(30):
        path = root / ("abc"[i % 3] + "/deep" * (i % 2)) / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes("".join(rng.choices("abc éß漢\r\n", k=rng.randint(20, 200))).encode() + b"x%d" % i)
    return root


def sources(root: Path) -> dict[str, str]:
    """{name: text} in the order of the names, without the code under test."""
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.txt"))
    return {name: (root / name).read_bytes().decode() for name in names}


def prepare_text(*argv, tokenizer="bytes") -> int:
    return prepare.main(["text", *map(str, argv), "--tokenizer", tokenizer])


def prepare_files(files: dict[str, str | bytes], *argv, tokenizer="bytes") -> int:
    """`prepare_text` for a folder of these files, {name: content}; the shards are data/n."""
    folder = Path(os.environ["DATA_PATH"]) / "texts"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return prepare_text(folder, "--out", "n", *argv, tokenizer=tokenizer)


def by_hash(texts: dict[str, str]) -> list[str]:
    """Texts of one document each, {name: text}, in the order of the shards."""
    return [texts[name] for name in sorted(
        texts, key=lambda name: hashlib.blake2b(f"{name} 0".encode(), digest_size=8).digest())]


def test_bytes_round_trip_shuffled_and_split_by_file(tiny, corpus, tmp_path, capsys, monkeypatch):
    """Of 30 files, whole ones validate. The same files give the same shards, anywhere."""
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 700)
    argv = "--out", "mine", "--val-fraction", 0.2
    assert prepare_text(corpus, *argv) == 0
    folder, texts = tiny / "mine", sources(corpus)
    train, val = texts_of(folder, ["train"]), texts_of(folder, ["val"])
    assert len(val) >= 2 and len(train) + len(val) == 30
    assert val == [text for text in texts.values() if text in val] and val != by_hash(texts)[:len(val)]
    assert train == by_hash({name: text for name, text in texts.items() if text not in val})
    share, whole = sum(map(len, val)), sum(map(len, texts.values()))
    assert 0.2 * whole <= share < 0.2 * whole + 206  # the share, plus less than one document
    shards = sorted(folder.glob("*_train_*"))
    sizes = [read_shard_header(path) for path in shards]
    assert len(sizes) > 2 and all(300 < size <= 700 for size in sizes[:-1])
    assert all(np.fromfile(path, "<u2", 1, offset=1024) == 256 for path in shards)
    out = capsys.readouterr().out
    assert (f"mine: 30 documents, {sum(sizes):,} training and {len(tokens_of(folder, 'val')):,} validation tokens in"
            f" {len(sizes)} + 1 shards\nvalidation: {len(val)} of 30 files: '") in out
    before = contents(tiny)
    shutil.copytree(corpus, tmp_path / "copy")
    (tmp_path / "link").symlink_to("copy")
    for paths in [corpus, corpus / "a"], [tmp_path / "link"]:  # "a" is named twice
        assert prepare_text(*paths, *argv) == 0 and contents(tiny) == before
    assert "files and folders that are named twice" in capsys.readouterr().out
    # A second build leaves no shard of the first.
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 7000)
    assert prepare_text(corpus, "--out", "mine") == 0
    assert sorted(contents(tiny)) == ["mine/mine.json", "mine/mine_train_000001.bin", "mine/mine_val_000000.bin"]


def test_unigram_of_the_training_text(tiny, corpus, capsys):
    """Its entropy, and its score on the validation text, with one added to every count."""
    (corpus / "b/10.txt").write_text("LETTERS THAT ONLY THIS FILE HAS, WHICH VALIDATES")
    assert prepare_text(corpus, "--out", "n", "--val-fraction", "0.3") == 0
    train, val = (tokens_of(tiny / "n", part).tolist() for part in ("train", "val"))
    entropy = -sum(train.count(x) / len(train) * math.log(train.count(x) / len(train)) for x in set(train))
    loss = -sum(math.log((train.count(x) + 1) / (len(train) + 257)) for x in val) / len(val)
    assert set(val) - set(train) and entropy < loss - 0.1
    assert (f"unigram entropy: {entropy:.4f} nats/token of the training text; its unigram scores {loss:.4f} on the"
            " validation text") in capsys.readouterr().out
    facts = read_facts(tiny / "n")
    assert abs(facts["unigram_entropy"] - entropy) + abs(facts["unigram_loss"] - loss) < 2e-6


def test_shards_are_what_the_format_says(tiny, tmp_path):
    """And two files of one name in two folders are two documents. A mark is dropped, and line ends stay."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("hi " + name)
    assert prepare_text(tmp_path / "a", tmp_path / "b", "--out", "n") == 0
    made = {path.read_bytes() for path in (tiny / "n").glob("*.bin")}
    assert made == {shard_bytes([256, *b"hi a"]), shard_bytes([256, *b"hi b"])}
    assert prepare_files({"a": "\ufeffone\r\ntwo\r", "b": "a\ufeff\n"}) == 0
    assert sorted(texts_of(tiny / "n")) == ["a\ufeff\n", "one\r\ntwo\r"]


def test_tokenizers(tiny, corpus, monkeypatch, capsys):
    """auto: bytes without a GPU or without GPT-2's files. Ids above the signed range survive."""
    gpt2 = types.SimpleNamespace(encode_ordinary=lambda text: [50255, len(text)])
    tiktoken = types.SimpleNamespace(get_encoding={"gpt2": gpt2}.get)
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken)
    argv, texts = (corpus, "--out", "n"), sorted(sources(corpus).values())
    assert prepare_text(*argv, tokenizer="auto") == 0 and sorted(texts_of(tiny / "n")) == texts
    assert "no GPU here: using bytes, for --preset=cpu" in capsys.readouterr().out
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert prepare_text(*argv, tokenizer="auto") == 0
    assert sorted(documents_of(tiny / "n", separator=50256)) == sorted([50255, len(t)] for t in texts)
    tiktoken.get_encoding = Mock(side_effect=OFFLINE)
    assert prepare_text(*argv, tokenizer="auto") == 0 and sorted(texts_of(tiny / "n")) == texts
    none = "no GPT-2 tokenizer (ConnectionError): tiktoken fetches it once, online"
    assert f"{none}; using bytes instead, separator 256\n" in capsys.readouterr().out
    assert prepare_text(*argv, tokenizer="gpt2") == 1
    assert one_line(capsys) == f"error: {none}; or use --tokenizer bytes\n"


@pytest.mark.parametrize("texts, length, chosen", [
    (500, 1000, "--preset=single --train_tokens=380000 "),  # a shard fills a row of the largest batch: the GPU chooses
    (100, 50, "--preset=single --train_tokens=27e6 ")])  # less than the shortest run
def test_the_command_for_large_and_small_texts(data, monkeypatch, capsys, texts, length, chosen):
    gpt2 = types.SimpleNamespace(encode_ordinary=lambda text: [int(text)] * length)
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding={"gpt2": gpt2}.get))
    assert prepare_files({f"{i}.txt": str(i) for i in range(texts)}, tokenizer="gpt2") == 0
    *_, title, command = capsys.readouterr().out.splitlines()
    assert f"/run.sh {chosen}" in command and "micro_batches" not in command
    assert re.match(f"NPROC=1 DATA_PATH={data.parent} [^ ]*run.sh ", command) and "several GPUs" in title


def test_the_command_for_many_tiny_documents_together(data, monkeypatch, capsys):
    """The micro-batches hold them, whatever number of micro-batches the GPU gets."""
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=lambda name: types.SimpleNamespace(
        encode_ordinary=lambda text: [7] * int(text))))
    files = {f"{i:04d}.txt": "1000" if i % 100 == 0 else "1" for i in range(2000)}
    assert prepare_files(files, "--val-fraction", "0.1", tokenizer="gpt2") == 0
    words = [word for word in shlex.split(capsys.readouterr().out.splitlines()[-1]) if word.startswith("--")]
    config = train_gpt.parse_config([*words, "--bigram_normal=false"])  # which would need GPT-2's tokenizer
    assert config.system.micro_batches == 0
    for count in possible_micro_batches(config, 1):
        given = with_knobs(config, micro_batches=count)
        plans = [train_gpt.make_plan(given, 0)] * 3
        loader = L.Loader(given, Runtime(0, 1, torch.device("cpu")), plans, warn=print, hash_ids=None)
        for _ in range(3 * count):
            loader.next_batch()


def pieces(*parts, size=(350, 437)) -> list[str]:
    return [*prepare.cut([*parts], lambda text: size)]


@pytest.mark.parametrize("text, lengths", [
    ("a" * 1000, [437, 437, 126]), ("a" * 400 + "\n" + "b" * 300, [401, 300]), ("a" * 437 + "\n", [438]),
    ("a" * 350 + "\n" + "b" * 40 + "\n", [351, 41]), ("a" * 349 + "\n" + "b" * 40 + "\n", [391]),
    ("a" * 360 + "\r" + "b" * 50 + " " + "c" * 50, [361, 101]), ("ab " * 200, [351, 249]),
    ("a" * 436 + "\r\n" + "b" * 9, [438, 9]), ("a" * 437 + "\r\n" + "b" * 9, [439, 9]), ("a" * 400 + " b", [402])])
def test_a_document_ends_at_a_line_end_a_space_or_anywhere(text, lengths):
    """In this order, and never between CR and LF, however the text arrives."""
    assert list(map(len, pieces((text, False)))) == lengths and "".join(pieces((text, False))) == text
    assert pieces(*((letter, False) for letter in text)) == pieces((text, False))


@pytest.mark.parametrize("line", ["ein Satz ohne Ende, " * 90_000, "漢字" * 300_000, "a" * 2**21, "word\r" * 300_000,
                                  ("word " * 150 + "\n") * 2000, "дом\r\n" * 200_000, "a\u0301 " * 500_000],
                         ids=["spaces", "Chinese", "letters", "CR", "paragraphs", "CRLF", "accents"])
def test_the_loader_drops_next_to_nothing(data, line):
    """The first stage of cpu takes 448 tokens of a document: of any text, in one line or many, nearly all."""
    assert prepare_files({"text.txt": line}) == 0
    documents = documents_of(data / "n")
    assert sum(min(447, len(d)) for d in documents) > 0.99 * sum(map(len, documents)) == 0.99 * len(line.encode())
    assert sorted(map(len, documents))[len(documents) // 2] >= 340 and all(bytes(d).decode() for d in documents)


def test_documents_of_a_mixed_folder_are_equally_long(data):
    """And those of a file whose second million of characters is of another language."""
    chinese = "漢字漢字\n"
    assert prepare_files({"a": "two words\n" * 9000, "b": chinese * 9000, "c": "few\n" * 2**18 + chinese * 9**5}) == 0
    lengths = sorted(map(len, documents_of(data / "n")))
    assert 345 < lengths[len(lengths) // 100] and lengths[-len(lengths) // 100] < 380


@pytest.mark.parametrize("name, line", [
    ("a", "a line {:20}\n"), ("b", "one line {:20} "), ("c.jsonl", '{{"text": "{:3000}"}}\n')])
def test_the_memory_does_not_hold_the_text(data, tmp_path, name, line):
    """Neither the text, its tokens (twice the text) nor a list of the documents (more)."""
    (tmp_path / name).write_text("".join(map(line.format, range(10**7 // len(line.format(10**5))))))
    tracemalloc.start()
    prepare.build("n", {name: tmp_path / name}, "bytes", 0.05, 10**8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.8 * (tmp_path / name).stat().st_size


def test_what_is_no_text_is_skipped_counted_and_named(tiny, corpus, tmp_path, capsys, monkeypatch):
    texts = sorted(sources(corpus).values())
    (corpus / ".git").mkdir()
    for name, content in {
            "utf16": "text".encode("utf-16"), "latin1": b"\xe9", "jis": "漢字".encode("shift-jis"), "nothing": b"",
            "blank": b" \n\t\n", "mark": b"\xef\xbb\xbf", "le": "a text\n".encode("utf-16-le"), "nul": b"a text\0",
            "be": "ein Text\n".encode("utf-16-be"), "utf32": "text".encode("utf-32-le"), ".hidden": b"hidden",
            ".git/HEAD": b"ref", "closed": b"a text", "late": b"a" * 3 * 2**20 + b"\0"}.items():
        (corpus / name).write_bytes(content)
    os.mkfifo(corpus / "pipe")
    (corpus / "nowhere").symlink_to("nothing there")
    (corpus / "itself").symlink_to("itself")
    opened = open
    monkeypatch.setattr("builtins.open", lambda path, *args, **options: opened(
        tmp_path / "no folder" / "file" if Path(path).name == "closed" else path, *args, **options))
    assert prepare_text(corpus, "--out", "n") == 0 and sorted(texts_of(tiny / "n")) == texts
    assert sorted(re.findall("^warning: (.*)$", capsys.readouterr().out, re.M)) == [
        "skipped 1 files that cannot be read, such as 'closed'",
        "skipped 2 hidden files and folders, such as '.git', '.hidden'",
        "skipped 3 empty files, such as 'blank', 'mark', 'nothing'",
        "skipped 3 that are no files (links to nothing, pipes, devices), such as 'itself', 'nowhere', 'pipe'",
        "skipped 8 files that are not UTF-8, or have NULs (binary, or another encoding), such as 'be', 'jis', 'late'"]


def test_links_are_followed_once(tiny, tmp_path, capsys):
    """Also a link to a folder outside, but no link that contains itself."""
    root, big = tmp_path / "text", tmp_path / "outside" / "big"
    (root / "sub" / "deep").mkdir(parents=True), (big / "sub").mkdir(parents=True)
    for name in root / "a", root / "sub" / "b", big / "c", big / "sub" / "d":
        name.write_text(f"text of {name.name}\n" * 9)
    for link, target in {"one": big, "two": big, "sub/deep/up": root, "sub/deep/above": tmp_path, "same": root / "a",
                         "three": "one"}.items():
        (root / link).symlink_to(target)
    assert prepare_text(root, "--out", "n") == 0
    assert {text.split("\n")[0][-1] for text in texts_of(tiny / "n")} == {*"abcd"}
    assert len(texts_of(tiny / "n")) == 4  # each once
    assert f"warning: {prepare.TWICE.format(5)}, such as " in capsys.readouterr().out


def test_odd_names(tiny, tmp_path, capsys):
    """Names of bytes, with line ends, letters and accents apart: no error, and the order of letters with accents."""
    accents = [("é", "e\u0301"), ("ü", "u\u0308"), ("ö", "o\u0308"), ("ä", "a\u0308"), ("à", "a\u0300")]
    orders = []
    for form in 0, 1:
        folder = tmp_path / str(form)
        folder.mkdir()
        for i, names in enumerate(accents):
            (folder / names[form]).write_text(f"text {i}")
        assert prepare_text(folder, "--out", "n") == 0
        orders.append(texts_of(tiny / "n"))
    assert orders[0] == orders[1]
    if sys.platform == "darwin":
        return  # its names are text
    for name in b"a\nb", b"\xff", b"\xfe", b"a 1", b"'":
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"" if name == b"\xff" else b"text")
    assert prepare_text(folder, "--out", "n") == 0 and len(texts_of(tiny / "n")) == 9
    assert "skipped 1 empty files, such as '\\udcff'\n" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_of_its_own_ends_documents(tiny, capsys, end):
    mark = "<|endoftext|>"
    stories = [f"story {i}{end}" for i in range(200)] + [f"not {mark}{end}", f"{mark}not{end}", f"end{mark} {end}"]
    assert prepare_files({"text": f"{mark}{end}" + f" \t{mark} {end}".join(stories) + mark}) == 0
    assert sorted(texts_of(tiny / "n")) == sorted(stories)
    assert "\n204 lines <|endoftext|> end documents\n" in "\n" + capsys.readouterr().out


def test_lines_of_json(tiny, capsys):
    """The field `text` of a line is a document; what has none is counted; a file without such lines stays as it is."""
    lines = ["one", "zwei\nzwei", "drei <|endoftext|>", "v\n<|endoftext|>\nw", "a" * 500, "  "]
    bad = ['{"text": 1}', '{"text": null}', "{broken", '{"no": "text"}', "[1]", "7", '"text"', '{"text": "\\ud800"}',
           '{"text": "\\u0000"}', "[" * 10**5]
    content = "\ufeff" + "\n\n".join([json.dumps({"id": 1, "text": text}) for text in lines * 2] + bad) + "\n"
    raw = {"d.json": '{"other": "field"}\n', "e": '{"a": 1}\n{"a": 2}\n', "f.json": '{\n "text": "x"\n}\n'}
    assert prepare_files({"a.jsonl": content, "b.txt": '{"text": "five"}\r\n{"text": "six"}', "c.json": (
        '[\n{"text": "eight"},\n{"text": "nine"},\n{"no": 1},\n{"no": 1},\n{"no": 1}]\n'), **raw}) == 0
    documents = ["one", "zwei\nzwei", "drei <|endoftext|>", "v\n", "w", "a" * 437, "a" * 63] * 2
    assert sorted(texts_of(tiny / "n")) == sorted([*documents, "five", "six", "eight", "nine", *raw.values()])
    out = capsys.readouterr().out
    assert "warning: skipped 13 lines of JSON without a text in the field `text`, such as 'a.jsonl', 'c.json'\n" in out
    assert "JSON: 16 texts in the field `text`" in out
    assert "warning: took 3 files of JSON as they are, for no line has a text in a field `text`, such as" in out


@pytest.mark.parametrize("how", ["shard", "older", "facts"])
def test_shards_that_cannot_be_exchanged_stay(tiny, capsys, how):
    """A folder in the place of a file: one line, and what was there stays."""
    text = {"a.txt": "line\n" * 500}
    assert prepare_files(text) == 0
    place = tiny / "n" / {"shard": "n_train_000001.bin", "older": "n_train_000009.bin", "facts": "n.json"}[how]
    place.unlink(missing_ok=True)
    place.mkdir()
    before = {path: os.path.isdir(path) or path.read_bytes() for path in (tiny / "n").iterdir()}
    capsys.readouterr()
    assert prepare_files(text) == 1
    assert re.fullmatch(f"error: .*{place.name} is a folder: remove it, .*\n", capsys.readouterr().err)
    assert before == {path: os.path.isdir(path) or path.read_bytes() for path in (tiny / "n").iterdir()}


def test_text_beside_its_shards(data, capsys):
    """A second build is equal to the first, whose files are no text. A file of the user stays."""
    (data / "n").mkdir()
    (data / "n/text.txt").write_text("".join(f"line {i}\n" for i in range(20_000)))
    built = [(prepare_text(data / "n", "--out", "n"), contents(data)) for _ in range(2)]
    assert built[0] == built[1] and built[0][0] == 0
    (data / "n/n_val_mine.bin").write_text("my notes")
    assert prepare_text(data / "n", "--out", "n") == 1
    assert "n_val_mine.bin: --out n would replace this file" in one_line(capsys)


@pytest.mark.parametrize("count, large, reason", [
    (1, 1, "there are fewer than 20 files"), (19, 19, "there are fewer than 20 files"), (20, 20, ""),
    (21, 1, "whole files do not make up this share")])
def test_from_twenty_files_on_whole_files_validate(data, capsys, count, large, reason):
    """The documents of fewer files, or of small ones beside a large one, represent all of them."""
    files = {f"{i}.txt": f"file {i}.\n" * (60_000 // large if i < large else 1) for i in range(count)}
    assert prepare_files(files, "--val-fraction", "0.1") == 0
    train, val = ({re.search(r"\d+", text)[0] for text in texts_of(data / "n", [part])} for part in ("train", "val"))
    line = re.search("^validation: (.*)$", capsys.readouterr().out, re.M)[1]
    lengths = [len(tokens_of(data / "n", part)) for part in ("val", "train")]
    assert 0.099 < lengths[0] / sum(lengths) < 0.13
    if not reason:
        assert train.isdisjoint(val) and len(train) + len(val) == count
        assert line == f"{len(val)} of {count} files: " + ", ".join(f"'{i}.txt'" for i in sorted(val))
    else:
        assert count > large or val == train == {*map(str, range(count))}
        assert re.fullmatch(rf"\d+ documents of all files, chosen by a hash, since {reason}", line)


@pytest.mark.parametrize("argv, expected", [
    ("text {}/missing --out n", "missing: no such file or folder"),
    ("text {}/empty --out n", "0 characters of text in 0 usable files"),
    ("text {}/one.txt --out n", "3 characters of text in 1 usable files: more text is needed"),
    ("text {}/../data/n --out n", "n_train_000001.bin: --out n would replace this file"),
    ("text {}/line.txt --out n", "no run can start on this text: .* use more data"),
    ("text {}/lines.txt --out n --val-fraction 0.9999", "no run can start on this text: .* use more data"),
    ("text {} --out stdlib", "--out stdlib: .* take another"), ("text {} --out ../n", "--out ../n"),
    ("text {} --out n --val-fraction nan", "--val-fraction nan"), ("text {} --out n --val-fraction 1", "--val-f"),
    ("fineweb --shards=104", "1 to 103"), ("stdlib", "only 0 bytes of library sources")])
def test_errors_are_one_line_and_change_nothing(data, tmp_path, capsys, monkeypatch, argv, expected):
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "one.txt").write_text("one"), (source / "line.txt").write_text("x" * 1000)
    (source / "lines.txt").write_text("a line\n" * 9000)
    (data / "n").mkdir()
    (data / "n" / "n_train_000001.bin").write_text("of an earlier build")
    before = contents(data)
    monkeypatch.setattr(prepare.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    assert prepare.main(argv.format(source).split() + ["--tokenizer", "bytes"] * argv.startswith("text")) == 1
    assert re.search(expected, one_line(capsys)) and contents(data) == before and os.listdir(data) == ["n"]
    assert not (tmp_path / "n").exists()


def test_a_file_that_changes_meanwhile(tiny, corpus, monkeypatch, capsys):
    """Between the first and the second reading."""
    survey = prepare.survey
    monkeypatch.setattr(prepare, "survey", lambda files: [survey(files), (corpus / "a/0.txt").write_bytes(b"\xff")][0])
    assert prepare_text(corpus, "--out", "n") == 1 and not list(tiny.iterdir())
    assert one_line(capsys) == "error: 'a/0.txt' has changed meanwhile; run the same command again\n"


@pytest.mark.parametrize("stop, status", [(KeyboardInterrupt, 130), (OSError("disk full"), 1)])
def test_an_interrupted_build_leaves_what_was_there(tiny, corpus, monkeypatch, stop, status):
    """No shard changes before all are written. Then the validation shard loses its name first and gets it last."""
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 900)
    assert prepare_text(corpus, "--out", "n") == 0
    before = contents(tiny)

    def build(tokens, where, name, after):
        """The files that are left by a build that stops in call number `after` of a function, counted from 0."""
        call, calls = getattr(where, name), iter(range(after))

        def interrupted(*args, **options):
            if next(calls, None) is None:
                raise stop
            return call(*args, **options)
        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupted)
            patch.setattr(prepare, "SHARD_TOKENS", tokens)
            assert prepare_text(corpus, "--out", "n") == status and list(calls) == []
        return contents(tiny)
    assert build(400, np, "array", 3) == before  # while shards are written
    assert "n/n.json" not in build(900, Path, "unlink", 1)
    assert "n/n_val_000000.bin" not in build(900, Path, "unlink", 2)
    for after in range(4):
        left = build(900, os, "replace", after)
        assert len([name for name in left if "train" in name]) == after and "n/n_val_000000.bin" not in left


# ---- The embedded default --------------------------------------------------------------------------------------------
def test_stdlib_is_complete_deterministic_and_not_built_twice(data, monkeypatch, capsys):
    files, build, folder = {}, prepare.build, data / "stdlib"
    monkeypatch.setattr(prepare, "build", lambda name, found, *rest: files.update(found) or build(name, found, *rest))
    assert prepare.main(["stdlib"]) == 0
    first, val = contents(folder), tokens_of(folder, "val")
    train, out = tokens_of(folder, "train"), capsys.readouterr().out
    assert len(list(folder.glob("*_train_*"))) >= 2 and len(val) >= 300_000
    assert 0.9 * prepare.STDLIB_BYTES < len(train) + len(val) < 1.1 * prepare.STDLIB_BYTES
    lengths = sum(path.stat().st_size for path in files.values())
    assert (train < 256).sum() + (val < 256).sum() == lengths and (train == 256).sum() > 300
    assert 2.5 < read_facts(folder)["unigram_entropy"] < 4 and " files: " in out

    # From all over the library; the round trip above has the order and the division.
    assert list(files) == sorted(files) and not any({"test", "site-packages"} & {*Path(key).parts} for key in files)
    assert len({key.split("/")[0] for key in files}) > 100

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "build", None)
        assert prepare.main(["stdlib"]) == 0 and "already there" in capsys.readouterr().out
    shard, facts = folder / "stdlib_train_000002.bin", folder / "stdlib.json"
    for damage, reason in {
            lambda: shard.write_bytes(first["stdlib_train_000002.bin"][:-2] + b"\x01\x01"): "token 257",
            shard.unlink: "stdlib_train_000002.bin is missing", facts.unlink: "no stdlib.json; if an older",
            lambda: shard.with_name("stdlib_train_000004.bin").touch(): "stdlib_train_000004.bin is of another build",
            lambda: shard.write_bytes(shard_bytes([256, 1])): "stdlib_train_000002.bin has 2 tokens instead of ",
            lambda: facts.write_text(facts.read_text().replace('"order": 2', '"order": 1')): "another version",
            lambda: facts.write_text("{"): "stdlib.json is damaged"}.items():
        damage()
        capsys.readouterr()
        assert prepare.main(["stdlib"]) == 0 and contents(folder) == first
        assert re.search(f"^building it again: .*{reason}", capsys.readouterr().out, re.M)


def test_the_trainer_meets_shards_of_an_older_program(tiny, corpus):
    """One line with the command; shards of other names, as of FineWeb, have no such file."""
    assert prepare_text(corpus, "--out", "mine") == 0
    config = train_gpt.parse_config(["--preset=cpu", "--val_files=data/mine/mine_val_*.bin"])
    facts, warning = facts_of_run(config)
    assert facts["validation"].startswith("2 of 30 files") and not warning
    (tiny / "mine" / "mine_train_000001.bin").unlink()
    assert facts_of_run(config) == (None, "mine_train_000001.bin is missing; make it again: python data/prepare.py text"
                                          " PATH --out mine")
    (tiny / "mine" / "mine.json").unlink()
    facts, warning = facts_of_run(config)
    assert facts is None and "order of the files' names" in warning and "text PATH --out mine" in warning
    (tiny / "mine" / "mine_val_000000.bin").rename(tiny / "mine" / "fineweb_val_000000.bin")
    assert facts_of_run(train_gpt.parse_config(["--val_files=data/mine/fineweb_val_*.bin"])) == (None, "")


# ---- From text to a sample -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count, size", [(2, 340), (1, 20_000), (300, 300), (1, 1_500_000)])
def test_the_printed_command_fits_the_text(data, capsys, count, size):
    """The loader gives batches of all stages to the end of the shards and on. size: characters of each file."""
    status = prepare_files({f"{i}.txt": (f"line {i}\n" * size)[:size] for i in range(count)})
    if count == 2:  # 340 tokens cannot fill a micro-batch of 1024
        assert status == 1 and "use more data" in one_line(capsys) and not contents(data)
        return
    out, available = capsys.readouterr().out, len(tokens_of(data / "n", "train"))
    _, script, *arguments = shlex.split(out.splitlines()[-1])
    assert (Path.cwd() / script).resolve() == ROOT / "run.sh" and "--preset=cpu" in arguments
    # Enough text: only the preset, the length of one pass, the files and the prompt. Without enough for the shortest
    # run, the run is that of the preset.
    assert size < 10**6 or [arg.partition("=")[0] for arg in arguments] == [
        "--preset", "--train_tokens", "--train_files", "--val_files", "--sample_prompt"]
    config = L.fit_validation(train_gpt.parse_config(arguments))
    _, passes, _ = tokens_and_passes(config, sorted((data / "n").glob("*_train_*")), available)
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
    shard = L.Shard(Path("own_train_000001.bin"), train_gpt.PRESETS["cpu"].config.model)
    documents = [bytes(shard.tokens[start + 1:start + length].astype(np.uint8))
                 for start, length in zip(shard.starts, shard.lengths)]
    assert documents == [b"The first document.\n" * 90, b"The second.\n" * 90]


def test_own_text_to_a_sample(data, tmp_path, capsys):
    """With the command that prepare.py prints, and a small model."""
    words = random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat", "and", "slept.\n"], k=60_000)
    assert prepare_files({f"{i}.txt": " ".join(words[3000 * i:3000 * (i + 1)]) for i in range(20)}) == 0
    _, _, *arguments = shlex.split(capsys.readouterr().out.splitlines()[-1])
    small = ["--model_dim=32", "--num_heads=2", "--layers=2", "--backout_layer=none", "--scheduled_steps=6",
             *(f"--stage{i}.batch_tokens=1024" for i in (1, 2, 3, 4)), "--sample_tokens=30",
             "--sample_prompt=Once upon", "--val_every=99", f"--log_dir={tmp_path}/logs"]
    assert train_gpt.main([*arguments, *small]) == 0
    out = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"^step:\d+/\d+ val_loss:([0-9.]+)", out, re.M)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.1
    sample = out.partition("\nsample:\n")[2].partition("\nfinal_val_loss:")[0]
    assert sample.startswith("Once upon") and len(sample) > 10
    facts = read_facts(data / "n")
    assert out.endswith(f"nats per token of the validation text: this model {losses[1]:.4f}, a unigram of the training"
                        f" text {facts['unigram_loss']:.4f} (its entropy: {facts['unigram_entropy']:.4f})\n")


def test_a_shard_is_as_long_as_it_may_be(tmp_path):
    documents = [np.full(n, i, np.uint16) for i, n in enumerate((3, 3, 4, 2, 1))]
    paths = prepare.write_shards(documents, tmp_path / "n", 7, 6)
    assert {path.name: read_shard_header(path) for path in paths} == {
        "n_000007.bin": 6, "n_000008.bin": 6, "n_000009.bin": 1}
    assert (tmp_path / "n_000008.bin").read_bytes() == shard_bytes([2, 2, 2, 2, 3, 3])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no file that is always full")
def test_a_full_disk_names_the_file(tmp_path):
    (tmp_path / "n_000001.bin").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot write .*/n_000001.bin \(No space left on device\)"):
        prepare.write_shards([np.zeros(9, np.uint16)], tmp_path / "n", 1, 9)
