"""Predictors that are trained: second @ relu(first @ x), by gradient descent. The only user of torch.

Must not know packs, files or thresholds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import Unsupported
from thermocline.offline.calibrate import Activity
from thermocline.ops.interface import F32

BATCH = 128  # tokens
STEPS = 1000
RATE, DECAY = 5e-3, 0.01
WARMUP = 0.1  # of the steps; then the rate falls to nothing along a cosine
FLOOR = 0.5  # weight of an active neuron that adds nothing, where the mean one's is FLOOR + 1


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def require() -> None:
    if not available():
        raise Unsupported("trained predictors need PyTorch: pip install 'thermocline[train]', or --kind svd")


def fit(
    a: Activity, rank: int, seed: int, threads: int, step: Callable[[], None] = lambda: None
) -> tuple[F32, F32]:
    """(first [rank, dim], second [neurons, rank]). `step` is called after each of `STEPS`.

    Cross entropy. An active neuron weighs as the square of its mass does, and by the root of how rare active
    ones are: scores then rise with what a miss would cost. Each neuron's bias is trained and dropped: its
    threshold, found later, is where it belongs.
    """
    import torch

    torch.set_num_threads(threads)
    made = torch.Generator().manual_seed(seed)
    x = torch.from_numpy(a.x)
    size = float(x.square().mean().sqrt()) or 1.0
    first = torch.randn(rank, x.shape[1], generator=made) / (x.shape[1] ** 0.5 * size)
    second = torch.randn(a.neurons, rank, generator=made) / rank**0.5
    rare, bias = _rarity(a)
    weights = [first.requires_grad_(), second.requires_grad_(), torch.from_numpy(bias).requires_grad_()]
    optimizer = torch.optim.AdamW(
        [{"params": weights[:2], "weight_decay": DECAY}, {"params": weights[2:], "weight_decay": 0.0}],
        lr=RATE,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=WARMUP)
    mean = a.energy / max(1, len(a.neuron))
    for rows in _batches(a.n, seed):
        batch = a.take(rows)
        mass, asked = torch.from_numpy(batch.dense()), torch.from_numpy(batch.asks())
        active = (mass > 0).float()
        weight = torch.where(mass > 0, rare * (FLOOR + mass.square() / mean), 1.0) * asked
        score = torch.relu(x[torch.from_numpy(rows)] @ weights[0].T) @ weights[1].T + weights[2]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score, active, weight)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        step()
    return first.detach().numpy(), second.detach().numpy()


def _rarity(a: Activity) -> tuple[float, F32]:
    """(the root of inactive / active, each neuron's bias where scores say nothing)."""
    active = np.bincount(a.neuron, minlength=a.neurons) / np.maximum(1, a.n * a.asked)  # of those that ask
    mean = max(float(active.mean()), 1e-6)
    rare = ((1 - mean) / mean) ** 0.5
    return rare, np.log((active * rare + 1e-4) / (1 - active + 1e-4)).astype(np.float32)


def _batches(n: int, seed: int) -> list[NDArray[np.int64]]:
    """Every token once before any is seen again."""
    rng, size = np.random.default_rng(seed), min(BATCH, n)
    order = np.concatenate([rng.permutation(n) for _ in range(-(-STEPS * size // n))])
    return [order[i * size : (i + 1) * size] for i in range(STEPS)]
