"""The reward model: one score a row, from a frozen classifier. One instance a rank; all ranks call alike."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from vrl.models.loading import load_reward_model, read_reward_config
from vrl.models.packing import PackedBatch
from vrl.models.renderer import HFRenderer, load_renderer
from vrl.protocol.columns import INPUT_IDS, MESSAGES, RESPONSE_TEXT, RM_CUT_TOKENS, RM_SCORES
from vrl.protocol.dataproto import DataProto
from vrl.protocol.dispatch import Dispatch, register
from vrl.protocol.ragged import Ragged
from vrl.workers.building import BuildContext, blocks_of, learner, residence, sharded
from vrl.workers.learner import Learner, timed


@final
class RewardModelWorker:
    """Holds the classifier.

    `renderer` is the reward model's own where its tokenizer or template is not the policy's: the conversation is then
    rendered anew from messages and response text; otherwise the row's own ids are read. Of a row of more than
    `max_length` tokens only the end is read, since the score is that of the last token.
    """

    def __init__(self, learn: Learner, renderer: HFRenderer | None, max_length: int | None) -> None:
        self._learner = learn
        self._renderer = renderer
        self._max_length = max_length

    @classmethod
    def build(cls, context: BuildContext) -> Self:
        """Load and shard the model of `reward_model.model`, without gradients."""
        config = context.config
        reward = config.reward_model
        path, trust = reward.model.path, reward.model.trust_remote_code
        assert path is not None, "the rules ask for it"
        module = load_reward_model(path, torch.float32, trust_remote_code=trust)
        sharded(module, blocks_of(module), reward.fsdp_config, context)
        limits = context.limits(config.reward_model_token_budget, reward.micro_batch_size_per_gpu)
        text_only = replace(context, images=None)
        stays = residence(reward.fsdp_config)
        learn = learner(module, text_only, limits, None, stays, config.sequence_parallel_size("reward_model"))
        renderer = load_renderer(path, trust_remote_code=trust) if reward.model.input_tokenizer is not None else None
        positions = read_reward_config(path, trust_remote_code=trust).positions
        return cls(learn, renderer, reward.max_length or positions)

    @register(Dispatch.ROWS, requires=(INPUT_IDS, MESSAGES, RESPONSE_TEXT), returns=(RM_SCORES, RM_CUT_TOKENS))
    def score(self, batch: DataProto) -> DataProto:
        """Return each row's score, and how many tokens of its beginning were not read."""
        rows = self._texts(batch)
        read = rows if self._max_length is None else [row[-self._max_length :] for row in rows]
        found, seconds = self._learner.infer(DataProto({INPUT_IDS: Ragged.from_rows(read, torch.int64)}), _run)
        meta = timed("reward_model", seconds)
        if not found:  # no column on a rank without rows, which still ran the collectives
            return DataProto(meta=meta)
        cut = torch.tensor([len(row) - len(kept) for row, kept in zip(rows, read, strict=True)], dtype=torch.int64)
        scores = torch.segment_reduce(found[0].values, "sum", offsets=found[0].offsets)  # one entry a row is not 0
        return DataProto({RM_SCORES: scores, RM_CUT_TOKENS: cut}, meta=meta)

    def _texts(self, batch: DataProto) -> list[list[int]]:
        """Return the ids that the model is to read."""
        if self._renderer is None:
            return [row.tolist() for row in batch.ragged(INPUT_IDS).to_rows()]
        texts = zip(batch.objects[MESSAGES], batch.objects[RESPONSE_TEXT], strict=True)
        return [self._renderer.render_whole(conversation(messages, answer)) for messages, answer in texts]


def conversation(messages: Sequence[Mapping[str, Any]], answer: str) -> list[Mapping[str, Any]]:
    """Return the prompt with its answer as the assistant's message."""
    return [*messages, {"role": "assistant", "content": answer}]


def _run(module: nn.Module, packed: PackedBatch, _rows: DataProto) -> Sequence[Tensor]:
    return [module(packed)]
