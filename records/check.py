"""The table of `python train_gpt.py --check`: whether a run with these arguments would start on this machine.

Each function in CHECKS takes a Run and returns a description, or (description, whether all is well). It raises
UserError if the run will not start. Every run makes the same checks without this file, in data/run/start.py, and stops
at the first failure.
"""

import dataclasses
import getpass
import os
import platform
import textwrap
from contextlib import suppress
from typing import NamedTuple

import torch

import triton_kernels as kernels
from data.run import start
from data.run.checkpoint import check_weights, load_checkpoint
from data.run.program import UserError
from data.run.config import with_knobs
from data.run.length import Gpu, SECONDS_PER_TOKEN, SIZE_KNOBS, Size, seconds_per_token, stage_starts, total_tokens
from data.run.machine import capability, ceilings, choose_kernels, find_device, measure_gpu
from data.run.memory import fit_memory, memory_report, require_state, state_bytes
from data.tokenizer import text_codec


class Run(NamedTuple):
    """The run that the table is about."""

    config: object
    world: int  # number of ranks
    table: tuple  # the `param_table` of the model
    models: dict  # name of a preset -> its model
    gpu: Gpu | None = None  # what the GPU can do, if the size was chosen

    @property
    def sizes(self):
        """`sizes` of data/run/memory.py."""
        return state_bytes(self.config, self.table, self.world)


def versions(run):
    """Versions of Python and of the packages."""
    start.require_torch()
    return (f"Python {platform.python_version()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'},"
            f" Triton {kernels.triton.__version__}")


def device(run):
    """The CPU or this process's GPU, and its capabilities."""
    device, name = find_device(run.config), f"CPU, cores {os.cpu_count()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    found = (f"{key.split('_')[-1]} {value}" for key, value in capability(device).items())
    return ", ".join([name, f"ranks {run.world}", *found])


def implementations(run):
    """The implementation of each operation."""
    names = choose_kernels(run.config, find_device(run.config))[2]
    return " ".join(f"{op}:{name}" for op, name in names.items())


def tokenizer(run):
    """GPT-2's tokenizer, from which a new run with --bigram_normal makes a table."""
    text_codec(run.config.model.vocab_size)
    return "GPT-2's BPE"


def checkpoint(run):
    """The checkpoint of --resume or --init_from."""
    path = run.config.system.resume or run.config.system.init_from
    state = load_checkpoint(path)
    check_weights(state, run.config.model, run.table)
    return f"{path}: step {state['step']}, {state['seconds']:.1f} s inside the clock"


def caches(run):
    """The folders of the compilers' caches."""
    folders = start.require_caches(run.config, find_device(run.config))
    try:
        getpass.getuser()
    except (KeyError, OSError):
        compiles = run.config.system.compile and "TORCHINDUCTOR_CACHE_DIR" not in os.environ
        if compiles and start.torch_version() < (2, 13):
            return "older versions of PyTorch need a user with a name: set USER, or TORCHINDUCTOR_CACHE_DIR", False
    return ", ".join(folders) or "nothing is compiled"


