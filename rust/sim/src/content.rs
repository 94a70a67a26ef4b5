//! Which blocks have equal content, as numbers, so that looking one up is indexing and not hashing.
//!
//! A trace's hash ids are chained: equal ids mean equal tokens from the prompt's start to the end of that
//! hash block. So the engine's block `i` is known by the id that covers its last token, together with
//! `i`, whether block sizes divide each other or not. Each id gets a run of numbers, one for each engine
//! block that ends in it. Tokens without an id (an unhashed prompt or tail, and everything generated)
//! are found again by nobody but their own request, when it resumes after a preemption: their blocks get
//! numbers of their own.

use std::sync::Arc;

use crate::config::ConfigError;
use crate::trace::Trace;

/// The numbers of every block of a trace, for one engine block size.
#[derive(Debug)]
pub(crate) struct Contents {
    trace: Arc<Trace>,
    block_size: u32,
    /// Per hash block: number of the engine's block `i` that ends in it, minus `i`, wrapping.
    hashed: Vec<u32>,
    /// Per request: number of its block `i` that ends past the hashed tokens, minus `i`, wrapping.
    own: Vec<u32>,
}

impl Contents {
    /// Numbers the blocks of every request that `served` names, for an engine whose prefix cache has one
    /// entry per block and group.
    pub(crate) fn new(
        trace: Arc<Trace>,
        block_size: u32,
        groups: usize,
        served: impl Fn(usize) -> bool,
    ) -> Result<Self, ConfigError> {
        let mut contents =
            Self { block_size, hashed: vec![], own: Vec::with_capacity(trace.len()), trace };
        let trace = Arc::clone(&contents.trace);
        contents.hashed.reserve_exact(trace.num_hash_blocks() as usize);
        let mut next = 0_u64;
        // A number that does not fit is never used: the count at the end is refused.
        let number_of =
            |next: u64, first: u32| u32::try_from(next).unwrap_or(u32::MAX).wrapping_sub(first);
        for request in 0..trace.len() {
            for (index, &block) in trace.hash_blocks_of(request).iter().enumerate() {
                if block as usize == contents.hashed.len() {
                    let (first, end) = contents.blocks_ending_in(request, index);
                    contents.hashed.push(number_of(next, first));
                    next += u64::from(end - first);
                }
            }
            let first = contents.hashed_tokens(request) / block_size;
            contents.own.push(number_of(next, first));
            if served(request) {
                let tokens = trace.input_of(request) + trace.output_of(request).max(1) - 1;
                next += u64::from(tokens / block_size - first);
            }
        }
        if next.saturating_mul(groups as u64) >= u64::from(u32::MAX) {
            return Err(ConfigError::TooManyBlocks { blocks: next, block_size, groups });
        }
        Ok(contents)
    }

    /// The numbers of a request's full blocks when it is `tokens` long, from block 0.
    pub(crate) fn fill_chain(&self, request: usize, tokens: u32, chain: &mut Vec<u32>) {
        chain.clear();
        let len = tokens / self.block_size;
        for (index, &block) in self.trace.hash_blocks_of(request).iter().enumerate() {
            let (first, end) = self.blocks_ending_in(request, index);
            let base = self.hashed[block as usize];
            chain.extend((first..end).map(|i| base.wrapping_add(i)));
        }
        let first = self.hashed_tokens(request) / self.block_size;
        chain.extend((first..len).map(|i| self.own_block(request, i)));
    }

    /// The number of a request's block `i` that ends in generated or unhashed tokens.
    pub(crate) fn own_block(&self, request: usize, i: u32) -> u32 {
        self.own[request].wrapping_add(i)
    }

    /// The engine's blocks whose last token lies in the request's hash block `index`, half-open.
    fn blocks_ending_in(&self, request: usize, index: usize) -> (u32, u32) {
        let size = self.trace.hash_block_size();
        let input = self.trace.input_of(request);
        // An id exists only where the prompt reaches, so its first token does fit.
        let first = u32::try_from(index).unwrap_or(u32::MAX).saturating_mul(size).min(input);
        let end = first.saturating_add(size).min(input);
        (first / self.block_size, end / self.block_size)
    }

    /// Prompt tokens under an id.
    fn hashed_tokens(&self, request: usize) -> u32 {
        let ids = self.trace.hash_blocks_of(request).len();
        let ids = u32::try_from(ids).unwrap_or(u32::MAX);
        ids.saturating_mul(self.trace.hash_block_size()).min(self.trace.input_of(request))
    }
}

#[cfg(test)]
mod tests;
