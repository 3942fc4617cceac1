//! `s3://bucket/prefix?endpoint=https://...&region=...`, and its options.

use std::path::PathBuf;
use std::time::Duration;

use crate::{Error, Key, Location, Result};

/// A bucket, a folder in it, and the connection options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) bucket: String,
    /// The root of the store: a key, or the root of the bucket.
    pub(crate) prefix: Key,
    pub(crate) options: S3Options,
}

/// Connection options of a bucket. Stores whose bucket and options are equal share connections,
/// credentials and limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct S3Options {
    /// The server. Default: that of the environment, else AWS.
    pub(crate) endpoint: Option<String>,
    /// Default: that of the environment or profile, else `us-east-1`.
    pub(crate) region: Option<String>,
    /// The bucket in the path, not in the host name. Default: on with an endpoint.
    pub(crate) path_style: Option<bool>,
    /// Certificates to trust instead of the machine's. Default: those of `AWS_CA_BUNDLE`.
    pub(crate) ca: Option<PathBuf>,
    /// A credentials file in the form of `~/.aws/credentials`. Default: the usual AWS chain.
    pub(crate) credentials: Option<PathBuf>,
    /// The profile in it, or in the usual files.
    pub(crate) profile: Option<String>,
    /// Queue depth.
    pub(crate) depth: usize,
    /// Time without a byte after which a request is retried.
    pub(crate) stall: Duration,
    /// The most attempts of one request.
    pub(crate) tries: u32,
    /// Whether late requests are hedged.
    pub(crate) hedge: bool,
}

/// At 85 MB/s a connection and 10 ms to the first byte, 128 requests of 1 MiB carry 6 GB/s.
pub(crate) const DEPTH_MAX: usize = 128;

/// S3 answers within a second or is in trouble; a Ceph OSD that restarts is back within ten.
const STALL: Duration = Duration::from_secs(10);

/// With pauses doubling from 0.1 s to 20 s, ten attempts outlast a minute of trouble.
const TRIES: u32 = 10;

impl Default for S3Options {
    fn default() -> Self {
        S3Options {
            endpoint: None,
            region: None,
            path_style: None,
            ca: None,
            credentials: None,
            profile: None,
            depth: DEPTH_MAX,
            stall: STALL,
            tries: TRIES,
            hedge: true,
        }
    }
}

const OPTIONS: &str = "endpoint=URL, region=NAME, path_style=on|off, ca=FILE, credentials=FILE, \
                       profile=NAME, depth=1..1024, stall=100ms..600s, tries=1..100 or \
                       hedge=on|off";

impl Address {
    /// Parses a URL that starts with `s3://`.
    pub(crate) fn parse(location: &Location) -> Result<Self> {
        let bad = |reason: String| Error::BadUrl { url: location.to_string(), reason };
        let bucket = location.store.strip_prefix("s3://");
        let bucket = bucket.ok_or_else(|| bad("expected s3://bucket".to_owned()))?;
        if bucket.contains([':', '@']) {
            // Not shown: it has a secret.
            return Err(bad(SECRET.to_owned()));
        }
        let valid = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if bucket.is_empty() || bucket.len() > 255 || !bucket.bytes().all(valid) {
            return Err(bad(format!("expected a bucket name, found '{bucket}'")));
        }
        let prefix = location.path.strip_prefix('/').unwrap_or("");
        let prefix = match prefix.trim_end_matches('/') {
            "" => Key::root(),
            prefix => Key::new(prefix)?,
        };
        let mut options = S3Options::default();
        let typed = location.options.trim_start_matches('?');
        for option in typed.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            options.set(name, value).map_err(|reason| bad(format!("option {name}: {reason}")))?;
        }
        Ok(Address { bucket: bucket.to_owned(), prefix, options })
    }
}

impl S3Options {
    fn set(&mut self, name: &str, value: &str) -> std::result::Result<(), String> {
        if value.is_empty() {
            return Err(format!("expected {OPTIONS}"));
        }
        let text = || Some(value.to_owned());
        match name {
            "endpoint" => self.endpoint = Some(endpoint(value)?),
            "region" => self.region = text(),
            "path_style" => self.path_style = Some(switch(value)?),
            "ca" => self.ca = Some(value.into()),
            "credentials" => self.credentials = Some(value.into()),
            "profile" => self.profile = text(),
            "depth" => self.depth = number(value, 1, 1024)? as usize, // fits: at most 1024
            "stall" => self.stall = duration(value)?,
            "tries" => self.tries = number(value, 1, 100)?,
            "hedge" => self.hedge = switch(value)?,
            _ => return Err(format!("expected {OPTIONS}")),
        }
        Ok(())
    }
}

