"""Make token shards for train_gpt.py. data/README.md describes the format and how the trainer reads shards.

    python data/prepare.py fineweb               the speedrun's data, already tokenised: 2 GB from the Hugging Face hub,
                                                 and GPT-2's tokenizer
    python data/prepare.py text PATH --out NAME  your text files or folders; prints the command that trains on them
    python data/prepare.py stdlib                bytes of Python's own library: 9 MB of text, no network, no options

prepare.py cuts texts at line ends into documents of about 1000 tokens of GPT-2 or 400 bytes, because the loader uses
only the beginning of a longer document. The shards are in data/fineweb10B, data/NAME and data/stdlib of this folder,
or of DATA_PATH. A shard gets its name when it is finished and verified. After an interruption or damage, run the same
command again.
"""
import argparse
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data import require_packages  # noqa: E402

require_packages("numpy", "torch")
import numpy as np  # noqa: E402
import torch  # noqa: E402

from data.loader import Shard, cu_seqlens_size  # noqa: E402
from data.run.errors import UserError, user_error  # noqa: E402
from data.run.knobs import flatten  # noqa: E402
from data.run.memory import possible_micro_batches  # noqa: E402
from data.run.start import survey_training_data, survey_validation_data, tokens_and_passes  # noqa: E402
from data.shards import (  # noqa: E402
    SHARD_HEADER_BYTES, SHARD_MAGIC, SHARD_VERSION, data_root, digest, find_files, read_shard, read_shard_header)
from data.tokenizer import gpt2_bpe  # noqa: E402

