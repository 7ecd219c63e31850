//! Each example is run, and prints what it should.

use netmem_testing::{installed, skip};
use std::process::{Command, Output};

/// The command that runs an example, built as this test is.
fn cargo(example: &str) -> Vec<String> {
    let words =
        [env!("CARGO"), "run", "--quiet", "--offline", "--package", "netmem", "--all-features", "--example", example];
    words.map(str::to_owned).into()
}

fn run(command: &[String]) -> Output {
    Command::new(&command[0]).args(&command[1..]).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap()
}

#[track_caller]
fn printed(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}\n{text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    text
}

#[track_caller]
fn prints(example: &str, expected: &[&str]) {
    let text = printed(&run(&cargo(example)));
    for what in expected {
        assert!(text.contains(what), "{what:?} is not in:\n{text}");
    }
}

#[test]
fn a_configuration_is_replaced_under_its_readers() {
    prints("config", &["versions 2 to 20 were stored", "version 1 is kept by a reference: mtu 1500, dying: true"]);
}

#[test]
fn packets_are_dropped_on_another_thread() {
    prints("hand_over", &["50000 frames of 200 bytes", "0 are out"]);
}

#[test]
fn a_stack_of_another_crate_runs_on_the_queues() {
    prints("tcp_smoltcp", &["10.0.0.2 received: \"GET / HTTP/1.1\"", "10.0.0.1 received: 100000 bytes of answer"]);
}

#[test]
fn a_payload_stays_in_device_memory() {
    prints("device_memory", &["the payload: \"computed on the device\"", "tokens returned: 1"]);
}

#[test]
fn a_driver_sleeps_in_tokio() {
    prints("sleep_tokio", &["the other task had its turns", "1000 frames came back; the driver slept: true"]);
}

#[test]
fn a_driver_sleeps_in_mio() {
    prints("sleep_mio", &["[20000, 20000] frames in two queues", "a message of another thread ended the loop"]);
}

/// Runs an example in a network namespace of its own, which goes with the process. `None`, and the
/// test is skipped, where there are no taps.
#[track_caller]
fn apart(example: &str) -> Option<String> {
    let apart = ["unshare", "--net"].map(str::to_owned);
    let checks = [&apart[..], &["ip".into(), "tuntap".into(), "add".into(), "mode".into(), "tap".into()]].concat();
    if let Err(why) = installed(&["unshare", "ip"]) {
        skip(&why);
        return None;
    }
    let done = Command::new("unshare").args(&checks[1..]).output().unwrap();
    if !done.status.success() {
        skip(&format!("no taps in a network namespace: {}", String::from_utf8_lossy(&done.stderr).trim()));
        return None;
    }
    Some(printed(&run(&[&apart[..], &cargo(example)].concat())))
}

#[test]
fn the_kernel_gets_its_datagrams_back() {
    let Some(text) = apart("echo_tap") else { return };
    for number in 1..=3 {
        let line = format!("sent \"hello {number}\", the echo is \"hello {number}\"");
        assert!(text.contains(&line), "{line} is not in:\n{text}");
    }
}

#[test]
fn hyper_runs_on_the_stack() {
    let Some(text) = apart("http_hyper") else { return };
    assert!(text.contains("HTTP/1.1 200 OK") && text.contains("on netmem"), "{text}");
    let (before, _) = text.split_once(" bytes were copied to be sent").unwrap();
    let copied: u32 = before.rsplit('\n').next().unwrap().parse().unwrap();
    assert!(copied < 512, "the head alone, and not the page behind it: {copied}");
}

#[test]
fn axum_runs_on_the_stack_from_many_threads() {
    let Some(text) = apart("http_axum") else { return };
    assert!(text.contains("192.0.2.2:80 serves HTTP"), "{text}");
    for number in 0..8 {
        assert!(text.contains(&format!("hello {number}, on netmem")), "{text}");
    }
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 8, "{text}");
}

#[test]
fn rustls_runs_on_the_stack_from_many_threads() {
    let Some(text) = apart("tls_rustls") else { return };
    assert!(text.contains("192.0.2.2:443 serves TLS"), "{text}");
    assert_eq!(text.matches("echoed 1000000 bytes").count(), 4, "{text}");
    assert_eq!(text.matches("1000000 bytes came back over TLSv1_3").count(), 4, "{text}");
}

#[test]
fn the_kernel_gets_its_bytes_back() {
    let Some(text) = apart("tcp_echo_tap") else { return };
    assert!(text.contains("sent 1000000 bytes, and the echo is equal"), "{text}");
}
