"""Make token shards for train_gpt.py; data/README.md has the format and what the trainer does with them.

    python data/prepare.py fineweb               the speedrun's data, already tokenised: 2 GB from the Hugging Face hub
    python data/prepare.py text PATH --out NAME  your own text files or folders; ends with the command that trains on them
    python data/prepare.py stdlib                bytes of Python's own library: no network, nothing to choose, 9 MB

Texts are cut at line ends into documents of about 1000 tokens, since the loader takes the head of a document and drops the rest.
Results lie in data/fineweb10B, data/NAME and data/stdlib of this folder, or of DATA_PATH. A shard gets its name once it is finished
and verified; whatever was interrupted or is damaged is continued or made again by the same command.
"""
import argparse
import hashlib
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.files import (  # noqa: E402
    SHARD_HEADER_BYTES, SHARD_MAGIC, SHARD_VERSION, UserError, data_root, find_files, read_shard)
from data import loader  # noqa: E402

GPT2_SEPARATOR = 50256  # <|endoftext|>
BYTE_SEPARATOR = 256  # the first value that is no byte
MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32
# A document ends at the first line end after so many characters: about 1000 tokens of either kind. Were files documents, the
# loader would see 5% of the library's sources at 1024 tokens per document; this way it sees 99%.
DOCUMENT_CHARACTERS = {GPT2_SEPARATOR: 4000, BYTE_SEPARATOR: 1000}

HUB_DATASET = "kjj0/fineweb10B-gpt2"  # by Keller Jordan; 10^8 tokens per shard
HUB_SHARDS = 103
FINEWEB_SHARDS = 9  # more than one record run reads

STDLIB_BYTES = 9_000_000  # a little less than any Python since 3.10 has, so that all give about the same
STDLIB_SHARD_TOKENS = 4_000_000  # three training shards, so that short runs change shards too
# Tests, two applications and tables of hexadecimal numbers; installed packages differ from machine to machine.
STDLIB_SKIP = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages", "__pycache__"}


# ---------------------------------------------------------------------------------------------------------------------
# Shards

