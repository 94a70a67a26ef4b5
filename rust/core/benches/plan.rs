//! What selecting and checking costs. Every plan is compared with the expected ids before it is timed.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use decodebench_core::{Group, Ledger, Planner, PlannerOptions, Pool, Request, Scratch};

const SPAN: u32 = 16;
const LONG: usize = 2_500;
const NUM_BLOCKS: u32 = 1 << 20;

fn planner(groups: usize) -> Planner {
    let pool = Pool::new(NUM_BLOCKS, Some(0)).expect("a valid pool");
    let group = Group::positional(SPAN).expect("a valid span");
    Planner::new(pool, vec![group; groups], PlannerOptions::default()).expect("a valid planner")
}

/// Distinct ids that jump through the whole pool, so that no cache line is reused.
fn scattered(first: usize, len: usize) -> Vec<i32> {
    (first..first + len)
        .map(|i| {
            i32::try_from(1 + i * 7_919 % (NUM_BLOCKS as usize - 1)).expect("below the pool's size")
        })
        .collect()
}

fn contiguous(first: usize, len: usize) -> Vec<i32> {
    (first + 1..).take(len).map(|i| i32::try_from(i).expect("below the pool's size")).collect()
}

fn tokens(blocks: usize) -> u64 {
    blocks as u64 * u64::from(SPAN)
}

fn assert_selects(planner: &Planner, request: &Request<'_>, expected: &[i32]) {
    let step = planner
        .plan_step(&mut Scratch::default(), std::slice::from_ref(request), None)
        .expect("a valid request");
    assert_eq!(step.all_block_ids(), expected);
}

fn long_request(c: &mut Criterion) {
    let mut group = c.benchmark_group("request of 2500 blocks");
    group.throughput(Throughput::Elements(LONG as u64));
    let planner = planner(1);
    let mut scratch = Scratch::default();
    for (name, table) in [("contiguous", contiguous(0, LONG)), ("scattered", scattered(0, LONG))] {
        let tables: [&[i32]; 1] = [&table];
        let request = Request { id: "r", local: 0, external: tokens(LONG), tables: &tables };
        assert_selects(&planner, &request, &table);
        group.bench_function(format!("check, {name}"), |b| {
            b.iter(|| planner.plan(&mut scratch, black_box(&request)).expect("a valid request"));
        });
        group.bench_function(format!("check and copy ids, {name}"), |b| {
            b.iter(|| planner.plan_step(&mut scratch, black_box(&[request]), None).expect("valid"));
        });
    }
    let table = scattered(0, 2 * LONG);
    let tables: [&[i32]; 1] = [&table];
    let request = Request { id: "r", local: tokens(LONG), external: tokens(LONG), tables: &tables };
    assert_selects(&planner, &request, &table[LONG..]);
    group.bench_function("check and copy ids, scattered, after a prefix hit of 2500", |b| {
        b.iter(|| planner.plan_step(&mut scratch, black_box(&[request]), None).expect("valid"));
    });
    group.finish();
}

fn short_request(c: &mut Criterion) {
    let mut group = c.benchmark_group("short request");
    group.throughput(Throughput::Elements(1));
    let planner = planner(1);
    let mut scratch = Scratch::default();
    let table = scattered(0, 8);
    let tables: [&[i32]; 1] = [&table];
    let request = Request { id: "r", local: 32, external: 63, tables: &tables };
    assert_selects(&planner, &request, &table[2..6]);
    group.bench_function("one group", |b| {
        b.iter(|| planner.plan(&mut scratch, black_box(&request)).expect("a valid request"));
    });
    group.finish();
}

fn step(c: &mut Criterion) {
    const REQUESTS: usize = 256;
    let mut group = c.benchmark_group("step of 256 requests of 2500 blocks");
    group.throughput(Throughput::Elements((REQUESTS * LONG) as u64));
    group.sample_size(30);
    let planner = planner(1);
    let mut scratch = Scratch::default();
    let ids: Vec<String> = (0..REQUESTS).map(|r| format!("request-{r}")).collect();
    for (name, table_of) in [("contiguous", contiguous as fn(_, _) -> _), ("scattered", scattered)] {
        let tables: Vec<Vec<i32>> = (0..REQUESTS).map(|r| table_of(r * LONG, LONG)).collect();
        let views: Vec<[&[i32]; 1]> = tables.iter().map(|table| [table.as_slice()]).collect();
        let requests: Vec<Request<'_>> = views
            .iter()
            .zip(&ids)
            .map(|(tables, id)| Request { id, local: 0, external: tokens(LONG), tables })
            .collect();
        let step = planner.plan_step(&mut scratch, &requests, None).expect("valid requests");
        let selected = step.all_block_ids().iter();
        assert!(selected.eq(tables.iter().flatten()));
        group.bench_function(format!("plan, {name}"), |b| {
            b.iter(|| {
                let step = planner.plan_step(&mut scratch, black_box(&requests), None);
                scratch.recycle(black_box(step.expect("valid")));
            });
        });
        let mut ledger = Ledger::new(&planner);
        group.bench_function(format!("admit, plan with the audit ledger, finish, {name}"), |b| {
            b.iter(|| {
                for (id, tables) in ids.iter().zip(&views) {
                    ledger.admit(id, tables, &[0]).expect("a valid admission");
                }
                let step = planner.plan_step(&mut scratch, black_box(&requests), Some(&mut ledger));
                for id in &ids {
                    ledger.finish(id).expect("a live request");
                }
                scratch.recycle(black_box(step.expect("valid")));
            });
        });
    }
    group.finish();
}

criterion_group!(benches, long_request, short_request, step);
criterion_main!(benches);
