/// WikiText as it was written, before its makers put spaces around punctuation: the rules of
/// Megatron-LM's `tasks/zeroshot_gpt`, in its order, mistakes included, because perplexities
/// of different texts cannot be compared.
#[must_use]
pub fn detokenize_wikitext(text: &str) -> String {
    let mut text = numbered_apostrophes(&text.replace("s '", "s'"));
    for (from, to) in [
        // Separators inside numbers.
        (" @-@ ", "-"),
        (" @,@ ", ","),
        (" @.@ ", "."),
        // Punctuation.
        (" : ", ": "),
        (" ; ", "; "),
        (" . ", ". "),
        (" ! ", "! "),
        (" ? ", "? "),
        (" , ", ", "),
    ] {
        text = text.replace(from, to);
    }
    for (open, close) in [('(', ')'), ('[', ']'), ('{', '}'), ('"', '"'), ('\'', '\'')] {
        text = tightened(&text, open, close);
    }
    for (from, to) in [
        ("= = = =", "===="),
        ("= = =", "==="),
        ("= =", "=="),
        (" \u{b0} ", "\u{b0}"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    ] {
        text = text.replace(from, to);
    }
    text
}

/// Megatron meant to close up `' 5`. It wrote slashes into the pattern and brackets into the
/// replacement: `/' 5/` becomes `/'[0-9]/`.
fn numbered_apostrophes(text: &str) -> String {
    (0..10).fold(text.to_owned(), |text, digit| text.replace(&format!("/' {digit}/"), "/'[0-9]/"))
}

/// Removes the white space inside each pair of brackets or quotes. A pair ends at the first that
/// closes it, however far away.
fn tightened(text: &str, open: char, close: char) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(begin) = rest.find(open) {
        let inside = &rest[begin + 1..];
        let Some(end) = inside.find(close) else { break };
        out.push_str(&rest[..=begin]);
        out.push_str(trimmed(&inside[..end]));
        out.push(close);
        rest = &inside[end + 1..];
    }
    out + rest
}

/// Without white space around it, as Python counts that.
pub(super) fn trimmed(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Python's white space: Unicode's, and four separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}
