//! The performance model of a store: a few figures in a TOML file.

use serde::Deserialize;

use crate::{Error, Result};

/// The performance model of a store, read from TOML, such as `storage/src/simulate/lustre.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreModel {
    /// Its name, such as `lustre`.
    pub name: String,
    pub(super) latency_us: Latencies,
    pub(super) servers: Servers,
    pub(super) client: Client,
    pub(super) meta: Meta,
    #[serde(default)]
    pub(super) stall: Vec<Stall>,
    #[serde(default)]
    pub(super) failure: Vec<Failure>,
}

/// Median and 99th percentile of the latency of a request, without the transfer of its bytes.
pub(super) type Spread = [f64; 2];

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Latencies {
    pub(super) read: Spread,
    pub(super) write: Spread,
    pub(super) commit: Spread,
    pub(super) meta: Spread,
}

/// The data servers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Servers {
    pub(super) count: u32,
    /// Bandwidth of each server.
    pub(super) mb_per_s: f64,
    /// Concurrent requests of each server.
    pub(super) in_flight: u32,
    /// The largest request; longer transfers are several requests.
    pub(super) request_kib: u32,
    pub(super) stripe_kib: u32,
    /// Servers that a file is spread over; 0 for all.
    pub(super) stripes: u32,
    /// Bandwidth of one request; unlimited if absent.
    pub(super) stream_mb_per_s: Option<f64>,
}

/// The client machine.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Client {
    /// Bandwidth of its link, for reads and writes together.
    pub(super) mb_per_s: f64,
    /// Bytes of an upload in flight before its writer waits.
    pub(super) in_flight_mib: u32,
    /// Reads and writes admitted per second; unlimited if absent.
    pub(super) requests_per_s: Option<f64>,
}

/// The metadata service.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Meta {
    pub(super) per_s: f64,
    /// Names in one listing response.
    pub(super) list_page: u32,
    /// Names that one request deletes.
    #[serde(default = "one")]
    pub(super) delete_page: u32,
    #[serde(default = "yes")]
    pub(super) can_publish: bool,
    #[serde(default = "yes")]
    pub(super) can_draft: bool,
}

fn one() -> u32 {
    1
}

fn yes() -> bool {
    true
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Op {
    Read,
    Write,
    Commit,
    Meta,
}

/// Stalls: some requests take this much longer.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stall {
    pub(super) of: Op,
    pub(super) per_million: u32,
    pub(super) ms: u64,
}

/// Some requests fail.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Failure {
    pub(super) of: Op,
    pub(super) per_million: u32,
    pub(super) errno: Errno,
}

/// The kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Errno {
    Eio,
    Estale,
    Etimedout,
    Enospc,
    Eacces,
}

impl Errno {
    pub(super) fn number(self) -> i32 {
        match self {
            Errno::Eio => libc::EIO,
            Errno::Estale => libc::ESTALE,
            Errno::Etimedout => libc::ETIMEDOUT,
            Errno::Enospc => libc::ENOSPC,
            Errno::Eacces => libc::EACCES,
        }
    }
}

/// The built-in models.
const BUILT_IN: [(&str, &str); 4] = [
    ("lustre", include_str!("lustre.toml")),
    ("ceph", include_str!("ceph.toml")),
    ("s3", include_str!("s3.toml")),
    ("nfs", include_str!("nfs.toml")),
];

/// No request takes longer than this without a stall: an hour.
const LATENCY_US_MAX: f64 = 3.6e9;

/// More servers than any cluster has; each takes some memory.
const SERVERS_MAX: u32 = 1 << 16;

impl StoreModel {
    /// The names of the built-in models.
    pub const NAMES: [&'static str; 4] = ["lustre", "ceph", "s3", "nfs"];

    /// The file of a built-in model.
    #[must_use]
    pub fn built_in(name: &str) -> Option<&'static str> {
        BUILT_IN.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
    }

