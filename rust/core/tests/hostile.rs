//! One hostile request per rule, and a wrong selection per rule that a wrong planner could break.

use decodebench_core::{BlockRange, Group, Ledger, Planner, PlannerOptions, Pool, Request, Scratch};

const STRICT: PlannerOptions = PlannerOptions { strict: true, exact_tail: false };

fn positional(span: u32) -> Group {
    Group::positional(span).expect("a span")
}

fn planner(groups: &[Group], options: PlannerOptions) -> Planner {
    let pool = Pool::new(64, Some(0)).expect("a pool");
    Planner::new(pool, groups.to_vec(), options).expect("a planner")
}

fn request<'a>(id: &'a str, local: u64, external: u64, tables: &'a [&'a [i32]]) -> Request<'a> {
    Request { id, local, external, tables }
}

/// Kind and message of the refusal of one step.
fn refusal(planner: &Planner, requests: &[Request<'_>]) -> (&'static str, String) {
    let step = planner.plan_step(&mut Scratch::default(), requests, None);
    let refusal = step.expect_err("a broken rule");
    (refusal.error.kind(), refusal.to_string())
}

#[test]
fn a_pool_has_between_one_and_max_blocks() {
    for num_blocks in [0, Pool::MAX_BLOCKS + 1, u32::MAX] {
        assert_eq!(Pool::new(num_blocks, None).expect_err("a bad size").kind(), "num_blocks");
    }
    assert!(Pool::new(Pool::MAX_BLOCKS, None).is_ok());
}

#[test]
fn a_span_is_not_zero() {
    assert_eq!(Group::positional(0).expect_err("a bad span").kind(), "zero_span");
    assert_eq!(Group::state(0).expect_err("a bad span").kind(), "zero_span");
}

#[test]
fn a_planner_has_groups() {
    let pool = Pool::new(1, None).expect("a pool");
    let error = Planner::new(pool, Vec::new(), PlannerOptions::default()).expect_err("no groups");
    assert_eq!(error.kind(), "no_groups");
}

#[test]
fn one_table_per_group() {
    let planner = planner(&[positional(16)], PlannerOptions::default());
    let (kind, message) = refusal(&planner, &[request("r1", 0, 1, &[&[1], &[2]])]);
    assert_eq!((kind, message.as_str()), ("table_count", "request r1: 2 block tables for 1 groups"));
}

#[test]
fn invariant_1_the_interval_does_not_overflow() {
    let planner = planner(&[positional(16)], PlannerOptions::default());
    assert_eq!(refusal(&planner, &[request("r1", u64::MAX, 1, &[&[1]])]).0, "interval_overflow");
}

#[test]
fn invariant_1_the_range_lies_in_the_table() {
    let planner = planner(&[positional(16)], PlannerOptions::default());
    let (kind, message) = refusal(&planner, &[request("r1", 16, 17, &[&[1, 2]])]);
    assert_eq!(kind, "range_outside_table");
    assert_eq!(
        message,
        "request r1: group 0, blocks [1, 3) of a table of 2: the range ends after the table"
    );
    let far = request("r1", u64::MAX - 1, 1, &[&[1, 2]]);
    assert_eq!(refusal(&planner, &[far]).0, "range_outside_table");
}

#[test]
fn invariant_2_every_selected_block_is_in_the_pool() {
    let planner = planner(&[positional(16), Group::Ring], PlannerOptions::default());
    for bad in [-1, 64, i32::MAX, i32::MIN] {
        let tables: [&[i32]; 2] = [&[1, bad], &[9]];
        let (kind, message) = refusal(&planner, &[request("r1", 0, 32, &tables)]);
        assert_eq!(kind, "block_outside_pool");
        assert!(message.contains(&format!("entry 1 is block {bad}")), "{message}");
        let tables: [&[i32]; 2] = [&[1, 2], &[bad]];
        assert_eq!(refusal(&planner, &[request("r1", 0, 32, &tables)]).0, "block_outside_pool");
        let tables: [&[i32]; 2] = [&[bad, 1, 2], &[9]];
        assert_eq!(refusal(&planner, &[request("r1", 16, 32, &tables)]).0, "block_outside_pool");
    }
}

#[test]
fn invariant_2_the_null_block_is_skipped() {
    let planner = planner(&[positional(16)], PlannerOptions::default());
    let tables: [&[i32]; 1] = [&[0, 0, 3]];
    let step = planner
        .plan_step(&mut Scratch::default(), &[request("r1", 0, 48, &tables)], None)
        .expect("a valid request");
    assert_eq!(step.block_ids(0), [3]);
    assert_eq!(step.null_blocks_skipped(), 2);
}

#[test]
fn invariant_3_the_own_prefix_is_not_selected() {
    let groups = [positional(16), positional(16)];
    let planner = planner(&groups, PlannerOptions::default());
    let same_group: [&[i32]; 2] = [&[5, 5], &[6, 7]];
    let (kind, message) = refusal(&planner, &[request("r1", 16, 16, &same_group)]);
    assert_eq!(kind, "prefix_block_selected");
    assert!(message.contains("selects block 5"), "{message}");
    let other_group: [&[i32]; 2] = [&[5, 6], &[6, 7]];
    let (kind, message) = refusal(&planner, &[request("r1", 16, 16, &other_group)]);
    assert_eq!(kind, "prefix_block_selected");
    assert!(message.contains("entry 0 of group 1"), "{message}");
}

#[test]
fn a_wrong_selection_is_caught() {
    let planner = planner(&[positional(16)], PlannerOptions::default());
    let tables: [&[i32]; 1] = [&[1, 2, 3, 4]];
    // Tokens 20 to 40: blocks 1 and 2.
    let check = |start, end| {
        let ranges = [BlockRange::new(start, end)];
        let plan = planner.check(&mut Scratch::default(), &request("r", 20, 21, &tables), &ranges);
        plan.map(|plan| plan.groups()[0].len()).map_err(|error| error.kind())
    };
    assert_eq!(check(1, 3), Ok(2));
    assert_eq!(check(0, 2), Err("token_uncovered"), "the first n blocks, whatever the prefix");
    assert_eq!(check(0, 3), Err("prefix_block_selected"));
    assert_eq!(check(2, 3), Err("token_uncovered"), "rounding the start up");
    assert_eq!(check(1, 2), Err("token_uncovered"), "rounding the end down");
    assert_eq!(check(1, 1), Err("token_uncovered"));
    assert_eq!(check(1, 4), Err("block_beyond_interval"));
    assert_eq!(check(1, 5), Err("range_outside_table"));
    let narrow = one_token_short();
    assert_eq!(narrow, Err("token_uncovered"), "one token short, where a block is one token");
    let nothing = planner.check(&mut Scratch::default(), &request("r", 20, 21, &tables), &[]);
    assert_eq!(nothing.expect_err("no range").kind(), "token_uncovered");
}

/// One block for two tokens, at one token a block.
fn one_token_short() -> Result<(), &'static str> {
    let request = request("r", 0, 2, &[&[1, 2]]);
    let plan = planner(&[positional(1)], STRICT);
    let plan = plan.check(&mut Scratch::default(), &request, &[BlockRange::new(0, 1)]);
    plan.map(|_| ()).map_err(|error| error.kind())
}

