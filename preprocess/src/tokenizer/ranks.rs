//! Vocabularies that have a rank for every token instead of a list of merges, as tiktoken's do: two
//! neighbours may be merged if together they are a token, and the lower its rank the sooner.

use std::collections::HashMap;

use super::merge::{ID_LIMIT, Merger};

/// Every way to divide a token is tried, so the length is limited. The longest token of o200k has
/// 128 bytes.
const TOKEN_BYTES_MAX: usize = 1024;

/// Why tokens make no vocabulary of byte-level BPE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unfit {
    pub(crate) found: String,
    pub(crate) expected: String,
}

/// Tokens by their bytes. The rank of each is its id.
pub(super) type Ids = HashMap<Box<[u8]>, u32>;

/// Collects tokens, each of which must be there once.
pub(super) fn ids_of<'a>(tokens: impl IntoIterator<Item = (&'a [u8], u32)>) -> Result<Ids, Unfit> {
    let mut ids = Ids::new();
    for (token, id) in tokens {
        let bad = |found: String, expected: String| Err(Unfit { found, expected });
        if !(1..=TOKEN_BYTES_MAX).contains(&token.len()) {
            let found = format!("{} bytes of token {id}", token.len());
            return bad(found, format!("1 to {TOKEN_BYTES_MAX} bytes"));
        }
        if id as usize >= ID_LIMIT {
            return bad(format!("id {id}"), format!("ids below {ID_LIMIT}"));
        }
        if let Some(before) = ids.insert(token.into(), id) {
            return bad(format!("ids {before} and {id} for the same bytes"), "one id".to_owned());
        }
    }
    Ok(ids)
}

/// The merges of a vocabulary of ranks.
pub(super) fn merger(ids: &Ids) -> Result<Merger, Unfit> {
    let mut byte_ids = [0; 256];
    for (id, byte) in byte_ids.iter_mut().zip(0..=255_u8) {
        *id = *ids.get(&[byte] as &[u8]).ok_or_else(|| Unfit {
            found: format!("none for byte {byte:#04x}"),
            expected: "a token for each byte".to_owned(),
        })?;
    }
    let mut tokens: Vec<(&[u8], u32)> = ids
        .iter()
        .filter(|(token, _)| token.len() > 1)
        .map(|(token, &id)| (&**token, id))
        .collect();
    tokens.sort_unstable_by_key(|&(_, id)| id);
    if let Some(two) = tokens.windows(2).find(|two| two[0].1 == two[1].1) {
        return Err(Unfit {
            found: format!("id {} twice", two[0].1),
            expected: "every id once".to_owned(),
        });
    }
    let mut pairs = Vec::new();
    for &(token, id) in &tokens {
        for at in 1..token.len() {
            let (left, right) = token.split_at(at);
            if let (Some(&left), Some(&right)) = (ids.get(left), ids.get(right)) {
                pairs.push((left, right, id));
            }
        }
    }
    let ids_end = tokens.last().map_or(0, |&(_, id)| id + 1);
    let all = Merger::ranked(byte_ids, &pairs, (0..ids_end).collect());
    Ok(match tokens.iter().map(|&(token, id)| all.halves(token, id)).collect::<Option<Vec<_>>>() {
        Some(pairs) => Merger::ranked(byte_ids, &pairs, (0..ids_end).collect()),
        None => all,
    })
}
