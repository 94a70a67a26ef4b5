//! The planner: a pool, its groups, and how strict to be.

use std::collections::HashSet;
use std::sync::Arc;

use crate::error::{PlanError, Refusal};
use crate::group::Group;
use crate::interval::TokenInterval;
use crate::ledger::Ledger;
use crate::marks::Marks;
use crate::plan::FillPlan;
use crate::pool::Pool;
use crate::range::BlockRange;
use crate::step::{StepMerge, StepPlan};

/// One request of a scheduler step.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The scheduler's id, for messages and the ledger.
    pub id: &'a str,
    /// Tokens already computed locally, as the scheduler reported them.
    pub local: u64,
    /// Tokens that come from outside, after the local ones.
    pub external: u64,
    /// The block table of each group, in the planner's order. Entries past the interval are not read.
    pub tables: &'a [&'a [i32]],
}

/// How a [`Planner`] treats what is allowed but notable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlannerOptions {
    /// Refuse a block that a step selects twice, instead of writing it once and counting it.
    pub strict: bool,
    /// Leave the slots after the interval's end alone. By default they are written too, so that no page
    /// keeps stale non-finite bytes: the engine writes those slots before it reads them.
    pub exact_tail: bool,
}

/// Working memory of planning, to be kept between calls. One per thread; any planner may use it.
#[derive(Debug, Default)]
pub struct Scratch {
    prefix: Marks,
    step: Marks,
    spare: Vec<i32>,
}

impl Scratch {
    /// Takes back the memory of a plan that is no longer needed, for the next one.
    pub fn recycle(&mut self, plan: StepPlan) {
        self.spare = plan.into_block_ids();
    }
}

/// Plans fills for one block pool and its KV-cache groups. Immutable, so threads can share it.
#[derive(Debug, Clone)]
pub struct Planner {
    pool: Pool,
    groups: Arc<[Group]>,
    options: PlannerOptions,
}

impl Planner {
    /// A planner for the groups that share `pool`.
    ///
    /// # Errors
    ///
    /// [`PlanError::NoGroups`] if `groups` is empty.
    pub fn new(pool: Pool, groups: Vec<Group>, options: PlannerOptions) -> Result<Self, PlanError> {
        if groups.is_empty() {
            return Err(PlanError::NoGroups);
        }
        Ok(Self { pool, groups: groups.into(), options })
    }

    /// The block pool.
    #[must_use]
    pub fn pool(&self) -> Pool {
        self.pool
    }

    /// The KV-cache groups.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    pub(crate) fn shared_groups(&self) -> Arc<[Group]> {
        Arc::clone(&self.groups)
    }

    /// The options.
    #[must_use]
    pub fn options(&self) -> PlannerOptions {
        self.options
    }

    /// Selects and checks the blocks of one request.
    ///
    /// # Errors
    ///
    /// The broken rule: invariants 1 to 4 of the design.
    pub fn plan<'t>(
        &self,
        scratch: &mut Scratch,
        request: &Request<'t>,
    ) -> Result<FillPlan<'t>, PlanError> {
        self.plan_with(&mut scratch.prefix, request)
    }

    fn plan_with<'t>(
        &self,
        marks: &mut Marks,
        request: &Request<'t>,
    ) -> Result<FillPlan<'t>, PlanError> {
        let interval = TokenInterval::new(request.local, request.external)?;
        let range_of = |_, group: Group, table_len| group.select(interval, table_len);
        FillPlan::new(self.pool, &self.groups, marks, interval, request.tables, range_of)
    }

    /// Checks blocks that were selected elsewhere: `ranges[g]` for each positional or state group `g`
    /// (a ring is always selected whole, an excluded group never).
    ///
    /// # Errors
    ///
    /// As [`Planner::plan`]; a group without a range counts as having selected nothing.
    pub fn check<'t>(
        &self,
        scratch: &mut Scratch,
        request: &Request<'t>,
        ranges: &[BlockRange],
    ) -> Result<FillPlan<'t>, PlanError> {
        let interval = TokenInterval::new(request.local, request.external)?;
        let range_of = |index: usize, group: Group, table_len| match group.span() {
            Some(_) => ranges.get(index).copied().unwrap_or(BlockRange::new(0, 0)),
            None => group.select(interval, table_len),
        };
        let marks = &mut scratch.prefix;
        FillPlan::new(self.pool, &self.groups, marks, interval, request.tables, range_of)
    }

    /// Plans all requests of one scheduler step, each block once.
    ///
    /// With a `ledger`, every selected block must be the request's own since its admission, and the
    /// request is then counted as filled.
    ///
    /// # Errors
    ///
    /// The first broken rule and the request that broke it. Nothing is planned then, and the ledger is
    /// as it was.
    pub fn plan_step(
        &self,
        scratch: &mut Scratch,
        requests: &[Request<'_>],
        ledger: Option<&mut Ledger>,
    ) -> Result<StepPlan, Refusal> {
        let refusal = |index: usize, error| Refusal { request: requests[index].id.to_owned(), error };
        if let (Some(first), Some(ledger)) = (requests.first(), &ledger)
            && !ledger.follows(self)
        {
            let request = first.id.to_owned();
            return Err(Refusal { request, error: PlanError::ForeignLedger });
        }
        let mut seen = HashSet::new();
        let Scratch { prefix, step, spare } = scratch;
        let mut merge = StepMerge::new(self, step, std::mem::take(spare), requests.len());
        for (index, request) in requests.iter().enumerate() {
            if requests.len() > 1 && !seen.insert(request.id) {
                return Err(refusal(index, PlanError::AlreadyFilled));
            }
            let fill = self.plan_with(prefix, request).map_err(|error| refusal(index, error))?;
            if let Some(ledger) = &ledger {
                ledger.check(request.id, &fill).map_err(|error| refusal(index, error))?;
            }
            merge.add(fill);
        }
        let step = merge.finish().map_err(|(index, error)| refusal(index, error))?;
        if let Some(ledger) = ledger {
            for request in requests {
                ledger.set_filled(request.id);
            }
        }
        Ok(step)
    }
}
