"""Model folders (or hub names) to policies and value models. Workers call it once when they are built.

What vrl cannot run right is refused here with a reason, since a packed forward pass through a model that mixes rows, or
log-probs without a model's own logit scaling, would be wrong without an error.
"""

import difflib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from vrl.models.attention import VARLEN_ATTENTION, VARLEN_VISION_ATTENTION
from vrl.models.policy import CausalPolicy
from vrl.models.qwen2_5_vl.backbone import MODEL_TYPE as QWEN2_5_VL
from vrl.models.reward import RewardModel
from vrl.models.value import ValueModel
from vrl.protocol.errors import ConfigError, DataError

_logger = logging.getLogger(__name__)

# verl's names for the attention; `flash_attention_2` means the same kernel without transformers' own packing logic.
_ATTENTIONS: Final = {
    "varlen": VARLEN_ATTENTION,
    "flash_attention_2": VARLEN_ATTENTION,
    "sdpa": "sdpa",
    "eager": "eager",
}
_LAYER_TYPES: Final = {"full_attention", "sliding_attention"}
_LOGIT_CHANGES: Final = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)
_DROPOUTS: Final = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCounts:
    """Attention heads of a model: what sequence and tensor parallelism divide. `vision` is None for text models."""

    query: int
    key_value: int
    vision: int | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelFacts:
    """What a reward model's config says. `positions` is the longest row in tokens, None where nothing bounds it."""

    pad_id: int
    positions: int | None


