"""What can go wrong in the engine, as nouns a caller can act on."""

from __future__ import annotations

from pathlib import Path

from moonpool.runtime.errors import MoonpoolError


class EngineError(MoonpoolError):
    """Base of the engine's errors."""


class CheckpointError(EngineError):
    """A checkpoint cannot be used: a file or a tensor is missing, truncated or of the wrong shape."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path}: {reason}")
        self.path = path
        self.reason = reason


class UnsupportedModel(EngineError):
    """The checkpoint asks for something the engine does not compute; ``feature`` names it."""

    def __init__(self, path: Path, feature: str) -> None:
        super().__init__(f"checkpoint {path} cannot be served: {feature}")
        self.path = path
        self.feature = feature


class PoolTooSmall(EngineError):
    """The memory given for the KV pool does not hold even one block."""

    def __init__(self, pool_nbytes: int, block_nbytes: int) -> None:
        super().__init__(
            f"the KV pool has {pool_nbytes:,} bytes but one block of this model needs {block_nbytes:,}: "
            "raise engine.pool_nbytes or lower engine.block_size"
        )
        self.pool_nbytes = pool_nbytes
        self.block_nbytes = block_nbytes


class WeightsTooLarge(EngineError):
    """The GPU's memory was full before all weights were loaded."""

    def __init__(self, path: Path, free_nbytes: int) -> None:
        nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        super().__init__(
            f"checkpoint {path}: its weights, {nbytes:,} bytes as they are stored, do not fit in the GPU's "
            f"memory, of which {free_nbytes:,} bytes were free: stop what else runs there or take "
            "another GPU (model.device=cuda:1)"
        )
        self.weights_nbytes = nbytes
        self.free_nbytes = free_nbytes


class GpuMemoryShort(EngineError):
    """The GPU has not got the memory asked for; ``room_nbytes`` is what would fit."""

    def __init__(self, wanted_nbytes: int, room_nbytes: int, why: str) -> None:
        super().__init__(
            f"the GPU has room for {room_nbytes:,} bytes of KV blocks, {wanted_nbytes:,} are needed ({why}): "
            "lower engine.pool_nbytes, engine.max_batch_tokens or engine.max_batch_size, raise "
            "engine.gpu_memory, or stop what else runs there"
        )
        self.wanted_nbytes = wanted_nbytes
        self.room_nbytes = room_nbytes


class OutOfBlocks(EngineError):
    """More blocks were asked for than are free or can be evicted. Nothing was allocated."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {free} free")
        self.needed = needed
        self.free = free


class SequenceTooLong(EngineError):
    """The sequence can never run here: it leaves no room for a token within the longest length served."""

    code = "INVALID_ARGUMENT"

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"the sequence has {num_tokens} tokens; this node serves at most {limit}, output included"
        )
        self.num_tokens = num_tokens
        self.limit = limit


class UnknownToken(EngineError):
    """A token id is outside the model's vocabulary; ``where`` says which of the request's it is."""

    code = "INVALID_ARGUMENT"

    def __init__(self, token_id: int, vocab_size: int, where: str) -> None:
        super().__init__(f"{where} {token_id} is outside the model's vocabulary of {vocab_size}")
        self.token_id = token_id
        self.vocab_size = vocab_size
        self.where = where


class DuplicateSequence(EngineError):
    """A sequence of the same request id and attempt is in the engine already."""

    code = "ALREADY_EXISTS"

    def __init__(self, request_id: str, attempt: int) -> None:
        super().__init__(f"request {request_id} (attempt {attempt}) is already in the engine")
        self.request_id = request_id
        self.attempt = attempt


class EngineClosed(EngineError):
    """The engine is not running: not started, closed, or stopped by an error it could not contain."""


class RankLost(EngineError):
    """A rank of the group died, or was silent for too long. The group can only be torn down."""

    code = "UNAVAILABLE"

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason}")
        self.rank = rank
        self.reason = reason


class LinkBroken(RankLost):
    """An exchange with ``rank`` failed. Why is known better to who watches its process and its machine."""


class RankRefused(EngineError):
    """A rank that started does not fit its group: another model, dtype or plan."""

    code = "FAILED_PRECONDITION"

    def __init__(self, rank: int, word: str, theirs: object, ours: object, where: str = "") -> None:
        """``where``: as " on gpu-2", nothing where it runs beside its leader."""
        super().__init__(f"rank {rank}{where} is refused: its {word} is {theirs}, the group's {ours}")
        self.rank = rank
        self.word = word


class RankDiverged(RankLost):
    """A rank's digest of the batches it ran is not the leader's: it ran others, or in another order."""

    def __init__(self, rank: int, step: int, theirs: int, ours: int) -> None:
        super().__init__(
            rank, f"at step {step} its digest of all batches is {theirs:x}, the leader's {ours:x}"
        )
        self.step = step


class HostRefused(EngineError):
    """A leader and a rank host do not take each other: another version, another secret, one too many."""

    code = "FAILED_PRECONDITION"


class NodeDraining(MoonpoolError):
    """The node finishes what it has and takes nothing new."""

    code = "UNAVAILABLE"

    def __init__(self, node_id: str) -> None:
        super().__init__(f"node {node_id} is draining and takes no new requests")
