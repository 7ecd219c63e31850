//! The example `quic_quinn`: a file goes to quinn on netmem's UDP and comes back, and the other end
//! is quinn on a socket of the kernel.

use crate::hosts::{Example, OURS, build, interfaces, kernel_side};
use netmem_testing::namespace::{in_a_network, in_namespace, in_peer_namespace};
use std::path::{Path, PathBuf};
use std::process::Command;

const SERVER: &str = "198.18.11.2";
/// Bytes of the file.
const FILE: u64 = 10_000_000;

fn program() -> PathBuf {
    build(&["quic_quinn"]).join("debug/examples/quic_quinn")
}

#[track_caller]
fn prints(command: &mut Command, expected: &str) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}\n{text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(expected), "{text}");
}

/// Makes a file of bytes that do not repeat.
fn file(path: &Path) {
    let bytes: Vec<u8> = (0..FILE).map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_file_goes_to_quinn_behind_a_tap_and_back() {
    let program = program();
    in_a_network(|| prints(&mut Command::new(program), "sent 20000000 bytes, and the file that came back is equal"));
}

/// Over AF_XDP, with a stack for each of two queues: datagrams that arrive at the queue whose stack
/// has no socket are handed over. The server ends in order.
#[test]
fn a_file_goes_to_quinn_over_af_xdp_and_back() {
    let program = program();
    in_namespace(|| {
        interfaces();
        let folder = tempfile::tempdir().unwrap();
        let (certificate, path) = (folder.path().join("certificate"), folder.path().join("file"));
        file(&path);
        let words = format!("serve xsk v0 {OURS} {}", certificate.display());
        let mut server = Example::start("quic_quinn", &words, "serves QUIC on 198.18.11.2:4433");
        let stdin = server.0.stdin.take();
        let peer = in_peer_namespace("v1", move || {
            kernel_side("v1");
            let mut client = Command::new(program);
            client.args(["copy", SERVER]).args([certificate, path]);
            prints(&mut client, "sent 10000000 bytes, and the file that came back is equal");
            drop(stdin);
        });
        peer.join().unwrap();
        assert!(server.0.wait().unwrap().success());
    });
}
