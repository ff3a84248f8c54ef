"""Several models behind one API: what the options ``models.*`` and their file say of each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moonpool.runtime.config.loading import override
from moonpool.runtime.config.options import Config, ModelsOptions
from moonpool.runtime.config.routes import Route, read_route
from moonpool.runtime.errors import ConfigError

_FIELDS = ("name", "path", "aliases", "price", "set")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model. ``config``: of its nodes; ``price`` in the file is their ``model.price``."""

    name: str
    config: Config
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models of a cluster; the first one answers requests that name none."""

    models: tuple[ModelConfig, ...]
    routes: tuple[Route, ...] = ()


def served_models(config: Config) -> ServedModels:
    """Return the models that ``config`` names: those of ``models.served`` and ``models.path``, else the one
    of ``model.path``.

    Raises:
        ConfigError: the file is missing or wrong, or two models have one name.
    """
    given = [_served(each) for each in config.models.served]
    routes: list[Route] = []
    if config.models.path:
        tree = _read(Path(config.models.path))
        given += tree.get("model", [])
        routes = [read_route(each) for each in tree.get("route", [])]
    if not given:
        return ServedModels((ModelConfig(config.model.served_name, config),))
    base = replace(config, models=ModelsOptions())
    # An adapter fits one model: those of the others are in their own settings.
    other = replace(base, lora=replace(base.lora, adapters=(), directory=""))
    models = tuple(_model(other if i else base, each, first=i == 0) for i, each in enumerate(given))
    names = [name for one in models for name in (one.name, *one.aliases)] + [one.name for one in routes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two models or routes are named {', '.join(twice)}", "models.path")
    for route in routes:
        for name in route.models:
            if name not in {one.name for one in models}:
                raise ConfigError(f"the route {route.name} names an unknown model: {name}", "models.path")
    return ServedModels(models, tuple(routes))


def _served(item: str) -> dict[str, Any]:
    name, _, path = item.partition("=")
    return {"name": name, "path": path}


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"models.path: {file} cannot be read: {error.strerror}", "models.path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", "models.path") from error
    unknown = sorted(set(tree) - {"model", "route"})
    if unknown:
        raise ConfigError(f"{file}: unknown {unknown[0]}; it has [[model]] and [[route]]", "models.path")
    for name, tables in tree.items():
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            raise ConfigError(f"{file}: write [[{name}]], once for each {name}", "models.path")
    return tree


def _model(base: Config, given: Mapping[str, Any], *, first: bool) -> ModelConfig:
    name = given.get("name")
    if not isinstance(name, str) or not name or not name.replace("-", "").replace(".", "").isalnum():
        raise ConfigError(f"a model's name has letters, digits, - and . only, got {name!r}", "models.path")
    if unknown := sorted(set(given) - set(_FIELDS)):
        raise ConfigError(
            f"model {name}: unknown {unknown[0]}; known are {', '.join(_FIELDS)}, and options are given as "
            'set = ["key=value"]',
            "models.path",
        )
    settings, aliases = _texts(given, "set"), _texts(given, "aliases")
    price = given.get("price", base.model.price)
    if not isinstance(price, int | float) or price < 0:
        raise ConfigError(f"model {name}: price must be a number from 0, got {price!r}", "models.path")
    # Each model has an index of its own. That of the first one is where tools look.
    namespace = base.index.namespace if first else f"{base.index.namespace}/{name}"
    path = given.get("path", "")
    if not isinstance(path, str):
        raise ConfigError(f"model {name}: path must be a text, got {path!r}", "models.path")
    absolute = str(Path(path).absolute()) if path else ""
    own = (
        f"model.path={absolute}",
        f"model.name={name}",
        f"model.price={float(price)!r}",
        f"index.namespace={namespace}",
    )
    return ModelConfig(name, override(base, (*settings, *own)), tuple(aliases))


def _texts(given: Mapping[str, Any], field: str) -> Sequence[str]:
    value = given.get(field, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"model {given['name']}: {field} must be a list of texts", "models.path")
    return value
