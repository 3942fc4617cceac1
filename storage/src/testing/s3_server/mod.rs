//! An in-process S3 server for tests: in memory, on a port of its own, exact in signatures,
//! conditions, keys and ranges, and able to inject the faults of networks and servers.
//!
//! ```
//! use storage::s3_server::{Fault, FaultRule, S3Server};
//! use storage::{Key, open_url, read_all, write_all};
//!
//! let server = S3Server::start()?;
//! let store = open_url(&server.url("run"))?;
//! let key = Key::new("a")?;
//! write_all(&*store, &key, b"all of it")?;
//! // Every third response is "503 SlowDown".
//! server.inject(FaultRule::every(3, Fault::SlowDown));
//! for _ in 0..10 {
//!     assert_eq!(read_all(&*store, &key)?, b"all of it");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod connection;
mod faults;
mod objects;

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::base::rng::Rng;
use connection::TestConnection;
use faults::Faults;
pub use faults::{Fault, FaultRule};
pub use objects::Conditions;
use objects::ObjectTable;

/// The bucket that exists from the start.
const BUCKET: &str = "test";

const ACCESS_KEY: &str = "accesskeyoftests";

/// The one after [`S3Server::renew_keys`].
const RENEWED_KEY: &str = "renewedkeyoftests";

/// A running server. Dropping it stops it and discards its objects.
#[derive(Debug)]
pub struct S3Server {
    address: SocketAddr,
    credentials: PathBuf,
    secret: String,
    faults: Arc<Faults>,
    memory: ObjectTable,
    runtime: Option<Runtime>,
}

impl S3Server {
    /// Starts one, on loopback, with an empty bucket.
    ///
    /// # Errors
    /// If there is no port, no thread, or no folder for its credentials file.
    pub fn start() -> io::Result<Self> {
        let mut rng = Rng::from_entropy();
        let secret = format!("{:016x}{:016x}", rng.next(), rng.next());
        let name = format!("feedline-test-{}-{:016x}", std::process::id(), rng.next());
        let credentials = std::env::temp_dir().join(name);
        write_keys(&credentials, ACCESS_KEY, &secret)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("s3-server")
            .enable_all()
            .build()?;
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0)))?;
        let (address, memory, faults) =
            (listener.local_addr()?, ObjectTable::new(BUCKET), Arc::default());
        let mut service = S3ServiceBuilder::new(memory.clone());
        let mut auth = SimpleAuth::from_single(ACCESS_KEY, secret.clone());
        auth.register(RENEWED_KEY.to_owned(), secret.clone().into());
        service.set_auth(auth);
        runtime.spawn(accept(listener, service.build(), Arc::clone(&faults)));
        let runtime = Some(runtime);
        Ok(S3Server { address, credentials, secret, faults, memory, runtime })
    }

    /// The URL of a folder of its bucket; more options may be added with `&`.
    #[must_use]
    pub fn url(&self, folder: &str) -> String {
        self.url_of(BUCKET, folder)
    }

    /// The same for any bucket.
    #[must_use]
    pub fn url_of(&self, bucket: &str, folder: &str) -> String {
        let (endpoint, credentials) = (self.endpoint(), self.credentials.display());
        // `AWS_PROFILE` may name a profile that the file of credentials does not have.
        let keys = format!("credentials={credentials}&profile=default");
        format!("s3://{bucket}/{folder}?endpoint={endpoint}&{keys}")
    }

    /// `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Writes other keys to the file of credentials. Those before are expired from now on.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn renew_keys(&self) -> io::Result<()> {
        self.expire_keys();
        std::fs::remove_file(&self.credentials)?;
        write_keys(&self.credentials, RENEWED_KEY, &self.secret)
    }

    /// From now on, the keys of the start are expired.
    pub fn expire_keys(&self) {
        self.faults.expire(ACCESS_KEY);
    }

    /// The secret key of the requests, which must never appear in output.
    #[must_use]
    pub fn secret(&self) -> &str {
        &self.secret
    }

    /// From now on, requests that match this rule fail with its fault. The first rule that hits
    /// counts.
    pub fn inject(&self, rule: FaultRule) {
        self.faults.add(rule);
    }

    /// Removes all rules.
    pub fn heal(&self) {
        self.faults.clear();
    }

    /// Sets how `If-None-Match` is honoured.
    pub fn keep(&self, conditions: Conditions) {
        self.memory.keep(conditions);
    }

    /// Objects in its bucket.
    #[must_use]
    pub fn object_count(&self) -> usize {
        self.memory.object_count()
    }

    /// Requests that a fault hit so far.
    #[must_use]
    pub fn fault_count(&self) -> u64 {
        self.faults.hits()
    }

    /// Requests so far.
    #[must_use]
    pub fn request_count(&self) -> u64 {
        self.faults.seen()
    }

    /// Multipart uploads that were started and neither completed nor aborted.
    #[must_use]
    pub fn upload_count(&self) -> usize {
        self.memory.upload_count()
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        // Requests that stall by fault injection would block a normal shutdown for ever.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_millis(100));
        }
        let _ = std::fs::remove_file(&self.credentials);
    }
}

fn write_keys(path: &Path, access_key: &str, secret: &str) -> io::Result<()> {
    let mut file = std::fs::OpenOptions::new();
    let mut file = file.write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "[default]\naws_access_key_id = {access_key}")?;
    writeln!(file, "aws_secret_access_key = {secret}")
}

async fn accept(listener: TcpListener, service: S3Service, faults: Arc<Faults>) {
    while let Ok((stream, _)) = listener.accept().await {
        // Without this an answer of two packets waits 40 ms for the acknowledgement of the first.
        let _ = stream.set_nodelay(true);
        let (service, faults) = (service.clone(), Arc::clone(&faults));
        let reset = Arc::new(AtomicBool::new(false));
        let connection = TokioIo::new(TestConnection::new(stream, Arc::clone(&reset)));
        let serve = service_fn(move |request| {
            let (service, faults, reset) = (service.clone(), Arc::clone(&faults), reset.clone());
            async move { faults.serve(request, &service, &reset).await }
        });
        tokio::spawn(http1::Builder::new().serve_connection(connection, serve));
    }
}
