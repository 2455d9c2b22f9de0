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
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import unicodedata
import zlib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data import require_packages  # noqa: E402

require_packages("numpy", "torch")
import numpy as np  # noqa: E402

from data.facts import ORDER, facts_file, read_facts, shards_of  # noqa: E402
from data.run.program import UserError, run_program, user_error, user_path  # noqa: E402
from data.shards import (  # noqa: E402
    SHARD_HEADER_BYTES, SHARD_MAGIC, SHARD_VERSION, Shards, data_root, digest, find_files, read_shard,
    read_shard_header)
from data.tokenizer import gpt2_bpe  # noqa: E402

# torch takes a second and half a GB of memory, so only functions that need it import it.

GPT2_SEPARATOR = 50256  # <|endoftext|>
BYTE_SEPARATOR = 256  # the first value that is no byte
SHARD_TOKENS, MAX_SHARD_TOKENS = 100_000_000, 2**31 - 1  # of a training shard; the header's count is an int32
# A document has about this many tokens, since the loader uses the first 896 tokens or 448 bytes of a document in the
# first stage, and more later. A model learns less from the same text in documents of 1000 bytes, since the loader drops
# half of it (records/2026-11-27_learning).
DOCUMENT_TOKENS = {GPT2_SEPARATOR: 900, BYTE_SEPARATOR: 350}
STDLIB_CHARACTERS = 1000, 4000  # the library has more text than a run takes, and losses stay comparable
WHOLE_FILES = 20  # so many files make validation by whole files representative
END_OF_DOCUMENT = re.compile(r"<\|endoftext\|>[ \t]*(?:\r\n?|\n|\Z)")  # if only blanks stand before it in its line
WHITE_SPACE = re.compile(r"\s")
NO_TEXT = "skipped {} lines of JSON without a text in the field `text`"

HUB_DATASET = "kjj0/fineweb10B-gpt2"  # by Keller Jordan; 10^8 tokens per shard
HUB_SHARDS = 103
FINEWEB_SHARDS = 9  # more than one record run reads

STDLIB_BYTES = 9_000_000  # slightly less than any library since Python 3.10, so all versions give about the same size
STDLIB_SHARD_TOKENS = 4_000_000  # three training shards, so that short runs change shards too
# Tests, two applications, tables of hexadecimal numbers, and installed packages, which differ between machines.
STDLIB_SKIP = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages", "__pycache__"}


# ---- Shards ----------------------------------------------------------------------------------------------------------

def report(folder: Path, facts: dict) -> None:
    """Prints what is in the shards of a folder. facts: those of data/facts.py, or the first three of them."""
    train, val = facts["train"].values(), facts["val"].values()
    print(f"{folder.name}: {facts['documents']:,} documents, {sum(train):,} training and {sum(val):,} validation tokens"
          f" in {len(train)} + {len(val)} shards")
    if "validation" in facts:
        print(f"validation: {facts['validation']}")
        print(f"unigram entropy: {facts['unigram_entropy']:.4f} nats/token of the training text; its unigram scores"
              f" {facts['unigram_loss']:.4f} on the validation text, a trained model must score less")


def token_counts(paths) -> np.ndarray:
    """How often each token occurs in the shards, (65536,) int64."""
    counts = np.zeros(2**16, np.int64)
    for path in paths:
        tokens = np.memmap(path, "<u2", "r", SHARD_HEADER_BYTES)
        for start in range(0, len(tokens), 2**18):  # bincount makes int64 of what it gets
            counts += np.bincount(tokens[start:start + 2**18], minlength=2**16)
    return counts


