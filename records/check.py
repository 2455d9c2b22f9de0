"""What can be known before anything is compiled: `python train_gpt.py --check` shows it all, every start stops at what will fail.

`check_config` looks at the numbers of a config alone. Each of CHECKS takes (config, number of ranks), returns what it found, raises
UserError when the run will not go well, Doubt when it may not.
"""

import dataclasses
import getpass
import os
import platform
import re
import shutil
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import torch

import train_gpt as T
from data import loader
from records import evaluate, work

LESS_MEMORY = "raise --micro_batches (16, 32: smaller forward passes), lower --val_batch_tokens, or try --cuda_graphs=false"


class Doubt(T.UserError):
    """A start says so and goes on."""


def check_config(config, world=1):
    """UserError when the numbers of a config do not make sense or do not fit together."""
    def require(ok, message):
        if not ok:
            raise T.UserError(message)

    for key, value in T.flatten(config).items():
        least = 0 if key in ("extension_steps", "seed", "sample_tokens", "micro_batches", "save_every", "keep") else 1
        require(isinstance(value, (bool, str, float, tuple)) or value >= least, f"--{key}={value}: must be {least} or more")
    model, schedule, run, data = config.model, config.schedule, config.run, config.data
    require(model.model_dim % (8 * model.num_heads) == 0 and model.num_heads % 2 == 0,
            f"--model_dim={model.model_dim} --num_heads={model.num_heads}: heads must be even and their width a multiple of 8")
    require(2 <= model.vocab_size <= 65536, f"--vocab_size={model.vocab_size}: shards hold 16-bit tokens, 2 to 65536 of them")
    require(schedule.scheduled_steps >= len(schedule.stages) - 1, f"--scheduled_steps={schedule.scheduled_steps}: one per stage at least")
    require(0 < schedule.cooldown_frac <= 1 <= schedule.cooldown_frac * schedule.scheduled_steps,
            f"--cooldown_frac={schedule.cooldown_frac}: at most 1, and at least one of the scheduled steps")
    require(schedule.split_stage <= len(schedule.stages), f"--split_stage={schedule.split_stage}: there are {len(schedule.stages)}")
    require(len(schedule.muon_momentum) == 2, f"--muon_momentum={T.render(schedule.muon_momentum)}: two numbers, at rest and at work")
    require(run.seed < 2**63, f"--seed={run.seed}: must be below 2 ** 63")
    require(re.fullmatch(r"([0-9]+:[1-9][0-9]*)?", run.profile), f"--profile={run.profile}: expected START:COUNT, for example 20:4")
    total = schedule.scheduled_steps + schedule.extension_steps
    require(run.profiled.stop <= total, f"--profile={run.profile}: the run has steps 0 to {total - 1}")
    require(not any(step % every == 0 for step in run.profiled[1:] for every in (run.val_every, run.save_every or total)),
            f"--profile={run.profile}: a pause comes in between; take other steps, or change --val_every={run.val_every}"
            f" or --save_every={run.save_every}")
    require("/" not in run.run_label and "\\" not in run.run_label, f"--run_label={run.run_label}: it names a file, not a folder")
    require(run.device in ("cuda", "cpu"), f"--device={run.device}: cuda or cpu")
    require(run.dtype in ("bfloat16", "float32"), f"--dtype={run.dtype}: bfloat16 or float32")
    plain_attention = run.device == "cpu" or run.kernels == "torch" or "attention:torch" in run.kernels
    require(plain_attention or run.dtype == "bfloat16",
            f"--dtype={run.dtype}: the attention kernel is made for bfloat16; add --kernels=attention:torch")
    require(plain_attention or model.head_dim >= 16 and model.head_dim & (model.head_dim - 1) == 0,
            f"--model_dim={model.model_dim} --num_heads={model.num_heads}: the attention kernel takes heads of 16, 32, 64, 128, ..."
            " channels; or add --kernels=attention:torch")
    require(data.data_end in ("wrap", "stop"), f"--data_end={data.data_end}: wrap or stop")
    require(data.val_batch_tokens % 16 == 0 and data.val_tokens % data.val_batch_tokens == 0,
            f"--val_tokens={data.val_tokens} must be a multiple of --val_batch_tokens={data.val_batch_tokens}, that one of 16")
    if not run.micro_batches:  # chosen later, and checked then
        require(world == 1, f"--micro_batches=0 (--preset=single) is for one process, give {world} of them a number")
        return
    require(run.micro_batches % world == 0,
            f"{world} processes do not divide --micro_batches={run.micro_batches}: start a divisor of it, or more than that")
    for i, stage in enumerate(schedule.stages, 1):
        require(stage.batch_tokens % (16 * run.micro_batches) == 0,
                f"--stage{i}.batch_tokens={stage.batch_tokens} must be a multiple of 16 * --micro_batches={run.micro_batches}"
                + (f", one for each of {world} processes" if world == run.micro_batches > 1 else ""))
        require(len(stage.mtp_start) == len(stage.mtp_end), f"--stage{i}.mtp_start and mtp_end need the same length")


