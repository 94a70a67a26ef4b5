//! The manager against one written plainly: real tokens, lists for queues, a map from whole prefixes.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

impl Watch for () {
    fn grew(&mut self, _: u32, _: usize, _: &[BlockId]) {}
    fn left_window(&mut self, _: u32, _: usize, _: &[BlockId]) {}
    fn released(&mut self, _: u32, _: &Tables) {}
    fn computed(&mut self, _: u32, _: u32, _: &Tables) {}
}

type Prefix = (usize, Vec<u16>);

#[derive(Debug)]
struct Plain {
    block_size: usize,
    groups: Vec<GroupKind>,
    queue: Vec<BlockId>,
    ref_counts: Vec<u32>,
    keys: HashMap<BlockId, Prefix>,
    cached: HashMap<Prefix, Vec<BlockId>>,
}

#[derive(Debug, Clone, Default)]
struct PlainTables {
    blocks: Vec<Vec<BlockId>>,
    cached: Vec<usize>,
}

impl Plain {
    fn new(num_blocks: i32, block_size: usize, groups: Vec<GroupKind>) -> Self {
        Self {
            block_size,
            groups,
            queue: (1..num_blocks).collect(),
            ref_counts: vec![0; num_blocks.unsigned_abs() as usize],
            keys: HashMap::new(),
            cached: HashMap::new(),
        }
    }

    fn find(&self, group: usize, text: &[u16], block: usize) -> Option<BlockId> {
        let prefix = text[..(block + 1) * self.block_size].to_vec();
        self.cached.get(&(group, prefix)).and_then(|blocks| blocks.first()).copied()
    }

    /// A prefix of `blocks` blocks is usable if every block that the next token sees is cached, for all
    /// groups of one kind together. Tried from the longest down.
    fn hits(&self, text: &[u16], kind: GroupKind, blocks: usize) -> bool {
        let first = match kind {
            GroupKind::Full => 0,
            GroupKind::Window(1) => return blocks == 0,
            GroupKind::Window(window) => {
                (blocks * self.block_size + 1).saturating_sub(window as usize) / self.block_size
            }
        };
        (0..self.groups.len())
            .filter(|&group| self.groups[group] == kind)
            .all(|group| (first..blocks).all(|block| self.find(group, text, block).is_some()))
    }

    fn longest(&self, text: &[u16]) -> usize {
        let most = (text.len() - 1) / self.block_size;
        (0..=most)
            .rev()
            .find(|&blocks| self.groups.iter().all(|&kind| self.hits(text, kind, blocks)))
            .unwrap_or(0)
    }

    fn skipped(&self, group: usize, computed: usize) -> usize {
        match self.groups[group] {
            GroupKind::Full => 0,
            GroupKind::Window(window) => {
                (computed + 1).saturating_sub(window as usize) / self.block_size
            }
        }
    }

    fn extend(&mut self, table: &mut Vec<BlockId>, len: usize) {
        while table.len() < len {
            let id = self.queue.remove(0);
            if let Some(prefix) = self.keys.remove(&id) {
                self.cached.entry(prefix).or_default().retain(|&other| other != id);
            }
            self.ref_counts[slot(id)] = 1;
            table.push(id);
        }
    }

    fn free(&mut self, ids: &[BlockId]) {
        let (mut first, mut last) = (Vec::new(), Vec::new());
        for &id in ids.iter().filter(|&&id| id != NULL) {
            self.ref_counts[slot(id)] -= 1;
            if self.ref_counts[slot(id)] == 0 {
                if self.keys.contains_key(&id) { &mut last } else { &mut first }.push(id);
            }
        }
        self.queue.splice(0..0, first);
        self.queue.extend(last);
    }

    fn admit(&mut self, text: &[u16]) -> Option<PlainTables> {
        let local = self.longest(text);
        let computed = text.len() - 1;
        let len = text.len().div_ceil(self.block_size);
        let mut tables = PlainTables::default();
        let mut need = 0;
        for group in 0..self.groups.len() {
            let skipped = self.skipped(group, computed);
            let mut table = vec![NULL; skipped];
            for block in skipped..local {
                table.push(self.find(group, text, block).unwrap_or(NULL));
            }
            need += len - table.len();
            need += table.iter().filter(|id| self.queue.contains(id)).count();
            tables.cached.push(table.len());
            tables.blocks.push(table);
        }
        if need > self.queue.len() {
            return None;
        }
        for &id in tables.blocks.iter().flatten().filter(|&&id| id != NULL) {
            self.queue.retain(|&other| other != id);
            self.ref_counts[slot(id)] += 1;
        }
        for (group, table) in tables.blocks.iter_mut().enumerate() {
            if computed > self.skipped_tokens(group, computed) {
                self.extend(table, computed.div_ceil(self.block_size));
            }
        }
        for table in &mut tables.blocks {
            self.extend(table, len);
        }
        self.cache(&mut tables, text);
        Some(tables)
    }

