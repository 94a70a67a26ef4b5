//! A memory of tags, to see whether fills write what they should and nothing else.

use std::collections::HashMap;
use std::sync::Arc;

use decodebench_sim::{
    Admitted, Advance, FillStep, Fills, Released, Replay, ReplayConfig, Stats, Trace,
};

/// Who wrote a slot: a sequence, and whether by fill.
type Tag = (u32, bool);

#[derive(Debug, Default)]
pub struct Memory {
    block_size: usize,
    slots: Vec<Tag>,
    /// What each live sequence must find, by group and position.
    live: HashMap<u32, Live>,
    checked: u64,
    overwritten: u64,
    unfilled: u64,
    admitted: u64,
    released: u64,
}

#[derive(Debug)]
struct Live {
    admitted: Admitted,
    /// Tags of the local tokens, once the engine has written all of them.
    local: Option<Vec<Vec<Tag>>>,
    computed: usize,
}

impl Memory {
    /// The memory after a whole replay, with everything checked on the way.
    pub fn after(trace: Trace, config: ReplayConfig) -> (Self, Stats) {
        let block_size = config.block_size as usize;
        let mut memory = Self {
            block_size,
            slots: vec![(0, false); config.num_blocks as usize * block_size],
            ..Self::default()
        };
        let mut replay = Replay::new(Arc::new(trace), config).expect("a good config");
        loop {
            match replay.advance(10).expect("no refusal") {
                Advance::Fill(step) => memory.apply(&step),
                Advance::Done => break,
                _ => {}
            }
        }
        (memory, replay.stats())
    }

    pub fn wrong(&self) -> u64 {
        self.overwritten + self.unfilled
    }

    /// Shared tokens that somebody else wrote over.
    pub fn overwritten(&self) -> u64 {
        self.overwritten
    }

    /// External tokens without the sequence's own fill.
    pub fn unfilled(&self) -> u64 {
        self.unfilled
    }

    pub fn checked(&self) -> u64 {
        self.checked
    }

    /// Sequences admitted and released.
    pub fn sequences(&self) -> (u64, u64) {
        (self.admitted, self.released)
    }

    fn apply(&mut self, step: &FillStep) {
        for group in &step.engine_writes {
            for (&slot, &sequence) in group.slots.iter().zip(&group.sequences) {
                self.slots[usize::try_from(slot).expect("a slot")] = (sequence, false);
            }
        }
        for &sequence in &step.engine_writes[0].sequences {
            self.live.get_mut(&sequence).expect("live").computed += 1;
        }
        self.remember_local();
        for released in &step.released {
            self.released += 1;
            self.check_released(released);
        }
        self.fill(step);
        for admitted in &step.admitted {
            self.admitted += 1;
            self.check_external(admitted, &admitted.tables);
            let live = Live { admitted: admitted.clone(), local: None, computed: 0 };
            assert!(self.live.insert(admitted.sequence, live).is_none());
        }
    }

    /// Tags of what new sequences share. Only now, since in the step that admitted them their prefix
    /// may have got its last token.
    fn remember_local(&mut self) {
        let (slots, block_size) = (&self.slots, self.block_size);
        for live in self.live.values_mut().filter(|live| live.local.is_none()) {
            let local = live.admitted.local as usize;
            let tag = |table: &Vec<i32>, position| slots[slot(table, position, block_size)];
            let tags = |table| (0..local).map(|position| tag(table, position)).collect();
            live.local = Some(live.admitted.tables.iter().map(tags).collect());
        }
    }

    fn fill(&mut self, step: &FillStep) {
        let sequences: Vec<u32> = step.admitted.iter().map(|admitted| admitted.sequence).collect();
        match &step.fills {
            Fills::Interval(plan) => {
                assert_eq!(plan.num_requests(), sequences.len());
                let mut parts: HashMap<usize, _> =
                    plan.partials().iter().map(|part| (part.position, part.slots.clone())).collect();
                for (cell, ends) in plan.cell_ends().windows(2).enumerate() {
                    for position in ends[0]..ends[1] {
                        let block = plan.all_block_ids()[position];
                        let part = parts.remove(&position).map(|p| p.start as usize..p.end as usize);
                        let part = part.unwrap_or(0..self.block_size);
                        self.write(block, part, sequences[cell % sequences.len()]);
                    }
                }
            }
            Fills::Leading(fill) => {
                for group in 0..step.engine_writes.len() {
                    for (ends, &sequence) in fill.ends(group).windows(2).zip(&sequences) {
                        for &block in &fill.block_ids(group)[ends[0]..ends[1]] {
                            self.write(block, 0..self.block_size, sequence);
                        }
                    }
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, block: i32, part: std::ops::Range<usize>, sequence: u32) {
        assert_ne!(block, 0);
        let start = usize::try_from(block).expect("a block") * self.block_size;
        self.slots[start..][part].fill((sequence, true));
    }

    fn check_released(&mut self, released: &Released) {
        let live = self.live.remove(&released.sequence).expect("live");
        self.check_external(&live.admitted, &released.tables);
        let local = live.local.expect("at least one step was run");
        for (table, tags) in released.tables.iter().zip(&local) {
            for (position, &tag) in tags.iter().enumerate() {
                let slot = slot(table, position, self.block_size);
                if slot >= self.block_size {
                    self.checked += 1;
                    self.overwritten += u64::from(self.slots[slot] != tag);
                }
            }
            let first = (live.admitted.local + live.admitted.external) as usize;
            for position in first..first + live.computed {
                let slot = slot(table, position, self.block_size);
                if slot >= self.block_size {
                    self.checked += 1;
                    self.overwritten += u64::from(self.slots[slot] != (released.sequence, false));
                }
            }
        }
    }

    fn check_external(&mut self, admitted: &Admitted, tables: &[Vec<i32>]) {
        let local = admitted.local as usize;
        for table in tables {
            for position in local..local + admitted.external as usize {
                let slot = slot(table, position, self.block_size);
                if slot >= self.block_size {
                    self.checked += 1;
                    self.unfilled += u64::from(self.slots[slot] != (admitted.sequence, true));
                }
            }
        }
    }
}

/// Index of a token's slot; below the block size, those of the null block, where there is none.
fn slot(table: &[i32], position: usize, block_size: usize) -> usize {
    let block = usize::try_from(table[position / block_size]).expect("a block");
    block * block_size + position % block_size
}
