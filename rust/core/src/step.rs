//! All fills of one scheduler step, each block once.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use crate::error::PlanError;
use crate::group::Group;
use crate::marks::Marked;
use crate::plan::{FillPlan, GroupFill};
use crate::planner::{Planner, PlannerOptions, Scratch};
use crate::pool::{BlockId, Pool};

/// A block of a step that is not to be written whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partial {
    /// Position of the block in [`StepPlan::all_block_ids`].
    pub position: usize,
    /// Token slots of the block to write, half-open.
    pub slots: Range<u32>,
}

/// The fills of all requests of one scheduler step.
///
/// Block ids stand group by group and, within a group, request by request; no block stands twice. A block
/// that several requests named stands with the first of them, and its written slots are the union of
/// theirs; where that is not one run, the repeat is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepPlan {
    groups: Arc<[Group]>,
    num_requests: usize,
    block_ids: Vec<BlockId>,
    /// End of cell `group * num_requests + request`, after a leading 0.
    cell_ends: Vec<usize>,
    partials: Vec<Partial>,
    null_blocks_skipped: u64,
    repeats_merged: u64,
    heads_preserved: u64,
}

impl StepPlan {
    /// Merges checked fills; the index of the fill stands beside an error.
    pub(crate) fn merge(
        planner: &Planner,
        scratch: &mut Scratch,
        fills: &[FillPlan<'_>],
    ) -> Result<Self, (usize, PlanError)> {
        let groups = planner.shared_groups();
        let blocks = || fills.iter().flat_map(FillPlan::groups);
        let mut block_ids = std::mem::take(&mut scratch.spare);
        block_ids.clear();
        block_ids.reserve(blocks().map(GroupFill::len).sum());
        let mut cell_ends = Vec::with_capacity(groups.len() * fills.len() + 1);
        cell_ends.push(0);
        let mut merged = Merged { block_ids, cell_ends, partials: Vec::new() };
        let exact_tail = planner.options().exact_tail;
        let mut taken = scratch.step.start(planner.pool());
        let repeats_merged = if merged.add_distinct(exact_tail, &mut taken, groups.len(), fills) {
            0
        } else {
            merged.add_repeating(planner.options(), groups.len(), fills)?
        };
        let heads = blocks().filter(|fill| fill.head_slot() > 0 && fill.first().is_some());
        Ok(Self {
            groups,
            num_requests: fills.len(),
            null_blocks_skipped: blocks().map(|fill| fill.null_blocks() as u64).sum(),
            repeats_merged,
            heads_preserved: heads.count() as u64,
            block_ids: merged.block_ids,
            cell_ends: merged.cell_ends,
            partials: merged.partials,
        })
    }

    pub(crate) fn into_block_ids(self) -> Vec<BlockId> {
        self.block_ids
    }

    /// Checks flat arrays that came from elsewhere, such as a pickle, before they count as a step plan:
    /// ids inside the pool, cell ends in order, partial blocks in order and inside their group's span.
    ///
    /// # Errors
    ///
    /// [`PlanError::Corrupt`] with what does not fit.
    pub fn check_parts(
        num_blocks: u32,
        groups: &[Group],
        num_requests: usize,
        block_ids: impl ExactSizeIterator<Item = i32>,
        cell_ends: &[i32],
        partials: &[i32],
    ) -> Result<(), PlanError> {
        let check = |what, ok: bool| if ok { Ok(()) } else { Err(PlanError::Corrupt { what }) };
        let index = |number: i32| usize::try_from(number).unwrap_or(usize::MAX);
        let num_blocks = Pool::new(num_blocks, None)?.num_blocks();
        let num_ids = block_ids.len();
        let outside = block_ids.fold(false, |any, id| any | (id.cast_unsigned() >= num_blocks));
        check("a block id outside the pool", !outside)?;
        let cells = groups.len().checked_mul(num_requests).and_then(|cells| cells.checked_add(1));
        check("the number of cells", cells == Some(cell_ends.len()))?;
        check("cells out of order", cell_ends.is_sorted())?;
        let bounds = (cell_ends.first().copied(), cell_ends.last().copied().map(index));
        check("cells that do not cover the ids", bounds == (Some(0), Some(num_ids)))?;
        check("partial blocks that are not rows of 3", partials.len().is_multiple_of(3))?;
        let mut next = 0;
        for row in partials.chunks_exact(3) {
            let (position, first, end) = (index(row[0]), row[1], row[2]);
            check("partial blocks out of order", (next..num_ids).contains(&position))?;
            next = position + 1;
            let cell = cell_ends.partition_point(|&end| index(end) <= position).saturating_sub(1);
            let span = match groups.get(cell / num_requests.max(1)) {
                Some(Group::Positional { span }) => span.get(),
                _ => 0,
            };
            let inside = 0 <= first && first < end && end.cast_unsigned() <= span;
            check("a partial block's slots", inside)?;
        }
        Ok(())
    }

    /// The planner's groups.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Number of requests in the step.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.num_requests
    }

