//! A list of URLs whose documents are dropped.

use std::collections::HashSet;

use crate::clean::UrlOptions;
use crate::{Error, Result};

/// A longer file is probably no list; the largest in use have 5 million domains.
const LIST_BYTES_MAX: u64 = 1 << 30;

/// The entries of [`UrlOptions::file`], by kind.
#[derive(Debug, Default)]
pub(in crate::clean) struct UrlList {
    domains: HashSet<String>,
    names: HashSet<String>,
    endings: Vec<String>,
    addresses: HashSet<String>,
}

impl UrlList {
    /// Reads a list.
    ///
    /// # Errors
    /// [`Error::BadInput`] if it is no text, [`Error::Storage`].
    pub(in crate::clean) fn read(options: &UrlOptions) -> Result<Self> {
        let bad = |found: String, expected: &str| {
            let (input, expected) = (options.file.clone(), expected.to_owned());
            Error::BadInput { input, found, expected, hint: None }
        };
        let (store, key) = storage::locate(&options.file)?;
        let len_bytes = store.open(&key)?.len_bytes();
        if len_bytes > LIST_BYTES_MAX {
            return Err(bad(format!("{len_bytes} bytes"), "a list of at most 1 GiB"));
        }
        let text = String::from_utf8(storage::read_all(store.as_ref(), &key)?);
        let text = text.map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            bad(format!("invalid UTF-8 at byte {at}"), "a list of URLs in UTF-8")
        })?;
        let mut list = UrlList::default();
        for line in text.lines().map(str::trim) {
            if !line.is_empty() && !line.starts_with('#') {
                list.add(line);
            }
        }
        Ok(list)
    }

    fn add(&mut self, line: &str) {
        if line.starts_with('.') {
            self.endings.push(line.to_lowercase());
            return;
        }
        let url = Url::parse(line);
        match (url.path.trim_end_matches('/'), url.host.contains('.')) {
            ("", false) => self.names.insert(url.host),
            ("", true) => self.domains.insert(url.host),
            (path, _) => self.addresses.insert(format!("{}{path}", url.host)),
        };
    }

    pub(in crate::clean) fn has(&self, url: &str) -> bool {
        let url = Url::parse(url);
        let mut above = url.host.as_str();
        loop {
            if self.domains.contains(above) {
                return true;
            }
            // Names are not compared with the last label, such as `com` or `uk`.
            let Some((label, rest)) = above.split_once('.') else { break };
            if self.names.contains(label) {
                return true;
            }
            above = rest;
        }
        if !self.addresses.is_empty() {
            let path = url.path.trim_end_matches('/');
            if self.addresses.contains(&format!("{}{path}", url.host)) {
                return true;
            }
        }
        let file = url.path.split(['?', '#']).next().unwrap_or("").to_lowercase();
        self.endings.iter().any(|ending| file.ends_with(ending))
    }
}

struct Url<'a> {
    /// In lower case, without user and port.
    host: String,
    path: &'a str,
}

impl<'a> Url<'a> {
    fn parse(text: &'a str) -> Url<'a> {
        let text = text.trim();
        let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
        let (host, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
        let host = host.split_once(':').map_or(host, |(host, _)| host);
        Url { host: host.trim_end_matches('.').to_lowercase(), path }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_entry_matches_its_urls() {
        let mut list = UrlList::default();
        for line in ["example.com", "amazon", ".JPG", "https://news.org/a/b/"] {
            list.add(line);
        }
        for url in [
            "http://example.com",
            "https://user:word@WWW.Example.com:8080/x?y",
            "example.com",
            "https://www.amazon.co.uk/dp/1",
            "http://a.b/c/D.jpg?size=2",
            "http://news.org/a/b",
        ] {
            assert!(list.has(url), "{url}");
        }
        for url in [
            "http://anexample.com",
            "http://example.com.au",
            "http://x.amazon",
            "http://a.b/jpg",
            "http://news.org/a/b/c",
            "http://www.news.org/a/b",
            "",
        ] {
            assert!(!list.has(url), "{url}");
        }
    }
}
