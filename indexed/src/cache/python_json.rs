//! JSON as Python's `json.dumps(value, indent=4)` writes it, on which the name of a cache depends.

use serde_json::{Number, Value};

/// The text, in ASCII.
pub(crate) fn dumps(value: &Value) -> String {
    let mut out = String::new();
    write(value, 0, &mut out);
    out
}

fn write(value: &Value, depth: usize, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
        Value::Number(number) => out.push_str(&number_text(number)),
        Value::String(text) => write_string(text, out),
        Value::Array(items) => {
            write_block(items.iter(), ['[', ']'], depth, out, |item, out| {
                write(item, depth + 1, out);
            });
        }
        Value::Object(fields) => {
            write_block(fields.iter(), ['{', '}'], depth, out, |(key, item), out| {
                write_string(key, out);
                out.push_str(": ");
                write(item, depth + 1, out);
            });
        }
    }
}

fn write_block<T>(
    items: impl ExactSizeIterator<Item = T>,
    [open, close]: [char; 2],
    depth: usize,
    out: &mut String,
    mut write_item: impl FnMut(T, &mut String),
) {
    let is_empty = items.len() == 0;
    out.push(open);
    for (place, item) in items.enumerate() {
        out.push_str(if place == 0 { "\n" } else { ",\n" });
        indent(depth + 1, out);
        write_item(item, out);
    }
    if !is_empty {
        out.push('\n');
        indent(depth, out);
    }
    out.push(close);
}

fn indent(depth: usize, out: &mut String) {
    out.extend(std::iter::repeat_n("    ", depth));
}

fn write_string(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(c),
            _ => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
    out.push('"');
}

fn number_text(number: &Number) -> String {
    match number.as_f64() {
        Some(value) if number.is_f64() => float_text(value),
        _ => number.to_string(),
    }
}

/// `repr(value)`: the shortest digits that parse to the same double, as in Rust, but with an
/// exponent of two digits below 1e-4 and from 1e16.
fn float_text(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the format has an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a number");
    if value == 0.0 || (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// From CPython 3.11: `[repr(x) for x in (...)]`.
    #[test]
    fn floats_are_formatted_as_in_python() {
        for (value, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.949, "0.949"),
            (0.1 + 0.2, "0.30000000000000004"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (0.000012345, "1.2345e-05"),
            (1e15, "1000000000000000.0"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (1e16, "1e+16"),
            (1e22, "1e+22"),
            (-1.5e-100, "-1.5e-100"),
            (5e-324, "5e-324"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
        ] {
            assert_eq!(float_text(value), expected);
        }
    }

    /// From CPython 3.11: `json.dumps({...}, indent=4)`.
    #[test]
    fn json_is_formatted_as_in_python() {
        let value = json!({
            "z": [], "a": {}, "text": "é\u{1f600}\u{7f}\u{0}\"\\/\n\t\u{8}\u{c}\r",
            "rows": [[0, 0.5], null, true, -7],
        });
        let expected = r#"{
    "z": [],
    "a": {},
    "text": "\u00e9\ud83d\ude00\u007f\u0000\"\\/\n\t\b\f\r",
    "rows": [
        [
            0,
            0.5
        ],
        null,
        true,
        -7
    ]
}"#;
        assert_eq!(dumps(&value), expected);
    }
}
