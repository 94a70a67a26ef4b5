//! JSON lines with the prompts' token ids: equal prefixes are found, and get hash ids.

use std::collections::HashMap;

use serde::Deserialize;

use super::fields::{count, json_error, time};
use super::format::TimeUnit;
use super::json::Value;
use super::{MAX_TOKENS, RowError};

#[derive(Deserialize)]
struct Fields {
    #[serde(default)]
    timestamp: Value,
    #[serde(default)]
    prompt_token_ids: Value,
    #[serde(default)]
    output_length: Value,
}

/// Gives every different (prefix, block of tokens) an id.
#[derive(Debug, Default)]
pub(crate) struct TokenHasher {
    ids: HashMap<(u64, Box<[u64]>), u64>,
}

/// Arrival in nanoseconds, prompt and output tokens, hash ids.
pub(crate) type TokenRow = (u64, u32, u32, Vec<u64>);

impl TokenHasher {
    pub(crate) fn row(&mut self, line: &str, unit: TimeUnit, block: u32) -> Result<TokenRow, RowError> {
        let fields: Fields = serde_json::from_str(line).map_err(|error| json_error(&error))?;
        let field = "prompt_token_ids";
        let tokens = match fields.prompt_token_ids {
            Value::Ids(tokens) => tokens,
            Value::Null => return Err(RowError::Missing { field }),
            Value::Mixed(index, found) => return Err(RowError::NotAToken { index, found }),
            other => return Err(RowError::NotAList { field, found: other.kind() }),
        };
        let input = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        if input > MAX_TOKENS {
            return Err(RowError::TooLarge { field, max: MAX_TOKENS.into() });
        }
        let arrival_ns = time("timestamp", fields.timestamp, unit)?;
        let output = count("output_length", fields.output_length)?;
        // Id 0 is the empty prefix.
        let mut prefix = 0;
        let chunks = tokens.chunks(block as usize);
        let ids = chunks.map(|chunk| {
            let next = self.ids.len() as u64 + 1;
            prefix = *self.ids.entry((prefix, chunk.into())).or_insert(next);
            prefix
        });
        Ok((arrival_ns, input, output, ids.collect()))
    }
}
