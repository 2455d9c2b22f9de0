"""The model against the plain, unbanked implementation in oracles.py: loss and every gradient."""

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
import triton_kernels as kernels

CONFIG = T.Model(vocab_size=120, model_dim=96)
# First document of one token, one longer than every window, tail of empty entries.
LENGTHS = [1, 70, 3, 40, 14]
SHORT, LONG, SCALE, KAPPA = 9, 21, 0.117, 0.25
WEIGHTS = (1.0, 0.5, 0.25)


@pytest.fixture(scope="module")
def setting():
    """Model in fp64 with every parameter random, and one batch."""
    torch.manual_seed(1)
    cpu = torch.device("cpu")
    ops, _ = kernels.choose_ops(cpu, "torch")
    model = T.GPT(CONFIG, ops, torch.float64, cpu)
    model.init_weights(0)
    model.double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.add_(torch.randn_like(param) * (0.3 if param.numel() < 1000 else 0.03))
    n = sum(LENGTHS)
    tokens = torch.randint(0, 120, (n + 1,))
    cu = torch.full((128,), n, dtype=torch.int32)
    cu[:len(LENGTHS) + 1] = torch.tensor([0, *np.cumsum(LENGTHS)])
    rows = torch.from_numpy(T.bigram_rows(tokens[:-1].numpy(), CONFIG.bigram_rows))
    frequencies, _ = T.rotary_states(CONFIG.head_dim, [LONG])[0]
    view = T.View(*T.rotary_table(frequencies, 2 * n, cpu, torch.float64), torch.tensor(SHORT), torch.tensor(LONG),
                  torch.tensor(SCALE, dtype=torch.float64), max(LENGTHS))
    settings = dict(S=SHORT, L=LONG, freqs=oracles.base_freqs(CONFIG.head_dim // 4), attn_scale=SCALE, H=6,
                    lambda_dtype=torch.bfloat16)
    return model, tokens, cu, rows, view, settings


def params_of(model):
    return {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}


def test_loss_and_all_gradients(setting):
    model, tokens, cu, rows, view, settings = setting
    model.zero_grad()
    head = kernels.HeadLoss(model.lm_head, torch.float64, fp8=False)
    h = model(tokens[:-1].int(), cu, rows, view)
    loss = head(h, tokens[1:], torch.tensor(WEIGHTS), KAPPA)
    loss.backward()

    params = params_of(model)
    borders = [0, *np.cumsum(LENGTHS)]
    expected, _ = oracles.model_loss(params, tokens[:-1], tokens[1:], borders, rows, mtp_weights=WEIGHTS, kappa=KAPPA, **settings)
    expected.backward()
    # The loss is fp32 by contract, so agreement ends near 1e-7 of the largest entry; seen: 3e-7 at most.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, param in model.named_parameters():
        error = (param.grad - params[name].grad).abs().max() / params[name].grad.abs().max()
        print(name, error.item())
        assert error < 2e-6, f"gradient of {name}: relative error {error:.1e}"
