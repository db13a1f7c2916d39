"""How many images a row the engine takes: from the data and what tools add, or as the settings say."""

import logging

import pytest

from vrl.controller.run import with_image_limit
from vrl.protocol.config.builder import build
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError


def config(limit: int | None, tools: bool) -> Config:
    agent = {"max_images": 3, "environments": {"look": {"class": "image_tools"}} if tools else {}}
    return build({"actor_rollout_ref": {"rollout": {"limit_images": limit, "agent": agent}}})


@pytest.mark.parametrize(
    ("limit", "tools", "most_images", "expected"),
    [(None, False, 2, 2), (None, True, 2, 5), (None, False, 0, 1), (2, False, 2, 2), (7, True, 2, 7), (2, True, 2, 2)],
)
def test_the_limit_is_that_of_the_data_and_the_tools(
    caplog: pytest.LogCaptureFixture, limit: int | None, tools: bool, most_images: int, expected: int
) -> None:
    with caplog.at_level(logging.WARNING):
        made = with_image_limit(config(limit, tools), most_images)
    assert made.actor_rollout_ref.rollout.limit_images == expected
    short = expected < most_images + 3 * tools
    assert ("limit_images=2: a row has 2 images, and agent.max_images=3 more" in caplog.text) == short


def test_a_limit_below_a_rows_own_images_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit_images=1: a row of the data has 2 images; leave it out, or raise it"):
        with_image_limit(config(1, tools=False), 2)
