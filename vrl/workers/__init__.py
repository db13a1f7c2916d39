"""One process, one rank: learners, engines and the rollout loop. Plain classes that also run under torchrun."""
