//! Who owns which block: an independent witness of the planner.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Ownership, PlanError, Site};
use crate::group::Group;
use crate::plan::FillPlan;
use crate::planner::Planner;
use crate::pool::{BlockId, Entry, Pool};
use crate::range::BlockRange;

/// Follows the block pool through admissions, growth and finishes, and from that alone says whether a
/// selected block is the request's own (invariants 6 and 7 of the design).
///
/// A block is a request's own if it was allocated to its current admission while no other live request
/// held it. A block that a prefix hit brought in is not; that later requests hit it in turn is no harm.
/// The ledger does not know token positions: it takes the number of hits from the engine, and so does
/// not repeat the planner's rule.
#[derive(Debug, Clone)]
pub struct Ledger {
    pool: Pool,
    groups: Arc<[Group]>,
    /// Per block: the owner it was last allocated to and has not left, 0 for none.
    owners: Vec<u64>,
    /// Per block: live requests that hold it, once per table entry.
    holders: Vec<u32>,
    live: HashMap<Box<str>, Live>,
    admissions: u64,
}

#[derive(Debug, Clone)]
struct Live {
    admission: u64,
    filled: bool,
    tables: Vec<Vec<BlockId>>,
}

impl Ledger {
    /// A ledger of `planner`'s pool, with nobody admitted.
    #[must_use]
    pub fn new(planner: &Planner) -> Self {
        let num_blocks = planner.pool().num_blocks() as usize;
        Self {
            pool: planner.pool(),
            groups: planner.shared_groups(),
            owners: vec![0; num_blocks],
            holders: vec![0; num_blocks],
            live: HashMap::new(),
            admissions: 0,
        }
    }

    /// A request was admitted with these block tables. The first `hits[g]` entries of table `g` came out
    /// of the prefix cache, the null blocks among them counted; the others were allocated to it.
    ///
    /// # Errors
    ///
    /// The request is admitted already, the tables do not fit the groups, or an entry is not a block of
    /// the pool. The ledger is then as it was.
    pub fn admit(&mut self, id: &str, tables: &[&[i32]], hits: &[usize]) -> Result<(), PlanError> {
        if self.live.contains_key(id) {
            return Err(PlanError::AlreadyAdmitted);
        }
        let expected = self.groups.len();
        for actual in [tables.len(), hits.len()] {
            if actual != expected {
                return Err(PlanError::TableCount { expected, actual });
            }
        }
        for (group, (table, &hits)) in tables.iter().zip(hits).enumerate() {
            let table_len = table.len();
            if hits > table_len {
                return Err(PlanError::HitsOutsideTable { group, hits, table_len });
            }
            self.check_entries(group, table)?;
        }
        self.admissions += 1;
        let admission = self.admissions;
        let mut held = Vec::with_capacity(expected);
        for (group, (table, &hits)) in tables.iter().zip(hits).enumerate() {
            let (hit, allocated) = table.split_at(hits);
            let mut blocks = Vec::with_capacity(table.len());
            for block in self.pool.blocks(hit) {
                self.holders[block.index()] += 1;
                blocks.push(block);
            }
            self.allocate(self.owner(admission, group), allocated, &mut blocks);
            held.push(blocks);
        }
        self.live.insert(id.into(), Live { admission, filled: false, tables: held });
        Ok(())
    }

    /// Blocks were allocated to a live request and appended to its table of `group`.
    ///
    /// # Errors
    ///
    /// The request is not live, there is no such group, or an entry is not a block of the pool.
    pub fn grow(&mut self, id: &str, group: usize, blocks: &[i32]) -> Result<(), PlanError> {
        self.check_entries(group, blocks)?;
        let Live { admission, tables, .. } = self.live.get_mut(id).ok_or(PlanError::NotAdmitted)?;
        let (admission, groups) = (*admission, self.groups.len());
        let table = tables.get_mut(group).ok_or(PlanError::NoSuchGroup { group, groups })?;
        let mut held = std::mem::take(table);
        self.allocate(self.owner(admission, group), blocks, &mut held);
        if let Some(live) = self.live.get_mut(id) {
            live.tables[group] = held;
        }
        Ok(())
    }