    fn skipped_tokens(&self, group: usize, computed: usize) -> usize {
        match self.groups[group] {
            GroupKind::Full => 0,
            GroupKind::Window(window) => (computed + 1).saturating_sub(window as usize),
        }
    }

    fn cache(&mut self, tables: &mut PlainTables, text: &[u16]) {
        let full = text.len() / self.block_size;
        for group in 0..self.groups.len() {
            for block in tables.cached[group]..full {
                let id = tables.blocks[group][block];
                if id != NULL && self.groups[group] != GroupKind::Window(1) {
                    let prefix = (group, text[..(block + 1) * self.block_size].to_vec());
                    self.keys.insert(id, prefix.clone());
                    self.cached.entry(prefix).or_default().push(id);
                }
            }
            tables.cached[group] = tables.cached[group].max(full);
        }
    }

    fn skip(&mut self, tables: &mut PlainTables, computed: usize) {
        for group in 0..self.groups.len() {
            let end = self.skipped(group, computed).min(tables.blocks[group].len());
            let mut freed = Vec::new();
            for id in tables.blocks[group][..end].iter_mut().rev() {
                if *id != NULL {
                    freed.push(std::mem::replace(id, NULL));
                }
            }
            self.free(&freed);
        }
    }

    fn grow(&mut self, tables: &mut PlainTables, text: &[u16]) -> bool {
        self.skip(tables, text.len() - 1);
        let len = text.len().div_ceil(self.block_size);
        let need: usize = tables.blocks.iter().map(|table| len - table.len()).sum();
        if need > self.queue.len() {
            return false;
        }
        for table in &mut tables.blocks {
            self.extend(table, len);
        }
        self.cache(tables, text);
        true
    }

    fn give_back(&mut self, tables: PlainTables) {
        for table in tables.blocks {
            let reversed: Vec<_> = table.into_iter().rev().collect();
            self.free(&reversed);
        }
    }
}

fn slot(id: BlockId) -> usize {
    id.unsigned_abs() as usize
}

#[derive(Debug, Clone)]
enum Op {
    /// Admit a prompt made of runs of one token each.
    Admit(Vec<(u16, usize)>),
    /// Generate so many tokens.
    Grow(prop::sample::Index, usize),
    Finish(prop::sample::Index),
    Preempt(prop::sample::Index),
}

fn op() -> impl Strategy<Value = Op> {
    let index = || any::<prop::sample::Index>();
    prop_oneof![
        3 => prop::collection::vec((0_u16..3, 1_usize..9), 1..6).prop_map(Op::Admit),
        3 => (index(), 1_usize..12).prop_map(|(index, count)| Op::Grow(index, count)),
        1 => index().prop_map(Op::Finish),
        1 => index().prop_map(Op::Preempt),
    ]
}

fn groups() -> impl Strategy<Value = Vec<GroupKind>> {
    let kind = prop_oneof![
        Just(GroupKind::Full),
        (1_u32..20).prop_map(GroupKind::Window),
        Just(GroupKind::Window(9)),
    ];
    prop::collection::vec(kind, 1..4)
}

struct Running {
    text: Vec<u16>,
    tables: Tables,
    plain: PlainTables,
    quiet_until: u32,
}

