"""Learning curves as a picture: `python benchmarks/curves.py OUT.png RUN/metrics.jsonl [RUN/metrics.jsonl ...]`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
KINDS = {"mean@1": ("-", "temperature 1"), "greedy": ("--", "greedy")}

Run = list[dict[str, Any]]


def curve(run: Run, task: str, kind: str) -> tuple[list[float], list[float]]:
    """Return steps and accuracies of a task's evaluations."""
    name = f"val-core/{task}/reward/{kind}"
    found = [line for line in run if name in line]
    return [line["training/global_step"] for line in found], [line[name] for line in found]


def tasks_of(runs: list[Run]) -> list[str]:
    """Return the tasks that were evaluated."""
    names = {name for run in runs for line in run for name in line if name.endswith("/reward/greedy")}
    return sorted(name.removeprefix("val-core/").removesuffix("/reward/greedy") for name in names)


def main() -> None:
    """Draw held-out accuracy over steps, one panel a task: solid at temperature 1, dashed greedy."""
    out, *files = sys.argv[1:]
    runs = [[json.loads(line) for line in Path(name).read_text().splitlines()] for name in files]
    tasks = tasks_of(runs)
    figure, panels = plt.subplots(1, len(tasks), figsize=(4.5 * len(tasks), 3.4), sharey=True, squeeze=False)
    for panel, task in zip(panels[0], tasks, strict=True):
        for number, run in enumerate(runs):
            for kind, (style, title) in KINDS.items():
                color = COLORS[number % len(COLORS)]
                panel.plot(*curve(run, task, kind), style, color=color, label=f"run {number + 1}, {title}")
        panel.set(title=task, xlabel="GRPO step", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("held-out accuracy")
    panels[0][0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
