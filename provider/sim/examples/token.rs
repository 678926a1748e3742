//! What a token costs StaR's card: `token PACKETS` prints the nanoseconds that it takes to know a packet by
//! its token, of 256 connections in turn.

use std::hint::black_box;
use std::time::Instant;

use starverbs_core::Gid;
use starverbs_star::token::{CardSecret, SlotArea};
use starverbs_star::wire::Prefix;

fn main() {
    let packets = std::env::args().nth(1).and_then(|packets| packets.parse::<u32>().ok());
    let Some(packets) = packets.filter(|packets| *packets > 0) else {
        eprintln!("usage: token PACKETS");
        std::process::exit(2)
    };
    let secret = CardSecret::new([1, 2]);
    let connections: Vec<_> = (0..=255)
        .map(|n| {
            let (peer, prefix) =
                (Gid::from_ipv4([10, 0, 0, n]), Prefix { qpn: u32::from(n) + 2, epoch: n.into() });
            let slots = SlotArea::new(u64::from(n) << 12, SlotArea::len_for(1024)).expect("an area");
            (peer, prefix, secret.token(&peer, prefix, slots))
        })
        .collect();
    let begin = Instant::now();
    let known = connections.iter().cycle().take(packets as usize).filter(|connection| {
        let (peer, prefix, token) = black_box(connection);
        secret.admits(peer, *prefix, token)
    });
    assert_eq!(known.count(), packets as usize);
    println!("{:.1} ns", begin.elapsed().as_nanos() as f64 / f64::from(packets));
}
