"""vLLM's interface to connectors, version 1, mapped to the two halves of ours."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from moonpool.connectors.checkpoint import fingerprint_of, layout_facts
from moonpool.connectors.errors import Unsupported
from moonpool.connectors.vllm.lookup.prefix_index import PrefixIndex
from moonpool.connectors.vllm.plan import StepPlan
from moonpool.connectors.vllm.registration import registration_of
from moonpool.connectors.vllm.scheduler import SchedulerSide
from moonpool.connectors.vllm.settings import (
    check_engine,
    check_version,
    identify,
    read_settings,
)
from moonpool.connectors.vllm.worker import WorkerSide


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    plan: StepPlan


class MoonpoolConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads prefixes of prompts from Moonpool's store, and keeps full blocks there.

    Raises ``Unsupported`` and ``ConfigError`` at vLLM's start. Later a fault of the store costs hits only.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        check_engine(vllm_config, kv_cache_config)
        block_size = _block_size(vllm_config, kv_cache_config)
        _log_as_vllm()
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config or {}
        config = read_settings(extra, transfer.engine_id)
        identify(config)
        facts = _facts(vllm_config, block_size)
        fingerprint = fingerprint_of(facts)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            index = PrefixIndex(config.index)
            self._scheduler = SchedulerSide(config.node.id, fingerprint, block_size, index)
        else:
            registration = registration_of(extra, vllm_config, fingerprint, block_size)
            self._worker = WorkerSide(config, fingerprint, facts, registration=registration)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that is not kept is computed again

    # ------------------------------------------------------------------ worker

    @property
    def _works(self) -> WorkerSide:
        assert self._worker is not None, "called in the scheduler's process"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._works.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Called before every step, so before any block is given to another request.
        self._works.fence()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._works.fence()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._works.begin_loads(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before their requests are scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        self._works.begin_saves(self._get_connector_metadata().plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        ended = self._works.ended_loads()
        return KVConnectorTransferResults(finished_recving=ended.loaded, failed_recving=ended.failed)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # ------------------------------------------------------------------ scheduler

    @property
    def _schedules(self) -> SchedulerSide:
        assert self._scheduler is not None, "called in the worker's process"
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        self._schedules.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._schedules.match(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._schedules.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state

        def blocks_of(request_id: str) -> Sequence[int] | None:
            found = None if state is None else state.get_block_ids(request_id)
            return None if found is None else found[0]

        return StepMetadata(self._schedules.plan(scheduler_output.num_scheduled_tokens, blocks_of))

    def update_connector_output(self, connector_output: Any) -> None:
        self._schedules.ended(
            set(connector_output.finished_recving or ()), set(connector_output.failed_recving or ())
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # Blocks are copied out and released: those that wait for a reader would keep an idle engine busy.
        return False, self._schedules.finished(request.request_id)

    def reset_cache(self) -> bool:
        self._schedules.reset_cache()
        return True


def _log_as_vllm() -> None:
    """Our messages appear where vLLM's do."""
    ours, theirs = logging.getLogger("moonpool"), logging.getLogger("vllm")
    ours.handlers, ours.propagate = theirs.handlers, theirs.propagate
    ours.setLevel(theirs.level)


def _block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of a block. Raises ``Unsupported``."""
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if block_size != hash_block_size:
        raise Unsupported(f"hashes of {hash_block_size} tokens beside blocks of {block_size}")
    return int(block_size)


def _facts(vllm_config: Any, block_size: int) -> dict[str, str]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "vllm": vllm.__version__,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "cache_dtype": cache.cache_dtype,
        "block_size": block_size,
        # Pages of CPU engines are packed by instruction set.
        "processor": torch.backends.cpu.get_cpu_capability() + str(torch.cpu._is_amx_tile_supported()),
        "device": vllm_config.device_config.device_type,
        "hash": cache.prefix_caching_hash_algo,
    }
    return layout_facts(model.model, str(model.revision), facts)
