use std::str::FromStr;
use std::time::Duration;

/// A time that is parsed as `30s`. A bare number is refused: some options meant seconds and some
/// milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeSpan(pub Duration);

/// Units and their milliseconds. `ms` and `min` are matched before `s` and `m`.
const UNITS: [(&str, u64); 6] =
    [("ms", 1), ("min", 60_000), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

impl FromStr for TimeSpan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse =
            || format!("expected a number and ms, s, min, h or d, such as 30s, found '{text}'");
        let (name, unit) =
            UNITS.iter().find(|(name, _)| text.ends_with(name)).ok_or_else(refuse)?;
        let count: u64 = text[..text.len() - name.len()].parse().map_err(|_| refuse())?;
        let millis = count.checked_mul(*unit).ok_or_else(refuse)?;
        Ok(TimeSpan(Duration::from_millis(millis)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_need_a_unit() {
        for (text, millis) in
            [("200ms", 200), ("30s", 30_000), ("2min", 120_000), ("2m", 120_000), ("1h", 3_600_000)]
        {
            let found = text.parse::<TimeSpan>().unwrap().0.as_millis();
            assert_eq!(found, millis, "{text}");
        }
        for bad in ["", "30", "s", "-1s", "1.5s", "1 year", "99999999999999999d"] {
            assert!(bad.parse::<TimeSpan>().is_err(), "{bad:?} was accepted");
        }
    }
}
