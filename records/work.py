"""The least work of our kernels, in operations and bytes.

records/trace.py and tests/bench_kernels.py use this module.
"""

from collections import Counter

import numpy as np


def product(n, M, K):
    """(operations, bytes) of n symmetric M x M products over K, in tiles of 128 up to the diagonal."""
    return n * M * (M + 128) * K, 2 * n * M * (K + M)


WORK = {  # operation -> (kernels of one call, function from sizes to (bf16 operations, bytes)). A multiply-add is two
    # operations; each operand counts once.
    "XXT": ("_gram_kernel", product),
    "XTX": ("_gram_kernel", product),
    "ba_plus_cAA": ("_gram_kernel", lambda n, M: (product(n, M, M)[0], 4 * n * M * M)),
    # slow: with a slow average. average: with that of the weights.
    "fused_momentum": ("_momentum_kernel _momentum_scale_kernel", lambda size, slow: (0, (12 + 8 * slow) * size)),
    "normuon_update": ("_row_norms_kernel _normuon_kernel", lambda size, average=False: (0, (10 + 8 * average) * size)),
    "adam_update": ("_adam_kernel", lambda size, average=False: (0, (22 + 8 * average) * size)),
    "replicated_update": ("_adam_kernel", lambda size, itemsize: (0, (32 + 3 * itemsize) * size)),
    "transpose_copy": ("_transpose_kernel", lambda size: (0, 4 * size)),
    "transpose_add": ("_transpose_kernel", lambda size: (0, 6 * size)),
    "transpose_bytes": ("_transpose_kernel", lambda size: (0, 2 * size)),
    # d: width of the heads of v; qk: width of those of q and k, divided by d; pairs: (query, key) that see each other,
    # over all heads
    "attend": ("_attention_kernel", lambda N, D, d, qk, pairs: (2 * d * (qk + 1) * pairs, 4 * N * D * (qk + 1))),
    "attend_backward": ("_attention_backward_kernel", lambda N, D, d, qk, pairs: (
        2 * d * (3 * qk + 2) * pairs, N * D * (8 * qk + 6))),
    "project": ("_project_kernel", lambda N, D, value, qk: (
        2 * N * D * D * (2 * qk + 1), 2 * N * D * (2 + 2 * qk + value))),
    # Reads q, k and their gradients, writes two gradients; may copy dv, read ve and write the gradient of ve.
    "project_backward": ("_project_grad_kernel", lambda N, D, value, paired, qk: (
        0, 2 * N * D * (6 * qk + (3 + paired if value else 2 * paired)))),
    # The projection in FP8; an FP8 operation counts as half of one, see below. The kernel of the gradients writes codes
    # of q, k and v in both layouts.
    "project_codes": ("_project_kernel", lambda N, D, value, qk: (
        N * D * D * (2 * qk + 1), N * D * (3 + 2 * (2 * qk + value)))),
    "project_codes_backward": ("_project_grad_kernel", lambda N, D, value, paired, qk: (
        0, 4 * N * D * (3 * qk + 1 + value))),
    # channels: input of the gates. Reads and writes the gradients of the channels and of other gates of the layer.
    "head_gates": ("_head_gates_kernel", lambda N, channels, gates: (0, 2 * N * (channels + gates))),
    "head_gates_backward": ("_head_gates_grad_kernel", lambda N, channels, gates: (
        0, 2 * N * (3 * channels + 2 * gates))),
    # passes: how often a bf16 tensor (size,) is read or written: weights and their gradients
    "scaled_weights": ("_scale_weights_kernel", lambda size, passes: (0, 2 * size * passes)),
    # passes: how often a sum of streams reads or writes a bf16 tensor (N, D); two codes (FP8) count as one
    "mix": ("_mix_kernel", lambda N, D, passes: (0, 2 * N * D * passes)),
    "mix_backward": ("_mix_grad_kernel", lambda N, D, passes: (0, 2 * N * D * passes)),
    "added_backward": ("_added_grad_kernel", lambda N, D, passes: (0, 2 * N * D * passes)),
    "token_gate": ("_token_gate_kernel", lambda N, channels: (0, N * (2 * channels + 4))),
    "token_gate_backward": ("_token_gate_grad_kernel", lambda N, channels: (0, N * (4 * channels + 4))),
    "exclude_values": ("_exclude_values_kernel", lambda N, D: (0, 6 * N * D)),
    "output_grad": ("_output_grad_kernel", lambda N, D, excludes: (0, (10 if excludes else 4) * N * D)),
    "mlp": ("_mlp_kernel", lambda N, D, F: (2 * N * D * F, 2 * N * (D + F))),  # relu(x W1ᵀ)²
    "mlp_backward": ("_mlp_kernel", lambda N, D, F: (2 * N * D * F, 2 * N * (D + 2 * F))),  # dpre
    # In FP8, whose limit is twice as high, so that an operation counts as half of one.
    "mlp_codes": ("_mlp_kernel", lambda N, D, F: (N * D * F, N * (D + 2 * F))),
    "mlp_codes_backward": ("_mlp_kernel", lambda N, D, F: (N * D * F, N * (D + 3 * F))),
    "quantise_weights": ("_quantise_weights_kernel", lambda size: (0, 4 * size)),  # without the largest weights
    "pointer_inputs": ("_pointer_inputs_kernel", lambda N, d: (0, 10 * N * d)),
    "pointer_inputs_backward": ("_pointer_inputs_grad_kernel", lambda N, d: (0, 16 * N * d)),
    "pointer": ("_pointer_kernel", lambda N, d, pairs: (2 * d * pairs, 4 * N * d)),
    "pointer_backward": ("_pointer_backward_kernel", lambda N, d, pairs: (6 * d * pairs, 8 * N * d)),
    "cross_entropy": ("_cross_entropy_kernel", lambda rows, V, fp8: (0, (3 if fp8 else 4) * rows * V)),
    # The signs are few rows, which the cache holds.
    "signed_rows": ("_signed_rows_kernel", lambda N, D, orders: (0, 2 * N * D * (orders + 1))),
    "embedding_grad": ("_sum_rows_kernel _sum_pieces_kernel", lambda N, D, unique: (0, 2 * D * (N + 2 * unique))),
    # Reads and writes bf16 weights, their gradients and fp32 second moments.
    "update_rows": ("_update_rows_kernel", lambda touched: (0, 16 * touched)),
    # Reads and writes bf16 weights and gradients.
    "update_few_rows": ("_update_few_rows_kernel", lambda touched: (0, 8 * touched))}


