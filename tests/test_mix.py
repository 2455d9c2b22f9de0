"""Sums of streams with their norm and codes, against autograd in fp64; new tensors hold NaN."""

from types import SimpleNamespace

import pytest
import torch

import test_guard
import train_gpt as T
import triton_kernels as tk
from data.run.log import Stopwatch
from data.run.machine import Runtime
from oracles import ON_GPU, assert_as_good, bf16, leaves, with_gradients

pytestmark = pytest.mark.usefixtures("poisoned_empty")
FP64 = torch.float64
MIX_REF, NO_REFERENCE = tk.mix_ref, ["mix_ref"]
SIZES = [(1, 16), (37, 48), (70, 96)]  # tokens, channels: one chunk of 16 channels, three, three of 32


def columns(N, count, device):
    """Columns (N, 1) of a wider matrix, as a dynamic layer makes them."""
    return list(torch.randn(N, count + 2, device=device)[:, 1:-1].split(1, 1))


def factors(N, device):
    """None, a number, tensors of one number, a column."""
    return [None, 0.5, torch.randn((), device=device), torch.randn(1, device=device), *columns(N, 1, device)]


def run(mix, streams, factors, reader, later, dtype=None):
    """Results and gradients of two sums: of all streams, and of what is added later in two places."""
    N, D = streams[0].shape
    streams, factors, later = leaves(streams, dtype), leaves(factors, dtype), [leaves(row, dtype) for row in later]
    vector = leaves([torch.linspace(-1, 1, 4, device=streams[0].device)], dtype)[0]  # its last element is for nobody
    table = leaves([torch.linspace(-1, 1, 5 * N, device=streams[0].device).view(5, N)], dtype)
    numbers = mix.unbind(vector)
    pieces = mix.columns(table[0], [1, 2, 1, 1])  # the second is for something else, the last one for nobody
    (first, second), added = mix.add_later(streams[:2], [*later, [pieces[2], numbers[2]]])
    third, channels = mix.first_channels(streams[3], 4)
    (third, fourth), before = mix.add_later([third, streams[4]], [[pieces[0], None], [numbers[2], factors[-1]]], True)
    terms = [*zip(factors, [first, second, streams[2], third, fourth]), (numbers[0], streams[2])]
    one = mix(terms, reader, [*added[:1], *before])
    two = mix([(factors[2], one.x), (numbers[1], first), (pieces[0], second), (numbers[0], first)], None, added[1:])
    results = [u for u in (one.x, one.normed, one.first, two.x, channels, numbers[1] * pieces[1]) if u is not None]
    torch.manual_seed(1)
    upstream = [torch.randn(u.shape, dtype=FP64).to(u) for u in results]
    inputs = [x for x in (*streams, vector, *table, *factors, *later[0], *later[1]) if isinstance(x, torch.Tensor)]
    return [*results, *torch.autograd.grad(results, inputs, upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, bf16])
@pytest.mark.parametrize("reader", [None, tk.Reader(), tk.Reader(channels=12)])
@pytest.mark.parametrize("N, D", SIZES)
def test_mix(N, D, reader, dtype, device):
    """With terms of every kind."""
    given = factors(N, device)
    streams = [torch.randn(N, D, device=device).to(dtype) for _ in given]
    later = [columns(N, 2, device), [torch.randn((), device=device), None]]
    args = streams, given, reader, later
    for part in zip(run(tk.mix, *args), run(MIX_REF, *args), run(MIX_REF, *args, FP64)):
        # The gradient of one number is a sum of N D products, which may cancel. With one token the reference is lucky.
        floor = 40 * (N * D)**0.5 * torch.finfo(dtype).eps / torch.finfo(part[0].dtype).eps
        assert_as_good(*part, slack=8 if N == 1 else 4,
                       floor=torch.full_like(part[2], floor) if part[2].numel() <= 4 else None)


