//! `netmem grant`: a helper with privileges, which opens AF_XDP sockets for workers without
//! privileges. A process that connects and asks gets sockets of an interface, and the XDP program
//! that redirects frames to them. A worker asks by `Grant::receive`.

use crate::args::GrantArgs;
use crate::limits;
use netmem::xdp::helper::{Event, HelperOptions, MAX_SOCKETS, Peer, Server, ServerOptions};
use netmem::xdp::privileges::Privileges;
use netmem::xdp::{Filter, ProgramOptions, Rule, XskOptions};
use netmem_measure::arguments::BadArgument;
use netmem_measure::output::{self, chain};
use netmem_measure::signals;

/// Workers that may wait for queues. Each has a descriptor here.
const PENDING: usize = 64;

/// Serves workers until a signal comes.
pub(crate) fn run(args: &GrantArgs) -> anyhow::Result<()> {
    let interface = &args.interface.interface;
    // Missing privileges are reported now, and not when a worker connects.
    let privileges = Privileges::current();
    privileges.check_socket()?;
    let host = |address: &_| Rule { address: Some(*address), ..Rule::default() };
    let program = ProgramOptions { filter: Filter::new(args.addr.iter().map(host))?, ..ProgramOptions::default() };
    privileges.check_program(&program.filter)?;
    let queues = args.interface.queues(args.queues).collect();
    let grants = HelperOptions { queues, program: Some(program), ..HelperOptions::default() };
    let options = options(args)?;
    // Those of one grant, and some for the system calls that open it.
    limits::descriptors(PENDING + MAX_SOCKETS + 16, "netmem grant")?;

    // So that the signals are handled before a worker can connect.
    let (_stop, signal) = (signals::stop_flag()?, signals::stop_descriptor()?);
    let mut server = Server::bind(&args.listen, interface, grants, options)?;
    let what = format!("{} queue(s) of {}", args.queues, args.interface);
    let bytes = XskOptions::PAGES * rustix::param::page_size();
    eprintln!(
        "a worker locks {bytes} bytes for each queue by default: its limit (RLIMIT_MEMLOCK) has to be {} bytes, or it has \
         CAP_IPC_LOCK",
        bytes * usize::from(args.queues)
    );
    eprintln!("ready: {what} at {}", args.listen.display());
    server.serve(signal, |event| match event {
        Event::Granted(worker) => output::offer(&format!("{} has {what}", named(worker))),
        Event::Refused(worker, error) => {
            output::Log.line(&format!("{} gets nothing: {}", named(worker), chain(error)));
        }
        Event::NotAccepting(error) => {
            output::Log.line(&format!("no worker can connect until the system accepts connections again: {error}"));
        }
        _ => {}
    })?;
    Ok(())
}

/// Who may have queues. An unknown user or group is a bad argument.
fn options(args: &GrantArgs) -> Result<ServerOptions, BadArgument> {
    let mut options = ServerOptions::new().pending(PENDING);
    if let Some(mode) = args.mode {
        options = options.mode(mode);
    }
    if let Some(group) = &args.group {
        options = options.group(group).map_err(|error| BadArgument(format!("--group: {error}")))?;
    }
    for user in &args.user {
        options = options.user(user).map_err(|error| BadArgument(format!("--user: {error}")))?;
    }
    Ok(options)
}

fn named(worker: Peer) -> String {
    match worker.pid {
        Some(pid) => format!("process {pid} of user {}", worker.user),
        // It is in a PID namespace that this process cannot see.
        None => format!("a process of user {}", worker.user),
    }
}
