//! The replay as a whole: its totals, and what its fills do to memory.

mod memory;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use decodebench_sim::{
    Advance, ConfigError, GroupKind, Replay, ReplayConfig, Selection, Stats, Trace, TraceOptions,
    conversation,
};
use memory::Memory;
use proptest::prelude::*;

fn trace(rows: &[(u32, u32, u32, &[u64])], hash_block_size: u32) -> Arc<Trace> {
    let lines: String = rows
        .iter()
        .map(|(timestamp, input, output, ids)| {
            format!(
                "{{\"timestamp\": {timestamp}, \"input_length\": {input}, \
                 \"output_length\": {output}, \"hash_ids\": {ids:?}}}\n"
            )
        })
        .collect();
    let options = TraceOptions { hash_block_size, limit: None };
    Arc::new(Trace::parse_mooncake(lines.as_bytes(), "t", options).expect("good rows"))
}

fn run(trace: &Arc<Trace>, config: ReplayConfig) -> Stats {
    let mut replay = Replay::new(Arc::clone(trace), config).expect("a good config");
    while replay.advance(1000).expect("no refusal") != Advance::Done {}
    assert_eq!(replay.advance(1), Ok(Advance::Done));
    replay.stats()
}

/// The totals without what depends on the machine.
fn untimed(stats: Stats) -> Stats {
    let mut stats = stats;
    (stats.plan_seconds, stats.plan_p50_seconds, stats.plan_p99_seconds) = (0.0, 0.0, 0.0);
    stats
}

fn groups(text: &str) -> Vec<GroupKind> {
    text.split(',').map(|group| group.parse().expect("a group")).collect()
}

#[test]
fn with_a_pool_for_everything_the_hits_are_the_ideal_ones() {
    let path = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../shared/traces/mooncake_conversation.jsonl"
    ));
    let Ok(file) = std::fs::File::open(path) else {
        eprintln!("skipped: no {}", path.display());
        return;
    };
    let trace = Arc::new(Trace::parse_mooncake(file, "t", TraceOptions::default()).expect("good"));
    for (block_size, num_blocks, hits) in [(16, 10_000_000, 54_097_440), (512, 400_000, 54_063_104)] {
        let stats = run(&trace, ReplayConfig::new(block_size, num_blocks));
        assert_eq!((stats.requests, stats.finished, stats.preemptions), (12_031, 12_031, 0));
        assert_eq!(stats.local_tokens, hits);
        assert_eq!(stats.external_tokens, trace.input_tokens() - 12_031 - hits);
    }
}

#[test]
fn block_sizes_need_not_divide_each_other() {
    let trace = Arc::new(conversation(3, 200));
    for block_size in [1, 7, 16, 24, 100, 5000] {
        let stats = run(&trace, ReplayConfig::new(block_size, 1_000_000));
        assert_eq!(stats.local_tokens, trace.ideal_hit_tokens(block_size), "{block_size}");
    }
}

#[test]
fn the_built_in_workload_exercises_the_pool() {
    for seed in 0..4 {
        let trace = Arc::new(conversation(seed, 400));
        assert_eq!(*trace, conversation(seed, 400));
        assert_eq!(trace.len(), 400);
        let stats = run(&trace, ReplayConfig::new(16, 4096));
        assert_eq!((stats.requests, stats.finished, stats.rejected), (400, 400, 0));
        assert!(stats.preemptions > 0 && stats.local_tokens > 100_000, "seed {seed}: {stats:?}");
        assert_eq!(stats.admissions, 400 + stats.preemptions);
        // Blocks that were filled, more than there are: some content was evicted.
        assert!(stats.blocks_selected[0] > 4096, "seed {seed}: {stats:?}");
        let lengths: Vec<_> = trace.requests().map(|request| request.input_tokens).collect();
        assert!(lengths.contains(&1) && lengths.iter().any(|&length| length > 1 && length % 16 == 0));
    }
    assert!(conversation(0, 0).is_empty());
    assert_ne!(conversation(1, 50), conversation(2, 50));
}

#[test]
fn replays_are_deterministic_however_they_are_advanced() {
    let trace = Arc::new(conversation(1, 300));
    for selection in [Selection::Interval, Selection::Leading] {
        let config = |record_memory| ReplayConfig {
            groups: groups("full,window:200"),
            selection,
            record_memory,
            ..ReplayConfig::new(16, 3000)
        };
        let whole = untimed(run(&trace, config(false)));
        assert_eq!(whole, untimed(run(&trace, config(false))));
        assert_eq!(whole, untimed(run(&trace, config(true))));
        let mut replay = Replay::new(Arc::clone(&trace), config(false)).expect("good");
        let mut steps = 0;
        while replay.advance(1).expect("no refusal") == Advance::Paused {
            steps += 1;
            assert_eq!(replay.stats().steps, steps);
        }
        assert_eq!(whole, untimed(replay.stats()));
    }
}

