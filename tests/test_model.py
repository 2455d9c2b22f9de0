"""The model against the plain, unbanked implementation in oracles.py: loss and every gradient."""

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
import triton_kernels as kernels
from data import loader as L

# First document of one token, one longer than every window, tail of empty entries.
LENGTHS = [1, 37, 3, 16, 7]
SHORT, LONG, SCALE, KAPPA = 9, 21, 0.117, 0.25
WEIGHTS = (1.0, 0.5, 0.25)
POINTER_WINDOW = 30  # the view's pointer_window, which here is shorter than the longest document

# Features that record 74 lacks: name -> (knobs, what the oracle has to know about them).
LATER_LAYERS = [f"--layer{i}={layer}" for i, layer in enumerate((
    "paired dynamic", "value_embed xsa", "value_embed paired", "long xsa", "xsa dynamic", "paired",
    "attention=false skip_from=3", "xsa", "value_embed xsa input_from=7", "value_embed paired input_from=7",
    "value_embed xsa long input_from=7 dynamic mix"))]
FEATURES = {
    None: ([], {}),
    "input_from": (["--layer5.input_from=3", "--layer8.input_from=7", "--layer9.input_from=8"],
                   dict(input_from={5: 3, 8: 7, 9: 8})),
    "xsa": (["--layer1.xsa=1", "--layer3.xsa=1", "--layer7.xsa=1", "--layer10.xsa=1"], dict(xsa=(1, 3, 7, 10))),
    "dynamic": (["--layer2.dynamic=1", "--layer6.dynamic=1"], dict(dynamic=(2, 6))),
    "mix": (["--layer8.mix=1", "--layer4.skip_from=2", "--layer7.skip_from=1"], dict(mix=8, skip={4: 2, 6: 3, 7: 1})),
    "bigram": (["--bigram_tables=7.5", "--bigram_signs=1"], {}),
    "one lane": ([f"--layer{i}.two_lanes=0" for i in (7, 8, 9, 10)], dict(lanes_from=None)),
    "pointer": (["--pointer=1"], dict(pointer=(120, POINTER_WINDOW))),
    "narrow": (["--layer0.narrow=1", "--layer1=value_embed narrow xsa", "--layer2.narrow=1", "--layer5.narrow=1",
                "--layer8.narrow=1", "--layer8.input_from=5", "--kernels=torch"],
               dict(narrow=(0, 1, 2, 5, 8), xsa=(1,), input_from={8: 5})),
    "less attention": (["--layer4=attention=0 dynamic", "--layer9=attention=0", "--layer7=attention=0",
                        "--layer8=value_embed", "--layer10=value_embed long", "--mlp_ratio=3"],
                       dict(layers=oracles.layers_without_attention((4, 7, 9)), dynamic=(4,), lanes_from=None)),
    "all": ([*LATER_LAYERS, "--bigram_tables=7.5", "--bigram_signs=1", "--pointer=1"],
            dict(input_from={8: 7, 9: 7, 10: 7}, xsa=(1, 3, 4, 7, 8, 10), dynamic=(0, 4, 10), mix=10, lanes_from=None,
                 pointer=(120, POINTER_WINDOW)))}


# Sizes of `single`. If the number of heads is odd, each head is a matrix for Muon, and no layer pairs its heads.
SHAPES = {"odd": "--model_dim=96 --num_heads=3", "one head": "--model_dim=32 --num_heads=1",
          "deep": "--model_dim=96 --num_heads=6 --depth=14", "deep and slim": "--model_dim=32 --num_heads=1 --depth=14",
          "slim": "--model_dim=32 --num_heads=2", "shallow": "--model_dim=96 --num_heads=6 --depth=3"}


