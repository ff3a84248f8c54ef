"""Read a whole LMDB and write its entries to stdout. A program of its own, because a damaged file kills it.

    python -P index_scan.py DIRECTORY

Each entry is two lengths, then key and value. It imports nothing of the project, to start quickly.
"""

from __future__ import annotations

import os
import struct
import sys

LENGTHS = struct.Struct("<HI")


def main(directory: str) -> None:
    import lmdb

    env = lmdb.open(directory, readonly=True, lock=False, create=False, max_dbs=0)
    pages = env.info()["last_pgno"] + 1
    nbytes = os.stat(os.path.join(directory, "data.mdb")).st_size
    if pages * env.stat()["psize"] > nbytes:
        sys.exit(f"data.mdb has {nbytes} bytes, its last page lies beyond them")
    # A compacting copy goes through every page in use, those of the list of free ones too.
    with open(os.devnull, "wb") as nowhere:
        env.copyfd(nowhere.fileno(), compact=True)
    parts: list[bytes] = []
    with env.begin() as transaction, transaction.cursor() as cursor:
        num_entries = transaction.stat()["entries"]
        for key, value in cursor:
            parts += (LENGTHS.pack(len(key), len(value)), key, value)
    if len(parts) != 3 * num_entries:
        sys.exit(f"it should have {num_entries} entries and has {len(parts) // 3}")
    sys.stdout.buffer.write(b"".join(parts))


if __name__ == "__main__":
    main(sys.argv[1])
