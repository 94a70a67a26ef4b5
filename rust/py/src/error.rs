//! From refusals to the exceptions of `decodebench.errors`.

use decodebench_core::{PlanError, Refusal};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static PLAN_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static TRACE_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// A `decodebench.PlanError` of `kind`, about `request` if there is one.
pub(crate) fn plan_error(
    py: Python<'_>,
    message: String,
    kind: &'static str,
    request: Option<&str>,
) -> PyErr {
    let raised = PLAN_ERROR
        .import(py, "decodebench.errors", "PlanError")
        .and_then(|class| class.call1((message, kind, request)));
    raised.map_or_else(|error| error, PyErr::from_value)
}

/// A `decodebench.TraceError`.
pub(crate) fn trace_error(py: Python<'_>, message: String) -> PyErr {
    let raised = TRACE_ERROR
        .import(py, "decodebench.errors", "TraceError")
        .and_then(|class| class.call1((message,)));
    raised.map_or_else(|error| error, PyErr::from_value)
}

/// A malformed argument: not a broken rule of planning, but nothing can be planned with it.
pub(crate) fn bad_argument(py: Python<'_>, message: String, request: Option<&str>) -> PyErr {
    let message = match request {
        Some(request) => format!("request {request}: {message}"),
        None => message,
    };
    plan_error(py, message, "bad_argument", request)
}

pub(crate) fn broken_rule(py: Python<'_>, error: &PlanError) -> PyErr {
    plan_error(py, error.to_string(), error.kind(), None)
}

pub(crate) fn refused(py: Python<'_>, refusal: &Refusal) -> PyErr {
    plan_error(py, refusal.to_string(), refusal.error.kind(), Some(&refusal.request))
}
