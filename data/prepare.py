"""Make token shards for train_gpt.py. data/README.md describes the format and how the trainer reads shards.

    python data/prepare.py fineweb               the speedrun's data, already tokenised: 2 GB from the Hugging Face hub,
                                                 and GPT-2's tokenizer
    python data/prepare.py text PATH --out NAME  your text files or folders; prints the command that trains on them
    python data/prepare.py stdlib                bytes of Python's own library: 9 MB of text, no network, no options

prepare.py cuts texts into documents of about 1000 tokens of GPT-2 or 400 bytes, because the loader uses only the
beginning of a longer document, and shuffles them: equal files give equal shards everywhere. The shards are in
data/fineweb10B, data/NAME and data/stdlib of this folder, or of DATA_PATH. They get their names when all are finished
and verified. After an interruption or damage, run the same command again.
"""
import argparse
import array
import codecs
import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unicodedata
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data import require_packages  # noqa: E402

require_packages("numpy", "torch")
import numpy as np  # noqa: E402

from data.facts import ORDER, facts_file, read_facts  # noqa: E402
from data.run.program import UserError, run_program, user_error, user_path  # noqa: E402
from data.shards import (  # noqa: E402
    SHARD_HEADER_BYTES, SHARD_MAGIC, SHARD_VERSION, data_root, digest, find_files, read_shard, read_shard_header)
from data.tokenizer import gpt2_bpe  # noqa: E402

# torch takes half a GB of memory, so only `training_command` imports it, when the shards are made.

GPT2_SEPARATOR = 50256  # <|endoftext|>
BYTE_SEPARATOR = 256  # the first value that is no byte
MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32
# A document has about this many tokens, since the loader uses the first 896 tokens or 448 bytes of a document in the
# first stage, and more later. A model learns less from the same text in documents of 1000 bytes, since the loader drops
# half of it (records/2026-11-27_learning).
DOCUMENT_TOKENS = {GPT2_SEPARATOR: 900, BYTE_SEPARATOR: 350}
STDLIB_CHARACTERS = 1000, 4000  # the library has more text than a run takes, and losses stay comparable
WHOLE_FILES = 20  # so many files make validation by whole files representative
END_OF_DOCUMENT = re.compile(r"<\|endoftext\|>[ \t]*(?:\r\n?|\n|\Z)")  # if only blanks stand before it in its line
WHITE_SPACE = re.compile(r"\s")
JSON_LINE = 2**24  # bytes; a longer line would not fit the memory that prepare.py may take

HUB_DATASET = "kjj0/fineweb10B-gpt2"  # by Keller Jordan; 10^8 tokens per shard
HUB_SHARDS = 103
FINEWEB_SHARDS = 9  # more than one record run reads

STDLIB_BYTES = 9_000_000  # slightly less than any library since Python 3.10, so all versions give about the same size
STDLIB_SHARD_TOKENS = 4_000_000  # three training shards, so that short runs change shards too
# Tests, two applications, tables of hexadecimal numbers, and installed packages, which differ between machines.
STDLIB_SKIP = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages", "__pycache__"}


# ---- Shards ----------------------------------------------------------------------------------------------------------

def folder_of(name: str) -> Path:
    """The folder of the shards called `name`; the trainer looks for shards there."""
    return data_root() / "data" / name


def report(folder: Path, facts: dict) -> None:
    """Prints what is in the shards of a folder. facts: those of data/facts.py, or the first three of them."""
    train, val = facts["train"].values(), facts["val"].values()
    print(f"{folder.name}: {facts['documents']:,} documents, {sum(train):,} training and {sum(val):,} validation tokens"
          f" in {len(train)} + {len(val)} shards")
    if "validation" in facts:
        print(f"validation: {facts['validation']}")
        print(f"unigram entropy: {facts['unigram_entropy']:.4f} nats/token of the training text; its unigram scores"
              f" {facts['unigram_loss']:.4f} on the validation text, a trained model must score less")


