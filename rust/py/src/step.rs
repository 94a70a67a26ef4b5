//! `StepPlan`.

use std::borrow::Cow;
use std::num::NonZeroU32;

use decodebench_core as core;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyString, PyTuple};

use crate::error::{bad_argument, broken_rule};
use crate::group::{Group, group_tuple};

/// The fills of all requests of one scheduler step, as flat int32 arrays.
#[pyclass(frozen, module = "decodebench._core")]
pub(crate) struct StepPlan {
    num_blocks: u32,
    null_block: Option<i32>,
    groups: Py<PyTuple>,
    request_ids: Py<PyTuple>,
    /// int32 [n].
    block_ids: Py<PyBytes>,
    /// int32 [groups * requests + 1].
    cell_ends: Py<PyBytes>,
    /// int32 [p, 3]: position, first slot, end slot.
    partials: Py<PyBytes>,
    counts: Counts,
}

/// Null blocks skipped, repeats merged, heads preserved.
type Counts = (u64, u64, u64);

impl StepPlan {
    pub(crate) fn new(
        py: Python<'_>,
        planner: &core::Planner,
        plan: &core::StepPlan,
        request_ids: Bound<'_, PyTuple>,
    ) -> PyResult<Self> {
        let ends = plan.cell_ends().iter().map(|&end| i32::try_from(end).unwrap_or(i32::MAX));
        let ends: Vec<i32> = ends.collect();
        let partials = plan.partials().iter().flat_map(|partial| {
            [partial.position, partial.slots.start as usize, partial.slots.end as usize]
                .map(|number| i32::try_from(number).unwrap_or(i32::MAX))
        });
        let partials: Vec<i32> = partials.collect();
        Ok(Self {
            num_blocks: planner.pool().num_blocks(),
            null_block: planner.pool().null_block(),
            groups: group_tuple(py, plan.groups())?.unbind(),
            request_ids: request_ids.unbind(),
            block_ids: int32_bytes(py, plan.all_block_ids()),
            cell_ends: int32_bytes(py, &ends),
            partials: int32_bytes(py, &partials),
            counts: (plan.null_blocks_skipped(), plan.repeats_merged(), plan.heads_preserved()),
        })
    }

    fn ends(&self, py: Python<'_>) -> Vec<i32> {
        int32s(self.cell_ends.as_bytes(py)).into_owned()
    }

    fn num_requests(&self, py: Python<'_>) -> usize {
        self.request_ids.bind(py).len()
    }

    /// Ids of the cells `[first, last)`.
    fn ids_between<'py>(
        &self,
        py: Python<'py>,
        first: usize,
        last: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ends = int32s(self.cell_ends.as_bytes(py));
        let bound = |cell: usize| ends.get(cell).copied().unwrap_or_default();
        let (start, end) = (bound(first), bound(last));
        int32_array(py, &self.block_ids)?.get_item(pyo3::types::PySlice::new(
            py,
            start as isize,
            end as isize,
            1,
        ))
    }

    fn check_index(
        py: Python<'_>,
        what: &str,
        index: &Bound<'_, PyAny>,
        len: usize,
    ) -> PyResult<usize> {
        let max = (len as u64).saturating_sub(1);
        match crate::table::unsigned(index, max) {
            Ok(index) if len > 0 => Ok(usize::try_from(index).unwrap_or(usize::MAX)),
            Ok(_) => Err(bad_argument(py, format!("{what} of none"), None)),
            Err(why) => Err(bad_argument(py, format!("{what} {why}"), None)),
        }
    }
}

#[pymethods]
impl StepPlan {
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    #[getter]
    fn groups(&self, py: Python<'_>) -> Py<PyTuple> {
        self.groups.clone_ref(py)
    }

    #[getter]
    fn request_ids(&self, py: Python<'_>) -> Py<PyTuple> {
        self.request_ids.clone_ref(py)
    }

    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        int32_array(py, &self.block_ids)
    }

    #[getter]
    fn group_offsets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (ends, requests) = (self.ends(py), self.num_requests(py));
        let num_groups = self.groups.bind(py).len();
        let offsets = (0..=num_groups).map(|group| ends.get(group * requests).copied().unwrap_or(0));
        let offsets: Vec<i32> = offsets.collect();
        int32_array(py, &int32_bytes(py, &offsets))
    }

    #[getter]
    fn block_counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let ends = int32s(self.cell_ends.as_bytes(py));
        let requests = self.num_requests(py);
        let counts = ends.windows(2).map(|cell| cell[1] - cell[0]);
        let of_request = |request| {
            PyTuple::new(py, counts.clone().skip(request).step_by(requests).collect::<Vec<_>>())
        };
        let rows: Vec<_> = (0..requests).map(of_request).collect::<PyResult<_>>()?;
        PyTuple::new(py, rows)
    }

    #[getter]
    fn partials<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        int32_array(py, &self.partials)?.call_method1("reshape", (-1, 3))
    }

    #[getter]
    fn null_blocks_skipped(&self) -> u64 {
        self.counts.0
    }

    #[getter]
    fn repeats_merged(&self) -> u64 {
        self.counts.1
    }

    #[getter]
    fn heads_preserved(&self) -> u64 {
        self.counts.2
    }

    fn group_block_ids<'py>(
        &self,
        py: Python<'py>,
        group: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let group = Self::check_index(py, "group", group, self.groups.bind(py).len())?;
        let requests = self.num_requests(py);
        self.ids_between(py, group * requests, (group + 1) * requests)
    }

    fn request_block_ids<'py>(
        &self,
        py: Python<'py>,
        group: &Bound<'py, PyAny>,
        request: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let group = Self::check_index(py, "group", group, self.groups.bind(py).len())?;
        let requests = self.num_requests(py);
        let request = Self::check_index(py, "request", request, requests)?;
        let cell = group * requests + request;
        self.ids_between(py, cell, cell + 1)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        static RESTORE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let restore = RESTORE.import(py, "decodebench._core", "_restore_step_plan")?;
        let mut specs = Vec::new();
        for group in self.groups.bind(py) {
            let group = group.cast_into::<Group>()?;
            specs.push((group.get().indexing(), group.get().span()));
        }
        let specs = PyTuple::new(py, specs)?;
        let arguments = (
            self.num_blocks,
            self.null_block,
            specs,
            self.request_ids.bind(py),
            self.block_ids.bind(py),
            self.cell_ends.bind(py),
            self.partials.bind(py),
            self.counts,
        );
        Ok((restore.clone(), arguments.into_pyobject(py)?))
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Ok(other) = other.cast::<Self>() else { return Ok(false) };
        let other = other.get();
        Ok((self.num_blocks, self.null_block) == (other.num_blocks, other.null_block)
            && self.counts == other.counts
            && self.groups.bind(py).eq(&other.groups)?
            && self.request_ids.bind(py).eq(&other.request_ids)?
            && self.block_ids.as_bytes(py) == other.block_ids.as_bytes(py)
            && self.cell_ends.as_bytes(py) == other.cell_ends.as_bytes(py)
            && self.partials.as_bytes(py) == other.partials.as_bytes(py))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!(
            "StepPlan({} requests, {} blocks in {} groups)",
            self.num_requests(py),
            self.block_ids.as_bytes(py).len() / 4,
            self.groups.bind(py).len(),
        )
    }
}

