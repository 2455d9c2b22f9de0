"""What a checkpoint has learned: text, validation loss and bits per byte, HellaSwag; its weights for other programs.

    python train_gpt.py --sample=CHECKPOINT --prompt="..." [--tokens=200 --temperature=0.8 --top_k=0 --seed=1337]
    python records/evaluate.py CHECKPOINT [--hellaswag[=FILE]] [--export=FILE.safetensors] [--validate=false]

Temperature 0 takes the likeliest token; top_k: one of so many (0: any). Both take the trainer's knobs, too: --device=cpu,
--val_files=..., --val_tokens=..., --val_batch_tokens=... (less memory). All else is as in the run, on a GPU if there is one.
Contents: the model of a checkpoint; text; validation and HellaSwag; export; the two commands.
"""

import codecs
import dataclasses
import difflib
import hashlib
import json
import math
import re
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
import train_gpt as T
from data import loader
from data.checkpoint import load_checkpoint
from data.files import UserError, atomic_write, data_root
from data.knobs import parse_value

# ---- The model of a checkpoint ---------------------------------------------------------------------------------------


def load_model(path, knobs):
    """(config, model, operations) of a checkpoint, on a GPU if there is one. knobs {name: text} go before those of its run."""
    state = load_checkpoint(path)
    config = T.config_from_dict(T.RECORD74, state["config"])
    device = knobs.get("device") or ("cuda" if torch.cuda.device_count() else "cpu")
    dtype = knobs.get("dtype") or ("float32" if device == "cpu" else config.system.dtype)
    # Nothing is trained here.
    config = T.override(config, {"device": device, "dtype": dtype, "kernels": "torch" if dtype == "float32" else "auto",
                                 "resume": "", "profile": ""} | knobs)
    T.check_config(config)
    T.check_weights(state, config.model)
    config, ops, _ = T.choose_kernels(config, device := T.find_device(config))
    model = T.GPT(config.model, ops, getattr(torch, config.system.dtype), device)
    model.load_state_dict(state["model"])
    return config, model, ops


def final_attention(model, config, tokens):
    """The view of the final validation, for rows of up to `tokens`."""
    data = dataclasses.replace(config.data, val_batch_tokens=tokens)
    return T.attention_settings(dataclasses.replace(config, data=data), model.embed.device, model.dtype)[-1]


