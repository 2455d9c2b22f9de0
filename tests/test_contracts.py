"""What the operations refuse, in words, that CPU tensors take the references, and the choice of implementations."""

import inspect

import pytest
import torch

import train_gpt as T
import triton_kernels as tk
from data.run.trial import example
from oracles import ON_GPU

CPU, BF16 = torch.device("cpu"), torch.bfloat16
MODEL = T.Model(257, 64, 2, pointer=True, layers=(T.Layer(paired=True, value_embed=True),), backout_layer=None)
OPS = sorted(tk.IMPLEMENTATIONS.keys() - {"mix"})  # test_mix.py
PRODUCTS = {"attention", "mlp", "pointer", "XXT", "XTX", "ba_plus_cAA"}  # the interpreter has them in fp32 only
# Arguments whose rows, and whose elements, may have any strides; those that may be bf16 where others are fp32.
ROWS = {"embedding_grad": "upstream", "cross_entropy": "logits grad"}
STRIDED = {"attention": "x weight ve w_out w_ve", "XXT": "X out", "XTX": "X out", "ba_plus_cAA": "P out",
           "cross_entropy": "targets", "pointer": "targets", "transpose_copy": "src dst", "transpose_add": "src dst"}
IN_BF16 = {"adam_update": "p grad", "replicated_update": "p grad", "fused_momentum": "grad", "normuon_update": "y",
           "cross_entropy": "logits grad", "embedding_grad": "grad upstream signs", "signed_rows": "table signs",
           "pointer_inputs": "projected"}
OTHER = {torch.float32: torch.float64, torch.int32: torch.int64, torch.int64: torch.int32, torch.int16: torch.int32,
         torch.bool: torch.uint8}


def good_call(op, dtype=torch.float32):
    """(wrapper, {argument: value}) of a call as `trial` makes it."""
    wrapper, args = tk.IMPLEMENTATIONS[op]["triton"], example(op, MODEL, dtype, CPU)
    return wrapper, dict(zip(inspect.signature(wrapper).parameters, args[0] if op == "attention" else args))


@pytest.mark.parametrize("op", OPS)
def test_wrong_tensors(op, monkeypatch):
    """Each tensor in turn of another dtype, on another device, with another axis, and with gaps."""
    monkeypatch.setattr(tk, tk.IMPLEMENTATIONS[op]["torch"].__name__, lambda *args, **options: "reference")
    monkeypatch.setattr(tk, "INTERPRETED", False)
    wrapper, good = good_call(op)
    assert wrapper(**good) == "reference"
    strided, rows, in_bf16 = (table.get(op, "").split() for table in (STRIDED, ROWS, IN_BF16))
    for i, (name, x) in enumerate((name, x) for name, x in good.items() if isinstance(x, torch.Tensor)):
        wrong = [x.to(OTHER[x.dtype]), x[..., None], *[x.to("meta")] * (i > 0)]
        fine = [x.to(BF16)] if name in in_bf16 else []
        wrong += [x.to(BF16)] * (x.dtype == torch.float32 and not fine)
        if x.ndim > 1 and x.size(-1) > 1:
            apart, turned = x.repeat_interleave(2, 0)[::2], x.mT.contiguous().mT
            (fine if name in strided + rows else wrong).append(apart)
            (fine if name in strided else wrong).append(turned)
        for other in fine:
            assert wrapper(**good | {name: other}) == "reference", name
        for other in wrong:
            with pytest.raises(ValueError, match=rf"^{wrapper.__name__}: \w+ must .*"):
                wrapper(**good | {name: other})
    if op in PRODUCTS:
        monkeypatch.setattr(tk, "INTERPRETED", True)
        assert wrapper(**good_call(op, BF16)[1]) == "reference"


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def codes_of(good):
    weight, x = good["weight"].to(BF16), good["x"]
    x8, x8_t = x.to(tk.E4M3), x.mT.contiguous().to(tk.E4M3)  # without a kernel, which would need a GPU
    return tk.Fp8Projections(lambda: weight[None], 1.0).of_layers(torch.ones(1))[0]._replace(x8=x8, x8_t=x8_t)