def training_command(name: str, made: Path, separator: int) -> str:
    """The command that trains on the shards of data/NAME, which are still in `made`, with its title: a preset, the
    length of one pass. The trainer fits the rest to the shards (`fit_memory`). Raises UserError when no run can
    start."""
    import torch
    import train_gpt  # for the presets
    from data.run.memory import fit_memory
    from data.run.start import survey_training_data, tokens_and_passes
    patterns = [f"data/{made.name}/{name}_{part}_*.bin" for part in ("train", "val")]
    files = [f"--train_files={patterns[0]}", f"--val_files={patterns[1]}"]
    training, validation = (sum(Shards(pattern).counts) for pattern in patterns)
    preset, start, note, sample = (
        "cpu", "", "", "--sample_prompt=") if separator == BYTE_SEPARATOR else (
        "single", "NPROC=1 ", "; several GPUs, without NPROC=1, make no sample", "--sample_tokens=200")

    def fitted(words):
        """(config, line about the training data, tokens of one pass or None if the run takes no more) of a run. Raises
        UserError when there is too little text."""
        config = fit_memory(train_gpt.parse_config(words + files), torch.device("cpu"), 1, 0)
        found, _ = survey_training_data(config)
        _, passes, one_pass = tokens_and_passes(config, find_files(patterns[0]), training)
        return config, found, one_pass if passes > 1 else None

    try:
        if validation < 17:
            raise UserError(f"{validation} validation tokens, at least 17 are needed: more text, or a larger"
                            " --val-fraction")
        config, found, most = fitted(words := [f"--preset={preset}"])
        # A second pass raises the validation loss (records/2026-11-27_learning), so a smaller text gets a shorter run.
        # A shorter run has smaller batches, and the loader drops more of the text for them. So it may still be too
        # long.
        for _ in range(9):
            if not most:
                break
            try:
                config, found, most = fitted(shortened := [*words[:1], f"--train_tokens={most}"])
            except UserError:  # a run of 20 steps, or a micro-batch of it, is longer than the text
                if words == ["--preset=single"]:  # then one of seconds, not of minutes
                    config, found, _ = fitted(words := [*words, "--train_tokens=27e6"])
                break
            words = shortened
    except UserError as error:
        raise UserError(f"no run can start on this text: {str(error).replace(made.name, name)}") from None
    if os.environ.get("DATA_PATH"):
        start += f"DATA_PATH={shlex.quote(str(data_root()))} "
    script = os.path.join(os.path.relpath(ROOT), "run.sh")  # "./run.sh" in this folder
    command = shlex.join([script, *words, *files, sample]).replace(made.name, name)
    return f"training data: {found}\ntrain on it, with a sample at the end{note}:\n{start}{command}"


# ---- FineWeb ---------------------------------------------------------------------------------------------------------

def hub_fetch(name: str, folder: Path) -> tuple[Path, str]:
    """(path, checksum on the hub) of a file of the dataset, which this downloads into `folder`, with a progress bar.
    Continues a broken download. Nothing in the file is executed."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    checksum = get_hf_file_metadata(hf_hub_url(HUB_DATASET, name, repo_type="dataset")).etag
    return Path(hf_hub_download(HUB_DATASET, name, repo_type="dataset", local_dir=folder)), checksum


def fineweb(shards: int) -> None:
    """Downloads the shards that are missing or damaged. Each gets its name when it is verified."""
    if not 1 <= shards <= HUB_SHARDS:
        raise UserError(f"--shards {shards}: the dataset has 1 to {HUB_SHARDS} training shards")
    folder = data_root() / "data/fineweb10B"
    partial = folder / ".partial"
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]
    for i, name in enumerate(names, 1):
        path = folder / name
        if path.exists():
            try:
                read_shard(path, GPT2_SEPARATOR + 1)
                print(f"{name}: already there")
                continue
            except UserError as error:
                print(f"damaged, fetching it again: {error}")
                path.unlink()
        print(f"{name}: fetching, {i} of {len(names)}", flush=True)
        try:
            arrived, checksum = hub_fetch(name, partial)
        except Exception as error:  # the hub's client has a dozen kinds of errors; all mean that it cannot fetch
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(f"{name}: cannot be fetched from the hub ({reason}); "
                            "see to the network and run this again, what is finished is kept") from error
        try:
            if re.fullmatch("[0-9a-f]{64}", checksum) and (found := digest(arrived)) != checksum:  # SHA-256, if large
                raise UserError(f"{arrived}: SHA-256 {found}, the hub has {checksum}")
            read_shard(arrived, GPT2_SEPARATOR + 1)
        except UserError as error:
            arrived.unlink()  # otherwise the hub's client would keep the file as finished
            raise UserError(f"{name}: the download is damaged ({error}); run this again") from error
        os.replace(arrived, path)
    shutil.rmtree(partial, ignore_errors=True)
    found = {part: {path.name: read_shard_header(path) for path in folder.glob(f"fineweb_{part}_*.bin")}
             for part in ("train", "val")}
    report(folder, found | {"documents": token_counts(folder.glob("fineweb_*.bin"))[GPT2_SEPARATOR]})
    try:  # the model takes a table from the tokenizer (--bigram_normal)
        gpt2_bpe()
    except UserError as error:
        print(f"warning: {error}; a run needs it", file=sys.stderr)


# ---- Text: what is read ----------------------------------------------------------------------------------------------

TWICE = "skipped {} files and folders that are named twice, linked twice, or linked from inside themselves"


def shown(keys) -> str:
    """Names of files; repr escapes what a terminal cannot print."""
    return ", ".join(repr(key.partition("\0")[0]) for key in keys)


def print_notices(notices: dict[str, Counter]) -> None:
    """notices: {kind of notice, with a place for the number: how often each file has it}."""
    for kind, keys in notices.items():
        if keys:
            print(f"warning: {kind.format(keys.total())}, such as {shown([*keys][:3])}")


def walk(root: Path, notices: dict[str, Counter], skip=frozenset()):
    """(name relative to root, path) of all files under root, by name, without hidden files and folders in `skip`.
    Follows links to folders, but enters each folder once, and none from inside itself."""
    found, entered = [], {os.path.realpath(root)}

    def name_of(*parts):
        # The bytes of the name, whatever the locale: the order of documents depends on it.
        return os.fsencode(Path(*parts).relative_to(root).as_posix()).decode("utf-8", "surrogateescape")

    def enter(folder, name):
        real = os.path.realpath(os.path.join(folder, name))
        if real in entered or Path(real) in Path(os.path.realpath(folder)).parents:
            notices[TWICE][name_of(folder, name)] += 1
            return False
        entered.add(real)
        return True

    def unread(error):
        notices["skipped {} folders that cannot be read"][name_of(error.filename)] += 1
    for folder, folders, files in os.walk(root, followlinks=True, onerror=unread):
        for name in folders + files:
            if name.startswith("."):
                notices["skipped {} hidden files and folders"][name_of(folder, name)] += 1
        folders[:] = [f for f in sorted(folders) if f not in skip and not f.startswith(".") and enter(folder, f)]
        found += [(name_of(folder, f), Path(folder, f)) for f in files if not f.startswith(".")]
    return sorted(found)


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
    """Yields (text, whether a document ends behind it) of a text file, about a million characters at a time. Drops a
    byte order mark, keeps the line ends. Raises UnicodeError for a file that is not UTF-8 or has NULs."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        while block := file.read(2**20) + file.readline(2**16):
            if "\0" in block:
                raise UnicodeError
            *ended, rest = split_documents(block)
            yield from ((text if text.strip() else "", True) for text in ended)
            yield rest, False


