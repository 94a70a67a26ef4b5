"""The class that vLLM creates, once in its scheduler and once in every worker."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from decodebench.vllm.metadata import DecodeBenchConnectorMetadata
from decodebench.vllm.options import Options
from decodebench.vllm.scheduler import FillScheduler
from decodebench.vllm.stats import DecodeBenchConnectorPromMetrics, DecodeBenchConnectorStats
from decodebench.vllm.worker import FillWorker

__all__ = ["DecodeBench"]


class DecodeBench(KVConnectorBase_V1, SupportsHMA):
    """Pretends that prompts were computed elsewhere, and fills their KV blocks with dummy values.

    Options, in ``kv_connector_extra_config``: see :class:`decodebench.vllm.options.Options`. Loads
    are synchronous: a step's blocks are filled before its forward pass.

    The class has the name under which it is registered, since vLLM's ``MultiConnector`` looks up
    by the one what it finds under the other.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: FillScheduler
        self._worker: FillWorker
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = FillScheduler(
                options,
                kv_cache_config,
                vllm_config.parallel_config.decode_context_parallel_size,
            )
        else:
            self._worker = FillWorker(options, kv_cache_config, vllm_config)

    # Scheduler.

    @property
    def requires_kv_delivery(self) -> bool:
        """False: no KV leaves this engine, so a preempted request keeps the tokens in flight."""
        return False

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the tokens that come from outside after the computed ones, loaded in the step."""
        return self._scheduler.num_external_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Record the blocks of an admitted request."""
        self._scheduler.admit(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan the step's fills."""
        return self._scheduler.build_metadata(scheduler_output)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the groups that a load restores: every one that is transferred."""
        return self._kv_cache_config.transfer_group_ids  # type: ignore[no-any-return]

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed."""
        self._scheduler.finish(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed."""
        self._scheduler.finish(request)
        return False, None

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the caches to fill, by layer, in place of those before."""
        self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Let go of the caches while the engine sleeps."""
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """Take the same caches again when the engine wakes; a start-up fill is redone."""
        self._worker.restore()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Fill the blocks that the step's metadata names."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DecodeBenchConnectorMetadata)
        self._worker.fill(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: the fill is done."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any
    ) -> None:
        """Do nothing: no KV leaves this engine."""

    def wait_for_save(self) -> None:
        """Return at once: no KV leaves this engine."""

    # Statistics.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this side counted since the last call."""
        if self.role == KVConnectorRole.SCHEDULER:
            return self._scheduler.take_stats()
        return self._worker.take_stats()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Return statistics of serialized ones."""
        return DecodeBenchConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Return the statistics' Prometheus counters."""
        return DecodeBenchConnectorPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
