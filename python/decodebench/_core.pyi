"""The Rust core: planning and checking fills, and replaying request traces."""

from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO, Final, Literal, SupportsIndex, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Int32s: TypeAlias = npt.NDArray[np.int32]
_Int64s: TypeAlias = npt.NDArray[np.int64]
_Table: TypeAlias = list[int] | tuple[int, ...] | npt.NDArray[np.integer[Any]] | Buffer
_Request: TypeAlias = tuple[str, SupportsIndex, SupportsIndex, Sequence[_Table]]

__all__ = [
    "FillStep",
    "Group",
    "GroupFill",
    "Ledger",
    "Planner",
    "Replay",
    "StepPlan",
    "Trace",
    "__version__",
    "_restore_step_plan",
]

__version__: Final[str]

@final
class Group:
    """A KV-cache group: how its blocks relate to tokens. Immutable, hashable, picklable.

    ============  =========================================  =============================
    indexing      what its blocks hold                       what a fill selects
    ============  =========================================  =============================
    positional    block i: tokens ``[i*span, (i+1)*span)``   blocks that hold external
                                                             tokens
    state         block i: the recurrent state after its     the same, always whole
                  span
    ring          one buffer per request, not indexed by     every block, with zeros
                  position
    excluded      nothing that comes from outside            none
    ============  =========================================  =============================

    Args:
        indexing: One of the four.
        span: Tokens per block, at least 1, already multiplied by the context-parallel world size
            where the group is sharded. Needed for ``positional`` and ``state``, refused otherwise.

    Raises:
        PlanError: The indexing is unknown, or the span missing, zero, negative or out of place.
    """

    def __new__(
        cls,
        indexing: Literal["positional", "state", "ring", "excluded"],
        span: SupportsIndex | None = None,
    ) -> Group: ...
    @property
    def indexing(self) -> Literal["positional", "state", "ring", "excluded"]:
        """How the blocks relate to tokens."""

    @property
    def span(self) -> int:
        """Tokens per block; 0 for ``ring`` and ``excluded``."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class GroupFill:
    """What one request fills in one KV-cache group."""

    @property
    def start(self) -> int:
        """First table entry that covers the interval."""

    @property
    def end(self) -> int:
        """One past the last table entry that covers the interval."""

    @property
    def block_ids(self) -> _Int32s:
        """Blocks to write, in table order: entries ``[start, end)`` but the null ones."""

    @property
    def head_slot(self) -> int:
        """First slot of entry ``start`` that may be written: those before hold local tokens."""

    @property
    def tail_slot(self) -> int:
        """Slots of entry ``end - 1`` that lie inside the interval.

        0 means all of them, or that the group is not addressed by token.
        """

@final
class Planner:
    """Selects and checks the blocks that requests fill. Immutable; threads may share one.

    A request is a tuple ``(id, local, external, tables)``: its id, the tokens that the scheduler
    reported as already computed, the tokens that come from outside after them, and one block table
    per group. A table is a list or tuple of ints, or a one-dimensional buffer of 32- or 64-bit
    integers such as a NumPy array. Entries past the last external token are not read.

    Args:
        groups: The KV-cache groups that share the block pool.
        num_blocks: Size of the pool, in ``[1, 2**28]``.
        null_block: Table entry that stands for "no block"; never selected. ``None``: there is none.
        strict: Refuse a block that a step selects twice instead of writing it once and counting it.
        exact_tail: Leave the slots after the last external token alone. By default they are written
            too, so that no page keeps stale non-finite bytes: the engine writes them before it
            reads them.

    Raises:
        PlanError: An argument is out of range, or there is no group.
    """

    def __new__(
        cls,
        groups: Iterable[Group],
        num_blocks: SupportsIndex,
        *,
        null_block: int | None = 0,
        strict: bool = False,
        exact_tail: bool = False,
    ) -> Planner: ...
    @property
    def groups(self) -> tuple[Group, ...]:
        """The KV-cache groups."""

    @property
    def num_blocks(self) -> int:
        """Size of the block pool, the null block included."""

    @property
    def null_block(self) -> int | None:
        """Table entry that stands for "no block"."""

    @property
    def strict(self) -> bool:
        """Whether a repeated block is refused."""

    @property
    def exact_tail(self) -> bool:
        """Whether the slots after the last external token are left alone."""

    def plan(self, request: _Request) -> list[GroupFill]:
        """Plan one request: one fill per group, in the planner's order.

        Raises:
            PlanError: The request is malformed or breaks a rule; its ``kind`` says which.
        """

    def plan_step(self, requests: Iterable[_Request], ledger: Ledger | None = None) -> StepPlan:
        """Plan all requests of one scheduler step, each block once.

        The GIL is released while planning. With a ledger, every selected block must have been
        allocated to the request's current admission, which then counts as filled.

        Raises:
            PlanError: A request is malformed or breaks a rule. Nothing is planned then, and the
                ledger is as it was.
        """

@final
class Ledger:
    """Follows who owns which block, from what the engine tells: an independent witness.

    A block is a request's own if it was allocated to its current admission while no other live
    request held it. The ledger belongs to the planner that it is made for.
    """

    def __new__(cls, planner: Planner) -> Ledger: ...
    def admit(self, id: str, tables: Sequence[_Table], hits: Iterable[SupportsIndex]) -> None:
        """A request was admitted with these block tables.

        Args:
            id: The request.
            tables: One block table per group.
            hits: Per group, how many leading table entries the prefix cache supplied, null blocks
                counted. The others were allocated to the request.

        Raises:
            PlanError: It is admitted already, or the tables do not fit the planner.
        """

    def grow(self, id: str, group: SupportsIndex, blocks: _Table) -> None:
        """Blocks were allocated to a live request and appended to its table of ``group``.

        Raises:
            PlanError: The request is not live, or the group or a block does not exist.
        """

    def release(self, id: str, group: SupportsIndex, blocks: _Table) -> None:
        """Blocks left a live request's table of ``group``: its window has passed them.

        Raises:
            PlanError: The request is not live or does not hold the blocks.
        """

    def finish(self, id: str) -> None:
        """A live request finished or was preempted: it holds no block any more.

        Raises:
            PlanError: The request is not live.
        """

@final
class StepPlan:
    """The checked fills of all requests of one scheduler step, each block once.

    Block ids stand group by group and, within a group, request by request. A block that several
    requests named stands with the first of them. Arrays are read-only views of buffers that
    :mod:`pickle` writes as they are. Only a planner, or unpickling, makes one.
    """

    @property
    def num_blocks(self) -> int:
        """Size of the block pool that the plan is for."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """The planner's groups."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests, in the order they were given."""

    @property
    def block_ids(self) -> _Int32s:
        """Every block to write, shape ``[n]``, group by group."""

    @property
    def group_offsets(self) -> _Int32s:
        """Shape ``[groups + 1]``: group g's ids are ``block_ids[offsets[g]:offsets[g + 1]]``."""

    @property
    def block_counts(self) -> tuple[tuple[int, ...], ...]:
        """How many blocks stand with each request, one number per group."""

    @property
    def partials(self) -> _Int32s:
        """Blocks not to be written whole, shape ``[p, 3]``, sorted by position.

        Rows are (position in ``block_ids``, first slot, end slot), the slots half-open and counted
        in tokens of the group's span.
        """

    @property
    def null_blocks_skipped(self) -> int:
        """Null blocks inside the selected ranges."""

    @property
    def repeats_merged(self) -> int:
        """How often a block was named that the step already writes."""

    @property
    def heads_preserved(self) -> int:
        """Blocks that began inside a request's local prefix, whose first slots are kept."""

    def group_block_ids(self, group: SupportsIndex) -> _Int32s:
        """The blocks to write in one group.

        Raises:
            PlanError: There is no such group.
        """

    def request_block_ids(self, group: SupportsIndex, request: SupportsIndex) -> _Int32s:
        """The blocks to write in one group for the request at that place of ``request_ids``.

        Raises:
            PlanError: There is no such group or request.
        """

    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]
    def __reduce__(self) -> tuple[Any, ...]: ...

