"""Train a 124M-parameter GPT (plus large embedding tables) to 3.28 validation loss on FineWeb, as fast as possible.

This file is the trainer; `triton_kernels.py` holds the operations that deserve a kernel, `data/loader.py` makes batches of
documents. The system is that of NanoGPT-speedrun record 74 (modded-nanogpt PR 233, Chris McCormick, and the records before it).

    ./run.sh                                                 set up everything, then train whatever this machine can
    torchrun --standalone --nproc_per_node=8 train_gpt.py    the record run: 8 GPUs (4, 2 or 1 accumulate gradients)
    torchrun --nnodes=2 --node_rank=... train_gpt.py         16 GPUs of two machines; the README has the recipe
    python train_gpt.py --preset=cpu                         same wiring, small: minutes on a laptop
    python train_gpt.py --check                              what this machine can do, and whether a run would start; with any knobs
    python train_gpt.py --sample=CHECKPOINT --prompt="..."   text by what a run with --save=true has learned
    python train_gpt.py --help                               every knob with its meaning; set one with --key=value

Expected: --preset=cpu, 2 cores: 1.96 nats per byte of Python's library in 170 s. --preset=record: 74 s inside the clock on eight
H200s; with --scheduled_steps=145 --extension_steps=4 55 s on one, 57.5 s on an H100 (records/). FineWeb has not been tried yet.

Contents, top to bottom; a name is defined above its first use:
    config     Model, Stage, Schedule, Optim, Data, Run; presets; --key=value
    runtime    ranks, device, what the GPU can do
    model      layer table, YaRN rotary, table lookup, the flat forward
    optimizer  Adam's rule, parameter table, sparse row exchange, NorMuonAndAdam
    schedule   make_plan(step): stage, rates, momentum, what is due
    log, eval  log file, chunked validation
    train      micro-step as a CUDA graph, train_step (shared by warm-up and run), Trainer, main

Shape letters: N tokens of one forward pass, D model width, H heads, d head width, V padded vocabulary, G ranks,
A = micro_batches/G gradient-accumulation micro-steps. K1..K12 mark quirks of the reference that the learned function depends on.
"""

import time

started = time.perf_counter()  # the imports take seconds

import dataclasses
import difflib
import gc
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import uuid
from bisect import bisect_right
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import triton_kernels as kernels
from data.loader import Loader, UserError, ValidationData, cu_seqlens, make_batch, one_line, user_error

IMPORT_SECONDS = time.perf_counter() - started  # the tools in records/ import this file, and are imported where they are used


# ---- Config: edit here, or override any field with --name=value (stage fields: --stage1.batch_tokens=...) ------------

