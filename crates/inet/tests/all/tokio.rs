//! A stack that is driven by a task, and streams with tokio's traits.

use crate::common::{Cable, host, pair, stack};
use netmem_inet::stack::tokio::drive;
use netmem_inet::tcp::Config;
use netmem_inet::{ListenOptions, StackOptions, Time};
use std::future::poll_fn;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::LocalSet;

/// Two stacks and their users are tasks of one thread. The thread sleeps in tokio when no task has
/// work.
#[test]
fn streams_are_read_and_written_by_tasks() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let tasks = LocalSet::new();
    let (there, back) = (Cable::default(), Cable::default());
    let mut near = stack(&host(1), pair(&back, &there, true), StackOptions::default());
    let mut far = stack(&host(2), pair(&there, &back, true), StackOptions::default());
    let (client, server) = (near.sockets(), far.sockets());
    let beginning = Instant::now();
    let now = move || Time::ZERO + beginning.elapsed();
    // The queues in memory wake no task, unlike those of devices. So a task wakes both stacks every
    // millisecond.
    for (mine, other) in [(near.waker(), far.waker()), (far.waker(), near.waker())] {
        tasks.spawn_local(async move {
            loop {
                mine.wake();
                other.wake();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }
    tasks.spawn_local(async move { drive(&mut near, now).await });
    tasks.spawn_local(async move { drive(&mut far, now).await });
    let mut listener = server.listen("10.0.0.2:80".parse().unwrap(), ListenOptions::default()).unwrap();
    tasks.spawn_local(async move {
        loop {
            let mut stream = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
            tokio::task::spawn_local(async move {
                let mut all = Vec::new();
                stream.read_to_end(&mut all).await.unwrap();
                stream.write_all(&all).await.unwrap();
                stream.shutdown();
            });
        }
    });
    let sent: Vec<u8> = (0..200_000_u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
    tasks.block_on(&runtime, async {
        let mut stream = client.connect("10.0.0.2:80".parse().unwrap(), &Config::default()).unwrap();
        poll_fn(|cx| stream.poll_connected(cx)).await.unwrap();
        stream.write_all(&sent).await.unwrap();
        stream.shutdown();
        let mut echo = Vec::new();
        stream.read_to_end(&mut echo).await.unwrap();
        assert!(echo == sent, "{} bytes", echo.len());
        let mut refused = client.connect("10.0.0.2:81".parse().unwrap(), &Config::default()).unwrap();
        let error = poll_fn(|cx| refused.poll_connected(cx)).await.unwrap_err();
        assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::ConnectionRefused);
    });
}
