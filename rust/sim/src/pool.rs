//! The block pool: who may have which block next, and which block holds what.
//!
//! Behaves as vLLM's `BlockPool` does. A block is in use (its reference count is the number of tables that
//! name it) or free. Free blocks keep their cached content until they are taken again; they are taken in
//! the order of the free queue: first those that came back without cached content, the last come first,
//! then those that were never used, in order of id, then those with cached content, the longest unused
//! first.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

/// Id of a block, in `[0, num_blocks)`. Signed, like the entries of a block table.
pub(crate) type BlockId = i32;

/// Stands in a table for a block that its request does not need.
pub(crate) const NULL: BlockId = 0;

/// Key of a block without cached content.
const NO_KEY: u32 = u32::MAX;

const UNUSED: Block = Block { ref_count: 0, key: NO_KEY, position: 0 };

/// A block pool and its prefix cache, whose keys are small numbers. Every operation takes amortised
/// constant time per block, and memory grows with the blocks ever used, not with the size of the pool.
#[derive(Debug)]
pub(crate) struct BlockPool {
    num_blocks: BlockId,
    num_free: u32,
    /// Free blocks without cached content, the next one last.
    uncached: Vec<BlockId>,
    /// Blocks `fresh..num_blocks` were never used.
    fresh: BlockId,
    /// Free blocks with cached content.
    cached: CachedQueue,
    /// State of the blocks that were ever used, by id.
    blocks: Vec<Block>,
    /// By key, the block that a lookup finds. Never more entries than blocks that were ever used.
    found: FxHashMap<u32, BlockId>,
    /// Rings of the blocks cached under one key, where those are more than one; in order of caching from
    /// the one that is found.
    rings: FxHashMap<BlockId, Links>,
    num_replaced: u64,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    ref_count: u32,
    key: u32,
    /// Position in the queue of cached blocks, if it stands there.
    position: u32,
}

#[derive(Debug, Clone, Copy)]
struct Links {
    prev: BlockId,
    next: BlockId,
}

/// A queue out of whose middle blocks are taken, too. Those leave a gap, and gaps are closed when they
/// are more than what is left: unlike the nodes of a linked list, the blocks to come are known ahead, so
/// that a processor need not wait for each.
#[derive(Debug, Default)]
struct CachedQueue {
    entries: VecDeque<BlockId>,
    gaps: usize,
    /// Positions of the first entry and past the last. They wrap; no queue is that long.
    head: u32,
    tail: u32,
}

/// Gaps that are never worth closing.
const MIN_GAPS: usize = 64;

impl CachedQueue {
    fn push(&mut self, id: BlockId, blocks: &mut [Block]) {
        blocks[slot(id)].position = self.tail;
        self.tail = self.tail.wrapping_add(1);
        self.entries.push_back(id);
    }

    fn pop(&mut self) -> Option<BlockId> {
        while let Some(id) = self.entries.pop_front() {
            self.head = self.head.wrapping_add(1);
            if id != NULL {
                return Some(id);
            }
            self.gaps -= 1;
        }
        None
    }

    fn remove(&mut self, id: BlockId, blocks: &mut [Block]) {
        let offset = blocks[slot(id)].position.wrapping_sub(self.head);
        self.entries[offset as usize] = NULL;
        self.gaps += 1;
        if self.gaps > MIN_GAPS && self.gaps * 2 > self.entries.len() {
            self.entries.retain(|&id| id != NULL);
            self.gaps = 0;
            self.tail = self.head;
            for &id in &self.entries {
                blocks[slot(id)].position = self.tail;
                self.tail = self.tail.wrapping_add(1);
            }
        }
    }
}

