//! A memory cache that speaks memcached's text protocol. Values are in pages that the device can
//! read, so a GET sends them without a copy.

mod answers;
mod commands;
mod pages;
mod protocol;
mod store;
#[cfg(test)]
mod tests;

use super::Service;
use super::client::{Awaited, Client, End};
use crate::host::Mem;
use answers::{Answers, Output};
use netmem::Frag;
use netmem::pool::SharedPool;
use netmem_inet::Fragment;
use pages::Pages;
use protocol::{Context, Outcome, Session};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use store::Store;

/// The most bytes of all items: keys, values, and a fixed number of bytes for each item.
const LIMIT: usize = 64 << 20;
/// Pages for values. A page with several values is free only when the last of them is gone. So there are more pages
/// than the values need.
pub(super) const PAGES: usize = LIMIT / 4096 * 3 / 2;

/// The service: one store for the connections of all queues.
pub(super) struct Memcached(Mutex<Store<Pages<Mem>>>);

impl Memcached {
    pub(super) fn new(pool: &Arc<SharedPool<Mem>>) -> Self {
        Self(Mutex::new(Store::new(Pages::new(Arc::clone(pool)), LIMIT)))
    }

    fn store(&self) -> MutexGuard<'_, Store<Pages<Mem>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn talk(&self, client: &mut Client, session: &mut Session<Frag<Mem>>) -> Result<(), End> {
        let mut answers = Answers::default();
        let mut place = [Fragment::default()];
        let mut outcome = Outcome::Done;
        loop {
            send(client, &mut answers, outcome == Outcome::AnswersFull).await?;
            if session.is_over() {
                break;
            }
            if client.leaves() {
                return Err(End::Leaves);
            }
            // Items are evicted for values that have no memory.
            let may_evict = outcome == Outcome::OutOfPages;
            let done = session.done();
            if session.has_work() {
                let mut rest = std::mem::take(&mut session.rest);
                let taken;
                (taken, outcome) = self.feed(session, &rest, may_evict, &mut answers);
                rest.drain(..taken);
                session.rest = rest;
            } else {
                if client.receive(&mut place, awaited(session)).await? == 0 {
                    break;
                }
                let [fragment] = std::mem::take(&mut place);
                let taken;
                (taken, outcome) = self.feed(session, &fragment, may_evict, &mut answers);
                // The page is returned to its pool before answers or values wait for room.
                session.rest = fragment[taken..].to_vec();
            }
            if session.done() != done {
                client.request_ends();
            }
        }
        client.finish().await
    }

    fn feed(
        &self,
        session: &mut Session<Frag<Mem>>,
        bytes: &[u8],
        may_evict: bool,
        answers: &mut Answers<Frag<Mem>>,
    ) -> (usize, Outcome) {
        session.feed(bytes, &mut Context { store: &mut self.store(), now: now(), may_evict, answers })
    }
}

fn awaited<P: Clone>(session: &Session<P>) -> Awaited {
    if session.has_begun() { Awaited::Rest } else { Awaited::Request }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Service for Memcached {
    const PORT: u16 = 11211;

    /// A session, with the bytes of a value that was received in part. Items are not saved, because
    /// this is a cache.
    type State = Option<Session<Vec<u8>>>;

    async fn serve(&self, client: &mut Client, state: &mut Self::State) -> Result<(), End> {
        let mut session = state.take().map(|saved| saved.restore(&mut self.store())).unwrap_or_default();
        let ended = self.talk(client, &mut session).await;
        if let Err(End::Leaves) = ended {
            *state = Some(session.save::<Pages<Mem>>());
        }
        ended
    }

    fn report(&self) -> String {
        let store = self.store();
        let store::Counts { gets, hits, sets, evictions, .. } = store.counts;
        format!("memcached: {gets} gets, {hits} hits, {sets} sets, {evictions} evictions, {} items\n", store.len())
    }
}

/// Sends all answers. Text is copied, values are not. `follow` says that other answers follow at
/// once.
async fn send(client: &mut Client, answers: &mut Answers<Frag<Mem>>, follow: bool) -> Result<(), End> {
    while let Some((output, more)) = answers.next() {
        match output {
            Output::Text(text) => client.write(&text).await?,
            Output::Part(part) => client.send(part, more || follow).await?,
        }
    }
    Ok(())
}
