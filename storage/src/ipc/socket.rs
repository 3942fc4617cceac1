//! Unix sockets with abstract names, which identify the peer and pass descriptors.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use crate::{Error, Result};

/// A name on this machine to which other processes of this user connect. One process has it at a
/// time; the kernel frees it when that process ends, in whatever way.
#[derive(Debug)]
pub struct LocalListener {
    name: String,
    listener: UnixListener,
}

/// The other end of a connection: a process of this user.
#[derive(Debug)]
pub struct Peer {
    stream: UnixStream,
    pid: u32,
}

impl LocalListener {
    /// Takes a name of this user's, or `None` if another process has it.
    ///
    /// # Errors
    /// [`Error::Io`] for other errors of the kernel.
    pub fn open(name: &str) -> Result<Option<Self>> {
        let name = of_this_user(name);
        let fail = |e| Error::from_io("bind", format!("socket @{name}"), e);
        let bound = SocketAddr::from_abstract_name(&name)
            .and_then(|address| UnixListener::bind_addr(&address));
        let listener = match bound {
            Ok(listener) => listener,
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => return Ok(None),
            Err(e) => return Err(fail(e)),
        };
        listener.set_nonblocking(true).map_err(fail)?;
        Ok(Some(LocalListener { name, listener }))
    }

    /// A connecting process, or `None` if there is none. Processes of other users are refused.
    ///
    /// # Errors
    /// [`Error::Io`] if the socket fails, or the peer belongs to another user.
    pub fn accept(&self) -> Result<Option<Peer>> {
        match self.listener.accept() {
            Ok((stream, _)) => Peer::of(stream, &self.name).map(Some),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => {
                Err(Error::from_io("accept", format!("a connection on socket @{}", self.name), e))
            }
        }
    }
}

impl AsFd for LocalListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Peer {
    /// Connects to a listener, or returns `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Io`] if the listener belongs to another user, or for other errors of the kernel.
    pub fn knock(name: &str) -> Result<Option<Self>> {
        let name = of_this_user(name);
        let address = SocketAddr::from_abstract_name(&name);
        match address.and_then(|address| UnixStream::connect_addr(&address)) {
            Ok(stream) => Peer::of(stream, &name).map(Some),
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Ok(None),
            Err(e) => Err(Error::from_io("open", format!("a connection to socket @{name}"), e)),
        }
    }

    /// Two ends within this process.
    ///
    /// # Errors
    /// [`Error::Io`] if the kernel has none.
    pub fn pair() -> Result<(Self, Self)> {
        let (a, b) =
            UnixStream::pair().map_err(|e| Error::from_io("create", "a pair of sockets", e))?;
        let pid = std::process::id();
        Ok((Peer { stream: a, pid }, Peer { stream: b, pid }))
    }

    /// The kernel recorded the peer's credentials when it connected, or created the listener.
    fn of(stream: UnixStream, name: &str) -> Result<Self> {
        let fail = |e| Error::from_io("identify", format!("the peer of socket @{name}"), e);
        stream.set_nonblocking(false).map_err(fail)?;
        let (pid, uid) = credentials(&stream).map_err(fail)?;
        let expected = user();
        if uid != expected {
            let reason = format!("expected user {expected}, found process {pid} of user {uid}");
            return Err(fail(io::Error::new(io::ErrorKind::PermissionDenied, reason)));
        }
        Ok(Peer { stream, pid: pid.unsigned_abs() })
    }

    /// Its process id; 0 if that is not visible in this PID namespace.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends all bytes; `limit` bounds each wait.
    ///
    /// # Errors
    /// Errors of the kernel; the connection is then unusable.
    pub fn send(&self, bytes: &[u8], limit: Duration) -> io::Result<()> {
        self.stream.set_write_timeout(Some(limit))?;
        (&self.stream).write_all(bytes)
    }

