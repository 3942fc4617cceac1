//! State shared by all stores in one bucket: clients, limits, latencies and counters.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use super::attempt_error::AttemptError;
use super::client::Clients;
use super::latency::LatencyTracker;
use super::limiter::Limiter;
use super::location::S3Options;
use super::runtime::runtime;
use crate::base::pending_call::PendingCall;
use crate::base::per_process::PerProcess;
use crate::base::rng::Rng;
use crate::{Error, RemoteError, RemoteErrorKind, Result};

/// A bucket behind an endpoint.
pub(crate) struct Bucket {
    pub(crate) name: String,
    pub(crate) options: S3Options,
    pub(crate) metrics: Arc<Metrics>,
    live: Mutex<Option<Arc<ProcessBucket>>>,
}

/// The part of a bucket that belongs to one process: none of it survives a fork.
pub(crate) struct ProcessBucket {
    process: u32,
    pub(crate) runtime: &'static Runtime,
    clients: Mutex<Arc<Clients>>,
    /// Held while the keys are read again.
    renewal: tokio::sync::Mutex<()>,
    pub(crate) bucket: String,
    pub(crate) options: S3Options,
    pub(crate) limiter: Limiter,
    pub(crate) latency: LatencyTracker,
    pub(crate) metrics: Arc<Metrics>,
}

impl Bucket {
    /// The bucket with this name and these options; equal arguments return the same one.
    pub(crate) fn of(name: &str, options: &S3Options) -> Arc<Self> {
        type Known = HashMap<(String, S3Options), Arc<Bucket>>;
        static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new();
        let mut known = KNOWN.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            Arc::new(Bucket {
                name: name.to_owned(),
                options: options.clone(),
                metrics: Arc::default(),
                live: Mutex::new(None),
            })
        };
        let key = (name.to_owned(), options.clone());
        Arc::clone(known.entry(key).or_insert_with(new))
    }

    /// The part of this process, created at first use.
    pub(crate) fn live(&self) -> Result<Arc<ProcessBucket>> {
        let process = std::process::id();
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(live) = live.as_ref().filter(|live| live.is_in_this_process()) {
            return Ok(Arc::clone(live));
        }
        let runtime = runtime()?;
        let call = PendingCall::start("find credentials for", format!("s3://{}", self.name));
        let clients = runtime.block_on(Clients::new(&self.options, 0))?;
        drop(call);
        let endpoint = clients.endpoint.as_deref().unwrap_or("AWS");
        log::info!("s3://{}: endpoint {endpoint}, queue depth {}", self.name, self.options.depth);
        let made = Arc::new(ProcessBucket {
            process,
            runtime,
            clients: Mutex::new(Arc::new(clients)),
            renewal: tokio::sync::Mutex::default(),
            bucket: self.name.clone(),
            options: self.options.clone(),
            limiter: Limiter::new(self.options.depth),
            latency: LatencyTracker::new(),
            metrics: Arc::clone(&self.metrics),
        });
        // The parent's part is not dropped: the parent closes its connections.
        std::mem::forget(live.replace(Arc::clone(&made)));
        Ok(made)
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bucket").field("name", &self.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for ProcessBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessBucket").field("bucket", &self.bucket).finish_non_exhaustive()
    }
}

/// Counters since the process started.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub(crate) requests: AtomicU64,
    pub(crate) moved_bytes: AtomicU64,
    pub(crate) delivered_bytes: AtomicU64,
    pub(crate) hedges_sent: AtomicU64,
    pub(crate) hedges_won: AtomicU64,
    retries: [AtomicU64; RemoteErrorKind::ALL.len()],
}

pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Metrics {
    /// Names and values; retries of causes that occurred.
    pub(crate) fn named(&self) -> Vec<(String, u64)> {
        let plain = [
            ("requests", &self.requests),
            ("moved_bytes", &self.moved_bytes),
            ("delivered_bytes", &self.delivered_bytes),
            ("hedges_sent", &self.hedges_sent),
            ("hedges_won", &self.hedges_won),
        ];
        let causes = RemoteErrorKind::ALL.iter().zip(&self.retries);
        let retries = causes.map(|(cause, count)| (format!("retries_{}", cause.name()), count));
        let all = plain.into_iter().map(|(name, count)| (name.to_owned(), count));
        let read = |(name, count): (String, &AtomicU64)| (name, count.load(Ordering::Relaxed));
        let seen = |(name, count): &(String, u64)| *count > 0 || !name.starts_with("retries");
        all.chain(retries).map(read).filter(seen).collect()
    }
}

/// The time limit of all attempts of a request together, even if more are allowed.
const TOTAL_MAX: Duration = Duration::from_secs(300);

/// The first pause is up to this, each next one up to twice as long as the one before.
const PAUSE_FIRST: Duration = Duration::from_millis(100);

/// Longer pauses only delay the recovery.
const PAUSE_MAX: Duration = Duration::from_secs(20);

/// The attempts of one request.
#[derive(Debug, Default)]
pub(crate) struct Tries {
    /// When the first one was admitted.
    started: Option<Instant>,
    made: u32,
    /// The generation of the keys that the last one had.
    generation: u64,
    /// Whether the keys were read again for this request.
    renewed: bool,
}

