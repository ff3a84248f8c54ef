"""Options of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonpool.runtime.config.section import Section, option, require
from moonpool.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoraOptions(Section, name="lora"):
    adapters: tuple[str, ...] = option(
        (), "names", "LoRA adapters in PEFT's format that a node serves from its start, each NAME=DIRECTORY"
    )
    directory: str = option(
        "", "path", "a directory of such directories: a node serves them under their names"
    )

    @property
    def paths(self) -> dict[str, Path]:
        """The directories of ``adapters``, by name."""
        return {name: Path(path) for name, _, path in (each.partition("=") for each in self.adapters)}

    def listed(self) -> dict[str, Path]:
        """The directories in ``directory``, by name. Raises ConfigError."""
        if not self.directory:
            return {}
        try:
            return {path.name: path for path in sorted(Path(self.directory).iterdir()) if path.is_dir()}
        except OSError as error:
            raise ConfigError(
                f"lora.directory: {self.directory} cannot be listed: {error.strerror}", key="lora.directory"
            ) from error

    def _check(self) -> None:
        for each in self.adapters:
            name, _, path = each.partition("=")
            require(bool(name and path), "lora.adapters", "a list of NAME=DIRECTORY", each)
        unique = len(self.paths) == len(self.adapters)
        require(unique, "lora.adapters", "a list of different names", self.adapters)
