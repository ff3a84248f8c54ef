"""Options of the models and their adapters, and of the engine that runs one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.runtime.config.section import Section, option, require, section
from moonpool.runtime.errors import ConfigError


def shipped(name: str) -> Path:
    """What ships with Moonpool: a checkpoint, or another file beside it."""
    return Path(__file__).parents[2] / "demo" / name


@dataclass(frozen=True, slots=True)
class ModelOptions(Section, name="model"):
    path: str = option(
        "", "path", "Hugging Face checkpoint directory; empty: the model that ships with Moonpool"
    )
    price: float = option(
        1.0,
        "money/second",
        "price of a node for a second, in any currency: an hour's divided by 3600",
        least=0,
    )
    name: str = option(
        "", "text", "name in the API; empty: the directory's name, or moonpool-demo for the shipped model"
    )
    dtype: str = option(
        "auto",
        "name",
        "dtype of weights and computation; auto: the checkpoint's, on a CPU float32 below 100 M weights",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "name", "auto, cpu, cuda or cuda:0, cuda:1 …; auto: the first GPU, if any")
    max_model_len: int = option(
        0, "tokens", "longest prompt plus output; 0: the checkpoint's own limit", least=0
    )

    def _check(self) -> None:
        known = self.device in ("auto", "cpu", "cuda") or re.fullmatch(r"cuda:\d+", self.device)
        require(bool(known), "model.device", "auto, cpu, cuda or cuda:NUMBER", self.device)

    @property
    def directory(self) -> Path:
        """The checkpoint directory: ``path``, or the model that ships. It need not exist."""
        return Path(self.path) if self.path else shipped("model")

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.name or (self.directory.resolve().name if self.path else "moonpool-demo")


@dataclass(frozen=True, slots=True)
class ModelsOptions(Section, name="models"):
    served: tuple[str, ...] = option(
        (),
        "names",
        "models behind one API, each NAME=DIRECTORY (NAME= for the shipped one); the first answers requests "
        "without a name; empty: model.path alone",
    )
    path: str = option("", "path", "TOML file of more models, their options, and routes among them")

    def _check(self) -> None:
        for each in self.served:
            name, equals, _ = each.partition("=")
            require(bool(name and equals), "models.served", "a list of NAME=DIRECTORY", each)


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


@dataclass(frozen=True, slots=True)
class ParallelOptions(Section, name="engine.parallel"):
    tp: int = option(1, "ranks", "tensor parallel: ranks that each layer is split over", least=1)
    pp: int = option(1, "stages", "pipeline parallel: stages that the layers are split into", least=1)
    pp_layers: str = option(
        "",
        "layers",
        "pipeline parallel: layers of each stage, such as 17+7; empty: balanced by the weights that a step "
        "reads and multiplies by. `moonpool doctor` says which ones balance by measured seconds",
    )
    ep: int = option(1, "ranks", "expert parallel: TP ranks that MoE experts are distributed over", least=1)
    expert_plan_path: str = option(
        "", "path", "expert parallel: file that assigns experts to ranks, written by `moonpool experts`"
    )
    all_to_all_tokens: int = option(
        0,
        "tokens",
        "expert parallel: steps of at least this many tokens use all-to-all, shorter ones broadcast all "
        "tokens to all ranks; 0: by a measured rule",
        least=0,
    )
    expert_capacity: float = option(
        0.0,
        "times",
        "expert parallel: most rows of an expert in a step over the mean of all experts (8 rows are always "
        "allowed), so that ranks wait less for the busiest one; a request's tokens then depend on others in "
        "its steps, and quality is lost; 0: no limit, else at least 1",
        least=0,
    )
    expert_overflow: str = option(
        "reroute",
        "name",
        "what becomes of rows beyond expert_capacity: reroute (to the token's next best expert with room), "
        "drop",
        choices=("reroute", "drop"),
    )
    dp: int = option(
        1,
        "replicas",
        "data parallel: replicas of one node; each has its own ranks, GPUs, pool, tiers and port "
        "(counted from node.port)",
        least=1,
    )
    cp: int = option(
        1,
        "ranks",
        "context parallel: ranks that the tokens of a long prompt, and the KV blocks of every prompt, are "
        "split over",
        least=1,
    )
    hosts: int = option(
        1,
        "machines",
        "machines that a node's ranks are distributed over, in whole stages (pp); on the other ones a "
        "launcher such as torchrun starts them (`moonpool ranks`)",
        least=1,
    )
    listen: str = option(
        "",
        "host:port",
        "with hosts: address at which the ranks of other machines reach this node; replica r uses port + r",
    )
    trusted_network: bool = option(
        False,
        "flag",
        "with hosts: strangers do not reach the network between the machines, where tensors (Gloo, NCCL) are "
        "neither encrypted nor authenticated; without it ranks join over the loopback address only",
    )
    link: str = option(
        "auto",
        "name",
        "how ranks exchange tensors: shm (shared memory), gloo, nccl, shm+gloo (shared memory on a machine, "
        "Gloo between machines); auto: nccl on GPUs, shm+gloo with several hosts, else shm",
        choices=("auto", "shm", "gloo", "nccl", "shm+gloo"),
    )
    timeout_s: float = option(
        5.0, "seconds", "a rank or replica that is silent for this long is considered lost", above=0
    )
    slow_rank: str = option(
        "off",
        "name",
        "what becomes of a node with a rank that stays slow, once its requests have moved to others: drain "
        "(its process ends, for its supervisor to start another), regroup (its ranks are replaced); off: it "
        "is named only",
        choices=("off", "drain", "regroup"),
    )
    start_timeout_s: float = option(
        120.0, "seconds", "longest time without progress while the ranks start and load", above=0
    )
    micro_batches: int = option(
        0,
        "micro-batches",
        "pipeline parallel: parts of the decoding sequences; while one is in a stage, others are in other "
        "stages; 0: as many as stages",
        least=0,
        most=8,
    )
    micro_batch_tokens: int = option(
        128, "tokens", "pipeline parallel: most prompt tokens in one micro-batch", least=1
    )
    cp_min_tokens: int = option(
        8, "tokens", "context parallel: steps of fewer tokens are computed by every rank, not split", least=1
    )

    def _check(self) -> None:
        valid = [n for n in range(1, self.pp + 1) if self.pp % n == 0]
        require(
            self.hosts in valid,
            "engine.parallel.hosts",
            f"one of {', '.join(map(str, valid))}, so that each machine has as many of the {self.pp} stages "
            "(engine.parallel.pp)",
            self.hosts,
        )
        require(
            not 0 < self.expert_capacity < 1,
            "engine.parallel.expert_capacity",
            "0 or at least 1: below it experts that are chosen equally often have too little room",
            self.expert_capacity,
        )
        counts = self.pp_layers.split("+") if self.pp_layers else ["1"] * self.pp
        require(
            len(counts) == self.pp and all(count.isdecimal() and int(count) > 0 for count in counts),
            "engine.parallel.pp_layers",
            f"empty or {self.pp} numbers above 0, one for each stage (engine.parallel.pp), such as 17+7",
            self.pp_layers,
        )
        _, _, port = self.listen.rpartition(":")
        require(
            (self.hosts == 1 and not self.listen) or port.isdigit(),
            "engine.parallel.listen",
            "an address of this machine and a port that the other machines reach, such as 10.0.0.1:7400",
            self.listen,
        )

    @property
    def num_micro_batches(self) -> int:
        """Parts of the decoding sequences; at most 8, the steps that a group's board has room for."""
        return self.micro_batches or min(self.pp, 8)

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp * self.cp

    @property
    def ranks_per_host(self) -> int:
        """Rank r is on machine ``r // ranks_per_host``; the leader's is 0."""
        return self.world_size // self.hosts


