//! One request's fill, checked.

use std::ops::Range;

use crate::error::{PlanError, Site};
use crate::group::Group;
use crate::interval::TokenInterval;
use crate::marks::Marks;
use crate::pool::{BlockId, Entry, Pool};
use crate::range::BlockRange;

/// What one request fills in one KV-cache group.
#[derive(Debug, Clone, Copy)]
pub struct GroupFill<'t> {
    pool: Pool,
    site: Site,
    entries: &'t [i32],
    null_blocks: usize,
    /// Slots per block of a positional group, else 0.
    span: u32,
    head_slot: u32,
    tail_slot: u32,
}

impl<'t> GroupFill<'t> {
    /// The table entries that cover the interval, null blocks included.
    #[must_use]
    pub fn range(&self) -> BlockRange {
        self.site.range
    }

    /// The blocks to write, in table order: the range without its null blocks.
    pub fn block_ids(&self) -> impl Iterator<Item = BlockId> + use<'t> {
        self.pool.blocks(self.entries)
    }

    /// Number of null blocks in the range.
    #[must_use]
    pub fn null_blocks(&self) -> usize {
        self.null_blocks
    }

    /// Number of blocks to write.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len() - self.null_blocks
    }

    /// Whether no block is to be written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// First slot of the range's first block that may be written: the slots before it hold local tokens.
    /// 0 where the group is not addressed by token.
    #[must_use]
    pub fn head_slot(&self) -> u32 {
        self.head_slot
    }

    /// Slots of the range's last block that lie inside the interval; 0: all of them, or the group is not
    /// addressed by token.
    #[must_use]
    pub fn tail_slot(&self) -> u32 {
        self.tail_slot
    }

    pub(crate) fn site(&self) -> Site {
        self.site
    }

    /// The range's first block, if it is not null.
    pub(crate) fn first(&self) -> Option<BlockId> {
        self.block(self.entries.first())
    }

    /// Appends the blocks to write to `ids`.
    pub(crate) fn append_to(&self, ids: &mut Vec<i32>) {
        if self.null_blocks == 0 {
            ids.extend_from_slice(self.entries);
        } else {
            ids.extend(self.block_ids().map(BlockId::get));
        }
    }

    /// The blocks to write, each with its slots if not all of them are to be written.
    pub(crate) fn writes(
        &self,
        exact_tail: bool,
    ) -> impl Iterator<Item = (BlockId, Option<Range<u32>>)> {
        (0..self.entries.len()).filter_map(move |index| {
            Some((self.block(self.entries.get(index))?, self.slots(index, exact_tail)))
        })
    }

    /// The blocks of which not every slot is to be written: the range's first and last, at most. With
    /// each, whether it is the first.
    pub(crate) fn partial_writes(&self, exact_tail: bool) -> impl Iterator<Item = (bool, Range<u32>)> {
        let last = self.entries.len().saturating_sub(1);
        [(true, 0), (false, last)].into_iter().filter_map(move |(is_first, index)| {
            self.block(self.entries.get(index))?;
            let slots = self.slots(index, exact_tail)?;
            (is_first || last > 0).then_some((is_first, slots))
        })
    }

    /// The slots to write of an entry, if not all of them.
    fn slots(&self, index: usize, exact_tail: bool) -> Option<Range<u32>> {
        let is_last = index + 1 == self.entries.len();
        let start = if index == 0 { self.head_slot } else { 0 };
        let end = if exact_tail && is_last && self.tail_slot > 0 { self.tail_slot } else { self.span };
        (start > 0 || end < self.span).then_some(start..end)
    }

    fn block(&self, raw: Option<&i32>) -> Option<BlockId> {
        match raw.map(|&raw| self.pool.entry(raw)) {
            Some(Entry::Block(block)) => Some(block),
            _ => None,
        }
    }
}

/// What one request fills, group by group. One that exists keeps invariants 1 to 4 of the design:
/// the ranges lie in the tables, every selected id is a block of the pool, no block of the request's own
/// prefix is selected but the one that the interval starts in, and every external token is covered.
#[derive(Debug, Clone)]
pub struct FillPlan<'t> {
    interval: TokenInterval,
    groups: Vec<GroupFill<'t>>,
}

impl<'t> FillPlan<'t> {
    /// Checks the selection `range_of(group index, group, table length)`.
    pub(crate) fn new(
        pool: Pool,
        groups: &[Group],
        marks: &mut Marks,
        interval: TokenInterval,
        tables: &[&'t [i32]],
        range_of: impl Fn(usize, Group, usize) -> BlockRange,
    ) -> Result<Self, PlanError> {
        if tables.len() != groups.len() {
            return Err(PlanError::TableCount { expected: groups.len(), actual: tables.len() });
        }
        let mut fills = Vec::with_capacity(groups.len());
        for (index, (&group, &table)) in groups.iter().zip(tables).enumerate() {
            let range = range_of(index, group, table.len());
            let site = Site { group: index, range, table_len: table.len() };
            fills.push(check_group(pool, group, interval, table, site)?);
        }
        check_prefix(pool, groups, marks, interval, tables, &fills)?;
        Ok(Self { interval, groups: fills })
    }

    /// The external tokens.
    #[must_use]
    pub fn interval(&self) -> TokenInterval {
        self.interval
    }

    /// One fill per group, in the planner's order.
    #[must_use]
    pub fn groups(&self) -> &[GroupFill<'t>] {
        &self.groups
    }
}

fn check_group<'t>(
    pool: Pool,
    group: Group,
    interval: TokenInterval,
    table: &'t [i32],
    site: Site,
) -> Result<GroupFill<'t>, PlanError> {
    let range = site.range;
    let entries = range.of(table).ok_or(PlanError::RangeOutsideTable { site })?;
    check_coverage(pool, group, interval, table, site)?;
    let null_blocks = check_entries(pool, entries, site)?;
    let (span, head_slot, tail_slot) = match group {
        Group::Positional { span } if !range.is_empty() => {
            let span = span.get();
            (span, slot_of(interval.start(), span), slot_of(interval.end(), span))
        }
        _ => (0, 0, 0),
    };
    Ok(GroupFill { pool, site, entries, null_blocks, span, head_slot, tail_slot })
}

