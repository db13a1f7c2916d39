"""Looking closer at an image of the prompt: zoom into a box, turn by an angle.

Both work on the image as it is in the data, not on an earlier result: boxes of a chain of zooms all count from the
same corner, as in DeepEyes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard

from PIL import Image

from vrl.agent.tools.pictures import PictureError, as_png, fitted, open_picture
from vrl.agent.tools.types import (
    ImageLimits,
    StatelessTool,
    ToolAnswer,
    ToolResources,
    check_settings,
    failed,
    function_schema,
)
from vrl.protocol.errors import ConfigError
from vrl.protocol.trajectory import Prompt

MIN_BOX_SIDE: Final = 2.0  # pixels of the image; below it there is nothing to see
_INDEX: Final = {"type": "integer", "description": "Which image of the question; 1 is the first and the default."}

ZOOM_SCHEMA: Final = function_schema(
    "image_zoom_in_tool",
    "Zoom into a region of an image of the question.",
    {
        "bbox_2d": {
            "type": "array",
            "items": {"type": "number"},
            "minItems": 4,
            "maxItems": 4,
            "description": "The region [x1, y1, x2, y2] in pixels: x1, y1 is its top left corner, x2, y2 the bottom "
            "right one.",
        },
        "label": {"type": "string", "description": "What the region shows."},
        "image_index": _INDEX,
    },
    "bbox_2d",
)
ROTATE_SCHEMA: Final = function_schema(
    "image_rotate_tool",
    "Turn an image of the question.",
    {
        "angle": {"type": "number", "description": "Degrees, counterclockwise."},
        "image_index": _INDEX,
    },
    "angle",
)


def zoom_tool(config: Mapping[str, Any], resources: ToolResources) -> StatelessTool:
    """Return the tool `image_zoom_in_tool`; `config` may set `name` and any of the limits of images."""
    return _image_tool(ZOOM_SCHEMA, zoom, config, resources)


def rotate_tool(config: Mapping[str, Any], resources: ToolResources) -> StatelessTool:
    """Return the tool `image_rotate_tool`; `config` may set `name` and any of the limits of images."""
    return _image_tool(ROTATE_SCHEMA, rotate, config, resources)


def zoom(image: Image.Image, arguments: Mapping[str, Any], limits: ImageLimits) -> Image.Image:  # noqa: ARG001 - as rotate
    """Return the box `bbox_2d` of an image, in whole pixels, clipped to the image.

    Raises PictureError that tells the model what is wrong with the box.
    """
    box = arguments.get("bbox_2d")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        raise PictureError("bbox_2d must be four numbers [x1, y1, x2, y2]")
    x1, y1, x2, y2 = box
    if not (x1 < x2 and y1 < y2):
        raise PictureError(f"bbox_2d {box} is empty: it needs x1 < x2 and y1 < y2")
    width, height = image.size
    left, top = math.floor(max(x1, 0)), math.floor(max(y1, 0))
    right, bottom = math.ceil(min(x2, width)), math.ceil(min(y2, height))
    if right <= left or bottom <= top:
        raise PictureError(f"bbox_2d {box} is outside the image of {width} x {height} pixels")
    if min(right - left, bottom - top) < min(MIN_BOX_SIDE, width, height):
        raise PictureError(f"bbox_2d {box} is too small: {right - left} x {bottom - top} pixels")
    return image.crop((left, top, right, bottom))


def rotate(image: Image.Image, arguments: Mapping[str, Any], limits: ImageLimits) -> Image.Image:
    """Return the whole image turned counterclockwise by `angle` degrees, corners black; right angles are exact.

    The turned image of a long and thin one has many times its pixels: it is made smaller before, where it would be
    above the limit.

    Raises PictureError when the angle is no number.
    """
    angle = arguments.get("angle")
    if not _is_number(angle):
        raise PictureError("angle must be a number of degrees")
    turn = math.radians(float(angle))
    sine, cosine = abs(math.sin(turn)), abs(math.cos(turn))
    pixels = (image.width * cosine + image.height * sine) * (image.width * sine + image.height * cosine)
    scale = math.sqrt(limits.max_pixels / max(pixels, 1.0))
    if scale < 1.0:
        image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    return image.rotate(float(angle) % 360.0, resample=Image.Resampling.BICUBIC, expand=True)


def _image_tool(
    schema: Mapping[str, Any],
    change: Callable[[Image.Image, Mapping[str, Any], ImageLimits], Image.Image],
    config: Mapping[str, Any],
    resources: ToolResources,
) -> StatelessTool:
    limits = _limits(config, resources.image_limits)
    function = {**schema["function"], "name": config.get("name", schema["function"]["name"])}

    def call(prompt: Prompt, arguments: Mapping[str, Any]) -> ToolAnswer:
        try:
            image = fitted(change(_pick(prompt, arguments.get("image_index", 1)), arguments, limits), limits)
        except PictureError as error:
            return failed(str(error))
        return ToolAnswer(images=(as_png(image),))

    return StatelessTool({**schema, "function": function}, call)


def _limits(config: Mapping[str, Any], default: ImageLimits) -> ImageLimits:
    names = ("min_side", "min_pixels", "max_pixels", "max_aspect")
    check_settings(config, ("name", *names), "an image tool")
    for name in names:
        value = config.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"an image tool: {name}={value!r} must be a number of at least 0")
    return ImageLimits(
        min_side=config.get("min_side", default.min_side),
        min_pixels=config.get("min_pixels", default.min_pixels),
        max_pixels=config.get("max_pixels", default.max_pixels),
        max_aspect=config.get("max_aspect", default.max_aspect),
    )


def _pick(prompt: Prompt, index: Any) -> Image.Image:
    count = len(prompt.images)
    if not count:
        raise PictureError("the question has no image")
    if type(index) is not int or not 1 <= index <= count:
        raise PictureError(f"image_index must be a whole number from 1 to {count}, the number of images")
    return open_picture(prompt.images[index - 1])


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
