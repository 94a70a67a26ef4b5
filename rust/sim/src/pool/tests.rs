//! The pool against one written plainly: lists for queues, a map for the cache.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Default)]
struct Plain {
    queue: Vec<BlockId>,
    ref_counts: HashMap<BlockId, u32>,
    keys: HashMap<BlockId, u32>,
    cached: HashMap<u32, Vec<BlockId>>,
}

impl Plain {
    fn new(num_blocks: i32) -> Self {
        Self { queue: (1..num_blocks).collect(), ..Self::default() }
    }

    fn find(&self, key: u32) -> BlockId {
        self.cached.get(&key).and_then(|blocks| blocks.first()).copied().unwrap_or(NULL)
    }

    fn take(&mut self) -> Option<BlockId> {
        if self.queue.is_empty() {
            return None;
        }
        let id = self.queue.remove(0);
        if let Some(key) = self.keys.remove(&id) {
            self.cached.entry(key).or_default().retain(|&other| other != id);
        }
        self.ref_counts.insert(id, 1);
        Some(id)
    }

    fn touch(&mut self, id: BlockId) {
        if self.ref_counts[&id] == 0 {
            self.queue.retain(|&other| other != id);
        }
        *self.ref_counts.entry(id).or_default() += 1;
    }

    fn cache(&mut self, id: BlockId, key: u32) {
        self.keys.insert(id, key);
        self.cached.entry(key).or_default().push(id);
    }

    fn release(&mut self, ids: &[BlockId]) {
        let (mut first, mut last) = (Vec::new(), Vec::new());
        for &id in ids {
            let count = self.ref_counts.entry(id).or_default();
            *count -= 1;
            if *count == 0 {
                if self.keys.contains_key(&id) { &mut last } else { &mut first }.push(id);
            }
        }
        self.queue.splice(0..0, first);
        self.queue.extend(last);
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// Take so many blocks and cache some of them.
    Take(u32, Vec<Option<u32>>),
    /// Use the block found under a key.
    Touch(u32),
    /// Give back blocks in use, by index among the references held.
    Release(Vec<prop::sample::Index>),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0_u32..6, prop::collection::vec(prop::option::of(0_u32..12), 6))
            .prop_map(|(count, keys)| Op::Take(count, keys)),
        (0_u32..12).prop_map(Op::Touch),
        prop::collection::vec(any::<prop::sample::Index>(), 0..6).prop_map(Op::Release),
    ]
}

proptest! {
    #[test]
    fn decides_like_the_plain_pool(
        num_blocks in 1_i32..24,
        ops in prop::collection::vec(op(), 0..300),
    ) {
        let mut pool = BlockPool::new(num_blocks.unsigned_abs());
        let mut plain = Plain::new(num_blocks);
        let mut held = Vec::new();
        for op in ops {
            match op {
                Op::Take(count, keys) => for key in keys.into_iter().take(count as usize) {
                    let id = pool.take();
                    prop_assert_eq!(id, plain.take());
                    let Some(id) = id else { continue };
                    held.push(id);
                    if let Some(key) = key {
                        pool.cache(id, key);
                        plain.cache(id, key);
                    }
                },
                Op::Touch(key) => {
                    let id = pool.find(key);
                    if id != NULL {
                        pool.touch(id);
                        plain.touch(id);
                        held.push(id);
                    }
                }
                Op::Release(indices) => {
                    let mut leaving = Vec::new();
                    for index in indices {
                        if !held.is_empty() {
                            leaving.push(held.swap_remove(index.index(held.len())));
                        }
                    }
                    pool.release(leaving.iter().copied());
                    plain.release(&leaving);
                }
            }
            for key in 0..12 {
                prop_assert_eq!(pool.find(key), plain.find(key), "key {}", key);
            }
            let free = plain.queue.len();
            prop_assert_eq!(pool.num_free() as usize, free);
            prop_assert_eq!(pool.num_free() + pool.num_used(), num_blocks.unsigned_abs() - 1);
            for id in 1..pool.fresh {
                prop_assert_eq!(pool.is_free(id), plain.queue.contains(&id), "block {}", id);
                let held = held.iter().filter(|&&other| other == id).count();
                prop_assert_eq!(pool.blocks[slot(id)].ref_count as usize, held, "block {}", id);
            }
        }
        // What is left comes in the same order.
        while let Some(id) = plain.take() {
            prop_assert_eq!(pool.take(), Some(id));
        }
        prop_assert_eq!(pool.take(), None);
    }
}

#[test]
fn many_gaps_are_closed() {
    let mut pool = BlockPool::new(1000);
    let blocks: Vec<_> = (0..999).filter_map(|_| pool.take()).collect();
    for (key, &block) in (0..).zip(&blocks) {
        pool.cache(block, key);
    }
    pool.release(blocks.iter().copied());
    for _ in 0..50 {
        for &block in &blocks[..900] {
            pool.touch(block);
        }
        pool.release(blocks[..900].iter().copied());
    }
    assert!(pool.cached.entries.len() <= 3 * 999, "{}", pool.cached.entries.len());
    assert_eq!(pool.num_free(), 999);
    assert_eq!(pool.take(), Some(blocks[900]));
}
