"""Fill statistics, for vLLM's logger and its Prometheus endpoint."""

from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.metrics.utils import create_metric_per_engine

__all__ = ["DecodeBenchConnectorPromMetrics", "DecodeBenchConnectorStats"]

_DESCRIPTIONS: Final = {
    "num_requests": "Admissions of requests with external tokens.",
    "num_tokens": "External tokens of those admissions.",
    "num_blocks": "KV blocks selected, each once per step.",
    "num_repeats_merged": "Times that a block was named which the step already fills.",
    "plan_seconds": "Time spent planning fills, in the scheduler.",
    "num_bytes": "Bytes written to KV caches, summed over workers.",
    "num_fills": "Steps in which KV caches were filled, summed over workers.",
    "fill_seconds": "Time spent writing, summed over workers.",
}


@dataclass
class DecodeBenchConnectorStats(KVConnectorStats):
    """Sums since the last report, by name; what did not happen is missing.

    The scheduler counts requests, tokens, blocks and planning, each worker its own writing.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def add(self, **counts: float) -> None:
        """Add to the sums."""
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def reset(self) -> None:
        """Start again from nothing."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's sums to these."""
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return every sum, for a log line."""
        return {name: round(self.data.get(name, 0), 6) for name in _DESCRIPTIONS}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class DecodeBenchConnectorPromMetrics(KVConnectorPromMetrics):
    """The sums as Prometheus counters ``vllm:decodebench_<name>_total``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {
            name: create_metric_per_engine(
                counter(
                    name=f"vllm:decodebench_{name}",
                    documentation=description,
                    labelnames=labelnames,
                ),
                per_engine_labelvalues,
            )
            for name, description in _DESCRIPTIONS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report's sums to the counters."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
