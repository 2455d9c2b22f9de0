"""The whole model in plain PyTorch. `records/evaluate.py --export` copies this file beside the weights.

    python plain_gpt.py model.safetensors "Once upon a time" 100     continues the text by 100 tokens (else by 200)

    model = Model("model.safetensors")
    log_p = model(tokens)    # tokens (T,) int64 -> (T, V) fp32: for each token, the log-probabilities of the next one

The tokens are one document: model.separator, then the text. The program computes in fp32 on the CPU. It needs PyTorch,
and tiktoken if the tokens are those of GPT-2. To learn the architecture, begin with `Model.__call__`.

Shape letters: T tokens, D width of the stream, H heads of d channels, V tokens of the vocabulary.
"""

import functools
import json
import os
import sys
from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn.functional as F

GATE = 12  # channels that a gate reads, the first ones of its input


def norm(x):
    """x / rms(x) over the last axis."""
    return F.rms_norm(x, x.shape[-1:], eps=2**-23)


def previous(x):
    """For each token the row of the token before, zeros for the first one."""
    return torch.cat((torch.zeros_like(x[:1]), x[:-1]))


def weighted(factors, streams):
    """The sum of n streams (T, D) times factors (n,) or, for each token, (T, n)."""
    return sum(factor * stream for factor, stream in zip(factors.split(1, -1), streams, strict=True))


