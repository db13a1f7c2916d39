"""Settings of the code sandbox (`actor_rollout_ref.rollout.multi_turn.sandbox.*`)."""

from dataclasses import dataclass
from typing import Literal, final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxConfig:
    """Where a model's code runs and what it may use. Limits hold for one interpreter, that of one episode."""

    kind: Literal["local", "remote", "rlimits"] = "local"  # bubblewrap, Sandbox Fusion server, or (unsafe) limits alone
    cell_seconds: float = 10.0  # seconds of wall clock a cell
    memory_mib: int = 512  # MiB a cell and its processes may use beyond the interpreter itself
    processes: int = 32  # processes and threads; with rlimits there are threads only
    file_mib: int = 64  # MiB of files
    output_chars: int = 8192  # characters of output a cell that are kept
    images: int = 4  # images a cell that are kept
    image_pixels: int = 1_048_576  # pixels of such an image; larger ones are made smaller
    pool_size: int = 4  # interpreters kept ready in a process that runs tools
    url: str | None = None  # of the Sandbox Fusion server, for kind=remote
    rate: float = 10.0  # requests a second to that server from each process: every rollout worker has several
