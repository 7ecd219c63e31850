//! The figures of `device --metrics`.

use crate::link::AskedLink;
use crate::metrics::Page;
use netmem::device::Stats;

/// Counters of [`Stats`] that are of frames or events: their names there, and what they count.
const COUNTERS: [(&str, &str); 26] = [
    ("rx_frames", "Frames from the port to the driver."),
    ("rx_bytes", "Their bytes, virtio headers not counted."),
    ("rx_in_place", "Frames that the port has put into the driver's buffers itself."),
    ("rx_joined", "Frames that were joined to the one before."),
    ("tx_frames", "Frames from the driver that the port accepted."),
    ("tx_bytes", "Their bytes, virtio headers not counted."),
    ("tx_in_place", "Frames that the port has read from the driver's buffers itself."),
    ("tx_direct", "Frames that were copied straight into the buffers of another queue pair."),
    ("checksummed", "Frames whose checksum was computed because the next hop does not."),
    ("segmented", "Frames that were cut because the next hop does not."),
    ("polls", "Passes over the queues."),
    ("out_of_buffers", "How often a queue had a frame and the driver no buffers for it."),
    ("calls", "Interrupts sent."),
    ("sleeps", "How often a thread went to sleep."),
    ("wakes", "Sleeps that have ended."),
    ("woken_by_kick", "Sleeps that ended by a driver's notification."),
    ("woken_by_port", "Sleeps that ended by a port."),
    ("woken_by_deadline", "Sleeps that ended because a port had work at that time."),
    ("woken_by_control", "Sleeps that ended by a front end's message."),
    ("commands", "Control commands answered."),
    ("connection_errors", "Connections that ended in an error."),
    ("memory_lost", "Accesses that found a page of a front end's memory gone."),
    ("refused", "Messages that the device refused."),
    ("log_misses", "Pages written for which the dirty log has no bit."),
    ("announced", "Announcements (RARP) that the port sent."),
    ("busy_ns", "Time in passes that moved frames."),
];

/// Counters of a queue pair.
const PAIR_COUNTERS: [(&str, &str); 5] = [
    ("rx_frames", "Frames of a queue pair from the port to the driver."),
    ("rx_bytes", "Their bytes, virtio headers not counted."),
    ("tx_frames", "Frames of a queue pair from the driver that the port accepted."),
    ("tx_bytes", "Their bytes, virtio headers not counted."),
    ("dropped", "Frames that were dropped in passes over a queue pair."),
];

/// Those that grow and fall.
const GAUGES: [(&str, &str, &str); 3] = [
    ("memory_regions", "memory_regions", "Regions of the front end's memory."),
    ("memory_bytes", "memory_bytes", "Bytes of the front end's memory."),
    ("memory_unsealed", "unsealed_memory_regions", "Regions whose file can be shortened."),
];

/// Fills in an answer.
pub(super) fn figures(page: &Page, stats: &Stats, link: Option<&AskedLink>) {
    for (name, value) in stats.counters() {
        if let Some((_, metric, help)) = GAUGES.iter().find(|gauge| gauge.0 == name) {
            page.gauge(&format!("netmem_device_{metric}"), help, &[], value as f64);
        } else if let Some((_, help)) = COUNTERS.iter().find(|counter| counter.0 == name) {
            match name.strip_suffix("_ns") {
                Some(name) => page.seconds(&format!("netmem_device_{name}_seconds_total"), help, &[], value),
                None => page.counter(&format!("netmem_device_{name}_total"), help, &[], value),
            }
        }
    }
    for (pair, counters) in stats.pairs().enumerate() {
        for ((name, value), (_, help)) in counters.into_iter().zip(PAIR_COUNTERS) {
            let name = format!("netmem_device_pair_{name}_total");
            page.counter(&name, help, &[("pair", &pair.to_string())], value);
        }
    }
    for (reason, frames) in stats.drops() {
        page.counter("netmem_device_dropped_total", "Frames that were dropped, by why.", &[("reason", reason)], frames);
    }
    for (fault, rings) in stats.queue_errors() {
        let help = "Rings that were stopped because their driver broke a rule, by which.";
        page.counter("netmem_device_queue_errors_total", help, &[("fault", fault)], rings);
    }
    if let Some(link) = link {
        link.figures(page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counter_of_the_device_is_reported() {
        let known =
            |name: &str| COUNTERS.iter().any(|known| known.0 == name) || GAUGES.iter().any(|known| known.0 == name);
        let unknown: Vec<_> = Stats::default().counters().filter(|(name, _)| !known(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
        assert_eq!(COUNTERS.len() + GAUGES.len(), Stats::default().counters().count());
    }

    #[test]
    fn the_names_of_a_pairs_counters_are_those_of_the_device() {
        let device = netmem::device::NetDevice::new(netmem::device::Options::default(), |_| {
            netmem::device::port::Gen::new(64, None)
        });
        let stats = device.unwrap().stats();
        let names: Vec<_> = stats.pairs().next().unwrap().map(|(name, _)| name).to_vec();
        assert_eq!(names, PAIR_COUNTERS.map(|(name, _)| name));
    }
}
