use std::fmt;
use std::time::Duration;

use storage::ByteSize;

use super::Plan;
use crate::log::{thousands, time_text};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.model)?;
        for (title, rows) in [
            ("parameters", self.parameter_rows()),
            ("memory, about", self.memory_rows()),
            ("run", self.run_rows()),
        ] {
            writeln!(f, "\n{title}")?;
            for (name, value, note) in rows {
                writeln!(f, "{}", format!("  {name:<20}{value:>18}  {note}").trim_end())?;
            }
        }
        for (title, lines) in [("cannot run", &self.refusals), ("warning", &self.warnings)] {
            for line in lines {
                write!(f, "\n{title}: {line}")?;
            }
        }
        if self.refusals.is_empty() && self.warnings.is_empty() {
            return Ok(());
        }
        writeln!(f)
    }
}

type Row = (&'static str, String, String);

impl Plan {
    fn parameter_rows(&self) -> Vec<Row> {
        let all = &self.parameters;
        vec![
            ("word embedding", count(all.word_embedding), "which is the head too".to_owned()),
            ("position embedding", count(all.position_embedding), String::new()),
            ("attention", count(all.attention), String::new()),
            ("feed-forward", count(all.feed_forward), String::new()),
            ("norms", count(all.norms), String::new()),
            ("total", count(all.total), String::new()),
        ]
    }

    fn memory_rows(&self) -> Vec<Row> {
        let all = &self.memory_bytes;
        let copy = ("compute copy", all.compute_copy, "bf16: 2 B a parameter");
        let rows = [
            ("weights", all.weights, "f32: 4 B a parameter"),
            copy,
            ("gradients", all.gradients, "partial sums of the micro-batches"),
            ("Adam moments", all.moments, "8 B a parameter"),
            ("activations", all.activations, "of one micro-batch: layers x tokens x (8h + 2ffn)"),
            ("head", all.head, "logits of 512 tokens at a time"),
            ("total", all.total, ""),
        ];
        let rows = rows.into_iter().filter(|row| *row != copy || all.compute_copy > 0);
        rows.map(|(name, value, note)| (name, bytes(value), note.to_owned())).collect()
    }

    fn run_rows(&self) -> Vec<Row> {
        let (run, saving) = (&self.run, &self.checkpoint);
        let passes = format!("{} micro-batches a step", run.accumulation);
        let kept =
            format!("{} in all, at most {} on disk", saving.count, bytes(saving.disk_bytes_max));
        let flop = |flop: u64| scaled(flop as f64);
        let mut rows = vec![
            ("steps", count(run.steps), passes),
            ("tokens", count(run.tokens), format!("{} a step", count(run.tokens_per_step))),
            ("FLOP a token", flop(self.flop.per_token_6n_12lhs), "6N + 12Lhs".to_owned()),
            ("FLOP a token", flop(self.flop.per_token_6n_6lhs), "6N + 6Lhs, causal".to_owned()),
            ("FLOP a step", flop(self.flop.per_step), "6N + 12Lhs".to_owned()),
            ("checkpoint", bytes(saving.checkpoint_bytes), kept),
            ("first loss", format!("{:.3}", self.loss_initial_nats), "ln(vocabulary)".to_owned()),
        ];
        if let Some(epochs) = run.epochs {
            rows.insert(2, ("epochs", format!("{epochs:.2}"), String::new()));
        }
        if let Some(time) = &self.time {
            let at = format!("at {} tokens/s, from {}", thousands(time.tokens_per_s), time.basis);
            let run = Duration::try_from_secs_f64(time.run_s).unwrap_or(Duration::MAX);
            rows.push(("time", time_text(run), at));
        }
        rows
    }
}

fn count(number: u64) -> String {
    thousands(number as f64)
}

fn bytes(number: u64) -> String {
    ByteSize(number).to_string()
}

/// `1.23 G`, in powers of a thousand.
fn scaled(number: f64) -> String {
    let units = ["", "k", "M", "G", "T", "P", "E"];
    let mut power = 0;
    let mut value = number;
    while value >= 1000.0 && power + 1 < units.len() {
        value /= 1000.0;
        power += 1;
    }
    format!("{value:.2} {}", units[power]).trim_end().to_owned()
}
