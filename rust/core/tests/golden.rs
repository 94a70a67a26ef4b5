//! The golden file that the token-by-token oracle wrote, read by the Python tests too.

use decodebench_core::{BlockId, Group, Planner, PlannerOptions, Pool, Request, Scratch};
use serde_json::{Value, json};

const GOLDEN: &str = include_str!("../../../tests/golden/plans.jsonl");

fn number<T: TryFrom<i128>>(value: &Value) -> T {
    let wide = value.as_u64().map(i128::from).or_else(|| value.as_i64().map(i128::from));
    wide.and_then(|wide| T::try_from(wide).ok()).expect("a number in range")
}

fn group(value: &Value) -> Group {
    match value["indexing"].as_str() {
        Some("positional") => Group::positional(number(&value["span"])).expect("a span"),
        Some("state") => Group::state(number(&value["span"])).expect("a span"),
        Some("ring") => Group::Ring,
        Some("excluded") => Group::Excluded,
        other => panic!("indexing {other:?}"),
    }
}

#[test]
fn the_core_answers_as_the_oracle_does() {
    let mut scratch = Scratch::default();
    let mut lines = 0;
    for line in GOLDEN.lines() {
        let case: Value = serde_json::from_str(line).expect("a JSON line");
        let request = &case["request"];
        let list = |value: &Value| value.as_array().expect("a list").clone();
        let groups: Vec<Group> = list(&request["groups"]).iter().map(group).collect();
        let tables: Vec<Vec<i32>> = list(&request["tables"])
            .iter()
            .map(|table| list(table).iter().map(number).collect())
            .collect();
        let views: Vec<&[i32]> = tables.iter().map(Vec::as_slice).collect();
        let null_block = Some(number(&request["null_block"]));
        let pool = Pool::new(number(&request["num_blocks"]), null_block).expect("a pool");
        let planner = Planner::new(pool, groups, PlannerOptions::default()).expect("a planner");
        let plain = Request {
            id: request["id"].as_str().expect("an id"),
            local: number(&request["local"]),
            external: number(&request["external"]),
            tables: &views,
        };
        let step = planner.plan_step(&mut scratch, &[plain], None);
        match (step, case["answer"]["kinds"].as_array()) {
            (Err(refusal), Some(kinds)) => {
                assert!(kinds.contains(&json!(refusal.error.kind())), "{line}\n{refusal}");
            }
            (Ok(step), None) => {
                let fill = planner.plan(&mut scratch, &plain).expect("planned before");
                let answer = fill.groups().iter().map(|fill| {
                    json!({
                        "start": fill.range().start().get(),
                        "end": fill.range().end().get(),
                        "block_ids": fill.block_ids().map(BlockId::get).collect::<Vec<_>>(),
                        "head_slot": fill.head_slot(),
                        "tail_slot": fill.tail_slot(),
                    })
                });
                assert_eq!(answer.collect::<Value>(), case["answer"]["groups"], "{line}");
                for (index, fill) in fill.groups().iter().enumerate() {
                    assert!(
                        fill.block_ids().map(BlockId::get).eq(step.block_ids(index).iter().copied()),
                        "{line}"
                    );
                }
            }
            (step, _) => panic!("{line}\n{step:?}"),
        }
        lines += 1;
    }
    assert!(lines > 100, "only {lines} golden lines");
}