#[test]
fn a_request_runs_one_step_per_output_token() {
    let trace = trace(&[(0, 10, 0, &[1]), (0, 10, 1, &[1]), (100, 10, 5, &[1])], 16);
    let stats = run(&trace, ReplayConfig::new(4, 20));
    // Both at once in one step of 20 ms; then a jump to 100 ms, and 5 steps.
    assert_eq!((stats.steps, stats.virtual_seconds), (6, 0.2));
    assert_eq!((stats.prefill_only, stats.finished, stats.peak_running), (1, 3, 2));
    // Blocks 0 and 1 of the first prompt serve the other two; the last token is never a hit.
    assert_eq!((stats.local_tokens, stats.external_tokens), (16, 11));
    assert_eq!(stats.blocks_selected, [3 + 1 + 1]);
}

#[test]
fn what_can_never_fit_is_rejected_and_does_not_block() {
    let rows: &[(u32, u32, u32, &[u64])] =
        &[(0, 64, 1, &[]), (0, 65, 1, &[]), (0, 60, 5, &[]), (0, 60, 6, &[]), (0, 3, 100_000_000, &[])];
    let stats = run(&trace(rows, 512), ReplayConfig::new(16, 5));
    assert_eq!((stats.requests, stats.rejected, stats.finished), (2, 3, 2));
    assert_eq!((stats.unhashed, stats.peak_blocks), (5, 4));
    // With a window, only what it sees has to fit.
    let windowed = ReplayConfig { groups: groups("window:20"), ..ReplayConfig::new(16, 5) };
    let stats = run(&trace(&rows[..4], 512), windowed);
    assert_eq!((stats.rejected, stats.finished), (0, 4));
}

#[test]
fn a_preempted_request_resumes_with_what_it_had() {
    // Nine blocks. Both prompts take 3, both sequences grow to 16 tokens in 4 blocks each, the first gets
    // the last block for its 17th token, and the second is preempted with 17 tokens, 16 of them computed.
    let rows: &[(u32, u32, u32, &[u64])] = &[(0, 12, 20, &[1]), (0, 12, 20, &[2])];
    let stats = run(&trace(rows, 16), ReplayConfig::new(4, 10));
    assert_eq!((stats.requests, stats.finished, stats.preemptions), (2, 2, 1));
    assert_eq!((stats.admissions, stats.peak_blocks, stats.peak_running), (3, 8, 2));
    // The first grows to 31 tokens in 8 blocks, over the second's last 3 blocks. So the second finds its
    // first one when it comes back, and the other 12 of its 16 tokens come from outside.
    assert_eq!((stats.local_tokens, stats.external_tokens), (4, 11 + 11 + 12));
    assert_eq!(stats.blocks_selected, [3 + 3 + 3]);
    assert_eq!(stats.steps, 20 + 15);
}

#[test]
fn a_resumed_request_finds_what_it_generated() {
    // The first sequence ends soon after it has pushed out the second, of which it needs nothing.
    let rows: &[(u32, u32, u32, &[u64])] = &[(0, 12, 6, &[1]), (0, 12, 20, &[2])];
    let stats = run(&trace(rows, 16), ReplayConfig::new(4, 10));
    assert_eq!((stats.finished, stats.preemptions), (2, 1));
    assert_eq!((stats.local_tokens, stats.external_tokens), (16, 11 + 11));
}

#[test]
fn the_running_requests_are_limited() {
    let rows: Vec<(u32, u32, u32, &[u64])> = vec![(0, 5, 3, &[]); 10];
    let config = ReplayConfig { max_num_seqs: 3, ..ReplayConfig::new(4, 1000) };
    let stats = run(&trace(&rows, 16), config);
    assert_eq!((stats.peak_running, stats.steps), (3, 12));
}

#[test]
fn right_fills_leave_every_token_as_its_writer_left_it() {
    let cases = [
        ("full", 2500),
        ("full,window:100", 2500),
        ("window:1,full", 2500),
        ("window:64,window:40", 400),
    ];
    for (seed, (kinds, num_blocks)) in (0..).zip(cases) {
        let config = ReplayConfig {
            groups: groups(kinds),
            record_memory: true,
            ..ReplayConfig::new(16, num_blocks)
        };
        let (memory, stats) = Memory::after(conversation(seed, 250), config);
        assert_eq!(memory.wrong(), 0, "{kinds}");
        assert!(memory.checked() > 100_000 && stats.preemptions > 0, "{kinds}: {stats:?}");
        assert_eq!(memory.sequences(), (stats.admissions, stats.admissions), "{kinds}");
        assert_eq!(stats.selections_refused, 0);
    }
}

