//! Which KV-cache blocks hold a request's external tokens, planned and checked.
//!
//! A decode instance that receives a request with `local` tokens already in its own prefix cache and
//! `external` tokens coming from elsewhere must fill exactly the blocks that cover
//! `[local, local + external)`. The crate turns those numbers and the request's block tables into
//! block ids, one type per step:
//!
//! ```text
//! (local, external) -> TokenInterval -> BlockRange per group -> FillPlan -> StepPlan
//! ```
//!
//! A [`FillPlan`] or a [`StepPlan`] that exists has passed every check: there is no other way to make
//! one. The crate does no I/O, reads no clock and holds no global state.
//!
//! ```
//! use decodebench_core::{Group, Planner, PlannerOptions, Pool, Request, Scratch};
//!
//! let planner = Planner::new(
//!     Pool::new(64, Some(0))?,
//!     vec![Group::positional(16)?, Group::Ring],
//!     PlannerOptions::default(),
//! )?;
//! let request = Request { id: "r1", local: 32, external: 17, tables: &[&[1, 2, 3, 4], &[9]] };
//! let step = planner.plan_step(&mut Scratch::default(), &[request], None)?;
//! assert_eq!(step.block_ids(0), [3, 4]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod error;
mod group;
mod interval;
mod ledger;
mod marks;
mod plan;
mod planner;
mod pool;
mod range;
mod step;

pub use error::{Ownership, PlanError, Refusal, Site};
pub use group::Group;
pub use interval::TokenInterval;
pub use ledger::Ledger;
pub use plan::{FillPlan, GroupFill};
pub use planner::{Planner, PlannerOptions, Request, Scratch};
pub use pool::{BlockId, Pool};
pub use range::{BlockIndex, BlockRange};
pub use step::{Partial, StepPlan};
