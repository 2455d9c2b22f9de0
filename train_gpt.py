"""Train a GPT of the size of GPT-2 small, plus large embedding tables, to 3.28 validation loss on FineWeb, fast.

This file is the trainer. `triton_kernels.py` holds the operations that have a GPU kernel, `data/` reads tokens, and
`data/run/` is what surrounds a run: arguments, checks, memory, start, clock, log, checkpoints. The code began as a
rewrite of NanoGPT-speedrun record 74 (modded-nanogpt PR 233, Chris McCormick, and all earlier records), which
--preset=record74 keeps; the other presets add later ideas. README.md has results, records/techniques.md the gain of
each idea.

    ./run.sh                                                 set up everything, then do the best run for this machine
    torchrun --standalone --nproc_per_node=8 train_gpt.py    the record run on 8 GPUs (4, 2 or 1 accumulate gradients)
    python train_gpt.py --preset=single                      the best run on one GPU: 5 minutes on an H100
    python train_gpt.py --preset=single --minutes=1          the best run of a length that you choose
    python train_gpt.py --preset=cpu                         a small model of bytes: minutes on a laptop
    python train_gpt.py --check                              check whether a run with these knobs would start here
    python train_gpt.py --sample=CHECKPOINT --prompt="..."   generate text from a checkpoint
    python train_gpt.py --help                               list every knob; set a knob with --key=value

Contents, top to bottom:
    config     Layer, Model, Stage, Schedule, Optim (data/run/config.py has Data, System); presets; --key=value
    model      parameter table, YaRN rotary, table lookup, the flat forward pass
    tables     Table: lookup, gradients and exchange of embeddings
    optimizer  Sharded, Replicated: state and updates; NorMuonAndAdam: the phases of a step
    schedule   make_plan(step): stage, rates, momentum, which parameters are updated
    a run      main, train: from the arguments to the results
    training   Trainer; the file ends with its loop, step and micro-step

Shape letters: N tokens of one forward pass, D model width, H heads, d head width, V padded vocabulary, G ranks. Words:
a bank is one parameter that holds the matrices of all layers; a table is one parameter whose rows are embeddings; a
lane is a residual stream (in record74 the last layers have two); MTP is multi-token prediction; a micro-step is the
forward and backward pass of one micro-batch; codes are FP8 numbers with a common scale.
The comments K1 to K12, in all files, mark quirks of record 74 that change what a model learns: records/record74.md.
"""

import time

started = time.perf_counter()  # the imports take seconds

import functools
import gc
import hashlib
import math
import os
import re
import sys
from bisect import bisect_right
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import accumulate, islice, takewhile
from pathlib import Path
from typing import Annotated, Callable, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
from data import SIGN_ROWS, require_packages
from data.run.config import (
    Bounds, Count, Data, Period, System, check_row, help_page, left_open, make_config, read_values, with_knobs)
from data.run.launch import Stop, Stopped, choose_waiting, die_at_ctrl_c, die_with_torchrun, watch_signals
from data.run.length import momentum_steps, scaled, stage_starts, validations
from data.run.program import (
    NotFinite, UserError, claim_report, error_message, is_out_of_memory, keep_bytecode, one_line, open_outputs,
    require_finite, run_program, serve, told)

if __name__ == "__main__":
    open_outputs()
    die_with_torchrun()
    die_at_ctrl_c()


# ---- Config: edit a default, or set a knob with --name=value (--stage1.batch_tokens=..., --layer6.attention=...) -----

# The numbers that a knob takes. A knob of several numbers has a type for each.
Channels, Vocabulary = Annotated[int, Bounds(16, 10**4)], Annotated[int, Bounds(2, 2**16)]
Part, Rate, Factor, Decay, Real = (Annotated[float, Bounds(0, high)] for high in (1, 10, 100, 10**4, 10**9))
Rows = Annotated[float, Bounds(0, 2**31 - 1)]
Memory = Annotated[float, Bounds(0, 1, below=True)]  # what an average keeps in a step
Place = Annotated[int | None, Bounds(0, 999)]  # of a layer


@dataclass(frozen=True)
class Layer:
    """The parts of one layer. The parameters, gates and windows of the model follow from its layers."""

    attention: bool = True  # false: the layer has no attention
    paired: bool = False  # two heads of a token become consecutive positions (K4; PR 191, classiclarryd)
    narrow: bool = False  # queries and keys have only the half of each head that the rotary embedding turns (PR 349)
    long: bool = False  # long window; half of the channels of a key lag by one token (PR 169, classiclarryd)
    value_embed: bool = False  # add a value embedding to the values (PR 209 and PR 218, photon_mz)
    two_lanes: bool = False  # from here on attention reads lane 0, the MLP lane 1, both add to both (PR 230, sisovicm)
    skip_from: Place = None  # first add a gated part of lane 0 before this earlier layer's MLP (PR 186)
    input_from: Place = None  # attention reads lane 0 as it left this earlier layer, not as it is now (PR 241)
    xsa: bool = False  # subtract a learned share of a head's output along the head's own value (PR 264, djdumpling)
    dynamic: bool = False  # a network adds to the factors from here to the next dynamic layer (PR 259, Lisennlp)
    mix: bool = False  # add earlier streams to lane 0 and the value embedding, and after the last layer (PR 259)

    # Whether the layer adds the token embedding and the bigram embedding.
    embeds = property(lambda self: self.attention or self.skip_from is None)


RECORD74_LAYERS = (
    Layer(paired=True),
    Layer(value_embed=True),
    Layer(value_embed=True, paired=True),
    Layer(long=True),
    Layer(),
    Layer(paired=True),
    Layer(attention=False, skip_from=3),
    Layer(two_lanes=True),
    Layer(two_lanes=True, value_embed=True),
    Layer(two_lanes=True, value_embed=True, paired=True),
    Layer(two_lanes=True, value_embed=True, long=True))


