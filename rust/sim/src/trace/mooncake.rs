//! The Mooncake format: one JSON object per line.

use std::fmt;
use std::io::Read;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::builder::Row;
use super::fields::{count, ids, json_error, time};
use super::format::{Format, TimeUnit};
use super::json::Value;
use super::lines::Lines;
use super::{MAX_TOKENS, RowError, Trace, TraceBuilder, TraceError, TraceOptions};

pub(crate) fn parse(reader: impl Read, file: &str, options: TraceOptions) -> Result<Trace, TraceError> {
    let hash_block_size = options.hash_block_size;
    if !(1..=MAX_TOKENS).contains(&hash_block_size) {
        return Err(TraceError::HashBlockSize { hash_block_size });
    }
    let row_error = |line, reason| TraceError::Row { file: file.to_owned(), line, reason };
    let mut lines = Lines::new(reader).map_err(|error| row_error(1, error.into()))?;
    let mut builder = TraceBuilder::new(hash_block_size);
    while options.limit.is_none_or(|limit| builder.len() < limit) {
        let (line, text) = match lines.next() {
            Ok(Some(line)) => line,
            Ok(None) => break,
            Err(reason) => return Err(row_error(lines.line(), reason)),
        };
        parse_row(text, Format::Mooncake, TimeUnit::Milliseconds)
            .and_then(|row| builder.push(line, &row.borrow()))
            .map_err(|reason| row_error(line, reason))?;
    }
    if builder.len() == 0 {
        return Err(TraceError::Empty { file: file.to_owned() });
    }
    Ok(builder.finish())
}

pub(crate) struct OwnedRow {
    arrival_ns: u64,
    input_tokens: u32,
    output_tokens: u32,
    ids: Vec<u64>,
    /// JSON text of the row's session, if it names one.
    pub(crate) session: Option<String>,
}

impl OwnedRow {
    pub(crate) fn borrow(&self) -> Row<'_> {
        Row {
            arrival_ns: self.arrival_ns,
            input_tokens: self.input_tokens,
            output_tokens: self.output_tokens,
            ids: &self.ids,
        }
    }
}

/// A row of the Mooncake format, or of Bailian's, whose fields are the same.
pub(crate) fn parse_row(text: &str, format: Format, unit: TimeUnit) -> Result<OwnedRow, RowError> {
    if !text.starts_with('{') {
        let other: Value = serde_json::from_str(text).map_err(|error| json_error(&error))?;
        return Err(RowError::NotAnObject { found: other.kind() });
    }
    let fields: Fields = serde_json::from_str(text).map_err(|error| json_error(&error))?;
    if let Some((format, why)) = fields.foreign(format) {
        return Err(RowError::Unsupported { format, why });
    }
    Ok(OwnedRow {
        arrival_ns: time("timestamp", fields.timestamp, unit)?,
        input_tokens: count("input_length", fields.input_length)?,
        output_tokens: count("output_length", fields.output_length)?,
        ids: ids(fields.hash_ids)?,
        session: fields.session_id.filter(|id| !id.is_null()).map(|id| id.to_string()),
    })
}

/// The fields of a row that mean something. A field that stands twice counts as it stood last.
#[derive(Default)]
struct Fields {
    timestamp: Value,
    input_length: Value,
    output_length: Value,
    hash_ids: Value,
    schema: Value,
    delay: Value,
    dependencies: Value,
    parent_chat_id: Value,
    session_id: Option<serde_json::Value>,
}

impl Fields {
    /// Name of the format that the row belongs to instead, and why it cannot be read as this one.
    fn foreign(&self, format: Format) -> Option<(&'static str, &'static str)> {
        if self.schema.is_there() || self.dependencies.is_there() {
            Some(("a Dynamo agentic trace", "its rows wait for other rows (schema, dependencies)"))
        } else if self.delay.is_there() {
            Some((
                "a Dynamo session trace",
                "a row with delay follows its session's last one and holds only what it adds",
            ))
        } else if matches!(self.hash_ids, Value::Object) {
            Some((
                "a RAGPulse trace",
                "hash_ids is an object of content ids, which do not chain over the prefix",
            ))
        } else if format == Format::Mooncake && self.parent_chat_id.is_there() {
            Some((
                "a Bailian trace",
                "its times are seconds and its last hash covers padding (parent_chat_id)",
            ))
        } else {
            None
        }
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;
        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Fields;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Fields::default();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "timestamp" => fields.timestamp = map.next_value()?,
                        "input_length" => fields.input_length = map.next_value()?,
                        "output_length" => fields.output_length = map.next_value()?,
                        "hash_ids" => fields.hash_ids = map.next_value()?,
                        "schema" => fields.schema = map.next_value()?,
                        "session_id" => fields.session_id = Some(map.next_value()?),
                        "delay" => fields.delay = map.next_value()?,
                        "dependencies" => fields.dependencies = map.next_value()?,
                        "parent_chat_id" => fields.parent_chat_id = map.next_value()?,
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(FieldsVisitor)
    }
}
