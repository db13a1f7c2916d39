"""The environments of a run, looked at before anything expensive starts: what rows use, whether it loads and works."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from vrl.agent.environments.configured import (
    environment_spec,
    observation_roles,
    running_code,
    settings_without_effect,
    with_built_in,
)
from vrl.agent.environments.pool import Schemas, check_environments
from vrl.agent.environments.registry import PLAIN
from vrl.agent.rewards.settings import runs_code
from vrl.agent.rewards.user import built_in_rule
from vrl.agent.sandbox.runner import probe
from vrl.data.dataset import used_data_sources, used_environments
from vrl.models.renderer import HFRenderer
from vrl.protocol.config.schema import Config
from vrl.workers.rollout import reward_spec

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Which environments rows may use: their function schemas, and those whose rows are left out here.

    Rows are left out by data source, too, where the reward would run code that cannot run.
    """

    schemas: Schemas = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    sources_left_out: frozenset[str] = frozenset()


def checked_environments(config: Config, renderer: HFRenderer) -> tuple[Config, Tools]:
    """Return the settings with all environments that rows use, and what prompts show of them.

    Each is loaded once, and the chat template is proved to go on turn by turn. Where the code sandbox does not work,
    rows that need it are left out, with a warning.

    Raises ConfigError where an environment or the template cannot be used.
    """
    taught = config.warm_start.files if config.warm_start.enable else ()
    trained = () if config.trainer.val_only else config.data.train_files
    files = list(dict.fromkeys([*trained, *config.data.val_files, *taught]))
    used = used_environments(files) if files else set[str]()
    named = bool(config.actor_rollout_ref.rollout.agent.environments)
    config = with_built_in(config, used)
    for message in settings_without_effect(config):
        _LOG.warning("%s", message)
    left_out, sources = _without_sandbox(config, used, list(dict.fromkeys([*trained, *config.data.val_files])))
    if left_out:
        config = _without(config, left_out)
    spec = environment_spec(config)
    if not spec.kinds:
        return config, Tools(left_out=left_out, sources_left_out=sources)
    renderer.check_turns(observation_roles(config))
    if not named and set(spec.kinds) != {PLAIN} and config.actor_rollout_ref.rollout.agent.max_turns == 1:
        _LOG.warning(
            "rows use %s, but actor_rollout_ref.rollout.agent.max_turns=1: no model sees what an environment answers; "
            "set max_turns=4, for example",
            ", ".join(spec.kinds),
        )
    schemas = check_environments(spec)
    hidden = [name for name, shown in schemas.items() if shown and not _shows(renderer, shown)]
    if hidden:
        _LOG.warning(
            "the chat template leaves out the tools of %s: no prompt shows them; describe them in the messages "
            "of the data and set config.show_schemas=False in its entry, or take a model whose template has them",
            ", ".join(hidden),
        )
    return config, Tools(schemas=schemas, left_out=left_out, sources_left_out=sources)


def _shows(renderer: HFRenderer, schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the chat template writes function schemas into a prompt."""
    question = [{"role": "user", "content": "Question"}]
    return renderer.render(question, schemas) != renderer.render(question)


def _without_sandbox(
    config: Config, used: Collection[str], scored: Sequence[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the environments in use, and the data sources of the files `scored`, whose code cannot run here."""
    need = running_code(config).intersection(used)
    sources = _sources_running_code(config, scored)
    reason = probe(config.actor_rollout_ref.rollout.multi_turn.sandbox) if need or sources else None
    if reason is None:
        return frozenset(), frozenset()
    for column, names in (("env_name", need), (config.data.reward_fn_key, sources)):
        if names:
            _LOG.warning(
                "rows with %s %s are left out, their code cannot run: %s", column, ", ".join(sorted(names)), reason
            )
    return frozenset(need), sources


def _sources_running_code(config: Config, files: Sequence[str]) -> frozenset[str]:
    """Return the data sources whose reward runs code: all or none where one function scores every row."""
    spec = reward_spec(config)
    rule = built_in_rule(spec)
    if not config.scores_by_rule or not files or (spec.function_path is not None and rule is None):
        return frozenset()
    used = used_data_sources(files, config.data.reward_fn_key)
    return frozenset(source for source in used if runs_code(rule or source, spec.function_kwargs))


def _without(config: Config, names: Collection[str]) -> Config:
    rollout = config.actor_rollout_ref.rollout
    kept = {name: entry for name, entry in rollout.agent.environments.items() if name not in names}
    rollout = replace(rollout, agent=replace(rollout.agent, environments=kept))
    return replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, rollout=rollout))
