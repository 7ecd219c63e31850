//! Open vSwitch with DPDK between two drivers. Its ports of the type `dpdkvhostuserclient` are back
//! ends that connect, so the drivers listen. Frames go through the switch in both directions, whole
//! and in order, also after either driver was closed and the switch has connected again.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use netmem_packet::{Packet, Poll, RxQueue, TxQueue};
use netmem_pool::PeerShared;
use netmem_testing::debian13::Root;
use netmem_testing::driver::*;
use netmem_testing::skip;
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{NetOptions, QueuePair, RxMode, VirtioNet};
use netmem_virtio::socket::Listener;

/// A process that ends with the test.
struct Process(Child);

impl Process {
    fn start(mut command: Command, log: &Path) -> Self {
        let log = std::fs::File::create(log).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        // SAFETY: two system calls.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                // The switch makes taps, which belong into a namespace of its own. A user who may
                // not make one may make no taps.
                libc::unshare(libc::CLONE_NEWNET);
                Ok(())
            })
        };
        Self(command.spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A switch with two ports, `p0` and `p1`, which connect to sockets of these names in `dir`.
struct Switch {
    _database: Process,
    daemon: Process,
}

impl Switch {
    fn start(root: &Root, dir: &Path) -> Self {
        let shown = dir.display();
        let command = |program: &str, args: &str| {
            let mut command = root.command(program);
            for variable in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"] {
                command.env(variable, dir);
            }
            command.args(args.split_whitespace());
            command
        };
        let run = |mut command: Command| {
            let output = command.output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        let schema = root.path("usr/share/openvswitch/vswitch.ovsschema");
        run(command("usr/bin/ovsdb-tool", &format!("create {shown}/conf.db {}", schema.display())));
        let serve = format!("--remote=punix:{shown}/db.sock {shown}/conf.db");
        let _database = Process::start(command("usr/sbin/ovsdb-server", &serve), &dir.join("database.log"));
        until(|| dir.join("db.sock").exists());

        let set = |args: &str, last: &str| {
            let mut set = command("usr/bin/ovs-vsctl", &format!("--db=unix:{shown}/db.sock --no-wait {args}"));
            set.args((!last.is_empty()).then_some(last));
            run(set);
        };
        set("init", "");
        let plugins = root.path("usr/lib/x86_64-linux-gnu/dpdk/pmds-25.0");
        let (plugins, id) = (plugins.display(), std::process::id());
        let quiet = "--no-pci --no-telemetry --no-shconf";
        let extra = format!(
            "other_config:dpdk-extra=--no-huge --legacy-mem -m 512 {quiet} --file-prefix=netmem-{id} -d {plugins}"
        );
        let cpus = "other_config:pmd-cpu-mask=2 other_config:dpdk-lcore-mask=1";
        // A pool of buffers for each port: the one for all ports would need 800 MB.
        let dpdk = "other_config:dpdk-init=true other_config:per-port-memory=true";
        set(&format!("set Open_vSwitch . {cpus} {dpdk}"), &extra);
        set("add-br br0 -- set bridge br0 datapath_type=netdev", "");
        for port in ["p0", "p1"] {
            let kind = "type=dpdkvhostuserclient";
            let path = format!("options:vhost-server-path={shown}/{port}");
            set(&format!("add-port br0 {port} -- set Interface {port} {kind} {path}"), "");
        }
        let daemon = command("usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk", &format!("unix:{shown}/db.sock"));
        Self { _database, daemon: Process::start(daemon, &dir.join("switch.log")) }
    }
}

/// A driver at a port of the switch.
struct End {
    net: VirtioNet,
    pair: QueuePair,
    accounting: Accounting,
}

impl End {
    /// Waits until the switch connects. It tries once a second.
    fn accept(listener: &Listener, mode: RxMode) -> Self {
        let backend = VhostUser::accept(listener, Duration::from_secs(60)).unwrap();
        let accounting = Accounting::default();
        let (net, mut pairs) = VirtioNet::probe(backend, accounting.count(NetOptions::new(mode))).unwrap();
        Self { net, pair: pairs.remove(0), accounting }
    }

    /// Whether there was room for it.
    fn send(&mut self, bytes: &[u8]) -> bool {
        self.pair.tx.complete();
        let mut page = self.pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap();
        page.copy_from(64, bytes).unwrap();
        let sent = self.pair.tx.send(Packet::new(page.freeze_range(64..64 + bytes.len()))).is_ok();
        self.pair.tx.flush();
        sent
    }

    /// The frames of the test that have come. The switch sends some of its own.
    fn take(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        receive(&mut self.pair.rx, &mut |p: Packet<PeerShared>| frames.push(p.to_vec()));
        frames.retain(|f| f[12..14] == TYPE);
        frames
    }

    fn close(self) {
        close_clean(self.pair);
        drop(self.net);
        self.accounting.assert_balanced();
    }
}

const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0x10], [2, 0, 0, 0, 0, 0x11]];
/// An Ethernet type for experiments.
const TYPE: [u8; 2] = [0x88, 0xb5];

/// Sends from one end to the other: a frame until one arrives, for the switch needs a moment to see
/// a new port, and then many.
fn traffic(from: &mut End, to: &mut End, macs: [[u8; 6]; 2], rng: &mut Rng) {
    let [source, destination] = macs;
    let make = |number: u64, size: usize| [&destination[..], &source, &TYPE, &frame(number, size)[14..]].concat();
    let first = make(0, 60);
    until(|| {
        from.send(&first);
        std::thread::sleep(Duration::from_millis(2));
        !to.take().is_empty()
    });
    let mut got = Vec::new();
    for batch in 0..100_u64 {
        let want: Vec<_> = (0..16).map(|i| make(1 + batch * 16 + i, 60 + rng.below(1455) as usize)).collect();
        assert!(want.iter().all(|f| from.send(f)), "the ring has room for a batch");
        until(|| {
            got.extend(to.take().into_iter().filter(|f| *f != first));
            got.len() == want.len()
        });
        assert!(got == want, "batch {batch}");
        got.clear();
    }
}

#[test]
fn open_vswitch_between_two_drivers() {
    let _alone = crate::alone();
    if !rustix::process::geteuid().is_root() {
        return skip("Open vSwitch with DPDK needs root");
    }
    if std::thread::available_parallelism().unwrap().get() < 2 {
        return skip("the switch polls on a CPU of its own");
    }
    let root = match Root::get() {
        Ok(root) => root,
        Err(why) => return skip(&why),
    };
    let dir = tempfile::tempdir().unwrap();
    let listeners = ["p0", "p1"].map(|name| Listener::bind(dir.path().join(name)).unwrap());
    let mut switch = Switch::start(&root, dir.path());
    let mut rng = Rng(7);
    let [a, b] = &listeners;
    let mut ends = [End::accept(a, RxMode::Mergeable), End::accept(b, RxMode::Small)];
    // Which end is closed before the next round.
    for reopened in [None, Some(0), Some(1)] {
        if let Some(i) = reopened {
            let mode = [RxMode::Small, RxMode::Mergeable][i];
            let [first, second] = ends;
            ends = match i {
                0 => {
                    first.close();
                    [End::accept(a, mode), second]
                }
                _ => {
                    second.close();
                    [first, End::accept(b, mode)]
                }
            };
        }
        let [first, second] = &mut ends;
        traffic(first, second, MACS, &mut rng);
        traffic(second, first, [MACS[1], MACS[0]], &mut rng);
    }
    assert!(switch.daemon.0.try_wait().unwrap().is_none(), "the switch has ended");
    ends.into_iter().for_each(End::close);
}
