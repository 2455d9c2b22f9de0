"""Evaluate a checkpoint: sample text, validation loss, bits per byte, HellaSwag; export weights for other programs.

    python train_gpt.py --sample=CHECKPOINT --prompt="..." [--tokens=200 --temperature=0.8 --top_k=0 --seed=1337]
    python records/evaluate.py CHECKPOINT [--hellaswag[=FILE]] [--export=FILE.safetensors] [--validate=false]

Temperature 0 takes the likeliest token; top_k limits the choice to the k likeliest tokens (0: no limit). Both commands
also take the trainer's knobs: --device=cpu, --val_files=..., --val_tokens=..., --val_batch_tokens=... (less memory).
All other settings come from the checkpoint. Both commands use a GPU if there is one.
Contents: the model of a checkpoint; text; validation and HellaSwag; export; the two commands.
"""

import codecs
import dataclasses
import hashlib
import json
import math
import re
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
import train_gpt as T
from data import loader
from data.checkpoint import check_weights, load_checkpoint
from data.files import UserError, atomic_write, data_root
from data.knobs import flatten, parse_value, render, unknown_key
from data.machine import Runtime, choose_kernels, find_device
from data.tokenizer import text_codec

# ---- The model of a checkpoint ---------------------------------------------------------------------------------------


def load_model(path, knobs):
    """(config, model) of a checkpoint, on a GPU if there is one.

    knobs: {name: text}, overrides of the checkpoint's settings. Raises UserError for a bad file or bad knobs.
    """
    state = load_checkpoint(path)
    config = T.config_from_dict(T.RECORD74, state["config"])
    device = knobs.get("device") or ("cuda" if torch.cuda.device_count() else "cpu")
    dtype = knobs.get("dtype") or ("float32" if device == "cpu" else config.system.dtype)
    config = T.override(config, {"device": device, "dtype": dtype, "kernels": "torch" if dtype == "float32" else "auto",
                                 "resume": "", "profile": ""} | knobs)  # nothing is trained
    T.check_config(config)
    config, ops, _ = choose_kernels(config, device := find_device(config))
    model = T.GPT(config.model, ops, getattr(torch, config.system.dtype), device)
    check_weights(state, model)
    model.load_state_dict(state["model"])
    return config, model


def hash_ids(model):
    """The table `hash_ids` of the model on the host, or None if the model has none."""
    return model.hash_ids.cpu().numpy() if model.config.bigram_normal else None


def final_attention(model, config, tokens):
    """The AttentionSettings of the final validation, for micro-batches of up to `tokens` tokens."""
    data = dataclasses.replace(config.data, val_batch_tokens=tokens)
    return T.attention_settings(dataclasses.replace(config, data=data), model.embed.device, model.dtype)[-1]