def torch_version():
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def check_versions(config, world):
    """Those of Python and of what it imports."""
    if torch_version() < (2, 11):
        raise T.UserError(f"PyTorch {torch.__version__}: 2.11 or newer is needed; install what requirements.txt names, or use ./run.sh")
    return (f"Python {platform.python_version()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'},"
            f" Triton {T.kernels.triton.__version__}")


def check_device(config, world):
    """The CPU or this process's GPU, and what it offers."""
    device, name = T.find_device(config), f"CPU, cores {os.cpu_count()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return ", ".join([name, f"ranks {world}", *(f"{key.split('_')[-1]} {value}" for key, value in T.capability(device).items())])


def check_kernels(config, world):
    """The implementation that each operation will use."""
    return " ".join(f"{op}:{name}" for op, name in T.choose_kernels(config, T.find_device(config))[2].items())


def check_training_data(config, world):
    """From all headers and the beginning of the first shard."""
    files, stages = loader.find_files(config.data.train_files), config.schedule.stages
    have, batches = [loader.read_shard_header(path) for path in files], np.array([stage.batch_tokens for stage in stages])
    lengths = loader.Shard(files[0], config.model, 2**22).lengths
    row = batches.max() // config.run.micro_batches + 1
    if row > max(have):
        raise T.UserError(f"{config.data.train_files}: the longest shard has {max(have)} tokens, a row of the batch {row}: use more data,"
                        " a smaller batch (--stage1.batch_tokens ...) or more --micro_batches")
    kept = [np.minimum(lengths, stage.max_doc_len).sum() / lengths.sum() for stage in stages]
    least, about = (np.diff(T.stage_starts(config.schedule)) @ tokens for tokens in (batches, batches / kept))
    found = (f"{len(files)} files, {sum(have):,} tokens; the run takes {least:,}, with what is cut off long documents about"
             f" {about:,.0f}: {about / sum(have):.2f} passes")
    if config.data.data_end == "stop" and about > sum(have):
        kind = T.UserError if least > sum(have) else Doubt
        raise kind(f"the training data may end before the run: {found}; add shards or use --data_end=wrap")
    return found


def check_validation_data(config, world):
    """From all headers."""
    counts = [loader.read_shard_header(path) for path in loader.find_files(config.data.val_files)]
    loader.require_validation_tokens(config, sum(counts))
    return f"{len(counts)} files, {sum(counts):,} tokens, {config.data.val_tokens + 1:,} of them used"


def state_bytes(config):
    """(weights, optimizer state) of all ranks together."""
    params = dict(T.GPT(config.model, None, None, torch.device("meta")).named_parameters())
    each = {"adam": 4 + 4, "normuon": 4 + 2}  # m, v; m, mantissa
    return sum(p.nbytes for p in params.values()), sum(each[row.optim] * params[row.label].numel() for row in T.PARAM_TABLE)


