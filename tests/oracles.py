"""Oracles: a second, slow and plain implementation of the trainer, with which tests compare the trainer.

This file was written from descriptions of record 74 and of later features alone and does not import the trainer. It
never rounds to bf16 or FP8: arithmetic runs in the dtype of the arguments, so fp64 arguments give reference values.
Contents: model and losses, data, optimizer, schedules of the record run.

Letters: N tokens, D width, H heads, d = D/H head width, F = 4D, V padded vocabulary, c matrices of R x C in a bank.
"""
import math
from itertools import accumulate

import numpy as np
import pytest
import torch

RMS_EPS = 2.0 ** -23
GATE = 12  # channels that a gate reads

# One row per layer: (number among the layers with attention, window, paired, key offset,
#  (value table, gate channels of x, gate channels of ve))
LAYERS = [
    (0, "S", True, False, None), (1, "S", False, False, (0, 6, 6)), (2, "S", True, False, (1, 12, 0)),
    (3, "L", False, True, None), (4, "S", False, False, None), (5, "S", True, False, None),
    (None, None, False, False, None), (6, "S", False, False, None), (7, "S", False, False, (2, 6, 6)),
    (8, "S", True, False, (3, 12, 0)), (9, "L", False, True, (4, 6, 6))]


def layers_without_attention(removed):
    """LAYERS in which the layers `removed` have no attention; later layers take the next rows and value tables."""
    rows, tables, layers = 0, 0, []
    for i, (row, *others, value) in enumerate(LAYERS):
        if row is None or i in removed:
            layers.append((None, None, False, False, None))
        else:
            layers.append((rows, *others, value and (tables, *value[1:])))
            rows, tables = rows + 1, tables + (value is not None)
    return layers


# ------------------------------------------------------------------------------------------------ model
def rms(x):
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + RMS_EPS)


def base_freqs(n):
    """n frequencies from 1 to 1/1024, equally spaced in the logarithm (n = 32 for d = 128)."""
    return [1024.0 ** (-j / (n - 1)) for j in range(n)]


def yarn(freqs, scale, W_old, W_new):
    """Frequencies and attention scale after the long window changed from W_old to W_new tokens."""
    out = []
    for w in freqs:
        turns = W_old * w / (2 * math.pi)
        keep = min(max((turns - 1) / (32 - 1), 0.0), 1.0)
        out.append(w * (W_old / W_new + keep * (1 - W_old / W_new)))
    return out, scale * (1 + 0.2 * math.log(W_new / W_old))


def bigram_hash(tokens, rows):
    """Bigram table row of every token, as a list of Python ints; rows is the size of the table."""
    M = rows - 1
    out = [M]
    for before, current in zip(tokens[:-1], tokens[1:]):
        a, b = 36313 * int(current), 27191 * int(before)
        assert max(a, b) < 2 ** 31, "token id outside the range for which int32 products are exact"
        out.append((a ^ b) % M)
    return out


def rotate(u, tau, freqs):
    """u (N, H, d), channels 2j and 2j + 1 turned by frequency j times the angle index tau (N, H); others stay."""
    freqs = torch.as_tensor(freqs, dtype=u.dtype, device=u.device)
    angle = tau[:, :, None].to(u.dtype) * freqs  # (N, H, pairs)
    cos, sin = torch.cos(angle), torch.sin(angle)
    out = list(u.unbind(-1))  # d channels of (N, H)
    for j in range(len(freqs)):
        even, odd = u[:, :, 2 * j], u[:, :, 2 * j + 1]
        out[2 * j] = cos[:, :, j] * even + sin[:, :, j] * odd
        out[2 * j + 1] = cos[:, :, j] * odd - sin[:, :, j] * even
    return torch.stack(out, dim=-1)


