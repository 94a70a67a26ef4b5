//! Content numbers against the tokens that they stand for.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::trace::{Row, TraceBuilder};

/// A token: the id that covers it and its offset there, or the request and its position.
type Token = (bool, u64, u32);

/// A row: the path of its whole hash blocks, tokens after them, whether those have an id, output.
type PathRow = (Vec<u8>, u32, bool, u32);

/// Chained ids along paths of a random tree, so that prompts share prefixes.
fn rows() -> impl Strategy<Value = (u32, Vec<PathRow>)> {
    let row = (prop::collection::vec(0_u8..3, 0..6), 0_u32..64, any::<bool>(), 0_u32..70);
    (1_u32..40, prop::collection::vec(row, 1..12))
}

proptest! {
    #[test]
    fn equal_numbers_mean_equal_tokens((size, rows) in rows(), block_size in 1_u32..100) {
        let mut builder = TraceBuilder::new(size);
        let mut ids_of_path: HashMap<(Vec<u8>, u32), u64> = HashMap::new();
        let mut texts: Vec<Vec<Token>> = Vec::new();
        for (path, extra, hash_tail, output) in rows {
            let whole = u32::try_from(path.len()).unwrap_or(0) * size;
            let tail = extra % size;
            let input = (whole + tail).max(1);
            let mut ids = Vec::new();
            for end in 1..=path.len() + usize::from(hash_tail && tail > 0) {
                let tokens = if end > path.len() { tail } else { size };
                let mut key = path[..end.min(path.len())].to_vec();
                key.resize(end, 9);
                let next = ids_of_path.len() as u64;
                ids.push(*ids_of_path.entry((key, tokens)).or_insert(next));
            }
            let request = texts.len() as u64;
            texts.push((0..input + output).map(|position| {
                let id = ids.get((position / size) as usize).filter(|_| position < input);
                match id {
                    Some(&id) => (true, id, position % size),
                    None => (false, request, position),
                }
            }).collect());
            let row = Row { arrival_ns: request, input_tokens: input, output_tokens: output, ids: &ids };
            prop_assert!(builder.push(request, &row).is_ok());
        }
        let trace = Arc::new(builder.finish());
        let contents = Contents::new(Arc::clone(&trace), block_size, 1, |_| true).expect("few blocks");
        let mut text_of_number: HashMap<u32, &[Token]> = HashMap::new();
        let mut number_of_text: HashMap<&[Token], u32> = HashMap::new();
        let mut chain = Vec::new();
        for (request, text) in texts.iter().enumerate() {
            let tokens = trace.input_of(request) + trace.output_of(request).max(1) - 1;
            contents.fill_chain(request, tokens, &mut chain);
            prop_assert_eq!(chain.len(), (tokens / block_size) as usize);
            for (i, &number) in (1..).zip(&chain) {
                let prefix = &text[..i * block_size as usize];
                prop_assert_eq!(*text_of_number.entry(number).or_insert(prefix), prefix);
                prop_assert_eq!(*number_of_text.entry(prefix).or_insert(number), number);
            }
        }
        // Dense: every number in use is below their count.
        prop_assert!(text_of_number.keys().all(|&number| (number as usize) < text_of_number.len()));
    }
}

#[test]
fn too_many_blocks_are_refused() {
    let mut builder = TraceBuilder::new(512);
    for line in 1..=33 {
        let row = Row { arrival_ns: 0, input_tokens: (1 << 27) - 1, output_tokens: 1, ids: &[] };
        builder.push(line, &row).expect("a good row");
    }
    let trace = Arc::new(builder.finish());
    assert!(Contents::new(Arc::clone(&trace), 2, 1, |_| true).is_ok());
    assert!(matches!(
        Contents::new(Arc::clone(&trace), 2, 2, |_| true),
        Err(ConfigError::TooManyBlocks { block_size: 2, groups: 2, .. })
    ));
    assert!(Contents::new(trace, 1, 2, |_| false).is_ok());
}
