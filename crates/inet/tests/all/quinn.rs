//! quinn over the stack's UDP, at both ends, while frames are lost.

use crate::common::{Link, addr};
use crate::remote::{block_on, bytes};
use netmem_inet::stack::remote::UdpSocket;
use netmem_inet::{StackOptions, Time};
use netmem_pool::Private;
use quinn::{
    ClientConfig, Connection, Endpoint, EndpointConfig, MtuDiscoveryConfig, PathStats, ServerConfig, TokioRuntime,
    TransportConfig, VarInt,
};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::PrivateKeyDer;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

const NAME: &str = "netmem.example";
const BYTES: usize = 3_000_000;
/// Bytes of the longest datagram that quinn tries: more than an MTU of 1500 bytes admits.
const LONGEST: u16 = 2000;
/// quinn's search ends when a step has fewer bytes: what it finds is less than two steps too short.
const STEP: u16 = 10;
/// The shortest result of a search.
const SHORTEST: u16 = 1472 - 2 * STEP;
/// After so many further transfers, the search has not found what it should.
const FURTHER: u32 = 200;

fn endpoint(socket: UdpSocket<Private>, server: Option<ServerConfig>) -> Endpoint {
    let (mut config, runtime) = (EndpointConfig::default(), Arc::new(TokioRuntime));
    config.max_udp_payload_size(LONGEST).unwrap();
    Endpoint::new_with_abstract_socket(config, server, Arc::new(socket), runtime).unwrap()
}

/// Sends bytes to the server on a stream, and gets them back.
async fn there_and_back(connection: &Connection, sent: &[u8]) -> Vec<u8> {
    let (mut send, mut receive) = connection.open_bi().await.unwrap();
    send.write_all(sent).await.unwrap();
    send.finish().unwrap();
    receive.read_to_end(BYTES).await.unwrap()
}

/// Sends bytes to a server and gets them back, and more until the search for the longest datagram
/// has ended if `searches`. Returns the bytes, and what the client knows of the path.
async fn echo(
    client: UdpSocket<Private>,
    server: UdpSocket<Private>,
    sent: &[u8],
    searches: bool,
) -> (Vec<u8>, PathStats) {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed([NAME.to_owned()]).unwrap();
    let certificate = cert.der().clone();
    let key = PrivateKeyDer::Pkcs8(signing_key.serialize_der().into());
    let server = endpoint(server, Some(ServerConfig::with_single_cert(vec![certificate.clone()], key).unwrap()));
    let serving = tokio::spawn(async move {
        let connection = server.accept().await.unwrap().await.unwrap();
        while let Ok((mut send, mut receive)) = connection.accept_bi().await {
            let all = receive.read_to_end(BYTES).await.unwrap();
            send.write_all(&all).await.unwrap();
            send.finish().unwrap();
        }
        server.wait_idle().await;
    });
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate).unwrap();
    let mut config = ClientConfig::with_root_certificates(Arc::new(roots)).unwrap();
    let (mut transport, mut search) = (TransportConfig::default(), MtuDiscoveryConfig::default());
    search.upper_bound(LONGEST).minimum_change(STEP);
    transport.mtu_discovery_config(Some(search));
    config.transport_config(Arc::new(transport));
    let client = endpoint(client, None);
    let connection = client.connect_with(config, addr("10.0.0.2:443"), NAME).unwrap().await.unwrap();
    let back = there_and_back(&connection, sent).await;
    // On a busy machine the bytes may be back before the search has ended.
    let mut further = 0..if searches { FURTHER } else { 0 };
    while connection.stats().path.current_mtu < SHORTEST && further.next().is_some() {
        there_and_back(&connection, &sent[..BYTES / 100]).await;
    }
    let path = connection.stats().path;
    connection.close(VarInt::from_u32(0), b"");
    client.wait_idle().await;
    serving.await.unwrap();
    (back, path)
}

/// Runs an echo over a link that loses one in `loses` frames. quinn's tasks are on threads of a
/// runtime, and the stacks on this one. Returns how many frames were lost, and the path.
fn over_a_link(cuts: bool, loses: Option<u64>) -> (u64, PathStats) {
    let mut link = Link::with(cuts, StackOptions { pages: 2048, ..StackOptions::default() });
    let lost = Rc::new(Cell::new(0_u64));
    for stack in [&mut link.near, &mut link.far] {
        let (lost, mut frames) = (lost.clone(), 0);
        stack.queues().1.loses = Box::new(move |_| {
            frames += 1;
            let is_lost = loses.is_some_and(|loses| frames % loses == 0);
            lost.set(lost.get() + u64::from(is_lost));
            is_lost
        });
    }
    let near = link.near.remote().bind(addr("10.0.0.1:0"));
    let far = link.far.remote().bind(addr("10.0.0.2:443"));
    link.settle();
    let (ends, ended) = mpsc::channel();
    let quinn = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        block_on(|cx| far.poll_bound(cx)).unwrap();
        let outcome = runtime.block_on(echo(near, far, &bytes(BYTES), loses.is_none()));
        ends.send(()).unwrap();
        outcome
    });
    let beginning = Instant::now();
    // The channel is closed if quinn's thread fails.
    while ended.try_recv() == Err(mpsc::TryRecvError::Empty) {
        link.now = link.now.max(Time::ZERO + beginning.elapsed());
        if link.near.poll(link.now) + link.far.poll(link.now) == 0 {
            thread::yield_now();
        }
    }
    let (back, path) = quinn.join().unwrap();
    assert!(back == bytes(BYTES), "{} bytes came back", back.len());
    (lost.get(), path)
}

/// With a device that cuts frames, and with one that does not. quinn searches for the longest
/// datagram that arrives, up to one that is longer than the MTU admits: 1500 bytes without the
/// headers of IPv4 and UDP are 1472. A socket that sends longer ones in fragments, or drops those
/// that fit, fails.
#[test]
fn what_is_sent_comes_back() {
    for cuts in [false, true] {
        let path = over_a_link(cuts, None).1;
        assert!((SHORTEST..=1472).contains(&path.current_mtu), "{path:?}");
    }
}

/// What is lost is sent again.
#[test]
fn what_is_lost_is_sent_again() {
    for cuts in [false, true] {
        let (lost, path) = over_a_link(cuts, Some(50));
        assert!(lost > 0 && path.lost_packets > 0, "{lost} frames were lost, and {} packets missed", path.lost_packets);
    }
}
