"""Options of several models behind one API."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.runtime.config.section import Section, option, require


@dataclass(frozen=True, slots=True)
class ModelsOptions(Section, name="models"):
    served: tuple[str, ...] = option(
        (),
        "names",
        "models behind one API, each NAME=DIRECTORY (NAME= for the shipped one); the first answers requests "
        "without a name; empty: model.path alone",
    )
    path: str = option("", "path", "TOML file of more models, their options, and routes among them")

    def _check(self) -> None:
        for each in self.served:
            name, equals, _ = each.partition("=")
            require(bool(name and equals), "models.served", "a list of NAME=DIRECTORY", each)
