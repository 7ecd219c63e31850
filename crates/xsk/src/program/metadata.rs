//! The part of the program that asks the driver about a frame, and writes the answers in front of
//! it.
//!
//! ```text
//!   R1 = context, R2 = &stack.time     call rx_timestamp   0: present |= TIME
//!   R1 = context, R2, R3 = &stack.hash call rx_hash        0: present |= HASH
//!   R1 = context, R2, R3 = &stack.vlan call rx_vlan_tag    0: present |= VLAN
//!   adjust_meta(context, -LEN)                             no room: the kernel gets the frame
//!   copy the record from the stack to the room
//! ```
//!
//! The functions are called before anything is written: a driver may keep its answers in front of
//! the frame, where its device has stored them.
//!
//! **A frame without the record never reaches a socket.** The bytes in front of a frame in the UMEM
//! have old contents if nothing was copied there, and these may be the record of another frame.

use super::asm::{Asm, Cond, Helper, Label, Reg, Width};
use super::filter::{CONTEXT, context};
use super::kernel_functions;
use crate::netlink::{AttachMode, XdpFeatures};
use crate::rx_metadata::{LEN, RxMetadataReader, at, present};
use crate::sys;
use std::hash::{BuildHasher, RandomState};
use std::io;

/// Whether the program reads the kernel's metadata functions (`bpf_xdp_metadata_rx_timestamp`,
/// `_rx_hash`: Linux 6.3; `_rx_vlan_tag`: Linux 6.8), which the driver answers for each frame. It
/// needs the feature `metadata` of this crate.
///
/// The program then calls a function of the driver for each value that the driver can have, and
/// writes 32 bytes in front of the frame. [`Program::rx_metadata`](crate::Program::rx_metadata)
/// returns what reads them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelMetadata {
    /// It does not.
    #[default]
    Off,
    /// It does, or the program is not attached: [`AttachError::NoMetadata`](crate::AttachError).
    Required,
    /// It does if the kernel and the driver have such functions. Otherwise the program without them
    /// is attached, and `Program::rx_metadata` is `None`.
    IfSupported,
}

/// The reason why a program cannot read the kernel's metadata functions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoRxMetadata {
    /// The crate was built without its feature.
    #[error("netmem-xsk was built without its feature `metadata`")]
    Feature,
    /// The program is in generic mode, in which the kernel calls no functions of a driver.
    #[error("it needs driver mode, and ProgramOptions::mode requires {0}")]
    Mode(AttachMode),
    /// The driver has no XDP.
    #[error("it needs driver mode, and the driver has no XDP")]
    DriverMode,
    /// The kernel is too old.
    #[error("the kernel's metadata functions need Linux 6.3, and this is Linux {}.{}", .0.0, .0.1)]
    Kernel((u32, u32)),
    /// The kernel has no description of its functions.
    #[error(
        "/sys/kernel/btf/vmlinux cannot be read ({0}): a kernel with CONFIG_DEBUG_INFO_BTF has it, if /sys is mounted"
    )]
    NoBtf(io::ErrorKind),
    /// The kernel's description of its functions cannot be read.
    #[error("/sys/kernel/btf/vmlinux: {0}")]
    Btf(String),
    /// The driver has no metadata functions.
    #[error(
        "the driver has no metadata functions (rx-timestamp, rx-hash): `netmem info` lists the features of each interface"
    )]
    Driver,
    /// The kernel interprets programs, and calls its functions only from compiled ones.
    #[error("the kernel does not compile programs, or not on this machine (net.core.bpf_jit_enable)")]
    Jit,
}

/// The metadata functions, in the order of the bits by which the kernel reports those of a driver.
const FUNCTIONS: [&str; 3] =
    ["bpf_xdp_metadata_rx_timestamp", "bpf_xdp_metadata_rx_hash", "bpf_xdp_metadata_rx_vlan_tag"];