const SECRET: &str = "a URL must not contain credentials (hint: use credentials=FILE)";

pub(crate) fn endpoint(value: &str) -> std::result::Result<String, String> {
    if value.contains('@') {
        // Not shown either.
        return Err(SECRET.to_owned());
    }
    let host = value.strip_prefix("http://").or_else(|| value.strip_prefix("https://"));
    let host = host.ok_or_else(|| format!("expected http:// or https://, found '{value}'"))?;
    if host.is_empty() {
        return Err("expected a host after ://".to_owned());
    }
    Ok(value.trim_end_matches('/').to_owned())
}

fn switch(value: &str) -> std::result::Result<bool, String> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("expected on or off, found '{value}'")),
    }
}

fn number(value: &str, min: u32, max: u32) -> std::result::Result<u32, String> {
    let number = value.parse().ok().filter(|number| (min..=max).contains(number));
    number.ok_or_else(|| format!("expected a number from {min} to {max}, found '{value}'"))
}

fn duration(value: &str) -> std::result::Result<Duration, String> {
    let parsed = match value.strip_suffix("ms") {
        Some(digits) => digits.parse().ok().map(Duration::from_millis),
        None => value.strip_suffix('s').and_then(|d| d.parse().ok()).map(Duration::from_secs),
    };
    let allowed = Duration::from_millis(100)..=Duration::from_secs(600);
    let parsed = parsed.filter(|parsed| allowed.contains(parsed));
    parsed.ok_or_else(|| format!("expected a time from 100ms to 600s, found '{value}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Address> {
        Address::parse(&Location::new(url))
    }

    #[test]
    fn valid_urls_are_parsed() {
        let plain = parse("s3://corpus").unwrap();
        assert_eq!((plain.bucket.as_str(), plain.prefix.as_str()), ("corpus", ""));
        assert_eq!(plain.options, S3Options::default());
        let all = "s3://b.c/x/表/?endpoint=https://h:1/&region=r&path_style=off&ca=/ca&\
                   credentials=/c&profile=p&depth=7&stall=1500ms&tries=3&hedge=off";
        let all = parse(all).unwrap();
        assert_eq!((all.bucket.as_str(), all.prefix.as_str()), ("b.c", "x/表"));
        let expected = S3Options {
            endpoint: Some("https://h:1".to_owned()),
            region: Some("r".to_owned()),
            path_style: Some(false),
            ca: Some("/ca".into()),
            credentials: Some("/c".into()),
            profile: Some("p".to_owned()),
            depth: 7,
            stall: Duration::from_millis(1500),
            tries: 3,
            hedge: false,
        };
        assert_eq!(all.options, expected);
        let (folder, name) = crate::locate("s3://b/x/y.bin").unwrap();
        assert_eq!((folder.display(&Key::root()).as_str(), name.as_str()), ("s3://b/x", "y.bin"));
        assert!(crate::locate("s3://b/").is_err());
    }

    #[test]
    fn invalid_urls_are_refused() {
        for bad in [
            "s3:",
            "s3://",
            "s3:///a",
            "s3://a b/c",
            "s3://b//c",
            "s3://b/../c",
            "s3://b?fast=on",
            "s3://b?depth=0",
            "s3://b?depth",
            "s3://b?stall=10",
            "s3://b?stall=1ms",
            "s3://b?endpoint=h:80",
            "s3://b?endpoint=http://",
            "s3://b?hedge=maybe",
        ] {
            assert!(parse(bad).is_err(), "{bad:?} was accepted");
        }
    }
    #[test]
    fn a_secret_in_a_url_is_not_repeated_in_the_error() {
        for url in [
            "s3://b?endpoint=https://key:secret@host",
            "s3://b?endpoint=key:secret@host",
            "s3://key:secret@bucket/a",
            "s3://key:secret/with/slashes@bucket/a",
        ] {
            let error = parse(url).unwrap_err();
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
