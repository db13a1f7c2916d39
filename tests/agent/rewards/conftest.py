"""A user function that runs the response as code, and prompts to score."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vrl.agent.rewards.types import RewardSpec
from vrl.protocol.trajectory import Prompt

RUNS_THE_RESPONSE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Run the response as code and return its variable `result`."""
    scope = {"ground_truth": ground_truth, "extra_info": extra_info, "kwargs": kwargs}
    exec(solution_str, scope)
    return scope["result"]
'''


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    def make(data_source: str = "tiny/visual", ground_truth: Any = "red", **extra_info: Any) -> Prompt:
        return Prompt(
            row_id="0", uid="0", messages=(), data_source=data_source, ground_truth=ground_truth, extra_info=extra_info
        )

    return make


@pytest.fixture
def code_spec(tmp_path: Path) -> RewardSpec:
    """A user's function that does whatever the response says: hang, die, return nonsense."""
    path = tmp_path / "my_reward.py"
    path.write_text(RUNS_THE_RESPONSE)
    return RewardSpec(function_path=str(path))
