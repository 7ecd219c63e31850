//! Compares `docs/design/virtio.md` with the device and the driver: feature bits, the configuration
//! space, the commands of the control queue.

use std::os::unix::net::UnixStream;

use netmem_testing::device::{Driver, PLAIN, poll_until};
use netmem_testing::driver::hostile::{Behaviour, FEATURES, Harness, Hostile};
use netmem_testing::driver::{DeviceThread, frame, take};
use netmem_testing::tree::page;
use netmem_virtio::device::port::{Echo, Port, Sink, Tap};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetError, NetOptions, RxMode, VirtioNet};
use netmem_virtio::net::config::{self, NetConfig};
use netmem_virtio::net::{ctrl, feature};
use netmem_virtio::virtqueue::{DESC_WRITE, Negotiated};
use netmem_virtio::{VhostUser, VhostUserError};

const MAC: [u8; 6] = [2, 1, 2, 3, 4, 5];

/// All that a device can report.
fn telling() -> Options {
    Options {
        max_pairs: 2,
        serve_control: true,
        mac: Some(MAC),
        mtu: Some(9000),
        speed: Some(25_000),
        ..Options::default()
    }
}

/// Each field lies where the specification has it, and fields that the device does not have are
/// zero.
#[test]
fn the_configuration_space_lies_as_specified() {
    let device = NetDevice::new(telling(), |_| Ok(Sink)).unwrap();
    let (control, driver) = (device.control(), Driver::connect(&device, PLAIN));
    let read = |offset, len| driver.front.get_config(offset, len).unwrap();
    let whole = [&MAC[..], &[1, 0], &[2, 0], &9000u16.to_le_bytes(), &25_000u32.to_le_bytes(), &[1], &[0; 7]].concat();
    assert_eq!(read(0, 24), whole);
    for (offset, len) in [(6, 2), (10, 2), (12, 5), (16, 1), (17, 3), (u32::MAX, 4)] {
        let at = offset as usize;
        let want: Vec<_> = (0..len as usize).map(|n| whole.get(at + n).copied().unwrap_or(0)).collect();
        assert_eq!(read(offset, len), want, "{len} bytes from {offset}");
    }
    control.set_link(false);
    assert_eq!(read(6, 2), [0, 0]);
    control.ask_to_announce();
    assert_eq!(read(6, 2), [2, 0]);
    control.set_link(true);
    assert_eq!(read(6, 2), [3, 0]);
    // A driver whose front end serves its control queue has no way to report that it has announced
    // itself.
    let device = NetDevice::new(Options::default(), |_| Ok(Sink)).unwrap();
    let driver = Driver::connect(&device, PLAIN);
    device.control().ask_to_announce();
    assert_eq!(driver.front.get_config(6, 2).unwrap(), [1, 0]);
}

/// A driver on a device, and the ring of its control queue.
struct Commands {
    device: NetDevice<Sink>,
    driver: Driver,
}

impl Commands {
    fn new(features: u64) -> Self {
        let device = NetDevice::new(telling(), |_| Ok(Sink)).unwrap();
        let driver = Driver::start(&device, PLAIN | feature::CTRL_VQ | features, 5);
        Self { device, driver }
    }

    /// The answer to a command.
    fn ask(&mut self, class: u8, command: u8, argument: &[u8]) -> u8 {
        let Self { device, driver } = self;
        let (addr, at) = driver.buffer(4, 0, 2048);
        driver.memory.write(at, &[&[class, command], argument, &[0xff]].concat());
        let len = argument.len() as u32;
        let parts = [(addr, 2, 0), (addr + 2, len, 0), (addr + 2 + u64::from(len), 1, DESC_WRITE)];
        let parts: Vec<_> = parts.into_iter().filter(|part| part.1 > 0).collect();
        driver.rings[4].chain(0, &parts);
        poll_until(device, || driver.rings[4].take().is_some());
        driver.memory.read(at + 2 + argument.len(), 1)[0]
    }
}