def read_json(path: Path):
    """Yields (text, True) for the field `text` of each line of JSON; for a line without it ("", NO_TEXT). A comma may
    follow the line, and brackets may surround all lines."""
    with open(path, "rb") as file:
        for line in file:
            if (line := line.strip().rstrip(b",")) and line not in (b"[", b"]"):
                try:
                    text = json.loads(line.decode("utf-8-sig"))["text"]
                    if "\0" in text or not text.encode():  # JSON can contain NULs, and halves of characters
                        raise ValueError
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    yield "", NO_TEXT
                else:
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
    found, notices, texts, ends = {}, defaultdict(Counter), 0, 0
    for key, path in files.items():
        try:
            readers = [read_json] * is_json(path) + [read_plain]
            for reader in readers:
                size, good, marks = 0, 0, Counter()  # characters, number of texts, what ends them
                for text, mark in reader(path):
                    size, good = size + len(text), good + bool(text.strip())
                    marks[mark] += 1
                if good:
                    break
            else:
                notices["skipped {} empty files"][key] += 1
                continue
        except UnicodeError:
            notices["skipped {} files that are not UTF-8, or have NULs (binary, or another encoding)"][key] += 1
        except OSError:
            notices["skipped {} files that cannot be read"][key] += 1
        else:
            found[key] = size, reader
            if reader is read_json:
                texts += good
                notices[NO_TEXT].update([key] * marks[NO_TEXT])
            else:
                ends += marks[True]
                if read_json in readers:
                    notices["took {} files of JSON as they are, for no line has a text in a field `text`"][key] += 1
    print_notices(notices)
    if texts:
        print(f"JSON: {texts:,} texts in the field `text` of a line; none shares a document with another")
    if ends:
        print(f"{ends:,} lines <|endoftext|> end documents")
    return found


# ---- Text: documents -------------------------------------------------------------------------------------------------

def load_tokenizer(kind: str):
    """The function from str to token ids, and the separator."""
    if kind == "auto":
        import torch
        if not torch.cuda.is_available():
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


def stable_name(key: str) -> bytes:
    """The name of a file, equal on all machines: a file system may store an accent as a character of its own."""
    return unicodedata.normalize("NFC", key).encode("utf-8", "surrogatepass")


