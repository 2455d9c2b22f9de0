"""The processes of a run and their devices, and what a GPU can do."""

import os
import platform
import socket
import time
import zlib
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import triton_kernels as kernels
from data.run.config import check_config, config_from_dict, flatten, override, render, with_knobs
from data.run.program import UserError, one_line, user_error

PATHS = "train_files", "val_files", "log_dir", "resume", "init_from"  # settings that may differ between machines
PATIENCE = 600  # seconds that a rank waits for the others, one of which may find nothing in its compile cache


class Runtime(NamedTuple):
    """This process: its rank, the number of ranks, its device."""

    rank: int
    world: int
    device: torch.device


def rank_from_env() -> tuple[int, int, int]:
    """(rank, number of ranks, rank on this machine) from the variables that torchrun sets; without them (0, 1, 0)."""
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env = {key: os.environ.get(key, default) for key, default in env.items()}
    if not all(map(str.isdecimal, env.values())) or int(env["RANK"]) >= int(env["WORLD_SIZE"]):
        env = " ".join(map("=".join, env.items()))
        raise UserError(f"{env}: ranks are numbers from 0 up to below WORLD_SIZE; use torchrun, or set none of these")
    return tuple(map(int, env.values()))


def find_device(config) -> torch.device:
    """The CPU, the GPU of a Mac, or the GPU of this process, which then sees only this one. UserError when no GPU can
    be used."""
    if config.system.device == "cpu":
        return torch.device("cpu")
    if config.system.device == "mps":
        if not torch.backends.mps.is_available() or rank_from_env()[1] > 1:
            raise UserError("--device=mps needs a Mac whose GPU PyTorch can use, and one process; try --device=cpu")
        return torch.device("mps")
    if torch.version.hip:
        raise UserError(f"this PyTorch is made for AMD GPUs (HIP {torch.version.hip}), the kernels for NVIDIA GPUs: for"
                        " AMD, all would need a test and other launch parameters; try --preset=cpu")
    local_rank, count = rank_from_env()[2], torch.cuda.device_count()
    if not torch.cuda.is_initialized():
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read at the first CUDA allocation
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
        if processes > count > 0:
            raise UserError(f"{processes} processes but {count} GPUs on this machine: start one process per GPU")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        try:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local_rank] if count else ""
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # torch without CUDA, an old driver, a GPU in exclusive use
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
            raise UserError(f"CUDA was asked for but this machine has no usable GPU ({one_line(error)}): repair it, or"
                            " train on the CPU: --preset=cpu, or --device=cpu for a checkpoint") from error
    torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else local_rank)
    return torch.device("cuda", torch.cuda.current_device())


def init_runtime(config) -> Runtime:
    """Join the process group that torchrun describes in the environment. A single process needs no group."""
    (rank, world, _), device = rank_from_env(), find_device(config)
    if device.type == "cuda":
        torch.set_num_threads(min(4, torch.get_num_threads()))  # more OpenMP threads slow down the kernel launches
        # NCCL would give other ranks the addresses of the tensors in a CUDA graph. It takes a tensor for one piece of
        # memory, but a large one in expandable segments has several (Megatron-LM refuses the two together).
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if world == 1:
        return Runtime(rank, world, device)
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):  # gloo would ask the network for the name of this machine
        for _, name in socket.if_nameindex():
            if name in ("lo", "lo0"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    master = " ".join(f"{key}={os.environ.get(key)}" for key in ("MASTER_ADDR", "MASTER_PORT"))
    with user_error(f"{world} processes do not come together, {master}", RuntimeError, ValueError):
        socket.getaddrinfo(os.environ.get("MASTER_ADDR"), 0)  # torch would try a wrong name until the timeout
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world,
                                timeout=timedelta(seconds=PATIENCE),
                                device_id=device if device.type == "cuda" else None)
        dist.barrier()
    return Runtime(rank, world, device)


def wait_for(event, world, limit=PATIENCE):
    """Wait until the GPU has passed an event. Raises RuntimeError after `limit` seconds, with several ranks: NCCL's own
    limit does not see the collectives of a CUDA graph, which wait for a rank that hangs."""
    if world == 1:
        return event.synchronize()
    end = time.monotonic() + limit
    while not event.query():
        if time.monotonic() > end:
            raise RuntimeError(f"timed out waiting for {limit} s for a step of the GPUs")
        time.sleep(0.0002)


def new_stream(device):
    """A stream of a GPU whose kernels come first: a large kernel of another stream would make them wait for its end.
    None on another device."""
    return torch.cuda.Stream(device, priority=-1) if torch.device(device).type == "cuda" else None


def on(stream):
    """A context in which kernels are launched on a stream; None: as before."""
    return torch.cuda.stream(stream) if stream else nullcontext()


