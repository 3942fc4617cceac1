use std::fmt;
use std::time::Duration;

/// A request that a remote store refused, or answered with an invalid response.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RemoteError {
    /// The operation after `cannot`, such as `read 4096 bytes at byte 8192 of`.
    pub operation: String,
    /// The object, as a URL without its options.
    pub object: String,
    /// The kind of error.
    pub cause: RemoteErrorKind,
    /// The response: status, code and message of the server, or the network error.
    pub response: String,
    /// The server's request id, by which its operators find it.
    pub request_id: Option<String>,
    /// The number of attempts.
    pub tries: u32,
    /// The time of all attempts together.
    pub waited: Duration,
}

/// Why a request to a remote store failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RemoteErrorKind {
    /// No credentials were found.
    NoCredentials,
    /// The credentials have expired.
    Expired,
    /// The clocks of the two machines differ too much for signatures.
    ClockSkew,
    /// The credentials are unknown, wrong, or do not allow it.
    Denied,
    /// There is no such bucket.
    NoBucket,
    /// The bucket is in another region.
    WrongRegion,
    /// The object is not the one that was opened.
    Replaced,
    /// The range is not within the object.
    Range,
    /// The server asks for fewer requests.
    SlowDown,
    /// The server failed.
    Server,
    /// Two requests conflicted.
    Conflict,
    /// The request was refused as invalid.
    Refused,
    /// No byte was received for too long.
    Stalled,
    /// Bytes were received, but too slowly for a transfer.
    Drip,
    /// The connection was reset or closed.
    Reset,
    /// The connection could not be established.
    Unreachable,
    /// The response was truncated.
    Truncated,
    /// The response has another length or range than requested.
    WrongLength,
    /// The server's name could not be resolved.
    Dns,
    /// The TLS connection could not be established.
    Tls,
    /// Anything else.
    Other,
}

impl RemoteErrorKind {
    /// All of them, in the order of their numbers.
    pub const ALL: [RemoteErrorKind; 21] = [
        RemoteErrorKind::NoCredentials,
        RemoteErrorKind::Expired,
        RemoteErrorKind::ClockSkew,
        RemoteErrorKind::Denied,
        RemoteErrorKind::NoBucket,
        RemoteErrorKind::WrongRegion,
        RemoteErrorKind::Replaced,
        RemoteErrorKind::Range,
        RemoteErrorKind::SlowDown,
        RemoteErrorKind::Server,
        RemoteErrorKind::Conflict,
        RemoteErrorKind::Refused,
        RemoteErrorKind::Stalled,
        RemoteErrorKind::Drip,
        RemoteErrorKind::Reset,
        RemoteErrorKind::Unreachable,
        RemoteErrorKind::Truncated,
        RemoteErrorKind::WrongLength,
        RemoteErrorKind::Dns,
        RemoteErrorKind::Tls,
        RemoteErrorKind::Other,
    ];

