use std::collections::VecDeque;

use indexed::{IndexedDataset, Split, SplitMatrix};
use preprocess::Tokenizer;
use serde::Serialize;
use serde_json::Value;

use super::detokenize::{is_space, trimmed};
use super::{ScoredRow, TokenScore, Windows, detokenize_wikitext, judge, refused};
use crate::Result;
use crate::generate::Trained;

/// How the model is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvalOptions {
    /// Windows in one pass.
    pub batch: usize,
    /// Tokens from one window to the next; the model's length if `None`: they do not overlap.
    pub stride: Option<u64>,
}

/// Perplexity of WikiText.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WikitextReport {
    /// Words of the text of the file, with the spaces around its punctuation.
    pub words: u64,
    /// Tokens that were predicted: all but the first.
    pub tokens: u64,
    /// Tokens of the window, and from one to the next.
    pub window_tokens: u64,
    /// See [`EvalOptions::stride`].
    pub stride_tokens: u64,
    /// Mean loss of a token, in nats.
    pub loss_per_token: f64,
    /// `exp(loss_per_token)`.
    pub perplexity_per_token: f64,
    /// `tokens / (words - 1)`, as Megatron counts.
    pub token_ratio: f64,
    /// `exp(loss_per_token x token_ratio)`: the one that papers compare.
    pub perplexity_per_word_adjusted: f64,
}

/// Scores a WikiText file as Megatron's `--task WIKITEXT103` does. Calls `progress` with the number
/// of tokens done, and of all tokens. A text without a heading of WikiText has a warning: its words
/// are not between the spaces that are counted.
///
/// # Errors
/// [`crate::Error::Mismatch`] for a text that is too short or a stride that does not fit,
/// [`crate::Error::Torch`], those of `progress`.
pub fn wikitext(
    trained: &Trained,
    tokenizer: &dyn Tokenizer,
    text: &str,
    options: EvalOptions,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<WikitextReport> {
    let is_heading = |line: &str| line.starts_with(" = ") && line.trim_end().ends_with(" =");
    if !text.lines().any(is_heading) {
        log::warn!("wikitext: no line is a heading as ' = Title = '; rates per word differ");
    }
    let words = trimmed(text).split(' ').count() as u64;
    let mut ids = Vec::new();
    tokenizer.encode(&detokenize_wikitext(text), &mut ids);
    let total = ids.len() as u64;
    if words < 2 || total < 2 {
        let problem = format!("expected 2 words and 2 tokens, found {words} and {total}");
        return Err(refused("cannot evaluate".to_owned(), problem, "use a WikiText file"));
    }
    let mut ids = ids.into_iter();
    let mut next = || Ok(ids.next());
    let sum = windowed(trained, total, options, &mut next, progress)?;
    let tokens = total - 1;
    let loss_per_token = sum / tokens as f64;
    let token_ratio = tokens as f64 / (words - 1) as f64;
    let window_tokens = trained.config().model.seq_len;
    Ok(WikitextReport {
        words,
        tokens,
        window_tokens,
        stride_tokens: options.stride.unwrap_or(window_tokens),
        loss_per_token,
        perplexity_per_token: loss_per_token.exp(),
        token_ratio,
        perplexity_per_word_adjusted: (loss_per_token * token_ratio).exp(),
    })
}

/// Perplexity of a corpus.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CorpusReport {
    /// Sequences that were read from.
    pub sequences: u64,
    /// Tokens that were predicted: all but the first.
    pub tokens: u64,
    /// Tokens of the window.
    pub window_tokens: u64,
    /// See [`EvalOptions::stride`].
    pub stride_tokens: u64,
    /// Mean loss of a token, in nats.
    pub loss_per_token: f64,
    /// `exp(loss_per_token)`.
    pub perplexity_per_token: f64,
    /// `loss_per_token / ln 2`.
    pub bits_per_token: f64,
}

/// The part of a corpus that is scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorpusTask {
    /// Shares of training, validation and test, as in a config.
    pub split: String,
    /// Which of them.
    pub which: Split,
    /// Tokens at most, from the first on.
    pub tokens_max: Option<u64>,
}

