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
    #[pyo3(signature = (files, *, format=None, hash_block_size=None, time_unit=None, limit=None))]
    fn read(
        cls: &Bound<'_, PyType>,
        files: &Bound<'_, PyAny>,
        format: Option<&str>,
        hash_block_size: Option<&Bound<'_, PyAny>>,
        time_unit: Option<&str>,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let py = cls.py();
        let refuse = |message: String| trace_error(py, message);
        let number = |name: &str, value: Option<&Bound<'_, PyAny>>, max| {
            let number = value.map(|value| unsigned(value, max)).transpose();
            number.map_err(|why| refuse(format!("{name} {why}")))
        };
        let block = number("hash_block_size", hash_block_size, u32::MAX.into())?;
        let limit = number("limit", limit, u64::MAX)?;
        let mut reader = sim::TraceReader::new(sim::ReadOptions {
            format: format.map(str::parse).transpose().map_err(refuse)?,
            hash_block_size: block.map(|block| u32::try_from(block).unwrap_or(u32::MAX)),
            time_unit: time_unit.map(str::parse).transpose().map_err(refuse)?,
            limit: limit.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX)),
        });
        for item in files.try_iter()? {
            let (file, name): (Bound<'_, PyAny>, String) = item?.extract()?;
            let failure = Rc::default();
            let source = PythonFile { file, failure: Rc::clone(&failure) };
            let read = reader.read(source, &name);
            match failure.take() {
                Some(failure) if !failure.is_instance_of::<PyOSError>(py) => return Err(failure),
                _ => read.map_err(|error| refuse(error.to_string()))?,
            }
        }
        let trace = reader.finish().map_err(|error| refuse(error.to_string()))?;
        Ok(Self(Arc::new(trace)))
    }

    fn at_speed(&self, py: Python<'_>, speed: f64) -> PyResult<Self> {
        let faster = sim::Trace::clone(&self.0).at_speed(speed);
        faster.map(|trace| Self(Arc::new(trace))).ok_or_else(|| {
            trace_error(py, format!("speed {speed} is not a number above 0 that arrivals bear"))
        })
    }

    fn ideal_hit_tokens(&self, py: Python<'_>, block_size: &Bound<'_, PyAny>) -> PyResult<u64> {
        match unsigned(block_size, u32::MAX.into()).map(u32::try_from) {
            Ok(Ok(size)) if size > 0 => Ok(self.0.ideal_hit_tokens(size)),
            Err(why) => Err(trace_error(py, format!("block_size {why}"))),
            Ok(_) => Err(trace_error(py, "block_size must be at least 1".to_owned())),
        }
    }

    fn to_mooncake(&self) -> String {
        self.0.to_mooncake()
    }

    fn requests(&self) -> Vec<(f64, u32, u32)> {
        let rows = self.0.requests();
        rows.map(|row| (row.arrival_ms, row.input_tokens, row.output_tokens)).collect()
    }

    #[getter]
    fn format(&self) -> Option<String> {
        self.0.source().map(|source| source.format.to_string())
    }

    #[getter]
    fn has_hashes(&self) -> bool {
        self.0.source().is_none_or(|source| source.format.has_hashes())
    }

    #[getter]
    fn time_unit(&self) -> Option<String> {
        self.0.source().map(|source| source.time_unit.to_string())
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
