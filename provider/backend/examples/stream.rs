//! CPU time of frames of 4096 bytes, from port to port of one host, and the same in bare segmented sends:
//! `cargo run --release -p starverbs-backend --example stream`. Both copy what arrives, as a card would.

mod common;

use std::hint::black_box;

use common::{PortEnd, bare, cost, median, segment};

const FRAME: usize = 4096;
const GROUP: usize = 15;
const SEGMENT: usize = FRAME + 16;

fn port() -> f64 {
    let (mut a, mut b) = PortEnd::pair();
    let to_b = b.qpn();
    let data = vec![7; FRAME * GROUP];
    let mut memory = vec![0; FRAME * GROUP];
    cost(|| {
        data.chunks(FRAME).for_each(|frame| a.send(to_b, frame));
        a.tx.flush(0);
        let mut frames = 0;
        while frames < GROUP {
            frames += b.take(|payload| memory[..FRAME].copy_from_slice(payload));
            black_box(&mut memory);
        }
        GROUP as u64
    })
}

fn sockets() -> f64 {
    let (a, b) = (bare(), bare());
    let to_b = b.local_addr().expect("bound");
    segment(&a, SEGMENT as i32);
    let data = vec![7; SEGMENT * GROUP];
    let mut buffer = vec![0; 1 << 16];
    let mut memory = vec![0; 1 << 16];
    cost(|| {
        a.send_to(&data, to_b).expect("sent");
        let mut frames = 0;
        while frames < GROUP {
            if let Ok((len, _)) = b.recv_from(&mut buffer) {
                for part in buffer[..len].chunks(SEGMENT) {
                    memory[..part.len()].copy_from_slice(part);
                    black_box(&mut memory);
                }
                frames += len / SEGMENT;
            }
        }
        GROUP as u64
    })
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some("port") {
        return println!("{:.3} us", port() * 1e6);
    }
    let (ports, bares): (Vec<_>, Vec<_>) = (0..7).map(|_| (port(), sockets())).unzip();
    let (port, bare) = (median(ports) * 1e6, median(bares) * 1e6);
    println!(
        "4 KiB frame, both ends: port {port:.3} us, bare sockets {bare:.3} us, ratio {:.2}",
        port / bare
    );
}
