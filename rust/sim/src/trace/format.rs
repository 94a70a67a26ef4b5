//! The formats, and how each is told from its first line.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::RowError;
use super::json::Value;

/// A trace format. Written in lower case, with a hyphen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// JSON lines with `timestamp`, `input_length`, `output_length`, `hash_ids`.
    Mooncake,
    /// The same with `chat_id`, `parent_chat_id`, `turn`, `type`; times are seconds.
    Bailian,
    /// CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; wall-clock times.
    Azure,
    /// CSV with `Timestamp`, `Request tokens`, `Response tokens`, among others; times are seconds.
    BurstGpt,
    /// A JSON object per conversation, with nested `requests`.
    Weka,
    /// JSON lines with `prompt_token_ids` in place of length and hashes.
    TokenIds,
}

/// What one unit of a timestamp is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeUnit {
    /// Milliseconds.
    Milliseconds,
    /// Seconds.
    Seconds,
    /// A date and a time of day.
    WallClock,
}

const NAMES: [(Format, &str); 6] = [
    (Format::Mooncake, "mooncake"),
    (Format::Bailian, "bailian"),
    (Format::Azure, "azure"),
    (Format::BurstGpt, "burstgpt"),
    (Format::Weka, "weka"),
    (Format::TokenIds, "token-ids"),
];

impl Format {
    /// The names of all formats.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMES.iter().map(|&(_, name)| name)
    }

    /// The unit of the format's timestamps.
    #[must_use]
    pub fn time_unit(self) -> TimeUnit {
        match self {
            Self::Mooncake | Self::TokenIds => TimeUnit::Milliseconds,
            Self::Bailian | Self::BurstGpt | Self::Weka => TimeUnit::Seconds,
            Self::Azure => TimeUnit::WallClock,
        }
    }

    /// Tokens per hash block; `None` if the file says it itself, or has no hash ids.
    #[must_use]
    pub fn hash_block_size(self) -> Option<u32> {
        match self {
            Self::Mooncake => Some(512),
            Self::Bailian | Self::TokenIds => Some(16),
            Self::Azure | Self::BurstGpt | Self::Weka => None,
        }
    }

    /// Whether rows say which prompts share a prefix.
    #[must_use]
    pub fn has_hashes(self) -> bool {
        !matches!(self, Self::Azure | Self::BurstGpt)
    }

    /// Tells the format from a file's first line, blank ones aside.
    pub(crate) fn recognise(line: &str) -> Result<Self, RowError> {
        if !line.starts_with('{') {
            let header = Header::of(line);
            return header.format().ok_or(RowError::UnknownFormat);
        }
        let Ok(keys) = serde_json::from_str::<Keys>(line) else { return Ok(Self::Mooncake) };
        Ok(match keys {
            Keys { requests: true, .. } => Self::Weka,
            Keys { prompt_token_ids: true, .. } => Self::TokenIds,
            Keys { parent_chat_id: true, .. } => Self::Bailian,
            // Those of other formats are refused there, by name.
            _ => Self::Mooncake,
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(format, _)| format == self).map_or("", |&(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|&&(_, name)| name == text).map(|&(format, _)| format);
        found.ok_or_else(|| {
            format!("format {text:?} is none of {}", Self::names().collect::<Vec<_>>().join(", "))
        })
    }
}

impl fmt::Display for TimeUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Milliseconds => "ms",
            Self::Seconds => "s",
            Self::WallClock => "wall clock",
        })
    }
}

impl FromStr for TimeUnit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "ms" => Ok(Self::Milliseconds),
            "s" => Ok(Self::Seconds),
            _ => Err(format!("time unit {text:?} is neither \"ms\" nor \"s\"")),
        }
    }
}

/// Where the columns of a CSV file are.
pub(crate) struct Header<'h>(Vec<&'h str>);

impl<'h> Header<'h> {
    pub(crate) fn of(line: &'h str) -> Self {
        Self(fields(line).collect())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn position(&self, name: &'static str) -> Result<usize, RowError> {
        let at = self.0.iter().position(|&field| field == name);
        at.ok_or(RowError::NoColumn { name })
    }

    fn format(&self) -> Option<Format> {
        let has = |name| self.0.contains(&name);
        if has("ContextTokens") && has("GeneratedTokens") {
            Some(Format::Azure)
        } else {
            (has("Request tokens") && has("Response tokens")).then_some(Format::BurstGpt)
        }
    }
}

/// The fields of a CSV line. None of the formats has a comma or a line end inside a field.
pub(crate) fn fields(line: &str) -> impl Iterator<Item = &str> {
    line.split(',').map(|field| field.trim().trim_matches('"'))
}

/// Which telling keys an object has.
#[derive(Default)]
struct Keys {
    requests: bool,
    prompt_token_ids: bool,
    parent_chat_id: bool,
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeysVisitor;
        impl<'de> Visitor<'de> for KeysVisitor {
            type Value = Keys;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                let mut keys = Keys::default();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "requests" => keys.requests = true,
                        "prompt_token_ids" => keys.prompt_token_ids = true,
                        "parent_chat_id" => {
                            keys.parent_chat_id = map.next_value::<Value>()?.is_there();
                            continue;
                        }
                        _ => {}
                    }
                    map.next_value::<IgnoredAny>()?;
                }
                Ok(keys)
            }
        }
        deserializer.deserialize_map(KeysVisitor)
    }
}
