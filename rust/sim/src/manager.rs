//! The KV-cache manager: block tables over the pool, for groups with and without a window.

use crate::config::GroupKind;
use crate::pool::{BlockId, BlockPool, NULL};
use crate::prefix::{PrefixLookup, window_blocks};
use crate::watch::Watch;

/// A sequence's block tables.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    /// Per group; null where the window has passed.
    blocks: Vec<Vec<BlockId>>,
    /// Per group: leading entries that are cached, or null.
    cached: Vec<u32>,
    /// Per group: leading entries that the prefix cache brought, nulls in front of them counted.
    hits: Vec<usize>,
}

impl Tables {
    /// The block table of each group.
    pub(crate) fn blocks(&self) -> &[Vec<BlockId>] {
        &self.blocks
    }

    /// Per group, the number of leading entries that came from the prefix cache or are null.
    pub(crate) fn hits(&self) -> &[usize] {
        &self.hits
    }
}

/// Allocates blocks for sequences of tokens as vLLM's `KVCacheManager` does.
#[derive(Debug)]
pub(crate) struct Manager {
    pool: BlockPool,
    block_size: u32,
    groups: Vec<GroupKind>,
    lookup: PrefixLookup,
    /// Per group: the blocks of the last lookup.
    found: Vec<Vec<BlockId>>,
}