    /// Fills a buffer; `limit` bounds each wait.
    ///
    /// # Errors
    /// Errors of the kernel, and `UnexpectedEof` if the other end is closed.
    pub fn receive(&self, bytes: &mut [u8], limit: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(limit))?;
        (&self.stream).read_exact(bytes)
    }

    /// Discards received bytes without waiting; returns whether the other end is still open.
    pub fn drain(&self) -> bool {
        let mut bytes = [0_u8; 256];
        loop {
            let (into, flags) = (bytes.as_mut_ptr().cast(), libc::MSG_DONTWAIT);
            // SAFETY: the buffer has that length and lives until the call returns.
            let count = unsafe { libc::recv(self.stream.as_raw_fd(), into, bytes.len(), flags) };
            match count {
                0 => return false,
                1.. => {}
                _ => match io::Error::last_os_error().kind() {
                    io::ErrorKind::WouldBlock => return true,
                    io::ErrorKind::Interrupted => {}
                    _ => return false,
                },
            }
        }
    }

    /// Wakes the other end. If the socket is full it has been woken already.
    pub fn nudge(&self) {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: one byte that lives until the call returns.
        unsafe { libc::send(self.stream.as_raw_fd(), [0_u8].as_ptr().cast(), 1, flags) };
    }

    /// Sends one byte and a descriptor with it.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn send_fd(&self, byte: u8, fd: BorrowedFd<'_>, limit: Duration) -> io::Result<()> {
        self.stream.set_write_timeout(Some(limit))?;
        let mut byte = [byte];
        let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let mut control = Control::zeroed();
        let message = control.message(&mut part);
        // SAFETY: the control buffer has room for one header, as `Control` is made.
        let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        let rights = libc::cmsghdr {
            cmsg_len: Control::FD_LEN,
            cmsg_level: libc::SOL_SOCKET,
            cmsg_type: libc::SCM_RIGHTS,
        };
        // SAFETY: the header is in the control buffer, which is aligned for it.
        unsafe { header.write(rights) };
        // SAFETY: the data of the header is in the control buffer.
        let data = unsafe { libc::CMSG_DATA(header) };
        // SAFETY: there is room for one descriptor; it need not be aligned.
        unsafe { data.cast::<libc::c_int>().write_unaligned(fd.as_raw_fd()) };
        let socket = self.stream.as_raw_fd();
        uninterrupted(|| {
            // SAFETY: the message and all that it points to live until the call returns.
            unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) }
        })
        .map(drop)
    }

    /// Receives one byte and the descriptor sent with it, if any.
    ///
    /// # Errors
    /// Errors of the kernel, and `UnexpectedEof` if the other end is closed.
    pub fn receive_fd(&self, limit: Duration) -> io::Result<(u8, Option<OwnedFd>)> {
        self.stream.set_read_timeout(Some(limit))?;
        let mut byte = [0_u8];
        let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let mut control = Control::zeroed();
        let mut message = control.message(&mut part);
        let (socket, flags) = (self.stream.as_raw_fd(), libc::MSG_CMSG_CLOEXEC);
        let count = uninterrupted(|| {
            // SAFETY: the message and all that it points to live until the call returns.
            unsafe { libc::recvmsg(socket, &raw mut message, flags) }
        })?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: the kernel wrote the control buffer and how much of it counts.
        let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        if header.is_null() {
            return Ok((byte[0], None));
        }
        // SAFETY: a header that is present is complete.
        let received = unsafe { header.read() };
        let rights =
            received.cmsg_level == libc::SOL_SOCKET && received.cmsg_type == libc::SCM_RIGHTS;
        if !rights || received.cmsg_len != Control::FD_LEN {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "expected a descriptor"));
        }
        // SAFETY: the data of the header is in the control buffer.
        let data = unsafe { libc::CMSG_DATA(header) };
        // SAFETY: the length says that one descriptor is there; it need not be aligned.
        let fd = unsafe { data.cast::<libc::c_int>().read_unaligned() };
        // SAFETY: the kernel made this descriptor for us just now.
        Ok((byte[0], Some(unsafe { OwnedFd::from_raw_fd(fd) })))
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Room for the control header of one descriptor, aligned as it requires.
#[repr(C, align(8))]
struct Control([u8; 64]);

impl Control {
    // SAFETY: it computes a length, and is unsafe in name only.
    const FD_LEN: usize = unsafe { libc::CMSG_LEN(size_of::<libc::c_int>() as u32) } as usize;

    fn zeroed() -> Self {
        Control([0; 64])
    }

    fn message(&mut self, part: &mut libc::iovec) -> libc::msghdr {
        // SAFETY: all zeros is a message without anything.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = part;
        message.msg_iovlen = 1;
        message.msg_control = self.0.as_mut_ptr().cast();
        // SAFETY: as for `FD_LEN`.
        let space = unsafe { libc::CMSG_SPACE(size_of::<libc::c_int>() as u32) };
        message.msg_controllen = space as usize;
        message
    }
}

/// Sleeps until a descriptor is readable or closed, or for `limit`; returns which ones are.
///
/// # Errors
/// [`Error::Io`] for errors of the kernel.
pub fn ready(fds: &[BorrowedFd<'_>], limit: Option<Duration>) -> Result<Vec<bool>> {
    let mut asked: Vec<libc::pollfd> = fds
        .iter()
        .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
        .collect();
    let limit = limit.map_or(-1, |limit| limit.as_millis().min(3_600_000) as libc::c_int);
    // SAFETY: as many entries as the length says live until the call returns.
    let count = unsafe { libc::poll(asked.as_mut_ptr(), asked.len() as libc::nfds_t, limit) };
    if count < 0 {
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(Error::from_io("poll", "sockets", e));
        }
    }
    Ok(asked.iter().map(|one| one.revents != 0).collect())
}

/// Retries a call interrupted by a signal, such as those of job schedulers.
fn uninterrupted(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<libc::ssize_t> {
    loop {
        let done = call();
        if done >= 0 {
            return Ok(done);
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// Two users may have jobs with the same name.
fn of_this_user(name: &str) -> String {
    format!("feedline-{}-{name}", user())
}

fn user() -> u32 {
    // SAFETY: this call cannot fail, and touches no memory.
    unsafe { libc::geteuid() }
}

fn credentials(stream: &UnixStream) -> io::Result<(i32, u32)> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let (socket, into) = (stream.as_raw_fd(), (&raw mut peer).cast());
    let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: there is room for one `ucred`, and both live until the call returns.
    let rc = unsafe { libc::getsockopt(socket, level, option, into, &raw mut len) };
    if rc == 0 { Ok((peer.pid, peer.uid)) } else { Err(io::Error::last_os_error()) }
}
