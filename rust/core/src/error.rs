//! Refusals: every broken rule is a variant that carries its numbers.

use std::fmt;

use thiserror::Error;

use crate::pool::Pool;
use crate::range::BlockRange;

/// Where in a request a rule was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// Index of the KV-cache group.
    pub group: usize,
    /// Blocks of the table that were being selected, half-open.
    pub range: BlockRange,
    /// Length of the group's block table.
    pub table_len: usize,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "group {}, blocks {} of a table of {}", self.group, self.range, self.table_len)
    }
}

/// Why the audit ledger does not count a block as the request's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ownership {
    /// `holders` live requests have the block in their tables, and it was not allocated to this one.
    Shared {
        /// Number of live requests that hold the block.
        holders: u32,
    },
    /// Only this request holds the block, but it came out of the prefix cache.
    Cached,
    /// No live request holds the block.
    Unallocated,
}

impl fmt::Display for Ownership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shared { holders } => write!(f, "{holders} live requests hold it"),
            Self::Cached => f.write_str("it came out of the prefix cache"),
            Self::Unallocated => f.write_str("no live request holds it"),
        }
    }
}

/// A rule that a pool, a group, a request or a step broke. Nothing was planned.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The pool has no block, or more than [`Pool::MAX_BLOCKS`].
    #[error("num_blocks {num_blocks} is not in [1, {max}]", max = Pool::MAX_BLOCKS)]
    NumBlocks {
        /// The size that was asked for.
        num_blocks: u32,
    },
    /// A block of a positional or state group must span at least one token.
    #[error("a block span of 0 tokens")]
    ZeroSpan,
    /// A planner without groups has nothing to plan.
    #[error("no KV-cache group")]
    NoGroups,
    /// A request must bring one block table per group.
    #[error("{actual} block tables for {expected} groups")]
    TableCount {
        /// Number of groups.
        expected: usize,
        /// Number of tables.
        actual: usize,
    },
    /// Invariant 1: the end of the interval does not fit 64 bits.
    #[error("local {local} + external {external} tokens overflow")]
    IntervalOverflow {
        /// Tokens the request already has.
        local: u64,
        /// Tokens that come from outside.
        external: u64,
    },
    /// Invariant 1: the interval reaches past the allocated table.
    #[error("{site}: the range ends after the table")]
    RangeOutsideTable {
        /// Group, range and table length.
        site: Site,
    },
    /// Invariant 2: a table entry is not a block of the pool.
    #[error("{site}: entry {index} is block {id}, outside the pool's [0, {num_blocks})")]
    BlockOutsidePool {
        /// Group, range and table length.
        site: Site,
        /// Index of the entry in the table.
        index: usize,
        /// The entry.
        id: i32,
        /// Size of the pool.
        num_blocks: u32,
    },
    /// Invariant 3: a block of the request's own local prefix would be overwritten.
    #[error(
        "{site}: selects block {block}, which holds local prefix tokens \
         (entry {prefix_index} of group {prefix_group})"
    )]
    PrefixBlockSelected {
        /// Group, range and table length.
        site: Site,
        /// The selected block.
        block: i32,
        /// Group in whose prefix the block stands.
        prefix_group: usize,
        /// Index of the block in that group's table.
        prefix_index: usize,
    },
    /// Invariant 4: an external token lies in no selected block.
    #[error("{site}: external token {token} lies in no selected block ({span} tokens a block)")]
    TokenUncovered {
        /// Group, range and table length.
        site: Site,
        /// First token that is not covered.
        token: u64,
        /// Tokens per block.
        span: u32,
    },
    /// Invariant 4, the other way round: a selected block holds no external token.
    #[error("{site}: entry {index} holds no token before {end} ({span} tokens a block)")]
    BlockBeyondInterval {
        /// Group, range and table length.
        site: Site,
        /// Index of the first such entry.
        index: u64,
        /// Exclusive end of the interval.
        end: u64,
        /// Tokens per block.
        span: u32,
    },
    /// Invariant 5: a block belongs to one group.
    #[error("{site}: block {block} is already selected in group {other}")]
    BlockInTwoGroups {
        /// Group, range and table length.
        site: Site,
        /// The block.
        block: i32,
        /// The group that selected it first.
        other: usize,
    },
    /// Invariant 5: the block is already selected in this step, by the same request, or by another while
    /// the planner is strict or the two differ in which of its slots are local.
    #[error("{site}: block {block} is already selected in this step")]
    BlockRepeated {
        /// Group, range and table length.
        site: Site,
        /// The block.
        block: i32,
    },
    /// Invariant 6: a selected block is not the request's own.
    #[error("{site}: block {block} is not this request's alone: {ownership}")]
    NotOwned {
        /// Group, range and table length.
        site: Site,
        /// The block.
        block: i32,
        /// Whose it is.
        ownership: Ownership,
    },
    /// Invariant 7: one fill per admission.
    #[error("already filled since its admission")]
    AlreadyFilled,
    /// A ledger follows the pool and the groups of the planner that it was made for.
    #[error("the ledger belongs to a planner of another pool or other groups")]
    ForeignLedger,
    /// The ledger was never told of the request's admission.
    #[error("not admitted")]
    NotAdmitted,
    /// The ledger was told of an admission while the last one still holds.
    #[error("already admitted")]
    AlreadyAdmitted,
    /// More prefix hits than table entries.
    #[error("group {group}: {hits} prefix-hit entries in a table of {table_len}")]
    HitsOutsideTable {
        /// Index of the group.
        group: usize,
        /// Leading entries said to come from the prefix cache.
        hits: usize,
        /// Length of the table.
        table_len: usize,
    },
    /// The flat arrays of a step plan do not fit together.
    #[error("not a step plan: {what}")]
    Corrupt {
        /// What does not fit.
        what: &'static str,
    },
    /// The ledger was told of a group that does not exist.
    #[error("group {group} of {groups}")]
    NoSuchGroup {
        /// Index that was given.
        group: usize,
        /// Number of groups.
        groups: usize,
    },
    /// The ledger was told that a block left a table that does not hold it.
    #[error("group {group}: block {block} is not in the request's table")]
    NotHeld {
        /// Index of the group.
        group: usize,
        /// The block.
        block: i32,
    },
}