@dataclass(frozen=True)
class Model:
    """Sizes; the wiring of the layers is in LAYERS."""

    vocab_size: int = 50257  # token ids; the last one separates documents (GPT-2: 50256)
    model_dim: int = 768  # D, residual width; heads * head width
    num_heads: int = 6  # H, even: a paired layer folds two heads into one stream
    bigram_tables: int = 5  # bigram rows, in units of the padded vocabulary (PR 201)

    @property
    def separator(self):
        return self.vocab_size - 1

    @property
    def padded_vocab(self):  # K3: the padding classes take part in the softmax
        return -(-self.vocab_size // 128) * 128

    @property
    def head_dim(self):
        return self.model_dim // self.num_heads

    @property
    def bigram_rows(self):
        return self.bigram_tables * self.padded_vocab


@dataclass(frozen=True)
class Stage:
    """What changes between the stages of a run."""

    batch_tokens: int  # tokens per step over all ranks and micro-steps
    max_doc_len: int  # documents are cut here, the tail is dropped; tokens
    short_window: int  # look-back of most layers, tokens
    long_window: int  # look-back of the long-window layers, tokens
    lr_mul: float  # about (batch / first batch) ** 0.5 or 0.6
    mtp_start: tuple[float, ...]  # weights of the next, second next, ... token at the start of the stage
    mtp_end: tuple[float, ...]  # linearly approached at its end


@dataclass(frozen=True)
class Schedule:
    """Length of the run, its stages, and what follows the step number; `make_plan` evaluates it."""

    scheduled_steps: int = 1450  # shared equally by all stages but the last
    extension_steps: int = 40  # the last stage: floor rate, widest windows
    stages: tuple[Stage, ...] = (
        Stage(131072, 896, 128, 384, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
        Stage(262144, 2048, 384, 896, 1.52, (1.0, 0.5), (1.0, 0.0)),
        Stage(393216, 2048, 640, 1408, 1.73, (1.0,), (1.0,)),
        Stage(393216, 2048, 768, 1664, 1.73, (1.0,), (1.0,)))
    final_window: int = 2560  # K10: long window of the last validation, no rotary update
    split_stage: int = 3  # head and embedding part at the first odd step of this stage (PR 175, PR 178, varunneal)
    cooldown_frac: float = 0.60  # of the scheduled steps, linear to lr_floor
    lr_floor: float = 0.15  # rate factor at the end of the cool-down and after
    muon_momentum: tuple[float, float] = (0.85, 0.95)  # at rest, at work
    muon_warmup: int = 300  # steps from rest to work
    muon_cooldown: int = 50  # last steps, back to rest


@dataclass(frozen=True)
class Optim:
    """Rates common to all parameters; what differs between them is in PARAM_TABLE."""

    adam_lr: float = 0.008  # times lr_mul of the parameter's row in PARAM_TABLE
    adam_eps: float = 1e-10  # not bias-corrected
    adam_wd: float = 0.005  # times rate squared
    muon_lr: float = 0.023  # times matrix_lr of the bank's row in PARAM_TABLE
    muon_beta2: float = 0.95  # of the per-row second moment (NorMuon)
    muon_wd: float = 1.2  # times rate squared


@dataclass(frozen=True)
class Data:
    """Where the tokens come from and how many validate."""

    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # read in name order; relative to $DATA_PATH or this folder
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # likewise
    val_tokens: int = 10485760  # the first ones of the validation files
    val_batch_tokens: int = 262144  # tokens of one validation forward
    tokens_per_doc: int = 300  # shortest mean document that fits: sets the fixed length of cu_seqlens
    data_end: str = "wrap"  # when the training shards run out: wrap (to the first, with a warning) or stop


@dataclass(frozen=True)
class Run:
    """Machine, numerics and output of one run."""

    run_label: str = "run"  # first part of the log's file name
    device: str = "cuda"  # cuda or cpu
    seed: int = 1337  # of the initial weights
    micro_batches: int = 8  # forward passes per step of all ranks, one each at least; more need less memory; 0: 8 or what fits
    val_every: int = 250  # steps
    dtype: str = "bfloat16"  # of activations: bfloat16 or float32; parameters are bfloat16 in any case
    compile: bool = True  # torch.compile and warm-up before the clock starts
    fp8: bool = True  # FP8 training head where the GPU has it
    cuda_graphs: bool = True  # on a GPU replay a micro-step as a whole; validation cannot reuse its memory then
    kernels: str = "auto"  # auto, torch (plain PyTorch throughout), or op:choice,op:choice
    log_dir: str = "logs"  # relative to this folder
    profile: str = ""  # START:COUNT: trace these steps and log where their time went (README: Reading a trace)
    save: bool = False  # a checkpoint at the end, in a folder beside the log
    save_every: int = 0  # steps; checkpoints on the way, too (0: none)
    keep: int = 2  # the newest checkpoints of a run stay, so many (0: all)
    resume: str = ""  # checkpoint to go on from
    sample_tokens: int = 0  # generate a text of this length at the end
    sample_prompt: str = ""  # its beginning

    @property
    def profiled(self):  # the steps to profile; without any, a range whose ends are no steps
        start, count = map(int, self.profile.split(":")) if self.profile else (-1, 0)
        return range(start, start + count)


@dataclass(frozen=True)
class Config:
    """All knobs, frozen; see PRESETS and parse_config."""

    model: Model = Model()
    schedule: Schedule = Schedule()
    optim: Optim = Optim()
    data: Data = Data()
    run: Run = Run()


PRESETS = {
    "record": Config(),
    "single": Config(data=Data(val_batch_tokens=65536), run=Run(micro_batches=0)),  # the same run on a GPU of 12 GB or more
    # The same wiring and shape of schedule: width and windows 1/8, tokens per step 1/32, steps 1/16; bytes as tokens.
    "cpu": Config(
        Model(vocab_size=257, model_dim=96),
        Schedule(
            scheduled_steps=90, extension_steps=6, final_window=320, muon_warmup=20, muon_cooldown=6,
            stages=(
                Stage(4096, 448, 16, 48, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
                Stage(8192, 512, 48, 112, 1.52, (1.0, 0.5), (1.0, 0.0)),
                Stage(12288, 512, 80, 176, 1.73, (1.0,), (1.0,)),
                Stage(12288, 512, 96, 208, 1.73, (1.0,), (1.0,)))),
        Optim(),
        Data(train_files="data/stdlib/stdlib_train_*.bin", val_files="data/stdlib/stdlib_val_*.bin", val_tokens=65536,
             val_batch_tokens=8192),
        Run(device="cpu", dtype="float32", compile=False, fp8=False, val_every=20, sample_tokens=200, sample_prompt="def ")),
}


def flatten(config) -> dict:
    """Every knob of the config -> its value; stage fields are named stage<n>.<field>, n from 1."""
    flat = {}
    for section in dataclasses.fields(config):
        for knob in dataclasses.fields(getattr(config, section.name)):
            value = getattr(getattr(config, section.name), knob.name)
            if knob.name == "stages":
                flat |= {f"stage{i}.{k}": v for i, stage in enumerate(value, 1) for k, v in vars(stage).items()}
            else:
                flat[knob.name] = value
    return flat


def parse_value(key, text, old):
    """`text` as a value of the type of `old`."""
    try:
        if isinstance(old, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(old, tuple):
            return tuple(float(part) for part in text.split(","))
        return type(old)(text)
    except (ValueError, KeyError):
        kind = "comma-separated numbers" if isinstance(old, tuple) else type(old).__name__
        raise UserError(f"--{key}={text}: expected {kind}, for example --{key}={render(old)}") from None


def render(value) -> str:
    """A knob's value as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parse_config(argv, world=1) -> Config:
    """Arguments --preset=name and --key=value -> Config for `world` ranks. Raises UserError on anything it does not know."""
    given = {}
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or not equals:
            raise UserError(f"argument '{arg}': write --key=value (see --help)")
        given[key] = text
    preset = given.pop("preset", "record")
    if preset not in PRESETS:
        raise UserError(f"--preset={preset}: known presets are {', '.join(PRESETS)}")
    config = PRESETS[preset]
    known = flatten(config)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, [*known, "preset"], 1, 0.0)[0]
            raise UserError(f"unknown key --{key}; the nearest is --{near} (see --help)")
    new = {key: parse_value(key, text, known[key]) for key, text in given.items()}
    if 0 < new.get("micro_batches", config.run.micro_batches) < world:
        new["micro_batches"] = world

    def updated(item, prefix=""):
        names = [f.name for f in dataclasses.fields(item)]
        return dataclasses.replace(item, **{n: new[prefix + n] for n in names if prefix + n in new})

    new["stages"] = tuple(updated(stage, f"stage{i}.") for i, stage in enumerate(config.schedule.stages, 1))
    config = Config(*(updated(getattr(config, f.name)) for f in dataclasses.fields(config)))
    from records import check
    check.check_config(config, world)
    return config


def help_text() -> str:
    """The module docstring and one line per knob: name, default, and the comment that stands beside it in the source."""
    knob_source = Path(__file__).read_text(encoding="utf-8").partition("class Config:")[0]
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", knob_source, re.M))
    knobs = flatten(PRESETS["record"])
    lines = [f"  --{key}={render(value)}".ljust(46) + "  " + comments.get(key.split(".")[-1], "") for key, value in knobs.items()]
    return f"{__doc__}\nKnobs with the values of --preset=record (the others: {', '.join(list(PRESETS)[1:])}):\n" + "\n".join(lines)


# ---- Runtime ---------------------------------------------------------------------------------------------------------

class Runtime(NamedTuple):
    """This process among the others."""

    rank: int
    world: int
    device: torch.device


def place() -> tuple[int, int, int]:
    """(rank, number of ranks, rank on this machine), which torchrun puts into the environment; a process without them is alone."""
    given = {key: os.environ.get(key, default) for key, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))}
    if not all(map(str.isdecimal, given.values())) or int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        given = " ".join(map("=".join, given.items()))
        raise UserError(f"{given}: ranks are numbers from 0 up to below WORLD_SIZE; use torchrun, or set none of these")
    return tuple(map(int, given.values()))


def find_device(config) -> torch.device:
    """The CPU, or the GPU of this process, which sees no other: compiled code names its device, so one cache serves all ranks."""
    if config.run.device == "cpu":
        return torch.device("cpu")
    local = place()[2]
    if not torch.cuda.is_initialized():  # not found before
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read at the first CUDA allocation
        count, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
        if processes > count > 0:
            raise UserError(f"{processes} processes but {count} GPUs on this machine: start one process per GPU")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        try:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local] if count else ""
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # no CUDA in this torch, an old driver, a GPU in exclusive use
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
            raise UserError("CUDA was asked for but this machine has no usable GPU"
                            f" ({one_line(error)}): see to it, or try --preset=cpu") from error
    torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else local)
    return torch.device("cuda", torch.cuda.current_device())


def init_runtime(config) -> Runtime:
    """Join the process group that torchrun describes in the environment, or a group of one without torchrun."""
    (rank, world, _), device = place(), find_device(config)
    if device.type == "cuda":
        torch.set_num_threads(min(4, torch.get_num_threads()))  # a wide OpenMP team only gets in the way of the launches
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # gloo carries the row counts of SparseRows
    where = " ".join(f"{key}={os.environ.get(key)}" for key in ("MASTER_ADDR", "MASTER_PORT"))
    with user_error(f"{world} processes do not come together, {where}", RuntimeError, ValueError):
        if world > 1:
            socket.getaddrinfo(os.environ.get("MASTER_ADDR"), 0)  # torch would try a wrong name until the timeout
        # Ten minutes for a process to come, and to be waited for later: one may compile what others have in their cache.
        dist.init_process_group(backend, rank=rank, world_size=world, store=dist.HashStore() if world == 1 else None,
                                timeout=timedelta(minutes=10), device_id=device if device.type == "cuda" else None)
        dist.barrier()
    return Runtime(rank, world, device)


def capability(device) -> dict[str, str]:
    """What the hardware offers, for the log and for the choice of kernels."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return {"hardware": f"sm_{major}{minor}" if major else platform.machine(),
            "hardware_fp8": "yes" if (major, minor) >= (8, 9) else "no", "hardware_tma": "yes" if major >= 9 else "no"}


def choose_kernels(config, device):
    """(config, whose fp8 is off where the GPU has none, implementation of every operation, {operation: its name})."""
    fp8 = config.run.fp8 and capability(device)["hardware_fp8"] == "yes"
    try:
        ops, names = kernels.choose_ops(device, config.run.kernels)
    except ValueError as error:
        raise UserError(str(error)) from None
    return (dataclasses.replace(config, run=dataclasses.replace(config.run, fp8=fp8)), ops,
            names | {"head": "fp8" if fp8 else config.run.dtype})


def region(name):
    """Context manager: a named range of host time in the trace of a profiled step, nothing in all others."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


# reduce_scatter_tensor and all_gather_into_tensor carry other names from torch 2.13 on.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# ---- Model -----------------------------------------------------------------------------------------------------------

class Layer(NamedTuple):
    """What one layer does. Bank rows, gates and windows follow from the table below."""

    attention: bool = True
    paired: bool = False  # heads of a token become consecutive positions (PR 191, classiclarryd)
    long: bool = False  # long window, and partial key offset: half of a key is the previous token's (PR 169, classiclarryd)
    value_table: int | None = None  # value embedding added to v (PR 209 and PR 218, photon_mz)
    two_lanes: bool = False  # attention reads lane 0, the MLP lane 1, both write both (PR 230, sisovicm)
    keep: str | None = None  # "skip": keep the stream after attention; "backout": keep it after the MLP
    add_skip: bool = False


LAYERS = (
    Layer(paired=True),
    Layer(value_table=0),
    Layer(value_table=1, paired=True),
    Layer(long=True, keep="skip"),
    Layer(),
    Layer(paired=True),
    Layer(attention=False, add_skip=True),
    Layer(two_lanes=True, keep="backout"),
    Layer(two_lanes=True, value_table=2),
    Layer(two_lanes=True, value_table=3, paired=True),
    Layer(two_lanes=True, value_table=4, long=True))

ATTENTION_ROWS = sum(layer.attention for layer in LAYERS)
VALUE_TABLES = sum(layer.value_table is not None for layer in LAYERS)
MLP_ROWS = -(-len(LAYERS) // 4) * 4  # padded, so that 2 matrices per layer divide among 8 ranks
GATE_CHANNELS = 12  # the gates look at the first channels of the stream only (PR 117, classiclarryd)


def rms_norm(x):
    """x / rms(x) over the last axis, in fp32 inside; no gain."""
    return F.rms_norm(x, (x.size(-1),), eps=kernels.RMS_EPS)


def yarn(frequencies: np.ndarray, scale: float, old: int, new: int) -> tuple[np.ndarray, float]:
    """Rotary frequencies (rad/token, fp64) and attention scale after the window grows from `old` to `new` tokens.

    Frequencies of less than one turn in the window are stretched with it, those of 32 turns and more are kept (arXiv 2309.00071).
    """
    keep = np.clip((old * frequencies / (2 * np.pi) - 1) / (32 - 1), 0, 1)
    return frequencies * (old / new + keep * (1 - old / new)), scale * (1 + 0.2 * math.log(new / old))


def rotary_states(head_dim: int, windows) -> list[tuple[np.ndarray, float]]:
    """(frequencies, attention scale) for each long window in turn; half of the channel pairs rotate."""
    state = (1 / 1024) ** np.linspace(0, 1, head_dim // 4), 0.1
    states = [state]
    for old, new in zip(windows, windows[1:]):
        states.append(states[-1] if old == new else yarn(*states[-1], old, new))
    return states


def rotary_table(frequencies: np.ndarray, rows: int, device, dtype) -> Tensor:
    """(rows, head_dim / 4, 2): cos and sin of position * frequency, in fp32."""
    frequencies = torch.tensor(frequencies, dtype=torch.float32, device=device)
    angle = torch.arange(rows, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.stack((angle.cos(), angle.sin()), -1).to(dtype)


class View(NamedTuple):
    """What a stage changes in the forward pass; windows and scale as 0-D CPU tensors, so that one compiled graph serves all."""

    rotary: Tensor  # (>= 2N, d / 4, 2)
    short_window: Tensor | int
    long_window: Tensor | int
    attn_scale: Tensor | float
    max_doc_len: int


def stage_views(config, device, dtype, number=torch.tensor) -> list[View]:
    """The View of every stage, and last that of the final validation (K10: wider, but the rotary state of the extension)."""
    stages = config.schedule.stages
    rows = 2 * max(config.data.val_batch_tokens, *(s.batch_tokens // config.run.micro_batches for s in stages))
    states = rotary_states(config.model.head_dim, [s.long_window for s in stages])
    views = [View(rotary_table(frequencies, rows, device, dtype), number(stage.short_window), number(stage.long_window),
                  number(scale), stage.max_doc_len) for stage, (frequencies, scale) in zip(stages, states)]
    return [*views, views[-1]._replace(long_window=number(config.schedule.final_window))]


class GPT(nn.Module):
    """The parameters and a flat forward pass. Parameter names are the labels of the optimizer's table."""

    def __init__(self, config: Model, ops, dtype, device):
        super().__init__()
        self.config, self.ops, self.dtype = config, ops, dtype
        D, H, V = config.model_dim, config.num_heads, config.padded_vocab

        def parameter(*shape, dtype=torch.bfloat16):
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))

        self.attn_bank = parameter(ATTENTION_ROWS, 4 * D, D)  # rows of a layer: Q, K, V, O
        self.mlp_bank = parameter(MLP_ROWS, 2, 4 * D, D)  # W1 up, W2 down, both hidden-major
        self.attn_gate_bank = parameter(ATTENTION_ROWS, H, GATE_CHANNELS)
        self.ve_gate_bank = parameter(VALUE_TABLES, H, GATE_CHANNELS)
        self.smear_gate = parameter(1, GATE_CHANNELS)
        self.skip_gate = parameter(1, GATE_CHANNELS)
        self.value_embeds = parameter(VALUE_TABLES * V, D)
        self.lm_head = parameter(D, V)  # transposed: its gradient comes out of the GEMM in this layout (PR 200)
        self.embed = parameter(V, D)
        self.bigram_embed = parameter(config.bigram_rows, D)
        self.post_lambdas = parameter(len(LAYERS), 2, 2, dtype=torch.float32)  # (attention, MLP) output into (lane 0, lane 1)
        self.x0_lambdas = parameter(len(LAYERS), dtype=torch.float32)
        self.bigram_lambdas = parameter(len(LAYERS), dtype=torch.float32)
        self.resid_lambdas = parameter(len(LAYERS), 2, dtype=torch.float32)  # before attention, before the MLP
        self.scalars = parameter(2 * len(LAYERS) + 3, dtype=torch.float32)  # sa pairs, smear, backout, skip

    @torch.no_grad()
    def init_weights(self, seed: int):
        """Initial values; the rest stays zero, as the MLP's W2 (muP-like). V and O are not zero (PR 214, srashedll)."""
        generator = torch.Generator(self.embed.device).manual_seed(seed)
        bound = 3**0.5 * 0.5 * self.config.model_dim**-0.5
        for weights in (self.attn_bank, self.mlp_bank[:, 0]):
            weights.copy_(torch.empty(weights.shape, device=weights.device).uniform_(-bound, bound, generator=generator))
        self.value_embeds.normal_(generator=generator).mul_(0.01)
        self.lm_head.normal_(std=0.005, generator=generator)
        self.embed.copy_(self.lm_head.t())
        self.post_lambdas.fill_(1.0)
        first = next(i for i, layer in enumerate(LAYERS) if layer.two_lanes)
        self.post_lambdas[first:, 0, 1] = 1.5
        self.bigram_lambdas.fill_(0.05)
        self.resid_lambdas.fill_(1.1**0.5)
        sa_pairs = self.scalars[:-3].view(-1, 2)
        sa_pairs.copy_(torch.tensor([0.5, 1.0]))
        self.scalars[-3:] = torch.tensor([0.0, 0.5, -1.5])

    def forward(self, tokens, cu_seqlens, bigram_rows, view: View):
        """tokens, bigram_rows (N,) int32, cu_seqlens (K,) int32 -> normed final stream (N, D); the head is in HeadLoss."""
        return self.layers(self.lookup(tokens, bigram_rows), cu_seqlens, view)

    def lookup(self, tokens, bigram_rows):
        """Rows of the tables, each (N, D): token embedding, bigram embedding, VALUE_TABLES value embeddings.

        Their gradients go straight into `.grad` of the tables: a batch touches a few percent of the rows. As a side effect, so
        this part is not compiled.
        """
        by_token, by_bigram = kernels.Groups(tokens), kernels.Groups(bigram_rows)
        return [rows for table, planes, groups in ((self.embed, 1, by_token), (self.bigram_embed, 1, by_bigram),
                                                   (self.value_embeds, VALUE_TABLES, by_token))
                for rows in kernels.lookup(table, planes, groups, self.ops.embedding_grad)]

    def layers(self, rows, cu_seqlens, view: View):
        """All that follows the tables; this is what is compiled."""
        dtype, ops = self.dtype, self.ops
        e, bigram, *values = (x.to(dtype) for x in rows)
        N, D = e.shape

        # One unbind per bank: its backward is one stack, where selects would add a full bank of zeros per layer (PR 233).
        attn_weights = iter(self.attn_bank.to(dtype).unbind(0))
        mlp_weights = self.mlp_bank.to(dtype).view(-1, 4 * D, D).unbind(0)
        attn_gates = iter(self.attn_gate_bank.to(dtype).unbind(0))
        value_gates = iter(self.ve_gate_bank.to(dtype).unbind(0))
        # K6: these act with bf16 precision (1.1 ** 0.5 becomes 1.046875).
        post, x0_mix, bigram_mix, resid = (p.bfloat16().view(-1).unbind(0) for p in (
            self.post_lambdas, self.x0_lambdas, self.bigram_lambdas, self.resid_lambdas))
        sa = self.scalars[:-3].view(-1, 2)
        smear_lambda, backout_lambda, skip_lambda = self.scalars[-3:]

        # Token embedding, smeared one token forward (PR 130, classiclarryd; K1: across document borders).
        gate = torch.sigmoid(F.linear(e[1:, :GATE_CHANNELS], self.smear_gate.to(dtype)))
        x0 = rms_norm(torch.cat((e[:1], e[1:] + smear_lambda * gate * e[:-1])))

        def attention(x, i, layer):
            """rms-normed stream (N, D) -> output of the attention block (N, D)."""
            weights = next(attn_weights)
            ve = w_ve = None
            if layer.value_table is not None:
                ve, w_ve = values[layer.value_table], next(value_gates)
            window = view.long_window if layer.long else view.short_window
            # Scaling weights is cheaper than scaling x (PR 166).
            y = ops.attention(x, sa[i, 0] * weights[:3 * D], view.rotary, ve, w_ve, next(attn_gates), cu_seqlens, view.max_doc_len,
                              window, view.attn_scale, layer.paired, layer.long)
            return F.linear(y.view(N, D), sa[i, 1] * weights[3 * D:])

        lane0 = x0 + bigram_mix[0] * bigram
        lane1 = None
        kept = {}
        for i, layer in enumerate(LAYERS):
            if not torch.compiler.is_compiling():
                with region(f"layer {i}"):  # a mark: the layer's operations follow
                    pass
            if layer.add_skip:
                gate = torch.sigmoid(skip_lambda) * 2 * torch.sigmoid(F.linear(x0[:, :GATE_CHANNELS], self.skip_gate.to(dtype)))
                lane0 = lane0 + gate * kept["skip"]
            if layer.two_lanes and lane1 is None:
                lane1 = lane0
            if layer.attention:
                a = attention(rms_norm(lane0), i, layer)
                inject = x0_mix[i] * x0 if i == 0 else x0_mix[i] * x0 + bigram_mix[i] * bigram
                if layer.two_lanes:
                    lane0 = resid[2 * i] * lane0 + post[4 * i] * a + inject
                    lane1 = resid[2 * i] * lane1 + post[4 * i + 1] * a  # K5: no injection here, nor in layer 6
                else:
                    lane0 = resid[2 * i] * lane0 + a + inject
            if layer.keep == "skip":
                kept["skip"] = lane0
            W1, W2 = mlp_weights[2 * i], mlp_weights[2 * i + 1]
            if layer.two_lanes:
                m = ops.mlp(rms_norm(lane1), W1, W2)
                lane0 = resid[2 * i + 1] * lane0 + post[4 * i + 2] * m
                lane1 = resid[2 * i + 1] * lane1 + post[4 * i + 3] * m
            else:  # scaling W2 saves two passes over (N, D) in the backward
                lane0 = resid[2 * i + 1] * lane0 + ops.mlp(rms_norm(lane0), W1, post[4 * i + 2] * W2)
            if layer.keep == "backout":
                kept["backout"] = lane0
        return rms_norm(0.5 * (lane0 + lane1) - backout_lambda * kept["backout"])


# ---- Optimizer: Adam's rule (NorMuon's are kernels), who is updated how, and when it travels -------------------------

def adam_update(p, m, v, grad, step_size, weight_decay, beta1, beta2, eps):
    """Adam with cautious decay on p (any dtype); m, v fp32. step_size and weight_decay broadcast against p; betas too."""
    grad = grad.float()
    m.mul_(beta1).add_(grad * (1 - beta1))
    v.mul_(beta2).add_(grad * grad * (1 - beta2))
    w = p.float()
    u = step_size * m / (v.sqrt() + eps)
    p.copy_(w - u - weight_decay * w * (u * w > 0))


class Row(NamedTuple):
    """How one parameter is optimized."""

    label: str
    optim: str  # normuon (every step) or adam (odd steps, on the sum of two gradients)
    comms: str  # replicated: all ranks update; sharded: the owner does; sharded_sparse: likewise, touched rows travel
    betas: tuple[float, float] | None = None
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    matrix_lr: tuple[float, ...] = ()  # normuon: rate multiplier of each matrix in one row of the bank


PARAM_TABLE = (
    Row("attn_bank", "normuon", "sharded", matrix_lr=(1.0, 1.0, 1.0, 1.0)),  # Q, K, V, O
    Row("mlp_bank", "normuon", "sharded", matrix_lr=(2.0, 4.0)),  # K9: W1, W2 (PR 168, nanochat PR 492)
    Row("scalars", "adam", "replicated", (0.9, 0.99), 5.0, 0.0),  # higher beta2 smooths scalars and gates (PR 177)
    Row("smear_gate", "adam", "replicated", (0.9, 0.99), 0.01, 0.0),
    Row("skip_gate", "adam", "replicated", (0.9, 0.99), 0.05, 0.0),
    Row("attn_gate_bank", "adam", "replicated", (0.9, 0.99)),
    Row("ve_gate_bank", "adam", "replicated", (0.9, 0.99)),
    Row("lm_head", "adam", "sharded", (0.5, 0.95), 1.0, 150.0),
    Row("bigram_embed", "adam", "sharded_sparse", (0.75, 0.95), 75.0, 5.0),
    Row("post_lambdas", "adam", "replicated", (0.9, 0.95), 1.0, 0.0),
    Row("x0_lambdas", "adam", "replicated", (0.9, 0.95), 1.0, 0.0),
    Row("bigram_lambdas", "adam", "replicated", (0.9, 0.95), 1.0, 0.0),
    Row("resid_lambdas", "adam", "replicated", (0.9, 0.95), 5.0, 0.0),
    Row("value_embeds", "adam", "sharded", (0.75, 0.95), 75.0, 5.0),
    Row("embed", "adam", "sharded", (0.5, 0.95), 1.0, 150.0))

# Launch order of the reductions, that of the table. "replicated" stands for all replicated rows: one reduction, one update.
SCATTER_ORDER = ("attn_bank", "mlp_bank", "replicated", "lm_head", "bigram_embed", "value_embeds", "embed")
# Small ones while the big reductions run; tables next, so that their gathers overlap with the orthogonalisation, which is
# last; lm_head before embed, which is copied from it while tied.
WORK_ORDER = ("replicated", "value_embeds", "bigram_embed", "lm_head", "embed", "attn_bank", "mlp_bank")


class SparseRows:
    """Averages a table's gradient over ranks by sending only the rows that were touched (PR 221, roeeshenberg).

    Rank r owns rows [r·k, (r+1)·k), k = ⌈n/G⌉. The host knows the touched rows from the batch, so the sizes of the exchange are
    agreed on the CPU (gloo) while the device computes, which is never waited for.
    """

    def __init__(self, rows, rt):
        self.rt, self.owned = rt, -(-rows // rt.world)
        self.touched = np.zeros(rows, dtype=bool)

    def send_counts(self):
        """Before the micro-step of a step that updates."""
        rows = np.flatnonzero(self.touched).astype(np.int32)
        self.touched[:] = False
        cuts = np.searchsorted(rows, np.arange(self.rt.world + 1) * self.owned)
        counts = np.diff(cuts)
        counts[self.rt.rank] = 0  # own rows stay
        rows = torch.from_numpy(np.delete(rows, slice(cuts[self.rt.rank], cuts[self.rt.rank + 1])))
        self.rows = rows.pin_memory().to(self.rt.device, non_blocking=True) if self.rt.device.type == "cuda" else rows
        self.counts = torch.from_numpy(counts)
        self.counts_in = torch.empty_like(self.counts)
        self.work = dist.all_to_all_single(self.counts_in, self.counts, async_op=True)

    def send_rows(self):
        """After the micro-step has been launched: the host waits for the counts while the device computes, the rows follow."""
        with region("wait bigram_embed"):
            self.work.wait()
        self.counts, self.counts_in = self.counts.tolist(), self.counts_in.tolist()
        self.rows_in = self.rows.new_empty(sum(self.counts_in))
        self.work = dist.all_to_all_single(self.rows_in, self.rows, self.counts_in, self.counts, async_op=True)

    def send_values(self, grad):
        """grad (G·k, D): this rank's gradient, summed over the steps since the last exchange."""
        values = grad[self.rows]
        self.values_in = grad.new_empty(sum(self.counts_in), grad.size(1))
        self.work_values = dist.all_to_all_single(self.values_in, values, self.counts_in, self.counts, async_op=True)

    def receive(self, grad):
        """Average of the owned rows (k, D)."""
        self.work.wait()
        self.work_values.wait()
        own = grad[self.rt.rank * self.owned:(self.rt.rank + 1) * self.owned]
        # One source at a time: rows are unique within a source, so the sum does not depend on timing.
        for rows, values in zip(self.rows_in.split(self.counts_in), self.values_in.split(self.counts_in)):
            own.index_add_(0, rows - self.rt.rank * self.owned, values)
        return own.div_(self.rt.world)


def flat_views(flat, like):
    """The consecutive parts of a flat buffer, each in the shape of one of `like`."""
    return [part.view_as(p) for part, p in zip(flat.split([p.numel() for p in like]), like)]


class NorMuonAndAdam:
    """State and communication of all parameters. The rules are adam_update and kernels, the numbers in PARAM_TABLE.

    named_params: {label: parameter}. One object with explicit orders in place of hooks: Chris McCormick (PR 200).
    """

    def __init__(self, named_params, config, rt, ops, compiler=lambda f: f):
        self.params, self.config, self.rt, self.ops = dict(named_params), config.optim, rt, ops
        self.table = {row.label: row for row in PARAM_TABLE}
        if len(self.table) != len(PARAM_TABLE) or set(self.table) != set(self.params):
            raise ValueError(f"PARAM_TABLE needs one row per parameter; differing: {sorted(set(self.table) ^ set(self.params))}")
        travelling = sorted({row.label if row.comms != "replicated" else row.comms for row in PARAM_TABLE})
        if not travelling == sorted(SCATTER_ORDER) == sorted(WORK_ORDER):
            raise ValueError(f"SCATTER_ORDER and WORK_ORDER need each of {', '.join(travelling)} once")
        self.adam_update = compiler(adam_update)
        self.buffers = {}  # label -> (parameter, gradient) in the optimizer's shape and padded, for the collectives
        self.shards = {}  # label -> the part of the parameter this rank updates, in the optimizer's shape; a view
        self.state = {}  # label -> {"m", "v", "mantissa"} of that part
        self.matrix_lr = {}  # label -> rate multiplier of every owned matrix
        self.coefficients = {}  # label -> (beta1, beta2, lr_mul, wd_mul)
        for label, row in self.table.items():
            param, full = self.params[label], self._matrices(label, self.params[label].detach())
            self.buffers[label] = self._padded(label, full), self._padded(label, torch.zeros_like(full))
            param.data, param.grad = (buffer[:len(full)].view_as(param) for buffer in self.buffers[label])
            shard = self.shards[label] = self._own(label, self.buffers[label][0])
            m = torch.zeros_like(shard, dtype=torch.float32)
            if row.optim == "adam":
                self.coefficients[label] = (*row.betas, row.lr_mul, row.wd_mul)
                self.state[label] = {"m": m, "v": torch.zeros_like(m)}
            else:
                v = torch.zeros_like(m[:, :, :1] if shard.size(1) >= shard.size(2) else m[:, :1])
                self.state[label] = {"m": m, "v": v, "mantissa": torch.zeros_like(shard, dtype=torch.int16)}
                rates = torch.tensor(row.matrix_lr * param.size(0), device=rt.device)
                self.matrix_lr[label] = self._own(label, rates).view(-1, 1, 1)

        # Replicated parameters share one flat fp32 buffer, one reduction and one update; coefficients are vectors over it.
        self.flat_labels = [row.label for row in PARAM_TABLE if row.comms == "replicated"]
        self.flat_params = [self.shards[label] for label in self.flat_labels]
        sizes = torch.tensor([p.numel() for p in self.flat_params])
        self.state["replicated"] = {key: torch.zeros(int(sizes.sum()), device=rt.device) for key in ("m", "v")}
        for key, flat in self.state["replicated"].items():
            for label, view in zip(self.flat_labels, flat_views(flat, self.flat_params)):
                self.state[label][key] = view
        columns = zip(*(self.coefficients[label] for label in self.flat_labels))
        self.coefficients["replicated"] = [torch.tensor(column).repeat_interleave(sizes).to(rt.device) for column in columns]

        # Exchanging touched rows pays for the gradient of a single micro-batch only.
        self.sparse = SparseRows(self.params["bigram_embed"].size(0), rt) if rt.world == config.run.micro_batches > 1 else None

    def _matrices(self, label, tensor):
        """The optimizer's view of a parameter-shaped tensor: banks (n, R, C), all else as it is."""
        per_row = len(self.table[label].matrix_lr)
        return tensor.view(tensor.size(0) * per_row, -1, tensor.size(-1)) if per_row else tensor

    def _padded(self, label, full):
        """A tensor in the optimizer's shape, followed by zeros if the ranks do not divide it."""
        missing = 0 if self.table[label].comms == "replicated" else -len(full) % self.rt.world
        return torch.cat((full, full.new_zeros(missing, *full.shape[1:]))) if missing else full

    def _own(self, label, full):
        """This rank's part of a full tensor, padded or not."""
        return full if self.table[label].comms == "replicated" else self._padded(label, full).chunk(self.rt.world)[self.rt.rank]

    def _full(self, label, part):
        """The full tensor from every rank's part, without padding."""
        if self.table[label].comms == "replicated" or self.rt.world == 1:
            return part
        octets = part.contiguous().view(torch.uint8)  # NCCL does not know int16
        full = octets.new_empty(octets.size(0) * self.rt.world, *octets.shape[1:])
        all_gather(full, octets)
        return full.view(part.dtype)[:len(self._matrices(label, self.params[label]))]

    def before_micro_step(self, plan, bigram_rows_cpu):
        if self.sparse is not None:
            self.sparse.touched[bigram_rows_cpu] = True
            if plan.adam:
                self.sparse.send_counts()

    def after_micro_step(self, plan):
        if self.sparse is not None and plan.adam:
            self.sparse.send_rows()

    @torch.no_grad()
    def step(self, plan):
        """Apply what is due at this step (`StepPlan`), publish the new parameters, drop the gradients that were used."""
        def due(name):
            return name in self.matrix_lr or plan.adam and not (name == "embed" and plan.tied)

        # Phase 1: start the reductions. Tied: the embedding's gradient joins that of the head.
        pending = {}
        for name in filter(due, SCATTER_ORDER):
            with region(f"reduce {name}"):
                if name == "lm_head" and plan.tied:
                    self.ops.transpose_add(self.params["embed"].grad, self.params["lm_head"].grad)
                pending[name] = self._start_reduction(name)

        # Phase 2: wait for each, update, start its gather.
        gathers = {}
        for name in filter(due, WORK_ORDER):
            with region(f"wait {name}"):
                grad = pending.pop(name)()
            with region(f"update {name}"):
                (self._update_normuon if name in self.matrix_lr else self._update_adam)(name, plan, grad)
            if self.rt.world > 1 and name != "replicated":
                with region(f"gather {name}"):
                    gathers[name] = all_gather(self.buffers[name][0], self.shards[name], async_op=True)

        # Phase 3: finish. Tied: the embedding is the transposed head.
        if plan.adam and plan.tied:
            if self.rt.world > 1:
                with region("wait gather lm_head"):
                    gathers.pop("lm_head").wait()
            with region("update embed"):
                self.ops.transpose_copy(self.params["lm_head"].detach(), self.params["embed"].detach())
        for name, work in gathers.items():
            with region(f"wait gather {name}"):
                work.wait()
        with region("zero gradients"):
            for label, param in self.params.items():
                if label in self.matrix_lr or plan.adam:
                    param.grad.zero_()  # it stays where it is: CUDA graphs add to it
        if plan.split:  # from here on the embedding has a state of its own, inherited from the head (PR 200)
            for key, part in self.state["embed"].items():
                part.copy_(self._own("embed", self._full("lm_head", self.state["lm_head"][key]).t()))

    def _start_reduction(self, name):
        """Launch the average over ranks of one gradient; returns a function that waits for it and gives this rank's part."""
        grad = self.buffers[name][1] if name != "replicated" else torch.cat([
            self.params[label].grad.float().flatten() for label in self.flat_labels])
        if self.rt.world == 1:
            return lambda: grad
        if name == "replicated":
            part, work = grad, dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True)
        elif self.sparse is not None and self.table[name].comms == "sharded_sparse":
            self.sparse.send_values(grad)
            return lambda: self.sparse.receive(grad)
        else:
            part = torch.empty_like(self.shards[name])
            work = reduce_scatter(part, grad, op=dist.ReduceOp.AVG, async_op=True)
        return lambda: (work.wait(), part)[1]

    def _update_normuon(self, label, plan, grad):
        state, shard = self.state[label], self.shards[label]
        X, scale = self.ops.fused_momentum(grad, state["m"], plan.momentum, kernels.POLAR_SAFETY)
        y = kernels.polar_express(X, scale, self.ops)
        lr = self.config.muon_lr * plan.lr_factor
        self.ops.normuon_tail(shard.view(torch.int16), state["mantissa"], state["v"], y, lr, self.matrix_lr[label],
                              self.config.muon_wd * lr, self.config.muon_beta2)  # decay: the bank's rate, no multiplier

    def _update_adam(self, name, plan, grad):
        state, (beta1, beta2, lr_mul, wd_mul) = self.state[name], self.coefficients[name]
        t = (plan.step + 1) // 2  # updates so far, this one included; the embedding inherits those of the head
        # 0-D CPU tensors: compiled code reads them at launch, so a new value costs neither a recompile nor a copy to the device.
        lr = self.config.adam_lr * plan.lr_factor * lr_mul
        step_size = torch.as_tensor(lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t))
        weight_decay = torch.as_tensor(lr * lr * self.config.adam_wd * wd_mul)
        p = torch.cat([p.float().flatten() for p in self.flat_params]) if name == "replicated" else self.shards[name]
        self.adam_update(p, state["m"], state["v"], grad, step_size, weight_decay, beta1, beta2, self.config.adam_eps)
        if name == "replicated":
            for param, new in zip(self.flat_params, flat_views(p, self.flat_params)):
                param.copy_(new)

    def state_dict(self):
        """{label: {"m", "v", "mantissa", "grad"}} of full tensors on the CPU, for any number of ranks: all call it, rank 0 gets it.
        "grad", averaged over ranks, is there when it waits for the next Adam update, that is before an odd step."""
        full = {}
        for label, param in self.params.items():
            grad = param.grad.clone()
            if self.rt.world > 1:
                dist.all_reduce(grad, op=dist.ReduceOp.AVG)
            tensors = {key: self._full(label, part) for key, part in self.state[label].items()}
            tensors |= {"grad": grad} if grad.any() else {}
            full[label] = {key: x.to("cpu", copy=True) for key, x in tensors.items() if self.rt.rank == 0}
        return full

    @torch.no_grad()
    def load_state_dict(self, full):
        """What `full` lacks is zero, as before the first step. All ranks get the same waiting gradient, and so its average."""
        for label, param in self.params.items():
            for key, place in (self.state[label] | {"grad": param.grad}).items():
                if (tensor := full.get(label, {}).get(key)) is None:
                    place.zero_()
                else:
                    place.copy_(tensor if key == "grad" else self._own(label, tensor))
        if self.sparse is not None:
            self.sparse.touched = self.params["bigram_embed"].grad.any(1).cpu().numpy()


