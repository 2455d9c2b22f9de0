"""The machine of a run: ranks and devices, what a GPU can do, and whether memory, caches and disk are enough.

`sizes` is the result of `state_bytes`. `table` is the `param_table` of the model, in train_gpt.py.
"""

import dataclasses
import math
import os
import platform
import re
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import triton_kernels as kernels
from data.checkpoint import require_room
from data.files import UserError, is_writable, one_line, user_error
from data.knobs import render
from data.loader import survey_training_data, survey_validation_data
from data.log import ROOT
from data.rules import stage_starts
from data.tokenizer import text_codec

LESS_MEMORY = ("raise --micro_batches (16, 32: smaller forward passes), lower --val_batch_tokens, or try"
               " --cuda_graphs=false")


# ---- Ranks and devices -----------------------------------------------------------------------------------------------

class Runtime(NamedTuple):
    """This process: its rank, the number of ranks, its device."""

    rank: int
    world: int
    device: torch.device


def rank_from_env() -> tuple[int, int, int]:
    """(rank, number of ranks, rank on this machine) from the variables that torchrun sets; without them (0, 1, 0)."""
    defaults = ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")
    env = {key: os.environ.get(key, default) for key, default in defaults}
    if not all(map(str.isdecimal, env.values())) or int(env["RANK"]) >= int(env["WORLD_SIZE"]):
        env = " ".join(map("=".join, env.items()))
        raise UserError(f"{env}: ranks are numbers from 0 up to below WORLD_SIZE; use torchrun, or set none of these")
    return tuple(map(int, env.values()))


def hide_other_gpus(local_rank):
    """Leave this process only the GPU of its local rank, as device 0. Compiled code contains the number of its device,
    which is then the same in all ranks, so they can share one compile cache."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read at the first CUDA allocation
    count, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if processes > count > 0:
        raise UserError(f"{processes} processes but {count} GPUs on this machine: start one process per GPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local_rank] if count else ""
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # torch without CUDA, an old driver, a GPU in exclusive use
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        raise UserError("CUDA was asked for but this machine has no usable GPU"
                        f" ({one_line(error)}): repair it, or train on the CPU: --preset=cpu, or --device=cpu for a"
                        " checkpoint") from error


def find_device(config) -> torch.device:
    """The CPU, or the GPU of this process. UserError when there is no GPU that can be used."""
    if config.system.device == "cpu":
        return torch.device("cpu")
    if torch.version.hip:
        raise UserError(f"this PyTorch is made for AMD GPUs (HIP {torch.version.hip}), the kernels for NVIDIA GPUs;"
                        " try --preset=cpu")
    local_rank = rank_from_env()[2]
    if not torch.cuda.is_initialized():
        hide_other_gpus(local_rank)
    torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else local_rank)
    return torch.device("cuda", torch.cuda.current_device())


def init_runtime(config) -> Runtime:
    """Join the process group that torchrun describes in the environment; without torchrun, make a group of one."""
    (rank, world, _), device = rank_from_env(), find_device(config)
    if device.type == "cuda":
        torch.set_num_threads(min(4, torch.get_num_threads()))  # more OpenMP threads slow down the kernel launches
    master = " ".join(f"{key}={os.environ.get(key)}" for key in ("MASTER_ADDR", "MASTER_PORT"))
    with user_error(f"{world} processes do not come together, {master}", RuntimeError, ValueError):
        if world > 1:
            socket.getaddrinfo(os.environ.get("MASTER_ADDR"), 0)  # torch would try a wrong name until the timeout
        # A rank that finds nothing in its compile cache may keep the other ranks waiting for minutes.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world,
                                store=dist.HashStore() if world == 1 else None,
                                timeout=timedelta(minutes=10), device_id=device if device.type == "cuda" else None)
        dist.barrier()
    return Runtime(rank, world, device)


def capability(device) -> dict[str, str]:
    """Capabilities of the hardware, for the log and for the choice of kernels."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return {"hardware": f"sm_{major}{minor}" if major else platform.machine(),
            "hardware_fp8": "yes" if (major, minor) >= (8, 9) else "no", "hardware_tma": "yes" if major >= 9 else "no"}


def choose_kernels(config, device):
    """(config with fp8 settled, implementations of all operations, {operation: name}).

    In this config, fp8 is off where the GPU lacks FP8. fp8_mlp and fp8_qkv are also off in float32, and where mlp or
    attention has another implementation than triton.
    """
    system, has_fp8 = config.system, capability(device)["hardware_fp8"] == "yes"
    can_train = has_fp8 and system.dtype == "bfloat16"
    try:
        ops, names = kernels.choose_ops(device, system.kernels)
    except ValueError as error:
        raise UserError(str(error)) from None
    config = with_system(config, fp8=system.fp8 and has_fp8,
                         fp8_mlp=system.fp8_mlp and can_train and names["mlp"] == "triton",
                         fp8_qkv=system.fp8_qkv and can_train and names["attention"] == "triton")
    names |= {"head": "fp8" if config.system.fp8 else config.system.dtype}
    names |= {"mlp_training": "fp8"} if config.system.fp8_mlp else {}
    return config, ops, names | ({"qkv_training": "fp8"} if config.system.fp8_qkv else {})


