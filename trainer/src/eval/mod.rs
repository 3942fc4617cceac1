//! Evaluates a trained model by published measures: perplexity of WikiText and of a corpus, and
//! LAMBADA.
//!
//! Every measure is a mean of the scores of tokens, each after those before it ([`TokenScore`]),
//! and its name says over what it is a mean. A perplexity is per token of the
//! run's own tokenizer; only the adjusted one, per word, compares tokenizers.
//!
//! In reading order: `detokenize` and `windows` prepare a text, `tasks` are the measures.

mod detokenize;
mod tasks;
mod windows;

use recipe::Incompatible;
use tch::{Kind, Tensor};

pub use detokenize::detokenize_wikitext;
pub use tasks::{
    CorpusReport, CorpusTask, EvalOptions, LambadaReport, WikitextReport, corpus, lambada, wikitext,
};
pub use windows::{Window, Windows};

use crate::generate::Trained;
use crate::model::{HEAD_CHUNK_ROWS, Micro};
use crate::{Error, Result};

/// Tokens to be scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoredRow {
    /// What the model sees, and the last token that counts.
    pub tokens: Vec<u32>,
    /// The first token that counts; at least 1.
    pub counts_from: usize,
}

/// The score of a token that counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenScore {
    /// Minus the logarithm of its probability, in nats.
    pub loss: f64,
    /// Whether no other token is likelier.
    pub is_likeliest: bool,
}

/// Scores the tokens that count, row by row, in one pass of the model.
///
/// # Errors
/// [`Error::Mismatch`] for a token that the model does not have, [`Error::Torch`].
///
/// # Panics
/// If a row has no token that counts.
pub fn judge(trained: &Trained, rows: &[ScoredRow]) -> Result<Vec<Vec<TokenScore>>> {
    let _no_grad = tch::no_grad_guard();
    let columns = rows.iter().map(|row| row.tokens.len() - 1).max().unwrap_or(0);
    let (mut ids, mut places, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    for (at, row) in rows.iter().enumerate() {
        assert!(0 < row.counts_from && row.counts_from < row.tokens.len(), "no token counts");
        trained.check_tokens(&row.tokens)?;
        let seen = row.tokens[..row.tokens.len() - 1].iter().copied().map(i64::from);
        // The padding is last, and no token that counts attends to it.
        ids.extend(seen.chain(std::iter::repeat(0)).take(columns));
        let first = at * columns + row.counts_from - 1;
        places.extend((first..).take(row.tokens.len() - row.counts_from).map(|place| place as i64));
        labels.extend(row.tokens[row.counts_from..].iter().copied().map(i64::from));
    }
    let ids = Tensor::f_from_slice(&ids)?.f_view([rows.len() as i64, columns as i64])?; // fits
    let hidden = trained.hidden(&Micro::prompt(&ids)?.on(trained.device())?)?;
    let mut scores = Vec::with_capacity(labels.len());
    let chunk = HEAD_CHUNK_ROWS as usize; // fits: a constant
    for (places, labels) in places.chunks(chunk).zip(labels.chunks(chunk)) {
        let hidden = hidden
            .f_index_select(0, &Tensor::f_from_slice(places)?.f_to_device(hidden.device())?)?;
        score(&trained.logits(&hidden)?, labels, &mut scores)?;
    }
    let mut scores = scores.into_iter();
    let counted =
        |row: &ScoredRow| scores.by_ref().take(row.tokens.len() - row.counts_from).collect();
    Ok(rows.iter().map(counted).collect())
}

fn score(logits: &Tensor, labels: &[i64], scores: &mut Vec<TokenScore>) -> Result<()> {
    let ids = Tensor::f_from_slice(labels)?.f_to_device(logits.device())?;
    let log_probs = logits.f_log_softmax(1, Kind::Float)?;
    let losses = log_probs.f_gather(1, &ids.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?.f_neg()?;
    let losses = Vec::<f64>::try_from(losses.f_to_kind(Kind::Double)?)?;
    let right = Vec::<bool>::try_from(logits.f_argmax(1, false)?.f_eq_tensor(&ids)?)?;
    let both = losses.into_iter().zip(right);
    scores.extend(both.map(|(loss, is_likeliest)| TokenScore { loss, is_likeliest }));
    Ok(())
}

fn refused(operation: String, detail: String, hint: &'static str) -> Error {
    Error::Mismatch(Incompatible::new(operation, detail, hint))
}
