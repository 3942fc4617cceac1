//! The values of a config that are neither a plain number nor a plain string.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use storage::ByteSize;

/// The length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Budget {
    /// In optimizer steps.
    Steps(u64),
    /// In samples.
    Samples(u64),
    /// In tokens.
    Tokens(u64),
}

/// A part of a run, counted from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Length {
    /// In optimizer steps.
    Steps(u64),
    /// In samples.
    Samples(u64),
    /// In tokens; rounded down to whole samples.
    Tokens(u64),
}

/// The length of the warm-up or of the final decay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Warmup {
    /// In optimizer steps.
    Steps(u64),
    /// In samples.
    Samples(u64),
    /// In tokens; rounded down to whole samples.
    Tokens(u64),
    /// As a fraction of the decay, 0 to 1; rounded down to whole samples.
    Fraction(f64),
}

impl Default for Warmup {
    fn default() -> Self {
        Warmup::Fraction(0.01)
    }
}

impl Warmup {
    /// Whether the length is 0.
    pub(super) fn is_zero(self) -> bool {
        match self {
            Warmup::Steps(count) | Warmup::Samples(count) | Warmup::Tokens(count) => count == 0,
            Warmup::Fraction(part) => part == 0.0,
        }
    }
}

/// One corpus: the prefix of a `.bin/.idx` pair.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Corpus {
    /// The prefix, as a path or a URL. Required.
    pub path: String,
    /// Its weight in the blend. Has no effect with one corpus. Default: 1. Minimum: above 0.
    pub weight: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CorpusTable {
    path: String,
    #[serde(default = "one")]
    weight: f64,
}

fn one() -> f64 {
    1.0
}

impl<'de> Deserialize<'de> for Corpus {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct CorpusVisitor;
        impl<'de> Visitor<'de> for CorpusVisitor {
            type Value = Corpus;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a prefix, or { path = \"...\" }")
            }

            fn visit_str<E: de::Error>(self, path: &str) -> Result<Corpus, E> {
                Ok(Corpus { path: path.to_owned(), weight: 1.0 })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Corpus, A::Error> {
                let table = CorpusTable::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Corpus { path: table.path, weight: table.weight })
            }
        }
        from.deserialize_any(CorpusVisitor)
    }
}

/// Reads a single prefix as a list of one corpus.
pub(super) fn corpora<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Corpus>, D::Error> {
    struct CorporaVisitor;
    impl<'de> Visitor<'de> for CorporaVisitor {
        type Value = Vec<Corpus>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a prefix, or [{ path = \"...\" }]")
        }

        fn visit_str<E: de::Error>(self, path: &str) -> Result<Vec<Corpus>, E> {
            Ok(vec![Corpus::deserialize(StrDeserializer::<E>::new(path))?])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Corpus>, A::Error> {
            let mut corpora = Vec::new();
            while let Some(corpus) = list.next_element()? {
                corpora.push(corpus);
            }
            Ok(corpora)
        }
    }
    from.deserialize_any(CorporaVisitor)
}

/// Shares of the documents in Megatron's syntax. The text is kept as it is written, because it is
/// part of the name of the index cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct SplitText(pub String);

impl Default for SplitText {
    fn default() -> Self {
        SplitText("949,50,1".to_owned())
    }
}

impl SplitText {
    /// The shares: every run of digits and points is a number.
    ///
    /// # Errors
    /// If the text holds letters or signs, a run that is not a number, more than three shares, or
    /// no share above 0.
    pub fn shares(&self) -> Result<Vec<f64>, String> {
        // Megatron ignores them and reads '1,inf,1' as two shares.
        if let Some(found) = self.0.chars().find(|c| matches!(c, '-' | '+') || c.is_alphabetic()) {
            let expected = "expected numbers of digits and points, such as 949,50,1";
            return Err(format!("{expected}, found '{}'", found.escape_debug()));
        }
        let runs = self.0.split(|c: char| !c.is_ascii_digit() && c != '.');
        let shares = runs
            .filter(|run| !run.is_empty())
            .map(|run| run.parse().map_err(|_| format!("expected a number, found '{run}'")))
            .collect::<Result<Vec<f64>, String>>()?;
        if shares.len() > 3 {
            return Err(format!("expected at most 3 shares, found {}", shares.len()));
        }
        if !shares.iter().any(|share| *share > 0.0) {
            return Err("expected a share above 0, found none".to_owned());
        }
        Ok(shares)
    }
}

impl<'de> Deserialize<'de> for SplitText {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct SplitVisitor;
        impl<'de> Visitor<'de> for SplitVisitor {
            type Value = SplitText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("shares as \"949,50,1\" or [949, 50, 1]")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<SplitText, E> {
                Ok(SplitText(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<SplitText, A::Error> {
                let mut shares = Vec::new();
                while let Some(share) = list.next_element::<f64>()? {
                    shares.push(share.to_string());
                }
                Ok(SplitText(shares.join(",")))
            }
        }
        from.deserialize_any(SplitVisitor)
    }
}

/// Where moments and master weights are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// In the memory of the device.
    #[default]
    None,
    /// In host memory.
    Cpu,
    /// On disks, in these folders. [`LOCAL_RANK`] in a path is the number of the rank on its node.
    Nvme(Vec<String>),
}

/// Placeholder for the number of a rank on its node, in the path of a folder.
pub const LOCAL_RANK: &str = "{local_rank}";

impl Offload {
    /// The folders of the rank with this number on its node; empty without a disk.
    #[must_use]
    pub fn folders(&self, local_rank: usize) -> Vec<String> {
        let Offload::Nvme(folders) = self else { return Vec::new() };
        folders.iter().map(|it| it.replace(LOCAL_RANK, &local_rank.to_string())).collect()
    }

    /// Reads a list of folders.
    fn nvme(list: &str) -> Result<Self, &'static str> {
        let folders: Vec<String> = list.split(',').map(|it| it.trim().to_owned()).collect();
        for (number, folder) in folders.iter().enumerate() {
            if folder.is_empty() {
                return Err("an empty path");
            }
            if folders[..number].contains(folder) {
                return Err("a duplicate path");
            }
            if folder.replace(LOCAL_RANK, "").contains(['{', '}']) {
                return Err("braces around another word than local_rank");
            }
        }
        Ok(Offload::Nvme(folders))
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Offload::None => f.write_str("none"),
            Offload::Cpu => f.write_str("cpu"),
            Offload::Nvme(folders) => write!(f, "nvme:{}", folders.join(",")),
        }
    }
}

