"""Energy of the processors' packages, as Linux counts it (RAPL)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


@dataclass(slots=True)
class _Zone:
    energy: Path  # microjoules; begins again at 0 after ``most``
    most: int
    last: int
    joules: float = 0.0


class RaplWatch:
    """Counts from its making on. ``missing``: why there is nothing to count; empty where there is."""

    def __init__(self, powercap: Path = _POWERCAP) -> None:
        self._zones: list[_Zone] = []
        self.missing = ""
        packages = sorted(powercap.glob("intel-rapl:[0-9]*")) if powercap.is_dir() else []
        # A package's parts, such as intel-rapl:0:1, are in it already.
        for package in (one for one in packages if one.name.count(":") == 1):
            try:
                energy, most = package / "energy_uj", int((package / "max_energy_range_uj").read_text())
                self._zones.append(_Zone(energy, most, int(energy.read_text())))
            except (OSError, ValueError) as error:
                self.missing = f"{package / 'energy_uj'} cannot be read: {error}"
        if not packages:
            self.missing = f"{powercap} has no RAPL package"

    def read(self) -> float | None:
        """Joules since this was made, of all packages; None: not available. At least once in a while: a
        counter that began again twice between two calls is not noticed."""
        if self.missing:
            return None
        try:
            for zone in self._zones:
                now = int(zone.energy.read_text())
                passed = now - zone.last if now >= zone.last else now + zone.most - zone.last
                zone.joules, zone.last = zone.joules + passed / 1e6, now
        except (OSError, ValueError) as error:
            self.missing = f"RAPL cannot be read any more: {error}"
            return None
        return sum(zone.joules for zone in self._zones)