impl Manager {
    pub(crate) fn new(num_blocks: u32, block_size: u32, groups: &[GroupKind]) -> Self {
        Self {
            pool: BlockPool::new(num_blocks),
            block_size,
            lookup: PrefixLookup::new(block_size, groups),
            found: vec![Vec::new(); groups.len()],
            groups: groups.to_vec(),
        }
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Whether a request that grows from `prompt` to `end` tokens ever needs more blocks than the pool
    /// has, with nothing else running.
    pub(crate) fn fits_alone(&self, prompt: u32, end: u32) -> bool {
        // The need grows with the tokens but where a window moves on by a block, so it peaks at the end
        // or just before one of the windows' last moves.
        let peaks = self.groups.iter().filter_map(|group| match *group {
            GroupKind::Full => None,
            GroupKind::Window(window) => {
                let moves = (end + 1).checked_sub(window)? / self.block_size;
                (window + moves * self.block_size).checked_sub(1)
            }
        });
        let all_blocks = u64::from(self.pool.num_free() + self.pool.num_used());
        peaks.filter(|&peak| (prompt..end).contains(&peak)).chain([end]).all(|tokens| {
            let blocks = tokens.div_ceil(self.block_size);
            let held = |&group| u64::from(blocks - self.skipped(group, tokens - 1).min(blocks));
            self.groups.iter().map(held).sum::<u64>() <= all_blocks
        })
    }

    /// Looks up the longest cached prefix of a sequence of `tokens` tokens, but never all of them: the
    /// last one must be computed for its output. Returns the length in tokens.
    pub(crate) fn find(&mut self, chain: &[u32], tokens: u32) -> u32 {
        self.lookup.longest(&self.pool, chain, tokens - 1, &mut self.found)
    }

    /// Free blocks that admitting a sequence of `tokens` tokens with the prefix found takes, those of the
    /// prefix that are free themselves counted.
    pub(crate) fn blocks_needed(&self, tokens: u32) -> u64 {
        let blocks = tokens.div_ceil(self.block_size) as usize;
        let need = self.groups.iter().zip(&self.found).map(|(&group, found)| {
            let skipped = self.skipped(group, tokens - 1) as usize;
            let new = blocks.saturating_sub(skipped.max(found.len()));
            let kept = found.get(skipped..).unwrap_or_default();
            new + kept.iter().filter(|&&block| self.pool.is_free(block)).count()
        });
        need.sum::<usize>() as u64
    }

    /// Admits a sequence of `tokens` tokens with the prefix found, whose last token is to be computed and
    /// whose others, past the prefix, come from outside. The pool must have the blocks needed.
    pub(crate) fn admit(&mut self, tables: &mut Tables, chain: &[u32], tokens: u32) {
        let computed = tokens - 1;
        tables.blocks.resize_with(self.groups.len(), Vec::new);
        tables.cached.clear();
        tables.hits.clear();
        // All groups' hits first: what one group allocates must not evict what another has found.
        for ((&group, found), table) in self.groups.iter().zip(&self.found).zip(&mut tables.blocks) {
            let skipped = self.skipped(group, computed) as usize;
            table.clear();
            table.resize(skipped, NULL);
            for &block in found.get(skipped..).unwrap_or_default() {
                self.pool.touch(block);
                table.push(block);
            }
            tables.hits.push(table.len());
            tables.cached.push(u32::try_from(table.len()).unwrap_or(u32::MAX));
        }
        // Then the blocks of the external tokens in all groups, and only then that of the last token.
        for (&group, table) in self.groups.iter().zip(&mut tables.blocks) {
            if group != GroupKind::Window(1) {
                extend(&mut self.pool, table, computed.div_ceil(self.block_size));
            }
        }
        for table in &mut tables.blocks {
            extend(&mut self.pool, table, tokens.div_ceil(self.block_size));
        }
        let full = tokens / self.block_size;
        for group in 0..self.groups.len() {
            self.cache(tables, group, full, |i| chain[i as usize]);
        }
    }

    /// Makes room for the last of a running sequence's `tokens` tokens, and returns up to which length
    /// nothing is to be done again; `None` if there are not enough free blocks. `own_block(i)` is the
    /// content of block `i`, past the prompt.
    pub(crate) fn grow(
        &mut self,
        sequence: u32,
        tables: &mut Tables,
        tokens: u32,
        own_block: impl Fn(u32) -> u32,
        watch: &mut impl Watch,
    ) -> Option<u32> {
        self.skip(tables, tokens - 1, |group, blocks| watch.left_window(sequence, group, blocks));
        let blocks = tokens.div_ceil(self.block_size);
        let missing = |table: &Vec<BlockId>| u64::from(blocks).saturating_sub(table.len() as u64);
        let need: u64 = tables.blocks.iter().map(missing).sum();
        if need > u64::from(self.pool.num_free()) {
            return None;
        }
        let full = tokens / self.block_size;
        for group in 0..self.groups.len() {
            let table = &mut tables.blocks[group];
            let len = table.len();
            extend(&mut self.pool, table, blocks);
            if table.len() > len {
                watch.grew(sequence, group, &table[len..]);
            }
        }
        for group in 0..self.groups.len() {
            self.cache(tables, group, full, &own_block);
        }
        let next_moves = self.groups.iter().filter_map(|&group| match group {
            GroupKind::Full => None,
            GroupKind::Window(window) => {
                Some(window + (self.skipped(group, tokens - 1) + 1) * self.block_size)
            }
        });
        let next_block = blocks * self.block_size + 1;
        let next_full = (full + 1) * self.block_size;
        Some(next_moves.fold(next_block.min(next_full), u32::min) - 1)
    }

    /// Gives back all blocks of a sequence that finished after `computed` tokens.
    pub(crate) fn finish(&mut self, tables: &mut Tables, computed: u32) {
        self.skip(tables, computed, |_, _| {});
        self.preempt(tables);
    }

    /// Gives back all blocks of a sequence, the last ones to be taken first.
    pub(crate) fn preempt(&mut self, tables: &mut Tables) {
        for table in &mut tables.blocks {
            self.pool.release(table.drain(..).rev());
        }
    }

    /// Leading blocks of which no token is seen by the one after `computed` tokens.
    fn skipped(&self, group: GroupKind, computed: u32) -> u32 {
        match group {
            GroupKind::Full => 0,
            GroupKind::Window(window) => (computed + 1).saturating_sub(window) / self.block_size,
        }
    }

    /// Gives back the blocks that the windows have passed after `computed` tokens.
    fn skip(&mut self, tables: &mut Tables, computed: u32, mut left: impl FnMut(usize, &[BlockId])) {
        for (group, table) in tables.blocks.iter_mut().enumerate() {
            let end = (self.skipped(self.groups[group], computed) as usize).min(table.len());
            let passed = &mut table[..end];
            let start = passed.iter().rposition(|&block| block == NULL).map_or(0, |i| i + 1);
            let passed = &mut passed[start..];
            if !passed.is_empty() {
                self.pool.release(passed.iter().rev().copied());
                left(group, passed);
                passed.fill(NULL);
            }
        }
    }

    /// Caches the blocks of `group` that became full, up to `full`.
    fn cache(&mut self, tables: &mut Tables, group: usize, full: u32, content: impl Fn(u32) -> u32) {
        let first = tables.cached[group];
        if first >= full {
            return;
        }
        tables.cached[group] = full;
        // A window of one token needs no prefix at all, and vLLM then caches none of its blocks.
        if matches!(self.groups[group], GroupKind::Window(w) if window_blocks(w, self.block_size) == 0)
        {
            return;
        }
        let number = u32::try_from(group).unwrap_or(u32::MAX);
        let blocks = &tables.blocks[group][first as usize..full as usize];
        for (i, &block) in (first..).zip(blocks) {
            if block != NULL {
                self.pool.cache(block, self.lookup.key(content(i), number));
            }
        }
    }
}

/// Appends new blocks up to `len` entries. The caller has checked that there are enough.
fn extend(pool: &mut BlockPool, table: &mut Vec<BlockId>, len: u32) {
    let missing = (len as usize).saturating_sub(table.len());
    table.extend(std::iter::from_fn(|| pool.take()).take(missing));
}

#[cfg(test)]
mod tests;
