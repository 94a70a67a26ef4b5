//! Numbers and block tables from Python.

use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyTuple};

/// A Python integer in `[0, max]`, or what is wrong with it.
pub(crate) fn unsigned(value: &Bound<'_, PyAny>, max: u64) -> Result<u64, String> {
    let not_an_integer = || format!("must be an integer, not {}", type_name(value));
    if value.is_instance_of::<PyBool>() {
        return Err(not_an_integer());
    }
    let index = if value.is_exact_instance_of::<PyInt>() {
        value.clone()
    } else {
        value.call_method0("__index__").map_err(|_| not_an_integer())?
    };
    match index.extract::<u64>() {
        Ok(number) if number <= max => Ok(number),
        _ => Err(format!("must lie in [0, {max}], got {}", printed(&index))),
    }
}

/// The number as text, cut so that a message stays a line.
fn printed(value: &Bound<'_, PyAny>) -> String {
    let text = value.str().map_or_else(|_| "a number too long to print".into(), |s| s.to_string());
    if text.len() > 40 { format!("a number of {} digits", text.len()) } else { text }
}

/// Most entries of one table. More blocks than any request has; a buffer may claim any number of entries
/// without holding memory for them.
const MAX_ENTRIES: usize = 1 << 26;

/// Block tables, one after the other in one allocation, which [`Tables::clear`] keeps.
#[derive(Default)]
pub(crate) struct Tables {
    /// The first `used` entries are those of the tables.
    entries: Vec<i32>,
    used: usize,
    ends: Vec<usize>,
}

impl Tables {
    /// Forgets the tables.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
        self.ends.clear();
    }

    /// Room for `len` more entries.
    fn claim(&mut self, len: usize) -> Result<&mut [i32], String> {
        let start = self.used;
        let used = start.checked_add(len).filter(|_| len <= MAX_ENTRIES);
        let used = used.ok_or_else(|| format!("has {len} entries, more than {MAX_ENTRIES}"))?;
        if let Some(missing) = used.checked_sub(self.entries.len()) {
            let reserved = self.entries.try_reserve(missing);
            reserved.map_err(|_| format!("has {len} entries, for which there is no memory"))?;
            self.entries.resize(used, 0);
        }
        self.used = used;
        Ok(&mut self.entries[start..used])
    }

    /// Appends a table; on failure says what is wrong with it.
    pub(crate) fn push(&mut self, table: &Bound<'_, PyAny>) -> Result<(), String> {
        if let Ok(list) = table.cast::<PyList>() {
            self.push_list(list)?;
        } else if let Ok(tuple) = table.cast::<PyTuple>() {
            self.push_list(&tuple.to_list())?;
        } else {
            self.push_buffer(table)?;
        }
        self.ends.push(self.used);
        Ok(())
    }

    /// The tables, in the order they were pushed.
    pub(crate) fn views(&self) -> Vec<&[i32]> {
        let starts = std::iter::once(&0).chain(&self.ends);
        starts.zip(&self.ends).map(|(&start, &end)| &self.entries[start..end]).collect()
    }

    fn push_list(&mut self, list: &Bound<'_, PyList>) -> Result<(), String> {
        for (index, slot) in self.claim(list.len())?.iter_mut().enumerate() {
            // An entry's `__index__` may run Python code that shortens the list: then there is no such item.
            *slot = match small_int(list, index) {
                Some(id) => id,
                None => block_id(&list.get_item(index).map_err(|error| error.to_string())?)?,
            };
        }
        Ok(())
    }

    fn push_buffer(&mut self, table: &Bound<'_, PyAny>) -> Result<(), String> {
        let not_a_table = || {
            format!(
                "must be a list, a tuple or a one-dimensional buffer of 32- or 64-bit integers, not {}",
                type_name(table)
            )
        };
        let buffer = PyUntypedBuffer::get(table).map_err(|_| not_a_table())?;
        let foreign = if cfg!(target_endian = "little") { b">!".as_slice() } else { b"<" };
        if buffer.format().to_bytes().first().is_some_and(|order| foreign.contains(order)) {
            return Err("holds integers of the other byte order".into());
        }
        if buffer.dimensions() != 1 {
            return Err(format!("has {} dimensions, not 1", buffer.dimensions()));
        }
        let py = table.py();
        if let Ok(buffer) = buffer.as_typed::<i32>() {
            let entries = self.claim(buffer.item_count())?;
            buffer.copy_to_slice(py, entries).map_err(|error| error.to_string())
        } else if let Ok(buffer) = buffer.as_typed::<i64>() {
            self.narrow(py, buffer)
        } else if let Ok(buffer) = buffer.as_typed::<u32>() {
            self.narrow(py, buffer)
        } else if let Ok(buffer) = buffer.as_typed::<u64>() {
            self.narrow(py, buffer)
        } else {
            Err(not_a_table())
        }
    }

    fn narrow<T>(&mut self, py: Python<'_>, buffer: &PyBuffer<T>) -> Result<(), String>
    where
        T: Element + std::fmt::Display,
        i32: TryFrom<T>,
    {
        let entries = self.claim(buffer.item_count())?;
        let wide = buffer.to_vec(py).map_err(|error| error.to_string())?;
        for (slot, entry) in entries.iter_mut().zip(wide) {
            *slot = i32::try_from(entry).map_err(|_| too_large(&entry.to_string()))?;
        }
        Ok(())
    }
}

/// Entry `index` of `list` if it is a plain `int` of 32 bits.
///
/// Schedulers hold block tables as lists of ints, and a step has some 10^5 entries. Through
/// `get_item` and `extract` an entry costs 12 ns, reference counting and type checks included, and this
/// way 4 ns, on the machine where the list comprehension that `benches/plan_step.py` compares with needs
/// 20 ns.
#[allow(unsafe_code)]
fn small_int(list: &Bound<'_, PyList>, index: usize) -> Option<i32> {
    let index = ffi::Py_ssize_t::try_from(index).ok()?;
    let mut overflow = 0;
    // SAFETY: the caller's `Bound` proves that this thread holds the GIL (the module asks for it where
    // Python can run without) and that `list` is a list. A null item (an index out of range) is caught, and
    // its exception cleared. The item is borrowed from the list; nothing between here and its last use can
    // run Python code or let another thread drop it, since an exact `int` converts without a callback.
    let id = unsafe {
        let item = ffi::PyList_GetItem(list.as_ptr(), index);
        if item.is_null() {
            ffi::PyErr_Clear();
            return None;
        }
        if ffi::Py_TYPE(item) != &raw mut ffi::PyLong_Type {
            return None;
        }
        ffi::PyLong_AsLongAndOverflow(item, &raw mut overflow)
    };
    if overflow == 0 { i32::try_from(id).ok() } else { None }
}

/// Any integer of 32 bits, or what is wrong with the entry.
pub(crate) fn block_id(entry: &Bound<'_, PyAny>) -> Result<i32, String> {
    match entry.extract::<i32>() {
        Ok(id) if !entry.is_instance_of::<PyBool>() => Ok(id),
        Ok(_) => Err("holds a bool, not an integer".into()),
        Err(_) if entry.is_instance_of::<PyInt>() => Err(too_large(&printed(entry))),
        Err(_) => Err(format!("holds a {}, not an integer", type_name(entry))),
    }
}

/// The name of a value's type, for messages.
pub(crate) fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "object".into(), |name| name.to_string())
}

fn too_large(id: &str) -> String {
    format!("holds {id}, which is no 32-bit block id")
}
