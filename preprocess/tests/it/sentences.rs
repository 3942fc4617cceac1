//! Sentence splitting: Punkt compared with NLTK, the Chinese rule, and settings that are refused.

use std::io::{BufRead, BufReader};
use std::path::Path;

use crate::common::{Random, print_seed};
use preprocess::objective::{Newlines, Nltk, SentenceSpec, Splitter};
use serde_json::Value;

fn open(spec: &SentenceSpec) -> Splitter {
    Splitter::open(spec).unwrap()
}

fn split<'a>(splitter: &Splitter, text: &'a str) -> Vec<&'a str> {
    let mut out = Vec::new();
    splitter.split(text, &mut out);
    out.into_iter().map(|range| &text[range]).collect()
}

/// The differences, and how many comparisons were made. Each line has a text and NLTK's sentences.
fn compare(cases: &Path) -> (Vec<String>, usize) {
    let splitter = |nltk, newlines| open(&SentenceSpec { nltk, newlines, ..Default::default() });
    let splitters = [("3.9", Nltk::V3_9), ("3.10", Nltk::V3_10)].map(|(name, nltk)| {
        (
            name,
            [("drop", Newlines::Drop), ("keep", Newlines::Keep)]
                .map(|(key, newlines)| (key, splitter(nltk, newlines))),
        )
    });
    let (mut differing, mut all) = (Vec::new(), 0);
    for line in BufReader::new(std::fs::File::open(cases).unwrap()).lines() {
        let case: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let text = case["text"].as_str().unwrap();
        let (_, pair) = splitters.iter().find(|(name, _)| *name == case["nltk"]).unwrap();
        for (key, splitter) in pair {
            all += 1;
            let found = split(splitter, text);
            let expected: Vec<_> =
                case[*key].as_array().unwrap().iter().map(|s| s.as_str()).collect();
            if !found.iter().map(|sentence| Some(*sentence)).eq(expected.iter().copied()) {
                let difference = found
                    .iter()
                    .zip(&expected)
                    .position(|(found, expected)| Some(*found) != *expected);
                let at = difference.unwrap_or(found.len().min(expected.len()));
                let (found, expected) = (found.get(at), expected.get(at).copied().flatten());
                differing.push(format!(
                    "{} {key} {at}: found {found:?}, expected {expected:?}",
                    case["nltk"]
                ));
            }
        }
    }
    (differing, all)
}

#[test]
fn punkt_matches_nltk() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/punkt/cases.jsonl");
    let (differing, all) = compare(&golden);
    assert_eq!(differing, Vec::<String>::new());
    assert!(all > 1000, "{all} cases");
}

/// The same for any file that `tests/readers/nltk_sentences.py` wrote.
#[test]
fn punkt_matches_nltk_on_more_texts() {
    let Some(cases) = std::env::var_os("FEEDLINE_SENTENCES") else {
        println!("skipped: FEEDLINE_SENTENCES names no file of cases");
        return;
    };
    let (differing, all) = compare(Path::new(&cases));
    println!("{} of {all} texts differ", differing.len());
    assert!(
        differing.is_empty(),
        "{} of {all}: {:#?}",
        differing.len(),
        &differing[..differing.len().min(10)]
    );
}

/// For any text, sentences are in order, within the text and not empty, and only white space is
/// outside of them.
#[test]
fn sentences_are_in_order_and_not_empty() {
    let mut random = Random::new(print_seed("sentences_are_in_order_and_not_empty", 11));
    let newlines = [Newlines::Drop, Newlines::Keep];
    let punkt = newlines.map(|newlines| open(&SentenceSpec { newlines, ..Default::default() }));
    for _ in 0..2000 {
        let text = random.soup(200).replace(['a', 'e', '\u{3000}'], ". ").replace('i', "!”");
        for splitter in &punkt {
            let mut out = Vec::new();
            splitter.split(&text, &mut out);
            let mut at = 0;
            for range in out {
                assert!(at <= range.start && range.start < range.end, "{text:?}");
                assert!(text[at..range.start].chars().all(is_space), "{text:?}");
                at = range.end;
            }
            assert!(text[at..].chars().all(is_space), "{text:?}");
        }
    }
}

fn is_space(char: char) -> bool {
    char.is_whitespace() || ('\x1c'..='\x1f').contains(&char)
}

#[test]
fn punkt_knows_names_and_abbreviations() {
    let splitter = open(&SentenceSpec::default());
    let text = "Punkt knows that Mr. Smith and Johann S. Bach end none.  (Really?)  \"Yes.\" i am.";
    let expected = [
        "Punkt knows that Mr. Smith and Johann S. Bach end none.",
        "(Really?)",
        "\"Yes.\"",
        "i am.",
    ];
    assert_eq!(split(&splitter, text), expected);
    assert!(split(&splitter, "").is_empty());
    assert!(split(&splitter, " \n ").is_empty());
}

/// A text is cut every 1,000,000 characters before Punkt splits it, so a sentence may start with a
/// space, as NLTK's do at the start of a text.
#[test]
fn huge_texts_are_cut_as_megatron_does() {
    let splitter = open(&SentenceSpec::default());
    let check = |letters: usize, expected: &[usize]| {
        let text = format!("{}é. Two. ", "a".repeat(letters));
        let lens: Vec<_> = split(&splitter, &text).iter().map(|sentence| sentence.len()).collect();
        assert_eq!(lens, expected, "{letters} letters");
    };
    check(999_000, &[999_003, 4]);
    check(999_998, &[1_000_001, 5]);
    check(999_999, &[1_000_001, 1, 4]);
}

