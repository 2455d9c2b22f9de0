"""The size of the model that suits the length of a run and a GPU.

In the same time, a smaller model trains on more tokens, and a larger one learns more from each. `rank_sizes` puts the
sizes that have been measured in order, by a fit of the loss and a fit of the time (records/2026-11-28_proven).
"""

import math
from typing import NamedTuple


class Size(NamedTuple):
    """The size of a model with heads of 128 channels."""

    width: int
    layers: int

    def __str__(self):
        return f"{self.width} x {self.layers}"

    @property
    def knobs(self) -> list[str]:
        """Arguments for a model of this size."""
        return [f"--model_dim={self.width}", f"--depth={self.layers}"]


SIZES = Size(384, 4), Size(512, 4), Size(512, 6), Size(640, 8), Size(768, 11)  # the time of a token grows
FITTED = 8e6, 155e6  # about the tokens of the shortest and of the longest runs in the fit
# A knob that is set by hand leaves the size as it is if it is one of these, --depth, or that of a layer.
SIZE_KNOBS = {"model_dim", "num_heads", "backout_layer"}


class Gpu(NamedTuple):
    """What a GPU can do; `measure_gpu` in data/run/machine.py measures it."""

    products: float  # operations per second of a large product, in FP8 if the GPU has it
    copies: float  # bytes per second, read and written
    launch: float  # seconds from one kernel of a CUDA graph to the next


H100 = Gpu(products=1490e12, copies=3010e9, launch=0.85e-6)  # measured, like the times of the fit


class Forecast(NamedTuple):
    """What a training time is enough for with one size."""

    size: Size
    tokens: float
    loss: float  # up to a constant, which depends on the text


def seconds_per_token(size, rows, gpu) -> float:
    """Time of a training step with `rows` tokens on one GPU, divided by the rows.

    A step multiplies each token with the weights of the layers and with the sampled classes of the head, makes passes
    over activations and logits, updates the weights, and launches 140 + 60 · layers kernels. 23 times of H100s and
    H200s are within 4.9 % of this, but for two of 640 x 8 on a busy machine (6 and 9 %).
    """
    width, layers = size
    weights = 9.6 * layers * width**2
    passes = 320e3 + 181.4 * layers * width + 133.9 * weights / rows  # bytes per token
    products = 6 * (weights + 64 * width * rows**0.5)  # operations per token
    copies = min(gpu.copies, (gpu.copies * H100.copies) ** 0.5)  # an H200's passes gain half of its lead
    return products / gpu.products + passes / copies + (140 + 60 * layers) * gpu.launch / rows


def expected_loss(size, tokens) -> float:
    """Validation loss after so many tokens, up to a constant that depends on the text. The last term says that large
    models gain more from more tokens. 47 runs with four million rows of n-grams have .0045 rms."""
    narrower, shallower = 768 / size.width, 11 / size.layers
    return (0.0586 * narrower**1.2 + 0.1258 * shallower**0.6 + 1.0068 * (40e6 / tokens) ** 0.25
            + 0.0183 * math.log(narrower**2 * shallower) * math.log(tokens / 40e6))


def rows_per_gpu(tokens, world) -> float:
    """Tokens per step on each GPU with the batches that `fit_length` gives `short`, before they are rounded."""
    return 32768 * (tokens / 27e6 * world**0.8) ** 0.5 / world


def seconds(size, tokens, gpu, world=1) -> float:
    """Training time of so many tokens on `world` GPUs."""
    return tokens * seconds_per_token(size, rows_per_gpu(tokens, world), gpu) / world


def forecast(size, time, gpu, world) -> Forecast:
    """What a model of this size learns in a training time in seconds on `world` GPUs."""
    tokens = 27e6
    for _ in range(20):  # the batch depends on the tokens
        tokens *= time / seconds(size, tokens, gpu, world)
    return Forecast(size, tokens, expected_loss(size, tokens))


def rank_sizes(time, gpu, world=1) -> list[Forecast]:
    """The forecasts of all sizes, the lowest loss first."""
    return sorted((forecast(size, time, gpu, world) for size in SIZES), key=lambda it: it.loss)


def best_seconds(tokens, gpu, world=1) -> float:
    """The training time in which the best size takes so many tokens.

    Shorter runs take smaller models, which take more tokens in a second, so two times can have the same tokens: this is
    the shorter one.
    """
    times = (seconds(size, tokens, gpu, world) for size in SIZES)
    return next(time for size, time in zip(SIZES, times)
                if SIZES.index(rank_sizes(time, gpu, world)[0].size) <= SIZES.index(size))
