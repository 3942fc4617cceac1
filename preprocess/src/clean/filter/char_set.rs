use regex_syntax::hir::{Class, HirKind};

/// Characters that a class of Unicode names.
#[derive(Debug)]
pub(in crate::clean) struct CharSet {
    /// First and last, ascending.
    ranges: Vec<(char, char)>,
}

impl CharSet {
    /// Those of a pattern that is one class, such as `[\p{L}\p{N}]`.
    pub(in crate::clean) fn new(pattern: &str) -> Option<Self> {
        match regex_syntax::parse(pattern).ok()?.into_kind() {
            HirKind::Class(Class::Unicode(class)) => {
                let ranges = class.iter().map(|range| (range.start(), range.end())).collect();
                Some(CharSet { ranges })
            }
            _ => None,
        }
    }

    pub(in crate::clean) fn has(&self, char: char) -> bool {
        let after = self.ranges.partition_point(|&(first, _)| first <= char);
        after > 0 && char <= self.ranges[after - 1].1
    }
}
