"""vrl beside TRL and verl on the same work, as Markdown tables: `python benchmarks/peers.py [PART ...] [--rounds N]`.

Parts: algorithms, batch, balance, ray (verl) and step (TRL); all by default. The peers are installed by uv in
environments of their own (~/.cache/vrl-peers, about 5 GB each) the first time. One thread everywhere; the sides take
turns, and what counts are CPU seconds, which move far less than wall time when others use the machine. Ratios are
formed round by round.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the sides are modules of this folder

from benchmarks.peer_sides.rounds import KEEP_MEMORY, Samples, Side, Spread, interleaved  # noqa: E402
from benchmarks.peer_sides.step_sizes import CAP, ROWS  # noqa: E402

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vrl-peers"
# The last ones of verl are what it imports without declaring it. Torch is the one that vrl runs on.
REQUIREMENTS = {
    "trl": ["trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0", "torch==2.13.0"],
    "verl": [
        "verl==0.9.1", "transformers==5.10.4", "tensordict==0.10.0", "ray==2.60.0", "numpy==2.4.6", "torch==2.13.0",
        "cachetools", "uvicorn", "fastapi",
    ],
}  # fmt: skip
SIZES = (1024, 2048)  # rows and tokens of the largest row
TARGETS = {
    "gae": 5.0, "reinforce++": 4.0, "grpo": 8.0, "rloo": 8.0,
    "ray.get": 50.0, "worker-group call, 2 ranks": 2.0, "mini-batches of 128, one epoch": 5.0,
    "longtail": 2.0, "fixed": 0.95,
}  # fmt: skip
WORTH_COMPARING = 1e-3  # seconds; what takes less only has to be
QUICK = 50e-6  # or not slower


def peer_python(name: str) -> str:
    """Return the interpreter of a peer's environment; install it when it is not there, or asks for other versions."""
    folder, wanted = CACHE / name, "\n".join(REQUIREMENTS[name])
    stamp = folder / "requirements.txt"
    if not stamp.is_file() or stamp.read_text() != wanted:
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if uv is None:
            raise SystemExit("error: uv is not there; `pip install uv`")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
        install = [
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            folder / "bin" / "python",
            *REQUIREMENTS[name],
            "psutil",
        ]
        subprocess.run(install, check=True)
        stamp.write_text(wanted)
    return str(folder / "bin" / "python")


@contextmanager
def opened(commands: Mapping[str, Sequence[str]], logs: Path, keep_memory: bool = False) -> Iterator[list[Side]]:
    """Yield the running sides; their messages go to files in `logs`."""
    with ExitStack() as stack:
        sides: list[Side] = []
        for name, command in commands.items():
            sides.append(Side(name, command, logs / f"{name}.log", KEEP_MEMORY if keep_memory else {}))
            stack.callback(sides[-1].close)
        yield sides


def part_commands(part: str, sizes: tuple[int, int], folder: Path, peers: bool = True) -> dict[str, list[str]]:
    """Return how the two sides of a part are started; only ours without `peers`."""
    modules = {"vrl": "vrl_calls" if part == "ray" else "vrl_side", "verl": "verl_side"}
    pythons = {"vrl": sys.executable} | ({"verl": peer_python("verl")} if peers else {})
    rows, width = map(str, sizes)
    return {
        name: [python, "-m", f"benchmarks.peer_sides.{modules[name]}", part, rows, width, str(folder / f"{name}.npz")]
        for name, python in pythons.items()
    }


def cell(seconds: Spread) -> str:
    """Return milliseconds: median and quartiles."""
    low, median, high = (1e3 * value for value in (seconds.low, seconds.median, seconds.high))
    digits = 1 if median >= 10 else 3
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def verdict(case: str, ours: Spread, ratio: Spread | None) -> str:
    """Return whether a target is met."""
    if ratio is None:
        return ""
    if case in TARGETS:
        return f"{TARGETS[case]:g}: {'met' if ratio.median >= TARGETS[case] else '**missed**'}"
    if ours.median < WORTH_COMPARING:
        return f"50 us or 1: {'met' if ours.median <= QUICK or ratio.median >= 1 else '**missed**'}"
    return f"1: {'met' if ratio.median >= 1 else '**missed**'}"