impl PlanError {
    /// Stable name of the broken rule, for programs.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NumBlocks { .. } => "num_blocks",
            Self::ZeroSpan => "zero_span",
            Self::NoGroups => "no_groups",
            Self::TableCount { .. } => "table_count",
            Self::IntervalOverflow { .. } => "interval_overflow",
            Self::RangeOutsideTable { .. } => "range_outside_table",
            Self::BlockOutsidePool { .. } => "block_outside_pool",
            Self::PrefixBlockSelected { .. } => "prefix_block_selected",
            Self::TokenUncovered { .. } => "token_uncovered",
            Self::BlockBeyondInterval { .. } => "block_beyond_interval",
            Self::BlockInTwoGroups { .. } => "block_in_two_groups",
            Self::BlockRepeated { .. } => "block_repeated",
            Self::NotOwned { .. } => "not_owned",
            Self::AlreadyFilled => "already_filled",
            Self::ForeignLedger => "foreign_ledger",
            Self::NotAdmitted => "not_admitted",
            Self::AlreadyAdmitted => "already_admitted",
            Self::HitsOutsideTable { .. } => "hits_outside_table",
            Self::Corrupt { .. } => "corrupt",
            Self::NoSuchGroup { .. } => "no_such_group",
            Self::NotHeld { .. } => "not_held",
        }
    }
}

/// A [`PlanError`] with the request that caused it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("request {request}: {error}")]
pub struct Refusal {
    /// Id of the request.
    pub request: String,
    /// What it broke.
    pub error: PlanError,
}
