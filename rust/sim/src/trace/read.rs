//! Files of any format into one trace.

use std::collections::HashMap;
use std::io::Read;

use super::builder::Row;
use super::csv::Columns;
use super::format::{Format, TimeUnit};
use super::lines::Lines;
use super::tokens::TokenHasher;
use super::weka::Conversation;
use super::{MAX_TOKENS, RowError, Source, Trace, TraceBuilder, TraceError, mooncake, one_line};

/// How to read trace files. What is `None` comes from the format, or from the file.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReadOptions {
    /// The format; recognised from the first line if `None`.
    pub format: Option<Format>,
    /// Tokens that one hash id covers, in `[1, 2^27]`.
    pub hash_block_size: Option<u32>,
    /// The unit of numeric timestamps.
    pub time_unit: Option<TimeUnit>,
    /// Read only the first so many requests, in file order; whole conversations where a line holds one.
    pub limit: Option<usize>,
}

/// Reads files one by one into a trace.
///
/// Hash ids of conversations (`weka`) are local to each; in all other formats they mean the same in all
/// files.
#[derive(Debug)]
pub struct TraceReader {
    options: ReadOptions,
    source: Option<Source>,
    builder: TraceBuilder,
    hasher: TokenHasher,
    /// Line of the first row of each session, in this file.
    sessions: HashMap<String, u64>,
}

impl TraceReader {
    /// A reader before its first file.
    #[must_use]
    pub fn new(options: ReadOptions) -> Self {
        Self {
            options,
            source: None,
            builder: TraceBuilder::new(1),
            hasher: TokenHasher::default(),
            sessions: HashMap::new(),
        }
    }

    /// Reads one file, plain or gzip. Errors call it `name`.
    ///
    /// # Errors
    ///
    /// The file cannot be read, has no rows, is of another format than the ones before, or a row is refused.
    pub fn read(&mut self, reader: impl Read, name: &str) -> Result<(), TraceError> {
        let file = one_line(name);
        let mut lines = match Lines::new(reader) {
            Ok(lines) => lines,
            Err(error) => return Err(TraceError::Row { file, line: 1, reason: error.into() }),
        };
        self.builder.next_file(&file);
        self.sessions.clear();
        let before = self.builder.len();
        match self.read_lines(&mut lines) {
            Err(reason) => Err(TraceError::Row { file, line: lines.line().max(1), reason }),
            Ok(()) if self.builder.len() == before && !self.is_full() => {
                Err(TraceError::Empty { file })
            }
            Ok(()) => Ok(()),
        }
    }

    /// The trace.
    ///
    /// # Errors
    ///
    /// There is no request in it.
    pub fn finish(self) -> Result<Trace, TraceError> {
        match self.source {
            Some(source) if self.builder.len() > 0 => {
                let mut trace = self.builder.finish();
                trace.source = Some(source);
                Ok(trace)
            }
            _ => Err(TraceError::Empty { file: "trace".to_owned() }),
        }
    }

    fn is_full(&self) -> bool {
        self.options.limit.is_some_and(|limit| self.builder.len() >= limit)
    }

    fn read_lines(&mut self, lines: &mut Lines<'_>) -> Result<(), RowError> {
        if self.is_full() {
            return Ok(());
        }
        let Some((number, first)) = lines.next()? else { return Ok(()) };
        let format = match self.options.format {
            Some(format) => format,
            None => Format::recognise(first)?,
        };
        let columns = match format {
            Format::Azure | Format::BurstGpt => Some(Columns::of(format, first)?),
            _ => None,
        };
        // The hash block size of a conversation stands in it.
        let own = match format {
            Format::Weka => Some(Conversation::parse(first)?.block_size()?),
            _ => None,
        };
        let source = self.source_of(format, own)?;
        let mut line = if columns.is_some() { lines.next()? } else { Some((number, first)) };
        while let Some((number, text)) = line {
            self.push(source, columns.as_ref(), number, text)?;
            if self.is_full() {
                break;
            }
            line = lines.next()?;
        }
        Ok(())
    }

    fn push(
        &mut self,
        source: Source,
        columns: Option<&Columns>,
        line: u64,
        text: &str,
    ) -> Result<(), RowError> {
        let unit = source.time_unit;
        if let Some(columns) = columns {
            return self.builder.push(line, &columns.row(text, unit)?);
        }
        match source.format {
            Format::Weka => {
                let mut conversation = Conversation::parse(text)?;
                self.source_of(source.format, Some(conversation.block_size()?))?;
                self.builder.forget_ids();
                conversation.push_to(&mut self.builder, line)
            }
            Format::TokenIds => {
                let block = self.builder.hash_block_size();
                let (arrival_ns, input_tokens, output_tokens, ids) =
                    self.hasher.row(text, unit, block)?;
                self.builder.push(line, &Row { arrival_ns, input_tokens, output_tokens, ids: &ids })
            }
            format => {
                let mut row = mooncake::parse_row(text, format, unit)?;
                if let Some(session) = row.session.take()
                    && let Some(first_line) = self.sessions.insert(session, line)
                {
                    return Err(RowError::SecondTurn { first_line });
                }
                self.builder.push(line, &row.borrow())
            }
        }
    }

    /// What all files have in common; refused if this one differs.
    fn source_of(&mut self, format: Format, own: Option<u32>) -> Result<Source, RowError> {
        let given = self.options.hash_block_size;
        let block = match (own, given) {
            (Some(own), Some(given)) if own != given => {
                return Err(RowError::BlockSize { found: own, expected: given });
            }
            (None, Some(_)) if !format.has_hashes() => return Err(RowError::NoHashes { format }),
            (own, given) => own.or(given).or(format.hash_block_size()).unwrap_or(1),
        };
        if !(1..=MAX_TOKENS).contains(&block) {
            return Err(RowError::BlockSizeRange { block });
        }
        let fixed = matches!(format, Format::Azure | Format::Weka);
        let time_unit = match self.options.time_unit {
            Some(unit) if fixed && unit != format.time_unit() => {
                return Err(RowError::TimeUnit { format, unit: format.time_unit() });
            }
            Some(unit) => unit,
            None => format.time_unit(),
        };
        let source = Source { format, time_unit };
        match self.source {
            None => {
                self.source = Some(source);
                self.builder.set_hash_block_size(block);
            }
            Some(first) if first.format != format => {
                return Err(RowError::OtherFormat { found: format, expected: first.format });
            }
            Some(_) if self.builder.hash_block_size() != block => {
                let expected = self.builder.hash_block_size();
                return Err(RowError::BlockSize { found: block, expected });
            }
            Some(_) => {}
        }
        Ok(source)
    }
}
