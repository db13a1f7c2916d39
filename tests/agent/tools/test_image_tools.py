"""Zoom and rotation on the original image: every pixel is where it should be, every bad argument is an answer."""

import time
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.agent.episodes import opened, png, prompt
from vrl.agent.tools.image_tools import rotate_tool, zoom_tool
from vrl.agent.tools.pictures import PictureError, encoded, fitted
from vrl.agent.tools.types import ImageLimits, ToolAnswer, ToolResources

RAW = {"min_side": 1}  # nothing is enlarged, so that pixels can be compared


def zoom(arguments: Any, *images: bytes, **config: Any) -> ToolAnswer:
    return zoom_tool(config or RAW, ToolResources()).start(prompt(*images), {}).call(arguments)


def rotate(arguments: Any, *images: bytes, **config: Any) -> ToolAnswer:
    return rotate_tool(config or RAW, ToolResources()).start(prompt(*images), {}).call(arguments)


@pytest.mark.parametrize(
    ("box", "corner", "size"),
    [
        ([10, 20, 50, 60], (10, 20), (40, 40)),
        ([10.4, 20.6, 49.5, 59.1], (10, 20), (40, 40)),  # whole pixels that hold the box
        ([-50, -50, 30, 30], (0, 0), (30, 30)),
        ([90, 70, 500, 500], (90, 70), (10, 10)),
        ([-1e8, -1e8, 1e8, 1e8], (0, 0), (100, 80)),
    ],
)
def test_a_box_is_cut_from_the_original(box: list[float], corner: tuple[int, int], size: tuple[int, int]) -> None:
    answer = zoom({"bbox_2d": box, "label": "it"}, png(100, 80))
    assert not answer.failed
    image = opened(answer.images[0])
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", size)
    original = np.asarray(opened(png(100, 80)))
    x, y = corner
    assert np.array_equal(np.asarray(image), original[y : y + size[1], x : x + size[0]])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "four numbers"),
        ({"bbox_2d": None}, "four numbers"),
        ({"bbox_2d": "1,2,3,4"}, "four numbers"),
        ({"bbox_2d": [1, 2, 3]}, "four numbers"),
        ({"bbox_2d": [1, 2, 3, "4"]}, "four numbers"),
        ({"bbox_2d": [1, 2, 3, True]}, "four numbers"),
        ({"bbox_2d": [1, 2, 3, float("nan")]}, "four numbers"),
        ({"bbox_2d": [1, 2, 3, 10**400]}, "four numbers"),
        ({"bbox_2d": [50, 20, 10, 60]}, "x1 < x2"),
        ({"bbox_2d": [10, 20, 10, 60]}, "x1 < x2"),
        ({"bbox_2d": [200, 200, 300, 300]}, "outside the image of 100 x 80"),
        ({"bbox_2d": [-9, -9, 0, 0]}, "outside"),
        ({"bbox_2d": [10, 10, 10.5, 60]}, "too small"),
        ({"bbox_2d": [0, 0, 99, 9], "image_index": 2}, "from 1 to 1"),
        ({"bbox_2d": [0, 0, 99, 9], "image_index": "1"}, "from 1 to 1"),
    ],
)
def test_bad_boxes_are_answers(arguments: dict[str, Any], reason: str) -> None:
    answer = zoom(arguments, png(100, 80))
    assert answer.failed
    assert not answer.images
    assert reason in answer.text


def test_the_limits_hold() -> None:
    data = png(400, 300)
    small = zoom({"bbox_2d": [0, 0, 10, 20]}, data, min_side=28)
    assert opened(small.images[0]).size == (28, 56)
    grown = zoom({"bbox_2d": [0, 0, 50, 50]}, data, min_pixels=10_000)
    assert opened(grown.images[0]).size == (100, 100)
    shrunk = zoom({"bbox_2d": [0, 0, 400, 300]}, data, max_pixels=30_000)
    assert opened(shrunk.images[0]).size == (200, 150)
    assert "at most 10 times" in zoom({"bbox_2d": [0, 0, 400, 4]}, data, max_aspect=10).text
    with pytest.raises(PictureError):
        fitted(Image.new("RGB", (0, 5)), ImageLimits())


def test_images_are_counted_from_one_and_none_is_said() -> None:
    second = zoom({"bbox_2d": [0, 0, 9, 9], "image_index": 2}, png(30, 30, "black"), png(30, 30, "blue"))
    assert np.asarray(opened(second.images[0]))[0, 0, 2] == 255
    assert "no image" in zoom({"bbox_2d": [0, 0, 9, 9]}).text
    assert "cannot be read" in zoom({"bbox_2d": [0, 0, 9, 9]}, b"no image at all").text


@pytest.mark.parametrize("angle", [0, 90, 180, 270, 360, -90, 450.0])
def test_right_angles_move_every_pixel(angle: float) -> None:
    original = np.asarray(opened(png(100, 80)))
    turned = np.asarray(opened(rotate({"angle": angle}, png(100, 80)).images[0]))
    assert np.array_equal(turned, np.rot90(original, k=round(angle / 90)))


def test_other_angles_keep_the_whole_image() -> None:
    width, height = opened(rotate({"angle": 45}, png(100, 100)).images[0]).size
    assert abs(width - 141.4) < 3
    assert abs(height - 141.4) < 3
    for angle in ("90", None, True, float("inf"), [90]):
        assert "must be a number" in rotate({"angle": angle}, png(100, 80)).text


def test_what_users_tools_call_an_image() -> None:
    transparent = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert opened(encoded(transparent)).getpixel((0, 0)) == (255, 255, 255)
    assert encoded(png(5, 5)) == png(5, 5)
    for wrong in (b"\x89PNG but no more", "path.png", 3):
        with pytest.raises(PictureError):
            encoded(wrong)


def test_a_long_image_is_made_smaller_before_it_is_turned() -> None:
    begin = time.process_time()
    answer = rotate({"angle": 33}, png(20_000, 100), max_aspect=1000)
    width, height = opened(answer.images[0]).size
    assert 0.9 * 4_194_304 <= width * height <= 4_194_304
    assert time.process_time() - begin < 3.0
    assert "too large to be opened" in rotate({"angle": 33}, png(9_400, 9_000)).text
