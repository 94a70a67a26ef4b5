//! What the Mooncake reader accepts, what it refuses, and what it says then.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use decodebench_sim::{Trace, TraceError, TraceOptions};
use flate2::Compression;
use flate2::write::GzEncoder;

const OPTIONS: TraceOptions = TraceOptions { hash_block_size: 512, limit: None };

fn parse(text: impl AsRef<[u8]>) -> Result<Trace, TraceError> {
    Trace::parse_mooncake(text.as_ref(), "t.jsonl", OPTIONS)
}

fn row(timestamp: &str, input: &str, output: &str, ids: &str) -> String {
    format!(
        "{{\"timestamp\": {timestamp}, \"input_length\": {input}, \
         \"output_length\": {output}, \"hash_ids\": {ids}}}\n"
    )
}

/// A good row, for the rows before and after the one in question.
fn good() -> String {
    row("0", "600", "1", "[1, 2]")
}

#[test]
fn refusals_are_one_line_with_file_line_and_reason() {
    let max = "18446744073709551616";
    let two = |a: String, b: String| a + &b;
    let cases: Vec<(String, &str)> = vec![
        // Ids against lengths.
        (
            row("0", "1024", "1", "[1]"),
            "1 hash_ids for 1024 input tokens; blocks of 512 tokens need at least 2",
        ),
        (
            row("0", "1024", "1", "[1, 2, 3]"),
            "3 hash_ids for 1024 input tokens; blocks of 512 tokens allow at most 2",
        ),
        (
            row("0", "1", "1", "[1, 2]"),
            "2 hash_ids for 1 input tokens; blocks of 512 tokens allow at most 1",
        ),
        // Ids against each other.
        (
            two(good(), row("0", "601", "1", "[1, 2]")),
            "2: hash id 2 covers 89 tokens here, but 88 on line 1",
        ),
        (
            two(good(), row("0", "1024", "1", "[1, 2]")),
            "2: hash id 2 covers 512 tokens here, but 88 on line 1",
        ),
        (
            two(good(), row("0", "600", "1", "[3, 2]")),
            "2: hash id 2 follows hash id 3 here, but hash id 1 on line 1",
        ),
        (
            two(good(), row("0", "88", "1", "[2]")),
            "2: hash id 2 follows nothing here, but hash id 1 on line 1",
        ),
        (row("0", "1024", "1", "[7, 7]"), "1: hash id 7 follows hash id 7 here, but nothing on line 1"),
        // Ids that are none.
        (row("0", "600", "1", "7"), "hash_ids is a number, not a list"),
        (
            row("0", "600", "1", "[1, -2]"),
            "hash_ids[1] is a negative number, not an unsigned 64-bit number",
        ),
        (row("0", "600", "1", "[1, 2.0]"), "hash_ids[1] is a floating-point or huge number"),
        (
            row("0", "600", "1", &format!("[{max}, 2]")),
            "hash_ids[0] is a floating-point or huge number",
        ),
        (row("0", "600", "1", "[1, \"2\"]"), "hash_ids[1] is a string"),
        (row("0", "600", "1", "[1, true]"), "hash_ids[1] is a boolean"),
        (row("0", "600", "1", "[1, [2]]"), "hash_ids[1] is a list"),
        // Lengths.
        (row("0", "0", "1", "[]"), "input_length is 0: a prompt has at least one token"),
        (row("0", "-1", "1", "[]"), "input_length is negative"),
        (row("0", "1.5", "1", "[]"), "input_length 1.5 is not a whole number"),
        (row("0", "\"8\"", "1", "[]"), "input_length is a string, not a number"),
        (row("0", "true", "1", "[]"), "input_length is a boolean, not a number"),
        (row("0", "null", "1", "[]"), "input_length is missing"),
        (row("0", "2147483648", "1", "[]"), "input_length is above 134217728"),
        (row("0", max, "1", "[]"), "input_length is above 134217728"),
        (row("0", "1e300", "1", "[]"), "input_length is above 134217728"),
        (row("0", "1", "-1", "[]"), "output_length is negative"),
        (row("0", "1", "0.5", "[]"), "output_length 0.5 is not a whole number"),
        (row("0", "1", "null", "[]"), "output_length is missing"),
        (
            row("0", "1", "134217728", "[]"),
            "input_length 1 + output_length 134217728 is above 134217728",
        ),
        ("{\"timestamp\": 0, \"input_length\": 1}".into(), "output_length is missing"),
        // Times.
        (row("-1", "1", "1", "[]"), "timestamp is negative"),
        (row("-0.5", "1", "1", "[]"), "timestamp is negative"),
        (row("\"0\"", "1", "1", "[]"), "timestamp is a string, not a number"),
        (row("false", "1", "1", "[]"), "timestamp is a boolean, not a number"),
        (row("1e14", "1", "1", "[]"), "timestamp is above 10000000000000"),
        (row("10000000000001", "1", "1", "[]"), "timestamp is above 10000000000000"),
        (row("NaN", "1", "1", "[]"), "not JSON: expected value at column 15"),
        (row("1e999", "1", "1", "[]"), "not JSON: number out of range"),
        ("{\"input_length\": 1, \"output_length\": 1}".into(), "timestamp is missing"),
        // Lines.
        ("[0, 1, 1, []]".into(), "a list where an object is expected"),
        ("7".into(), "a number where an object is expected"),
        ("{\"timestamp\": 0".into(), "not JSON: EOF while parsing"),
        (two(good(), "timestamp,input_length".into()), "2: not JSON: expected"),
        ("{} {}".into(), "not JSON: trailing characters"),
        // Other formats.
        (
            "{\"schema\": \"dynamo.agentic_mooncake\", \"version\": 2}".into(),
            "a Dynamo agentic trace is not supported",
        ),
        (
            "{\"input_length\": 1, \"dependencies\": []}".into(),
            "a Dynamo agentic trace is not supported",
        ),
        (
            two(good(), "{\"session_id\": \"s\", \"delay\": 5}".into()),
            "2: a Dynamo session trace is not supported",
        ),
        (
            "{\"timestamp\": \"82\", \"hash_ids\": {\"history\": [1]}}".into(),
            "a RAGPulse trace is not supported: hash_ids is an object",
        ),
        ("{\"timestamp\": 0.0, \"parent_chat_id\": -1}".into(), "a Bailian trace is not supported"),
    ];
    for (text, expected) in cases {
        let message = parse(&text).expect_err(&text).to_string();
        assert!(message.starts_with("t.jsonl:"), "{message}");
        assert!(message.contains(expected), "{text}\n got: {message}\nwant: {expected}");
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn the_line_number_counts_blank_lines() {
    let text = format!("\n\n{}\n{}", good(), row("0", "0", "1", "[]"));
    assert_eq!(
        parse(text).expect_err("refused").to_string(),
        "t.jsonl:5: input_length is 0: a prompt has at least one token"
    );
}

#[test]
fn accepted_rows_mean_what_they_say() {
    let text = format!(
        "\u{feff}{}\r\n   \r\n{}\r\n{}{}{}{}",
        "{\"timestamp\": 5, \"input_length\": 600.0, \"output_length\": 3, \
          \"hash_ids\": [18446744073709551615, 4611686018427387905], \"extra\": {\"a\": [1]}}",
        "{\"timestamp\": 7.25, \"input_length\": 600, \"output_length\": 0, \
          \"hash_ids\": [18446744073709551615]}",
        row("6", "1024", "1", "[18446744073709551615, 4611686018427387904]"),
        row("8", "10", "1", "[]"),
        row("9", "10", "1", "null"),
        "{\"timestamp\": 9, \"input_length\": 10, \"output_length\": 1}",
    );
    let trace = parse(text).expect("all rows are good");
    let notes = trace.notes();
    assert_eq!((notes.unhashed, notes.floor_hashed, notes.prefill_only), (3, 1, 1));
    assert_eq!((notes.out_of_order, notes.shifted_ms), (1, 5.0));
    let rows: Vec<_> = trace
        .requests()
        .map(|row| (row.arrival_ms, row.input_tokens, row.output_tokens, row.hash_blocks.to_vec()))
        .collect();
    let expected = [
        (0.0, 600, 3, vec![0, 1]),
        (1.0, 1024, 1, vec![0, 2]),
        (2.25, 600, 0, vec![0]),
        (3.0, 10, 1, vec![]),
        (4.0, 10, 1, vec![]),
        (4.0, 10, 1, vec![]),
    ];
    assert_eq!(rows, expected);
    assert_eq!((trace.input_tokens(), trace.output_tokens()), (2254, 7));
    assert_eq!(trace.hash_block_size(), 512);
    // 512 shared tokens for the second and the third request.
    assert_eq!(trace.ideal_hit_tokens(16), 1024);
    assert_eq!(trace.ideal_hit_tokens(500), 1000);
}

#[test]
fn sorting_is_stable_and_renumbers_the_blocks() {
    let text = row("2", "1", "1", "[9]") + &row("1", "2", "1", "[8]") + &row("1", "3", "1", "[7]");
    let trace = parse(text).expect("good rows");
    let rows: Vec<_> = trace.requests().map(|r| (r.input_tokens, r.hash_blocks.to_vec())).collect();
    assert_eq!(rows, [(2, vec![0]), (3, vec![1]), (1, vec![2])]);
    assert_eq!(trace.notes().out_of_order, 2);
}

#[test]
fn the_whole_prompt_is_never_an_ideal_hit() {
    let trace = parse(row("0", "512", "1", "[1]").repeat(2)).expect("good rows");
    assert_eq!(trace.ideal_hit_tokens(16), 496);
    assert_eq!(trace.ideal_hit_tokens(512), 0);
}

#[test]
fn a_limit_reads_no_further() {
    let text = good() + &good() + "not a row";
    let options = |limit| TraceOptions { limit, ..OPTIONS };
    let read = |limit| Trace::parse_mooncake(text.as_bytes(), "t", options(limit));
    assert_eq!(read(Some(2)).expect("two good rows").len(), 2);
    assert!(read(Some(3)).expect_err("refused").to_string().starts_with("t:3: not JSON"));
    assert!(matches!(read(Some(0)), Err(TraceError::Empty { .. })));
}

#[test]
fn gzip_is_recognised_and_a_cut_one_refused() {
    let text: String = (0..2000).map(|id| row("0", "512", "1", &format!("[{id}]"))).collect();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).expect("in memory");
    let zipped = encoder.finish().expect("in memory");
    assert_eq!(parse(&zipped).expect("whole"), parse(&text).expect("plain"));
    for length in [2, 5, 10, 100, zipped.len() - 9, zipped.len() - 1] {
        let message = parse(&zipped[..length]).expect_err("cut").to_string();
        assert!(message.contains(": cannot read: "), "{length}: {message}");
    }
    let mut damaged = zipped.clone();
    damaged[zipped.len() / 2] ^= 0x55;
    assert!(parse(damaged).is_err());
}

#[test]
fn what_is_no_text_is_refused() {
    assert_eq!(
        parse([0xc3, 0x28, b'\n']).expect_err("refused").to_string(),
        "t.jsonl:1: not UTF-8 text"
    );
    assert_eq!(parse("").expect_err("refused").to_string(), "t.jsonl: no requests");
    assert_eq!(parse("\n \r\n").expect_err("refused").to_string(), "t.jsonl: no requests");
    let endless = std::io::repeat(b' ');
    let error = Trace::parse_mooncake(endless, "t", OPTIONS).expect_err("refused");
    assert_eq!(error.to_string(), "t:1: the line is longer than 67108864 bytes");
    // A name cannot break the line either.
    let error = Trace::parse_mooncake(&b""[..], "a\nb", OPTIONS).expect_err("refused");
    assert_eq!(error.to_string(), "a\u{fffd}b: no requests");
}

#[test]
fn hash_blocks_have_a_size() {
    for hash_block_size in [0, (1 << 27) + 1] {
        let options = TraceOptions { hash_block_size, limit: None };
        let error = Trace::parse_mooncake(good().as_bytes(), "t", options).expect_err("refused");
        assert!(error.to_string().contains("is not in [1, 134217728]"), "{error}");
    }
    let whole = TraceOptions { hash_block_size: 1 << 27, limit: None };
    let text = row("0", "134217727", "1", "[1]").repeat(2);
    let trace = Trace::parse_mooncake(text.as_bytes(), "t", whole).expect("good rows");
    assert_eq!(trace.ideal_hit_tokens(1), 134_217_726);
}

#[test]
fn a_source_that_cannot_be_read_is_refused() {
    let directory = File::open(env!("CARGO_MANIFEST_DIR")).expect("a directory opens");
    let error = Trace::parse_mooncake(directory, "t", OPTIONS).expect_err("but cannot be read");
    let message = error.to_string();
    assert!(message.starts_with("t:1: cannot read"), "{message}");
    assert_eq!(message.lines().count(), 1);
}

/// Hands out one byte at a time.
struct Trickle<'b>(&'b [u8]);