GPT2_SEPARATOR = 50256  # <|endoftext|>
BYTE_SEPARATOR = 256  # the first value that is no byte
MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32
# A document ends at the first line end after about this many tokens. The loader uses the first 896 tokens or 448 bytes
# of a document in the first stage, and more later. A model learns less from the same text in documents of 1000 bytes,
# since the loader drops half of it (records/2026-11-27_learning).
DOCUMENT_TOKENS = {GPT2_SEPARATOR: 900, BYTE_SEPARATOR: 350}
STDLIB_CHARACTERS = 1000  # the library has more text than a run takes, and losses stay comparable

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


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = np.zeros(SHARD_HEADER_BYTES // 4, "<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    with user_error(f"cannot write {path}"), open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2", copy=False))


def pack(documents, limit: int):
    """Joins the token arrays of `documents` and yields pieces of `limit` tokens; the last piece may be shorter."""
    pending, count = [], 0
    for tokens in documents:
        pending.append(tokens)
        count += len(tokens)
        if count >= limit:
            joined = np.concatenate(pending)
            whole = count - count % limit
            yield from joined[:whole].reshape(-1, limit)
            pending, count = [joined[whole:].copy()], count % limit
    if count:
        yield np.concatenate(pending)


def report(folder: Path, prefix: str, separator: int) -> None:
    """Prints the numbers of documents, tokens and shards in a folder, and for bytes the unigram entropy.

    A trained model must have a lower loss than the unigram entropy.
    """
    count, shards = {}, {}
    for part in ("train", "val"):
        shards[part] = sorted(folder.glob(f"{prefix}_{part}_*.bin"))
        count[part] = np.zeros(2**16, np.int64)
        for path in shards[part]:
            tokens = read_shard(path, separator + 1)
            for i in range(0, len(tokens), 2**22):  # in pieces, since bincount makes an int64 copy
                count[part] += np.bincount(tokens[i:i + 2**22], minlength=2**16)
    train, val = count["train"], count["val"]
    print(f"{folder.name}: {train[separator] + val[separator]:,} documents, {train.sum():,} training and {val.sum():,} "
          f"validation tokens in {len(shards['train'])} + {len(shards['val'])} shards")
    if separator == BYTE_SEPARATOR:
        p = train[train > 0] / train.sum()
        print(f"unigram entropy: {-(p * np.log(p)).sum():.4f} nats/token")


def most_documents(lengths: np.ndarray, tokens: int) -> int:
    """The largest number of documents that `tokens` consecutive tokens can touch; the first may begin earlier."""
    ends = np.cumsum(lengths)
    return int((np.searchsorted(ends, ends - lengths + tokens) - np.arange(len(ends))).max()) + 2


def fit_to_text(words: list[str], train: list[np.ndarray], val: list[np.ndarray]) -> list[str]:
    """Arguments of the trainer, with changes that fit its batches to a text: to the amount and to the lengths of the
    documents. train, val: these lengths, for each shard. Raises UserError when there is too little text."""
    import train_gpt  # only this command needs it, for the presets

    def counts(config):
        """The numbers of micro-batches that the trainer may choose."""
        return [config.system.micro_batches] if config.system.micro_batches else possible_micro_batches(config, 1)
    config = train_gpt.parse_config(words)
    data, stages = config.data, config.schedule.stages

    # The loader drops the end of a shard if the end fills no micro-batch. So the longest micro-batch has at most 2048
    # tokens, or an eighth of the longest shard if that is more.
    max_doc_len = min(stage.max_doc_len for stage in stages)
    lengths = [np.minimum(n, max_doc_len) for n in train]
    longest, largest = max(n.sum() for n in lengths), max(stage.batch_tokens for stage in stages)
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
    available, val_tokens, piece = sum(n.sum() for n in val) - 1, data.val_tokens, data.val_batch_tokens
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


def training_arguments(name: str, separator: int) -> list[str]:
    """The trainer's arguments for the shards of data/NAME: a preset, a length, and what `fit_to_text` adds. Raises
    UserError when there is too little text."""
    import train_gpt
    preset, shorter = ("cpu", "cpu") if separator == BYTE_SEPARATOR else ("single", "short")
    patterns = {part: f"data/{name}/{name}_{part}_*.bin" for part in ("train", "val")}
    files, model = list(map(find_files, patterns.values())), train_gpt.parse_config([f"--preset={preset}"]).model
    train, val = ([Shard(path, model).lengths for path in paths] for paths in files)
    tokens = sum(map(read_shard_header, files[0]))

    def fitted(*words):
        return fit_to_text([*words, *(f"--{part}_files={pattern}" for part, pattern in patterns.items())], train, val)

    # A second pass raises the validation loss (records/2026-11-27_learning), so a smaller text gets a shorter run. On a
    # GPU, this run has the preset `short`, because its length also chooses the size of the model. A shorter run has
    # smaller batches, and the loader drops more of the text for them. So a run of this length may still be too long.
    arguments = fitted(f"--preset={preset}")
    for attempt in range(9):
        _, passes, one_pass = tokens_and_passes(train_gpt.parse_config(arguments), files[0], tokens)
        if passes <= 1:
            break
        try:
            arguments = fitted(f"--preset={shorter}", f"--train_tokens={one_pass}")
        except UserError:  # a run of 20 steps, or a micro-batch of it, is longer than the text
            return arguments if attempt else fitted(f"--preset={shorter}")
    return arguments


def report_command(name: str, separator: int) -> None:
    """Checks the shards of data/NAME as the trainer does, then prints the command that trains on them."""
    import train_gpt
    try:
        arguments = training_arguments(name, separator)
        config = train_gpt.parse_config(arguments)
        found, _ = survey_training_data(config)
        survey_validation_data(config)
    except UserError as error:
        print(f"warning: no run can start on this: {error}")
        return
    script, start, note = os.path.relpath(ROOT / "run.sh"), "", ""
    if separator != BYTE_SEPARATOR:
        try:
            train_gpt.parse_config(arguments, 8)
            note = "; several GPUs make no sample"
        except UserError:  # too few steps, since a step is larger on several GPUs
            start = "NPROC=1 "
    if "DATA_PATH" in os.environ:
        note += f"; it needs DATA_PATH={shlex.quote(os.environ['DATA_PATH'])}"
    print(f"training data: {found}")
    print(f"train on it, with a sample at the end{note}:")
    print(start + shlex.join([script if os.sep in script else f"./{script}", *arguments]))


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
    report(folder, "fineweb", GPT2_SEPARATOR)
    try:  # the model takes a table from the tokenizer (--bigram_normal)
        gpt2_bpe()
    except UserError as error:
        print(f"warning: {error}; a run needs it", file=sys.stderr)


# ---- Text ------------------------------------------------------------------------------------------------------------

def walk(root: Path, skip=frozenset()):
    """(name relative to root, path) of all files under root, by name, without hidden files and folders in `skip`."""
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
            return gpt2_bpe().encode_ordinary, GPT2_SEPARATOR
        except UserError as error:
            if kind == "gpt2":
                raise UserError(f"{error}; or use --tokenizer bytes") from error
            print(f"{error}; using bytes instead, separator {BYTE_SEPARATOR}")
    return lambda text: np.frombuffer(text.encode(), np.uint8), BYTE_SEPARATOR


def read_text(path: Path) -> str:
    """The text of a file, with its line ends. Raises UnicodeDecodeError when it is not UTF-8."""
    return path.read_bytes().decode("utf-8")


def rank(key: str) -> tuple[int, str]:
    """Sort key of a fixed shuffle of files: equal on all machines, and little changed by new or deleted files."""
    return zlib.crc32(key.encode("utf-8", "surrogateescape")), key


def cut(text: str, characters: int) -> list[str]:
    """Cuts the text into pieces, each at the first line end after `characters` characters, or after four times as many
    if no line ends there."""
    return re.findall(rf".{{{characters}}}.{{0,{3 * characters}}}?\n|.{{1,{4 * characters}}}", text, re.DOTALL)


def document_characters(texts: list[str], encode, separator: int) -> int:
    """The characters of DOCUMENT_TOKENS tokens in text like `texts`."""
    characters, tokens = sum(map(len, texts)), sum(len(encode(text)) for text in texts)
    return max(1, round(DOCUMENT_TOKENS[separator] * characters / tokens)) if tokens else DOCUMENT_TOKENS[separator]


def split(sizes: dict[str, int], val_fraction: float) -> set[str]:
    """The validation files: the first files in the order of rank() that make up `val_fraction` of the size."""
    val, size, target = set(), 0, val_fraction * sum(sizes.values())
    for key in sorted(sizes, key=rank)[:-1]:  # at least one file remains for training
        if size < target:
            val.add(key)
            size += sizes[key]
    return val


def build(name: str, files: dict[str, Path], tokenizer: str, val_fraction: float, shard_tokens: int,
          characters: int | None = None) -> int:
    """Tokenises `files`, {relative name: path}, in their order into the shards of data/NAME; returns the separator.

    A document ends after `characters` characters (None: `document_characters`). Reads one file at a time; the memory
    holds one training shard, or all validation tokens. Raises UserError when there is too little text.
    """
    sizes, skipped = {}, {"not UTF-8": [], "empty": []}
    for key, path in files.items():
        try:
            text = read_text(path)
        except UnicodeDecodeError:
            skipped["not UTF-8"].append(key)
            continue
        if text.strip():
            sizes[key] = len(text)
        else:
            skipped["empty"].append(key)
    if any(skipped.values()):
        parts = (f"{len(keys)} {why}, such as {keys[0]}" for why, keys in skipped.items() if keys)
        print(f"warning: skipped {sum(map(len, skipped.values()))} files ({'; '.join(parts)})")
    encode, separator = load_tokenizer(tokenizer)
    if not characters:
        some = sorted(sizes, key=rank)[:10]
        characters = document_characters(
            [read_text(files[key])[:10**6 // len(some)] for key in some], encode, separator)
    val, total = split(sizes, val_fraction), sum(sizes.values())
    whole = val and val_fraction * total <= sum(sizes[key] for key in val) <= 4 * val_fraction * total
    if not whole:  # there are too few or too large files for this share, so single documents validate
        documents = {f"{key} {i}": len(document) for key in sizes
                     for i, document in enumerate(cut(read_text(files[key]), characters))}
        if len(documents) < 2:
            raise UserError(f"{total} characters of text in {len(sizes)} usable files: two files at least, or one of"
                            f" more than {characters} characters in several lines, to have something to train and"
                            " something to validate on")
        val = split(documents, val_fraction)

    def tokens(part):
        for key in sizes:
            if whole and (key in val) != (part == "val"):
                continue
            for i, document in enumerate(cut(read_text(files[key]), characters)):
                if whole or (f"{key} {i}" in val) == (part == "val"):
                    yield np.concatenate([[separator], encode(document)]).astype(np.uint16)

    # Shards are written to a temporary folder and renamed at the end, the validation shard last: if it exists, the
    # shards belong together and are complete.
    folder = folder_of(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder.parent) as made:
        for i, shard in enumerate(pack(tokens("train"), shard_tokens), 1):
            write_shard(Path(made, f"{name}_train_{i:06d}.bin"), shard)
        for i, shard in enumerate(pack(tokens("val"), MAX_SHARD_TOKENS)):
            write_shard(Path(made, f"{name}_val_{i:06d}.bin"), shard)
        folder.mkdir(exist_ok=True)
        for part in ("val", "train"):  # shards of an earlier build, which may have been more
            for old in folder.glob(f"{name}_{part}_*.bin"):
                old.unlink()
        for shard in sorted(Path(made).iterdir()):
            os.replace(shard, folder / shard.name)
    report(folder, name, separator)
    return separator


def text(paths: list[Path], out: str, val_fraction: float, shard_tokens: int, tokenizer: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", out):
        raise UserError(f"--out {out}: give the name of a folder to make in data/: letters, digits and ._- only")
    if out in ("fineweb10B", "stdlib", "run", "cache", "hellaswag"):
        raise UserError(f"--out {out}: another folder of data/ has that name, take another")
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
                # Keys are relative, so the split does not depend on the folder's place on the machine.
                files[key if key not in files else f"{key} {len(files)}"] = path
    report_command(out, build(out, files, tokenizer, val_fraction, shard_tokens))


# ---- Python's library ------------------------------------------------------------------------------------------------

def stdlib() -> None:
    """Makes shards of Python's library. Equal sources give equal shards."""
    folder = folder_of("stdlib")
    if all((folder / f"stdlib_{shard}.bin").exists() for shard in ("train_000001", "val_000000")):
        try:
            report(folder, "stdlib", BYTE_SEPARATOR)
            print("already there, nothing to do")
            return
        except UserError as error:
            print(f"damaged, building it again: {error}")
    root = Path(sysconfig.get_path("stdlib"))
    # Files with a dash in their name, and _sysconfigdata, describe the build of this Python and contain its paths.
    files = {key: path for key, path in walk(root, STDLIB_SKIP)
             if key.endswith(".py") and "-" not in key and not key.startswith("_sysconfigdata")}
    total = sum(path.stat().st_size for path in files.values())
    if total < STDLIB_BYTES // 2:
        raise UserError(f"{root}: only {total} bytes of library sources here; use `prepare.py text` with text of your"
                        " own")
    # rank() drops an even sample of the files, from the end of its order; validation files are at the start.
    keep = 2**32 * STDLIB_BYTES / total
    files = {key: path for key, path in files.items() if rank(key)[0] < keep}
    build("stdlib", files, "bytes", 0.05, STDLIB_SHARD_TOKENS, STDLIB_CHARACTERS)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="fineweb|text|stdlib")
    command = commands.add_parser("fineweb", help="download tokenised FineWeb")
    command.set_defaults(run=fineweb)
    command.add_argument("--shards", type=int, default=FINEWEB_SHARDS,
                         help=f"training shards, 1 to {HUB_SHARDS} (default %(default)s)")
    command = commands.add_parser("text", help="tokenise text files")
    command.set_defaults(run=text)
    command.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="UTF-8 text file, or folder of text files")
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
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character of the name of a file
    sys.exit(main(sys.argv[1:]))
