"""Evaluate a checkpoint: validation loss, bits per byte, HellaSwag. Export its weights for other programs, beside a
program that reads them.

    python records/evaluate.py CHECKPOINT [--hellaswag[=FILE]] [--export=FILE.safetensors] [--validate=false]

The command also takes the trainer's knobs: --device=cpu, --val_files=..., --val_tokens=..., --val_batch_tokens=...
(less memory). All other settings come from the checkpoint. It uses a GPU if there is one.
"""

import functools
import hashlib
import json
import math
import sys
import urllib.request
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.run.launch import choose_waiting
from data.run.program import UserError, atomic_write, run_program, user_error, user_path

if __name__ == "__main__":  # before torch is imported
    choose_waiting(sys.argv[1:])

import numpy as np
import torch

import triton_kernels as kernels
from data import NGRAM_FACTORS, SIGN_FACTORS
from data.loader import ValidationData
from data.run.config import flatten, read_options, render
from data.run.machine import Runtime
from data.run.sample import forward, hash_ids
from data.shards import Shards, data_root
from data.tokenizer import text_codec
from train_gpt import NARROW_SCALE, RECORD74, load_model, rotary_states, summed_loss
from train_gpt import validate as mean_losses


def head(model):
    """The unquantised head."""
    return kernels.HeadLoss(model.lm_head, model.dtype, False, model.ops.cross_entropy, pointer=model.ops.pointer,
                            gate=model.config.gate_id)


# ---- Validation and HellaSwag ----------------------------------------------------------------------------------------

def bits_per_byte(config, loss, tokens):
    """Converts a mean loss over `tokens`, in nats per token, to bits per byte of text.

    The losses of separators count, but separators have no bytes.
    """
    decode = text_codec(config.model.vocab_size)[1]
    lengths = np.array([*(len(decode(id)) for id in range(config.model.bos_id)), 0])
    return loss * len(tokens) / math.log(2) / lengths[tokens].sum()


def validate(model, config, attention):
    """Prints the loss of the final validation. attention: its AttentionSettings."""
    rt = Runtime(0, 1, model.embed.device)
    shards = Shards(config.data.val_files)
    for warning in shards.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    data = ValidationData(config, rt, hash_ids(model), shards)
    loss, = mean_losses(functools.partial(summed_loss, model, head(model)), data, attention, rt)
    print(f"val_loss: {loss:.4f}", flush=True)
    try:
        print(f"val_bits_per_byte: {bits_per_byte(config, loss, data.tokens[1:]):.4f}", flush=True)
    except UserError as error:
        print(f"no bits per byte: {error}", flush=True)


HELLASWAG_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
HELLASWAG_SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"


def fetch_hellaswag() -> Path:
    """Path of the authors' validation set in data/hellaswag (of DATA_PATH), downloaded once. Raises UserError."""
    path = data_root() / "data" / "hellaswag" / "hellaswag_val.jsonl"
    if not path.exists():
        try:
            with urllib.request.urlopen(HELLASWAG_URL, timeout=60) as answer:
                content = answer.read()
        except Exception as error:  # urllib raises many kinds of errors
            raise UserError(f"cannot fetch HellaSwag from {HELLASWAG_URL} ({error}); --hellaswag=FILE takes"
                            " a copy") from None
        if hashlib.sha256(content).hexdigest() != HELLASWAG_SHA256:
            raise UserError(f"what came from {HELLASWAG_URL} is not the published file; --hellaswag=FILE takes a copy")
        with atomic_write(path) as file:
            file.write(content)
    return path


def read_hellaswag(path) -> list[tuple[str, list[str], int]]:
    """(context, four endings, index of the right ending) of every line of JSON. Raises UserError for another format."""
    with user_error(f"cannot read {path}", UnicodeDecodeError), open(user_path(path), encoding="utf-8") as file:
        lines, examples = [*file], []
    for number, line in enumerate(lines, 1):
        try:
            example = json.loads(line)
            context, endings, label = example["ctx"], example["endings"], int(example["label"])
            if len(endings) != 4 or not all(isinstance(x, str) for x in (context, *endings)) or not 0 <= label < 4:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: not an example with ctx, four endings and label") from None
        examples.append((context, endings, label))
    if not examples:
        raise UserError(f"{path}: no examples")
    return examples


@torch.no_grad()
def ending_losses(model, config, attention, pairs):
    """Yields the losses of every ending given its context, (k,) fp32, in nats per token.

    attention: AttentionSettings of the final validation. pairs: (context ids, k ending ids), which it packs into
    micro-batches of at most --val_batch_tokens. Raises UserError when a pair is longer.
    """
    separator, limit = config.model.bos_id, config.data.val_batch_tokens
    # A token reads from the documents before its own (K1): its n-gram reads n - 1 tokens, and its key also reads the
    # n-gram of the token before, so n tokens. If these tokens are n documents of one separator each, the losses of a
    # pair do not depend on the other pairs.
    before = max(order for order, _ in config.model.ngrams) * [[separator]]
    extra = len(before) + 1  # separators of a pair
    micro_batches, room = [], 0
    for pair in pairs:
        length = extra + sum(map(len, pair))
        if length > limit:
            raise UserError(f"an example has {length} tokens: --val_batch_tokens={limit} must be as many at least")
        if length > room:
            micro_batches.append([])
            room = limit
        micro_batches[-1].append(pair)
        room -= length
    exact, one = head(model), torch.ones(1, device=model.embed.device)
    for packed in micro_batches:
        documents = [part for pair in packed for part in (*before, [separator, *pair[0], *pair[1]])]
        output, targets = forward(model, config, documents, attention)
        ends = accumulate(extra + sum(map(len, pair)) for pair in packed)
        rows = np.concatenate([np.arange(end - len(ending), end) - 1 for end, (_, ending) in zip(ends, packed)])
        losses = exact.losses(output.h, targets, one, output.point, torch.from_numpy(rows).to(one.device))
        yield from losses.cpu().split([len(ending) for _, ending in packed])


