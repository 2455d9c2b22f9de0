"""The table of `python train_gpt.py --check`: whether a run with these arguments would start on this machine.

The checks are those of every start (data/run/start.py), which stops at the first failure. The table adds what a start
does not wait for: the tokens of the shards, and the expected time.
"""

import dataclasses
import os
import textwrap
from contextlib import suppress
from functools import partial

import torch

from data.run import start
from data.run.config import with_knobs
from data.run.length import SECONDS_PER_TOKEN, SIZE_KNOBS, Size, seconds_per_token, stage_starts, total_tokens
from data.run.machine import capability, choose_kernels, find_device, measure_gpu
from data.run.memory import fit_memory
from data.run.program import UserError


def expected_time(config, world, models, gpu):
    """(a line about the expected training time, whether it could be estimated): by the fit of data/run/length.py, or
    by the seconds per token of two cores (records/guide.md).

    models: {name of a preset: its model}; gpu: what the GPU can do, if the size was chosen.
    """
    device, schedule = find_device(config), config.schedule
    if schedule.minutes:
        return f"{schedule.minutes:g} min, as --minutes says", True
    tokens, model = total_tokens(schedule), config.model
    size = {key: getattr(model, key) for key in (*SIZE_KNOBS, "layers")} if gpu else {}
    timed = [dataclasses.replace(x, **size, ngram_rows=model.ngram_rows if any(x.ngram_rows) else x.ngram_rows)
             for name, x in models.items() if (name == "cpu") == (device.type == "cpu")]
    if model not in timed or config.system.kernels != "auto":
        return "not known for this model or these kernels", True
    if device.type == "cpu":
        return (f"{SECONDS_PER_TOKEN['cpu'] * tokens / 60:.1f} minutes on two cores of an AMD EPYC; this CPU was not"
                " measured"), True
    try:
        gpu = gpu or measure_gpu(fp8=True)
    except UserError:
        return "not measured: too little memory of the GPU is free", False
    rows = tokens / stage_starts(schedule)[-1] / world
    minutes = tokens * seconds_per_token(Size(model.model_dim, model.depth), rows, gpu) / world / 60
    # What the runs of the fit have and this run lacks.
    if not schedule.sampled_frac:
        minutes *= 1.15  # records/2026-11-22_sampled_softmax
    if not config.system.fp8_mlp and capability(device)["hardware_fp8"] == "yes":
        minutes *= 1.13  # records/2026-11-23_fp8
    if not model.layers_with("narrow"):
        minutes *= 1.25  # wider heads and MLPs, record 74's optimizer: 149 of its steps took 55.0 s on one H200
    return f"about {minutes:.1f} minutes (estimate from H100s, scaled to what this GPU can do)", True


def with_shards(check, part, config, world):
    """A check of the data, and what the shards hold, which the first process of a machine reads."""
    found, fine = check(config, world)
    doubts = start.read_shards(config, part) if os.environ.get("LOCAL_RANK", "0") == "0" else []
    return "; ".join([found, *doubts]), fine and not doubts


def check_table(config, world, models, fit, rows_open, show) -> int:
    """Prints the table and returns the exit status. Without `show` it prints nothing and raises the first failure.

    models: see `expected_time`. fit: None, or function (Gpu, device) -> (config of the best size for the length of the
    run, a line about it, training time). rows_open: see `fit_memory`.
    """
    columns, status, more, gpu = "{:<15} | {:<90} | {}", 0, {}, None
    if show:
        print(columns.format("what", "found", "ok?"))
    try:
        device = find_device(config)
    except UserError:  # the row "device" reports it
        device = torch.device("cpu")
    if fit and device.type == "cuda":
        try:
            gpu = measure_gpu(fp8=config.system.fp8_mlp)
            config, line, _ = fit(gpu, device)
            size = line.removeprefix("size: "), True
        except UserError as error:
            size = str(error), False
        more["size"] = lambda *run: size
    with suppress(UserError):  # the row "kernels" reports it
        config = choose_kernels(config, device)[0]
    try:
        config = fit_memory(config, device, world, rows_open)
    except UserError as error:
        def fails(*run, error=error):
            raise error
        more["memory"], config = fails, with_knobs(config, micro_batches=world)  # the other checks need a number
    checks = start.checks_of(config, **more)
    for part, name in ("train", "training data"), ("val", "validation data"):
        checks[name] = partial(with_shards, checks[name], part)
    if show:
        checks["time"] = lambda config, world: expected_time(config, world, models, gpu)
    for name, check in checks.items():
        try:
            found, fine = check(config, world)
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