# ---- Schedule --------------------------------------------------------------------------------------------------------

class StepPlan(NamedTuple):
    """What `make_plan` says of one step."""

    step: int
    stage: int  # index into schedule.stages
    row_tokens: int  # N of a training forward pass
    max_doc_len: int
    lr_factor: float
    momentum: float  # of NorMuon
    mtp_weights: tuple[float, ...]
    adam: bool  # Adam parameters are updated on odd steps, with the sum of two gradients (PR 136, classiclarryd)
    tied: bool  # embedding and head are one
    split: bool  # they part after this step


def stage_starts(schedule: Schedule) -> list[int]:
    """First step of every stage, and the number of steps at the end."""
    equal = len(schedule.stages) - 1
    starts = [round(schedule.scheduled_steps * i / equal) for i in range(equal + 1)]
    return [*starts, schedule.scheduled_steps + schedule.extension_steps]


def make_plan(config: Config, step: int) -> StepPlan:
    """All that depends on the step number; pure."""
    schedule = config.schedule
    *starts, total = stage_starts(schedule)
    index = bisect_right(starts, step) - 1
    stage, start = schedule.stages[index], starts[index]
    progress = (step - start) / ([*starts, total][index + 1] - start) if step < total else 0.0

    cooldown = int(schedule.scheduled_steps * (1 - schedule.cooldown_frac))
    t = min(1.0, max(0.0, (step - cooldown) / (schedule.scheduled_steps - cooldown)))  # K11: base jumps inside the cool-down
    low, high = schedule.muon_momentum
    if step < schedule.muon_warmup:
        work = step / schedule.muon_warmup
    else:
        work = 1 - max(0, step - (total - schedule.muon_cooldown)) / schedule.muon_cooldown
    split_step = starts[schedule.split_stage - 1] | 1
    return StepPlan(
        step=step, stage=index, row_tokens=stage.batch_tokens // config.run.micro_batches, max_doc_len=stage.max_doc_len,
        lr_factor=stage.lr_mul * (1 - t) + schedule.lr_floor * t, momentum=low + (high - low) * work,
        mtp_weights=tuple(a + (b - a) * progress for a, b in zip(stage.mtp_start, stage.mtp_end)),
        adam=step % 2 == 1,  # K12: the two gradients may come from different stages
        tied=step <= split_step, split=step == split_step)


