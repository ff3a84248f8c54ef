"""The choice of a cell: laws of affinity, load and confinement."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.cells.choice import HOT_PER_S, Cell, RegionCells, candidates
from moonpool.conductor.cells.prefixes import MAX_DIGESTS, HotPrefixes, prefix_digests


def cells(number: int, region: str = "", **facts: float) -> list[Cell]:
    given: dict[str, float] = {"num_nodes": 10.0, **facts}
    return [Cell(f"{region}{one}", region, usable=True, **given) for one in range(number)]  # type: ignore[arg-type]


def prefixes(number: int, depth: int = 3, shared: int = 0) -> list[list[int]]:
    """Chains of digests, the first ``shared`` of which are the same."""
    rng = random.Random(number)
    common = [rng.getrandbits(64) for _ in range(shared)]
    return [common + [rng.getrandbits(64) for _ in range(depth)] for _ in range(number)]


def test_a_prefix_keeps_its_cell_and_the_loss_of_another_moves_nothing_else() -> None:
    region = RegionCells("", cells(8))
    before = {chain[0]: region.order(chain)[0] for chain in prefixes(2000)}
    # A longer prompt of the same beginning.
    assert all(region.order([*chain, 7, 8])[0] is before[chain[0]] for chain in prefixes(2000))
    spread = Counter(cell.name for cell in before.values())
    assert len(spread) == 8 and max(spread.values()) < 1.3 * 2000 / 8
    lost = region.cells[3]
    lost.usable = False
    region.refresh(lost)
    moved = Counter[str]()
    for chain in prefixes(2000):
        now = region.order(chain)[0]
        assert now is not lost
        if before[chain[0]] is lost:
            moved[now.name] += 1
        else:
            assert now is before[chain[0]]
    assert len(moved) == 7, "all others get a part of its prefixes"


def test_cells_get_prefixes_by_their_nodes() -> None:
    given = cells(4)
    given[0].num_nodes = 30.0
    spread = Counter(RegionCells("", given).order(chain)[0].name for chain in prefixes(4000))
    assert spread["0"] == pytest.approx(2000, rel=0.1)


def test_a_loaded_cell_comes_last_and_its_prefixes_return_to_it() -> None:
    region = RegionCells("", cells(4))
    [chain] = prefixes(1)
    home, second, *_ = region.order(chain)
    for cell in region.cells:
        region.add(cell, 10)
    assert region.order(chain)[0] is home, "as loaded as the others"
    region.add(home, 10)
    assert region.order(chain)[0] is second and region.order(chain)[-1] is home
    region.add(home, -10)
    assert region.order(chain)[0] is home


def test_a_loaded_cell_gives_prefixes_away_a_few_at_a_time() -> None:
    region, chains = RegionCells("", cells(4, num_requests=40.0)), prefixes(2000)
    heavy = region.cells[0]
    heavy.num_requests = 55.0  # within the bound

    def homes() -> list[Cell]:
        return [region.order(chain)[0] for chain in chains]

    before = homes()
    for _ in range(5):
        region.refresh(heavy)
        after = homes()
        assert all(new is old for new, old in zip(after, before, strict=True) if old is not heavy)
        left = sum(new is not old for new, old in zip(after, before, strict=True))
        assert 0 < left < 0.05 * len(chains), "of its prefixes alone, and few"
        before = after
    few = homes().count(heavy)
    for load in (25.0, 0.0):  # less than the others; and none anywhere
        heavy.num_requests = load
        for cell in region.cells[1:]:
            cell.num_requests = min(cell.num_requests, 1.6 * load)
            region.refresh(cell)
        for _ in range(100):
            region.refresh(heavy)
        assert homes().count(heavy) > few, "it has got them back"
        heavy.num_requests = 500.0
        for _ in range(5):
            region.refresh(heavy)


def test_a_few_requests_a_node_are_no_load() -> None:
    region = RegionCells("", cells(4))
    [chain] = prefixes(1)
    home = region.order(chain)[0]
    region.add(home, 10)
    assert region.order(chain)[0] is home


def test_a_hot_prefix_gets_as_many_cells_as_it_fills_quarters_of() -> None:
    given = cells(10, requests_per_s=100.0)
    chains = prefixes(500, shared=1)
    hot = chains[0][0]
    for cell in given:
        cell.hot = {hot: 10.0}  # 100 a second: a cell's worth
    region = RegionCells("", given)
    spread = Counter(region.order(chain)[0].name for chain in chains)
    assert len(spread) == 4 and max(spread.values()) < 200
    # Each conversation stays where it is, and all are where the hot prefix would be alone.
    assert all(region.order([*chain, 1])[0] is region.order(chain)[0] for chain in chains)
    only = RegionCells("", cells(10)).order([hot])[:4]
    assert spread.keys() == {cell.name for cell in only}
    for cell in region.cells:
        cell.hot = {hot: HOT_PER_S / 20}
        region.refresh(cell)
    assert len({region.order(chain)[0] for chain in chains}) == 1


def test_cells_without_the_model_come_only_if_none_has_it() -> None:
    given = cells(6)
    given[2].models = given[4].models = {"large"}
    region = RegionCells("", given)
    [chain] = prefixes(1)
    assert set(region.order(chain, "large")) == {given[2], given[4]}
    assert len(list(candidates([region], chain, model="unknown"))) == 6, "one of them says what is wrong"
    away = RegionCells("us", cells(3, "us"))
    assert {cell.region for cell in candidates([away, region], chain, model="large")} == {""}


NAMES = ("eu", "us", "ap", "")


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.integers(0, 50)), min_size=1, max_size=12),
    st.lists(st.integers(0, 2**64 - 1), max_size=4),
    st.permutations(NAMES),
    st.frozensets(st.sampled_from(NAMES[:3])),
)
def test_requests_go_to_usable_cells_of_allowed_regions_nearest_first(
    made: list[tuple[str, bool, int]], digests: list[int], order: Sequence[str], confined: frozenset[str]
) -> None:
    all_cells = [
        Cell(str(number), region, usable, num_nodes=1.0, num_requests=load)
        for number, (region, usable, load) in enumerate(made)
    ]
    regions = [RegionCells(name, [one for one in all_cells if one.region == name]) for name in order]
    found = list(candidates(regions, digests, confined=confined))
    allowed = {one for one in all_cells if one.usable and (not confined or one.region in confined)}
    assert set(found) == allowed and len(found) == len(allowed)
    places = [order.index(cell.region) for cell in found]
    assert places == sorted(places)


def turn(*texts: str, **more: object) -> dict[str, object]:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[min(at, 1 + at % 2)], "content": text} for at, text in enumerate(texts)]
    return {"model": "m", "messages": messages, **more}


def test_turns_of_a_conversation_have_the_same_beginning() -> None:
    first = prefix_digests(turn("Be kind.", "Hello " * 400), "")
    second = prefix_digests(turn("Be kind.", "Hello " * 400, "Hi!", "And?"), "")
    assert second[: len(first)] == first and len(second) == len(first) + 2
    other = prefix_digests(turn("Be kind.", "Goodbye"), "")
    assert other[0] == first[0] and other[1] not in first
    for different in (
        prefix_digests(turn("Be kind."), "4:acme/"),
        prefix_digests(turn("Be kind.", model="n"), ""),
    ):
        assert different[0] != first[0]
    assert prefix_digests(turn("Be kind.", tools=[{"name": "f"}]), "")[0] != first[0]


def test_texts_are_cut_where_they_are_alike() -> None:
    text = "In the beginning " * 200
    one, two = (prefix_digests({"prompt": text + end}, "") for end in ("one", "two"))
    assert one[:-1] == two[:-1] and one[-1] != two[-1] and len(one) > 4
    tokens = list(range(1000, 2000))
    assert (
        prefix_digests({"prompt": [*tokens, 1]}, "")[:3] == prefix_digests({"prompt": [*tokens, 2]}, "")[:3]
    )
    assert prefix_digests({"prompt": [text, "x"]}, "") == prefix_digests({"prompt": text}, "")
    assert prefix_digests({"input": text, "instructions": "Be kind."}, "")
    assert len(prefix_digests({"messages": ["x"] * 1000}, "")) == MAX_DIGESTS


@given(st.recursive(st.none() | st.integers(0, 9) | st.text(max_size=3), st.lists, max_leaves=5))
def test_any_body_has_digests(value: object) -> None:
    for name in ("prompt", "messages", "input", "instructions", "tools", "model"):
        prefix_digests({name: value, "messages" if name == "tools" else "x": [{}]}, "")


def test_hot_prefixes_are_counted_and_forgotten() -> None:
    now_s = 0.0
    hot = HotPrefixes(lambda: now_s)
    assert not hot.is_wanted
    assert hot.rates(8) == (0.0, []) and hot.is_wanted
    rng = random.Random(1)
    for _ in range(4000):  # far more prefixes than are kept
        now_s += 0.005
        hot.count(
            [1, 2, *(rng.getrandbits(64) for _ in range(20))]
            if rng.random() < 0.5
            else [3, rng.getrandbits(64)]
        )
    per_s, found = hot.rates(3)
    assert per_s == pytest.approx(200, rel=0.05)
    assert {digest for digest, _ in found} == {1, 2, 3}
    assert all(rate == pytest.approx(100, rel=0.1) for _, rate in found)
    now_s += 12.0
    hot.count([9])
    now_s += 12.0
    assert hot.rates(8)[1] == [], "what nobody asked for lately is gone"
    now_s += 120.0
    assert not hot.is_wanted, "no router has asked for minutes"
