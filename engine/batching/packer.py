"""Packs for the blocks of running sequences that every window has passed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import Move
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.engine.memory.packing import MOST_MOVES, Packing


class Packer:
    """Moves blocks into packs while less than half of the pool is free or cached. Bookkeeping, one thread.

    A step copies what moves before it computes anything. Its end releases the blocks, which stay cached,
    whole and with their keys, until their room is needed. A pack belongs to one sequence and is released with
    it. Blocks with several users stay where they are: each would need a copy.
    """

    def __init__(self, pool: BlockPool, packing: Packing) -> None:
        self._pool = pool
        self._packing = packing

    def moves(self, sequences: Iterable[Sequence], num_running: int) -> list[Move]:
        """Choose what the next step moves, of its sequences. Allocates packs, in which the sequences hold
        them from now on; one block for each of ``num_running`` sequences stays free."""
        pool, found = self._pool, list[Move]()
        if 2 * pool.num_free >= pool.num_blocks:
            return found
        size = len(self._packing.shifts)
        for sequence in sequences:
            columns = [] if sequence.stays_whole or sequence.prefill_only else self._passed(sequence)
            for first in range(0, len(columns) - size + 1, size):
                if len(found) + size > MOST_MOVES or pool.num_free <= num_running:
                    return found
                (pack,) = pool.allocate(1)
                sequence.packs.append(pack)
                for k, column in enumerate(columns[first : first + size]):
                    block, place = sequence.block_table[column], self._packing.place_in(pack, k)
                    found.append(Move(sequence, column, block, self._packing.place(block), place))
                sequence.num_passed_blocks = columns[first + size - 1] + 1
        return found

    def _passed(self, sequence: Sequence) -> list[int]:
        """Return the columns of blocks that every window has passed and that no one else uses, after those
        that were moved. Shared ones before them are not looked at again."""
        pool, table = self._pool, sequence.block_table
        end = (sequence.num_computed_tokens - self._packing.window + 1) // pool.block_size
        first = sequence.num_passed_blocks
        while first < end and pool.num_users(table[first]) > 1:
            first += 1
        sequence.num_passed_blocks = first
        return [column for column in range(first, end) if pool.num_users(table[column]) == 1]

    def moved(
        self, moves: list[Move], moved: Callable[[Sequence, int], None], release: Callable[[list[int]], None]
    ) -> None:
        """The step with these moves has ended. ``moved(sequence, column)`` is called for each; ``release``
        with the blocks of each sequence. Those of sequences that lost their blocks meanwhile are skipped."""
        blocks: dict[Sequence, list[int]] = {}
        for move in moves:
            table = move.sequence.block_table
            if table and table[move.column] == move.block:
                table[move.column] = -1
                move.sequence.packed[move.column] = move.after
                blocks.setdefault(move.sequence, []).append(move.block)
                moved(move.sequence, move.column)
        for released in blocks.values():
            release(released)