def hellaswag(model, config, attention, path):
    """Prints the accuracy: how often the right ending has the lowest loss, as a sum and as a mean over its tokens."""
    encode, _ = text_codec(config.model.vocab_size)
    examples = read_hellaswag(path)
    pairs = [(encode(context), encode(" " + ending)) for context, endings, _ in examples for ending in endings]
    scores = []  # (sum, mean) of the losses of every ending
    for losses in ending_losses(model, config, attention, pairs):
        scores.append((losses.sum().item(), losses.mean().item()))
        if len(scores) % 400 == 0 or len(scores) == len(pairs):
            print(f"hellaswag: {len(scores) // 4} of {len(examples)} examples", file=sys.stderr, flush=True)
    right = [label for _, _, label in examples]
    print(f"hellaswag_examples: {len(examples)}")
    for name, score in zip(("acc", "acc_norm"), np.array(scores).T):
        accuracy = (score.reshape(-1, 4).argmin(1) == right).mean()
        error = (accuracy * (1 - accuracy) / len(right)) ** 0.5
        print(f"hellaswag_{name}: {accuracy:.4f}\nhellaswag_{name}_standard_error: {error:.4f}", flush=True)


# ---- Export ----------------------------------------------------------------------------------------------------------

READER = Path(__file__).with_name("plain_gpt.py")


def wiring(config, attention) -> dict:
    """What the reader must know beside the weights, for JSON. attention: AttentionSettings of the final validation."""
    model, layers, networks = config.model, [], config.model.dynamic_sizes
    for i, layer in enumerate(model.layers):
        windows = [s.short_window if layer.narrow else s.long_window for s in config.schedule.stages]
        frequencies, scale = rotary_states(model.head_dim, windows, NARROW_SCALE if layer.narrow else 0.1)[-1]
        layers.append(vars(layer) | dict(
            window=attention.long_window if layer.long else attention.short_window, scale=scale,
            frequencies=frequencies.tolist(), dynamic=[(*key, size) for key, size in networks.get(i, {}).items()]))
    return dict(layers=layers, num_heads=model.num_heads, separator=model.bos_id, backout_layer=model.backout_layer,
                pointer_window=attention.pointer_window, ngrams=model.ngrams, ngram_factors=NGRAM_FACTORS,
                sign_factors=SIGN_FACTORS,
                tokenizer={257: "bytes", 50257: "gpt2"}.get(model.vocab_size, "unknown"))


def unreadable(model) -> str:
    """What of this model the reader does not know."""
    source = READER.read_text(encoding="utf-8")
    unknown = [f"the parameter {label}" for label in model.state_dict() if f'"{label}"' not in source]
    return ", ".join(unknown + ["two lanes"] * bool(model.config.layers_with("two_lanes")))


def export(model, config, attention, path):
    """Writes the weights in their own dtypes, and the config as text, in the format of safetensors; and copies the
    reader, plain_gpt.py, beside them. For the reader the file also has `wiring`, as JSON, and the signs of n-grams.

    The format, little-endian: length of the header (8 bytes); the header (JSON, padded with spaces to a multiple of 8);
    the tensors.
    """
    path, unknown, weights = user_path(path), unreadable(model), model.state_dict()
    metadata = {key: render(value) for key, value in flatten(config).items()}
    if not unknown:
        metadata["wiring"] = json.dumps(wiring(config, attention))
        weights |= {"signs": model.signs.to(torch.int8)} if config.model.bigram_signs else {}
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32", torch.int8: "I8"}
    ends = [0, *accumulate(x.nbytes for x in weights.values())]
    header = {label: {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
              for (label, x), start, end in zip(weights.items(), ends, ends[1:])}
    text = json.dumps(header | {"__metadata__": metadata}).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in weights.values():
            file.write(x.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    print(f"exported: {path}", flush=True)
    reader, text = path.with_name(READER.name), READER.read_bytes()
    if unknown:
        print(f"no reader: {READER.name} does not know {unknown}", flush=True)
    elif reader.exists() and reader.read_bytes() != text:
        print(f"reader: {reader} is another one and stays; {READER} reads this export", flush=True)
    else:
        with atomic_write(reader) as file:
            file.write(text)
        print(f"reader: {reader}", flush=True)


# ---- The command -----------------------------------------------------------------------------------------------------

def main(argv) -> int:
    """Evaluate as `argv` says; returns the exit status."""
    if not argv or "--help" in argv:
        print(__doc__)
        return int(not argv)
    path, *argv = argv
    if not path:
        raise UserError("the first argument, the checkpoint, is empty; --save=true makes one")
    try:
        for i, (arg, following) in enumerate(zip(argv, [*argv[1:], "--"])):
            if arg == "--hellaswag" and following.startswith("--"):
                argv[i] = f"--hellaswag={fetch_hellaswag()}"
        options, knobs = read_options(argv, {"hellaswag": "", "export": "", "validate": True}, {}, flatten(RECORD74))
        config, model, attention = load_model(path, knobs)
        if options["export"]:
            export(model, config, attention, options["export"])
        if options["validate"]:
            validate(model, config, attention)
        if options["hellaswag"]:
            hellaswag(model, config, attention, options["hellaswag"])
    except torch.OutOfMemoryError:
        raise UserError("out of GPU memory: lower --val_batch_tokens") from None
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        return 130
    return 0


if __name__ == "__main__":
    run_program(main)
