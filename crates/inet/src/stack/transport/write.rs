//! Bytes that a user writes: they are copied into pages of the stack's pool, within the
//! connection's share.
//!
//! Why a share: a peer that does not read keeps what was written for it
//! ([`pages`](crate::stack::pages)).

use crate::stack::error::SocketError;
use crate::stack::payload::Payload;
use crate::stack::resources::Resources;
use crate::stack::transport::connections::Connections;
use crate::stack::transport::handles::ConnectionId;
use std::mem;

/// Copies bytes into pages and sends them, as many as there is room for. Returns how many. If it is
/// none, and the connection has not ended, its user is woken when that changes.
///
/// Writes that follow each other go into the same page, until all bytes in it are acknowledged.
pub(crate) fn write<P: Payload>(
    connections: &mut Connections<P>,
    resources: &mut Resources<P>,
    id: ConnectionId,
    bytes: &[u8],
) -> Result<usize, SocketError> {
    let entry = connections.get_mut(id).ok_or(SocketError::StackGone)?;
    entry.connection.can_send()?;
    let mut written = 0;
    while written < bytes.len() {
        let room = entry.connection.room();
        if room == 0 {
            break;
        }
        if entry.written.page.is_none() {
            let admitted = resources.pages.admits(entry.written.held());
            entry.written.page = if admitted { resources.egress.page() } else { None };
            resources.pages.count(usize::from(entry.written.page.is_some()));
        }
        let Some(page) = &mut entry.written.page else {
            wait_for_page(connections, resources, id);
            break;
        };
        let n = page.len().min(bytes.len() - written).min(room);
        let copied = page.copy_from(0, &bytes[written..written + n]);
        debug_assert!(copied.is_ok());
        let chunk = page.split_to(n).freeze();
        let is_full = page.len() == 0;
        if let Err(refusal) = entry.connection.send(P::from_host(chunk), false) {
            return if written > 0 { Ok(written) } else { Err(refusal.why.into()) };
        }
        if is_full {
            entry.written.handle_full(entry.connection.send_end());
        }
        written += n;
    }
    Ok(written)
}

/// Whether a byte that is written now would find a page. If not, the user is woken when one is
/// free.
pub(crate) fn can_write<P: Payload>(
    connections: &mut Connections<P>,
    resources: &mut Resources<P>,
    id: ConnectionId,
) -> bool {
    let Some(entry) = connections.get_mut(id) else { return true };
    // Headers, and payload that users allocate from the pool, can have all pages that the shares
    // admit. The page is not kept: a user that never writes would hold it.
    let is_found = entry.written.has_open_page() || resources.egress.has_page();
    let can = is_found && entry.written.has_page(&resources.pages);
    if !can {
        wait_for_page(connections, resources, id);
    }
    can
}

/// A connection found no page. If its own share is used up, it waits until its peer acknowledges
/// some of its pages, and not in the queue for those that others release.
fn wait_for_page<P: Payload>(connections: &mut Connections<P>, resources: &mut Resources<P>, id: ConnectionId) {
    let Some(entry) = connections.get_mut(id) else { return };
    if resources.pages.limits(entry.written.held()) || mem::replace(&mut entry.awaits_page, true) {
        return;
    }
    if resources.pages.wait(id) > 2 * connections.len() {
        resources.pages.forget(|id| connections.see(id).is_none());
    }
    resources.await_page();
}
