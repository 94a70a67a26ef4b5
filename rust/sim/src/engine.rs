//! The scheduler: continuous batching over a virtual clock.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::config::{ConfigError, ReplayConfig};
use crate::content::Contents;
use crate::manager::{Manager, Tables};
use crate::pool::BlockPool;
use crate::trace::Trace;
use crate::watch::Watch;

/// One admission of a request.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    request: usize,
    number: u32,
    /// Prompt and generated tokens. All but the last have been computed, or filled.
    tokens: u32,
    /// Steps left to the end of the output.
    steps_left: u32,
    /// Length up to which its tables need no change.
    quiet_until: u32,
    local: u32,
    external: u32,
    tables: Tables,
}

impl Sequence {
    /// Number of the request in the trace.
    pub(crate) fn request(&self) -> usize {
        self.request
    }

    /// Number of the admission, from 1.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Tokens that the prefix cache had at admission.
    pub(crate) fn local(&self) -> u32 {
        self.local
    }

    /// Tokens that came from outside at admission.
    pub(crate) fn external(&self) -> u32 {
        self.external
    }

    pub(crate) fn tables(&self) -> &Tables {
        &self.tables
    }
}

/// A request in the queue, with the output it had when it was preempted.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    request: usize,
    generated: u32,
}

/// What a request at the head of the queue needs, so that it is not looked up again in every step.
///
/// The need cannot shrink while nothing is admitted: nothing that the request could find in the prefix
/// cache is added, and a block that it finds and that becomes free counts as needed from then on. Only if
/// a block that it finds is lost, it may find another one that is in use, and need one less.
#[derive(Debug, Clone, Copy)]
struct Stuck {
    /// Free blocks.
    needs: u64,
    num_replaced: u64,
}

/// What the engine counted.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counters {
    pub requests: u64,
    pub rejected: u64,
    pub finished: u64,
    pub admissions: u64,
    pub preemptions: u64,
    pub steps: u64,
    pub local_tokens: u64,
    pub external_tokens: u64,
    pub peak_running: u64,
    pub peak_blocks: u64,
}

/// Whether there is anything left to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// A step was scheduled, to be executed. The last so many running sequences were admitted in it.
    Step(usize),
    /// Every request finished or was rejected.
    Ended,
}

/// The simulated engine. A step is one call of `schedule` and one of `execute`.
#[derive(Debug)]
pub(crate) struct Engine {
    trace: Arc<Trace>,
    contents: Contents,
    manager: Manager,
    max_running: usize,
    step_ns: u64,
    concurrency: Option<usize>,
    clock_ns: u64,
    next_arrival: usize,
    waiting: VecDeque<Waiting>,
    running: Vec<Sequence>,
    /// Sequences that are no more, kept for their tables' memory.
    spare: Vec<Sequence>,
    /// The head of the queue, if it was looked at and does not fit.
    stuck: Option<Stuck>,
    chain: Vec<u32>,
    counters: Counters,
}

impl Engine {
    pub(crate) fn new(trace: Arc<Trace>, config: &ReplayConfig) -> Result<Self, ConfigError> {
        let step_ns = config.check()?;
        let ReplayConfig { block_size, num_blocks, ref groups, .. } = *config;
        let manager = Manager::new(num_blocks, block_size, groups);
        let contents = Contents::new(Arc::clone(&trace), block_size, groups.len(), |request| {
            served(&trace, &manager, request)
        })?;
        Ok(Self {
            contents,
            manager,
            max_running: config.max_num_seqs as usize,
            step_ns,
            concurrency: config.concurrency.map(|clients| clients as usize),
            clock_ns: 0,
            next_arrival: 0,
            waiting: VecDeque::new(),
            running: Vec::new(),
            spare: Vec::new(),
            stuck: None,
            chain: Vec::new(),
            counters: Counters::default(),
            trace,
        })
    }

    pub(crate) fn counters(&self) -> Counters {
        self.counters
    }

    pub(crate) fn clock_ns(&self) -> u64 {
        self.clock_ns
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        self.manager.pool()
    }

    /// In the order in which they are scheduled.
    pub(crate) fn running(&self) -> &[Sequence] {
        &self.running
    }

    /// The requests in the queue, the next one first.
    pub(crate) fn waiting(&self) -> impl ExactSizeIterator<Item = usize> {
        self.waiting.iter().map(|waiting| waiting.request)
    }

    /// The last `count` running sequences.
    pub(crate) fn last_admitted(&self, count: usize) -> &[Sequence] {
        &self.running[self.running.len().saturating_sub(count)..]
    }

    /// Schedules a step: one token for every running request, then admissions if nothing was preempted.
    pub(crate) fn schedule(&mut self, watch: &mut impl Watch) -> Schedule {
        self.arrive();
        while self.running.is_empty() && self.waiting.is_empty() {
            let Some(arrival) = self.trace.arrival_ns(self.next_arrival) else {
                return Schedule::Ended;
            };
            self.clock_ns = self.clock_ns.max(arrival);
            self.arrive();
        }
        let preempted = self.schedule_running(watch);
        let mut admitted = 0;
        if !preempted {
            while self.running.len() < self.max_running && self.admit() {
                admitted += 1;
            }
        }
        let counters = &mut self.counters;
        counters.steps += 1;
        counters.peak_running = counters.peak_running.max(self.running.len() as u64);
        counters.peak_blocks = counters.peak_blocks.max(self.manager.pool().num_used().into());
        Schedule::Step(admitted)
    }

