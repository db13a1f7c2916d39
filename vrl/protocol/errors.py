"""The errors that reach the person at the console.

Each carries one finished message: what was given, where, and a way out. They take one string only, so that they pickle
and travel between processes unchanged. The command line prints the message without a traceback for `ConfigError` and
`DataError`; the others keep theirs.
"""


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or impossible. The message names the key; nothing has started yet."""


class DataError(ValueError):
    """A data file, row or image cannot be used. The message names the file and, where there is one, the row."""


class WorkerError(RuntimeError):
    """A worker process failed or died. The message names the role, the rank and the first cause."""


class EngineError(RuntimeError):
    """The generation engine refused a request or broke an invariant (weights missing, caches not reset)."""


class RewardError(RuntimeError):
    """A reward function raised, ran over its time limit or returned something that is no score."""


class SandboxError(RuntimeError):
    """No sandbox for a model's code can be had: bubblewrap is missing, namespaces are refused, a server is down.

    What the code itself does wrong is never one: it is in the result of its cell.
    """
