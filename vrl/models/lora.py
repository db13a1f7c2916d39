"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) on a loaded model: the only door to peft.

An adapted linear layer computes `W x + b + scale * B (A x)` with `scale = alpha / rank`. W and everything else of the
model are frozen, A `[rank, in]` and B `[out, rank]` learn. Workers add adapters before a model is sharded; the engine
never sees them: it gets `W + scale * B A` under the name of W.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model, load_peft_weights
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from vrl.models import backbone
from vrl.protocol.errors import ConfigError, DataError

_logger = logging.getLogger(__name__)

ALL_LINEAR: Final = "all-linear"
VISION: Final = "visual"  # the tower's module, and what a setting must say to reach it
FOLDER: Final = "lora_adapter"  # of the adapter, in an exported model folder
_NAME: Final = "default"  # peft's name for the only adapter of a model
_FILE: Final = "adapter_model.safetensors"
_FILE_PREFIX: Final = "base_model.model."
_BASE: Final = ".base_layer."
# What peft can do beyond `W + scale * B A`, by the entries of its config that switch it on.
_EXTRAS: Final = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "target_parameters", "layer_replication"),
    *("alora_invocation_tokens", "trainable_token_indices", "fan_in_fan_out", "arrow_config"),
)

Named = Iterable[tuple[str, nn.Parameter]]
Weights = Iterator[tuple[str, Tensor]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Which layers get adapters, and of what size.

    `target_modules` and `exclude_modules` are lists of module names or their ends (`q_proj`), or one text: a regular
    expression that a whole name must match, or "all-linear". They mean linear layers of the decoder; those of the
    vision tower only where an entry says `visual`. The language head and embeddings have no adapters.
    """

    section: str  # where the settings stand, for messages
    rank: int = 0  # rows of A; with `adapter_path` 0 means the adapter's
    alpha: int = 16  # scale * rank
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    exclude_modules: str | tuple[str, ...] | None = None
    adapter_path: str | None = None  # folder in peft's format to go on from; its own rank, alpha and modules hold
    vision_frozen: bool = False  # an adapter in the tower is refused


def add_adapters(hf: PreTrainedModel, settings: LoraSettings, base_path: str | Path) -> None:
    """Freeze a loaded, unsharded model and put float32 adapters on its layers, in place.

    New ones start as the identity: B is zero, A is uniform as in peft (Kaiming, a = sqrt 5) from a generator of its
    own, so that all ranks get the same and the global generator is left alone.

    Args:
        hf: the model; parameters around it, such as a value head, stay as they are.
        settings: with a rank or an adapter's folder.
        base_path: where the model came from; an exported adapter names it.

    Raises:
        ConfigError: modules that do not exist, a frozen tower, an adapter of another kind or rank.
        DataError: an adapter's folder that is no such folder, or does not fit the model.
    """
    weights: Mapping[str, Tensor] = {}
    if settings.adapter_path is None:
        names = adapted_names(hf, settings)
        config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, bias="none")
        config.task_type = "CAUSAL_LM"
    else:
        config, weights = _read_adapter(settings)
        names = _names_in_file(hf, settings, weights)
    config.target_modules = names
    config.exclude_modules = None
    config.lora_dropout = 0.0  # sampling has none, and log-probs must be those of the policy that acted
    config.init_lora_weights = True
    config.inference_mode = False
    config.base_model_name_or_path = str(Path(base_path).resolve()) if Path(base_path).is_dir() else str(base_path)
    hf.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator
        inject_adapter_in_model(config, hf, _NAME)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, layer in _layers(hf):
            for part in (layer.lora_A[_NAME], layer.lora_B[_NAME]):
                part.to(torch.float32).requires_grad_(True)
            nn.init.kaiming_uniform_(_factor(layer.lora_A), a=math.sqrt(5), generator=draw)
            nn.init.zeros_(_factor(layer.lora_B))
        _copy_weights(hf, settings, weights)
    _logger.info("%s: LoRA, %s", settings.section, summary(hf))


def adapted_names(hf: nn.Module, settings: LoraSettings) -> list[str]:
    """Return the full names of the layers that the settings ask for, in the model's order.

    Raises:
        ConfigError: an entry that matches nothing (with the names there are), nothing left, or a frozen vision tower.
    """
    linear = _linear_layers(hf)
    chosen = _matching(hf, settings, "target_modules", linear)
    if settings.exclude_modules:
        excluded = set(_matching(hf, settings, "exclude_modules", linear))
        chosen = [name for name in chosen if name not in excluded]
        if not chosen:
            raise ConfigError(
                f"{settings.section}.exclude_modules={_shown(settings.exclude_modules)} leaves nothing of "
                f"target_modules={_shown(settings.target_modules)} to adapt; exclude fewer of {_kinds(linear)}"
            )
    if settings.vision_frozen and any(_in_vision(name) for name in chosen):
        raise ConfigError(
            f"{settings.section}.target_modules={_shown(settings.target_modules)} asks for adapters in the vision "
            "tower, which freeze_vision_tower=True forbids: set it to False, or leave the tower out of target_modules"
        )
    return chosen


def _linear_layers(hf: nn.Module) -> list[str]:
    """Return the linear layers of decoder and vision tower; the head, whose weight is read directly, is none."""
    base: nn.Module = hf.base_model if isinstance(hf, PreTrainedModel) else hf
    inside = {id(module) for part in (*backbone.decoder_layers(base), _tower(base)) for module in part.modules()}
    return [name for name, module in hf.named_modules() if isinstance(module, nn.Linear) and id(module) in inside]


def _tower(base: nn.Module) -> nn.Module:
    return base.visual if backbone.is_vision_language(base) else nn.Identity()


def _in_vision(name: str) -> bool:
    return VISION in name.split(".")


def _matching(hf: nn.Module, settings: LoraSettings, key: str, linear: list[str]) -> list[str]:
    given = settings.target_modules if key == "target_modules" else settings.exclude_modules
    entries = (given,) if isinstance(given, str) else tuple(given or ())
    found: set[str] = set()
    for entry in entries:
        hits = {name for name in linear if _matches(entry, name, isinstance(given, str))}
        if not hits and not (key == "exclude_modules" and VISION in entry):  # a text model has no tower
            known = ", ".join(_kinds(linear))
            raise ConfigError(
                f"{settings.section}.{key}={_shown(given)}: {entry!r} matches no linear layer of {type(hf).__name__}; "
                f"there are {known} (the vision tower's are meant only by an entry that says {VISION!r}), "
                f"or {ALL_LINEAR!r} for all of the decoder"
            )
        found |= hits
    return [name for name in linear if name in found]


def _matches(entry: str, name: str, is_pattern: bool) -> bool:
    if _in_vision(name) and VISION not in entry:
        return False
    if entry == ALL_LINEAR:
        return True
    if is_pattern:
        return re.fullmatch(entry, name) is not None
    return name == entry or name.endswith(f".{entry}")


def _kinds(linear: list[str]) -> list[str]:
    """Return the layers' names without the numbers of their blocks, each once: what a user may write."""
    kinds = (re.split(r"\.\d+\.", name)[-1].rpartition(".")[2] for name in linear if not _in_vision(name))
    tower = (f"{VISION}.{name.partition(f'{VISION}.')[2]}" for name in linear if _in_vision(name))
    return list(dict.fromkeys([*kinds, *(re.sub(r"\.\d+\.", ".N.", name) for name in tower)]))


def _shown(given: str | tuple[str, ...] | None) -> str:
    return given if isinstance(given, str) else f"[{','.join(given or ())}]"


# -- an adapter in a folder -------------------------------------------------------------------------------------------


def _read_adapter(settings: LoraSettings) -> tuple[LoraConfig, Mapping[str, Tensor]]:
    where = f"{settings.section}.lora_adapter_path={settings.adapter_path}"
    folder = Path(settings.adapter_path or "")
    if not (folder / "adapter_config.json").is_file():
        raise DataError(f"{where} is no adapter's folder: it has no adapter_config.json")
    try:
        config = PeftConfig.from_pretrained(str(folder))
        weights = load_peft_weights(str(folder), device="cpu")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{where} cannot be read: {str(error).strip().splitlines()[0]}") from error
    if not isinstance(config, LoraConfig):
        raise ConfigError(f"{where} holds an adapter of type {config.peft_type}; vrl trains LoRA only")
    extras = [name for name in _EXTRAS if vars(config).get(name)]
    if config.bias != "none":
        extras.append("bias")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights.lower() != "gaussian":
        extras.append("init_lora_weights")  # such as PiSSA, which changes the base
    if extras:
        raise ConfigError(f"{where} uses {', '.join(extras)}; vrl trains plain LoRA (base + scale * B A) only")
    if settings.rank not in (0, config.r):
        raise ConfigError(
            f"{settings.section}.lora_rank={settings.rank}, but the adapter in {folder} has rank {config.r}: "
            f"set lora_rank={config.r} or 0"
        )
    return config, weights


def _names_in_file(hf: nn.Module, settings: LoraSettings, weights: Mapping[str, Tensor]) -> list[str]:
    wanted = {name.removeprefix(_FILE_PREFIX).partition(".lora_")[0] for name in weights}
    linear = _linear_layers(hf)
    strange = sorted(wanted - set(linear))
    if strange or not wanted:
        raise DataError(
            f"{settings.section}.lora_adapter_path={settings.adapter_path} adapts {', '.join(strange[:3]) or 'nothing'}"
            f", but vrl adapts linear layers that {type(hf).__name__} has, such as {linear[0]}"
        )
    if settings.vision_frozen and any(_in_vision(name) for name in wanted):
        raise ConfigError(
            f"{settings.section}.lora_adapter_path={settings.adapter_path} adapts the vision tower, which "
            "freeze_vision_tower=True forbids: set it to False"
        )
    return [name for name in linear if name in wanted]


def _copy_weights(hf: nn.Module, settings: LoraSettings, weights: Mapping[str, Tensor]) -> None:
    """Fill the adapters from a file's tensors; without any they stay new."""
    if not weights:
        return
    mine = dict(adapter_parameters(hf))
    shapes = {name: tuple(parameter.shape) for name, parameter in mine.items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in weights.items()}:
        wrong = sorted(name for name in {*shapes, *weights} if name not in mine or name not in weights)
        wrong = wrong or sorted(name for name in shapes if shapes[name] != tuple(weights[name].shape))
        raise DataError(
            f"{settings.section}.lora_adapter_path={settings.adapter_path} does not fit {type(hf).__name__}: "
            f"{', '.join(wrong[:3])} missing, too many or of another shape"
        )
    for name, parameter in mine.items():
        parameter.copy_(weights[name])


# -- an adapted model -------------------------------------------------------------------------------------------------


def _layers(module: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLayer))


