use std::fmt;
use std::time::Duration;

use storage::ByteSize;

use super::RunPlan;
use crate::text::{thousands, time_text};

impl fmt::Display for RunPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.model)?;
        for (title, rows) in [
            ("parameters", self.parameter_rows()),
            ("layout", self.layout_rows()),
            ("estimated memory of one rank", self.memory_rows()),
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

/// Maximum of stages in the table.
const STAGES_SHOWN_MAX: usize = 16;

type Row = (&'static str, String, String);

impl RunPlan {
    fn parameter_rows(&self) -> Vec<Row> {
        let all = &self.parameters;
        let tied = if all.head == 0 { "shared with the head" } else { "" };
        let rows = [
            ("word embedding", all.word_embedding, tied),
            ("position embedding", all.position_embedding, ""),
            ("attention", all.attention, ""),
            ("feed-forward", all.feed_forward, ""),
            ("norms", all.norms, ""),
            ("head", all.head, ""),
            ("total", all.total, ""),
        ];
        let rows = rows.into_iter().filter(|(_, value, _)| *value > 0);
        rows.map(|(name, value, note)| (name, count(value), note.to_owned())).collect()
    }

    fn layout_rows(&self) -> Vec<Row> {
        let Some(all) = self.layout else { return Vec::new() };
        let mesh = format!("dp {} x pp {} x tp {}", all.dp, all.pp, all.tp);
        let mut rows = vec![("ranks", count(all.world), mesh)];
        if self.stages.len() > 1 {
            let idle = format!("{:.1} %", 100.0 * self.bubble);
            rows.push(("bubble", idle, "of a step, in which a rank waits for others".to_owned()));
            for (rank, stage) in self.stages.iter().enumerate().take(STAGES_SHOWN_MAX) {
                let need = bytes(stage.memory_bytes.total);
                let note = format!(
                    "layers {:?}, {} parameters, {} micro-batches in flight",
                    stage.units,
                    count(stage.parameters),
                    stage.in_flight
                );
                rows.push(if rank == 0 { ("stages", need, note) } else { ("", need, note) });
            }
            if self.stages.len() > STAGES_SHOWN_MAX {
                let rest =
                    format!("and {} more (--json lists all)", self.stages.len() - STAGES_SHOWN_MAX);
                rows.push(("", String::new(), rest));
            }
        }
        rows
    }

    fn memory_rows(&self) -> Vec<Row> {
        let all = &self.memory_bytes;
        let rows = [
            ("weights", all.weights, "f32, slice of one replica"),
            (
                "offloaded",
                all.offload,
                "in host memory: f32 weights and moments, or their staging buffers",
            ),
            ("compute copy", all.compute_copy, "weights in the format of the computation"),
            ("Adam moments", all.moments, "8 B per parameter, slice of one replica"),
            ("gradients", all.gradients, "partial sums of the tree over micro-batches"),
            ("activations", all.activations, "of the micro-batches in flight"),
            ("input buffers", all.input_buffers, "in host memory: staging of inputs for the disk"),
            ("backward", all.backward, "logits of 512 tokens, or gradients of one micro-batch"),
            ("exchange", all.exchange, "buffers between replicas"),
            ("staging", all.staging, "in host memory: copy of the state for an async save"),
            ("program", all.program, "in host memory: libtorch, measured"),
            ("total", all.total, ""),
        ];
        let rows = rows.into_iter().filter(|(_, value, _)| *value > 0);
        rows.map(|(name, value, note)| (name, bytes(value), note.to_owned())).collect()
    }

    fn run_rows(&self) -> Vec<Row> {
        let (run, saving) = (&self.run, &self.checkpoint);
        let passes = format!("{} micro-batches per step and replica", run.accumulation);
        let kept =
            format!("{} in total, at most {} on disk", saving.count, bytes(saving.disk_bytes_max));
        let flop = |flop: u64| scaled(flop as f64);
        let mut rows = vec![
            ("steps", count(run.steps), passes),
            ("tokens", count(run.tokens), format!("{} per step", count(run.tokens_per_step))),
            ("FLOP per token", flop(self.flop.per_token_6n_12lhs), "6N + 12Lhs".to_owned()),
            ("FLOP per token", flop(self.flop.per_token_6n_6lhs), "6N + 6Lhs, causal".to_owned()),
            ("FLOP per step", flop(self.flop.per_step), "6N + 12Lhs".to_owned()),
            ("checkpoint", bytes(saving.checkpoint_bytes), kept),
            ("initial loss", format!("{:.3}", self.loss_initial_nats), "ln(vocabulary)".to_owned()),
        ];
        if let Some(epochs) = run.epochs {
            rows.insert(2, ("epochs", format!("{epochs:.2}"), String::new()));
        }
        if let Some(all) = &self.efficiency {
            let by = [("6N + 12Lhs", all.mfu_6n_12lhs), ("6N + 6Lhs, causal", all.mfu_6n_6lhs)];
            for (formula, used) in by {
                rows.push(("MFU", format!("{:.1} %", 100.0 * used), formula.to_owned()));
            }
        }
        if let Some(all) = &self.offload {
            let moved = bytes(all.read_bytes_per_step + all.write_bytes_per_step);
            let mut note = format!("read and written in {}", all.place);
            if let Some(seconds) = all.disk_s_per_step {
                note += &format!(", {seconds:.1} s of disk time");
            }
            if let Some(seconds) = all.compute_s_per_step {
                note += &format!(", {seconds:.1} s of computation");
            }
            rows.push(("I/O per update", moved, note));
        }
        if let Some(all) = &self.inputs {
            let spared = bytes(all.spared_bytes);
            let mut note = format!("to {} and back, saves {spared} of memory", all.place);
            if let Some(seconds) = all.disk_s_per_step {
                note += &format!(", {seconds:.1} s of disk time");
            }
            if let Some(seconds) = all.compute_s_per_step {
                note += &format!(", {seconds:.1} s of computation");
            }
            rows.push(("input I/O per step", bytes(all.bytes_per_step), note));
        }
        if let Some(time) = &self.time {
            let at =
                format!("at {} tokens/s, based on {}", thousands(time.tokens_per_s), time.basis);
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