def most_documents(lengths: np.ndarray, tokens: int) -> int:
    """The largest number of documents that `tokens` consecutive tokens can touch; the first may begin earlier."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return int((np.searchsorted(ends, ends - lengths + tokens) - np.arange(len(ends))).max()) + 2


def fit_to_text(words: list[str], train: list[np.ndarray], val: list[np.ndarray]) -> list[str]:
    """Arguments of the trainer, with changes that fit its batches to a text: to the amount and to the lengths of the
    documents. train, val: these lengths, for each shard. Raises UserError when there is too little text."""
    import train_gpt  # for the presets
    from data.loader import cu_seqlens_size
    from data.run.config import flatten
    from data.run.memory import possible_micro_batches

    def counts(config):
        """The numbers of micro-batches that the trainer may choose."""
        return [config.system.micro_batches] if config.system.micro_batches else possible_micro_batches(config, 1)
    config = train_gpt.parse_config(words)
    data, stages = config.data, config.schedule.stages

    # The loader drops the end of a shard if the end fills no micro-batch. So the longest micro-batch has at most 2048
    # tokens, or an eighth of the longest shard if that is more.
    max_doc_len = min(stage.max_doc_len for stage in stages)
    lengths = [np.minimum(n, max_doc_len) for n in train]
    longest, largest = max(int(n.sum()) for n in lengths), max(stage.batch_tokens for stage in stages)
    micro_batches = least = counts(config)[0]
    while largest // micro_batches > 2048 and 8 * largest // micro_batches > longest:
        micro_batches *= 2
    if longest <= largest // micro_batches:
        raise UserError(f"the longest training shard keeps {longest} tokens of its documents, a row of the batch takes"
                        f" {largest // micro_batches + 1}: more text is needed")
    if micro_batches > least:
        words = [*words, f"--micro_batches={micro_batches}"]
        config = train_gpt.parse_config(words)  # which may round the batches to another multiple

    # Nearly all validation tokens, in as few pieces as the preset allows.
    available, val_tokens, piece = sum(int(n.sum()) for n in val) - 1, data.val_tokens, data.val_batch_tokens
    if available < 16:
        raise UserError(f"{available + 1} validation tokens, at least 17 are needed: more text, or a larger"
                        " --val-fraction")
    if available < val_tokens:
        pieces = -(-available // piece)
        piece = available // pieces // 16 * 16
        val_tokens = pieces * piece

    # (document lengths, tokens) of every shard and forward pass: short documents need a longer cu_seqlens.
    rows = {stage.batch_tokens // count for stage in config.schedule.stages for count in counts(config)}
    passes = [(n, row) for n in lengths for row in rows] + [(n, piece) for n in val]
    tokens_per_doc = data.tokens_per_doc
    for n, tokens in passes:
        if len(n) and (most := most_documents(n, tokens + 1)) >= cu_seqlens_size(tokens, tokens_per_doc):
            tokens_per_doc = max(1, tokens // (most + 1))

    fitting = {"val_tokens": val_tokens, "val_batch_tokens": piece, "tokens_per_doc": tokens_per_doc,
               "sample_tokens": 200, "sample_prompt": ""}
    defaults = flatten(config)
    return [*words, *(f"--{key}={value}" for key, value in fitting.items() if value != defaults[key])]


def training_arguments(patterns: dict[str, str], separator: int, train: list[np.ndarray],
                       val: list[np.ndarray]) -> list[str]:
    """The trainer's arguments for shards: a preset, a length, and what `fit_to_text` adds. patterns: of the training
    and the validation shards; train, val: as for `fit_to_text`. Raises UserError when there is too little text."""
    import train_gpt
    from data.run.start import tokens_and_passes
    preset, shorter = ("cpu", "cpu") if separator == BYTE_SEPARATOR else ("single", "short")
    files, tokens = find_files(patterns["train"]), sum(int(n.sum()) for n in train)

    def fitted(*words):
        return fit_to_text([*words, *(f"--{part}_files={pattern}" for part, pattern in patterns.items())], train, val)

    # A second pass raises the validation loss (records/2026-11-27_learning), so a smaller text gets a shorter run. On a
    # GPU, this run has the preset `short`, because its length also chooses the size of the model. A shorter run has
    # smaller batches, and the loader drops more of the text for them. So a run of this length may still be too long.
    arguments = fitted(f"--preset={preset}")
    for attempt in range(9):
        _, passes, one_pass = tokens_and_passes(train_gpt.parse_config(arguments), files, tokens)
        if passes <= 1:
            break
        try:
            arguments = fitted(f"--preset={shorter}", f"--train_tokens={one_pass}")
        except UserError:  # a run of 20 steps, or a micro-batch of it, is longer than the text
            return arguments if attempt else fitted(f"--preset={shorter}")
    return arguments


def training_command(name: str, made: Path, separator: int, train: list[np.ndarray], val: list[np.ndarray]) -> str:
    """Checks the shards of data/NAME, which are still in `made`, as the trainer does; returns the command that trains
    on them, with its title. train, val: as for `fit_to_text`. Raises UserError when no run can start."""
    import train_gpt
    from data.run.start import survey_training_data, survey_validation_data
    patterns = {part: f"data/{made.name}/{name}_{part}_*.bin" for part in ("train", "val")}
    try:
        arguments = training_arguments(patterns, separator, train, val)
        config = train_gpt.parse_config(arguments)
        found, _ = survey_training_data(config)
        survey_validation_data(config)
    except UserError as error:
        raise UserError(f"no run can start on this text: {str(error).replace(made.name, name)}") from None
    script, start, note = os.path.relpath(ROOT / "run.sh"), "", ""
    if separator != BYTE_SEPARATOR:
        try:
            train_gpt.parse_config(arguments, 8)
            note = "; several GPUs make no sample"
        except UserError:  # too few steps, since a step is larger on several GPUs
            start = "NPROC=1 "
    if os.environ.get("DATA_PATH"):
        start += f"DATA_PATH={shlex.quote(str(data_root()))} "
    command = shlex.join([script if os.sep in script else f"./{script}", *arguments]).replace(made.name, name)
    return f"training data: {found}\ntrain on it, with a sample at the end{note}:\n{start}{command}"


# ---- FineWeb ---------------------------------------------------------------------------------------------------------

# Only these two functions use the network for FineWeb. Nothing that they download is executed.

def hub_metadata(name: str) -> tuple[int, str]:
    """The size and the checksum of one file of the dataset on the hub. Fails at once when offline."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    metadata = get_hf_file_metadata(hf_hub_url(HUB_DATASET, name, repo_type="dataset"))
    return metadata.size, metadata.etag