    /// Executes the step: every running request computes its last token and gets a new one.
    pub(crate) fn execute(&mut self, watch: &mut impl Watch) {
        self.clock_ns = self.clock_ns.saturating_add(self.step_ns);
        let mut finished = false;
        for sequence in &mut self.running {
            watch.computed(sequence.number, sequence.tokens - 1, &sequence.tables);
            sequence.tokens += 1;
            sequence.steps_left -= 1;
            finished |= sequence.steps_left == 0;
        }
        if !finished {
            return;
        }
        let done = self.running.extract_if(.., |sequence| sequence.steps_left == 0);
        for mut sequence in done {
            self.counters.finished += 1;
            watch.released(sequence.number, &sequence.tables);
            self.manager.finish(&mut sequence.tables, sequence.tokens - 1);
            self.spare.push(sequence);
        }
    }

    /// Queues the requests that have arrived; those that could never run are counted and dropped.
    fn arrive(&mut self) {
        while let Some(arrival) = self.trace.arrival_ns(self.next_arrival)
            && self.is_due(arrival)
        {
            let request = self.next_arrival;
            self.next_arrival += 1;
            if served(&self.trace, &self.manager, request) {
                self.waiting.push_back(Waiting { request, generated: 0 });
            } else {
                self.counters.rejected += 1;
            }
        }
    }

    /// Whether the next request is sent: when it arrives, or, in a closed loop, when a client is idle.
    fn is_due(&self, arrival: u64) -> bool {
        match self.concurrency {
            Some(clients) => self.running.len() + self.waiting.len() < clients,
            None => arrival <= self.clock_ns,
        }
    }

    /// Returns whether anything was preempted.
    fn schedule_running(&mut self, watch: &mut impl Watch) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while let Some(sequence) = self.running.get_mut(index) {
            if sequence.tokens > sequence.quiet_until {
                let Sequence { request, number, tokens, ref mut tables, .. } = *sequence;
                let own_block = |i| self.contents.own_block(request, i);
                match self.manager.grow(number, tables, tokens, own_block, watch) {
                    Some(quiet_until) => sequence.quiet_until = quiet_until,
                    None => {
                        // The last admitted goes; it may be this very one.
                        preempted = true;
                        self.preempt_last(watch);
                        continue;
                    }
                }
            }
            index += 1;
        }
        preempted
    }

    fn preempt_last(&mut self, watch: &mut impl Watch) {
        let Some(mut sequence) = self.running.pop() else { return };
        watch.released(sequence.number, &sequence.tables);
        self.manager.preempt(&mut sequence.tables);
        let generated = sequence.tokens - self.trace.input_of(sequence.request);
        self.waiting.push_front(Waiting { request: sequence.request, generated });
        self.stuck = None;
        self.counters.preemptions += 1;
        self.spare.push(sequence);
    }

    /// Admits the head of the queue, if it fits.
    fn admit(&mut self) -> bool {
        let Some(&Waiting { request, generated }) = self.waiting.front() else { return false };
        let pool = self.manager.pool();
        let (free, num_replaced) = (u64::from(pool.num_free()), pool.num_replaced());
        if let Some(head) = self.stuck
            && head.num_replaced == num_replaced
            && free < head.needs
        {
            debug_assert!(self.find_prefix(request, generated).1 >= head.needs);
            return false;
        }
        let (local, needs) = self.find_prefix(request, generated);
        if needs > free {
            self.stuck = Some(Stuck { needs, num_replaced });
            return false;
        }
        self.stuck = None;
        self.waiting.pop_front();
        let tokens = self.trace.input_of(request) + generated;
        let mut sequence = self.spare.pop().unwrap_or_default();
        self.manager.admit(&mut sequence.tables, &self.chain, tokens);
        let external = tokens - 1 - local;
        let counters = &mut self.counters;
        counters.admissions += 1;
        counters.requests += u64::from(generated == 0);
        counters.local_tokens += u64::from(local);
        counters.external_tokens += u64::from(external);
        self.running.push(Sequence {
            request,
            number: u32::try_from(counters.admissions).unwrap_or(u32::MAX),
            tokens,
            steps_left: self.trace.output_of(request).max(1) - generated,
            quiet_until: tokens,
            local,
            external,
            tables: sequence.tables,
        });
        true
    }

    /// Looks up a request's prefix. Returns its length in tokens and the blocks that admission takes.
    fn find_prefix(&mut self, request: usize, generated: u32) -> (u32, u64) {
        let tokens = self.trace.input_of(request) + generated;
        self.contents.fill_chain(request, tokens, &mut self.chain);
        let local = self.manager.find(&self.chain, tokens);
        (local, self.manager.blocks_needed(tokens))
    }
}

/// Whether a request can run at all: the pool has the blocks for it alone.
fn served(trace: &Trace, manager: &Manager, request: usize) -> bool {
    let prompt = trace.input_of(request);
    manager.fits_alone(prompt, prompt + trace.output_of(request).max(1) - 1)
}
