//! CPU time of 8 bytes one way, between two ports of one host and between two bare sockets:
//! `cargo run --release -p starverbs-backend --example pingpong`.

mod common;

use common::{PortEnd, bare, cost, median};

fn port() -> f64 {
    let (mut a, mut b) = PortEnd::pair();
    let (to_a, to_b) = (a.qpn(), b.qpn());
    cost(|| {
        // A card that polls finds nothing more often than something.
        a.take(|_| ());
        b.take(|_| ());
        a.send(to_b, b"pingping");
        a.tx.flush(0);
        while b.take(|_| ()) == 0 {}
        b.send(to_a, b"pongpong");
        b.tx.flush(0);
        while a.take(|_| ()) == 0 {}
        2
    })
}

fn sockets() -> f64 {
    let (a, b) = (bare(), bare());
    let (to_a, to_b) = (a.local_addr().expect("bound"), b.local_addr().expect("bound"));
    let mut buffer = [0; 64];
    cost(|| {
        for socket in [&a, &b] {
            assert!(socket.recv_from(&mut buffer).is_err());
        }
        a.send_to(&[0; 24], to_b).expect("sent");
        while b.recv_from(&mut buffer).is_err() {}
        b.send_to(&[0; 24], to_a).expect("sent");
        while a.recv_from(&mut buffer).is_err() {}
        2
    })
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some("port") {
        return println!("{:.3} us", port() * 1e6);
    }
    let (ports, bares): (Vec<_>, Vec<_>) = (0..7).map(|_| (port(), sockets())).unzip();
    let (port, bare) = (median(ports) * 1e6, median(bares) * 1e6);
    println!("8 B one way: port {port:.2} us, bare sockets {bare:.2} us, ratio {:.2}", port / bare);
}