def check_checkpoint(config, world):
    """The one to go on from."""
    state = evaluate.load_to_resume(config)
    return f"{config.run.resume}: step {state['step']}, {state['seconds']:.1f} s inside the clock"


def existing(folder):
    """The folder, or the one in which it would be made."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def writable(folder):
    return os.access(existing(folder), os.W_OK | os.X_OK)


def check_caches(config, world):
    """The folders in which the compilers keep what they made, by the environment variables that name them."""
    folders = {}
    if T.find_device(config).type == "cuda" and not T.kernels.NO_TRITON:
        folders["TRITON_CACHE_DIR"] = T.kernels.triton.knobs.cache.dir
    if config.run.compile:  # by default a folder in that of temporary files; torch itself could say which, but makes it when asked
        folders["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    for name, folder in folders.items():
        if not writable(Path(folder).absolute()):
            raise T.UserError(f"{folder} cannot be written: set {name} to a folder for what is compiled")
    try:
        getpass.getuser()
    except (KeyError, OSError):
        if config.run.compile and "TORCHINDUCTOR_CACHE_DIR" not in os.environ and torch_version() < (2, 13):
            raise Doubt("older versions of PyTorch need a user with a name: set USER, or TORCHINDUCTOR_CACHE_DIR") from None
    return ", ".join(folders.values()) or "nothing is compiled"


def check_disk(config, world):
    """Room for what rank 0 writes."""
    if os.environ.get("RANK", "0") != "0":
        return "rank 0 writes"
    run, folder = config.run, Path(T.__file__).parent / config.run.log_dir
    place = existing(folder)
    free, need, need_for = shutil.disk_usage(place).free, 2**20, "the log"
    if run.save or run.save_every:
        weights, state = state_bytes(config)
        saves = -(-T.stage_starts(config.schedule)[-1] // run.save_every) if run.save_every else 1
        count = min(saves, run.keep + 1) if run.keep else saves  # the oldest goes when the newest is complete
        need, need_for = need + count * (2 * weights + state), "the log and checkpoints"  # of weights, gradients and state at most
    found = f"{config.run.log_dir}: {free // 2**20} MiB free, {need // 2**20} needed for {need_for}"
    if free < need or not writable(place):
        raise T.UserError(f"cannot write a log in {found}; make room, or choose another --log_dir")
    return found


def estimate_memory(config, world):
    """MiB (allocated, reserved) on each GPU at the peak, with the default kernels.

    Within 0.3 % and 2 % of what 1, 2, 4, 8 H200s took (records/2026-11-20_one_to_eight: one 23470 and 39806, eight 20035 and 36386), and
    16 micro-batches on one (15898). To those 14.2 is fitted, about what autograd keeps per layer; the 18 of validation is counted.
    """
    (weights, state), run, V = state_bytes(config), config.run, config.model.padded_vocab
    N = max(stage.batch_tokens for stage in config.schedule.stages) // run.micro_batches
    plane = config.model.model_dim * getattr(torch, run.dtype).itemsize  # one activation of one token
    # The head has its gradient, in bytes or bf16, and either a block of bf16 logits or (bytes) the gradient transposed.
    head = (1 if run.fp8 else 2) * N * V + max(run.fp8 * N * V, 2 * V * min(N, T.kernels.head_rows(V)))
    row = 14.2 * len(T.LAYERS) * N * plane + head
    # Weights, gradients, while warming up the initial weights; rotary tables, codes of the head, workspaces.
    allocated = (2 + run.compile) * weights + state / world + 430 * 2**20 + max(row, 18 * config.data.val_batch_tokens * plane)
    return allocated / 2**20, (allocated + run.cuda_graphs * row) / 2**20  # the graphs keep their memory to themselves


def fitting(config, world):
    """With --micro_batches=0: the config with the fewest, 8 to 128, for which the GPU has the memory, or the most; that of --resume."""
    if config.run.micro_batches:
        return config
    numbers, fits = [8, 16, 32, 64, 128], None
    if config.run.resume:  # as it was begun
        numbers = [evaluate.load_checkpoint(config.run.resume)["config"].get("micro_batches", 8)]
    for number in numbers:
        try:
            check_config(tried := dataclasses.replace(config, run=dataclasses.replace(config.run, micro_batches=number)), world)
            fits = tried
        except T.UserError:
            if fits is None:
                raise
            break  # so many do not divide the batches
        try:
            check_memory(fits, world)
            break
        except T.UserError:  # also without a GPU, which another check says
            pass
    return fits


def check_memory(config, world):
    """The estimate against what the GPU has free: less than what will be allocated is too little, less than what is reserved a doubt."""
    device = T.find_device(config)
    if device.type == "cpu":
        return "not estimated for a CPU"
    (least, most), free = estimate_memory(T.choose_kernels(config, device)[0], world), torch.cuda.mem_get_info(device)[0] / 2**20
    found = (f"{free:.0f} MiB of the GPU are free, about {least:.0f} to {most:.0f} needed (estimate) with micro-batches"
             f" {config.run.micro_batches}")
    if most > free:
        raise (T.UserError if least > free else Doubt)(f"{found}: {LESS_MEMORY}")
    return found


def expected_time(config, world):
    """From seconds per token with the default kernels: one H200 (790 TFLOP/s in bf16; records), two cores of an EPYC (README)."""
    device, schedule = T.find_device(config), config.schedule
    if config.model != T.PRESETS["cpu" if device.type == "cpu" else "record"].model or config.run.kernels != "auto":
        return "not known for this model or these kernels"
    minutes = np.diff(T.stage_starts(schedule)) @ [stage.batch_tokens for stage in schedule.stages] / 60
    if device.type == "cpu":
        return f"{172e-6 * minutes:.1f} minutes on two cores of an AMD EPYC"
    rate = work.ceilings()["bf16"] / 1e12
    minutes *= 1.36e-6 / world * 790 / rate
    if T.capability(device)["hardware_tma"] == "no":
        minutes *= 1.21  # nor Hopper's matrix instructions, nor FP8 (records/2026-11-20_hardware)
    return f"about {minutes:.1f} minutes (estimate from an H200, scaled to the {rate:.0f} TFLOP/s that this GPU just did)"


CHECKS = {"versions": check_versions, "device": check_device, "kernels": check_kernels, "training data": check_training_data,
          "validation data": check_validation_data, "caches": check_caches, "disk": check_disk, "memory": check_memory}


def run_checks(config, world, show):
    """(config with its micro-batches chosen, whether a run would start). show: print all that was found as a table; else raise
    at the first failure."""
    config, fine, columns = fitting(config, world), True, "{:<15} | {:<90} | {}"
    if show:
        print(columns.format("what", "found", "ok?"))
    checks = CHECKS | ({"checkpoint": check_checkpoint} if config.run.resume else {}) | ({"time": expected_time} if show else {})
    for name, check in checks.items():
        try:
            found, ok = check(config, world), "yes"
        except (T.UserError, OSError) as error:
            found, ok = str(error), "maybe" if isinstance(error, Doubt) else "no"
        fine &= ok != "no"
        if show:
            first, *rest = textwrap.wrap(found, 90, break_on_hyphens=False)
            print(columns.format(name, first, ok), *(columns.format("", part, "").rstrip() for part in rest), sep="\n")
        elif ok == "no":
            raise T.UserError(found)
        elif ok == "maybe" and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"warning: {found}", file=sys.stderr, flush=True)
    return config, fine


def first_to_say(local) -> bool:
    """Whether this process shall say why the run ends: one of those that torchrun started on this machine is enough."""
    time.sleep(local > 0)  # the first one usually has the same to say
    try:
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1].joinpath("told").mkdir()  # it gave each a folder, side by side
    except FileExistsError:
        return False
    except (KeyError, IndexError, OSError):  # without torchrun, or its folders: better twice than never
        pass
    return True