def forward(model, config, documents, attention):
    """(Output, the next tokens (N,)) of documents (lists of token ids), packed into one micro-batch.

    A document of separators pads the micro-batch to a multiple of 128, as the kernels require. Padding changes nothing,
    since no token sees later tokens.
    """
    borders = np.cumsum([len(document) for document in documents])
    N = -(-borders[-1] // 128) * 128
    tokens = np.full(N + 1, config.model.bos_id, np.uint16)
    tokens[:borders[-1]] = np.concatenate(documents)
    cu = loader.cu_seqlens(borders, N, 128 * (len(borders) // 128 + 1))
    batch = loader.make_batch(tokens, cu, config, model.embed.device, hash_ids=hash_ids(model))
    output = model(batch.tokens, batch.cu_seqlens, batch.row_ids, attention._replace(pointer_window=int(N)))
    return output, batch.targets


def head(model):
    """The unquantised head."""
    return T.kernels.HeadLoss(model.lm_head, model.dtype, False, model.ops.cross_entropy, pointer=model.ops.pointer,
                              gate=model.config.gate_id)


def log_probabilities(model, output, row):
    """Of every class as the token after token `row`, (padded vocabulary,) fp32."""
    h, point = output
    z = T.kernels.softcap(h[row] @ model.lm_head.to(h.dtype)).log_softmax(0)
    if point is None:
        return z
    first, attn = T.kernels.pointer_attention(point.q, point.k, point.sink, point.start, point.window, point.scale,
                                            slice(row, row + 1))
    sink_mass, p = attn[0, 0], z.exp()
    gate = p[model.config.gate_id].clone()
    p[model.config.gate_id] = 0.0
    mass = torch.zeros_like(p).index_add_(0, point.tokens[first:row + 1].long(), attn[0, 1:].to(p.dtype))
    return (p * (1 + gate * sink_mass / (1 - gate).clamp(min=T.kernels.LEAST_REST)) + gate * mass).log()


# ---- Text ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(model, config, ids, count, temperature, top_k):
    """Yields `count` token ids that follow `ids`.

    Each token takes a forward pass over a separator and the most recent tokens, at most as many as the longest training
    document. It never draws the separator, so the text is one document.
    """
    ids, separator, recent = list(ids), config.model.bos_id, config.schedule.stages[-1].max_doc_len - 1
    attention = final_attention(model, config, recent + 128)
    generator = torch.Generator().manual_seed(config.system.seed)
    for _ in range(count):
        document = [separator, *ids[max(0, len(ids) - recent):]]
        output, _ = forward(model, config, [document], attention)
        z = log_probabilities(model, output, len(document) - 1)[:separator].cpu()
        if top_k:
            z[z < z.topk(min(top_k, separator)).values[-1]] = -torch.inf
        if temperature:
            ids.append(int(torch.multinomial(torch.softmax(z / temperature, 0), 1, generator=generator)))
        else:
            ids.append(int(z.argmax()))
        yield ids[-1]


def sample(model, config, temperature=0.8, top_k=0):
    """Yields --sample_prompt, then --sample_tokens generated tokens as whole characters. --seed is the random seed."""
    encode, decode = text_codec(config.model.vocab_size)
    prompt, count = config.system.sample_prompt, config.system.sample_tokens
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield prompt
    for id in generate(model, config, encode(prompt), count, temperature, top_k):
        yield decoder.decode(decode(id))
    yield decoder.decode(b"", final=True)


# ---- Validation and HellaSwag ----------------------------------------------------------------------------------------


def bits_per_byte(config, loss, tokens):
    """Converts a mean loss over `tokens`, in nats per token, to bits per byte of text.

    The losses of separators count, but separators have no bytes.
    """
    decode = text_codec(config.model.vocab_size)[1]
    lengths = np.array([*(len(decode(id)) for id in range(config.model.bos_id)), 0])
    return loss * len(tokens) / math.log(2) / lengths[tokens].sum()


def validate(model, config):
    """Prints the loss of the final validation."""
    rt = Runtime(0, 1, model.embed.device)
    data = loader.ValidationData(config, rt, hash_ids(model))
    attention = T.attention_settings(config, rt.device, model.dtype)[-1]
    loss = T.validate(model, head(model), data, attention, rt)
    print(f"val_loss: {loss:.4f}", flush=True)
    try:
        print(f"val_bits_per_byte: {bits_per_byte(config, loss, data.tokens[1:]):.4f}", flush=True)
    except UserError as error:
        print(f"no bits per byte: {error}", flush=True)


HELLASWAG_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
HELLASWAG_SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"


def fetch_hellaswag() -> Path:
    """Path of the authors' validation set in data/hellaswag (of DATA_PATH), downloaded once. Raises UserError."""
    import urllib.request  # slow to import, and a training run imports this file, too
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
    try:
        text = Path(path).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    examples = []
    lines = text.split("\n") if text else []  # splitlines would also split at U+2028, which JSON strings may contain
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
def ending_losses(model, config, pairs):
    """Yields the losses of every ending given its context, (k,) fp32, in nats per token.

    pairs: (context ids, k ending ids), which it packs into micro-batches of at most --val_batch_tokens. Raises
    UserError when a pair is longer.
    """
    separator, limit = config.model.bos_id, config.data.val_batch_tokens
    micro_batches, room = [], 0
    for pair in pairs:
        length = 3 + sum(map(len, pair))
        if length > limit:
            raise UserError(f"an example has {length} tokens: --val_batch_tokens={limit} must be as many at least")
        if length > room:
            micro_batches.append([])
            room = limit
        micro_batches[-1].append(pair)
        room -= length
    attention = final_attention(model, config, limit + 128)
    exact, one = head(model), torch.ones(1, device=model.embed.device)
    for packed in micro_batches:
        # Smear, bigram hash and key offset look one token back, also into another document (K1). After two documents of
        # one separator each, the previous token is always the same. So a loss does not depend on the other pairs.
        documents = [part for pair in packed for part in ([separator], [separator], [separator, *pair[0], *pair[1]])]
        output, targets = forward(model, config, documents, attention)
        ends = accumulate(3 + sum(map(len, pair)) for pair in packed)
        before = np.concatenate([np.arange(end - len(ending), end) - 1 for end, (_, ending) in zip(ends, packed)])
        losses = exact.losses(output.h, targets, one, output.point, torch.from_numpy(before).to(one.device))
        yield from losses.cpu().split([len(ending) for _, ending in packed])


def hellaswag(model, config, path):
    """Prints the accuracy: how often the right ending has the lowest loss, as a sum and as a mean over its tokens."""
    encode, _ = text_codec(config.model.vocab_size)
    examples = read_hellaswag(path)
    pairs = [(encode(context), encode(" " + ending)) for context, endings, _ in examples for ending in endings]
    scores = []  # (sum, mean) of the losses of every ending
    for losses in ending_losses(model, config, pairs):
        scores.append((losses.sum().item(), losses.mean().item()))
        if len(scores) % 400 == 0 or len(scores) == len(pairs):
            print(f"hellaswag: {len(scores) // 4} of {len(examples)} examples", file=sys.stderr, flush=True)
    right = np.array([label for _, _, label in examples])
    print(f"hellaswag_examples: {len(examples)}")
    for name, score in zip(("acc", "acc_norm"), np.array(scores).reshape(-1, 4, 2).transpose(2, 0, 1)):
        accuracy = (score.argmin(1) == right).mean()
        error = (accuracy * (1 - accuracy) / len(right)) ** 0.5
        print(f"hellaswag_{name}: {accuracy:.4f}\nhellaswag_{name}_standard_error: {error:.4f}", flush=True)


# ---- Export ----------------------------------------------------------------------------------------------------------


def export(model, config, path):
    """Writes the weights in their own dtypes, and the config as text, in the format of safetensors. The signs of
    bigrams, which are the same for all models of one width, are not among them (`GPT.__init__`).

    The format, little-endian: length of the header (8 bytes); the header (JSON, padded with spaces to a multiple of 8);
    the tensors.
    """
    names, weights = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32"}, model.state_dict()
    ends = [0, *accumulate(x.nbytes for x in weights.values())]
    header = {label: {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
              for (label, x), start, end in zip(weights.items(), ends, ends[1:])}
    header["__metadata__"] = {key: render(value) for key, value in flatten(config).items()}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in weights.values():
            file.write(x.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    print(f"exported: {path}", flush=True)


# ---- The two commands ------------------------------------------------------------------------------------------------


def arguments(argv, options, aliases):
    """({option: value}, {knob: text}) of --key=value arguments.

    options: {option: default value}; aliases: {alias: knob of the trainer}. Raises UserError for an unknown key.
    """
    values, knobs, known = dict(options), {}, flatten(T.Config())
    for key, text in T.read_arguments(argv).items():
        if key in options:
            values[key] = parse_value(key, text, type(options[key]), options[key])
        elif key in known or key in aliases or re.match(r"(stage|layer)\d", key):
            knobs[aliases.get(key, key)] = text
        else:
            raise unknown_key(key, [*options, *aliases, *known])
    return values, knobs


def sample_command(argv) -> int:
    """--sample: prints text token by token. Returns the exit status, raises UserError."""
    options, knobs = arguments(argv, {"sample": "", "temperature": 0.8, "top_k": 0},
                               {"prompt": "sample_prompt", "tokens": "sample_tokens"})
    if not 0 <= options["temperature"] < math.inf or options["top_k"] < 0:
        raise UserError(f"--temperature={options['temperature']} --top_k={options['top_k']}: neither may be negative")
    config, model = load_model(options["sample"], {"sample_tokens": "200"} | knobs)
    try:
        for piece in sample(model, config, options["temperature"], options["top_k"]):
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    return 0


def main(argv) -> int:
    """Evaluate as `argv` says; returns the exit status."""
    if not argv or "--help" in argv:
        print(__doc__)
        return int(not argv)
    try:
        path, *argv = argv
        for i, (arg, following) in enumerate(zip(argv, [*argv[1:], "--"])):
            if arg == "--hellaswag" and following.startswith("--"):
                argv[i] = f"--hellaswag={fetch_hellaswag()}"
        options, knobs = arguments(argv, {"hellaswag": "", "export": "", "validate": True}, {})
        config, model = load_model(path, knobs)
        if options["export"]:
            export(model, config, options["export"])
        if options["validate"]:
            validate(model, config)
        if options["hellaswag"]:
            hellaswag(model, config, options["hellaswag"])
        return 0
    except UserError as error:
        message, status = str(error), 1
    except torch.OutOfMemoryError:
        message, status = "out of GPU memory: lower --val_batch_tokens", 1
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have every character
    sys.exit(main(sys.argv[1:]))
