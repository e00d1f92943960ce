"""Train predictors of the form second @ relu(first @ x) by gradient descent, with torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import DeviceFailure, Unsupported
from thermocline.offline.training.calibrate import LayerSamples
from thermocline.ops.interface import F32

BATCH = 128  # tokens
STEPS = 1000
RATE, DECAY = 5e-3, 0.01
WARMUP = 0.1  # of the steps; then the rate falls to nothing along a cosine
FLOOR = 0.5  # the weight of an active neuron of no mass; the mean active neuron's is FLOOR + 1


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def require() -> None:
    if not available():
        raise Unsupported("trained predictors need PyTorch: pip install 'thermocline[train]', or --kind svd")


def fit(
    a: LayerSamples,
    rank: int,
    seed: int,
    threads: int,
    step: Callable[[], None] = lambda: None,
    device: str = "cpu",
) -> tuple[F32, F32]:
    """Train a predictor: (first [rank, dim], second [neurons, rank]). `step` is called after each step.

    The loss is cross entropy. An active neuron's weight grows with the square of its mass, and with the
    root of how rare active neurons are, so scores rise with the cost of a miss. Each neuron's bias is
    trained and dropped: the threshold that is found later takes its place.

    `device`: torch's name of what computes. All begin with the same numbers, and sum them in orders of
    their own. Raises DeviceFailure.
    """
    import torch

    torch.set_num_threads(threads)
    try:
        return _fit(a, rank, seed, step, device)
    except (torch.cuda.OutOfMemoryError, torch.AcceleratorError) as e:
        first, *_ = str(e).splitlines()
        raise DeviceFailure(f"{device}: {first}; --gpu off trains on the CPU") from e
    finally:
        if device != "cpu":
            torch.cuda.empty_cache()  # trials want it


def _fit(a: LayerSamples, rank: int, seed: int, step: Callable[[], None], device: str) -> tuple[F32, F32]:
    import torch

    made = torch.Generator().manual_seed(seed)
    x = torch.from_numpy(a.x)
    size = float(x.square().mean().sqrt()) or 1.0
    first = torch.randn(rank, x.shape[1], generator=made) / (x.shape[1] ** 0.5 * size)
    second = torch.randn(a.neurons, rank, generator=made) / rank**0.5
    rare, bias = _rarity(a)
    x = x.to(device)
    weights = [w.to(device).requires_grad_() for w in (first, second, torch.from_numpy(bias))]
    optimizer = torch.optim.AdamW(
        [{"params": weights[:2], "weight_decay": DECAY}, {"params": weights[2:], "weight_decay": 0.0}],
        lr=RATE,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=WARMUP)
    mean = a.energy / max(1, len(a.neuron))
    for rows in _batches(a.n, seed):
        batch = a.take(rows)
        mass, asked = (torch.from_numpy(of).to(device) for of in (batch.dense(), batch.asks()))
        active = (mass > 0).float()
        weight = torch.where(mass > 0, rare * (FLOOR + mass.square() / mean), 1.0) * asked
        score = torch.relu(x[torch.from_numpy(rows).to(device)] @ weights[0].T) @ weights[1].T + weights[2]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score, active, weight)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        step()
    fitted_first, fitted_second = (w.detach().cpu().numpy() for w in weights[:2])
    return fitted_first, fitted_second


def _rarity(a: LayerSamples) -> tuple[float, F32]:
    """Return (the root of inactive / active, each neuron's initial bias)."""
    active = np.bincount(a.neuron, minlength=a.neurons) / np.maximum(1, a.n * a.asked)  # among its tokens
    mean = max(float(active.mean()), 1e-6)
    rare = ((1 - mean) / mean) ** 0.5
    return rare, np.log((active * rare + 1e-4) / (1 - active + 1e-4)).astype(np.float32)


def _batches(n: int, seed: int) -> list[NDArray[np.int64]]:
    """Return `STEPS` batches of tokens. Every token is used once before any is used again."""
    rng, size = np.random.default_rng(seed), min(BATCH, n)
    order = np.concatenate([rng.permutation(n) for _ in range(-(-STEPS * size // n))])
    return [order[i * size : (i + 1) * size] for i in range(STEPS)]
