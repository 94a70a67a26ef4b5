//! Replays a Mooncake trace and prints the totals, the time and the peak memory:
//! `replay TRACE NUM_BLOCKS GROUP...`. For measuring and profiling without Python.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use decodebench_sim::{Advance, Replay, ReplayConfig, Trace, TraceOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = PathBuf::from(args.next().ok_or("no trace")?);
    let num_blocks = args.next().ok_or("no pool size")?.parse()?;
    let groups = args.map(|group| group.parse()).collect::<Result<Vec<_>, _>>()?;

    let start = Instant::now();
    let trace = Arc::new(Trace::read_mooncake(&path, TraceOptions::default())?);
    let read = start.elapsed();
    let config = ReplayConfig { groups, ..ReplayConfig::new(16, num_blocks) };
    let mut replay = Replay::new(Arc::clone(&trace), config)?;
    while !matches!(replay.advance(u64::MAX)?, Advance::Done) {}
    println!("{:#?}", replay.stats());
    println!("read {read:?}, in all {:?}", start.elapsed());
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    for line in status.lines().filter(|line| line.starts_with("VmHWM")) {
        println!("{line}");
    }
    Ok(())
}
