//! A list of URLs whose documents are dropped.

use std::borrow::Cow;
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
    /// Without user and port, in the form that names of hosts have in the domain name system.
    host: String,
    path: &'a str,
}

impl<'a> Url<'a> {
    fn parse(text: &'a str) -> Url<'a> {
        let text = text.trim();
        let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
        let rest = rest.strip_prefix("//").unwrap_or(rest);
        let end = rest.find(['/', '\\', '?', '#']).unwrap_or(rest.len());
        let (host, path) = rest.split_at(end);
        let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
        Url { host: host_name(host), path }
    }
}

/// One spelling of a host: percent escapes are decoded, letters are in lower case and Unicode's
/// other spellings of them are mapped (UTS 46), a label with letters beyond ASCII is in Punycode
/// (RFC 3492). The port and the dot of the root are dropped. A name that no browser would look up
/// is only put in lower case.
fn host_name(host: &str) -> String {
    let port = host.rfind(':').filter(|&at| host[at + 1..].bytes().all(|b| b.is_ascii_digit()));
    let host = percent_decoded(&host[..port.unwrap_or(host.len())]);
    let name = idna::domain_to_ascii(&host).unwrap_or_else(|_| host.to_lowercase());
    name.trim_end_matches('.').to_owned()
}

/// A text without percent escapes, or as it is if they are not of UTF-8.
fn percent_decoded(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return text.into();
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let digit = |at: usize| char::from(*after.get(at)?).to_digit(16);
        let escaped = digit(0).zip(digit(1)).filter(|_| byte == b'%');
        bytes.push(escaped.map_or(byte, |(high, low)| (high << 4 | low) as u8)); // fits: 8 bits
        rest = &after[if escaped.is_some() { 2 } else { 0 }..];
    }
    String::from_utf8(bytes).map_or(text.into(), Cow::from)
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

    /// A host has many spellings, in the list as in the documents. The forms in Punycode are those
    /// of Python's codec `idna`.
    #[test]
    fn all_spellings_of_a_host_are_one() {
        let spellings = [
            "köln.example",
            "xn--kln-sna.example",
            "//köln.example",
            "http://ko\u{308}ln.example",
            "https://KÖLN.Example.:8080",
            "http://k%C3%B6ln.example",
            "http://a:b@XN--KLN-SNA.EXAMPLE./",
            "https://ｋöｌｎ。example",
        ];
        for line in spellings {
            let mut list = UrlList::default();
            list.add(line);
            for url in spellings {
                assert!(list.has(url), "{line}: {url}");
                assert!(list.has(&format!("{url}?a")), "{line}: {url}");
            }
            assert!(list.has("https://www.köln.example/b"), "{line}");
            assert!(list.has("https://köln.example\\b"), "{line}");
            for url in ["http://koln.example", "http://köln.example.org", "http://xn--.example"] {
                assert!(!list.has(url), "{line}: {url}");
            }
        }
        let mut list = UrlList::default();
        ["münchen", "http://köln.example/a", "%ff.example"].iter().for_each(|line| list.add(line));
        for url in [
            "http://www.xn--mnchen-3ya.example",
            "http://xn--kln-sna.example/a/",
            "http://%FF.example:80",
        ] {
            assert!(list.has(url), "{url}");
        }
        assert!(!list.has("http://xn--kln-sna.example/b"));
    }
}