def forward(model, config, documents, view):
    """Normed final stream (N, D) of documents, lists of token ids, side by side in one row. Separators, a document of their own,
    fill it up to a multiple of 128: what is behind a token does not change it, and the kernels are made for such rows."""
    borders = np.cumsum([len(document) for document in documents])
    N = -(-borders[-1] // 128) * 128
    row = np.full(N + 1, config.model.bos_id, np.uint16)
    row[:borders[-1]] = np.concatenate(documents)
    cu = loader.cu_seqlens(borders, N, 128 * (len(borders) // 128 + 1))
    batch = loader.make_batch(row, cu, config, model.embed.device)
    return model(batch.tokens, batch.cu_seqlens, batch.row_ids, view._replace(max_doc_len=int(N)))


def logits(model, h):
    """(n, D) -> (n, padded vocabulary) fp32."""
    return T.kernels.softcap(h @ model.lm_head.to(h.dtype))


# ---- Text ------------------------------------------------------------------------------------------------------------


def text_codec(vocab_size):
    """(encode: text -> token ids, octets: id -> its bytes): bytes are tokens, or the GPT-2 BPE if tiktoken can have its files."""
    if vocab_size == 257:
        return lambda text: list(text.encode(errors="replace")), lambda id: bytes([id])
    if vocab_size != 50257:
        raise UserError(f"no tokenizer is known for a vocabulary of {vocab_size}; 257 are bytes, 50257 the GPT-2 BPE")
    try:
        import tiktoken
        bpe = tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken passes on whatever its download raised
        raise UserError(f"no GPT-2 tokenizer ({type(error).__name__}): tiktoken fetches it once, online") from None
    return bpe.encode_ordinary, bpe.decode_single_token_bytes


@torch.no_grad()
def generate(model, config, ids, count, temperature, top_k):
    """Yields `count` token ids that follow `ids`. Each takes a forward pass over the separator and the recent tokens, as many as
    the longest document in training had. The separator is never drawn: one document."""
    ids, separator, recent = list(ids), config.model.bos_id, config.schedule.stages[-1].max_doc_len - 1
    view = final_attention(model, config, recent + 128)
    generator = torch.Generator().manual_seed(config.system.seed)
    for _ in range(count):
        document = [separator, *ids[max(0, len(ids) - recent):]]
        last = forward(model, config, [document], view)[len(document) - 1:len(document)]
        z = logits(model, last)[0, :separator].cpu()
        if top_k:
            z[z < z.topk(min(top_k, separator)).values[-1]] = -torch.inf
        ids.append(int(torch.multinomial(torch.softmax(z / temperature, 0), 1, generator=generator) if temperature else z.argmax()))
        yield ids[-1]


def sample(model, config, temperature=0.8, top_k=0):
    """Yields --sample_prompt, then --sample_tokens tokens that follow, in pieces of whole characters; --seed decides which."""
    encode, octets = text_codec(config.model.vocab_size)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield config.system.sample_prompt
    for id in generate(model, config, encode(config.system.sample_prompt), config.system.sample_tokens, temperature, top_k):
        yield decoder.decode(octets(id))
    yield decoder.decode(b"", final=True)


# ---- Validation and HellaSwag ----------------------------------------------------------------------------------------


def bits_per_byte(config, loss, tokens):
    """A mean loss over `tokens` (nats per token) in bits per byte of their text. Separators are no text but had to be predicted."""
    octets = text_codec(config.model.vocab_size)[1]
    lengths = np.array([*(len(octets(id)) for id in range(config.model.bos_id)), 0])
    return loss * len(tokens) / math.log(2) / lengths[tokens].sum()


def validate(model, config, ops):
    """Prints the loss of the final validation."""
    rt = T.Runtime(0, 1, model.embed.device)
    data, view = loader.ValidationData(config, rt), T.attention_settings(config, rt.device, model.dtype)[-1]
    loss = T.validate(model, T.kernels.HeadLoss(model.lm_head, model.dtype, False, ops.cross_entropy), data, view, rt)
    print(f"val_loss: {loss:.4f}", flush=True)
    try:
        print(f"val_bits_per_byte: {bits_per_byte(config, loss, data.tokens[1:]):.4f}", flush=True)
    except UserError as error:
        print(f"no bits per byte: {error}", flush=True)


HELLASWAG_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
HELLASWAG_SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"


def fetch_hellaswag() -> Path:
    """The authors' validation set, in data/hellaswag (of DATA_PATH); downloaded once."""
    import urllib.request  # a start, which imports this file, does without
    path = data_root() / "data" / "hellaswag" / "hellaswag_val.jsonl"
    if not path.exists():
        try:
            with urllib.request.urlopen(HELLASWAG_URL, timeout=60) as answer:
                content = answer.read()
        except Exception as error:  # of many kinds
            raise UserError(f"cannot fetch HellaSwag from {HELLASWAG_URL} ({error}); --hellaswag=FILE takes a copy") from None
        if hashlib.sha256(content).hexdigest() != HELLASWAG_SHA256:
            raise UserError(f"what came from {HELLASWAG_URL} is not the published file; --hellaswag=FILE takes a copy")
        with atomic_write(path) as file:
            file.write(content)
    return path


def read_hellaswag(path) -> list[tuple[str, list[str], int]]:
    """(context, four endings, number of the right one) of every line of JSON; UserError when it is something else."""
    try:
        text = Path(path).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    examples = []
    for number, line in enumerate(text.split("\n") if text else [], 1):  # splitlines would also cut at U+2028, which JSON allows
        try:
            example = json.loads(line)
            context, endings, label = example["ctx"], example["endings"], int(example["label"])
            if not (isinstance(context, str) and len(endings) == 4 and all(isinstance(x, str) for x in endings) and 0 <= label < 4):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: not an example with ctx, four endings and label") from None
        examples.append((context, endings, label))
    if not examples:
        raise UserError(f"{path}: no examples")
    return examples


@torch.no_grad()
def ending_losses(model, config, pairs):
    """Yields the losses (k,) fp32, nats per token, of every ending given its context: pairs of (context ids, k ending ids), side by
    side in rows of at most --val_batch_tokens."""
    separator, limit = config.model.bos_id, config.data.val_batch_tokens
    rows, room = [], 0
    for pair in pairs:
        length = 3 + sum(map(len, pair))
        if length > limit:
            raise UserError(f"an example has {length} tokens: --val_batch_tokens={limit} must be as many at least")
        if length > room:
            rows.append([])
            room = limit
        rows[-1].append(pair)
        room -= length
    view = final_attention(model, config, limit + 128)
    for row in rows:
        # Smear, bigram hash and key offset look one token back, also into another document (K1). Behind two separators, each a
        # document, that is always the same, and a loss does not depend on what else is in the row.
        documents = [part for pair in row for part in ([separator], [separator], [separator, *pair[0], *pair[1]])]
        h = forward(model, config, documents, view)
        ends = accumulate(3 + sum(map(len, pair)) for pair in row)
        before = np.concatenate([np.arange(end - len(ending), end) - 1 for end, (_, ending) in zip(ends, row)])
        h = h[torch.from_numpy(before).to(h.device)]
        targets = torch.tensor([id for _, ending in row for id in ending], device=h.device)
        parts = zip(h.split(1024), targets.split(1024))
        losses = [F.cross_entropy(logits(model, some), ids, reduction="none") for some, ids in parts]
        yield from torch.cat(losses).cpu().split([len(ending) for _, ending in row])


def hellaswag(model, config, path):
    """Prints the part of the examples whose right ending has the least loss, as a sum and as a mean over tokens."""
    encode, _ = text_codec(config.model.vocab_size)
    examples = read_hellaswag(path)
    pairs = [(encode(context), encode(" " + ending)) for context, endings, _ in examples for ending in endings]
    scores = []  # of every ending (sum, mean)
    for losses in ending_losses(model, config, pairs):
        scores.append((losses.sum().item(), losses.mean().item()))
        if len(scores) % 400 == 0 or len(scores) == len(pairs):
            print(f"hellaswag: {len(scores) // 4} of {len(examples)} examples", file=sys.stderr, flush=True)
    right = np.array([label for _, _, label in examples])
    print(f"hellaswag_examples: {len(examples)}")
    for name, score in zip(("acc", "acc_norm"), np.array(scores).reshape(-1, 4, 2).transpose(2, 0, 1)):
        part = (score.argmin(1) == right).mean()
        error = (part * (1 - part) / len(right)) ** 0.5
        print(f"hellaswag_{name}: {part:.4f}\nhellaswag_{name}_standard_error: {error:.4f}", flush=True)


# ---- Export ----------------------------------------------------------------------------------------------------------


def export(model, config, path):
    """The weights as they are, and the config as text, in the format of safetensors: the length of the header (8 bytes), the header
    (JSON, spaces to a multiple of 8), the tensors one after the other; all little-endian."""
    names, weights = {torch.bfloat16: "BF16", torch.float32: "F32"}, model.state_dict()
    ends = [0, *accumulate(x.nbytes for x in weights.values())]
    header = {label: {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
              for (label, x), start, end in zip(weights.items(), ends, ends[1:])}
    header["__metadata__"] = {key: T.render(value) for key, value in T.flatten(config).items()}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in weights.values():
            file.write(x.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    print(f"exported: {path}", flush=True)


# ---- The two commands ------------------------------------------------------------------------------------------------


def arguments(argv, options, aliases):
    """({option: value}, {knob: text}) of --key=value arguments: options as given or by default, knobs of the trainer, maybe by an
    alias. UserError on any other."""
    values, knobs, known = dict(options), {}, T.flatten(T.Config())
    for key, text in T.read_arguments(argv).items():
        if key in options:
            values[key] = parse_value(key, text, type(options[key]), options[key])
        elif key in known or key in aliases or re.match(r"(stage|layer)\d", key):
            knobs[aliases.get(key, key)] = text
        else:
            near = difflib.get_close_matches(key, [*options, *aliases, *known], 1, 0.0)[0]
            raise UserError(f"unknown key --{key}; the nearest is --{near}")
    return values, knobs


def sample_command(argv) -> int:
    """--sample: text, as it comes. Returns the exit status, raises UserError."""
    options, knobs = arguments(argv, {"sample": "", "temperature": 0.8, "top_k": 0},
                               {"prompt": "sample_prompt", "tokens": "sample_tokens"})
    if not 0 <= options["temperature"] < math.inf or options["top_k"] < 0:
        raise UserError(f"--temperature={options['temperature']} --top_k={options['top_k']}: neither may be negative")
    config, model, _ = load_model(options["sample"], {"sample_tokens": "200"} | knobs)
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
        config, model, ops = load_model(path, knobs)
        if options["export"]:
            export(model, config, options["export"])
        if options["validate"]:
            validate(model, config, ops)
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
