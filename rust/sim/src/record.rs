//! What happens in memory, for whoever writes and checks it.

use decodebench_core::StepPlan;
use rustc_hash::FxHashMap;
use rustc_hash::FxHashSet;

use crate::manager::Tables;
use crate::pool::{BlockId, NULL};
use crate::watch::Watch;

/// One step in which something has to be written or can be checked.
///
/// In this order: the engine's writes of the steps before; then the sequences that were released may be
/// checked, for their blocks are still as they left them; then the fills; then the admitted sequences may
/// be checked.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct FillStep {
    /// Per group, what the engine itself has computed since the last record.
    pub engine_writes: Vec<EngineWrites>,
    /// Sequences that finished or were preempted since the last record, in that order.
    pub released: Vec<Released>,
    /// The blocks to fill, of the admitted sequences in their order.
    pub fills: Fills,
    /// Sequences admitted in this step, in order. May be none.
    pub admitted: Vec<Admitted>,
}

/// The blocks to fill in one step.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Fills {
    /// What the planner selected and checked.
    Interval(StepPlan),
    /// What the old rule selected.
    Leading(LeadingFill),
}

/// The blocks that the old rule selects: the first of each table, as many as the external tokens fill,
/// without null blocks. Unchecked. A block that several sequences of the step select stands with the last
/// of them, which writes it last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LeadingFill {
    groups: Vec<(Vec<i32>, Vec<usize>)>,
    null_blocks_skipped: u64,
}

impl LeadingFill {
    pub(crate) fn new(num_groups: usize) -> Self {
        Self { groups: vec![(Vec::new(), vec![0]); num_groups], null_blocks_skipped: 0 }
    }

    /// Adds a sequence, with the `blocks` leading entries of each of its tables.
    pub(crate) fn push(&mut self, tables: &Tables, blocks: usize) {
        for (table, (ids, ends)) in tables.blocks().iter().zip(&mut self.groups) {
            let leading = &table[..blocks.min(table.len())];
            let before = ids.len();
            ids.extend(leading.iter().filter(|&&block| block != NULL));
            self.null_blocks_skipped += (leading.len() - (ids.len() - before)) as u64;
            ends.push(ids.len());
        }
    }

    /// Number of blocks, in all groups.
    pub(crate) fn len(&self) -> usize {
        self.groups.iter().map(|(ids, _)| ids.len()).sum()
    }

    /// Drops all but the last of the selections of each block.
    pub(crate) fn keep_last(&mut self) {
        for (ids, ends) in &mut self.groups {
            let mut seen = FxHashSet::default();
            let mut keep: Vec<bool> = ids.iter().rev().map(|&id| seen.insert(id)).collect();
            keep.reverse();
            let (mut position, mut kept) = (0, 0);
            for end in ends.iter_mut() {
                kept += keep[position..*end].iter().filter(|&&kept| kept).count();
                position = std::mem::replace(end, kept);
            }
            let mut kept = keep.iter();
            ids.retain(|_| kept.next().copied().unwrap_or(true));
        }
    }

    /// The blocks of `group`, sequence by sequence; none for a group that does not exist.
    #[must_use]
    pub fn block_ids(&self, group: usize) -> &[i32] {
        self.groups.get(group).map_or(&[], |(ids, _)| ids)
    }

    /// Where the blocks of each sequence end in [`LeadingFill::block_ids`], after a leading 0: those of
    /// the step's admitted sequence `i` are `[ends[i], ends[i + 1])`.
    #[must_use]
    pub fn ends(&self, group: usize) -> &[usize] {
        self.groups.get(group).map_or(&[], |(_, ends)| ends)
    }

    pub(crate) fn null_blocks_skipped(&self) -> u64 {
        self.null_blocks_skipped
    }
}

/// A sequence that was admitted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Admitted {
    /// Number of the admission, from 1. A request that resumes after a preemption gets a new one.
    pub sequence: u32,
    /// Tokens that the prefix cache had, a multiple of the block size.
    pub local: u32,
    /// Tokens that come from outside, after the local ones: all others but the last.
    pub external: u32,
    /// Block table of each group, 0 for the null block.
    pub tables: Vec<Vec<i32>>,
}

/// A sequence that finished or was preempted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Released {
    /// Number of the admission.
    pub sequence: u32,
    /// Block table of each group at the end, 0 for the null block.
    pub tables: Vec<Vec<i32>>,
}

/// Token slots of one group that the engine wrote, in order. No slot of the pool stands in two groups of
/// one record.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EngineWrites {
    /// `block * block_size + token % block_size`.
    pub slots: Vec<i64>,
    /// Number of the sequence that each slot was written for.
    pub sequences: Vec<u32>,
}

/// Most slots of one group that a record holds before it is handed over without waiting for an admission.
const MAX_SLOTS: usize = 1 << 18;

/// Collects the record in the making.
#[derive(Debug)]
pub(crate) struct Recorder {
    block_size: u32,
    writes: Vec<EngineWrites>,
    released: Vec<Released>,
    /// Blocks that fell behind a window since the last record, and the group that had them.
    left: FxHashMap<BlockId, usize>,
    /// Whether another group has got one of them, and will write it.
    passed_on: bool,
}

impl Recorder {
    pub(crate) fn new(block_size: u32, num_groups: usize) -> Self {
        let writes = vec![EngineWrites::default(); num_groups];
        Self { block_size, writes, released: Vec::new(), left: FxHashMap::default(), passed_on: false }
    }

    /// Whether the record cannot wait: blocks of a released sequence may be written over from now on, or
    /// a block by another group than before.
    pub(crate) fn is_due(&self) -> bool {
        self.passed_on
            || !self.released.is_empty()
            || self.writes.iter().any(|group| group.slots.len() >= MAX_SLOTS)
    }

    /// Whether there is nothing to record.
    pub(crate) fn is_empty(&self) -> bool {
        self.released.is_empty() && self.writes.iter().all(|group| group.slots.is_empty())
    }

    /// The record so far, with this step's fills.
    pub(crate) fn take(&mut self, fills: Fills, admitted: Vec<Admitted>) -> FillStep {
        self.left.clear();
        self.passed_on = false;
        FillStep {
            engine_writes: self.writes.iter_mut().map(std::mem::take).collect(),
            released: std::mem::take(&mut self.released),
            fills,
            admitted,
        }
    }
}

impl Watch for Recorder {
    fn grew(&mut self, _: u32, group: usize, blocks: &[BlockId]) {
        let other = |block| self.left.get(block).is_some_and(|&before| before != group);
        self.passed_on |= blocks.iter().any(other);
    }

    fn left_window(&mut self, _: u32, group: usize, blocks: &[BlockId]) {
        self.left.extend(blocks.iter().map(|&block| (block, group)));
    }

    fn released(&mut self, sequence: u32, tables: &Tables) {
        self.released.push(Released { sequence, tables: tables.blocks().to_vec() });
    }

    fn computed(&mut self, sequence: u32, position: u32, tables: &Tables) {
        let (index, slot) = ((position / self.block_size) as usize, position % self.block_size);
        for (table, writes) in tables.blocks().iter().zip(&mut self.writes) {
            let block = table.get(index).copied().unwrap_or(NULL);
            if block != NULL {
                writes.slots.push(i64::from(block) * i64::from(self.block_size) + i64::from(slot));
                writes.sequences.push(sequence);
            }
        }
    }
}