def rank(key: str) -> tuple[int, bytes]:
    """Sort key of a fixed shuffle of files: equal on all machines, and little changed by new or deleted files."""
    return zlib.crc32(stable_name(key)), stable_name(key)


def split(sizes: dict[str, int], share: float) -> tuple[set[str], str]:
    """The validation files: the first files in the order of rank() that make up a share of the size. Or none, and why
    documents of all files validate in their place."""
    if len(sizes) < WHOLE_FILES:
        return set(), f"there are fewer than {WHOLE_FILES} files"
    val, size, total = set(), 0, sum(sizes.values())
    for key in sorted(sizes, key=rank)[:-1]:  # at least one file remains for training
        if size < share * total:
            val.add(key)
            size += sizes[key]
    if not share * total <= size <= min(4 * share, (1 + share) / 2) * total:
        return set(), "whole files do not make up this share"
    return val, ""


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
    """Cuts (text, whether a document ends behind it) into documents. A document ends at the first line end after the
    least length that `size` gives, else at the first white space, else at the largest length."""
    rest = ""
    for text, ends in itertools.chain(parts, [("", True)]):
        rest, start = rest + text, 0
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


def write_shards(documents, prefix: Path, number: int, limit: int) -> list[Path]:
    """Writes documents, (n,) uint16 with a separator first, to the shards PREFIX_<number>.bin, PREFIX_<number + 1>.bin
    ... of at most `limit` tokens. Returns their paths. Raises UserError when a shard cannot be written."""
    used, paths = 0, []

    def shard_of(document):
        nonlocal number, used
        used += len(document)
        if used > limit:
            number, used = number + 1, len(document)
        return Path(f"{prefix}_{number:06d}.bin")
    for path, shard in itertools.groupby(documents, shard_of):
        paths.append(path)
        with user_error(f"cannot write {path}"), open(path, "wb") as file:
            file.write(bytes(SHARD_HEADER_BYTES))
            for document in shard:
                file.write(document)
            count = (file.tell() - SHARD_HEADER_BYTES) // 2
            file.seek(0)  # the header, which makes the file a shard, is written last
            file.write(np.array([SHARD_MAGIC, SHARD_VERSION, count], "<i4"))
    return paths


def shuffle(documents, path: Path):
    """(number of documents, their tokens, an iterator over them in the order of their keys). documents: (key, tokens),
    8 bytes and (n,) uint16. They wait in the file `path`, which takes as much room as the shards."""
    keys, lengths = bytearray(), array.array("Q")
    with open(path, "wb") as file:
        for key, document in documents:
            file.write(document)
            keys += key
            lengths.append(len(document))
    ends = np.cumsum(np.frombuffer(lengths, np.uint64), dtype=np.int64)

    def in_order():
        tokens = np.memmap(path, "<u2", "r")
        for i in np.argsort(np.frombuffer(keys, ">u8"), kind="stable"):
            yield tokens[ends[i] - lengths[i]:ends[i]]
    return len(lengths), sum(lengths), in_order()


def until(documents, tokens: float, most: int):
    """The next documents, until they have so many tokens, and at most so many documents."""
    while tokens > 0 and most > 0:
        yield (document := next(documents))
        tokens, most = tokens - len(document), most - 1


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
    val, why = split(sizes, val_fraction)
    folder = data_root() / "data" / name
    folder.parent.mkdir(parents=True, exist_ok=True)

    def documents(keys):
        """(key, tokens) of the documents of the files `keys`."""
        for key in keys:
            _, reader = found[key]
            length = size or document_size(encode, DOCUMENT_TOKENS[separator])
            try:
                for i, document in enumerate(cut(reader(files[key]), length)):
                    ids = encode(document)
                    tokens = np.empty(1 + len(ids), "<u2")
                    tokens[0], tokens[1:] = separator, ids
                    yield hashlib.blake2b(b"%b %d" % (stable_name(key), i), digest_size=8).digest(), tokens
            except (UnicodeError, OSError):
                raise UserError(f"{shown([key])} has changed meanwhile; run the same command again") from None

    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder.parent) as made:
        made = Path(made)
        whole = (document for _, document in documents(key for key in found if key in val))
        prefix = made / f"{name}_val"
        validating = write_shards(whole, prefix, 0, MAX_SHARD_TOKENS)
        count, tokens, shuffled = shuffle(documents(key for key in found if key not in val), made / "shuffled")
        if count + bool(val) < 2:
            raise UserError(f"{sum(sizes.values())} characters of text in {len(sizes)} usable files: more text is"
                            " needed, to have something to train on and something to validate on")
        first = until(shuffled, val_fraction * tokens, count - 1)
        validating = validating or write_shards(first, prefix, 0, MAX_SHARD_TOKENS)
        shards = {"train": write_shards(shuffled, made / f"{name}_train", 1, shard_tokens), "val": validating}
        checked = check(name, made, separator) if check else None
        counts = {part: token_counts(paths) for part, paths in shards.items()}
        if val:
            chosen = f"{len(val)} of {len(sizes)} files: {shown(sorted(val)[:5])}" + ", ..." * (len(val) > 5)
        else:
            chosen = f"{counts['val'][separator]:,} documents of all files, chosen by a hash, since {why}"
        train, validated = (n[:separator + 1] for n in counts.values())  # of each token
        p, smooth = train[train > 0] / train.sum(), (train + 1) / (train + 1).sum()
        facts = {"order": ORDER, "separator": separator, "documents": int(train[-1] + validated[-1]),
                 "validation": chosen,
                 **{part: {path.name: read_shard_header(path) for path in paths} for part, paths in shards.items()},
                 "unigram_entropy": round(-(p * np.log(p)).sum(), 6),
                 "unigram_loss": round(-(validated * np.log(smooth)).sum() / validated.sum(), 6)}
        install(made, folder, facts)
    report(folder, facts)
    return checked


