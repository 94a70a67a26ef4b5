//! JSON values as rows need them: what is wrong with a value is told later, by the field's name.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::RowError;

/// One JSON value, as far as any row needs it.
#[derive(Debug, Default)]
pub(crate) enum Value {
    /// Null, or the field is absent.
    #[default]
    Null,
    /// A whole number that fits 64 bits without sign. Never passed through a float.
    Whole(u64),
    /// Any other number.
    Float(f64),
    /// A list of such whole numbers.
    Ids(Vec<u64>),
    /// Any other list: the first index that is no such number, and what stands there.
    Mixed(usize, &'static str),
    /// An object.
    Object,
    /// Anything else, in words.
    Other(&'static str),
}

impl Value {
    pub(crate) fn is_there(&self) -> bool {
        !matches!(self, Self::Null)
    }

    /// The value in words.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Whole(_) => "a number",
            Self::Float(number) if *number < 0.0 => "a negative number",
            Self::Float(number) if number.fract() != 0.0 => "a fraction",
            Self::Float(_) => "a floating-point or huge number",
            Self::Ids(_) | Self::Mixed(..) => "a list",
            Self::Object => "an object",
            Self::Other(kind) => kind,
        }
    }

    /// The value of a field that must be a number and is not.
    pub(crate) fn not_a_number(&self, field: &'static str) -> RowError {
        match self {
            Self::Null => RowError::Missing { field },
            other => RowError::NotANumber { field, found: other.kind() },
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, _: bool) -> Result<Value, E> {
        Ok(Value::Other("a boolean"))
    }
    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(Value::Whole(number))
    }
    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(u64::try_from(number).map_or(Value::Float(number as f64), Value::Whole))
    }
    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(Value::Float(number))
    }
    fn visit_str<E>(self, _: &str) -> Result<Value, E> {
        Ok(Value::Other("a string"))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut ids = Vec::new();
        let mut mixed = None;
        while let Some(value) = list.next_element()? {
            match value {
                Value::Whole(id) => ids.push(id),
                other => {
                    mixed.get_or_insert((ids.len(), other.kind()));
                }
            }
        }
        Ok(mixed.map_or(Value::Ids(ids), |(index, found)| Value::Mixed(index, found)))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Value::Object)
    }
}
