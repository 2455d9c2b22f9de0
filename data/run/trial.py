"""Before training on a GPU that nobody has tested: each operation once on a small input, against its reference."""

import platform

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import triton_kernels as kernels
from data.loader import sorted_pieces
from data.run.config import with_knobs
from data.run.program import UserError, is_out_of_memory, one_line

TESTED = {(9, 0)}  # compute capabilities of the GPUs that have run the tests: H100 and H200
# Largest accepted ‖result − reference‖ / ‖reference‖. Rounding to bf16 makes up to .011, FP8 .06 to .1.
TOLERANCE, FP8_TOLERANCE = 0.05, 0.2


def is_tested(device) -> bool:
    """Whether the tests have run on a GPU of this kind; a CPU runs the references."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) in TESTED


def trials(model, dtype, device) -> dict:
    """{operation: function(op) -> results}. All calls of a function have the same input, of the model's widths. "fp8"
    is the head, whose function has the argument "in FP8". dtype: of weights and activations. The results are what op
    returns or changes, and the gradients of its inputs."""
    D, H, d, F, V, N = model.model_dim, model.num_heads, model.head_dim, model.mlp_dim, model.padded_vocab, 256
    generator, fp32 = torch.Generator(device), torch.float32
    borders = torch.tensor([0, N // 3, N], dtype=torch.int32, device=device)
    mtp_weights = torch.tensor([1.0, 0.5], device=device)

    def random(*shape, std=1.0, dtype=dtype):
        return (std * torch.randn(shape, generator=generator, device=device)).to(dtype)

    def integers(high, *shape, dtype=torch.int32):
        return torch.randint(high, shape, generator=generator, device=device, dtype=dtype)

    def zeros(*shape, dtype=fp32):
        return torch.zeros(shape, dtype=dtype, device=device)

    def all_tensors(op, *args):
        """What an operation returns, and its arguments, of which it may change some."""
        return [x for x in tree_leaves((op(*args), args)) if torch.is_tensor(x)]

    def with_gradients(function, *inputs):
        """The results of a function, and the gradients of its inputs for random gradients of the results."""
        inputs = [x.requires_grad_() for x in inputs]
        results = [x for x in function(*inputs) if x is not None]
        return results + list(torch.autograd.grad(results, inputs, [random(*x.shape, dtype=x.dtype) for x in results]))

    def embedding_grad(op):
        few, ids = kernels.FewRows(zeros(64, D, dtype=dtype), 64), integers(64, 2 * N)
        pieces = torch.from_numpy(sorted_pieces(ids.cpu().numpy())).to(device)
        op(few.grad, kernels.SortedIds(ids, pieces), random(N, D), *few.places, random(8, D), integers(8, 2 * N))
        return [few.grad[few.place[ids.long()].long()], few.rows.sort().values, few.count]  # rows have any places

    def update_few_rows(op):
        few = kernels.FewRows(p := random(64, D), 32)
        few.load(torch.randperm(64, generator=generator, device=device)[:24], random(24, D))
        return all_tensors(op, p, zeros(64, 1), zeros(64, 1, dtype=torch.int32), few.grad, few.place, few.rows,
                           few.count, 1, 0.1, 0.01, 0.9, 1e-8)

    def attention(op):
        results = []
        for paired, long, narrow, has_values in sorted(
                {(layer.paired, layer.long, layer.narrow, layer.value_embed)
                 for layer in model.layers if layer.attention}):
            angles = random(2 * N, d // 4, dtype=fp32)
            rotary = torch.stack((angles.cos(), angles.sin()), 2).to(dtype)
            weight = random((2 * d // (1 + narrow) + d) * H, D, std=D**-0.5)
            gates = [random(H, 12) for _ in range(1 + has_values)]
            values = [random(N, D)] * has_values

            def run(x, weight, w_out, *values):
                ve, w_ve = values or (None, None)
                return [op(x, weight, rotary, ve, w_ve, w_out, borders, 128, d**-0.5, paired, long, narrow)]
            results += with_gradients(run, random(N, D), weight, gates[0], *values, *gates[1:])
        return results

    def mix(op):
        def run(lane, a, x0, ngram, bank, vector, matrix, weight, numbers):
            factors = numbers.unbind()  # in one tensor, since the gradient of one number may be near zero by chance
            (first, second), columns = op.unbind(vector), op.columns(matrix, [1, 1])
            (x0, _), added = op.add_later([x0, ngram], [columns, [factors[0], None]])
            x0, channels = op.first_channels(x0, 12)
            gate = op.token_gate(channels, weight, factors[3])
            (x0,), before = op.add_later([x0], [[gate]], previous=True)
            one = op([(factors[1], lane), (None, a)], kernels.Reader(channels=12), added[:1])
            two = op([(0.5, one.x), (factors[2], x0), (first, lane), (second, lane)], None, [*added[1:], *before])
            return one.normed, one.first, two.x, channels, *op.scaled_weights(bank, vector)[1]
        return with_gradients(run, *(random(N, D) for _ in range(4)), random(2, 2, 64, D), random(2, dtype=fp32),
                              random(2, N, dtype=fp32), random(1, 12), random(4, dtype=fp32))

    def mlp(op):
        return with_gradients(lambda *inputs: [op(*inputs)], random(N, D), *random(2, F, D, std=D**-0.5).unbind())

    def pointer(op):
        start, end = kernels.document_of_tokens(borders, N)
        tokens, targets = integers(8, N), integers(8, N, 2, dtype=torch.int64)
        return with_gradients(lambda *inputs: op(*inputs, tokens, start, end, 128, 0.1, targets),
                              random(N, 128), random(N, 128), random(N, dtype=fp32))

    def pointer_inputs(op):
        start, _ = kernels.document_of_tokens(borders, N)
        return with_gradients(lambda *inputs: op(*inputs, start), random(N, 3 * 128), random(1, dtype=fp32),
                              random(128, dtype=fp32))

    def cross_entropy(op):
        grad, targets, copies = zeros(64, V, dtype=dtype), integers(model.vocab_size, 64, 2, dtype=torch.int64), None
        if model.pointer:
            copies = kernels.Copies(random(64, 2, dtype=fp32).sigmoid(), random(64, dtype=fp32).sigmoid(),
                                    model.gate_id, zeros(64, 2), zeros(64))
        losses = op(random(64, V, std=5.0), targets, mtp_weights, 1.0, 2.0**-6, grad, copies)
        return [losses, grad, *(copies[3:] if copies else ())]

    def head(fp8):
        weight, targets = torch.nn.Parameter(random(D, V, std=0.1)), integers(model.vocab_size, N, dtype=torch.int64)
        loss = kernels.HeadLoss(weight, dtype, fp8, kernels.cross_entropy_ref)
        return with_gradients(lambda h, weight: [loss(h, targets, mtp_weights, 1.0)], random(N, D), weight)

    def normuon_update(op):
        halves = [integers(2**14, 2, 256, D, dtype=torch.int16) for _ in range(2)]
        v, average = zeros(2, 256, 1), zeros(2, 256, D)
        op(*halves, v, random(2, 256, D), 0.1, 1 + zeros(2, 1, 1), 0.1, 0.9, average, 0.5)
        return [kernels.join_master(*halves), v, average]

    own = (embedding_grad, update_few_rows, attention, mix, mlp, pointer, pointer_inputs, cross_entropy, normuon_update)
    runs = {run.__name__: run for run in own} | {"fp8": head}
    inputs = {  # operation -> function that makes its arguments
        "signed_rows": lambda: (random(64, D), integers(64, 2 * N), 2, random(8, D), integers(8, 2 * N)),
        "update_rows": lambda: (random(64, D), zeros(64, D), zeros(64, 1, dtype=torch.int32),
                                zeros(64, dtype=torch.bool).logical_not(), random(64, D), 1, 0.1, 0.01, 0.9, 1e-8),
        "XXT": lambda: (random(2, 256, D), zeros(2, 256, 256, dtype=dtype), random(2).float().abs()),
        "XTX": lambda: (random(2, 256, D), zeros(2, D, D, dtype=dtype), random(2).float().abs()),
        "ba_plus_cAA": lambda: ((P := random(2, 256, 256)) + P.mT, 0.1, 0.5, torch.empty_like(P), 2.0),
        "fused_momentum": lambda: (random(2, 256, D), random(2, 256, D, dtype=fp32), 0.9, 1.02, zeros(2, 256, D), 0.85,
                                   0.1, 0.5),
        "adam_update": lambda: (random(64, D), *random(2, 64, D, dtype=fp32).abs(), random(64, D), 0.1, 0.01, 0.9, 0.99,
                                1e-8, random(64, D, dtype=fp32), 0.5),
        "replicated_update": lambda: (random(64 * D), *zeros(2, 64 * D), random(64 * D), 0.1, 3,
                                      *random(4, 64 * D, dtype=fp32).sigmoid(), 0.01, 1e-8),
        "transpose_copy": lambda: (random(N, D), random(D, N)), "transpose_add": lambda: (random(N, D), random(D, N))}
    runs |= {name: lambda op, make=make: all_tensors(op, *make()) for name, make in inputs.items()}

    def seeded(function):
        def run(op):
            generator.manual_seed(0)
            return function(op)
        return run
    return {op: seeded(function) for op, function in runs.items()}


def fp8_mlp(x, W1, W2):
    """`mlp` in FP8."""
    return kernels.Fp8Mlps(torch.stack((W1, W2))[None], 1.0)(0, x, W1, W2)


def fp8_attention(x, weight, *others):
    """`attention_block` with a projection in FP8."""
    [codes] = kernels.Fp8Projections(lambda: weight.detach()[None], 1.0).of_layers(torch.ones(1, device=x.device))
    x8, x8_t = kernels.both_layouts(x.detach(), kernels.x8_scale(x.size(1)), kernels.E4M3)
    return kernels.attention_block(x, weight, *others, codes=codes._replace(x8=x8, x8_t=x8_t))


def fault_of(run, name, op, reference, tolerance):
    """What is wrong with an operation in words, or None. run: a function of `trials`. Raises UserError when the
    operation leaves the GPU unusable."""
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
    system = config.system
    runs, found = trials(config.model, getattr(torch, system.dtype), device), {}
    head = runs.pop("fp8")
    references = {op: kernels.IMPLEMENTATIONS[op]["torch"] for op in runs}
    for op, run in runs.items():
        if getattr(ops, op) is not references[op]:
            found[op] = fault_of(run, op, getattr(ops, op), references[op], TOLERANCE)
    for knob, op, in_fp8 in (("fp8_mlp", "mlp", fp8_mlp), ("fp8_qkv", "attention", fp8_attention)):
        if getattr(system, knob) and not found.get(op):
            found[knob] = fault_of(runs[op], knob, in_fp8, references[op], FP8_TOLERANCE)
    if system.fp8:
        found["fp8"] = fault_of(head, "fp8", True, False, FP8_TOLERANCE)
    return {op: fault for op, fault in found.items() if fault}


def replace_faulty_kernels(config, ops, rt):
    """(config in which faulty operations have their references and faulty FP8 is off, a line for each fault). ops: the
    implementations that the config chooses; see `choose_kernels`. What is faulty on one rank is replaced on all ranks.
    GPUs that have run the tests need no trial."""
    faults = [{} if is_tested(rt.device) else find_faults(config, ops, rt.device)]
    if rt.world > 1:
        faults *= rt.world
        dist.all_gather_object(faults, faults[0])
    faults = {op: fault for found in faults for op, fault in found.items()}
    references = ",".join(f"{op}:torch" for op in faults if op in kernels.IMPLEMENTATIONS)
    config = with_knobs(config, kernels=references or config.system.kernels,
                         **{knob: False for knob in faults if knob not in kernels.IMPLEMENTATIONS})
    gpu = torch.cuda.get_device_name(rt.device) if rt.device.type == "cuda" else platform.machine()
    return config, [f"warning: on {gpu}, with PyTorch {torch.__version__} and Triton {kernels.triton.__version__}, the"
                    f" kernel of {op} {fault}; PyTorch replaces it, which is slower and takes more memory. Please"
                    " report this line." for op, fault in faults.items()]
