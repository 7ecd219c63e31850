//! A small HTTP/1.1 server. It answers `GET /N` with N bytes of a pattern, without a copy, and
//! `GET /` with a line of text.
//!
//! It keeps connections open, and accepts pipelined requests. It reads no bodies: a request that
//! has a body is refused. After a request whose end is in doubt, the connection is closed
//! ([`request`]).

mod request;

use super::client::{Awaited, Client, End};
use super::plain::Pattern;
use super::service::Service;
use netmem::pool::SharedPool;
use netmem_inet::Fragment;
use netmem_inet::tcp::Config;
use netmem_measure::endpoint::Mem;
use request::{BAD, HEAD_TOO_LARGE, Request, head_len};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// The longest head of a request.
const MAX_HEAD: usize = 8192;
/// The most bytes in an answer's body.
const MAX_BODY: u64 = 1 << 40;
/// The most bytes of memory for requests that an idle connection keeps.
const KEPT: usize = 1024;
const NOT_ALLOWED: &str = "405 Method Not Allowed";
const TIMEOUT: &str = "408 Request Timeout";
const TEXT: &[u8] = b"netmem serves: GET /N has N bytes\n";

/// An answer to a request.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: &'static str,
    body: Body,
    /// Bytes of the body. The answer to a HEAD has this number in its header, and no body.
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

    /// The answer to the request with this head.
    fn to(head: &[u8]) -> Self {
        let Request { method, target, close } = match Request::parse(head) {
            Ok(request) => request,
            Err(status) => return Self::error(status, true),
        };
        let head_only = match method {
            "GET" => false,
            "HEAD" => true,
            _ => return Self::error(NOT_ALLOWED, close),
        };
        // Section 3.2.2: the absolute form, whose authority replaces the host field.
        let target = match target.strip_prefix("http://") {
            Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
            None => target,
        };
        let (body, len) = match target.strip_prefix('/') {
            Some("") => (Body::Text(TEXT), TEXT.len() as u64),
            Some(number) => match number.parse() {
                Ok(len) if len <= MAX_BODY && !number.starts_with('+') => (Body::Pattern, len),
                _ => return Self::error("404 Not Found", close),
            },
            None => return Self::error(BAD, true),
        };
        Self { status: "200 OK", body, len, head_only, close }
    }

    fn head(&self) -> String {
        let close = if self.close { "Connection: close\r\n" } else { "" };
        let allow = if self.status == NOT_ALLOWED { "Allow: GET, HEAD\r\n" } else { "" };
        format!("HTTP/1.1 {}\r\nContent-Length: {}\r\n{allow}{close}\r\n", self.status, self.len)
    }

    /// Sends the answer, except a body that is the pattern.
    async fn send(&self, client: &mut Client) -> Result<(), End> {
        client.write(self.head().as_bytes()).await?;
        match self.body {
            Body::Text(text) if !self.head_only => client.write(text).await,
            _ => Ok(()),
        }
    }

    /// Bytes of the pattern to send as the body.
    fn pattern(&self) -> u64 {
        if self.body == Body::Pattern && !self.head_only { self.len } else { 0 }
    }
}

/// A connection's state while a call waits.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Requests {
    /// Received bytes: requests that are not answered yet, the last of which may be incomplete.
    bytes: Vec<u8>,
    /// The position in the body that is being sent; `end` is the body's end.
    at: u64,
    end: u64,
    /// The connection ends after this body.
    close: bool,
}

impl Requests {
    /// The next answer, if a request is complete or is refused.
    fn answer(&mut self) -> Option<Answer> {
        let refused = |status| Some(Answer::error(status, true));
        match head_len(&self.bytes) {
            Ok(Some(len)) if len <= MAX_HEAD => {
                let answer = Answer::to(&self.bytes[..len]);
                self.bytes.drain(..len);
                Some(answer)
            }
            Ok(None) if self.bytes.len() <= MAX_HEAD => None,
            Ok(_) => refused(HEAD_TOO_LARGE),
            Err(status) => refused(status),
        }
    }

    /// What the server waits for if there is no answer.
    fn awaits(&self) -> Awaited {
        if self.bytes.is_empty() { Awaited::Request } else { Awaited::Rest }
    }
}

/// The service.
pub(super) struct Http {
    pattern: Pattern,
    answered: AtomicU64,
}

impl Http {
    pub(super) fn new(pool: &SharedPool<Mem>) -> anyhow::Result<Self> {
        Ok(Self { pattern: Pattern::new(pool)?, answered: AtomicU64::new(0) })
    }
}

impl Service for Http {
    const PORT: u16 = 80;
    type State = Requests;

    /// A request is short and answered at once, so that its answer acknowledges it. A quarter of
    /// the frames of a connection with one request were such acknowledgements.
    fn config() -> Config {
        Config { quick_acks: 0, ..Config::default() }
    }