class Model:
    """path: of an export. Another file raises an error of some kind."""

    def __init__(self, path):
        w, self.settings = read_safetensors(path)
        self.wiring = SimpleNamespace(**json.loads(self.settings["wiring"]))
        self.layers, self.separator = [SimpleNamespace(**x) for x in self.wiring.layers], self.wiring.separator
        # A text needs few rows of these tables, and only those become fp32.
        tables = "embed", "value_embeds", "ngram_embed", "bigram_embed", "signs", "hash_ids"
        self.w = w = {name: x if name in tables else x.float() for name, x in w.items()}
        for name in "x0_lambdas", "bigram_lambdas", "resid_lambdas", "post_lambdas":
            w[name] = w[name].bfloat16().float()  # training reads these rounded
        if "value_embeds" in w:
            w["value_embeds"] = w["value_embeds"].view(-1, *w["embed"].shape)

    @torch.no_grad()
    def __call__(self, tokens):
        """The log-probabilities (T, V) fp32 of every next token; tokens (T,) int64."""
        w, backout, end = self.w, self.wiring.backout_layer, len(self.layers)
        bank = functools.cache(lambda name: iter(w[name]))  # next(bank(name)): the weights of one layer after another

        # The stream x (T, D) begins with the token, some of the token before, and the n-grams that end here.
        e, ngrams = w["embed"][tokens].float(), self.ngrams(tokens)
        gate = w["smear_lambda"] * torch.sigmoid(e[:, :GATE] @ w["smear_gate"].T)
        x = x0 = norm(e + gate * previous(e))
        before_mlp, after, first_ve = [], [], None  # the streams in all layers
        more = defaultdict(int)  # what networks add to learned factors: by place and name, 0 or (T, number of factors)
        for i, layer in enumerate(self.layers):
            if layer.dynamic:  # the network of this layer and the next ones
                hidden = F.gelu(x @ next(bank("dynamic_in")).T)
                for place, name, count in layer.dynamic:
                    out = torch.stack([next(bank("dynamic_out")) for _ in range(count)])
                    more[place, name] = 0.1 * hidden @ out.T
            for_x0, for_ngrams = w["x0_lambdas"][i] + more[i, "x0"], w["bigram_lambdas"][i] + more[i, "bigram"]
            if i == 0:
                x = first = x + for_ngrams * ngrams
            if layer.skip_from is not None:  # add the stream as it was in an earlier layer
                gate = torch.sigmoid(x0[:, :GATE] @ next(bank("skip_gate")))[:, None]
                x = x + 2 * torch.sigmoid(next(bank("skip_lambda"))) * gate * before_mlp[layer.skip_from]
            ve = next(bank("value_embeds"))[tokens].float() if layer.value_embed else None
            if layer.mix:  # add earlier streams to the value embeddings and to the stream
                before_mix, streams = x, (first, after[backout], x)
                for_ve, for_x = (w["mix_lambdas"][:6] + more[i, "mix"]).split(3, -1)
                ve, x = ve + weighted(for_ve, streams), x + weighted(for_x, streams)
            first_ve = ve if first_ve is None else first_ve

            keep, keep_at_mlp = w["resid_lambdas"][i]
            if layer.attention or layer.skip_from is None:  # add the embeddings again
                source, x = x, keep * x + for_x0 * x0 + (for_ngrams * ngrams if i else 0)
            if layer.attention:
                source = norm(source if layer.input_from is None else after[layer.input_from])
                x = x + self.attention(i, bank, source, ve, more[i, "xsa"])
            before_mlp.append(x)
            up, down = next(bank("mlp_bank"))  # (F, D), F the width of the MLP
            x = keep_at_mlp * x + w["post_lambdas"][i] * (norm(x) @ up.T).relu().square() @ down
            after.append(x)

        # The head reads what is left without a middle layer's stream, and with earlier streams.
        if backout is not None:
            x = x - w["backout_lambda"] * after[backout]
        if "mix_lambdas" in w:
            skips = [before_mlp[i] for i in sorted({layer.skip_from for layer in self.layers} - {None})]
            streams = first, after[backout], before_mix, first_ve, *skips
            x = x + weighted(w["mix_lambdas"][6:] + more[end, "mix"], streams)
        h = norm(x)
        p = (23 * torch.sigmoid((h @ w["lm_head"] + 5) / 7.5)).softmax(1)
        return (self.pointer(h, tokens, p) if "pointer_weights" in w else p)[:, :self.separator + 1].log()

    def ngrams(self, tokens):
        """The sum of the embeddings of the n-grams that end at each token (T, D). A hash of the n-gram picks a row of
        the table; another hash picks its signs, so that n-grams in one row differ."""
        w, start, total = self.w, 0, 0
        table = w["ngram_embed" if "ngram_embed" in w else "bigram_embed"]
        ids = w["hash_ids"][tokens].long() if "hash_ids" in w else tokens  # one id for words that differ in case

        def hashed(order, factors, size, incomplete):
            found = factors[0] * ids
            for i in range(1, order):
                found = found ^ factors[i] * ids.roll(i)
            found = found % size
            found[:order - 1] = incomplete  # the n-gram would begin before the text
            return found
        for order, rows in self.wiring.ngrams:
            embedding = table[start + hashed(order, self.wiring.ngram_factors, rows - 1, rows - 1)].float()
            if "signs" in w:
                embedding = embedding * w["signs"][hashed(order, self.wiring.sign_factors, len(w["signs"]), 0)]
            total, start = total + embedding, start + rows
        return total

    def attention(self, i, bank, x, ve, more):
        """What the attention of layer i adds to the stream (T, D). x (T, D): the normed stream; ve: value embeddings
        (T, D) or None; more: what a network adds to its factors of XSA, 0 or (T, H)."""
        layer, T, H = self.layers[i], len(x), self.wiring.num_heads
        qk = next(bank("narrow_qk_bank" if layer.narrow else "qk_bank")).flatten(0, -2)  # narrow: heads of d/2
        (values, out), (for_in, for_out) = next(bank("vo_bank")), self.w["sa_lambdas"][i]
        q, k = (norm(u.view(T, H, -1)) for u in (for_in * x @ qk.T).chunk(2, 1))
        v = (for_in * x @ values.T).view(T, H, -1)
        if ve is not None:
            read = x[:, :GATE] if layer.paired else torch.cat((x[:, :GATE // 2], ve[:, :GATE // 2]), 1)
            v = v + 2 * torch.sigmoid(read @ next(bank("ve_gate_bank")).T)[..., None] * ve.view(v.shape)

        # Rotary: pairs of the first d/2 channels turn with the position. In a paired layer, odd heads turn as half a
        # token later.
        half, position = v.size(-1) // 2, torch.arange(T, dtype=torch.float32)[:, None].expand(T, H)
        position = 2 * position + torch.arange(H) % 2 if layer.paired else position
        angle = position[..., None] * torch.tensor(layer.frequencies)

        def rotate(u):
            a, b = u[..., :half:2], u[..., 1:half:2]
            turned = torch.stack((a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()), -1)
            return torch.cat((turned.flatten(-2), u[..., half:]), -1)
        q, k = rotate(q), rotate(k)
        if layer.long:  # the other half of a key is that of the token before
            k = torch.cat((k[..., :half], torch.cat((k[:1], k[:-1]))[..., half:]), -1)

        # Causal softmax with a window. In a paired layer, each half of the heads becomes a position: 2T with H/2 heads.
        q, k, by_position = (u.reshape(2 * T, H // 2, -1) if layer.paired else u for u in (q, k, v))
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        scores = layer.scale * torch.einsum("thd,shd->hts", q, k)
        scores = scores.masked_fill((distance < 0) | (distance > layer.window), -torch.inf)
        y = torch.einsum("hts,shd->thd", scores.softmax(-1), by_position).reshape(v.shape)
        y = y * torch.sigmoid(x[:, :GATE] @ next(bank("attn_gate_bank")).T)[..., None]
        if layer.xsa:  # take out a share of what lies along the token's own value
            share = torch.tanh(next(bank("xsa_lambdas")) + more) * (y * v).sum(-1) / v.square().sum(-1).clamp(min=1e-8)
            y = y - share[..., None] * v
        return for_out * y.flatten(1) @ out.T

    def pointer(self, h, tokens, p):
        """The probabilities p (T, V) after the pointer head. The part of p that the class `gate` has goes to earlier
        tokens, as attention says; what attention leaves at a sink goes back to p. h (T, D): the normed stream."""
        w, gate = self.w, self.separator + 1
        q, k, to_next = (h @ w["pointer_weights"].flatten(0, 1).T).chunk(3, 1)
        q, k = w["pointer_gain"] * norm(q), norm(k + previous(to_next))
        distance = torch.arange(len(h))[:, None] - torch.arange(len(h))
        scores = (q @ k.T).masked_fill((distance < 1) | (distance > self.wiring.pointer_window), -torch.inf)
        scores = torch.cat(((q @ w["pointer_sink"])[:, None], scores), 1) * q.size(1)**-0.5
        sink, copies = scores.softmax(1).split((1, len(h)), 1)
        part, p = p[:, gate, None], p.index_fill(1, torch.tensor(gate), 0)
        return (p * (1 + part * sink / (1 - part).clamp(min=1e-6))).index_add(1, tokens, part * copies)


def read_safetensors(path):
    """({name: tensor}, {name: text}) of a file. It has the size of the header (8 bytes), the header (JSON), and the
    tensors, which stay on the disk until they are used."""
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32, "I8": torch.int8}
    data = torch.from_file(str(path), size=os.path.getsize(path), dtype=torch.uint8)
    size = 8 + data[:8].view(torch.int64).item()
    header, data = json.loads(bytes(data[8:size].tolist())), data[size:]
    metadata = header.pop("__metadata__")
    return {name: data[slice(*x["data_offsets"])].view(dtypes[x["dtype"]]).view(x["shape"])
            for name, x in header.items()}, metadata


def main(path, prompt="", count="200"):
    try:
        model = Model(path)
    except Exception as error:  # other files raise many kinds
        sys.exit(f"error: {path} is no export for this program ({type(error).__name__}: {error})")
    encode, decode = lambda text: list(text.encode(errors="replace")), lambda token: bytes([token])
    if model.wiring.tokenizer == "unknown":
        sys.exit("error: the tokens are your own: call Model in Python, which takes their numbers")
    if model.wiring.tokenizer != "bytes":
        try:
            import tiktoken
            bpe = tiktoken.get_encoding(model.wiring.tokenizer)
            encode, decode = bpe.encode_ordinary, bpe.decode_single_token_bytes
        except Exception as error:  # tiktoken passes on all errors of its download
            sys.exit(f"error: no tokenizer {model.wiring.tokenizer!r} ({type(error).__name__}: {error}): pip install"
                     " tiktoken, which fetches that of GPT-2 once, online")
    ids, recent = encode(prompt), model.wiring.pointer_window - 1  # it learned from documents of this length at most
    torch.manual_seed(int(model.settings["seed"]))
    sys.stdout.buffer.write(prompt.encode(errors="replace"))
    for _ in range(int(count)):
        sys.stdout.flush()
        log_p = model(torch.tensor([model.separator, *ids[-recent:]]))[-1, :model.separator]  # never the separator
        ids.append(int(torch.multinomial((log_p / 0.8).softmax(0), 1)))
        sys.stdout.buffer.write(decode(ids[-1]))
    print()


if __name__ == "__main__":
    path, *rest = sys.argv[1:] or ["--help"]
    if path.startswith("-") or len(rest) > 2 or len(rest) == 2 and not rest[1].isdecimal():
        print(__doc__)
        sys.exit(path not in ("--help", "-h"))
    main(path, *rest)
