"""The code runner that the settings ask for, and whether it works here."""

from vrl.agent.sandbox.fusion import FusionRunner
from vrl.agent.sandbox.local import LocalRunner
from vrl.agent.sandbox.types import ProgramRunner
from vrl.protocol.config.sandbox import SandboxConfig
from vrl.protocol.errors import SandboxError

_QUESTION, _ANSWER = "print(6 * 7)", "42\n"


def make_runner(config: SandboxConfig) -> ProgramRunner:
    """Return the runner of `config.kind`; it starts in the background. One a process serves all its threads."""
    return FusionRunner(config) if config.kind == "remote" else LocalRunner(config)


def probe(config: SandboxConfig) -> str | None:
    """Run a trivial cell with these settings; return None when it works, else why it does not and the way out.

    Takes one to two seconds. Called once when a run starts, before rows that need code are handed out.
    """
    runner = make_runner(config)
    try:
        session = runner.session()
        result = session.run(_QUESTION)
        session.close()
    except SandboxError as error:
        return str(error)
    finally:
        runner.close()
    if result.error is None and result.output == _ANSWER:
        return None
    return f"the code sandbox starts, but {_QUESTION} gives {result.output!r} and the error {result.error!r}"