def folder_of(name: str) -> Path:
    """Where the shards of that name lie: where the trainer looks for them."""
    return data_root() / "data" / name


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = np.zeros(SHARD_HEADER_BYTES // 4, "<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2", copy=False))


def pack(documents, limit: int):
    """Yields the token arrays of `documents` joined and cut into pieces of `limit` tokens; the last may be shorter."""
    pending, have = [], 0
    for tokens in documents:
        pending.append(tokens)
        have += len(tokens)
        if have >= limit:
            joined = np.concatenate(pending)
            whole = have - have % limit
            yield from joined[:whole].reshape(-1, limit)
            pending, have = [joined[whole:].copy()], have % limit
    if have:
        yield np.concatenate(pending)


def report(folder: Path, prefix: str, separator: int) -> None:
    """Prints what the finished shards of a folder hold. The entropy is the loss of a model that knows only how frequent
    each byte is; a trained one has to be below it."""
    count, shards = {}, {}
    for part in ("train", "val"):
        shards[part] = sorted(folder.glob(f"{prefix}_{part}_*.bin"))
        count[part] = np.zeros(2**16, np.int64)
        for path in shards[part]:
            tokens = read_shard(path, separator + 1)
            for i in range(0, len(tokens), 2**22):  # bincount makes an int64 copy, so not the whole shard at once
                count[part] += np.bincount(tokens[i:i + 2**22], minlength=2**16)
    train, val = count["train"], count["val"]
    print(f"{folder.name}: {train[separator] + val[separator]:,} documents, {train.sum():,} training and {val.sum():,} "
          f"validation tokens in {len(shards['train'])} + {len(shards['val'])} shards")
    if separator == BYTE_SEPARATOR:
        p = train[train > 0] / train.sum()
        print(f"unigram entropy: {-(p * np.log(p)).sum():.4f} nats/token")


def most_documents(lengths: np.ndarray, tokens: int) -> int:
    """The most documents of these lengths, one after another, that `tokens` tokens can touch; the first may have begun before."""
    ends = np.cumsum(lengths)
    return int((np.searchsorted(ends, ends - lengths + tokens) - np.arange(len(ends))).max()) + 2


def training_arguments(name: str, separator: int) -> list[str]:
    """The trainer's arguments for the shards of data/NAME: the preset of their tokenizer, and what has to differ from it for the
    amount of text there is and the lengths of its documents."""
    preset = "cpu" if separator == BYTE_SEPARATOR else "record"
    import train_gpt  # the knobs of the presets; the other commands do without
    config = train_gpt.PRESETS[preset]
    data, stages, micro_batches = config.data, config.schedule.stages, config.system.micro_batches
    given = {"preset": preset, **{f"{part}_files": f"data/{name}/{name}_{part}_*.bin" for part in ("train", "val")}}

    # Of a shard's end that fills no row nothing is seen, so the longest row is an eighth of the longest shard at most, or 2048.
    cut = min(stage.max_doc_len for stage in stages)
    lengths = [np.minimum(loader.Shard(path, config.model).lengths, cut) for path in find_files(given["train_files"])]
    longest, largest = max(n.sum() for n in lengths), max(stage.batch_tokens for stage in stages)
    while largest // micro_batches > 2048 and 8 * largest // micro_batches > longest:
        micro_batches *= 2
    if longest <= largest // micro_batches:
        raise UserError(f"the longest training shard keeps {longest} tokens of its documents, a row of the batch takes"
                        f" {largest // micro_batches + 1}: more text is needed")

    # All validation tokens, but for a few, in as few pieces as the preset allows.
    validation = [read_shard(path, separator + 1) for path in find_files(given["val_files"])]
    have, val_tokens, piece = sum(map(len, validation)) - 1, data.val_tokens, data.val_batch_tokens
    if have < 16:
        raise UserError(f"{have + 1} validation tokens, at least 17 are needed: more text, or a larger --val-fraction")
    if have < val_tokens:
        pieces = -(-have // piece)
        piece = have // pieces // 16 * 16
        val_tokens = pieces * piece

    rows = [(n, stage.batch_tokens // micro_batches) for n in lengths for stage in stages]
    rows += [(np.diff(np.flatnonzero(part == separator), append=len(part)), piece) for part in validation]
    tokens_per_doc = data.tokens_per_doc
    for n, row in rows:
        if len(n) and (most := most_documents(n, row + 1)) >= loader.cu_seqlens_size(row, tokens_per_doc):
            tokens_per_doc = max(1, row // (most + 1))

    fitting = {"micro_batches": micro_batches, "val_tokens": val_tokens, "val_batch_tokens": piece,
               "tokens_per_doc": tokens_per_doc, "sample_tokens": 200, "sample_prompt": ""}
    usual = train_gpt.flatten(config)
    given |= {key: value for key, value in fitting.items() if value != usual[key]}
    return [f"--{key}={value}" for key, value in given.items()]


def report_command(name: str, separator: int) -> None:
    """Prints how to train on the shards of data/NAME, after the trainer's own checks of the data, as the last line."""
    import train_gpt
    try:
        arguments = training_arguments(name, separator)
        config = train_gpt.parse_config(arguments)
        found, _ = loader.survey_training_data(config, np.diff(train_gpt.stage_starts(config.schedule)))
        loader.survey_validation_data(config)
    except UserError as error:
        print(f"warning: no run can start on this: {error}")
        return
    script = os.path.relpath(ROOT / "run.sh")
    print(f"training data: {found}")
    print("train on it, with a sample at the end" + (":" if separator == BYTE_SEPARATOR else ", on one GPU or more:"))
    print(shlex.join([script if os.sep in script else f"./{script}", *arguments]))


# ---------------------------------------------------------------------------------------------------------------------
# FineWeb

# The only two functions that use the network for FineWeb. What arrives is never executed, only read as numbers.

def hub_metadata(name: str) -> tuple[int, str]:
    """The size and the checksum that the hub has for one file of the dataset. Fails at once when offline."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    metadata = get_hf_file_metadata(hf_hub_url(HUB_DATASET, name, repo_type="dataset"))
    return metadata.size, metadata.etag


def hub_fetch(name: str, folder: Path) -> Path:
    """Downloads one file of the dataset into `folder`, with a progress bar; goes on where a broken connection stopped it."""
    from huggingface_hub import hf_hub_download
    return Path(hf_hub_download(HUB_DATASET, name, repo_type="dataset", local_dir=folder))


def verify(path: Path, size, checksum) -> None:
    """UserError when a shard of FineWeb is damaged, or differs from what the hub has (None: unknown)."""
    if size is not None and (have := path.stat().st_size) != size:
        raise UserError(f"{path}: {have} bytes, the hub has {size}")
    if re.fullmatch("[0-9a-f]{64}", checksum or ""):  # the hub's checksum of a large file is its SHA-256
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
        if digest.hexdigest() != checksum:
            raise UserError(f"{path}: SHA-256 {digest.hexdigest()}, the hub has {checksum}")
    read_shard(path, GPT2_SEPARATOR + 1)


def fineweb(shards: int) -> None:
    """Shards that are there are verified, too; without network only by what they hold."""
    if not 1 <= shards <= HUB_SHARDS:
        raise UserError(f"--shards {shards}: the dataset has 1 to {HUB_SHARDS} training shards")
    folder, offline = folder_of("fineweb10B"), None
    partial = folder / ".partial"
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]

    def reason(error):  # the hub's client has a dozen kinds; all mean that the file cannot be had
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

    for i, name in enumerate(names, 1):
        path, promised = folder / name, (None, None)
        try:
            promised = promised if offline else hub_metadata(name)
        except Exception as error:
            offline = error
        if path.exists():
            try:
                verify(path, *promised)
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
            verify(arrived, *promised)
        except UserError as error:
            arrived.unlink()  # or the hub's client would take it for finished
            raise UserError(f"{name}: the download is damaged ({error}); run this again") from error
        os.replace(arrived, path)
    shutil.rmtree(partial, ignore_errors=True)
    report(folder, "fineweb", GPT2_SEPARATOR)


# ---------------------------------------------------------------------------------------------------------------------
# Text

def walk(root: Path, skip=frozenset()):
    """Yields (name relative to root, path) of the files under root, sorted by name; hidden ones and `skip` left out."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in skip and not f.startswith(".")]
        found += [Path(folder, f) for f in files if not f.startswith(".")]
    return sorted((path.relative_to(root).as_posix(), path) for path in found)


def load_tokenizer(kind: str):
    """The function from str to token ids, and the separator."""
    if kind == "auto" and not torch.cuda.is_available():
        print("no GPU here: using bytes, for --preset=cpu (--tokenizer gpt2 makes data for a machine with GPUs)")
        kind = "bytes"
    if kind != "bytes":
        try:
            import tiktoken
            return tiktoken.get_encoding("gpt2").encode_ordinary, GPT2_SEPARATOR
        except (ImportError, OSError, ValueError) as error:  # not installed, no network, damaged on its way
            reason = f"GPT-2's tokenizer cannot be had ({type(error).__name__})"
            if kind == "gpt2":
                raise UserError(f"{reason}: install tiktoken and run this once with network, or use --tokenizer bytes") from error
            print(f"{reason}: using bytes instead, separator {BYTE_SEPARATOR}")
    return lambda text: np.frombuffer(text.encode(), np.uint8), BYTE_SEPARATOR


def read_text(path: Path) -> str:
    """The text of a file; raises UnicodeDecodeError when it is not UTF-8. Line ends stay as they are."""
    return path.read_bytes().decode("utf-8")


def rank(key: str) -> tuple[int, str]:
    """A fixed shuffle of files: the same on every machine, and mostly kept when files come or go."""
    return zlib.crc32(key.encode("utf-8", "surrogateescape")), key


def cut(text: str, characters: int) -> list[str]:
    """The text in pieces that end at the first line end after so many characters."""
    return re.findall(rf".{{{characters}}}.*?\n|.+", text, re.DOTALL)


def split(sizes: dict[str, int], val_fraction: float) -> set[str]:
    """The files to validate on: the first by rank() that make up `val_fraction` of the size."""
    val, have, want = set(), 0, val_fraction * sum(sizes.values())
    for key in sorted(sizes, key=rank)[:-1]:  # one at least is left for training
        if have < want:
            val.add(key)
            have += sizes[key]
    return val


def build(name: str, files: dict[str, Path], tokenizer: str, val_fraction: float, shard_tokens: int) -> int:
    """Tokenises `files` (by name relative to where they were found) in their order into the shards of data/NAME.
    Reads files one at a time and holds one training shard, or all of validation. Returns the separator."""
    sizes, binary, empty = {}, 0, 0
    for key, path in files.items():
        try:
            text = read_text(path)
        except UnicodeDecodeError:
            binary += 1
            continue
        if text.strip():
            sizes[key] = len(text)
        else:
            empty += 1
    if binary or empty:
        print(f"warning: skipped {binary + empty} files ({binary} not UTF-8, {empty} empty)")
    encode, separator = load_tokenizer(tokenizer)
    characters = DOCUMENT_CHARACTERS[separator]
    val, total = split(sizes, val_fraction), sum(sizes.values())
    whole = 0 < sum(sizes[key] for key in val) <= 4 * val_fraction * total
    if not whole:  # files too few and large for that share: single documents of them validate
        documents = {f"{key} {i}": len(document) for key in sizes
                     for i, document in enumerate(cut(read_text(files[key]), characters))}
        if len(documents) < 2:
            raise UserError(f"{total} characters of text in {len(sizes)} usable files: two files at least, or one of more than"
                            f" {characters} characters in several lines, to have something to train and something to validate on")
        val = split(documents, val_fraction)

    def tokens(part):
        for key in sizes:
            if whole and (key in val) != (part == "val"):
                continue
            for i, document in enumerate(cut(read_text(files[key]), characters)):
                if whole or (f"{key} {i}" in val) == (part == "val"):
                    yield np.concatenate([[separator], encode(document)]).astype(np.uint16)

    # Everything is made in a folder of its own and renamed at the end, validation last: its presence tells that the
    # shards belong together and are complete.
    folder = folder_of(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder.parent) as made:
        for i, shard in enumerate(pack(tokens("train"), shard_tokens), 1):
            write_shard(Path(made, f"{name}_train_{i:06d}.bin"), shard)
        for i, shard in enumerate(pack(tokens("val"), MAX_SHARD_TOKENS)):
            write_shard(Path(made, f"{name}_val_{i:06d}.bin"), shard)
        folder.mkdir(exist_ok=True)
        for part in ("val", "train"):  # of an earlier build, which may have had more
            for old in folder.glob(f"{name}_{part}_*.bin"):
                old.unlink()
        for shard in sorted(Path(made).iterdir()):
            os.replace(shard, folder / shard.name)
    report(folder, name, separator)
    return separator


def text(paths: list[Path], out: str, val_fraction: float, shard_tokens: int, tokenizer: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", out):
        raise UserError(f"--out {out}: give the name of a folder to make in data/: letters, digits and ._- only")
    if out in ("fineweb10B", "stdlib"):
        raise UserError(f"--out {out}: the other data has that name, take another")
    if not 0 < val_fraction < 1:
        raise UserError(f"--val-fraction {val_fraction}: give a number between 0 and 1")
    if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
        raise UserError(f"--shard-tokens {shard_tokens}: give a number from 1 to {MAX_SHARD_TOKENS}")
    files, known = {}, set()
    for root in paths:
        if not root.exists():
            raise UserError(f"{root}: no such file or folder")
        for key, path in walk(root) if root.is_dir() else [(root.name, root)]:
            if path.resolve() not in known and path.is_file():
                known.add(path.resolve())
                # Keys hold no machine's paths: where the same text lies must not change its split.
                files[key if key not in files else f"{key} {len(files)}"] = path
    report_command(out, build(out, files, tokenizer, val_fraction, shard_tokens))


# ---------------------------------------------------------------------------------------------------------------------
# The embedded default

def stdlib() -> None:
    """Identical shards for identical library sources."""
    folder = folder_of("stdlib")
    if all((folder / f"stdlib_{shard}.bin").exists() for shard in ("train_000001", "val_000000")):
        try:
            report(folder, "stdlib", BYTE_SEPARATOR)
            print("already there, nothing to do")
            return
        except UserError as error:
            print(f"damaged, building it again: {error}")
    root = Path(sysconfig.get_path("stdlib"))
    # Names with a dash, and _sysconfigdata, come from how this Python was built and hold its paths.
    files = {key: path for key, path in walk(root, STDLIB_SKIP)
                 if key.endswith(".py") and "-" not in key and not key.startswith("_sysconfigdata")}
    total = sum(path.stat().st_size for path in files.values())
    if total < STDLIB_BYTES // 2:
        raise UserError(f"{root}: only {total} bytes of library sources here; use `prepare.py text` with text of your own")
    # rank() also spreads what is left out evenly. It cuts at its end, validation takes from its start.
    keep = 2**32 * STDLIB_BYTES / total
    files = {key: path for key, path in files.items() if rank(key)[0] < keep}
    build("stdlib", files, "bytes", 0.05, STDLIB_SHARD_TOKENS)


# ---------------------------------------------------------------------------------------------------------------------

def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="fineweb|text|stdlib")
    command = commands.add_parser("fineweb", help="download tokenised FineWeb")
    command.set_defaults(run=fineweb)
    command.add_argument("--shards", type=int, default=FINEWEB_SHARDS, help=f"training shards, 1 to {HUB_SHARDS} (default %(default)s)")
    command = commands.add_parser("text", help="tokenise text files")
    command.set_defaults(run=text)
    command.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="UTF-8 text file, or folder with such files")
    command.add_argument("--out", required=True, metavar="NAME", help="shards are data/NAME/NAME_{train,val}_*.bin")
    command.add_argument("--val-fraction", type=float, default=0.05, help="share of the text for validation (default %(default)s)")
    command.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens per training shard (default %(default)s)")
    command.add_argument("--tokenizer", choices=("gpt2", "bytes", "auto"), default="auto",
                         help="auto: gpt2, or bytes where there is no GPU or GPT-2's files cannot be had (default %(default)s)")
    commands.add_parser("stdlib", help="Python's own library as bytes").set_defaults(run=stdlib)
    args = vars(parser.parse_args(argv))
    try:
        args.pop("run")(**args)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
