"""Before anything is compiled: checks of software, data, caches, disk and memory, and the size of the model."""

import math
import os
import platform
import re
import shutil
import sys
import tempfile
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import torch

import triton_kernels as kernels
from data.loader import Shard, no_row, require_validation_tokens
from data.run.length import (
    BORDERS, best_size, h100s, loss_on_L, seconds, stage_starts, sum_over_steps, total_tokens)
from data.run.machine import capability, choose_kernels, find_device
from data.run.memory import fit_memory, memory_report, require_state, state_bytes
from data.run.program import ROOT, UserError, existing_folder, is_writable, user_error, user_path
from data.run.state import check_weights, compare_shards, load_checkpoint
from data.shards import Shards, matching_files, run_shards
from data.tokenizer import text_codec


def share_taken(shard, whole, tokens, max_doc_len, most=100) -> float:
    """Estimates which share of a shard's tokens the loader uses, by packing its first `most` micro-batches of `tokens`
    tokens. The loader drops the ends of long documents, of micro-batches and of shards. whole: whether `shard` has all
    tokens of its file, not only the first ones."""
    cursor = count = 0
    while count < most and (packed := shard.pack(cursor, tokens, max_doc_len)):
        cursor, count = packed[-1], count + 1
    if not count:  # the first tokens do not fill a micro-batch, so only the ends of documents count
        return np.minimum(shard.lengths, max_doc_len).sum() / len(shard.tokens)
    used = len(shard.tokens) if whole and count < most else np.append(shard.starts, len(shard.tokens))[cursor]
    return count * tokens / used


def tokens_and_passes(config, files, available) -> tuple[int, float, int]:
    """(tokens that the run takes, passes over the training data (an estimate), tokens of one pass in two digits).
    files: the training shards, which hold `available` tokens; reads the beginning of the first one, and more only where
    that fills no row. Raises a UserError when no shard fills the row of a stage."""
    shard, stages = Shard(files[0], config.model, 2**22), config.schedule.stages
    batches, whole = np.array([stage.batch_tokens for stage in stages]), len(shard.tokens) < 2**22
    rows = batches // (config.system.micro_batches or 1)  # 0: nobody has chosen the number yet
    for row, stage in zip(rows, stages) if config.system.micro_batches else ():
        tried = chain([shard], (Shard(path, config.model) for path in files))
        if not any(each.pack(0, row, stage.max_doc_len) for each in tried):
            raise no_row(row, stage.max_doc_len)
    taken = [share_taken(shard, whole, row, stage.max_doc_len) for row, stage in zip(rows, stages)]
    trained, required = (sum_over_steps(config.schedule, tokens) for tokens in (batches, batches / taken))
    passes = required / available
    unit = 10 ** (math.floor(math.log10(trained / passes)) - 1)
    return trained, passes, math.floor(trained / passes / unit) * unit


def survey_training_data(config, world=1) -> tuple[str, bool]:
    """(a line about the training data, whether the data certainly lasts for the run and, in a run of ten million tokens
    or more, for one pass). Reads all headers and the beginning of the first shard. Raises UserError when no run can
    train on these files."""
    shards = Shards(config.data.train_files)
    files, counts, available = [*shards.files], shards.counts, sum(shards.counts)
    longest = 1 + max(stage.batch_tokens for stage in config.schedule.stages) // (config.system.micro_batches or 1)
    if longest > max(counts):
        raise UserError(f"{config.data.train_files}: the longest shard has {max(counts)} tokens, a row of the batch"
                        f" {longest}: use more data, a smaller batch (--stage1.batch_tokens ...) or more"
                        " --micro_batches")
    if config.schedule.minutes:
        return f"{len(files)} files, {available:,} tokens; --minutes will choose how many the run takes", True
    trained, passes, one_pass = tokens_and_passes(config, files, available)
    found = (f"{len(files)} files, {available:,} tokens; the run takes {trained:,}, with what is cut off long documents"
             f" about {passes * available:,.0f}: {passes:.2f} passes")
    if passes <= 1:
        return found, True
    return f"{found}; a second pass raises the validation loss: --train_tokens={one_pass} is about one", trained < 1e7


