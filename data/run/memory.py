"""Memory of a GPU: what a run needs, and how many micro-batches and rows of n-grams fit.

`sizes` is the result of `state_bytes`. `table` is the `param_table` of the model, in train_gpt.py.
"""

import math
import os
import sys
from contextlib import suppress

import torch

import triton_kernels as kernels
from data.loader import fit_validation, kept_tokens
from data.run.config import render, with_knobs
from data.run.length import expected_tokens
from data.run.program import LESS_MEMORY, UserError

# A validation holds so many streams (tokens, model_dim) at once, in the dtype of the activations, scaled weights
# included; an MLP takes 5 or 6 of them. tests/test_check.py counts the streams.
VALIDATION_STREAMS = 17.4
WHOLE = 0.9  # part of a GPU's memory up to which rows of n-grams fill it; a desktop and other programs take some


def most_few_rows(config) -> int:
    """The most rows of the n-gram table with gradients before an update: those of two steps. One rank may have all."""
    return 2 * len(config.model.ngrams) * max(stage.batch_tokens for stage in config.schedule.stages)


def state_bytes(config, table, world=1) -> tuple[int, int, int, int]:
    """Bytes of all weights, of the optimizer's state on all ranks without NorMuon's small second moments, and on each
    rank of the FP8 codes of banks and of the gradients of few rows. A table whose rows are updated one by one is state
    here: each rank has a part of it, and no gradient for all rows."""
    weights = state = codes = few = 0
    for param in table:
        size = math.prod(param.shape)
        if param.optim == "rows":  # 12: v, last and place of every row
            rows, width = param.shape
            state += size * param.dtype.itemsize + 12 * rows
            few += min(most_few_rows(config), -(-rows // world)) * width * param.dtype.itemsize
            continue
        weights += size * param.dtype.itemsize
        # Adam keeps m and v in fp32, and only v for a lazy table. NorMuon keeps m in fp32, a mantissa of 16 bits, and
        # with --slow_momentum a slow average in fp32.
        muon = 10 if config.optim.slow_momentum else 6
        state += size * (muon if param.optim == "normuon" else 4 if param.lazy and config.optim.lazy_tables else 8)
        state += 4 * size * bool(param.average and config.optim.average_blend)
        knob, per_weight = param.codes
        codes += int(size * per_weight) if knob and getattr(config.system, knob) else 0
    return weights, state, codes, few


def estimate_memory(config, sizes, world) -> tuple[float, float]:
    """Estimate of the peak memory of each GPU in MiB: (allocated, reserved by PyTorch), with the default kernels. Runs
    on an H200 allocated 2.3 % less to .8 % more, and reserved 7 % less to 7 % more, with sequences of 4096 tokens 16 %
    (records/2026-11-29_pairs, records/2026-11-30_proof). The numbers of activations that autograd keeps per layer, with
    attention and without, are fits."""
    (weights, state, codes, few), system, V = sizes, config.system, config.model.padded_vocab
    N = max(stage.batch_tokens for stage in config.schedule.stages) // system.micro_batches
    activation = config.model.model_dim * getattr(torch, system.dtype).itemsize  # bytes per token
    # The head keeps the gradient of the logits, and beside it a transposed FP8 copy or some bf16 logits.
    head = (1 if system.fp8 else 2) * N * V + max(system.fp8 * N * V, 2 * V * min(N, kernels.head_rows(V)))
    mlp = config.model.mlp_dim / config.model.model_dim
    kept = sum((10.75 - 0.5 * layer.narrow - 0.9 * system.fp8_qkv if layer.attention else 4.35) + mlp
               - 0.5 * system.fp8_mlp for layer in config.model.layers)
    training = kept * N * activation + head
    validation = VALIDATION_STREAMS * config.data.val_batch_tokens * activation
    fixed, sent = 620 * 2**20 + codes + few, 0  # 620 MiB: rotary tables, FP8 codes of the head, workspaces of streams
    if world > 1 and any(config.model.ngram_rows):
        rows = len(config.model.ngrams) * activation * max(N, config.data.val_batch_tokens)
        fixed += 3 * rows  # rows from all ranks, their gradients, rows of the next micro-batch
        sent = 4 * rows  # gradients to and from the ranks, and their sums in fp32
    allocated = 2 * weights + state / world + fixed + max(training, validation, sent)  # 2: weights and their gradients
    return allocated / 2**20, (allocated + system.cuda_graphs * (training + sent)) / 2**20  # graphs keep their memory


def needed_memory(config, world) -> tuple[float, float]:
    """Estimate of the peak memory of each GPU in MiB: (allocated, all that the process takes)."""
    allocated, reserved = estimate_memory(config, state_bytes(config, config.model.table, world), world)
    return allocated, reserved + 850  # kernels and NCCL take this outside PyTorch (measured on an H200)


def free_memory(device) -> float:
    """Free MiB of a GPU, where what PyTorch has reserved in this process counts as free; else MiB of the machine."""
    if device.type != "cuda":  # Windows lacks the function
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20 if hasattr(os, "sysconf") else math.inf
    return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) / 2**20


def memory_report(config, device, world) -> tuple[str, bool]:
    """(sentence about the needed and the free memory of the GPU, whether the free memory is enough)."""
    if device.type != "cuda":
        return f"not estimated for a {'CPU' if device.type == 'cpu' else 'Mac'}", True
    free, (allocated, needed) = free_memory(device), needed_memory(config, world)
    rows = f" --ngram_rows={render(config.model.ngram_rows)}" if any(config.model.ngram_rows) else ""
    found = (f"{free:.0f} MiB of the GPU are free, about {allocated:.0f} to {needed:.0f} needed (estimate) with"
             f" --micro_batches={config.system.micro_batches}{rows}")
    return (found, True) if needed <= free else (f"{found}: {LESS_MEMORY}", False)


def require_state(config, device, world):
    """Raises UserError when weights, gradients and optimizer state alone are more than `free_memory`."""
    weights, state, codes, few = state_bytes(config, config.model.table, world)
    needed = (2 * weights + state / world + codes + few) / 2**20
    if needed > (free := free_memory(device)):
        found = "{:.0f} MiB of the GPU are free" if device.type == "cuda" else "this machine has {:.0f} MiB"
        raise UserError(f"{found.format(free)}, but weights, gradients and optimizer state alone take {needed:.0f}: use"
                        " fewer --ngram_rows or --bigram_tables, or a smaller --model_dim")


def possible_micro_batches(config, world) -> list[int]:
    """The numbers of micro-batches, up to 128, that divide the batches of all stages into sequences of up to 49152
    tokens. The kernels are tuned and tested for these lengths. The loader drops the end of a shard that fills no
    sequence. So small shards get shorter ones: an eighth of the longest shard, or 2048 tokens if that is more."""
    batches = [stage.batch_tokens for stage in config.schedule.stages]
    counts = [n for n in range(world, 129, world) if math.gcd(*batches) % (16 * n) == 0 and max(batches) <= 49152 * n]
    if not counts:
        raise UserError(f"--micro_batches=0: no number up to 128 divides batches of {render(tuple(batches))} tokens"
                        f" into multiples of 16, at most 49152 each, for {world} processes; change the batches")
    least = counts[0]
    with suppress(UserError):  # `survey_training_data` says what is wrong with the shards
        row = max(2048, kept_tokens(config) / 8)
        while max(batches) / least > row:
            least *= 2
    return [n for n in counts if n >= least] or counts[-1:]


def fewest_micro_batches(config, world, fits):
    """The config with the fewest micro-batches that fit, or the most of `possible_micro_batches` if none fits. Several
    ranks take the fewest: all must choose the same number, but the free memory of their GPUs may differ."""
    counts = [with_knobs(config, micro_batches=count) for count in possible_micro_batches(config, world)]
    return next(filter(fits, counts), counts[-1]) if world == 1 else counts[0]


def with_more_rows(config, device, world, most_rows):
    """The config with a larger table of n-grams. Its rows double up to `most_rows` and the expected tokens while all
    fits the whole memory of a GPU, with as few micro-batches as that allows: more rows take memory, not time, and what
    else is on the GPU does not change what is learned. GPUs of several sizes need --ngram_rows."""
    whole = WHOLE * torch.cuda.mem_get_info(device)[1] / 2**20
    def fits(config):
        return needed_memory(config, world)[1] <= whole

    tried, given = config, config.system.micro_batches
    try:  # more micro-batches than needed, by hand, bring no more rows
        tried = fewest_micro_batches(config, world, fits)
        tried = with_knobs(tried, micro_batches=min(given or math.inf, tried.system.micro_batches))
    except UserError:  # only the given number divides the batches
        if not given:
            raise
    rows, most_rows = config.model.ngram_rows, min(most_rows, expected_tokens(config, world))
    while 0 < 2 * sum(rows) <= most_rows and fits(with_knobs(tried, ngram_rows=(more := tuple(2 * n for n in rows)))):
        rows = more
    return with_knobs(config, ngram_rows=rows)


def fit_memory(config, device, world, most_rows):
    """The config with the validation tokens that there are, with the rows of the n-gram table that suit the GPUs, and
    for --micro_batches=0 with the fewest micro-batches that fit the memory that is free then."""
    config = fit_validation(config)
    if device.type == "cuda" and most_rows:
        config = with_more_rows(config, device, world, most_rows)
    if config.system.micro_batches:
        return config
    return fewest_micro_batches(config, world, lambda config: memory_report(config, device, 1)[1])


def restart_with_more_micro_batches(argv, config, device):
    """Start this process again, with at least twice as many micro-batches, and as many as the memory requires now. The
    estimate of the memory was too low, or another program took memory. Only a new process has all memory back. It does
    not restart again, because it is given the number. Returns if there is no such number."""
    count = config.system.micro_batches
    more = [n for n in possible_micro_batches(config, 1) if n >= 2 * count]
    fitting = (n for n in more if memory_report(with_knobs(config, micro_batches=n), device, 1)[1])
    if more:
        chosen = f"--micro_batches={next(fitting, more[-1])}"
        print(f"out of GPU memory with --micro_batches={count}: starting again with {chosen}", file=sys.stderr)
        rows = [f"--ngram_rows={render(config.model.ngram_rows)}"] * any(config.model.ngram_rows)  # no more than now
        program = sys.orig_argv[1:len(sys.orig_argv) + 1 - len(sys.argv)]  # and Python's own options
        os.execv(sys.executable, [sys.executable, *program, *argv, chosen, *rows])