# ---- Log and evaluation ----------------------------------------------------------------------------------------------

class Log:
    """The log file and the console of rank 0; other ranks write nothing. Lines are written at once: a killed run loses none."""

    def __init__(self, config, rt):
        self.path = Path(__file__).parent / config.run.log_dir / f"{config.run.run_label}_{uuid.uuid4()}.txt"
        self.is_main, self.terminal = rt.rank == 0, rt.rank == 0 and sys.stdout.isatty()
        self.sorry = f"cannot write {self.path} or the console; make room, or choose another --log_dir"
        if self.is_main:
            with user_error(self.sorry):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = open(self.path, "w", encoding="utf-8", buffering=1)
            self.line(str(self.path), file=False)

    def line(self, text, console=True, file=True, end="\n"):
        if not self.is_main:
            return
        with user_error(self.sorry):  # a run that is not written down is worth nothing
            if file:
                self.file.write(text + "\n")  # one write (2.4 µs, Xeon at 2.5 GHz): the loader's thread writes, too
            if console:
                print(("\r\033[K" if self.terminal else "") + text, flush=True, end=end)

    def progress(self, text, seconds_left):
        """A line per step in the file; on a terminal it stays in one place, with the expected time to the end."""
        self.line(text, console=not self.terminal)
        if self.terminal:
            self.line(f"{text} eta:{seconds_left // 60:.0f}m{seconds_left % 60:02.0f}s", file=False, end="")


