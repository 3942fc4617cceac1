//! Prints the validation batches of a run, one JSON object per line, to compare them with another
//! program: `valid_batches RUN.toml`.

use std::io::Write as _;

use feed::{AnyBatch, Data, open_corpus, with_special};
use recipe::config::Config;
use recipe::mesh::{DeviceMesh, MeshRank};
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let path = std::env::args().nth(1).ok_or("expected the config of a run, found none")?;
    let config = with_special(Config::load(&path, &[])?)?;
    let data = Data::new(open_corpus(&config)?, &config)?;
    let rank = MeshRank { mesh: DeviceMesh::ALONE, rank: 0 };
    let mut batches = data.valid_batches(&config, rank)?.ok_or("eval.every is 0")?;
    loop {
        let mut read = Vec::new();
        batches.fill(1, &mut read)?;
        let Some(batch) = read.first() else { return Ok(()) };
        writeln!(std::io::stdout(), "{}", to_json(batch))?;
    }
}

fn to_json(batch: &AnyBatch) -> Value {
    match batch {
        AnyBatch::Lm(batch) => json!({
            "rows": batch.rows, "input_ids": batch.tokens, "labels": batch.labels,
            "loss_mask": batch.loss_mask,
        }),
        AnyBatch::Spans(batch) => json!({
            "rows": batch.rows, "input_ids": batch.encoder_tokens,
            "attention_mask": batch.encoder_mask, "decoder_input_ids": batch.decoder_tokens,
            "labels": batch.labels, "loss_mask": batch.loss_mask,
        }),
        AnyBatch::Triple(batch) => json!({
            "rows": batch.rows, "input_ids": batch.encoder_tokens,
            "decoder_input_ids": batch.decoder_tokens, "labels": batch.labels,
            "loss_mask": batch.loss_mask,
        }),
        AnyBatch::Masked(batch) => json!({
            "rows": batch.rows, "input_ids": batch.tokens, "token_type_ids": batch.types,
            "attention_mask": batch.padding_mask, "labels": batch.labels,
            "loss_mask": batch.loss_mask, "is_random": batch.is_random,
            "two_parts": batch.two_parts,
        }),
    }
}