def hub_fetch(name: str, folder: Path) -> Path:
    """Downloads one file of the dataset into `folder`, with a progress bar, and continues a broken download."""
    from huggingface_hub import hf_hub_download
    return Path(hf_hub_download(HUB_DATASET, name, repo_type="dataset", local_dir=folder))


def verify(path: Path, size, checksum) -> None:
    """Raises UserError when a shard is damaged, or differs from the hub's size or checksum (None: unknown)."""
    if size is not None and (found := path.stat().st_size) != size:
        raise UserError(f"{path}: {found} bytes, the hub has {size}")
    if re.fullmatch("[0-9a-f]{64}", checksum or ""):  # the hub's checksum of a large file is its SHA-256
        if (found := digest(path)) != checksum:
            raise UserError(f"{path}: SHA-256 {found}, the hub has {checksum}")
    read_shard(path, GPT2_SEPARATOR + 1)


def fineweb(shards: int) -> None:
    """Downloads missing shards and verifies all shards; without a network it can check only headers and tokens."""
    if not 1 <= shards <= HUB_SHARDS:
        raise UserError(f"--shards {shards}: the dataset has 1 to {HUB_SHARDS} training shards")
    folder, offline = folder_of("fineweb10B"), None
    partial = folder / ".partial"
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]

    def reason(error):  # the hub's client has a dozen kinds of errors; all mean that it cannot fetch the file
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

    for i, name in enumerate(names, 1):
        path, metadata = folder / name, (None, None)
        try:
            metadata = metadata if offline else hub_metadata(name)
        except Exception as error:
            offline = error
        if path.exists():
            try:
                verify(path, *metadata)
                compared = f"not compared with the hub ({reason(offline)})" if offline else "as on the hub"
                print(f"{name}: already there, {compared}")
                continue
            except UserError as error:
                print(f"damaged, fetching it again: {error}")
                path.unlink()
        try:
            if offline:
                raise offline
            print(f"{name}: fetching, {i} of {len(names)}", flush=True)
            arrived = hub_fetch(name, partial)
        except Exception as error:
            raise UserError(f"{name}: cannot be fetched from the hub ({reason(error)}); "
                            "see to the network and run this again, what is finished is kept") from error
        try:
            verify(arrived, *metadata)
        except UserError as error:
            arrived.unlink()  # otherwise the hub's client would keep the file as finished
            raise UserError(f"{name}: the download is damaged ({error}); run this again") from error
        os.replace(arrived, path)
    shutil.rmtree(partial, ignore_errors=True)
    shards = {part: {path: read_shard_header(path) for path in sorted(folder.glob(f"fineweb_{part}_*.bin"))}
              for part in ("train", "val")}
    documents = sum(np.count_nonzero(read_shard(path, GPT2_SEPARATOR + 1) == GPT2_SEPARATOR)
                    for part in shards.values() for path in part)
    report(folder, shards | {"documents": documents})
    try:  # the model takes a table from the tokenizer (--bigram_normal)
        gpt2_bpe()
    except UserError as error:
        print(f"warning: {error}; a run needs it", file=sys.stderr)


