//! The CSV formats: Azure and `BurstGPT`.

use super::builder::Row;
use super::fields::{count, time};
use super::format::{Format, Header, TimeUnit, fields};
use super::json::Value;
use super::{MAX_MS, NS_PER_MS, RowError};

/// Where the three columns are that mean something, and what they are called.
pub(crate) struct Columns {
    width: usize,
    time: (&'static str, usize),
    input: (&'static str, usize),
    output: (&'static str, usize),
}

impl Columns {
    /// From the header line.
    pub(crate) fn of(format: Format, line: &str) -> Result<Self, RowError> {
        let header = Header::of(line);
        let names = match format {
            Format::Azure => ["TIMESTAMP", "ContextTokens", "GeneratedTokens"],
            _ => ["Timestamp", "Request tokens", "Response tokens"],
        };
        let [time, input, output] = names.map(|name| header.position(name).map(|at| (name, at)));
        Ok(Self { width: header.len(), time: time?, input: input?, output: output? })
    }

    /// A row after the header.
    pub(crate) fn row(&self, line: &str, unit: TimeUnit) -> Result<Row<'static>, RowError> {
        let found = fields(line).count();
        if found != self.width {
            return Err(RowError::Width { found, expected: self.width });
        }
        let field = |(name, at): (&'static str, usize)| (name, fields(line).nth(at).unwrap_or(""));
        let (time_name, text) = field(self.time);
        let arrival_ns = match unit {
            TimeUnit::WallClock => {
                wall_clock_ns(text).ok_or(RowError::NotATime { field: time_name })?
            }
            unit => time(time_name, number(time_name, text)?, unit)?,
        };
        let count = |column| {
            let (name, text) = field(column);
            count(name, number(name, text)?)
        };
        Ok(Row {
            arrival_ns,
            input_tokens: count(self.input)?,
            output_tokens: count(self.output)?,
            ids: &[],
        })
    }
}

fn number(field: &'static str, text: &str) -> Result<Value, RowError> {
    if text.is_empty() {
        return Err(RowError::Missing { field });
    }
    serde_json::from_str(text).map_err(|_| RowError::NotANumber { field, found: "text" })
}

/// Nanoseconds since 1970 of `YYYY-MM-DD HH:MM:SS[.FRACTION][Z|+HH:MM|-HH:MM]`, UTC without a zone; up to
/// nine digits of fraction.
fn wall_clock_ns(text: &str) -> Option<u64> {
    let (date, clock) = text.split_once([' ', 'T'])?;
    let mut parts = date.splitn(3, '-').zip([4, 2, 2]).map(|(part, digits)| digits_of(part, digits));
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let (clock, offset) = match clock.find(['Z', '+', '-']) {
        Some(at) => (&clock[..at], offset_seconds(&clock[at..])?),
        None => (clock, 0),
    };
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let mut parts = clock.splitn(3, ':').map(|part| digits_of(part, 2));
    let (hour, minute, second) = (parts.next()??, parts.next()??, parts.next()??);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days_in = match month {
        2 => 28 + u64::from(leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if year < 1970 || !(1..=days_in).contains(&day) || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    if fraction.is_empty() || fraction.len() > 9 {
        return None;
    }
    let width = u32::try_from(9 - fraction.len()).ok()?;
    let nanos = digits_of(fraction, fraction.len())? * 10_u64.pow(width);
    // Years from March, so that the leap day is the last of its year.
    let (year, month) = if month < 3 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    let seconds = (days - 719_468) * 86_400 + hour * 3600 + minute * 60 + second;
    let ns = seconds.checked_add_signed(-offset)?.checked_mul(1_000_000_000)? + nanos;
    (ns <= MAX_MS * NS_PER_MS).then_some(ns)
}

fn offset_seconds(zone: &str) -> Option<i64> {
    if zone == "Z" {
        return Some(0);
    }
    let sign = if zone.starts_with('-') { -1 } else { 1 };
    let (hours, minutes) = zone[1..].split_once(':')?;
    let (hours, minutes) = (digits_of(hours, 2)?, digits_of(minutes, 2)?);
    if hours > 23 || minutes > 59 {
        return None;
    }
    i64::try_from(hours * 3600 + minutes * 60).ok().map(|seconds| sign * seconds)
}

/// A number of exactly so many digits.
fn digits_of(text: &str, digits: usize) -> Option<u64> {
    let right = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_digit());
    if right { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::wall_clock_ns;

    #[test]
    fn wall_clocks() {
        let s = 1_000_000_000;
        let cases = [
            ("1970-01-01 00:00:00", Some(0)),
            ("2000-02-29 00:00:00", Some(951_782_400 * s)),
            ("2023-11-16 18:17:03.9799600", Some(1_700_158_623 * s + 979_960_000)),
            ("2024-05-10 00:00:00.009930+00:00", Some(1_715_299_200 * s + 9_930_000)),
            ("2024-05-10 00:00:00+00:00", Some(1_715_299_200 * s)),
            ("2024-05-10T01:30:00+01:30", Some(1_715_299_200 * s)),
            ("2024-05-09 23:00:00-01:00", Some(1_715_299_200 * s)),
            ("2024-05-10 00:00:00Z", Some(1_715_299_200 * s)),
            ("2023-02-29 00:00:00", None),
            ("2023-13-01 00:00:00", None),
            ("2023-01-01 24:00:00", None),
            ("2023-01-01 00:00:00.", None),
            ("2023-01-01 00:00:00.0000000001", None),
            ("2023-01-01 00:00:00+1:00", None),
            ("1970-01-01 00:00:00+00:01", None),
            ("2023-01-01", None),
            ("5", None),
            ("", None),
            ("\u{e9}-01-01 00:00:00", None),
        ];
        for (text, expected) in cases {
            assert_eq!(wall_clock_ns(text), expected, "{text}");
        }
    }
}