SQUARE, NARROW = zeros(8, 8), zeros(128, 64)
WORDS = [  # operation, what is changed in its good call, the message
    ("mlp", dict(W2=None), "W2 must be a tensor, got None"),
    ("mlp", dict(x=zeros(6, 8, dtype=torch.float64)),
     r"x must be contiguous torch.bfloat16 or torch.float32 of shape \(6, 8\) on cpu, got torch.float64 of shape \(6, 8"
     r"\), strides \(8, 1\) on cpu"),
    ("ba_plus_cAA", dict(P=SQUARE, out=SQUARE), "out must not be P"),
    ("transpose_copy", dict(src=SQUARE, dst=SQUARE), "dst must not be src"),
    ("transpose_add", [zeros(2, 2, dtype=torch.int32)] * 2, "src must be .* got torch.int32"),
    ("mlp", dict(x=zeros(0, 64)), "N must be above 0"), ("mlp", dict(W1=zeros(18, 64), W2=zeros(18, 64)), "16 bytes"),
    ("mlp", [zeros(6, 6), zeros(16, 6), zeros(16, 6)], "16 bytes"),
    ("pointer", dict(q=zeros(256, 8), k=zeros(256, 8)), "d must be a power of two from 16"),
    ("pointer", dict(q=zeros(256, 48), k=zeros(256, 48)), "d must be a power of two from 16"),
    ("pointer", dict(targets=zeros(256, 0, dtype=torch.int64)), r"targets must be \(N, 1 or more\), got .* \(256, 0\)"),
    ("pointer_inputs", dict(projected=zeros(256, 72), weights=zeros(24)),
     r"projected must be \(N, 3 d\), d a power of two"),
    *(("cross_entropy", lambda good, part=part: dict(copies=good["copies"]._replace(**part)), f"copies.{message}")
      for part, message in (
          (dict(gate=384), "gate must be a column, 0 to 383, got 384"), (dict(gate=-1), "gate must be a column"),
          (dict(mass=zeros(64, 3)), r"mass must be .* shape \(64, 2\)"), (dict(dmass=zeros(2, 64).T), "dmass must be "),
          (dict(sink_mass=zeros(64).double()), "sink_mass must be contiguous torch.float32"),
          (dict(dsink_mass=zeros(64, 1)), r"dsink_mass must be .* shape \(64,\)"))),
    ("embedding_grad", dict(upstream=zeros(200, 64)), "512 ids, but upstream has 200 rows"),
    ("embedding_grad", dict(rows=None), "place, rows and count belong together"),
    *((op, change, message) for change in (dict(signs=None), dict(sign_ids=None), dict(sign_ids=zeros(2).int()))
      for op, message in (("embedding_grad", "signs need a sign_id for each of the 512 ids"),
                          ("signed_rows", "sign(s and sign_ids belong together|_ids)"))),
    ("signed_rows", lambda good: dict(ids=good["ids"][1:], sign_ids=good["sign_ids"][1:]), "511 ids for 2 orders"),
    *(("embedding_grad", lambda good, start=start: dict(sorted_ids=tk.SortedIds(
        good["sorted_ids"].ids, good["sorted_ids"].pieces if start is None else None if start else zeros(5, 3).int())),
       "sorted_ids has no pieces of its ids") for start in (0, 1)),
    ("attention", dict(weight=zeros(97, 64)), r"weight must be \(96 H, 64\), H even in paired layers, got \(97, 64\)"),
    ("attention", dict(weight=zeros(96, 64)), r"weight must be \(96 H, 64\), H even in paired layers, got \(96, 64\)"),
    ("attention", dict(weight=zeros(64, 64), rotary=zeros(512, 4, 2), narrow=True), "d is at least 32; got d = 16"),
    ("attention", dict(weight=NARROW, offset=True, narrow=True), "a narrow layer has no offset, .* offset=True"),
    ("attention", dict(narrow=True), r"16 \(q, k\) and 32 \(v\) weight must be \(64 H, 64\)"),
    *(("attention", dict(w_ve=zeros(H, C), w_out=zeros(H, C)),
       rf"w_out must be \(2, C\), C even and at most 64, got \({H}, {C}\)") for H, C in ((3, 12), (2, 66), (2, 11))),
    ("attention", dict(rotary=zeros(511, 8, 2)), r"rotary must have 512 rows, got \(511, 8, 2\)"),
    ("attention", dict(documents=zeros(2, 256).int()), r"documents must be \(2, 512\), got \(2, 256\)"),
    ("attention", dict(w_ve=None), r"ve must be \(256, 64\) and w_ve \(2, 12\), or both None, got .* and None"),
    ("attention", dict(ve=zeros(256, 63)), r"got \(256, 63\) and \(2, 12\)"),
    ("attention", dict(x=zeros(256, 66), weight=zeros(192, 66)), "rows of x must be multiples of 16 bytes, got 66 "),
    ("attention", dict(weight=zeros(288, 64), rotary=zeros(512, 12, 2)), "power of two and at least 16, got 48"),
    *(("attention", lambda good, part=part: dict(codes=codes_of(good)._replace(**part)), f"codes.{message}")
      for part, message in (
          (dict(x8=zeros(256, 64)), "x8 must be contiguous torch.float8_e4m3fn .* got torch.float32"),
          (dict(x8_t=zeros(256, 64).to(tk.E4M3)), r"x8_t must be .* got .* \(256, 64\)"),
          (dict(w8=zeros(64, 192).to(tk.E4M3).mT), r"w8 must be contiguous .* strides \(1, 192\)"),
          (dict(w8_t=zeros(64, 96).to(tk.E4M3)), r"w8_t must be .* got .* \(64, 96\)"))),
    ("attention", lambda good: (short := dict(x=good["x"][:40], ve=good["ve"][:40])) | dict(
        documents=good["documents"][:, :80].contiguous(), codes=codes_of(good | short)),
     ".*multiples of 16 for codes, got 40 and "),
    ("Fp8Mlps", dict(x=zeros(8, 32, dtype=BF16)), r".*multiples of 16, got 8 and \(48, 32\)"),
    ("Fp8Mlps", dict(x=zeros(16, 48, dtype=BF16)), r"x must be .* shape \(16, 32\) .* got .* shape \(16, 48\)"),
    ("Fp8Mlps", dict(W2=zeros(32, 48, dtype=BF16).mT), r"W2 must be contiguous torch.bfloat16 .* strides \(1, 48\)"),
    ("quantise_weights", dict(x=zeros(2, 4, 16)), "x must be contiguous torch.bfloat16 .* got torch.float32"),
    ("quantise_weights", dict(scales=zeros(2, 2)), r"scales must be .* shape \(2, 1\) .* got .* shape \(2, 2\)"),
    ("quantise_weights", dict(codes_t=zeros(2, 4, 16).to(tk.E4M3)), r"codes_t must be .* shape \(2, 16, 4\)"),
    ("quantise_weights", dict(codes=zeros(2, 4, 16).to(tk.E5M2)), "codes must be contiguous torch.float8_e4m3fn")]


