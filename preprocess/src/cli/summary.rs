use std::io::{self, Write as _};

use crate::Report;
use storage::ByteSize;

/// Prints a summary of a run as a table.
pub(crate) fn print(report: &Report) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for (name, number, more) in rows(report) {
        writeln!(out, "{}", format!("{name:<12}{number:>16}  {more}").trim_end())?;
    }
    for output in &report.outputs {
        writeln!(out, "{}  {}", output.name, ByteSize(output.bytes))?;
    }
    if report.documents == 0 {
        writeln!(io::stderr(), "warning: inputs are empty; no documents were written")?;
    }
    if report.inputs_unverified > 0 {
        writeln!(
            io::stderr(),
            "warning: {} of {} inputs: not compared with what was read before the resume; no \
             identity was recorded (a stream, or a journal of an earlier version)",
            report.inputs_unverified,
            report.inputs.len()
        )?;
    }
    Ok(())
}

fn rows(report: &Report) -> Vec<(&'static str, String, String)> {
    let Report { documents, tokens, elapsed_s, .. } = report;
    let mut rows = vec![(
        "documents",
        grouped(*documents),
        match report.documents_empty {
            0 => String::new(),
            empty => format!("{} empty, without tokens and end-of-document", grouped(empty)),
        },
    )];
    let per_token = report.text_bytes_per_token;
    let shape = format!(
        "{:.1} per document, {per_token:.2} bytes of text per token",
        report.tokens_per_document
    );
    rows.push(("tokens", grouped(*tokens), shape));
    for (cause, count) in report.skipped.causes() {
        rows.push(("skipped", grouped(count), cause.to_owned()));
    }
    if report.blank_lines > 0 {
        rows.push(("skipped", grouped(report.blank_lines), "blank lines".to_owned()));
    }
    let speed = format!(
        "in {elapsed_s:.1} s: {:.1} MB/s, {:.2} M tokens/s, {} workers",
        report.json_mb_per_s,
        report.tokens_per_s / 1e6,
        report.workers,
    );
    rows.push(("input", ByteSize(report.json_bytes).to_string(), speed));
    let stages = report.stages;
    let named = [
        ("reading", stages.read_ns),
        ("JSON", stages.parse_ns),
        ("tokenizing", stages.tokenize_ns),
        ("writing", stages.write_ns),
    ];
    let all = named.iter().map(|(_, ns)| ns).sum::<u64>().max(1) as f64;
    let shares: Vec<_> = named
        .map(|(name, ns)| format!("{:.0} % {name}", ns as f64 * 100.0 / all))
        .into_iter()
        .collect();
    rows.push(("thread time", format!("{:.1} s", all / 1e9), shares.join(", ")));
    rows
}

/// A number with thousands separators.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.char_indices() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn thousands_are_separated() {
        for (number, expected) in
            [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")]
        {
            assert_eq!(grouped(number), expected);
        }
    }
}