    /// Its name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        use RemoteErrorKind as C;
        match self {
            C::NoCredentials => "no_credentials",
            C::Expired => "expired",
            C::ClockSkew => "clock_skew",
            C::Denied => "denied",
            C::NoBucket => "no_bucket",
            C::WrongRegion => "wrong_region",
            C::Replaced => "replaced",
            C::Range => "range",
            C::SlowDown => "slow_down",
            C::Server => "server",
            C::Conflict => "conflict",
            C::Refused => "refused",
            C::Stalled => "stalled",
            C::Drip => "drip",
            C::Reset => "reset",
            C::Unreachable => "unreachable",
            C::Truncated => "truncated",
            C::WrongLength => "wrong_length",
            C::Dns => "dns",
            C::Tls => "tls",
            C::Other => "other",
        }
    }

    /// Whether the same request may succeed later.
    #[must_use]
    pub fn is_passing(self) -> bool {
        use RemoteErrorKind as C;
        matches!(
            self,
            C::SlowDown
                | C::Server
                | C::Conflict
                | C::Stalled
                | C::Drip
                | C::Reset
                | C::Unreachable
                | C::Truncated
                | C::WrongLength
                | C::Dns
        )
    }

    /// As text.
    fn text(self) -> &'static str {
        use RemoteErrorKind as C;
        match self {
            C::NoCredentials => "no credentials found",
            C::Expired => "credentials expired",
            C::ClockSkew => "clocks of client and server differ too much",
            C::Denied => "access denied",
            C::NoBucket => "no such bucket",
            C::WrongRegion => "bucket is in another region",
            C::Replaced => "object was replaced after it was opened",
            C::Range => "range is outside the object",
            C::SlowDown => "server requests a lower rate",
            C::Server => "server error",
            C::Conflict => "conflict with another request",
            C::Refused => "server rejected the request",
            C::Stalled => "no data within the timeout",
            C::Drip => "transfer too slow",
            C::Reset => "connection closed",
            C::Unreachable => "connection failed",
            C::Truncated => "response truncated",
            C::WrongLength => "response differs from the requested range",
            C::Dns => "host name not resolved",
            C::Tls => "TLS connection failed",
            C::Other => "request failed",
        }
    }

    /// The likely cause, and what to do.
    fn hint(self) -> Option<&'static str> {
        use RemoteErrorKind as C;
        Some(match self {
            C::NoCredentials => {
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or credentials=FILE \
                 in the URL; a profile of single sign-on needs aws sso login"
            }
            C::Expired => {
                "write new ones to the file or profile, which is read again, or use a role or \
                 credential_process, which renews them"
            }
            C::ClockSkew => {
                "set this machine's clock; check it with timedatectl or chronyc tracking"
            }
            C::Denied => {
                "check the access key, and that its policy allows this action on the bucket"
            }
            C::NoBucket => "check the bucket name and the endpoint; Feedline creates no buckets",
            C::WrongRegion => "set region=NAME in the URL, or AWS_REGION",
            C::Replaced => "do not overwrite objects that a run reads",
            C::Range => "the .idx may belong to another .bin",
            C::SlowDown => "lower depth= in the URL; other jobs may load the same store",
            C::Stalled => "stall= in the URL sets the timeout; on Ceph, look for a stuck OSD",
            C::Drip | C::Truncated | C::WrongLength => {
                "check proxies and load balancers between this machine and the store"
            }
            C::Unreachable => "check endpoint= in the URL or AWS_ENDPOINT_URL, and the network",
            C::Dns => {
                "check endpoint= and region=; without path_style=on, the host has the bucket name"
            }
            C::Tls => {
                "for a private certificate authority set ca=FILE or AWS_CA_BUNDLE; for a server \
                 without TLS use an http:// endpoint"
            }
            C::Server | C::Conflict | C::Refused | C::Reset | C::Other => return None,
        })
    }
}

impl fmt::Display for RemoteErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl fmt::Display for RemoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RemoteError { operation, object, cause, response, request_id, tries, waited } = self;
        write!(f, "cannot {operation} {object}: {cause}: {response}")?;
        if let Some(id) = request_id {
            write!(f, " (request id {id})")?;
        }
        if *tries > 1 {
            write!(f, ", {tries} attempts in {:.1} s", waited.as_secs_f64())?;
        }
        cause.hint().map_or(Ok(()), |hint| write!(f, " (hint: {hint})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_has_its_own_text() {
        let mut texts: Vec<_> = RemoteErrorKind::ALL.iter().map(|cause| cause.text()).collect();
        texts.extend(RemoteErrorKind::ALL.iter().map(|cause| cause.name()));
        texts.sort_unstable();
        texts.dedup();
        assert_eq!(texts.len(), 2 * RemoteErrorKind::ALL.len());
        for (number, cause) in RemoteErrorKind::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, number);
        }
    }
}