#[test]
fn invariant_5_a_block_belongs_to_one_group() {
    let planner = planner(&[positional(16), Group::Ring], PlannerOptions::default());
    let own: [&[i32]; 2] = [&[7], &[7]];
    assert_eq!(refusal(&planner, &[request("r1", 0, 16, &own)]).0, "block_in_two_groups");
    let (one, other): ([&[i32]; 2], [&[i32]; 2]) = ([&[7], &[8]], [&[9], &[7]]);
    let requests = [request("r1", 0, 16, &one), request("r2", 0, 16, &other)];
    let (kind, message) = refusal(&planner, &requests);
    assert_eq!(kind, "block_in_two_groups");
    assert!(message.starts_with("request r2: group 1"), "{message}");
}

#[test]
fn invariant_5_a_repeat_is_merged_or_strictly_refused() {
    let tables: [&[i32]; 1] = [&[7, 8]];
    let requests = [request("r1", 0, 32, &tables), request("r2", 0, 32, &tables)];
    let lenient = planner(&[positional(16)], PlannerOptions::default());
    let step = lenient.plan_step(&mut Scratch::default(), &requests, None).expect("a repeat");
    assert_eq!(step.all_block_ids().len(), 2);
    assert_eq!(step.repeats_merged(), 2);
    let strict = planner(&[positional(16)], STRICT);
    let (kind, message) = refusal(&strict, &requests);
    assert_eq!(kind, "block_repeated");
    assert!(message.starts_with("request r2: "), "{message}");
}

