"""Rows of parquet and json files. `dataset` reads prompts through it; converters and generators write parquet with it.

A parquet file is unpacked once into an unnamed temporary file and mapped, so that a row is read when it is asked for
and image bytes take no memory of the process; json rows stay in memory.
"""

import bisect
import json
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, final

import pyarrow as pa
import pyarrow.parquet as pq

from vrl.protocol.errors import DataError

JSON_SUFFIXES: Final = (".jsonl", ".json")
SUFFIXES: Final = (".parquet", *JSON_SUFFIXES)
_ROWS_PER_BATCH: Final = 64
_BUFFER_BYTES: Final = 1 << 20


class Table(Protocol):
    """The rows of one file."""

    path: Path
    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, Any]:
        """Return row `index` as plain Python values."""
        ...

    def values(self, column: str, field: str | None = None) -> list[Any]:
        """Return a column, or one field of a column of dicts; None where a row has no such value."""
        ...


def open_table(path: Path) -> Table:
    """Open a parquet, jsonl or json file (a list of rows, or a row a line).

    Raises:
        DataError: the file is missing, of another type, or cannot be read.
    """
    if not path.exists():
        raise DataError(
            f"{path}: no such file (working folder {Path.cwd()}); check data.train_files and data.val_files"
        )
    if path.is_dir() or path.suffix not in SUFFIXES:
        raise DataError(f"{path}: not a data file; name files that end in {', '.join(SUFFIXES)}")
    return ParquetTable(path) if path.suffix == ".parquet" else JsonTable(path)


def write_parquet(rows: Sequence[Mapping[str, Any]], path: Path, schema: pa.Schema | None = None) -> None:
    """Write rows to `path`, complete or not at all; its folder is made.

    Without a schema the types follow the rows, and the columns are those of all rows.
    """
    names = schema.names if schema is not None else dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: [row.get(name) for row in rows] for name in names}, schema=schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        pq.write_table(table, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@final
class ParquetTable:
    """A parquet file as mapped record batches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._table = _unpacked(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path}: cannot be read as parquet ({error}); write it again, or set TMPDIR to a folder with room for "
                "the unpacked file"
            ) from error
        self.columns = tuple(self._table.column_names)
        self._batches = self._table.to_batches()
        self._starts: list[int] = []
        start = 0
        for batch in self._batches:
            self._starts.append(start)
            start += batch.num_rows

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        """See `Table`."""
        number = bisect.bisect_right(self._starts, index) - 1
        at = index - self._starts[number]
        columns = self._batches[number].columns
        return {name: column[at].as_py() for name, column in zip(self.columns, columns, strict=True)}

    def values(self, column: str, field: str | None = None) -> list[Any]:
        """See `Table`."""
        if column not in self.columns:
            return [None] * len(self)
        chunks = self._table.column(column)
        if field is None:
            return chunks.to_pylist()
        position = chunks.type.get_field_index(field) if pa.types.is_struct(chunks.type) else -1
        return chunks.flatten()[position].to_pylist() if position >= 0 else [None] * len(self)


def _unpacked(path: Path) -> pa.Table:
    source = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)  # a piece at a time, not whole columns
    if source.metadata.num_rows == 0:
        return source.schema_arrow.empty_table()
    with tempfile.TemporaryFile() as file:
        # The stream form: a file form refuses text columns whose dictionaries differ from batch to batch.
        with pa.ipc.new_stream(file, source.schema_arrow) as writer:
            for batch in source.iter_batches(_ROWS_PER_BATCH):
                writer.write_batch(batch)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pa.default_memory_pool().release_unused()
    return pa.ipc.open_stream(pa.py_buffer(mapped)).read_all()


@final
class JsonTable:
    """A jsonl file, or a json file with one list, in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from error
        whole = path.suffix == ".json" and text.lstrip().startswith("[")
        self._rows = _parsed_list(text, path) if whole else _parsed_lines(text, path)
        self.columns = tuple(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """See `Table`."""
        return self._rows[index]

    def values(self, column: str, field: str | None = None) -> list[Any]:
        """See `Table`."""
        found = [row.get(column) for row in self._rows]
        if field is None:
            return found
        return [value.get(field) if isinstance(value, dict) else None for value in found]


def _parsed_list(text: str, path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: broken json ({error})") from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {index}: is {type(row).__name__}, not an object with named columns")
    return rows


def _parsed_lines(text: str, path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: broken json ({error}); repair or delete the line") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: is {type(row).__name__}, not an object with named columns")
        rows.append(row)
    return rows
