"""Where the time of a run's steps went, as medians after the first step: `run_shares.py RUN/metrics.jsonl`."""

import json
import statistics
import sys
from pathlib import Path

STAGES = {
    "engine (generation)": ["timing_s/gen/engine"],
    "forward": ["timing_s/forward"],
    "backward": ["timing_s/backward"],
    "optimizer": ["timing_s/optimizer"],
    "weight sync": ["timing_s/update_weights"],
    "waiting for rewards": ["timing_s/reward"],
    "turn loop, rendering, rows": ["timing_s/gen/loop"],
    "advantages (driver)": ["timing_s/adv"],
}
CALLS = ("gen", "update_actor", "update_critic", "update_weights", "old_log_prob", "ref", "values")


def main() -> None:
    """Print the share of each stage in `timing_s/step`."""
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    steps = [line for line in lines if line.get("training/global_step", 0) > 1 and "timing_s/step" in line]
    print(f"{len(steps)} steps, median {statistics.median(s['timing_s/step'] for s in steps):.2f} s")
    for title, names in STAGES.items():
        shares = [sum(step.get(name, 0.0) for name in names) / step["timing_s/step"] for step in steps]
        print(f"{title:28s} {100 * statistics.median(shares):5.1f} %")
    whole = [
        sum(step.get(f"timing_s/{name}", 0.0) for name in ("gen/engine", "forward", "backward", "optimizer"))
        / step["timing_s/step"]
        for step in steps
    ]
    print(f"{'engine + learner':28s} {100 * statistics.median(whole):5.1f} %")
    apart = [1 - sum(step.get(f"timing_s/{name}", 0.0) for name in CALLS) / step["timing_s/step"] for step in steps]
    print(f"{'driver between calls':28s} {100 * statistics.median(apart):5.1f} %")


if __name__ == "__main__":
    main()
