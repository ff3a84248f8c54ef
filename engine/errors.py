"""The engine's errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


class EngineError(MoonpoolError):
    """Base of the engine's errors."""

    failure = FailureClass.WORKER


class CheckpointError(EngineError):
    """A file or tensor of a checkpoint is missing, truncated or of the wrong shape."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path}: {reason}")
        self.path = path
        self.reason = reason


class RoleUnsupported(EngineError):
    """The node cannot have this role. It has kept its own."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST

    def __init__(self, node_id: str, role: str, stages: Sequence[str]) -> None:
        super().__init__(f"node {node_id} cannot have the role {role!r}: it serves {' and '.join(stages)}")
        self.role = role


class UnsupportedModel(EngineError):
    """The checkpoint needs a feature that the engine does not have."""

    def __init__(self, path: Path, feature: str) -> None:
        super().__init__(f"checkpoint {path} cannot be served: {feature}")
        self.path = path


class PoolTooSmall(EngineError):
    """The KV pool has no room for even one block."""

    failure = FailureClass.DEVICE

    def __init__(self, pool_nbytes: int, block_nbytes: int) -> None:
        super().__init__(
            f"the KV pool has {pool_nbytes:,} bytes but one block of this model needs {block_nbytes:,}: "
            "raise engine.pool_nbytes or lower engine.block_size"
        )
        self.pool_nbytes = pool_nbytes
        self.block_nbytes = block_nbytes


class WeightsTooLarge(EngineError):
    """The weights do not fit in the GPU's memory."""

    failure = FailureClass.DEVICE

    def __init__(self, path: Path, free_nbytes: int) -> None:
        nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        super().__init__(
            f"checkpoint {path}: {nbytes:,} bytes of weights do not fit in the {free_nbytes:,} bytes of free "
            "GPU memory: stop other processes there or use another GPU (model.device=cuda:1)"
        )


class GpuMemoryShort(EngineError):
    """The KV pool does not fit on the GPU; ``room_nbytes`` would fit."""

    failure = FailureClass.DEVICE

    def __init__(self, wanted_nbytes: int, room_nbytes: int, why: str) -> None:
        super().__init__(
            f"the GPU has room for {room_nbytes:,} bytes of KV blocks, {wanted_nbytes:,} are needed ({why}): "
            "lower engine.pool_nbytes, engine.max_batch_tokens or engine.max_batch_size, raise "
            "engine.gpu_memory, or stop other processes there"
        )
        self.wanted_nbytes = wanted_nbytes
        self.room_nbytes = room_nbytes


class WrongKernel(EngineError):
    """A compiled kernel computes something else than its definition."""

    failure = FailureClass.DEVICE

    def __init__(self, what: str, head_dim: int, pages: str, device: str, off: float) -> None:
        super().__init__(
            f"{what} attention with heads of {head_dim} over pages of {pages} is compiled wrongly for "
            f"{device}: off by {off:.0%} of the largest value. Nothing is served with it: choose another "
            "engine.kv_dtype or engine.block_size, or another version of triton"
        )


class OutOfBlocks(EngineError):
    """Not enough blocks are free or evictable. Nothing was allocated."""

    failure = FailureClass.DEVICE

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {free} free")
        self.needed = needed
        self.free = free


class SequenceTooLong(EngineError):
    """The sequence leaves no room for a token within the longest length served."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"the sequence has {num_tokens} tokens; this node serves at most {limit}, output included"
        )


class UnknownToken(EngineError):
    """A token id is outside the model's vocabulary. ``where``: its role in the request."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST

    def __init__(self, token_id: int, vocab_size: int, where: str) -> None:
        super().__init__(f"{where} {token_id} is outside the model's vocabulary of {vocab_size}")


class DuplicateSequence(EngineError):
    """The engine already has a sequence of this request id and attempt."""

    code = "ALREADY_EXISTS"
    failure = FailureClass.REQUEST

    def __init__(self, request_id: str, attempt: int) -> None:
        super().__init__(f"request {request_id} (attempt {attempt}) is already in the engine")


class DeviceLost(EngineError):
    """The device does nothing more for this process, such as after an illegal address, a failed assertion on
    the device or an uncorrectable ECC error. Only another process can use it, if any."""

    code = "UNAVAILABLE"
    failure = FailureClass.DEVICE

    def __init__(self, error: Exception) -> None:
        text = (str(error).splitlines() or [""])[0]
        super().__init__(
            f"the device is lost to this process ({type(error).__name__}: {text}): the process must end"
        )


class EngineClosed(EngineError):
    """The engine is not started, closed, or stopped by an error."""


class RankLost(EngineError):
    """A rank of the group ended or was silent for too long. The group is unusable."""

    code = "UNAVAILABLE"
    failure = FailureClass.RANK

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason}")
        self.rank = rank
        self.reason = reason


class RankSlow(EngineError):
    """A rank stayed slow, and the node's requests have left. ``regroups``: other ranks join this process."""

    code = "DEADLINE_EXCEEDED"
    failure = FailureClass.RANK

    def __init__(self, rank: int, reason: str, *, regroups: bool) -> None:
        super().__init__(f"rank {rank} stays slow: {reason}")
        self.regroups = regroups


class LinkBroken(RankLost):
    """An exchange with ``rank`` failed. ``RankGroup.explain`` finds the cause."""

    failure = FailureClass.COLLECTIVE


class RankRefused(EngineError):
    """A started rank does not fit its group: another model, dtype or plan."""

    code = "FAILED_PRECONDITION"
    failure = FailureClass.GROUP

    def __init__(self, rank: int, word: str, theirs: object, ours: object, where: str = "") -> None:
        """``where``: such as " on gpu-2"; empty on the leader's machine."""
        super().__init__(f"rank {rank}{where} is refused: its {word} is {theirs}, the group's {ours}")


class RankDiverged(RankLost):
    """A rank ran other batches than the leader, or in another order."""

    failure = FailureClass.GROUP

    def __init__(self, rank: int, step: int, theirs: int, ours: int) -> None:
        super().__init__(
            rank, f"at step {step} its digest of all batches is {theirs:x}, the leader's {ours:x}"
        )


class JoinRefused(EngineError):
    """A rank of another machine is not taken now: it has joined already. It asks again."""

    code = "FAILED_PRECONDITION"
    failure = FailureClass.GROUP


class RankUnfit(JoinRefused):
    """A rank of another machine is never taken: another version, or another number of ranks. It ends."""

    code = "INVALID_ARGUMENT"


class NodeDraining(MoonpoolError):
    """The node is draining and accepts no new requests."""

    code = "UNAVAILABLE"
    failure = FailureClass.NODE

    def __init__(self, node_id: str) -> None:
        super().__init__(f"node {node_id} is draining and takes no new requests")


class AdapterRefused(EngineError):
    """A LoRA adapter cannot be served; ``path`` is the file that says why. Nothing was changed."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"adapter {path}: {reason}")
        self.path = path
        self.reason = reason


class ExpertsRefused(EngineError):
    """The experts of a layer cannot be placed so. That layer and those after it stay as they were."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST

    def __init__(self, layer: int, reason: str) -> None:
        super().__init__(f"experts of layer {layer} were not moved: {reason}")
        self.layer = layer


class AdapterNameTaken(EngineError):
    """Another adapter has this name. It stays."""

    code = "ALREADY_EXISTS"
    failure = FailureClass.REQUEST

    def __init__(self, name: str, path: str) -> None:
        super().__init__(
            f"the adapter {name!r} is loaded from {path} with another content: unload it, or replace it "
            "with load_inplace"
        )