/// A `StepPlan` from its buffers, as pickling writes them. They are checked: ids in the pool, cells in
/// order, partial blocks inside their group.
#[pyfunction]
#[pyo3(name = "_restore_step_plan")]
#[allow(clippy::too_many_arguments)] // what a pickle holds
pub(crate) fn restore_step_plan(
    py: Python<'_>,
    num_blocks: u32,
    null_block: Option<i32>,
    groups: Vec<(String, u32)>,
    request_ids: Bound<'_, PyTuple>,
    block_ids: Bound<'_, PyBytes>,
    cell_ends: Bound<'_, PyBytes>,
    partials: Bound<'_, PyBytes>,
    counts: Counts,
) -> PyResult<StepPlan> {
    let corrupt = |what| broken_rule(py, &core::PlanError::Corrupt { what });
    let spanned = |span| NonZeroU32::new(span).ok_or_else(|| corrupt("a span of 0"));
    let groups = groups.iter().map(|(indexing, span)| match indexing.as_str() {
        "positional" => Ok(core::Group::Positional { span: spanned(*span)? }),
        "state" => Ok(core::Group::State { span: spanned(*span)? }),
        "ring" => Ok(core::Group::Ring),
        "excluded" => Ok(core::Group::Excluded),
        _ => Err(corrupt("an unknown indexing")),
    });
    let groups: Vec<core::Group> = groups.collect::<PyResult<_>>()?;
    for bytes in [&block_ids, &cell_ends, &partials] {
        if !bytes.as_bytes().len().is_multiple_of(4) {
            return Err(corrupt("a buffer that is not int32"));
        }
    }
    for id in &request_ids {
        if !id.is_instance_of::<PyString>() {
            return Err(corrupt("a request id that is not a str"));
        }
    }
    let pool = core::Pool::new(num_blocks, null_block).map_err(|error| broken_rule(py, &error))?;
    core::StepPlan::check_parts(
        pool,
        &groups,
        request_ids.len(),
        &int32s(block_ids.as_bytes()),
        &int32s(cell_ends.as_bytes()),
        &int32s(partials.as_bytes()),
    )
    .map_err(|error| broken_rule(py, &error))?;
    Ok(StepPlan {
        num_blocks,
        null_block,
        groups: group_tuple(py, &groups)?.unbind(),
        request_ids: request_ids.unbind(),
        block_ids: block_ids.unbind(),
        cell_ends: cell_ends.unbind(),
        partials: partials.unbind(),
        counts,
    })
}

/// A read-only NumPy int32 array over `bytes`.
pub(crate) fn int32_array<'py>(py: Python<'py>, bytes: &Py<PyBytes>) -> PyResult<Bound<'py, PyAny>> {
    from_buffer(py, bytes.bind(py), "int32")
}

/// A read-only NumPy int64 array of `numbers`.
pub(crate) fn int64_array<'py>(py: Python<'py>, numbers: &[i64]) -> PyResult<Bound<'py, PyAny>> {
    from_buffer(py, &PyBytes::new(py, bytemuck::cast_slice(numbers)), "int64")
}

fn from_buffer<'py>(
    py: Python<'py>,
    bytes: &Bound<'py, PyBytes>,
    dtype: &str,
) -> PyResult<Bound<'py, PyAny>> {
    static FROM_BUFFER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    FROM_BUFFER.import(py, "numpy", "frombuffer")?.call1((bytes, dtype))
}

/// `numbers` as native int32.
pub(crate) fn int32_bytes(py: Python<'_>, numbers: &[i32]) -> Py<PyBytes> {
    PyBytes::new(py, bytemuck::cast_slice(numbers)).unbind()
}

/// The native int32s of `bytes`: in place, unless they are not aligned.
fn int32s(bytes: &[u8]) -> Cow<'_, [i32]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(numbers) => Cow::Borrowed(numbers),
        Err(_) => {
            let words = bytes.chunks_exact(4).map(|word| word.try_into().map_or(0, i32::from_ne_bytes));
            Cow::Owned(words.collect())
        }
    }
}
