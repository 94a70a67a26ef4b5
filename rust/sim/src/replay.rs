//! A trace through the engine, every fill planned and audited.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use decodebench_core::{
    BlockRange, Group, Ledger, PlanError, Planner, PlannerOptions, Pool, Refusal, Request, Scratch,
};
use thiserror::Error;

use crate::config::{ConfigError, ReplayConfig, Selection};
use crate::engine::{Engine, Schedule, Sequence};
use crate::manager::Tables;
use crate::pool::BlockId;
use crate::record::{Admitted, FillStep, Fills, LeadingFill, Recorder};
use crate::stats::{FillTotals, Stats};
use crate::trace::Trace;
use crate::watch::Watch;

/// The planner or its ledger refused what the engine did. The engine is at fault, or the planner; after
/// it, the replay has ended.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("step {step}: {refusal}")]
pub struct ReplayError {
    step: u64,
    refusal: Refusal,
}

impl ReplayError {
    /// Number of the engine step, from 1.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The broken rule; its request is named by the number of its admission.
    #[must_use]
    pub fn refusal(&self) -> &Refusal {
        &self.refusal
    }
}

/// Why [`Replay::advance`] returned.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Advance {
    /// There is something to write or to check. Only if memory is recorded.
    Fill(FillStep),
    /// The steps asked for were run.
    Paused,
    /// Every request finished or was rejected, and every record was returned.
    Done,
}

/// A replay of a trace. See the [crate documentation](crate) for an example.
#[derive(Debug)]
pub struct Replay {
    engine: Engine,
    trace: Arc<Trace>,
    block_size: u32,
    selection: Selection,
    planner: Planner,
    scratch: Scratch,
    watcher: Watcher,
    totals: FillTotals,
    /// Whether a step was scheduled that has not been executed.
    scheduled: bool,
    ended: bool,
}

impl Replay {
    /// A replay at its start.
    ///
    /// # Errors
    ///
    /// A setting is out of range, or the trace has more blocks of that size than can be numbered.
    pub fn new(trace: Arc<Trace>, config: ReplayConfig) -> Result<Self, ConfigError> {
        let engine = Engine::new(Arc::clone(&trace), &config)?;
        let ReplayConfig { block_size, num_blocks, selection, .. } = config;
        let num_groups = config.groups.len();
        let planner = Planner::new(
            Pool::new(num_blocks, Some(crate::pool::NULL))?,
            vec![Group::positional(block_size)?; num_groups],
            PlannerOptions::default(),
        )?;
        let audit = (selection == Selection::Interval).then(|| Ledger::new(&planner));
        let recorder = config.record_memory.then(|| Recorder::new(block_size, num_groups));
        Ok(Self {
            engine,
            trace,
            block_size,
            selection,
            planner,
            scratch: Scratch::default(),
            watcher: Watcher { audit, recorder, name: String::new(), refused: None },
            totals: FillTotals::new(num_groups),
            scheduled: false,
            ended: false,
        })
    }

    /// Runs until there is a record to return, `max_steps` engine steps were run, or the trace ended.
    ///
    /// A record is returned for each step that admits a sequence or follows the release of one, and now
    /// and then for the engine's writes alone. The last one comes after the last step.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] if the planner refused a selection or the ledger an allocation, which would be a
    /// mistake in this crate or in the planner.
    pub fn advance(&mut self, max_steps: u64) -> Result<Advance, ReplayError> {
        for _ in 0..max_steps {
            if self.ended {
                return Ok(Advance::Done);
            }
            match self.step() {
                Ok(Some(record)) => return Ok(Advance::Fill(record)),
                Ok(None) => {}
                Err(refusal) => {
                    self.ended = true;
                    return Err(ReplayError { step: self.engine.counters().steps, refusal });
                }
            }
        }
        Ok(if self.ended { Advance::Done } else { Advance::Paused })
    }

    /// The planner of the replay's pool and groups.
    #[must_use]
    pub fn planner(&self) -> &Planner {
        &self.planner
    }

