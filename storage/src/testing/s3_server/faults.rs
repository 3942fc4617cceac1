//! Fault injection.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use aws_smithy_types::DateTime;
use aws_smithy_types::date_time::Format;
use futures_util::stream;
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_RANGE, DATE, HeaderValue};
use hyper::{Request, Response};
use s3s::Body;
use s3s::dto::StreamingBlob;
use s3s::service::S3Service;

use crate::base::rng::Rng;

/// One way for a request to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// `503 SlowDown`: the request is not processed.
    SlowDown,
    /// `500 InternalError`, without processing the request.
    InternalError,
    /// `400 ExpiredToken`, without processing the request.
    Expired,
    /// `403 AccessDenied`, without processing the request.
    Denied,
    /// `403 RequestTimeTooSkewed`, without processing the request.
    ClockSkew,
    /// `409 ConditionalRequestConflict`, without processing the request.
    Conflict,
    /// The response is late by this much.
    Delay(Duration),
    /// There is no response.
    Stall,
    /// The response stalls after half of its body.
    StallInBody,
    /// The body arrives in pieces of this size, with a pause before each.
    Drip(usize, Duration),
    /// The connection is closed after half of the body.
    Truncate,
    /// The connection is reset after half of the body.
    Reset,
    /// One byte of the body is corrupt.
    WrongByte,
    /// The response has another range.
    WrongRange,
    /// The request is executed, and the connection closed without a response.
    LoseAnswer,
    /// The date of the response is this many seconds ahead, or behind if negative.
    Clock(i64),
}

/// A fault, and the requests that it applies to.
#[derive(Clone, Debug)]
pub struct FaultRule {
    fault: Fault,
    when: When,
    method: Option<&'static str>,
    target_contains: Option<String>,
    matched: u64,
}

#[derive(Clone, Debug)]
enum When {
    Nth(u64),
    Every(u64),
    Chance(Rng, u32),
}

impl FaultRule {
    fn new(fault: Fault, when: When) -> Self {
        FaultRule { fault, when, method: None, target_contains: None, matched: 0 }
    }

    /// Hits the request with this number, counted from 1, among those that this rule matches from
    /// now on.
    #[must_use]
    pub fn nth(n: u64, fault: Fault) -> Self {
        Self::new(fault, When::Nth(n))
    }

    /// Every `k`th request.
    #[must_use]
    pub fn every(k: u64, fault: Fault) -> Self {
        Self::new(fault, When::Every(k.max(1)))
    }

    /// This many of 1000 requests, chosen by the seed.
    #[must_use]
    pub fn per_mille(share: u32, seed: u64, fault: Fault) -> Self {
        Self::new(fault, When::Chance(Rng::new(seed), share))
    }

    /// Restricts the rule to requests with this method.
    #[must_use]
    pub fn of(mut self, method: &'static str) -> Self {
        self.method = Some(method);
        self
    }

    /// Restricts the rule to requests whose path and query contain this text.
    #[must_use]
    pub fn to(mut self, text: &str) -> Self {
        self.target_contains = Some(text.to_owned());
        self
    }

    fn hits(&mut self, method: &str, target: &str) -> bool {
        let matches = self.method.is_none_or(|of| of == method)
            && self.target_contains.as_ref().is_none_or(|text| target.contains(text));
        if !matches {
            return false;
        }
        self.matched += 1;
        match &mut self.when {
            When::Nth(n) => self.matched == *n,
            When::Every(k) => self.matched.is_multiple_of(*k),
            When::Chance(rng, share) => rng.chance(*share),
        }
    }
}

/// The rules in force.
#[derive(Debug, Default)]
pub(super) struct Faults {
    rules: Mutex<Vec<FaultRule>>,
    /// An access key of which requests are refused as expired.
    expired: Mutex<Option<&'static str>>,
    seen: AtomicU64,
    hits: AtomicU64,
}