/// What a program writes in front of each frame.
#[derive(Clone, Debug)]
pub(super) struct Metadata {
    /// The numbers of the functions that the kernel and the driver have, in the order of
    /// `FUNCTIONS`.
    pub(super) functions: [Option<u32>; 3],
    pub(super) reader: RxMetadataReader,
}

impl Metadata {
    /// Looks up the functions for an interface, to which a program is to be attached in `mode`.
    pub(super) fn find(ifindex: u32, mode: Option<AttachMode>) -> Result<Self, NoRxMetadata> {
        let functions = usable(sys::kernel(), mode, || XdpFeatures::of(ifindex).ok(), kernel_functions::find)?;
        Ok(Self::new(functions))
    }

    pub(super) fn new(functions: [Option<u32>; 3]) -> Self {
        // The record of another program, which is still in the memory, is not taken for one of
        // this.
        let number = RandomState::new().hash_one(std::process::id()) as u32;
        Self { functions, reader: RxMetadataReader::of_program(number) }
    }

    /// What the program of a helper writes. The functions are not known.
    pub(super) fn of_helper(reader: RxMetadataReader) -> Self {
        Self { functions: [None; 3], reader }
    }

    /// The same for another program on the interface, which has the same readers.
    pub(super) fn on(&self, ifindex: u32) -> Result<Self, NoRxMetadata> {
        if self.functions != [None; 3] {
            return Ok(self.clone());
        }
        let found = Self::find(ifindex, Some(AttachMode::Driver))?;
        Ok(Self { reader: self.reader, ..found })
    }

    /// Writes the record in front of the frame, or jumps to `pass`. Overwrites R0 to R5, R7 and the
    /// last bytes of the stack.
    pub(super) fn write(&self, asm: &mut Asm, pass: Label) {
        const STACK: Reg = Reg::R10;
        const PRESENT: Reg = Reg::R7;
        const BASE: i16 = -(LEN as i16);
        let field = |at: usize| BASE + at as i16;
        for word in 0..LEN / 8 {
            asm.store_constant(Width::Double, STACK, field(8 * word), 0);
        }
        asm.set(PRESENT, 0);
        let of_functions = [
            (present::TIME, &[at::TIME][..]),
            (present::HASH, &[at::HASH, at::KIND]),
            (present::VLAN, &[at::TPID, at::TCI]),
        ];
        for (function, (bit, results)) in self.functions.iter().zip(of_functions) {
            let Some(function) = function else { continue };
            let absent = asm.label();
            asm.copy(Reg::R1, CONTEXT);
            for (register, result) in [Reg::R2, Reg::R3].into_iter().zip(results) {
                asm.copy(register, STACK).add(register, field(*result).into());
            }
            asm.call_kernel_function(*function).jump_if(Reg::R0, Cond::NotEqual, 0, absent);
            asm.or(PRESENT, bit as i32).place(absent);
        }
        asm.store(Width::Word, STACK, field(at::PRESENT), PRESENT);
        for (half, word) in self.reader.mark().into_iter().enumerate() {
            asm.store_constant(Width::Word, STACK, field(at::MARK + 4 * half), word as i32);
        }
        asm.copy(Reg::R1, CONTEXT).set(Reg::R2, BASE.into()).call(Helper::AdjustMeta);
        asm.jump_if(Reg::R0, Cond::NotEqual, 0, pass);
        asm.load(Width::Word, Reg::R1, CONTEXT, context::DATA_META).load(Width::Word, Reg::R2, CONTEXT, context::DATA);
        // Always true, and the verifier does not know it.
        asm.copy(Reg::R3, Reg::R1).add(Reg::R3, LEN as i32).jump_if_register(Reg::R3, Cond::Above, Reg::R2, pass);
        for word in 0..LEN / 8 {
            asm.load(Width::Double, Reg::R4, STACK, field(8 * word)).store(
                Width::Double,
                Reg::R1,
                8 * word as i16,
                Reg::R4,
            );
        }
    }
}