def load_policy(
    path: str | Path,
    dtype: torch.dtype,
    *,
    gradient_checkpointing: bool = False,
    freeze_vision_tower: bool = False,
    attn: str = "varlen",
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> CausalPolicy:
    """Load a causal language model or Qwen2.5-VL on the CPU, in training mode and without dropout.

    Args:
        path: a Hugging Face folder or hub name.
        dtype: of the weights; float32 for master weights.
        gradient_checkpointing: compute each layer again in the backward pass instead of keeping its activations.
        freeze_vision_tower: the vision tower gets no gradient.
        attn: "varlen" (packed rows without a mask) or, to compare with, "sdpa" and "eager".
        override_config: entries of the model's config to replace; `attn_implementation` overrides `attn`.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        DataError: no model there, or weights missing.
        ConfigError: a model that vrl cannot run, or an unknown override.
    """
    config, attention = _prepare_config(path, attn, override_config, trust_remote_code)
    _check_is_language_model(path, config)
    hf, _ = _load_weights(_auto(config), path, config, dtype, trust_remote_code)
    _finish(hf, attention, gradient_checkpointing=gradient_checkpointing, freeze_vision_tower=freeze_vision_tower)
    return CausalPolicy(hf).train()


def load_value_model(
    path: str | Path,
    dtype: torch.dtype,
    *,
    gradient_checkpointing: bool = False,
    freeze_vision_tower: bool = False,
    attn: str = "varlen",
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> ValueModel:
    """Load a saved value model exactly, or give a plain backbone a new head and say so in the log.

    Arguments and errors as in `load_policy`. From a language model only the language head may be left over.
    """
    config, attention = _prepare_config(path, attn, override_config, trust_remote_code)
    base, unexpected = _load_weights(AutoModel, path, config, dtype, trust_remote_code)
    left_over = sorted(name for name in unexpected if not name.startswith("lm_head."))
    if left_over:
        raise DataError(
            f"{path} holds weights that a {config.model_type} value model has no place for: {_some(left_over)}"
        )
    model = ValueModel(base)
    if model.load_head(Path(path)):
        _logger.info("value head of %s loaded", path)
    else:
        _logger.warning("%s is a plain backbone: the value head starts from new random weights", path)
    _finish(base, attention, gradient_checkpointing=gradient_checkpointing, freeze_vision_tower=freeze_vision_tower)
    return model.train()


def load_reward_model(
    path: str | Path, dtype: torch.dtype, *, attn: str = "varlen", trust_remote_code: bool = False
) -> RewardModel:
    """Load a sequence classifier with one label on the CPU, frozen. Arguments and errors as in `load_policy`."""
    facts = read_reward_config(path, trust_remote_code=trust_remote_code)
    config, attention = _prepare_config(path, attn, None, trust_remote_code)
    hf, unexpected = _load_weights(AutoModelForSequenceClassification, path, config, dtype, trust_remote_code)
    if unexpected:
        raise DataError(f"{path} holds weights that its reward model has no place for: {_some(sorted(unexpected))}")
    _finish(hf, attention, gradient_checkpointing=False, freeze_vision_tower=False)
    return RewardModel(hf, facts.pad_id).requires_grad_(False).eval()


def read_reward_config(path: str | Path, *, trust_remote_code: bool = False) -> RewardModelFacts:
    """Return what the config of a reward model says, without weights.

    Raises:
        DataError: there is no model.
        ConfigError: it is no sequence classifier over a decoder, has not one label, or no padding token.
    """
    config = read_config(path, trust_remote_code=trust_remote_code)
    named = ", ".join(config.architectures or ()) or f"a {config.model_type} model of no named class"
    remote = "AutoModelForSequenceClassification" in (config.to_dict().get("auto_map") or {})
    if "ForSequenceClassification" not in named and not remote:
        raise ConfigError(
            f"reward_model.model.path: {path} holds {named}, which gives no score a row; give a sequence classifier "
            "(...ForSequenceClassification) with one label"
        )
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if not remote and not (isinstance(known, type) and issubclass(known, GenericForSequenceClassification)):
        raise ConfigError(f"reward_model.model.path: {path} holds {named}, whose head is not a score of the last token")
    if config.num_labels != 1:
        raise ConfigError(
            f"reward_model.model.path: {path} has {config.num_labels} labels, a reward model has one: save it with "
            "num_labels=1"
        )
    text = config.get_text_config().to_dict()
    if text.get("pad_token_id") is None:
        raise ConfigError(
            f"reward_model.model.path: {path} names no padding token, so the end of a row is not known: set "
            "pad_token_id in its config.json (of a token that never ends a row)"
        )
    return RewardModelFacts(pad_id=text["pad_token_id"], positions=text.get("max_position_embeddings"))


def skeleton(
    path: str | Path,
    *,
    value_model: bool = False,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Return the model that `load_policy` (or `load_value_model`) would load, without memory for its weights.

    Errors as in `load_policy`, apart from those of the weights.
    """
    config, _ = _prepare_config(path, "varlen", override_config, trust_remote_code)
    auto: Any = AutoModel if value_model else _auto(config)
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def head_counts(path: str | Path, *, trust_remote_code: bool = False) -> HeadCounts:
    """Return the numbers of attention heads from the config, without weights."""
    config = read_config(path, trust_remote_code=trust_remote_code)
    text = config.get_text_config().to_dict()
    query = text["num_attention_heads"]
    vision = config.to_dict().get("vision_config")
    return HeadCounts(
        query=query,
        key_value=text.get("num_key_value_heads") or query,
        vision=None if vision is None else vision.get("num_heads"),
    )


def read_config(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the model's config.

    Raises:
        DataError: there is no model; ConfigError: its type is unknown to transformers.
    """
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise DataError(f"{path} is no model folder: it has no config.json")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise DataError(
            f"{path} is neither a model folder nor a model that can be fetched: {_first_line(error)}"
        ) from error
    except (ValueError, KeyError) as error:
        raise ConfigError(f"transformers cannot read the config of {path}: {_first_line(error)}") from error


def _prepare_config(
    path: str | Path, attn: str, override_config: Mapping[str, Any] | None, trust_remote_code: bool
) -> tuple[PreTrainedConfig, str]:
    config = read_config(path, trust_remote_code=trust_remote_code)
    overrides = dict(override_config or {})
    attn = overrides.pop("attn_implementation", attn)
    if attn not in _ATTENTIONS:
        raise ConfigError(f"attention {attn!r} is unknown; use one of {', '.join(_ATTENTIONS)}")
    _apply_overrides(config, overrides, "override_config")
    _check_supported(path, config)
    for part in (config, config.get_text_config()):
        for name in _DROPOUTS:
            if name in part.to_dict():
                setattr(part, name, 0.0)
    return config, _ATTENTIONS[attn]


def _apply_overrides(config: PreTrainedConfig, overrides: Mapping[str, Any], where: str) -> None:
    """Set known entries; a nested mapping goes into a sub-config, a plain name may be the text part's."""
    for name, value in overrides.items():
        owner = next((part for part in (config, config.get_text_config()) if name in part.to_dict()), None)
        if owner is None:
            known = {*config.to_dict(), *config.get_text_config().to_dict()}
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}.{name}={value!r}: a {config.model_type} config has no such entry{hint}")
        current = vars(owner).get(name)
        if isinstance(current, PreTrainedConfig) and isinstance(value, Mapping):
            _apply_overrides(current, value, f"{where}.{name}")
        else:
            setattr(owner, name, value)


def _check_supported(path: str | Path, config: PreTrainedConfig) -> None:
    entries = {**config.to_dict(), **config.get_text_config().to_dict()}
    what = f"{path} is a {config.model_type} model"
    if config.to_dict().get("vision_config") is not None and config.model_type != QWEN2_5_VL:
        raise ConfigError(f"{what}: of the vision-language models vrl runs {QWEN2_5_VL} only")
    if config.is_encoder_decoder:
        raise ConfigError(f"{what}: an encoder-decoder; vrl runs decoder-only language models")
    other = set(entries.get("layer_types") or ()) - _LAYER_TYPES
    if other:
        raise ConfigError(f"{what} with layers of type {', '.join(sorted(other))}, which would mix packed rows")
    changed = [name for name in _LOGIT_CHANGES if entries.get(name) not in (None, 1, 1.0)]
    if changed:
        raise ConfigError(f"{what} that changes its logits ({', '.join(changed)}), which vrl does not compute")


def _auto(config: PreTrainedConfig) -> Any:
    return AutoModelForImageTextToText if config.model_type == QWEN2_5_VL else AutoModelForCausalLM


def _check_is_language_model(path: str | Path, config: PreTrainedConfig) -> None:
    named = set(config.architectures or ())
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) | {"Qwen2_5_VLForConditionalGeneration"}
    remote = "auto_map" in config.to_dict()
    if named and not named & causal and not remote:
        raise ConfigError(f"{path} holds {', '.join(sorted(named))}, which is no causal language model")


def _load_weights(
    auto: Any, path: str | Path, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, set[str]]:
    """Return the model and the names in the checkpoint that found no place; missing weights are an error."""
    try:
        model, report = auto.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation="eager",  # replaced by `_finish`, which needs no check of what is installed
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except OSError as error:
        raise DataError(f"the weights of {path} cannot be read: {_first_line(error)}") from error
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot build the model of {path}: {_first_line(error)}") from error
    missing = {*report["missing_keys"], *(str(entry[0]) for entry in report["mismatched_keys"])}
    if missing:
        raise DataError(f"{path} lacks weights, or has them in other shapes: {_some(sorted(missing))}")
    return model, set(report["unexpected_keys"])


def _finish(hf: PreTrainedModel, attention: str, *, gradient_checkpointing: bool, freeze_vision_tower: bool) -> None:
    varlen = attention == VARLEN_ATTENTION
    # The library's own marks of a class; they have no public names.
    if hf._is_stateful or not hf._supports_attention_backend:
        raise ConfigError(f"{hf.config.model_type} models have layers of their own making, which would mix packed rows")
    for part in (hf.config, hf.config.get_text_config()):
        part._attn_implementation = attention
    if hf.config.model_type == QWEN2_5_VL:
        hf.config.vision_config._attn_implementation = VARLEN_VISION_ATTENTION if varlen else attention
        hf.base_model.visual.requires_grad_(not freeze_vision_tower)
    elif freeze_vision_tower:
        raise ConfigError(f"freeze_vision_tower=True, but a {hf.config.model_type} model has no vision tower")
    for module in _dropouts(hf):
        module.p = 0.0
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _dropouts(hf: nn.Module) -> Iterator[nn.Dropout]:
    """Sampling had no dropout, so training has none: log-probs must be those of the policy that acted."""
    return (module for module in hf.modules() if isinstance(module, nn.Dropout))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