# ---- Text: what is read ----------------------------------------------------------------------------------------------

class Notices(dict):
    """{kind of notice, with a place for the number: [number, first names]}."""

    def add(self, kind: str, key: str, number: int = 1) -> None:
        notice = self.setdefault(kind, [0, []])
        notice[0] += number
        if len(notice[1]) < 3 and key not in notice[1]:
            notice[1].append(key)

    def print(self) -> None:
        for kind, (number, keys) in self.items():
            print(f"warning: {kind.format(number)}, such as {shown(keys)}")
        self.clear()


TWICE = "skipped {} files and folders that are named twice, linked twice, or linked from inside themselves"


def shown(keys) -> str:
    """Names of files; repr escapes what a terminal cannot print."""
    return ", ".join(repr(key.partition("\0")[0]) for key in keys)


def walk(root: Path, notices: Notices, skip=frozenset()):
    """(name relative to root, path) of all files under root, by name, without hidden files and folders in `skip`.

    Follows links to folders, but enters each folder once, and none from inside itself.
    """
    found, entered = [], {os.path.realpath(root)}

    def name_of(path):
        # The bytes of the name, whatever the locale: the order of documents depends on it.
        return os.fsencode(Path(path).relative_to(root).as_posix()).decode("utf-8", "surrogateescape")

    def enter(folder, name):
        path = os.path.join(folder, name)
        real = os.path.realpath(path)
        if real in entered or Path(real) in Path(os.path.realpath(folder)).parents:
            notices.add(TWICE, name_of(path))
            return False
        entered.add(real)
        return True
    for folder, folders, files in os.walk(root, followlinks=True, onerror=lambda error: notices.add(
            "skipped {} folders that cannot be read", name_of(error.filename))):
        for name in folders + files:
            if name.startswith("."):
                notices.add("skipped {} hidden files and folders", name_of(os.path.join(folder, name)))
        folders[:] = [f for f in sorted(folders) if f not in skip and not f.startswith(".") and enter(folder, f)]
        found += [Path(folder, f) for f in files if not f.startswith(".")]
    return sorted((name_of(path), path) for path in found)


class NotText(Exception):
    """The kind of notice about a file that is no text."""


def split_documents(text: str) -> list[str]:
    """The texts that lines <|endoftext|> end, then the rest."""
    parts, start = [], 0
    for mark in END_OF_DOCUMENT.finditer(text):
        before = text[start:mark.start()].rstrip(" \t")
        if not before or before[-1] in "\r\n":
            parts.append(before)
            start = mark.end()
    return [*parts, text[start:]]


