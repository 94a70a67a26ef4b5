//! The tokens that come from outside.

use crate::error::PlanError;

/// The external tokens of a request: `[local, local + external)`, in token positions from 0.
///
/// `local` is what the scheduler reported as already computed. It is not derived from the prompt's
/// length: a scheduler may cap the external count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenInterval {
    start: u64,
    end: u64,
}

impl TokenInterval {
    /// The interval of `external` tokens after `local` ones.
    ///
    /// # Errors
    ///
    /// [`PlanError::IntervalOverflow`] if the sum does not fit 64 bits.
    pub fn new(local: u64, external: u64) -> Result<Self, PlanError> {
        let end = local.checked_add(external).ok_or(PlanError::IntervalOverflow { local, external })?;
        Ok(Self { start: local, end })
    }

    /// First external token.
    #[must_use]
    pub fn start(self) -> u64 {
        self.start
    }

    /// One past the last external token.
    #[must_use]
    pub fn end(self) -> u64 {
        self.end
    }

    /// Whether no token comes from outside.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }
}
