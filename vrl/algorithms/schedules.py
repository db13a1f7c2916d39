"""Learning-rate factors by step, used by the learner. `step` counts finished updates: the first update sees 0."""

import math


def constant_factor(step: int, warmup_steps: int = 0) -> float:
    """Rises linearly from 0 at step 0 to 1 at `warmup_steps`, then stays 1."""
    return step / warmup_steps if step < warmup_steps else 1.0


def cosine_factor(
    step: int, *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0, num_cycles: float = 0.5
) -> float:
    """Warm-up from `min_lr_ratio` to 1, then cosine waves between 1 and `min_lr_ratio` until `total_steps`.

    The default half wave falls to `min_lr_ratio` at `total_steps`; later steps stay where the wave ended.
    """
    if not 0.0 <= min_lr_ratio <= 1.0:
        raise ValueError(f"optim.min_lr_ratio must lie between 0 and 1, got {min_lr_ratio}")
    if step < warmup_steps:
        return min_lr_ratio + (1.0 - min_lr_ratio) * step / warmup_steps
    progress = min((step - warmup_steps) / max(1, total_steps - warmup_steps), 1.0)
    wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * progress))
    return min_lr_ratio + (1.0 - min_lr_ratio) * wave
