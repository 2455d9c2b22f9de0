"""data/NAME/NAME.json: what prepare.py tells about the shards beside it. Shards of other programs need no such file."""

import glob
import json
from pathlib import Path

from data.run.errors import UserError
from data.shards import find_files, read_shard_header

ORDER = 2  # version of the order and the borders of documents; the first had no file and the order of the files' names


def facts_file(folder: Path) -> Path:
    return folder / f"{folder.name}.json"


def remake(folder: Path) -> str:
    """The advice to make the shards of a folder again."""
    command = "stdlib" if folder.name == "stdlib" else f"text PATH --out {folder.name}"
    return f"make it again: python data/prepare.py {command}"


def read_facts(folder: Path) -> dict:
    """{"order", "separator", "documents", "validation": which text it is, "train" and "val": {name of a shard: tokens},
    "unigram_entropy", "unigram_loss"} of the shards in data/NAME. The last two are the entropy of the training text,
    and the loss of a unigram of the training text on the validation text, in nats per token.

    Raises UserError when these are not the shards that today's prepare.py has made.
    """
    path = facts_file(folder)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        order, shards = facts["order"], facts["train"] | facts["val"]
        facts["documents"], facts["validation"], facts["unigram_loss"] - facts["unigram_entropy"]  # all are there
    except FileNotFoundError:
        raise UserError(f"{folder}: no {path.name}, so an older prepare.py has made it, with the documents in the order"
                        f" of the files' names, or another program; {remake(folder)}") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}); {remake(folder)}") from None
    if order != ORDER:
        raise UserError(f"{folder}: another version of prepare.py has made it; {remake(folder)}")
    there = {path.name for path in folder.glob(f"{glob.escape(folder.name)}_*_*.bin")}
    if wrong := sorted(there ^ set(shards)):
        raise UserError(f"{folder}: {wrong[0]} {'does not belong to it' if wrong[0] in there else 'is missing'};"
                        f" {remake(folder)}")
    for name, tokens in shards.items():
        if (found := read_shard_header(folder / name)) != tokens:
            raise UserError(f"{folder / name}: {found} tokens, prepare.py wrote {tokens}; {remake(folder)}")
    return facts


def facts_of_run(config) -> tuple[dict | None, str]:
    """(facts about the validation text of a run or None, a warning or ""). Only shards that have the names of
    prepare.py's, other than FineWeb, can have facts."""
    path = find_files(config.data.val_files)[0]
    if not path.name.startswith(f"{path.absolute().parent.name}_val_"):
        return None, ""
    try:
        return read_facts(path.absolute().parent), ""
    except UserError as error:
        return None, str(error)
