//! A memory cache that speaks memcached's text protocol. Values are in pages that the device reaches: a GET sends them without a copy.

mod protocol;
mod store;

use super::{Service, Shared};
use crate::host::tasks::{Conn, Task, receive, send, write};
use crate::host::{Mem, Running};
use netmem::pool::SharedPool;
use netmem::{Frag, Page};
use netmem_inet::{Fragment, SocketError};
use protocol::{Answers, Output, Session};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use store::{Memory, Store};

/// Bytes of keys and values, and what each item takes beside them.
const LIMIT: usize = 64 << 20;
/// Pages for values. A page is free again when its last value is gone, so there are more than the values need.
pub(super) const PAGES: usize = LIMIT / 4096 * 3 / 2;
/// Answers that wait to be sent before no more commands are taken from the connection.
const WAITING: usize = 256;

/// Values in pages: many small ones to a page.
struct Pages {
    pool: Arc<SharedPool<Mem>>,
    open: Option<Page<Mem>>,
}

impl Memory for Pages {
    type Part = Frag<Mem>;

    fn append(&mut self, mut bytes: &[u8], value: &mut Vec<Frag<Mem>>) -> bool {
        while !bytes.is_empty() {
            let Some(mut page) = self.open.take().or_else(|| self.pool.alloc()) else { return false };
            let n = bytes.len().min(page.len());
            page.as_mut_slice()[..n].copy_from_slice(&bytes[..n]);
            if n < page.len() {
                value.push(page.split_to(n).freeze());
                self.open = Some(page);
            } else {
                value.push(page.freeze());
            }
            bytes = &bytes[n..];
        }
        true
    }

    fn bytes(part: &Frag<Mem>) -> &[u8] {
        part
    }
}

/// The service: one store for all connections.
pub(super) struct Memcached(Rc<RefCell<Store<Pages>>>);

impl Memcached {
    pub(super) fn new(running: &mut Running) -> anyhow::Result<Self> {
        let pool = Arc::clone(&running.pool);
        Ok(Self(Rc::new(RefCell::new(Store::new(Pages { pool, open: None }, LIMIT)))))
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Service for Memcached {
    const PORT: u16 = 11211;

    fn serve(&self, mut stream: Conn, counts: Shared) -> Task<'static> {
        let store = Rc::clone(&self.0);
        Box::pin(async move {
            let (mut session, mut answers) = (Session::default(), Answers::default());
            let mut fragments: [Fragment<Mem>; 16] = Default::default();
            loop {
                let n = receive(&mut stream, &mut fragments).await?;
                if n == 0 {
                    stream.shutdown();
                    return Ok(());
                }
                for place in &mut fragments[..n] {
                    let fragment = std::mem::take(place);
                    counts.borrow_mut().received += fragment.len() as u64;
                    session.feed(&fragment, &mut store.borrow_mut(), now(), &mut answers);
                    // The page goes home before the answers wait for room.
                    drop(fragment);
                    if answers.0.len() >= WAITING {
                        answer(&mut stream, &mut answers, &counts).await?;
                    }
                }
                answer(&mut stream, &mut answers, &counts).await?;
                if session.is_over() {
                    stream.shutdown();
                    return Ok(());
                }
            }
        })
    }

    fn report(&self) -> String {
        let store = self.0.borrow();
        let store::Counts { gets, hits, sets, evictions, .. } = store.counts;
        format!("memcached: {gets} gets, {hits} hits, {sets} sets, {evictions} evictions, {} items\n", store.len())
    }
}

/// Sends all answers: text by a copy, values as they are.
async fn answer(stream: &mut Conn, answers: &mut Answers<Frag<Mem>>, counts: &Shared) -> Result<(), SocketError> {
    while let Some(output) = answers.0.pop_front() {
        let more = !answers.0.is_empty();
        let len = match output {
            Output::Text(text) => {
                write(stream, &text).await?;
                text.len()
            }
            Output::Part(part) => {
                let len = part.len();
                send(stream, part, more).await?;
                len
            }
        };
        counts.borrow_mut().sent += len as u64;
    }
    Ok(())
}
