"""Golden data for the algorithm tests: `golden(NAME)` reads tests/golden/NAME.json and .npz.

vrl is not imported here, so that the jaxtyping hook can still be installed.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Golden:
    """Cases and arrays of one golden file. Where a case accepts both the peer's value and the formula's: `choice`."""

    cases: list[dict]
    arrays: dict[str, np.ndarray]
    batches: dict[str, dict]
    tolerance: dict

    def tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.arrays[name])

    @staticmethod
    def prefix(case: dict, choice: str) -> str:
        """Nothing for the plain (peer's) value, "formula_" for the formula's."""
        accepted = [word for word in case["accept"] if word != "error"]
        word = choice if choice in accepted else accepted[0]
        return "formula_" if word == "formula" else ""

    def expected(self, case: dict, field: str, choice: str) -> torch.Tensor:
        return self.tensor(f"{case['id']}.{self.prefix(case, choice)}{field}")

    def expected_number(self, case: dict, field: str, choice: str) -> float:
        return float(case[self.prefix(case, choice) + field])


@pytest.fixture(scope="session")
def golden():
    def load(name: str) -> Golden:
        table = json.loads((FOLDER / f"{name}.json").read_text())
        with np.load(FOLDER / f"{name}.npz") as arrays:
            loaded = dict(arrays)
        batches = {batch["id"]: batch for batch in table.get("batches", [])}
        return Golden(table["cases"], loaded, batches, table["tolerance"])

    return load