/// Unsupported commands of any length are answered with an error, and the queue continues.
#[test]
fn every_control_command() {
    let mut all = Commands::new(feature::MQ | feature::STATUS | feature::GUEST_ANNOUNCE);
    let followed = |class, command, argument: &[u8]| match (class, command) {
        (ctrl::CLASS_MQ, ctrl::MQ_PAIRS_SET) => argument == [2, 0],
        (ctrl::CLASS_ANNOUNCE, ctrl::ANNOUNCE_ACK) => argument.is_empty(),
        _ => false,
    };
    let page = page("design/virtio.md");
    let rows = table(&page, "| class |");
    assert_eq!(rows.len(), ctrl::COMMANDS.len());
    for (row, (class, command, name)) in rows.iter().zip(ctrl::COMMANDS) {
        assert_eq!(row[..3], [&class.to_string(), &command.to_string(), name]);
        let answered = [&[], &[2, 0][..]].iter().any(|argument| followed(class, command, argument));
        assert_eq!(row[4].starts_with("followed"), answered, "{name}: {}", row[4]);
    }
    let known = ctrl::COMMANDS.iter().map(|&(class, command, _)| (class, command));
    let unknown = [(0, 6), (3, 1), (4, 3), (7, 0), (255, 255)];
    let arguments: [&[u8]; 6] = [&[], &[1], &[2, 0], &[0, 0], &[2, 0, 0], &[1; 1500]];
    for (class, command) in known.chain(unknown) {
        for argument in arguments {
            let want = if followed(class, command, argument) { ctrl::OK } else { ctrl::ERR };
            assert_eq!(all.ask(class, command, argument), want, "class {class}, command {command}, {argument:?}");
        }
    }
    assert_eq!(all.driver.queue_errors(), []);
    assert_eq!(all.ask(ctrl::CLASS_MQ, ctrl::MQ_PAIRS_SET, &[1, 0]), ctrl::OK);
}

/// A command of a feature that was not negotiated is refused, and so is the queue itself.
#[test]
fn commands_that_were_not_negotiated() {
    let mut none = Commands::new(0);
    assert_eq!(none.ask(ctrl::CLASS_MQ, ctrl::MQ_PAIRS_SET, &[2, 0]), ctrl::ERR);
    none.device.control().ask_to_announce();
    assert_eq!(none.ask(ctrl::CLASS_ANNOUNCE, ctrl::ANNOUNCE_ACK, &[]), ctrl::ERR);
    assert_eq!(none.driver.front.get_config(6, 2).unwrap(), [3, 0], "it is asked still");
    let device = NetDevice::new(telling(), |_| Ok(Sink)).unwrap();
    let mut driver = Driver::start(&device, PLAIN | feature::MQ, 4);
    driver.front.acknowledged = false;
    driver.start_ring(256);
    let error = driver.connection.take().unwrap().wait().unwrap_err();
    assert!(format!("{:?}", causes(&error)).contains("VIRTIO_NET_F_CTRL_VQ was not negotiated"), "{error:?}");
}

/// An error and its causes.
fn causes(error: &dyn std::error::Error) -> Vec<String> {
    std::iter::successors(Some(error), |e| e.source()).map(ToString::to_string).collect()
}

/// The driver reads its device's configuration, sees changes of it, and reports that it has
/// announced itself.
#[test]
fn the_driver_reads_the_configuration_space() {
    let mut device_thread = DeviceThread::new(NetDevice::new(telling(), |_| Ok(Echo::new())).unwrap());
    let (mut net, pairs) = device_thread.probe(NetOptions::new(RxMode::Mergeable).pairs(2));
    let config = net.config().unwrap();
    assert_eq!((config.mac, config.mtu, config.max_pairs), (Some(MAC), Some(9000), Some(2)));
    assert_eq!((config.speed, config.full_duplex), (Some(25_000), Some(true)));
    assert!(config.link_up && !config.announce);
    device_thread.control.set_link(false);
    device_thread.control.ask_to_announce();
    let config = net.config().unwrap();
    assert!(!config.link_up && config.announce);
    net.announced().unwrap();
    assert!(!net.config().unwrap().announce);
    drop(pairs);
    // With one pair there is no control queue, and so nothing is asked.
    drop(net);
    drop(device_thread.connection.take());
    let (mut net, _pairs) = device_thread.probe(NetOptions::new(RxMode::Small));
    device_thread.control.ask_to_announce();
    assert_eq!((net.config().unwrap().announce, net.config().unwrap().max_pairs), (false, None));
    net.announced().unwrap();
}