def with_shape(name):
    """The arguments of make_setting for `single` in one of SHAPES. The oracle gets the layers of the config, so this
    does not test `wire`: test_config.py has its 11 layers, test_guard.py the curves of 4 and 14."""
    config = T.parse_config(["--preset=single", "--vocab_size=120", "--ngram_rows=0", "--bigram_tables=5",
                             "--bigram_normal=false", "--kernels=torch", *SHAPES[name].split()]).model
    layers, with_attention, with_values = config.layers, *map(config.layers_with, ("attention", "value_embed"))
    rows = [(None, None, False, False, None)] * len(layers)
    for row, i in enumerate(with_attention):
        gate = (12, 0) if layers[i].paired else (6, 6)  # channels of the stream and of the table
        rows[i] = (row, "L" if layers[i].long else "S", layers[i].paired, layers[i].long,
                   (with_values.index(i), *gate) if i in with_values else None)
    return config, dict(layers=rows, backout=config.backout_layer, lanes_from=None,
                        pointer=(120, POINTER_WINDOW), mix=config.layers_with("mix")[0],
                        skip={i: layers[i].skip_from for i in config.layers_with("skip_from")},
                        input_from={i: layer.input_from for i, layer in enumerate(layers)
                                    if layer.input_from is not None},
                        **{name: tuple(config.layers_with(name)) for name in ("xsa", "dynamic", "narrow")})


def with_features(name, *knobs):
    """The arguments of make_setting for a small record74 with the features of that name, and with other knobs."""
    arguments, known = FEATURES[name]
    return T.parse_config(["--preset=record74", "--vocab_size=120", "--model_dim=96", *arguments, *knobs]).model, known