/// The functions that a program for a driver with these features can call.
fn usable(
    kernel: (u32, u32),
    mode: Option<AttachMode>,
    features: impl FnOnce() -> Option<XdpFeatures>,
    find: impl FnOnce([&'static str; 3]) -> Result<[Option<u32>; 3], NoRxMetadata>,
) -> Result<[Option<u32>; 3], NoRxMetadata> {
    match mode {
        None | Some(AttachMode::Driver) => {}
        Some(mode) => return Err(NoRxMetadata::Mode(mode)),
    }
    let features = features();
    if features.is_some_and(|features| !features.driver_mode()) {
        return Err(NoRxMetadata::DriverMode);
    }
    // Since Linux 6.7 the kernel reports which functions a driver has. The others return an error
    // for each frame.
    let has = match features {
        Some(features) if kernel >= (6, 7) => features.rx_metadata(),
        _ => u64::MAX,
    };
    let mut functions = find(FUNCTIONS)?;
    if functions == [None; 3] {
        return Err(NoRxMetadata::Kernel(kernel));
    }
    for (bit, function) in functions.iter_mut().enumerate() {
        *function = function.filter(|_| has >> bit & 1 != 0);
    }
    if functions == [None; 3] { Err(NoRxMetadata::Driver) } else { Ok(functions) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::{Filter, Program, ProgramOptions, bpf, filter};
    #[cfg(feature = "metadata")]
    use super::super::{Rule, load_with};
    use super::*;
    #[cfg(feature = "metadata")]
    use crate::testing::with_capabilities;
    use crate::testing::{in_namespace, ip};
    use crate::{AttachError, Interface};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    #[cfg(feature = "metadata")]
    use rustix::thread::CapabilitySet;
    use std::os::fd::{AsFd, AsRawFd, OwnedFd};

    const HAS_ALL: [Option<u32>; 3] = [Some(1), Some(2), Some(3)];

    /// The program with answers of ours in the place of the driver's: these words on the stack, and
    /// these results of the calls.
    fn answered(metadata: &Metadata, map: &OwnedFd, values: [i32; 3], results: [i32; 3]) -> OwnedFd {
        let mut code = filter::program(&Filter::default(), map.as_raw_fd(), Some(metadata)).unwrap();
        let is_store = |word: &u64| *word as u8 == 0x7a;
        assert_eq!(code.iter().filter(|word| is_store(word)).count(), LEN / 8);
        for (word, value) in code.iter_mut().filter(|word| is_store(word)).zip(values) {
            *word |= u64::from(value as u32) << 32;
        }
        let calls = code.iter_mut().filter(|word| **word & 0xf0ff == 0x2085);
        let functions =
            metadata.functions.iter().zip(results).filter_map(|(function, result)| Some(((*function)?, result)));
        let mut called = 0;
        for (word, (function, result)) in calls.zip(functions) {
            assert_eq!(*word >> 32, u64::from(function));
            *word = 0xb7 | u64::from(result as u32) << 32;
            called += 1;
        }
        assert_eq!(called, metadata.functions.iter().flatten().count());
        bpf::load(&code, true, None).unwrap_or_else(|error| panic!("{}", error.log))
    }

    /// The record is written as the reader reads it, for each combination of answers.
    #[test]
    fn answers_are_written_in_front_of_the_frame() {
        in_namespace(|| {
            let map = bpf::create_xskmap(1).unwrap();
            let socket = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
            bpf::update(map.as_fd(), 0, socket.as_raw_fd() as u32).unwrap();
            let frame: Vec<u8> = (0..100).collect();
            let values = [0x0102_0304, 0x0506_0708, 0x0900_0081];
            for absent in 0..8 {
                for functions in [HAS_ALL, [None, Some(2), None], [Some(1), None, Some(3)]] {
                    let metadata = Metadata::new(functions);
                    let results = [0, 1, 2].map(|bit| if absent >> bit & 1 != 0 { -libc::ENODATA } else { 0 });
                    let program = answered(&metadata, &map, values, results);
                    let (result, output) = bpf::test_output(program.as_fd(), &frame).unwrap();
                    assert_eq!((result, &output[LEN..]), (4, &frame[..]));
                    let read = metadata.reader.decode(output[..LEN].try_into().unwrap()).unwrap();
                    let has = |bit: usize| absent >> bit & 1 == 0 && functions[bit].is_some();
                    assert_eq!(read.time.map(u64::from), has(0).then_some(0x0102_0304));
                    assert_eq!(read.hash.map(|hash| (hash.value, hash.kind)), has(1).then_some((0x0506_0708, 0)));
                    assert_eq!(read.vlan.map(|tag| (tag.tpid, tag.tci)), has(2).then_some((0x8100, 0x0900)));
                }
            }
        });
    }

    /// Queues without a socket pass the frame to the kernel, and so does a filter.
    #[test]
    fn what_is_not_redirected_goes_to_the_kernel() {
        in_namespace(|| {
            let map = bpf::create_xskmap(1).unwrap();
            let program = answered(&Metadata::new(HAS_ALL), &map, [0; 3], [0; 3]);
            assert_eq!(bpf::test_run(program.as_fd(), &[7; 64]).unwrap(), 2);
        });
    }

    /// What is missing is named, in the order in which it can be changed.
    #[test]
    fn what_is_missing_for_metadata_is_named() {
        let now = (6, 18);
        let (no_xdp, none) = (|| Some(XdpFeatures::default()), || Some(XdpFeatures::with_rx_metadata(0)));
        let all = |_| Ok(HAS_ALL);
        let generic = Some(AttachMode::Generic);
        assert_eq!(usable(now, generic, none, all), Err(NoRxMetadata::Mode(AttachMode::Generic)));
        assert_eq!(usable(now, None, no_xdp, all), Err(NoRxMetadata::DriverMode));
        assert_eq!(usable(now, None, none, all), Err(NoRxMetadata::Driver));
        assert_eq!(usable((6, 2), None, || None, |_| Ok([None; 3])), Err(NoRxMetadata::Kernel((6, 2))));
        let no_btf = NoRxMetadata::NoBtf(io::ErrorKind::NotFound);
        assert_eq!(usable(now, None, none, |_| Err(no_btf.clone())), Err(no_btf));
        // Linux 6.3 to 6.6 does not report the functions of a driver.
        for features in [none(), None] {
            assert_eq!(usable((6, 6), None, || features, all), Ok(HAS_ALL));
        }
        let time_and_vlan = || Some(XdpFeatures::with_rx_metadata(0b101));
        assert_eq!(usable(now, Some(AttachMode::Driver), time_and_vlan, all), Ok([Some(1), None, Some(3)]));
        // Before Linux 6.8 there is no function for the tag.
        assert_eq!(usable((6, 7), None, time_and_vlan, |_| Ok([Some(1), Some(2), None])), Ok([Some(1), None, None]));
    }

    fn attach(interface: &str, mode: Option<AttachMode>, metadata: KernelMetadata) -> Result<Program, AttachError> {
        let index = Interface::by_name(interface).unwrap().index;
        Program::attach(index, &ProgramOptions { mode, metadata, ..ProgramOptions::default() })
    }

    /// Without the feature, the error names it, and the program without metadata works.
    #[cfg(not(feature = "metadata"))]
    #[test]
    fn without_the_feature_there_is_none() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            let error = attach("v0", None, KernelMetadata::Required).unwrap_err();
            assert!(matches!(error, AttachError::NoMetadata { reason: NoRxMetadata::Feature, .. }), "{error}");
            let program = attach("v0", None, KernelMetadata::IfSupported).unwrap();
            assert_eq!((program.mode(), program.rx_metadata()), (Some(AttachMode::Driver), None));
        });
    }

    /// What this kernel lacks for the tests on a veth.
    #[cfg(feature = "metadata")]
    fn missing() -> Option<NoRxMetadata> {
        match kernel_functions::find(FUNCTIONS) {
            Err(error) => Some(error),
            Ok(functions) if functions == [None; 3] => Some(NoRxMetadata::Kernel(sys::kernel())),
            Ok(_) => None,
        }
    }

    /// The program is refused, or attached without metadata, where there is none.
    #[cfg(feature = "metadata")]
    #[test]
    fn interfaces_without_metadata() {
        in_namespace(|| {
            ip("link add v0 type veth peer name v1");
            for (interface, mode, wanted) in [
                ("lo", None, NoRxMetadata::DriverMode),
                ("v0", Some(AttachMode::Generic), NoRxMetadata::Mode(AttachMode::Generic)),
            ] {
                let error = attach(interface, mode, KernelMetadata::Required).unwrap_err();
                let AttachError::NoMetadata { reason, .. } = &error else { panic!("{error}") };
                assert!(*reason == wanted || sys::kernel() < (6, 3), "{reason}");
                assert_eq!(Interface::by_name(interface).unwrap().programs, []);
                let program = attach(interface, mode, KernelMetadata::IfSupported).unwrap();
                assert_eq!((program.mode(), program.rx_metadata()), (Some(AttachMode::Generic), None));
            }
        });
    }

    /// The verifier accepts the program with all functions of a veth, with and without a filter,
    /// for a process with no more capabilities than the program without metadata needs. A new
    /// filter keeps the number, by which frames are read.
    #[cfg(feature = "metadata")]
    #[test]
    fn a_program_with_metadata_comes_and_goes() {
        in_namespace(|| {
            if let Some(missing) = missing() {
                eprintln!("skipped: {missing}");
                return;
            }
            ip("link add v0 mtu 9000 type veth peer name v1");
            let minimal = CapabilitySet::NET_ADMIN | CapabilitySet::BPF;
            with_capabilities(minimal, || drop(attach("v0", None, KernelMetadata::Required).unwrap()));
            let program = attach("v0", None, KernelMetadata::Required).unwrap();
            let reader = program.rx_metadata().unwrap();
            assert_eq!((program.mode(), program.frags), (Some(AttachMode::Driver), sys::kernel() >= (6, 8)));
            let before = Interface::by_name("v0").unwrap().programs;
            program.set_filter(&Filter::new([Rule { port: Some(7), ..Rule::default() }]).unwrap()).unwrap();
            let after = Interface::by_name("v0").unwrap().programs;
            assert!(before.len() == 1 && after.len() == 1 && before != after);
            assert_eq!(program.rx_metadata(), Some(reader));
            drop(program);
            assert_eq!(Interface::by_name("v0").unwrap().programs, []);
            assert_ne!(attach("v0", None, KernelMetadata::Required).unwrap().rx_metadata(), Some(reader));
        });
    }

    /// A program that calls functions of the kernel is of one device: the kernel loads it for no
    /// interface that does not exist.
    #[cfg(feature = "metadata")]
    #[test]
    fn a_program_with_metadata_is_of_one_device() {
        in_namespace(|| {
            if let Some(missing) = missing() {
                eprintln!("skipped: {missing}");
                return;
            }
            ip("link add v0 type veth peer name v1");
            let map = bpf::create_xskmap(1).unwrap();
            let metadata = Metadata::find(Interface::by_name("v0").unwrap().index, None).unwrap();
            assert!(load_with(&Filter::default(), map.as_fd(), true, Some((&metadata, 9999))).is_err());
            let code = filter::program(&Filter::default(), map.as_raw_fd(), Some(&metadata)).unwrap();
            let bpf::NotLoaded { log, .. } = bpf::load(&code, true, None).unwrap_err();
            assert!(!log.is_empty());
        });
    }
}