# ---- Memory and micro-batches ----------------------------------------------------------------------------------------

def with_system(config, **knobs):
    """The config with other values for some knobs of System."""
    return dataclasses.replace(config, system=dataclasses.replace(config.system, **knobs))


def state_bytes(config, table) -> tuple[int, int, int]:
    """Bytes of all weights, of the optimizer's state on all ranks without NorMuon's small second moments, and of the
    FP8 codes of banks."""
    weights = state = codes = 0
    for param in table:
        size = math.prod(param.shape)
        weights += size * param.dtype.itemsize
        # Adam has fp32 m and v, NorMuon fp32 m, perhaps a slow average, and an int16 mantissa, a lazy table only v.
        muon = 10 if config.optim.slow_momentum else 6
        state += size * (muon if param.optim == "normuon" else 4 if param.lazy and config.optim.lazy_tables else 8)
        state += 4 * size * bool(param.average and config.optim.average_blend)
        knob, per_weight = param.codes
        codes += int(size * per_weight) if knob and getattr(config.system, knob) else 0
    return weights, state, codes


def estimate_memory(config, sizes, world) -> tuple[float, float]:
    """Estimate of the peak memory of each GPU in MiB: (allocated, reserved by PyTorch), with the default kernels.

    Measured on 1, 2 and 4 H200s, the error is at most 0.8 % and 2 % (records/2026-11-22_lengths: the record run took
    22432 and 38744 MiB on one GPU, 19435 and 35784 MiB on four). For LAYERS at 49152 tokens it is 1.6 % too high with
    FP8 MLPs (22924 MiB), and .2 % with FP8 projections, too (21443 MiB). The number of activations that autograd keeps
    per layer is fitted to layers with attention. 18, the number of activations in a validation, is counted.
    """
    (weights, state, codes), system, V = sizes, config.system, config.model.padded_vocab
    N = max(stage.batch_tokens for stage in config.schedule.stages) // system.micro_batches
    activation = config.model.model_dim * getattr(torch, system.dtype).itemsize  # bytes per token
    # The head keeps the gradient of the logits, and beside it a transposed FP8 copy or some bf16 logits.
    head = (1 if system.fp8 else 2) * N * V + max(system.fp8 * N * V, 2 * V * min(N, kernels.head_rows(V)))
    mlp = config.model.mlp_dim / config.model.model_dim
    kept = sum(10.2 + mlp - 0.5 * (layer.narrow + system.fp8_mlp) - 0.9 * (layer.attention and system.fp8_qkv)
               for layer in config.model.layers)
    training = kept * N * activation + head
    validation = 18 * config.data.val_batch_tokens * activation
    fixed = 430 * 2**20 + codes  # 430 MiB: rotary tables, FP8 codes of the head, workspaces
    allocated = 2 * weights + state / world + fixed + max(training, validation)  # 2: the weights and their gradients
    return allocated / 2**20, (allocated + system.cuda_graphs * training) / 2**20  # graphs keep their own memory


def memory_report(config, sizes, device, world) -> tuple[str, bool]:
    """(sentence about the needed and the free memory of the GPU, whether the free memory is enough).

    What PyTorch has reserved in this process counts as free.
    """
    if device.type == "cpu":
        return "not estimated for a CPU", True
    allocated, reserved = estimate_memory(config, sizes, world)
    free = (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) / 2**20
    reserved += 850  # kernels and NCCL take this outside PyTorch (measured on an H200)
    found = (f"{free:.0f} MiB of the GPU are free, about {allocated:.0f} to {reserved:.0f} needed (estimate) with"
             f" --micro_batches={config.system.micro_batches}")
    return (found, True) if reserved <= free else (f"{found}: {LESS_MEMORY}", False)


def possible_micro_batches(config, world) -> list[int]:
    """The numbers of micro-batches, up to 128, that divide the batches of all stages into rows of up to 49152 tokens.

    The kernels are tuned and tested for these lengths.
    """
    batches = [stage.batch_tokens for stage in config.schedule.stages]
    counts = [n for n in range(world, 129, world) if math.gcd(*batches) % (16 * n) == 0 and max(batches) <= 49152 * n]
    if not counts:
        raise UserError(f"--micro_batches=0: no number up to 128 divides batches of {render(tuple(batches))} tokens"
                        f" into multiples of 16, at most 49152 each, for {world} processes; change the batches")
    return counts