#[test]
fn chinese_sentences() {
    let splitter = open(&SentenceSpec { lang: Some("chinese".into()), ..Default::default() });
    let check =
        |text: &str, expected: &[&str]| assert_eq!(split(&splitter, text), expected, "{text}");
    check("你好。再见！", &["你好。", "再见！"]);
    check("真的？！是；好……嗯…吧", &["真的？！", "是；", "好……", "嗯…吧"]);
    check("他说：“去。”她没去。", &["他说：“去。”", "她没去。"]);
    check("“去吗？”，他问。", &["“去吗？”，他问。"]);
    check("（好。）】\u{3000}\n\n 一行\r\n二行", &["（好。）】", "一行", "二行"]);
    check("3.14 Yes! No? 圆。", &["3.14 Yes!", "No?", "圆。"]);
    check("。", &["。"]);
    check("\n \u{3000}", &[]);
    check("", &[]);
}

/// With white space kept, the sentences concatenate to the text.
#[test]
fn chinese_sentences_keep_all() {
    let lang = || Some("chinese".to_owned());
    let keep = open(&SentenceSpec { lang: lang(), newlines: Newlines::Keep, ..Default::default() });
    let drop = open(&SentenceSpec { lang: lang(), ..Default::default() });
    let mut random = Random::new(print_seed("chinese_sentences_keep_all", 7));
    for _ in 0..3000 {
        let len = random.below(30);
        let pieces = ["。", "！", "……", "…", "”", "，", "\n", " ", "\u{3000}", "好", "a", ")", "?"];
        let text: String = (0..len).map(|_| *random.pick(&pieces)).collect();
        let (kept, bare) = (split(&keep, &text), split(&drop, &text));
        assert_eq!(kept.concat(), if text.trim().is_empty() { "" } else { &text });
        assert_eq!(
            kept.iter().map(|sentence| sentence.trim()).collect::<Vec<_>>(),
            bare,
            "{text:?}"
        );
    }
}

#[test]
fn separators() {
    let lines = open(&SentenceSpec { lang: Some("newline".into()), ..Default::default() });
    assert_eq!(split(&lines, " 一。二 \n\n三\n"), ["一。二", "三"]);
    let yuan = open(&SentenceSpec { separator: Some("<n>".into()), ..Default::default() });
    assert_eq!(split(&yuan, "<n>一<n> <n>nice 二<n>"), ["一", "nice 二"]);
}

#[test]
fn parameters_of_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("abbrev_types.txt", "foo\n. . ");
    write("sent_starters.txt", "");
    write("collocations.tab", "bar\tbaz");
    write("ortho_context.tab", "qux\t34\nbaz\t2");
    let params = Some(folder.path().to_str().unwrap().to_owned());
    let spec = SentenceSpec { params, lang: Some("latin".into()), ..Default::default() };
    let splitter = open(&spec);
    let expected = ["A foo. b bar. Baz.", "C mr.", "D foo.", "Qux."];
    assert_eq!(split(&splitter, "A foo. b bar. Baz. C mr. D foo. Qux."), expected);

    write("ortho_context.tab", "qux\t34\nbaz\t3");
    let error = Splitter::open(&spec).unwrap_err().to_string();
    assert!(
        error.contains("ortho_context.tab, line 2: expected a word")
            && error.contains("found 'baz\\t3'"),
        "{error}"
    );
    write("ortho_context.tab", "");
    write("collocations.tab", "one\n");
    let error = Splitter::open(&spec).unwrap_err().to_string();
    assert!(
        error.contains("collocations.tab, line 1: expected two words")
            && error.contains("found 'one'"),
        "{error}"
    );
    std::fs::write(folder.path().join("abbrev_types.txt"), b"a\n\xff").unwrap();
    let error = Splitter::open(&spec).unwrap_err().to_string();
    assert!(
        error.contains("abbrev_types.txt: expected UTF-8 text, found invalid UTF-8 at byte 2"),
        "{error}"
    );
    std::fs::remove_file(folder.path().join("abbrev_types.txt")).unwrap();
    assert!(Splitter::open(&spec).is_err());
}

#[test]
fn invalid_settings_are_refused() {
    let refuse = |spec: &SentenceSpec| Splitter::open(spec).unwrap_err().to_string();
    let spec = SentenceSpec { lang: Some("german".into()), ..Default::default() };
    assert!(refuse(&spec).contains("--lang: expected english, chinese or newline, found 'german'"));
    let spec = SentenceSpec { separator: Some(String::new()), ..Default::default() };
    assert!(
        refuse(&spec).contains("--sentence-splitter: expected some text, found an empty string")
    );
    let (lang, params) = (Some("chinese".into()), Some("x".into()));
    assert!(refuse(&SentenceSpec { lang, params, ..Default::default() }).contains("punkt-params"));
    let (separator, newlines) = (Some("<n>".into()), Newlines::Keep);
    let spec = SentenceSpec { separator, newlines, ..Default::default() };
    assert!(refuse(&spec).contains("--keep-newlines"));
}
