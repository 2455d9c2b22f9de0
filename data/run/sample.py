"""Text from a model; the command --sample.

    python train_gpt.py --sample=CHECKPOINT --prompt="..." [--tokens=200 --temperature=0.8 --top_k=0 --seed=1337]

Temperature 0 takes the likeliest token; top_k limits the choice to the k likeliest tokens (0: no limit). The command
also takes the trainer's knobs, such as --device=cpu; all other settings come from the checkpoint.
"""

import codecs
import math

import numpy as np
import torch

import triton_kernels as kernels
from data.loader import make_batch
from data.run.config import flatten, read_options
from data.run.program import UserError
from data.tokenizer import text_codec


def hash_ids(model):
    """The table `hash_ids` of the model on the host, or None if the model has none."""
    return model.hash_ids.cpu().numpy() if model.config.bigram_normal else None


def forward(model, config, documents, attention):
    """(Output, the next tokens (N,)) of documents (lists of token ids), packed into one micro-batch. A document of
    separators pads the micro-batch to a multiple of 128, as the kernels require. Padding changes nothing, since no
    token sees later tokens."""
    ends = np.cumsum([len(document) for document in documents])
    N = -(-ends[-1] // 128) * 128
    tokens = np.full(N + 1, config.model.bos_id, np.uint16)
    tokens[:ends[-1]] = np.concatenate(documents)
    batch = make_batch(tokens, ends, config, model.embed.device, hash_ids=hash_ids(model))
    output = model(batch.tokens, batch.documents, batch.row_ids, attention._replace(pointer_window=int(N)))
    return output, batch.targets


def log_probabilities(model, output, row):
    """Of every class as the token after token `row`, (padded vocabulary,) fp32."""
    h, point = output[:2]
    z = kernels.softcap(h[row] @ model.lm_head.to(h.dtype)).log_softmax(0)
    if point is None:
        return z
    first, attn = kernels.pointer_attention(point.q, point.k, point.sink, point.start, point.window, point.scale,
                                            slice(row, row + 1))
    sink_mass, p = attn[0, 0], z.exp()
    gate = p[model.config.gate_id].clone()
    p[model.config.gate_id] = 0.0
    mass = torch.zeros_like(p).index_add_(0, point.tokens[first:row + 1].long(), attn[0, 1:].to(p.dtype))
    return (p * (1 + gate * sink_mass / (1 - gate).clamp(min=kernels.LEAST_REST)) + gate * mass).log()


@torch.no_grad()
def generate(model, config, attention, ids, count, temperature, top_k):
    """Yields `count` token ids that follow `ids`. attention: AttentionSettings of the last validation. Each token takes
    a forward pass over a separator and the most recent tokens, at most as many as the longest training document or as
    `attention` has angles for. It never draws the separator, so the text is one document."""
    ids, separator = list(ids), config.model.bos_id
    most = len(attention.rotary[False][0]) // 2 // 128 * 128  # tokens of a pass; a paired layer takes two rows for each
    recent = min(config.schedule.stages[-1].max_doc_len, most) - 1
    generator = torch.Generator().manual_seed(config.system.seed)
    for _ in range(count):
        document = [separator, *ids[max(0, len(ids) - recent):]]
        output, _ = forward(model, config, [document], attention)
        z = log_probabilities(model, output, len(document) - 1)[:separator].cpu()
        if top_k:
            z[z < z.topk(min(top_k, separator)).values[-1]] = -torch.inf
        if temperature:  # z must stay finite
            ids.append(int(torch.multinomial(torch.softmax(z / max(temperature, 1e-30), 0), 1, generator=generator)))
        else:
            ids.append(int(z.argmax()))
        yield ids[-1]


def sample(model, config, attention, temperature=0.8, top_k=0):
    """Yields --sample_prompt, then --sample_tokens generated tokens as whole characters. --seed is the random seed.
    attention: AttentionSettings of the last validation."""
    encode, decode = text_codec(config.model.vocab_size)
    prompt, count = config.system.sample_prompt, config.system.sample_tokens
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield prompt
    for id in generate(model, config, attention, encode(prompt), count, temperature, top_k):
        yield decoder.decode(decode(id))
    yield decoder.decode(b"", final=True)


def sample_command(argv, default, load_model) -> int:
    """--sample: prints text token by token. Returns the exit status, raises UserError. default: a config, for the names
    of the knobs; load_model: the function of train_gpt.py."""
    options, knobs = read_options(argv, {"sample": "", "temperature": 0.8, "top_k": 0},
                                  {"prompt": "sample_prompt", "tokens": "sample_tokens"}, flatten(default))
    if not 0 <= options["temperature"] < math.inf or options["top_k"] < 0:
        raise UserError(f"--temperature={options['temperature']} --top_k={options['top_k']}: neither may be negative")
    config, model, attention = load_model(options["sample"], {"sample_tokens": "200"} | knobs)
    try:
        for piece in sample(model, config, attention, options["temperature"], options["top_k"]):
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    return 0
