//! A stack that is driven by a task, and streams with tokio's traits.

use crate::common::{Cable, host, pair, stack};
use netmem_inet::stack::remote::TcpStream;
use netmem_inet::stack::tokio::drive;
use netmem_inet::tcp::Config;
use netmem_inet::{ListenOptions, StackOptions, Time};
use netmem_pool::Private;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
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

async fn echo(stream: TcpStream<Private>) {
    // One task reads, and another one writes.
    let (mut read, mut write) = stream.into_split();
    let (to_write, mut bytes) = tokio::sync::mpsc::channel::<Vec<u8>>(4);
    let writer = tokio::spawn(async move {
        while let Some(bytes) = bytes.recv().await {
            write.write_all(&bytes).await.unwrap();
        }
    });
    let mut some = vec![0; 3000];
    loop {
        let n = AsyncReadExt::read(&mut read, &mut some).await.unwrap();
        if n == 0 {
            break;
        }
        to_write.send(some[..n].to_vec()).await.unwrap();
    }
    drop(to_write);
    writer.await.unwrap();
}

/// Streams are used by tasks of a runtime with several threads. The stacks have a thread, which is
/// none of the runtime's.
#[test]
fn streams_are_used_by_tasks_of_any_thread() {
    const CLIENTS: usize = 20;
    let (sockets, opened) = mpsc::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let stacks = thread::spawn(move || {
        let (there, back) = (Cable::default(), Cable::default());
        let mut near = stack(&host(1), pair(&back, &there, true), StackOptions::default());
        let mut far = stack(&host(2), pair(&there, &back, true), StackOptions::default());
        sockets.send((near.remote(), far.remote())).unwrap();
        let beginning = Instant::now();
        while !flag.load(Ordering::Relaxed) {
            let now = Time::ZERO + beginning.elapsed();
            if near.poll(now) + far.poll(now) == 0 {
                thread::yield_now();
            }
        }
        (near.pages(), far.pages())
    });
    let (client, server) = opened.recv().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).build().unwrap();
    let mut listener = server.listen("10.0.0.2:80".parse().unwrap(), ListenOptions::default());
    runtime.block_on(async move {
        poll_fn(|cx| listener.poll_listening(cx)).await.unwrap();
        let serving = tokio::spawn(async move {
            for _ in 0..CLIENTS {
                tokio::spawn(echo(poll_fn(|cx| listener.poll_accept(cx)).await.unwrap()));
            }
            listener
        });
        let clients: Vec<_> = (0..CLIENTS)
            .map(|n| {
                let mut stream = client.connect("10.0.0.2:80".parse().unwrap(), &Config::default());
                tokio::spawn(async move {
                    poll_fn(|cx| stream.poll_connected(cx)).await.unwrap();
                    let sent: Vec<u8> = (0..100_000_u32).map(|at| (at as usize * 7 + n) as u8).collect();
                    let (mut read, mut write) = stream.into_split();
                    let (bytes, expected) = (sent.clone(), sent);
                    let writing = tokio::spawn(async move {
                        write.write_all(&bytes).await.unwrap();
                        write.shutdown();
                        write
                    });
                    let mut echo = Vec::new();
                    read.read_to_end(&mut echo).await.unwrap();
                    assert!(echo == expected, "{n}: {} bytes", echo.len());
                    writing.await.unwrap();
                })
            })
            .collect();
        for client in clients {
            client.await.unwrap();
        }
        drop(serving.await.unwrap());
    });
    drop(runtime);
    stop.store(true, Ordering::Relaxed);
    assert_eq!(stacks.join().unwrap(), (0, 0));
}
