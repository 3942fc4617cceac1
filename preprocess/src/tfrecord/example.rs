//! Converts a TFRecord example with texts to an equivalent line of JSON.

use indexed::Example;

use crate::json::scanner::LineFault;

/// Writes the features of the keys as a JSON object: a value is a string, several are a list.
pub(crate) fn write_json(
    example: &Example<'_>,
    keys: &[String],
    json: &mut String,
) -> Result<(), LineFault> {
    json.push('{');
    for (idx, key) in keys.iter().enumerate() {
        let Some(values) = example.bytes(key)? else {
            return Err(fault(example.names(), format!("a feature '{key}' of bytes")));
        };
        json.push_str(if idx > 0 { "," } else { "" });
        json.push_str(&string(key));
        let ends = if values.len() == 1 { ["", ""] } else { ["[", "]"] };
        json.extend([":", ends[0]]);
        for (idx, value) in values.iter().enumerate() {
            let text = std::str::from_utf8(value).map_err(|bad| {
                let found = format!("byte {:#04x}, which is not UTF-8", value[bad.valid_up_to()]);
                fault(found, format!("UTF-8 in feature '{key}'"))
            })?;
            json.push_str(if idx > 0 { "," } else { "" });
            json.push_str(&string(text));
        }
        json.push_str(ends[1]);
    }
    json.push('}');
    Ok(())
}

fn string(text: &str) -> String {
    serde_json::to_string(text).expect("every text is a JSON string")
}

pub(crate) fn fault(found: impl Into<String>, expected: impl Into<String>) -> LineFault {
    LineFault { column: 0, found: found.into(), expected: expected.into(), hint: None }
}