    /// The totals so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let (counters, notes) = (self.engine.counters(), self.trace.notes());
        self.totals.stats(&counters, self.engine.clock_ns(), &notes)
    }

    /// The requests of the step that was scheduled last, in the engine's order: those admitted in it at
    /// the end. Those that the next step finishes are still among them.
    pub fn running(&self) -> impl ExactSizeIterator<Item = Running<'_>> {
        self.engine.running().iter().map(|sequence| Running {
            request: sequence.request(),
            sequence: sequence.number(),
            local: sequence.local(),
            external: sequence.external(),
            tables: sequence.tables().blocks(),
        })
    }

    /// The requests that have arrived and do not run, by number in the trace, the next one first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = usize> {
        self.engine.waiting()
    }

    /// The free blocks, in the order in which they will be taken.
    #[must_use]
    pub fn free_blocks(&self) -> Vec<i32> {
        self.engine.pool().free_blocks()
    }

    /// The blocks with content that the prefix cache finds or could find, in order of id.
    #[must_use]
    pub fn cached_blocks(&self) -> Vec<i32> {
        self.engine.pool().cached_blocks()
    }

    fn step(&mut self) -> Result<Option<FillStep>, Refusal> {
        if std::mem::take(&mut self.scheduled) {
            self.engine.execute(&mut self.watcher);
        }
        let schedule = self.engine.schedule(&mut self.watcher);
        let count = match schedule {
            Schedule::Step(admitted) => admitted,
            Schedule::Ended => 0,
        };
        self.ended = schedule == Schedule::Ended;
        self.scheduled = !self.ended;
        let admitted = self.engine.last_admitted(count);
        self.watcher.admit(admitted)?;
        let due = self.watcher.recorder.as_ref().is_some_and(|recorder| {
            count > 0 || recorder.is_due() || (self.ended && !recorder.is_empty())
        });
        let mut record = None;
        if count > 0 || due {
            let fills = self.fill(count)?;
            if let Some(recorder) = self.watcher.recorder.as_mut().filter(|_| due) {
                let admitted = self.engine.last_admitted(count).iter().map(admitted_record).collect();
                record = Some(recorder.take(fills, admitted));
            }
        }
        self.watcher.refused.take().map_or(Ok(record), Err)
    }

    /// Selects the blocks of the sequences admitted last.
    fn fill(&mut self, count: usize) -> Result<Fills, Refusal> {
        let admitted = self.engine.last_admitted(count);
        let ids: Vec<String> = admitted.iter().map(|seq| seq.number().to_string()).collect();
        let tables: Vec<&[i32]> =
            admitted.iter().flat_map(|seq| seq.tables().blocks()).map(Vec::as_slice).collect();
        let num_groups = self.planner.groups().len();
        let requests: Vec<Request<'_>> = admitted
            .iter()
            .zip(&ids)
            .zip(tables.chunks_exact(num_groups))
            .map(|((seq, id), tables)| Request {
                id,
                local: seq.local().into(),
                external: seq.external().into(),
                tables,
            })
            .collect();
        let start = Instant::now();
        let fills = match self.selection {
            Selection::Interval => {
                let ledger = self.watcher.audit.as_mut();
                let plan = self.planner.plan_step(&mut self.scratch, &requests, ledger)?;
                self.totals.add_plan(&plan);
                Fills::Interval(plan)
            }
            Selection::Leading => {
                let mut fill = LeadingFill::new(num_groups);
                for sequence in admitted {
                    let blocks = sequence.external().div_ceil(self.block_size);
                    fill.push(sequence.tables(), blocks as usize);
                }
                let named = fill.len();
                fill.keep_last();
                self.totals.add_leading(&fill, named - fill.len());
                Fills::Leading(fill)
            }
        };
        if count > 0 {
            self.totals.add_time(start.elapsed(), count);
        }
        if self.selection == Selection::Leading {
            for request in &requests {
                let blocks = request.external.div_ceil(self.block_size.into());
                let ranges = vec![BlockRange::new(0, blocks); num_groups];
                let checked = self.planner.check(&mut self.scratch, request, &ranges);
                self.totals.selections_refused += u64::from(checked.is_err());
            }
        }
        Ok(fills)
    }
}

/// A request that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Running<'r> {
    /// Number of the request in the trace, in order of arrival from 0.
    pub request: usize,
    /// Number of the admission, from 1.
    pub sequence: u32,
    /// Tokens that the prefix cache had at admission.
    pub local: u32,
    /// Tokens that came from outside at admission.
    pub external: u32,
    /// Block table of each group, 0 for the null block.
    pub tables: &'r [Vec<i32>],
}

fn admitted_record(sequence: &Sequence) -> Admitted {
    Admitted {
        sequence: sequence.number(),
        local: sequence.local(),
        external: sequence.external(),
        tables: sequence.tables().blocks().to_vec(),
    }
}

/// Keeps the ledger and the record, and the first refusal.
#[derive(Debug)]
struct Watcher {
    audit: Option<Ledger>,
    recorder: Option<Recorder>,
    name: String,
    refused: Option<Refusal>,
}

impl Watcher {
    /// Tells the ledger of the admitted sequences, and returns a refusal if there was any before.
    fn admit(&mut self, sequences: &[Sequence]) -> Result<(), Refusal> {
        for sequence in sequences {
            let tables = sequence.tables();
            self.audit(sequence.number(), |ledger, id| {
                let blocks: Vec<&[i32]> = tables.blocks().iter().map(Vec::as_slice).collect();
                ledger.admit(id, &blocks, tables.hits())
            });
        }
        self.refused.take().map_or(Ok(()), Err)
    }

    fn audit(&mut self, sequence: u32, tell: impl FnOnce(&mut Ledger, &str) -> Result<(), PlanError>) {
        let Some(ledger) = &mut self.audit else { return };
        self.name.clear();
        // Writing to a string does not fail.
        let _ = write!(self.name, "{sequence}");
        if let Err(error) = tell(ledger, &self.name) {
            let request = self.name.clone();
            self.refused.get_or_insert(Refusal { request, error });
        }
    }
}

impl Watch for Watcher {
    fn grew(&mut self, sequence: u32, group: usize, blocks: &[BlockId]) {
        self.audit(sequence, |ledger, id| ledger.grow(id, group, blocks));
        if let Some(recorder) = &mut self.recorder {
            recorder.grew(sequence, group, blocks);
        }
    }

    fn left_window(&mut self, sequence: u32, group: usize, blocks: &[BlockId]) {
        self.audit(sequence, |ledger, id| ledger.release(id, group, blocks));
        if let Some(recorder) = &mut self.recorder {
            recorder.left_window(sequence, group, blocks);
        }
    }

    fn released(&mut self, sequence: u32, tables: &Tables) {
        self.audit(sequence, |ledger, id| ledger.finish(id));
        if let Some(recorder) = &mut self.recorder {
            recorder.released(sequence, tables);
        }
    }

    #[inline]
    fn computed(&mut self, sequence: u32, position: u32, tables: &Tables) {
        if let Some(recorder) = &mut self.recorder {
            recorder.computed(sequence, position, tables);
        }
    }
}
