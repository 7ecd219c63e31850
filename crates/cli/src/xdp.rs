//! The options of commands that open an interface by AF_XDP.

use crate::args::XskArg;
use clap::{Args, ValueEnum};
use netmem::device::port::PortError;
use netmem::xdp::{AttachMode, BusyPoll, Mode, ProgramOptions, QueueOptions, XskPort};
use netmem_measure::arguments::BadArgument;
use netmem_measure::output;

#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct XdpArgs {
    /// With xsk:IFACE, how frames reach the sockets: auto, without copies if the driver has that
    /// for frames of the interface's MTU; zero-copy; copy, by the driver's XDP program; generic, by
    /// the kernel's own, for drivers whose XDP does not work [default: auto]
    #[arg(long, value_name = "MODE")]
    pub(crate) xdp_mode: Option<XdpModeArg>,
    /// With xsk:IFACE: the thread that receives polls the driver, which interrupts it less. Needs
    /// CAP_NET_ADMIN, and napi_defer_hard_irqs and gro_flush_timeout in /sys/class/net/IFACE. The
    /// report of perf says whether the kernel knows what to poll for the socket
    #[arg(long)]
    pub(crate) busy_poll: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum XdpModeArg {
    Auto,
    ZeroCopy,
    Copy,
    Generic,
}

impl XdpArgs {
    /// Refuses the options where no interface is opened. `where_to` names what opens one.
    pub(crate) fn check(self, opens: bool, where_to: &str) -> Result<(), BadArgument> {
        let option = match (self.xdp_mode, self.busy_poll) {
            (Some(_), _) => "--xdp-mode",
            (_, true) => "--busy-poll",
            (None, false) => return Ok(()),
        };
        if opens {
            return Ok(());
        }
        BadArgument::new(format!("{option} is for an interface that is opened by AF_XDP: {where_to}"))
    }

    /// `options`, with the mode in which the program is attached.
    pub(crate) fn program(self, options: ProgramOptions) -> ProgramOptions {
        let generic = self.xdp_mode == Some(XdpModeArg::Generic);
        ProgramOptions { mode: generic.then_some(AttachMode::Generic).or(options.mode), ..options }
    }

    /// The options of a queue.
    pub(crate) fn queue(self) -> QueueOptions {
        let options = match self.xdp_mode {
            None | Some(XdpModeArg::Auto) => QueueOptions::new(),
            Some(XdpModeArg::ZeroCopy) => QueueOptions::new().mode(Mode::ZeroCopy),
            Some(XdpModeArg::Copy | XdpModeArg::Generic) => QueueOptions::new().mode(Mode::Copy),
        };
        if self.busy_poll { options.busy_poll(BusyPoll::default()) } else { options }
    }

    /// Opens `pairs` queues of an interface as ports, and reports the mode of each.
    pub(crate) fn ports(self, xsk: &XskArg, pairs: u16, program: ProgramOptions) -> Result<Vec<XskPort>, PortError> {
        let queues = xsk.queues(pairs).collect();
        let ports = XskPort::open(&xsk.interface, Some(queues), self.program(program), |_| self.queue())?;
        for port in &ports {
            output::Log.line(&port.queues().0.socket().to_string());
        }
        Ok(ports)
    }
}