impl Read for Trickle<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let len = buffer.len().min(1);
        self.0.read(&mut buffer[..len])
    }
}

#[test]
fn a_slow_reader_reads_the_same() {
    let text = good() + &good();
    let slow = Trace::parse_mooncake(Trickle(text.as_bytes()), "t", OPTIONS).expect("good rows");
    assert_eq!(slow, parse(&text).expect("good rows"));
}

#[test]
fn published_traces() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/traces"));
    let file = |name: &str| {
        let path = folder.join(name);
        let Ok(file) = File::open(path) else {
            eprintln!("skipped: no {name}");
            return None;
        };
        Some(Trace::parse_mooncake(file, name, OPTIONS))
    };
    if let Some(trace) = file("mooncake_conversation.jsonl") {
        let trace = trace.expect("a good trace");
        assert_eq!(trace.len(), 12_031);
        assert_eq!((trace.input_tokens(), trace.output_tokens()), (144_793_823, 4_122_048));
        assert_eq!(trace.ideal_hit_tokens(16), 54_097_440);
        assert_eq!(trace.ideal_hit_tokens(512), 54_063_104);
        assert_eq!(trace.notes(), Default::default());
    }
    if let Some(trace) = file("mooncake_synthetic.jsonl") {
        assert_eq!(trace.expect("a good trace").len(), 3993);
    }
    let refused = [
        ("aiperf_production.jsonl", ":3: 3 hash_ids for 1024 input tokens"),
        ("dynamo_agentic_mooncake.jsonl", ":1: a Dynamo agentic trace"),
        ("dynamo_mooncake_delta.jsonl", ":2: a Dynamo session trace"),
        ("ragpulse_head400.jsonl", ":1: a RAGPulse trace"),
        ("bailian_row_quoted.jsonl", ":1: a Bailian trace"),
        ("azure_2023_code.csv", ":1: not JSON"),
    ];
    for (name, expected) in refused {
        if let Some(trace) = file(name) {
            let message = trace.expect_err(name).to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
