use netmem_packet::{Packet, XdpFrame};
use netmem_pool::PeerShared;

fn of_a_frame(frame: &mut XdpFrame<PeerShared>) {
    frame.data();
    frame.data_mut();
}

fn of_a_packet(packet: &Packet<PeerShared>) -> &[u8] {
    packet.head()
}

fn of_a_fragment(packet: &Packet<PeerShared>) -> u8 {
    packet.frags()[0][0]
}

fn main() {}
