//! A memory cache that speaks memcached's text protocol. Values are in pages that the device can read, so a GET sends
//! them without a copy.

mod protocol;
mod store;

use super::Service;
use super::client::{Client, End};
use crate::host::Mem;
use netmem::pool::SharedPool;
use netmem::{Frag, Page};
use netmem_inet::Fragment;
use protocol::{Answers, Output, Session};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use store::{Memory, Store};

/// The most bytes of all items: keys, values, and a fixed number of bytes for each item.
const LIMIT: usize = 64 << 20;
/// Pages for values. A page with several values is free only when the last of them is gone. So there are more pages
/// than the values need.
pub(super) const PAGES: usize = LIMIT / 4096 * 3 / 2;
/// If so many answers wait to be sent, they are sent before more commands of the connection are read.
const WAITING: usize = 256;

/// The memory of values: pages, each of which has many small values.
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

/// The service: one store for the connections of all queues.
pub(super) struct Memcached(Mutex<Store<Pages>>);

impl Memcached {
    pub(super) fn new(pool: &Arc<SharedPool<Mem>>) -> Self {
        Self(Mutex::new(Store::new(Pages { pool: Arc::clone(pool), open: None }, LIMIT)))
    }

    fn store(&self) -> MutexGuard<'_, Store<Pages>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn talk(&self, client: &mut Client, session: &mut Session<Frag<Mem>>) -> Result<(), End> {
        let mut answers = Answers::default();
        let mut fragments: [Fragment<Mem>; 16] = Default::default();
        loop {
            if session.is_over() {
                client.shutdown();
                return Ok(());
            }
            let n = client.receive(&mut fragments).await?;
            if n == 0 {
                client.shutdown();
                return Ok(());
            }
            for place in &mut fragments[..n] {
                let fragment = std::mem::take(place);
                session.feed(&fragment, &mut self.store(), now(), &mut answers);
                // The page is returned to its pool before the answers wait for room.
                drop(fragment);
                if answers.0.len() >= WAITING {
                    answer(client, &mut answers).await?;
                }
            }
            answer(client, &mut answers).await?;
        }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Service for Memcached {
    const PORT: u16 = 11211;

    /// A session, with the bytes of a value that was received in part. Items are not saved, because this is a cache.
    type State = Option<Session<Vec<u8>>>;

    async fn serve(&self, client: &mut Client, state: &mut Self::State) -> Result<(), End> {
        let mut session = state.take().map(|saved| saved.restore(&mut self.store())).unwrap_or_default();
        let ended = self.talk(client, &mut session).await;
        if let Err(End::Leaves) = ended {
            *state = Some(session.save::<Pages>());
        }
        ended
    }

    fn report(&self) -> String {
        let store = self.store();
        let store::Counts { gets, hits, sets, evictions, .. } = store.counts;
        format!("memcached: {gets} gets, {hits} hits, {sets} sets, {evictions} evictions, {} items\n", store.len())
    }
}

/// Sends all answers. Text is copied, values are not.
async fn answer(client: &mut Client, answers: &mut Answers<Frag<Mem>>) -> Result<(), End> {
    while let Some(output) = answers.0.pop_front() {
        match output {
            Output::Text(text) => client.write(&text).await?,
            Output::Part(part) => client.send(part, !answers.0.is_empty()).await?,
        }
    }
    Ok(())
}
