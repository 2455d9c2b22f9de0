"""data/NAME/NAME.json: what prepare.py knows of the shards beside it. Shards of other programs need no such file."""

import glob
import json
from pathlib import Path

from data.run.program import UserError
from data.shards import find_files, read_shard_header

ORDER = 2  # version of the order and the borders of documents; 1 was the order of the files' names, without a file


def facts_file(folder: Path) -> Path:
    return folder / f"{folder.name}.json"


def shards_of(folder: Path) -> list[Path]:
    """The shards in data/NAME that have its name, those of the validation first."""
    return [path for part in ("val", "train") for path in folder.glob(f"{glob.escape(folder.name)}_{part}_*.bin")]


def read_facts(folder: Path) -> dict:
    """{"order", "separator", "documents", "validation": which text it is, "train" and "val": {name of a shard: tokens},
    "unigram_entropy", "unigram_loss"} of the shards in data/NAME. The last two are the entropy of the training text,
    and the loss of a unigram of the training text on the validation text, in nats per token.

    Raises UserError when the shards are not those that today's prepare.py has made.
    """
    path, name = facts_file(folder), folder.name
    remake = "python data/prepare.py " + ("stdlib" if name == "stdlib" else f"text PATH --out {name}")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        order, shards = facts["order"], facts["train"] | facts["val"]
        facts["documents"], facts["validation"], facts["unigram_loss"] - facts["unigram_entropy"]  # all are there
    except FileNotFoundError:
        raise UserError(f"{name}: no {path.name}; if an older prepare.py made it, its documents are in the order of"
                        f" the files' names, and a model learns less; make it again: {remake}") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path.name} is damaged ({error}); make it again: {remake}") from None
    if order != ORDER:
        raise UserError(f"{name}: another version of prepare.py made it; make it again: {remake}")
    there = {path.name for path in shards_of(folder)}
    if wrong := sorted(there ^ set(shards)):
        raise UserError(f"{wrong[0]} {'is of another build' if wrong[0] in there else 'is missing'}; make it"
                        f" again: {remake}")
    for shard, tokens in shards.items():
        if (found := read_shard_header(folder / shard)) != tokens:
            raise UserError(f"{shard} has {found} tokens instead of {tokens}; make it again: {remake}")
    return facts


def facts_of_run(config) -> tuple[dict | None, str]:
    """(the facts about the validation text of a run or None, a warning or ""). Shards whose names are not like those of
    prepare.py have none."""
    path = find_files(config.data.val_files)[0].absolute()
    if not path.name.startswith(f"{path.parent.name}_val_"):
        return None, ""
    try:
        return read_facts(path.parent), ""
    except UserError as error:
        return None, str(error)
