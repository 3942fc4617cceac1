use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes that is parsed and formatted as `64MiB`. A bare number is refused: too many
/// configurations meant MiB and were read as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("expected a size with its unit, such as 64MiB, found '{text}'");
        let (name, unit) =
            UNITS.iter().find(|(name, _)| text.ends_with(name)).ok_or_else(refuse)?;
        let digits = text[..text.len() - name.len()].trim_end();
        let count: u64 = digits.parse().map_err(|_| refuse())?;
        count.checked_mul(*unit).map(ByteSize).ok_or_else(refuse)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = UNITS[..4].iter().rev().find(|(_, unit)| self.0 >= *unit);
        match binary {
            Some((name, unit)) if self.0.is_multiple_of(*unit) => {
                write!(f, "{} {name}", self.0 / unit)
            }
            Some((name, unit)) => write!(f, "{:.1} {name}", self.0 as f64 / *unit as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

/// A rate in MB/s (10^6 bytes a second), the unit in which devices are sold.
#[must_use]
pub fn rate_text(bytes: u64, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-9);
    format!("{:.1} MB/s", bytes as f64 / 1e6 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_and_formatted() {
        for (text, bytes) in
            [("64MiB", 64 << 20), ("1 GB", 1_000_000_000), ("0B", 0), ("7KB", 7000)]
        {
            assert_eq!(text.parse::<ByteSize>().unwrap().0, bytes);
        }
        for bad in ["", "64", "MiB", "-1MiB", "1.5GiB", "99999999999TiB", "64mib"] {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad:?} was accepted");
        }
        assert_eq!(ByteSize(64 << 20).to_string(), "64 MiB");
        assert_eq!(ByteSize(1500).to_string(), "1.5 KiB");
        assert_eq!(ByteSize(3).to_string(), "3 B");
    }
}
