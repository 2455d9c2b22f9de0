"""Example calls of every operation; and, before training on a GPU that nobody has tested, a trial of each operation by
these examples against its reference."""

import platform
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import triton_kernels as kernels
from data.loader import document_of_tokens, sorted_pieces
from data.run.config import with_knobs
from data.run.program import UserError, is_out_of_memory, one_line

TESTED = {(9, 0)}  # compute capabilities of the GPUs that have run the tests: H100 and H200
# Largest accepted ‖result − reference‖ / ‖reference‖. Rounding to bf16 makes up to .011, FP8 .06 to .1.
TOLERANCE, FP8_TOLERANCE = 0.05, 0.2


def is_tested(device) -> bool:
    """Whether the tests have run on a GPU of this kind; a CPU runs the references."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in TESTED


def example(op, model, dtype, device, ends=None, window=128, D=None, H=None, d=None, F=None, V=None, N=256, R=64,
            n=2, M=256):
    """Arguments of an operation, the same random numbers each time. Inputs with gradients require them. "attention" has
    a list, the arguments of each kind of layer; "mix" those of `sums`, "head" those of `head_loss`. ends: those of
    documents, as of `document_of_tokens`, here of two; window: of the pointer. D, H, d, F (of the MLP), V (columns
    of the head): other widths than the model's. N tokens, R rows of tables, n matrices of M rows."""
    D, H, d = D or model.model_dim, H or model.num_heads, d or model.head_dim
    F, V = F or model.mlp_dim, V or model.padded_vocab
    generator, fp32, int64 = torch.Generator(device).manual_seed(0), torch.float32, torch.int64

    def random(*shape, std=1.0, dtype=dtype):
        return (std * torch.randn(shape, generator=generator, device=device)).to(dtype)

    def leaf(*shape, **options):
        return random(*shape, **options).requires_grad_()

    def integers(high, *shape, dtype=torch.int32):
        return torch.randint(high, shape, generator=generator, device=device, dtype=dtype)

    def zeros(*shape, dtype=fp32):
        return torch.zeros(shape, dtype=dtype, device=device)

    ends = np.array([N // 3]) if ends is None else ends
    of_tokens, of_pairs = (torch.from_numpy(document_of_tokens(n * ends, n * N)).to(device) for n in (1, 2))
    mtp_weights = torch.tensor([1.0, 0.5], device=device)

    def embedding_grad():
        rows, few = integers(R, 2 * N), kernels.FewRows(zeros(R, D, dtype=dtype), min(R, 2 * N))
        pieces = torch.from_numpy(sorted_pieces(rows.cpu().numpy())).to(device)
        return few.grad, kernels.SortedIds(rows, pieces), random(N, D), *few.places, random(8, D), integers(8, 2 * N)

    def update_few_rows():
        p, touched = random(R, D), min(N, 3 * R // 8)
        few = kernels.FewRows(p, touched + 8)
        few.load(torch.randperm(R, generator=generator, device=device)[:touched], random(touched, D))
        return p, zeros(R, 1), zeros(R, 1, dtype=torch.int32), few.grad, *few.places, 1, 0.1, 0.01, 0.9, 1e-8

    def attention():
        calls = []
        for paired, long, narrow, has_values in sorted({(layer.paired, layer.long, layer.narrow, layer.value_embed)
                                                        for layer in model.layers if layer.attention}):
            angles = random(2 * N, d // 4, dtype=fp32)
            rotary = torch.stack((angles.cos(), angles.sin()), 2).to(dtype)
            weight = leaf((2 * d // (1 + narrow) + d) * H, D, std=D**-0.5)
            ve, w_ve = (leaf(N, D), leaf(H, 12)) if has_values else (None, None)
            calls.append((leaf(N, D), weight, rotary, ve, w_ve, leaf(H, 12),
                          of_pairs if paired else of_tokens, 128, d**-0.5, paired, long, narrow))
        return calls

    def cross_entropy():
        copies = kernels.Copies(random(R, 2, dtype=fp32).sigmoid(), random(R, dtype=fp32).sigmoid(), model.gate_id,
                                zeros(R, 2), zeros(R)) if model.pointer else None
        return (random(R, V, std=5.0), integers(min(model.vocab_size, V), R, 2, dtype=int64), mtp_weights, 1.0, 2.0**-6,
                zeros(R, V, dtype=dtype), copies)

    calls = {
        "signed_rows": lambda: (random(R, D), integers(R, 2 * N), 2, random(8, D), integers(8, 2 * N)),
        "embedding_grad": embedding_grad,
        "update_rows": lambda: (random(R, D), zeros(R, D), zeros(R, 1, dtype=torch.int32),
                                zeros(R, dtype=torch.bool).logical_not(), random(R, D), 1, 0.1, 0.01, 0.9, 1e-8),
        "update_few_rows": update_few_rows,
        "attention": attention,
        # The numbers are in one tensor, since the gradient of one number may be near zero by chance.
        "mix": lambda: (*(leaf(N, D) for _ in range(4)), leaf(2, 2, 64, D), leaf(2, dtype=fp32),
                        leaf(2, N, dtype=fp32), leaf(1, 12), leaf(4, dtype=fp32)),
        "mlp": lambda: (leaf(N, D), *(leaf(F, D, std=D**-0.5) for _ in range(2))),
        "pointer": lambda: (leaf(N, 128), leaf(N, 128), leaf(N, dtype=fp32), integers(8, N), *of_tokens, window, 0.1,
                            integers(8, N, 2, dtype=int64)),
        "pointer_inputs": lambda: (leaf(N, 3 * 128), leaf(1, dtype=fp32), leaf(128, dtype=fp32), of_tokens[0]),
        "cross_entropy": cross_entropy,
        "head": lambda: (leaf(N, D), torch.nn.Parameter(random(D, V, std=0.1)),
                         integers(min(model.vocab_size, V), N, dtype=int64), mtp_weights),
        "XXT": lambda: (random(n, M, D), zeros(n, M, M, dtype=dtype), random(n).float().abs()),
        "XTX": lambda: (random(n, M, D), zeros(n, D, D, dtype=dtype), random(n).float().abs()),
        "ba_plus_cAA": lambda: ((P := random(n, M, M)) + P.mT, 0.1, 0.5, torch.empty_like(P), 2.0),
        # The last arguments of these three are those of an average.
        "fused_momentum": lambda: (random(n, M, D), random(n, M, D, dtype=fp32), 0.9, 1.02, zeros(n, M, D), 0.85, 0.1,
                                   0.5),
        "normuon_update": lambda: (*(integers(2**14, n, M, D, dtype=torch.int16) for _ in range(2)), zeros(n, M, 1),
                                   random(n, M, D), 0.1, 1 + zeros(n, 1, 1), 0.1, 0.9, zeros(n, M, D), 0.5),
        "adam_update": lambda: (random(R, D), *random(2, R, D, dtype=fp32).abs(), random(R, D), 0.1, 0.01, 0.9, 0.99,
                                1e-8, random(R, D, dtype=fp32), 0.5),
        "replicated_update": lambda: (random(R * D), *zeros(2, R * D), random(R * D), 0.1, 3,
                                      *random(4, R * D, dtype=fp32).sigmoid(), 0.01, 1e-8),
        **dict.fromkeys(("transpose_copy", "transpose_add"), lambda: (random(N, D), random(D, N)))}
    return calls[op]()


def sums(mix, lane, a, x0, ngram, bank, vector, matrix, weight, numbers):
    """All parts of the operation `mix`, which is more than one function."""
    factors = numbers.unbind()
    (first, second), columns = mix.unbind(vector), mix.columns(matrix, [1, 1])
    (x0, _), added = mix.add_later([x0, ngram], [columns, [factors[0], None]])
    x0, channels = mix.first_channels(x0, 12)
    gate = mix.token_gate(channels, weight, factors[3])
    (x0,), before = mix.add_later([x0], [[gate]], previous=True)
    one = mix([(factors[1], lane), (None, a)], kernels.Reader(channels=12), added[:1])
    two = mix([(0.5, one.x), (factors[2], x0), (first, lane), (second, lane)], None, [*added[1:], *before])
    return one.normed, one.first, two.x, channels, *mix.scaled_weights(bank, vector)[1]


def head_loss(fp8, h, weight, targets, mtp_weights):
    return kernels.HeadLoss(weight, h.dtype, fp8, kernels.cross_entropy_ref)(h, targets, mtp_weights, 1.0)


def fp8_mlp(x, W1, W2):
    """`mlp` in FP8."""
    return kernels.Fp8Mlps(torch.stack((W1, W2))[None], 1.0)(0, x, W1, W2)


def fp8_attention(x, weight, *others):
    """`attention_block` with a projection in FP8."""
    [codes] = kernels.Fp8Projections(lambda: weight.detach()[None], 1.0).of_layers(torch.ones(1, device=x.device))
    x8, x8_t = kernels.both_layouts(x.detach(), kernels.x8_scale(x.size(1)), kernels.E4M3)
    return kernels.attention_block(x, weight, *others, codes=codes._replace(x8=x8, x8_t=x8_t))


def outcome(op, function, args):
    """What a function returns and changes, and the gradients of its inputs."""
    results = [x for x in tree_leaves(function(*args)) if torch.is_tensor(x)]
    inputs = [x for x in tree_leaves(args) if torch.is_tensor(x) and x.requires_grad]
    if inputs:
        generator = torch.Generator(inputs[0].device).manual_seed(1)
        grads = [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in results]
        return results + list(torch.autograd.grad(results, inputs, grads))
    if op == "embedding_grad":
        grad, (ids, _), _, place, rows, count, *_ = args
        return [grad[place[ids.long()].long()], rows.sort().values, count]  # rows have any places
    if op == "normuon_update":
        args = kernels.join_master(*args[:2]), *args[2:]
    return results + [x for x in tree_leaves(args) if torch.is_tensor(x)]


def fault_of(run, name, op, reference, tolerance):
    """What is wrong with an operation in words, or None. run(op): what op returns and changes. Raises UserError when
    the operation leaves the GPU unusable."""
    try:
        for result, wanted in zip(run(op), run(reference), strict=True):
            wanted = wanted.float()
            difference = (result.float() - wanted).norm() / wanted.norm().clamp(min=1e-30)
            if not difference <= tolerance:  # also NaN
                return f"differs by {difference.item():.2g}"
    except Exception as error:  # of any kind, since a compiler may fail
        if is_out_of_memory(error):
            raise
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError:
            knob = f"--kernels={name}:torch" if name in kernels.IMPLEMENTATIONS else f"--{name}=false"
            raise UserError(f"the kernel of {name} stops this GPU ({one_line(error)}); train with {knob}") from error
        return f"fails ({one_line(error)})"


def find_faults(config, ops, device) -> dict[str, str]:
    """{operation: what is wrong with it in words}, of the operations that do not have their references. "fp8",
    "fp8_mlp" and "fp8_qkv" stand for the head and two operations in FP8."""
    system, model, found = config.system, config.model, {}
    references = {op: functions["torch"] for op, functions in kernels.IMPLEMENTATIONS.items()}
    tried = [(op, op, getattr(ops, op), TOLERANCE) for op in references if getattr(ops, op) is not references[op]]
    tried += [row for row in (("fp8_mlp", "mlp", fp8_mlp, FP8_TOLERANCE), ("fp8", "head", True, FP8_TOLERANCE),
                              ("fp8_qkv", "attention", fp8_attention, FP8_TOLERANCE)) if getattr(system, row[0])]
    for name, op, function, tolerance in tried:
        def run(function):
            args = example(op, model, getattr(torch, system.dtype), device)
            function = {"mix": partial(sums, function), "head": partial(head_loss, function)}.get(op, function)
            return [x for each in (args if op == "attention" else [args]) for x in outcome(op, function, each)]
        if not found.get(op):
            found[name] = fault_of(run, name, function, references.get(op, False), tolerance)
    return {name: fault for name, fault in found.items() if fault}


def replace_faulty_kernels(config, ops, rt, log=None):
    """(config in which faulty operations have their references and faulty FP8 is off, a line for each fault). ops: the
    implementations that the config chooses; see `choose_kernels`. What is faulty on one rank is replaced on all ranks.
    GPUs that have run the tests need no trial."""
    faults = [{}]
    if not is_tested(rt.device):
        if log:
            log.line("trying each kernel on a GPU of a kind that nobody has tested", file=False)
        faults = [find_faults(config, ops, rt.device)]
    if rt.world > 1:
        faults *= rt.world
        dist.all_gather_object(faults, faults[0])
    faults = {op: fault for found in faults for op, fault in found.items()}
    references = [f"{op}:torch" for op in faults if op in kernels.IMPLEMENTATIONS]
    wanted = [config.system.kernels] if config.system.kernels != "auto" else []
    config = with_knobs(config, kernels=",".join(wanted + references) or "auto",  # an operation's last choice counts
                         **{knob: False for knob in faults if knob not in kernels.IMPLEMENTATIONS})
    gpu = torch.cuda.get_device_name(rt.device) if rt.device.type == "cuda" else platform.machine()
    return config, [f"warning: on {gpu}, with PyTorch {torch.__version__} and Triton {kernels.triton.__version__}, the"
                    f" kernel of {op} {fault}; PyTorch replaces it, which is slower and takes more memory. Please"
                    " report this line." for op, fault in faults.items()]