@dataclass(frozen=True, slots=True)
class SpeculativeOptions(Section, name="engine.speculative"):
    method: str = option(
        "off",
        "name",
        "how tokens are proposed that a decode step verifies: ngram repeats what followed the newest three "
        "tokens before, suffix at most as many tokens as the match is long, draft asks a smaller model",
        choices=("off", "ngram", "suffix", "draft"),
    )
    num_tokens: int = option(4, "tokens", "most proposed tokens of a sequence in one step", least=1, most=16)
    draft_path: str = option(
        "",
        "path",
        "draft: checkpoint directory of the smaller model, with the tokenizer of the served one; "
        "empty: the small model that ships with Moonpool",
    )
    pool_nbytes: int = option(64 << 20, "bytes", "draft: memory of the smaller model's own KV pool", least=1)

    @property
    def draft_directory(self) -> Path:
        """The checkpoint directory of the smaller model. It need not exist."""
        return Path(self.draft_path) if self.draft_path else shipped("small")


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most tokens and sequences in one step where the options name none."""

    num_tokens: int
    num_sequences: int

    def __str__(self) -> str:
        return f"at most {self.num_tokens} tokens and {self.num_sequences} sequences"


CPU_LIMITS = StepLimits(512, 64)


@dataclass(frozen=True, slots=True)
class EngineOptions(Section, name="engine"):
    block_size: int = option(16, "tokens", "tokens in a KV block", choices=(8, 16, 32, 64, 128, 256, 512))
    kv_dtype: str = option(
        "auto",
        "name",
        "dtype of the KV pool; auto: as computed; fp8_e4m3 uses the k_scale and v_scale of the checkpoint; "
        "int8 has a scale for each token and head, on CPUs",
        choices=("auto", "fp8_e4m3", "int8"),
    )
    weights: str = option(
        "auto",
        "name",
        "bits of the weights; auto: as the checkpoint stores them; int8 and int4 round plain weights at load",
        choices=("auto", "int8", "int4"),
    )
    pool_nbytes: int = option(
        0,
        "bytes",
        "memory of a node's paged KV pool; 0: 256 MiB, on a GPU what engine.gpu_memory leaves",
        least=0,
    )
    gpu_memory: float = option(
        0.9, "fraction", "part of a GPU's memory that one node may use, weights included", above=0, most=1
    )
    decode_graphs: bool = option(
        True, "flag", "on a GPU: capture decode steps as CUDA graphs at start, one a batch size"
    )
    max_batch_size: int = option(
        0, "sequences", "most sequences in one step; 0: 64, on a GPU by its memory", least=0
    )
    max_batch_tokens: int = option(
        0,
        "tokens",
        "most tokens in one step, longer prompts are computed in chunks; 0: 512, on a GPU by its memory",
        least=0,
    )
    threads: int = option(
        0,
        "threads",
        "compute threads of a rank; 0: the cores divided by the ranks (in `moonpool up`: of all nodes)",
        least=0,
    )
    parallel: ParallelOptions = section(ParallelOptions)
    speculative: SpeculativeOptions = section(SpeculativeOptions)

    def _check(self) -> None:
        require(
            self.speculative.method == "off" or self.parallel.cp == 1,
            "engine.speculative.method",
            "off with context parallelism (engine.parallel.cp)",
            self.speculative.method,
        )
        # Context parallelism splits tokens in whole blocks.
        most = max(1, (self.max_batch_tokens or CPU_LIMITS.num_tokens) // self.block_size)
        must_be = f"at most {most}, the blocks of a step (engine.max_batch_tokens / engine.block_size)"
        require(self.parallel.cp <= most, "engine.parallel.cp", must_be, self.parallel.cp)

    def compute_threads(self, cores: int, nodes: int = 1) -> int:
        """Return the threads of each rank where so many equal nodes share ``cores``."""
        ranks = nodes * self.parallel.dp * self.parallel.ranks_per_host
        return self.threads or max(1, cores // ranks)

    def within(self, limits: StepLimits) -> EngineOptions:
        """Return the options with ``limits`` for the steps' sizes that are 0."""
        return replace(
            self,
            max_batch_tokens=self.max_batch_tokens or limits.num_tokens,
            max_batch_size=self.max_batch_size or limits.num_sequences,
        )

    @property
    def host_pool_nbytes(self) -> int:
        """Size of the KV pool on a node that computes on CPUs."""
        return self.pool_nbytes or 256 << 20
