//! `netmem info`: what this machine offers to a program that moves packets.

use crate::args::InfoArgs;
use anyhow::Context;
use netmem::pool::{PeerShared, RegionOptions};
use netmem::xdp::privileges::{Capability, Privileges};
use netmem::xdp::{self, Filter, InterfaceInfo, Rule};
use netmem_measure::{cpus, machine, output};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{self, CapabilitySet, membarrier_query};
use serde::Serialize;
use std::borrow::Borrow;
use std::fs::read_to_string;
use std::path::Path;

#[derive(Debug, Serialize)]
struct Info {
    netmem: &'static str,
    command: &'static str,
    kernel: String,
    cpus_online: String,
    /// CPUs that this process may use.
    cpus_allowed: String,
    percpu: PerCpu,
    /// The commands of `membarrier` that the kernel knows.
    membarrier: Vec<String>,
    hugepages: HugePages,
    af_xdp: Answer,
    interfaces: Vec<InterfaceReport>,
    tap: Answer,
    /// Bytes that this process may lock in RAM; `None` if there is no limit.
    memlock_bytes: Option<u64>,
    /// The number of the user.
    user: u32,
    /// What this user may do, with the capabilities and the limit of this process.
    may: Vec<Step>,
    /// The capabilities in effect, of those that netmem uses.
    capabilities: Vec<String>,
    capabilities_missing: Vec<String>,
}

/// How per-CPU data is reached.
#[derive(Debug, Serialize)]
struct PerCpu {
    /// `rseq` or `portable`.
    mode: String,
    /// The number by which restartable sequences index per-CPU data.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
}

#[derive(Debug, Serialize)]
struct HugePages {
    reserved_2m: u64,
    free_2m: u64,
    transparent: String,
    transparent_shared: String,
    /// The kind of pages that a region of peer-shared memory gets. The command has just made one to
    /// find out.
    region: String,
}

/// What an interface offers to AF_XDP.
#[derive(Debug, Serialize)]
struct InterfaceReport {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
    rx_queues: u32,
    tx_queues: u32,
    mtu: u32,
    /// The modes in which sockets can bind, best first.
    modes: Vec<&'static str>,
    features: Vec<&'static str>,
    /// What is missing for AF_XDP, in words.
    missing: Vec<String>,
    /// Known defects of the driver, in words.
    quirks: Vec<&'static str>,
}

impl InterfaceReport {
    fn new(info: InterfaceInfo) -> Self {
        Self {
            rx_queues: info.queues.0,
            tx_queues: info.queues.1,
            mtu: info.mtu,
            modes: info.modes(),
            features: info.features.map_or(Vec::new(), |features| features.names()),
            missing: info.missing(),
            quirks: info.quirks.iter().map(|quirk| quirk.text).collect(),
            driver: info.driver,
            name: info.name,
        }
    }
}

#[derive(Debug, Serialize)]
struct Answer {
    possible: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
}

/// A step for which a user needs a privilege.
#[derive(Debug, Serialize)]
struct Step {
    step: String,
    #[serde(flatten)]
    answer: Answer,
}

/// Bytes of the UMEM of a queue, as the command opens it for `device` and `serve`.
const UMEM: u64 = 32 << 20;

/// Examines the machine and prints the findings.
pub(crate) fn run(args: &InfoArgs) -> anyhow::Result<()> {
    let (capabilities, capabilities_missing) = capabilities();
    let info = Info {
        netmem: env!("CARGO_PKG_VERSION"),
        command: "info",
        kernel: machine::kernel(),
        cpus_online: cpus::list(&cpus::online()),
        cpus_allowed: cpus::list(&cpus::allowed()),
        percpu: percpu(),
        membarrier: membarrier(),
        hugepages: hugepages(),
        af_xdp: answer(xdp::check()),
        interfaces: InterfaceInfo::all().into_iter().map(InterfaceReport::new).collect(),
        tap: tap(),
        memlock_bytes: getrlimit(Resource::Memlock).current,
        user: rustix::process::geteuid().as_raw(),
        may: may(&Privileges::current()),
        capabilities,
        capabilities_missing,
    };
    Ok(if args.json { output::json(&info) } else { output::print(&render(&info)) }?)
}

/// A list in a line.
fn words<T: Borrow<str>>(words: &[T]) -> String {
    if words.is_empty() { "none".into() } else { words.join(", ") }
}

