use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::fd::IntoRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use super::missing_ranks;
use crate::ffi::{self, RawStore};
use crate::{Error, Result};

/// How long the store may take to answer. It takes microseconds, or a second if thousands of ranks
/// ask at once; c10d itself waits forever if the host of the store is unreachable or stopped.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// A key-value store in one process, through which ranks find one another and exchange notes. A
/// clone is the same connection, on which one call waits for another; [`Store::again`] opens a
/// second one.
#[derive(Clone)]
pub struct Store {
    connection: Arc<Connection>,
    /// Precedes every key.
    prefix: String,
    listens_on: Option<SocketAddr>,
    /// Shared by all connections of one rank, and not by other ranks.
    pub(super) owner: Arc<()>,
}

struct Connection {
    raw: NonNull<RawStore>,
    host: String,
    port: u16,
    /// The longest that connecting may take.
    timeout: Duration,
    /// Whether a call was abandoned: it still holds the connection.
    is_stuck: AtomicBool,
}

// SAFETY: c10d's TCPStore may be called, and destroyed, on any thread.
unsafe impl Send for Connection {}
// SAFETY: it holds a lock during every call.
unsafe impl Sync for Connection {}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: the shim passed ownership of this reference, and no other code uses it any more.
        unsafe { ffi::fb_store_free(self.raw.as_ptr()) };
    }
}

impl Store {
    /// Hosts a store in this process, until all handles to it are dropped. It listens only on the
    /// address of `host`, or, if that is not an address of this machine but for example of a
    /// gateway, on all addresses: see [`Store::listens_on`]. Port 0 takes a free one.
    ///
    /// # Errors
    /// [`Error::Serve`] if the port is in use, or `host` has no address.
    pub fn serve(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let refuse = |text: String| Error::Serve { address: format!("{host}:{port}"), text };
        let listener = listen(host, port).map_err(|error| {
            let hint = if error.kind() == io::ErrorKind::AddrInUse {
                " (hint: another run uses this port; choose another)"
            } else {
                ""
            };
            refuse(format!("{error}{hint}"))
        })?;
        let address = listener.local_addr().map_err(|error| refuse(error.to_string()))?;
        let store = open(host, address.port(), Some(listener), timeout).map_err(refuse)?;
        Ok(Store { listens_on: Some(address), ..store })
    }

