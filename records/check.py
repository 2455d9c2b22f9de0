"""The table of `python train_gpt.py --check`: whether a run with these arguments would start on this machine.

Each function in CHECKS takes (config, number of ranks) and returns a description. It raises UserError if the run will
not start, CheckWarning if the run may fail later. Every run makes the same checks without this file, in
data/machine.py, and stops at the first failure.
"""

import getpass
import os
import platform
import textwrap
from contextlib import suppress

import torch

import train_gpt as T
from data import loader, machine
from data.checkpoint import load_checkpoint
from data.files import UserError
from data.rules import SECONDS_PER_TOKEN, total_tokens
from records import work


class CheckWarning(UserError):
    """A problem that a run reports without stopping."""


def memory_sizes(config):
    """`sizes` of data/machine.py."""
    return machine.state_bytes(config, T.param_table(config.model))


def check_versions(config, world):
    """Versions of Python and of the packages."""
    machine.require_torch()
    return (f"Python {platform.python_version()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'},"
            f" Triton {T.kernels.triton.__version__}")


def check_device(config, world):
    """The CPU or this process's GPU, and its capabilities."""
    device, name = machine.find_device(config), f"CPU, cores {os.cpu_count()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    found = (f"{key.split('_')[-1]} {value}" for key, value in machine.capability(device).items())
    return ", ".join([name, f"ranks {world}", *found])


def check_kernels(config, world):
    """The implementation that each operation will use."""
    names = machine.choose_kernels(config, machine.find_device(config))[2]
    return " ".join(f"{op}:{name}" for op, name in names.items())


def check_training_data(config, world):
    """Reads all headers and the beginning of the first shard."""
    found, lasts = loader.survey_training_data(config)
    if not lasts:
        raise CheckWarning(found)
    return found


def check_validation_data(config, world):
    """Reads all headers."""
    return loader.survey_validation_data(config)


def check_tokenizer(config, world):
    """GPT-2's tokenizer, from which a new run with --bigram_normal makes a table."""
    machine.text_codec(config.model.vocab_size)
    return "GPT-2's BPE"


def check_checkpoint(config, world):
    """The checkpoint of --resume; parse_config has read it."""
    state = load_checkpoint(config.system.resume)
    return f"{config.system.resume}: step {state['step']}, {state['seconds']:.1f} s inside the clock"


def check_caches(config, world):
    """The folders of the compilers' caches."""
    folders = machine.require_caches(config, machine.find_device(config))
    try:
        getpass.getuser()
    except (KeyError, OSError):
        if config.system.compile and "TORCHINDUCTOR_CACHE_DIR" not in os.environ and machine.torch_version() < (2, 13):
            raise CheckWarning("older versions of PyTorch need a user with a name: set USER, or"
                               " TORCHINDUCTOR_CACHE_DIR") from None
    return ", ".join(folders) or "nothing is compiled"


def check_disk(config, world):
    """Disk space for the files of rank 0."""
    return machine.require_disk(config, memory_sizes(config))


def check_memory(config, world):
    """The estimated memory, compared with the free memory of the GPU."""
    found, enough = machine.memory_report(config, memory_sizes(config), machine.find_device(config), world)
    if not enough:
        raise CheckWarning(found)
    return found


def expected_time(config, world):
    """From the seconds per token of an H200 (790 TFLOP/s in bf16; records) or of two cores (records/guide.md)."""
    device, schedule = machine.find_device(config), config.schedule
    if schedule.minutes:
        return f"{schedule.minutes:g} min, as --minutes says"
    timed = [preset.model for name, preset in T.PRESETS.items() if (name == "cpu") == (device.type == "cpu")]
    if config.model not in timed or config.system.kernels != "auto":
        return "not known for this model or these kernels"
    tokens = total_tokens(schedule)
    if device.type == "cpu":
        return f"{SECONDS_PER_TOKEN['cpu'] * tokens / 60:.1f} minutes on two cores of an AMD EPYC"
    rate = work.ceilings()["bf16"] / 1e12
    minutes = tokens / 60 * SECONDS_PER_TOKEN["cuda"] / world * 790 / rate
    if not schedule.sampled_frac:
        minutes *= 1.15  # records/2026-11-22_sampled_softmax
    if not config.system.fp8_mlp:
        minutes *= 1.13  # records/2026-11-23_fp8
    if not any(layer.narrow for layer in config.model.layers):
        minutes *= 1.16  # wider heads and MLPs, record 74's optimizer (records/2026-11-23_attention, _optimizer)
    if machine.capability(device)["hardware_tma"] == "no":
        minutes *= 1.21  # no Hopper matrix instructions, and a head in bf16 (records/2026-11-20_hardware)
    return f"about {minutes:.1f} minutes (estimate from an H200, scaled to the {rate:.0f} TFLOP/s measured on this GPU)"


CHECKS = {
    "versions": check_versions, "device": check_device, "kernels": check_kernels,
    "training data": check_training_data, "validation data": check_validation_data, "caches": check_caches,
    "disk": check_disk, "memory": check_memory}


def check_table(config, world, show) -> int:
    """Prints the table and returns the exit status. Without `show` it prints nothing and raises the first failure."""
    columns, status = "{:<15} | {:<90} | {}", 0
    if show:
        print(columns.format("what", "found", "ok?"))
    try:
        device = machine.find_device(config)
    except UserError:  # the row "device" reports it
        device = torch.device("cpu")
    with suppress(UserError):  # the row "kernels" reports it
        config = machine.choose_kernels(config, device)[0]
    config = machine.choose_micro_batches(config, memory_sizes(config), device, world)
    checks = CHECKS | ({"checkpoint": check_checkpoint} if config.system.resume else {})
    checks |= {"tokenizer": check_tokenizer} if machine.needs_tokenizer(config) else {}
    checks |= {"time": expected_time} if show else {}
    for name, check in checks.items():
        try:
            found, ok = check(config, world), "yes"
        except (UserError, OSError) as error:
            found, ok = str(error), "maybe" if isinstance(error, CheckWarning) else "no"
        status |= ok == "no"
        if show:
            first, *rest = textwrap.wrap(found, 90, break_on_hyphens=False)
            print(columns.format(name, first, ok), *(columns.format("", part, "").rstrip() for part in rest), sep="\n")
        elif ok == "no":
            raise UserError(found)
    return status
