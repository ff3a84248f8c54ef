"""Files of keys and certificates."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.runtime.security.certificates import CertificateError, replace_file


def test_a_file_that_cannot_be_replaced_leaves_no_part_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "node.key"
    file.mkdir()  # no file can be renamed to it
    with pytest.raises(CertificateError, match="cannot be written"):
        replace_file(file, b"secret")
    assert [one.name for one in tmp_path.iterdir()] == ["node.key"]