/// Invariants 3 (by position) and 4.
fn check_coverage(
    pool: Pool,
    group: Group,
    interval: TokenInterval,
    table: &[i32],
    site: Site,
) -> Result<(), PlanError> {
    let Some(span) = group.span() else { return Ok(()) };
    let span = span.get();
    let (start, end) = (site.range.start().get(), site.range.end().get());
    let first_token = start.saturating_mul(u64::from(span));
    let end_token = end.saturating_mul(u64::from(span));
    if !interval.is_empty() {
        let token = if first_token > interval.start() {
            Some(interval.start())
        } else if end_token < interval.end() {
            Some(end_token.max(interval.start()))
        } else {
            None
        };
        if let Some(token) = token {
            return Err(PlanError::TokenUncovered { site, token, span });
        }
    }
    let prefix_end = interval.start() / u64::from(span);
    let prefix = BlockRange::new(start, prefix_end.min(end)).of(table).unwrap_or_default();
    for (offset, &raw) in prefix.iter().enumerate() {
        if let Entry::Block(block) = pool.entry(raw) {
            return Err(PlanError::PrefixBlockSelected {
                site,
                block: block.get(),
                prefix_group: site.group,
                prefix_index: usize::try_from(start).unwrap_or(usize::MAX) + offset,
            });
        }
    }
    let needed_end = if interval.is_empty() { start } else { interval.end().div_ceil(u64::from(span)) };
    if end > needed_end {
        let end = interval.end();
        return Err(PlanError::BlockBeyondInterval { site, index: needed_end, end, span });
    }
    Ok(())
}

/// Invariant 2. Returns the number of null blocks.
fn check_entries(pool: Pool, entries: &[i32], site: Site) -> Result<usize, PlanError> {
    let (null_blocks, outside) = pool.survey(entries);
    if !outside {
        return Ok(null_blocks);
    }
    let start = usize::try_from(site.range.start().get()).unwrap_or(usize::MAX);
    for (offset, &raw) in entries.iter().enumerate() {
        entry_in_pool(pool, raw, start + offset, site)?;
    }
    Ok(null_blocks)
}

fn entry_in_pool(pool: Pool, raw: i32, index: usize, site: Site) -> Result<(), PlanError> {
    match pool.entry(raw) {
        Entry::Null | Entry::Block(_) => Ok(()),
        Entry::Outside => {
            Err(PlanError::BlockOutsidePool { site, index, id: raw, num_blocks: pool.num_blocks() })
        }
    }
}

/// Invariant 3, by id: no selected block stands again in any group's prefix, whatever its index.
fn check_prefix(
    pool: Pool,
    groups: &[Group],
    marks: &mut Marks,
    interval: TokenInterval,
    tables: &[&[i32]],
    fills: &[GroupFill<'_>],
) -> Result<(), PlanError> {
    let prefix_len = |group: Group| {
        let blocks = group.span().map_or(0, |span| interval.start() / u64::from(span.get()));
        usize::try_from(blocks).unwrap_or(usize::MAX)
    };
    let has_prefix = groups.iter().any(|&group| prefix_len(group) > 0);
    if !has_prefix || fills.iter().all(GroupFill::is_empty) {
        return Ok(());
    }
    let mut selected = marks.start(pool);
    let mut buffer = Vec::new();
    for fill in fills {
        selected.insert_all(blocks_of(pool, fill.entries, fill.null_blocks, &mut buffer));
    }
    for ((&group, table), fill) in groups.iter().zip(tables).zip(fills) {
        let prefix = &table[..prefix_len(group).min(table.len())];
        let (null_blocks, outside) = pool.survey(prefix);
        if outside {
            for (index, &raw) in prefix.iter().enumerate() {
                entry_in_pool(pool, raw, index, fill.site)?;
            }
        }
        if selected.meets(blocks_of(pool, prefix, null_blocks, &mut buffer)) {
            let found = pool.blocks(prefix).find(|&block| selected.contains(block));
            let Some(block) = found else { continue };
            let by = fills.iter().find(|fill| fill.block_ids().any(|other| other == block));
            return Err(PlanError::PrefixBlockSelected {
                site: by.unwrap_or(fill).site,
                block: block.get(),
                prefix_group: fill.site.group,
                prefix_index: prefix.iter().position(|&raw| raw == block.get()).unwrap_or(0),
            });
        }
    }
    Ok(())
}

/// The blocks among surveyed `entries`: these themselves, or a copy in `buffer` if there are null blocks
/// to leave out.
fn blocks_of<'a>(
    pool: Pool,
    entries: &'a [i32],
    null_blocks: usize,
    buffer: &'a mut Vec<i32>,
) -> &'a [i32] {
    if null_blocks == 0 {
        return entries;
    }
    buffer.clear();
    buffer.extend(pool.blocks(entries).map(BlockId::get));
    buffer
}

/// Offset of `token` in its block.
fn slot_of(token: u64, span: u32) -> u32 {
    u32::try_from(token % u64::from(span)).unwrap_or(0)
}