impl Serialize for Offload {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Offload {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let expected = "expected none, cpu or nvme:/path, or several paths separated by commas";
        match (text.as_str(), text.strip_prefix("nvme:")) {
            ("none", _) => Ok(Offload::None),
            ("cpu", _) => Ok(Offload::Cpu),
            (_, Some(list)) => Offload::nvme(list)
                .map_err(|why| de::Error::custom(format!("{expected}, found '{text}' with {why}"))),
            _ => Err(de::Error::custom(format!("{expected}, found '{text}'"))),
        }
    }
}

/// Where a run starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LoadFrom {
    /// From its newest complete checkpoint, or from scratch if there is none.
    #[default]
    Auto,
    /// From scratch. Checkpoints in the folder are an error; they are not overwritten.
    None,
    /// From the checkpoint in this folder.
    Path(String),
}

impl fmt::Display for LoadFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LoadFrom::Auto => "auto",
            LoadFrom::None => "none",
            LoadFrom::Path(path) => path,
        })
    }
}

impl Serialize for LoadFrom {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LoadFrom {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(match String::deserialize(from)?.as_str() {
            "auto" => LoadFrom::Auto,
            "none" => LoadFrom::None,
            path => LoadFrom::Path(path.to_owned()),
        })
    }
}

/// A number of bytes, read and written as `64GiB`. A bare number is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let whole = |(_, bits): &&(&str, u32)| self.0 > 0 && self.0.is_multiple_of(1 << bits);
        let (name, bits) = UNITS.iter().find(whole).unwrap_or(&("B", 0));
        write!(f, "{}{name}", self.0 >> bits)
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let size = String::deserialize(from)?.parse::<ByteSize>().map_err(de::Error::custom)?;
        Ok(Size(size.0))
    }
}

/// A duration, read and written as `23h50m`. A bare number is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WallTime(pub Duration);

/// Largest first, each at most once.
const TIME_UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3_600), ('m', 60), ('s', 1)];

impl FromStr for WallTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("expected a time such as 23h50m or 90s, found '{text}'");
        let (mut seconds, mut rest, mut units) = (0_u64, text, TIME_UNITS.iter());
        while !rest.is_empty() {
            let at = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(refuse)?;
            let count: u64 = rest[..at].parse().map_err(|_| refuse())?;
            let unit = rest[at..].chars().next().ok_or_else(refuse)?;
            let (_, unit_seconds) =
                units.by_ref().find(|(name, _)| *name == unit).ok_or_else(refuse)?;
            let part = count.checked_mul(*unit_seconds).ok_or_else(refuse)?;
            seconds = seconds.checked_add(part).ok_or_else(refuse)?;
            rest = &rest[at + unit.len_utf8()..];
        }
        if text.is_empty() { Err(refuse()) } else { Ok(WallTime(Duration::from_secs(seconds))) }
    }
}

impl fmt::Display for WallTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut seconds = self.0.as_secs();
        if seconds == 0 {
            return f.write_str("0s");
        }
        for (name, unit_seconds) in TIME_UNITS {
            if seconds >= unit_seconds {
                write!(f, "{}{name}", seconds / unit_seconds)?;
                seconds %= unit_seconds;
            }
        }
        Ok(())
    }
}

impl Serialize for WallTime {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for WallTime {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(de::Error::custom)
    }
}