def log_header(log, config, rt, choices, sources):
    """Sources, versions, machine, resolved config: what is needed to repeat the run."""
    try:
        gpus = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
        gpus = re.split(r"\s*\+-+\+\n\| Processes", gpus)[0]  # logs are published: nobody's processes and paths
    except FileNotFoundError:
        gpus = "nvidia-smi: not found"
    rule, short_rule = "=" * 100, "-" * 40
    settings = capability(rt.device) | {"ranks": rt.world, "cores": os.cpu_count(), "platform": platform.platform()}
    script, *others = sources.items()
    for text in (script[1], *(f"\n{short_rule}\n# {name}\n{short_rule}\n\n{source}" for name, source in others), rule,
                 f"Running Python {sys.version}",
                 f"Running PyTorch {torch.__version__} compiled for CUDA {torch.version.cuda}",
                 f"Running Triton version {kernels.triton.__version__}", gpus, rule,
                 *(f"{key}: {render(value)}" for key, value in (settings | flatten(config)).items()), rule):
        log.line(text, console=False)
    log.line("kernels: " + " ".join(f"{op}:{name}" for op, name in choices.items()))
    rows = [str(stage.batch_tokens // config.run.micro_batches) for stage in config.schedule.stages]
    log.line(f"tokens per micro-batch: {' '.join(rows)}; micro-batches per rank: {config.run.micro_batches // rt.world}")


@torch.no_grad()
def summed_loss(forward, head, batch, view) -> Tensor:
    """Sum of the next-token cross-entropies (nats) of a batch, 0-D fp32; the head unquantised, its logits in blocks of rows."""
    h = forward(batch.tokens, batch.cu_seqlens, batch.bigram_rows, view._replace(max_doc_len=len(batch.tokens)))
    return head(h, batch.targets, torch.ones(1, device=h.device), 1.0, exact=True)


def validate(forward, head, data, view, rt) -> float:
    """Mean loss over the validation tokens of all ranks, of which some may have fewer pieces than others, or none."""
    total = sum((summed_loss(forward, head, batch, view) for batch in data), torch.zeros((), device=rt.device))
    if rt.world > 1:
        dist.all_reduce(total)
    return total.item() / data.config.data.val_tokens


# ---- Training --------------------------------------------------------------------------------------------------------

def require_finite(value, what):
    """UserError when a loss, a Python float, is nan or inf."""
    if not math.isfinite(value):
        raise UserError(f"the {what} is {value}: lower --muon_lr and --adam_lr, or check the data")


class MicroStep:
    """Forward pass, loss and backward pass of one micro-batch; gradients add up in `.grad`. Returns the loss, κ * sum.

    On a GPU the first call of a stage also records a CUDA graph, which replays the hundreds of launches of all later calls at once:
    the host would need 30 to 39 ms for them, the GPU needs 21 (stage 1, H200). Whatever a graph reads or writes stays in its place.
    """

    def __init__(self, forward, head, kappa, record):
        self.forward, self.head, self.kappa, self.record = forward, head, kappa, record
        self.graphs = {}  # stage -> (graph, its inputs, its view, its loss)
        # Autograd adds up gradients on the stream on which it first met a parameter, so all runs of a parameter use one stream.
        # One graph runs at a time: they share their memory.
        self.stream, self.pool = (torch.cuda.Stream(), torch.cuda.graph_pool_handle()) if record else (None, None)

    def run(self, tokens, targets, cu_seqlens, bigram_rows, mtp_weights, view):
        with region("forward"):
            h = self.forward(tokens, cu_seqlens, bigram_rows, view)
        with region("loss"):
            loss = self.head(h, targets, mtp_weights, self.kappa)
        with region("backward"):
            loss.backward()
        return loss.detach()

    def __call__(self, batch, mtp_weights, view, stage):
        given = (*batch[:4], mtp_weights)
        if not self.record:
            return self.run(*given, view)
        if stage not in self.graphs:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                first_loss = self.run(*given, view)  # compiles, which nothing recorded may do
            torch.cuda.current_stream().wait_stream(self.stream)
            inputs, graph = [x.clone() for x in given], torch.cuda.CUDAGraph()
            # thread_local: the loader's threads may go on.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                loss = self.run(*inputs, view)
            self.graphs[stage] = graph, inputs, view, loss
            return first_loss
        graph, inputs, _, loss = self.graphs[stage]
        for place, value in zip(inputs, given):
            place.copy_(value)
        graph.replay()
        return loss


def train_step(micro_step, optimizer, loader, plan, view, mtp_weights, micro_steps):
    """All micro-batches, then the optimizer. Returns the last micro-batch's loss (κ * sum)."""
    for _ in range(micro_steps):
        with region("data"):
            batch = loader.next_batch()
        optimizer.before_micro_step(plan, batch.bigram_rows_cpu)
        with region("micro-step"):
            loss = micro_step(batch, mtp_weights, view, plan.stage)
        optimizer.after_micro_step(plan)
    optimizer.step(plan)
    if plan.adam:
        with region("update head codes"):
            micro_step.head.refresh()
    return loss


def warmup_steps(plans) -> list[int]:
    """The first step of every stage, and of every kind of update: so every graph is made before the clock starts."""
    seen, steps = set(), []
    for plan in plans:
        met = {plan.stage, (plan.adam, plan.tied, plan.split)}
        if not met <= seen:
            steps.append(plan.step)
        seen |= met
    return steps


class Stopwatch(dict):
    """Phase of the start -> its seconds, in order."""

    def __init__(self):
        self.start = self.last = time.perf_counter()
        self["imports"] = IMPORT_SECONDS

    def lap(self, phase):
        """What has passed since the last call belongs to `phase`."""
        now = time.perf_counter()
        self[phase], self.last = now - self.last, now


class Trainer:
    """Model, optimizer, data and schedule of one run, put together; `run` is the timed loop."""

    def __init__(self, config, rt, log, ops, watch, sources=None, resumed=None):
        self.config, self.rt, self.log, self.watch, self.sources = config, rt, log, watch, sources
        self.first, self.before = (resumed["step"], resumed["seconds"]) if resumed else (0, 0.0)  # the clock before the first step
        self.dtype = getattr(torch, config.run.dtype)
        compiler = (lambda f: torch.compile(f, dynamic=False, fullgraph=True)) if config.run.compile else (lambda f: f)
        self.total = stage_starts(config.schedule)[-1]
        self.micro_steps = config.run.micro_batches // rt.world
        self.plans = [make_plan(config, step) for step in range(self.total + 1)]
        self.tokens = list(accumulate(config.schedule.stages[plan.stage].batch_tokens for plan in self.plans[:-1]))  # seen by then
        self.losses = deque()  # (step, event after its copy, loss on the host) of steps that are not known to have gone well
        self.seconds = {}  # phase -> seconds outside the clock
        self.clock_ms = []  # the clock at the end of every step

        self.validation = ValidationData(config, rt)
        self.loader = self.new_loader(self.plans[:-1], config)
        watch.lap("data")
        self.model = GPT(config.model, ops, self.dtype, rt.device)
        self.model.init_weights(config.run.seed)
        if rt.world > 1:
            for param in self.model.parameters():
                dist.broadcast(param.detach(), 0)
        self.layers = compiler(self.model.layers)
        self.head = kernels.HeadLoss(self.model.lm_head, self.dtype, config.run.fp8, ops.cross_entropy)
        record = config.run.cuda_graphs and rt.device.type == "cuda"
        self.micro_step = MicroStep(self.forward, self.head, 1 / self.micro_steps, record)
        self.optimizer = NorMuonAndAdam(self.model.named_parameters(), config, rt, ops, compiler)
        self.plain = ops.attention is not kernels.attention_block  # traced by the compiler, which then needs Python numbers
        self.views = stage_views(config, rt.device, self.dtype, (lambda x: x) if self.plain else torch.tensor)
        if config.run.profile:
            from records import trace
            self.profile = trace.Profile(self, LAYERS, len(kernels.POLAR_EXPRESS))
        width = max(len(plan.mtp_weights) for plan in self.plans)
        self.mtp_table = torch.tensor([(*plan.mtp_weights, *[0.0] * width)[:width] for plan in self.plans], device=rt.device)
        self.synchronize()
        watch.lap("model")

    def forward(self, tokens, cu_seqlens, bigram_rows, view):
        """What `GPT.forward` gives, compiled."""
        rows = self.model.lookup(tokens, bigram_rows)
        for x in (*rows, cu_seqlens) if self.config.run.compile else ():
            torch._dynamo.mark_dynamic(x, 0)  # one graph for all lengths: training compiles once, evaluation once
        return self.layers(rows, cu_seqlens, view)

    def new_loader(self, plans, config):
        return Loader(config, self.rt, plans, warn=lambda text: self.log.line("warning: " + text))

    def step(self, loader, plan, micro_steps):
        mtp_weights = self.mtp_table[plan.step, :len(plan.mtp_weights)]
        with region(f"step {plan.step}"):
            return train_step(self.micro_step, self.optimizer, loader, plan, self.views[plan.stage], mtp_weights, micro_steps)

    def synchronize(self):
        if self.rt.device.type == "cuda":
            torch.cuda.synchronize()

    def settle(self):
        """Before the clock goes on: no garbage, nothing under way, all ranks here. Else the first step waits for the slowest."""
        gc.collect()
        self.synchronize()
        if self.rt.world > 1:
            dist.barrier()

    def compile_kernels(self):
        """Run all but the compiled graphs on a few tokens, which compiles the Triton kernels. Leaves weights and state changed."""
        torch.cuda.set_device(self.rt.device)  # the current device belongs to the thread
        N, view = 256, self.views[0]
        batch = make_batch(np.zeros(N + 1, np.uint16), cu_seqlens(np.array([N]), N, 128), self.config, self.rt.device)
        with torch.cuda.stream(self.micro_step.stream):
            with torch.no_grad():
                summed_loss(self.model, self.head, batch, view)
            for width in {len(plan.mtp_weights) for plan in self.plans}:
                h = self.model(batch.tokens, batch.cu_seqlens, batch.bigram_rows, view)
                self.head(h, batch.targets, self.mtp_table[0, :width], 1.0).backward()
            for label in self.optimizer.matrix_lr:
                self.optimizer._update_normuon(label, self.plans[0], torch.zeros_like(self.optimizer.shards[label]))

    def warm_up(self):
        """Compile every graph by running it, then put everything back to the start."""
        torch._dynamo.config.recompile_limit = 64  # several shapes of one function are meant to be
        steps = warmup_steps(self.plans[self.first:-1])
        self.log.line(f"Sampling steps {steps} for warmup")
        initial = [param.detach().clone() for param in self.model.parameters()]
        one_each = dataclasses.replace(self.config, run=dataclasses.replace(self.config.run, micro_batches=self.rt.world))
        loader = self.new_loader([self.plans[step] for step in steps], one_each)
        self.synchronize()
        with ThreadPoolExecutor(1) as pool:  # Triton compiles kernels while Dynamo and Inductor are busy here
            kernels_ready = pool.submit(self.compile_kernels) if self.rt.device.type == "cuda" else None
            for piece in islice(self.validation, 1):  # a rank may have none
                for view in self.views if self.plain else self.views[-1:]:  # one graph for all, or one for each
                    summed_loss(self.forward, self.head, piece, view)
            if kernels_ready is not None:
                kernels_ready.result()
        self.synchronize()
        self.watch.lap("evaluation")
        for step in steps:
            self.step(loader, self.plans[step], 1)
            self.synchronize()
            self.watch.lap(f"step {step}")
        self.log.line("Resetting Model")
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), initial):
                param.copy_(value)
        self.optimizer.load_state_dict({})
        self.head.refresh()

    def run(self):
        """The timed run -> (final validation loss, seconds inside the clock)."""
        from records import evaluate
        run, pause_seconds = self.config.run, 0.0
        gc.disable()  # collected in pauses, outside the clock
        self.loader.ready.exception()  # waits for the first batch
        self.settle()
        elapsed, start = self.before, time.perf_counter()  # the clock starts: first batch ready, everything compiled
        for step, plan in enumerate(self.plans[self.first:], self.first):
            if step == run.profiled.stop:
                start += self.profile.stop()  # outside the clock
            last = step == self.total
            validates = last or step % run.val_every == 0
            saves = run.save_every and self.first < step < self.total and step % run.save_every == 0
            if validates or saves:
                self.synchronize()
                elapsed += time.perf_counter() - start  # the clock stops
                pause = time.perf_counter()
                self.check_losses(keep=0)
                if validates:
                    loss = validate(self.forward, self.head, self.validation, self.views[-1 if last else plan.stage], self.rt)
                    ms = 1000 * elapsed
                    self.log.line(f"step:{step}/{self.total} val_loss:{loss:.4f} train_time:{ms:.0f}ms"
                                  f" step_avg:{ms / max(step, 1):.2f}ms")
                    require_finite(loss, f"validation loss before step {step}")
                if saves:
                    evaluate.save(self, step, elapsed)
                self.settle()
                start = time.perf_counter()
                pause_seconds += start - pause
                if last:
                    break
            if step == run.profiled.start:
                start += self.profile.start()
            host_loss = self.step(self.loader, plan, self.micro_steps).detach().to("cpu", non_blocking=True)
            copied = torch.cuda.current_stream().record_event() if self.rt.device.type == "cuda" else None
            self.losses.append((step, copied, host_loss))
            self.check_losses(keep=2)
            if run.profile and step + 1 not in run.profiled:
                self.synchronize()  # so that the time of this step is its own, to compare the profiled ones with
            ms = 1000 * (elapsed + time.perf_counter() - start)
            self.clock_ms.append(ms)
            self.log.progress(f"step:{step + 1}/{self.total} train_time:{ms:.0f}ms step_avg:{ms / (step + 1):.2f}ms",
                              ms / 1000 * (self.tokens[-1] / self.tokens[step] - 1))
        self.seconds["validation"] = pause_seconds
        if run.profile:
            self.log.line(self.profile.cost())
        return loss, elapsed

    def check_losses(self, keep):
        """Stop at a training loss that is not finite. The last `keep` steps may be under way: the host does not wait for them."""
        while len(self.losses) > keep:
            step, copied, loss = self.losses.popleft()
            if copied is not None:
                copied.synchronize()
            require_finite(loss.item(), f"training loss of step {step}")


