//! A memory cache that speaks memcached's text protocol. Values are in pages that the device can
//! read, so a GET sends them without a copy.

mod answers;
mod commands;
mod pages;
mod protocol;
mod store;
#[cfg(test)]
mod tests;

use super::client::{Awaited, Client, End};
use super::service::Service;
use answers::{Answers, Output};
use netmem::pool::{Frag, SharedPool};
use netmem_inet::{Fragment, Time};
use netmem_measure::endpoint::Mem;
use pages::Pages;
use protocol::{Context, Outcome, Session};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use store::Store;

pub(super) use pages::Sizes;

/// The most bytes of all items, unless the user chooses: keys, values, and a fixed number of bytes
/// for each item.
pub(super) const LIMIT: usize = 64 << 20;
/// For so long, a value waits until the stacks have answered a round of [`super::pressure`].
const ROUND: Duration = Duration::from_millis(1);
/// For so long, a value waits for pages that connections keep. After that, items are evicted for as
/// long: the connections that keep pages have not stopped then, and are just too many.
const LONGEST: Duration = Duration::from_secs(2);

/// The service: one store for the connections of all queues.
pub(super) struct Memcached {
    store: Mutex<Store<Pages<Mem>>>,
    /// Until this time, in microseconds, items are evicted for values that have no page.
    evict_until: AtomicU64,
}

impl Memcached {
    pub(super) fn new(pool: &Arc<SharedPool<Mem>>, sizes: Sizes) -> Self {
        let pages = Pages::new(Arc::clone(pool));
        let store = Mutex::new(Store::new(pages, sizes.limit, sizes.store));
        Self { store, evict_until: AtomicU64::new(0) }
    }

    fn store(&self) -> MutexGuard<'_, Store<Pages<Mem>>> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn talk(&self, client: &mut Client, session: &mut Session<Frag<Mem>>) -> Result<(), End> {
        let mut answers = Answers::default();
        let mut place = [Fragment::default()];
        let (mut outcome, mut may_evict) = (Outcome::Done, false);
        loop {
            send(client, &mut answers, outcome == Outcome::AnswersFull).await?;
            if session.is_over() {
                break;
            }
            if client.leaves() {
                return Err(End::Leaves);
            }
            if outcome == Outcome::OutOfPages {
                may_evict = self.wait_for_page(client).await?;
            }
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
            may_evict = false;
        }
        // Until the peer has acknowledged the answers, they keep pages, for which the connection is
        // responsible.
        client.deliver().await?;
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

    /// Waits until the pool has a page. Returns true if items must be evicted for it.
    async fn wait_for_page(&self, client: &mut Client) -> Result<bool, End> {
        let begin = client.now();
        if begin.micros() < self.evict_until.load(Ordering::Relaxed) {
            return Ok(true);
        }
        loop {
            let round = client.pressure().ask();
            while !client.pressure().is_answered(round) {
                client.pause(ROUND).await?;
            }
            if self.store().memory.has_some() {
                return Ok(false);
            }
            let waited = client.now().since(begin);
            if !client.pressure().were_kept(round) || waited >= LONGEST {
                let until: Time = client.now() + LONGEST;
                self.evict_until.store(until.micros(), Ordering::Relaxed);
                return Ok(true);
            }
        }
    }
}

fn awaited<P: Clone>(session: &Session<P>) -> Awaited {
    if session.has_value() {
        Awaited::Value
    } else if session.has_begun() {
        Awaited::Rest
    } else {
        Awaited::Request
    }
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

/// Sends all answers. Text is copied, values are not. `follow`: other answers follow at
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
