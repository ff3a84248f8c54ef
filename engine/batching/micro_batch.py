"""Decoding sequences that take their steps together."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from moonpool.engine.batching.sequence import Sequence, State


class MicroBatch:
    """Some of the decoding sequences; each is in one micro-batch. A pipeline has a step of each in flight.

    ``decoding[i].row == i``. version: changes whenever ``decoding`` does.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.decoding: list[Sequence] = []
        self.version = 0
        self._moved_blocks: list[tuple[Sequence, int, int]] = []

    def __len__(self) -> int:
        return len(self.decoding)

    def add(self, sequence: Sequence) -> None:
        """Add a row. A step in flight does not have it."""
        sequence.state = State.DECODING
        self.version += 1
        sequence.micro_batch, sequence.row = self.number, len(self.decoding)
        sequence.joined = self.version
        self.decoding.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a row; the last one takes its place. No step in flight has it."""
        last = self.decoding.pop()
        if last is not sequence:
            self.decoding[sequence.row] = last
            last.row = sequence.row
        sequence.row = -1
        self.version += 1
        # Its whole block table is read when it is added again.
        self._moved_blocks = [change for change in self._moved_blocks if change[0] is not sequence]

    def move_block(self, sequence: Sequence, column: int, block: int) -> None:
        """Note a change of a block table for the next plan."""
        self._moved_blocks.append((sequence, column, block))

    def take_moved(self) -> list[tuple[Sequence, int, int]]:
        """Return and forget the noted changes."""
        moved, self._moved_blocks = self._moved_blocks, []
        return moved

    def give_surplus(self, others: Rows[MicroBatch]) -> None:
        """Move rows to the smallest micro-batch until it has as many, or one fewer. No step of ours is in
        flight."""
        smallest = min(others, key=len)
        while len(self) - len(smallest) > 1:
            sequence = self.decoding[-1]
            self.remove(sequence)
            smallest.add(sequence)
