//! DPDK's vhost as a back end: `dpdk-testpmd`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::skip::skip;

/// A testpmd that swaps the addresses of frames and sends them back.
pub struct Testpmd(Child);

impl Testpmd {
    /// Starts it on a socket: it listens there, or connects as a `client`, again and again. None if it cannot run here, which is
    /// said.
    pub fn start(socket: &Path, client: bool) -> Option<Self> {
        if std::thread::available_parallelism().unwrap().get() < 2 {
            skip("dpdk-testpmd needs two CPUs");
            return None;
        }
        let arguments = format!(
            "-oL dpdk-testpmd -l 0,1 --main-lcore 0 --no-pci --no-telemetry --no-huge -m 256 --no-shconf --file-prefix=netmem-{} \
             --vdev=net_vhost0,iface={},queues=1,client={} -- -i --total-num-mbufs=8192 --nb-cores=1 --port-topology=loop \
             --forward-mode=macswap",
            std::process::id(),
            socket.display(),
            u8::from(client)
        );
        let mut command = Command::new("stdbuf");
        command.args(arguments.split_whitespace()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // It dies with us.
        // SAFETY: one system call.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            })
        };
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(e) => {
                skip(&format!("dpdk-testpmd cannot be run: {e}"));
                return None;
            }
        };
        // It may have ended already, if there is no testpmd: it then says nothing below.
        let _ = writeln!(child.stdin.as_mut().unwrap(), "start");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        if !lines.any(|line| line.contains("packet forwarding - ports=1")) {
            skip("dpdk-testpmd does not start");
            return None;
        }
        // What it says later is read, so that it never waits for us.
        std::thread::spawn(move || lines.for_each(|line| println!("testpmd: {line}")));
        Some(Self(child))
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
