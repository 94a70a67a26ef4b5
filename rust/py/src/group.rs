//! `Group`.

use decodebench_core as core;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error::{bad_argument, broken_rule};
use crate::table::{type_name, unsigned};

/// A KV-cache group: how its blocks relate to tokens.
#[pyclass(frozen, eq, hash, module = "decodebench._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Group(pub(crate) core::Group);

#[pymethods]
impl Group {
    #[new]
    #[pyo3(signature = (indexing, span=None))]
    fn new(py: Python<'_>, indexing: &str, span: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let span = span
            .map(|span| {
                unsigned(span, u64::from(u32::MAX))
                    .map_err(|why| bad_argument(py, format!("span {why}"), None))
            })
            .transpose()?
            .map(|span| u32::try_from(span).unwrap_or(u32::MAX));
        let group = match (indexing, span) {
            ("positional", Some(span)) => core::Group::positional(span),
            ("state", Some(span)) => core::Group::state(span),
            ("ring", None) => Ok(core::Group::Ring),
            ("excluded", None) => Ok(core::Group::Excluded),
            ("positional" | "state", None) => {
                return Err(bad_argument(py, format!("a {indexing} group needs a span"), None));
            }
            ("ring" | "excluded", Some(_)) => {
                return Err(bad_argument(py, format!("a group that is {indexing} has no span"), None));
            }
            _ => {
                let message =
                    format!("indexing must be positional, state, ring or excluded, not {indexing:?}");
                return Err(bad_argument(py, message, None));
            }
        };
        group.map(Self).map_err(|error| broken_rule(py, &error))
    }

    #[getter]
    pub(crate) fn indexing(&self) -> &'static str {
        match self.0 {
            core::Group::Positional { .. } => "positional",
            core::Group::State { .. } => "state",
            core::Group::Ring => "ring",
            core::Group::Excluded => "excluded",
        }
    }

    #[getter]
    pub(crate) fn span(&self) -> u32 {
        self.0.span().map_or(0, std::num::NonZeroU32::get)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, group) = (slf.py(), slf.get());
        let span = group.0.span().map(std::num::NonZeroU32::get);
        let arguments = (group.indexing(), span).into_pyobject(py)?;
        Ok((slf.get_type().into_any(), arguments))
    }

    fn __repr__(&self) -> String {
        match self.0.span() {
            Some(span) => format!("Group({:?}, {span})", self.indexing()),
            None => format!("Group({:?})", self.indexing()),
        }
    }
}

/// More groups than any model has, fewer than an endless iterator.
const MAX_GROUPS: usize = 1 << 16;

/// The groups of a sequence of `Group`s.
pub(crate) fn groups_of(groups: &Bound<'_, PyAny>) -> PyResult<Vec<core::Group>> {
    let py = groups.py();
    groups
        .try_iter()?
        .enumerate()
        .map(|(index, group)| {
            let group = group?;
            if index >= MAX_GROUPS {
                return Err(bad_argument(py, format!("more than {MAX_GROUPS} groups"), None));
            }
            let Ok(group) = group.cast::<Group>() else {
                let message = format!("a group must be a Group, not {}", type_name(&group));
                return Err(bad_argument(group.py(), message, None));
            };
            Ok(group.get().0)
        })
        .collect()
}

/// A tuple of `Group`s.
pub(crate) fn group_tuple<'py>(
    py: Python<'py>,
    groups: &[core::Group],
) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, groups.iter().map(|&group| Group(group)))
}
