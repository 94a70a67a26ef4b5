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
            self.stamps = vec![0; self.stamps.len()];
            self.current = 1;
        }
        Marked { stamps: &mut self.stamps[..len], current: self.current }
    }
}

/// Ids are looked at in runs of so many.
const RUN: usize = 32;

impl Marked<'_> {
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.stamps[block.index()] == self.current
    }

    /// Whether one of the blocks is marked. Looks at all of them: it is meant for the case that none is.
    pub(crate) fn meets(&self, block_ids: &[i32]) -> bool {
        let stamp = |id: &i32| self.stamps[id.cast_unsigned() as usize];
        block_ids.iter().fold(false, |any, id| any | (stamp(id) == self.current))
    }

    /// Marks blocks of the pool; returns whether one of them was marked already.
    pub(crate) fn insert_all(&mut self, block_ids: &[i32]) -> bool {
        let mut any = false;
        let (runs, rest) = block_ids.as_chunks::<RUN>();
        for run in runs {
            // A fresh pool hands out ascending ids: their marks are one piece of memory.
            let first = run[0].cast_unsigned() as usize;
            any |= match self.stamps.get_mut(first..first + RUN) {
                Some(stamps) if ascends(run) => mark_run(stamps, self.current),
                _ => self.insert_each(run),
            };
        }
        any | self.insert_each(rest)
    }

    #[inline]
    fn insert_each(&mut self, block_ids: &[i32]) -> bool {
        let mut any = false;
        for id in block_ids {
            let stamp = &mut self.stamps[id.cast_unsigned() as usize];
            any |= *stamp == self.current;
            *stamp = self.current;
        }
        any
    }
}

/// Whether the ids are consecutive. Looks at all of them, without a branch for each.
#[inline]
fn ascends(run: &[i32; RUN]) -> bool {
    let mut next = run[0];
    let mut differing = 0;
    for id in run {
        differing |= id ^ next;
        next = next.wrapping_add(1);
    }
    differing == 0
}

#[inline]
fn mark_run(stamps: &mut [u8], current: u8) -> bool {
    let any = stamps.iter().fold(false, |any, &stamp| any | (stamp == current));
    stamps.fill(current);
    any
}