impl Faults {
    fn rules(&self) -> MutexGuard<'_, Vec<FaultRule>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, rule: FaultRule) {
        self.rules().push(rule);
    }

    pub(super) fn expire(&self, access_key: &'static str) {
        *self.expired.lock().unwrap_or_else(PoisonError::into_inner) = Some(access_key);
    }

    fn is_expired(&self, request: &Request<Incoming>) -> bool {
        let expired = *self.expired.lock().unwrap_or_else(PoisonError::into_inner);
        let signature = request.headers().get(AUTHORIZATION).map_or(&[][..], |it| it.as_bytes());
        let signature = String::from_utf8_lossy(signature);
        expired.is_some_and(|key| signature.contains(&format!("Credential={key}/")))
    }

    pub(super) fn clear(&self) {
        self.rules().clear();
    }

    pub(super) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    pub(super) fn seen(&self) -> u64 {
        self.seen.load(Ordering::Relaxed)
    }

    fn choose(&self, request: &Request<Incoming>) -> Option<Fault> {
        let target = request.uri().path_and_query().map_or("", |target| target.as_str());
        let method = request.method().as_str();
        // Every rule counts every request, even if another rule hits it.
        let hit = |found: Option<Fault>, rule: &mut FaultRule| {
            let hits = rule.hits(method, target);
            found.or(hits.then_some(rule.fault))
        };
        let expired = self.is_expired(request).then_some(Fault::Expired);
        let fault = self.rules().iter_mut().fold(expired, hit);
        self.hits.fetch_add(u64::from(fault.is_some()), Ordering::Relaxed);
        fault
    }

    /// Answers a request, or injects the fault.
    pub(super) async fn serve(
        &self,
        request: Request<Incoming>,
        service: &S3Service,
        reset: &AtomicBool,
    ) -> io::Result<Response<Body>> {
        let number = self.seen.fetch_add(1, Ordering::Relaxed) + 1;
        let fault = self.choose(&request);
        let mut response = match fault.and_then(refusal) {
            Some((status, code)) => refuse(status, code)?,
            None => {
                match fault {
                    Some(Fault::Delay(time)) => tokio::time::sleep(time).await,
                    Some(Fault::Stall) => std::future::pending().await,
                    _ => {}
                }
                service.call(request.map(Body::from)).await.map_err(io::Error::other)?
            }
        };
        if fault == Some(Fault::LoseAnswer) {
            return Err(io::Error::other("cannot respond: injected fault"));
        }
        let id = HeaderValue::from_str(&format!("request-{number}")).map_err(io::Error::other)?;
        response.headers_mut().insert("x-amz-request-id", id);
        if let Some(Fault::Clock(ahead_s)) = fault {
            response.headers_mut().insert(DATE, date(ahead_s)?);
        }
        let in_body = |fault: &Fault| !matches!(fault, Fault::Clock(_));
        match fault.filter(in_body).filter(|_| response.status().is_success()) {
            Some(fault) => corrupt_body(response, fault, reset).await,
            None => Ok(response),
        }
    }
}

fn date(ahead_s: i64) -> io::Result<HeaderValue> {
    let now = DateTime::from(SystemTime::now());
    let text = DateTime::from_secs(now.secs() + ahead_s).fmt(Format::HttpDate);
    HeaderValue::from_str(&text.map_err(io::Error::other)?).map_err(io::Error::other)
}

fn refusal(fault: Fault) -> Option<(u16, &'static str)> {
    match fault {
        Fault::SlowDown => Some((503, "SlowDown")),
        Fault::InternalError => Some((500, "InternalError")),
        Fault::Expired => Some((400, "ExpiredToken")),
        Fault::Denied => Some((403, "AccessDenied")),
        Fault::ClockSkew => Some((403, "RequestTimeTooSkewed")),
        Fault::Conflict => Some((409, "ConditionalRequestConflict")),
        _ => None,
    }
}

fn refuse(status: u16, code: &str) -> io::Result<Response<Body>> {
    let body = format!("<Error><Code>{code}</Code><Message>on request</Message></Error>");
    let response = Response::builder().status(status).header("content-type", "application/xml");
    response.body(Body::from(body)).map_err(io::Error::other)
}

/// Injects a fault into the body of a response, most after its first half.
async fn corrupt_body(
    response: Response<Body>,
    fault: Fault,
    reset: &AtomicBool,
) -> io::Result<Response<Body>> {
    let (mut head, mut body) = response.into_parts();
    let bytes = body.store_all_limited(usize::MAX).await.map_err(io::Error::other)?;
    let half = bytes.slice(..bytes.len() / 2);
    let body = match fault {
        Fault::Truncate => pieces(vec![half], FaultEnd::Closed),
        Fault::Reset => {
            reset.store(true, Ordering::Relaxed);
            pieces(vec![half], FaultEnd::Closed)
        }
        Fault::StallInBody => pieces(vec![half], FaultEnd::Never),
        Fault::Drip(size, pause) => {
            let starts = (0..bytes.len()).step_by(size.max(1));
            let parts = starts.map(|at| bytes.slice(at..bytes.len().min(at + size.max(1))));
            pieces(parts.collect(), FaultEnd::Slow(pause))
        }
        Fault::WrongByte => {
            let mut wrong = bytes.to_vec();
            if let Some(byte) = wrong.last_mut() {
                *byte ^= 1;
            }
            Body::from(wrong)
        }
        Fault::WrongRange => {
            head.headers.insert(CONTENT_RANGE, HeaderValue::from_static("bytes 7-7/8"));
            Body::from(bytes)
        }
        _ => Body::from(bytes),
    };
    Ok(Response::from_parts(head, body))
}

#[derive(Clone, Copy)]
enum FaultEnd {
    /// After the pieces the connection is closed.
    Closed,
    /// After the pieces the body stalls.
    Never,
    /// The pieces are the complete body, with a pause before each.
    Slow(Duration),
}

fn pieces(pieces: Vec<Bytes>, end: FaultEnd) -> Body {
    let next = move |mut rest: std::vec::IntoIter<Bytes>| async move {
        if let FaultEnd::Slow(pause) = end {
            tokio::time::sleep(pause).await;
        }
        match (rest.next(), end) {
            (Some(piece), _) => Some((Ok(piece), rest)),
            (None, FaultEnd::Slow(_)) => None,
            (None, FaultEnd::Closed) => {
                // Gives the pieces time to be sent.
                tokio::time::sleep(Duration::from_millis(10)).await;
                Some((Err(io::Error::other("cannot complete the body: injected fault")), rest))
            }
            (None, FaultEnd::Never) => std::future::pending().await,
        }
    };
    Body::from(StreamingBlob::wrap(stream::unfold(pieces.into_iter(), next)))
}
