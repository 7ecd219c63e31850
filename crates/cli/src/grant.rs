//! `netmem grant`: a helper with privileges, which opens AF_XDP sockets for workers without privileges. Each process
//! that connects gets sockets of an interface, and the XDP program that redirects frames to them. A worker receives
//! both with `Grant::receive`.

use crate::args::GrantArgs;
use crate::{output, signals};
use anyhow::Context;
use netmem::virtio::socket::Listener;
use netmem::xsk::helper::HelperOptions;
use netmem::xsk::privileges::Privileges;
use netmem::xsk::{AttachError, Filter, Grant, Interface, ProgramOptions, Rule};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a worker may take to receive the descriptors.
const LIMIT: Duration = Duration::from_secs(1);

/// Serves one worker after another, until a signal comes.
pub(crate) fn run(args: &GrantArgs) -> anyhow::Result<()> {
    let interface = &args.interface.interface;
    // Missing privileges are reported now, and not when a worker connects.
    let privileges = Privileges::current();
    privileges.check_socket()?;
    let host = |address: &_| Rule { address: Some(*address), ..Rule::default() };
    let program = ProgramOptions { filter: Filter::new(args.addr.iter().map(host))?, ..ProgramOptions::default() };
    privileges.check_program(&program.filter)?;
    Interface::by_name(interface).map_err(|_| AttachError::NoInterface(interface.clone()))?;
    let queues = args.interface.queues(args.queues).collect();
    let options = HelperOptions { queues, program: Some(program), ..HelperOptions::default() };

    let (stop, signal) = (signals::stop_flag()?, signals::stop_descriptor()?);
    let listener = Listener::bind(&args.listen).context("--listen")?;
    eprintln!("ready: {} queue(s) of {} at {}", args.queues, args.interface, args.listen.display());
    while !stop.load(Ordering::Relaxed) {
        match poll(&mut [PollFd::new(&signal, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(io::Error::from(e)).context("waiting for workers"),
        }
        // There is no connection if the worker has closed it already.
        let Ok(worker) = listener.accept(Duration::ZERO) else { continue };
        match grant(interface, &options, &worker) {
            Ok(pid) => output::offer(&format!("process {pid} has {} queue(s) of {}", args.queues, args.interface)),
            // The worker's connection is closed when `worker` is dropped.
            Err(e) => output::Log.line(&format!("a worker gets nothing: {e:#}")),
        }
    }
    Ok(())
}

/// Opens the sockets and the program, and passes them to the worker. Returns the worker's process id, in this process's
/// PID namespace.
fn grant(interface: &str, options: &HelperOptions, worker: &UnixStream) -> anyhow::Result<i32> {
    let pid = socket_peercred(worker).context("asking for the worker's process")?.pid.as_raw_nonzero().get();
    Grant::open(interface, options)?.send(worker, LIMIT)?;
    Ok(pid)
}
