//! DPDK's vhost as a back end: `dpdk-testpmd`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::debian13::Root;
use crate::{installed, skip};

/// A version of DPDK.
#[derive(Clone, Copy, Debug)]
pub enum Dpdk {
    /// The system's: 22.11 on Debian 12.
    System,
    /// Debian 13's: 24.11.
    Debian13,
}

/// A running testpmd.
pub struct Testpmd(Child);

impl Testpmd {
    /// Starts the system's testpmd on a socket: it swaps the addresses of frames and sends them
    /// back. It listens there, or connects as a `client`, again and again. None if it cannot run
    /// here, which is reported.
    pub fn start(socket: &Path, client: bool) -> Option<Self> {
        let vhost = format!("net_vhost0,iface={},queues=1,client={}", socket.display(), u8::from(client));
        Self::run(Dpdk::System, &vhost, "--forward-mode=macswap", "")
    }

    /// Starts it with one port, which sends back what it receives, as `options` say. `commands` are
    /// lines for its console.
    pub fn run(dpdk: Dpdk, vdev: &str, options: &str, commands: &str) -> Option<Self> {
        Self::of_ports(dpdk, &[vdev], &format!("--port-topology=loop {options}"), commands)
    }

    /// Starts it with these ports.
    pub fn of_ports(dpdk: Dpdk, vdevs: &[&str], options: &str, commands: &str) -> Option<Self> {
        if std::thread::available_parallelism().unwrap().get() < 2 {
            skip("dpdk-testpmd needs two CPUs");
            return None;
        }
        let system = matches!(dpdk, Dpdk::System);
        let missing = if system { installed(&["stdbuf", "dpdk-testpmd"]) } else { installed(&["stdbuf"]) };
        if let Err(why) = missing {
            skip(&why);
            return None;
        }
        let mut command = Command::new("stdbuf");
        command.arg("-oL");
        match dpdk {
            Dpdk::System => _ = command.arg("dpdk-testpmd"),
            Dpdk::Debian13 => {
                let root = match Root::get() {
                    Ok(root) => root,
                    Err(why) => {
                        skip(&why);
                        return None;
                    }
                };
                let testpmd = root.command("usr/bin/dpdk-testpmd");
                command.arg(testpmd.get_program()).args(testpmd.get_args());
                command.arg("-d").arg(root.path("usr/lib/x86_64-linux-gnu/dpdk/pmds-25.0"));
            }
        }
        let ports: String = vdevs.iter().map(|vdev| format!("--vdev={vdev} ")).collect();
        let arguments = format!(
            "-l 0,1 --main-lcore 0 --no-pci --no-telemetry --no-huge -m 256 --no-shconf --file-prefix=netmem-{} {ports}\
             -- -i --total-num-mbufs=8192 --nb-cores=1 {options}",
            std::process::id()
        );
        command.args(arguments.split_whitespace());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // It dies with us.
        // SAFETY: one system call.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            })
        };
        let mut testpmd = Self(command.spawn().unwrap());
        // It may have ended already: then there is no output below.
        let _ = writeln!(testpmd.0.stdin.as_mut().unwrap(), "{commands}\nstart");
        let mut lines = BufReader::new(testpmd.0.stdout.take().unwrap()).lines().map_while(Result::ok);
        // "io packet forwarding - ports=1 - cores=1", or with "with retry" in between.
        let ports = format!(" - ports={} - ", vdevs.len());
        if !lines.any(|line| line.contains("packet forwarding") && line.contains(&ports)) {
            skip("dpdk-testpmd does not start");
            return None;
        }
        // Later output is read, so that testpmd never waits for a full pipe.
        std::thread::spawn(move || lines.for_each(|line| println!("testpmd: {line}")));
        Some(testpmd)
    }

    /// Writes lines to its console.
    pub fn command(&mut self, lines: &str) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{lines}").unwrap();
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
