//! The traits of the `futures` crates for streams of any thread.

use crate::stack::remote::{ReadHalf, TcpStream, WriteHalf};
use futures_io::{AsyncRead, AsyncWrite};
use netmem_pool::Mapped;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

macro_rules! read {
    ($half:ident) => {
        impl<M: Mapped> AsyncRead for $half<M> {
            fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
                self.get_mut().poll_read(cx, into).map_err(io::Error::from)
            }
        }
    };
}

macro_rules! write {
    ($half:ident) => {
        impl<M: Mapped> AsyncWrite for $half<M> {
            fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
                self.get_mut().poll_write(cx, bytes).map_err(io::Error::from)
            }

            fn poll_write_vectored(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                slices: &[io::IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                self.get_mut().poll_write_vectored(cx, slices).map_err(io::Error::from)
            }

            /// The next poll of the stack sends what was written, so there is nothing to flush.
            fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(Ok(()))
            }

            fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.get_mut().shutdown();
                Poll::Ready(Ok(()))
            }
        }
    };
}

read!(TcpStream);
read!(ReadHalf);
write!(TcpStream);
write!(WriteHalf);
