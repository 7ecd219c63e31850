//! The head of a request (RFC 9112), read so that no other reader of the same bytes can find
//! another end of it.
//!
//! A proxy in front of the server may read a head in another way than the server does. If they
//! disagree about where the request ends, a client can hide a request in another one (request
//! smuggling). So what RFC 9112 lets a recipient repair is refused here. `httparse` refuses invalid
//! names, spaces before a colon, and folded lines. It accepts a bare LF as the end of a line, and
//! knows nothing of the fields: both are checked here.

use httparse::{EMPTY_HEADER, Error};

/// The most fields of a head.
const MAX_FIELDS: usize = 64;

pub(super) const BAD: &str = "400 Bad Request";
const TOO_LARGE: &str = "413 Content Too Large";
pub(super) const HEAD_TOO_LARGE: &str = "431 Request Header Fields Too Large";
const UNKNOWN_CODING: &str = "501 Not Implemented";
const UNKNOWN_VERSION: &str = "505 HTTP Version Not Supported";

/// A request without a body.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request<'a> {
    pub(super) method: &'a str,
    pub(super) target: &'a str,
    /// The connection ends after the answer.
    pub(super) close: bool,
}

/// The length of the first head in `bytes`, with the empty lines before it. `None` if its end is
/// not there.
///
/// # Errors
///
/// The status of the answer: there is a CR without LF, or LF without CR (section 2.2).
pub(super) fn head_len(bytes: &[u8]) -> Result<Option<usize>, &'static str> {
    let (mut at, mut has_text) = (0, false);
    while let Some(n) = bytes[at..].iter().position(|byte| matches!(byte, b'\r' | b'\n')) {
        match &bytes[at + n..] {
            [b'\r', b'\n', ..] => {}
            [b'\r'] => return Ok(None),
            _ => return Err(BAD),
        }
        at += n + 2;
        if n == 0 && has_text {
            return Ok(Some(at));
        }
        has_text |= n > 0;
    }
    Ok(None)
}

impl<'a> Request<'a> {
    /// Reads a head, whose length is that of [`head_len`].
    ///
    /// # Errors
    ///
    /// The status of the answer. The connection must be closed after it, because the end of the
    /// request is not known.
    pub(super) fn parse(head: &'a [u8]) -> Result<Self, &'static str> {
        let mut fields = [EMPTY_HEADER; MAX_FIELDS];
        let mut request = httparse::Request::new(&mut fields);
        match request.parse(head) {
            Ok(status) if status.is_complete() => {}
            Err(Error::Version) => return Err(UNKNOWN_VERSION),
            Err(Error::TooManyHeaders) => return Err(HEAD_TOO_LARGE),
            _ => return Err(BAD),
        }
        let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version) else {
            return Err(BAD);
        };
        let mut framing = Framing { close: minor == 0, ..Framing::default() };
        request.headers.iter().try_for_each(|field| framing.field(field.name, field.value))?;
        framing.check(minor)?;
        Ok(Self { method, target, close: framing.close })
    }
}

/// What the fields determine about the end of the request and of the connection.
#[derive(Debug, Default)]
struct Framing<'a> {
    close: bool,
    hosts: usize,
    length: Option<&'a [u8]>,
    coding: Option<&'a [u8]>,
}

impl<'a> Framing<'a> {
    fn field(&mut self, name: &str, value: &'a [u8]) -> Result<(), &'static str> {
        if name.eq_ignore_ascii_case("content-length") {
            // A list of numbers, even of equal ones, may be refused (RFC 9112, section 6.3).
            let is_number = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
            if !is_number || self.length.replace(value).is_some() {
                return Err(BAD);
            }
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            if self.coding.replace(value).is_some() {
                return Err(BAD);
            }
        } else if name.eq_ignore_ascii_case("connection") {
            let mut options = value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
            self.close |= options.any(|option| option.eq_ignore_ascii_case(b"close"));
        } else if name.eq_ignore_ascii_case("host") {
            self.hosts += 1;
            if !value.iter().all(is_host) {
                return Err(BAD);
            }
        }
        Ok(())
    }

    fn check(&self, minor: u8) -> Result<(), &'static str> {
        // Section 3.2: exactly one Host, which HTTP/1.0 does not have.
        if self.hosts > 1 || (self.hosts == 0 && minor > 0) {
            return Err(BAD);
        }
        match (self.coding, self.length) {
            // Section 6.1: the framing is faulty with a length together with the coding, and in
            // HTTP/1.0.
            (Some(_), Some(_)) => Err(BAD),
            (Some(_), None) if minor == 0 => Err(BAD),
            (Some(coding), None) if coding.eq_ignore_ascii_case(b"chunked") => Err(TOO_LARGE),
            (Some(_), None) => Err(UNKNOWN_CODING),
            (None, Some(length)) if length.iter().any(|&digit| digit != b'0') => Err(TOO_LARGE),
            (None, _) => Ok(()),
        }
    }
}

