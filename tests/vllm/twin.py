"""The simulated engine beside vLLM's scheduler, step by step, on the same requests."""

import io
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm_support import Engine

from decodebench.replay import Replay, Trace

OURS = {
    "kv_connector": "DecodeBenchConnector",
    "kv_connector_module_path": "decodebench.vllm",
}


@dataclass(frozen=True)
class Row:
    """A request of a trace; its hash ids chain, and each covers ``hash_block`` tokens."""

    at_ms: float
    prompt: int
    output: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Setting:
    """An engine that both sides can be."""

    groups: tuple[str, ...] = ("full",)
    block_size: int = 16
    num_blocks: int = 64
    max_num_seqs: int = 16


def spec_of(group: str, block_size: int) -> KVCacheSpec:
    """The spec that makes vLLM manage a group as ours is."""
    attention = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": 4,
        "dtype": torch.float32,
    }
    match group.split(":"):
        case ["full"]:
            return FullAttentionSpec(**attention)
        case ["window", tokens]:
            return SlidingWindowSpec(**attention, sliding_window=int(tokens))
    raise AssertionError(group)


def prompts_of(rows: Sequence[Row], hash_block: int) -> list[list[int]]:
    """Token ids that are equal exactly where the hash ids say so."""
    fresh = itertools.count(1 << 40)
    prompts = []
    for row in rows:
        tokens = [
            token
            for id_ in row.ids
            for token in range(id_ * hash_block, id_ * hash_block + hash_block)
        ][: row.prompt]
        tokens.extend(itertools.islice(fresh, row.prompt - len(tokens)))
        prompts.append(tokens)
    return prompts


def read(rows: Sequence[Row], hash_block: int) -> Trace:
    """The rows as a trace."""
    lines = [
        json.dumps(
            {
                "timestamp": row.at_ms,
                "input_length": row.prompt,
                "output_length": row.output,
                "hash_ids": row.ids,
            }
        )
        for row in rows
    ]
    file = io.BytesIO("\n".join(lines).encode())
    return Trace.read([(file, "rows")], format="mooncake", hash_block_size=hash_block)


class Twin:
    """Both engines at their start. Rows are in order of arrival."""

    def __init__(self, rows: Sequence[Row], hash_block: int, setting: Setting) -> None:
        self.rows = rows
        self.setting = setting
        self.prompts = prompts_of(rows, hash_block)
        self.ours = Replay(
            read(rows, hash_block),
            block_size=setting.block_size,
            num_blocks=setting.num_blocks,
            groups=setting.groups,
            max_num_seqs=setting.max_num_seqs,
            step_ms=20.0,
            selection="interval",
            record_memory=False,
        )
        with tempfile.TemporaryDirectory() as path:
            self.engine = Engine(
                Path(path),
                OURS,
                num_blocks=setting.num_blocks,
                block_size=setting.block_size,
                specs=[spec_of(group, setting.block_size) for group in setting.groups],
                max_num_seqs=setting.max_num_seqs,
                max_model_len=1 << 20,
                hash_function=lambda value: hash(value).to_bytes(8, "big", signed=True),
            )
        self.scheduler = self.engine.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.sampled = itertools.count(1 << 50)
        self.arrived = self.admissions = self.preemptions = 0
        self.hits: dict[int, tuple[int, int]] = {}
        self._listen()

    def _listen(self) -> None:
        """Note each request's local and external tokens as the connector is asked for them."""
        connector: Any = self.scheduler.connector
        asked = connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request: Any, local: int) -> tuple[int | None, bool]:
            external, is_async = asked(request, local)
            self.hits[int(request.request_id)] = (local, external)
            return external, is_async

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens

    def run(self, every: int = 1) -> None:
        """Step both to the end; compare the order of the whole pool in every ``every``-th step."""
        for step in itertools.count(1):
            self.ours.advance(1)
            if self.ours.done:
                break
            output = self.step()
            if step % every == 0:
                self.compare_pools()
            self.finish(output)
        self.compare_pools()
        assert not self.scheduler.running
        assert not self.scheduler.waiting

    def step(self) -> SchedulerOutput:
        """Schedule vLLM's step, and compare what both decided."""
        running, waiting = self.ours.running(), self.ours.waiting()
        seen = {request for request, *_ in running} | set(waiting)
        for request in sorted(request for request in seen if request >= self.arrived):
            # The others were too large for the pool.
            tokens, output = self.prompts[request], self.rows[request].output
            self.engine.add(str(request), tokens, max(output, 1))
            self.arrived = request + 1
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        assert [int(request.request_id) for request in self.scheduler.running] == [
            request for request, *_ in running
        ]
        assert [int(request.request_id) for request in self.scheduler.waiting] == waiting
        assert self.ours.stats()["preemptions"] == self.preemptions
        for request, admission, local, external, tables in running:
            theirs = self.manager.get_block_ids(str(request))
            assert [table.tolist() for table in tables] == list(theirs), f"tables of {request}"
            if admission > self.admissions:
                assert (local, external) == self.hits[request], f"hits of {request}"
                self.admissions = admission
        pool = self.manager.block_pool
        assert len(self.ours.free_blocks()) == pool.get_num_free_blocks()
        return output

    def compare_pools(self) -> None:
        """Free blocks in the order in which they go, and the blocks with cached content."""
        pool = self.manager.block_pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert self.ours.free_blocks().tolist() == free
        cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
        assert self.ours.cached_blocks().tolist() == cached

    def finish(self, output: SchedulerOutput) -> None:
        """Give every request of vLLM's step a token that no other has."""
        names = list(output.num_scheduled_tokens)
        self.engine.finish_step(output, [next(self.sampled) for _ in names])
