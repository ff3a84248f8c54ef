"""Registers that compiled kernels read before every path to them has written them."""

from __future__ import annotations

import pytest

from moonpool.kernels.compilation.assembly import unset_registers


def listing(*lines: str) -> str:
    numbered = (f"        /*{16 * i:04x}*/    {line} ;    /* 0x0 */" for i, line in enumerate(lines))
    return "\n".join(("\t\tFunction : kernel", *numbered))


def test_what_one_path_only_writes_is_unset() -> None:
    """As ptxas 12.8 left the descriptors of a tile's later parts: set in a loop that may not run."""
    found = unset_registers(
        listing(
            "UMOV UR4, 0x80",
            "@P1 BRA 0x40",
            "UMOV UR6, UR4",
            "UMOV UR7, 0x20",
            "UIADD3 UR8, UP0, UR6, 0x40, URZ",
            "HGMMA.64x32x16.F32 R72, R24, gdesc[UR4].tnspB, R72",
            "EXIT",
        )
    )
    assert found == [
        "UIADD3 UR8, UP0, UR6, 0x40, URZ",
        "HGMMA.64x32x16.F32 R72, R24, gdesc[UR4].tnspB, R72",
    ]


@pytest.mark.parametrize(
    "lines",
    [
        ("ULDC.64 UR4, c[0x0][0x208]", "LDG.E R2, desc[UR4][R2.64]", "EXIT"),
        # Both ways to the last line write it.
        ("@P1 BRA 0x30", "UMOV UR5, 0x1", "BRA 0x40", "UMOV UR5, 0x2", "IADD3 R1, R1, UR5, RZ", "EXIT"),
        # A condition that the reader has, too.
        ("@UP1 USHF.R.U32.HI UR8, URZ, 0x1, URZ", "@!P2 BRA 0x30", "UMOV UR8, 0x1", "MOV R1, UR8", "EXIT"),
        # A loop: what the first turn reads was written before it.
        ("UMOV UR4, URZ", "UIADD3 UR4, UR4, 0x1, URZ", "@P0 BRA 0x10", "EXIT", "UMOV UR9, UR8"),
    ],
)
def test_what_every_path_writes_is_set(lines: tuple[str, ...]) -> None:
    assert unset_registers(listing(*lines)) == []
