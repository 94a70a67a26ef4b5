//! What a replay can be told.

use std::fmt;
use std::str::FromStr;

use decodebench_core::{PlanError, Pool};
use thiserror::Error;

use crate::trace::{MAX_TOKENS, ns_of_ms};

/// Which blocks a fill selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Selection {
    /// The blocks that cover the external tokens, by `decodebench-core`.
    #[default]
    Interval,
    /// The first `ceil(external / block_size)` blocks of each table, whatever the local hit: what vLLM's
    /// own connector did at first. Wrong on purpose, to show what it destroys.
    Leading,
}

impl FromStr for Selection {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "interval" => Ok(Self::Interval),
            "leading" => Ok(Self::Leading),
            _ => Err(ConfigError::Selection { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interval => "interval",
            Self::Leading => "leading",
        })
    }
}

/// What a KV-cache group attends to. Written `full` or `window:TOKENS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupKind {
    /// Every token before the current one.
    Full,
    /// The last so many tokens, the current one counted; at least 1.
    Window(u32),
}

impl FromStr for GroupKind {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let kind = match text.split_once(':') {
            None if text == "full" => Some(Self::Full),
            Some(("window", tokens)) => tokens.parse().ok().map(Self::Window),
            _ => None,
        };
        kind.filter(|kind| kind.is_valid()).ok_or_else(|| ConfigError::Group { text: text.to_owned() })
    }
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Window(tokens) => write!(f, "window:{tokens}"),
        }
    }
}

impl GroupKind {
    fn is_valid(self) -> bool {
        match self {
            Self::Full => true,
            Self::Window(tokens) => (1..=MAX_TOKENS).contains(&tokens),
        }
    }
}

/// The simulated engine. [`Replay::new`](crate::Replay::new) checks it.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayConfig {
    /// Tokens per block, in every group; at least 1.
    pub block_size: u32,
    /// Blocks of the pool that all groups share, the null block 0 counted; at least 2.
    pub num_blocks: u32,
    /// The KV-cache groups, at least one.
    pub groups: Vec<GroupKind>,
    /// Most requests that run at once; at least 1.
    pub max_num_seqs: u32,
    /// A closed loop of so many clients, at least 1, each of which sends the trace's next request when
    /// its last one has finished; arrivals in the trace are not looked at. `None`: as the trace says.
    pub concurrency: Option<u32>,
    /// Duration of every engine step in virtual milliseconds, at least 10^-6 (one nanosecond).
    pub step_ms: f64,
    /// Which blocks are filled.
    pub selection: Selection,
    /// Whether [`Replay::advance`](crate::Replay::advance) returns what is written and where.
    pub record_memory: bool,
}

impl ReplayConfig {
    /// One full-attention group, 256 requests at most, steps of 20 ms, the right selection, no record.
    #[must_use]
    pub fn new(block_size: u32, num_blocks: u32) -> Self {
        Self {
            block_size,
            num_blocks,
            groups: vec![GroupKind::Full],
            max_num_seqs: 256,
            concurrency: None,
            step_ms: 20.0,
            selection: Selection::Interval,
            record_memory: false,
        }
    }

    /// Checks everything that does not depend on the trace. Returns the step in nanoseconds.
    pub(crate) fn check(&self) -> Result<u64, ConfigError> {
        let Self { block_size, num_blocks, max_num_seqs, step_ms, .. } = *self;
        if !(1..=MAX_TOKENS).contains(&block_size) {
            return Err(ConfigError::BlockSize { block_size });
        }
        if !(2..=Pool::MAX_BLOCKS).contains(&num_blocks) {
            return Err(ConfigError::NumBlocks { num_blocks });
        }
        if self.groups.is_empty() {
            return Err(ConfigError::NoGroups);
        }
        if let Some(group) = self.groups.iter().find(|group| !group.is_valid()) {
            return Err(ConfigError::Group { text: group.to_string() });
        }
        if max_num_seqs == 0 {
            return Err(ConfigError::NoSeqs);
        }
        if self.concurrency == Some(0) {
            return Err(ConfigError::NoClients);
        }
        ns_of_ms(step_ms).filter(|&ns| ns > 0).ok_or(ConfigError::Step { step_ms })
    }
}

/// A setting that no engine can have.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Neither of the selections.
    #[error("selection {text:?} is neither \"interval\" nor \"leading\"")]
    Selection {
        /// What was given.
        text: String,
    },
    /// Not a KV-cache group.
    #[error(
        "group {text:?} is neither \"full\" nor \"window:TOKENS\" with TOKENS in [1, {MAX_TOKENS}]"
    )]
    Group {
        /// What was given.
        text: String,
    },
    /// Tokens per block.
    #[error("block_size {block_size} is not in [1, {MAX_TOKENS}]")]
    BlockSize {
        /// What was given.
        block_size: u32,
    },
    /// Size of the pool.
    #[error("num_blocks {num_blocks} is not in [2, {max}]", max = Pool::MAX_BLOCKS)]
    NumBlocks {
        /// What was given.
        num_blocks: u32,
    },
    /// There is nothing to allocate for.
    #[error("no KV-cache group")]
    NoGroups,
    /// Nothing could ever run.
    #[error("max_num_seqs is 0")]
    NoSeqs,
    /// A closed loop without clients.
    #[error("concurrency is 0")]
    NoClients,
    /// Duration of a step.
    #[error("step_ms {step_ms} is not in [0.000001, 10^13]")]
    Step {
        /// What was given.
        step_ms: f64,
    },
    /// The blocks of the trace cannot be numbered.
    #[error("the trace has {blocks} different blocks of {block_size} tokens in {groups} groups, above {max}", max = u32::MAX - 1)]
    TooManyBlocks {
        /// Blocks in the trace that differ in content.
        blocks: u64,
        /// Tokens per block.
        block_size: u32,
        /// Number of groups.
        groups: usize,
    },
    /// The planner refused the pool or the groups.
    #[error(transparent)]
    Plan(#[from] PlanError),
}
