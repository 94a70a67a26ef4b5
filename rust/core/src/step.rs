//! All fills of one scheduler step, each block once.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use crate::error::{PlanError, Site};
use crate::group::Group;
use crate::marks::{Marked, Marks};
use crate::plan::FillPlan;
use crate::planner::{Planner, PlannerOptions};
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
/// theirs; where their local slots differ, the repeat is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepPlan {
    groups: Arc<[Group]>,
    num_requests: usize,
    /// Every one in the pool and not null.
    block_ids: Vec<i32>,
    /// End of cell `group * num_requests + request`, after a leading 0.
    cell_ends: Vec<usize>,
    partials: Vec<Partial>,
    null_blocks_skipped: u64,
    repeats_merged: u64,
    heads_preserved: u64,
}

impl StepPlan {
    pub(crate) fn into_block_ids(self) -> Vec<i32> {
        self.block_ids
    }

    /// Checks flat arrays that came from elsewhere, such as a pickle, before they count as a step plan:
    /// ids inside the pool, none null, none twice, none in an excluded group; cell ends in order; partial
    /// blocks in order and inside their group's span.
    ///
    /// # Errors
    ///
    /// [`PlanError::Corrupt`] with what does not fit.
    pub fn check_parts(
        pool: Pool,
        groups: &[Group],
        num_requests: usize,
        block_ids: &[i32],
        cell_ends: &[i32],
        partials: &[i32],
    ) -> Result<(), PlanError> {
        let check = |what, ok: bool| if ok { Ok(()) } else { Err(PlanError::Corrupt { what }) };
        let index = |number: i32| usize::try_from(number).unwrap_or(usize::MAX);
        let (null_blocks, outside) = pool.survey(block_ids);
        check("a null block", null_blocks == 0)?;
        check("a block id outside the pool", !outside)?;
        check("a block id twice", all_differ(pool, block_ids))?;
        let cells = groups.len().checked_mul(num_requests).and_then(|cells| cells.checked_add(1));
        check("the number of cells", cells == Some(cell_ends.len()))?;
        check("cells out of order", cell_ends.is_sorted())?;
        let bounds = (cell_ends.first().copied(), cell_ends.last().copied().map(index));
        check("cells that do not cover the ids", bounds == (Some(0), Some(block_ids.len())))?;
        for (group, ends) in
            groups.iter().zip(cell_ends.windows(num_requests + 1).step_by(num_requests.max(1)))
        {
            let excluded = matches!(group, Group::Excluded);
            check("blocks of an excluded group", !excluded || ends.first() == ends.last())?;
        }
        check("partial blocks that are not rows of 3", partials.len().is_multiple_of(3))?;
        let mut next = 0;
        for row in partials.chunks_exact(3) {
            let (position, first, end) = (index(row[0]), row[1], row[2]);
            check("partial blocks out of order", (next..block_ids.len()).contains(&position))?;
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
    pub fn all_block_ids(&self) -> &[i32] {
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
    pub fn block_ids(&self, group: usize) -> &[i32] {
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

/// A step in the making: it is told of one request's fill after the other, while the table is still in the
/// processor's cache.
pub(crate) struct StepMerge<'m, 't> {
    planner: &'m Planner,
    fills: Vec<FillPlan<'t>>,
    /// The blocks of all fills so far, and whether one of them was named twice.
    taken: Marked<'m>,
    repeats: bool,
    /// The usual case, in which none is: one column per group.
    columns: Vec<Column>,
}

/// The blocks of one group, request by request.
#[derive(Default)]
struct Column {
    block_ids: Vec<i32>,
    ends: Vec<usize>,
    /// Positions count from the start of the column.
    partials: Vec<Partial>,
}

impl<'m, 't> StepMerge<'m, 't> {
    /// A step of `num_requests` requests, which may use the memory of `spare`.
    pub(crate) fn new(
        planner: &'m Planner,
        marks: &'m mut Marks,
        mut spare: Vec<i32>,
        num_requests: usize,
    ) -> Self {
        spare.clear();
        let mut columns: Vec<Column> = planner.groups().iter().map(|_| Column::default()).collect();
        columns[0].block_ids = spare;
        Self {
            planner,
            fills: Vec::with_capacity(num_requests),
            taken: marks.start(planner.pool()),
            repeats: false,
            columns,
        }
    }

    /// Adds the next request.
    pub(crate) fn add(&mut self, fill: FillPlan<'t>) {
        let exact_tail = self.planner.options().exact_tail;
        for (fill, column) in fill.groups().iter().zip(&mut self.columns) {
            let start = column.block_ids.len();
            fill.append_to(&mut column.block_ids);
            self.repeats |= self.taken.insert_all(&column.block_ids[start..]);
            let end = column.block_ids.len();
            for (is_first, slots) in fill.partial_writes(exact_tail) {
                let position = if is_first { start } else { end - 1 };
                column.partials.push(Partial { position, slots });
            }
            column.ends.push(end);
        }
        self.fills.push(fill);
    }

    /// The step, or the request that broke invariant 5.
    pub(crate) fn finish(mut self) -> Result<StepPlan, (usize, PlanError)> {
        let mut repeats_merged = 0;
        if self.repeats {
            (self.columns, repeats_merged) = self.merge_repeats()?;
        }
        let groups = self.planner.shared_groups();
        let blocks = || self.fills.iter().flat_map(FillPlan::groups);
        let heads = blocks().filter(|fill| fill.head_slot() > 0 && fill.first().is_some());
        let (heads_preserved, null_blocks_skipped) =
            (heads.count() as u64, blocks().map(|fill| fill.null_blocks() as u64).sum());
        let mut cell_ends = Vec::with_capacity(groups.len() * self.fills.len() + 1);
        cell_ends.push(0);
        let mut columns = self.columns.into_iter();
        let first = columns.next().unwrap_or_default();
        let (mut block_ids, mut partials) = (first.block_ids, first.partials);
        cell_ends.extend(first.ends);
        for column in columns {
            let start = block_ids.len();
            block_ids.extend(column.block_ids);
            cell_ends.extend(column.ends.iter().map(|end| start + end));
            partials.extend(
                column
                    .partials
                    .into_iter()
                    .map(|partial| Partial { position: start + partial.position, ..partial }),
            );
        }
        Ok(StepPlan {
            groups,
            num_requests: self.fills.len(),
            block_ids,
            cell_ends,
            partials,
            null_blocks_skipped,
            repeats_merged,
            heads_preserved,
        })
    }

    /// The rare case: a block is written once, where it was named first, in the union of the slots.
    /// Returns the columns and how many repeats there were.
    fn merge_repeats(&self) -> Result<(Vec<Column>, u64), (usize, PlanError)> {
        let PlannerOptions { strict, exact_tail } = self.planner.options();
        let mut columns = Vec::new();
        let mut repeats = 0;
        let mut taken: HashMap<BlockId, (usize, usize, usize)> = HashMap::new();
        for group in 0..self.columns.len() {
            let mut column = Column::default();
            let mut partials: BTreeMap<usize, Range<u32>> = BTreeMap::new();
            for (request, fill) in self.fills.iter().enumerate() {
                let fill = &fill.groups()[group];
                let refuse = |error: fn(Site, i32, usize) -> PlanError, block: BlockId, other| {
                    Err((request, error(fill.site(), block.get(), other)))
                };
                for (block, slots) in fill.writes(exact_tail) {
                    match taken.get(&block) {
                        None => {
                            let position = column.block_ids.len();
                            taken.insert(block, (group, request, position));
                            partials.extend(slots.map(|slots| (position, slots)));
                            column.block_ids.push(block.get());
                        }
                        Some(&(other, _, _)) if other != group => {
                            return refuse(in_two_groups, block, other);
                        }
                        // One block cannot hold two spans of one request.
                        Some(&(_, by, _)) if strict || by == request => {
                            return refuse(repeated, block, group);
                        }
                        Some((_, _, position)) => {
                            repeats += 1;
                            match (slots, partials.get_mut(position)) {
                                (Some(more), Some(slots)) if more.start == slots.start => {
                                    slots.end = slots.end.max(more.end);
                                }
                                (Some(more), None) if more.start == 0 => {}
                                (None, Some(slots)) if slots.start == 0 => {
                                    partials.remove(position);
                                }
                                (None, None) => {}
                                // Slots that are local to one of them the other would write.
                                _ => return refuse(repeated, block, group),
                            }
                        }
                    }
                }
                column.ends.push(column.block_ids.len());
            }
            let partials = partials.into_iter();
            column.partials = partials.map(|(position, slots)| Partial { position, slots }).collect();
            columns.push(column);
        }
        Ok((columns, repeats))
    }
}

/// Whether no id stands twice among blocks of the pool. A bit per block of the pool, since an arriving
/// step is all that this memory is for.
fn all_differ(pool: Pool, block_ids: &[i32]) -> bool {
    let mut seen = vec![0_u64; pool.num_blocks().div_ceil(u64::BITS) as usize];
    let mut repeated = 0;
    for id in block_ids {
        let id = id.cast_unsigned();
        let word = &mut seen[(id / u64::BITS) as usize];
        repeated |= *word >> (id % u64::BITS) & 1;
        *word |= 1 << (id % u64::BITS);
    }
    repeated == 0
}

fn in_two_groups(site: Site, block: i32, other: usize) -> PlanError {
    PlanError::BlockInTwoGroups { site, block, other }
}

fn repeated(site: Site, block: i32, _: usize) -> PlanError {
    PlanError::BlockRepeated { site, block }
}
