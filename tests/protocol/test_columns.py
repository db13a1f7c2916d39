"""Columns are declared once, with dtype, shape and writer; messages name the writer."""

import pytest

from vrl.protocol import columns
from vrl.protocol.columns import COLUMNS, LOSS_MASK, OLD_LOG_PROBS, declare, missing_column_message

SHAPES = {"T", "T 3", "B", "B E"}
DTYPES = {"int64", "int32", "float32", "bool", "object"}


def test_every_constant_is_the_name_of_its_declaration() -> None:
    constants = {key: value for key, value in vars(columns).items() if key.isupper() and isinstance(value, str)}
    assert {value.upper() for value in constants.values()} == set(constants)
    assert set(constants.values()) == set(COLUMNS)


def test_every_declaration_is_complete() -> None:
    for name, spec in COLUMNS.items():
        assert spec.name == name
        assert spec.dtype in DTYPES
        assert spec.shape in SHAPES
        assert spec.writer
        assert spec.meaning
        assert spec.dtype != "object" or spec.shape == "B", name


def test_declaring_a_name_twice_is_an_error() -> None:
    before = dict(COLUMNS)
    with pytest.raises(ValueError, match=LOSS_MASK):
        declare(LOSS_MASK, "float32", "T", "nobody", "again")
    assert before == COLUMNS


def test_a_missing_column_names_method_column_and_writer() -> None:
    message = missing_column_message("Critic.update", OLD_LOG_PROBS)
    assert "Critic.update" in message
    assert OLD_LOG_PROBS in message
    assert COLUMNS[OLD_LOG_PROBS].writer in message


def test_a_missing_column_that_nobody_declared() -> None:
    message = missing_column_message("Critic.update", "old_log_prob")
    assert "Critic.update" in message
    assert "old_log_prob" in message
    assert "declared" in message
