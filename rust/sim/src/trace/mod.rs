//! Request traces: when requests arrive, how long they are, and which prompts share a prefix.

mod builder;
mod csv;
mod error;
mod fields;
mod format;
mod json;
mod lines;
mod mooncake;
mod read;
mod tokens;
mod weka;

use std::fmt::Write as _;
use std::io::Read;

pub(crate) use builder::{Row, TraceBuilder};
pub use error::{RowError, TraceError};
pub use format::{Format, TimeUnit};
pub use read::{ReadOptions, TraceReader};

/// Largest token count of one request, prompt and output together: a hundred times any context there is. A
/// row of a few bytes must not ask for more memory than a machine has.
pub(crate) const MAX_TOKENS: u32 = 1 << 27;

/// Largest timestamp, in milliseconds: some 300 years.
pub(crate) const MAX_MS: u64 = 10_000_000_000_000;
pub(crate) const NS_PER_MS: u64 = 1_000_000;

/// How to read a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceOptions {
    /// Tokens that one hash id covers; at least 1. The Mooncake traces use 512.
    pub hash_block_size: u32,
    /// Read only the first so many requests, in file order. Rows after them are not even looked at.
    pub limit: Option<usize>,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self { hash_block_size: 512, limit: None }
    }
}

/// What was notable about a trace but no reason to refuse it. Counts are numbers of requests.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct TraceNotes {
    /// Prompts without any hash id: they share nothing.
    pub unhashed: u64,
    /// Prompts whose last, partial hash block has no id: that tail shares nothing.
    pub floor_hashed: u64,
    /// Requests with an output length of 0.
    pub prefill_only: u64,
    /// Requests that stood after one with a later timestamp. They were sorted, stably.
    pub out_of_order: u64,
    /// What was taken off every timestamp so that the first is 0, in milliseconds.
    pub shifted_ms: f64,
}

/// What the files of a trace were read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The format.
    pub format: Format,
    /// The unit of the timestamps.
    pub time_unit: TimeUnit,
}

/// One request of a [`Trace`].
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct TraceRequest<'t> {
    /// Milliseconds from the first arrival.
    pub arrival_ms: f64,
    /// Prompt length in tokens, at least 1.
    pub input_tokens: u32,
    /// Output length in tokens; 0 for a request that only prefills.
    pub output_tokens: u32,
    /// The prompt's hash blocks, numbered from 0 across the trace in order of first appearance. Equal
    /// numbers mean equal tokens up to the end of that block.
    pub hash_blocks: &'t [u32],
}

/// A request trace in order of arrival. Immutable; takes some 40 bytes a request and 4 bytes a hash id.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    hash_block_size: u32,
    requests: Vec<Record>,
    hash_blocks: Vec<u32>,
    num_hash_blocks: u32,
    notes: TraceNotes,
    source: Option<Source>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Record {
    arrival_ns: u64,
    input_tokens: u32,
    output_tokens: u32,
    /// The request's hash blocks are `hash_blocks[start..start + len]`.
    start: usize,
    len: usize,
}

impl Trace {
    /// Reads a Mooncake trace: one JSON object per line with `timestamp` (milliseconds),
    /// `input_length`, `output_length` and `hash_ids`; plain or gzip. Errors call it `name`.
    ///
    /// # Errors
    ///
    /// The source cannot be read, has no rows, or a row is malformed, inconsistent with an earlier one, or
    /// of a format that means something else.
    pub fn parse_mooncake(
        reader: impl Read,
        name: &str,
        options: TraceOptions,
    ) -> Result<Self, TraceError> {
        mooncake::parse(reader, &one_line(name), options)
    }

    /// Number of requests, at least 1.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether the trace has no request; never, for one that was read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Tokens that one hash id covers.
    #[must_use]
    pub fn hash_block_size(&self) -> u32 {
        self.hash_block_size
    }

    /// What was notable.
    #[must_use]
    pub fn notes(&self) -> TraceNotes {
        self.notes
    }

    /// What it was read as by a [`TraceReader`].
    #[must_use]
    pub fn source(&self) -> Option<Source> {
        self.source
    }

