//! A small HTTP/1.1 server: `GET /N` is answered with N bytes of a pattern, from the pages in which it is; `GET /` with a line of text.
//!
//! It keeps connections open, takes requests that come before the last one is answered, and reads no bodies: a request that has one is
//! refused.

use super::plain::Pattern;
use super::{Service, Shared};
use crate::host::Running;
use crate::host::tasks::{Conn, Task, receive, send, write};
use netmem_inet::{Fragment, SocketError};

/// The longest head of a request.
const MAX_HEAD: usize = 8192;
/// Bytes that are taken behind the last request.
const MAX_REST: usize = 1 << 20;
/// The longest answer.
const MAX_BODY: u64 = 1 << 40;
const TEXT: &[u8] = b"netmem serves: GET /N has N bytes\n";

/// What a request is answered with.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: &'static str,
    body: Body,
    /// Bytes of the body, which a HEAD is told and not sent.
    len: u64,
    head_only: bool,
    close: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Body {
    Text(&'static [u8]),
    Pattern,
}

impl Answer {
    fn error(status: &'static str, close: bool) -> Self {
        Self { status, body: Body::Text(b""), len: 0, head_only: false, close }
    }

    /// The answer to a request, of which this is the head.
    fn to(head: &[u8]) -> Self {
        let bad = || Self::error("400 Bad Request", true);
        let Ok(head) = std::str::from_utf8(head) else { return bad() };
        let mut lines = head.split("\r\n");
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (Some(method), Some(path), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
        else {
            return bad();
        };
        let mut close = match version {
            "HTTP/1.1" => false,
            "HTTP/1.0" => true,
            _ => return Self::error("505 HTTP Version Not Supported", true),
        };
        for line in lines.filter(|line| !line.is_empty()) {
            let Some((name, value)) = line.split_once(':') else { return bad() };
            let value = value.trim();
            if name.eq_ignore_ascii_case("connection") {
                close |= value.eq_ignore_ascii_case("close");
            }
            let has_body = name.eq_ignore_ascii_case("content-length") && value != "0";
            if has_body || name.eq_ignore_ascii_case("transfer-encoding") {
                return Self::error("413 Content Too Large", true);
            }
        }
        let head_only = match method {
            "GET" => false,
            "HEAD" => true,
            _ => return Self::error("405 Method Not Allowed", close),
        };
        let (body, len) = match path.strip_prefix('/') {
            Some("") => (Body::Text(TEXT), TEXT.len() as u64),
            Some(number) => match number.parse() {
                Ok(len) if len <= MAX_BODY => (Body::Pattern, len),
                _ => return Self::error("404 Not Found", close),
            },
            None => return bad(),
        };
        Self { status: "200 OK", body, len, head_only, close }
    }

    fn head(&self) -> String {
        let close = if self.close { "Connection: close\r\n" } else { "" };
        format!("HTTP/1.1 {}\r\nContent-Length: {}\r\n{close}\r\n", self.status, self.len)
    }

    async fn send(&self, stream: &mut Conn, pattern: &Pattern, counts: &Shared) -> Result<(), SocketError> {
        let head = self.head();
        write(stream, head.as_bytes()).await?;
        counts.borrow_mut().sent += head.len() as u64;
        if self.head_only {
            return Ok(());
        }
        if let Body::Text(text) = self.body {
            write(stream, text).await?;
            counts.borrow_mut().sent += text.len() as u64;
            return Ok(());
        }
        let mut at = 0;
        while at < self.len {
            let part = pattern.part(at, self.len - at);
            let n = part.len() as u64;
            at += n;
            send(stream, part, at < self.len).await?;
            counts.borrow_mut().sent += n;
        }
        Ok(())
    }
}

/// Ends a connection after its last answer. What the client still sends is taken, up to a bound: with data that was not read, the end
/// would be a reset, and the client might lose the answer.
async fn finish(mut stream: Conn) -> Result<(), SocketError> {
    stream.shutdown();
    let (mut place, mut taken) = ([Fragment::default()], 0);
    while taken < MAX_REST && receive(&mut stream, &mut place).await? > 0 {
        taken += std::mem::take(&mut place[0]).len();
    }
    Ok(())
}

/// The service.
pub(super) struct Http(Pattern);

impl Http {
    pub(super) fn new(running: &mut Running) -> anyhow::Result<Self> {
        Ok(Self(Pattern::new(running)?))
    }
}

impl Service for Http {
    const PORT: u16 = 80;

    fn serve(&self, mut stream: Conn, counts: Shared) -> Task<'static> {
        let pattern = self.0.clone();
        Box::pin(async move {
            let mut requests = Vec::new();
            let mut place = [Fragment::default()];
            loop {
                if receive(&mut stream, &mut place).await? == 0 {
                    stream.shutdown();
                    return Ok(());
                }
                let [fragment] = std::mem::take(&mut place);
                counts.borrow_mut().received += fragment.len() as u64;
                requests.extend_from_slice(&fragment);
                drop(fragment);
                while let Some(end) = requests.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                    let answer = Answer::to(&requests[..end]);
                    requests.drain(..end + 4);
                    answer.send(&mut stream, &pattern, &counts).await?;
                    if answer.close {
                        return finish(stream).await;
                    }
                }
                if requests.len() > MAX_HEAD {
                    Answer::error("431 Request Header Fields Too Large", true)
                        .send(&mut stream, &pattern, &counts)
                        .await?;
                    return finish(stream).await;
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(head: &str) -> (&'static str, u64, bool) {
        let answer = Answer::to(head.as_bytes());
        (&answer.status[..3], answer.len, answer.close)
    }

    #[test]
    fn requests_are_answered() {
        assert_eq!(status("GET / HTTP/1.1\r\nHost: a"), ("200", TEXT.len() as u64, false));
        assert_eq!(status("GET /1000 HTTP/1.1\r\nhost: a\r\nconnection: Close"), ("200", 1000, true));
        assert_eq!(status("GET /0 HTTP/1.0"), ("200", 0, true));
        assert!(Answer::to(b"HEAD /7 HTTP/1.1").head_only);
        for (head, expected) in [
            ("GET /x HTTP/1.1", "404"),
            ("GET /-1 HTTP/1.1", "404"),
            ("GET /99999999999999999999 HTTP/1.1", "404"),
            ("GET 7 HTTP/1.1", "400"),
            ("GET /7", "400"),
            ("GET  /7 HTTP/1.1", "400"),
            ("", "400"),
            ("GET /7 HTTP/1.1\r\nno colon", "400"),
            ("GET /7 HTTP/2.0", "505"),
            ("PUT /7 HTTP/1.1", "405"),
            ("POST /7 HTTP/1.1\r\nContent-Length: 5", "413"),
            ("POST /7 HTTP/1.1\r\nTransfer-Encoding: chunked", "413"),
        ] {
            assert_eq!(status(head).0, expected, "{head}");
        }
        let head = Answer::to(b"GET /12 HTTP/1.0").head();
        assert_eq!(head, "HTTP/1.1 200 OK\r\nContent-Length: 12\r\nConnection: close\r\n\r\n");
    }
}
