"""Image decoding, the resize rule and the cache of patches."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor

from vrl.models.images import ImageCache, ImageRule, decode_image, rule_of
from vrl.protocol.errors import DataError

_GOLDEN = Path(__file__).parents[1] / "golden"
_DEFAULT = ImageRule(min_pixels=56 * 56, max_pixels=12845056)


def _encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_golden_sizes() -> None:
    for case in json.loads((_GOLDEN / "image_resize.json").read_text(encoding="utf-8"))["cases"]:
        rule = ImageRule(min_pixels=case["min_pixels"], max_pixels=case["max_pixels"])
        if "expected_error" in case:
            with pytest.raises(ValueError, match="200 times"):
                rule.grid(case["height"], case["width"])
        else:
            grid = rule.grid(case["height"], case["width"])
            assert (list(grid), rule.tokens(grid)) == (case["grid_thw"], case["tokens"]), case["id"]


@pytest.mark.parametrize(
    ("height", "width", "tokens"),
    [(512, 512, 324), (480, 640, 391), (100, 140, 20), (28, 28, 4), (1080, 1920, 2691), (1, 1, 4), (3, 500, 26)],
)
def test_visual_tokens(height: int, width: int, tokens: int) -> None:
    assert _DEFAULT.tokens(_DEFAULT.grid(height, width)) == tokens


def test_images_without_pixels_are_refused() -> None:
    with pytest.raises(DataError, match="no pixels"):
        _DEFAULT.grid(0, 10)


def test_transparent_pixels_become_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    decoded = decode_image(_encode(image))
    assert decoded.mode == "RGB"
    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (10, 20, 30)]


@pytest.mark.parametrize("mode", ["L", "P", "1", "LA", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    decoded = decode_image(_encode(Image.new("RGB", (4, 3), (255, 255, 255)).convert(mode), kind))
    assert (decoded.mode, decoded.size) == ("RGB", (4, 3))


def test_cameras_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert decode_image(_encode(Image.new("RGB", (8, 4)), "JPEG", exif=exif)).size == (4, 8)


def test_broken_files_are_refused(png: Callable[..., bytes]) -> None:
    whole = png(40, 40)
    for data in (b"", b"no image", whole[:30], whole[: len(whole) // 2], whole.replace(b"IDAT", b"IDXX")):
        with pytest.raises(DataError, match="cannot be read"):
            decode_image(data)


def test_patches_are_the_image_processors(png: Callable[..., bytes]) -> None:
    processor = Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 16)
    cache = ImageCache(processor, 1 << 30)
    images = [png(30, 60, 1), png(200, 200, 2)]
    pixels, grids = cache.batch(images)
    wanted = processor(images=[Image.open(io.BytesIO(data)) for data in images], return_tensors="pt")
    assert pixels is not None
    torch.testing.assert_close(pixels, wanted["pixel_values"], rtol=0, atol=0)
    torch.testing.assert_close(grids, wanted["image_grid_thw"], rtol=0, atol=0)
    rule = rule_of(processor)
    assert [list(rule.grid(30, 60)), list(rule.grid(200, 200))] == wanted["image_grid_thw"].tolist()
    assert cache.batch([]) == (None, None)


def test_cache_is_bounded_and_drops_the_oldest(png: Callable[..., bytes]) -> None:
    processor = Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=56 * 56)
    images = [png(56, 56, seed) for seed in range(4)]
    size = 16 * 1176 * 4
    cache = ImageCache(processor, 3 * size + 10)
    first = cache.get(images[0])[0]
    second = cache.get(images[1])[0]
    cache.get(images[2])
    assert cache.nbytes == 3 * size
    assert cache.get(bytes(bytearray(images[0])))[0] is first  # by content
    cache.get(images[3])
    assert cache.nbytes == 3 * size
    assert cache.get(images[0])[0] is first
    again = cache.get(images[1])[0]
    assert again is not second
    np.testing.assert_array_equal(again.numpy(), second.numpy())


def test_an_image_above_the_bound_is_not_kept(png: Callable[..., bytes]) -> None:
    cache = ImageCache(Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=56 * 56), 1000)
    assert len(cache.get(png(56, 56))[0]) == 16
    assert cache.nbytes == 0
