//! A set of blocks that empties in constant time.

use crate::pool::{BlockId, Pool};

/// One byte per block: it holds the number of the last use that marked the block, so that nothing is
/// cleared between uses but every 255th time. A byte, because the set is walked in the order of the
/// block ids, which may be any: the smaller it is, the more of it stays in cache.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    stamps: Vec<u8>,
    current: u8,
}

/// The blocks marked in one use.
pub(crate) struct Marked<'m> {
    stamps: &'m mut [u8],
    current: u8,
}

impl Marks {
    /// An empty set of the blocks of `pool`.
    pub(crate) fn start(&mut self, pool: Pool) -> Marked<'_> {
        let len = pool.num_blocks() as usize;
        if self.stamps.len() < len {
            // Fresh zeros rather than a resize: the system hands them out as they are touched.
            self.stamps = vec![0; len];
        }
        if let Some(next) = self.current.checked_add(1) {
            self.current = next;
        } else {
            self.stamps.fill(0);
            self.current = 1;
        }
        Marked { stamps: &mut self.stamps[..len], current: self.current }
    }
}

impl Marked<'_> {
    #[inline]
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.stamps[block.index()] == self.current
    }

    /// Whether one of `blocks` is marked. Looks at all of them: it is meant for the case that none is.
    #[inline]
    pub(crate) fn contains_any(&self, blocks: impl Iterator<Item = BlockId>) -> bool {
        blocks.fold(false, |any, block| any | self.contains(block))
    }

    /// Marks `blocks`; returns whether one of them was marked already.
    #[inline]
    pub(crate) fn insert_all(&mut self, blocks: impl Iterator<Item = BlockId>) -> bool {
        let mut any = false;
        for block in blocks {
            let stamp = &mut self.stamps[block.index()];
            any |= *stamp == self.current;
            *stamp = self.current;
        }
        any
    }
}
