//! A connection that can end with a reset instead of an orderly close.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

pub(super) struct TestConnection {
    stream: TcpStream,
    reset: Arc<AtomicBool>,
}

impl TestConnection {
    pub(super) fn new(stream: TcpStream, reset: Arc<AtomicBool>) -> Self {
        TestConnection { stream, reset }
    }

    fn is_reset(&self) -> bool {
        self.reset.load(Ordering::Relaxed)
    }
}

impl Drop for TestConnection {
    fn drop(&mut self) {
        if self.is_reset() {
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for TestConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for TestConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_reset() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