def survey_validation_data(config, world=1) -> tuple[str, bool]:
    """(a line about the validation data, whether no file of it is trained on). Raises UserError when the files hold too
    few tokens."""
    shards = Shards(config.data.val_files)
    files, counts = shards.files, shards.counts
    require_validation_tokens(config, sum(counts))
    found = f"{len(counts)} files, {sum(counts):,} tokens, {config.data.val_tokens + 1:,} of them used"
    trained = {path.resolve() for path in matching_files(config.data.train_files)}
    if both := trained.intersection(path.resolve() for path in files):
        return f"the run trains on {min(both).name}, which is also a file of the validation; {found}", False
    return found, True


def read_shards(config, part, most=2**30) -> list[str]:
    """Lines about the shards of one part of the data ("train", "val") for --check: what is doubtful, and what was not
    read, since it is behind the first `most` bytes. Raises UserError for a bad shard that the run certainly reads, and
    for shards that are not those of the checkpoint to resume."""
    shards = Shards(getattr(config.data, f"{part}_files"))
    trained = 1 if config.schedule.minutes else total_tokens(config.schedule)
    taken = trained if part == "train" else config.data.val_tokens + 1
    found, unread = list(shards.warnings), []
    if config.system.resume:
        found.append(compare_shards(load_checkpoint(config.system.resume), config, {part: shards}))
    for path, start, count in zip(shards.files, accumulate(shards.counts, initial=0), shards.counts):
        if 2 * (start + count) > most:
            unread.append(path)
            continue
        try:
            shards.read(path, config.model.vocab_size)
        except UserError as error:
            if start < taken:
                raise
            found.append(f"{error}; the run ends there if it needs the shard")
    if unread:
        found.append(f"not read: {len(unread)} shards from {unread[0].name} on; a run reads each when it needs it")
    return list(filter(None, found))


# A check takes a config and the number of ranks, and returns (what it has found, whether all is well). It raises
# UserError if the run will not start.

def check_versions(config, world):
    """Versions of Python and of the packages."""
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11):
        raise UserError(f"PyTorch {torch.__version__}: 2.11 or newer is needed; install the packages that"
                        " requirements.txt names, or use ./run.sh")
    return (f"Python {platform.python_version()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'},"
            f" Triton {kernels.triton.__version__}"), True


def check_device(config, world):
    """The CPU or this process's GPU, and its capabilities."""
    device = find_device(config)
    other = {"cpu": f"CPU, cores {os.cpu_count()}", "mps": "GPU of a Mac"}
    name = other.get(device.type) or torch.cuda.get_device_name(device)
    found = (f"{key.split('_')[-1]} {value}" for key, value in capability(device).items())
    return ", ".join([name, f"ranks {world}", *found]), True


def check_kernels(config, world):
    """The implementation of each operation."""
    names = choose_kernels(config, find_device(config))[2]
    return " ".join(f"{op}:{name}" for op, name in names.items()), True


def check_caches(config, world):
    """The folder in which Triton keeps its kernels."""
    if find_device(config).type != "cuda" or kernels.NO_TRITON:
        return "nothing is compiled", True
    folder = kernels.triton.knobs.cache.dir
    if not is_writable(Path(folder).absolute()):
        raise UserError(f"{folder} cannot be written: set TRITON_CACHE_DIR to a folder for compiled code")
    return folder, True


