use netmem_packet::{Packet, TxQueue, XdpFrame};
use netmem_pool::PeerShared;
use netmem_virtio::driver::{VirtioRx, VirtioTx};

fn sent(tx: &mut VirtioTx, packet: Packet<PeerShared>) {
    let _ = tx.send(packet);
    packet.len();
}

fn passed(mut frame: XdpFrame<PeerShared>) {
    let _packet = frame.into_packet();
    let _ = frame.write_at(0, b"late");
}

fn sent_twice(tx: &mut VirtioTx, packet: Packet<PeerShared>) {
    let _ = tx.send(packet);
    let _ = tx.send(packet);
}

fn closed(rx: VirtioRx) {
    let _ = rx.close();
    rx.stats();
}

fn main() {}
