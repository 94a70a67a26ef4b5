"""Connectors that note what the engine says and check every fill in the worker that makes it.

Records go as JSON lines into a folder, since scheduler and workers may be processes of their own:
``step`` from the scheduler, ``register`` and ``fill`` from workers.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from engine_oracle import Admission, FillCheck, filled_layers, memory_of
from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as in_tree
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from decodebench import vllm as ours

RECORDS = "DECODEBENCH_TEST_RECORDS"


@dataclass
class SpyMetadata(KVConnectorMetadata):
    """The connector's own metadata, and what the engine said about the step."""

    inner: KVConnectorMetadata
    admissions: list[Admission]


def spy_on(base: Any) -> Any:
    """Return a connector that does what ``base`` does, and checks it."""

    class Spy(base):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            options = self._kv_transfer_config.kv_connector_extra_config
            self._rank = vllm_config.parallel_config.rank
            self._value = None if options.get("fill_std") else options.get("fill_mean", 0.015)
            self._at_startup = options.get("startup_fill", False)
            self._admissions: list[Admission] = []

        def get_num_new_matched_tokens(self, request: Any, local: int) -> Any:
            _LOCAL[request.request_id] = local
            return super().get_num_new_matched_tokens(request, local)

        def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
            super().update_state_after_alloc(request, blocks, external)
            if external:
                self._admissions.append(
                    Admission(
                        request.request_id,
                        request.num_preemptions,
                        _LOCAL[request.request_id],
                        external,
                        blocks.get_block_ids(),
                    )
                )

        def build_connector_meta(self, output: Any) -> SpyMetadata:
            to_zero = output.new_block_ids_to_zero or []
            inner = super().build_connector_meta(output)
            admissions, self._admissions = self._admissions, []
            _record(
                "step",
                tokens=output.num_scheduled_tokens,
                admissions=[asdict(admission) for admission in admissions],
                to_zero=to_zero,
                left_to_zero=output.new_block_ids_to_zero or [],
            )
            return SpyMetadata(inner, admissions)

        def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
            super().register_kv_caches(kv_caches)
            self._caches = kv_caches
            filled = filled_layers(self._kv_cache_config, kv_caches, self._value or 0.0)
            _record("register", filled=filled)

        def bind_connector_metadata(self, metadata: SpyMetadata) -> None:
            super().bind_connector_metadata(metadata.inner)
            self._said = metadata.admissions

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            check = FillCheck(
                self._kv_cache_config, self._caches, self._said, self._value, self._at_startup
            )
            super().start_load_kv(forward_context, **kwargs)
            if self._said:
                requests = [admission.request_id for admission in self._said]
                _record(
                    "fill",
                    requests=requests,
                    rank=self._rank,
                    num_bytes=check.num_bytes,
                    digest=_digest(self._caches),
                )
            if problems := check.problems():
                _record("problem", problems=problems)

    # Under its name an engine of several connectors finds what reads its statistics.
    Spy.__name__ = base.__name__
    return Spy


# Until the next admission, as the connector may hold this under any name.
_LOCAL: dict[str, int] = {}


def _record(kind: str, **facts: Any) -> None:
    path = Path(os.environ[RECORDS]) / f"{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, **facts}) + "\n")


def _digest(caches: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for memory in memory_of(caches).values():
        digest.update(memory.numpy().data)
    return digest.hexdigest()


Ours = spy_on(ours.DecodeBenchConnector)
InTree = spy_on(in_tree.DecodeBenchConnector)
