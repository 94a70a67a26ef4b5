//! What a replay counted.

use std::time::Duration;

use hdrhistogram::Histogram;

use crate::engine::Counters;
use crate::record::LeadingFill;
use crate::trace::TraceNotes;

/// Totals of a replay so far. Deterministic but for the fields in seconds of planning.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Requests of the trace that were admitted at least once.
    pub requests: u64,
    /// Requests that the pool could not hold even alone; dropped on arrival.
    pub rejected: u64,
    /// Requests that finished.
    pub finished: u64,
    /// Admissions, those after a preemption counted.
    pub admissions: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Engine steps.
    pub steps: u64,
    /// Tokens that the prefix cache had, over all admissions.
    pub local_tokens: u64,
    /// Tokens that came from outside, over all admissions.
    pub external_tokens: u64,
    /// Per group, blocks selected to be filled.
    pub blocks_selected: Vec<u64>,
    /// Null blocks inside the selected ranges.
    pub null_blocks_skipped: u64,
    /// Blocks whose first slots were kept since they held local tokens.
    pub heads_preserved: u64,
    /// How often a step selected a block that it already fills.
    pub duplicates_merged: u64,
    /// Admissions whose selection the planner would have refused. 0 but for the leading selection.
    pub selections_refused: u64,
    /// Prompts of the trace without hash ids.
    pub unhashed: u64,
    /// Requests of the trace with an output length of 0.
    pub prefill_only: u64,
    /// Most requests that ran in one step.
    pub peak_running: u64,
    /// Most blocks in use in one step, the null block not counted.
    pub peak_blocks: u64,
    /// Virtual time, in seconds.
    pub virtual_seconds: f64,
    /// Real time spent in selecting blocks, in seconds.
    pub plan_seconds: f64,
    /// Median over admissions of the time to select one's blocks, in seconds: its step's time, divided by
    /// the admissions of that step.
    pub plan_p50_seconds: f64,
    /// 99th percentile of the same.
    pub plan_p99_seconds: f64,
}

/// What the fills of a step add to the statistics.
#[derive(Debug, Clone)]
pub(crate) struct FillTotals {
    blocks_selected: Vec<u64>,
    null_blocks_skipped: u64,
    heads_preserved: u64,
    duplicates_merged: u64,
    pub(crate) selections_refused: u64,
    plan_time: Duration,
    /// Nanoseconds per admission.
    plan_times: Histogram<u64>,
}

/// Longest time per admission that the histogram tells from longer ones.
const MAX_PLAN_NS: u64 = 60_000_000_000;

impl FillTotals {
    pub(crate) fn new(num_groups: usize) -> Self {
        Self {
            blocks_selected: vec![0; num_groups],
            null_blocks_skipped: 0,
            heads_preserved: 0,
            duplicates_merged: 0,
            selections_refused: 0,
            plan_time: Duration::ZERO,
            plan_times: Histogram::new_with_bounds(1, MAX_PLAN_NS, 3).expect("bounds in range"),
        }
    }

    pub(crate) fn add_plan(&mut self, plan: &decodebench_core::StepPlan) {
        for (group, total) in self.blocks_selected.iter_mut().enumerate() {
            *total += plan.block_ids(group).len() as u64;
        }
        self.null_blocks_skipped += plan.null_blocks_skipped();
        self.heads_preserved += plan.heads_preserved();
        self.duplicates_merged += plan.repeats_merged();
    }

    pub(crate) fn add_leading(&mut self, fill: &LeadingFill, duplicates: usize) {
        for (group, total) in self.blocks_selected.iter_mut().enumerate() {
            *total += fill.block_ids(group).len() as u64;
        }
        self.null_blocks_skipped += fill.null_blocks_skipped();
        self.duplicates_merged += duplicates as u64;
    }

    /// A step's selection took so long, for `admissions` sequences, at least one.
    pub(crate) fn add_time(&mut self, time: Duration, admissions: usize) {
        self.plan_time += time;
        let count = admissions as u64;
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.plan_times.saturating_record_n(nanos / count.max(1), count);
    }

    pub(crate) fn stats(&self, counters: &Counters, clock_ns: u64, notes: &TraceNotes) -> Stats {
        let quantile = |q| self.plan_times.value_at_quantile(q) as f64 / 1e9;
        Stats {
            requests: counters.requests,
            rejected: counters.rejected,
            finished: counters.finished,
            admissions: counters.admissions,
            preemptions: counters.preemptions,
            steps: counters.steps,
            local_tokens: counters.local_tokens,
            external_tokens: counters.external_tokens,
            blocks_selected: self.blocks_selected.clone(),
            null_blocks_skipped: self.null_blocks_skipped,
            heads_preserved: self.heads_preserved,
            duplicates_merged: self.duplicates_merged,
            selections_refused: self.selections_refused,
            unhashed: notes.unhashed,
            prefill_only: notes.prefill_only,
            peak_running: counters.peak_running,
            peak_blocks: counters.peak_blocks,
            virtual_seconds: clock_ns as f64 / 1e9,
            plan_seconds: self.plan_time.as_secs_f64(),
            plan_p50_seconds: quantile(0.5),
            plan_p99_seconds: quantile(0.99),
        }
    }
}
