"""Pack the log of a run, to be sent to us, without the names of your folders, of your account and of your machine.

    python records/pack.py logs/run_1.txt

It writes run_1.zip into the current folder: the log, and the picture and the traces beside it. The packed log can be
trained again (./run.sh --rerun). It says what it has replaced. A name that is also a name in the code of the log stays,
since the code would not run without it. Checkpoints are not packed. Nothing is sent.
"""

import getpass
import gzip
import io
import json
import platform
import re
import sys
import tokenize
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.run.program import ROOT, UserError, atomic_write, run_program, user_error, user_path
from data.shards import data_root
from records.compare import read_run
from records.rerun import unpack

TITLES = {".": "folders of the project, its data and logs", "~": "home folders", "host": "the name of the machine",
          "user": "the name of the account"}  # what stands in the place of a name -> what it replaces


def words_of(source) -> set[str]:
    """The words, in small letters, of which the names in Python code consist."""
    words = {"localhost"}
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            words |= {*token.string.lower().split("_")} if token.type == tokenize.NAME else set()
    return words


def private_names(log: Path, words) -> tuple[list[tuple[str, str]], list[str]]:
    """([(pattern, what stands in its place)], the names that must stay, since the code of the log has these words)."""
    home, node = Path.home(), platform.node()
    names = {node: "host", node.partition(".")[0]: "host", home.name: "user"}
    with suppress(KeyError, OSError, ImportError):  # an account without a name
        names[getpass.getuser()] = "user"
    names.pop("", None)
    kept, patterns = sorted(name for name in names if name.lower() in words), []

    def add(before, text, after, new):
        for form in {text: 0, json.dumps(text)[1:-1]: 0}:  # the latter has other forms of what is no ASCII
            patterns.append((before + re.escape(form) + after, new))

    folders = {path: "." for folder in (ROOT, log.parent, data_root())
               for path in (folder.absolute(), folder.resolve())} | {home: "~", home.resolve(): "~"}
    for path in sorted(folders, key=lambda path: -len(str(path))):
        if len(path.parts) > 1:  # /data of a container may also stand behind another folder, in the code
            add(r"(?<![\w.}/~])" if len(path.parts) == 2 else "", str(path), r"(?![\w-])", folders[path])
    patterns.append((r"(?<![\w.])/(?:home|Users)/[^\s/\"'\\:,;)]+", "~"))  # of others, or of another machine
    for name in sorted(names.keys() - {*kept}, key=len, reverse=True):
        add(r"(?i)(?<![^\W_])", name, r"(?![^\W_])", names[name])
    return patterns, kept


def pack(log: Path) -> tuple[Path, list[str], dict[str, int], list[str]]:
    """(the archive, names in it, {replacement: how often}, names that stay). Raises UserError."""
    run = read_run(log)
    patterns, kept = private_names(log, set().union(*(words_of(text) for _, text in unpack(run))))
    counts = {}

    def public(text):
        for pattern, new in patterns:
            text, count = re.subn(pattern, new, text)
            counts[new] = counts.get(new, 0) + count
        return text

    beside = [path for path in sorted(log.parent.glob("*")) if re.fullmatch(
        re.escape(log.stem) + r"(\.svg|_rank\d+\.json\.gz)", path.name)]
    archive, names = Path(public(log.stem) + ".zip"), []
    with atomic_write(archive) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in (log, *beside):
            with user_error(f"cannot read {path}", EOFError, zlib.error):
                data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            data = public(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
            names.append(public(path.name))
            packed.writestr(names[-1], gzip.compress(data) if path.suffix == ".gz" else data)
    return archive, names, counts, kept


def main(argv) -> int:
    if "--help" in argv:
        print(__doc__)
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        raise UserError("expected a log, and nothing else (see --help)")
    archive, names, counts, kept = pack(user_path(argv[0]))
    print(f"{archive}, {archive.stat().st_size / 1e6:.1f} MB: {', '.join(names)}")
    for new, title in TITLES.items():
        print(f"replaced {counts.get(new, 0)} times by {new}: {title}")
    for name in kept:
        print(f"stays: {name}, which is also a word of the code")
    print("Labels, prompts, samples and names of your files stay: look into the archive, then attach it to an issue of"
          " this project.")
    return 0


if __name__ == "__main__":
    run_program(main)