    /// Connects to the store that another process hosts, or will host before the timeout.
    ///
    /// # Errors
    /// [`Error::Store`] if the store does not answer in time.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let operation = || format!("connect to the store on {host}:{port}");
        open(host, port, None, timeout)
            .map_err(|text| Error::Store { operation: operation(), text })
    }

    /// A second connection of the same rank to the same store. It may take as long as the first.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn again(&self) -> Result<Self> {
        let made = self.request("open a second connection", self.connection.timeout, |store| {
            let mut raw = std::ptr::null_mut();
            // SAFETY: the store is alive, and `raw` has room for one pointer.
            let code = unsafe { ffi::fb_store_again(store, &raw mut raw) };
            (code, NonNull::new(raw).map(Made))
        })?;
        let Made(raw) = made.expect("the call succeeded");
        let &Connection { ref host, port, timeout, .. } = &*self.connection;
        let (host, is_stuck) = (host.clone(), AtomicBool::new(false));
        let connection = Arc::new(Connection { raw, host, port, timeout, is_stuck });
        Ok(Store { connection, ..self.clone() })
    }

    /// The same connection with `prefix/` before every key.
    #[must_use]
    pub fn below(&self, prefix: &str) -> Self {
        Store { prefix: format!("{}{prefix}/", self.prefix), ..self.clone() }
    }

    /// The address of the store, if this handle's process hosts it.
    #[must_use]
    pub fn listens_on(&self) -> Option<SocketAddr> {
        self.listens_on
    }

    /// The port of the store, also if it was chosen by the system.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.connection.port
    }

    /// Writes a value, over the one that was there.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let (name, value) = (self.key(key)?, value.to_vec());
        self.request(&format!("set '{key}'"), ANSWER_MAX, move |store| {
            // SAFETY: the store, the key and `value.len()` bytes are alive during the call.
            let code =
                unsafe { ffi::fb_store_set(store, name.as_ptr(), value.as_ptr(), value.len()) };
            (code, ())
        })
    }

    /// Waits until a key is there, and returns its value.
    ///
    /// # Errors
    /// [`Error::Store`] if it is not there in time.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        if self.wait(&[key], timeout)? {
            return self.value(key);
        }
        let text = format!("key not set after {}", missing_ranks::seconds(timeout.as_secs_f64()));
        Err(Error::Store { operation: self.describe(&format!("get '{key}'")), text })
    }

    /// The value of a key, if it is there.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn look(&self, key: &str) -> Result<Option<Vec<u8>>> {
        if self.has(&[key])? { self.value(key).map(Some) } else { Ok(None) }
    }

    /// Adds to a number, which is 0 before the first time, and returns the sum.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let name = self.key(key)?;
        self.request(&format!("add to '{key}'"), ANSWER_MAX, move |store| {
            let mut sum = 0;
            // SAFETY: the store and the key are alive, and `sum` has room for one number.
            let code = unsafe { ffi::fb_store_add(store, name.as_ptr(), amount, &raw mut sum) };
            (code, sum)
        })
    }

    /// Whether all the keys are there.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn has<K: AsRef<str>>(&self, keys: &[K]) -> Result<bool> {
        let names = self.keys(keys)?;
        let all = self.request("check keys", ANSWER_MAX, move |store| {
            let list: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
            let mut all = 0;
            // SAFETY: the store and `list.len()` names are alive, and `all` has room.
            let code = unsafe { ffi::fb_store_has(store, list.as_ptr(), list.len(), &raw mut all) };
            (code, all)
        })?;
        Ok(all != 0)
    }

    /// Waits until all the keys are there; false if they are not in time.
    ///
    /// # Errors
    /// [`Error::Store`] if the store does not answer.
    pub fn wait<K: AsRef<str>>(&self, keys: &[K], timeout: Duration) -> Result<bool> {
        let names = self.keys(keys)?;
        let within = timeout.saturating_add(ANSWER_MAX);
        let found = self.request("wait for keys", within, move |store| {
            let list: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
            let (mut came, timeout) = (0, milliseconds(timeout));
            // SAFETY: the store and `list.len()` names are alive, and `came` has room.
            let code = unsafe {
                ffi::fb_store_wait(store, list.as_ptr(), list.len(), timeout, &raw mut came)
            };
            (code, came)
        })?;
        Ok(found != 0)
    }

    /// Registers `rank` at the barrier `name`, and waits until all of `members` have done so. Every
    /// barrier has a name of its own.
    ///
    /// # Errors
    /// [`Error::Absent`] with the ranks that are missing at the timeout, [`Error::Peer`] if one of
    /// them reported its failure by [`Store::fail`], or [`Error::Store`].
    pub fn meet(
        &self,
        name: &str,
        rank: usize,
        members: &[usize],
        timeout: Duration,
    ) -> Result<()> {
        let barrier = self.below(name);
        barrier.set(&rank.to_string(), b"")?;
        // A rank that registers twice would count for another and end the barrier too soon. The
        // start of a run prevents that: each rank's number is claimed once.
        if barrier.add("count", 1)? == members.len() as i64 {
            barrier.set("end", b"")?;
        }
        if barrier.wait(&["end"], timeout)? {
            let verdict = barrier.value("end")?;
            if verdict.is_empty() {
                return Ok(());
            }
            let text = String::from_utf8_lossy(&verdict).into_owned();
            return Err(Error::Peer { operation: format!("pass barrier {name}"), text });
        }
        let missing = barrier.missing(members)?;
        Err(Error::Absent { operation: format!("pass barrier {name}"), missing, after: timeout })
    }

    /// Notifies all that wait at the barrier `name` that `rank` will not reach it.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn fail(&self, name: &str, rank: usize, reason: &str) -> Result<()> {
        self.below(name).set("end", format!("rank {rank}: {reason}").as_bytes())
    }

    /// Which of these ranks have no key of their number. Halves the list where one is missing, so
    /// that a few of thousands are found with a few requests.
    fn missing(&self, ranks: &[usize]) -> Result<Vec<usize>> {
        let keys: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        if ranks.is_empty() || self.has(&keys)? {
            return Ok(Vec::new());
        }
        if ranks.len() == 1 {
            return Ok(ranks.to_vec());
        }
        let (left, right) = ranks.split_at(ranks.len() / 2);
        Ok([self.missing(left)?, self.missing(right)?].concat())
    }

    /// This connection, with the keys of another.
    pub(super) fn at(&self, other: &Self) -> Self {
        Store { prefix: other.prefix.clone(), ..self.clone() }
    }

    pub(super) fn raw(&self) -> *mut RawStore {
        self.connection.raw.as_ptr()
    }

    /// A key with its prefix.
    pub(super) fn key(&self, key: &str) -> Result<CString> {
        CString::new(format!("{}{key}", self.prefix)).map_err(|_| Error::Store {
            operation: self.describe("use a key"),
            text: format!("{key:?} contains NUL"),
        })
    }

    fn keys<K: AsRef<str>>(&self, keys: &[K]) -> Result<Vec<CString>> {
        keys.iter().map(|key| self.key(key.as_ref())).collect()
    }

    /// The value of a key that is there.
    fn value(&self, key: &str) -> Result<Vec<u8>> {
        let name = self.key(key)?;
        self.request(&format!("get '{key}'"), ANSWER_MAX, move |store| {
            let (mut data, mut length) = (std::ptr::null(), 0);
            // SAFETY: the store and the key are alive, and both outputs have room.
            let code =
                unsafe { ffi::fb_store_get(store, name.as_ptr(), &raw mut data, &raw mut length) };
            if code != 0 || length == 0 {
                return (code, Vec::new());
            }
            // SAFETY: the shim keeps these bytes until this thread's next call.
            (code, unsafe { std::slice::from_raw_parts(data, length) }.to_vec())
        })
    }

    fn describe(&self, operation: &str) -> String {
        format!("{operation} in the store on {}:{}", self.connection.host, self.connection.port)
    }

    /// Makes a call on a thread of its own, to be able to abandon it.
    fn request<T: Send + 'static>(
        &self,
        operation: &str,
        within: Duration,
        call: impl FnOnce(*mut RawStore) -> (c_int, T) + Send + 'static,
    ) -> Result<T> {
        let refuse = |text: String| Error::Store { operation: self.describe(operation), text };
        if self.connection.is_stuck.load(Ordering::Relaxed) {
            return Err(refuse("an earlier request is still unanswered".to_owned()));
        }
        let connection = Arc::clone(&self.connection);
        let (answer, answered) = mpsc::channel();
        let spawned = thread::Builder::new().name("store".to_owned()).spawn(move || {
            let (code, value) = call(connection.raw.as_ptr());
            // Before the answer, so that its receiver may be the last to hold the connection.
            drop(connection);
            // An abandoned call has no receiver.
            _ = answer.send(if code == 0 { Ok(value) } else { Err(ffi::last_error()) });
        });
        spawned.map_err(|error| refuse(format!("cannot start a thread: {error}")))?;
        match answered.recv_timeout(within) {
            Ok(answer) => answer.map_err(|text| refuse(missing_ranks::one_line(&text))),
            Err(_) => {
                self.connection.is_stuck.store(true, Ordering::Relaxed);
                Err(refuse(format!(
                    "no answer after {}: its process is stuck or unreachable",
                    missing_ranks::seconds(within.as_secs_f64())
                )))
            }
        }
    }
}

