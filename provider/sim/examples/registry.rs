//! What StaR's security registry costs by its number of rules: `registry RULES PACKETS`, below an instruction
//! counter. Each packet's request finds its rule by key, and the packet passes the gate; of no rules, it asks
//! for none.
//!
//! `tools/scripts/registry.sh` counts; docs/sim.md has the figures.

use starverbs_core::mr::MemoryRule;
use starverbs_core::{Access, Av, Gid, NicConfig, PdId, Psn};
use starverbs_sim::{Faults, Net, Rng};
use starverbs_star::registry::{Claim, FoundRule, MemoryOwner, RuleRegistry, SendCtx, SlPeer};
use starverbs_star::token::Token;
use starverbs_star::wire::{Opt, Ptype, StarHeader};

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u32>().expect("a number"));
    let (Some(rules), Some(packets)) = (args.next(), args.next()) else {
        eprintln!("usage: registry RULES PACKETS");
        std::process::exit(2)
    };
    let mut net = Net::new(1, NicConfig::default(), Faults::default(), 1);
    let host = &mut net.hosts[0];
    host.env.port = usize::MAX;
    let (mut registry, pd) = (RuleRegistry::default(), PdId(1));
    let server = MemoryOwner { gid: Gid::from_ipv4([10, 0, 0, 9]), boot: 1, pd };
    let peer = SlPeer { av: Av::default(), port: 4793, control_port: 4794, qpn: 5, epoch: 1 };
    let conn = registry.join(server, peer, Token::NONE).expect("memory");
    let addr = |key: u32| u64::from(key) << 12;
    for key in 1..=rules {
        let (addr, access) = (addr(key), Access::LOCAL_WRITE);
        let rule = MemoryRule { key, pd, qpn: 0, addr, len: 4096, iova: addr, access };
        registry.add(conn, rule).expect("up to 65,536 rules");
    }
    let mut rng = Rng::new(1);
    let mut sent = 0;
    for number in 0..packets {
        let key = 1 + rng.below(rules.max(1).into()) as u32;
        let (va, len, need) = (addr(key) + 64, 32, Access::LOCAL_WRITE);
        let (claim, addr) = if rules == 0 {
            (Claim::None, va)
        } else {
            let FoundRule { rule, addr } = registry.find(conn, key, va, len, need).expect("its rule");
            (Claim::Memory { rule, addr, len, need }, addr)
        };
        let header = StarHeader {
            ptype: Ptype::Rd,
            opt: Opt::Send,
            migrate: false,
            ack: true,
            qpn: 6,
            epoch: 1,
            psn: Psn::new(number),
            addr,
            len: len as u16,
        };
        let stats = host.nic.stats().clone();
        let left = registry.send(
            SendCtx { env: &mut host.env, stats: &stats, now: 1 },
            conn,
            &claim,
            header,
            &[0; 32],
            &[],
        );
        sent += u32::from(left);
        if number % 64 == 63 {
            host.env.flush_star();
        }
    }
    assert_eq!(sent, packets, "all may leave");
}