def install(made: Path, folder: Path, facts: dict) -> None:
    """Moves the shards from `made` to `folder`, the first validation shard last. Then they are complete and belong
    together, and the trainer finds them. Raises UserError before it changes anything if it cannot do so."""
    folder.mkdir(exist_ok=True)
    old = [facts_file(folder), *shards_of(folder)]  # an earlier build may have had more shards
    for path in *old, *(folder / name for name in facts["train"] | facts["val"]):
        if os.path.isdir(path):
            raise UserError(f"{path} is a folder: remove it, and run the same command again")
    if folder.stat().st_dev != made.stat().st_dev:
        raise UserError(f"{folder} is on another disk than the folder around it: let DATA_PATH name a folder there")
    for path in old:
        path.unlink(missing_ok=True)
    for name in facts["train"]:
        os.replace(made / name, folder / name)
    facts_file(folder).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    for name in reversed(facts["val"]):
        os.replace(made / name, folder / name)


def text(paths: list[str], out: str, val_fraction: float, tokenizer: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", out):
        raise UserError(f"--out {out}: give the name of a folder to make in data/: letters, digits and ._- only")
    if out in ("fineweb10B", "stdlib", "run", "cache", "hellaswag", "__pycache__"):
        raise UserError(f"--out {out}: another folder of data/ has that name, take another")
    if not 0 < val_fraction < 1:
        raise UserError(f"--val-fraction {val_fraction}: give a number between 0 and 1")
    folder = data_root() / "data" / out
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {out}: data/{out} is no folder, take another name")
    files, known, notices = {}, set(), defaultdict(Counter)
    replaced = {*map(os.path.realpath, (facts_file(folder), *shards_of(folder)))}
    try:  # the files of an earlier build are no text
        facts = json.loads(facts_file(folder).read_text(encoding="utf-8"))
        ours = {facts_file(folder).name, *facts["train"], *facts["val"]}
    except (OSError, ValueError, LookupError, TypeError):
        ours = set()
    for given in paths:
        root = user_path(given)
        if not given or not os.path.exists(root):
            raise UserError(f"{given or 'an empty path'}: no such file or folder")
        for key, path in walk(root, notices) if root.is_dir() else [(root.name, root)]:
            if not os.path.isfile(path):
                notices["skipped {} that are no files (links to nothing, pipes, devices)"][key] += 1
            elif (real := os.path.realpath(path)) in replaced:
                if os.path.basename(real) not in ours:
                    raise UserError(f"{path}: --out {out} would replace this file; move it, or take another name")
            elif real in known:
                notices[TWICE][key] += 1
            else:
                known.add(real)
                # Keys are relative, so the split does not depend on the folder's place on the machine.
                files[key if key not in files else f"{key}\0{len(files)}"] = path
    print_notices(notices)
    print(build(out, files, tokenizer, val_fraction, SHARD_TOKENS, None, training_command))


# ---- Python's library ------------------------------------------------------------------------------------------------

def stdlib() -> None:
    """Makes shards of Python's library. Equal sources give equal shards."""
    folder = data_root() / "data/stdlib"
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
    files = {key: path for key, path in walk(root, defaultdict(Counter), STDLIB_SKIP)
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
