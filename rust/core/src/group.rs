//! KV-cache groups.

use std::num::NonZeroU32;

use crate::error::PlanError;
use crate::interval::TokenInterval;
use crate::range::BlockRange;

/// How the blocks of a KV-cache group relate to tokens.
///
/// A span is in tokens and already multiplied by the context-parallel world size where the group is
/// sharded: a 16-token block under a decode context parallelism of 2 spans 32 tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Group {
    /// Block `i` holds the keys and values of tokens `[i * span, (i + 1) * span)`: attention of any
    /// kind. Where a window has passed, the table holds the null block.
    Positional {
        /// Tokens per block.
        span: NonZeroU32,
    },
    /// Block `i` holds the recurrent state after its span: Mamba, linear attention, short convolution.
    /// A selected block is always written whole.
    State {
        /// Tokens per block.
        span: NonZeroU32,
    },
    /// One fixed buffer per request that positions do not index: every block is selected, and zeroed,
    /// since it may pack integers.
    Ring,
    /// Not restored from outside: nothing is selected.
    Excluded,
}

impl Group {
    /// A positional group of `span` tokens per block.
    ///
    /// # Errors
    ///
    /// [`PlanError::ZeroSpan`] for a span of 0.
    pub fn positional(span: u32) -> Result<Self, PlanError> {
        Ok(Self::Positional { span: NonZeroU32::new(span).ok_or(PlanError::ZeroSpan)? })
    }

    /// A state group of `span` tokens per block.
    ///
    /// # Errors
    ///
    /// [`PlanError::ZeroSpan`] for a span of 0.
    pub fn state(span: u32) -> Result<Self, PlanError> {
        Ok(Self::State { span: NonZeroU32::new(span).ok_or(PlanError::ZeroSpan)? })
    }

    /// Tokens per block, where tokens index the blocks.
    #[must_use]
    pub fn span(self) -> Option<NonZeroU32> {
        match self {
            Self::Positional { span } | Self::State { span } => Some(span),
            Self::Ring | Self::Excluded => None,
        }
    }

    /// The entries of a table of `table_len` that a fill of `interval` writes. This is the one place
    /// where blocks are selected.
    pub(crate) fn select(self, interval: TokenInterval, table_len: usize) -> BlockRange {
        match self {
            Self::Positional { span } | Self::State { span } => BlockRange::covering(interval, span),
            Self::Ring if !interval.is_empty() => BlockRange::new(0, table_len as u64),
            Self::Ring | Self::Excluded => BlockRange::new(0, 0),
        }
    }
}
