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

/// How long the store may take to answer. It does so in microseconds, or when thousands of ranks
/// ask at once in a second; c10d itself waits for ever if the keeper is cut off or stopped.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Where ranks find one another and leave notes: keys and small values, kept by one process. A
/// clone is the same connection, on which one call waits for another; [`Store::again`] is a second
/// one.
#[derive(Clone)]
pub struct Store {
    connection: Arc<Connection>,
    /// What stands before every key.
    prefix: String,
    listens_on: Option<SocketAddr>,
    /// Shared by all connections of one rank, and by nobody else.
    pub(super) owner: Arc<()>,
}

struct Connection {
    raw: NonNull<RawStore>,
    host: String,
    port: u16,
    /// The longest that connecting may take.
    timeout: Duration,
    /// Whether a call was given up: it still holds the connection.
    is_stuck: AtomicBool,
}

// SAFETY: c10d's TCPStore may be called, and destroyed, on any thread.
unsafe impl Send for Connection {}
// SAFETY: it holds a lock during every call.
unsafe impl Sync for Connection {}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: the shim gave this reference up to us, and nobody uses it any more.
        unsafe { ffi::fb_store_free(self.raw.as_ptr()) };
    }
}

impl Store {
    /// Keeps a store in this process, until all handles to it are dropped. It listens on the
    /// address of `host` alone, or, if that is none of this machine's but for example of a gateway,
    /// on all addresses: see [`Store::listens_on`]. Port 0 takes a free one.
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

    /// Connects to the store that another process keeps, or will keep before the time-out.
    ///
    /// # Errors
    /// [`Error::Store`] if it is not there in time.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let doing = || format!("connect to the store on {host}:{port}");
        open(host, port, None, timeout).map_err(|text| Error::Store { operation: doing(), text })
    }

    /// A second connection of the same rank to the same store. It may take as long as the first.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn again(&self) -> Result<Self> {
        let made = self.ask("open a second connection", self.connection.timeout, |store| {
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

    /// Where the store is reached, if it is kept by this handle's process.
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
        self.ask(&format!("set '{key}'"), ANSWER_MAX, move |store| {
            // SAFETY: the store, the key and `value.len()` bytes are alive during the call.
            let code =
                unsafe { ffi::fb_store_set(store, name.as_ptr(), value.as_ptr(), value.len()) };
            (code, ())
        })
    }

    /// The value of a key, once it is there.
    ///
    /// # Errors
    /// [`Error::Store`] if it is not there in time.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        if self.wait(&[key], timeout)? {
            return self.value(key);
        }
        let text = format!("key not set after {}", missing_ranks::seconds(timeout.as_secs_f64()));
        Err(Error::Store { operation: self.doing(&format!("get '{key}'")), text })
    }

    /// The value of a key, if it is there.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn look(&self, key: &str) -> Result<Option<Vec<u8>>> {
        if self.has(&[key])? { self.value(key).map(Some) } else { Ok(None) }
    }

    /// Adds to a number, which is 0 before the first time, and gives the sum.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let name = self.key(key)?;
        self.ask(&format!("add to '{key}'"), ANSWER_MAX, move |store| {
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
        let all = self.ask("check keys", ANSWER_MAX, move |store| {
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
    /// [`Error::Store`] if the store cannot be asked.
    pub fn wait<K: AsRef<str>>(&self, keys: &[K], timeout: Duration) -> Result<bool> {
        let names = self.keys(keys)?;
        let within = timeout.saturating_add(ANSWER_MAX);
        let came = self.ask("wait for keys", within, move |store| {
            let list: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
            let (mut came, timeout) = (0, milliseconds(timeout));
            // SAFETY: the store and `list.len()` names are alive, and `came` has room.
            let code = unsafe {
                ffi::fb_store_wait(store, list.as_ptr(), list.len(), timeout, &raw mut came)
            };
            (code, came)
        })?;
        Ok(came != 0)
    }

    /// Says that `rank` has come to the place `name`, and waits until all of `members` have. Every
    /// place has a name of its own.
    ///
    /// # Errors
    /// [`Error::Absent`] with those that are missing at the time-out, [`Error::Peer`] if one of
    /// them said by [`Store::fail`] that it will not come, or [`Error::Store`].
    pub fn meet(
        &self,
        name: &str,
        rank: usize,
        members: &[usize],
        timeout: Duration,
    ) -> Result<()> {
        let place = self.below(name);
        place.set(&rank.to_string(), b"")?;
        // One that came twice would count for another: then the end comes too soon, and whoever
        // starts ranks looks for that (a rank's number is claimed once).
        if place.add("count", 1)? == members.len() as i64 {
            place.set("end", b"")?;
        }
        if place.wait(&["end"], timeout)? {
            let verdict = place.value("end")?;
            if verdict.is_empty() {
                return Ok(());
            }
            let text = String::from_utf8_lossy(&verdict).into_owned();
            return Err(Error::Peer { operation: format!("pass barrier {name}"), text });
        }
        let missing = place.missing(members)?;
        Err(Error::Absent { operation: format!("pass barrier {name}"), missing, after: timeout })
    }

    /// Tells all that wait at `name` that `rank` will not come.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn fail(&self, name: &str, rank: usize, why: &str) -> Result<()> {
        self.below(name).set("end", format!("rank {rank}: {why}").as_bytes())
    }

    /// Which of these ranks have no key of their number. Halves the list where one is missing, so
    /// that a few of thousands are found with a few questions.
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

    /// A key as it stands in the store.
    pub(super) fn key(&self, key: &str) -> Result<CString> {
        CString::new(format!("{}{key}", self.prefix)).map_err(|_| Error::Store {
            operation: self.doing("use a key"),
            text: format!("{key:?} contains NUL"),
        })
    }

    fn keys<K: AsRef<str>>(&self, keys: &[K]) -> Result<Vec<CString>> {
        keys.iter().map(|key| self.key(key.as_ref())).collect()
    }

    /// The value of a key that is there.
    fn value(&self, key: &str) -> Result<Vec<u8>> {
        let name = self.key(key)?;
        self.ask(&format!("get '{key}'"), ANSWER_MAX, move |store| {
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

    fn doing(&self, what: &str) -> String {
        format!("{what} in the store on {}:{}", self.connection.host, self.connection.port)
    }

    /// Makes a call on a thread of its own, to be able to give it up.
    fn ask<T: Send + 'static>(
        &self,
        what: &str,
        within: Duration,
        call: impl FnOnce(*mut RawStore) -> (c_int, T) + Send + 'static,
    ) -> Result<T> {
        let refuse = |text: String| Error::Store { operation: self.doing(what), text };
        if self.connection.is_stuck.load(Ordering::Relaxed) {
            return Err(refuse("an earlier request is still unanswered".to_owned()));
        }
        let connection = Arc::clone(&self.connection);
        let (answer, answered) = mpsc::channel();
        let asking = thread::Builder::new().name("store".to_owned()).spawn(move || {
            let (code, value) = call(connection.raw.as_ptr());
            // Before the answer, so that whoever has it may be the last to hold the connection.
            drop(connection);
            // Nobody takes it if the call was given up.
            _ = answer.send(if code == 0 { Ok(value) } else { Err(ffi::last_error()) });
        });
        asking.map_err(|error| refuse(format!("cannot start a thread: {error}")))?;
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

/// A store that a thread hands to another.
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
    // c10d logs what it throws, with its own frames.
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

/// At least one: c10d takes 0 for no time-out at all.
pub(super) fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX).max(1)
}