def read_plain(path: Path):
    """Yields (text, whether a document ends behind it) of a text file, about a million characters at a time.

    Drops a byte order mark, keeps the line ends. Raises NotText.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            while block := file.read(2**20) + file.readline(2**16):
                if "\0" in block:
                    raise NotText("skipped {} files with NULs (binary, or UTF-16)")
                *ended, rest = split_documents(block)
                yield from ((text if text.strip() else "", True) for text in ended)
                yield rest, False
    except UnicodeDecodeError:
        raise NotText("skipped {} files that are not UTF-8 (binary, or another encoding)") from None


def read_json(path: Path):
    """Yields (text, True) for the field `text` of each line of JSON; None for the text if the line has none, False if
    the line is longer than JSON_LINE.

    A comma may follow the line, and brackets may surround all lines.
    """
    with open(path, "rb") as file:
        while line := file.readline(JSON_LINE):
            if len(line) == JSON_LINE and not line.endswith(b"\n"):
                while (rest := file.readline(2**20)) and not rest.endswith(b"\n"):
                    pass
                yield False, True
                continue
            if not (line := line.strip().rstrip(b",")) or line in (b"[", b"]"):
                continue
            try:
                text = json.loads(line.decode("utf-8-sig"))["text"]
                if "\0" in text or not text.encode():  # JSON can contain NULs, and halves of characters
                    raise ValueError
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                yield None, True
                continue
            yield from ((part, True) for part in split_documents(text) if part.strip())


def is_json(path: Path) -> bool:
    """Whether a file has a name of JSON, or an object in JSON as its first line."""
    if path.suffix.lower() in (".json", ".jsonl", ".ndjson"):
        return True
    with open(path, "rb") as file:
        line = file.readline(2**16).removeprefix(codecs.BOM_UTF8)
    try:
        return line.startswith(b"{") and isinstance(json.loads(line.decode()), dict)
    except (ValueError, RecursionError):
        return False


def survey(files: dict[str, Path]) -> dict[str, tuple[int, object]]:
    """{name: (characters, function that reads the file)} of the files that are text. Prints what is special."""
    found, notices, texts, ends = {}, Notices(), 0, 0

    def read(key, reader):
        """(characters, texts, items without text, items that are too long, ends of documents) of a file."""
        size = good = bad = long = marks = 0
        for text, end in reader(files[key]):
            size, marks, bad, long = size + len(text or ""), marks + end, bad + (text is None), long + (text is False)
            good += bool(text and text.strip())
        return size, good, bad, long, marks
    for key, path in files.items():
        try:
            if json_lines := is_json(path):
                size, good, bad, long, _ = read(key, read_json)
                if long:
                    notices.add(f"skipped {{}} lines of JSON of over {JSON_LINE:,} bytes: cut their texts", key, long)
                if good or long:
                    if good:
                        found[key], texts = (size, read_json), texts + good
                    if bad:
                        notices.add("skipped {} lines of JSON without a text in the field `text`", key, bad)
                    continue
            size, good, *_, marks = read(key, read_plain)
            if not good:
                notices.add("skipped {} empty files", key)
                continue
            found[key], ends = (size, read_plain), ends + marks
            if json_lines:
                notices.add("took {} files of JSON as they are, for no line has a text in a field `text`", key)
        except NotText as kind:
            notices.add(str(kind), key)
        except OSError:
            notices.add("skipped {} files that cannot be read", key)
    notices.print()
    if texts:
        print(f"JSON: {texts:,} texts in the field `text` of a line; none shares a document with another")
    if ends:
        print(f"{ends:,} lines <|endoftext|> end documents")
    return found


# ---- Text: documents -------------------------------------------------------------------------------------------------

def has_gpu() -> bool:
    """Whether torch sees a GPU. A process of its own asks, since torch takes half a GB of memory."""
    question = "import os, torch; os._exit(not torch.cuda.is_available())"
    return not subprocess.run([sys.executable, "-c", question], stderr=subprocess.DEVNULL).returncode


def load_tokenizer(kind: str):
    """The function from str to token ids, and the separator."""
    if kind == "auto" and not has_gpu():
        print("no GPU here: using bytes, for --preset=cpu (--tokenizer gpt2 makes data for a machine with GPUs)")
        kind = "bytes"
    if kind != "bytes":
        try:
            return gpt2_bpe().encode_ordinary, GPT2_SEPARATOR
        except UserError as error:
            if kind == "gpt2":
                raise UserError(f"{error}; or use --tokenizer bytes") from error
            print(f"{error}; using bytes instead, separator {BYTE_SEPARATOR}")
    return lambda text: np.frombuffer(text.encode(), np.uint8), BYTE_SEPARATOR


def rank(key: str) -> tuple[int, str]:
    """Sort key of a fixed shuffle of files: equal on all machines, and little changed by new or deleted files."""
    key = unicodedata.normalize("NFC", key)  # a file system may store an accent as a character of its own
    return zlib.crc32(key.encode("utf-8", "surrogatepass")), key


def split(sizes: dict[str, int], val_fraction: float) -> set[str]:
    """The validation files: the first files in the order of rank() that make up `val_fraction` of the size."""
    val, size, target = set(), 0, val_fraction * sum(sizes.values())
    for key in sorted(sizes, key=rank)[:-1]:  # at least one file remains for training
        if size < target:
            val.add(key)
            size += sizes[key]
    return val


def document_size(encode, tokens: int):
    """A function from the next text of a file to the least and the largest length of a document of about `tokens`
    tokens, in characters. It counts the tokens of a sample of every million characters."""
    bytes_per_token, known = 4.0, 0  # known: characters until the next sample

    def size(text):
        nonlocal bytes_per_token, known
        count = len(text.encode())
        if known <= 0 and count >= tokens:  # a smaller text is one document
            sample = text[len(text) // 2:][:2 * tokens]
            bytes_per_token, known = len(sample.encode()) / len(encode(sample)), 2**20
        known -= len(text)
        least = max(1, round(tokens * bytes_per_token * len(text) / count))
        return least, least * 5 // 4
    return size


def cut(parts, size):
    """Cuts (text, whether a document ends behind it) into documents.

    A document ends at the first line end after the least length that `size` gives, else at the first white space, else
    at the largest length.
    """
    rest = ""
    for text, ends in itertools.chain(parts, [("", True)]):
        rest, start = rest + (text or ""), 0
        least, most = size(rest) if rest else (0, 0)
        while len(rest) - start > most + 1 or ends and start < len(rest):
            after, end = start + least, start + most
            if (line := rest.find("\n", after, end + 1)) >= 0 or (line := rest.find("\r", after, end + 1)) >= 0:
                end = line + 1
            elif end < len(rest) and (space := WHITE_SPACE.search(rest, after, end + 1)):
                end = space.end()
            end += rest[end - 1:end + 1] == "\r\n"
            yield rest[start:end]
            start = end
        rest = rest[start:]


class Part:
    """The training or the validation shards, written document by document.

    prefix: the path of a shard without its number; number: that of the first shard; limit: most tokens of a shard.
    Every shard begins with a separator.
    """

    def __init__(self, prefix: Path, number: int, limit: int):
        self.prefix, self.number, self.limit = prefix, number, limit
        self.lengths = {}  # path of each shard -> lengths of its documents, uint16: tokens, the largest stands for more
        self.counts = np.zeros(2**16, np.int64)  # of each token
        self.tokens = self.room = 0
        self.path, self.pending = None, []

    def write(self, mode: str, content) -> None:
        with user_error(f"cannot write {self.path}"), open(self.path, mode) as file:
            file.write(content)

    def add(self, document: np.ndarray) -> None:
        """document: (n,) uint16. Raises UserError when a shard cannot hold it."""
        if len(document) > self.limit:
            raise UserError(f"--shard-tokens {self.limit}: a document has {len(document)} tokens, give more")
        if len(document) > self.room:
            self.close()
            self.path = Path(f"{self.prefix}_{self.number:06d}.bin")
            self.number, self.room = self.number + 1, self.limit
            self.lengths[self.path] = array.array("H")
            self.write("wb", bytes(SHARD_HEADER_BYTES))
        self.pending.append(document)
        self.lengths[self.path].append(min(len(document), 2**16 - 1))
        self.room, self.tokens = self.room - len(document), self.tokens + len(document)
        if len(self.pending) == 1024:
            self.flush()

    def flush(self) -> None:
        tokens, self.pending = np.concatenate([np.empty(0, "<u2"), *self.pending]), []
        self.counts += np.bincount(tokens, minlength=2**16)
        self.write("ab", tokens)

    def close(self) -> None:
        """Finishes a shard: the header that makes it one is written last."""
        if self.path:
            self.flush()
            header = np.array([SHARD_MAGIC, SHARD_VERSION, self.limit - self.room], "<i4")
            self.write("r+b", header)

    def sizes(self) -> dict[str, int]:
        """{name of a shard: its tokens}."""
        return {path.name: read_shard_header(path) for path in self.lengths}


def scatter(documents, folder: Path) -> tuple[list[Path], int, int]:
    """Writes (key, tokens), 8 bytes and (n,) uint16 with a separator first, to 64 files of equal ranges of keys.
    Returns the files, the number of documents and their tokens."""
    paths, count, tokens = [folder / f"{i:02d}" for i in range(64)], 0, 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb")) for path in paths]
        for key, document in documents:
            file = files[key[0] // 4]
            file.write(np.frombuffer(key, np.uint8).astype("<u2"))
            file.write(document)
            count, tokens = count + 1, tokens + len(document)
    return paths, count, tokens


def gather(paths: list[Path], separator: int):
    """Yields the documents that `scatter` has written, in the order of their keys, and deletes its files."""
    for path in paths:
        tokens = np.fromfile(path, "<u2")
        path.unlink()
        starts = np.flatnonzero(tokens == separator)
        ends = np.append(starts[1:] - 8, len(tokens))
        keys = tokens[starts[:, None] - np.arange(8, 0, -1)].astype(np.uint8).view(">u8")[:, 0]
        for i in np.argsort(keys, kind="stable"):
            yield tokens[starts[i]:ends[i]]


def unigram(train: np.ndarray, val: np.ndarray, vocabulary: int) -> tuple[float, float]:
    """(entropy of the tokens with the counts `train`; loss of their unigram, with one added to every count, on those
    with the counts `val`), nats per token."""
    p, smooth = train[train > 0] / train.sum(), (train + 1) / (train.sum() + vocabulary)
    return -float((p * np.log(p)).sum()), -float((val * np.log(smooth)).sum() / val.sum())


def build(name: str, files: dict[str, Path], tokenizer: str, val_fraction: float, shard_tokens: int, size=None,
          check=None):
    """Makes the shards of data/NAME from `files`, {relative name: path}, and returns what `check` returns.

    Training documents have the order of a hash of their file's name and their number in it. size: what `document_size`
    returns; check: a function like `training_command`, which may refuse the shards before they replace older ones.
    Raises UserError when there is too little text.
    """
    found = survey(files)
    encode, separator = load_tokenizer(tokenizer)
    sizes = {key: count for key, (count, _) in found.items()}
    val, total, few = split(sizes, val_fraction), sum(sizes.values()), len(sizes) < WHOLE_FILES
    most = min(4 * val_fraction, (1 + val_fraction) / 2) * total
    if few or not val_fraction * total <= sum(sizes[key] for key in val) <= most:
        val = set()
    folder = folder_of(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder.parent) as made:
        made = Path(made)
        parts = {"train": Part(made / f"{name}_train", 1, shard_tokens),
                 "val": Part(made / f"{name}_val", 0, MAX_SHARD_TOKENS)}

        def documents(keys):
            """(key, tokens) of the documents of the files `keys`."""
            for key in keys:
                _, reader = found[key]
                # A file system may store an accent as a character of its own.
                stem = unicodedata.normalize("NFC", key).encode("utf-8", "surrogatepass")
                length = size or document_size(encode, DOCUMENT_TOKENS[separator])
                try:
                    for i, document in enumerate(cut(reader(files[key]), length)):
                        ids = encode(document)
                        tokens = np.empty(1 + len(ids), "<u2")
                        tokens[0], tokens[1:] = separator, ids
                        yield hashlib.blake2b(b"%b %d" % (stem, i), digest_size=8).digest(), tokens
                except NotText:
                    raise UserError(f"{shown([key])} has changed meanwhile; run the same command again") from None
        for _, document in documents(key for key in found if key in val):
            parts["val"].add(document)
        ranges, count, tokens = scatter(documents(key for key in found if key not in val), made)
        if count + bool(val) < 2:
            raise UserError(f"{total} characters of text in {len(sizes)} usable files: more text is needed, to have"
                            " something to train on and something to validate on")
        target = 0 if val else val_fraction * tokens
        for i, document in enumerate(gather(ranges, separator), 1):
            parts["val" if parts["val"].tokens < target and i < count else "train"].add(document)
        del document  # and the memory of its file
        for part in parts.values():
            part.close()
        lengths = [[np.frombuffer(n, np.uint16) for n in part.lengths.values()] for part in parts.values()]
        checked = check(name, made, separator, *lengths) if check else None
        if val:
            names = shown(sorted(val)[:5]) + ", ..." * (len(val) > 5)
            chosen = f"{len(val)} of {len(sizes)} files: {names}"
        else:
            why = f"there are fewer than {WHOLE_FILES} files" if few else "whole files do not make up this share"
            chosen = f"{sum(map(len, lengths[1])):,} documents of all files, chosen by a hash, since {why}"
        entropy, loss = unigram(parts["train"].counts, parts["val"].counts, separator + 1)
        facts = {"order": ORDER, "separator": separator, "documents": sum(map(len, sum(lengths, []))),
                 "validation": chosen, **{key: part.sizes() for key, part in parts.items()},
                 "unigram_entropy": round(entropy, 6), "unigram_loss": round(loss, 6)}
        install(made, folder, facts)
    report(folder, facts)
    return checked


def install(made: Path, folder: Path, facts: dict) -> None:
    """Moves the shards from `made` to `folder`, the first validation shard last. Then they are complete and belong
    together, and the trainer finds them. Raises UserError before it changes anything if it cannot do so."""
    folder.mkdir(exist_ok=True)
    for path in facts_file(folder), *(folder / name for name in facts["train"] | facts["val"]), *folder.glob(
            f"{glob.escape(folder.name)}_*_*.bin"):
        if os.path.isdir(path):
            raise UserError(f"{path} is a folder: remove it, and run the same command again")
    if folder.stat().st_dev != made.stat().st_dev:
        raise UserError(f"{folder} is on another disk than the folder around it: let DATA_PATH name a folder there")
    facts_file(folder).unlink(missing_ok=True)
    for part in ("val", "train"):  # shards of an earlier build, which may have been more
        for old in folder.glob(f"{folder.name}_{part}_*.bin"):
            old.unlink(missing_ok=True)
    for name in facts["train"]:
        os.replace(made / name, folder / name)
    facts_file(folder).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    for name in reversed(facts["val"]):
        os.replace(made / name, folder / name)


def text(paths: list[str], out: str, val_fraction: float, shard_tokens: int, tokenizer: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", out):
        raise UserError(f"--out {out}: give the name of a folder to make in data/: letters, digits and ._- only")
    if out in ("fineweb10B", "stdlib", "run", "cache", "hellaswag"):
        raise UserError(f"--out {out}: another folder of data/ has that name, take another")
    if not 0 < val_fraction < 1:
        raise UserError(f"--val-fraction {val_fraction}: give a number between 0 and 1")
    if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
        raise UserError(f"--shard-tokens {shard_tokens}: give a number from 1 to {MAX_SHARD_TOKENS}")
    files, known, notices = {}, set(), Notices()
    for given in paths:
        root = user_path(given)
        if not given or not os.path.exists(root):
            raise UserError(f"{given or 'an empty path'}: no such file or folder")
        for key, path in walk(root, notices) if root.is_dir() else [(root.name, root)]:
            if not os.path.isfile(path):
                dead = os.path.islink(path) and not os.path.exists(path)
                notices.add("skipped {} links to nothing" if dead else "skipped {} that are no files (pipes, devices)",
                            key)
            elif (real := os.path.realpath(path)) in known:
                notices.add(TWICE, key)
            else:
                known.add(real)
                # Keys are relative, so the split does not depend on the folder's place on the machine.
                files[key if key not in files else f"{key}\0{len(files)}"] = path
    notices.print()
    print(build(out, files, tokenizer, val_fraction, shard_tokens, None, training_command))


# ---- Python's library ------------------------------------------------------------------------------------------------

def stdlib() -> None:
    """Makes shards of Python's library. Equal sources give equal shards."""
    folder = folder_of("stdlib")
    if folder.exists():
        try:
            facts = read_facts(folder)
            for name in facts["train"] | facts["val"]:
                read_shard(folder / name, BYTE_SEPARATOR + 1)
            report(folder, facts)
            print("already there, nothing to do")
            return
        except UserError as error:
            print(f"building it again: {error}")
    root = Path(sysconfig.get_path("stdlib"))
    # Files with a dash in their name, and _sysconfigdata, describe the build of this Python and contain its paths.
    files = {key: path for key, path in walk(root, Notices(), STDLIB_SKIP)
             if key.endswith(".py") and "-" not in key and not key.startswith("_sysconfigdata")}
    total = sum(path.stat().st_size for path in files.values())
    if total < STDLIB_BYTES // 2:
        raise UserError(f"{root}: only {total} bytes of library sources here; use `prepare.py text` with text of your"
                        " own")
    # rank() drops an even sample of the files, from the end of its order; validation files are at the start.
    keep = 2**32 * STDLIB_BYTES / total
    files = {key: path for key, path in files.items() if rank(key)[0] < keep}
    build("stdlib", files, "bytes", 0.05, STDLIB_SHARD_TOKENS, lambda text: STDLIB_CHARACTERS)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="fineweb|text|stdlib")
    command = commands.add_parser("fineweb", help="download tokenised FineWeb")
    command.set_defaults(run=fineweb)
    command.add_argument("--shards", type=int, default=FINEWEB_SHARDS,
                         help=f"training shards, 1 to {HUB_SHARDS} (default %(default)s)")
    command = commands.add_parser("text", help="tokenise text files")
    command.set_defaults(run=text)
    command.add_argument("paths", nargs="+", metavar="PATH", help="UTF-8 text file, or folder of text files")
    command.add_argument("--out", required=True, metavar="NAME", help="shards are data/NAME/NAME_{train,val}_*.bin")
    command.add_argument("--val-fraction", type=float, default=0.05,
                         help="share of the text for validation (default %(default)s)")
    command.add_argument("--shard-tokens", type=int, default=100_000_000,
                         help="tokens per training shard (default %(default)s)")
    command.add_argument("--tokenizer", choices=("gpt2", "bytes", "auto"), default="auto",
                         help="auto: gpt2, or bytes without a GPU or without GPT-2's files (default %(default)s)")
    commands.add_parser("stdlib", help="Python's own library as bytes").set_defaults(run=stdlib)
    args = vars(parser.parse_args(argv))
    try:
        args.pop("run")(**args)
        sys.stdout.flush()  # into a pipe that may be closed, or on a full disk
    except BrokenPipeError:  # of the output, not of a file
        raise
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_program(main)  # a normal end would take another 0.13 GB of memory for torch
