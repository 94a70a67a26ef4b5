//! `Replay` and `FillStep`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use decodebench_core as core;
use decodebench_sim as sim;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::error::{plan_error, trace_error};
use crate::group::group_tuple;
use crate::step::{int32_array, int32_bytes, int64_array};
use crate::table::unsigned;
use crate::trace::Trace;

/// A request trace through a simulated engine.
#[pyclass(frozen, module = "decodebench._core")]
pub(crate) struct Replay {
    replay: Mutex<sim::Replay>,
    done: AtomicBool,
}

#[pymethods]
impl Replay {
    #[new]
    #[pyo3(signature = (
        trace, *, block_size, num_blocks, groups, max_num_seqs, step_ms, selection, record_memory,
        concurrency=None
    ))]
    #[allow(clippy::too_many_arguments)] // keyword arguments, on the Python side
    fn new(
        py: Python<'_>,
        trace: &Bound<'_, Trace>,
        block_size: &Bound<'_, PyAny>,
        num_blocks: &Bound<'_, PyAny>,
        groups: Vec<String>,
        max_num_seqs: &Bound<'_, PyAny>,
        step_ms: f64,
        selection: &str,
        record_memory: bool,
        concurrency: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let number = |name: &str, value: &Bound<'_, PyAny>| {
            unsigned(value, u64::from(u32::MAX))
                .map(|number| u32::try_from(number).unwrap_or(u32::MAX))
                .map_err(|why| trace_error(py, format!("{name} {why}")))
        };
        let refuse = |error: sim::ConfigError| trace_error(py, error.to_string());
        let kinds = groups.iter().map(|group| group.parse::<sim::GroupKind>().map_err(refuse));
        let config = sim::ReplayConfig {
            block_size: number("block_size", block_size)?,
            num_blocks: number("num_blocks", num_blocks)?,
            groups: kinds.collect::<PyResult<_>>()?,
            max_num_seqs: number("max_num_seqs", max_num_seqs)?,
            concurrency: concurrency.map(|clients| number("concurrency", clients)).transpose()?,
            step_ms,
            selection: selection.parse().map_err(refuse)?,
            record_memory,
        };
        let trace = std::sync::Arc::clone(&trace.get().0);
        let replay = py.detach(|| sim::Replay::new(trace, config)).map_err(refuse)?;
        Ok(Self { replay: Mutex::new(replay), done: AtomicBool::new(false) })
    }

    fn advance(&self, py: Python<'_>, max_steps: u64) -> PyResult<Option<FillStep>> {
        let (advanced, planner) = py.detach(|| {
            let mut replay = self.lock();
            let advanced = replay.advance(max_steps);
            (advanced, replay.planner().clone())
        });
        let contradiction = |error: sim::ReplayError| {
            let refusal = error.refusal();
            plan_error(py, error.to_string(), refusal.error.kind(), Some(&refusal.request))
        };
        match advanced.map_err(contradiction)? {
            sim::Advance::Fill(step) => FillStep::new(py, &planner, &step).map(Some),
            sim::Advance::Done => {
                self.done.store(true, Ordering::Relaxed);
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    fn running<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for running in self.lock().running() {
            let tables = tables(py, running.tables)?;
            list.append((running.request, running.sequence, running.local, running.external, tables))?;
        }
        Ok(list)
    }

    fn waiting(&self) -> Vec<usize> {
        self.lock().waiting().collect()
    }

    fn free_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        int32_array(py, &int32_bytes(py, &self.lock().free_blocks()))
    }

    fn cached_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        int32_array(py, &int32_bytes(py, &self.lock().cached_blocks()))
    }

    #[getter]
    fn done(&self) -> bool {
        self.done.load(Ordering::Relaxed)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.lock().stats());
        let dict = PyDict::new(py);
        dict.set_item("requests", stats.requests)?;
        dict.set_item("rejected", stats.rejected)?;
        dict.set_item("finished", stats.finished)?;
        dict.set_item("admissions", stats.admissions)?;
        dict.set_item("preemptions", stats.preemptions)?;
        dict.set_item("steps", stats.steps)?;
        dict.set_item("local_tokens", stats.local_tokens)?;
        dict.set_item("external_tokens", stats.external_tokens)?;
        dict.set_item("blocks_selected", stats.blocks_selected)?;
        dict.set_item("null_blocks_skipped", stats.null_blocks_skipped)?;
        dict.set_item("heads_preserved", stats.heads_preserved)?;
        dict.set_item("duplicates_merged", stats.duplicates_merged)?;
        dict.set_item("selections_refused", stats.selections_refused)?;
        dict.set_item("unhashed", stats.unhashed)?;
        dict.set_item("prefill_only", stats.prefill_only)?;
        dict.set_item("peak_running", stats.peak_running)?;
        dict.set_item("peak_blocks", stats.peak_blocks)?;
        dict.set_item("virtual_seconds", stats.virtual_seconds)?;
        dict.set_item("plan_seconds", stats.plan_seconds)?;
        dict.set_item("plan_p50_seconds", stats.plan_p50_seconds)?;
        dict.set_item("plan_p99_seconds", stats.plan_p99_seconds)?;
        Ok(dict)
    }
}