fn render(i: &Info) -> String {
    let mut out = String::new();
    let mut line = |what: &str, value: String| out.push_str(&format!("{what:<14} {value}\n"));
    let answer = |a: &Answer| a.why_not.as_ref().map_or("yes".into(), |why| format!("no: {why}"));
    line("netmem", i.netmem.into());
    line("kernel", i.kernel.clone());
    line("CPUs", format!("{} online, {} for this process", i.cpus_online, i.cpus_allowed));
    let index = i.percpu.index.as_ref().map(|index| format!("by {index}"));
    let detail = index.as_ref().or(i.percpu.why_not.as_ref()).map_or(String::new(), |detail| format!(": {detail}"));
    line("per CPU", format!("{}{detail}", i.percpu.mode));
    line("membarrier", words(&i.membarrier));
    let h = &i.hugepages;
    line("huge pages", format!("{} of 2 MiB reserved, {} free", h.reserved_2m, h.free_2m));
    line("", format!("transparent: {}; for shared memory: {}", h.transparent, h.transparent_shared));
    line("", format!("a region gets: {}", h.region));
    line("AF_XDP", answer(&i.af_xdp));
    for interface in &i.interfaces {
        let InterfaceReport { name, driver, rx_queues, tx_queues, mtu, modes, features, missing, quirks } = interface;
        let driver = driver.as_deref().unwrap_or("of no known driver");
        line("", format!("{name}: {driver}, queues {rx_queues} rx {tx_queues} tx, MTU {mtu}"));
        line("", format!("    modes: {}; features: {}", modes.join("; "), words(features)));
        for what in missing.iter().map(String::as_str).chain(quirks.iter().copied()) {
            line("", format!("    {what}"));
        }
    }
    line("tap", answer(&i.tap));
    line("memlock", i.memlock_bytes.map_or("no limit".into(), |bytes| format!("{bytes} bytes")));
    line("user", format!("number {}", i.user));
    for Step { step, answer } in &i.may {
        match &answer.why_not {
            None => line("", format!("may {step}")),
            Some(why) => line("", format!("may not {step}: {why}")),
        }
    }
    line("capabilities", format!("{}; missing: {}", words(&i.capabilities), words(&i.capabilities_missing)));
    out
}

fn percpu() -> PerCpu {
    let mode = netmem_percpu::mode();
    let (index, why_not) = match mode {
        netmem_percpu::Mode::Rseq(index) => (Some(index.to_string()), None),
        netmem_percpu::Mode::Portable(why) => (None, Some(why.to_string())),
        _ => (None, None),
    };
    PerCpu { mode: mode.to_string(), index, why_not }
}

fn membarrier() -> Vec<String> {
    membarrier_query().iter_names().map(|(name, _)| name.to_lowercase()).collect()
}

fn hugepages() -> HugePages {
    let number = |file: &str| {
        let text = read_to_string(Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").join(file));
        text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    };
    // The setting is the word in brackets.
    let setting = |file: &str| {
        let text = read_to_string(Path::new("/sys/kernel/mm/transparent_hugepage").join(file)).unwrap_or_default();
        let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        chosen.map_or("not in this kernel".to_owned(), |(chosen, _)| chosen.to_owned())
    };
    let region = RegionOptions::new(512).reserved_huge_pages(true).build::<PeerShared>();
    HugePages {
        reserved_2m: number("nr_hugepages"),
        free_2m: number("free_hugepages"),
        transparent: setting("enabled"),
        transparent_shared: setting("shmem_enabled"),
        region: region.map_or_else(|e| format!("nothing: {e}"), |region| region.backing().to_string()),
    }
}

fn answer<T, E: Into<anyhow::Error>>(tried: Result<T, E>) -> Answer {
    let why_not = tried.err().map(|e| format!("{:#}", e.into()));
    Answer { possible: why_not.is_none(), why_not }
}

/// Whether the control device can be opened. To create interfaces, a process also needs
/// CAP_NET_ADMIN.
fn tap() -> Answer {
    answer(std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun"))
}

/// What this user may do. Nothing is tried: the capabilities and the limits of this process are
/// compared with those that each step needs.
fn may(has: &Privileges) -> Vec<Step> {
    let filter = Filter::new([Rule { port: Some(7), ..Rule::default() }]);
    let with_filter = filter.map_err(anyhow::Error::from).and_then(|filter| Ok(has.check_program(&filter)?));
    let tap = || {
        let path = "/dev/net/tun";
        std::fs::OpenOptions::new().read(true).write(true).open(path).context(path)?;
        let own = "a tap that exists can belong to this user (ip tuntap add NAME mode tap user USER vnet_hdr)";
        anyhow::ensure!(has.has(Capability::NetAdmin), "needs CAP_NET_ADMIN; {own}");
        Ok(())
    };
    let step = |step: &str, answer| Step { step: step.to_owned(), answer };
    vec![
        step("open AF_XDP sockets", answer(has.check_socket())),
        step("redirect all frames of an interface to them", answer(has.check_program(&Filter::default()))),
        step("redirect the frames of some addresses or ports", answer(with_filter)),
        step(&format!("register {} MiB for an AF_XDP queue", UMEM >> 20), answer(has.check_memory(UMEM))),
        step("make taps", answer(tap())),
    ]
}

/// The capabilities in effect, and those that are missing, of those that netmem uses.
fn capabilities() -> (Vec<String>, Vec<String>) {
    use CapabilitySet as Set;
    let used = [Set::NET_ADMIN, Set::NET_RAW, Set::IPC_LOCK, Set::SYS_ADMIN, Set::SYS_NICE, Set::PERFMON, Set::BPF];
    let has = thread::capabilities(None).map_or(Set::empty(), |sets| sets.effective);
    let used = Set::from_iter(used);
    let names = |set: Set| set.iter_names().map(|(name, _)| format!("CAP_{name}")).collect();
    (names(used & has), names(used - has))
}
