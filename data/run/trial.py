"""Before training on a GPU that nobody has tested: each operation once on a small input, against its reference."""

import platform

import torch
import torch.distributed as dist

import triton_kernels as kernels
from data.loader import sorted_pieces
from data.run.errors import one_line
from data.run.knobs import with_system

TESTED = {(9, 0)}  # compute capabilities of the GPUs that have run the tests: H100 and H200
TOKENS = 256
TOLERANCE = 0.05, 0.2  # of ‖result − reference‖ / ‖reference‖: rounding to bf16 makes about .01, FP8 about .08


def needs_trial(config, device) -> bool:
    """Whether the script chooses kernels for a GPU of a kind on which the tests have not run."""
    return (device.type == "cuda" and config.system.kernels == "auto"
            and torch.cuda.get_device_capability(device) not in TESTED)


def trials(model, dtype, device) -> dict:
    """{operation: function(op) -> results}. All calls of a function have the same input, of the model's widths."""
    D, H, d, F, N = model.model_dim, model.num_heads, model.head_dim, model.mlp_dim, TOKENS
    generator = torch.Generator(device)

    def random(*shape, std=1.0, dtype=dtype):
        return (std * torch.randn(shape, generator=generator, device=device)).to(dtype)

    def integers(high, n=N, dtype=torch.int32):
        return torch.randint(high, (n,), generator=generator, device=device, dtype=dtype)

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    def with_gradients(function, *inputs):
        """The results of a function, and the gradients of its inputs for random gradients of the results."""
        inputs = [x.requires_grad_() for x in inputs]
        results = [x for x in function(*inputs) if x is not None]
        return results + list(torch.autograd.grad(results, inputs, [random(*x.shape, dtype=x.dtype) for x in results]))

    def signed_rows(op):
        return [op(random(64, D), integers(64, 2 * N), 2, random(8, D), integers(8, 2 * N))]

    def embedding_grad(op):
        grad, ids = zeros(64, D, dtype=dtype), integers(64)
        op(grad, kernels.SortedIds(ids, torch.from_numpy(sorted_pieces(ids.cpu().numpy())).to(device)), random(N, D))
        return [grad]

    def update_rows(op):
        p, v, last = random(64, D), zeros(64, D), zeros(64, 1, dtype=torch.int32)
        op(p, v, last, zeros(64, dtype=torch.bool) | True, random(64, D), 1, 0.1, 0.01, 0.9, 1e-8)
        return [p, v]

    def update_few_rows(op):
        p, v, last = random(64, D), zeros(64, 1), zeros(64, 1, dtype=torch.int32)
        few = kernels.FewRows(p, 32)
        few.claim(kernels.SortedIds(integers(32)))
        few.grad.copy_(random(32, D))
        op(p, v, last, few.grad, few.place, few.rows, few.count, 1, 0.1, 0.01, 0.9, 1e-8)
        return [p, v]

    def attention(op):
        kinds = {(layer.paired, layer.long, layer.narrow, layer.value_embed)
                 for layer in model.layers if layer.attention}
        results, borders = [], torch.tensor([0, N // 3, N], dtype=torch.int32, device=device)
        window, scale = torch.tensor(128), torch.tensor(d**-0.5)
        for paired, long, narrow, has_values in sorted(kinds):
            angles = random(2 * N, d // 4, dtype=torch.float32)
            rotary = torch.stack((angles.cos(), angles.sin()), 2).to(dtype)
            weight = random((2 * d // (1 + narrow) + d) * H, D, std=D**-0.5)
            gates = [random(H, min(12, D)) for _ in range(1 + has_values)]
            values = [random(N, D)] * has_values

            def run(x, weight, w_out, *values):
                ve, w_ve = values or (None, None)
                return op(x, weight, rotary, ve, w_ve, w_out, borders, window, scale, paired, long, narrow)
            results += with_gradients(run, random(N, D), weight, gates[0], *values, *gates[1:])
        return results

    def mlp(op):
        return with_gradients(lambda *inputs: [op(*inputs)], random(N, D), *(random(F, D, std=D**-0.5) for _ in "12"))

    def pointer(op):
        start, end = kernels.document_of_tokens(torch.tensor([0, N // 3, N], dtype=torch.int32, device=device), N)
        tokens, targets = integers(8), integers(8, dtype=torch.int64)[:, None]

        def run(q, k, sink):
            return op(q, k, sink, tokens, start, end, 128, 0.1, targets)
        return with_gradients(run, random(N, 128), random(N, 128), random(N, dtype=torch.float32))

    def cross_entropy(op):
        grad, targets = zeros(N, 1024, dtype=dtype), integers(1024, dtype=torch.int64)[:, None]
        return [op(random(N, 1024, std=5.0), targets, torch.ones(1, device=device), 1.0, 1.0, grad), grad]

    def gram(side):
        return lambda op: [op(x := random(2, 256, D), x.new_empty(2, *[x.size(side)] * 2), random(2).float().abs())]

    def ba_plus_cAA(op):
        P = random(2, 256, 256)
        return [op(P + P.mT, 0.1, 0.5, torch.empty_like(P), 2.0)]

    def transpose(op):
        return [op(random(N, D), random(D, N))]

    def seeded(function):
        def run(op):
            generator.manual_seed(0)
            return function(op)
        return run
    found = {"signed_rows": signed_rows, "embedding_grad": embedding_grad, "update_rows": update_rows,
             "update_few_rows": update_few_rows, "attention": attention, "mlp": mlp, "pointer": pointer,
             "cross_entropy": cross_entropy, "XXT": gram(1), "XTX": gram(2), "ba_plus_cAA": ba_plus_cAA,
             "transpose_copy": transpose, "transpose_add": transpose}
    return {op: seeded(function) for op, function in found.items()}


def fp8_mlp(x, W1, W2):
    """`mlp` in FP8: its products and the kernels that write codes are those of head and projections, too."""
    mlps = kernels.Fp8Mlps(torch.stack((W1, W2))[None], 1.0)
    return mlps(0, x, W1, W2)


def fault_of(run, op, reference, tolerance):
    """What is wrong with an operation in words, or None. run: a function of `trials`."""
    try:
        results, expected = run(op), run(reference)
    except Exception as error:  # of any kind, since a compiler failed
        return f"fails ({one_line(error)})"
    for result, wanted in zip(results, expected):
        difference = (result.float() - wanted.float()).norm() / wanted.float().norm()
        if not difference <= tolerance:  # also NaN
            return f"differs by {difference.item():.2g}"


def find_faults(config, ops, device) -> dict[str, str]:
    """{operation: what is wrong with it in words}; "fp8" stands for all products of FP8 codes."""
    system = config.system
    runs, found = trials(config.model, getattr(torch, system.dtype), device), {}
    for op, run in runs.items():
        reference = kernels.IMPLEMENTATIONS[op]["torch"]
        if getattr(ops, op) is not reference:
            found[op] = fault_of(run, getattr(ops, op), reference, TOLERANCE[0])
    if system.fp8 or system.fp8_mlp or system.fp8_qkv:
        found["fp8"] = fault_of(runs["mlp"], fp8_mlp, kernels.mlp_ref, TOLERANCE[1])
    return {op: fault for op, fault in found.items() if fault}


def replace_faulty_kernels(config, ops, rt):
    """(config in which faulty operations have their references and faulty FP8 is off, a line for each fault).

    ops: the implementations that the config chooses; see `choose_kernels`. What is faulty on one rank is replaced on
    all ranks.
    """
    faults = [find_faults(config, ops, rt.device)]
    if rt.world > 1:
        faults *= rt.world
        dist.all_gather_object(faults, faults[0])
    faults = {op: fault for found in faults for op, fault in found.items()}
    references = ",".join(f"{op}:torch" for op in faults if op != "fp8")
    config = with_system(config, kernels=references or config.system.kernels)
    if "fp8" in faults:
        config = with_system(config, fp8=False, fp8_mlp=False, fp8_qkv=False)
    gpu = torch.cuda.get_device_name(rt.device) if rt.device.type == "cuda" else platform.machine()
    return config, [f"warning: on {gpu}, with PyTorch {torch.__version__} and Triton {kernels.triton.__version__}, the"
                    f" kernel of {op} {fault}; this run does without it, and is slower. Please report this line."
                    for op, fault in faults.items()]
