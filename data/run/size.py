"""The width of the model that suits the length of a run and a GPU.

In the same time, a narrower model trains on more tokens, and a wider one learns more from each. `rank_sizes` puts the
widths that have been measured in order, by a fit of the loss and a fit of the time (records/2026-11-25_size).
"""

from typing import NamedTuple

WIDTHS = 256, 512, 768  # of models of 11 layers with heads of 128 channels
LONGEST = 155e6  # tokens of the longest runs of narrow models in the fit
SIZE_KNOBS = {"model_dim", "num_heads", "depth", "layers"}  # one that is set by hand leaves the size as it is


class Gpu(NamedTuple):
    """What a GPU can do; `measure_gpu` in data/run/machine.py measures it."""

    products: float  # operations per second of a large product, in FP8 if the GPU has it
    copies: float  # bytes per second, read and written
    launch: float  # seconds from one kernel of a CUDA graph to the next


class Forecast(NamedTuple):
    """What a training time is enough for with one width."""

    width: int
    tokens: float
    loss: float  # up to a constant, which depends on the text


def seconds_per_token(width, rows, gpu) -> float:
    """Time of a training step with `rows` tokens on one GPU, divided by the rows.

    A step multiplies each token with 105 width² weights and with the sampled classes of the head, makes passes over
    activations and logits, and launches 800 kernels. Twelve measured times (H100) differ from this by 6 % at most.
    """
    weights = 105 * width**2 + 64 * rows**0.5 * width
    return 6 * weights / gpu.products + (2270 * width + 320e3) / gpu.copies + 800 * gpu.launch / rows


def expected_loss(width, tokens) -> float:
    """Validation loss after so many tokens, up to a constant that depends on the text. Sixteen runs have .006 rms."""
    return 0.137 * (768 / width) ** 0.84 + 1.585 * (40e6 / tokens) ** 0.18


def rows_per_gpu(tokens, world) -> float:
    """Tokens per step on each GPU with the batches that `fit_length` gives `short`, before they are rounded."""
    return 32768 * (tokens / 27e6 * world**0.8) ** 0.5 / world


def forecast(width, seconds, gpu, world) -> Forecast:
    """What a model of this width learns in a training time on `world` GPUs."""
    tokens = 27e6
    for _ in range(5):  # the batch depends on the tokens
        tokens = seconds * world / seconds_per_token(width, rows_per_gpu(tokens, world), gpu)
    return Forecast(width, tokens, expected_loss(width, tokens))


def rank_sizes(seconds, gpu, world=1) -> list[Forecast]:
    """The forecasts of all widths, the lowest loss first."""
    return sorted((forecast(width, seconds, gpu, world) for width in WIDTHS), key=lambda it: it.loss)


def best_seconds(tokens, gpu, world=1) -> float:
    """The training time in which the best width takes so many tokens.

    Shorter runs take narrower models, which take more tokens in a second, so two times can have the same tokens: this
    is the shorter one.
    """
    times = (tokens * seconds_per_token(width, rows_per_gpu(tokens, world), gpu) / world for width in WIDTHS)
    return next(seconds for width, seconds in zip(WIDTHS, times) if rank_sizes(seconds, gpu, world)[0].width <= width)
