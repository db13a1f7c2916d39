"""From a config name and an override list to the settings of a run. The command line calls `load` first of all.

The only file that knows Hydra and OmegaConf. The tree of YAML files is theirs; what comes out is a frozen `Config` of
protocol/ and the same as plain dictionaries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vrl.protocol.config.builder import build, to_dict
from vrl.protocol.config.overrides import normalise
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
HYDRA_VERSION = "1.3"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """The settings, the same as plain dictionaries with every key (what `config.yaml` of a run holds), and notes."""

    config: Config
    values: dict[str, Any]
    notes: tuple[str, ...]


def load(config_name: str, overrides: Sequence[str] = (), config_dir: Path = CONFIG_DIR) -> Composed:
    """Compose a config file with overrides.

    Args:
        config_name: file in `config_dir`, with or without `.yaml`.
        overrides: as typed (`key=value`, `+key=value`, `~key`, `group=option`); verl's names of keys are understood.
        config_dir: folder of the files and config groups; a file of another folder may still name those here as
            its defaults.

    Raises:
        ConfigError: no such file, an unknown key or group, a value of the wrong type, an interpolation that fails.
    """
    name = config_name.removesuffix(".yaml")
    if not (config_dir / f"{name}.yaml").is_file():
        raise ConfigError(f"no config {name!r} in {config_dir}; there are {', '.join(config_names(config_dir))}")
    wanted = normalise(overrides, groups=_groups(config_dir))
    values = _compose(name, [*wanted.overrides, *_search_path(config_dir)], config_dir.resolve())
    config = build(values)
    return Composed(config=config, values=to_dict(config), notes=wanted.notes)


def config_names(config_dir: Path = CONFIG_DIR) -> list[str]:
    """Return the names of the config files of a folder."""
    return sorted(path.stem for path in config_dir.glob("*.yaml"))


def yaml_text(values: Mapping[str, Any]) -> str:
    """Return plain dictionaries as YAML: the answer to `--cfg job` and the `config.yaml` of a run."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))


def _groups(config_dir: Path) -> set[str]:
    folders = {config_dir, CONFIG_DIR}
    return {path.name for folder in folders for path in folder.glob("*") if path.is_dir()}


def _search_path(config_dir: Path) -> list[str]:
    """Let files of another folder use the ones that come with vrl."""
    if config_dir.resolve() == CONFIG_DIR:
        return []
    return [f"hydra.searchpath=[file://{CONFIG_DIR}]"]


def _compose(name: str, overrides: list[str], config_dir: Path) -> dict[str, Any]:
    try:
        with hydra.initialize_config_dir(str(config_dir), version_base=HYDRA_VERSION):
            composed = hydra.compose(name, overrides)
            values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        what = str(error).split("\n\n")[0]  # Hydra goes on with its search path
        raise ConfigError(f"config {name}: {what}") from error
    finally:
        GlobalHydra.instance().clear()
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}
