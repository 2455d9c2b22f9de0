"""The start: how many graphs are compiled, and that the log says where its time went."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import oracles
import train_gpt as T
import triton_kernels as tk
from data.run.clock import Stopwatch
from data.run.machine import Runtime
from data.run.warmup import steps_with_new_keys

# The model for training, the model for evaluation, Adam for each table that it updates (the replicated ones together,
# head, bigrams, values, embedding), and NorMuon before and after its iteration for two shapes of matrices.
GRAPHS = 2 + 5 + 2 * 2


@pytest.mark.skipif(torch.cuda.is_available(),
                    reason="counts what the CPU's compiler is given; on a GPU test_ops compiles the model")
@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs(tmp_path, monkeypatch):
    """One graph serves all stages and lengths. A change that adds a graph of the model costs every user half a minute of
    every cold start."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, 4000)
    tokens[::40] = 256
    for name in "train", "val":
        oracles.write_shard(tmp_path / f"{name}.bin", tokens)
    stages = ((64, 24, 8, 16), (96, 48, 16, 32), (128, 48, 24, 40), (128, 64, 32, 48))
    keys = "batch_tokens", "max_doc_len", "short_window", "long_window"
    config = T.parse_config([
        "--preset=record74", "--device=cpu", "--dtype=float32", "--fp8=false", "--vocab_size=257", "--micro_batches=1",
        "--kernels=attention:triton,mlp:triton", "--model_dim=32", "--num_heads=2",
        "--bigram_tables=1", "--scheduled_steps=9", "--extension_steps=2", "--val_tokens=160", "--val_batch_tokens=160",
        f"--train_files={tmp_path}/train.bin", f"--val_files={tmp_path}/val.bin",
        *(f"--stage{i}.{key}={value}" for i, stage in enumerate(stages, 1) for key, value in zip(keys, stage))])
    # In place of the opaque operators, which take minutes in the interpreter: all around them is traced as it is.
    monkeypatch.setattr(tk, "_mlp", lambda x, W1, W2: (tk.mlp_ref(x, W1, W2),))
    monkeypatch.setattr(tk, "_AttentionBlock", SimpleNamespace(apply=lambda with_values, x, weight, *args: (
        x @ weight[:x.size(1)]).view(x.size(0), args[3].size(0), -1) * args[7]))
    counter, compile = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **others: compile(f, backend=counter, **others))
    torch._dynamo.reset()
    device = torch.device("cpu")
    ops, _ = tk.choose_ops(device, config.system.kernels)
    watch = Stopwatch(0.0)
    trainer = T.Trainer(config, Runtime(0, 1, device), SimpleNamespace(line=print), ops, watch)
    T.warm_up(trainer)
    assert counter.frame_count == GRAPHS
    assert list(watch) == ["imports", "data", "model", "evaluation",
                           *(f"step {s}" for s in steps_with_new_keys(trainer.plans[:-1], set()))]
    for step in range(trainer.total):  # the run itself meets nothing new
        trainer.step(trainer.loader, trainer.plans[step], 1)
    for view in trainer.attn:
        T.summed_loss(trainer.forward, trainer.head, next(iter(trainer.validation)), view)
    assert counter.frame_count == GRAPHS
    torch._dynamo.reset()
