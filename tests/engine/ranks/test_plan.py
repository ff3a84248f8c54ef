"""Which plans a model allows, and that the ranks of one hold all of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.weights import Checkpoint
from moonpool.engine.errors import CheckpointError
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.engine.sharding.tensor_slices import TensorSlices, expected_tensors
from moonpool.runtime.config.options import EngineOptions, ParallelOptions
from moonpool.runtime.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def config(make_checkpoint) -> ModelConfig:
    """8 heads, 2 KV heads, 80 MLP columns, 160 words, 3 layers."""
    return ModelConfig.from_checkpoint(make_checkpoint("llama", num_attention_heads=8).path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"tp": 3}, r"engine\.parallel\.tp is 3: 8 attention heads, 2 KV heads .* valid are 1, 2, 4, 8"),
        ({"tp": 16}, r"valid are 1, 2, 4, 8"),
        ({"pp": 4}, r"engine\.parallel\.pp is 4: the model has 3 layers, so valid are 1 to 3"),
        ({"ep": 2}, r"engine\.parallel\.ep is 2: llama has no experts; valid is 1"),
        ({"pp": 2, "pp_layers": "3+1"}, r"pp_layers is 3\+1: these are 4 layers, the model has 3"),
        ({"dp": 2}, r"engine\.parallel\.dp is 2: .*; valid is 1"),
        ({"expert_capacity": 1.5}, r"expert_capacity is 1\.5: without expert parallelism .*; valid is 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_impossible_plan_says_what_would_be_valid(config, words, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ParallelPlan.from_options(ParallelOptions(**words), config, CPU)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            {"pp": 4, "hosts": 3, "listen": "10.0.0.1:7400"},
            r"hosts must be one of 1, 2, 4, .* got 3",
        ),
        ({"tp": 4, "hosts": 2, "listen": "10.0.0.1:7400"}, r"hosts must be one of 1, .* 1 stages .* got 2"),
        ({"pp": 2, "hosts": 2}, r"listen must be an address of this machine and a port .* got ''"),
        ({"pp": 2, "pp_layers": "3"}, r"pp_layers must be empty or 2 numbers above 0, .* got '3'"),
        ({"pp": 2, "pp_layers": "3+0"}, r"pp_layers must be empty or 2 numbers above 0, .* got '3\+0'"),
        ({"expert_capacity": 0.5}, r"expert_capacity must be 0 or at least 1: .* got 0\.5"),
        ({"pp": 2, "hosts": 2, "listen": "10.0.0.1"}, r"listen must be an address .* got '10\.0\.0\.1'"),
    ],
)
def test_stages_that_cannot_be_cut_or_dealt_out_so_are_refused(words, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ParallelOptions(**words)


def test_more_shares_than_a_step_has_blocks_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.parallel\.cp must be at most 4, the blocks of a step .* got 5"
    ):
        EngineOptions(block_size=16, max_batch_tokens=64, parallel=ParallelOptions(cp=5))


def test_more_ranks_than_devices_are_refused(config, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"tp 2 × pp 1 needs 2 GPUs .* from cuda:0 on, there are 1"):
        ParallelPlan.from_options(ParallelOptions(tp=2), config, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match=r"needs 2 GPUs .* from cuda:3 on, there are 1"):
        ParallelPlan.from_options(ParallelOptions(tp=2), config, torch.device("cuda:3"))
    far = ParallelOptions(tp=2, pp=2, hosts=2, listen="127.0.0.1:7400")
    assert ParallelPlan.from_options(far, config, torch.device("cuda:2")).world_size == 4


def test_ranks_have_the_gpus_of_their_machine_from_the_nodes_first_on(config) -> None:
    far = ParallelOptions(tp=2, pp=2, hosts=2, listen="127.0.0.1:7400")
    leader = Assignment(
        rank=0,
        model="",
        dtype="float32",
        device="cuda",
        link="nccl",
        options=EngineOptions(parallel=far),
        num_blocks=1,
        max_len=1,
        model_len=1,
        first_device=4,
    )
    devices = [replace(leader, rank=rank).torch_device() for rank in range(4)]
    assert devices == [torch.device("cuda", index) for index in (4, 5, 4, 5)]


@pytest.fixture(scope="session")
def mixtures(make_checkpoint) -> list[ModelConfig]:
    """One of the three layers is dense where the family has such; 40 columns of the shared expert."""
    heads = {"num_attention_heads": 8}
    models = [
        make_checkpoint("mixtral", **heads),
        make_checkpoint("qwen2_moe", **heads, mlp_only_layers=[1]),
        make_checkpoint("qwen3_moe", **heads, decoder_sparse_step=2),
    ]
    return [ModelConfig.from_checkpoint(model.path) for model in models]


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.integers(1, 3),
    cp=st.integers(1, 3),
    ep=st.sampled_from([1, 2, 4]),
    family=st.integers(0, 3),
)
def test_the_ranks_hold_every_element_once_a_share(config, mixtures, tp, pp, cp, ep, family: int) -> None:
    """But KV heads, which ranks share where there are more ranks than heads, and what every rank needs
    whole: with expert parallelism also the shared one."""
    config = [config, *mixtures][family]
    plan = ParallelPlan(tp, pp, min(ep, tp) if config.moe else 1, cp=cp)
    counts = {name: np.zeros(shape, int) for name, shape in expected_tensors(config).items()}
    for shard in plan.shards(config):
        part = TensorSlices(config, shard)
        for name in expected_tensors(config, shard):
            counts[name][part(name)] += 1
    for name, count in counts.items():
        if "norm" in name or name.endswith((".gate.weight", ".shared_expert_gate.weight")):
            times = tp
        elif "k_proj" in name or "v_proj" in name:
            times = max(1, tp // config.num_kv_heads)
        elif ".shared_expert." in name and plan.ep > 1:
            times = tp
        else:
            times = 1
        assert (count == cp * times).all(), name


@given(tp=st.integers(1, 4), pp=st.integers(1, 3), cp=st.integers(1, 3))
def test_every_rank_has_its_stage_cp_rank_and_tp_rank(config, tp: int, pp: int, cp: int) -> None:
    shards = ParallelPlan(tp, pp, cp=cp).shards(config)
    assert len({(s.stage, s.cp_rank, s.tp_rank) for s in shards}) == len(shards) == tp * pp * cp
    for shard in shards:
        mates = {
            "tensor": [s.rank for s in shards if (s.stage, s.cp_rank) == (shard.stage, shard.cp_rank)],
            "context": [s.rank for s in shards if (s.stage, s.tp_rank) == (shard.stage, shard.tp_rank)],
        }
        assert mates == {"tensor": list(shard.tensor_ranks), "context": list(shard.context_ranks)}
        same = [shards[rank] for rank in shard.context_ranks]
        assert len({(s.layers, s.heads, s.kv_heads, s.inter, s.vocab) for s in same}) == 1
        if not shard.is_last:
            after = shards[shard.rank + shard.stage_size]
            assert (after.stage, after.cp_rank, after.tp_rank) == (
                shard.stage + 1,
                shard.cp_rank,
                shard.tp_rank,
            )
    heads = ParallelPlan(tp, pp, cp=cp).head_shards(config)
    assert [word for shard in heads for word in shard.vocab] == list(range(config.vocab_size))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"tp": 2, "ep": 4}, r"ep is 4: 5 experts are distributed over 2 tp ranks; valid are 1, 2$"),
        ({"tp": 8, "ep": 8}, r"ep is 8: 5 experts are distributed over 8 tp ranks; valid are 1, 2, 4$"),
        ({"ep": 2}, r"ep is 2: .* valid are 1$"),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_an_impossible_deal_of_experts_says_what_would_be_valid(mixtures, words, sentence) -> None:
    with pytest.raises(ConfigError, match=r"engine\.parallel\." + sentence):
        ParallelPlan.from_options(ParallelOptions(**words), mixtures[0], CPU)


def test_whole_experts_need_not_be_split(mixtures) -> None:
    narrow = replace(mixtures[2], moe=replace(mixtures[2].moe, expert_inter=33))
    assert ParallelPlan.from_options(ParallelOptions(tp=4, ep=4), narrow, CPU).ep == 4
    with pytest.raises(ConfigError, match=r"33 MLP columns .*; valid are 4, 8|tp is 4"):
        ParallelPlan.from_options(ParallelOptions(tp=4, ep=2), narrow, CPU)


def test_experts_that_cannot_be_split_say_what_would_be_valid(mixtures) -> None:
    _, mixed, _ = mixtures
    narrow = replace(mixed, moe=replace(mixed.moe, expert_inter=34))
    with pytest.raises(ConfigError, match=r"80 and 34 and 40 MLP columns .*; valid are 1, 2$"):
        ParallelPlan.from_options(ParallelOptions(tp=4), narrow, CPU)
    # What no layer has need not be split.
    everywhere = replace(mixed, moe=replace(mixed.moe, layers=frozenset(range(3))), intermediate_size=81)
    assert ParallelPlan.from_options(ParallelOptions(tp=4), everywhere, CPU).tp == 4


@given(tp=st.sampled_from([2, 4, 8]))
def test_a_rank_has_the_kv_heads_its_query_heads_read(config, tp: int) -> None:
    group = config.num_heads // config.num_kv_heads
    for shard in ParallelPlan(tp).shards(config):
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        per_kv = len(shard.heads) // len(shard.kv_heads)
        assert [shard.kv_heads[i // per_kv] for i in range(len(shard.heads))] == [
            head // group for head in shard.heads
        ]


def test_tied_embeddings_are_read_by_the_first_and_the_last_stage(config) -> None:
    tied = replace(config, tie_word_embeddings=True)
    first, middle, last = ParallelPlan(pp=3).shards(tied)
    embeds = ["model.embed_tokens.weight" in expected_tensors(tied, shard) for shard in (first, middle, last)]
    assert embeds == [True, False, True]


def test_a_rank_reads_only_its_part_and_names_what_is_wrong_with_it(config) -> None:
    shard = ParallelPlan(2, 3).shard(config, 3)
    reports: list[tuple[int, int, str]] = []
    checkpoint = Checkpoint(config.path, lambda *report: reports.append(report), TensorSlices(config, shard))
    expected = expected_tensors(config, shard)
    assert {name.split(".")[2] for name in expected} == {"1"}
    checkpoint.check(expected, expected_tensors(config))
    for name in expected:
        assert checkpoint.read(name).numel() <= np.prod(expected[name])
    whole = sum(4 * int(np.prod(shape)) for shape in expected.values())
    assert reports[-1][0] == reports[-1][1]
    assert whole / 2 <= reports[-1][1] < 0.51 * whole
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.x is missing"):
        checkpoint.check({**expected, "model.layers.1.x": (1,)})
