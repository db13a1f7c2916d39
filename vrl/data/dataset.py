"""Prompt datasets of parquet and json files in verl's format. The controller and the `data` commands load them.

Only what is checked at once is read at once (row ids, environment names); messages and images are read when a row is
asked for.
"""

import logging
import random
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, final

from vrl.data.files import Table, open_table
from vrl.data.prompts import ColumnNames, data_source_of, env_name_of, to_prompt
from vrl.protocol.errors import DataError
from vrl.protocol.trajectory import Prompt

_LOG = logging.getLogger(__name__)
_DEFAULT_COLUMNS: Final = ColumnNames()


@final
class RowDataset:
    """Rows of one or several files, each with a `row_id` that stays the same from run to run.

    `dataset[i]` is a `Prompt` whose uid is its row_id, until a loader draws it; its images are read, not decoded. It
    raises DataError with file and row for a row that cannot be used.
    """

    def __init__(self, tables: Sequence[Table], columns: ColumnNames, rows: Sequence[tuple[int, int, str]]) -> None:
        """`rows` lists (table, row of the table, row_id)."""
        self._tables = tables
        self._columns = columns
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        number, row, row_id = self._rows[index]
        table = self._tables[number]
        try:
            return to_prompt(table.row(row), self._columns, table.path.parent, row_id)
        except DataError as error:
            raise DataError(f"{self.where(index)}: {error}") from error

    def select(self, indices: Sequence[int]) -> "RowDataset":
        """Return the dataset of these rows in this order."""
        return RowDataset(self._tables, self._columns, [self._rows[index] for index in indices])

    @property
    def row_ids(self) -> tuple[str, ...]:
        """The name of each row."""
        return tuple(row_id for _, _, row_id in self._rows)

    def where(self, index: int) -> str:
        """Name the file and the row (counted from 0) of row `index`, for messages."""
        number, row, _ = self._rows[index]
        return f"{self._tables[number].path}, row {row}"


def load_rows(
    files: str | Path | Sequence[str | Path],
    *,
    columns: ColumnNames = _DEFAULT_COLUMNS,
    max_samples: int = -1,
    seed: int | None = None,
    env_names: Collection[str] | None = None,
    left_out: Collection[str] = (),
    sources_left_out: Collection[str] = (),
) -> RowDataset:
    """Open files and check what can be checked without reading every row.

    Args:
        files: one or several of `data.train_files` or `data.val_files`; with and without an image column may be mixed.
        columns: names of the columns that a run may rename.
        max_samples: keep this many rows; -1 keeps all.
        seed: draws the kept rows at random; None keeps the first ones.
        env_names: environments that exist; None skips the check.
        left_out: environments whose rows are not taken.
        sources_left_out: data sources whose rows are not taken.

    Raises:
        DataError: a missing or unreadable file, no prompt column, no rows, a file named twice, an unknown environment.
    """
    paths = _paths(files)
    tables = [open_table(path) for path in paths]
    for table in tables:
        _require_prompts(table, columns.prompt)
        if env_names is not None:
            _require_known(table, env_names)
    rows = [
        (number, row, row_id)
        for number, (table, name) in enumerate(zip(tables, _names(paths), strict=True))
        for row, row_id in _taken(table, _row_ids(table, name), columns, left_out, sources_left_out)
    ]
    if not rows:
        without = f" without env_name {', '.join(sorted(left_out))}" if left_out else ""
        without += f" without {columns.data_source} {', '.join(sorted(sources_left_out))}" if sources_left_out else ""
        raise DataError(f"{', '.join(map(str, paths))}: no rows{without}")
    if max_samples == 0 or max_samples < -1:
        raise DataError(f"max_samples={max_samples}: give the number of rows to keep, or -1 for all {len(rows)}")
    if 0 < max_samples < len(rows):
        chosen = range(max_samples) if seed is None else random.Random(seed).sample(range(len(rows)), max_samples)
        rows = [rows[index] for index in chosen]
    return RowDataset(tables, columns, rows)


def used_environments(files: str | Path | Sequence[str | Path]) -> set[str]:
    """Return the environments that rows of these files name. Raises DataError as `load_rows` does for files."""
    return {name for path in _paths(files) for name in _env_names(open_table(path)) if name is not None}


def used_data_sources(files: str | Path | Sequence[str | Path], column: str) -> set[str]:
    """Return the data sources of rows of these files. Raises DataError as `load_rows` does for files."""
    return {source for path in _paths(files) for source in _data_sources(open_table(path), column)}


def _taken(
    table: Table,
    row_ids: Sequence[str],
    columns: ColumnNames,
    left_out: Collection[str],
    sources_left_out: Collection[str],
) -> list[tuple[int, str]]:
    rows = list(enumerate(row_ids))
    if left_out:
        names = _env_names(table)
        rows = [(row, row_id) for row, row_id in rows if names[row] not in left_out]
    if sources_left_out:
        sources = _data_sources(table, columns.data_source)
        rows = [(row, row_id) for row, row_id in rows if sources[row] not in sources_left_out]
    return rows


def _paths(files: str | Path | Sequence[str | Path]) -> list[Path]:
    listed = [files] if isinstance(files, str | Path) else list(files)
    if not listed or any(not str(file).strip() for file in listed):
        raise DataError(f"files={files!r}: no data file is named; set data.train_files and data.val_files")
    paths = [Path(file).expanduser() for file in listed]
    twice = [path for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if twice:
        raise DataError(f"{twice[0]}: the file is listed more than once; list it once")
    return paths


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest names that tell the files apart: stems, else with their folder, else whole paths."""
    stems = [path.stem for path in paths]
    with_folder = [f"{path.resolve().parent.name}/{path.stem}" for path in paths]
    for names in (stems, with_folder):
        if len(set(names)) == len(names):
            return names
    return [str(path.resolve()) for path in paths]


def _row_ids(table: Table, name: str) -> list[str]:
    """Return `<file>:<extra_info.index>`, or `<file>:<row>` for a file where indices are missing or repeat."""
    indices = table.values("extra_info", "index")
    if all(isinstance(index, int | str) for index in indices) and len(set(map(str, indices))) == len(indices):
        return [f"{name}:{index}" for index in indices]
    if any(index is not None for index in indices):
        _LOG.info("%s: extra_info.index is missing in places or repeats; row ids are row numbers", table.path)
    return [f"{name}:{row}" for row in range(len(table))]


def _require_prompts(table: Table, column: str) -> None:
    if len(table) and column not in table.columns:
        raise DataError(
            f"{table.path}: no column '{column}' (it has: {', '.join(table.columns) or 'none'}); set data.prompt_key "
            "to the column with the messages, or convert the file to verl's format with `vrl data`"
        )


def _require_known(table: Table, env_names: Collection[str]) -> None:
    unknown = [(row, name) for row, name in enumerate(_env_names(table)) if name is not None and name not in env_names]
    if unknown:
        row, name = unknown[0]
        raise DataError(
            f"{table.path}, row {row}: env_name '{name}' is unknown ({len(unknown)} such rows); known: "
            f"{', '.join(sorted(env_names)) or 'none'}; register it, or leave the cell empty for a plain row"
        )


def _data_sources(table: Table, column: str) -> list[str]:
    return [data_source_of(cell) for cell in table.values(column)]


def _env_names(table: Table) -> list[Any]:
    return [env_name_of(cell) for cell in table.values("env_name")]