def choose_micro_batches(config, sizes, device, world):
    """With --micro_batches=0: choose the fewest that fit the GPU, else the most of `possible_micro_batches`.

    Several ranks take the fewest: all must choose the same number, but the free memory of their GPUs may differ.
    """
    for count in () if config.system.micro_batches else possible_micro_batches(config, world):
        config = with_system(config, micro_batches=count)
        if world > 1 or memory_report(config, sizes, device, world)[1]:
            break
    return config


def restart_with_more_micro_batches(config, sizes, device):
    """Start this process again, with at least twice as many micro-batches, and as many as the memory requires now.

    The estimate of the memory was too low, or another program took memory. Only a new process has all memory back. It
    does not restart again, because it is given the number. Returns if there is no such number.
    """
    count = config.system.micro_batches
    more = [n for n in possible_micro_batches(config, 1) if n >= 2 * count]
    fitting = (n for n in more if memory_report(with_system(config, micro_batches=n), sizes, device, 1)[1])
    if chosen := next(fitting, more[-1] if more else None):
        print(f"out of GPU memory with --micro_batches={count}: starting again with --micro_batches={chosen}",
              file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], f"--micro_batches={chosen}"])


# ---- Software, caches, disk ------------------------------------------------------------------------------------------

def torch_version() -> tuple[int, ...]:
    """(major, minor) of PyTorch."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def require_torch():
    """Raises UserError when PyTorch is too old."""
    if torch_version() < (2, 11):
        raise UserError(f"PyTorch {torch.__version__}: 2.11 or newer is needed; install the packages that"
                        " requirements.txt names, or use ./run.sh")


def require_caches(config, device) -> list[str]:
    """The folders in which the compilers keep their caches. Raises UserError when a folder cannot be written."""
    folders = {}
    if device.type == "cuda" and not kernels.NO_TRITON:
        folders["TRITON_CACHE_DIR"] = kernels.triton.knobs.cache.dir
    if config.system.compile:  # torch's function for the default folder would make the folder
        folders["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    for name, folder in folders.items():
        if not is_writable(Path(folder).absolute()):
            raise UserError(f"{folder} cannot be written: set {name} to a folder for compiled code")
    return list(folders.values())


def require_disk(config, sizes) -> str:
    """Sentence about the disk space for the log and the checkpoints. Raises UserError when there is too little."""
    if os.environ.get("RANK", "0") != "0":
        return "rank 0 writes"
    system, size, purpose = config.system, 2**20, "the log"
    if system.save or system.save_every:
        weights, state, _ = sizes
        saves = -(-stage_starts(config.schedule)[-1] // system.save_every) if system.save_every else 1
        count = min(saves, system.keep + 1) if system.keep else saves  # the oldest goes once the newest is complete
        size, purpose = size + count * (2 * weights + state), "the log and checkpoints"  # weights, gradients, state
    return require_room(ROOT / system.log_dir, size, purpose)


# ---- Start: checks before anything is compiled -----------------------------------------------------------------------

def needs_tokenizer(config) -> bool:
    """Whether the run makes `hash_ids`; a checkpoint contains them."""
    return config.model.bigram_normal and not config.system.resume


def check_start(config, table, world):
    """Raises UserError for what would stop the run later; warns about what might stop the run.

    Returns the config with fp8 and the number of micro-batches settled.
    """
    require_torch()
    device = find_device(config)
    config = choose_kernels(config, device)[0]
    sizes = state_bytes(config, table)
    config = choose_micro_batches(config, sizes, device, world)
    training_data = survey_training_data(config)
    survey_validation_data(config)
    if needs_tokenizer(config):
        text_codec(config.model.vocab_size)
    require_caches(config, device)
    require_disk(config, sizes)
    for text, fine in training_data, memory_report(config, sizes, device, world):
        if not fine and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"warning: {text}", file=sys.stderr, flush=True)
    return config


# ---- Errors ----------------------------------------------------------------------------------------------------------

def is_out_of_memory(error) -> bool:
    """Whether PyTorch, CUDA, Triton or cuBLAS found too little GPU memory."""
    return isinstance(error, torch.OutOfMemoryError) or bool(
        re.search("CUDA.*out of memory|CUBLAS_STATUS_ALLOC_FAILED", str(error)))


def error_message(error) -> str | None:
    """One line for an error that the user or the machine has caused; None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return f"out of GPU memory: {LESS_MEMORY} ({one_line(error)})"
    if re.search("connection (closed|reset)|broken pipe|timed out waiting|nccl", str(error), re.I):
        return f"lost the connection to another process, which may say why ({one_line(error)})"
    return None
