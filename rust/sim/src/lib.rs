//! A simulated decode engine that replays request traces through the fill planner.
//!
//! The engine is that of vLLM 0.32, decision for decision, for full-attention and sliding-window
//! KV-cache groups with a synchronous connector: one block pool with a null block and an LRU free queue,
//! a prefix cache, continuous batching, decode growth and preemption. It runs on a virtual clock and
//! computes one token per request and step, since everything but a prompt's last token comes from
//! outside.
//!
//! ```text
//! Trace -> contents (which blocks are equal) -> engine: pool, manager, scheduler -> Replay: plan, audit
//! ```
//!
//! ```
//! use std::sync::Arc;
//! use decodebench_sim::{Advance, Replay, ReplayConfig, conversation};
//!
//! let trace = Arc::new(conversation(7, 50));
//! let mut replay = Replay::new(trace, ReplayConfig::new(16, 4096))?;
//! while !matches!(replay.advance(u64::MAX)?, Advance::Done) {}
//! let stats = replay.stats();
//! assert_eq!(stats.finished, 50);
//! assert!(stats.local_tokens > 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod config;
mod content;
mod engine;
mod manager;
mod pool;
mod prefix;
mod record;
mod replay;
mod stats;
mod trace;
mod watch;
mod workload;

pub use config::{ConfigError, GroupKind, ReplayConfig, Selection};
pub use record::{Admitted, EngineWrites, FillStep, Fills, LeadingFill, Released};
pub use replay::{Advance, Replay, ReplayError, Running};
pub use stats::Stats;
pub use trace::{
    Format, ReadOptions, RowError, Source, TimeUnit, Trace, TraceError, TraceNotes, TraceOptions,
    TraceReader, TraceRequest,
};
pub use workload::conversation;