    /// A built-in model, unchanged.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::parse(Self::built_in(name)?, &[]).ok()
    }

    /// Parses a model, with overrides for some of its keys, such as `servers.stripes=8`.
    ///
    /// # Errors
    /// [`Error::BadUrl`] with what is wrong with which key.
    pub fn parse(text: &str, overrides: &[&str]) -> Result<Self> {
        let bad = |what: &str, reason: String| Error::BadUrl { url: what.to_owned(), reason };
        let mut table: toml::Table =
            toml::from_str(text).map_err(|e| bad("store model", e.to_string()))?;
        for set in overrides {
            let refuse = |found: &str| {
                bad(set, format!("expected KEY=VALUE such as servers.stripes=8, found {found}"))
            };
            let (key, value) = set.split_once('=').ok_or_else(|| refuse("no '='"))?;
            let path: Vec<&str> = key.trim().split('.').collect();
            let Some((last, sections)) = path.split_last() else { return Err(refuse("no key")) };
            let mut at = &mut table;
            for name in sections {
                let inner = at.get_mut(*name).and_then(toml::Value::as_table_mut);
                at = inner.ok_or_else(|| refuse("no such section"))?;
            }
            let parsed: toml::Table = toml::from_str(&format!("value = {}", value.trim()))
                .map_err(|_| refuse("no TOML value"))?;
            let value = parsed.get("value").cloned().ok_or_else(|| refuse("no value"))?;
            at.insert((*last).to_owned(), value);
        }
        let model: StoreModel = table.try_into().map_err(|e: toml::de::Error| {
            bad("store model", e.to_string().trim_end().replace('\n', " "))
        })?;
        model.check().map_err(|reason| bad(&format!("store model {}", model.name), reason))?;
        Ok(model)
    }

    fn check(&self) -> std::result::Result<(), String> {
        let Latencies { read, write, commit, meta } = &self.latency_us;
        let spreads = [("read", read), ("write", write), ("commit", commit), ("meta", meta)];
        for (name, [median, p99]) in spreads {
            if !(*median > 0.0 && median <= p99 && *p99 <= LATENCY_US_MAX) {
                return Err(format!(
                    "latency_us.{name}: expected [median, p99] with 0 < median <= p99 <= \
                     {LATENCY_US_MAX}, found [{median}, {p99}]"
                ));
            }
        }
        let Servers { count, in_flight, request_kib, stripe_kib, stripes, .. } = self.servers;
        let counts = [
            ("servers.count", count),
            ("servers.in_flight", in_flight),
            ("servers.request_kib", request_kib),
            ("servers.stripe_kib", stripe_kib),
            ("client.in_flight_mib", self.client.in_flight_mib),
            ("meta.list_page", self.meta.list_page),
            ("meta.delete_page", self.meta.delete_page),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(format!("{name}: expected 1 or more, found 0"));
        }
        if count > SERVERS_MAX || stripes > count {
            return Err(format!(
                "expected servers.count <= {SERVERS_MAX} and servers.stripes <= servers.count, \
                 found servers.count = {count} and servers.stripes = {stripes}"
            ));
        }
        let rates = [
            ("servers.mb_per_s", Some(self.servers.mb_per_s)),
            ("servers.stream_mb_per_s", self.servers.stream_mb_per_s),
            ("client.mb_per_s", Some(self.client.mb_per_s)),
            ("client.requests_per_s", self.client.requests_per_s),
            ("meta.per_s", Some(self.meta.per_s)),
        ];
        match rates.iter().find(|(_, rate)| rate.is_some_and(|r| !(1e-3..=1e12).contains(&r))) {
            Some((name, _)) => Err(format!("{name}: expected a number from 0.001 to 1e12")),
            None => Ok(()),
        }
    }

    /// Median and 99th percentile of a kind of request.
    pub(super) fn spread(&self, op: Op) -> Spread {
        match op {
            Op::Read => self.latency_us.read,
            Op::Write => self.latency_us.write,
            Op::Commit => self.latency_us.commit,
            Op::Meta => self.latency_us.meta,
        }
    }
}
