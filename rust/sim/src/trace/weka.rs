//! Conversations with subagents: one JSON object each, requests nested.

use serde::Deserialize;

use super::builder::Row;
use super::fields::{count, ids, json_error, time};
use super::format::TimeUnit;
use super::json::Value;
use super::{RowError, TraceBuilder};

#[derive(Deserialize)]
pub(crate) struct Conversation {
    #[serde(default)]
    block_size: Value,
    requests: Vec<Request>,
}

/// A request, or the marker of a subagent with its requests inside.
#[derive(Deserialize)]
struct Request {
    #[serde(default)]
    t: Value,
    #[serde(default, rename = "in")]
    input: Value,
    #[serde(default, rename = "out")]
    output: Value,
    #[serde(default)]
    hash_ids: Value,
    requests: Option<Vec<Request>>,
}

impl Conversation {
    pub(crate) fn parse(line: &str) -> Result<Self, RowError> {
        serde_json::from_str(line).map_err(|error| json_error(&error))
    }

    pub(crate) fn block_size(&mut self) -> Result<u32, RowError> {
        count("block_size", std::mem::take(&mut self.block_size))
    }

    /// Adds every request, those of subagents at the time of their marker and their own.
    pub(crate) fn push_to(self, builder: &mut TraceBuilder, line: u64) -> Result<(), RowError> {
        push_all(self.requests, 0, "requests", builder, line)
    }
}

fn push_all(
    requests: Vec<Request>,
    start_ns: u64,
    path: &str,
    builder: &mut TraceBuilder,
    line: u64,
) -> Result<(), RowError> {
    for (index, request) in requests.into_iter().enumerate() {
        let path = format!("{path}[{index}]");
        push(request, start_ns, &path, builder, line).map_err(|reason| match reason {
            inside @ RowError::At { .. } => inside,
            reason => RowError::At { path, reason: Box::new(reason) },
        })?;
    }
    Ok(())
}

fn push(
    request: Request,
    start_ns: u64,
    path: &str,
    builder: &mut TraceBuilder,
    line: u64,
) -> Result<(), RowError> {
    // Not beyond 2^64: both are bounded by the largest time there is, and markers nest 128 deep at most.
    let at = start_ns.saturating_add(time("t", request.t, TimeUnit::Seconds)?);
    if let Some(inner) = request.requests {
        return push_all(inner, at, &format!("{path}.requests"), builder, line);
    }
    let ids = ids(request.hash_ids)?;
    builder.push(
        line,
        &Row {
            arrival_ns: at,
            input_tokens: count("in", request.input)?,
            output_tokens: count("out", request.output)?,
            ids: &ids,
        },
    )
}
