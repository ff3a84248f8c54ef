"""The file of models and routes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.models_file import served_models
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError

GOOD = """
[[model]]
name = "large"
aliases = ["gpt"]
price = 4

[[model]]
name = "small"
path = "/models/small"
set = ["engine.parallel.tp=2", "cluster.both=3"]

[[route]]
name = "auto"
model = "small"
rule = [{ model = "large", tools = true }, { model = "large", min_chars = 4000 }]
"""


def with_file(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "models.toml"
    file.write_text(text)
    config = Config()
    return replace(config, models=replace(config.models, path=str(file)))


def test_without_names_there_is_the_model_of_its_path() -> None:
    config = Config()
    (only,) = served_models(config).models
    assert (only.name, only.config) == ("moonpool-demo", config)


def test_each_model_has_its_options_and_an_index_of_its_own(tmp_path: Path) -> None:
    served = served_models(with_file(tmp_path, GOOD))
    large, small = served.models
    assert (large.name, large.aliases, large.config.model.price) == ("large", ("gpt",), 4.0)
    assert (small.config.model.path, small.config.engine.parallel.tp) == ("/models/small", 2)
    assert (large.config.cluster.both, small.config.cluster.both) == (0, 3)
    assert (large.config.index.namespace, small.config.index.namespace) == ("moonpool", "moonpool/small")
    assert served.routes[0].models == ("large", "small")


def test_models_of_the_command_line() -> None:
    served = served_models(load_config(sets=["models.served=a=,b=/models/b"]))
    assert [(one.name, one.config.model.path) for one in served.models] == [("a", ""), ("b", "/models/b")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[model]]\nname = 3", "letters"),
        ("[[model]]\nname = 'a'\npth = '/x'", "unknown pth"),
        ("[[model]]\nname = 'a'\nset = ['engine.nothing=1']", "unknown option engine.nothing"),
        ("[[model]]\nname = 'a'\n[[model]]\nname = 'a'", "two models or routes are named a"),
        ("[[models]]\nname = 'a'", "unknown models"),
        ("[[model]]\nname = 'a'\nprice = -1", "price"),
        ("[[model]]\nname = 'a'\n[[route]]\nname = 'r'\nmodel = 'b'", "unknown model: b"),
        ("[[model]]\nname = 'a'\n[[route]]\nname = 'r'", "needs a classifier"),
        ("[[model]]\nname = 'a'\n[[route]]\nname = 'r'\nclassifier = {models = ['a']}", "two models"),
        (
            "[[model]]\nname = 'a'\n[[route]]\nname = 'r'\nclassifier = {models = ['a', 'a'], threshold = 2}",
            "threshold must be a number from 0 to 1",
        ),
        (
            "[[model]]\nname = 'a'\n[[route]]\nname = 'r'\nclassifier = {models = ['a', 'b']}",
            "unknown model: b",
        ),
        (
            "[[model]]\nname = 'a'\n[[route]]\nname = 'r'\nmodel = 'a'\nrule = [{model = 'a', tool = 1}]",
            "tool",
        ),
        ("[[model]]\nname = 'a'\n[[route]]\nname = 'r'\ncascade = {models = ['a']}", "two models"),
        (
            "[[model]]\nname = 'a'\n[[route]]\nname = 'r'\n"
            "cascade = {models = ['a', 'a'], least_logprob = -1, min_tokens = 4, after_tokens = 3}",
            "after_tokens must be min_tokens",
        ),
        ("[[model]]\nname = 'a'\n[[route]]\nname = 'r'\nweights = {a = -1}", "weights"),
        ("[[model]]\nname = 'a'\n[[route]]\nname = 'r'\nweights = {a = inf}", "weights must be numbers"),
        ("[model]\nname = 'a'", r"models\.toml: write \[\[model\]\], once for each model"),
        ("model = 3", r"write \[\[model\]\]"),
        ("model = ['a']", r"write \[\[model\]\]"),
        ("[[model]]\nname = 'a'\n[route]\nname = 'r'", r"write \[\[route\]\], once for each route"),
        (
            "[[model]]\nname = 'a'\n[[route]]\nname = 'r'\nrule = {model = 'a'}",
            "rule must be a list of tables",
        ),
        ("[[model]]\nname = 'a'\n[[route]]\nname = 'r'\nrule = ['a']", "r, a rule: must be a table"),
        ("[[model]]\nname = 'a'\n[[route]]\nname = 'r'\ncascade = 3", "r, its cascade: must be a table"),
        ("name = ", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        served_models(with_file(tmp_path, text))


def test_adapters_are_those_of_the_first_model(tmp_path: Path) -> None:
    own = GOOD.replace('"cluster.both=3"', '"lora.adapters=poems=/adapters/poems"')
    for text, others in ((GOOD, ()), (own, ("poems=/adapters/poems",))):
        config = with_file(tmp_path, text).with_adapters(["legal=/adapters/legal"])
        large, small = served_models(config).models
        assert large.config.lora.adapters == ("legal=/adapters/legal",)
        assert small.config.lora.adapters == others