def whole(shape, device):
    """Numbers that FP8 and bf16 hold, and whose sums are exact."""
    return torch.randint(-4, 5, shape, device=device).to(torch.float32)


@pytest.mark.parametrize("N, D", SIZES[1:])
def test_codes(N, D, device):
    """Codes of the normed stream in both layouts. The normed stream itself is not written; an edit that reads it meets
    NaN. A stream of one absolute value has a norm that FP8 holds."""
    x = torch.where(torch.rand(N, D, device=device) < 0.5, -3.0, 3.0)
    got = tk.mix([(None, x)], tk.Reader(2.0**-4, channels=12))
    for codes, wanted in zip(got.codes, (x.sign(), x.sign().mT)):
        assert torch.equal(codes.float() * 2.0**-4, wanted)
    assert torch.allclose(got.first, x.sign()[:, :12]) and got.normed.isnan().all() and got.normed.shape == x.shape


@pytest.mark.parametrize("N, D", SIZES[1:])
def test_the_gradient_as_codes(N, D, device):
    lane, m = whole((N, D), device).requires_grad_(), whole((N, D), device).requires_grad_()
    channel, upstream = tk.GradCodes(2.0**-6), whole((N, D), device)
    out = tk.mix([(torch.tensor(0.5, device=device), lane), (None, m)], grad_codes=channel)
    dlane, dm = torch.autograd.grad(out.x, (lane, m), upstream)
    assert torch.equal(dlane, 0.5 * upstream) and dm.isnan().all()
    codes = channel.take()
    assert all(torch.equal(u.float() * 2.0**-6, g) for u, g in zip(codes, (upstream, upstream.mT)))
    assert channel.take() is None


