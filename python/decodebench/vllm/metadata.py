"""What the scheduler sends to the workers each step."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from decodebench import StepPlan, _core

__all__ = ["DecodeBenchConnectorMetadata", "ReqsToFill"]

ReqsToFill = Mapping[str, tuple[tuple[list[int], ...], int]]
"""Request id to (block ids, one list per KV-cache group; number of external tokens)."""


class DecodeBenchConnectorMetadata(KVConnectorMetadata):
    """The blocks to fill before the step's forward pass.

    It travels as a :class:`decodebench.StepPlan`, a few buffers, and reads as ``reqs_to_fill``. A
    mapping given instead of a plan is taken as it is.

    Attributes:
        plan: The checked plan; None where there is nothing to fill or a mapping was given.
        reqs_to_fill: Request id to (block ids, one list per KV-cache group; number of external
            tokens). A block that several requests of a step name stands with the first of them.
    """

    def __init__(
        self,
        reqs_to_fill: ReqsToFill | None = None,
        *,
        plan: StepPlan | None = None,
        num_tokens: tuple[int, ...] = (),
    ) -> None:
        self.plan = plan
        self._num_tokens = num_tokens
        if reqs_to_fill is not None:
            self.__dict__["reqs_to_fill"] = dict(reqs_to_fill)

    @cached_property
    def reqs_to_fill(self) -> ReqsToFill:  # noqa: D102
        plan = self.plan
        if plan is None:
            return {}
        return {
            request_id: (
                tuple(
                    plan.request_block_ids(group, number).tolist()
                    for group in range(len(plan.groups))
                ),
                num_tokens,
            )
            for number, (request_id, num_tokens) in enumerate(
                zip(plan.request_ids, self._num_tokens, strict=True)
            )
        }

    def __reduce__(self) -> tuple[Any, ...]:
        if self.plan is None:
            return DecodeBenchConnectorMetadata, (self.reqs_to_fill or None,)
        # The plan's own parts rather than the plan: one function for pickle to look up, not two.
        _, parts = self.plan.__reduce__()
        return _restore, (self._num_tokens, *parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(reqs_to_fill={self.reqs_to_fill})"


def _restore(num_tokens: tuple[int, ...], *parts: Any) -> DecodeBenchConnectorMetadata:
    plan = _core._restore_step_plan(*parts)
    return DecodeBenchConnectorMetadata(plan=plan, num_tokens=num_tokens)