fn slot(id: BlockId) -> usize {
    id.unsigned_abs() as usize
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, at least 1 and at most `i32::MAX`. Block 0 is the null block.
    pub(crate) fn new(num_blocks: u32) -> Self {
        let num_blocks = BlockId::try_from(num_blocks).unwrap_or(BlockId::MAX).max(1);
        Self {
            num_blocks,
            num_free: (num_blocks - 1).unsigned_abs(),
            uncached: Vec::new(),
            fresh: 1,
            cached: CachedQueue::default(),
            blocks: vec![UNUSED],
            found: FxHashMap::default(),
            rings: FxHashMap::default(),
            num_replaced: 0,
        }
    }

    /// Number of free blocks.
    pub(crate) fn num_free(&self) -> u32 {
        self.num_free
    }

    /// Number of blocks in use, the null block not counted.
    pub(crate) fn num_used(&self) -> u32 {
        (self.num_blocks - 1).unsigned_abs() - self.num_free
    }

    /// The free blocks, in the order in which they will be taken.
    pub(crate) fn free_blocks(&self) -> Vec<BlockId> {
        let uncached = self.uncached.iter().rev().copied();
        let cached = self.cached.entries.iter().copied().filter(|&id| id != NULL);
        uncached.chain(self.fresh..self.num_blocks).chain(cached).collect()
    }

    /// The blocks with cached content, in order of id.
    pub(crate) fn cached_blocks(&self) -> Vec<BlockId> {
        (0..).zip(&self.blocks).filter(|(_, block)| block.key != NO_KEY).map(|(id, _)| id).collect()
    }

    /// How often a lookup that found a block that was lost finds another one since.
    pub(crate) fn num_replaced(&self) -> u64 {
        self.num_replaced
    }

    /// The block cached first under `key`, of those that still are; [`NULL`] for none.
    #[inline]
    pub(crate) fn find(&self, key: u32) -> BlockId {
        self.found.get(&key).copied().unwrap_or(NULL)
    }

    /// Whether the block is free, so that using it takes it out of the free queue.
    #[inline]
    pub(crate) fn is_free(&self, id: BlockId) -> bool {
        id != NULL && self.blocks[slot(id)].ref_count == 0
    }

    /// Uses a block that a lookup found.
    pub(crate) fn touch(&mut self, id: BlockId) {
        if id == NULL {
            return;
        }
        if self.blocks[slot(id)].ref_count == 0 {
            self.cached.remove(id, &mut self.blocks);
            self.num_free -= 1;
        }
        self.blocks[slot(id)].ref_count += 1;
    }

    /// Takes the next free block, whose cached content is lost; `None` if all are in use.
    pub(crate) fn take(&mut self) -> Option<BlockId> {
        let id = if let Some(id) = self.uncached.pop() {
            id
        } else if self.fresh < self.num_blocks {
            self.fresh += 1;
            self.blocks.push(UNUSED);
            self.fresh - 1
        } else {
            let id = self.cached.pop()?;
            self.forget(id);
            id
        };
        self.num_free -= 1;
        self.blocks[slot(id)].ref_count = 1;
        Some(id)
    }

    /// Caches a block in use, which has no cached content yet, under `key`.
    pub(crate) fn cache(&mut self, id: BlockId, key: u32) {
        self.blocks[slot(id)].key = key;
        let first = *self.found.entry(key).or_insert(id);
        if first == id {
            return;
        }
        let ring = self.rings.entry(first).or_insert(Links { prev: first, next: first });
        let last = std::mem::replace(&mut ring.prev, id);
        if let Some(ring) = self.rings.get_mut(&last) {
            ring.next = id;
        }
        self.rings.insert(id, Links { prev: last, next: first });
    }

    /// Drops one reference to each block; those without any left become free, in this order. Null blocks
    /// are passed over.
    pub(crate) fn release(&mut self, ids: impl Iterator<Item = BlockId>) {
        let before = self.uncached.len();
        for id in ids {
            if id == NULL {
                continue;
            }
            let block = &mut self.blocks[slot(id)];
            block.ref_count -= 1;
            if block.ref_count > 0 {
                continue;
            }
            self.num_free += 1;
            if block.key == NO_KEY {
                self.uncached.push(id);
            } else {
                self.cached.push(id, &mut self.blocks);
            }
        }
        // Before all others, but in order among themselves.
        self.uncached[before..].reverse();
    }

    /// Drops the cached content of a block.
    fn forget(&mut self, id: BlockId) {
        let key = std::mem::replace(&mut self.blocks[slot(id)].key, NO_KEY);
        let Some(found) = self.found.get_mut(&key) else { return };
        let Some(Links { prev, next }) = self.rings.remove(&id) else {
            self.found.remove(&key);
            return;
        };
        if *found == id {
            *found = next;
            self.num_replaced += 1;
        }
        if prev == next {
            self.rings.remove(&next);
            return;
        }
        if let Some(ring) = self.rings.get_mut(&prev) {
            ring.next = next;
        }
        if let Some(ring) = self.rings.get_mut(&next) {
            ring.prev = prev;
        }
    }
}

#[cfg(test)]
mod tests;