def train(config, rt, log, watch, sources):
    """Everything after the process group exists."""
    from records import evaluate
    config, ops, choices = choose_kernels(config, rt.device)
    log_header(log, config, rt, choices, sources)
    run = config.run
    resumed = evaluate.load_to_resume(config) if run.resume else None
    watch.lap("log")
    trainer = Trainer(config, rt, log, ops, watch, sources, resumed)
    ready = time.perf_counter()
    if run.compile:
        log.line("Compiling model and warming up kernels (minutes on first execution)")
        trainer.warm_up()
    if resumed:
        evaluate.load(trainer, resumed)
    log.line("startup, seconds: " + ", ".join(f"{phase} {value:.2f}" for phase, value in watch.items()))
    trainer.seconds |= {"setup": ready - watch.start, "warmup": time.perf_counter() - ready}
    loss, seconds = trainer.run()
    allocated, reserved = torch.cuda.max_memory_allocated() // 2**20, torch.cuda.max_memory_reserved() // 2**20  # without a GPU 0
    log.line(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")
    if run.sample_tokens and rt.rank == 0:
        try:
            log.line("sample:\n" + "".join(evaluate.sample(trainer.model, config)))
        except (UserError, RuntimeError) as error:  # out of memory, too: what was trained is not lost for it
            log.line(f"warning: no sample: {one_line(error)}")
    summary = {"final_val_loss": f"{loss:.4f}", "train_seconds": f"{seconds:.3f}"}
    summary |= {f"{phase}_seconds": f"{value:.3f}" for phase, value in trainer.seconds.items()}
    summary |= {"total_seconds": f"{time.perf_counter() - watch.start:.3f}", "steps": trainer.total,
                "tokens": trainer.tokens[-1], "peak_memory_mib": allocated}
    for key, value in summary.items():
        log.line(f"{key}: {value}")
    if run.save or run.save_every:
        evaluate.save(trainer, trainer.total, seconds)


def main(argv) -> int:
    """Train as `argv` says; returns the exit status."""
    watch = Stopwatch()
    if "--help" in argv:
        print(help_text())
        return 0
    root, names = Path(__file__).parent, (Path(__file__).name, "data/loader.py", "triton_kernels.py")
    sources = {name: (root / name).read_text(encoding="utf-8") for name in names}  # before anybody edits them
    from records import check, evaluate
    rank = local = 0
    try:
        if any(arg.startswith("--sample=") for arg in argv):
            return evaluate.speak(argv)
        rank, world, local = place()
        only_check = "--check" in argv
        config = parse_config([arg for arg in argv if arg != "--check"], world)
        config, fine = check.run_checks(config, world, show=only_check and local == 0)  # before anything is compiled
        if only_check:
            return int(not fine)
        watch.lap("checks")
        rt = init_runtime(config)
        watch.lap("processes")
        train(config, rt, Log(config, rt), watch, sources)
        dist.destroy_process_group()
        return 0
    except UserError as error:
        message = str(error)
    except torch.OutOfMemoryError as error:
        message = f"out of GPU memory: {check.LESS_MEMORY} ({one_line(error)})"
    except RuntimeError as error:
        if not re.search("connection (closed|reset)|broken pipe|timed out waiting|nccl", str(error), re.I):
            raise
        message = f"lost the connection to another process, or waited for it in vain; it may say why ({one_line(error)})"
    finally:
        gc.enable()
    if check.first_to_say(local):
        print(f"error: {f'rank {rank}: ' if rank else ''}{message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.modules["train_gpt"] = sys.modules[__name__]  # for those in records/ that import it
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have every character of a sample
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not so after nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, like at SIGTERM, also while waiting for another process
    status = main(sys.argv[1:])
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # after an error other ranks may hang in a collective; do not wait for them
