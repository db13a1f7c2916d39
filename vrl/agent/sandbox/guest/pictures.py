"""Images that the code of a cell shows, leaves open or saves, as raw RGB pixels for the tool process."""

import hashlib
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy
import PIL.Image
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp"})
_MAX_FILES_LOOKED_AT = 256


@final
class Pictures:
    """What one cell has shown so far: `(width, height, pixels)`, each content once, at most `limit`."""

    def __init__(self, limit: int, max_pixels: int) -> None:
        self._limit = limit
        self._max_pixels = max_pixels
        self._seen: set[bytes] = set()
        self._files: dict[str, tuple[int, int]] = {}
        self._saved: dict[Figure, str] = {}  # figures that are as they were saved in this cell, and where
        self.shown: list[tuple[int, int, bytes]] = []
        self.left_out = 0

    def begin(self) -> None:
        """Forget the last cell's images and remember which files are there."""
        self.shown, self.left_out = [], 0
        self._seen.clear()
        self._saved.clear()
        self._files = self._image_files()

    def show(self, image: PIL.Image.Image) -> None:
        """Keep an image: RGB on white, made smaller when it has too many pixels."""
        if len(self.shown) >= self._limit:
            self.left_out += 1
            return
        width, height = image.size
        if width < 1 or height < 1:
            return
        if width * height > self._max_pixels:
            factor = math.sqrt(self._max_pixels / (width * height))
            size = (max(1, int(width * factor)), max(1, int(height * factor)))
            size = (min(size[0], self._max_pixels), min(size[1], self._max_pixels))
            image = opaque(image).resize(size, PIL.Image.Resampling.BOX)
        image = opaque(image)
        pixels = image.tobytes()
        key = hashlib.sha256(b"%d %d " % image.size + pixels).digest()
        if key not in self._seen:
            self._seen.add(key)
            self.shown.append((*image.size, pixels))

    def show_figure(self, figure: Figure) -> None:
        """Draw a figure and keep it; one that was saved and not changed since is taken from its file."""
        if figure in self._saved and not figure.stale and self._show_file(self._saved[figure]):
            return
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        self.show(PIL.Image.fromarray(numpy.asarray(canvas.buffer_rgba())))

    def note_saved(self, figure: Figure, target: Any) -> None:
        """Remember that a figure was saved: the file and the figure that is shown are one picture."""
        if not isinstance(target, (str, os.PathLike)):
            return
        name = os.path.relpath(os.fsdecode(target))
        self._saved = {other: file for other, file in self._saved.items() if file != name}
        if Path(name).suffix.lower() in _SUFFIXES:
            self._saved[figure] = name
            figure.stale = False  # its resolution was changed for the file and changed back

    def show_rest(self) -> None:
        """Keep what is there at the end of a cell: open figures and new files."""
        self.show_open_figures()
        self.show_new_files()

    def show_open_figures(self) -> None:
        """Keep all figures of pyplot and close them, as a notebook does."""
        for number in pyplot.get_fignums():
            if len(self.shown) >= self._limit:
                self.left_out += 1
            else:
                self.show_figure(pyplot.figure(number))
        pyplot.close("all")

    def show_new_files(self) -> None:
        """Keep the image files that were made or changed in the working folder or below it since `begin`."""
        for name, state in self._image_files().items():
            if self._files.get(name) == state:
                continue
            if len(self.shown) >= self._limit:
                self.left_out += 1
                continue
            self._show_file(name)

    def _show_file(self, name: str) -> bool:
        try:
            with PIL.Image.open(name) as image:
                self.show(image)
        except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError):
            return False  # half a file, or none of an image at all
        state = _state(Path(name))
        if state is not None:
            self._files[name] = state
        return True

    @staticmethod
    def _image_files() -> dict[str, tuple[int, int]]:
        """Return time and size of the image files in the working folder and below, the oldest first."""
        found: list[tuple[int, int, str]] = []
        looked_at = 0
        for folder, folders, names in os.walk("."):
            folders[:] = sorted(below for below in folders if not below.startswith("."))
            for path in [Path(folder, name) for name in sorted(names)[: _MAX_FILES_LOOKED_AT - looked_at]]:
                state = _state(path) if path.suffix.lower() in _SUFFIXES else None
                if state is not None:
                    found.append((*state, str(path)))
            looked_at += len(names) + len(folders)
            if looked_at >= _MAX_FILES_LOOKED_AT:
                break
        return {name: (time, size) for time, size, name in sorted(found)}


def _state(path: Path) -> tuple[int, int] | None:
    """Return time and size of a file; None when it is none."""
    try:
        state = path.lstat()
    except OSError:
        return None
    return (state.st_mtime_ns, state.st_size) if stat.S_ISREG(state.st_mode) else None


def take_over_show(pictures: Pictures) -> None:
    """Make `.show()` of images, figures and pyplot hand over what they would put on a screen; note saved figures."""
    save_to_file = Figure.savefig

    def save(figure: Figure, fname: Any, *arguments: Any, **settings: Any) -> Any:
        saved = save_to_file(figure, fname, *arguments, **settings)
        pictures.note_saved(figure, fname)
        return saved

    def show_image(image: PIL.Image.Image, *_: Any, **__: Any) -> None:
        pictures.show(image)

    def show_all(*_: Any, **__: Any) -> None:
        pictures.show_open_figures()

    def show_figure(figure: Figure, *_: Any, **__: Any) -> None:
        pictures.show_figure(figure)
        pyplot.close(figure)

    replace: list[tuple[Any, Callable[..., None]]] = [
        (PIL.Image.Image, show_image),
        (pyplot, show_all),
        (Figure, show_figure),
    ]
    for owner, function in replace:
        owner.show = function
    figures: Any = Figure
    figures.savefig = save


def opaque(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return the image as RGB, on white where it is transparent."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        return PIL.Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
