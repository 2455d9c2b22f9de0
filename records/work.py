"""The least work of the kernels that take most of a step, in operations and bytes.

records/trace.py and tests/bench_kernels.py use this module.
"""

import numpy as np


def product(n, M, K):
    """(operations, bytes) of n symmetric M x M products over K, in tiles of 128 up to the diagonal."""
    return n * M * (M + 128) * K, 2 * n * M * (K + M)


WORK = {  # operation -> (kernels of one call, function from sizes to (bf16 operations, bytes)). A multiply-add is two
    # operations; each operand counts once. fp8: with codes, in 1 byte; the limit is twice as high, so that an operation
    # counts as half of one.
    "XXT": ("_gram_kernel", product),
    "XTX": ("_gram_kernel", product),
    "ba_plus_cAA": ("_gram_kernel", lambda n, M: (product(n, M, M)[0], 4 * n * M * M)),
    # slow: with a slow average. average: with that of the weights.
    "fused_momentum": ("_momentum_kernel _momentum_scale_kernel", lambda size, slow: (0, (12 + 8 * slow) * size)),
    "normuon_update": ("_row_norms_kernel _normuon_kernel", lambda size, average=False: (0, (10 + 8 * average) * size)),
    "adam_update": ("_adam_kernel", lambda size, average=False: (0, (22 + 8 * average) * size)),
    "replicated_update": ("_adam_kernel", lambda size, itemsize: (0, (32 + 3 * itemsize) * size)),
    # d: width of the heads of v; qk: width of those of q and k, divided by d; pairs: (query, key) that see each other,
    # over all heads
    "attend": ("_attention_kernel", lambda N, D, d, qk, pairs: (2 * d * (qk + 1) * pairs, 4 * N * D * (qk + 1))),
    "attend_backward": ("_attention_backward_kernel", lambda N, D, d, qk, pairs: (
        2 * d * (3 * qk + 2) * pairs, N * D * (8 * qk + 6))),
    "project": ("_project_kernel", lambda N, D, value, qk, fp8=False: (
        (2 - fp8) * N * D * D * (2 * qk + 1), N * D * (4 - fp8 + 4 * qk + 2 * value))),
    # Reads q, k and their gradients, writes two gradients; may copy dv, read ve and write the gradient of ve. In FP8 it
    # writes codes of q, k and v in both layouts.
    "project_backward": ("_project_grad_kernel", lambda N, D, value, paired, qk, fp8=False: (
        0, 4 * N * D * (3 * qk + 1 + value) if fp8 else
        2 * N * D * (6 * qk + (3 + paired if value else 2 * paired)))),
    # channels: input of the gates. Reads and writes the gradients of the channels and of other gates of the layer.
    "head_gates": ("_head_gates_kernel", lambda N, channels, gates: (0, 2 * N * (channels + gates))),
    "head_gates_backward": ("_head_gates_grad_kernel", lambda N, channels, gates: (
        0, 2 * N * (3 * channels + 2 * gates))),
    # relu(x W1ᵀ)², and the gradient before the activation
    "mlp": ("_mlp_kernel", lambda N, D, F, fp8=False: ((2 - fp8) * N * D * F, N * ((2 - fp8) * D + 2 * F))),
    "mlp_backward": ("_mlp_kernel", lambda N, D, F, fp8=False: (
        (2 - fp8) * N * D * F, N * ((2 - fp8) * D + (4 - fp8) * F))),
    "pointer_inputs": ("_pointer_inputs_kernel", lambda N, d: (0, 10 * N * d)),
    "pointer_inputs_backward": ("_pointer_inputs_grad_kernel", lambda N, d: (0, 16 * N * d)),
    "pointer": ("_pointer_kernel", lambda N, d, pairs: (2 * d * pairs, 4 * N * d)),
    "pointer_backward": ("_pointer_backward_kernel", lambda N, d, pairs: (6 * d * pairs, 8 * N * d)),
    "cross_entropy": ("_cross_entropy_kernel", lambda rows, V, fp8: (0, (3 if fp8 else 4) * rows * V)),
    "embedding_grad": ("_sum_rows_kernel _sum_pieces_kernel", lambda N, D, unique: (0, 2 * D * (N + 2 * unique)))}


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
    for batch in batches:
        documents, token_ids = np.diff(batch.cu_seqlens.tolist()), batch.tokens.unique().numel()
        for layer in layers:
            yield from ((name, N, D, F, config.system.fp8_mlp) for name in ("mlp", "mlp_backward"))
            if layer.attention:
                folds, value, paired = 1 + layer.paired, layer.value_embed, layer.paired
                qk = 0.5 if layer.narrow else 1  # width of the heads of q and k, divided by d
                window = stage.long_window if layer.long else stage.short_window
                pairs = H // folds * seen_pairs(folds * documents, window)
                yield from ((name, N, D, D // H, qk, pairs) for name in ("attend", "attend_backward"))
                yield "project", N, D, value, qk, config.system.fp8_qkv
                yield "project_backward", N, D, value, paired, qk, config.system.fp8_qkv
                channels = optimizer.params["attn_gate_bank"].size(-1) * (3 if value and not paired else 2) // 2
                yield from ((name, N, channels, H * (1 + value)) for name in ("head_gates", "head_gates_backward"))
        if model.pointer:
            d, pairs = optimizer.params["pointer_sink"].numel(), seen_pairs(documents - 1, N)  # none points at itself
            yield from ((name, N, d, pairs) for name in ("pointer", "pointer_backward"))
            yield from ((name, N, d) for name in ("pointer_inputs", "pointer_inputs_backward"))
        columns = V if batch.candidates is None else batch.candidates.numel()
        for start in range(0, N, head.block):
            yield "cross_entropy", min(head.block, N - start), columns, head.fp8
        for _ in range(1 + sum(layer.value_embed for layer in layers)):  # tables indexed by token id
            yield "embedding_grad", N, D, token_ids
        for rows in batch.row_ids.values():
            touched = rows.unique().numel()
            yield "embedding_grad", N * len(model.ngrams), D, touched
            if ranks > 1 and optimizer.of_rows:  # of the rows that the ranks send to their owners
                yield "embedding_grad", touched, D, touched // ranks
    for each in optimizer.sharded.values():
        if each.row.optim == "normuon":
            n, R, C = each.part.shape
            side, name = min(R, C), "XXT" if R <= C else "XTX"
            yield from [(name, n, side, max(R, C)), ("ba_plus_cAA", n, side)] * config.optim.polar_steps
            yield from (("fused_momentum", n * R * C, bool(config.optim.slow_momentum)), ("normuon_update", n * R * C))
        elif "m" in each.state and not (plan.tied and each.row.tied_to) and (
                plan.tables if each.row.sparse else plan.adam):
            yield "adam_update", each.part.numel()
    if plan.adam:
        yield from (("replicated_update", len(x), x.element_size()) for x in optimizer.replicated.grads)
