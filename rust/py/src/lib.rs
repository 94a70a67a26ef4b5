//! `decodebench._core`: the planner and the replay for Python. Conversion only, no arithmetic.

mod error;
mod group;
mod ledger;
mod planner;
mod replay;
mod step;
mod table;
mod trace;

use pyo3::prelude::*;

/// The extension module.
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use crate::group::Group;
    #[pymodule_export]
    use crate::ledger::Ledger;
    #[pymodule_export]
    use crate::planner::{GroupFill, Planner};
    #[pymodule_export]
    use crate::replay::{FillStep, Replay};
    #[pymodule_export]
    use crate::step::{StepPlan, restore_step_plan};
    #[pymodule_export]
    use crate::trace::Trace;

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