@pytest.mark.parametrize("op, change, message", WORDS)
def test_words(op, change, message, monkeypatch):
    monkeypatch.setattr(tk, "INTERPRETED", True)  # some checks are the kernels'
    if op == "Fp8Mlps":
        bank = zeros(1, 2, 48, 32, dtype=BF16)
        call = lambda x, W1, W2: tk.Fp8Mlps(bank, 1.0)(0, x, W1, W2)
        good = dict(x=zeros(16, 32, dtype=BF16), W1=bank[0, 0], W2=bank[0, 1])
    elif op == "quantise_weights":
        call, good = tk.quantise_weights, dict(x=zeros(2, 4, 16, dtype=BF16), scales=zeros(2, 1), codes=zeros(
            2, 4, 16).to(tk.E4M3), codes_t=zeros(2, 16, 4).to(tk.E4M3))
    else:
        call, good = good_call(op)
    change = change(good) if callable(change) else dict(zip(good, change)) if isinstance(change, list) else change
    with pytest.raises(ValueError, match=f"^{getattr(call, '__name__', op).replace('<lambda>', op)}: .*{message}"):
        call(**good | change)


# ---- The choice of implementations -----------------------------------------------------------------------------------
CUDA, EVERY = torch.device("cuda"), (  # naming a device needs none
    "XXT", "XTX", "ba_plus_cAA", "transpose_copy", "transpose_add", "attention", "mlp", "pointer", "pointer_inputs",
    "cross_entropy", "update_rows", "update_few_rows", "signed_rows", "embedding_grad", "fused_momentum",
    "normuon_update", "adam_update", "replicated_update", "mix")
FAST = dict.fromkeys(EVERY, "triton")


@pytest.mark.parametrize("device, wanted, changed", [
    (CPU, "auto", dict.fromkeys(EVERY, "torch")), (CUDA, "auto", FAST), (CUDA, "torch", dict.fromkeys(EVERY, "torch")),
    (CUDA, "XXT:torch,transpose_add:torch", FAST | {"XXT": "torch", "transpose_add": "torch"}),
    pytest.param(CPU, "XTX:triton", dict.fromkeys(EVERY, "torch") | {"XTX": "triton"},
                 marks=pytest.mark.skipif(ON_GPU, reason="kernels take CPU tensors in Triton's interpreter only"))])
def test_choose_ops(device, wanted, changed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    ops, names = tk.choose_ops(device, wanted)
    assert names == changed and set(vars(ops)) == set(EVERY)
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