    /// Every block to write, group by group.
    #[must_use]
    pub fn all_block_ids(&self) -> &[BlockId] {
        &self.block_ids
    }

    /// Where each request's blocks end in [`StepPlan::all_block_ids`]: after a leading 0, entry
    /// `group * num_requests + request + 1` is the exclusive end of that cell.
    #[must_use]
    pub fn cell_ends(&self) -> &[usize] {
        &self.cell_ends
    }

    /// The blocks to write in `group`; none for a group that does not exist.
    #[must_use]
    pub fn block_ids(&self, group: usize) -> &[BlockId] {
        let bounds = group.checked_mul(self.num_requests).and_then(|first| {
            let last = first.checked_add(self.num_requests)?;
            Some((*self.cell_ends.get(first)?, *self.cell_ends.get(last)?))
        });
        bounds.and_then(|(start, end)| self.block_ids.get(start..end)).unwrap_or_default()
    }

    /// The blocks that are not to be written whole, by position.
    #[must_use]
    pub fn partials(&self) -> &[Partial] {
        &self.partials
    }

    /// Null blocks inside the ranges.
    #[must_use]
    pub fn null_blocks_skipped(&self) -> u64 {
        self.null_blocks_skipped
    }

    /// How often a block was named that the step already writes.
    #[must_use]
    pub fn repeats_merged(&self) -> u64 {
        self.repeats_merged
    }

    /// Blocks that began inside a request's local prefix, whose first slots are kept.
    #[must_use]
    pub fn heads_preserved(&self) -> u64 {
        self.heads_preserved
    }
}

/// The flat arrays of a step in the making, group by group and request by request.
struct Merged {
    block_ids: Vec<BlockId>,
    cell_ends: Vec<usize>,
    partials: Vec<Partial>,
}

impl Merged {
    /// The usual case, in which no block is named twice. Returns whether that was so; if not, what was
    /// added is of no use.
    fn add_distinct(
        &mut self,
        exact_tail: bool,
        taken: &mut Marked<'_>,
        num_groups: usize,
        fills: &[FillPlan<'_>],
    ) -> bool {
        for group in 0..num_groups {
            for fill in fills {
                let fill = &fill.groups()[group];
                let start = self.block_ids.len();
                fill.append_to(&mut self.block_ids);
                let added = &self.block_ids[start..];
                if taken.insert_all(added.iter().copied()) {
                    return false;
                }
                for (is_first, slots) in fill.partial_writes(exact_tail) {
                    let position = if is_first { start } else { self.block_ids.len() - 1 };
                    self.partials.push(Partial { position, slots });
                }
                self.cell_ends.push(self.block_ids.len());
            }
        }
        true
    }

    /// The rare case: a block is written once, where it was named first, in the union of the slots.
    /// Returns how many repeats there were, or the fill that broke invariant 5.
    fn add_repeating(
        &mut self,
        options: PlannerOptions,
        num_groups: usize,
        fills: &[FillPlan<'_>],
    ) -> Result<u64, (usize, PlanError)> {
        self.block_ids.clear();
        self.cell_ends.truncate(1);
        self.partials.clear();
        let mut repeats = 0;
        let mut taken: HashMap<BlockId, (usize, usize)> = HashMap::new();
        let mut partials: BTreeMap<usize, Range<u32>> = BTreeMap::new();
        for group in 0..num_groups {
            for (request, fill) in fills.iter().enumerate() {
                let fill = &fill.groups()[group];
                let site = fill.site();
                for (block, slots) in fill.writes(options.exact_tail) {
                    let id = block.get();
                    match taken.get(&block) {
                        None => {
                            let position = self.block_ids.len();
                            taken.insert(block, (group, position));
                            partials.extend(slots.map(|slots| (position, slots)));
                            self.block_ids.push(block);
                        }
                        Some(&(other, _)) if other != group => {
                            let error = PlanError::BlockInTwoGroups { site, block: id, other };
                            return Err((request, error));
                        }
                        Some(_) if options.strict => {
                            return Err((request, PlanError::BlockRepeated { site, block: id }));
                        }
                        Some((_, position)) => {
                            repeats += 1;
                            match (slots, partials.get_mut(position)) {
                                // Slots between the two are neither's to write.
                                (Some(more), Some(slots))
                                    if more.start > slots.end || slots.start > more.end =>
                                {
                                    let error = PlanError::BlockRepeated { site, block: id };
                                    return Err((request, error));
                                }
                                (Some(more), Some(slots)) => {
                                    *slots = slots.start.min(more.start)..slots.end.max(more.end);
                                }
                                (None, Some(_)) => drop(partials.remove(position)),
                                (_, None) => {}
                            }
                        }
                    }
                }
                self.cell_ends.push(self.block_ids.len());
            }
        }
        let partials = partials.into_iter();
        self.partials.extend(partials.map(|(position, slots)| Partial { position, slots }));
        Ok(repeats)
    }
}
