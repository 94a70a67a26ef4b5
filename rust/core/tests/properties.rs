//! Random steps against a naive reading of the rules, token by token and slot by slot.

use std::collections::{BTreeMap, BTreeSet};

use decodebench_core::{Group, Planner, PlannerOptions, Pool, Request, Scratch, StepPlan};
use proptest::collection::vec;
use proptest::prelude::*;

const NUM_BLOCKS: u32 = 512;

#[derive(Debug, Clone)]
struct Facts {
    local: u64,
    external: u64,
    tables: Vec<Vec<i32>>,
}

fn edges(span: u32) -> impl Strategy<Value = u64> {
    let span = u64::from(span);
    prop_oneof![Just(0), Just(1), Just(span - 1), Just(span), Just(span + 1), 0..4 * span]
}

/// Requests over positional groups of `span`, with tables long enough. Ids are distinct between requests
/// and groups unless `shared`.
fn step(span: u32, shared: bool) -> impl Strategy<Value = (usize, Vec<Facts>)> {
    let requests = vec((edges(span), edges(span), any::<bool>(), any::<u64>()), 1..5);
    (1..3_usize, requests).prop_map(move |(groups, requests)| {
        let mut next = 1;
        let mut first_tables: Option<Vec<Vec<i32>>> = None;
        let facts = requests.into_iter().map(|(local, external, repeat, nulls)| {
            let len = usize::try_from((local + external).div_ceil(u64::from(span)) + 1).unwrap_or(0);
            let mut table = || -> Vec<i32> {
                (0..len)
                    .map(|index| {
                        next += 1;
                        if nulls >> (index % 64) & 7 == 7 { 0 } else { next }
                    })
                    .collect()
            };
            let mut tables: Vec<Vec<i32>> = (0..groups).map(|_| table()).collect();
            if let (true, true, Some(first)) = (shared, repeat, &first_tables) {
                for (table, first) in tables.iter_mut().zip(first) {
                    for (entry, &other) in table.iter_mut().zip(first) {
                        *entry = other;
                    }
                }
            }
            first_tables.get_or_insert_with(|| tables.clone());
            Facts { local, external, tables }
        });
        (groups, facts.collect())
    })
}

/// Per (group, block), the slots written. Slots past the interval's end count unless `exact_tail`.
fn naive(span: u32, exact_tail: bool, facts: &[Facts]) -> BTreeMap<(usize, i32), BTreeSet<u64>> {
    let span = u64::from(span);
    let mut written: BTreeMap<_, BTreeSet<u64>> = BTreeMap::new();
    for Facts { local, external, tables } in facts {
        for (group, table) in tables.iter().enumerate() {
            let (end, mut token) = (local + external, *local);
            while token < end || (!exact_tail && *external > 0 && token % span != 0) {
                let block = table[usize::try_from(token / span).expect("a small index")];
                if block != 0 {
                    written.entry((group, block)).or_default().insert(token % span);
                }
                token += 1;
            }
        }
    }
    written
}

/// Whether two requests name a block of which different slots are local to them.
fn heads_differ(span: u32, facts: &[Facts]) -> bool {
    let span = u64::from(span);
    let mut heads: BTreeMap<(usize, i32), u64> = BTreeMap::new();
    facts.iter().filter(|facts| facts.external > 0).any(|Facts { local, external, tables }| {
        let blocks = local / span..(local + external).div_ceil(span);
        tables.iter().enumerate().any(|(group, table)| {
            blocks.clone().any(|index| {
                let block = table[usize::try_from(index).expect("a small index")];
                let head = local.saturating_sub(index * span);
                block != 0 && *heads.entry((group, block)).or_insert(head) != head
            })
        })
    })
}

fn written(span: u32, groups: usize, plan: &StepPlan) -> BTreeMap<(usize, i32), BTreeSet<u64>> {
    let mut slots: Vec<BTreeSet<u64>> =
        vec![(0..u64::from(span)).collect(); plan.all_block_ids().len()];
    for partial in plan.partials() {
        slots[partial.position] = partial.slots.clone().map(u64::from).collect();
    }
    let ids = (0..groups).flat_map(|group| plan.block_ids(group).iter().map(move |id| (group, id)));
    ids.map(|(group, id)| (group, *id)).zip(slots).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_step_writes_what_its_tokens_need(
        (span, exact_tail, (groups, facts)) in
            (1..20_u32, any::<bool>(), any::<bool>()).prop_flat_map(|(span, shared, exact)| {
                (Just(span), Just(exact), step(span, shared))
            })
    ) {
        let pool = Pool::new(NUM_BLOCKS, Some(0)).expect("a pool");
        let group = Group::positional(span).expect("a span");
        let options = PlannerOptions { strict: false, exact_tail };
        let planner = Planner::new(pool, vec![group; groups], options).expect("a planner");
        let views: Vec<Vec<&[i32]>> =
            facts.iter().map(|facts| facts.tables.iter().map(Vec::as_slice).collect()).collect();
        let ids: Vec<String> = (0..facts.len()).map(|index| format!("r{index}")).collect();
        let requests: Vec<Request<'_>> = facts
            .iter()
            .zip(&views)
            .zip(&ids)
            .map(|((facts, tables), id)| {
                Request { id, local: facts.local, external: facts.external, tables }
            })
            .collect();
        let expected = naive(span, exact_tail, &facts);
        let plan = planner.plan_step(&mut Scratch::default(), &requests, None);
        if let Err(refusal) = &plan {
            prop_assert_eq!(refusal.error.kind(), "block_repeated");
            prop_assert!(heads_differ(span, &facts));
            return Ok(());
        }
        prop_assert!(!heads_differ(span, &facts));
        let plan = plan.expect("valid");
        prop_assert_eq!(written(span, groups, &plan), expected);

        let named: usize = requests
            .iter()
            .map(|request| {
                let fill = planner.plan(&mut Scratch::default(), request).expect("valid");
                fill.groups().iter().map(decodebench_core::GroupFill::len).sum::<usize>()
            })
            .sum();
        let selected = plan.all_block_ids().len() as u64;
        prop_assert_eq!(selected + plan.repeats_merged(), named as u64);
        let distinct: BTreeSet<i32> = plan.all_block_ids().iter().copied().collect();
        prop_assert_eq!(distinct.len() as u64, selected);
        prop_assert_eq!(plan.cell_ends().len(), groups * facts.len() + 1);

        let parts = |ids: Vec<i32>| {
            let ends: Vec<i32> = plan.cell_ends().iter().map(|&end| i32::try_from(end).expect("small")).collect();
            let rows: Vec<i32> = plan
                .partials()
                .iter()
                .flat_map(|partial| [
                    i32::try_from(partial.position).expect("small"),
                    partial.slots.start.cast_signed(),
                    partial.slots.end.cast_signed(),
                ])
                .collect();
            StepPlan::check_parts(pool, plan.groups(), facts.len(), &ids, &ends, &rows)
        };
        let ids: Vec<i32> = plan.all_block_ids().to_vec();
        prop_assert_eq!(parts(ids.clone()), Ok(()));
        prop_assert!(parts(ids.iter().copied().chain([1]).collect()).is_err());
        if !ids.is_empty() {
            prop_assert!(parts(ids.iter().map(|id| id - 512).collect()).is_err());
        }
    }
}
