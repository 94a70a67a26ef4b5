//! A synthetic trace, for when there is none at hand.

use fastrand::Rng;

use crate::trace::{Row, Trace, TraceBuilder, ns_of_ms};

/// Tokens per hash block: as fine as an engine's blocks.
const HASH_BLOCK: u32 = 16;

/// Length in tokens of each tenant's system prompt. One does not end with a block.
const SYSTEM_PROMPTS: [u32; 4] = [64, 500, 2048, 6144];

/// Longest prompt after which a conversation is over, in tokens.
const LONGEST: u32 = 16_000;

const MEAN_GAP_MS: f64 = 45.0;

/// A chat service: four tenants with a system prompt each, conversations of several turns whose next
/// prompt is the last one with its output and a new message, lengths with a heavy tail, random arrivals.
/// Among them are prompts of a single token, prompts that end with a block, and the same prompt several
/// times at one instant. The same `seed` gives the same trace.
///
/// With 400 requests, blocks of 16 tokens and a pool of 4,096 blocks there are prefix hits, evictions and
/// some preemptions.
#[must_use]
pub fn conversation(seed: u64, requests: usize) -> Trace {
    let mut workload = Workload::new(seed);
    let mut clock_ms = 0.0;
    while workload.trace.len() < requests {
        let row = workload.next_turn();
        let copies = if workload.rng.u32(0..24) == 0 { workload.rng.usize(2..5) } else { 1 };
        for _ in 0..copies.min(requests - workload.trace.len()) {
            let added = workload.trace.push(
                0,
                &Row {
                    arrival_ns: ns_of_ms(clock_ms).unwrap_or(u64::MAX),
                    input_tokens: row.input,
                    output_tokens: row.output,
                    ids: &row.ids,
                },
            );
            debug_assert!(added.is_ok(), "{added:?}");
        }
        // Exponential gaps: arrivals are a Poisson process.
        clock_ms -= MEAN_GAP_MS * (1.0 - workload.rng.f64()).ln();
    }
    workload.trace.finish()
}

struct Workload {
    rng: Rng,
    trace: TraceBuilder,
    next_id: u64,
    /// The ids of each tenant's system prompt, without its last partial block.
    systems: Vec<Vec<u64>>,
    open: Vec<Conversation>,
}

/// The text so far.
struct Conversation {
    tokens: u32,
    /// Ids of its full hash blocks.
    ids: Vec<u64>,
}

struct Turn {
    input: u32,
    output: u32,
    ids: Vec<u64>,
}

impl Workload {
    fn new(seed: u64) -> Self {
        let mut workload = Self {
            rng: Rng::with_seed(seed),
            trace: TraceBuilder::new(HASH_BLOCK),
            next_id: 0,
            systems: Vec::new(),
            open: Vec::new(),
        };
        for tokens in SYSTEM_PROMPTS {
            let mut system = Conversation { tokens, ids: Vec::new() };
            workload.hash(&mut system);
            workload.systems.push(system.ids);
        }
        workload
    }

    fn next_turn(&mut self) -> Turn {
        if self.rng.u32(0..40) == 0 {
            let ids = vec![self.new_id()];
            return Turn { input: 1, output: self.long_tailed(8), ids };
        }
        let mut conversation = self.pick();
        conversation.tokens += self.long_tailed(24);
        if self.rng.u32(0..20) == 0 {
            conversation.tokens = conversation.tokens.next_multiple_of(HASH_BLOCK);
        }
        self.hash(&mut conversation);
        let (input, output) = (conversation.tokens, self.long_tailed(48));
        let mut ids = conversation.ids.clone();
        if !input.is_multiple_of(HASH_BLOCK) {
            // The last block is hashed as it is now; the next turn fills it up and hashes it anew.
            ids.push(self.new_id());
        }
        conversation.tokens += output;
        if conversation.tokens < LONGEST {
            self.open.push(conversation);
        }
        Turn { input, output, ids }
    }

    /// An open conversation or, half the time, a new one.
    fn pick(&mut self) -> Conversation {
        if !self.open.is_empty() && self.rng.bool() {
            let index = self.rng.usize(0..self.open.len());
            return self.open.swap_remove(index);
        }
        let tenant = self.rng.usize(0..SYSTEM_PROMPTS.len());
        Conversation { tokens: SYSTEM_PROMPTS[tenant], ids: self.systems[tenant].clone() }
    }

    /// Gives every full hash block of the text an id.
    fn hash(&mut self, text: &mut Conversation) {
        while text.ids.len() < (text.tokens / HASH_BLOCK) as usize {
            text.ids.push(self.new_id());
        }
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// At least `least`; every second time at least twice that, every fourth at least four times, up to
    /// 64 times.
    fn long_tailed(&mut self, least: u32) -> u32 {
        let base = least << self.rng.u32(..).trailing_zeros().min(6);
        base + self.rng.u32(0..base)
    }
}