impl Tries {
    /// Starts an attempt. The total time counts from the first attempt: it excludes the wait for
    /// admission, which is long for the last part of a long read.
    pub(crate) fn start(&mut self, live: &ProcessBucket) {
        self.started.get_or_insert_with(Instant::now);
        self.generation = live.clients().generation;
    }

    fn waited(&self) -> Duration {
        self.started.map_or(Duration::ZERO, |started| started.elapsed())
    }

    pub(crate) fn made(&self) -> u32 {
        self.made
    }

    /// After a failed attempt: waits for the next one, or returns the error if there is none.
    pub(crate) async fn wait_for_retry(
        &mut self,
        live: &ProcessBucket,
        failed: AttemptError,
    ) -> std::result::Result<(), AttemptError> {
        self.made += 1;
        if failed.cause == RemoteErrorKind::SlowDown {
            live.limiter.slow_down(Instant::now());
        }
        if failed.is_of_keys() && !self.renewed {
            self.renewed = true;
            let is_renewed = live.renew_keys(self.generation).await;
            // Without any keys, only a later request can succeed.
            if is_renewed && failed.cause != RemoteErrorKind::NoCredentials {
                return Ok(());
            }
        }
        let spent = self.made >= live.options.tries || self.waited() >= TOTAL_MAX;
        if spent || !failed.cause.is_passing() {
            return Err(failed);
        }
        count(&live.metrics.retries[failed.cause as usize], 1);
        let doubled = PAUSE_FIRST.saturating_mul(1 << self.made.min(10)) / 2;
        // Full jitter: requests that failed together do not retry together.
        let pause_max_us = doubled.min(PAUSE_MAX).as_micros() as u64; // fits: 20 s
        let pause = Duration::from_micros(Rng::from_entropy().below(pause_max_us + 1));
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// The error of the last attempt.
    pub(crate) fn error(&self, operation: &str, object: &str, failed: AttemptError) -> Error {
        if failed.is_absent() {
            return Error::NotFound { object: object.to_owned() };
        }
        Error::Remote(Box::new(RemoteError {
            operation: operation.to_owned(),
            object: object.to_owned(),
            cause: failed.cause,
            response: failed.response,
            request_id: failed.request_id,
            tries: self.made.max(1),
            waited: self.waited(),
        }))
    }
}

impl ProcessBucket {
    /// Whether this is the process that created it.
    pub(crate) fn is_in_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    /// The clients with the newest keys. Each attempt asks for them.
    pub(crate) fn clients(&self) -> Arc<Clients> {
        Arc::clone(&self.clients.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the keys again, unless another request did so since `generation`. Returns whether that
    /// succeeded.
    async fn renew_keys(&self, generation: u64) -> bool {
        let _renewal = self.renewal.lock().await;
        if self.clients().generation != generation {
            return true;
        }
        match Clients::new(&self.options, generation + 1).await {
            Ok(clients) => {
                log::info!("s3://{}: the credentials are read again", self.bucket);
                let mut current = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
                *current = Arc::new(clients);
                true
            }
            Err(e) => {
                log::warn!("s3://{}: the credentials cannot be read again: {e}", self.bucket);
                false
            }
        }
    }

    /// Sends a small request, with retries.
    pub(crate) async fn with_retries<T, Attempt>(
        &self,
        operation: &str,
        object: &str,
        mut attempt: impl FnMut() -> Attempt,
    ) -> Result<T>
    where
        Attempt: Future<Output = std::result::Result<T, AttemptError>>,
    {
        let _call = PendingCall::start(operation.to_owned(), object);
        let mut tries = Tries::default();
        loop {
            match self.once(&mut tries, self.response_timeout(0), attempt()).await {
                Ok(response) => return Ok(response),
                Err(failed) => {
                    let retry = tries.wait_for_retry(self, failed).await;
                    retry.map_err(|failed| tries.error(operation, object, failed))?;
                }
            }
        }
    }

    /// One attempt, when it is admitted, with a timeout.
    pub(crate) async fn once<T>(
        &self,
        tries: &mut Tries,
        timeout: Duration,
        attempt: impl Future<Output = std::result::Result<T, AttemptError>>,
    ) -> std::result::Result<T, AttemptError> {
        let _permit = self.limiter.acquire().await;
        tries.start(self);
        count(&self.metrics.requests, 1);
        let outcome = tokio::time::timeout(timeout, attempt).await;
        let timed_out = || {
            let response = format!("no response within {timeout:?}");
            Err(AttemptError::new(RemoteErrorKind::Stalled, response))
        };
        let outcome = outcome.unwrap_or_else(|_| timed_out());
        if outcome.is_ok() {
            self.limiter.record_success();
        }
        outcome
    }

    /// Timeout of a request that sends this many bytes: the stall time, plus the body at 256 KiB/s,
    /// the least rate of an upload, because its progress is not visible.
    pub(crate) fn response_timeout(&self, sends_bytes: usize) -> Duration {
        const UPLOAD_BYTES_PER_S: f64 = 262_144.0;
        self.options.stall + Duration::from_secs_f64(sends_bytes as f64 / UPLOAD_BYTES_PER_S)
    }
}
