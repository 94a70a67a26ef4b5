//! `Trace`.

use std::cell::RefCell;
use std::io::{self, Read};
use std::rc::Rc;
use std::sync::Arc;

use decodebench_sim as sim;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyType};

use crate::error::trace_error;
use crate::table::unsigned;

/// A request trace in order of arrival. Immutable.
#[pyclass(frozen, module = "decodebench._core")]
pub(crate) struct Trace(pub(crate) Arc<sim::Trace>);

#[pymethods]
impl Trace {
    #[classmethod]
    #[pyo3(signature = (file, name, limit=None))]
    fn read_mooncake(
        cls: &Bound<'_, PyType>,
        file: &Bound<'_, PyAny>,
        name: &str,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let py = cls.py();
        let mut options = sim::TraceOptions::default();
        if let Some(limit) = limit {
            let limit =
                unsigned(limit, u64::MAX).map_err(|why| trace_error(py, format!("limit {why}")))?;
            options.limit = Some(usize::try_from(limit).unwrap_or(usize::MAX));
        }
        let failure = Rc::default();
        let source = PythonFile { file: file.clone(), failure: Rc::clone(&failure) };
        let trace = sim::Trace::parse_mooncake(source, name, options);
        match failure.take() {
            Some(failure) if !failure.is_instance_of::<PyOSError>(py) => Err(failure),
            _ => trace
                .map(|trace| Self(Arc::new(trace)))
                .map_err(|error| trace_error(py, error.to_string())),
        }
    }

    #[classmethod]
    fn conversation(
        cls: &Bound<'_, PyType>,
        seed: &Bound<'_, PyAny>,
        requests: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = cls.py();
        let seed = unsigned(seed, u64::MAX).map_err(|why| trace_error(py, format!("seed {why}")))?;
        let requests = unsigned(requests, MAX_REQUESTS)
            .map_err(|why| trace_error(py, format!("requests {why}")))?;
        let requests = usize::try_from(requests).unwrap_or(usize::MAX);
        Ok(Self(Arc::new(py.detach(|| sim::conversation(seed, requests)))))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    #[getter]
    fn hash_block_size(&self) -> u32 {
        self.0.hash_block_size()
    }

    #[getter]
    fn input_tokens(&self) -> u64 {
        self.0.input_tokens()
    }

    #[getter]
    fn output_tokens(&self) -> u64 {
        self.0.output_tokens()
    }

    #[getter]
    fn notes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let notes = self.0.notes();
        let dict = PyDict::new(py);
        dict.set_item("unhashed", notes.unhashed)?;
        dict.set_item("floor_hashed", notes.floor_hashed)?;
        dict.set_item("prefill_only", notes.prefill_only)?;
        dict.set_item("out_of_order", notes.out_of_order)?;
        dict.set_item("shifted_ms", notes.shifted_ms)?;
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        format!("Trace({} requests, {} input tokens)", self.0.len(), self.0.input_tokens())
    }
}

/// Most requests of a made-up trace: it is made in one go, some tenths of a second for this many.
const MAX_REQUESTS: u64 = 100_000;

/// Bytes that are asked for at a time: few calls, and Ctrl-C does not wait long.
const CHUNK: usize = 1 << 20;

/// A binary file of Python's, which opens and waits as Python does: names of any encoding, pipes without a
/// writer, signals.
struct PythonFile<'py> {
    file: Bound<'py, PyAny>,
    /// What the file raised.
    failure: Rc<RefCell<Option<PyErr>>>,
}

impl Read for PythonFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut read = || {
            self.file.py().check_signals()?;
            let bytes = self.file.call_method1("read", (buffer.len().min(CHUNK),))?;
            let bytes = bytes.cast::<PyBytes>()?;
            let target = buffer.get_mut(..bytes.as_bytes().len());
            let target = target.ok_or_else(|| PyValueError::new_err("read more than asked for"))?;
            target.copy_from_slice(bytes.as_bytes());
            Ok(target.len())
        };
        read().map_err(|failure: PyErr| {
            let message = failure.value(self.file.py()).to_string();
            self.failure.replace(Some(failure));
            io::Error::other(message)
        })
    }
}