impl Replay {
    fn lock(&self) -> MutexGuard<'_, sim::Replay> {
        self.replay.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One engine step in which something is written or can be checked.
#[pyclass(frozen, get_all, module = "decodebench._core")]
pub(crate) struct FillStep {
    num_blocks: u32,
    groups: Py<PyTuple>,
    engine_writes: Py<PyList>,
    released: Py<PyList>,
    block_ids: Py<PyAny>,
    group_offsets: Py<PyAny>,
    partials: Py<PyAny>,
    block_sequences: Py<PyAny>,
    admitted: Py<PyList>,
}

impl FillStep {
    fn new(py: Python<'_>, planner: &core::Planner, step: &sim::FillStep) -> PyResult<Self> {
        let writes = PyList::empty(py);
        for group in &step.engine_writes {
            let slots = int64_array(py, &group.slots)?;
            let sequences: Vec<i64> = group.sequences.iter().copied().map(i64::from).collect();
            writes.append((slots, int64_array(py, &sequences)?))?;
        }
        let released = PyList::empty(py);
        for request in &step.released {
            released.append((request.sequence, tables(py, &request.tables)?))?;
        }
        let admitted = PyList::empty(py);
        for request in &step.admitted {
            let tables = tables(py, &request.tables)?;
            admitted.append((request.sequence, request.local, request.external, tables))?;
        }
        let sequences: Vec<i64> = step.admitted.iter().map(|r| i64::from(r.sequence)).collect();
        let flat = Flat::of(&step.fills, step.engine_writes.len(), sequences.len());
        let block_sequences: Vec<i64> = flat
            .cell_ends
            .windows(2)
            .enumerate()
            .flat_map(|(cell, ends)| {
                let sequence = sequences.get(cell % sequences.len().max(1)).copied().unwrap_or(0);
                std::iter::repeat_n(sequence, ends[1] - ends[0])
            })
            .collect();
        let array = |numbers: &[i32]| int32_array(py, &int32_bytes(py, numbers));
        Ok(Self {
            num_blocks: planner.pool().num_blocks(),
            groups: group_tuple(py, planner.groups())?.unbind(),
            engine_writes: writes.unbind(),
            released: released.unbind(),
            block_ids: array(&flat.block_ids)?.unbind(),
            group_offsets: array(&flat.group_offsets)?.unbind(),
            partials: array(&flat.partials)?.call_method1("reshape", (-1, 3))?.unbind(),
            block_sequences: int64_array(py, &block_sequences)?.unbind(),
            admitted: admitted.unbind(),
        })
    }
}

/// The fills of a step as flat arrays, whichever rule selected them.
struct Flat {
    block_ids: Vec<i32>,
    cell_ends: Vec<usize>,
    group_offsets: Vec<i32>,
    partials: Vec<i32>,
}

impl Flat {
    fn of(fills: &sim::Fills, num_groups: usize, num_requests: usize) -> Self {
        let (mut block_ids, mut cell_ends, mut partials) = (Vec::new(), vec![0], Vec::new());
        match fills {
            sim::Fills::Interval(plan) => {
                block_ids.extend_from_slice(plan.all_block_ids());
                cell_ends = plan.cell_ends().to_vec();
                partials.extend(plan.partials().iter().flat_map(|partial| {
                    [
                        int32(partial.position),
                        partial.slots.start.cast_signed(),
                        partial.slots.end.cast_signed(),
                    ]
                }));
            }
            sim::Fills::Leading(leading) => {
                for group in 0..num_groups {
                    let start = block_ids.len();
                    block_ids.extend_from_slice(leading.block_ids(group));
                    cell_ends.extend(leading.ends(group).iter().skip(1).map(|end| start + end));
                }
            }
            _ => {}
        }
        let offset = |group: usize| cell_ends.get(group * num_requests).copied().unwrap_or(0);
        let group_offsets = (0..=num_groups).map(|group| int32(offset(group))).collect();
        Self { block_ids, cell_ends, group_offsets, partials }
    }
}

fn int32(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn tables<'py>(py: Python<'py>, tables: &[Vec<i32>]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for table in tables {
        list.append(int32_array(py, &int32_bytes(py, table))?)?;
    }
    Ok(list)
}
