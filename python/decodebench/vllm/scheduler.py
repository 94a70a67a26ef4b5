"""The connector's side in the scheduler: which requests are filled, and with which blocks."""

import logging
import time
from typing import Final

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request
from vllm.version import __version_tuple__

from decodebench import StepPlan
from decodebench.vllm.groups import step_planner
from decodebench.vllm.metadata import DecodeBenchConnectorMetadata
from decodebench.vllm.options import Options
from decodebench.vllm.stats import DecodeBenchConnectorStats

__all__ = ["FillScheduler"]

logger = init_logger(f"vllm.{__name__}")

_NOTHING: Final = DecodeBenchConnectorMetadata()

_Request = tuple[str, int, int, tuple[list[int], ...]]
"""Id, local tokens, external tokens, block tables."""

# Before 0.32 the interface forbids connectors to change the scheduler's output.
_MAY_SPARE_ZEROING: Final = __version_tuple__[:2] >= (0, 32)


class FillScheduler:
    """Follows requests from the engine's questions to the plan of a step.

    The planner selects and checks; here it is only recorded what the engine said.
    """

    def __init__(self, options: Options, config: KVCacheConfig, dcp_world_size: int) -> None:
        self._refill = options.on_preemption == "refill"
        self._planner = step_planner(config, dcp_world_size, options)
        self._filling = [
            number
            for number, group in enumerate(self._planner.groups)
            if group.indexing != "excluded"
        ]
        self._zeroed = [
            number
            for number, group in enumerate(self._planner.groups)
            if group.indexing == "positional"
        ]
        self._local: dict[str, int] = {}
        """Local tokens that the engine reported last, by request."""
        self._filled: dict[str, int] = {}
        """The admission, as the number of preemptions before it, in which a request was filled."""
        self._admitted: dict[str, tuple[int, int, KVCacheBlocks]] = {}
        """Requests of this step: local tokens, external tokens, all their blocks."""
        self._counted = _nothing_counted()

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> int:
        """Return how many tokens after the local ones come from outside: all but the last."""
        admission = request.num_preemptions
        if admission and not self._refill:
            return 0
        if self._filled.get(request.request_id) == admission:
            return 0
        self._local[request.request_id] = num_local_tokens
        num_tokens: int = request.num_tokens
        return max(0, num_tokens - 1 - num_local_tokens)

    def admit(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Record a request that got its blocks; without external tokens nothing changes."""
        if num_external_tokens == 0:
            return
        request_id = request.request_id
        local = self._local.pop(request_id, None)
        if local is None:
            local = request.num_tokens - 1 - num_external_tokens
        self._filled[request_id] = request.num_preemptions
        self._admitted[request_id] = local, num_external_tokens, blocks

    def build_metadata(self, scheduler_output: SchedulerOutput) -> DecodeBenchConnectorMetadata:
        """Plan what the requests admitted since the last call need.

        Blocks that are filled whole need not be zeroed first and are taken off the engine's list
        where its interface allows that.

        Raises:
            PlanError: What the engine said contradicts itself.
        """
        admitted, self._admitted = self._admitted, {}
        if not admitted:
            return _NOTHING
        num_tokens = tuple([external for _, external, _ in admitted.values()])
        counted = self._counted
        counted["num_requests"] += len(admitted)
        counted["num_tokens"] += sum(num_tokens)
        if not self._filling:
            return _NOTHING
        start = time.perf_counter()
        requests = _requests(scheduler_output, admitted)
        plan = self._planner.plan_step(requests)
        counts = plan.block_counts
        counted["num_blocks"] += sum(map(sum, counts))
        counted["num_repeats_merged"] += plan.repeats_merged
        counted["plan_seconds"] += time.perf_counter() - start
        if any(0 in row for row in counts) or logger.isEnabledFor(logging.DEBUG):
            self._report(plan, requests, counts)
        if _MAY_SPARE_ZEROING and scheduler_output.new_block_ids_to_zero:
            self._spare_zeroing(scheduler_output, plan)
        return DecodeBenchConnectorMetadata(plan=plan, num_tokens=num_tokens)

    def finish(self, request: Request) -> None:
        """Forget a request."""
        self._local.pop(request.request_id, None)
        self._filled.pop(request.request_id, None)

    def take_stats(self) -> DecodeBenchConnectorStats | None:
        """Return what was counted since the last call, None if nothing was."""
        if not self._counted["num_requests"]:
            return None
        counted, self._counted = self._counted, _nothing_counted()
        return DecodeBenchConnectorStats(data=counted)

    def _report(
        self, plan: StepPlan, requests: list[_Request], block_counts: tuple[tuple[int, ...], ...]
    ) -> None:
        for request, counts in zip(requests, block_counts, strict=True):
            empty = [group for group in self._filling if not counts[group]]
            if empty and plan.repeats_merged:
                # A block that several requests name stands with the first of them only.
                counts = tuple(len(fill.block_ids) for fill in self._planner.plan(request))
                empty = [group for group in self._filling if not counts[group]]
            request_id, _, external, _ = request
            for group in empty:
                logger.warning(
                    "No block to fill in KV cache group %d (%s) for the %d external tokens of "
                    "request %s",
                    group,
                    plan.groups[group].indexing,
                    external,
                    request_id,
                )
            logger.debug(
                "Request %s: %d external tokens, blocks to fill by KV cache group: %s",
                request_id,
                external,
                counts,
            )

    def _spare_zeroing(self, scheduler_output: SchedulerOutput, plan: StepPlan) -> None:
        in_part = set(plan.block_ids[plan.partials[:, 0]].tolist())
        filled = {
            block for group in self._zeroed for block in plan.group_block_ids(group).tolist()
        } - in_part
        scheduler_output.new_block_ids_to_zero = [
            block for block in scheduler_output.new_block_ids_to_zero if block not in filled
        ] or None


def _nothing_counted() -> dict[str, float]:
    return dict.fromkeys(
        ("num_requests", "num_tokens", "num_blocks", "num_repeats_merged", "plan_seconds"), 0
    )


def _requests(
    scheduler_output: SchedulerOutput, admitted: dict[str, tuple[int, int, KVCacheBlocks]]
) -> list[_Request]:
    """Return the admitted requests with their block tables.

    Most stand in the step's output, where their tables are lists of ids anyway.
    """
    tables = {}
    for new in scheduler_output.scheduled_new_reqs:
        tables[new.req_id] = new.block_ids
    cached = scheduler_output.scheduled_cached_reqs
    # From 0.34 on, resumed requests stand among the new ones.
    if resumed := getattr(cached, "resumed_req_ids", None):
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in resumed:
                tables[request_id] = block_ids
    return [
        (request_id, local, external, tables.get(request_id) or blocks.get_block_ids())
        for request_id, (local, external, blocks) in admitted.items()
    ]