def make_setting(config, features=None):
    """A random model in fp64, one batch, its view, and what the oracle has to know, also about the features."""
    torch.manual_seed(1)
    cpu = torch.device("cpu")
    ops, _ = kernels.choose_ops(cpu, "torch")
    model = T.GPT(config, ops, torch.float64, cpu)
    model.init_weights(0)
    model.double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.add_(torch.randn_like(param) * (0.3 if param.numel() < 1000 else 0.03))
    n = sum(LENGTHS)
    tokens = torch.randint(0, 120, (n + 1,))
    cu = torch.full((128,), n, dtype=torch.int32)
    cu[:len(LENGTHS) + 1] = torch.tensor([0, *np.cumsum(LENGTHS)])
    rows = {name: torch.from_numpy(made(tokens[:-1].numpy(), config.ngrams))
            for name, made in (("bigram_embed", L.ngram_rows), ("signs", L.sign_rows))}
    frequencies, _ = T.rotary_states(config.head_dim, [LONG])[0]

    def rotary(frequencies):  # `rotary_table` computes in fp32, where an angle of 256 is off by up to 1.5e-5
        angle = torch.arange(2 * n, dtype=torch.float64)[:, None] * torch.from_numpy(frequencies)
        torch.testing.assert_close(T.rotary_table(frequencies, 2 * n, cpu, torch.float64),
                                   found := torch.stack((angle.cos(), angle.sin()), -1), rtol=0, atol=2e-5)
        return found
    view = T.AttentionSettings({False: (rotary(frequencies), SCALE), True: (rotary(0.875 * frequencies), 0.3)},
                               SHORT, LONG, POINTER_WINDOW)
    settings = dict(S=SHORT, L=LONG, freqs=oracles.base_freqs(config.head_dim // 4), attn_scale=SCALE,
                    H=config.num_heads, lambda_dtype=torch.bfloat16, **features or {})
    if config.layers_with("narrow"):
        settings["narrow_state"] = [0.875 * w for w in oracles.base_freqs(config.head_dim // 4)], 0.3
    if config.bigram_signs:
        settings["signs"] = model.signs
    return model, tokens, cu, rows, view, settings


def pieces_of(tokens, rows, device):
    """What the kernel of the tables' gradients reads, as in a Batch."""
    return {name: torch.from_numpy(L.sorted_pieces(ids.numpy())).to(device)
            for name, ids in (("tokens", tokens), ("bigram_embed", rows["bigram_embed"]))}


def plain_head(model):
    """The head of a model in fp64, without kernels."""
    return kernels.HeadLoss(model.lm_head, torch.float64, False, kernels.cross_entropy_ref,
                            pointer=kernels.pointer_ref, gate=model.config.gate_id)


def params_of(model):
    return {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}


def compare_with_oracle(model, head, setting, loss_bound, gradient_bound, lambda_bound):
    """Loss and the gradient of every parameter, relative to its largest entry, for the data and the weights of
    `setting`. No weight of a bank is dead: each has a gradient."""
    exact, tokens, cu, rows, view, settings = setting
    device, dtype = model.embed.device, model.dtype
    model.zero_grad()
    view = view._replace(rotary={key: (x.to(device, dtype), scale) for key, (x, scale) in view.rotary.items()})
    row_ids = {name: ids.to(device) for name, ids in rows.items()}
    documents = {paired: oracles.documents((1 + paired) * cu.to(device)) for paired in (False, True)}
    h, point, *_ = model(tokens[:-1].int().to(device), documents, row_ids, view, pieces_of(tokens[:-1], rows, device))
    loss = head(h, tokens[1:].to(device), torch.tensor(WEIGHTS, device=device), KAPPA, point=point)
    loss.backward()

    params = params_of(exact)
    expected, _ = oracles.model_loss(params, tokens[:-1], tokens[1:], [0, *np.cumsum(LENGTHS)], rows["bigram_embed"],
                                     mtp_weights=WEIGHTS, loss_scale=KAPPA, **settings)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=loss_bound)
    banks = {row.label for row in T.param_table(model.config) if row.optim == "normuon"}
    for name, param in model.named_parameters():
        wanted = params[name].grad
        assert name not in banks or param.grad.all(), name
        error = (param.grad.to(wanted) - wanted).abs().max() / wanted.abs().max()
        rounded = name in ("post_lambdas", "x0_lambdas", "bigram_lambdas", "resid_lambdas")
        # A single number is a sum over all tokens in which much cancels.
        bound = lambda_bound if rounded else 50 * gradient_bound if param.numel() == 1 else gradient_bound
        assert error < bound, f"gradient of {name}: relative error {error:.1e}"


@pytest.mark.parametrize("name", [*FEATURES, *SHAPES])
def test_loss_and_all_gradients(name):
    """All in fp64, but for the gradients of lambdas, which are rounded to bf16 with the lambdas themselves (K6).
    Largest seen: 2e-16 of the loss, 5e-14 of a gradient, 1.4e-13 of a single number, 6.2e-3 of a lambda."""
    setting = make_setting(*with_shape(name) if name in SHAPES else with_features(name))
    model = setting[0]
    compare_with_oracle(model, plain_head(model), setting, loss_bound=1e-12, gradient_bound=1e-12, lambda_bound=2**-7)


@pytest.mark.parametrize("name", [None, "all", "narrow", "less attention", "deep and slim"])
def test_loss_and_all_gradients_through_the_kernels(device, name):
    """Every kernel of a micro-step in its place, in fp32. Without a GPU, where Triton's interpreter takes three times
    as long for six heads, the largest error of a gradient was 4e-6, of a single number 6e-5, of a lambda 3.8e-3."""
    small = [] if device.type == "cuda" else ["--model_dim=32", "--num_heads=2"]
    small = ["--model_dim=64", "--num_heads=2"] if name == "narrow" else small  # the kernel needs heads of 32
    setting = make_setting(*with_shape(name) if name in SHAPES else with_features(name, *small))
    config = setting[0].config
    ops, _ = kernels.choose_ops(device, "attention:triton,mlp:triton,pointer:triton,pointer_inputs:triton,mix:triton,"
                                        "cross_entropy:triton,embedding_grad:triton")
    model = T.GPT(config, ops, torch.float32, device).float()
    model.load_state_dict(setting[0].state_dict())
    head = kernels.HeadLoss(model.lm_head, torch.float32, False, ops.cross_entropy, pointer=ops.pointer,
                            gate=config.gate_id)
    compare_with_oracle(model, head, setting, loss_bound=1e-5, gradient_bound=1e-4, lambda_bound=2**-7)
