//! The longest cached prefix that every group can use.

use crate::config::GroupKind;
use crate::pool::{BlockId, BlockPool, NULL};

/// How to look up prefixes: the groups, those of one kind together, full attention first.
#[derive(Debug)]
pub(crate) struct PrefixLookup {
    block_size: u32,
    num_groups: u32,
    kinds: Vec<(GroupKind, Vec<u32>)>,
}

impl PrefixLookup {
    pub(crate) fn new(block_size: u32, groups: &[GroupKind]) -> Self {
        let mut kinds: Vec<(GroupKind, Vec<u32>)> = Vec::new();
        for (group, &kind) in (0..).zip(groups) {
            match kinds.iter_mut().find(|(other, _)| *other == kind) {
                Some((_, members)) => members.push(group),
                None => kinds.push((kind, vec![group])),
            }
        }
        kinds.sort_by_key(|(kind, _)| *kind != GroupKind::Full);
        let num_groups = u32::try_from(groups.len()).unwrap_or(u32::MAX);
        Self { block_size, num_groups, kinds }
    }

    /// Key of a block in the pool's prefix cache. Every group caches its own block of one content.
    #[inline]
    pub(crate) fn key(&self, content: u32, group: u32) -> u32 {
        content * self.num_groups + group
    }

    /// Puts into `hits` each group's blocks for the longest usable prefix of at most `max_tokens` tokens,
    /// and returns its length in tokens, a multiple of the block size. A group with a window has null
    /// blocks before it.
    ///
    /// As vLLM's hybrid coordinator: every kind in turn accepts the length so far or shortens it, over and
    /// over until none does. With full attention and one window, once is enough.
    pub(crate) fn longest(
        &self,
        pool: &BlockPool,
        chain: &[u32],
        max_tokens: u32,
        hits: &mut [Vec<BlockId>],
    ) -> u32 {
        let max_blocks = (max_tokens / self.block_size) as usize;
        let once =
            self.kinds.len() == 1 || (self.kinds.len() == 2 && self.kinds[0].0 == GroupKind::Full);
        let mut length = max_blocks.min(chain.len());
        let mut full_length = None;
        loop {
            let before = length;
            for (kind, members) in &self.kinds {
                length = match (kind, full_length) {
                    // A shorter prefix of a cached prefix is cached.
                    (GroupKind::Full, Some(full)) => length.min(full),
                    (GroupKind::Full, None) => {
                        let full = self.leading(pool, &chain[..length], members, hits);
                        full_length = Some(full);
                        full
                    }
                    (GroupKind::Window(tokens), _) => {
                        self.windowed(pool, &chain[..length], members, *tokens, hits)
                    }
                };
            }
            if once || length == before {
                break;
            }
        }
        for group in hits.iter_mut() {
            group.truncate(length);
        }
        u32::try_from(length).unwrap_or(u32::MAX) * self.block_size
    }

    /// Full attention: every block from the first on, until one is missing.
    fn leading(
        &self,
        pool: &BlockPool,
        chain: &[u32],
        members: &[u32],
        hits: &mut [Vec<BlockId>],
    ) -> usize {
        let cached =
            |&content: &u32| members.iter().all(|&group| pool.find(self.key(content, group)) != NULL);
        let length = chain.iter().take_while(|content| cached(content)).count();
        for &group in members {
            let found = chain[..length].iter().map(|&content| pool.find(self.key(content, group)));
            let hits = &mut hits[group as usize];
            hits.clear();
            hits.extend(found);
        }
        length
    }

    /// A window: the last run of cached blocks that is long enough for the next token, or else the run
    /// that begins the prompt.
    fn windowed(
        &self,
        pool: &BlockPool,
        chain: &[u32],
        members: &[u32],
        window: u32,
        hits: &mut [Vec<BlockId>],
    ) -> usize {
        for &group in members {
            let hits = &mut hits[group as usize];
            hits.clear();
            hits.resize(chain.len(), NULL);
        }
        let needed = window_blocks(window, self.block_size);
        let mut run = 0;
        let mut length = None;
        for (i, &content) in chain.iter().enumerate().rev() {
            if members.iter().any(|&group| pool.find(self.key(content, group)) == NULL) {
                run = 0;
                continue;
            }
            for &group in members {
                hits[group as usize][i] = pool.find(self.key(content, group));
            }
            run += 1;
            if run >= needed {
                length = Some(i + run);
                break;
            }
        }
        let length = length.unwrap_or(run);
        for &group in members {
            hits[group as usize].truncate(length);
        }
        length
    }
}

/// Blocks that a window reaches back over from a block's start: what a prefix hit must bring.
pub(crate) fn window_blocks(window: u32, block_size: u32) -> usize {
    (window - 1).div_ceil(block_size) as usize
}
