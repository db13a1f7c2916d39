"""The Renderer of a Hugging Face tokenizer or processor: chat messages to token ids, image placeholders, text back.

Built by `load_renderer`; data, agent and workers get it as the port of `protocol.ports`.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from jinja2 import TemplateError
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from vrl.models.images import ImageCache, ImageRule, decode_image, image_size, rule_of
from vrl.models.loading import read_config
from vrl.models.qwen2_5_vl.backbone import MODEL_TYPE as QWEN2_5_VL
from vrl.models.qwen2_5_vl.positions import mrope_positions
from vrl.models.turn_bridge import TurnBridge
from vrl.protocol.errors import ConfigError, DataError
from vrl.protocol.messages import placed_images
from vrl.protocol.trajectory import IMAGE_MARK, content_key

_VISION_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_REMEMBERED_SIZES: Final = 65536


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The image side of a vision-language model's tokens."""

    processor: ProcessorMixin
    rule: ImageRule
    image_id: int
    video_id: int


@final
class HFRenderer:
    """See `protocol.ports.Renderer`.

    In prompts, text that spells a special token becomes that token, as in the chat template; in observations it stays
    text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str, eos_ids: tuple[int, ...], vision: Vision | None
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._vision = vision
        self._grids: OrderedDict[str, tuple[int, int, int]] = OrderedDict()
        self.eos_ids = eos_ids
        pad: Any = tokenizer.pad_token_id
        self.pad_id: int = eos_ids[0] if pad is None else pad
        vocabulary = tokenizer.get_vocab()
        banned = {vocabulary[token] for token in _VISION_TOKENS if token in vocabulary} if vision else set()
        self.banned_ids = tuple(sorted(banned))
        special = {token for token in (*tokenizer.all_special_tokens, *_VISION_TOKENS) if token in vocabulary}
        special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        names: Any = tokenizer.convert_ids_to_tokens(list(eos_ids))
        self._bridge = TurnBridge(self._text_of, self._encode, sorted(special), dict(zip(names, eos_ids, strict=True)))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return prompt ids with the generation prompt; each image mark or part becomes one placeholder id.

        In string content of all but assistant messages, `<image>` stands for an image (vision-language models only).
        `tools` are function schemas that the template shows the model.

        Raises:
            DataError: the chat template refuses the messages.
        """
        return self._templated(messages, tools, add_generation_prompt=True)

    def render_whole(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a finished conversation, whose last message is the assistant's; errors as in `render`."""
        return self._templated(messages, (), add_generation_prompt=False)

    def _templated(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
    ) -> list[int]:
        prepared = [self._prepare(message) for message in messages]
        try:
            return self._encode(self._text_of(prepared, add_generation_prompt, tools))
        except TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise DataError(f"the chat template refuses messages with roles {roles}: {error}") from error

    def observation_ids(self, messages: Sequence[Mapping[str, Any]], images: int, last_id: int) -> list[int]:
        """Return the ids that bridge from a sampled turn to the next generation prompt; see the port.

        Raises:
            DataError: places and images differ in number, or the model takes none.
            ConfigError: the chat template cannot be continued turn by turn with such messages.
        """
        if images and self._vision is None:
            raise DataError(f"an observation brings {images} images for a model that takes text only")
        placed = [_with_typed_parts(message) for message in placed_images(messages, images)]
        ids = self._bridge.ids(placed, last_id)
        if self._vision is not None and ids.count(self._vision.image_id) != images:
            raise DataError(f"{images} images of an observation became {ids.count(self._vision.image_id)} placeholders")
        return ids

    def check_turns(self, roles: Mapping[str, str] | None = None) -> None:
        """Prove that the chat template can be continued turn by turn; called where episodes have several turns.

        Args:
            roles: of the messages that carry the answers of an environment, by its name, where that is known.

        Raises:
            ConfigError: it cannot by messages of the user, or by those of such a role.
        """
        self.observation_ids([{"role": "user", "content": "text"}], 0, -1)
        for name, role in (roles or {}).items():
            try:
                for count in (1, 2):
                    self.observation_ids([{"role": role, "content": "text"}] * count, 0, -1)
            except ConfigError as error:
                raise ConfigError(
                    f"environment {name} answers with the role {role}: {error}; or set its config.role=user in "
                    "actor_rollout_ref.rollout.agent.environments"
                ) from error

    def check_image(self, data: bytes, max_pixels: int) -> None:
        """Raise DataError, with a reason that a model may read, unless an image can be used as it is."""
        if self._vision is None:
            raise DataError("this model takes text only")
        height, width = image_size(data)  # before it is decoded: a small file may hold a huge image
        if height * width > max_pixels:
            raise DataError(f"the image is {height} x {width}, at most {max_pixels} pixels are allowed")
        self._grid(self._vision, data)

    def expand(self, ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Return ids with each image placeholder repeated to the number of its visual tokens.

        Raises:
            DataError: marks and images differ in number, an image cannot be used, or the model takes none.
        """
        vision = self._vision
        if vision is None:
            if images:
                raise DataError(f"{len(images)} images for a model that takes text only")
            return list(ids)
        marks = sum(token == vision.image_id for token in ids)
        if marks != len(images):
            raise DataError(
                f"the prompt has {marks} image marks but {len(images)} images; give one {IMAGE_MARK} an image, "
                "and no image token spelled out in the text"
            )
        if vision.video_id in ids:
            raise DataError("the prompt holds a video token; videos are not supported, take it out of the text")
        counts = iter([vision.rule.tokens(self._grid(vision, data)) for data in images])
        expanded: list[int] = []
        for token in ids:
            expanded.extend([token] * (next(counts) if token == vision.image_id else 1))
        return expanded

    def answer_ids(self, text: str) -> list[int]:
        """Return the ids of an assistant's answer and the token that ends its turn: what supervised training learns."""
        return [*self._tokenizer.encode(text, add_special_tokens=False), self.eos_ids[0]]

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of ids; special tokens are left out unless asked for."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def positions(self, ids: Sequence[int], images: Sequence[bytes]) -> np.ndarray | None:
        """Return the int64 `[T, 3]` positions of a finished, expanded row; None for models with 1-D positions."""
        vision = self._vision
        if vision is None:
            return None
        grids = [self._grid(vision, data) for data in images]
        merge = vision.rule.merge_size
        return mrope_positions(ids, grids, image_token_id=vision.image_id, merge_size=merge)

    @property
    def image_token(self) -> int | None:
        """The placeholder of images; None for text models."""
        return None if self._vision is None else self._vision.image_id

    def image_cache(self, max_bytes: int) -> ImageCache | None:
        """Return a new cache of patches under this renderer's pixel limits; None for text models."""
        return None if self._vision is None else ImageCache(self._vision.processor.image_processor, max_bytes)

    def save_pretrained(self, folder: Path) -> None:
        """Write tokenizer, template and image processor (with this renderer's pixel limits) beside a saved model."""
        (self._tokenizer if self._vision is None else self._vision.processor).save_pretrained(folder)

    def _grid(self, vision: Vision, data: bytes) -> tuple[int, int, int]:
        """Return an image's grid; decodes each distinct image once, which also proves that it can be decoded."""
        key = content_key(data)
        grid = self._grids.pop(key, None)
        if grid is None:
            image = decode_image(data)
            grid = vision.rule.grid(image.height, image.width)
        self._grids[key] = grid
        if len(self._grids) > _REMEMBERED_SIZES:
            self._grids.popitem(last=False)
        return grid

    def _text_of(
        self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self._chat_template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Turn image marks into typed parts and leave image payloads out: the template needs only their places."""
        content = message.get("content")
        if isinstance(content, str):
            if self._vision is None or message.get("role") == "assistant" or IMAGE_MARK not in content:
                return dict(message)
            parts: list[dict[str, Any]] = []
            for number, text in enumerate(content.split(IMAGE_MARK)):
                if number:
                    parts.append({"type": "image"})
                if text:
                    parts.append({"type": "text", "text": text})
            return {**message, "content": parts}
        return _with_typed_parts(message)


def _with_typed_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Leave image payloads out of typed content, and join it where it is text alone."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    typed = [_typed(part) for part in content]
    if all(part["type"] == "text" for part in typed):
        return {**message, "content": "".join(part["text"] for part in typed)}
    return {**message, "content": typed}


def _typed(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in ("image", "image_url"):
        return {"type": "image"}
    raise DataError(f"a message part of type {kind!r} is not supported; use text and image parts")


def load_renderer(
    path: str | Path,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> HFRenderer:
    """Load the renderer of a model folder or hub name.

    Args:
        path: the model.
        min_pixels: smaller images are enlarged to this; the model's own limit by default.
        max_pixels: larger images are made smaller to this; the model's own limit by default.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        DataError: no tokenizer, chat template, end token or image processor there, naming the path.
    """
    config = read_config(path, trust_remote_code=trust_remote_code)
    is_vision = config.model_type == QWEN2_5_VL
    auto = AutoProcessor if is_vision else AutoTokenizer
    try:
        loaded = auto.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:  # what a missing file becomes varies
        what = "tokenizer and image processor" if is_vision else "tokenizer"
        raise DataError(f"{path} has no usable {what}: {str(error).strip().splitlines()[0]}") from error
    tokenizer = loaded.tokenizer if is_vision else loaded
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):  # transformers makes up an empty one
        raise DataError(f"{path} has no usable tokenizer: no vocabulary was found")
    template = loaded.chat_template or tokenizer.chat_template
    if not isinstance(template, str):
        raise DataError(f"{path} has no chat template; take an instruct model or add chat_template.jinja")
    vision = None
    if is_vision:
        _set_limits(loaded.image_processor, min_pixels, max_pixels)
        vision = Vision(
            processor=loaded,
            rule=rule_of(loaded.image_processor),
            image_id=config.image_token_id,
            video_id=config.video_token_id,
        )
    return HFRenderer(tokenizer, template, _eos_ids(path, tokenizer, config), vision)


def check_same_tokenizer(
    path: str | Path, other: str | Path, key: str, way_out: str, *, trust_remote_code: bool = False
) -> None:
    """Raise ConfigError when a folder `other` comes with another tokenizer than the policy's `path`.

    A folder without a tokenizer is taken at its word. `key` is the setting that names `other`, `way_out` what to do.
    """
    mine, theirs = (_vocabulary(folder, trust_remote_code) for folder in (path, other))
    if mine is not None and theirs is not None and mine != theirs:
        raise ConfigError(
            f"{key}={other} has another tokenizer than the policy ({path}), so the rows' ids mean other text to it: "
            f"{way_out}"
        )


def _vocabulary(path: str | Path, trust_remote_code: bool) -> dict[str, int] | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # what a missing file becomes varies
        return None
    vocabulary = tokenizer.get_vocab()
    return vocabulary if len(vocabulary) > len(tokenizer.get_added_vocab()) else None


def _set_limits(processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
    low, high = processor.size["shortest_edge"], processor.size["longest_edge"]
    low, high = min_pixels or low, max_pixels or high
    if not 0 < low <= high:
        raise ConfigError(f"min_pixels={low} and max_pixels={high} leave no image size")
    processor.size = {"shortest_edge": low, "longest_edge": high}


def _eos_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return every token that ends a turn: the tokenizer's first, then those of the generation config."""
    try:
        generation = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the file is optional
        generation = config.get_text_config().to_dict().get("eos_token_id")
    ids: list[int] = []
    for source in (tokenizer.eos_token_id, generation):
        for token in source if isinstance(source, list) else [source]:
            if token is not None and token not in ids:
                ids.append(int(token))
    if not ids:
        raise DataError(f"{path} names no end token, neither in its tokenizer nor in its generation config")
    return tuple(ids)
