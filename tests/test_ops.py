"""The choice of implementations."""

import pytest
import torch

import triton_kernels as tk
from oracles import ON_GPU

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # naming a device needs none
OPS = ("XXT", "XTX", "ba_plus_cAA", "transpose_copy", "transpose_add", "attention", "mlp", "pointer", "pointer_inputs",
       "cross_entropy", "update_rows", "update_few_rows", "signed_rows", "embedding_grad", "fused_momentum",
       "normuon_update", "adam_update", "replicated_update", "mix")
FAST = dict.fromkeys(OPS, "triton")


@pytest.mark.parametrize("device, wanted, changed", [
    (CPU, "auto", dict.fromkeys(OPS, "torch")),
    (CUDA, "auto", FAST),
    (CUDA, "torch", dict.fromkeys(OPS, "torch")),
    (CUDA, "XXT:torch,transpose_add:torch", FAST | {"XXT": "torch", "transpose_add": "torch"}),
    pytest.param(CPU, "XTX:triton", dict.fromkeys(OPS, "torch") | {"XTX": "triton"},
                 marks=pytest.mark.skipif(ON_GPU, reason="kernels take CPU tensors in Triton's interpreter only")),
])
def test_choose_ops(device, wanted, changed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    ops, names = tk.choose_ops(device, wanted)
    assert names == changed and set(vars(ops)) == set(OPS)
    for op, name in names.items():
        function = op.replace("attention", "attention_block") + {"triton": "", "torch": "_ref"}[name]
        assert getattr(ops, op) is getattr(tk, function)


@pytest.mark.parametrize("wanted, message", [
    ("attention:flash", "'attention:flash' is not one of .*attention:triton.torch, .*XXT:triton.torch"),
    ("mlp:torch,XXT:cuda", "'XXT:cuda' is not one of"), ("attention", "'attention' is not one of")])
def test_implementations_that_do_not_exist(wanted, message, monkeypatch):
    """Each is refused before anything runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(ValueError, match=f"kernels: {message}"):
        tk.choose_ops(CUDA, wanted)
