//! The options that decide a run's output, as texts. A journal holds them, and a run resumes only a
//! journal of the same texts. They never change, whatever the types and fields are called.

use crate::input::{Format, Separator, TextRules};
use crate::objective::{Newlines, Nltk, SentenceSpec};
use crate::options::{EmptyDocuments, Lists, Objective, OnBadLine, SpanOptions};

pub(crate) fn empty_documents(empty: EmptyDocuments) -> &'static str {
    match empty {
        EmptyDocuments::Megatron => "Megatron",
        EmptyDocuments::Sequence => "Sequence",
        EmptyDocuments::Skip => "Skip",
    }
}

/// `None` for what earlier versions did, whose journals have no text for it.
pub(crate) fn lists(lists: Lists) -> Option<&'static str> {
    match lists {
        Lists::Sequences => None,
        Lists::Joined => Some("Joined"),
    }
}

pub(crate) fn bad_lines(bad: OnBadLine) -> &'static str {
    match bad {
        OnBadLine::Fail => "Fail",
        OnBadLine::Skip => "Skip",
    }
}

pub(crate) fn objective(objective: &Objective) -> String {
    match objective {
        Objective::Documents => "Documents".to_owned(),
        Objective::Sentences(sentences) => {
            let SentenceSpec { lang, separator, newlines, params, nltk } = sentences;
            let newlines = match newlines {
                Newlines::Drop => "Drop",
                Newlines::Keep => "Keep",
            };
            let nltk = match nltk {
                Nltk::V3_9 => "V3_9",
                Nltk::V3_10 => "V3_10",
            };
            format!(
                "Sentences(SentenceSpec {{ lang: {lang:?}, separator: {separator:?}, \
                 newlines: {newlines}, params: {params:?}, nltk: {nltk} }})"
            )
        }
        Objective::Spans(spans) => {
            let SpanOptions { density, mean_len, seed, cpm_compat } = spans;
            format!(
                "Spans(SpanOptions {{ density: {density:?}, mean_len: {mean_len:?}, seed: {seed}, \
                 cpm_compat: {cpm_compat} }})"
            )
        }
    }
}

pub(crate) fn input_format(format: Format) -> &'static str {
    match format {
        Format::Auto => "Auto",
        Format::JsonLines => "JsonLines",
        Format::JsonArray => "JsonArray",
        Format::Text => "Text",
        Format::Parquet => "Parquet",
        Format::TfRecord => "TfRecord",
    }
}

pub(crate) fn text_rules(rules: &TextRules) -> String {
    let TextRules { separator, newline, trim } = rules;
    let separator = match separator {
        Separator::Line => "Line".to_owned(),
        Separator::BlankLine => "BlankLine".to_owned(),
        Separator::Literal(literal) => format!("Literal({literal:?})"),
        Separator::File => "File".to_owned(),
    };
    format!("TextRules {{ separator: {separator}, newline: {newline:?}, trim: {trim} }}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Journals of earlier versions hold these texts.
    #[test]
    fn option_texts_are_stable() {
        use EmptyDocuments::{Megatron, Sequence, Skip};
        assert_eq!(
            [Megatron, Sequence, Skip].map(empty_documents),
            ["Megatron", "Sequence", "Skip"]
        );
        assert_eq!([Lists::Sequences, Lists::Joined].map(lists), [None, Some("Joined")]);
        assert_eq!([OnBadLine::Fail, OnBadLine::Skip].map(bad_lines), ["Fail", "Skip"]);
        let formats =
            [Format::Auto, Format::JsonLines, Format::JsonArray, Format::Text, Format::Parquet];
        let names = ["Auto", "JsonLines", "JsonArray", "Text", "Parquet"];
        assert_eq!(formats.map(input_format), names);
        assert_eq!(input_format(Format::TfRecord), "TfRecord");
    }

    #[test]
    fn objective_texts_are_stable() {
        assert_eq!(objective(&Objective::Documents), "Documents");
        assert_eq!(
            objective(&Objective::Sentences(SentenceSpec::default())),
            "Sentences(SentenceSpec { lang: None, separator: None, newlines: Drop, params: None, \
             nltk: V3_10 })"
        );
        let sentences = SentenceSpec {
            lang: Some("german".to_owned()),
            separator: Some("\n\"".to_owned()),
            newlines: Newlines::Keep,
            params: Some("punkt_tab".to_owned()),
            nltk: Nltk::V3_9,
        };
        assert_eq!(
            objective(&Objective::Sentences(sentences)),
            "Sentences(SentenceSpec { lang: Some(\"german\"), separator: Some(\"\\n\\\"\"), \
             newlines: Keep, params: Some(\"punkt_tab\"), nltk: V3_9 })"
        );
        assert_eq!(
            objective(&Objective::Spans(SpanOptions::default())),
            "Spans(SpanOptions { density: 0.15, mean_len: 3.0, seed: 233, cpm_compat: false })"
        );
    }

    #[test]
    fn text_rule_texts_are_stable() {
        assert_eq!(
            text_rules(&TextRules::default()),
            "TextRules { separator: Line, newline: None, trim: false }"
        );
        let rules =
            |separator| TextRules { separator, newline: Some("<n>".to_owned()), trim: true };
        assert_eq!(
            text_rules(&rules(Separator::BlankLine)),
            "TextRules { separator: BlankLine, newline: Some(\"<n>\"), trim: true }"
        );
        assert_eq!(
            text_rules(&rules(Separator::File)),
            "TextRules { separator: File, newline: Some(\"<n>\"), trim: true }"
        );
        assert_eq!(
            text_rules(&rules(Separator::Literal("\n---\n".to_owned()))),
            "TextRules { separator: Literal(\"\\n---\\n\"), newline: Some(\"<n>\"), trim: true }"
        );
    }
}