/// A device with a shorter MTU than the driver's gets its own, which it accepts.
#[test]
fn a_device_with_a_short_mtu() {
    let mut device_thread =
        DeviceThread::new(NetDevice::new(Options { mtu: Some(1400), ..Options::default() }, |_| Ok(Sink)).unwrap());
    let (net, _pairs) = device_thread.probe(NetOptions::new(RxMode::Small));
    assert_eq!(net.config().unwrap().mtu, Some(1400));
}

/// The answer to GET_CONFIG, as a payload.
fn answer(offset: u32, bytes: &[u8]) -> Vec<u8> {
    [offset, bytes.len() as u32, 0].iter().flat_map(|w| w.to_ne_bytes()).chain(bytes.iter().copied()).collect()
}

const CONFIG: u64 = 1 << 9;
const FIELDS: u64 = feature::MAC | feature::STATUS | feature::SPEED_DUPLEX | feature::MTU;

fn back_end(config: Vec<u8>) -> Behaviour {
    Behaviour { features: FEATURES | FIELDS, protocol: 1 | 1 << 4 | CONFIG, config, ..Behaviour::default() }
}

/// The answers of a back end are checked. If the form of an answer is wrong, the connection ends.
/// Wrong values are not reported.
#[test]
fn a_configuration_space_that_lies() {
    let told = [&MAC[..], &[1, 0, 0, 0], &1500u16.to_le_bytes(), &1000u32.to_le_bytes(), &[0]].concat();
    let harness = Harness::with(back_end(answer(0, &told)), NetOptions::new(RxMode::Small));
    let config = harness.net.config().unwrap();
    assert_eq!(
        (config.mac, config.mtu, config.speed, config.full_duplex),
        (Some(MAC), Some(1500), Some(1000), Some(false))
    );
    assert_eq!(harness.device.mtu(), 1500);
    harness.close();
    // Values without a meaning, of which the probe uses none, either.
    let nonsense = [&[0xff; 6][..], &[0, 0, 0xff, 0xff], &[67, 0], &[0, 0, 0, 0x80], &[2]].concat();
    let harness = Harness::with(back_end(answer(0, &nonsense)), NetOptions::new(RxMode::Small));
    let mut nothing = NetConfig::default();
    nothing.link_up = false;
    assert_eq!(harness.net.config().unwrap(), nothing);
    harness.close();
    // A refusal, in each of its forms, is as good as no configuration space.
    for refusal in [vec![], vec![1, 0, 0, 0, 0, 0, 0, 0]] {
        let harness = Harness::with(back_end(refusal), NetOptions::new(RxMode::Small));
        assert_eq!(harness.net.config().unwrap(), NetConfig::default());
        harness.close();
    }
    for wrong in
        [answer(1, &told), answer(0, &told[..16]), answer(0, &[&told[..], &[0]].concat()), vec![0; 12], vec![0; 5]]
    {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let _device = Hostile::over(theirs, back_end(wrong));
        let error =
            VirtioNet::probe(VhostUser::own_device(ours).unwrap(), NetOptions::<_>::new(RxMode::Small)).unwrap_err();
        assert!(matches!(error, NetError::Backend(VhostUserError::Message { .. })), "{error:?}");
        assert!(error.to_string().contains("GET_CONFIG"), "{error}");
    }
}

/// Features that only announce fields do not bind the driver to back ends that have them.
#[test]
fn a_back_end_that_tells_less_takes_over() {
    let told = [&MAC[..], &[1, 0, 0, 0], &1500u16.to_le_bytes(), &1000u32.to_le_bytes(), &[0]].concat();
    let mut harness = Harness::with(back_end(answer(0, &told)), NetOptions::new(RxMode::Small));
    let (mut device, backend) = Hostile::new(Behaviour::default());
    std::mem::swap(&mut harness.device, &mut device);
    harness.net.reconnect(backend).unwrap();
    assert_eq!((harness.net.features() & FIELDS, harness.net.config().unwrap()), (0, NetConfig::default()));
    take(&mut harness.pair.rx);
    harness.ring = harness.device.ring(0);
    harness.deliver(&frame(1, 100));
    assert_eq!(take(&mut harness.pair.rx)[0].to_vec(), frame(1, 100));
    // And back.
    let (mut device, backend) = Hostile::new(back_end(answer(0, &told)));
    std::mem::swap(&mut harness.device, &mut device);
    harness.net.reconnect(backend).unwrap();
    assert_eq!(harness.net.config().unwrap().mac, Some(MAC));
    harness.close();
}