/// A store that one thread passes to another.
struct Made(NonNull<RawStore>);

// SAFETY: as for `Connection`.
unsafe impl Send for Made {}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Connection { host, port, .. } = &*self.connection;
        f.debug_struct("Store")
            .field("address", &format!("{host}:{port}"))
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// A socket that listens on the address of a host, or on all addresses if it has none here.
fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    match TcpListener::bind(&*addresses) {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            let all = |address: &SocketAddr| match address {
                SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
                SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)),
            };
            TcpListener::bind(&*addresses.iter().map(all).collect::<Vec<_>>())
        }
        bound => bound,
    }
}

fn open(
    host: &str,
    port: u16,
    listener: Option<TcpListener>,
    timeout: Duration,
) -> std::result::Result<Store, String> {
    // c10d logs its exceptions, with stack traces.
    ffi::fb_quiet();
    let name = CString::new(host).map_err(|_| "host name contains NUL".to_owned())?;
    let mut raw = std::ptr::null_mut();
    let listener = listener.map_or(-1, IntoRawFd::into_raw_fd);
    // SAFETY: the name is alive during the call, the socket is the store's, and `raw` has room.
    let code = unsafe {
        ffi::fb_store_open(name.as_ptr(), port, listener, milliseconds(timeout), &raw mut raw)
    };
    let Some(raw) = NonNull::new(raw).filter(|_| code == 0) else {
        return Err(missing_ranks::one_line(&ffi::last_error()));
    };
    let (host, is_stuck) = (host.to_owned(), AtomicBool::new(false));
    let connection = Arc::new(Connection { raw, host, port, timeout, is_stuck });
    Ok(Store { connection, prefix: String::new(), listens_on: None, owner: Arc::new(()) })
}

/// At least one: for c10d, 0 is no timeout.
pub(super) fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX).max(1)
}
