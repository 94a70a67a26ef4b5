//! `Trace`.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};
use std::rc::Rc;
use std::sync::Arc;

use decodebench_sim as sim;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};

use crate::error::trace_error;
use crate::table::unsigned;

/// A request trace in order of arrival. Immutable.
#[pyclass(frozen, module = "decodebench._core")]
pub(crate) struct Trace(pub(crate) Arc<sim::Trace>);

#[pymethods]
impl Trace {
    #[classmethod]
    #[pyo3(signature = (path, limit=None))]
    fn read_mooncake(
        cls: &Bound<'_, PyType>,
        path: &str,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let py = cls.py();
        let mut options = sim::TraceOptions::default();
        if let Some(limit) = limit {
            let limit =
                unsigned(limit, u64::MAX).map_err(|why| trace_error(py, format!("limit {why}")))?;
            options.limit = Some(usize::try_from(limit).unwrap_or(usize::MAX));
        }
        py.detach(|| {
            if path == "-" {
                return read(io::stdin().lock(), "<stdin>", options);
            }
            match File::open(path) {
                Ok(file) => read(file, path, options),
                Err(source) => {
                    let error = sim::TraceError::open(path, source);
                    Err(Python::attach(|py| trace_error(py, error.to_string())))
                }
            }
        })
    }

    #[classmethod]
    fn conversation(
        cls: &Bound<'_, PyType>,
        seed: &Bound<'_, PyAny>,
        requests: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = cls.py();
        let seed = unsigned(seed, u64::MAX).map_err(|why| trace_error(py, format!("seed {why}")))?;
        let requests =
            unsigned(requests, 1_000_000).map_err(|why| trace_error(py, format!("requests {why}")))?;
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

fn read(source: impl Read, name: &str, options: sim::TraceOptions) -> PyResult<Trace> {
    let interrupt = Rc::default();
    let source = Interruptible { source, interrupt: Rc::clone(&interrupt) };
    let trace = sim::Trace::parse_mooncake(source, name, options);
    if let Some(interrupt) = interrupt.take() {
        return Err(interrupt);
    }
    trace
        .map(|trace| Trace(Arc::new(trace)))
        .map_err(|error| Python::attach(|py| trace_error(py, error.to_string())))
}

/// A source that ends in an error when Python has a signal to raise: reading may wait for a pipe.
struct Interruptible<R> {
    source: R,
    interrupt: Rc<RefCell<Option<PyErr>>>,
}

impl<R: Read> Read for Interruptible<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer);
        match Python::attach(|py| py.check_signals()) {
            Ok(()) => read,
            Err(interrupt) => {
                self.interrupt.replace(Some(interrupt));
                Err(io::Error::other("interrupted"))
            }
        }
    }
}