/// The cells of the rows of a table, from the row that begins with `head` on.
fn table<'a>(page: &'a str, head: &str) -> Vec<Vec<&'a str>> {
    let rows = page.lines().skip_while(|line| !line.starts_with(head)).skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// The bits that are offered by a device with a port that accepts all offloads, or a tap, and with
/// all options.
fn offered() -> u64 {
    let device = NetDevice::new(telling(), |_| Ok(Echo::new())).unwrap();
    device.control().offered() | <Tap as Port>::FEATURES
}

/// The bits that the driver accepts, with these options, from a back end that offers all. The
/// options may be of `several` queue pairs.
fn accepted(options: NetOptions, several: bool) -> u64 {
    let told = [0; config::LEN];
    let behaviour = Behaviour { features: u64::MAX, pairs: 2, ..back_end(answer(0, &told)) };
    let (device, backend) = Hostile::new(behaviour);
    std::thread::scope(|s| {
        if several {
            s.spawn(|| device.answer_command(&mut device.ring(4), 0));
        }
        drop(VirtioNet::probe(backend, options).unwrap());
    });
    device.negotiated()
}

/// Each bit has a row with its name, and the row describes what the driver and the device do.
#[test]
fn every_feature_bit() {
    let options = || {
        let modes = [RxMode::Small, RxMode::Mergeable, RxMode::Big];
        modes.into_iter().flat_map(|mode| {
            let new = || NetOptions::new(mode).pairs(2);
            let late = (mode == RxMode::Small).then(|| new().late_device_memory());
            let rings = new().ring_features(Negotiated::RING);
            let several = [new(), new().max_frame(mode.max_frame()), rings].into_iter().chain(late);
            several.map(|options| (options, true)).chain([(NetOptions::new(mode), false)])
        })
    };
    let (mut sometimes, mut always) = (0, u64::MAX);
    for (options, several) in options() {
        let accepted = accepted(options, several);
        sometimes |= accepted;
        always &= accepted;
    }
    let offered = offered();
    let page = page("design/virtio.md");
    let rows = table(&page, "| bit |");
    for bit in 0..64 {
        let (mask, number) = (1u64 << bit, bit.to_string());
        let name = feature::name(mask);
        let row: Vec<_> = rows.iter().filter(|row| row[0] == number).collect();
        if name == feature::UNNAMED {
            assert!(row.is_empty(), "bit {bit} has a row and no name");
            assert!((sometimes | offered) & mask == 0, "bit {bit} is used and has no name");
            continue;
        }
        let [row] = row[..] else { panic!("{name}, bit {bit}, has {} rows", row.len()) };
        assert_eq!(row[1], name, "bit {bit}");
        let taken = row[2].starts_with("accepted") || row[2].starts_with("needed");
        assert!(taken || row[2].starts_with("not accepted"), "{name}: {}", row[2]);
        assert_eq!(sometimes & mask != 0, taken, "{name}: the page says of the driver: {}", row[2]);
        assert!(always & mask != 0 || row[2] != "needed", "{name} is not always needed");
        assert!(row[3].starts_with("offered") || row[3].starts_with("not offered"), "{name}: {}", row[3]);
        assert_eq!(
            offered & mask != 0,
            row[3].starts_with("offered"),
            "{name}: the page says of the device: {}",
            row[3]
        );
    }
}

/// A bit that was not offered is refused by its name, and changes nothing.
#[test]
fn each_bit_that_is_not_offered_is_refused() {
    let device = NetDevice::new(Options::default(), |_| Ok(Sink)).unwrap();
    let offered = device.control().offered();
    for mask in (0..64).map(|bit| 1u64 << bit).filter(|mask| offered & mask == 0) {
        let mut driver = Driver::connect(&device, PLAIN);
        let error = driver.front.set_features(PLAIN | mask).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "the connection goes on");
        driver.front.set_features(PLAIN).unwrap();
        // Where no acknowledgement was asked for, the error names the message.
        driver.reconnect(&device.control(), PLAIN);
        driver.front.acknowledged = false;
        driver.front.set_features(PLAIN | mask).unwrap();
        let error = driver.connection.take().unwrap().wait().unwrap_err();
        let text = causes(&error).concat();
        assert!(text.contains(feature::name(mask)) && text.contains("SET_FEATURES"), "{text}");
    }
}
