//! Why a trace was refused.

use std::io;

use thiserror::Error;

use super::{Format, MAX_TOKENS, TimeUnit};

/// A trace that cannot be read. Displays as one line, `FILE:LINE: reason`.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A row is refused, or the file cannot be read at this row.
    #[error("{file}:{line}: {reason}")]
    Row {
        /// Name of the file.
        file: String,
        /// Number of the line, from 1.
        line: u64,
        /// What is wrong with it.
        #[source]
        reason: RowError,
    },
    /// No hash block has that size.
    #[error("hash_block_size {hash_block_size} is not in [1, {MAX_TOKENS}]")]
    HashBlockSize {
        /// What was given.
        hash_block_size: u32,
    },
    /// The file has no request in it.
    #[error("{file}: no requests")]
    Empty {
        /// Name of the file.
        file: String,
    },
}

/// What is wrong with one row of a trace.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RowError {
    /// The file ends in an error here: a directory, a damaged or cut gzip stream, a failing disk.
    #[error("cannot read: {0}")]
    Read(#[from] io::Error),
    /// The line is not text.
    #[error("not UTF-8 text")]
    NotUtf8,
    /// The line is longer than any row can be.
    #[error("the line is longer than {max} bytes")]
    LineTooLong {
        /// The limit, in bytes.
        max: u64,
    },
    /// The line is not JSON.
    #[error("not JSON: {message} at column {column}")]
    Json {
        /// What the JSON reader said.
        message: String,
        /// Column, from 1.
        column: usize,
    },
    /// The line is JSON, but no object.
    #[error("{found} where an object is expected")]
    NotAnObject {
        /// What the line is instead.
        found: &'static str,
    },
    /// The row belongs to a format whose rows mean something else.
    #[error("{format} is not supported: {why}")]
    Unsupported {
        /// Name of the format.
        format: &'static str,
        /// What gives it away, and why it cannot be read like a plain row.
        why: &'static str,
    },
    /// A field that every row needs is absent or null.
    #[error("{field} is missing")]
    Missing {
        /// Name of the field.
        field: &'static str,
    },
    /// A field is not a number.
    #[error("{field} is {found}, not a number")]
    NotANumber {
        /// Name of the field.
        field: &'static str,
        /// What it is instead.
        found: &'static str,
    },
    /// A number is negative.
    #[error("{field} is negative")]
    Negative {
        /// Name of the field.
        field: &'static str,
    },
    /// A token count has a fraction.
    #[error("{field} {value} is not a whole number")]
    NotWhole {
        /// Name of the field.
        field: &'static str,
        /// The number.
        value: f64,
    },
    /// A number is too large.
    #[error("{field} is above {max}")]
    TooLarge {
        /// Name of the field.
        field: &'static str,
        /// Largest value allowed.
        max: u64,
    },
    /// The prompt is empty.
    #[error("input_length is 0: a prompt has at least one token")]
    EmptyPrompt,
    /// Prompt and output together are longer than a token count can say.
    #[error("input_length {input} + output_length {output} is above {MAX_TOKENS}")]
    TooManyTokens {
        /// Prompt length in tokens.
        input: u32,
        /// Output length in tokens.
        output: u32,
    },
    /// `hash_ids` is not a list.
    #[error("hash_ids is {found}, not a list")]
    IdsNotAList {
        /// What it is instead.
        found: &'static str,
    },
    /// An entry of `hash_ids` is not an unsigned 64-bit number.
    #[error("hash_ids[{index}] is {found}, not an unsigned 64-bit number")]
    NotAnId {
        /// Index of the entry.
        index: usize,
        /// What it is instead.
        found: &'static str,
    },
    /// The ids leave whole hash blocks of the prompt uncovered.
    #[error("{ids} hash_ids for {input} input tokens; blocks of {block} tokens need at least {needed}")]
    TooFewIds {
        /// Number of ids.
        ids: usize,
        /// Prompt length in tokens.
        input: u32,
        /// Tokens per hash block.
        block: u32,
        /// Number of whole hash blocks in the prompt.
        needed: u32,
    },
    /// More ids than the prompt has hash blocks.
    #[error("{ids} hash_ids for {input} input tokens; blocks of {block} tokens allow at most {most}")]
    TooManyIds {
        /// Number of ids.
        ids: usize,
        /// Prompt length in tokens.
        input: u32,
        /// Tokens per hash block.
        block: u32,
        /// Number of hash blocks in the prompt, the last partial one counted.
        most: u32,
    },
    /// A refusal inside a conversation.
    #[error("{path}: {reason}")]
    At {
        /// Where, such as `requests[3].requests[0]`.
        path: String,
        /// What is wrong there.
        reason: Box<RowError>,
    },
    /// The first line tells no format.
    #[error("no known format: neither a JSON object nor a CSV header of Azure or BurstGPT")]
    UnknownFormat,
    /// A CSV header lacks a column.
    #[error("the header has no column {name:?}")]
    NoColumn {
        /// Name of the column.
        name: &'static str,
    },
    /// A CSV row has more or fewer fields than the header.
    #[error("{found} fields under a header of {expected}")]
    Width {
        /// Fields of the row.
        found: usize,
        /// Fields of the header.
        expected: usize,
    },
    /// A field is not a date with a time of day.
    #[error("{field} is not a date and time from 1970 on, such as 2024-05-10 00:00:00.009930+00:00")]
    NotATime {
        /// Name of the field.
        field: &'static str,
    },
    /// A field is not a list.
    #[error("{field} is {found}, not a list")]
    NotAList {
        /// Name of the field.
        field: &'static str,
        /// What it is instead.
        found: &'static str,
    },
    /// An entry of `prompt_token_ids` is not an unsigned 64-bit number.
    #[error("prompt_token_ids[{index}] is {found}, not an unsigned 64-bit number")]
    NotAToken {
        /// Index of the entry.
        index: usize,
        /// What it is instead.
        found: &'static str,
    },
    /// Files of one trace have different formats.
    #[error("format {found}, but {expected} in the files before")]
    OtherFormat {
        /// Format of this file.
        found: Format,
        /// Format of the first.
        expected: Format,
    },
    /// Parts of one trace, or the file and the option, have different hash block sizes.
    #[error("hash blocks of {found} tokens, but {expected} were given or stand before")]
    BlockSize {
        /// Size here.
        found: u32,
        /// Size of the first, or the one asked for.
        expected: u32,
    },
    /// No hash block has that size.
    #[error("hash block size {block} is not in [1, {MAX_TOKENS}]")]
    BlockSizeRange {
        /// What was given.
        block: u32,
    },
    /// A hash block size was given for a format without hash ids.
    #[error("format {format} has no hash ids, so no hash block size either")]
    NoHashes {
        /// The format.
        format: Format,
    },
    /// Another time unit than the only one that the format can have was given.
    #[error("times of format {format} are always {unit}")]
    TimeUnit {
        /// The format.
        format: Format,
        /// Its unit.
        unit: TimeUnit,
    },
    /// A later turn of a session: when it comes depends on the end of the turn before.
    #[error("second row of the session on line {first_line}: multi-turn sessions are not supported")]
    SecondTurn {
        /// Line of the turn before.
        first_line: u64,
    },
    /// One id stands for blocks of different length.
    #[error(
        "hash id {id} covers {tokens} tokens here, but {first_tokens} on line {first_line}{first_file}"
    )]
    IdLength {
        /// The id, as the file has it.
        id: u64,
        /// Tokens it covers in this row.
        tokens: u32,
        /// Tokens it covered at first.
        first_tokens: u32,
        /// Line where it stood first.
        first_line: u64,
        /// ` of FILE` if that was another file, else empty.
        first_file: String,
    },
    /// One id follows different prefixes, so it is not a hash of the whole prefix.
    #[error("hash id {id} follows {parent} here, but {first_parent} on line {first_line}{first_file}")]
    IdParent {
        /// The id, as the file has it.
        id: u64,
        /// What stands before it in this row.
        parent: String,
        /// What stood before it at first.
        first_parent: String,
        /// Line where it stood first.
        first_line: u64,
        /// ` of FILE` if that was another file, else empty.
        first_file: String,
    },
}
