//! The delivery of a frame of host memory: the XDP program returns a verdict, and the handler
//! receives the frame.

use super::buffers::{Buffers, FrameSink, ReceivedFrame};
use super::stats::RxStats;
use netmem_packet::{Handler, Meta, RxGroup, Verdict, XdpFrame};
use netmem_pool::{Napi, Page, PagePool, PeerMemory};

/// A handler as the sink of a queue.
pub(super) struct HandlerSink<'h, H>(pub(super) &'h mut H);

impl<M: PeerMemory, H: Handler<M>, B> FrameSink<B> for HandlerSink<'_, H>
where
    B: Buffers<Mem = M, Frame = XdpFrame<M>, Pools = PagePool<M>>,
{
    #[inline(always)]
    fn deliver(&mut self, stats: &mut RxStats, napi: &mut Napi<'_, M>, frame: XdpFrame<M>) -> Option<Page<M>> {
        deliver(stats, napi, frame, self.0)
    }

    /// Not inlined, so that there is one copy of the handler's code for all formats of rings.
    #[inline(never)]
    fn deliver_group(&mut self, group: &mut RxGroup<'_, M>) {
        self.0.run_batch(group);
    }

    #[inline(always)]
    fn flush(&mut self) {
        self.0.flush();
    }
}

impl<M: PeerMemory> ReceivedFrame for XdpFrame<M> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn is_multi_buffer(&self) -> bool {
        self.is_multi_buffer()
    }

    #[inline(always)]
    fn meta(&mut self) -> &mut Meta {
        &mut self.meta
    }
}

/// Runs the program on a frame and does what it decides. Returns the head's page if the frame was
/// dropped. Not inlined, as above: a frame that is delivered alone can pay for a call.
#[inline(never)]
fn deliver<M: PeerMemory, H: Handler<M>>(
    stats: &mut RxStats,
    napi: &mut Napi<'_, M>,
    mut frame: XdpFrame<M>,
    handler: &mut H,
) -> Option<Page<M>> {
    if H::LINEAR && frame.linearise(napi).is_err() {
        stats.not_linear += 1;
        return Some(frame.into_page());
    }
    stats.frames += 1;
    stats.bytes += frame.len() as u64;
    // The verdicts are compared one by one, those whose speed matters most first. A `match` with
    // five arms would become a jump table, whose target the processor may predict wrongly.
    let verdict = handler.run(&mut frame);
    if verdict == Verdict::Pass {
        stats.passed += 1;
        handler.pass(frame.into_packet());
        return None;
    }
    if verdict == Verdict::Drop {
        stats.dropped += 1;
        return Some(frame.into_page());
    }
    if verdict == Verdict::Tx {
        stats.transmitted += 1;
        handler.tx(frame.into_packet());
        return None;
    }
    if verdict == Verdict::Redirect {
        stats.redirected += 1;
        redirect(handler, frame);
        return None;
    }
    stats.aborted += 1;
    Some(frame.into_page())
}

/// Not inlined, because it is rare.
#[inline(never)]
fn redirect<M: PeerMemory, H: Handler<M>>(handler: &mut H, frame: XdpFrame<M>) {
    handler.redirect(frame.into_packet());
}