    /// Blocks left a live request's table of `group`, such as those that its window has passed.
    ///
    /// # Errors
    ///
    /// The request is not live, there is no such group, or its table does not hold one of the blocks.
    /// The ledger is then as it was.
    pub fn release(&mut self, id: &str, group: usize, blocks: &[i32]) -> Result<(), PlanError> {
        self.check_entries(group, blocks)?;
        let leaving: Vec<BlockId> = self.pool.blocks(blocks).collect();
        let live = self.live.get_mut(id).ok_or(PlanError::NotAdmitted)?;
        let groups = self.groups.len();
        let table = live.tables.get_mut(group).ok_or(PlanError::NoSuchGroup { group, groups })?;
        let kept = without(table, &leaving)
            .map_err(|block| PlanError::NotHeld { group, block: block.get() })?;
        *table = kept;
        let admission = live.admission;
        let owner = self.owner(admission, group);
        for block in leaving {
            self.leave(owner, block);
        }
        Ok(())
    }

    /// A live request finished, or was preempted: it holds no block any more.
    ///
    /// # Errors
    ///
    /// The request is not live.
    pub fn finish(&mut self, id: &str) -> Result<(), PlanError> {
        let live = self.live.remove(id).ok_or(PlanError::NotAdmitted)?;
        for (group, table) in live.tables.into_iter().enumerate() {
            let owner = self.owner(live.admission, group);
            for block in table {
                self.leave(owner, block);
            }
        }
        Ok(())
    }

    /// Whether the ledger's pool and groups are `planner`'s.
    pub(crate) fn follows(&self, planner: &Planner) -> bool {
        self.pool == planner.pool() && *self.groups == *planner.groups()
    }

    /// Invariants 6 and 7 for one request's fill.
    pub(crate) fn check(&self, id: &str, fill: &FillPlan<'_>) -> Result<(), PlanError> {
        let live = self.live.get(id).ok_or(PlanError::NotAdmitted)?;
        if live.filled {
            return Err(PlanError::AlreadyFilled);
        }
        for (index, group) in fill.groups().iter().enumerate() {
            let owner = self.owner(live.admission, index);
            for block in group.block_ids() {
                if self.owners[block.index()] != owner {
                    let ownership = match self.holders[block.index()] {
                        0 => Ownership::Unallocated,
                        1 => Ownership::Cached,
                        holders => Ownership::Shared { holders },
                    };
                    let (site, block) = (group.site(), block.get());
                    return Err(PlanError::NotOwned { site, block, ownership });
                }
            }
        }
        Ok(())
    }

    pub(crate) fn set_filled(&mut self, id: &str) {
        if let Some(live) = self.live.get_mut(id) {
            live.filled = true;
        }
    }

    /// The number that stands for a group's table of an admission.
    fn owner(&self, admission: u64, group: usize) -> u64 {
        admission * self.groups.len() as u64 + group as u64
    }

    /// A block leaves one entry of a table.
    fn leave(&mut self, owner: u64, block: BlockId) {
        self.holders[block.index()] -= 1;
        if self.owners[block.index()] == owner {
            self.owners[block.index()] = 0;
        }
    }

    fn allocate(&mut self, owner: u64, entries: &[i32], table: &mut Vec<BlockId>) {
        for block in self.pool.blocks(entries) {
            let holders = &mut self.holders[block.index()];
            if *holders == 0 {
                self.owners[block.index()] = owner;
            }
            *holders += 1;
            table.push(block);
        }
    }

    fn check_entries(&self, group: usize, entries: &[i32]) -> Result<(), PlanError> {
        let outside = |&raw: &i32| matches!(self.pool.entry(raw), Entry::Outside);
        let Some(index) = entries.iter().position(outside) else { return Ok(()) };
        let range = BlockRange::new(0, entries.len() as u64);
        Err(PlanError::BlockOutsidePool {
            site: Site { group, range, table_len: entries.len() },
            index,
            id: entries[index],
            num_blocks: self.pool.num_blocks(),
        })
    }
}

/// Most blocks that are looked for one by one, from the front of the table, where a window leaves them.
const FEW: usize = 16;

/// `table` without one entry for each of `leaving`, or the first that it does not hold.
fn without(table: &[BlockId], leaving: &[BlockId]) -> Result<Vec<BlockId>, BlockId> {
    let mut kept = table.to_vec();
    if leaving.len() <= FEW {
        for block in leaving {
            let index = kept.iter().position(|held| held == block).ok_or(*block)?;
            kept.remove(index);
        }
        return Ok(kept);
    }
    let mut counts: HashMap<BlockId, usize> = HashMap::new();
    for &block in leaving {
        *counts.entry(block).or_default() += 1;
    }
    kept.retain(|block| match counts.get_mut(block) {
        Some(count) if *count > 0 => {
            *count -= 1;
            false
        }
        _ => true,
    });
    leaving.iter().find(|block| counts[*block] > 0).map_or(Ok(kept), |block| Err(*block))
}
