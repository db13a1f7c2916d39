"""Which models Liger's kernels are for. What they compute needs a GPU: see tests/gpu/test_liger.py."""

import pytest

from vrl.models.liger import MODEL_TYPES, check_type
from vrl.protocol.errors import ConfigError


def test_only_models_whose_layers_have_kernels_are_taken() -> None:
    for model_type in MODEL_TYPES:
        check_type(model_type, "actor_rollout_ref.model.use_liger")
    with pytest.raises(
        ConfigError, match=r"critic\.model\.use_liger=True is for llama, .* not for gemma2: set it to False"
    ):
        check_type("gemma2", "critic.model.use_liger")
