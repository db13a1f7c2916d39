"""A part that `save_contents` leaves out is written all the same, and that is said once a role."""

import pytest

from tests.protocol.config.test_rules import config_with
from vrl.protocol.config.rules import check

GAE = {"algorithm.adv_estimator": "gae"}


@pytest.mark.parametrize("section", ["actor_rollout_ref.actor", "critic"])
def test_a_part_that_is_left_out_gets_one_warning(section: str):
    key = f"{section}.checkpoint.save_contents"
    (warning,) = check(config_with(GAE | {key: ["model", "hf_model"]}))
    assert warning.startswith(f"{key} lacks optimizer, extra, ")
    assert "set [model,optimizer,extra]" in warning


def test_a_folder_beside_is_no_reason_for_one_and_neither_is_a_critic_that_is_not_there():
    whole = ["model", "optimizer", "extra", "hf_model"]
    asked = {f"{section}.checkpoint.save_contents": whole for section in ("actor_rollout_ref.actor", "critic")}
    config = config_with(GAE | asked)
    assert check(config) == ()
    assert config.exported_roles == ("actor", "critic")
    assert config_with({}).exported_roles == ()
    assert check(config_with({"critic.checkpoint.save_contents": ["model"]})) == ()
