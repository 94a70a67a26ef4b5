//! `Ledger`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use decodebench_core as core;
use pyo3::prelude::*;

use crate::error::{bad_argument, plan_error};
use crate::planner::Planner;
use crate::table::{Tables, unsigned};

/// Follows who owns which block, as an independent witness of a planner.
#[pyclass(frozen, module = "decodebench._core")]
pub(crate) struct Ledger(Mutex<core::Ledger>);

impl Ledger {
    /// To be called without the GIL, or at least never while waiting for it: the holder may need it.
    pub(crate) fn lock(&self) -> MutexGuard<'_, core::Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(
        &self,
        py: Python<'_>,
        id: &str,
        fact: impl FnOnce(&mut core::Ledger) -> Result<(), core::PlanError> + Send,
    ) -> PyResult<()> {
        py.detach(|| fact(&mut self.lock()))
            .map_err(|error| plan_error(py, format!("request {id}: {error}"), error.kind(), Some(id)))
    }
}

fn table_of(id: &str, what: &str, table: &Bound<'_, PyAny>) -> PyResult<Tables> {
    let mut tables = Tables::default();
    tables.push(table).map_err(|why| bad_argument(table.py(), format!("{what} {why}"), Some(id)))?;
    Ok(tables)
}

fn index_of(id: &str, what: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let index = unsigned(value, u64::MAX)
        .map_err(|why| bad_argument(value.py(), format!("{what} {why}"), Some(id)))?;
    Ok(usize::try_from(index).unwrap_or(usize::MAX))
}

#[pymethods]
impl Ledger {
    #[new]
    fn new(planner: &Bound<'_, Planner>) -> Self {
        Self(Mutex::new(core::Ledger::new(planner.get().core())))
    }

    fn admit(&self, id: &str, tables: &Bound<'_, PyAny>, hits: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = tables.py();
        let mut converted = Tables::default();
        for (index, table) in tables.try_iter()?.enumerate() {
            converted
                .push(&table?)
                .map_err(|why| bad_argument(py, format!("table {index} {why}"), Some(id)))?;
        }
        // One more than there should be is enough to know.
        let most = converted.views().len() + 1;
        let hits: Vec<usize> = hits
            .try_iter()?
            .take(most)
            .map(|hits| index_of(id, "hits", &hits?))
            .collect::<PyResult<_>>()?;
        self.tell(py, id, |ledger| ledger.admit(id, &converted.views(), &hits))
    }

    fn grow(&self, id: &str, group: &Bound<'_, PyAny>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let (group, table) = (index_of(id, "group", group)?, table_of(id, "blocks", blocks)?);
        self.tell(blocks.py(), id, |ledger| ledger.grow(id, group, table.views()[0]))
    }

    fn release(&self, id: &str, group: &Bound<'_, PyAny>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let (group, table) = (index_of(id, "group", group)?, table_of(id, "blocks", blocks)?);
        self.tell(blocks.py(), id, |ledger| ledger.release(id, group, table.views()[0]))
    }

    fn finish(&self, py: Python<'_>, id: &str) -> PyResult<()> {
        self.tell(py, id, |ledger| ledger.finish(id))
    }
}
