"""Connectors, requests and engine configurations, without an engine."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import ForwardContext
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from decodebench.vllm import DecodeBenchConnector, DecodeBenchConnectorMetadata

BLOCK = 16
CONSTANT = torch.tensor(0.015)
FORWARD = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})


def full(**options: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{
            "block_size": BLOCK,
            "num_kv_heads": 2,
            "head_size": 4,
            "dtype": torch.float32,
            **options,
        }
    )


def window(**options: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=2,
        head_size=4,
        dtype=torch.float32,
        sliding_window=32,
        **options,
    )


def cache_config(*specs: KVCacheSpec, num_blocks: int = 32, **group: Any) -> KVCacheConfig:
    """One group per spec, with the layer ``layer<group>``."""
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer{i}"], spec, **group) for i, spec in enumerate(specs)
        ],
    )


def engine_config(
    options: Mapping[str, Any], *, dcp: int = 1, interleave: int = 1, cache_dtype: str = "auto"
) -> Any:
    """As much of a VllmConfig as the connector reads."""
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="DecodeBenchConnector",
            kv_role="kv_both",
            kv_connector_extra_config=dict(options),
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp, cp_kv_cache_interleave_size=interleave
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )


def scheduler_side(config: KVCacheConfig, dcp: int = 1, **options: Any) -> DecodeBenchConnector:
    return DecodeBenchConnector(engine_config(options, dcp=dcp), KVConnectorRole.SCHEDULER, config)


def worker_side(
    config: KVCacheConfig,
    kv_caches: Mapping[str, Any],
    *,
    dcp: int = 1,
    interleave: int = 1,
    cache_dtype: str = "auto",
    **options: Any,
) -> DecodeBenchConnector:
    connector = DecodeBenchConnector(
        engine_config(options, dcp=dcp, interleave=interleave, cache_dtype=cache_dtype),
        KVConnectorRole.WORKER,
        config,
    )
    connector.register_kv_caches(dict(kv_caches))
    return connector


def request(num_tokens: int, name: str = "r", preemptions: int = 0) -> Request:
    made = Request(
        request_id=name,
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
    )
    made.num_preemptions = preemptions
    return made


def blocks(*tables: list[int]) -> KVCacheBlocks:
    return KVCacheBlocks(
        tuple([KVCacheBlock(block_id=i, is_null=i == 0) for i in table] for table in tables)
    )


def plan(
    connector: DecodeBenchConnector, output: SchedulerOutput | None = None
) -> DecodeBenchConnectorMetadata:
    metadata = connector.build_connector_meta(output or SchedulerOutput.make_empty())
    assert isinstance(metadata, DecodeBenchConnectorMetadata)
    return metadata


def admit(
    connector: DecodeBenchConnector, req: Request, local: int, *tables: list[int]
) -> DecodeBenchConnectorMetadata:
    """Ask, allocate and plan one request, as the scheduler does."""
    external, is_async = connector.get_num_new_matched_tokens(req, local)
    assert not is_async
    connector.update_state_after_alloc(req, blocks(*tables), external)
    return plan(connector)


def fill(connector: DecodeBenchConnector, metadata: DecodeBenchConnectorMetadata) -> None:
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(FORWARD)
    connector.wait_for_save()
    connector.clear_connector_metadata()


class Engine:
    """vLLM's scheduler with a connector; every step yields one token per request."""

    def __init__(
        self,
        path: Path,
        kv_transfer: dict[str, Any],
        *,
        num_blocks: int,
        block_size: int = BLOCK,
        specs: Sequence[KVCacheSpec] = (),
        max_num_seqs: int = 16,
        max_model_len: int = 4096,
        hash_function: Callable[[Any], bytes] = sha256,
        async_scheduling: bool = False,
    ) -> None:
        (path / "config.json").write_text(
            json.dumps(
                {
                    "architectures": ["LlamaForCausalLM"],
                    "model_type": "llama",
                    "hidden_size": 64,
                    "intermediate_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "vocab_size": 128,
                    "max_position_embeddings": max_model_len,
                    "torch_dtype": "float32",
                }
            )
        )
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
        cache.kv_cache_layout = "LBNHC"
        cache.num_gpu_blocks = num_blocks
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(path), skip_tokenizer_init=True, dtype="float32", seed=0
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=4096,
                max_model_len=max_model_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=async_scheduling,
            ),
            cache_config=cache,
            kv_transfer_config=KVTransferConfig(kv_role="kv_both", **kv_transfer),
            device_config=DeviceConfig("cpu"),
        )
        self.config = config
        self.scheduler = (AsyncScheduler if async_scheduling else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache_config(*(specs or [full()]), num_blocks=num_blocks),
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
        )
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(block_size, hash_function)

    def add(self, name: str, tokens: list[int], max_tokens: int = 4) -> Request:
        made = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(made)
        return made

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule()

    def finish_step(self, output: SchedulerOutput, sampled: Sequence[int] | None = None) -> None:
        """Give every request of the step its token, in the order of the output."""
        names = list(output.num_scheduled_tokens)
        known = {field.name for field in fields(ModelRunnerOutput)}
        index = {"req_id_to_index": {name: i for i, name in enumerate(names)}}  # before 0.34
        result = ModelRunnerOutput(
            req_ids=names,
            sampled_token_ids=[[token] for token in sampled or [7] * len(names)],
            **{name: value for name, value in index.items() if name in known},
        )
        self.scheduler.update_from_output(output, result)
