"""Where the time of a run's steps went, as medians after the first step: `run_shares.py RUN/metrics.jsonl`.

The stages of learners are added up over all roles: a critic on processes of its own counts beside the actor's time.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

LEARNERS = ("reward_model", "old_log_prob", "ref", "values", "update_critic", "update_actor")


def of_learners(*stages: str) -> tuple[str, ...]:
    """Return the names of stages in all calls of learners."""
    return tuple(f"{call}/{stage}" for call in LEARNERS for stage in stages)


STAGES = {
    "engine (generation)": ("gen/engine",),
    "forward": of_learners("forward"),
    "backward": of_learners("backward"),
    "optimizer": of_learners("optimizer"),
    "weight sync": ("update_weights",),
    "waiting for rewards": ("reward",),
    "turn loop, rendering, rows": ("gen/loop",),
    "waiting for tools": ("gen/tools",),
    "advantages (driver)": ("adv",),
}
WORK = ("gen/engine", *of_learners("forward", "backward", "optimizer"))
# What workers report of themselves; the rest of a step is rows on their way, calls, and the driver.
INSIDE = (*WORK, "gen/loop", "gen/tools", "reward", *of_learners("data", "metrics", "offload"), "update_weights", "adv")
CALLS = ("gen", *LEARNERS, "update_weights")


def main() -> None:
    """Print the share of each stage in `timing_s/step`."""
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    steps = [line for line in lines if line.get("training/global_step", 0) > 1 and "timing_s/step" in line]
    print(f"{len(steps)} steps, median {statistics.median(s['timing_s/step'] for s in steps):.2f} s")
    for title, names in STAGES.items():
        print(f"{title:28s} {median_share(steps, names):5.1f} %")
    print(f"{'engine + learner':28s} {median_share(steps, WORK):5.1f} %")
    print(f"{'transport, calls, driver':28s} {median_share(steps, ('step',), minus=INSIDE):5.1f} %")
    print(f"{'driver between calls':28s} {median_share(steps, ('step',), minus=CALLS):5.1f} %")


def median_share(steps: list[dict[str, float]], names: Sequence[str], minus: Sequence[str] = ()) -> float:
    """Return the median percentage of a step that `timing_s/<names>` take, less what `minus` takes of it."""

    def seconds(step: dict[str, float], stages: Sequence[str]) -> float:
        return sum(step.get(f"timing_s/{stage}", 0.0) for stage in stages)

    return 100 * statistics.median(
        (seconds(step, names) - seconds(step, minus)) / step["timing_s/step"] for step in steps
    )


if __name__ == "__main__":
    main()