#[test]
fn invariant_6_only_blocks_of_the_own_admission() {
    let planner = planner(&[positional(16)], PlannerOptions::default());
    let mut scratch = Scratch::default();
    let mut ledger = Ledger::new(&planner);
    let mut plan = |ledger: &mut Ledger, id, local, table: &[i32]| {
        let request = Request { id, local, external: 16, tables: &[table] };
        let step = planner.plan_step(&mut scratch, &[request], Some(ledger));
        step.map(|_| ()).map_err(|refusal| (refusal.error.kind(), refusal.to_string()))
    };
    assert_eq!(plan(&mut ledger, "a", 0, &[1]).expect_err("unknown").0, "not_admitted");
    ledger.admit("a", &[&[1]], &[0]).expect("an admission");
    plan(&mut ledger, "a", 0, &[1]).expect("a's own block");

    ledger.admit("b", &[&[1, 2]], &[1]).expect("a hit on a's block");
    let (kind, message) = plan(&mut ledger, "b", 0, &[1]).expect_err("a's block");
    assert_eq!(kind, "not_owned");
    assert!(message.ends_with("2 live requests hold it"), "{message}");
    plan(&mut ledger, "b", 16, &[1, 2]).expect("b's own block");

    ledger.finish("a").expect("live");
    ledger.finish("b").expect("live");
    ledger.admit("c", &[&[1, 3]], &[1]).expect("a hit on a cached block");
    let (kind, message) = plan(&mut ledger, "c", 0, &[1]).expect_err("a cached block");
    assert_eq!(kind, "not_owned");
    assert!(message.ends_with("it came out of the prefix cache"), "{message}");
    let (_, message) = plan(&mut ledger, "c", 0, &[9]).expect_err("nobody's block");
    assert!(message.ends_with("no live request holds it"), "{message}");

    ledger.admit("d", &[&[3]], &[0]).expect("an engine that hands a live block out again");
    let (kind, message) = plan(&mut ledger, "d", 0, &[3]).expect_err("c's block");
    assert_eq!(kind, "not_owned");
    assert!(message.ends_with("2 live requests hold it"), "{message}");
}

#[test]
fn invariant_6_follows_growth_windows_and_reuse() {
    let planner = planner(&[positional(16)], PlannerOptions::default());
    let mut scratch = Scratch::default();
    let mut ledger = Ledger::new(&planner);
    ledger.admit("a", &[&[0, 1, 2]], &[0]).expect("an admission");
    ledger.grow("a", 0, &[3]).expect("live");
    ledger.release("a", 0, &[1]).expect("held");
    ledger.admit("b", &[&[1]], &[0]).expect("a's former block, allocated anew");
    let a: [&[i32]; 1] = [&[0, 0, 2, 3]];
    let b: [&[i32]; 1] = [&[1]];
    let requests = [request("a", 0, 64, &a), request("b", 0, 16, &b)];
    planner.plan_step(&mut scratch, &requests, Some(&mut ledger)).expect("each its own blocks");
}

#[test]
fn invariant_7_one_fill_per_admission() {
    let planner = planner(&[positional(16)], PlannerOptions::default());
    let mut scratch = Scratch::default();
    let tables: [&[i32]; 1] = [&[1]];
    let twice = [request("a", 0, 16, &tables), request("a", 0, 16, &tables)];
    assert_eq!(refusal(&planner, &twice).0, "already_filled");

    let mut ledger = Ledger::new(&planner);
    let mut plan = |ledger: &mut Ledger| {
        let step = planner.plan_step(&mut scratch, &twice[..1], Some(ledger));
        step.map(|_| ()).map_err(|refusal| refusal.error.kind())
    };
    ledger.admit("a", &tables, &[0]).expect("an admission");
    assert_eq!(plan(&mut ledger), Ok(()));
    assert_eq!(plan(&mut ledger), Err("already_filled"));
    ledger.finish("a").expect("live");
    ledger.admit("a", &tables, &[0]).expect("a new admission");
    assert_eq!(plan(&mut ledger), Ok(()));
}