def bank_of(P, dtype, device):
    """Four layers of matrices larger than a block of the kernel. With one matrix a layer, they lie between NaN."""
    bank = torch.randn(4, 2, 50, 90, device=device).to(dtype)
    if P == 2:
        return bank
    bank[:, 0] = torch.nan
    return bank.unbind(1)[1][:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("P", [1, 2])
class TestScaledWeights:
    """The last layer has no factor. In bf16 the interpreter would not round; plain operations then stand for the
    kernel."""

    @pytest.fixture(autouse=True)
    def no_interpreter_in_bf16(self, dtype, monkeypatch):
        if not ON_GPU and dtype == torch.bfloat16:
            monkeypatch.setattr(tk, "INTERPRETED", False)

    def test_weights_times_factors(self, P, dtype, device):
        bank, factors = bank_of(P, dtype, device), torch.tensor([0.7, 0.0, -1.3], device=device)
        upstream = [torch.randn(50, 90, device=device).to(dtype) for _ in range(4 * P)]

        def exact(bank, factors):
            return [(*layer[:-1], factor * layer[-1]) for layer, factor in zip(bank, [*factors, 1.0])]
        for part in zip(*(with_gradients(lambda *inputs: sum(map(list, function(*inputs)), []), (bank, factors),
                                         upstream, dtype) for function, dtype in (
                (tk.scaled_weights, None), (tk.scaled_weights_ref, None), (exact, FP64))), strict=True):
            # The gradient of a factor is a sum of products, which may cancel.
            assert_as_good(*part, floor=torch.full_like(part[2], 40 * 4500**0.5) if part[2].ndim == 1 else None)

    def test_factors_in_codes(self, P, dtype, device):
        """The matrices are those of the bank, in its memory, and their gradients contain the factors."""
        bank, factors = leaves([bank_of(P, dtype, device), torch.tensor([0.7, 0.0, -1.3], device=device)])
        layers, upstream = tk.scaled_weights(bank, factors, in_codes=True), torch.randn(4, P, 50, 90, device=device)
        upstream[:3] *= factors.detach()[:, None, None, None]
        upstream = upstream.to(dtype)
        assert all(matrix.data_ptr() == bank[i, p].data_ptr() for i, layer in enumerate(layers)
                   for p, matrix in enumerate(layer))
        matrices = [matrix for layer in layers for matrix in layer]
        dbank, dfactors = torch.autograd.grad(matrices, (bank, factors), upstream.flatten(0, 1).unbind(0))
        assert torch.equal(dbank, upstream) and dfactors[1] == 0
        dots = (bank.detach().double() * upstream.double())[:3, -1]
        wanted = dots.sum((1, 2)) / factors.detach().double()
        for i in 0, 2:
            assert abs(dfactors[i] - wanted[i]) <= 2**-22 * dots[i].abs().sum() / abs(factors[i])


@pytest.mark.parametrize("by_sums", [False, True])
def test_every_reader_counts(by_sums, device):
    """Also beyond those whose gradients come to mix by themselves, and sums that read the stream."""
    x, count = torch.randn(9, 16, device=device).requires_grad_(), tk.READERS + 2
    upstream, factors = torch.randn(2 * count, 9, 16, device=device), torch.randn(count, 9, 1, device=device)

    def gradient(mix):
        mixed = mix([(0.5, x)], tk.Reader())
        xs = [mix([(factor, mixed.x)]).x if by_sums else factor * mixed.x for factor in factors]
        return torch.autograd.grad([*xs, *(mixed.normed for _ in xs)], x, [*upstream])[0]
    torch.testing.assert_close(gradient(tk.mix), gradient(MIX_REF))


@pytest.mark.parametrize("place", range(tk.READERS))
def test_an_x_with_two_readers_is_never_silently_wrong(place, device):
    """A sum and another operation that read one x, not each its own."""
    s = torch.randn(9, 16, device=device).requires_grad_()
    mixed = tk.mix([(None, s)])
    x = [mixed.x for _ in range(tk.READERS)][place]
    try:
        grad, = torch.autograd.grad((tk.mix([(2.0, x)]).x + 3 * x).sum(), s)
    except RuntimeError:
        return
    assert (grad == 5).all()


def test_a_place_without_a_gradient_is_passed_over(device):
    streams = leaves([torch.randn(20, 32, device=device) for _ in range(2)])
    rows = [leaves([torch.randn((), device=device), torch.randn((), device=device)]) for _ in range(2)]
    kept, added = tk.mix.add_later(streams, rows)
    loss = (tk.mix([(None, kept[0])], None, added[1:]).x).sum()
    dx, dn, *df = torch.autograd.grad(loss, [*streams, *rows[0], *rows[1]], allow_unused=True)
    assert torch.allclose(dx, 1 + rows[1][0].expand(20, 32)) and torch.allclose(dn, rows[1][1].expand(20, 32))
    assert df[:2] == [None, None] and torch.allclose(df[2], streams[0].sum(), rtol=1e-4)


def test_what_mix_refuses(device):
    x = torch.randn(4, 16, device=device)
    for other in torch.randn(4, 32, device=device)[:, ::2], torch.randn(5, 16, device=device), x.double():
        with pytest.raises(ValueError, match="^mix: stream must be contiguous"):
            tk.mix([(None, x), (None, other)])
    with pytest.raises(ValueError, match="has a factor"):
        tk.mix([(None, x), (torch.tensor(1.0), x)], grad_codes=tk.GradCodes(1.0))


@pytest.mark.parametrize("both", [False, True])
def test_first_channels(both, device):
    """Alone, and beside another reader of the stream, whose gradient stays as it is."""
    x, upstream = torch.randn(9, 16, device=device).requires_grad_(), torch.randn(9, 16, device=device)
    (stream, first), before = tk.first_channels(x, 4), upstream.clone()
    outputs, given = [first] + [stream] * both, [torch.ones_like(first)] + [upstream] * both
    wanted = both * upstream
    wanted[:, :4] += 1
    assert torch.equal(torch.autograd.grad(outputs, x, given)[0], wanted) and torch.equal(upstream, before)


@pytest.mark.parametrize("dtype", [torch.float32, bf16])
@pytest.mark.parametrize("N, C", [(1, 12), (700, 12), (513, 16)])
def test_token_gate(N, C, dtype, device):
    """In fp32 between inputs and outputs in bf16, too."""
    given = [torch.randn(rows, C, device=device).to(dtype) for rows in (N, 1)]
    factor = torch.full((1,), -1.7, device=device)
    upstream = torch.randn(N, 1, device=device)

    for got, exact in zip(with_gradients(tk.token_gate, (*given, factor), [upstream]),
                          with_gradients(tk.token_gate_ref, (*given, factor), [upstream], FP64)):
        assert (got - exact).norm() <= 4 * torch.finfo(got.dtype).eps * max(exact.norm(), N**0.5)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_exclude_values(per_token, dtype, device):
    """Forward, and the gradients that the attention block takes, the output gate's among them."""
    N, H, d = 21, 3, 16
    y, v, dz = (torch.randn(N, H, d, device=device).to(dtype) for _ in range(3))
    v[3] = 0  # no direction
    share = torch.randn(N, H + 2, device=device)[:, 1:-1] if per_token else torch.randn(H, device=device)
    gate = torch.rand(N, H, device=device).to(dtype)
    gate[5] = 0

    def reference(*args):
        *args, gate = args  # y has been multiplied by the gate: d/dgate = dy . y / gate
        *found, dgate = with_gradients(lambda y, v, share, one: tk.exclude_values_ref(one[..., None] * y, v, share),
                                       (*args, torch.ones_like(gate)), [dz])
        return *found, torch.where(gate > 0, dgate / gate, 0).float()
    got = tk.exclude_values(y, v, share), *tk.output_grad(dz, y, v, share, gate)
    exact = reference(*(x.double() for x in (y, v, share, gate)))
    for part in zip(got, reference(y, v, share, gate), exact):
        assert_as_good(*part)
    dy, dv, dshare, dgate = tk.output_grad(dz, y, v, None, gate)
    assert dy is not None and torch.equal(dy, dz) and dv is dshare is None
    wanted = torch.where(gate > 0, (dz.double() * y.double()).sum(-1) / gate.double(), 0)
    assert_as_good(dgate, wanted.float(), wanted)


def test_a_micro_step_in_fp8(tmp_path, device):
    """All parts of a run in FP8: with the sums by kernels the same gradients as with plain sums, within the noise of
    codes. A tensor without memory that somebody reads would make them NaN."""
    def gradients(mix):
        config = T.parse_config(["--preset=cpu", *test_guard.GUARD, *corpus, "--model_dim=64", "--micro_batches=1",
                                 "--stage1.batch_tokens=96", f"--device={device.type}", "--dtype=bfloat16",
                                 "--fp8=true", "--fp8_mlp=true", "--fp8_qkv=true", f"--kernels=mix:{mix}"])
        ops, _ = tk.choose_ops(device, config.system.kernels)
        rt = Runtime(0, 1, torch.empty(0, device=device).device)  # with the index of the GPU
        trainer = T.Trainer(config, rt, SimpleNamespace(line=print), ops, Stopwatch(0.0))
        generator = torch.Generator(device).manual_seed(1)
        for p in trainer.model.parameters():
            if not p.any():  # what begins at zero passes no gradient on
                p.detach().normal_(std=0.05, generator=generator)
        trainer.quantise_weights()
        batch, plan = trainer.loader.next_batch(), trainer.plans[0]
        trainer.micro_step(batch, trainer.mtp_table[0, :len(plan.mtp_weights)], trainer.attn[0])
        return {label: p.grad.float() for label, p in trainer.model.named_parameters() if p.grad is not None}
    corpus = test_guard.make_corpus(tmp_path)
    plain, fused = gradients("torch"), gradients("triton")
    for label, wanted in plain.items():
        assert fused[label].isfinite().all(), label
        if wanted.numel() > 1000:
            assert (fused[label] - wanted).norm() <= (0.15 if ON_GPU else 0.3) * wanted.norm(), label