def _factor(parts: nn.ModuleDict) -> nn.Parameter:
    weight = parts[_NAME].weight
    assert isinstance(weight, nn.Parameter)
    return weight


def has_adapters(module: nn.Module) -> bool:
    """Whether any layer is adapted."""
    return any(True for _ in _layers(module))


def summary(module: nn.Module) -> str:
    """Return the adapters' sizes and number in words, equal for models whose adapters mean the same."""
    layers = [layer for _, layer in _layers(module)]
    if not layers:
        return "no adapter"
    sizes = sorted({(layer.r[_NAME], layer.scaling[_NAME]) for layer in layers})
    return f"{', '.join(f'rank {r} scale {scale:g}' for r, scale in sizes)} on {len(layers)} layers"


def adapter_parameters(hf: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield A and B of every adapted layer under the names that peft gives them in a file."""
    for name, layer in _layers(hf):
        yield f"{_FILE_PREFIX}{name}.lora_A.weight", _factor(layer.lora_A)
        yield f"{_FILE_PREFIX}{name}.lora_B.weight", _factor(layer.lora_B)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Run the base alone inside the block; for passes without gradient.

    peft's own switch also changes which parameters need a gradient, which a sharded module must not see.
    """
    layers = [layer for _, layer in _layers(module)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(hf: nn.Module, named: Named, gather: Callable[[Named], Weights]) -> Weights:
    """Yield full weights under the names that the model has without adapters, in the same order and number.

    An adapted layer's weight is `W + scale * B A` of its dtype, computed in float32 in a new tensor: nothing of the
    model changes. A model without adapters passes through.

    Args:
        hf: the model that carries the adapters.
        named: its parameters by name, perhaps with others.
        gather: makes full tensors of sharded parameters; valid until the next one is asked for. A collective.
    """
    scales = {name: layer.scaling[_NAME] for name, layer in _layers(hf)}
    factors: dict[str, Tensor] = {}
    for name, tensor in gather(_factors_first(named, scales)):
        layer, inside, rest = name.partition(_BASE)
        if not inside and name.partition(".lora_")[0] in scales:
            factors[name] = tensor.float().clone()  # the base's weight comes when `tensor` may be gone
        elif inside and rest == "weight":
            a, b = (factors.pop(f"{layer}.lora_{x}.{_NAME}.weight") for x in "AB")
            yield f"{layer}.weight", torch.addmm(tensor.float(), b, a, alpha=scales[layer]).to(tensor.dtype)
        else:
            yield f"{layer}.{rest}" if inside else name, tensor


def _factors_first(named: Named, layers: Iterable[str]) -> Named:
    """Put A and B before the weight they go into, so that one layer's at a time is held."""
    parameters = dict(named)
    factors = {f"{layer}{_BASE}weight": [f"{layer}.lora_{x}.{_NAME}.weight" for x in "AB"] for layer in layers}
    moved = {name for pair in factors.values() for name in pair}
    for name, parameter in parameters.items():
        yield from ((factor, parameters[factor]) for factor in factors.get(name, ()))
        if name not in moved:
            yield name, parameter


def save_adapter(hf: PreTrainedModel, weights: Weights, folder: Path, *, write: bool) -> None:
    """Write the adapter so that peft's `PeftModel.from_pretrained` and vLLM load it on the base model.

    `weights` yields full tensors by the names of `adapter_parameters` and is a collective: every rank must call this,
    one of them with `write`.
    """
    state = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in weights if write}
    if not write:
        return
    configs: Any = hf.peft_config  # put there by peft
    config = copy(configs[_NAME])
    config.target_modules = sorted(config.target_modules)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(state, folder / _FILE, metadata={"format": "pt"})
