//! Numbers of rows: which are accepted, and as what.

use super::format::TimeUnit;
use super::json::Value;
use super::{MAX_MS, MAX_TOKENS, NS_PER_MS, RowError, ns_of_ms};

/// A token count.
pub(crate) fn count(field: &'static str, value: Value) -> Result<u32, RowError> {
    let too_large = RowError::TooLarge { field, max: u64::from(MAX_TOKENS) };
    match value {
        Value::Whole(number) => {
            u32::try_from(number).ok().filter(|&count| count <= MAX_TOKENS).ok_or(too_large)
        }
        Value::Float(value) if value < 0.0 => Err(RowError::Negative { field }),
        Value::Float(value) if value.fract() != 0.0 => Err(RowError::NotWhole { field, value }),
        Value::Float(value) if value > f64::from(MAX_TOKENS) => Err(too_large),
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // whole, in [0, 2^31)
        Value::Float(value) => Ok(value as u32),
        other => Err(other.not_a_number(field)),
    }
}

/// A time in nanoseconds.
pub(crate) fn time(field: &'static str, value: Value, unit: TimeUnit) -> Result<u64, RowError> {
    let ms_per_unit = if unit == TimeUnit::Seconds { 1000 } else { 1 };
    let max = MAX_MS / ms_per_unit;
    let too_large = RowError::TooLarge { field, max };
    match value {
        Value::Whole(number) if number <= max => Ok(number * ms_per_unit * NS_PER_MS),
        Value::Whole(_) => Err(too_large),
        Value::Float(number) if number < 0.0 => Err(RowError::Negative { field }),
        Value::Float(number) => ns_of_ms(number * ms_per_unit as f64).ok_or(too_large),
        other => Err(other.not_a_number(field)),
    }
}

/// A list of hash ids, empty if there is none.
pub(crate) fn ids(value: Value) -> Result<Vec<u64>, RowError> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Ids(ids) => Ok(ids),
        Value::Mixed(index, found) => Err(RowError::NotAnId { index, found }),
        other => Err(RowError::IdsNotAList { found: other.kind() }),
    }
}

/// The reader's message without its position: the line is always 1, as lines are read one by one.
pub(crate) fn json_error(error: &serde_json::Error) -> RowError {
    let mut message = error.to_string();
    if let Some(end) = message.rfind(" at line ") {
        message.truncate(end);
    }
    RowError::Json { message, column: error.column() }
}
