//! `Planner` and `GroupFill`.

use std::sync::{Mutex, PoisonError};

use decodebench_core as core;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyString, PyTuple};

use crate::error::{bad_argument, broken_rule, refused};
use crate::group::{group_tuple, groups_of};
use crate::ledger::Ledger;
use crate::step::{StepPlan, int32_array, int32_bytes};
use crate::table::{Tables, block_id, type_name, unsigned};

/// Selects and checks the blocks that requests fill. Threads may share one.
#[pyclass(frozen, module = "decodebench._core")]
pub(crate) struct Planner {
    planner: core::Planner,
    /// Working memory that no thread is using.
    idle: Mutex<Vec<Working>>,
}

#[derive(Default)]
struct Working {
    scratch: core::Scratch,
    tables: Tables,
}

impl Planner {
    pub(crate) fn core(&self) -> &core::Planner {
        &self.planner
    }

    /// Converts `requests`, then runs `plan` on them without the GIL, and `finish` with it.
    fn with_requests<'py, P: Send, T>(
        &self,
        py: Python<'py>,
        requests: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
        plan: impl FnOnce(&mut core::Scratch, &[core::Request<'_>]) -> Result<P, core::Refusal> + Send,
        finish: impl FnOnce(&[RequestFacts], &mut core::Scratch, P) -> PyResult<T>,
    ) -> PyResult<T> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let Working { mut scratch, mut tables } = idle().pop().unwrap_or_default();
        tables.clear();
        let num_groups = self.planner.groups().len();
        let facts = facts_of(py, requests, &mut tables, num_groups)?;
        let views = tables.views();
        let requests: Vec<core::Request<'_>> = facts
            .iter()
            .zip(views.chunks_exact(num_groups))
            .map(|(RequestFacts { id, local, external }, tables)| core::Request {
                id,
                local: *local,
                external: *external,
                tables,
            })
            .collect();
        let planned = py.detach(|| plan(&mut scratch, &requests));
        let planned = planned.map_err(|refusal| refused(py, &refusal))?;
        let finished = finish(&facts, &mut scratch, planned);
        idle().push(Working { scratch, tables });
        finished
    }
}

#[pymethods]
impl Planner {
    #[new]
    #[pyo3(
        signature = (groups, num_blocks, *, null_block=NullBlock(Some(0)), strict=false, exact_tail=false),
        text_signature = "(groups, num_blocks, *, null_block=0, strict=False, exact_tail=False)"
    )]
    fn new(
        groups: &Bound<'_, PyAny>,
        num_blocks: &Bound<'_, PyAny>,
        null_block: NullBlock,
        strict: bool,
        exact_tail: bool,
    ) -> PyResult<Self> {
        let py = groups.py();
        let num_blocks = unsigned(num_blocks, u64::from(u32::MAX))
            .map_err(|why| bad_argument(py, format!("num_blocks {why}"), None))?;
        let num_blocks = u32::try_from(num_blocks).unwrap_or(u32::MAX);
        let options = core::PlannerOptions { strict, exact_tail };
        let groups = groups_of(groups)?;
        let planner = core::Pool::new(num_blocks, null_block.0)
            .and_then(|pool| core::Planner::new(pool, groups, options))
            .map_err(|error| broken_rule(py, &error))?;
        Ok(Self { planner, idle: Mutex::default() })
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.planner.pool().num_blocks()
    }

    #[getter]
    fn null_block(&self) -> Option<i32> {
        self.planner.pool().null_block()
    }

    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        group_tuple(py, self.planner.groups())
    }

    #[getter]
    fn strict(&self) -> bool {
        self.planner.options().strict
    }

    #[getter]
    fn exact_tail(&self) -> bool {
        self.planner.options().exact_tail
    }

    fn plan(&self, request: &Bound<'_, PyAny>) -> PyResult<Vec<GroupFill>> {
        let plan = |scratch: &mut core::Scratch, requests: &[core::Request<'_>]| {
            // A step of one request also keeps the rules between groups.
            let step = self.planner.plan_step(scratch, requests, None)?;
            scratch.recycle(step);
            let mut fills = Vec::new();
            for request in requests {
                let refusal = |error| core::Refusal { request: request.id.to_owned(), error };
                let plan = self.planner.plan(scratch, request).map_err(refusal)?;
                fills.extend(plan.groups().iter().map(GroupFacts::of));
            }
            Ok(fills)
        };
        let py = request.py();
        self.with_requests(py, std::iter::once(Ok(request.clone())), plan, |_, _, fills| {
            Ok(fills.into_iter().map(|fill| GroupFill::new(py, fill)).collect())
        })
    }

    #[pyo3(signature = (requests, ledger=None))]
    fn plan_step(
        &self,
        requests: &Bound<'_, PyAny>,
        ledger: Option<&Bound<'_, Ledger>>,
    ) -> PyResult<StepPlan> {
        let py = requests.py();
        let ledger = ledger.map(|ledger| ledger.get());
        let plan = |scratch: &mut core::Scratch, requests: &[core::Request<'_>]| {
            let mut ledger = ledger.map(Ledger::lock);
            self.planner.plan_step(scratch, requests, ledger.as_deref_mut())
        };
        self.with_requests(py, requests.try_iter()?, plan, |facts, scratch, plan| {
            let ids = PyTuple::new(py, facts.iter().map(|request| &request.id))?;
            let step = StepPlan::new(py, &self.planner, &plan, ids);
            scratch.recycle(plan);
            step
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let groups = self.groups(py)?.repr()?;
        Ok(format!("Planner({groups}, num_blocks={})", self.num_blocks()))
    }
}

/// The table entry that stands for "no block".
struct NullBlock(Option<i32>);

impl FromPyObject<'_, '_> for NullBlock {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if value.is_none() {
            return Ok(Self(None));
        }
        block_id(&value)
            .map(|id| Self(Some(id)))
            .map_err(|why| bad_argument(value.py(), format!("null_block {why}"), None))
    }
}

