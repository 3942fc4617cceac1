//! Values as Python writes them, for the descriptions that Megatron hashes.

/// `str` of a list of strings.
pub(super) fn repr_list(texts: &[String]) -> String {
    let quoted: Vec<_> = texts.iter().map(|text| repr(text)).collect();
    format!("[{}]", quoted.join(", "))
}

/// `repr` of a string that has nothing to escape but quotes and backslashes.
fn repr(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\");
    if escaped.contains('\'') && !escaped.contains('"') {
        format!("\"{escaped}\"")
    } else {
        format!("'{}'", escaped.replace('\'', "\\'"))
    }
}

#[cfg(test)]
mod tests {
    use super::repr_list;

    /// Against `str(["a", "it's", 'both\'"', "\\"])` of Python 3.11.
    #[test]
    fn as_python_writes_it() {
        let texts = ["a", "it's", "both'\"", "\\"].map(str::to_owned);
        assert_eq!(repr_list(&texts), r#"['a', "it's", 'both\'"', '\\']"#);
        assert_eq!(repr_list(&[]), "[]");
    }
}