    /// The same requests, arriving `speed` times as fast; `None` if that is no positive finite number or
    /// if arrivals move out of range.
    #[must_use]
    pub fn at_speed(mut self, speed: f64) -> Option<Self> {
        if !(speed.is_finite() && speed > 0.0) {
            return None;
        }
        if speed != 1.0 {
            for record in &mut self.requests {
                record.arrival_ns = ns_of_ms(ms_of_ns(record.arrival_ns) / speed)?;
            }
        }
        Some(self)
    }

    /// The trace as Mooncake JSON lines, hash blocks numbered from 0.
    #[must_use]
    pub fn to_mooncake(&self) -> String {
        let mut text = String::new();
        for row in self.requests() {
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": {:?}}}",
                row.arrival_ms, row.input_tokens, row.output_tokens, row.hash_blocks
            );
        }
        text
    }

    /// The requests in order of arrival.
    pub fn requests(&self) -> impl ExactSizeIterator<Item = TraceRequest<'_>> {
        self.requests.iter().map(|record| TraceRequest {
            arrival_ms: ms_of_ns(record.arrival_ns),
            input_tokens: record.input_tokens,
            output_tokens: record.output_tokens,
            hash_blocks: self.blocks_of(record),
        })
    }

    /// Prompt tokens of all requests.
    #[must_use]
    pub fn input_tokens(&self) -> u64 {
        self.requests.iter().map(|record| u64::from(record.input_tokens)).sum()
    }

    /// Output tokens of all requests.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.requests.iter().map(|record| u64::from(record.output_tokens)).sum()
    }

    /// Prompt tokens that a prefix cache of unlimited size would serve, with blocks of `block_size`
    /// tokens: per request the tokens under its leading hash blocks that an earlier request brought,
    /// never the whole prompt, rounded down to whole blocks.
    #[must_use]
    pub fn ideal_hit_tokens(&self, block_size: u32) -> u64 {
        let mut seen = 0;
        let hits = self.requests.iter().map(|record| {
            let blocks = self.blocks_of(record);
            let shared = blocks.iter().take_while(|&&block| block < seen).count() as u64;
            seen = blocks.iter().fold(seen, |seen, &block| seen.max(block + 1));
            let tokens = shared.saturating_mul(u64::from(self.hash_block_size));
            let most = u64::from(record.input_tokens - 1);
            let tokens = tokens.min(most);
            tokens - tokens % u64::from(block_size.max(1))
        });
        hits.sum()
    }

    /// Number of different hash blocks.
    pub(crate) fn num_hash_blocks(&self) -> u32 {
        self.num_hash_blocks
    }

    pub(crate) fn input_of(&self, request: usize) -> u32 {
        self.requests[request].input_tokens
    }

    pub(crate) fn output_of(&self, request: usize) -> u32 {
        self.requests[request].output_tokens
    }

    /// Arrival of a request in nanoseconds; `None` past the last one.
    pub(crate) fn arrival_ns(&self, request: usize) -> Option<u64> {
        self.requests.get(request).map(|record| record.arrival_ns)
    }

    pub(crate) fn hash_blocks_of(&self, request: usize) -> &[u32] {
        self.blocks_of(&self.requests[request])
    }

    fn blocks_of(&self, record: &Record) -> &[u32] {
        &self.hash_blocks[record.start..record.start + record.len]
    }
}

/// Milliseconds as whole nanoseconds; `None` if negative, not finite, or above [`MAX_MS`].
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // both parts are in [0, MAX_MS]
pub(crate) fn ns_of_ms(ms: f64) -> Option<u64> {
    let in_range = (0.0..=MAX_MS as f64).contains(&ms);
    // The parts apart: milliseconds since 1970 with a fraction would lose it in one product.
    in_range.then(|| ms.trunc() as u64 * NS_PER_MS + (ms.fract() * 1e6).round() as u64)
}

pub(crate) fn ms_of_ns(ns: u64) -> f64 {
    (ns / NS_PER_MS) as f64 + (ns % NS_PER_MS) as f64 / 1e6
}

/// A file name that cannot break the line it is printed on.
fn one_line(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
