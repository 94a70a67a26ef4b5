//! The block pool, as far as planning needs to know it.

use crate::error::PlanError;

/// A block of the pool that may be written: in range and not the null block.
///
/// Only a [`Pool`] makes one, from a table entry; a position in a table is a
/// [`BlockIndex`](crate::BlockIndex).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockId(i32);

impl BlockId {
    /// The id, in `[0, num_blocks)`.
    #[must_use]
    pub fn get(self) -> i32 {
        self.0
    }

    pub(crate) fn index(self) -> usize {
        self.0.cast_unsigned() as usize
    }
}

/// What a block-table entry stands for.
pub(crate) enum Entry {
    Null,
    Block(BlockId),
    Outside,
}

/// Size of the block pool and the id that stands for "no block".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    num_blocks: u32,
    null_block: Option<i32>,
}

impl Pool {
    /// A pool of blocks `[0, num_blocks)`.
    ///
    /// `null_block` is the table entry that stands for a block a request does not need, such as 0 in
    /// vLLM or -1 elsewhere; it is never selected. `None`: every entry is a real block.
    ///
    /// # Errors
    ///
    /// [`PlanError::NumBlocks`] if `num_blocks` is 0 or above [`Pool::MAX_BLOCKS`].
    pub fn new(num_blocks: u32, null_block: Option<i32>) -> Result<Self, PlanError> {
        if (1..=Self::MAX_BLOCKS).contains(&num_blocks) {
            Ok(Self { num_blocks, null_block })
        } else {
            Err(PlanError::NumBlocks { num_blocks })
        }
    }

    /// Largest pool. Checking a step takes a byte per block of the pool, auditing it 12 more, so that a
    /// size that is a mistake must not be taken at its word; this one is a hundred times any real pool.
    pub const MAX_BLOCKS: u32 = 1 << 28;

    /// Number of blocks, the null block included.
    #[must_use]
    pub fn num_blocks(self) -> u32 {
        self.num_blocks
    }

    /// The table entry that stands for "no block".
    #[must_use]
    pub fn null_block(self) -> Option<i32> {
        self.null_block
    }

    /// Number of null entries, and whether an entry is neither null nor a block of the pool. Without a
    /// branch per entry, so that it runs at the speed of memory.
    pub(crate) fn survey(self, entries: &[i32]) -> (usize, bool) {
        let (has_null, null) = (self.null_block.is_some(), self.null_block.unwrap_or(0));
        let (mut null_blocks, mut outside) = (0, false);
        // Chunks keep the count in 32 bits, which vectorises twice as wide.
        for chunk in entries.chunks(1 << 16) {
            let mut nulls = 0_u32;
            for &raw in chunk {
                let is_null = has_null & (raw == null);
                nulls += u32::from(is_null);
                outside |= !is_null & (raw.cast_unsigned() >= self.num_blocks);
            }
            null_blocks += nulls as usize;
        }
        (null_blocks, outside)
    }

    /// The blocks among `entries`.
    #[inline]
    pub(crate) fn blocks(self, entries: &[i32]) -> impl Iterator<Item = BlockId> + use<'_> {
        entries.iter().filter_map(move |&raw| match self.entry(raw) {
            Entry::Block(block) => Some(block),
            Entry::Null | Entry::Outside => None,
        })
    }

    #[inline]
    pub(crate) fn entry(self, raw: i32) -> Entry {
        if self.null_block == Some(raw) {
            Entry::Null
        } else if raw.cast_unsigned() < self.num_blocks {
            Entry::Block(BlockId(raw))
        } else {
            Entry::Outside
        }
    }
}