def _restore_step_plan(
    num_blocks: int,
    null_block: int | None,
    groups: Sequence[tuple[str, int]],
    request_ids: tuple[str, ...],
    block_ids: bytes,
    cell_ends: bytes,
    partials: bytes,
    counts: tuple[int, int, int],
) -> StepPlan: ...

@final
class Trace:
    """A request trace in order of arrival. Immutable.

    What was notable but no reason to refuse it stands in :attr:`notes`.
    """

    @classmethod
    def read_mooncake(cls, file: BinaryIO, name: str, limit: SupportsIndex | None = None) -> Trace:
        """Read a Mooncake trace.

        One JSON object per line: ``timestamp`` (milliseconds), ``input_length``, ``output_length``
        (tokens), and ``hash_ids``, one per 512 tokens, each the hash of the prompt up to the end of
        its block.

        Args:
            file: Anything with ``read(n) -> bytes``, plain or gzip.
            name: What errors call it.
            limit: Read only the first rows, at least 1.

        Raises:
            TraceError: The file cannot be read or a row is refused: file, line and reason.
        """

    @classmethod
    def read(
        cls,
        files: Iterable[tuple[BinaryIO, str]],
        *,
        format: str | None = None,
        hash_block_size: SupportsIndex | None = None,
        time_unit: str | None = None,
        limit: SupportsIndex | None = None,
    ) -> Trace:
        """Read files of one format, one after the other, into a trace.

        Args:
            files: Files with the names that errors give them, each with ``read(n) -> bytes``, plain
                or gzip.
            format: ``mooncake``, ``bailian``, ``azure``, ``burstgpt``, ``weka`` or ``token-ids``;
                recognised from each first line if ``None``.
            hash_block_size: Tokens per hash id; that of the format or of the file if ``None``.
            time_unit: ``ms`` or ``s``; that of the format if ``None``.
            limit: Read only the first requests, at least 1; conversations of ``weka`` whole.

        Raises:
            TraceError: A file cannot be read or a row is refused: file, line and reason.
        """

    def at_speed(self, speed: float) -> Trace:
        """Return the same requests, arriving ``speed`` times as fast.

        Raises:
            TraceError: ``speed`` is no positive finite number, or arrivals move out of range.
        """

    def ideal_hit_tokens(self, block_size: SupportsIndex) -> int:
        """Return the prompt tokens that an infinite prefix cache would serve.

        Per request the tokens under its leading hash ids that an earlier request brought, never the
        whole prompt, rounded down to whole blocks of ``block_size`` tokens, at least 1.

        Raises:
            TraceError: ``block_size`` is out of range.
        """

    def to_mooncake(self) -> str:
        """Return the trace as Mooncake JSON lines, hash ids numbered from 0, times in ms."""

    def requests(self) -> list[tuple[float, int, int]]:
        """Return arrival in ms from the first, prompt and output tokens of each request."""

    @property
    def format(self) -> str | None:
        """What the files were read as by :meth:`read`, else ``None``."""

    @property
    def has_hashes(self) -> bool:
        """Whether the format says which prompts share a prefix."""

    @property
    def time_unit(self) -> str | None:
        """``ms``, ``s`` or ``wall clock``, as read by :meth:`read`, else ``None``."""

    @classmethod
    def conversation(cls, seed: SupportsIndex, requests: SupportsIndex) -> Trace:
        """Make up a trace of multi-turn conversations that share system prompts.

        Args:
            seed: In ``[0, 2**64)``; the same seed makes the same trace.
            requests: How many, at most 100,000.

        Raises:
            TraceError: An argument is out of range.
        """

    def __len__(self) -> int:
        """Number of requests."""

    @property
    def hash_block_size(self) -> int:
        """Tokens that one hash id covers."""

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests."""

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""

    @property
    def notes(self) -> dict[str, int | float]:
        """What was notable.

        ``unhashed``: prompts without hash ids, which share nothing. ``floor_hashed``: prompts whose
        last, partial hash block has no id. ``prefill_only``: requests without output.
        ``out_of_order``: requests that stood after a later one and were sorted. ``shifted_ms``:
        what was taken off every timestamp so that the first is 0.
        """

@final
class Replay:
    """A request trace on its way through a simulated engine, on a virtual clock.

    Args:
        trace: The requests.
        block_size: Tokens per block.
        num_blocks: Blocks of the pool that all groups share, the null block 0 counted.
        groups: KV-cache groups: ``full`` or ``window:TOKENS``.
        max_num_seqs: Most requests that run at once.
        step_ms: Virtual milliseconds of an engine step.
        selection: ``interval``, the planner's, or ``leading``, the first blocks of each table.
        record_memory: Whether :meth:`advance` says what is written and where.
        concurrency: A closed loop of so many clients, at least 1, each of which sends the next
            request when its last one has finished; arrivals in the trace are not looked at.

    Raises:
        TraceError: A setting is out of range.
    """

    def __new__(
        cls,
        trace: Trace,
        *,
        block_size: SupportsIndex,
        num_blocks: SupportsIndex,
        groups: Sequence[str],
        max_num_seqs: SupportsIndex,
        step_ms: float,
        selection: str,
        record_memory: bool,
        concurrency: SupportsIndex | None = None,
    ) -> Replay: ...
    def advance(self, max_steps: int) -> FillStep | None:
        """Run until something is to be written or checked, or for that many engine steps.

        The GIL is released meanwhile.

        Raises:
            PlanError: The planner or its ledger refused what the engine did: a mistake in one of
                them.
        """

    def running(self) -> list[tuple[int, int, int, int, list[_Int32s]]]:
        """Return the requests of the step that was scheduled last, in the engine's order.

        Per request: its number in the trace, in order of arrival from 0; the number of its
        admission, from 1; tokens that the prefix cache had and tokens that came from outside, at
        admission; and one block table per group, 0 for the null block. Requests that finish with
        the step are still among them: the step is executed when the next one is scheduled.
        """

    def waiting(self) -> list[int]:
        """Return the requests that have arrived and do not run, the next one first."""

    def free_blocks(self) -> _Int32s:
        """Return the free blocks, in the order in which they will be taken."""

    def cached_blocks(self) -> _Int32s:
        """Return the blocks that the prefix cache knows, free or not, in order of id."""

    @property
    def done(self) -> bool:
        """Whether every request has finished or was rejected, and everything was returned."""

    def stats(self) -> dict[str, Any]:
        """Return the totals so far. All are deterministic but those of planning time.

        ``requests`` (admitted at least once), ``rejected`` (larger than the pool), ``finished``,
        ``admissions``, ``preemptions``, ``steps``, ``local_tokens`` and ``external_tokens`` (over
        all admissions), ``blocks_selected`` (per group), ``null_blocks_skipped``,
        ``heads_preserved``, ``duplicates_merged``, ``selections_refused`` (those of ``leading``
        that the planner would not allow), ``unhashed``, ``prefill_only``, ``peak_running``,
        ``peak_blocks``, ``virtual_seconds``; ``plan_seconds``, and per admission
        ``plan_p50_seconds`` and ``plan_p99_seconds``.
        """

@final
class FillStep:
    """One engine step in which something is written or can be checked.

    In this order: the engine's own writes since the last one; then the released requests may be
    checked, whose blocks are still as they left them; then the fills; then the admitted requests
    may be checked. The fills have the attributes of a :class:`StepPlan`.
    """

    @property
    def num_blocks(self) -> int:
        """Size of the block pool."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """The KV-cache groups."""

    @property
    def engine_writes(self) -> list[tuple[_Int64s, _Int64s]]:
        """Per group, the slots that the engine wrote, in order, and the admission of each.

        A slot is ``block * block_size + token % block_size``.
        """

    @property
    def released(self) -> list[tuple[int, list[_Int32s]]]:
        """Admissions that finished or were preempted, with their block tables at the end."""

    @property
    def block_ids(self) -> _Int32s:
        """Blocks to fill, as in :attr:`StepPlan.block_ids`."""

    @property
    def group_offsets(self) -> _Int32s:
        """As in :attr:`StepPlan.group_offsets`."""

    @property
    def partials(self) -> _Int32s:
        """As in :attr:`StepPlan.partials`."""

    @property
    def block_sequences(self) -> _Int64s:
        """Beside ``block_ids``, the admission that each block is filled for."""

    @property
    def admitted(self) -> list[tuple[int, int, int, list[_Int32s]]]:
        """Admissions of this step: number, local tokens, external tokens, block tables."""
