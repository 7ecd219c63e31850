//! Bytes that a user writes: they are copied into pages of the stack's pool, within the
//! connection's share.

use crate::stack::SocketError;
use crate::stack::core::Core;
use crate::stack::payload::Payload;
use crate::stack::transport::connections::ConnectionId;
use std::mem;

impl<P: Payload> Core<P> {
    /// Copies bytes into pages and sends them, as many as there is room for. Returns how many. If
    /// it is none, and the connection goes on, its user is called when that changes.
    ///
    /// Writes that follow each other go into the same page, until all bytes in it are acknowledged.
    pub(crate) fn write(&mut self, id: ConnectionId, bytes: &[u8]) -> Result<usize, SocketError> {
        let slot = self.connections.get_mut(id).ok_or(SocketError::StackGone)?;
        slot.connection.can_send()?;
        let mut written = 0;
        while written < bytes.len() {
            let room = slot.connection.room();
            if room == 0 {
                break;
            }
            if slot.written.page.is_none() {
                slot.written.page = if self.pages.admits(slot.written.held()) { self.egress.page() } else { None };
                self.pages.count(usize::from(slot.written.page.is_some()));
            }
            let Some(page) = &mut slot.written.page else {
                self.wait_for_page(id);
                break;
            };
            let n = page.len().min(bytes.len() - written).min(room);
            let copied = page.copy_from(0, &bytes[written..written + n]);
            debug_assert!(copied.is_ok());
            let part = page.split_to(n).freeze();
            let is_full = page.len() == 0;
            if let Err(refusal) = slot.connection.send(P::from_host(part), false) {
                return if written > 0 { Ok(written) } else { Err(refusal.why.into()) };
            }
            if is_full {
                slot.written.full(slot.connection.send_end());
            }
            written += n;
        }
        Ok(written)
    }

    /// Whether a byte that is written now would find a page. If not, the user is called when one is
    /// free.
    pub(crate) fn can_write(&mut self, id: ConnectionId) -> bool {
        let Some(slot) = self.connections.get_mut(id) else { return true };
        let can = slot.written.page.is_some() || self.pages.admits(slot.written.held());
        if !can {
            self.wait_for_page(id);
        }
        can
    }

    /// A connection found no page. If its own share is used up, it waits until its peer acknowledges
    /// some of its pages, and not in the queue for those that others release.
    fn wait_for_page(&mut self, id: ConnectionId) {
        let Some(slot) = self.connections.get_mut(id) else { return };
        if self.pages.limits(slot.written.held()) || mem::replace(&mut slot.awaits_page, true) {
            return;
        }
        if self.pages.wait(id) > 2 * self.connections.len() {
            self.pages.forget(|id| self.connections.get(id).is_none());
        }
    }
}