/// A request without its tables.
struct RequestFacts {
    id: PyBackedStr,
    local: u64,
    external: u64,
}

/// An endless iterator of requests must not keep Ctrl-C waiting.
const REQUESTS_BETWEEN_SIGNALS: usize = 256;

/// Converts requests, `num_groups` tables each.
fn facts_of<'py>(
    py: Python<'py>,
    requests: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
    tables: &mut Tables,
    num_groups: usize,
) -> PyResult<Vec<RequestFacts>> {
    type Fields<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);
    let mut facts = Vec::new();
    for (index, request) in requests.enumerate() {
        let request = request?;
        if index % REQUESTS_BETWEEN_SIGNALS == 0 {
            py.check_signals()?;
        }
        let bad = |why: String| bad_argument(py, format!("request {index} {why}"), None);
        let Ok((id, local, external, request_tables)) = request.extract::<Fields<'_>>() else {
            let got = type_name(&request);
            return Err(bad(format!("must be a tuple (id, local, external, tables), not {got}")));
        };
        let id: PyBackedStr = id.extract().map_err(|_| {
            bad(format!("has an id that is a {}, not a str of valid Unicode", type_name(&id)))
        })?;
        let bad = |why: String| bad_argument(py, why, Some(&id));
        let tokens = |name: &str, value: &Bound<'_, PyAny>| {
            unsigned(value, u64::MAX).map_err(|why| bad(format!("{name} {why}")))
        };
        let (local, external) = (tokens("local", &local)?, tokens("external", &external)?);
        let not_tables =
            || bad(format!("tables must be a sequence of tables, not {}", type_name(&request_tables)));
        if request_tables.is_instance_of::<PyString>() {
            return Err(not_tables());
        }
        let mut actual = 0;
        // One more than there should be is enough to know.
        for table in request_tables.try_iter().map_err(|_| not_tables())?.take(num_groups + 1) {
            tables.push(&table?).map_err(|why| bad(format!("table {actual} {why}")))?;
            actual += 1;
        }
        if actual != num_groups {
            let error = core::PlanError::TableCount { expected: num_groups, actual };
            return Err(refused(py, &core::Refusal { request: id.to_string(), error }));
        }
        facts.push(RequestFacts { id, local, external });
    }
    Ok(facts)
}

/// What one request fills in one KV-cache group, without the tables it came from.
struct GroupFacts {
    range: core::BlockRange,
    block_ids: Vec<i32>,
    head_slot: u32,
    tail_slot: u32,
}

impl GroupFacts {
    fn of(fill: &core::GroupFill<'_>) -> Self {
        Self {
            range: fill.range(),
            block_ids: fill.block_ids().map(core::BlockId::get).collect(),
            head_slot: fill.head_slot(),
            tail_slot: fill.tail_slot(),
        }
    }
}

/// What one request fills in one KV-cache group.
#[pyclass(frozen, module = "decodebench._core")]
pub(crate) struct GroupFill {
    facts: GroupFacts,
    block_ids: Py<PyBytes>,
}

impl GroupFill {
    fn new(py: Python<'_>, facts: GroupFacts) -> Self {
        let block_ids = int32_bytes(py, &facts.block_ids);
        Self { facts, block_ids }
    }
}

#[pymethods]
impl GroupFill {
    #[getter]
    fn start(&self) -> u64 {
        self.facts.range.start().get()
    }

    #[getter]
    fn end(&self) -> u64 {
        self.facts.range.end().get()
    }

    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        int32_array(py, &self.block_ids)
    }

    #[getter]
    fn head_slot(&self) -> u32 {
        self.facts.head_slot
    }

    #[getter]
    fn tail_slot(&self) -> u32 {
        self.facts.tail_slot
    }

    fn __repr__(&self) -> String {
        let GroupFacts { range, block_ids, head_slot, tail_slot } = &self.facts;
        let blocks = block_ids.len();
        format!("GroupFill({blocks} blocks of {range}, head_slot={head_slot}, tail_slot={tail_slot})")
    }
}
