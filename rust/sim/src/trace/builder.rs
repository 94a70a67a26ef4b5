//! Rows in, a checked trace out.

use std::collections::HashMap;

use super::{MAX_TOKENS, Record, RowError, Trace, TraceNotes, ms_of_ns};

/// Collects rows in any order and checks them against each other.
#[derive(Debug)]
pub(crate) struct TraceBuilder {
    hash_block_size: u32,
    requests: Vec<Record>,
    hash_blocks: Vec<u32>,
    /// Ids come from a file: a hash that anyone can foresee would let it make every one of them collide.
    numbers: HashMap<u64, u32>,
    firsts: Vec<First>,
    notes: TraceNotes,
    files: Vec<String>,
}

/// Where an id stood first, and what it said there.
#[derive(Debug)]
struct First {
    id: u64,
    parent: Option<u32>,
    tokens: u32,
    line: u64,
    /// Number of the file, from 1; 0 if there is none.
    file: u32,
}

/// One row, its fields already in range.
#[derive(Debug)]
pub(crate) struct Row<'r> {
    pub arrival_ns: u64,
    pub input_tokens: u32,
    pub output_tokens: u32,
    pub ids: &'r [u64],
}

impl TraceBuilder {
    /// For hash blocks of that many tokens, in `[1, MAX_TOKENS]`.
    pub(crate) fn new(hash_block_size: u32) -> Self {
        Self {
            hash_block_size,
            requests: Vec::new(),
            hash_blocks: Vec::new(),
            numbers: HashMap::new(),
            firsts: Vec::new(),
            notes: TraceNotes::default(),
            files: Vec::new(),
        }
    }

    pub(crate) fn hash_block_size(&self) -> u32 {
        self.hash_block_size
    }

    /// Before the first row.
    pub(crate) fn set_hash_block_size(&mut self, hash_block_size: u32) {
        self.hash_block_size = hash_block_size;
    }

    /// The rows that follow are those of another file.
    pub(crate) fn next_file(&mut self, name: &str) {
        self.files.push(name.to_owned());
    }

    /// The ids that follow have nothing to do with those before.
    pub(crate) fn forget_ids(&mut self) {
        self.numbers.clear();
    }

    fn file(&self) -> u32 {
        u32::try_from(self.files.len()).unwrap_or(u32::MAX)
    }

    /// ` of FILE`, if an id stood first in another file.
    fn other_file(&self, first: &First) -> String {
        let name =
            (first.file != self.file()).then(|| self.files.get((first.file as usize).wrapping_sub(1)));
        name.flatten().map_or_else(String::new, |name| format!(" of {name}"))
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Adds the row on `line`.
    pub(crate) fn push(&mut self, line: u64, row: &Row<'_>) -> Result<(), RowError> {
        let &Row { arrival_ns, input_tokens: input, output_tokens: output, ids } = row;
        let block = self.hash_block_size;
        if input == 0 {
            return Err(RowError::EmptyPrompt);
        }
        if input.checked_add(output).is_none_or(|tokens| tokens > MAX_TOKENS) {
            return Err(RowError::TooManyTokens { input, output });
        }
        let (whole, all) = (input / block, input.div_ceil(block));
        let start = self.hash_blocks.len();
        if ids.is_empty() {
            self.notes.unhashed += 1;
        } else if ids.len() < whole as usize {
            return Err(RowError::TooFewIds { ids: ids.len(), input, block, needed: whole });
        } else if ids.len() > all as usize {
            return Err(RowError::TooManyIds { ids: ids.len(), input, block, most: all });
        } else {
            self.notes.floor_hashed += u64::from(ids.len() < all as usize);
            self.intern(line, input, ids)?;
        }
        self.notes.prefill_only += u64::from(output == 0);
        self.requests.push(Record {
            arrival_ns,
            input_tokens: input,
            output_tokens: output,
            start,
            len: ids.len(),
        });
        Ok(())
    }

    fn intern(&mut self, line: u64, input: u32, ids: &[u64]) -> Result<(), RowError> {
        let file = self.file();
        let mut parent = None;
        let mut left = input;
        for &id in ids {
            let tokens = left.min(self.hash_block_size);
            left -= tokens;
            let next = u32::try_from(self.firsts.len()).unwrap_or(u32::MAX);
            let number = *self.numbers.entry(id).or_insert(next);
            if number == next {
                self.firsts.push(First { id, parent, tokens, line, file });
            } else {
                let first = &self.firsts[number as usize];
                if first.parent != parent {
                    return Err(RowError::IdParent {
                        id,
                        parent: self.parent_name(parent),
                        first_parent: self.parent_name(first.parent),
                        first_line: first.line,
                        first_file: self.other_file(first),
                    });
                }
                if first.tokens != tokens {
                    let (first_tokens, first_line) = (first.tokens, first.line);
                    let first_file = self.other_file(first);
                    return Err(RowError::IdLength {
                        id,
                        tokens,
                        first_tokens,
                        first_line,
                        first_file,
                    });
                }
            }
            parent = Some(number);
            self.hash_blocks.push(number);
        }
        Ok(())
    }

    fn parent_name(&self, parent: Option<u32>) -> String {
        match parent {
            Some(number) => format!("hash id {}", self.firsts[number as usize].id),
            None => "nothing".to_owned(),
        }
    }

    /// The trace, shifted to start at 0 and sorted by arrival.
    pub(crate) fn finish(mut self) -> Trace {
        let shift = self.requests.iter().map(|record| record.arrival_ns).min().unwrap_or(0);
        let mut latest = 0;
        for record in &mut self.requests {
            record.arrival_ns -= shift;
            self.notes.out_of_order += u64::from(record.arrival_ns < latest);
            latest = latest.max(record.arrival_ns);
        }
        self.notes.shifted_ms = ms_of_ns(shift);
        if self.notes.out_of_order > 0 {
            self.requests.sort_by_key(|record| record.arrival_ns);
            self.renumber();
        }
        self.requests.shrink_to_fit();
        self.hash_blocks.shrink_to_fit();
        Trace {
            hash_block_size: self.hash_block_size,
            requests: self.requests,
            hash_blocks: self.hash_blocks,
            num_hash_blocks: u32::try_from(self.firsts.len()).unwrap_or(u32::MAX),
            notes: self.notes,
            source: None,
        }
    }

    /// Numbers the hash blocks again, in order of first appearance among the sorted requests.
    fn renumber(&mut self) {
        let mut renumbered = vec![u32::MAX; self.firsts.len()];
        let mut next = 0;
        for record in &self.requests {
            for number in &mut self.hash_blocks[record.start..record.start + record.len] {
                let new = &mut renumbered[*number as usize];
                if *new == u32::MAX {
                    *new = next;
                    next += 1;
                }
                *number = *new;
            }
        }
    }
}
