"""Image cells of data files."""

import base64

import pytest

from vrl.data.images import image_cells, is_missing, read_image
from vrl.protocol.errors import DataError


@pytest.mark.parametrize("cell", [None, float("nan"), [], (), "", b"", {}])
def test_missing_cells(cell):
    assert is_missing(cell)
    assert image_cells(cell) == []


def test_present_cells():
    assert not any(map(is_missing, [0, False, "x", [None], {"bytes": None}, 1.5]))
    assert image_cells("a.png") == ["a.png"]
    assert image_cells({"path": "a.png"}) == [{"path": "a.png"}]
    assert image_cells([b"1", b"2"]) == [b"1", b"2"]


def test_every_form_gives_the_same_bytes(tmp_path, image):
    data = image()
    (tmp_path / "pictures").mkdir()
    path = tmp_path / "pictures" / "a.png"
    path.write_bytes(data)
    cells = [
        data,
        "pictures/a.png",
        str(path),
        f"file://{path}",
        "data:image/png;base64," + base64.b64encode(data).decode(),
        {"bytes": data, "path": "somewhere/else.png"},
        {"bytes": None, "path": "pictures/a.png"},
        {"bytes": b"", "path": "pictures/a.png"},
        {"path": "pictures/a.png"},
        {"type": "image", "image": f"file://{path}"},
        {"image": {"bytes": data}},
    ]
    assert [read_image(cell, tmp_path) for cell in cells] == [data] * len(cells)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ({"bytes": None, "path": None}, "neither bytes nor path (keys: bytes, path)"),
        (3, "given as int"),
        (None, "given as NoneType"),
        ("gone.png", "gone.png cannot be read (No such file"),
        ("https://example.org/a.png", "is a web address"),
        ("data:image/png;base64,???", "not base64"),
        ("\x89PNG\x00\x01", "is no path"),
        ("A" * 5000, "cannot be read (File name too long"),
    ],
)
def test_cells_that_are_no_image(tmp_path, cell, says):
    with pytest.raises(DataError) as caught:
        read_image(cell, tmp_path)
    assert says in str(caught.value)