#[test]
fn a_refused_step_leaves_the_ledger_as_it_was() {
    let planner = planner(&[positional(16)], PlannerOptions::default());
    let mut scratch = Scratch::default();
    let mut ledger = Ledger::new(&planner);
    ledger.admit("a", &[&[1]], &[0]).expect("an admission");
    let (good, bad): ([&[i32]; 1], [&[i32]; 1]) = ([&[1]], [&[2]]);
    let step = [request("a", 0, 16, &good), request("b", 0, 16, &bad)];
    let refusal = planner.plan_step(&mut scratch, &step, Some(&mut ledger)).expect_err("b is unknown");
    assert_eq!((refusal.request.as_str(), refusal.error.kind()), ("b", "not_admitted"));
    planner.plan_step(&mut scratch, &step[..1], Some(&mut ledger)).expect("a was not filled");
}

#[test]
fn the_ledger_refuses_facts_that_cannot_be() {
    let planner = planner(&[positional(16)], PlannerOptions::default());
    let mut ledger = Ledger::new(&planner);
    let kind = |fact: Result<(), decodebench_core::PlanError>| fact.expect_err("a refusal").kind();
    assert_eq!(kind(ledger.admit("a", &[&[1], &[2]], &[0])), "table_count");
    assert_eq!(kind(ledger.admit("a", &[&[1]], &[])), "table_count");
    assert_eq!(kind(ledger.admit("a", &[&[1]], &[2])), "hits_outside_table");
    assert_eq!(kind(ledger.admit("a", &[&[64]], &[0])), "block_outside_pool");
    assert_eq!(kind(ledger.grow("a", 0, &[2])), "not_admitted");
    assert_eq!(kind(ledger.release("a", 0, &[1])), "not_admitted");
    assert_eq!(kind(ledger.finish("a")), "not_admitted");
    ledger.admit("a", &[&[1]], &[0]).expect("an admission");
    assert_eq!(kind(ledger.admit("a", &[&[1]], &[0])), "already_admitted");
    assert_eq!(kind(ledger.grow("a", 1, &[2])), "no_such_group");
    assert_eq!(kind(ledger.release("a", 1, &[1])), "no_such_group");
    assert_eq!(kind(ledger.release("a", 0, &[1, 1])), "not_held");
    ledger.release("a", 0, &[1]).expect("the refused release changed nothing");
}

#[test]
fn a_ledger_belongs_to_its_planner() {
    let small = Pool::new(2, None).expect("a pool");
    let small = Planner::new(small, vec![positional(16)], STRICT).expect("a planner");
    let mut ledger = Ledger::new(&small);
    ledger.admit("a", &[&[1]], &[0]).expect("an admission");
    let planner = planner(&[positional(16)], STRICT);
    let tables: [&[i32]; 1] = [&[60]];
    let step =
        planner.plan_step(&mut Scratch::default(), &[request("a", 0, 16, &tables)], Some(&mut ledger));
    assert_eq!(step.expect_err("another pool").error.kind(), "foreign_ledger");
}

#[test]
fn invariant_5_a_repeat_is_noticed_wherever_it_stands() {
    let pool = Pool::new(1_000, Some(0)).expect("a pool");
    let planner = Planner::new(pool, vec![positional(16)], STRICT).expect("a planner");
    let mut scratch = Scratch::default();
    let ascending: Vec<i32> = (101..=200).collect();
    let descending: Vec<i32> = ascending.iter().rev().copied().collect();
    let scattered: Vec<i32> = (0..100).map(|i| 101 + i * 37 % 100).collect();
    for table in [&ascending, &descending, &scattered] {
        for &block in table {
            for (other, repeats) in [(block, true), (block + 100, false), (block - 100, false)] {
                let other = [other];
                let tables: [[&[i32]; 1]; 2] = [[table], [&other]];
                let requests = [request("a", 0, 1_600, &tables[0]), request("b", 0, 16, &tables[1])];
                let step = planner.plan_step(&mut scratch, &requests, None);
                assert_eq!(step.is_err(), repeats, "{other:?} after {table:?}");
            }
        }
    }
}

#[test]
fn marks_of_earlier_steps_are_forgotten() {
    let planner = planner(&[positional(16)], STRICT);
    let mut scratch = Scratch::default();
    // Marks are numbered by the use in a byte: a block that rests for 255 uses meets its number again.
    for round in 0..2_000 {
        let table: &[i32] = match round % 510 {
            0 => &[3, 1, 2],
            255 => &[1, 3, 2],
            _ => &[4, 5, 6],
        };
        planner
            .plan_step(&mut scratch, &[request("r", 16, 32, &[table])], None)
            .expect("blocks of earlier steps");
    }
}
