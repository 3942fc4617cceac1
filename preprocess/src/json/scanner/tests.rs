use super::*;

/// The result of Python's `json.loads(line)["text"]`, or the position and text of our error.
#[track_caller]
fn check(line: &str, expected: Result<&str, (usize, &str)>) {
    let mut finder = TextFinder::new("text");
    // Twice: a line must not affect the next.
    for _ in 0..2 {
        match (finder.find(line), expected) {
            (Ok(text), Ok(expected)) => assert_eq!(text, expected, "in {line}"),
            (Err(fault), Err((column, words))) => {
                let message = format!("found {}, expected {}", fault.found, fault.expected);
                assert!(message.contains(words), "of {line}: {message}");
                assert_eq!(fault.column, column, "of {line}: {message}");
            }
            (found, expected) => panic!("{line}: found {found:?}, expected {expected:?}"),
        }
    }
}

#[test]
fn accepts_lines_that_python_accepts() {
    check(r#"{"text":"a"}"#, Ok("a"));
    check(r#"  { "text" : "a" }  "#, Ok("a"));
    check("\t{\r\"text\":\"a\"\r}\r", Ok("a"));
    check(r#"{"text":""}"#, Ok(""));
    check(r#"{"a":1,"text":"b","c":[{"text":"d"}]}"#, Ok("b"));
    check(r#"{"a":{"text":"no"},"text":"yes"}"#, Ok("yes"));
    // The last of equal keys.
    check(r#"{"text":"a","text":"b"}"#, Ok("b"));
    check(r#"{"text":1,"text":"b"}"#, Ok("b"));
    let mut once = TextFinder::new("text").once(true);
    assert_eq!(once.find(r#"{"text":"a","te\u0078t":""}"#).unwrap_err().column, 12);
    assert_eq!(once.find(r#"{"a":1,"a":2,"text":{"text":1},"text":""}"#).unwrap_err().column, 31);
    assert_eq!(once.find(r#"{"a":1,"a":2,"b":{"text":1},"text":"c"}"#), Ok("c"));
    // Keys are compared with their escapes resolved.
    check(r#"{"te\u0078t":"a"}"#, Ok("a"));
    check(r#"{"te\u0078t\ud800":"b","text":"a"}"#, Ok("a"));
    check(r#"{"text":"\"\\\/\b\f\n\r\t"}"#, Ok("\"\\/\u{8}\u{c}\n\r\t"));
    check(r#"{"text":"\u0041\u00e9\u4E2d\u0000"}"#, Ok("Aé中\0"));
    check(r#"{"text":"x\ud83d\ude00y"}"#, Ok("x😀y"));
    check(r#"{"text":"\uD800\uDC00\udbff\udfff"}"#, Ok("\u{10000}\u{10ffff}"));
    check("{\"text\":\"é中😀\u{7f}\u{2028}\"}", Ok("é中😀\u{7f}\u{2028}"));
    check(
        r#"{"text":"a","n":[0,-0,1.5,-1e5,1E+5,2.5e-3,123456789012345678901234567890]}"#,
        Ok("a"),
    );
    check(r#"{"text":"a","n":[NaN,Infinity,-Infinity,true,false,null]}"#, Ok("a"));
    check(r#"{"text":"a","n":[],"o":{},"p":[[],[{}],{"q":[]}]}"#, Ok("a"));
    // Half a surrogate pair is accepted outside the text.
    check(r#"{"id":"\ud83d","text":"a"}"#, Ok("a"));
    let deep = format!(r#"{{"n":{}{},"text":"a"}}"#, "[".repeat(100_000), "]".repeat(100_000));
    check(&deep, Ok("a"));
}

#[test]
fn errors_have_a_position() {
    check("{", Err((1, "the end of the line, expected a key")));
    check(r#"{"text":"a""#, Err((11, "the end of the line, expected ',' or '}'")));
    check(r#"{"text":"a"#, Err((10, "the end of the line, expected '\"'")));
    check(r#"{"text":"a"}}"#, Err((12, "'}', expected the end of the line")));
    check(r#"{"text":"a"}{"text":"b"}"#, Err((12, "'{', expected the end of the line")));
    check(r#"{"text":"a"} x"#, Err((13, "'x'")));
    check(r#"{"text":"a",}"#, Err((12, "'}', expected a key")));
    check(r#"{,"text":"a"}"#, Err((1, "','")));
    check(r#"{"text" "a"}"#, Err((8, "'\"', expected ':'")));
    check(r#"{"text":}"#, Err((8, "'}', expected a value")));
    check(r#"{'text':'a'}"#, Err((1, "'\\'', expected a key in double quotes")));
    check(r#"{"n":01,"text":"a"}"#, Err((6, "'1', expected ',' or '}'")));
    check(r#"{"n":1.,"text":"a"}"#, Err((7, "expected a digit after the point")));
    check(r#"{"n":1e,"text":"a"}"#, Err((7, "expected a digit of the exponent")));
    check(r#"{"n":-,"text":"a"}"#, Err((6, "expected a value")));
    check(r#"{"n":+1,"text":"a"}"#, Err((5, "'+', expected a value")));
    check(r#"{"n":nul,"text":"a"}"#, Err((5, "'n', expected a value")));
    check(r#"{"n":[1 2],"text":"a"}"#, Err((8, "'2', expected ',' or ']'")));
    check(r#"{"n":[1,],"text":"a"}"#, Err((8, "']', expected a value")));
    check(r#"{"n":[1},"text":"a"}"#, Err((7, "'}', expected ',' or ']'")));
    check(r#"{"text":"\x41"}"#, Err((10, "'x', expected one of")));
    check(r#"{"text":"\u12g4"}"#, Err((13, "'g', expected four hexadecimal digits")));
    check(r#"{"text":"\u+123"}"#, Err((11, "'+', expected four hexadecimal digits")));
    check("{\"text\":\"a\tb\"}", Err((10, "unescaped control character 0x09 in a string")));
    check("{\"text\":\"a\u{0}\"}", Err((10, "unescaped control character 0x00")));
    check(r#"{"text":"ab\ud83dc"}"#, Err((11, "\\ud83d, half of a surrogate pair")));
    check(r#"{"text":"\ude00\ud83d"}"#, Err((9, "\\ude00, half")));
    check(r#"{"text":"\ud83d\u0041"}"#, Err((9, "\\ud83d, half")));
    check(r#"{"text":"\ud83d"}"#, Err((9, "\\ud83d, half")));
    check("[1]", Err((0, "a list, expected an object")));
    check("\"a\"", Err((0, "a string, expected an object")));
    check("12", Err((0, "a number, expected an object")));
    check("hello", Err((0, "'h', expected an object")));
    check("\u{feff}{\"text\":\"a\"}", Err((0, "a byte order mark")));
    check("{\"text\":\"a\"}\u{a0}", Err((12, "expected the end of the line")));
}

#[test]
fn errors_name_the_found_value() {
    check(r#"{"text":12}"#, Err((8, "a number under the key 'text', expected a string")));
    check(r#"{"text": null}"#, Err((9, "null under the key 'text'")));
    check(r#"{"text":["a"]}"#, Err((8, "a list under")));
    check(r#"{"text":"a","text":{}}"#, Err((19, "an object under")));
    check(r#"{"text":false}"#, Err((8, "a boolean under")));
    check("{}", Err((0, "an object without keys, expected the key 'text'")));
    check(r#"{"a":1,"Text":"x"}"#, Err((0, "only 'a', 'Text', expected the key 'text'")));
    let many: String = (0..20).map(|i| format!("\"k{i}\":{i},")).collect();
    let many = format!("{{{}}}", many.trim_end_matches(','));
    check(&many, Err((0, "'k7', and more, expected")));
}

/// serde_json reads the same language but for what Python adds: both agree on lines that are broken
/// at random, except there.
#[test]
fn agrees_with_serde_json() {
    let seed_lines = [
        r#"{"id": 12, "text": "plain words, \"quoted\" \\ and \u4e2d\u6587 \n", "n": [1, -2.5e3]}"#,
        r#"{"meta": {"a": [true, false, null, {"b": {}}]}, "text": "中文 and 😀", "z": "\t"}"#,
        r#"{"text":"a","text":"b","list":[[],[0],[{"x":"y"}]]}"#,
    ];
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |limit: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) as usize % limit
    };
    let (mut accepted, mut refused) = (0, 0);
    let mut finder = TextFinder::new("text");
    for round in 0..60_000 {
        let mut line = seed_lines[round % seed_lines.len()].as_bytes().to_vec();
        for _ in 0..=next(3) {
            let at = next(line.len().max(1));
            match next(4) {
                _ if line.is_empty() => {}
                0 => drop(line.remove(at)),
                1 => line.insert(at, b" {}[],:\"\\u0e.-1tx\t"[next(18)]),
                2 => line[at] = b" {}[],:\"\\u0e.-1tx\t"[next(18)],
                _ => line.truncate(at.max(1)),
            }
        }
        let Ok(line) = std::str::from_utf8(&line) else { continue };
        let theirs = serde_json::from_str::<serde_json::Value>(line);
        match (finder.find(line), theirs) {
            (Ok(text), Ok(value)) => {
                assert_eq!(Some(text), value["text"].as_str(), "in {line}");
                accepted += 1;
            }
            (Err(fault), Ok(value)) => {
                assert!(!value["text"].is_string(), "{line}: {fault:?}");
            }
            (Ok(_), Err(error)) => {
                let error = error.to_string();
                let wider = error.contains("surrogate")
                    || error.contains("hex escape")
                    || error.contains("number out of range");
                assert!(wider, "{line}: {error}");
            }
            (Err(_), Err(_)) => refused += 1,
        }
    }
    assert!(accepted > 1000, "only {accepted} lines accepted");
    assert!(refused > 1000, "only {refused} lines refused");
}