/// Whether a byte can be in a host and port (RFC 3986, section 3.2).
fn is_host(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=:[]".contains(byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(fields: &str) -> &'static str {
        let head = format!("GET /7 HTTP/1.1\r\n{fields}\r\n");
        match head_len(head.as_bytes()) {
            Ok(Some(len)) => Request::parse(&head.as_bytes()[..len]).map_or_else(|status| &status[..3], |_| "200"),
            Ok(None) => "none",
            Err(status) => &status[..3],
        }
    }

    #[test]
    fn the_end_of_a_head() {
        for (bytes, expected) in [
            ("", Ok(None)),
            ("GET /", Ok(None)),
            ("GET / HTTP/1.1\r\n\r", Ok(None)),
            ("GET / HTTP/1.1\r\n\r\nGET", Ok(Some(18))),
            ("\r\n\r\nGET / HTTP/1.1\r\nA: b\r\n\r\n", Ok(Some(28))),
            ("\r\n\r\n", Ok(None)),
            ("GET / HTTP/1.1\n", Err(BAD)),
            ("\nGET / HTTP/1.1\r\n\r\n", Err(BAD)),
            ("GET / HTTP/1.1\r\rA", Err(BAD)),
            ("GET / HTTP/1.1\r\nA: b\n\r\n", Err(BAD)),
            ("GET / HTTP/1.1\r\nA: b\rc\r\n\r\n", Err(BAD)),
        ] {
            assert_eq!(head_len(bytes.as_bytes()), expected, "{bytes:?}");
        }
    }

    /// Each of these hides a length from another reader, or may do so.
    #[test]
    fn ambiguous_fields_are_refused() {
        for (fields, expected) in [
            ("Host: a\r\nContent-Length : 18\r\n", "400"),
            ("Host: a\r\nContent-Length\t: 18\r\n", "400"),
            ("Host: a\r\nX: a\r\n Content-Length: 18\r\n", "400"),
            ("Host: a\r\nX: a\r\n\tb\r\n", "400"),
            ("Host: a\r\nContent-Length:\r\n 18\r\n", "400"),
            (" Host: a\r\n", "400"),
            ("Host: a\r\nContent\0-Length: 18\r\n", "400"),
            ("Host: a\r\n: 18\r\n", "400"),
            ("Host: a\r\nno colon\r\n", "400"),
            ("Host: a\r\nX: a\0b\r\n", "400"),
            ("Host: a\r\nContent-Length: +0\r\n", "400"),
            ("Host: a\r\nContent-Length: -1\r\n", "400"),
            ("Host: a\r\nContent-Length: 0x0\r\n", "400"),
            ("Host: a\r\nContent-Length:\r\n", "400"),
            ("Host: a\r\nContent-Length: 0, 0\r\n", "400"),
            ("Host: a\r\nContent-Length: 0\r\nContent-Length: 0\r\n", "400"),
            ("Host: a\r\nContent-Length: 0\r\ncontent-length: 5\r\n", "400"),
            ("Host: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n", "400"),
            ("Host: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "400"),
            ("", "400"),
            ("Host: a\r\nHost: a\r\n", "400"),
            ("Host: a b\r\n", "400"),
            ("Host: a/b\r\n", "400"),
            ("Host: a\r\nContent-Length: 5\r\n", "413"),
            ("Host: a\r\nContent-Length: 99999999999999999999999\r\n", "413"),
            ("Host: a\r\nTransfer-Encoding: Chunked\r\n", "413"),
            ("Host: a\r\nTransfer-Encoding: gzip, chunked\r\n", "501"),
            ("Host: a\r\nTransfer-Encoding: xchunked\r\n", "501"),
            ("Host: a\r\nContent-Length: 00\r\n", "200"),
            ("Host:\r\n", "200"),
            ("Host: [fd00::1]:80\r\nX:\t a \t\r\n", "200"),
        ] {
            assert_eq!(status(fields), expected, "{fields:?}");
        }
        let many: String = (0..MAX_FIELDS).map(|n| format!("X{n}: a\r\n")).collect();
        assert_eq!(status(&format!("Host: a\r\n{many}")), "431");
        assert_eq!(Request::parse(b"GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), Err(BAD));
    }

    #[test]
    fn the_connection_option() {
        for (version, options, close) in [
            ("1.1", "keep-alive", false),
            ("1.1", "Close", true),
            ("1.1", "te , close", true),
            ("1.1", "closed", false),
            ("1.0", "keep-alive", true),
        ] {
            let head = format!("HEAD /a%20b HTTP/{version}\r\nHost: a\r\nConnection: {options}\r\n\r\n");
            let request = Request::parse(head.as_bytes()).unwrap();
            assert_eq!(request, Request { method: "HEAD", target: "/a%20b", close }, "{head}");
        }
    }
}
