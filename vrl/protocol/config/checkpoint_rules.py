"""Rules of what a checkpoint holds; `rules` runs them with the others."""

from collections.abc import Iterator

from vrl.protocol.config.model import CheckpointConfig
from vrl.protocol.config.schema import Config


def left_out(config: Config) -> Iterator[str]:
    """Parts of `save_contents` that are not asked for and written all the same."""
    sections = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor.checkpoint}
    if config.needs_critic:
        sections["critic"] = config.critic.checkpoint
    always = CheckpointConfig().save_contents
    for section, checkpoint in sections.items():
        missing = [part for part in always if part not in checkpoint.save_contents]
        if missing:
            yield (
                f"{section}.checkpoint.save_contents lacks {', '.join(missing)}, but a checkpoint always has what a "
                f"resume needs: set [{','.join(always)}], or these and hf_model for a model folder beside"
            )
