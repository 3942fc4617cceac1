//! Formats numbers for people.

use std::time::Duration;

/// `5,321`, rounded to a whole number.
#[must_use]
pub fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return digits;
    }
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1m12s`, `3h05m` or `2d04h`: two units are enough.
#[must_use]
pub fn time_text(time: Duration) -> String {
    let seconds = time.as_secs();
    let (days, hours) = (seconds / 86_400, seconds / 3_600 % 24);
    let (minutes, rest) = (seconds / 60 % 60, seconds % 60);
    match seconds {
        0..60 => format!("{rest}s"),
        60..3_600 => format!("{minutes}m{rest:02}s"),
        3_600..86_400 => format!("{hours}h{minutes:02}m"),
        _ => format!("{days}d{hours:02}h"),
    }
}
