//! Classifies the error of one attempt: whether to retry it, and how to report it.

use std::error::Error as StdError;
use std::io;

use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::operation::RequestId as _;
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;

use super::client::NameUnknown;
use crate::RemoteErrorKind;

/// A failed attempt.
#[derive(Clone, Debug)]
pub(crate) struct AttemptError {
    pub(crate) cause: RemoteErrorKind,
    /// The status of the response; 0 if there was none.
    pub(crate) status: u16,
    pub(crate) response: String,
    pub(crate) request_id: Option<String>,
    /// The server does not know the keys any more.
    pub(crate) revoked: bool,
}

impl AttemptError {
    pub(crate) fn new(cause: RemoteErrorKind, response: impl Into<String>) -> Self {
        let response = response.into();
        AttemptError { cause, status: 0, response, request_id: None, revoked: false }
    }

    /// Other keys may help.
    pub(crate) fn is_of_keys(&self) -> bool {
        self.revoked
            || matches!(self.cause, RemoteErrorKind::Expired | RemoteErrorKind::NoCredentials)
    }

    pub(crate) fn is_absent(&self) -> bool {
        self.status == 404 && self.cause != RemoteErrorKind::NoBucket
    }

    /// The condition of the request did not hold.
    pub(crate) fn is_unmet(&self) -> bool {
        self.status == 412
    }

    /// Whether the server may have executed the request despite this error.
    pub(crate) fn is_ambiguous(&self) -> bool {
        // A response with status 200 may contain an error: completing a multipart upload takes so
        // long that the status is sent first.
        !(400..500).contains(&self.status)
    }