def name_in_work(name):
    """The name in WORK of a kernel."""
    return name.replace("_hopper_kernel", "_kernel")


def seen_pairs(lengths, window):
    """Pairs (query, key) of one head with key <= query <= key + window in documents of these lengths."""
    lengths = np.asarray(lengths, dtype=np.int64)
    near = np.minimum(lengths, window)
    return int((near * (near + 1) // 2 + (lengths - near) * (window + 1)).sum())


def calls(trainer, plan, batches):
    """(operation, sizes) of every call on this rank in the step of `plan`, which has these batches."""
    config, optimizer, head, ranks = trainer.config, trainer.optimizer, trainer.head, trainer.rt.world
    model, layers, stage = config.model, config.model.layers, config.schedule.stages[plan.stage]
    D, H, F, V, N = model.model_dim, model.num_heads, model.mlp_dim, model.padded_vocab, plan.micro_batch_tokens
    mlp_codes, qkv_codes = "_codes" * config.system.fp8_mlp, "_codes" * config.system.fp8_qkv
    orders, tables = len(model.ngrams), 1 + sum(layer.value_embed for layer in layers)  # tables indexed by token id
    for batch in batches:
        documents, token_ids = np.diff(batch.cu_seqlens.tolist()), batch.tokens.unique().numel()
        touched = {table: rows.unique().numel() for table, rows in batch.row_ids.items()}
        for layer in layers:
            yield from ((f"mlp{mlp_codes}{way}", N, D, F) for way in ("", "_backward"))
            if layer.attention:
                folds, value, paired = 1 + layer.paired, layer.value_embed, layer.paired
                qk = 0.5 if layer.narrow else 1  # width of the heads of q and k, divided by d
                window = stage.long_window if layer.long else stage.short_window
                pairs = H // folds * seen_pairs(folds * documents, window)
                yield from ((name, N, D, D // H, qk, pairs) for name in ("attend", "attend_backward"))
                yield f"project{qkv_codes}", N, D, value, qk
                yield f"project{qkv_codes}_backward", N, D, value, paired, qk
                channels = optimizer.params["attn_gate_bank"].size(-1) * (3 if value and not paired else 2) // 2
                yield from ((name, N, channels, H * (1 + value)) for name in ("head_gates", "head_gates_backward"))
        if model.pointer:
            d, pairs = optimizer.params["pointer_sink"].numel(), seen_pairs(documents - 1, N)  # none points at itself
            yield from ((name, N, d, pairs) for name in ("pointer", "pointer_backward"))
            yield from ((name, N, d) for name in ("pointer_inputs", "pointer_inputs_backward"))
        columns = V if batch.candidates is None else batch.candidates.numel()
        for start in range(0, N, head.block):
            yield "cross_entropy", min(head.block, N - start), columns, head.fp8
        yield from [("transpose_bytes", N * columns)] * head.fp8
        yield from [("transpose_bytes", D * columns)] * (head.fp8 and columns < V)
        yield from [("embedding_grad", N, D, token_ids)] * tables
        yield from (("embedding_grad", N * orders, D, n) for n in touched.values())
        if ranks > 1:  # of the rows that the ranks send to their owners
            yield from (("embedding_grad", n, D, n // ranks) for n in touched.values() if optimizer.of_rows)
        if model.bigram_signs or orders > 1:
            yield "signed_rows", N, D, orders
    if mlp_codes:
        yield "quantise_weights", 2 * F * D * len(layers)
    if qkv_codes:  # layers of one width are quantised together
        widths = Counter(layer.narrow for layer in layers if layer.attention)
        yield from (("quantise_weights", n * D * D * (2 if narrow else 3)) for narrow, n in widths.items())
    for each in optimizer.sharded.values():
        if each.row.optim == "normuon":
            n, R, C = each.part.shape
            side, product = min(R, C), "XXT" if R <= C else "XTX"
            yield from [(product, n, side, max(R, C)), ("ba_plus_cAA", n, side)] * config.optim.polar_steps
            yield from (("fused_momentum", n * R * C, bool(config.optim.slow_momentum)), ("normuon_update", n * R * C))
        elif "m" in each.state and not (plan.tied and each.row.tied_to) and (
                plan.tables if each.row.sparse else plan.adam):
            yield "adam_update", each.part.numel()
    if plan.adam:
        yield from (("replicated_update", len(x), x.element_size()) for x in optimizer.replicated.grads)
        yield from [("quantise_weights", D * V)] * head.fp8
        yield from [("transpose_add", D * V), ("transpose_copy", D * V)] * plan.tied
    if plan.tables:
        # This counts too little: only the rows that the last micro-batch touched, and of these this rank's share.
        rows = {"value_embeds": (tables - 1) * token_ids, **touched}
        for label, state in optimizer.state.items():
            if label in optimizer.of_rows or "last" in state:
                name = "update_few_rows" if label in optimizer.of_rows else "update_rows"
                yield name, D * rows[label] // ranks