    async fn serve(&self, client: &mut Client, state: &mut Requests) -> Result<(), End> {
        let mut place: [Fragment<Mem>; 1] = Default::default();
        loop {
            while state.at < state.end {
                if client.leaves() {
                    return Err(End::Leaves);
                }
                let part = self.pattern.part(state.at, state.end - state.at);
                let at = state.at + part.len() as u64;
                client.send(part, at < state.end).await?;
                state.at = at;
            }
            if state.close {
                return client.finish().await;
            }
            let mut answer = state.answer();
            if answer.is_none() {
                if state.bytes.is_empty() && state.bytes.capacity() > KEPT {
                    state.bytes = Vec::new();
                }
                match client.receive(&mut place, state.awaits()).await {
                    Ok(0) => {
                        client.shutdown();
                        return Ok(());
                    }
                    Ok(_) => {
                        let [fragment] = std::mem::take(&mut place);
                        state.bytes.extend_from_slice(&fragment);
                    }
                    Err(End::Late) => {
                        client.count_late();
                        answer = Some(Answer::error(TIMEOUT, true));
                    }
                    Err(end) => return Err(end),
                }
            }
            if let Some(answer) = answer {
                client.request_ends();
                answer.send(client).await?;
                self.answered.fetch_add(1, Ordering::Relaxed);
                (state.at, state.end, state.close) = (0, answer.pattern(), answer.close);
            }
        }
    }

    fn report(&self) -> String {
        format!("http: {} requests were answered\n", self.answered.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(head: &str) -> (&'static str, u64, bool) {
        let answer = Answer::to(format!("{head}\r\n\r\n").as_bytes());
        (&answer.status[..3], answer.len, answer.close)
    }

    #[test]
    fn requests_are_answered() {
        assert_eq!(status("GET / HTTP/1.1\r\nHost: a"), ("200", TEXT.len() as u64, false));
        assert_eq!(status("GET /1000 HTTP/1.1\r\nhost: a\r\nconnection: Close"), ("200", 1000, true));
        assert_eq!(status("GET /0 HTTP/1.0"), ("200", 0, true));
        assert!(Answer::to(b"HEAD /7 HTTP/1.1\r\nHost: a\r\n\r\n").head_only);
        for (line, expected) in [
            ("GET /x HTTP/1.1", "404"),
            ("GET /-1 HTTP/1.1", "404"),
            ("GET /+1 HTTP/1.1", "404"),
            ("GET http://a/7 HTTP/1.1", "200"),
            ("GET http://a HTTP/1.1", "200"),
            ("GET https://a/7 HTTP/1.1", "400"),
            ("GET /99999999999999999999 HTTP/1.1", "404"),
            ("GET 7 HTTP/1.1", "400"),
            ("GET /7", "400"),
            ("GET  /7 HTTP/1.1", "400"),
            ("GET /7 HTTP/1.1 ", "400"),
            ("GET /7 HTTP/2.0", "505"),
            ("PUT /7 HTTP/1.1", "405"),
            ("POST /7 HTTP/1.1\r\nContent-Length: 5", "413"),
            ("POST /7 HTTP/1.1\r\nTransfer-Encoding: chunked", "413"),
        ] {
            assert_eq!(status(&format!("{line}\r\nHost: a")).0, expected, "{line}");
        }
        let head = Answer::to(b"GET /12 HTTP/1.0\r\n\r\n").head();
        assert_eq!(head, "HTTP/1.1 200 OK\r\nContent-Length: 12\r\nConnection: close\r\n\r\n");
    }

    /// Bytes behind a refused request are no request. A head is answered as soon as it is complete
    /// or wrong, in whatever pieces it comes.
    #[test]
    fn nothing_follows_a_refused_request() {
        let next = "GET /5 HTTP/1.1\r\nHost: a\r\n\r\n";
        let head = "GET /3 HTTP/1.1\r\nHost: a\r\n";
        for (bytes, expected) in [
            (format!("{head}\r\n{next}"), &[("200", 3, false), ("200", 5, false)][..]),
            (format!("{head}Content-Length : 18\r\n\r\n{next}"), &[("400", 0, true)]),
            (format!("{head}X: a\nContent-Length: 31\r\n\r\n{next}"), &[("400", 0, true)]),
            (format!("{head}X: a\rY: b\r\n\r\n{next}"), &[("400", 0, true)]),
            (format!("{head}X: {}", "x".repeat(MAX_HEAD)), &[("431", 0, true)]),
        ] {
            for size in [1, 7, bytes.len()] {
                let (mut requests, mut answers) = (Requests::default(), Vec::new());
                'received: for piece in bytes.as_bytes().chunks(size) {
                    requests.bytes.extend_from_slice(piece);
                    while let Some(answer) = requests.answer() {
                        answers.push((&answer.status[..3], answer.len, answer.close));
                        if answer.close {
                            break 'received;
                        }
                    }
                    assert!(requests.bytes.len() <= MAX_HEAD);
                }
                assert_eq!(answers, expected, "{bytes:?} in pieces of {size}");
            }
        }
    }
}