    /// The error of a body that broke off.
    pub(crate) fn of_body(error: &(dyn StdError + 'static)) -> Self {
        let mut failed = Self::of_network(error);
        if failed.cause == RemoteErrorKind::Other {
            failed.cause = RemoteErrorKind::Reset;
        }
        failed
    }

    /// The network error, from the sources of this one.
    fn of_network(error: &(dyn StdError + 'static)) -> Self {
        let text = chain(error);
        let kind = error_of::<io::Error>(error).map(io::Error::kind);
        let holds = |words: &[&str]| words.iter().any(|word| text.contains(word));
        let cause = if error_of::<NameUnknown>(error).is_some() {
            RemoteErrorKind::Dns
        } else if holds(&["redential"]) {
            RemoteErrorKind::NoCredentials
        } else if holds(&["certificate", "received corrupt message", "TLS", "fatal alert"]) {
            RemoteErrorKind::Tls
        } else if holds(&["connection closed before message completed", "end of file before"]) {
            RemoteErrorKind::Truncated
        } else {
            match kind {
                Some(io::ErrorKind::ConnectionRefused | io::ErrorKind::HostUnreachable) => {
                    RemoteErrorKind::Unreachable
                }
                Some(io::ErrorKind::UnexpectedEof) => RemoteErrorKind::Truncated,
                Some(
                    io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::ConnectionAborted,
                ) => RemoteErrorKind::Reset,
                Some(io::ErrorKind::TimedOut) => RemoteErrorKind::Stalled,
                _ => RemoteErrorKind::Other,
            }
        };
        AttemptError::new(cause, text)
    }

    /// The error of an SDK operation.
    #[expect(clippy::needless_pass_by_value, reason = "as `map_err` gives it")]
    pub(crate) fn of<E>(error: SdkError<E, HttpResponse>) -> Self
    where
        E: ProvideErrorMetadata + StdError + 'static,
    {
        match &error {
            SdkError::ServiceError(service) => {
                let (meta, raw) = (service.err().meta(), service.raw());
                let id = meta.request_id().or_else(|| raw.headers().get("x-amz-request-id"));
                let status = raw.status().as_u16();
                let (code, message) = (meta.code().unwrap_or(""), meta.message().unwrap_or(""));
                Self::of_response(status, code, message, id)
            }
            SdkError::ResponseError(response) => {
                let status = response.raw().status().as_u16();
                let id = response.raw().headers().get("x-amz-request-id");
                // A body that breaks off, or is no XML, such as the page of a proxy.
                let message = "not the response of an S3 server";
                let mut failed = Self::of_response(status, "", message, id);
                if failed.cause == RemoteErrorKind::Other {
                    failed.cause = RemoteErrorKind::Truncated;
                }
                failed
            }
            SdkError::DispatchFailure(dispatch) => {
                let mut failed = Self::of_network(&error);
                if failed.cause == RemoteErrorKind::Other && dispatch.is_timeout() {
                    failed.cause = RemoteErrorKind::Unreachable;
                } else if failed.cause == RemoteErrorKind::Other && dispatch.is_io() {
                    failed.cause = RemoteErrorKind::Reset;
                }
                failed
            }
            SdkError::TimeoutError(_) => AttemptError::new(RemoteErrorKind::Stalled, chain(&error)),
            _ => Self::of_network(&error),
        }
    }

    /// The error response of the server.
    fn of_response(status: u16, code: &str, message: &str, request_id: Option<&str>) -> Self {
        let cause = match (code, status) {
            ("ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired", _) => {
                RemoteErrorKind::Expired
            }
            ("RequestTimeTooSkewed" | "RequestExpired" | "RequestInTheFuture", _) => {
                RemoteErrorKind::ClockSkew
            }
            ("NoSuchBucket", _) => RemoteErrorKind::NoBucket,
            ("PermanentRedirect" | "AuthorizationHeaderMalformed", _) | (_, 301 | 307) => {
                RemoteErrorKind::WrongRegion
            }
            ("SlowDown" | "SlowDownRead" | "SlowDownWrite" | "RequestLimitExceeded", _)
            | (_, 429 | 503) => RemoteErrorKind::SlowDown,
            ("RequestTimeout" | "InternalError", _) | (_, 500 | 502 | 504) => {
                RemoteErrorKind::Server
            }
            ("OperationAborted" | "ConditionalRequestConflict", _) | (_, 409) => {
                RemoteErrorKind::Conflict
            }
            (_, 401 | 403) => RemoteErrorKind::Denied,
            (_, 412) => RemoteErrorKind::Replaced,
            (_, 416) => RemoteErrorKind::Range,
            (_, 400..) => RemoteErrorKind::Refused,
            _ => RemoteErrorKind::Other,
        };
        let mut response = format!("status {status}");
        for part in [code, message] {
            if !part.is_empty() {
                response.push(' ');
                response.push_str(part);
            }
        }
        let (request_id, revoked) = (request_id.map(str::to_owned), code == "InvalidAccessKeyId");
        AttemptError { cause, status, response, request_id, revoked }
    }
}

/// The texts of an error and its sources, without repetition. None of them has credentials.
fn chain(error: &(dyn StdError + 'static)) -> String {
    const BYTES_MAX: usize = 500;
    let mut joined = String::new();
    let mut next = Some(error);
    while let Some(error) = next.filter(|_| joined.len() < BYTES_MAX) {
        let text = error.to_string();
        if !joined.contains(&text) {
            joined.push_str(if joined.is_empty() { "" } else { ": " });
            joined.push_str(&text);
        }
        next = error.source();
    }
    joined
}

/// The first error of a type in the source chain. An error within an `io::Error` is not its source,
/// and is checked too.
fn error_of<'a, E: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a E> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_classified() {
        for (status, code, expected) in [
            (400, "ExpiredToken", RemoteErrorKind::Expired),
            (403, "RequestTimeTooSkewed", RemoteErrorKind::ClockSkew),
            (403, "AccessDenied", RemoteErrorKind::Denied),
            (403, "", RemoteErrorKind::Denied),
            (404, "NoSuchBucket", RemoteErrorKind::NoBucket),
            (301, "PermanentRedirect", RemoteErrorKind::WrongRegion),
            (503, "SlowDown", RemoteErrorKind::SlowDown),
            (503, "", RemoteErrorKind::SlowDown),
            (500, "InternalError", RemoteErrorKind::Server),
            (400, "RequestTimeout", RemoteErrorKind::Server),
            (409, "OperationAborted", RemoteErrorKind::Conflict),
            (412, "PreconditionFailed", RemoteErrorKind::Replaced),
            (416, "InvalidRange", RemoteErrorKind::Range),
            (400, "InvalidArgument", RemoteErrorKind::Refused),
        ] {
            let failed = AttemptError::of_response(status, code, "", Some("r-1"));
            assert_eq!(failed.cause, expected, "{status} {code}");
            assert_eq!(failed.request_id.as_deref(), Some("r-1"));
        }
        assert!(AttemptError::of_response(404, "NoSuchKey", "", None).is_absent());
        assert!(!AttemptError::of_response(404, "NoSuchBucket", "", None).is_absent());
        for (status, expected) in [(0, true), (200, true), (412, false), (429, false), (503, true)]
        {
            let failed = AttemptError::of_response(status, "InternalError", "", None);
            assert_eq!(failed.is_ambiguous(), expected, "{status}");
        }
    }

    #[test]
    fn network_errors_are_classified() {
        for (kind, expected) in [
            (io::ErrorKind::ConnectionReset, RemoteErrorKind::Reset),
            (io::ErrorKind::ConnectionRefused, RemoteErrorKind::Unreachable),
            (io::ErrorKind::UnexpectedEof, RemoteErrorKind::Truncated),
            (io::ErrorKind::TimedOut, RemoteErrorKind::Stalled),
        ] {
            assert_eq!(AttemptError::of_body(&io::Error::from(kind)).cause, expected);
        }
        let tls = io::Error::other("invalid peer certificate: UnknownIssuer");
        assert_eq!(AttemptError::of_body(&tls).cause, RemoteErrorKind::Tls);
    }
}
