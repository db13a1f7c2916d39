"""Errors travel between processes unchanged."""

import pickle

import pytest

from vrl.protocol.errors import ConfigError, DataError, EngineError, RewardError, SandboxError, WorkerError


@pytest.mark.parametrize("kind", [ConfigError, DataError, WorkerError, EngineError, RewardError, SandboxError])
def test_an_error_keeps_class_and_message_when_pickled(kind: type[Exception]):
    copy = pickle.loads(pickle.dumps(kind("row 3 of a.parquet: no prompt")))
    assert type(copy) is kind
    assert str(copy) == "row 3 of a.parquet: no prompt"


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_what_a_user_got_wrong_is_a_value_error(kind: type[Exception]):
    assert issubclass(kind, ValueError)