#[test]
fn leading_fills_destroy_shared_tokens_and_miss_fresh_ones() {
    let config = ReplayConfig {
        selection: Selection::Leading,
        record_memory: true,
        ..ReplayConfig::new(16, 4096)
    };
    let (memory, stats) = Memory::after(conversation(5, 250), config);
    assert!(memory.overwritten() > 1000 && memory.unfilled() > 1000, "{memory:?}");
    assert!(stats.selections_refused > 50, "{stats:?}");
}

#[test]
fn settings_out_of_range_are_refused() {
    let refused = |change: fn(&mut ReplayConfig)| {
        let mut config = ReplayConfig::new(16, 100);
        change(&mut config);
        let error = Replay::new(Arc::new(conversation(0, 1)), config).expect_err("out of range");
        error.to_string()
    };
    assert_eq!(refused(|c| c.block_size = 0), "block_size 0 is not in [1, 134217728]");
    assert_eq!(refused(|c| c.num_blocks = 1), "num_blocks 1 is not in [2, 268435456]");
    assert_eq!(refused(|c| c.num_blocks = 1 << 31), "num_blocks 2147483648 is not in [2, 268435456]");
    assert_eq!(refused(|c| c.groups.clear()), "no KV-cache group");
    assert_eq!(refused(|c| c.max_num_seqs = 0), "max_num_seqs is 0");
    for step_ms in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-9] {
        let config = ReplayConfig { step_ms, ..ReplayConfig::new(16, 100) };
        let error = Replay::new(Arc::new(conversation(0, 1)), config);
        assert!(matches!(error, Err(ConfigError::Step { .. })), "{step_ms}");
    }
    let window =
        "group \"window:0\" is neither \"full\" nor \"window:TOKENS\" with TOKENS in [1, 134217728]";
    assert_eq!(refused(|c| c.groups = vec![GroupKind::Window(0)]), window);
    for text in ["window:0", "window", "window:", "window:-1", "window:4096x", "Full", "full:1", ""] {
        let error = text.parse::<GroupKind>().expect_err(text).to_string();
        assert!(error.contains(&format!("{text:?}")), "{error}");
    }
    assert_eq!("window:4096".parse(), Ok(GroupKind::Window(4096)));
    assert_eq!(GroupKind::Window(4096).to_string(), "window:4096");
    assert_eq!("leading".parse(), Ok(Selection::Leading));
    assert_eq!(Selection::Interval.to_string().parse(), Ok(Selection::Interval));
    assert!("both".parse::<Selection>().is_err());
}

/// Rows whose prompts follow random paths in a tree of hash blocks, in tokens of `size` each: the path,
/// tokens after it, whether those have an id, output, milliseconds since the last row.
type PathRow = (Vec<u8>, u32, bool, u32, u32);

fn tree_trace(size: u32, rows: &[PathRow]) -> Trace {
    let mut ids_of_path = HashMap::new();
    let mut clock = 0;
    let mut lines = String::new();
    for (path, extra, hash_tail, output, gap) in rows {
        clock += gap;
        let tail = extra % size;
        let input = (u32::try_from(path.len()).expect("short") * size + tail).max(1);
        let mut ids = Vec::new();
        for end in 1..=path.len() + usize::from(*hash_tail && tail > 0) {
            let key = (path[..end.min(path.len())].to_vec(), if end > path.len() { tail } else { 0 });
            let next = ids_of_path.len();
            ids.push(*ids_of_path.entry(key).or_insert(next));
        }
        lines += &format!(
            "{{\"timestamp\": {clock}, \"input_length\": {input}, \
             \"output_length\": {output}, \"hash_ids\": {ids:?}}}\n"
        );
    }
    let options = TraceOptions { hash_block_size: size, limit: None };
    Trace::parse_mooncake(lines.as_bytes(), "t", options).expect("good rows")
}

proptest! {
    #[test]
    fn any_trace_ends_with_every_token_as_its_writer_left_it(
        size in 1_u32..20,
        rows in prop::collection::vec(
            (prop::collection::vec(0_u8..3, 0..6), 0_u32..20, any::<bool>(), 0_u32..40, 0_u32..60),
            1..30,
        ),
        block_size in 1_u32..20,
        num_blocks in 2_u32..80,
        max_num_seqs in 1_u32..8,
        kinds in prop::collection::vec(
            prop_oneof![Just(GroupKind::Full), (1_u32..50).prop_map(GroupKind::Window)],
            1..4,
        ),
    ) {
        let trace = tree_trace(size, &rows);
        let config = ReplayConfig {
            groups: kinds,
            max_num_seqs,
            record_memory: true,
            ..ReplayConfig::new(block_size, num_blocks)
        };
        let (memory, stats) = Memory::after(trace, config);
        prop_assert_eq!(memory.wrong(), 0);
        prop_assert_eq!(memory.sequences(), (stats.admissions, stats.admissions));
        prop_assert_eq!(stats.requests + stats.rejected, rows.len() as u64);
        prop_assert_eq!((stats.finished, stats.admissions), (stats.requests, stats.requests + stats.preemptions));
    }
}
