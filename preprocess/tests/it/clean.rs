//! Cleaning through its public interface: lines in, lines and a report out.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Random, print_seed};
use preprocess::clean::{
    CleanOptions, CleanReport, DropReason, Filters, Measure, NearOptions, ShingleUnit, UrlOptions,
    clean,
};
use serde_json::{Value, json};
use storage::Key;
use storage::s3_server::S3Server;

struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new() -> Self {
        Case { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        fs::write(self.path(name), content).unwrap();
        self.path(name).to_str().unwrap().to_owned()
    }

    fn options(&self, inputs: &[&str]) -> CleanOptions {
        let inputs = inputs.iter().map(|name| self.path(name).to_str().unwrap().to_owned());
        CleanOptions::new(inputs.collect(), self.path("out").to_str().unwrap())
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

fn run(options: &CleanOptions) -> CleanReport {
    clean(options, &mut |_| {}).unwrap()
}

fn lines(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines().map(str::to_owned).collect()
}

fn line(text: &str) -> String {
    json!({ "text": text }).to_string()
}

/// The shingles of a text as characters, without hashes, as the reference.
fn shingles(text: &str) -> HashSet<Vec<char>> {
    let chars: Vec<char> = text.chars().collect();
    chars.windows(5).map(<[char]>::to_vec).collect()
}

fn jaccard(first: &HashSet<Vec<char>>, second: &HashSet<Vec<char>>) -> f64 {
    let common = first.intersection(second).count();
    common as f64 / (first.len() + second.len() - common) as f64
}

/// Documents of several lengths and scripts, some of them changed copies of earlier ones.
fn corpus(random: &mut Random, count: usize) -> Vec<String> {
    let mut texts: Vec<String> = Vec::new();
    for _ in 0..count {
        let len = [30, 120, 500, 1500][random.below(4) as usize];
        let text = match random.below(10) {
            0..=2 if !texts.is_empty() => {
                let mut chars: Vec<char> = random.pick(&texts).chars().collect();
                for _ in 0..=chars.len() as u64 * random.below(12) / 100 {
                    let at = random.below(chars.len() as u64) as usize;
                    chars[at] = *random.pick(&['x', '春', ' ']);
                }
                chars.into_iter().collect()
            }
            3 if !texts.is_empty() => random.pick(&texts).clone(),
            4..=6 => random.chinese(len),
            _ => random.english(len),
        };
        texts.push(text);
    }
    texts
}

#[test]
fn exact_duplicates_match_a_hash_set() {
    let mut random = Random::new(print_seed("exact_duplicates_match_a_hash_set", 0xc1ea));
    let texts = corpus(&mut random, 600);
    let mut seen = HashSet::new();
    let expected: Vec<String> =
        texts.iter().filter(|text| seen.insert(text.as_str())).map(|text| line(text)).collect();
    assert!(expected.len() < texts.len());
    let case = Case::new();
    let all: Vec<String> = texts.iter().map(|text| line(text)).collect();
    let (first, second) = all.split_at(200);
    case.file("a.jsonl", first.join("\n"));
    case.file("b.jsonl", second.join("\n"));
    let mut options = case.options(&["a.jsonl", "b.jsonl"]);
    options.exact = true;
    let report = run(&options);
    assert_eq!(lines(&case.path("out.jsonl")), expected);
    assert_eq!((report.documents, report.kept), (600, expected.len() as u64));
    assert_eq!(report.dropped[&DropReason::ExactDuplicate].documents, 600 - expected.len() as u64);
    assert_eq!(report.inputs[0].lines, 200);
}

/// Each dropped document has at least the requested similarity to a kept one, by its characters. No
/// two kept documents have it, except for the few pairs that LSH may miss.
#[test]
fn near_duplicates_match_brute_force() {
    let mut random = Random::new(print_seed("near_duplicates_match_brute_force", 0x5e7));
    let texts = corpus(&mut random, 400);
    let sets: Vec<_> = texts.iter().map(|text| shingles(text)).collect();
    let case = Case::new();
    let all: Vec<String> = texts.iter().map(|text| line(text)).collect();
    case.file("in.jsonl", all.join("\n"));
    let mut options = case.options(&["in.jsonl"]);
    options.near = Some(NearOptions::default());
    options.dropped = Some(case.path("dropped.jsonl").to_str().unwrap().to_owned());
    let report = run(&options);

    let mut is_dropped = vec![false; texts.len()];
    for dropped in lines(&case.path("dropped.jsonl")) {
        let dropped: Value = serde_json::from_str(&dropped).unwrap();
        let place = |name: &str| dropped[name].as_u64().unwrap() as usize;
        let (document, of) = (place("document"), place("of"));
        assert!(of < document && !is_dropped[of], "{dropped}");
        let expected = jaccard(&sets[document], &sets[of]);
        assert!(expected >= 0.7, "{dropped}");
        assert!(
            (dropped["jaccard"].as_f64().unwrap() - expected).abs() < 1e-12,
            "{expected}: {dropped}"
        );
        assert_eq!(dropped["dropped"]["text"], texts[document]);
        assert_eq!((place("line"), &dropped["cause"]), (document + 1, &json!("near-duplicate")));
        is_dropped[document] = true;
    }
    let kept: Vec<usize> = (0..texts.len()).filter(|nth| !is_dropped[*nth]).collect();
    let expected: Vec<String> = kept.iter().map(|nth| all[*nth].clone()).collect();
    assert_eq!(lines(&case.path("out.jsonl")), expected);
    let mut missed = 0;
    for (nth, second) in kept.iter().enumerate() {
        for first in &kept[..nth] {
            let jaccard = jaccard(&sets[*first], &sets[*second]);
            assert!(jaccard < 0.85, "documents {first} and {second} are kept: {jaccard}");
            missed += usize::from(jaccard >= 0.7);
        }
    }
    let found = texts.len() - kept.len();
    assert!(found > 50 && missed <= 2, "{missed} missed, {found} found");
    let clusters = report.clusters.unwrap();
    assert_eq!(clusters.sizes.values().sum::<u64>(), clusters.count);
    assert!(clusters.largest >= 3, "{clusters:?}");
}

/// Outputs are the same for any number of workers, size of blocks and number of passes.
#[test]
fn outputs_do_not_depend_on_workers_blocks_or_passes() {
    let mut random = Random::new(print_seed("outputs_do_not_depend_on_workers", 0xd0));
    let texts = corpus(&mut random, 700);
    let case = Case::new();
    let all: Vec<String> = texts.iter().map(|text| line(text)).collect();
    case.file("in.jsonl", all.join("\n"));
    let mut outputs = Vec::new();
    for (workers, block_bytes, two_passes) in
        [(1, 1 << 20, false), (3, 1000, false), (2, 20_000, true), (7, 1, true)]
    {
        let mut options = case.options(&["in.jsonl"]);
        options.out = case.path(&format!("o{workers}")).to_str().unwrap().to_owned();
        (options.workers, options.block_bytes, options.exact) = (workers, block_bytes, true);
        options.near = Some(NearOptions { two_passes, jaccard: 0.6, ..NearOptions::default() });
        options.filters = Filters { chars_min: Some(40), ..Filters::default() };
        options.split = Some("6,3,1".parse().unwrap());
        options.dropped = Some(format!("{}_dropped.jsonl", options.out));
        let report = run(&options);
        let names = ["train", "valid", "test", "dropped"];
        outputs.push(
            names.map(|name| fs::read_to_string(format!("{}_{name}.jsonl", options.out)).unwrap()),
        );
        assert_eq!(report.dropped.len(), 3, "{:?}", report.dropped);
    }
    assert!(outputs.iter().all(|output| *output == outputs[0]));
    let counts = outputs[0].each_ref().map(|output| output.lines().count());
    assert_eq!(counts.iter().sum::<usize>(), 700);
    assert!(counts[0] > counts[1] && counts[1] > counts[2] && counts[2] > 0, "{counts:?}");
}

#[test]
fn lines_are_kept_byte_for_byte() {
    let case = Case::new();
    let kept = "{ \"b\":NaN,\"text\" : \"\\u00e9  x\",\"a\":[1e5]}\r\n\n  {\"text\":\"\"}\n";
    case.file(
        "in.jsonl",
        format!("{kept}{{\"text\":\"no\", \"k\": 1}}\n \t\n{{\"text\":\"end\"}}"),
    );
    let mut options = case.options(&["in.jsonl"]);
    options.filters.rejects = vec!["NO".parse().unwrap()];
    options.dropped = Some(case.path("d.jsonl").to_str().unwrap().to_owned());
    let report = run(&options);
    let expected = kept.replace("\r\n\n", "\r\n") + "{\"text\":\"end\"}\n";
    assert_eq!(fs::read_to_string(case.path("out.jsonl")).unwrap(), expected);
    assert_eq!((report.blank_lines, report.documents, report.kept), (2, 4, 3));
    let file = case.path("in.jsonl");
    let expected = format!(
        "{{\"cause\":\"rejected-words\",\"file\":{},\"line\":4,\"document\":2,\
         \"dropped\":{{\"text\":\"no\", \"k\": 1}}}}\n",
        json!(file.to_str().unwrap())
    );
    assert_eq!(fs::read_to_string(case.path("d.jsonl")).unwrap(), expected);
}

/// Lines end as in Python, and kept lines are written with `\n`.
#[test]
fn lines_may_end_with_a_lone_return() {
    let case = Case::new();
    let [first, second, third] = ["one text", "another text", "a third"].map(line);
    case.file("a.jsonl", format!("{first}\r{second}\r\r\n{third}\r"));
    let report = run(&case.options(&["a.jsonl"]));
    assert_eq!(lines(&case.path("out.jsonl")), [first, second, third]);
    assert_eq!(report.documents, 3);
}

#[test]
fn texts_may_be_rewritten_and_case_folded() {
    let case = Case::new();
    case.file("in.jsonl", "{\"text\":\"a  b\\nc\\\"\",\"n\":1}\n{\"text\":\"A B C\\\"\"}\n");
    let mut options = case.options(&["in.jsonl"]);
    options.fix_spaces = true;
    let report = run(&options);
    let expected = ["{\"text\":\"a b c\\\"\",\"n\":1}", "{\"text\":\"A B C\\\"\"}"];
    assert_eq!(lines(&case.path("out.jsonl")), expected);
    assert_eq!(report.rewritten, 1);
    options.out = case.path("folded.jsonl").to_str().unwrap().to_owned();
    (options.exact, options.fold) = (true, true);
    run(&options);
    assert_eq!(lines(&case.path("folded.jsonl")), expected[..1]);
}

#[test]
fn outputs_are_compressed_according_to_their_names() {
    let case = Case::new();
    let texts: Vec<String> = (0..5000).map(|nth| line(&format!("text {nth}"))).collect();
    let packed = zstd::encode_all(texts.join("\n").as_bytes(), 1).unwrap();
    case.file("in.jsonl.zst", packed);
    let mut options = case.options(&["in.jsonl.zst"]);
    options.out += ".jsonl.zst";
    let report = run(&options);
    let packed = fs::read(case.path("out.jsonl.zst")).unwrap();
    assert_eq!(report.outputs[0].bytes, packed.len() as u64);
    let text = String::from_utf8(zstd::decode_all(&packed[..]).unwrap()).unwrap();
    assert_eq!(text, texts.join("\n") + "\n");
}

#[test]
fn urls_on_the_list_are_dropped() {
    let case = Case::new();
    let document = |url: Value| json!({ "text": "t", "url": url }).to_string();
    let all =
        [document(json!("http://a.example.com/x")), document(json!("http://b.org")), line("none")];
    case.file("in.jsonl", all.join("\n"));
    let mut options = case.options(&["in.jsonl"]);
    let file = case.file("list.txt", "# bad\n\nexample.com\n");
    options.filters.urls = Some(UrlOptions { file, key: "url".to_owned() });
    let report = run(&options);
    assert_eq!(lines(&case.path("out.jsonl")), all[1..]);
    assert_eq!((report.without_url, report.dropped[&DropReason::Url].documents), (1, 1));
}

/// Lists are published as archives: the bytes of one are no URLs.
#[test]
fn a_compressed_list_of_urls_is_refused() {
    let case = Case::new();
    case.file("in.jsonl", line("text"));
    let list = case.path("list.gz");
    fs::write(&list, b"\x1f\x8b\x08\0\0\0\0\0\0\x03").unwrap();
    let mut options = case.options(&["in.jsonl"]);
    let file = list.to_str().unwrap().to_owned();
    options.filters.urls = Some(UrlOptions { file, key: "url".to_owned() });
    refused(&case, &options, &["list.gz", "a list of URLs in UTF-8, found invalid UTF-8"]);
}

/// If one text is a part of another, all shingles of the smaller set are common.
#[test]
fn measures_and_units_can_be_chosen() {
    let case = Case::new();
    let words: Vec<String> = (0..400_u32).map(|nth| format!("w{}", nth * 7919)).collect();
    let all =
        [line(&words.join(" ")), line(&words[..200].join("  ")), line(&words[300..].join(","))];
    case.file("in.jsonl", all.join("\n"));
    let near = |measure, unit| NearOptions {
        measure,
        unit,
        bands: 256,
        rows: 1,
        jaccard: 0.9,
        ..NearOptions::default()
    };
    for (out, near, kept) in [
        ("a", near(Measure::Union, ShingleUnit::Word), 3),
        ("b", near(Measure::Max, ShingleUnit::Word), 3),
        ("c", near(Measure::Min, ShingleUnit::Word), 1),
        ("d", near(Measure::Min, ShingleUnit::Char), 3),
    ] {
        let mut options = case.options(&["in.jsonl"]);
        options.out = case.path(out).to_str().unwrap().to_owned();
        options.near = Some(near);
        assert_eq!(run(&options).kept, kept, "{out}");
    }
}

fn refused(case: &Case, options: &CleanOptions, words: &[&str]) {
    let before = case.names();
    let error = clean(options, &mut |_| {}).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
    assert_eq!(case.names(), before, "leftover files after: {error}");
}

#[test]
fn bad_lines_and_inputs_are_reported() {
    let case = Case::new();
    let good = line("good") + "\n";
    case.file("bad.jsonl", good.repeat(3000) + "{\"text\": 1}\n");
    case.file("cut.jsonl", good.repeat(2) + "{\"text\":\"a");
    case.file("bytes.jsonl", b"{\"text\":\"\xff\"}");
    let packed = zstd::encode_all(good.repeat(100_000).as_bytes(), 3).unwrap();
    case.file("cut.jsonl.zst", &packed[..packed.len() / 2]);
    case.file("good.jsonl", &good);
    let place = "bad.jsonl, line 3001 (byte 48000 of the file)";
    for two_passes in [false, true] {
        let check = |input: &str, words: &[&str]| {
            let mut options = case.options(&["good.jsonl", input]);
            options.block_bytes = 4000;
            options.dropped = Some(case.path("dropped.jsonl").to_str().unwrap().to_owned());
            options.near = Some(NearOptions { two_passes, ..NearOptions::default() });
            refused(&case, &options, words);
        };
        check("bad.jsonl", &[place, "found a number", "expected a string"]);
        check("cut.jsonl", &["cut.jsonl, line 3", "end of the line", "truncated"]);
        check("bytes.jsonl", &["line 1", "0xff, which is not UTF-8"]);
        check("cut.jsonl.zst", &["cut.jsonl.zst", "truncated"]);
        check("none.jsonl", &["none.jsonl", "no such file"]);
    }
}

#[test]
fn options_are_checked_and_nothing_is_overwritten() {
    let case = Case::new();
    case.file("in.jsonl", "bad\n");
    let check = |change: &dyn Fn(&mut CleanOptions), words: &[&str]| {
        let mut options = case.options(&["in.jsonl"]);
        options.near = Some(NearOptions::default());
        change(&mut options);
        refused(&case, &options, words);
    };
    check(&|o| o.inputs.clear(), &["--json-in"]);
    check(&|o| o.workers = 0, &["--workers: expected", "at most 1024, found 0"]);
    check(
        &|o| o.filters.letters_min = Some(1.5),
        &["--min-letters: expected", "from 0 to 1, found 1.5"],
    );
    check(&|o| o.filters.one_char_max = Some(f64::NAN), &["--max-one-char: expected", "found NaN"]);
    check(&|o| o.near.as_mut().unwrap().bands = 3000, &["--bands: expected", "found 3000"]);
    check(
        &|o| o.near.as_mut().unwrap().rows = 103,
        &["--bands times --rows: expected", "found 2060"],
    );
    check(&|o| o.near.as_mut().unwrap().shingle = 0, &["--shingle: expected", "found 0"]);
    let to_stdin = |o: &mut CleanOptions| {
        o.inputs = vec!["-".to_owned()];
        o.near.as_mut().unwrap().two_passes = true;
    };
    check(&to_stdin, &["--two-passes: expected", "found standard input"]);
    let scratch = case.path("no");
    let lost = |o: &mut CleanOptions| o.near.as_mut().unwrap().scratch = Some(scratch.clone());
    check(&lost, &["no such file", "--scratch"]);
    case.file("out.jsonl", "precious");
    check(&|_| {}, &["out.jsonl: already exists"]);
    case.file("out_valid.jsonl", "precious");
    check(&|o| o.split = Some("1,1,0".parse().unwrap()), &["out_valid.jsonl: already exists"]);
    assert_eq!(fs::read_to_string(case.path("out.jsonl")).unwrap(), "precious");
}

#[test]
fn the_report_adds_up() {
    let mut random = Random::new(print_seed("the_report_adds_up", 0xadd));
    let texts = corpus(&mut random, 400);
    let case = Case::new();
    let all: Vec<String> = texts.iter().map(|text| line(text)).collect();
    case.file("in.jsonl", all.join("\n"));
    let mut options = case.options(&["in.jsonl"]);
    (options.exact, options.near) = (true, Some(NearOptions::default()));
    options.filters =
        Filters { chars_min: Some(100), one_char_max: Some(0.2), ..Filters::default() };
    let report = run(&options);
    let dropped: u64 = report.dropped.values().map(|dropped| dropped.documents).sum();
    let bytes: u64 = report.dropped.values().map(|dropped| dropped.bytes).sum();
    assert_eq!((report.documents, report.kept + dropped), (400, 400));
    let line_bytes: usize = all.iter().map(String::len).sum();
    assert_eq!(report.kept_bytes + bytes, line_bytes as u64);
    assert_eq!(report.outputs[0].bytes, report.kept_bytes + report.kept);
    let counts: BTreeMap<DropReason, u64> =
        report.dropped.iter().map(|(cause, dropped)| (*cause, dropped.documents)).collect();
    assert_eq!(report.inputs[0].dropped, counts);
    let example = &report.dropped[&DropReason::FewChars].examples[0];
    let text: Value = serde_json::from_str(&all[example.document as usize]).unwrap();
    assert!(text["text"].as_str().unwrap().chars().count() < 100);
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["dropped"]["few-chars"]["documents"], counts[&DropReason::FewChars]);
}

/// The ending was taken from the end of the URL, which is the value of its last option: the lines
/// were not compressed, and had another name.
#[test]
fn outputs_in_a_bucket_are_named_by_their_keys() {
    let case = Case::new();
    let texts: Vec<String> = (0..200).map(|nth| line(&format!("text {nth}"))).collect();
    case.file("in.jsonl", texts.join("\n") + "\n");
    let server = S3Server::start().unwrap();
    let names = |folder: &str| {
        let store = storage::open_url(&server.url(folder)).unwrap();
        store.list_names(&Key::root()).unwrap()
    };
    let read = |name: &str| {
        let (store, key) = storage::locate(&server.url(name)).unwrap();
        storage::read_all(&*store, &key).unwrap()
    };
    let with = |out: &str, option: &str, split: Option<&str>| {
        let mut options = case.options(&["in.jsonl"]);
        options.out = server.url(out) + option;
        options.split = split.map(|weights| weights.parse().unwrap());
        run(&options)
    };
    for (nth, option) in ["", "&depth=16", "&region=us-east-1"].into_iter().enumerate() {
        let report = with(&format!("one{nth}/a.jsonl.zst"), option, None);
        assert_eq!(names(&format!("one{nth}")), ["a.jsonl.zst"], "{option}");
        assert_eq!(report.outputs.len(), 1);
        let packed = read(&format!("one{nth}/a.jsonl.zst"));
        let unpacked = zstd::decode_all(&packed[..]).unwrap();
        assert_eq!(String::from_utf8(unpacked).unwrap(), texts.join("\n") + "\n");

        with(&format!("three{nth}/a.jsonl.zst"), option, Some("8,1,1"));
        let parts = ["a_test.jsonl.zst", "a_train.jsonl.zst", "a_valid.jsonl.zst"];
        assert_eq!(names(&format!("three{nth}")), parts, "{option}");
        for part in parts {
            zstd::decode_all(&read(&format!("three{nth}/{part}"))[..]).unwrap();
        }
        with(&format!("plain{nth}/a"), option, None);
        assert_eq!(names(&format!("plain{nth}")), ["a.jsonl"], "{option}");
        assert_eq!(read(&format!("plain{nth}/a.jsonl")), (texts.join("\n") + "\n").as_bytes());
    }
}