/// Numbers the prefixes of a text, so that equal prefixes have equal numbers.
fn chain(numbers: &mut HashMap<Vec<u16>, u32>, text: &[u16], block_size: usize) -> Vec<u32> {
    let blocks = text.len() / block_size;
    let number = |blocks| {
        let next = u32::try_from(numbers.len()).unwrap_or(0);
        *numbers.entry(text[..blocks * block_size].to_vec()).or_insert(next)
    };
    (1..=blocks).map(number).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn allocates_like_the_plain_manager(
        groups in groups(),
        block_size in 1_u32..6,
        num_blocks in 2_u32..60,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let size = block_size as usize;
        let mut manager = Manager::new(num_blocks, block_size, &groups);
        let mut plain = Plain::new(num_blocks.cast_signed(), size, groups);
        let mut numbers = HashMap::new();
        let mut running: Vec<Running> = Vec::new();
        let mut next_token = 100;
        for op in ops {
            match op {
                Op::Admit(runs) => {
                    let text: Vec<u16> =
                        runs.iter().flat_map(|&(token, count)| vec![token; count]).collect();
                    let tokens = u32::try_from(text.len()).unwrap_or(0);
                    let chain = chain(&mut numbers, &text, size);
                    let local = manager.find(&chain, tokens);
                    prop_assert_eq!(local as usize, plain.longest(&text) * size);
                    let fits = manager.blocks_needed(tokens) <= manager.pool().num_free().into();
                    let admitted = plain.admit(&text);
                    prop_assert_eq!(fits, admitted.is_some());
                    if let Some(plain) = admitted {
                        let mut tables = Tables::default();
                        manager.admit(&mut tables, &chain, tokens);
                        running.push(Running { text, tables, plain, quiet_until: tokens });
                    }
                }
                Op::Grow(index, count) if !running.is_empty() => {
                    let index = index.index(running.len());
                    let sequence = &mut running[index];
                    for _ in 0..count {
                        sequence.text.push(next_token);
                        next_token += 1;
                        let tokens = u32::try_from(sequence.text.len()).unwrap_or(0);
                        let grown = plain.grow(&mut sequence.plain, &sequence.text);
                        if tokens > sequence.quiet_until {
                            let chain = chain(&mut numbers, &sequence.text, size);
                            let own_block = |i| chain[i as usize];
                            let quiet =
                                manager.grow(0, &mut sequence.tables, tokens, own_block, &mut ());
                            prop_assert_eq!(quiet.is_some(), grown);
                            sequence.quiet_until = quiet.unwrap_or(tokens - 1);
                        }
                        prop_assert_eq!(sequence.tables.blocks(), &sequence.plain.blocks[..]);
                        if !grown {
                            sequence.text.pop();
                            break;
                        }
                    }
                }
                Op::Finish(index) if !running.is_empty() => {
                    let mut sequence = running.swap_remove(index.index(running.len()));
                    let computed = sequence.text.len();
                    manager.finish(&mut sequence.tables, u32::try_from(computed).unwrap_or(0));
                    plain.skip(&mut sequence.plain, computed);
                    plain.give_back(sequence.plain);
                }
                Op::Preempt(index) if !running.is_empty() => {
                    let mut sequence = running.swap_remove(index.index(running.len()));
                    manager.preempt(&mut sequence.tables);
                    plain.give_back(sequence.plain);
                }
                _ => {}
            }
            for sequence in &running {
                prop_assert_eq!(sequence.tables.blocks(), &sequence.plain.blocks[..]);
            }
            // A block is free exactly if no table names it, and never both.
            let pool = manager.pool();
            prop_assert_eq!(pool.num_free() as usize, plain.queue.len());
            prop_assert_eq!(pool.num_free() + pool.num_used(), num_blocks - 1);
            for (id, &count) in (0..).zip(&plain.ref_counts).skip(1) {
                let tables = running.iter().flat_map(|sequence| sequence.tables.blocks()).flatten();
                let named = tables.filter(|&&block| block == id).count();
                prop_assert_eq!(count as usize, named, "block {}", id);
                if named > 0 {
                    prop_assert!(!pool.is_free(id), "block {}", id);
                }
            }
        }
    }

    #[test]
    fn fits_alone_is_the_largest_need(
        groups in groups(),
        block_size in 1_u32..9,
        num_blocks in 2_u32..40,
        prompt in 1_u32..80,
        growth in 0_u32..60,
    ) {
        let manager = Manager::new(num_blocks, block_size, &groups);
        let plain = Plain::new(num_blocks.cast_signed(), block_size as usize, groups);
        let need = |tokens: usize| -> usize {
            let held = |group| tokens.div_ceil(plain.block_size) - plain.skipped(group, tokens - 1);
            (0..plain.groups.len()).map(held).sum()
        };
        let most = (prompt..=prompt + growth).map(|tokens| need(tokens as usize)).max();
        let fits = most.is_some_and(|most| most < num_blocks as usize);
        prop_assert_eq!(manager.fits_alone(prompt, prompt + growth), fits);
    }
}

#[test]
fn a_window_has_null_blocks_before_it() {
    let mut manager = Manager::new(64, 4, &[GroupKind::Full, GroupKind::Window(8)]);
    let chain: Vec<u32> = (0..7).collect();
    let mut tables = Tables::default();
    // 29 tokens: the last one sees tokens 21 to 28, so blocks 0 to 4 are never needed.
    assert_eq!(manager.find(&chain, 29), 0);
    assert_eq!(manager.blocks_needed(29), 8 + 3);
    manager.admit(&mut tables, &chain, 29);
    assert_eq!(tables.blocks()[0], [1, 2, 3, 4, 5, 6, 7, 10]);
    assert_eq!(tables.blocks()[1], [0, 0, 0, 0, 0, 8, 9, 11]);
    assert_eq!(tables.hits(), [0, 5]);
    // A second prompt finds the two blocks that the window needs after 28 tokens, but not after 24.
    assert_eq!(manager.find(&chain, 29), 28);
    assert_eq!(manager.find(&chain, 28), 0);
}