def wire(depth, narrow=True, paired=True, mix=True, sparse=False) -> tuple[Layer, ...]:
    """The layers of a model of `depth` layers, 3 or more. The rules were read off 11 layers, for which
    records/2026-11-22_model, 2026-11-23_attention (narrow) and 2026-11-29_record (sparse) have the gain of each."""
    last = depth - 1
    middle = min((depth + 1) // 2, depth - 2)  # has no attention; the stream of `source` bridges the gap
    source = middle // 2  # looks far, so the skip carries what it saw
    settled = min(middle + 1, depth - 2)  # later layers read the stream as it left this layer
    quiet = {source + 1, settled, last - 1} if sparse else ()  # these have no attention: it costs more than it gains
    layers = []
    for i in range(depth):
        if i == middle:
            layers.append(Layer(attention=False, skip_from=source))
            continue
        is_long = i in (source, last)  # one look back halfway to the middle, one before the prediction
        count = i - (i > middle)  # of earlier layers, but for the middle one
        is_paired = paired and not is_long and (count == 0 or count % 3 == 2)  # pairs see 2 positions of each token
        layers.append(Layer(attention=False, dynamic=i == source + 1) if i in quiet else Layer(
            paired=is_paired, narrow=narrow and not is_long,  # a long layer keeps the channels that do not turn
            long=is_long, xsa=not is_paired,
            # Tables of values pay next to the embedding and next to the head.
            value_embed=0 < i < min(3, middle) or i > max(settled, last - 3),
            input_from=settled if i > settled else None,
            # One network for the first third, one for what follows the long layer, one for the end.
            dynamic=i in (0, last) or i == source + 1, mix=mix and i == last))
    return tuple(layers)


@dataclass(frozen=True)
class Model:
    """Sizes and layers; `param_table` derives the parameters from them."""

    vocab_size: Vocabulary = 50257  # number of token ids; the last id is BOS, which begins a document (GPT-2: 50256)
    model_dim: Channels = 768  # D, width of the residual stream: heads * head width
    num_heads: Count = 6  # H; paired layers fold two heads into one, so a model with an odd number has none of them
    mlp_ratio: Factor = 4.0  # width of an MLP / D; the width is rounded to a multiple of 16
    bigram_tables: Factor = 5.0  # the bigram table has this many times padded_vocab rows (PR 201)
    ngram_rows: tuple[Rows, ...] = (0.0,)  # rows for bigrams, trigrams, ... in place of this table (PR 360, devenpzak)
    bigram_normal: bool = False  # n-grams whose tokens differ in case, accents or spaces alone are one (PR 375)
    bigram_signs: bool = False  # multiply the row of each n-gram by one of 8192 random rows of signs (PR 299, TrianX)
    head_pairs: bool = False  # a matrix of Q or K, as Muon sees it, has two heads, not all heads (PR 253, samacqua)
    pointer: bool = False  # the head can also point at an earlier token of the document and copy it (PR 379)
    backout_layer: Place = 7  # at the end, subtract lane 0 as it left this layer (PR 140, classiclarryd)
    layers: tuple[Layer, ...] = RECORD74_LAYERS  # counted from 0
    width_lr_power: Part = 0.0  # Adam multiplies its rates by (768 / D) to this power, for lm_head and embed twice

    depth = property(lambda self: len(self.layers))
    head_dim = property(lambda self: self.model_dim // self.num_heads)
    mlp_dim = property(lambda self: 16 * round(self.mlp_ratio * self.model_dim / 16))
    padded_vocab = property(lambda self: -(-(self.vocab_size + self.pointer) // 128) * 128)  # K3
    bos_id = property(lambda self: self.vocab_size - 1)
    # The class whose probability is the weight of the pointer, or None; no token has it.
    gate_id = property(lambda self: self.vocab_size if self.pointer else None)
    ngram_table = property(lambda self: "ngram_embed" if any(self.ngram_rows) else "bigram_embed")  # its label
    table = property(lambda self: param_table(self))  # the parameters that follow from these sizes and layers
    # Whether the layers are those of `wire`.
    is_wired = property(lambda self: self.layers in (self.rewired(self.depth, paired) for paired in (False, True)))

    def rewired(self, depth, paired) -> tuple[Layer, ...]:
        """So many layers by the rules of `wire`, narrow or mixed if some layer is, sparse if several lack attention."""
        sparse = len(self.layers_with("attention")) < self.depth - 1
        return wire(depth, bool(self.layers_with("narrow")), paired, bool(self.layers_with("mix")), sparse)

    @property
    def ngrams(self) -> list[tuple[int, int]]:
        """[(order, number of rows)] of the table of n-grams: 2 for bigrams, 3 for trigrams."""
        found = [(order, int(rows)) for order, rows in enumerate(self.ngram_rows, 2) if rows]
        return found or [(2, int(self.bigram_tables * self.padded_vocab))]

    @property
    def qk_banks(self) -> list[tuple[list[int], str, tuple[int, ...]]]:
        """[(layers, bank, shape of its part of a layer)] for the layers with whole and for those with narrow heads. The
        shape is (2 for Q and K, matrices, rows, D). With head_pairs a matrix has two heads, or one if the number of
        heads is odd; else it has all heads."""
        banks, heads = [], 2 - self.num_heads % 2 if self.head_pairs else self.num_heads
        for label, narrow in ("qk_bank", False), ("narrow_qk_bank", True):
            layers = [i for i in self.layers_with("attention") if self.layers[i].narrow == narrow]
            rows = heads * self.head_dim // (1 + narrow)
            banks += [(layers, label, (2, self.num_heads // heads, rows, self.model_dim))] if layers else []
        return banks

    @property
    def mix_sizes(self) -> dict[int, int]:
        """{place: how many factors its mixtures have}; the places are the layer with `mix`, and the end. In the layer:
        of the embedding, the backout stream and lane 0, for the value embedding and for lane 0. At the end: of these
        three, the first value embedding and the sources of skips."""
        sources = {layer.skip_from for layer in self.layers} - {None}
        return {place: size for i in self.layers_with("mix")
                for place, size in ((i, 6), (len(self.layers), 4 + len(sources)))}

    @property
    def dynamic_sizes(self) -> dict[int, dict[tuple[int, str], int]]:
        """{dynamic layer: {(place, name): number of factors to which its network adds}}."""
        sizes = [(i, name, size) for i, layer in enumerate(self.layers) for name, size in (
            ("x0", layer.embeds), ("bigram", layer.embeds), ("xsa", layer.xsa * self.num_heads)) if size]
        sizes += [(i, "mix", size) for i, size in self.mix_sizes.items()]
        starts = [*self.layers_with("dynamic"), math.inf]
        return {start: {(i, name): int(size) for i, name, size in sizes if start <= i < end}
                for start, end in zip(starts, starts[1:])}

    def layers_with(self, field) -> list[int]:
        """Numbers of the layers in which a field of Layer is set."""
        values = (getattr(layer, field) for layer in self.layers)
        return [i for i, value in enumerate(values) if value is not False and value is not None]


@dataclass(frozen=True)
class Stage:
    """The settings that change between the stages of a run."""

    batch_tokens: Count  # tokens per step, over all ranks and micro-steps
    max_doc_len: Count  # tokens; a longer document loses its tail
    short_window: Count  # tokens that most layers look back
    long_window: Count  # tokens that the long-window layers look back
    lr_mul: Factor  # of all learning rates; larger batches take larger rates; no effect in the last stage (lr_floor)
    mtp_start: tuple[Factor, ...]  # MTP: loss weights of token +1, +2, ... at the start of the stage
    mtp_end: tuple[Factor, ...]  # the loss weights at the end of the stage; linear in between
    share: Real = 1.0  # length relative to the other stages; 0 for the last stage, the extension


@dataclass(frozen=True)
class Schedule:
    """Length and stages of the run, and the values that depend on the step; `make_plan` evaluates them."""

    # --train_tokens and --minutes change the length of a preset, and with it batches, rates and steps (`recipe`).
    train_tokens: Annotated[int | float, Bounds(0, 10**15)] = 0  # tokens of the whole run (0: as the other knobs say)
    minutes: Real = 0.0  # of training time; the steps are timed before the run (0: as the other knobs say)
    scheduled_steps: Count = 1450  # the shares of the stages divide these steps
    extension_steps: Annotated[int, Bounds(0, 999999)] = 40  # steps of the last stage: lowest rate, widest windows
    stages: tuple[Stage, ...] = (  # counted from 1
        Stage(131072, 896, 128, 384, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
        Stage(262144, 2048, 384, 896, 1.52, (1.0, 0.5), (1.0, 0.0)),
        Stage(393216, 2048, 640, 1408, 1.73, (1.0,), (1.0,)),
        Stage(393216, 2048, 768, 1664, 1.73, (1.0,), (1.0,), share=0.0))
    final_window: Count = 2560  # long window of the last validation, without a rotary update (K10)
    split_stage: Count = 3  # untie head and embed after the first odd step of this stage (PR 175, PR 178, varunneal)
    cooldown_frac: Part = 0.60  # part of the scheduled steps in which the learning rate falls linearly to lr_floor
    lr_floor: Factor = 0.15  # factor of all learning rates after the cool-down, in place of lr_mul and not times it
    muon_momentum: tuple[Memory, Memory] = (0.85, 0.95)  # Muon's momentum at the first step, and after its warm-up
    muon_warmup: Period = 300  # first steps, in which Muon's momentum rises linearly; below 1: part of the run
    muon_cooldown: Period = 50  # last steps, in which Muon's momentum falls linearly; below 1: part of the run
    # Sampled softmax (PR 360, devenpzak); a micro-batch with more targets than sampled classes takes all classes.
    sampled_frac: Part = 0.0  # first part of the run, in which the loss samples the classes; never after the split
    candidates: Annotated[float, Bounds(0.001, 10**6)] = 64.0  # sampled classes / root of a forward pass's tokens


@dataclass(frozen=True)
class Optim:
    """Rates common to all parameters; `param_table` has the factors of each parameter."""

    adam_lr: Rate = 0.008  # of head, embedding, gates, lambdas, times lr_mul of the parameter; tables have table_lr
    table_lr: Rate = 0.008  # of the tables of values and n-grams, times lr_mul
    adam_eps: Annotated[float, Bounds(1e-30, 1)] = 1e-10  # added to the root of the uncorrected second moment
    adam_wd: Decay = 0.005  # weight decay, multiplied by wd_mul and the squared learning rate of the parameter
    # Tables are always updated in every second step. With 1, take .84 of the adam_lr for 2 (2026-11-27_learning).
    adam_every: Literal[1, 2] = 2  # Adam updates head, embedding, gates, lambdas in every step or in every second one
    lazy_tables: bool = False  # value_embeds, bigram_embed lack a first moment and skip untouched rows, as ngram_embed
    table_beta2: Memory = 0.95  # decay of Adam's second moment of head, embedding and tables; small batches want more
    muon_lr: Rate = 0.023  # multiplied by matrix_lr of the bank
    muon_beta2: Memory = 0.95  # decay of the per-row second moment (NorMuon)
    muon_wd: Decay = 1.2  # weight decay, multiplied by muon_lr ** 2 and by matrix_lr of the bank
    slow_momentum: Memory = 0.0  # share of a slower gradient average in Muon's momentum, after SLOW_START (PR 339)
    polar_steps: Literal[4, 5] = 5  # steps of the iteration that orthogonalises Muon's updates
    # Exponential averages of the weights over the last part of a run (PR 347, deepmatmul; PR 364, dnhkng; PR 380), with
    # the time constants of column `average` of param_table. The run ends with a mixture of last weights and averages.
    average_blend: Part = 0.0  # share of the averages in the final weights (0: none, 1: all)


@dataclass(frozen=True)
class Config:
    """All knobs of a run: PRESETS holds values for common runs, and `parse_config` changes single knobs. The files of
    tokens (Data) and the machine and output of a run (System) are in data/run/config.py."""

    model: Model = Model()
    schedule: Schedule = Schedule()
    optim: Optim = Optim()
    data: Data = Data()
    system: System = System()


class Preset(NamedTuple):
    """A config that --preset=name selects, and how --minutes and --train_tokens change it."""

    config: Config
    gpus: int = 1  # number of GPUs for which its batches were chosen
    # (tokens, GPUs) -> config; its size then suits the length, too. None: the size stays, and `scaled` makes the rest.
    recipe: Callable | None = None
    most_rows: float = 0.0  # the rows of its n-gram table double up to so many, where they fit (`fit_memory`)


RECORD74 = Config()
LAYERS = wire(11)
# What `record` and `recipe` share, beside the settings of record 74.
BASE = with_knobs(
    RECORD74, mlp_ratio=3.33, bigram_normal=True, bigram_signs=True, head_pairs=True, pointer=True, layers=LAYERS,
    backout_layer=LAYERS[-1].input_from, split_stage=4, sampled_frac=0.93, adam_every=1, slow_momentum=0.56,
    polar_steps=4, average_blend=0.5, fp8_mlp=True, fp8_qkv=True)


def recipe(tokens=340e6, gpus=1) -> Config:
    """The best run of so many tokens that we know, on so many GPUs of 12 GB or more: --preset=single. The length is its
    only dial. Dates name the records that measured a choice; records/techniques.md has them all."""
    # 1. Size: 768 channels in 11 layers, which should reach 3.28 on FineWeb with 340M tokens. A given length, this one
    #    too, gets the size of `best_size`: in little time a small model learns more (11-25_size, 11-29_recipe).
    # 2. Layers: all ideas of `wire`; mixtures pay with 384 x 4 at 60M tokens and 512 x 6 at 155M (11-29_recipe).
    # 3. Tables: a million rows for bigrams and trigrams, or up to 16 million where the GPU has the memory, since they
    #    take no time (11-26_ngrams). A step has gradients of few rows: no first moment (11-23_optimizer).
    # 4. Adam updates the head in every step. Its rates fall a little as runs get longer. Narrow models take higher
    #    rates, but not in long runs (11-25_size, 11-25_length, 11-27_learning, 11-29_recipe).
    longer = max(1.0, tokens / 27e6)
    rate, narrow = longer**-0.08, max(0.0, 0.5 - 0.29 * math.log(longer))
    # 5. Muon's weight decay: the matrices of a longer run have more steps in which to shrink (11-27_learning).
    # 6. Cool-down over .7 of the run. Windows and documents grow; only the first stage predicts a second token, too
    #    (11-22_short_runs). Validations in pieces of 65536 tokens fit small GPUs; all but the last are short.
    config = with_knobs(
        BASE, ngram_rows=(5e5, 5e5), lazy_tables=True, width_lr_power=round(narrow, 3),
        adam_lr=round(0.00875 * rate, 5), table_lr=round(0.0104 * rate, 5), table_beta2=0.98, muon_beta2=0.9,
        muon_wd=round(2.4 * longer**-0.27, 3), muon_momentum=(0.85, 0.91), muon_warmup=0.2, muon_cooldown=0.03,
        cooldown_frac=0.7, scheduled_steps=800, extension_steps=24, micro_batches=0, val_batch_tokens=65536,
        val_every=0.1, val_share=0.005, stages=(
            Stage(32768, 896, 128, 384, 0.75, (1.0, 0.5), (1.0, 0.0)),
            Stage(32768, 2048, 384, 896, 0.75, (1.0,), (1.0,)),
            Stage(32768, 2048, 640, 1408, 0.75, (1.0,), (1.0,)),
            Stage(32768, 2048, 768, 1664, 0.75, (1.0,), (1.0,), share=0.0)))
    # 7. These batches, rates and steps are those of 27.0M tokens. The batch grows with the root of the tokens, all
    #    rates and their floor with batch ** .35; second moments forget as fast in tokens (11-22_lengths, 11-25_length).
    return with_knobs(scaled(config, tokens, gpus), train_tokens=int(tokens))


PRESETS = {
    "record74": Preset(RECORD74, gpus=8),  # never changes, so that later runs can be compared with it
    # This is our best run for 8 GPUs. Its 1310 steps should reach 3.28, but no run has shown this (records/guide.md).
    # Mixtures do not pay in this preset (records/2026-11-28_proven). Like record 92, the preset has up to 85 million
    # n-gram embeddings and documents of 3072 tokens (records/2026-11-29_pairs).
    "record": Preset(gpus=8, most_rows=85e6, config=with_knobs(
        BASE, layers=wire(11, mix=False, sparse=True), ngram_rows=(2.65e6, 2.65e6), scheduled_steps=1270,
        cooldown_frac=0.8, lr_floor=0.3, muon_momentum=(0.85, 0.93), muon_warmup=0.2308, muon_cooldown=0.0385,
        adam_lr=0.0077, table_lr=0.0092, stages=(RECORD74.schedule.stages[0], *(
            replace(stage, max_doc_len=3072) for stage in RECORD74.schedule.stages[1:])))),
    "single": Preset(recipe(), recipe=recipe, most_rows=16e6),
    # `recipe` in small: width and windows 1/8, tokens per step 1/32. Its tokens are bytes. Without MTP, with other
    # rates than there, with whole heads of 16 channels, with 4 layers, and with windows that do not grow at the end, it
    # learns more (records/2026-11-22_cpu, 2026-11-23_attention, 2026-11-26_cpu), and with rows for 6 and 8 bytes.
    "cpu": Preset(with_knobs(
        RECORD74, vocab_size=257, model_dim=96, ngram_rows=(6e4, 2e5, 2e5, 0.0, 5e5, 0.0, 5e5), bigram_signs=True,
        head_pairs=True, pointer=True, layers=wire(4, narrow=False), backout_layer=2, scheduled_steps=1704,
        extension_steps=56, final_window=176, split_stage=4, cooldown_frac=0.7, muon_momentum=(0.85, 0.88),
        muon_warmup=0.2, muon_cooldown=0.03, muon_beta2=0.9, adam_lr=0.0101, table_lr=0.012, adam_every=1,
        table_beta2=0.98, average_blend=0.5, device="cpu", micro_batches=1, dtype="float32", fp8=False, val_every=0.1,
        train_files="data/stdlib/stdlib_train_*.bin", val_files="data/stdlib/stdlib_val_*.bin", val_tokens=65536,
        val_batch_tokens=8192, val_share=0.01, sample_tokens=200, sample_prompt="def ",
        stages=(
            Stage(1024, 448, 16, 48, 0.75, (1.0,), (1.0,)),
            Stage(1024, 512, 48, 112, 0.75, (1.0,), (1.0,)),
            Stage(1024, 512, 80, 176, 0.75, (1.0,), (1.0,)),
            Stage(1024, 512, 80, 176, 0.75, (1.0,), (1.0,), share=0.0)))),
}


def parse_config(argv, world=1, gpu=1.0) -> Config:
    """Arguments --preset=name and --key=value -> Config for `world` ranks. Raises UserError on an unknown argument.
    gpu: how many H100s a GPU is worth, for --minutes."""
    return make_config(read_values(argv, PRESETS), world, PRESETS, gpu)


def first_answer(argv) -> int | None:
    """The exit status of --help. None: the run needs PyTorch, whose import takes seconds. Raises UserError for
    arguments that no run accepts; those that need a checkpoint, or come to `serve`, are read later."""
    rest = [argument for argument in argv if argument not in ("--help", "-h")]
    if not re.search(r"^(-$|--(sample|resume|init_from)\b)", "\n".join(rest), re.M):
        parse_config(rest)
    if rest == argv:
        return None
    print(help_page(__doc__, PRESETS, argv, Path(__file__).read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    if "WORLD_SIZE" not in os.environ:  # of several processes, `main` lets one speak
        run_program(first_answer)
    keep_bytecode()
    choose_waiting(sys.argv[1:])
require_packages("numpy", "torch")  # the rest of this file needs them

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import triton_kernels as kernels
from data.facts import facts_of_run
from data.loader import Batch, Loader, ValidationData
from data.run.log import (
    Clock, Log, Stopwatch, loaded_sources, published, quoted, shards_line, trace_mark, trace_range, write_header)
from data.run.machine import (
    all_come, all_reduce, beside, capability, checkpoint_config, choose_kernels, init_runtime, measure_gpu, new_stream,
    of_rank_0, on, rank_from_env, require_equal_ranks, wait_for)
from data.run.memory import most_few_rows, restart_with_more_micro_batches
from data.run.sample import sample, sample_command
from data.run.start import check_start, fit_size
from data.run.state import check_weights, compare_shards, load, load_checkpoint, load_weights, save
from data.run.trial import replace_faulty_kernels
from data.run.warmup import MicroStepGraphs, UpdateGraphs, require_codes, warm_up
from data.shards import run_shards
from data.tokenizer import normalised_ids, text_codec


# ---- Model -----------------------------------------------------------------------------------------------------------

GATE_CHANNELS = 12  # the gates read only the first channels of their input (PR 117, classiclarryd)
DYNAMIC_WIDTH = 64  # hidden width of the networks of `dynamic` layers
NARROW_SCALE = 0.13  # attention scale of narrow layers in the first stage
POINTER_WIDTH = 128  # width of the queries and keys of the pointer head


class Param(NamedTuple):
    """One parameter: its shape, initial values, update rule, and communication between ranks."""

    label: str  # name in the model, the optimizer, checkpoints
    shape: tuple[int, ...]  # of a bank (..., R, C): matrices (R, C), each of which Muon orthogonalises
    # normuon; adam; rows: Adam without first moment, with one second moment for each row, of the rows that occurred; or
    # replicated: Adam of the whole parameter on every rank, in one reduction and one update for all of these. Of the
    # others, every rank updates its part of the matrices or rows. `steps_per_update` says how often.
    optim: str
    init: float | Callable | None = 0.0  # value, or function (tensor, generator) that fills it; None: `init_weights`
    betas: tuple[float, float | None] | None = None  # of Adam; None stands for table_beta2 of Optim
    lr_mul: float = 1.0  # adam: factor of adam_lr, or of table_lr
    wd_mul: float = 1.0  # adam: factor of adam_wd
    lazy: bool = False  # adam: --lazy_tables applies; a step has gradients of few rows
    matrix_lr: tuple[float, ...] = (1.0,)  # normuon: factors of muon_lr, for one matrix of a bank after the other
    average: float = 0.0  # time constant of the average of the weights, as a part of the run; 0: none, as for lazy
    tied_to: str = ""  # until the split, the parameter is the transpose of this one and has no update of its own
    codes: tuple[str, float] = ("", 0.0)  # knob with which it has FP8 codes, and their bytes per weight
    dtype: torch.dtype = torch.bfloat16

    # Whether it is a table of which a step has gradients of few rows.
    sparse = property(lambda self: self.lazy or self.optim == "rows")


def uniform(p, generator, bound=None):
    """Fill p (..., D) with draws from -bound to bound; None: standard deviation 0.5 / D**0.5."""
    bound = 3**0.5 * 0.5 * p.size(-1) ** -0.5 if bound is None else bound
    p.copy_(torch.empty(p.shape, device=p.device).uniform_(-bound, bound, generator=generator))


def fill_mlps(p, generator):
    """W1 of every MLP. Record 74 drew 12 MLPs, one of them without a layer. So values are drawn for a multiple of 4
    MLPs, and the parameters that are drawn later begin as in record 74."""
    drawn = p.new_empty(-(-len(p) // 4) * 4, *p.shape[2:])
    uniform(drawn, generator)
    p[:, 0] = drawn[:len(p)]


def lambdas(label, shape, init, beta2, lr_mul) -> Param:
    """Learned factors in fp32, without weight decay."""
    return Param(label, shape, "replicated", init, (0.9, beta2), lr_mul, wd_mul=0.0, dtype=torch.float32)


def gates(label, *shape, lr_mul=1.0, wd_mul=1.0) -> Param:
    """Weights of gates: for each gate a row for the first channels of its input."""
    return Param(label, (*shape, GATE_CHANNELS), "replicated", 0.0, (0.9, 0.99), lr_mul, wd_mul)


@functools.cache  # `make_plan` asks for the table in every step
def param_table(model: Model) -> tuple[Param, ...]:
    """The parameters of a model, in the order in which their initial values are drawn.

    Q, K, V and O begin at random (PR 214, srashedll; `GPT.init_weights`); the MLP's W2 begins at zero (muP-like).
    A higher beta2 smooths the updates of lambdas and gates (PR 177). Narrow models take higher rates of Adam (muP,
    arXiv 2203.03466, has such a rule with other powers)."""
    D, H, V, layers, dynamic = model.model_dim, model.num_heads, model.padded_vocab, model.layers, model.dynamic_sizes
    with_attention, with_values, with_skip, with_xsa, with_lanes = map(
        model.layers_with, ("attention", "value_embed", "skip_from", "xsa", "two_lanes"))
    narrow_lr = (768 / D) ** model.width_lr_power
    ngram_shape = sum(rows for _, rows in model.ngrams), D

    table = [
        *(Param(label, (len(numbers), *shape), "normuon", None, average=0.12, codes=("fp8_qkv", 2.0))
          for numbers, label, shape in model.qk_banks),
        # Each layer: V (H d, D) and O (D, H d); O has no codes.
        Param("vo_bank", (len(with_attention), 2, D, D), "normuon", None, average=0.12, codes=("fp8_qkv", 1.0)),
        # Each MLP: W1 (up) and W2 (down), both (mlp_dim, D). K9 (PR 168, nanochat PR 492)
        Param("mlp_bank", (len(layers), 2, model.mlp_dim, D), "normuon", fill_mlps, matrix_lr=(2.0, 4.0),
              average=0.06, codes=("fp8_mlp", 2.0)),
        Param("value_embeds", (len(with_values) * V, D), "adam",
              lambda p, generator: p.normal_(generator=generator).mul_(0.01), (0.75, None), 75.0, 5.0, lazy=True),
        # (D, V), because the GEMM of its gradient gives this layout (PR 200). Below, all rates get narrow_lr, too.
        Param("lm_head", (D, V), "adam", lambda p, generator: p.normal_(std=0.005, generator=generator), (0.5, None),
              narrow_lr, 150.0, average=0.12),
        Param("embed", (V, D), "adam", 0.0, (0.5, None), narrow_lr, 150.0, average=0.12, tied_to="lm_head"),
        Param("bigram_embed", ngram_shape, "adam", 0.0, (0.75, None), 75.0, 5.0, lazy=True)
        if not any(model.ngram_rows) else Param("ngram_embed", ngram_shape, "rows", 0.0, (0.0, None), 75.0, 5.0),
        gates("attn_gate_bank", len(with_attention), H),
        gates("ve_gate_bank", len(with_values), H),
        gates("smear_gate", 1, lr_mul=0.01, wd_mul=0.0),
        gates("skip_gate", len(with_skip), lr_mul=0.05, wd_mul=0.0),
        lambdas("sa_lambdas", (len(layers), 2), lambda p, _: p.copy_(torch.tensor([0.5, 1.0])), 0.99, 5.0),
        Param("dynamic_in", (len(dynamic), DYNAMIC_WIDTH, D), "replicated",
              lambda p, generator: uniform(p, generator, D**-0.5), (0.9, 0.99), lr_mul=0.25),
        Param("dynamic_out", (sum(sum(sizes.values()) for sizes in dynamic.values()), DYNAMIC_WIDTH), "replicated",
              betas=(0.9, 0.99), lr_mul=0.25, dtype=torch.float32),
        lambdas("xsa_lambdas", (len(with_xsa), H), 0.0, 0.99, 1.0),
        lambdas("mix_lambdas", (sum(model.mix_sizes.values()),), 0.0, 0.99, 1.0),
        lambdas("smear_lambda", (1,), 0.0, 0.99, 5.0),
        lambdas("backout_lambda", (int(model.backout_layer is not None),), 0.5, 0.99, 5.0),
        lambdas("skip_lambda", (len(with_skip),), -1.5, 0.99, 5.0),
        # (attention, MLP) x (lane 0, lane 1); with one lane only that of the MLP. Attention enters lane 1 times 1.5.
        lambdas("post_lambdas", (len(layers), 2, 2), lambda p, _: p.fill_(1.0)[with_lanes[0]:, 0, 1].mul_(1.5), 0.95,
                1.0) if with_lanes else lambdas("post_lambdas", (len(layers), 1), 1.0, 0.95, 1.0),
        lambdas("x0_lambdas", (len(layers),), 0.0, 0.95, 1.0),
        lambdas("bigram_lambdas", (len(layers),), 0.05, 0.95, 1.0),
        lambdas("resid_lambdas", (len(layers), 2), 1.1**0.5, 0.95, 5.0),  # before attention, before the MLP
        # pointer_weights holds three matrices: for queries, for keys, and for what a token adds to the next key. The
        # third begins at zero.
        Param("pointer_weights", (3 * model.pointer, POINTER_WIDTH, D), "replicated",
              lambda p, generator: uniform(p[:2], generator), (0.9, 0.99)),
        lambdas("pointer_sink", (model.pointer * POINTER_WIDTH,),
                lambda p, generator: p.normal_(std=POINTER_WIDTH**-0.5, generator=generator), 0.99, 1.0),
        lambdas("pointer_gain", (int(model.pointer),), 1.0, 0.99, 1.0)]
    for param in table:
        check_row(param, [each.label for each in table])
    return tuple(param._replace(lr_mul=narrow_lr * param.lr_mul) for param in table
                 if math.prod(param.shape))  # a parameter that no layer uses is empty


def rotary_states(head_dim: int, windows, scale=0.1) -> list[tuple[np.ndarray, float]]:
    """(rotary frequencies of the head_dim / 4 rotating pairs, in rad/token, fp64; factor of q · k) for each of the
    windows (tokens). scale: the factor for the first window. YaRN (arXiv 2309.00071): a frequency of less than one turn
    in the old window falls in proportion as the window grows. A frequency of 32 turns or more stays. Between them the
    change is linear."""
    frequencies = (1 / 1024) ** np.linspace(0, 1, head_dim // 4)
    states = [(frequencies, scale)]
    for old, new in zip(windows, windows[1:]):
        keep = np.clip((old * frequencies / (2 * np.pi) - 1) / (32 - 1), 0, 1)
        frequencies, scale = frequencies * (old / new + keep * (1 - old / new)), scale * (1 + 0.2 * math.log(new / old))
        states.append((frequencies, scale))
    return states


def rotary_table(frequencies: np.ndarray, rows: int, device, dtype) -> Tensor:
    """(rows, head_dim / 4, 2): cos and sin of position * frequency, computed in fp32."""
    frequencies = torch.tensor(frequencies, dtype=torch.float32, device=device)
    angle = torch.arange(rows, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.stack((angle.cos(), angle.sin()), -1).to(dtype)


class AttentionSettings(NamedTuple):
    """The part of the forward pass that changes between stages."""

    rotary: dict[bool, tuple[Tensor, float]]  # whether a layer is narrow -> table (>= 2N, d / 4, 2), factor of q · k
    short_window: int
    long_window: int
    pointer_window: int  # tokens that the pointer head looks back


def attention_settings(config, device, dtype) -> list[AttentionSettings]:
    """The AttentionSettings of every stage, and then those of the final validation (K10)."""
    stages = config.schedule.stages
    tokens = max(config.data.val_batch_tokens, *(s.batch_tokens // config.system.micro_batches for s in stages))
    rows = 2 * 128 * -(-tokens // 128)  # evaluations pad a forward pass to a multiple of 128 tokens
    settings = [AttentionSettings({}, stage.short_window, stage.long_window, stage.max_doc_len) for stage in stages]
    for narrow in {False, *(layer.narrow for layer in config.model.layers)}:
        windows = [each.short_window if narrow else each.long_window for each in settings]
        states = rotary_states(config.model.head_dim, windows, NARROW_SCALE if narrow else 0.1)
        for each, (frequencies, scale) in zip(settings, states):
            each.rotary[narrow] = rotary_table(frequencies, rows, device, dtype), scale
    return [*settings, settings[-1]._replace(long_window=config.schedule.final_window)]


class Output(NamedTuple):
    """The result of a forward pass, for `HeadLoss`."""

    h: Tensor  # (N, D), the final stream after its norm
    point: kernels.Point | None  # where the pointer head looks
    codes: tuple[Tensor, Tensor] | None = None  # of h in both layouts, where the head trains in FP8
    embeddings: list[Tensor] | None = None  # of `GPT.lookup`, see `GPT.forward`


class LayerWeights(NamedTuple):
    """What `GPT.layers` reads of the parameters in one layer. All fields are in the dtype of the activations, but for
    the lambda of skip (fp32)."""

    W1: Tensor  # (mlp_dim, D)
    W2: Tensor  # (mlp_dim, D), with one lane times the factor mlp0
    qkv: Tensor | None = None  # (2 H w + H d, D), w the width of the heads of q and k, times a lambda
    qkv_codes: kernels.ProjectionCodes | None = None  # without those of x; they contain the lambda, qkv does not
    mlp_scales: tuple[Tensor, Tensor] | None = None  # see Fp8Mlps; the codes contain the factor mlp0, W2 does not
    out: Tensor | None = None  # (D, H d), times a lambda
    gate: Tensor | None = None  # (H, GATE_CHANNELS), of the output of attention
    value_gate: Tensor | None = None  # (H, GATE_CHANNELS)
    skip: tuple[Tensor, Tensor] | None = None  # 0-D lambda and gate (1, GATE_CHANNELS) of the skip


class Factors(dict):
    """factors[place, name]: a list of learned factors at a layer or the end, each a number, for xsa H numbers. From the
    first dynamic layer on, x0, bigram, mix and xsa have them for every token, as its network adds to them. resid: what
    a lane carries past attention and MLP; post: with two lanes, the output of attention in each, then the MLP's."""

    def __init__(self, model):
        config, dtype, self.mix = model.config, model.dtype, model.ops.mix
        networks, layers = config.dynamic_sizes, range(len(config.layers))
        rounded = dict(x0=model.x0_lambdas, bigram=model.bigram_lambdas, resid=model.resid_lambdas)  # K6
        rounded |= {"post": model.post_lambdas} if config.layers_with("two_lanes") else {}
        pieces = torch.cat([x.flatten() for x in rounded.values()]).bfloat16().float().split(
            [x[i].numel() for x in rounded.values() for i in layers])
        constants = dict(zip([(i, name) for name in rounded for i in layers], pieces))
        if config.backout_layer is not None:
            constants[len(layers), "backout"] = -model.backout_lambda
        if with_xsa := config.layers_with("xsa"):
            constants |= zip([(i, "xsa") for i in with_xsa], model.xsa_lambdas.unbind(0))
        if sizes := config.mix_sizes:
            constants |= zip([(i, "mix") for i in sizes], model.mix_lambdas.split(list(sizes.values())))
        self.constants, dynamic = constants, {key for counts in networks.values() for key in counts}
        self.update({key: [constants[key]] for key in constants if key[1] == "xsa" and key not in dynamic})
        fixed = [key for key in constants if key[1] != "xsa" and key not in dynamic]
        numbers = iter(self.mix.unbind(torch.cat([constants[key] for key in fixed])))
        self.update({key: [*islice(numbers, len(constants[key]))] for key in fixed})
        self.networks = {}  # dynamic layer -> {(place, name): number of factors}, W_in, W_out
        if networks:
            rows = [sum(counts.values()) for counts in networks.values()]
            weights = model.dynamic_in.to(dtype).unbind(0), model.dynamic_out.to(dtype).split(rows)
            self.networks = dict(zip(networks, zip(networks.values(), *weights)))

    def run_network(self, i, stream):
        """Run the network of layer i on a stream (N, D)."""
        counts, W_in, W_out = self.networks[i]
        constants = torch.cat([self.constants[key] for key in counts])
        rows = torch.add(constants[:, None], W_out @ F.gelu(F.linear(stream, W_in)).mT, alpha=0.1)
        sizes = {key: [count] if key[1] == "xsa" else [1] * count for key, count in counts.items()}
        columns = iter(self.mix.columns(rows, sum(sizes.values(), [])))
        self.update((key, [*islice(columns, len(widths))]) for key, widths in sizes.items())


def steps_per_update(row, optim) -> int:
    """Number of steps whose gradients make one update of a parameter. In two steps of a short run, many rows of a table
    occur once, so two updates of the tables would teach them little."""
    return 1 if row.optim == "normuon" else 2 if row.sparse else optim.adam_every


def adam_betas(row, optim) -> tuple[float, float]:
    """Decays of the first and the second moment of a parameter. A lazy table has no first moment. table_beta2 is
    that of an update of the tables, after two steps; the head's decay is rescaled to forget as fast in tokens."""
    beta1, beta2 = row.betas
    beta2 = optim.table_beta2 ** (steps_per_update(row, optim) / 2) if beta2 is None else beta2
    return 0.0 if row.lazy and optim.lazy_tables else beta1, beta2


# ---- Embedding tables ------------------------------------------------------------------------------------------------

class Table:
    """An embedding table (R, D): what a forward pass reads of it, where the backward pass leaves the gradients, and
    what the ranks exchange.

    A batch touches few rows, so the gradients go past autograd: into the parameter's `grad`, or of a table of `rows`
    into `few` (FewRows). touched (R,) bool, of a lazy table: the rows with a gradient, at least. With several ranks,
    each has a part of a table of `rows`; `local` (most, D) then has the rows of the micro-batch, in the order of
    `Exchange.takes`. All ranks must call `start`, `fetch` and `send_gradients` in the same order. PR 360 (devenpzak)
    fetches its rows a step ahead."""

    def __init__(self, parameter, ops):
        self.parameter, self.ops = parameter, ops
        self.touched = self.few = self.local = None
        self.under_way = None  # (exchange, the rows that this rank gives, work) of rows that travel to next_local

    def lookup(self, count, ids, *n_grams):
        """kernels.lookup of the table, or of the rows that have come."""
        table, few = (self.parameter, self.few) if self.local is None else (self.local, None)
        return kernels.lookup(table, count, ids, self.ops, self.touched, few, *n_grams)

    def share(self, most, rt):
        """Begin to exchange rows with the other ranks, at most `most` for a micro-batch."""
        self.rt, table = rt, self.parameter
        self.local = torch.zeros(most, table.size(1), dtype=table.dtype, device=table.device, requires_grad=True)
        self.local.grad, self.next_local = torch.zeros_like(self.local), torch.zeros_like(self.local)

    @torch.no_grad()
    def start(self, exchange):
        """Begin to bring the rows of a micro-batch, while the GPU works on."""
        if self.under_way:  # rows that nobody has taken: a validation came between
            self.under_way[-1].wait()
        with trace_range("fetch rows"):
            given, count = self.parameter.index_select(0, exchange.rows), sum(exchange.takes)
            work = dist.all_to_all_single(self.next_local[:count], given, exchange.takes, exchange.gives, async_op=True)
        self.under_way = exchange, given, work

    @torch.no_grad()
    def fetch(self, exchange):
        """Bring the rows of a micro-batch, which may be under way."""
        if not self.under_way or self.under_way[0] is not exchange:
            self.start(exchange)
        with trace_range("fetch rows"):
            self.under_way[-1].wait()
            self.under_way, count = None, sum(exchange.takes)
            self.local[:count] = self.next_local[:count]

    @torch.no_grad()
    def send_gradients(self, exchange):
        """Add the gradients of the rows to those of the ranks that own the rows, as an average over the ranks."""
        with trace_range("send gradients of rows"):
            sent, ids = self.local.grad[:sum(exchange.takes)], kernels.SortedIds(exchange.rows, exchange.pieces)
            received = torch.empty(len(exchange.rows), sent.size(1), dtype=sent.dtype, device=sent.device)
            dist.all_to_all_single(received, sent / self.rt.world, exchange.gives, exchange.takes)
            sent.zero_()
            if len(received):
                self.ops.embedding_grad(self.few.grad, ids, received, *self.few.places)


class GPT(nn.Module):
    """The parameters of `param_table` and a flat forward pass. ranks: number of ranks that share the table of n-grams;
    each has the same number of its rows."""

    def __init__(self, config: Model, ops, dtype, device, ranks=1):
        super().__init__()
        self.config, self.ops, self.dtype = config, ops, dtype
        self.codes = {}  # label -> WeightCodes, of what trains in FP8
        self.stream = new_stream(device)  # for `lookup`
        self.with_attention, self.with_values, self.with_skip = map(
            config.layers_with, ("attention", "value_embed", "skip_from"))
        for param in config.table:
            rows = -(-param.shape[0] // ranks) if param.optim == "rows" else param.shape[0]
            zeros = torch.zeros(rows, *param.shape[1:], dtype=param.dtype, device=device)
            self.register_parameter(param.label, nn.Parameter(zeros))
        self.tables = {row.label: Table(self.get_parameter(row.label), ops) for row in config.table
                       if row.sparse or row.label == "embed"}
        if config.bigram_signs:  # the same in every run, whatever the seed
            bits = torch.randint(2, (SIGN_ROWS, config.model_dim), generator=torch.Generator().manual_seed(0))
            self.register_buffer("signs", (2 * bits - 1).to(device, dtype), persistent=False)
        if config.bigram_normal:  # checkpoints contain this table, so they need no tokenizer
            self.register_buffer("hash_ids", torch.arange(config.padded_vocab, dtype=torch.int32, device=device))

    @torch.no_grad()
    def init_weights(self, seed: int):
        """Draw the weights of attention first, then the others in the order of `param_table`. The embedding begins as
        the transposed head."""
        generator = torch.Generator(self.embed.device).manual_seed(seed)
        # Record 74 draws Q, K, V and O of a layer as four matrices (D, D). A narrow head takes the first half of its
        # rows of Q and K.
        H, d, D = self.config.num_heads, self.config.head_dim, self.config.model_dim
        drawn = torch.empty(len(self.with_attention), 4, H, d, D, device=self.embed.device)
        uniform(drawn, generator)
        self.vo_bank.copy_(drawn[:, 2:].flatten(2, 3))
        for layers, label, _ in self.config.qk_banks:
            qk, bank = drawn[[self.with_attention.index(i) for i in layers], :2], self.get_parameter(label)
            width = d // (1 + self.config.layers[layers[0]].narrow)
            bank.copy_(qk[..., :width, :].reshape(bank.shape))
        for param in self.config.table:
            tensor = self.get_parameter(param.label)
            if callable(param.init):
                tensor.zero_()
                param.init(tensor, generator)
            elif param.init is not None:
                tensor.fill_(param.init)
        self.embed.copy_(self.lm_head.t())

    def forward(self, tokens, documents, row_ids, attn: AttentionSettings, pieces=None) -> Output:
        """tokens (N,) int32, documents, row_ids and pieces: see Batch."""
        # In training, the lookup runs beside the many small kernels that prepare weights, and so do their backward
        # passes: autograd runs a backward pass on the stream of its forward pass. The lookup's stream owns the memory
        # of the embeddings and reuses it once it is free, so `Output` keeps them for the whole backward pass.
        codes, stream = (self.codes, self.stream) if torch.is_grad_enabled() else ({}, None)  # only training is in FP8
        with beside([stream]):
            factors, weights = Factors(self), self.weights_of_layers(codes)
            with on(stream):
                embeddings = self.lookup(tokens, row_ids, pieces)
        kept = embeddings[:] if stream else None
        return self.layers(embeddings, factors, weights, codes, tokens, documents, attn)._replace(embeddings=kept)

    def lookup(self, tokens, row_ids, pieces=None):
        """Embeddings, each (N, D): of the tokens, of the n-grams, then the value embeddings."""
        pieces = pieces or {}
        token_ids = kernels.SortedIds(tokens, pieces.get("tokens"))
        table, orders = self.config.ngram_table, len(self.config.ngrams)
        signs = (self.signs, row_ids["signs"]) if self.config.bigram_signs else ()
        ngram_ids = kernels.SortedIds(row_ids[table], pieces.get(table))
        return [*self.tables["embed"].lookup(1, token_ids),
                *self.tables[table].lookup(1, ngram_ids, orders, signs),
                *(self.tables["value_embeds"].lookup(len(self.with_values), token_ids) if self.with_values else ())]

    def projections(self, vs, banks=None) -> list[tuple[list[int], str, Tensor]]:
        """[(layers, label of their bank, weights of their q, k and v (layers, 2 H w + H d, D))], for each width w of
        the heads of q and k, or for some of config.qk_banks. vs: the matrices V of the layers with attention (layers,
        D, D)."""
        found, by_layer = [], dict(zip(self.with_attention, vs.unbind(0)))
        for layers, label, _ in banks or self.config.qk_banks:
            qk = self.get_parameter(label).to(vs.dtype).flatten(1, 3)
            own = vs if len(layers) == len(vs) else torch.stack([by_layer[i] for i in layers])
            found.append((layers, label, torch.cat((qk, own), 1)))
        return found

    def weights_of_layers(self, codes) -> list[LayerWeights]:
        """The weights of every layer, in the dtype of the activations, and these FP8 codes. Each bank is unbound once,
        so that its gradient is one torch.stack. Indexing the bank in each layer would add a bank of zeros per layer
        (PR 233)."""
        config, dtype, mix, count = self.config, self.dtype, self.ops.mix, len(self.config.layers)
        of_qkv, of_out = (column.unbind(0) for column in self.sa_lambdas.unbind(1))

        def scaled(weights, layers, factors, in_codes=False):
            return {i: matrix for i, [matrix] in zip(layers, mix.scaled_weights(weights[:, None], factors, in_codes))}

        vs, os = self.vo_bank.to(dtype).unbind(1)
        found = {"qkv": {}, "qkv_codes": {}}
        for layers, label, weights in self.projections(vs):
            factors = torch.stack([of_qkv[i] for i in layers])
            if label in codes:
                found["qkv_codes"] |= zip(layers, codes[label].of_layers(factors))
            found["qkv"] |= scaled(weights, layers, factors, label in codes)
        found["out"] = scaled(os, self.with_attention, torch.stack([of_out[i] for i in self.with_attention]))

        # With one lane, the factor of the MLP scales W2, which saves two passes over (N, D) in the backward pass.
        one_lane = min(config.layers_with("two_lanes"), default=count)  # so many layers have one lane
        factors = self.post_lambdas.bfloat16().view(count, -1, 1 + (one_lane < count))[:one_lane, -1, 0]
        if "mlp_bank" in codes:
            of_all = F.pad(factors, (0, count - one_lane), value=1.0)
            found["mlp_scales"] = dict(enumerate(codes["mlp_bank"].factored(of_all)))
        mlps = mix.scaled_weights(self.mlp_bank.to(dtype), factors, "mlp_bank" in codes)
        found["W1"], found["W2"] = (dict(enumerate(matrices)) for matrices in zip(*mlps))

        found["gate"] = dict(zip(self.with_attention, mix.unbind(self.attn_gate_bank.to(dtype))))
        if self.with_values:
            found["value_gate"] = dict(zip(self.with_values, mix.unbind(self.ve_gate_bank.to(dtype))))
        if self.with_skip:
            skips = zip(self.skip_lambda.unbind(0), self.skip_gate.to(dtype).split(1))
            found["skip"] = dict(zip(self.with_skip, skips))
        return [LayerWeights(**{name: by_layer[i] for name, by_layer in found.items() if i in by_layer})
                for i in range(count)]

    def attention(self, i, w: LayerWeights, stream: kernels.Mixed, ve, documents, attn: AttentionSettings, xsa):
        """Output of the attention of layer i (N, D). ve (N, D) or None: value embeddings; xsa: the factors of the
        heads, or None."""
        layer, codes = self.config.layers[i], stream.codes
        rotary, scale = attn.rotary[layer.narrow]
        codes = codes and w.qkv_codes._replace(x8=codes[0], x8_t=codes[1])
        y = self.ops.attention(stream.normed, w.qkv, rotary, ve, w.value_gate, w.gate, documents[layer.paired],
                               attn.long_window if layer.long else attn.short_window, scale, layer.paired, layer.long,
                               layer.narrow, codes, stream.first if codes else None, xsa)
        return F.linear(y.flatten(1), w.out)

    def layers(self, embeddings, factors, weights, codes, tokens, documents, attn: AttentionSettings) -> Output:
        """The forward pass after `lookup`, whose result it clears, and `weights_of_layers`. All streams are (N, D)."""
        config, layers, mix, last = self.config, self.config.layers, self.ops.mix, len(self.config.layers) - 1
        e, ngram, *values = (x.to(self.dtype) for x in embeddings)
        values = dict(zip(self.with_values, values))  # by layer
        mlps, x8_scale = codes.get("mlp_bank"), kernels.x8_scale(config.model_dim)
        in_fp8 = codes.keys() & {label for _, label, _ in config.qk_banks}
        by_attention = kernels.Reader(x8_scale, GATE_CHANNELS) if in_fp8 else kernels.Reader()
        by_mlp = kernels.Reader(x8_scale if mlps else None)
        by_head = kernels.Reader(kernels.X_SCALE if "lm_head" in codes else None, whole=True)

        # Token embedding, smeared one token forward (PR 130, classiclarryd; K1).
        e, first = mix.first_channels(e, GATE_CHANNELS)
        gate = mix.token_gate(first, self.smear_gate.to(self.dtype), self.smear_lambda)
        (e,), before = mix.add_later([e], [[gate]], previous=True)
        smeared = mix([(None, e)], kernels.Reader(channels=GATE_CHANNELS), before)
        first, lane0, lane1 = smeared.first, kernels.Mixed(smeared.normeds), None  # lane 1: where a layer has two lanes
        embeddings.clear()  # what has a name takes memory
        del e, gate, before, smeared

        def read(stream, by):
            """The stream with what this reader of its norm needs."""
            return stream if stream.reader == by else mix([(None, stream.x)], by)

        def reader(i):
            """What reads the norm of lane 0 in layer i, before the layer adds to it. A wrong guess costs time: `read`
            then computes the norm again."""
            if i > last or layers[i].input_from is not None:
                return None
            return by_attention if layers[i].attention else None if layers[i].embeds else by_mlp
        changing = {0, *self.with_skip, *config.layers_with("mix")}  # layers that change lane 0 before attention

        embedded = backout = before_mix = first_ve = None  # streams for mixtures and for the end
        skip_sources, input_sources = {layer.skip_from for layer in layers}, {layer.input_from for layer in layers}
        dynamic, at_end = config.layers_with("dynamic"), []  # at_end: the part of the last sum, begun by a mixture
        skips, inputs = {}, {}  # layer -> lane 0 before its MLP; input of attention, from lane 0 after it
        added = {}  # layer -> what it adds of x0 and of the n-grams
        for i, (layer, w) in enumerate(zip(layers, weights)):
            trace_mark(f"layer {i}")
            ve = values.pop(i, None)
            if layer.dynamic:
                factors.run_network(i, lane0.x)
            if layer.dynamic or i == 0:
                end = min([j for j in dynamic if j > i], default=last + 1)
                places = [j for j in range(i, end) if layers[j].embeds]
                rows = [[*factors[j, "x0"], *(factors[j, "bigram"] if j else [None])] for j in places]
                if i == 0:  # lane 0 begins with n-grams, a sum before those of `places`
                    rows, x0 = [[None, *factors[0, "bigram"]], *rows], lane0.x
                (x0, ngram), sums = mix.add_later([x0, ngram], rows)
                added.update(zip(reversed(places), reversed(sums)))
                if i == 0:
                    lane0 = mix([(None, lane0.x)], reader(0), [sums[0]])
                    embedded = lane0.x
            if layer.skip_from is not None:
                skip_lambda, skip_gate = w.skip
                gate = mix.token_gate(first, skip_gate, torch.sigmoid(skip_lambda) * 2)
                lane0 = mix([(None, lane0.x), (gate, skips[layer.skip_from].x)], reader(i))
            if layer.two_lanes and lane1 is None:
                lane1 = lane0
            if layer.mix:
                places = [factors[i, "mix"][:3], factors[i, "mix"][3:]]
                if i >= max(dynamic, default=0):  # the factors of the end will not change
                    places.append(factors[last + 1, "mix"][:3])
                (embedded, backout, before_mix), (for_value, for_lane, *at_end) = mix.add_later(
                    [embedded, backout, lane0.x], places)
                mixed = mix([(None, ve)], None, [for_value])
                ve, first_ve = mixed.x, mixed.x if first_ve is None else first_ve
                lane0 = mix([(None, before_mix)], reader(i), [for_lane])
            if first_ve is None:
                first_ve = ve

            # `w.out` contains a factor of the output of attention. Two lanes also have factors of their own for it.
            resid_attn, resid_mlp = factors[i, "resid"]
            if layer.attention:
                source = read(lane0 if layer.input_from is None else inputs[layer.input_from], by_attention)
                a = self.attention(i, w, source, ve, documents, attn, factors[i, "xsa"][0] if layer.xsa else None)
                if lane1 is None:
                    lane0 = mix([(resid_attn, lane0.x), (None, a)], by_mlp, [added.pop(i)])
                else:  # K5: x0 and n-grams into lane 0 only
                    at = mix.add_later([a], [[factor] for factor in factors[i, "post"][:2]])[1]
                    lane0 = mix([(resid_attn, lane0.x)], None, [at[0], added.pop(i)])
                    lane1 = mix([(resid_attn, lane1.x)], by_mlp, [at[1]])
                    del at
                del source, a
            elif layer.embeds:
                lane0 = mix([(resid_attn, lane0.x)], by_mlp if lane1 is None else None, [added.pop(i)])
            if i in skip_sources:
                skips[i] = kernels.Mixed(lane0.xs)

            # With one lane, W2 contains the factor of the output of the MLP.
            next_reader = by_attention if i in input_sources else None if i + 1 in changing else reader(i + 1)
            source = read(lane0 if lane1 is None else lane1, by_mlp)
            grad_codes = mlps.new_grad_codes() if mlps and lane1 is None else None
            m = (mlps(i, source.normed, w.W1, w.W2, w.mlp_scales, source.codes, grad_codes) if mlps
                 else self.ops.mlp(source.normed, w.W1, w.W2))
            del source
            if lane1 is None:
                lane0 = mix([(resid_mlp, lane0.x), (None, m)], next_reader, (), grad_codes)
            else:
                at = mix.add_later([m], [[factor] for factor in factors[i, "post"][2:]])[1]
                lane0 = mix([(resid_mlp, lane0.x)], next_reader, [at[0]])
                lane1 = mix([(resid_mlp, lane1.x)], None, [at[1]])
                del at
            del m
            if i in input_sources:
                inputs[i] = lane0._replace(xs=None)
            if i == config.backout_layer:
                backout = lane0.x

        ends = [(None, lane0.x)] if lane1 is None else [(0.5, lane0.x), (0.5, lane1.x)]
        if config.backout_layer is not None:
            ends.append((*factors[last + 1, "backout"], backout))
        if config.mix_sizes:
            streams = [embedded, backout, before_mix, first_ve, *(skip.x for skip in skips.values())]
            ends += [*zip(factors[last + 1, "mix"], streams, strict=True)][3 * bool(at_end):]
        x = mix(ends, by_head, at_end)
        point = self.point(x.normed, tokens, *documents[False], attn.pointer_window) if config.pointer else None
        return Output(x.normed, point, x.codes)

    def point(self, x, tokens, start, end, window):
        """Where the pointer head looks. A token sees its own document alone, and the key of a token also tells what
        came before it there. start, end (N,): of the documents."""
        projected = F.linear(x, self.pointer_weights.view(-1, x.size(1)).to(x.dtype))
        q, k, sink = self.ops.pointer_inputs(projected, self.pointer_gain, self.pointer_sink, start)
        return kernels.Point(q, k, sink, tokens, start, end, window, POINTER_WIDTH**-0.5)


# ---- Optimizer: state and communication between ranks (triton_kernels.py has the rules of the updates) --------------

# torch 2.13 renamed reduce_scatter_tensor and all_gather_into_tensor.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@torch.no_grad()
def blend_weights(p, state, factor, sum_over_ranks=lambda x: None):
    """Replace the last weights p by a mixture of them and their average, whose part is `factor`, from 0 to 1.

    The parameter as a whole keeps its norm: an average has a smaller norm, because noise cancels, so the mixture is
    scaled back (PR 349). state: the optimizer state of p, a rank's part. sum_over_ranks: adds up a tensor in place."""
    tensors = [p, state["average"], *([state["mantissa"]] if "mantissa" in state else [])]

    def parts():
        """(part of p, its last weights, mixture), some rows at a time: fp32 copies of a whole table take gigabytes."""
        for part, average, *mantissa in zip(*(x.split(max(1, 2**24 // p[0].numel())) for x in tensors)):
            w = kernels.join_master(part.view(torch.int16), *mantissa) if mantissa else part.float()
            yield part, w, w.lerp(average, factor)

    squares = sum(torch.stack((w.norm(), mixture.norm())).square() for _, w, mixture in parts())
    sum_over_ranks(squares)
    scale = (squares[0] / squares[1].clamp(min=1e-30)).sqrt()  # all weights may be zero
    for part, _, mixture in parts():
        part.copy_(mixture.mul_(scale))


def update_numbers(config, plan) -> dict[str, float]:
    """The numbers with which the optimizer makes the update of a step: {name: number}, and {"label name": number} of
    the parameters. Every step has the same names."""
    optim, muon_lr = config.optim, config.optim.muon_lr * plan.lr_factor

    def updates(steps):
        """Number of updates, this one included, with so many steps per update."""
        return max(1, (plan.step + 1) // steps)

    # t and adam_lr: of Replicated, which has vectors of all other numbers.
    numbers = {"t": updates(optim.adam_every), "table_t": updates(2), "adam_lr": optim.adam_lr * plan.lr_factor,
               "muon_lr": muon_lr, "momentum": plan.momentum, "momentum_decay": plan.momentum_decay,
               "slow_rate": plan.slow_rate, "slow_share": plan.slow_share}
    for row in (row for row in config.model.table if row.optim != "replicated"):
        decay = optim.muon_wd * muon_lr  # normuon_update multiplies by lr and the rate of the matrix
        if row.optim != "normuon":
            lr = (optim.table_lr if row.sparse else optim.adam_lr) * plan.lr_factor * row.lr_mul
            numbers[f"{row.label} step_size"] = kernels.adam_step_size(
                lr, updates(steps_per_update(row, optim)), *adam_betas(row, optim))
            decay = lr * lr * optim.adam_wd * row.wd_mul
        numbers[f"{row.label} weight_decay"] = decay
        numbers[f"{row.label} average_rate"] = plan.average_rates.get(row.label, 0.0)
    return numbers


class Sharded:
    """A parameter of which every rank updates a part: some matrices of a bank, some rows of another parameter.

    whole, grads: the memory behind the parameter and, in a list, behind its gradient, in the shape (n, R, C) for a bank
    of matrices (R, C), padded with zeros to a multiple of the number of ranks. part: this rank's part of `whole`. Of a
    table of `rows`, the parameter is the part, and there is no other memory. count: matrices or rows of all ranks.
    touched: as of Table, where one rank updates single rows of a parameter and zeroes their gradients. state: of the
    part, "m" and "v" or, where single rows are updated, "v" and "last", the number of the last update of every row; of
    a bank also "mantissa", the lower 16 bits of its fp32 weights, and with --slow_momentum "slow"; with --average_blend
    "average"."""

    def __init__(self, row, param, table, config, rt, ops):
        self.row, self.table, self.optim, self.rt, self.ops = row, table, config.optim, rt, ops
        self.count, self.part, self.grads, self.touched = row.shape[0], param.detach(), [], None
        by_rows = row.optim == "rows"
        if by_rows:
            table.few = kernels.FewRows(self.part, min(most_few_rows(config), len(param)))
        else:
            whole = self.part.flatten(0, -3) if row.optim == "normuon" else self.part
            self.count, size = len(whole), -(-len(whole) // rt.world)
            self.whole, grad = (self.padded(x, rt.world * size) for x in (whole, torch.zeros_like(whole)))
            param.data, param.grad = (x[:self.count].view_as(param) for x in (self.whole, grad))
            self.part, self.grads = self.whole[rt.rank * size:(rt.rank + 1) * size], [grad]

        def zeros(like, dtype=torch.float32):
            return torch.zeros(like.shape, dtype=dtype, device=rt.device)

        part = self.part
        if row.optim == "normuon":
            self.state = {"m": zeros(part), "v": zeros(part[:, :, :1]), "mantissa": zeros(part, torch.int16)}
            self.state |= {"slow": zeros(part)} if self.optim.slow_momentum else {}
            rates = torch.tensor(row.matrix_lr, device=rt.device).repeat(self.count // len(row.matrix_lr))
            self.matrix_lr = self.own(rates).view(-1, 1, 1)
        elif by_rows or row.lazy and self.optim.lazy_tables:
            self.state = {"v": zeros(part[:, :1] if by_rows else part), "last": zeros(part[:, :1], torch.int32)}
            if not by_rows and rt.world == 1:  # several ranks, which all touch rows of a part, look at the gradient
                self.touched = table.touched = torch.zeros(len(param), dtype=torch.bool, device=rt.device)
        else:
            self.state = {"m": zeros(part), "v": zeros(part)}
        if row.average and self.optim.average_blend:
            self.state["average"] = zeros(part)
        # The update of a bank is a chain of small kernels. It runs beside the updates of other banks and of tables.
        # MattBeton (profile/GRAM_SWEEP.md of a fork of modded-nanogpt) updates three banks on three streams.
        self.stream = new_stream(rt.device) if row.optim == "normuon" else None

    @staticmethod
    def padded(x, length):
        """x (n, ...) with zeros behind, if it is shorter."""
        return torch.cat((x, x.new_zeros(length - len(x), *x.shape[1:]))) if len(x) < length else x

    def own(self, whole):
        """This rank's part of a tensor (count, ...), padded with zeros."""
        size = len(self.part)
        return self.padded(whole[self.rt.rank * size:(self.rt.rank + 1) * size], size)

    def start_reduction(self):
        """Start averaging the gradient over the ranks. Returns (work to wait for or None, this rank's part)."""
        if self.rt.world == 1:
            return None, self.grads[0]
        part = torch.empty_like(self.part)
        return reduce_scatter(part, self.grads[0], op=dist.ReduceOp.AVG, async_op=True), part

    def update(self, grad, numbers, moves_average):
        """Update the part. grad: of the part; of a table of `rows` None. moves_average: whether "average" moves."""
        label, state, ops, optim = self.row.label, self.state, self.ops, self.optim
        average, rate = state["average"] if moves_average else None, numbers[f"{label} average_rate"]
        decay, step_size = numbers[f"{label} weight_decay"], numbers.get(f"{label} step_size")  # the latter of Adam
        if self.row.optim == "normuon":
            X, scale = ops.fused_momentum(
                grad, state["m"], numbers["momentum"], kernels.POLAR_SAFETY, state.get("slow"),
                numbers["momentum_decay"], numbers["slow_rate"], numbers["slow_share"])
            y = kernels.polar_express(X, scale, ops, optim.polar_steps)
            ops.normuon_update(self.part.view(torch.int16), state["mantissa"], state["v"], y, numbers["muon_lr"],
                               self.matrix_lr, decay, optim.muon_beta2, average, rate)
        elif "last" not in state:
            ops.adam_update(self.part, state["m"], state["v"], grad, step_size, decay, *adam_betas(self.row, optim),
                            optim.adam_eps, average, rate)
        else:  # Adam of the rows with a gradient, which becomes zero
            tensors = self.part, state["v"], state["last"]
            rates = numbers["table_t"], step_size, decay, adam_betas(self.row, optim)[1], optim.adam_eps
            if few := self.table.few:
                ops.update_few_rows(*tensors, few.grad, few.place, few.rows, few.count, *rates)
            else:
                ops.update_rows(*tensors, (grad != 0).any(1) if self.touched is None else self.touched, grad, *rates)


class Replicated:
    """The replicated parameters in one vector per dtype, so that few kernels and one reduction serve all of them.
    rows: of param_table; params {label: parameter}, whose weights and gradients move into the vectors. state: label ->
    {"m", "v"}."""

    row, touched, stream = Param("replicated", (), "replicated"), None, None

    def __init__(self, rows, params, config, rt, ops):
        self.optim, self.rt, self.ops, self.state = config.optim, rt, ops, {}
        self.vectors = []  # for each dtype: weights, gradients, m, v; beta1, beta2, lr_mul, wd_mul
        for dtype in sorted({row.dtype for row in rows}, key=str):
            group = [row for row in rows if row.dtype == dtype]
            # A parameter begins at a multiple of 512 bytes, as tensors do on a GPU. For less, cuBLAS may choose another
            # GEMM, which may round otherwise.
            sizes = [-(-math.prod(row.shape) // 256) * 256 for row in group]
            vectors = [torch.zeros(sum(sizes), dtype=each, device=rt.device)
                       for each in (dtype, dtype, torch.float32, torch.float32)]
            for row, *parts in zip(group, *(vector.split(sizes) for vector in vectors)):
                param = params[row.label]
                weights, grad, m, v = (part[:param.numel()].view_as(param) for part in parts)
                weights.copy_(param.detach())
                param.data, param.grad, self.state[row.label] = weights, grad, {"m": m, "v": v}
            columns = zip(*((*adam_betas(row, self.optim), row.lr_mul, row.wd_mul) for row in group))
            self.vectors.append((*vectors, *(torch.tensor(column).repeat_interleave(torch.tensor(sizes)).to(rt.device)
                                             for column in columns)))
        self.grads = [grads for _, grads, *_ in self.vectors]

    def start_reduction(self):
        """As of Sharded; the gradients are those of `vectors`."""
        if self.rt.world == 1:
            return None, self.grads
        whole = torch.cat([grad.float() for grad in self.grads])  # one dtype: one reduction
        work = dist.all_reduce(whole, op=dist.ReduceOp.AVG, async_op=True)
        return work, whole.split([*map(len, self.grads)])

    def update(self, grads, numbers, moves_average):
        for (weights, _, m, v, *coefficients), grad in zip(self.vectors, grads):
            self.ops.replicated_update(weights, m, v, grad, numbers["adam_lr"], numbers["t"], *coefficients,
                                       self.optim.adam_wd, self.optim.adam_eps)


class NorMuonAndAdam:
    """The updates of all parameters, in three phases; `param_table` has the settings of each. The order is explicit;
    it replaces gradient hooks (PR 200, Chris McCormick)."""

    def __init__(self, model, config, rt, ops):
        self.params, self.tables, self.rt, self.ops = dict(model.named_parameters()), model.tables, rt, ops
        rows = {row.label: row for row in config.model.table}
        if differing := sorted(rows.keys() ^ self.params.keys()):
            raise UserError(f"param_table needs one row per parameter; differing: {', '.join(differing)}")
        self.copies = {row.tied_to: row.label for row in rows.values() if row.tied_to}  # parameter -> its copy
        self.sharded = {label: Sharded(row, self.params[label], self.tables.get(label), config, rt, ops)
                        for label, row in rows.items() if row.optim != "replicated"}
        self.replicated = Replicated([row for row in rows.values() if row.optim == "replicated"], self.params, config,
                                     rt, ops)
        self.state = {label: each.state for label, each in self.sharded.items()} | self.replicated.state
        self.of_rows = [label for label, row in rows.items() if row.optim == "rows"]
        banks, tables = ([each for each in self.sharded.values() if each.row.optim == optim]
                         for optim in ("normuon", "adam"))
        # The banks are updated last: the gathers of the tables then overlap with the orthogonalisation of the banks.
        self.reduce_order, self.update_order = [*banks, self.replicated, *tables], [self.replicated, *tables, *banks]

    @torch.no_grad()
    def step_rows(self, plan, numbers):
        """The update of the tables of `rows`, where all ranks then find the rows of their next micro-batch. No CUDA
        graph can hold that exchange, since the number of rows changes from batch to batch, nor the plain update, whose
        host reads the number of rows from the GPU."""
        for label in self.of_rows if plan.tables else ():
            with trace_range(f"update {label}"):
                self.sharded[label].update(None, numbers, False)

    @torch.no_grad()
    def step(self, plan, numbers):
        """Update the other parameters whose turn it is at this step (`StepPlan`), on all ranks, and zero their
        gradients. Call it after `step_rows`. numbers: `update_numbers` of the step; its values may be 0-D tensors on
        the GPU."""
        copies = self.copies if plan.tied else {}
        reduced, updated = (
            {each.row.label: each for each in order if plan.updates(each.row) and each.row.label not in copies.values()}
            for order in (self.reduce_order, self.update_order))

        # Phase 1: start the reductions. While tied, the gradient of the copy is added to that of its original.
        reductions = {}
        for name, each in reduced.items():
            with trace_range(f"reduce {name}"):
                if name in copies:
                    self.ops.transpose_add(self.params[copies[name]].grad, self.params[name].grad)
                reductions[name] = each.start_reduction()

        # Phase 2: for each parameter, wait for its reduction, update this rank's part, start its gather.
        gathers = {}
        with beside(each.stream for each in updated.values()):
            for name, each in updated.items():
                with on(each.stream):
                    with trace_range(f"wait {name}"):
                        work, grad = reductions.pop(name)
                        if work:
                            work.wait()
                    with trace_range(f"update {name}"):
                        each.update(grad, numbers, name in plan.average_rates)
                    if self.rt.world > 1 and name in self.sharded:
                        with trace_range(f"gather {name}"):
                            gathers[name] = all_gather(each.whole, each.part, async_op=True)

        # Phase 3: wait for the gathers. While head and embedding are tied, the new head's transpose becomes the
        # embedding.
        for name in updated:
            if name in gathers:
                with trace_range(f"wait gather {name}"):
                    gathers.pop(name).wait()
            if name in copies:
                self.follow(name)
        with trace_range("zero gradients"):
            # In place, because CUDA graphs add to this memory. update_rows zeroes the gradients of its tables.
            torch._foreach_zero_([grad for each in self.reduce_order if plan.updates(each.row)
                                  and each.touched is None for grad in each.grads])
        for name, copy in self.copies.items() if plan.split else ():  # a state of its own, as its original's (PR 200)
            for key, part in self.sharded[name].state.items():
                whole = part
                if self.rt.world > 1:
                    whole = part.new_empty(len(part) * self.rt.world, *part.shape[1:])
                    all_gather(whole, part)
                own = self.sharded[copy].own(whole[:self.sharded[name].count].t())
                self.state[copy][key].copy_(own)

    def follow(self, name):
        """Make the copy of a parameter its transpose."""
        with trace_range(f"update {self.copies[name]}"):
            self.ops.transpose_copy(self.params[name].detach(), self.params[self.copies[name]].detach())

    @torch.no_grad()
    def drop_gradients(self):
        """Zero all gradients, without an update."""
        torch._foreach_zero_([grad for each in self.reduce_order for grad in each.grads])
        for few in (self.tables[label].few for label in self.of_rows):
            few.load(few.rows[:0], few.grad[:0])

    @torch.no_grad()
    def blend(self, plan):
        """Replace the last weights by their mixture with the averages. All ranks must call this. Training cannot go on
        afterwards."""
        for label, each in self.sharded.items():
            if "average" in each.state and not (plan.tied and each.row.tied_to):
                blend_weights(each.part, each.state, each.optim.average_blend, lambda x: all_reduce(x, self.rt))
                if self.rt.world > 1:
                    all_gather(each.whole, each.part)
        for name in self.copies if plan.tied else ():
            self.follow(name)


# ---- Schedule --------------------------------------------------------------------------------------------------------

class StepPlan(NamedTuple):
    """The settings of one step, from `make_plan`."""

    step: int
    stage: int  # index into schedule.stages, from 0; knobs count stages from 1
    micro_batch_tokens: int  # N of a training forward pass
    max_doc_len: int
    lr_factor: float
    momentum: float  # share of the averaged gradients in the input of NorMuon (Nesterov)
    momentum_decay: float  # decay of the averaged gradients
    slow_rate: float  # rate of the slow averages (--slow_momentum)
    slow_share: float  # share of the slow averages in the averaged gradients
    average_rates: dict[str, float]  # label -> rate at which the average of its weights moves in this step
    mtp_weights: tuple[float, ...]
    candidates: int  # classes in the loss of a micro-batch; 0: all
    adam: bool  # whether Adam updates its parameters other than tables
    tables: bool  # whether the tables are updated: on odd steps, with the sum of two gradients (PR 136, classiclarryd)
    tied: bool  # whether embedding and head share their weights
    split: bool  # whether embedding and head are untied after this step

    def updates(self, row) -> bool:
        """Whether a parameter is updated at this step."""
        return row.optim == "normuon" or (self.tables if row.sparse else self.adam)

    # Steps with equal forward keys have the same shapes and windows, so they share one CUDA graph of the micro-step.
    # Those with equal update keys run the same operations of the optimizer.
    forward_key = property(lambda self: (self.stage, self.candidates))
    update_key = property(lambda self: (self.adam, self.tables, self.tied, self.split, frozenset(self.average_rates)))


def average_rates(config, step, total) -> dict[str, float]:
    """{label: rate} of the averages that move in a step. An average begins three time constants before the end."""
    rates = {}
    for param in param_table(config.model) if config.optim.average_blend else ():
        period, tau = steps_per_update(param, config.optim), max(1.0, param.average * total)
        start = max(0.0, total - 3 * tau)
        if param.average and step >= start and step % period == period - 1:
            # Its first update makes an average a copy of the weights.
            rates[param.label] = 1.0 if step - period < start else 1 - (1 - 1 / tau) ** period
    return rates


def num_candidates(config, tokens) -> int:
    """Number of classes in the sampled loss of a micro-batch: a multiple of 256, as the FP8 products work in tiles of
    256 classes. 0 when it is not below the number of all classes."""
    count = 256 * math.ceil(config.schedule.candidates * tokens**0.5 / 256)
    return count if count < config.model.padded_vocab else 0


# With --slow_momentum: time constant of the slow averages, and the step from which NorMuon uses them, as parts of the
# run; as in record 92.
SLOW_PERIOD, SLOW_START = 0.042, 0.43


def make_plan(config: Config, step: int) -> StepPlan:
    """The settings of a step, which depend only on the config and the step. The step after the last one has a plan,
    too, for the last validation."""
    schedule = config.schedule
    *starts, total = stage_starts(schedule)
    index = bisect_right(starts, step) - 1
    stage, start = schedule.stages[index], starts[index]
    progress = (step - start) / ([*starts, total][index + 1] - start) if step < total else 0.0

    decay_start = int(schedule.scheduled_steps * (1 - schedule.cooldown_frac))
    t = min(1.0, max(0.0, (step - decay_start) / (schedule.scheduled_steps - decay_start)))  # K11
    low, high = schedule.muon_momentum
    warmup, cooldown = momentum_steps(schedule)
    warmth = step / warmup if step < warmup else 1 - max(0, step - (total - cooldown)) / max(1, cooldown)
    momentum = low + (high - low) * warmth
    slow_share = config.optim.slow_momentum if step >= SLOW_START * total else 0.0
    # The first odd step of the stage. With --init_from, head and embedding are untied before the first step.
    split_step = -1 if config.system.init_from else starts[schedule.split_stage - 1] | 1
    tokens = stage.batch_tokens // config.system.micro_batches
    # Both gradients of an Adam update come from the same kind of softmax.
    sampled = step - step % 2 < schedule.sampled_frac * total and step <= split_step
    return StepPlan(
        step=step, stage=index, micro_batch_tokens=tokens,
        max_doc_len=stage.max_doc_len, lr_factor=stage.lr_mul * (1 - t) + schedule.lr_floor * t,
        # Beside a slow average, the fast one forgets as fast as at the first step: the two then see different spans.
        momentum=momentum, momentum_decay=low if slow_share else momentum,
        slow_rate=min(1.0, 1 / (SLOW_PERIOD * total)), slow_share=slow_share,
        average_rates=average_rates(config, step, total),
        mtp_weights=tuple(a + (b - a) * progress for a, b in zip(stage.mtp_start, stage.mtp_end)),
        candidates=num_candidates(config, tokens) if sampled else 0,
        adam=step % config.optim.adam_every == config.optim.adam_every - 1, tables=step % 2 == 1,  # K12
        tied=step <= split_step, split=step == split_step)


# ---- A run, from the arguments to the results ------------------------------------------------------------------------

def load_model(path, knobs) -> tuple[Config, GPT, AttentionSettings]:
    """(config, model, settings of the last validation) of a checkpoint, on a GPU if there is one. knobs: {name: text},
    overrides of the checkpoint's settings. Raises UserError for a bad file or bad knobs."""
    state = load_checkpoint(path)
    config, ops, device = checkpoint_config(state["config"], RECORD74, knobs)
    check_weights(state, config.model)
    model = GPT(config.model, ops, getattr(torch, config.system.dtype), device)
    model.load_state_dict(state["model"])
    return config, model, attention_settings(config, device, model.dtype)[-1]


def main(argv, began=started) -> int:
    """Train, or do what --help, --check or --sample asks for; returns the exit status. With - as the first argument, do
    the runs that records/repeat.py sends. began: `time.perf_counter` at the start of the run."""
    if argv[:1] == ["-"]:
        return serve(main)
    watch = Stopwatch(began)
    if {"--help", "-h"} & {*argv}:
        return first_answer(argv)
    rank = local = 0
    log = None
    try:
        if any(arg.partition("=")[0] == "--sample" for arg in argv):
            return sample_command(argv, RECORD74, load_model)
        rank, world, local = rank_from_env()
        values, fit, size = read_values(argv, PRESETS), None, ""
        config = make_config(values, world, PRESETS)
        seconds, (size_open, most_rows) = 60 * config.schedule.minutes, left_open(values, PRESETS)
        if size_open or seconds and config.system.device == "cuda":
            fit = functools.partial(fit_size, config, size_open, lambda gpu, **knobs: make_config(
                values | knobs, world, PRESETS, gpu), world)
        if "--check" in argv:
            from records.check import check_table
            return check_table(config, world, fit, most_rows, show=local == 0)
        automatic = world == 1 and not config.system.micro_batches
        if not fit:  # else most checks need what follows from the GPU
            config = check_start(config, world, most_rows)
        watch.lap("checks")
        rt = init_runtime(config)
        watch.lap("processes")
        if fit:
            config, size = fit(of_rank_0(measure_gpu(config.system.fp8_mlp), rt) if seconds else 1.0, rt.device)
            config = check_start(config, world, most_rows)
            watch.lap("size")
        log, profiler = Log(config, rt), None
        if config.system.profile:
            from records.trace import Profiler as profiler
        train(config, rt, log, argv, watch, automatic, size, seconds, profiler)
        if config.system.plot and rank == 0:
            from records.compare import plot_run
            try:
                log.line(f"plot: {quoted(published(str(plot_run(log.path))))}")
            except UserError as error:
                log.line(f"warning: no plot: {error}")
        if world > 1:
            dist.destroy_process_group()
        return 0
    except Stopped as stopped:
        return stopped.status
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not log:  # of `--check | head -n 1`, for example
            return 1
        message = error_message(error) if isinstance(error, (UserError, RuntimeError, OSError)) else None
        claimed = claim_report(local)
        if log and (claimed or rank == 0 or message is None):
            log.failed(message or one_line(error), error)
        if message is None:
            raise
    finally:
        gc.enable()
    if claimed:
        print(f"error: {f'rank {rank}: ' if rank else ''}{message}", file=sys.stderr, flush=True)
    return 1


def train(config, rt, log, argv, watch, automatic=False, size="", seconds=0.0, profiler=None):
    """Train, from the log's header to the results.

    automatic: the script has chosen the number of micro-batches, and chooses a larger one if memory is too small.
    size: a line for the log about the size that the script has chosen, if it has. seconds: the expected training time,
    if it is known. profiler: class Profiler, or None.
    """
    config, ops, _ = choose_kernels(config, rt.device)
    config, faults = replace_faulty_kernels(config, ops, rt, log) if config.system.kernels != "torch" else (config, [])
    config, ops, choices = choose_kernels(config, rt.device)
    watch.lap("trial")
    system, machine = config.system, capability(rt.device) | {"ranks": rt.world}
    sources = loaded_sources()  # now, because somebody may edit the files during the run
    shards = run_shards(config)
    require_equal_ranks(rt, config, sources | {f"{part}_shards": str(each) for part, each in shards.items()})
    if rt.rank == 0:
        write_header(log, argv, sources, config, machine, choices, shards)
        facts, doubt = facts_of_run(config)
        doubts = [f"warning: {text}" for text in (doubt, *shards["train"].warnings, *shards["val"].warnings) if text]
        for line in filter(None, (size, *faults, *doubts)):
            log.line(line)
    stop = watch_signals(functools.partial(log.ended, system), lambda: told().exists())
    resumed = load_checkpoint(system.resume) if system.resume else None
    initial = load_checkpoint(system.init_from) if system.init_from and not resumed else None
    if warning := resumed and compare_shards(resumed, config, shards):
        log.line(f"warning: {warning}")
    watch.lap("log")
    try:
        trainer = Trainer(config, rt, log, ops, watch, sources, resumed, initial, profiler, shards, stop)
        ready, on_gpu = time.perf_counter(), rt.device.type == "cuda"
        if on_gpu:
            log.line("Compiling kernels and capturing graphs")
        if seconds:
            end = datetime.now() + timedelta(seconds=seconds + 20 * on_gpu)  # a start with empty caches
            length = f"{round(seconds, 1):g} s" if seconds < 60 else f"{round(seconds / 60, 1):g} min"
            log.line(f"about {length} of training follow, and validations; the run ends after {end:%H:%M}", file=False)
        if on_gpu or config.schedule.minutes:
            doing = ("compiling for {:.0f} s; 5 s is usual, 20 s with empty caches" if on_gpu else
                     "timing steps for {:.0f} s")
            with log.moving(lambda: doing.format(time.perf_counter() - ready)):
                warm_up(trainer)
        if on_gpu:
            require_codes(trainer)
    except RuntimeError as error:
        if automatic and is_out_of_memory(error):
            restart_with_more_micro_batches(argv, config, rt.device)
        raise
    if resumed:
        load(trainer, resumed)
        log.line(f"resumed: step {trainer.first_step}, {trainer.seconds_before:.3f} s inside the clock, from"
                 f" {quoted(published(system.resume))}")
    elif initial:
        load_weights(trainer, initial)
    if sampled := [plan.step for plan in trainer.plans[:-1] if plan.candidates]:
        log.line(f"train_loss: over sampled classes up to step {sampled[-1] + 1}, which makes it lower than a val_loss")
    log.line("startup, seconds: " + ", ".join(f"{phase} {value:.2f}" for phase, value in watch.items()))
    phases = {"setup": ready - watch.began, "warmup": time.perf_counter() - ready}
    loss, clock = trainer.run()
    trainer.update_graphs.drop()
    phases |= clock.paused_seconds
    if trainer.head.saturates():
        log.line(f"warning: more than .001 % of the head's weights are beyond ±{kernels.W_LIMIT:g}, the range of their"
                 " FP8 codes: training has read them as this limit; --fp8=false reads them as they are")
    allocated, reserved = torch.cuda.max_memory_allocated() // 2**20, torch.cuda.max_memory_reserved() // 2**20
    log.line(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")
    if system.sample_tokens and trainer.shared:
        log.line("warning: no sample: this rank has only a part of the table of n-grams; sample a checkpoint (--save)")
    elif system.sample_tokens and rt.rank == 0:
        try:
            text = sample(trainer.model, config, trainer.attn[-1])
            log.line("sample:\n" + "".join(takewhile(lambda _: not stop.number, text)))
        except Exception as error:  # such as out of memory: the results must still be logged
            log.line(f"warning: no sample: {one_line(error)}")
    spent, gpus = time.perf_counter() - watch.began, rt.world if rt.device.type == "cuda" else 0
    phases |= {"total": trainer.seconds_before + spent, "gpu": gpus * spent}  # gpu: of all ranks
    summary = {"final_val_loss": f"{loss:.4f}", "train_seconds": f"{clock.counted:.3f}"}
    summary |= {f"{phase}_seconds": f"{value:.3f}" for phase, value in phases.items()}
    summary |= {"steps": trainer.total, "tokens": trainer.tokens[-1], "peak_memory_mib": allocated}
    for key, value in summary.items():
        log.line(f"{key}: {value}")
    if rt.rank == 0 and facts:
        log.line(f"nats per token of the validation text: this model {loss:.4f}, a unigram of the training text"
                 f" {facts['unigram_loss']:.4f} (its entropy: {facts['unigram_entropy']:.4f})")
    if rt.rank == 0:  # last, since it reads the shards once more
        log.line(shards_line(shards, trainer.loader.state_dict()["shard"] + 1), console=False)
    if system.save or system.save_every:
        save(trainer, trainer.total, clock.counted)


# ---- Training --------------------------------------------------------------------------------------------------------

@torch.no_grad()
def summed_loss(forward, head, batch, attn) -> Tensor:
    """Sum of the next-token cross-entropies (nats) of a batch, 0-D fp32, with the exact head, not FP8."""
    out = forward(batch.tokens, batch.documents, batch.row_ids, attn._replace(pointer_window=len(batch.tokens)))
    return head(out.h, batch.targets, torch.ones(1, device=out.h.device), 1.0, exact=True, point=out.point)


def validate(summed_loss, data, attn, rt, parts=((None, 0),)) -> list[float]:
    """Mean losses over parts of the validation tokens (`validations`), by default over all. A rank may have no piece,
    or a repeated one, which does not count. summed_loss: function (batch, attn) -> sum of the losses, 0-D."""
    losses = [summed_loss(batch, attn) for batch in islice(data, parts[-1][0])][:data.pieces]
    totals = torch.stack([sum(losses[:few], torch.zeros((), device=rt.device)) for few, _ in parts])
    all_reduce(totals, rt)
    return [total / (tokens or data.config.data.val_tokens) for total, (_, tokens) in zip(totals.tolist(), parts)]


def add_gradients(loss, leaves):
    """As loss.backward(), but a few kernels add the gradients of all leaves; autograd would launch one for each. The
    leaves are all that the loss depends on, also the tables, to which the backward pass of `GPT.lookup` adds itself."""
    groups = defaultdict(list)  # lists of (.grad, new gradient)
    for leaf, new in zip(leaves, torch.autograd.grad(loss, leaves, allow_unused=True)):
        if new is not None:  # a list of several dtypes, or with unequal strides in a pair, takes a kernel for each pair
            groups[new.dtype, new.stride() == leaf.grad.stride()].append((leaf.grad, new))
    for pairs in groups.values():
        torch._foreach_add_(*map(list, zip(*pairs)))


class Trainer:
    """Model, optimizer, data and schedule of one run; `run` is the timed loop. sources {path: text}: the code, for
    checkpoints; resumed: the checkpoint to continue from; initial: the one whose weights a new run begins with;
    profiler: class Profiler; shards: `run_shards` at the start; stop: the Stop of `watch_signals`."""

    def __init__(self, config, rt, log, ops, watch, sources=None, resumed=None, initial=None, profiler=None,
                 shards=None, stop=None):
        self.stop, self.agreed = stop or Stop(), 0  # a signal to this rank; that of any rank, known a step later
        self.whole = None  # between two steps: (number of the next one, training time until now)
        self.shards = shards or run_shards(config)
        self.rt, self.log, self.watch, self.sources = rt, log, watch, sources
        self.first_step, self.seconds_before = (resumed["step"], resumed["seconds"]) if resumed else (0, 0.0)
        self.dtype = getattr(torch, config.system.dtype)
        self.micro_steps = config.system.micro_batches // rt.world
        # Not yet logged: (step, event after the copies, on the host the loss and the signal to any rank, seconds)
        self.losses = deque()
        self.hash_ids = None
        if config.model.bigram_normal:
            self.hash_ids = ((resumed or initial)["model"]["hash_ids"].numpy() if resumed or initial else
                             normalised_ids(text_codec(config.model.vocab_size)[1], config.model))
            log.line(f"hash_ids: sha256 {hashlib.sha256(self.hash_ids.tobytes()).hexdigest()}")
        self.validation = ValidationData(config, rt, self.hash_ids, self.shards["val"])
        self.set_length(config)
        watch.lap("data")
        self.model = GPT(config.model, ops, self.dtype, rt.device, rt.world)
        if config.model.bigram_normal:
            self.model.hash_ids.copy_(torch.from_numpy(self.hash_ids))
        self.init_weights()
        self.head = kernels.HeadLoss(self.model.lm_head, self.dtype, config.system.fp8, ops.cross_entropy,
                                     self.model.embed, ops.pointer, config.model.gate_id)
        has_graphs = config.system.cuda_graphs and rt.device.type == "cuda"
        self.graphs = MicroStepGraphs(self.micro_step, has_graphs)
        self.optimizer = NorMuonAndAdam(self.model, config, rt, ops)
        self.update_graphs = UpdateGraphs(self.update, has_graphs, self.graphs, update_numbers(config, self.plans[0]))
        longest = max(max(plan.micro_batch_tokens for plan in self.plans), config.data.val_batch_tokens)
        self.shared = [self.model.tables[label] for label in self.optimizer.of_rows if rt.world > 1]
        for table in self.shared:
            table.share(longest * len(config.model.ngrams), rt)
        self.model.codes |= {"lm_head": self.head} if config.system.fp8 else {}
        if config.system.fp8_mlp:  # after the optimizer, which may move the bank
            self.model.codes["mlp_bank"] = kernels.Fp8Mlps(self.model.mlp_bank, 1 / self.micro_steps)
        for bank in config.model.qk_banks if config.system.fp8_qkv else ():
            self.model.codes[bank[1]] = kernels.Fp8Projections(
                lambda bank=bank: self.model.projections(self.model.vo_bank.detach()[:, 0], [bank])[0][2],
                1 / self.micro_steps)
        self.attn = attention_settings(config, rt.device, self.dtype)
        self.profiler = profiler and profiler(self)
        self.synchronize()
        watch.lap("model")

    def set_length(self, config):
        """Plan the steps of a config, which may differ from the last one only in the number of steps."""
        self.config, self.total = config, stage_starts(config.schedule)[-1]
        self.plans = [make_plan(config, step) for step in range(self.total + 1)]
        batches = (config.schedule.stages[plan.stage].batch_tokens for plan in self.plans[:-1])
        self.tokens = list(accumulate(batches))  # tokens seen at the end of every step
        # A row takes a multiple of 16 bytes. For pointers without this alignment, Triton would compile more kernels.
        width = 4 * math.ceil(max(len(plan.mtp_weights) for plan in self.plans) / 4)
        weights = [(*plan.mtp_weights, *[0.0] * width)[:width] for plan in self.plans]
        self.mtp_table = torch.tensor(weights, device=self.rt.device)  # (steps + 1, width)
        numbers = [[*update_numbers(config, plan).values()] for plan in self.plans]
        self.number_table = torch.tensor(numbers, dtype=torch.float32, device=self.rt.device)  # (steps + 1, names)
        self.loader = self.new_loader(self.plans[:-1], config)

    def new_loader(self, plans, config):
        return Loader(config, self.rt, plans, lambda text: self.log.line("warning: " + text), self.hash_ids,
                      self.shards["train"])

    def init_weights(self):
        """`GPT.init_weights`, and the weights of rank 0 for all ranks, except for tables that the ranks share: they
        begin as constants."""
        self.model.init_weights(self.config.system.seed)
        for param in self.config.model.table if self.rt.world > 1 else ():
            if param.optim != "rows":
                dist.broadcast(self.model.get_parameter(param.label).detach(), 0)

    def quantise_weights(self, mlp_scales=None):
        """Make the FP8 codes of all weights anew. mlp_scales: the state_dict of the FP8 MLPs; None: as at step 0."""
        for codes in self.model.codes.values():
            codes.load_state_dict(mlp_scales)

    def summed_loss(self, batch, attn):
        """Summed loss of a validation batch."""
        self.fetch_rows(batch)
        return summed_loss(self.model, self.head, batch, attn)

    def log_losses(self, keep):
        """Log all steps but the last `keep`, which the GPU may still compute. NotFinite for such a training loss."""
        while len(self.losses) > keep:
            step, copied, loss, signal, seconds = self.losses.popleft()
            if copied is not None:
                wait_for(copied, self.rt.world)
            self.log.step(step + 1, self.total, f"train_loss:{loss.item():.4f}", seconds,
                          seconds * (self.tokens[-1] / self.tokens[step] - 1))
            require_finite(loss.item(), f"training loss of step {step + 1}")
            self.agreed = self.agreed or int(signal)

    def synchronize(self):
        if self.rt.device.type == "cuda":
            wait_for(torch.cuda.current_stream().record_event(), self.rt.world)
        getattr(torch, self.rt.device.type).synchronize()  # cuda, cpu or mps

    def sync_ranks(self):
        """Collect garbage, finish the work of the GPU and wait for all ranks. All ranks then go on together."""
        gc.collect()
        self.synchronize()
        if self.rt.world > 1:
            dist.barrier()

    def run(self) -> tuple[float, Clock]:
        """`timed_run`; an error between two steps leaves a checkpoint of this state, if the run saves any."""
        try:
            self.stop.waits = True
            return self.timed_run()
        except Exception as error:
            system, rt = self.config.system, self.rt
            if self.whole and (system.save or system.save_every) and not isinstance(error, NotFinite):
                with suppress(Exception):  # the first error is the one to tell
                    if rt.world == 1 or all_come(rt, f"error before step {self.whole[0]}"):
                        self.synchronize()
                        require_finite(sum(loss.item() for _, _, loss, *_ in self.losses), "sum of the last losses")
                        save(self, *self.whole)
                        self.log_losses(keep=0)  # after the checkpoint, since the log may be what failed
            raise

    def timed_run(self) -> tuple[float, Clock]:
        """-> (final validation loss, clock). Raises Stopped at the end of a step, for a signal."""
        system = self.config.system
        by_kernels = system.profiled[:max(1, min(2, len(system.profiled) - 1))]  # two at most; graphs replay the others
        val_steps, parts = system.val_steps(self.total), validations(self.config, self.rt.world)
        gc.disable()  # sync_ranks collects garbage, while the clock is paused
        self.loader.ready.exception()  # waits for the first batch; next_batch raises its error
        self.sync_ranks()
        clock = Clock(self.seconds_before)  # the first batch is ready and, on a GPU, all graphs
        for step, plan in enumerate(self.plans[self.first_step:], self.first_step):
            if step in (system.profiled.start, system.profiled.stop):
                self.log_losses(keep=0)
                self.synchronize()  # steps that the GPU has still to do belong to the training time
            if step == system.profiled.stop:
                with clock.paused("profile"):
                    self.profiler.stop()
            last = step == self.total
            stops = not last and (self.agreed if self.rt.world > 1 else self.stop.number)
            validates = last or not stops and step in val_steps and step not in system.profiled[1:]
            saves = self.first_step < step < self.total and (
                system.save or system.save_every if stops else system.save_every and step % system.save_every == 0)
            if last and self.config.optim.average_blend:
                self.optimizer.blend(plan)
            if validates or saves or stops:
                self.log_losses(keep=0)
                self.synchronize()
                with clock.paused("validation") as seconds:
                    if validates:
                        attn = self.attn[-1 if last else plan.stage]
                        losses = validate(self.summed_loss, self.validation, attn, self.rt, parts[:1 + last])
                        self.log.validation(step, self.total, losses, parts, seconds)
                    if saves:
                        save(self, step, seconds)
                    if stops:
                        self.log.ended(system, stops, f" after step {step}/{self.total}")
                    self.sync_ranks()
                if stops:
                    raise Stopped(stops)
                if last:
                    break
            if step == system.profiled.start:
                with clock.paused("profile"):
                    self.profiler.start()
            step_loss = self.step(self.loader, plan, self.micro_steps, eager=step in by_kernels)
            self.whole = step + 1, clock.seconds()
            signal = 0
            if self.rt.world > 1:  # tells all ranks of a signal to any of them: they end after the same step
                signal = torch.full((), self.stop.number, device=self.rt.device)  # without a wait for the GPU
                all_reduce(signal, self.rt, dist.ReduceOp.MAX)
                signal = signal.to("cpu", non_blocking=True)
            step_loss = step_loss.to("cpu", non_blocking=self.rt.device.type == "cuda")
            copied = torch.cuda.current_stream().record_event() if self.rt.device.type == "cuda" else None
            self.log_losses(keep=1)  # the host stays at most two steps ahead
            self.losses.append((step, copied, step_loss, signal, clock.seconds()))
            if not copied:
                self.log_losses(keep=0)
        return losses[-1], clock

    def step(self, loader, plan, micro_steps, eager=False):
        """All micro-batches of a step, then the optimizer. Returns the mean loss of the next tokens, 0-D: before the
        update, of this rank, over the classes of the step. eager: launch the kernels of the first micro-batch and of
        the update one by one."""
        attn, mtp_weights = self.attn[plan.stage], self.mtp_table[plan.step, :len(plan.mtp_weights)]
        self.head.next_loss.zero_()
        with trace_range(f"step {plan.step}"):
            for part in range(micro_steps):
                with trace_range("data"):
                    batch = loader.next_batch()
                self.whole = None
                self.fetch_rows(batch)
                if not plan.tables or part + 1 < micro_steps:  # else the rows change before the next micro-batch
                    self.fetch_ahead(loader)
                with trace_range("micro-step"):
                    self.graphs(batch, mtp_weights, attn, plan.stage, eager and part == 0)
                for table in self.shared:
                    table.send_gradients(batch.exchange)
            numbers = self.numbers(plan)
            self.optimizer.step_rows(plan, numbers)
            if plan.tables:
                self.fetch_ahead(loader)
            with trace_range("update"):
                self.update_graphs(plan, numbers, eager)
        return self.head.next_loss / plan.micro_batch_tokens

    def fetch_rows(self, batch):
        """Bring the rows of n-grams that this rank reads in a micro-batch. All ranks must call this."""
        for table in self.shared if batch.exchange else ():
            table.fetch(batch.exchange)

    def fetch_ahead(self, loader):
        """Begin to bring the rows of the next micro-batch. All ranks must call this."""
        for table in self.shared:
            if exchange := loader.next_exchange():
                table.start(exchange)

    def numbers(self, plan):
        """`update_numbers` of a step, on a GPU at the addresses where graphs read them."""
        return self.update_graphs.set_numbers(self.number_table[plan.step]) or update_numbers(self.config, plan)

    def micro_step(self, batch: Batch, mtp_weights, attn):
        """Forward pass, loss and backward pass of one micro-batch; the gradients add up in `.grad`. Returns the loss,
        0-D: the sum over the tokens / number of micro-steps."""
        with trace_range("forward"):
            out = self.model(batch.tokens, batch.documents, batch.row_ids, attn, batch.pieces)
        with trace_range("loss"):
            loss = self.head(out.h, batch.targets, mtp_weights, 1 / self.micro_steps, candidates=batch.candidates,
                             point=out.point, codes=out.codes)
        with trace_range("backward"), beside([self.model.stream]):  # the lookup's stream adds to gradients
            add_gradients(loss, [*self.model.parameters(), *(table.local for table in self.shared)])
        return loss.detach()

    def update(self, plan, numbers):
        """`NorMuonAndAdam.step`, and the FP8 codes of the new weights."""
        self.optimizer.step(plan, numbers)
        streams = {label: self.optimizer.sharded[label].stream for label in self.model.codes}
        with beside(streams.values()):
            for label, codes in self.model.codes.items():
                if plan.adam or label != "lm_head":
                    with trace_range(f"update codes of {label}"), on(streams[label]):
                        codes.refresh(lambda maxima: all_reduce(maxima, self.rt, dist.ReduceOp.MAX))


if __name__ == "__main__":
    run_program(main)