/// Scores a split of a `.bin/.idx` pair: its sequences in the order of the file as one text, of
/// which only a part is in memory.
///
/// # Errors
/// [`crate::Error::Feed`], and as [`wikitext`].
pub fn corpus(
    trained: &Trained,
    corpus: &IndexedDataset,
    task: &CorpusTask,
    options: EvalOptions,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<CorpusReport> {
    let split = SplitMatrix::parse(&task.split)?;
    let part = split.range(task.which, corpus.sequence_count()).unwrap_or(0..0);
    let (mut total, mut end) = (0, part.start);
    let tokens_max = task.tokens_max.unwrap_or(u64::MAX);
    while end < part.end && total < tokens_max {
        total = tokens_max.min(total + u64::from(corpus.sequence_len(end)));
        end += 1;
    }
    if total < 2 {
        let what = format!("cannot evaluate {} split of {}", task.which.name(), corpus.display());
        let problem = format!("expected at least 2 tokens, found {total}");
        return Err(refused(what, problem, "another --split, or another corpus"));
    }
    let mut sequences = part.start..end;
    let mut read = VecDeque::new();
    let mut next = || {
        while read.is_empty()
            && let Some(sequence) = sequences.next()
        {
            read.extend(corpus.read_sequence(sequence)?);
        }
        let token: Option<i64> = read.pop_front();
        // A token that is no id becomes the largest id, which no vocabulary has.
        Ok(token.map(|token| u32::try_from(token).unwrap_or(u32::MAX)))
    };
    let sum = windowed(trained, total, options, &mut next, progress)?;
    let loss_per_token = sum / (total - 1) as f64;
    let window_tokens = trained.config().model.seq_len;
    Ok(CorpusReport {
        sequences: end - part.start,
        tokens: total - 1,
        window_tokens,
        stride_tokens: options.stride.unwrap_or(window_tokens),
        loss_per_token,
        perplexity_per_token: loss_per_token.exp(),
        bits_per_token: loss_per_token / std::f64::consts::LN_2,
    })
}

/// The sum of the losses of a text of `total` tokens, which `next` returns, in nats.
fn windowed(
    trained: &Trained,
    total: u64,
    options: EvalOptions,
    next: &mut dyn FnMut() -> Result<Option<u32>>,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<f64> {
    let len = trained.config().model.seq_len;
    let stride = options.stride.unwrap_or(len);
    if stride == 0 || stride > len {
        let problem = format!("expected 1 to {len}, the tokens of a sequence, found {stride}");
        return Err(refused(format!("cannot use --stride {stride}"), problem, "another --stride"));
    }
    let (mut held, mut held_from) = (VecDeque::new(), 0);
    let mut sum = 0.0;
    let mut windows = Windows::new(total, len, stride).peekable();
    while windows.peek().is_some() {
        let (mut rows, mut done) = (Vec::new(), 0);
        for window in windows.by_ref().take(options.batch.max(1)) {
            while held_from < window.begin {
                held.pop_front();
                held_from += 1;
            }
            while held_from + (held.len() as u64) < window.end {
                held.push_back(next()?.expect("`next` returns `total` tokens"));
            }
            let len = (window.end - window.begin) as usize; // fits: at most a window
            let counts_from = (window.counts_from - window.begin) as usize; // fits: as above
            rows.push(ScoredRow { tokens: held.iter().take(len).copied().collect(), counts_from });
            done = window.end;
        }
        let scores = judge(trained, &rows)?;
        sum += scores.iter().flatten().map(|score| score.loss).sum::<f64>();
        progress(done, total)?;
    }
    Ok(sum)
}

/// How well the ends of passages are guessed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LambadaReport {
    /// Passages.
    pub examples: u64,
    /// Those of whose last word each token was the likeliest: Megatron's
    /// `--strict-lambada`, and what papers report.
    pub last_word_correct: u64,
    /// `last_word_correct / examples`.
    pub last_word_accuracy: f64,
    /// Those whose last token was the likeliest: Megatron's default, which is easier.
    pub last_token_correct: u64,
    /// `last_token_correct / examples`.
    pub last_token_accuracy: f64,
    /// `exp` of the mean loss of a last word.
    pub last_word_perplexity: f64,
    /// Passages longer than the window of the model, of which it saw the end.
    pub cut: u64,
}

/// Scores LAMBADA: lines of JSON, each with a passage under `text`.
///
/// # Errors
/// [`crate::Error::Mismatch`] for a line that is not JSON, or has one word;
/// [`crate::Error::Torch`], those of `progress`.
pub fn lambada(
    trained: &Trained,
    tokenizer: &dyn Tokenizer,
    lines: &str,
    options: EvalOptions,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<LambadaReport> {
    let mut rows = Vec::new();
    let mut cut = 0;
    let window = trained.config().model.seq_len as usize; // fits: the config bounds it
    for (number, line) in lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let pair = passage(tokenizer, line).ok_or_else(|| {
            let what = format!("cannot read LAMBADA at line {}", number + 1);
            let problem = "expected a JSON object with a 'text' of two words".to_owned();
            refused(what, problem, "a line is {\"text\": \"all of a passage\"}")
        })?;
        cut += u64::from(pair[0].tokens.len() > window + 1);
        rows.push(pair.map(|row| shortened(row, window)));
    }
    if rows.is_empty() {
        let problem = "expected a line of JSON, found none".to_owned();
        return Err(refused("cannot read LAMBADA".to_owned(), problem, "another file"));
    }
    let (mut words, mut tokens, mut loss) = (0, 0, 0.0);
    for (at, rows_now) in rows.chunks(options.batch.max(1)).enumerate() {
        let whole: Vec<ScoredRow> = rows_now.iter().map(|[word, _]| word.clone()).collect();
        let lone: Vec<ScoredRow> = rows_now.iter().map(|[_, token]| token.clone()).collect();
        let all_right = |row: &&Vec<TokenScore>| row.iter().all(|score| score.is_likeliest);
        let scores = judge(trained, &whole)?;
        words += scores.iter().filter(all_right).count() as u64;
        loss += scores.iter().flatten().map(|score| score.loss).sum::<f64>();
        tokens += judge(trained, &lone)?.iter().filter(all_right).count() as u64;
        let done = at * options.batch.max(1) + rows_now.len();
        progress(done as u64, rows.len() as u64)?;
    }
    let examples = rows.len() as u64;
    Ok(LambadaReport {
        examples,
        last_word_correct: words,
        last_word_accuracy: words as f64 / examples as f64,
        last_token_correct: tokens,
        last_token_accuracy: tokens as f64 / examples as f64,
        last_word_perplexity: (loss / examples as f64).exp(),
        cut,
    })
}

/// A passage whose last word counts, and one whose last token does. The word is encoded
/// separately, after a space, as in Megatron, so its tokens never overlap the word before.
fn passage(tokenizer: &dyn Tokenizer, line: &str) -> Option<[ScoredRow; 2]> {
    let line: Value = serde_json::from_str(line).ok()?;
    let text = line["text"].as_str()?;
    let last = text.split(is_space).rfind(|word| !word.is_empty())?;
    let mut word = Vec::new();
    tokenizer.encode(trimmed(&text[..text.rfind(last)?]), &mut word);
    let counts_from = word.len();
    tokenizer.encode(&format!(" {last}"), &mut word);
    let mut whole = Vec::new();
    tokenizer.encode(text, &mut whole);
    let last_token = whole.len().checked_sub(1)?;
    let is_whole = counts_from > 0 && counts_from < word.len() && last_token > 0;
    let rows = [
        ScoredRow { tokens: word, counts_from },
        ScoredRow { tokens: whole, counts_from: last_token },
    ];
    is_whole.then_some(rows)
}

/// The end of a row, as much as the model sees and one token more.
fn shortened(mut row: ScoredRow, window: usize) -> ScoredRow {
    let over = row.tokens.len().saturating_sub(window + 1);
    row.tokens.drain(..over);
    row.counts_from = row.counts_from.saturating_sub(over).max(1);
    row
}