def expected_time(run):
    """The expected training time. It comes from what was measured for the choice of the size (data/run/length.py), from
    the seconds per token of an H200 (790 TFLOP/s in bf16; records), or from those of two cores (records/guide.md)."""
    device, schedule = find_device(run.config), run.config.schedule
    if schedule.minutes:
        return f"{schedule.minutes:g} min, as --minutes says"
    tokens = total_tokens(schedule)
    model, timed = run.config.model, [x for name, x in run.models.items() if (name == "cpu") == (device.type == "cpu")]
    timed = [dataclasses.replace(x, ngram_rows=model.ngram_rows) if any(x.ngram_rows) else x for x in timed]
    if run.gpu:
        size = {key: getattr(model, key) for key in (*SIZE_KNOBS, "layers")}
        timed = [dataclasses.replace(x, **size) for x in timed]
    if model not in timed or run.config.system.kernels != "auto":
        return "not known for this model or these kernels"
    if run.gpu:
        rows = tokens / stage_starts(schedule)[-1] / run.world
        minutes = tokens * seconds_per_token(Size(model.model_dim, model.depth), rows, run.gpu) / run.world / 60
        return f"about {minutes:.1f} minutes (estimate from H100s, scaled to what this GPU can do, see size)"
    if device.type == "cpu":
        return (f"{SECONDS_PER_TOKEN['cpu'] * tokens / 60:.1f} minutes on two cores of an AMD EPYC; this CPU was not"
                " measured")
    try:
        rate = ceilings()["bf16"] / 1e12
    except torch.OutOfMemoryError:
        return "not measured: too little memory of the GPU is free", False
    minutes = tokens / 60 * SECONDS_PER_TOKEN["cuda"] / run.world * 790 / rate
    if not schedule.sampled_frac:
        minutes *= 1.15  # records/2026-11-22_sampled_softmax
    if not run.config.system.fp8_mlp:
        minutes *= 1.13  # records/2026-11-23_fp8
    if not any(layer.narrow for layer in model.layers):
        minutes *= 1.16  # wider heads and MLPs, record 74's optimizer (records/2026-11-23_attention, _optimizer)
    if capability(device)["hardware_tma"] == "no":
        minutes *= 1.21  # no Hopper matrix instructions, and a head in bf16 (records/2026-11-20_hardware)
    return f"about {minutes:.1f} minutes (estimate from an H200, scaled to the {rate:.0f} TFLOP/s measured on this GPU)"


def memory(run):
    """The memory of the GPU."""
    device = find_device(run.config)
    require_state(run.sizes, device, run.world)
    return memory_report(run.config, run.sizes, device, run.world)


def data(run, part, survey):
    """A line of `survey`, and what the shards hold, which the first process of a machine reads."""
    found, fine = survey(run.config)
    doubts = start.read_shards(run.config, part) if os.environ.get("LOCAL_RANK", "0") == "0" else []
    return "; ".join([found, *doubts]), fine and not doubts


CHECKS = {
    "versions": versions, "device": device, "kernels": implementations,
    "training data": lambda run: data(run, "train", start.survey_training_data),
    "validation data": lambda run: data(run, "val", start.survey_validation_data),
    "caches": caches, "disk": lambda run: start.require_disk(run.config, run.table),
    "memory": memory}


def check_table(config, world, param_table, models, fit, rows_open, show) -> int:
    """Prints the table and returns the exit status. Without `show` it prints nothing and raises the first failure.

    param_table: that of train_gpt.py. fit: None, or function (Gpu, device) -> (config of the best size for the length
    of the run, a line about it, training time). rows_open: see `fit_memory`. The others are those of Run.
    """
    columns, status, checks = "{:<15} | {:<90} | {}", 0, dict(CHECKS)
    if show:
        print(columns.format("what", "found", "ok?"))
    try:
        device = find_device(config)
    except UserError:  # the row "device" reports it
        device = torch.device("cpu")
    gpu = None
    if fit and device.type == "cuda":
        try:
            gpu = measure_gpu(config.system.fp8_mlp)
            config, line, _ = fit(gpu, device)
            size = line.removeprefix("size: ")
        except UserError as error:
            size = str(error), False
        checks["size"] = lambda run: size
    with suppress(UserError):  # the row "kernels" reports it
        config = choose_kernels(config, device)[0]
    try:
        config, _ = fit_memory(config, param_table, device, world, rows_open)
    except UserError as error:
        why = str(error)

        def fails(run):
            raise UserError(why)
        checks["memory"], config = fails, with_knobs(config, micro_batches=world)  # the other checks need a number
    run = Run(config, world, param_table(config.model), models, gpu)
    checks |= {"checkpoint": checkpoint} if config.system.resume or config.system.init_from else {}
    checks |= {"tokenizer": tokenizer} if start.needs_tokenizer(config) else {}
    checks |= {"time": expected_time} if show else {}
    for name, check in checks.items():
        try:
            found = check(run)
            found, fine = found if isinstance(found, tuple) else (found, True)
            ok = "yes" if fine else "maybe"
        except (UserError, OSError) as error:
            found, ok = str(error), "no"
        status |= ok == "no"
        if show:
            first, *rest = textwrap.wrap(found, 90, break_on_hyphens=False)
            print(columns.format(name, first, ok), *(columns.format("", part, "").rstrip() for part in rest), sep="\n")
        elif ok == "no":
            raise UserError(found)
    return status