def line(case: str, samples: Samples, key: str, judge: bool = True) -> str:
    """Return a table row: ours, the peer's, their ratio, and the target."""
    ours, *others = ([sample[key] for sample in rounds] for rounds in samples.values())
    cells = [case, cell(Spread.of(ours))]
    ratio: Spread | None = None
    for theirs in others:
        ratio = Spread.of([b / a for a, b in zip(ours, theirs, strict=True)])
        cells += [cell(Spread.of(theirs)), f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"]
    return "| " + " | ".join([*cells, verdict(case, Spread.of(ours), ratio) if judge else ""]) + " |"


def head(sides: Sequence[Side], what: str, unit: str) -> Iterator[str]:
    """Return the first lines of a table."""
    for side in sides:
        yield f"{side.name}: " + ", ".join(f"{name} {version}" for name, version in side.facts["versions"].items())
    yield ""
    columns = [what, *(f"{side.name}, {unit}" for side in sides), *(["ratio"] if len(sides) > 1 else []), "target"]
    yield "| " + " | ".join(columns) + " |"
    yield "| " + " | ".join("---" for _ in columns) + " |"


def algorithms(sides: Sequence[Side], rounds: int, folder: Path) -> Iterator[str]:
    """Time the estimators, and compare what they return."""
    yield from head(sides, "estimator", "ms")
    for case in sides[0].cases:
        yield line(case, interleaved(sides, case, rounds), "cpu_s")
    yield f"\n{sides[0].facts['tokens']} sampled tokens in {SIZES[0]} rows."
    if len(sides) > 1:
        ours, theirs = (np.load(folder / f"{side.name}.npz") for side in sides)
        for case in sides[0].cases:
            yield f"Largest difference, {case}: {np.abs(ours[case] - theirs[case]).max():.1e}."


def operations(sides: Sequence[Side], rounds: int, _folder: Path) -> Iterator[str]:
    """Time what both sides can do."""
    yield from head(sides, "operation", "ms")
    for case in sides[0].cases:
        if all(case in side.cases for side in sides):
            yield line(case, interleaved(sides, case, rounds), "cpu_s")
    yield "\n" + ", ".join(f"{side.name}: {side.facts['mib']:.0f} MiB of tensors" for side in sides) + "."


def balance(sides: Sequence[Side], rounds: int, _folder: Path) -> Iterator[str]:
    """Time the partitions and give the heaviest part over the mean."""
    yield from head(sides, "problem (heaviest part / mean: vrl, verl)", "ms")
    for case in sides[0].cases:
        found = [side for side in sides if case in side.cases]
        ratios = [side.facts["imbalance"][case] for side in found]
        name = f"{case} ({', '.join(f'{ratio:.4f}' for ratio in ratios)})"
        cells = line(name, interleaved(found, case, rounds), "cpu_s", judge=False).removesuffix(" |  |")
        missing = " |  | " * (len(sides) - len(found))
        verdict_here = f"1.01: {'met' if ratios[0] <= 1.01 else '**missed**'}" if "equal" in case else ""
        yield f"{cells}{missing} | {verdict_here} |"


def over_ray(sides: Sequence[Side], rounds: int, _folder: Path) -> Iterator[str]:
    """Time the object store in the driver, and a call in all processes together."""
    yield from head(sides, "operation", "ms")
    for case in sides[0].cases:
        samples = interleaved(sides, case, rounds)
        if "call" not in case:
            yield line(case, samples, "cpu_s")
            continue
        yield line(case, samples, "tree_s")
        yield line(f"{case}: the driver alone", samples, "cpu_s", judge=False)
        yield line(f"{case}: wall", samples, "wall_s", judge=False)


PARTS: dict[str, Callable[[Sequence[Side], int, Path], Iterator[str]]] = {
    "algorithms": algorithms,
    "batch": operations,
    "balance": balance,
    "ray": over_ray,
}


def write_step_workload(folder: Path) -> None:
    """Write models, prompts and reward of the step."""
    module = "benchmarks.peer_sides.step_workload"
    subprocess.run(
        [sys.executable, "-m", module, folder],
        check=True, cwd=ROOT, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def step_commands(case: str, folder: Path, peers: bool = True) -> dict[str, list[str]]:
    """Return how the two trainers are started; only ours without `peers`."""
    pythons = {"vrl": sys.executable} | ({"trl": peer_python("trl")} if peers else {})
    return {
        name: [python, "-m", f"benchmarks.peer_sides.{name}_step", str(folder), case]
        for name, python in pythons.items()
    }


def step(rounds: int, folder: Path) -> Iterator[str]:
    """Time a whole GRPO step in all processes together."""
    write_step_workload(folder)
    for case in CAP:
        with opened(step_commands(case, folder), folder) as sides:
            yield from head(sides, "step", "CPU ms")
            samples = interleaved(sides, "step", rounds)
            yield line(case, samples, "tree_s")
            yield ""
            yield from step_details(case, samples)
            yield ""


def step_details(case: str, samples: Samples) -> Iterator[str]:
    """Return what lies behind the figures of a step."""
    for name, found in samples.items():
        seconds = Spread.of([sample["tree_s"] for sample in found]).median
        tokens = sum(sample["response_tokens"] for sample in found) / len(found)
        yield f"{case}, {name}: {ROWS / seconds:.1f} samples a CPU second, {tokens:.0f} response tokens a step."
    update = [f"update_actor/{part}" for part in ("forward", "backward", "optimizer")]
    stages: dict[str, Any] = {
        stage: Spread.of([sample[f"timing_s/{stage}"] for sample in samples["vrl"]]).median
        for stage in ("gen/engine", "gen", "update_actor", *update, "update_weights", "step")
    }
    yield f"{case}, vrl, wall: " + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items()) + "."


def measured(part: str, rounds: int, folder: Path) -> Iterator[str]:
    """Return the lines of one part."""
    if part == "step":
        yield from step(rounds, folder)
        return
    with opened(part_commands(part, SIZES, folder), folder, keep_memory=part != "ray") as sides:
        yield from PARTS[part](sides, rounds, folder)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "step"], default=[*PARTS, "step"])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(
        f"Load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs, Python {platform.python_version()}.", flush=True
    )
    for part in arguments.parts:
        print(f"\n## {part}\n")
        with tempfile.TemporaryDirectory(prefix="vrl-peers-") as folder:
            for text in measured(part, arguments.rounds, Path(folder)):
                print(text, flush=True)


if __name__ == "__main__":
    main()