def check_disk(config, world):
    """The disk space for the log and the checkpoints."""
    if os.environ.get("RANK", "0") != "0":
        return "rank 0 writes", True
    system, size, purpose, each = config.system, 2**20, "the log", 0
    if system.save or system.save_every:
        weights, state, _, few = state_bytes(config, config.model.table)  # of all ranks
        saves = -(-stage_starts(config.schedule)[-1] // system.save_every) if system.save_every else 1
        count = min(saves, system.keep + 1)  # the oldest goes once the newest is complete
        each = 2 * weights + state + few  # weights, gradients, state
        size, purpose = size + count * each, f"the log and checkpoints of up to {each / 1e9:.1f} GB"
    folder = ROOT / user_path(system.log_dir)
    place, advice = existing_folder(folder), "choose another --log_dir"
    with user_error(f"cannot write a log in {folder}; {advice}"), tempfile.TemporaryFile(dir=place):
        free = shutil.disk_usage(place).free
    found = f"{folder.name}: {free // 2**20} MiB free, {size // 2**20} needed for {purpose}"
    if free < size:
        raise UserError(f"cannot write a log in {found}; make room, or {advice}")
    large = each > 4e9
    found += "; each checkpoint is larger than 4 GB: --ngram_rows, --keep and --save_every limit them" * large
    return found, not large


def check_memory(config, world):
    """The memory of the GPU."""
    device = find_device(config)
    require_state(config, device, world)
    return memory_report(config, device, world)


def check_checkpoint(config, world):
    """The checkpoint of --resume or --init_from."""
    path = config.system.resume or config.system.init_from
    state = load_checkpoint(path)
    check_weights(state, config.model)
    return f"{path}: step {state['step']}, {state['seconds']:.1f} s inside the clock", True


def check_tokenizer(config, world):
    """GPT-2's tokenizer, from which a new run with --bigram_normal makes `hash_ids`; a checkpoint contains them."""
    text_codec(config.model.vocab_size)
    return "GPT-2's BPE", True


def checks_of(config, **more) -> dict:
    """{name: check} of a start, in the order of --check. more: checks that --check adds, or has in place of these."""
    continues = config.system.resume or config.system.init_from
    last = {"checkpoint": check_checkpoint} if continues else {}
    last |= {"tokenizer": check_tokenizer} if config.model.bigram_normal and not continues else {}
    return {"versions": check_versions, "device": check_device, "kernels": check_kernels,
            "training data": survey_training_data, "validation data": survey_validation_data,
            "caches": check_caches, "disk": check_disk, "memory": check_memory} | more | last


def settle(config, device, world, most_rows):
    """The config with the fp8, the number of micro-batches and, up to `most_rows`, the number of n-gram embeddings that
    suit the device."""
    return fit_memory(choose_kernels(config, device)[0], device, world, most_rows)


def check_start(config, world, most_rows):
    """The config, settled. Raises UserError for what would stop the run later; warns about what might."""
    wanted = config.data.val_tokens
    config = settle(config, find_device(config), world, most_rows)
    found = [check(config, world) for check in checks_of(config).values()]
    if config.system.resume:
        compare_shards(load_checkpoint(config.system.resume), config, run_shards(config))
    lines = [f"the validation files have fewer tokens than --val_tokens={wanted}: {config.data.val_tokens} are used\n"]
    lines = lines * (config.data.val_tokens < wanted) + [f"warning: {text}\n" for text, fine in found if not fine]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(*lines, sep="", end="", file=sys.stderr, flush=True)
    return config


def fit_size(config, is_open, parse, world, gpu, device):
    """(config that suits this GPU, a line about its size or ""): where the size is open, that of the best size for the
    length of the run. One GPU leaves out a size that does not fit its memory, but for the smallest. Several GPUs ignore
    the memory: they must agree, but may differ in what is free.

    config: of any size, with the length; parse: function (gpu, **knobs of a size) -> config; gpu: see `h100s`."""
    def fits(size):
        return memory_report(settle(parse(gpu, **size.knobs), device, world, 0), device, world)[1]

    if not is_open:
        return parse(gpu), ""
    tokens, time, speed = total_tokens(config.schedule), 60 * config.schedule.minutes, h100s(gpu, world)
    best = best_size(time * speed, tokens)
    size = next(it for it in reversed(BORDERS) if it == min(BORDERS) or it <= best and (world > 1 or fits(it)))
    length = f"{time:g} s; the GPUs are worth {speed:.2f} H100s" if time else f"{tokens / 1e6:.3g}M tokens"
    line = f"size: {size} (channels x layers) for {length}"
    line += loss_on_L(size, time / seconds(size, 1, speed) if time else tokens)
    return parse(gpu, **size.knobs), line + f"; {best} would be better, but does not fit the memory" * (size != best)
