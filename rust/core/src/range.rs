//! Runs of block-table entries.

use std::fmt;
use std::num::NonZeroU32;

use crate::interval::TokenInterval;

/// A position in a block table. It is not a [`BlockId`](crate::BlockId): the table maps one to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockIndex(pub(crate) u64);

impl BlockIndex {
    /// The position, from 0.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

/// Entries `[start, end)` of a block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    start: BlockIndex,
    end: BlockIndex,
}

impl BlockRange {
    /// Entries `[start, end)`; an `end` before `start` gives an empty range at `start`.
    #[must_use]
    pub fn new(start: u64, end: u64) -> Self {
        Self { start: BlockIndex(start), end: BlockIndex(end.max(start)) }
    }

    /// The blocks that hold the tokens of `interval`, where block `i` holds tokens
    /// `[i * span, (i + 1) * span)`. An empty interval needs no block, wherever it stands.
    #[must_use]
    pub fn covering(interval: TokenInterval, span: NonZeroU32) -> Self {
        let span = u64::from(span.get());
        let start = interval.start() / span;
        if interval.is_empty() {
            return Self::new(start, start);
        }
        Self::new(start, interval.end().div_ceil(span))
    }

    /// First entry.
    #[must_use]
    pub fn start(self) -> BlockIndex {
        self.start
    }

    /// One past the last entry.
    #[must_use]
    pub fn end(self) -> BlockIndex {
        self.end
    }

    /// Whether the range holds no entry.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// The entries of `table` in this range, or `None` if it ends after the table.
    #[must_use]
    pub fn of(self, table: &[i32]) -> Option<&[i32]> {
        let start = usize::try_from(self.start.0).ok()?;
        let end = usize::try_from(self.end.0).ok()?;
        if self.is_empty() { Some(&[]) } else { table.get(start..end) }
    }
}

impl fmt::Display for BlockRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.start.0, self.end.0)
    }
}
