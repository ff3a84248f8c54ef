"""Laws of the block pool, for any order of users coming, sealing, sharing and leaving."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.engine.errors import OutOfBlocks
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.eviction.kept_blocks import KeptBlocks
from moonpool.kvstore.eviction.surplus_copies import SurplusCopies


def chain(path: str) -> list[BlockKey]:
    """Keys of a chain: equal prefixes of ``path`` give equal keys."""
    return [BlockKey(path[: i + 1].encode()) for i in range(len(path))]


def piece_keys(number: int) -> list[BlockKey]:
    return [] if number % 2 else chain("0123456"[number] * number)


class Users(RuleBasedStateMachine):
    """Users hold chains named by strings: what is cached is acquired, the rest sealed block by block."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.found: dict[BlockKey, int] = {}  # what a follower of on_sealed and on_evicted believes
        self.users: list[tuple[str, list[int], int]] = []  # path, table, sealed blocks
        self.pieces: dict[int, list[int]] = {}  # that were not evicted
        self.piece_users: list[int] = []
        self.reads: list[list[int]] = []  # of pieces with keys
        self.pool = BlockPool(num_blocks, 4)
        self.pool.on_sealed, self.pool.on_evicted = self.sealed, self.evicted

    def sealed(self, block: int, key: BlockKey) -> None:
        assert key not in self.found
        self.found[key] = block

    def evicted(self, block: int, key: BlockKey) -> None:
        assert self.found.pop(key) == block
        assert self.pool.key_of(block) == key, "the bytes must still be the key's"

    @rule(path=st.text("ab", min_size=1, max_size=6))
    def come(self, path: str) -> None:
        hits = self.pool.match(chain(path))
        needed = len(path) - len(hits)
        room = self.pool.num_free - self.pool.num_idle(hits)
        if needed > room:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(self.pool.num_free + 1)
            return
        self.pool.acquire(hits)
        new = self.pool.allocate(needed)
        assert not set(new) & {block for _, table, _ in self.users for block in table}, (
            "a block is used twice"
        )
        self.users.append((path, hits + new, len(hits)))

    @rule(path=st.text("ab", min_size=1, max_size=6))
    def evict(self, path: str) -> None:
        key = chain(path)[-1]
        held_before, free_before = key in self.found, self.pool.num_free
        if self.pool.evict(key):
            assert held_before
            assert key not in self.found
            assert not any(chain(path)[-1] in chain(other)[:sealed] for other, _, sealed in self.users)
        else:
            assert (key in self.found) == held_before
        assert self.pool.num_free == free_before

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.users) - 1))
        path, table, sealed = self.users[i]
        if sealed < len(path):
            keys = chain(path)
            table[sealed] = self.pool.seal(table[sealed], keys[sealed], keys[sealed - 1] if sealed else None)
            assert self.pool.key_of(table[sealed]) == keys[sealed]
            self.users[i] = (path, table, sealed + 1)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        path, table, sealed = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.pool.release(table)
        assert len(self.pool.match(chain(path)[:sealed])) == sealed, "what was sealed stays findable"

    @rule(number=st.integers(0, 4), parts=st.sampled_from([1, 2, 4]))
    def use_a_piece(self, number: int, parts: int) -> None:
        """Of as many blocks as its number, odd ones without keys; of each remainder by ``parts`` as many."""
        if number in self.pieces:
            self.pool.acquire(self.pieces[number])
        elif 0 < number <= self.pool.num_free:
            parts = parts if number % parts == 0 else 1
            free_before, blocks = self.pool.num_free, self.pool.allocate_evenly(number, parts)
            if blocks is None:
                assert parts > 1
                assert self.pool.num_free == free_before
                return
            assert self.pool.counts_by_part(blocks, parts) == [number // parts] * parts
            keys = piece_keys(number)
            if not self.found.keys() & keys:
                for i, key in enumerate(keys):
                    self.pool.seal(blocks[i], key, keys[i - 1] if i else None)
            self.pool.keep_together(blocks, lambda: self.piece_evicted(number))
            self.pieces[number] = blocks
        else:
            return
        self.piece_users.append(number)

    @rule(number=st.integers(0, 4), length=st.integers(1, 4))
    def read_a_piece(self, number: int, length: int) -> None:
        """As the store does, a prefix of it, whether it is used or not."""
        blocks = self.pool.match(piece_keys(number)[:length])
        self.pool.acquire(blocks)
        self.reads.append(blocks)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def end_a_read(self, data: st.DataObject) -> None:
        self.pool.release(self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1))))

    def piece_evicted(self, number: int) -> None:
        assert number not in self.piece_users, "it was evicted while it was used"
        del self.pieces[number]

    @precondition(lambda self: self.piece_users)
    @rule(data=st.data())
    def leave_a_piece(self, data: st.DataObject) -> None:
        number = self.piece_users.pop(data.draw(st.integers(0, len(self.piece_users) - 1)))
        self.pool.release(self.pieces[number])

    @invariant()
    def laws(self) -> None:
        self.pool.check_integrity()
        assert {key: block for block, key in self.pool.sealed()} == self.found
        assert all(key[:-1] in self.found for key in self.found if len(key) > 1), "a chain has a hole"
        used = {block for number in self.piece_users for block in self.pieces[number]}
        used |= {block for _, table, _ in self.users for block in table}
        used |= {block for blocks in self.reads for block in blocks}
        assert self.pool.num_used == len(used)

    def teardown(self) -> None:
        for blocks in self.reads:
            self.pool.release(blocks)
        for number in self.piece_users:
            self.pool.release(self.pieces[number])
        for _, table, _ in self.users:
            self.pool.release(table)
        assert self.pool.num_used == 0