@contextmanager
def beside(streams):
    """In this context, the kernels of these streams (or None) run beside those of the current stream. They wait for
    what it did before the context, and what it does after the context waits for them."""
    streams = [*filter(None, streams)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    yield
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


def all_come(rt, place, seconds=10) -> bool:
    """Whether all ranks call this with the same `place` (text) within so many seconds. A collective would hang where
    one does not come."""
    store, end = dist.distributed_c10d._get_default_store(), time.monotonic() + seconds
    count = store.add(place, 1)
    while count < rt.world and time.monotonic() < end:
        time.sleep(0.05)
        count = store.add(place, 0)
    return count == rt.world


def all_reduce(x, rt, op=dist.ReduceOp.SUM):
    """Replace x by its sum over the ranks, or by what another `op` makes of it."""
    if rt.world > 1:
        dist.all_reduce(x, op=op)


def capability(device) -> dict[str, str]:
    """Capabilities of the hardware, for the log and for the choice of kernels."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return {"hardware": f"sm_{major}{minor}" if major else platform.machine(),
            "hardware_fp8": "yes" if (major, minor) >= (8, 9) else "no", "hardware_tma": "yes" if major >= 9 else "no"}


def choose_kernels(config, device):
    """(config with fp8 settled, implementations of all operations, {operation: name}). In this config, fp8 is off where
    the GPU lacks FP8. fp8_mlp and fp8_qkv are also off in float32, and where mlp or attention has another
    implementation than triton."""
    system, has_fp8 = config.system, capability(device)["hardware_fp8"] == "yes"
    try:
        ops, names = kernels.choose_ops(device, system.kernels)
    except ValueError as error:
        raise UserError(str(error)) from None
    can_train = has_fp8 and system.dtype == "bfloat16"
    settled = {"fp8": system.fp8 and has_fp8,
               "fp8_mlp": system.fp8_mlp and can_train and names["mlp"] == "triton",
               "fp8_qkv": system.fp8_qkv and can_train and names["attention"] == "triton"}
    names |= {"head": "fp8" if settled["fp8"] else system.dtype}
    names |= {f"{part}_training": "fp8" for part in ("mlp", "qkv") if settled[f"fp8_{part}"]}
    return with_knobs(config, **settled), ops, names


def checkpoint_config(saved, default, knobs):
    """(config, implementations of the operations, device) for the model of a checkpoint, on a GPU if there is one.
    saved: "config" of the checkpoint; default: config of the knobs that it lacks; knobs: {name: text}, overrides.
    Raises UserError for bad knobs."""
    config = config_from_dict(default, saved)
    device = knobs.get("device") or ("cuda" if torch.cuda.device_count() else "cpu")
    dtype = knobs.get("dtype") or (config.system.dtype if device == "cuda" else "float32")
    kernels = "torch" if dtype == "float32" else config.system.kernels
    for_reading = {"device": device, "dtype": dtype, "kernels": kernels, "resume": "", "profile": ""}
    config = override(config, for_reading | {"micro_batches": str(config.system.micro_batches or 1)} | knobs)
    check_config(config, 1)
    return *choose_kernels(config, device := find_device(config))[:2], device


def median_seconds(run) -> float:
    """Median time of 20 calls of `run` on the current GPU."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(25)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1e-3 * float(np.median([start.elapsed_time(end) for start, end in events[5:]]))


def ceilings():
    """Measured limits of the current GPU: {"bf16", "fp8": operations per second of an 8192³ GEMM (0: no FP8);
    "copy": bytes per second, read plus written}."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    limits = {"bf16": 2 * 8192**3 / median_seconds(lambda: a @ b), "fp8": 0.0}
    if torch.cuda.get_device_capability() >= (8, 9):
        a, b, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), torch.ones((), device="cuda")
        limits["fp8"] = 2 * 8192**3 / median_seconds(
            lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
    source = torch.randint(2**30, (2**28,), device="cuda", dtype=torch.int32)
    target = torch.empty_like(source)
    return limits | {"copy": 2 * source.nbytes / median_seconds(lambda: target.copy_(source))}


def measure_gpu(fp8) -> float:
    """How many H100s the current GPU is worth, by its rates of products and of copies. Takes a second and 2.3 GiB of
    its memory. fp8: whether the MLPs are to train in FP8, if the GPU has it. Raises UserError when the memory is not
    enough."""
    try:
        limits = ceilings()
    except torch.OutOfMemoryError:
        raise UserError("too little free memory to measure this GPU for --minutes; free 2.3 GiB, or give --train_tokens"
                        ) from None
    torch.cuda.empty_cache()
    products = fp8 and limits["fp8"] or limits["bf16"]
    return (products / 1490e12 * limits["copy"] / 3010e9) ** 0.5  # the rates of an H100, in FP8


def require_equal_ranks(rt, config, sources: dict):
    """Raises a UserError on all ranks if one has other settings, code or shards than rank 0, as on a second machine
    that was started with another command. Paths may differ. sources: {path, or name of what must be equal: text}."""
    if rt.world == 1:
        return
    mine = {f"--{knob}": render(value) for knob, value in flatten(config).items() if knob not in PATHS} | sources
    everyone = [None] * rt.world
    dist.all_gather_object(everyone, {name: zlib.crc32(text.encode(errors="backslashreplace"))  # of any prompt
                                      for name, text in mine.items()})
    for rank, found in enumerate(everyone):
        if differing := found.items() ^ everyone[0].items():
            raise UserError(f"rank {rank} differs from rank 0 in {', '.join(sorted({name for name, _ in differing}))}:"
                            " start all processes with the same command, code and shards")


def of_rank_0(value, rt):
    """The value of rank 0, on all ranks, which must all call this."""
    if rt.world > 1:
        dist.broadcast_object_list(values := [value], 0)
        return values[0]
    return value