def pair(u):
    """(N, H, c) -> (2N, H/2, c); head h of token t is at position 2t + h//(H/2) of stream h mod (H/2)."""
    N, H, c = u.shape
    half = H // 2
    out = u.new_zeros(2 * N, half, c)
    for h in range(H):
        out[h // half::2, h % half] = u[:, h]
    return out


def unpair(u):
    """Inverse of pair()."""
    half = u.shape[1]
    return torch.stack([u[h // half::2, h % half] for h in range(2 * half)], dim=1)


def attention_mask(cu, n, window):
    """(n, n) booleans; query p of a document sees its keys p - window ... p."""
    assert cu[0] == 0 and cu[-1] == n
    mask = torch.zeros(n, n, dtype=torch.bool)
    for a, b in zip(cu[:-1], cu[1:]):
        for p in range(a, b):
            mask[p, max(a, p - window):p + 1] = True
    return mask


def documents(cu):
    """Start and end of the document of every token, (2, N) int32, by a search in the borders cu (K,) int32."""
    after = torch.searchsorted(cu, torch.arange(int(cu[-1]), dtype=torch.int32, device=cu.device), right=True)
    return torch.stack((cu[after - 1], cu[after]))


def attend(q, k, v, cu, window, scale):
    """Dense softmax attention, one head at a time; q, k, v (n, heads, d)."""
    mask = attention_mask(cu, q.shape[0], window).to(q.device)
    heads = []
    for h in range(q.shape[1]):
        scores = (q[:, h] @ k[:, h].T) * scale
        heads.append(torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1) @ v[:, h])
    return torch.stack(heads, dim=1)


def attention(params, i, layer, x, ve, cu, *, S, L, freqs, attn_scale, H, xsa=None, narrow=None, number=None):
    """Attention of layer i, a row of LAYERS, on the normalised x (N, D); ve: its value embedding (N, D); xsa: a, (H,)
    or (N, H); narrow: (frequencies, scale) of a layer whose queries and keys have only the first half of each head;
    number: of the layer among those with as wide queries and keys (None: all layers with attention)."""
    row, window, paired, key_offset, value = layer
    window = S if window == "S" else L
    N, D = x.shape
    d = D // H
    bank = params["qk_bank" if narrow is None else "narrow_qk_bank"][row if number is None else number]
    sa = params["sa_lambdas"][i]

    q, k = (rms((x @ (sa[0] * bank[part].reshape(-1, D)).T).reshape(N, H, -1)) for part in (0, 1))
    v = (x @ (sa[0] * params["vo_bank"][row, 0]).T).reshape(N, H, d)
    if narrow is not None:
        freqs, attn_scale = narrow
    t, h = torch.arange(N, device=x.device)[:, None], torch.arange(H, device=x.device)[None, :]
    tau = 2 * t + h % 2 if paired else t + 0 * h
    q, k = rotate(q, tau, freqs), rotate(k, tau, freqs)

    if key_offset:  # the half that is not rotated comes from the previous token of the packed row
        moved = torch.cat([k[:1, :, d // 2:], k[:-1, :, d // 2:]], dim=0)
        k = torch.cat([k[:, :, :d // 2], moved], dim=-1)
    if value is not None:
        table, from_x, from_ve = value
        inp = torch.cat([x[:, :from_x], ve[:, :from_ve]], dim=-1)
        gate = 2 * torch.sigmoid(inp @ params["ve_gate_bank"][table].T)  # (N, H)
        v = v + gate[:, :, None] * ve.reshape(v.shape)
    if paired:
        y = unpair(attend(pair(q), pair(k), pair(v), [2 * c for c in cu], window, attn_scale))
    else:
        y = attend(q, k, v, cu, window, attn_scale)
    y = y * torch.sigmoid(x[:, :GATE] @ params["attn_gate_bank"][row].T)[:, :, None]
    if xsa is not None:
        along = (y * v).sum(-1) / (v * v).sum(-1).clamp(min=1e-8)  # (N, H)
        y = y - (torch.tanh(xsa) * along)[:, :, None] * v
    return y.reshape(N, -1) @ (sa[1] * params["vo_bank"][row, 1]).T


def mlp(params, i, x):
    """relu(x W1^T)^2 W2; both matrices are stored as (F, D)."""
    W1, W2 = params["mlp_bank"][i]
    return torch.relu(x @ W1.T) ** 2 @ W2


def model_hidden(params, tok, cu, bigram_rows, *, lambda_dtype=None, lanes_from=7, skip={6: 3}, input_from={}, xsa=(),
                 dynamic=(), mix=None, signs=None, narrow=(), narrow_state=None, layers=LAYERS, backout=7, **settings):
    """The normalised output h (N, D) of the model, before the head.

    settings: S, L, freqs, attn_scale, H of attention(). lanes_from: the first layer with two lanes, or None. skip:
    {layer: the layer that its skip connection comes from}. The remaining arguments are features that record 74 lacks.
    input_from: {layer: the layer whose output its attention reads}. xsa, dynamic, mix: layers with that feature.
    signs: (8192, D), the factors of bigrams. narrow: layers whose queries and keys have half of the channels;
    narrow_state: their (frequencies, scale). layers: rows like LAYERS; backout: the layer whose output is subtracted.
    """
    cu = [int(c) for c in cu]
    tok, bigram_rows = torch.as_tensor(tok).long(), torch.as_tensor(bigram_rows).long()
    device, V = params["embed"].device, params["embed"].shape[0]
    tok, bigram_rows = tok.to(device), bigram_rows.to(device)

    def lambdas(label):  # rounded to lambda_dtype before use (K6)
        p = params[label]
        return p if lambda_dtype is None else p.to(lambda_dtype).to(p.dtype)
    rho, pi = lambdas("resid_lambdas"), lambdas("post_lambdas")
    pi = pi if pi.dim() == 3 else pi[:, :, None].expand(-1, 2, 2)  # with one lane, the MLP alone has a factor
    alpha, beta = lambdas("x0_lambdas"), lambdas("bigram_lambdas")
    smear_lambda, backout_lambda = params["smear_lambda"][0], params["backout_lambda"][0]

    end = len(layers)
    # Each factor has a constant part. The key of a factor is its place (a layer, or `end`: behind the last layer) and
    # its name; the order is the order of dynamic_out.
    constants = {}
    for i, (row, *_) in enumerate(layers):
        if row is not None or i not in skip:
            constants |= {(i, "x0"): alpha[i:i + 1], (i, "bigram"): beta[i:i + 1]}
        if i in xsa:
            constants[i, "xsa"] = params["xsa_lambdas"][xsa.index(i)]
    if mix is not None:
        constants |= {(mix, "mix"): params["mix_lambdas"][:6], (end, "mix"): params["mix_lambdas"][6:]}
    def network(place):  # the number of networks that begin up to there: the last of them serves the place
        return sum(start <= place for start in dynamic)
    served = sorted((key for key in constants if network(key[0])), key=lambda key: network(key[0]))
    ends = accumulate(len(constants[key]) for key in served)
    rows_out = {key: slice(end - len(constants[key]), end) for key, end in zip(served, ends)}
    network_streams = []

    def factor(place, name):
        """(number,), or with what the network adds (N, number)."""
        key, k = (place, name), network(place) - 1
        if key not in rows_out:
            return constants[key]
        z = network_streams[k] @ params["dynamic_in"][k].T
        hidden = z * (1 + torch.erf(z / math.sqrt(2))) / 2  # GELU
        return constants[key] + 0.1 * hidden @ params["dynamic_out"][rows_out[key]].T
    def weighted(factors, sources):
        assert factors.shape[-1] == len(sources)
        return sum(factors[..., j:j + 1] * source for j, source in enumerate(sources))
    # token embedding, bigram rows, value embeddings
    e = params["embed"][tok]
    gate = smear_lambda * torch.sigmoid(e[1:, :GATE] @ params["smear_gate"].T)  # (N-1, 1)
    x0 = rms(torch.cat([e[:1], e[1:] + gate * e[:-1]], dim=0))
    b = params["bigram_embed"][bigram_rows]
    if signs is not None:
        pairs = [0] + [(int(t) ^ int(before)) % 8192 for before, t in zip(tok[:-1], tok[1:])]
        b = b * signs[pairs].to(b)
    ves = {i: params["value_embeds"][value[0] * V + tok] for i, (*_, value) in enumerate(layers) if value}

    # layers
    lane0, lane1, before_mlp, left = x0, None, [], []  # lane 0 before every MLP, and as it left every layer
    for i, layer in enumerate(layers):
        if i in dynamic:
            network_streams.append(lane0)
        if i == 0:
            first = lane0 = x0 + factor(0, "bigram") * b
        if i in skip:
            j = [*skip].index(i)
            g = 2 * torch.sigmoid(x0[:, :GATE] @ params["skip_gate"][j])[:, None]  # (N, 1)
            lane0 = lane0 + torch.sigmoid(params["skip_lambda"][j]) * g * before_mlp[skip[i]]
        if i == lanes_from:
            lane1 = lane0
        if i == mix:
            before_mix, sources, m = lane0, [first, left[backout], lane0], factor(i, "mix")
            ves[i] = ves[i] + weighted(m[..., :3], sources)
            lane0 = lane0 + weighted(m[..., 3:], sources)
        a = None
        if layer[0] is not None:
            number = sum(layers[j][0] is not None and (j in narrow) == (i in narrow) for j in range(i))
            a = attention(params, i, layer, rms(left[input_from[i]] if i in input_from else lane0), ves.get(i), cu,
                          xsa=factor(i, "xsa") if i in xsa else None, narrow=narrow_state if i in narrow else None,
                          number=number, **settings)
            if lane1 is not None:
                lane1 = rho[i, 0] * lane1 + pi[i, 0, 1] * a
                a = pi[i, 0, 0] * a
        if a is not None or i not in skip:
            inject = factor(i, "x0") * x0 + (factor(i, "bigram") * b if i > 0 else 0)
            lane0 = rho[i, 0] * lane0 + (0 if a is None else a) + inject
        before_mlp.append(lane0)
        m = mlp(params, i, rms(lane0 if lane1 is None else lane1))
        lane0 = rho[i, 1] * lane0 + pi[i, 1, 0] * m
        if lane1 is not None:
            lane1 = rho[i, 1] * lane1 + pi[i, 1, 1] * m
        left.append(lane0)
    x = (lane0 if lane1 is None else 0.5 * (lane0 + lane1)) - backout_lambda * left[backout]
    if mix is not None:
        skips = [before_mlp[j] for j in sorted({*skip.values()})]
        x = x + weighted(factor(end, "mix"), [first, left[backout], before_mix, ves[min(ves)], *skips])
    return rms(x)


def softcapped_logits(params, h):
    """Z = 23 sigmoid((l + 5) / 7.5), (N, V)."""
    return 23 * torch.sigmoid((h @ params["lm_head"] + 5) / 7.5)


def target_losses(z, targets, weights, gate=None, mass=None, sink_mass=None):
    """Losses (N,) from softcapped logits z (N, C); targets (N, K) are columns of z, -1 = none.

    With the column `gate`: of a head with a pointer, whose attention on copies of the targets is mass (N, K).
    """
    targets = targets.to(z.device)
    log_p = torch.log_softmax(z, dim=-1).gather(1, targets.clamp(min=0))
    if gate is not None:
        alpha = torch.softmax(z, dim=-1)[:, gate, None]
        log_p = torch.log(log_p.exp() * (1 + alpha * sink_mass[:, None] / (1 - alpha)) + alpha * mass)
    return -(torch.as_tensor(weights).to(z) * (targets >= 0) * log_p).sum(1)


def pointer_inputs(params, h, cu):
    """Queries, keys (N, 128) and the sink's scores (N,) of the pointer head, from the normalised output h (N, D).

    Key j also takes a projection of h[j - 1], but not where token j is the first of its document.
    """
    W, width = params["pointer_weights"], params["pointer_sink"].shape[0]
    keys = h @ W[1].T
    follows = torch.ones(h.shape[0], 1, dtype=h.dtype, device=h.device)
    follows[[c for c in cu[:-1] if c < cu[-1]]] = 0
    before = torch.cat([h[:1], h[:-1]]) @ W[2].T
    q = params["pointer_gain"] * rms(h @ W[0].T)
    return q, rms(keys + follows * before), q @ params["pointer_sink"] / math.sqrt(width)


def pointer_attention(q, k, sink, cu, window, scale):
    """(N, 1 + N): softmax over the sink's score and the keys i - window ... i - 1 of token i's own document."""
    seen = attention_mask(cu, q.shape[0], window).fill_diagonal_(False)
    scores = (scale * (q @ k.T)).masked_fill(~seen.to(q.device), -math.inf)
    return torch.softmax(torch.cat([sink[:, None], scores], dim=1), dim=1)


def pointer_hits(tokens, targets):
    """(K, N, N): token j + k, not after token i, is target k of token i; targets (N, K), -1 = none."""
    n, K = targets.shape
    tokens, targets = torch.as_tensor(tokens).tolist(), targets.tolist()
    hits = torch.zeros(K, n, n, dtype=torch.bool)
    for k in range(K):
        for i in range(n):
            for j in range(i - k + 1):
                hits[k, i, j] = targets[i][k] >= 0 and tokens[j + k] == targets[i][k]
    return hits


def copy_masses(attn, hits):
    """(mass (N, K), sink_mass (N,)): attention on copies of each target, and on the sink."""
    return torch.stack([(attn[:, 1:] * hit.to(attn)).sum(1) for hit in hits], dim=1), attn[:, 0]


def later_targets(targets, count):
    """(N, count): column k is the target k tokens later, -1 beyond the end."""
    targets = torch.as_tensor(targets).tolist()
    return torch.tensor([[targets[i + k] if i + k < len(targets) else -1 for k in range(count)]
                         for i in range(len(targets))])


def losses_of_head(params, h, tok, targets, cu, mtp_weights, pointer=None):
    """(losses (N,), softcapped logits (N, V)). pointer: None, or (class of the gate, window) of the pointer head."""
    z, shifted, copies = softcapped_logits(params, h), later_targets(targets, len(mtp_weights)), ()
    if pointer is not None:
        (gate, window), cu = pointer, [int(c) for c in cu]
        attn = pointer_attention(*pointer_inputs(params, h, cu), cu, window, 128**-0.5)
        copies = gate, *copy_masses(attn, pointer_hits(tok, shifted))
    return target_losses(z, shifted, mtp_weights, *copies), z


def model_loss(params, tok, targets, cu, bigram_rows, *, mtp_weights, loss_scale, pointer=None, **settings):
    """(loss_scale * sum_t loss_t, softcapped logits (N, V)); pointer: see losses_of_head, settings: model_hidden."""
    h = model_hidden(params, tok, cu, bigram_rows, **settings)
    losses, z = losses_of_head(params, h, tok, targets, cu, mtp_weights, pointer)
    return loss_scale * losses.sum(), z


# ------------------------------------------------------------------------------------------------- data
def write_shard(path, tokens, magic=20240520, version=1, count=None):
    """Write a shard file, valid or with a wrong header; returns its path."""
    header = np.random.default_rng(1).integers(-2**31, 2**31, 256).astype("<i4")  # after three numbers without meaning
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens).astype("<u2").tobytes())
    return path


def write_library(folder):
    """Write a small corpus of bytes in place of Python's library, into a folder for DATA_PATH; returns the folder."""
    (folder / "data/stdlib").mkdir(parents=True)
    for name, seed, count in ("train", 1, 24000), ("val", 2, 1025):
        tokens = np.random.default_rng(seed).integers(97, 123, count)
        tokens[::60] = 256
        write_shard(folder / f"data/stdlib/stdlib_{name}_000000.bin", tokens)
    return folder


def one_batch(tokens, B, i, n, M):
    """One batch from cursor i: ((inputs, targets, lengths), new cursor), or None if B has too few documents."""
    pieces = []
    while sum(map(len, pieces)) <= n:
        if i == len(B):
            return None
        following = B[i + 1] if i + 1 < len(B) else len(tokens)
        pieces.append(tokens[B[i]:min(following, B[i] + M, B[i] + n - sum(map(len, pieces)) + 1)])
        i += 1
    c = np.concatenate(pieces)
    assert len(c) == n + 1
    return (c[:n].astype(np.int32), c[1:].astype(np.int64), [*map(len, pieces)]), i


def pack_documents(tokens_of_shards, sep, spec):
    """For each (n, M) of spec (inputs (n,), targets (n,), document lengths), as on one rank.

    The lengths sum to n + 1. A batch that finds too few documents starts again on the next shard; after the last shard
    comes the first. Raises a ValueError if no shard holds enough documents for one batch.
    """
    shards = [(tokens, [p for p, x in enumerate(tokens.tolist()) if x == sep]) for tokens in tokens_of_shards]
    shard, i = 0, 0
    for n, M in spec:
        for _ in range(len(shards) + 1):
            if result := one_batch(*shards[shard], i, n, M):
                break
            shard, i = (shard + 1) % len(shards), 0
        else:
            raise ValueError(f"no shard fills {n} tokens with documents of at most {M}")
        batch, i = result
        yield batch


def cu_seqlens(lengths, n):
    """Cumulative lengths of documents that sum to n + 1 tokens: the last document loses one."""
    assert sum(lengths) == n + 1
    return np.array([0, *np.cumsum(lengths[:-1]), n], np.int32)


def validation_piece(tokens, pos, n, sep):
    """(inputs, targets, cu) of the n tokens from pos on; cu is 0, the position of every separator, and n."""
    inputs, targets = tokens[pos:pos + n], tokens[pos + 1:pos + n + 1]
    assert len(targets) == n
    cu = np.array([0, *(p for p, x in enumerate(inputs.tolist()) if x == sep), n], np.int32)
    return inputs.astype(np.int32), targets.astype(np.int64), cu


# -------------------------------------------------------------------------------------------- optimizer
ADAM_LR, ADAM_EPS, ADAM_WD = 0.008, 1e-10, 0.005
NORMUON_LR, NORMUON_BETA2, NORMUON_WD = 0.023, 0.95, 1.2

# Polar Express: coefficients of the iterations
POLAR = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]

# label: (beta1, beta2, lr_mul, wd_mul)
ADAM_TABLE = {label: row for labels, row in {
    "sa_lambdas smear_lambda backout_lambda skip_lambda": (0.9, 0.99, 5.0, 0), "resid_lambdas": (0.9, 0.95, 5.0, 0),
    "post_lambdas x0_lambdas bigram_lambdas": (0.9, 0.95, 1.0, 0), "attn_gate_bank ve_gate_bank": (0.9, 0.99, 1, 1),
    "smear_gate": (0.9, 0.99, 0.01, 0), "skip_gate": (0.9, 0.99, 0.05, 0),
    "lm_head embed": (0.5, 0.95, 1, 150), "bigram_embed value_embeds": (0.75, 0.95, 75, 5)}.items()
    for label in labels.split()}

# label: learning-rate multipliers of the matrices of one bank, repeated along the bank
NORMUON_TABLE = {
    "qk_bank": (1,), "narrow_qk_bank": (1,), "vo_bank": (1, 1), "mlp_bank": (2, 4)}  # V, O; W1, W2


def polar_express(X):
    """Five iterations on X (..., R, C), whose Frobenius norms are below 1."""
    wide = X.shape[-2] <= X.shape[-1]
    for a, b, c in POLAR:
        P = X @ X.mT if wide else X.mT @ X
        Q = b * P + c * P @ P
        X = a * X + (Q @ X if wide else X @ Q)
    return X


def normuon_step(state, g, mu, lrs, wd, slow=None):
    """One step of master weights w (c, R, C), in place; lrs one rate per matrix, wd = lambda.

    slow: (decay of m, rate of the slow average s, its share in the averaged gradient), if there is one.
    """
    m, lrs = state["m"], torch.as_tensor(lrs, dtype=g.dtype, device=g.device).reshape(-1, 1, 1)
    # 1-3
    decay, rate, share = slow or (mu, 0.0, 0.0)
    m.copy_(decay * m + (1 - decay) * g)
    if slow:
        state["s"].copy_((1 - rate) * state["s"] + rate * g)
    u = (1 - mu) * g + mu * ((1 - share) * m + share * state.get("s", 0.0))
    normuon_update(state, polar_express(u / (1.02 * torch.sqrt((u * u).sum((-2, -1), keepdim=True)) + 1e-6)), lrs, wd)


def normuon_update(state, y, lrs, wd):
    """The part of `normuon_step` that follows the orthogonalisation: y (c, R, C), lrs (c, 1, 1)."""
    w, v = state["w"], state["v"]
    # 4
    q, n = (y * y).mean(2, keepdim=True), w.shape[2]
    norm = torch.sqrt(n * q.sum((1, 2), keepdim=True))
    v.copy_(v + (1 - NORMUON_BETA2) * (q - v))
    r = 1 / torch.sqrt(v.clamp(min=1e-10))
    new_norm = torch.sqrt((n * q * r * r).sum((1, 2), keepdim=True))
    y = y * r * norm / new_norm.clamp(min=1e-10)
    # 5
    keep = (y * w >= 0).to(w.dtype)
    w.copy_(w - keep * w * wd * lrs - y * lrs)


def adam_step(state, g, lr, beta1, beta2, wd_mul):
    """One Adam step with quadratic cautious decay; updates the parameter p in place."""
    p, m, v = state["p"], state["m"], state["v"]
    state["t"] += 1
    m.copy_(beta1 * m + (1 - beta1) * g)
    v.copy_(beta2 * v + (1 - beta2) * g * g)
    size = lr * (1 - beta2 ** state["t"]) ** 0.5 / (1 - beta1 ** state["t"])
    u = size * m / (torch.sqrt(v) + ADAM_EPS)
    wd = lr * lr * ADAM_WD * wd_mul
    u = u + wd * p * (u * p > 0).to(p.dtype)
    p.copy_(p - u)


def rows_step(p, v, g, lr, wd, beta2, eps, one_number=False):
    """(p, v) after one step of Adam without first moment; v (rows, width), or one number for each row (rows, 1)."""
    v = beta2 * v + (1 - beta2) * (g.square().mean(1, keepdim=True) if one_number else g.square())
    u = lr * g / (v.sqrt() + eps)
    return p - u - wd * p * (u * p > 0), v


class OracleOptimizer:
    """The optimizer of the whole model on one rank. The banks are the master weights, and nothing is rounded.

    `params` holds the current weights under their labels; `states` the Adam and NorMuon states.
    """

    def __init__(self, params):
        assert set(ADAM_TABLE) < set(params) <= set(ADAM_TABLE) | set(NORMUON_TABLE)
        self.params = {label: p.detach().double().clone().contiguous() for label, p in params.items()}
        self.states = {}
        self.banks = [label for label in NORMUON_TABLE if label in params]
        for label in self.banks:
            w = self.params[label].flatten(0, -3)
            m, s, v = (torch.zeros_like(x) for x in (w, w, w[:, :, :1]))
            self.states[label] = dict(w=w, m=m, s=s, v=v)
        for label in ADAM_TABLE:
            p = self.params[label]
            self.states[label] = dict(p=p, m=torch.zeros_like(p), v=torch.zeros_like(p), t=0)
        self.sums = {label: torch.zeros_like(self.params[label]) for label in ADAM_TABLE}
        self.tied = True

    @torch.no_grad()
    def step(self, grads, step, s, mu, split_step, slow=None, every=2, table_lr=ADAM_LR):
        """At learning-rate factor s and momentum mu; slow: see `normuon_step`; every: steps per Adam update."""
        assert split_step % 2 == 1
        for label in self.banks:
            muls = NORMUON_TABLE[label]
            g = grads[label].double().flatten(0, -3)
            lrs = [NORMUON_LR * s * muls[j % len(muls)] for j in range(len(g))]
            normuon_step(self.states[label], g, mu, lrs, NORMUON_WD * NORMUON_LR * s, slow)

        for label in ADAM_TABLE:
            self.sums[label] += grads[label].double()
        tables = "value_embeds", "bigram_embed"
        updated = [label for label in ADAM_TABLE if step % 2 or every == 1 and label not in tables]
        if self.tied and updated:
            self.sums["lm_head"] += self.sums["embed"].T
        for label in updated:
            beta1, beta2, lr_mul, wd_mul = ADAM_TABLE[label]
            if every == 1 and label not in tables:
                beta2 **= 0.5 if label in ("lm_head", "embed") else 1
            if not (label == "embed" and self.tied):
                rate = table_lr if label in tables else ADAM_LR
                adam_step(self.states[label], self.sums[label], rate * s * lr_mul, beta1, beta2, wd_mul)
            self.sums[label].zero_()
        if self.tied and updated:
            self.params["embed"].copy_(self.params["lm_head"].T)

        if step == split_step:
            head, embed = self.states["lm_head"], self.states["embed"]
            embed["t"] = head["t"]
            embed["m"].copy_(head["m"].T)
            embed["v"].copy_(head["v"].T)
            self.tied = False


# -------------------------------------------------------------------------- schedules of the record run
def stage_of(step):
    """0, 1, 2, and 3 for the extension (which also holds step 1490)."""
    return sum(step >= end for end in (483, 967, 1450))


def lr_factor(step):
    """Learning-rate factor of a step."""
    base = [1.0, 1.52, 1.73, 1.73][stage_of(step)]  # has no effect in the extension
    t = min(max(0, (step - 580) / (1450 - 580)), 1)
    return base * (1 - t) + 0.15 * t


def muon_momentum(step):
    """Momentum of NorMuon at a step."""
    return np.interp(step, (0, 300, 1440, 1490), (0.85, 0.95, 0.95, 0.85))


def mtp_weights(step):
    """Weights of the next-token predictions, linear within a stage."""
    if step < 483:
        return [1.0, 0.5, 0.25 * (1 - step / 483)]
    if step < 967:
        return [1.0, 0.5 * (1 - (step - 483) / (967 - 483))]
    return [1.0]


# ---- Judging a kernel ------------------------------------------------------------------------------------------------
ON_GPU = torch.cuda.is_available()
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: Triton's interpreter gets it wrong or takes minutes")
only_gpu = lambda *values: pytest.param(*values, marks=gpu)  # noqa: E731
bf16 = only_gpu(torch.bfloat16)  # the interpreter gets tl.dot on bf16 wrong and truncates to bf16


def leaves(values, dtype=None):
    """Each tensor as a leaf of autograd, of another dtype if one is given; None and numbers stay."""
    return [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() if isinstance(x, torch.Tensor) else x
            for x in values]


def with_gradients(function, inputs, upstream, dtype=None):
    """[*results, *gradients of the inputs], leaving out what is None; inputs and upstream may get another dtype."""
    inputs = leaves(inputs, dtype)
    results = function(*inputs)
    results = [x for x in (results if isinstance(results, (tuple, list)) else [results]) if x is not None]
    grads = torch.autograd.grad(results, [x for x in inputs if isinstance(x, torch.Tensor)],
                                [g.to(x.dtype) for g, x in zip(upstream, results, strict=True)], materialize_grads=True)
    return [*(x.detach() for x in results), *grads]


def framed(values, *margins):
    """(buffer of NaN, view in it of `values`); margins: (before, after) of each of the last axes."""
    margins = [(0, 0)] * (values.dim() - len(margins)) + [*margins]
    shape = [before + size + after for size, (before, after) in zip(values.shape, margins)]
    buffer = torch.full(shape, math.nan, device=values.device).to(values.dtype)
    view = buffer[tuple(slice(before, before + size) for size, (before, _) in zip(values.shape, margins))]
    return buffer, view.copy_(values)


def assert_only_view_written(buffer, view):
    """`view` holds no NaN, and the buffer around `view` holds nothing else."""
    buffer, view = (x.float().isnan() for x in (buffer, view))  # fp8 has no isnan
    assert not view.any() and buffer.sum() == buffer.numel() - view.numel()


def assert_as_good(got, ref, oracle, name="", slack=None, floor=None, norm_floor=None, worst_ref=None):
    """Assert that the error of `got` is at most `slack` times the error of `ref` plus a floor, per element and in norm.

    ref is plain PyTorch in the same dtype; oracle is fp64.
    floor, norm_floor: in roundings (half an eps); by default one rounding of the oracle, in fp32 four.
    worst_ref: the largest allowed error of ref in norm, in roundings of the whole oracle. A reference with a larger
    error is broken and would excuse any kernel.
    """
    rounding = torch.finfo(got.dtype).eps / 2
    # fp32 is for tests only; its sums run in another order than the library's sums, which may be lucky. Largest ratio
    # seen: 3.4 (H200).
    loose = 4 if got.dtype == torch.float32 else 1
    slack = max(2, loose) if slack is None else slack
    floor = loose * oracle.abs() if floor is None else floor
    norm_floor = floor.norm() if norm_floor is None else norm_floor
    assert got.dtype == ref.dtype and got.shape == ref.shape == oracle.shape, name
    error, ref_error = got.double() - oracle, ref.double() - oracle
    seen = (f"{name}: {error.abs().max():.2e} against {ref_error.abs().max():.2e},"
            f" norm {error.norm():.2e} against {ref_error.norm():.2e}") if error.numel() else name
    assert not error.numel() or (error.abs() <= slack * ref_error.abs().max() + rounding * floor).all(), seen
    assert error.norm() <= slack * ref_error.norm() + rounding * norm_floor, seen
    assert worst_ref is None or ref_error.norm() <= worst_ref * rounding * oracle.norm() + 1e-30, seen