Users.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestUsers = Users.TestCase


class WindowedUsers(RuleBasedStateMachine):
    """Users that release the blocks they have passed; those that they still have may then lose their keys."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.found: dict[BlockKey, int] = {}
        self.users: list[tuple[str, list[int], int, int]] = []  # path, table, sealed and passed blocks
        self.pool = BlockPool(num_blocks, 4)
        self.pool.on_sealed = lambda block, key: self.found.update({key: block})
        self.pool.on_evicted = lambda block, key: self.found.pop(key)

    @rule(path=st.text("ab", min_size=1, max_size=6))
    def come(self, path: str) -> None:
        hits = self.pool.match(chain(path))
        if len(path) - len(hits) <= self.pool.num_free - self.pool.num_idle(hits):
            self.pool.acquire(hits)
            self.users.append((path, hits + self.pool.allocate(len(path) - len(hits)), len(hits), 0))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.users) - 1))
        path, table, sealed, passed = self.users[i]
        if sealed < len(path):
            keys = chain(path)
            table[sealed] = self.pool.seal(table[sealed], keys[sealed], keys[sealed - 1] if sealed else None)
            self.users[i] = (path, table, sealed + 1, passed)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def go_past(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.users) - 1))
        path, table, sealed, passed = self.users[i]
        if passed < sealed:
            self.pool.release(table[passed : passed + 1])
            self.users[i] = (path, table, sealed, passed + 1)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        _, table, _, passed = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.pool.release(table[passed:])

    @rule()
    def take_all_that_is_free(self) -> None:
        blocks = self.pool.allocate(self.pool.num_free)
        assert not set(blocks) & {b for _, table, _, passed in self.users for b in table[passed:]}
        self.pool.release(blocks)

    @invariant()
    def laws(self) -> None:
        self.pool.check_integrity()
        assert {key: block for block, key in self.pool.sealed()} == self.found
        assert all(key[:-1] in self.found for key in self.found if len(key) > 1), "a chain has a hole"
        used = {block for _, table, _, passed in self.users for block in table[passed:]}
        assert self.pool.num_used == len(used)


WindowedUsers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWindowedUsers = WindowedUsers.TestCase


def fill(pool: BlockPool, path: str) -> None:
    keys = chain(path)
    hits = pool.match(keys)
    pool.acquire(hits)
    table = hits + pool.allocate(len(path) - len(hits))
    for i, key in enumerate(keys):
        table[i] = pool.seal(table[i], key, keys[i - 1] if i else None)
    pool.release(table)


def test_eviction_takes_the_least_recently_used_chain_leaf_first() -> None:
    evicted: list[bytes] = []
    pool = BlockPool(6, 4)
    pool.on_evicted = lambda _, key: evicted.append(key)
    fill(pool, "abc")
    fill(pool, "xyz")
    fill(pool, "ab")  # used again: now "xyz" is the older one, and "abc"'s last block older still
    pool.release(pool.allocate(5))
    assert evicted == [b"abc", b"xyz", b"xy", b"x", b"ab"]
    assert pool.match(chain("abc")) == pool.match(chain("a"))
    pool.check_integrity()


def test_the_end_of_a_chain_can_be_told_to_go_unless_it_is_used_or_continued() -> None:
    pool = BlockPool(6, 4)
    fill(pool, "abc")
    assert not pool.evict(chain("ab")[-1])
    assert pool.evict(chain("abc")[-1])
    assert not pool.evict(chain("abc")[-1])
    hits = pool.match(chain("ab"))
    pool.acquire(hits)
    assert not pool.evict(chain("ab")[-1])
    pool.release(hits)
    assert [pool.evict(key) for key in reversed(chain("ab"))] == [True, True]
    pool.check_integrity()


def test_eviction_keeps_chains_whole_when_a_prefix_was_released_first() -> None:
    pool = BlockPool(3, 4)
    keys = chain("abc")
    table = pool.allocate(3)
    for i, key in enumerate(keys):
        pool.seal(table[i], key, keys[i - 1] if i else None)
    for block in reversed(table):
        pool.acquire([block])
        pool.release([block])
    pool.release(table[2:])
    pool.release(table[:2])
    pool.release(pool.allocate(1))
    assert len(pool.match(keys)) == 2


def test_sealing_a_key_twice_moves_the_hold_to_the_first_block() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2)
    assert pool.seal(first, chain("a")[0]) == first
    assert pool.seal(second, chain("a")[0]) == first
    assert pool.num_used == 1
    pool.release([first])
    assert pool.num_used == 1, "the second holder still holds it"
    pool.release([first])
    assert (pool.num_used, pool.num_cached) == (0, 1)
    pool.check_integrity()


def test_out_of_blocks_says_how_many_and_changes_nothing() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="2 KV blocks needed, 1 free") as raised:
        pool.allocate(2)
    assert (raised.value.needed, raised.value.free, pool.num_free) == (2, 1, 1)
    pool.check_integrity()


def test_cold_copies_for_busy_times_go_before_what_is_older() -> None:
    now_s = 0.0
    gone: list[BlockKey] = []
    pool = BlockPool(6, 4)
    pool.on_evicted = lambda block, key: gone.append(key)
    pool.surplus = SurplusCopies(clock=lambda: now_s)

    def come(path: str) -> None:
        parent, blocks = None, []
        for key, block in zip(chain(path), pool.allocate(len(path)), strict=True):
            blocks.append(pool.seal(block, key, parent))
            parent = key
        pool.release(blocks)

    come("a")
    come("xyz")
    pool.surplus.mark(chain("xyz"))
    come("b")
    now_s = 60.0
    used = pool.match(chain("xy"))
    pool.acquire(used)
    now_s = 65.0
    pool.release(used)
    pool.release(pool.allocate(3))
    # The end nobody used goes; the rest was used a moment ago, so that the oldest goes next.
    assert gone == [chain("xyz")[2], chain("a")[0]]
    now_s = 90.0
    pool.release(pool.allocate(5))
    assert gone[2:] == [chain("xy")[1], chain("x")[0]]
    assert pool.match(chain("b"))
    pool.check_integrity()


def filled(pool: BlockPool, *paths: str) -> None:
    for path in paths:
        keys, blocks = chain(path), pool.allocate(len(path))
        for i, block in enumerate(blocks):
            pool.seal(block, keys[i], keys[i - 1] if i else None)
        pool.release(blocks)


def cached(pool: BlockPool, path: str) -> int:
    return len(pool.match(chain(path)))


def test_kept_chains_go_after_all_others() -> None:
    pool = BlockPool(9, 4)
    pool.kept = KeptBlocks(9)
    filled(pool, "abc", "def", "ghi")
    pool.kept.keep("t", chain("abc"), 60.0, 9)
    pool.release(pool.allocate(4))
    pool.check_integrity()
    assert [cached(pool, path) for path in ("abc", "def", "ghi")] == [3, 0, 2]
    pool.release(pool.allocate(8))
    pool.check_integrity()
    assert [cached(pool, path) for path in ("abc", "ghi")] == [1, 0]


def test_of_kept_chains_alone_one_goes_whole() -> None:
    pool = BlockPool(6, 4)
    pool.kept = KeptBlocks(6)
    filled(pool, "abc", "def")
    for path in ("abc", "def"):
        pool.kept.keep("t", chain(path), 60.0, 6)
    pool.release(pool.allocate(3))
    pool.check_integrity()
    assert [cached(pool, path) for path in ("abc", "def")] == [0, 3]
    assert chain("abc")[0] in pool.kept, "another tier still keeps it"
    assert not pool._yielded


def test_a_chain_that_was_let_go_goes_first() -> None:
    pool = BlockPool(6, 4)
    filled(pool, "abc", "def")
    pool.surplus.drop(chain("def"))
    pool.release(pool.allocate(2))
    pool.check_integrity()
    assert [cached(pool, path) for path in ("abc", "def")] == [3, 1]
    assert pool.is_shared(chain("ab")[1], None)
    assert not pool.is_shared(chain("ab")[1], chain("abc")[2])


def test_pieces_and_chains_go_by_last_use() -> None:
    pool, gone = BlockPool(9, 4), list[str]()
    filled(pool, "abc")
    pieces = {}
    for name in ("first", "second"):
        pieces[name] = pool.allocate(2)
        pool.keep_together(pieces[name], lambda name=name: gone.append(name))  # type: ignore[misc]
    pool.release(pieces["first"])
    filled(pool, "de")
    pool.release(pool.allocate(4))  # of the oldest chain, and then the piece after it
    assert ([cached(pool, path) for path in ("abc", "de")], gone) == ([0, 2], ["first"])
    pool.release(pool.allocate(pool.num_free))
    pool.check_integrity()
    assert (cached(pool, "de"), gone, pool.num_free) == (0, ["first"], 7), "a used piece stays"
    filled(pool, "fg")
    pool.release(pieces["second"])
    pool.kept = KeptBlocks(9)
    pool.kept.keep("t", chain("fg"), 60.0, 9)
    pool.release(pool.allocate(6))  # the kept chain is older, and goes last
    assert (cached(pool, "fg"), gone) == (2, ["first", "second"])
    pool.check_integrity()


def test_a_piece_with_keys_is_evicted_whole_and_stays_findable_where_it_is_read() -> None:
    evicted, gone = list[bytes](), list[str]()
    pool = BlockPool(8, 4)
    pool.on_evicted = lambda _, key: evicted.append(key)
    piece, keys = pool.allocate(3), chain("xyz")
    for i, key in enumerate(keys):
        pool.seal(piece[i], key, keys[i - 1] if i else None)
    pool.keep_together(piece, lambda: gone.append("piece"))
    pool.release(piece)
    pool.check_integrity()
    read = pool.match(keys[:1])
    pool.acquire(read)
    pool.release(pool.allocate(6))
    pool.check_integrity()
    assert (evicted, gone) == ([b"xyz", b"xy"], ["piece"])
    assert pool.match(keys) == read
    pool.release(read)
    pool.release(pool.allocate(8))
    assert evicted == [b"xyz", b"xy", b"x"]
    pool.check_integrity()
