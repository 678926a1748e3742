//! GIDs: each of the table once, and every kind of traffic over IPv6.

use crate::case::{BOTH, Case, Net, Verdict};
use crate::check::Expect;
use crate::pair::Pair;
use crate::world::World;

/// A kind of IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ipv6Scope {
    /// `::1`
    Loopback,
    /// Neither of the others
    Global,
    /// fe80::/10
    LinkLocal,
}

impl Ipv6Scope {
    fn of(address: &str) -> Option<Ipv6Scope> {
        match address {
            "::1" => Some(Ipv6Scope::Loopback),
            _ if address.starts_with("::ffff:") => None,
            _ if address.starts_with("fe80:") => Some(Ipv6Scope::LinkLocal),
            _ => Some(Ipv6Scope::Global),
        }
    }

    fn word(self) -> &'static str {
        match self {
            Ipv6Scope::Loopback => "::1",
            Ipv6Scope::Global => "global IPv6",
            Ipv6Scope::LinkLocal => "link-local IPv6",
        }
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases =
        vec![Case::special("GIDs", "ibv_rc_pingpong -g and ib_send_lat -x with each GID", BOTH, each_gid)];
    for (scope, nets) in [
        (Ipv6Scope::Loopback, &[Net::Lo][..]),
        (Ipv6Scope::Global, BOTH),
        (Ipv6Scope::LinkLocal, &[Net::Veth]),
    ] {
        cases.extend(traffic().into_iter().map(|pair| case(pair, scope, nets)));
    }
    cases.extend(strain().into_iter().map(|pair| case(pair, Ipv6Scope::Global, &[Net::Veth])));
    for case in &mut cases {
        match case.name.as_str() {
            "ib_send_bw (::1)" => case.quick = &[Net::Lo],
            "ib_write_bw (global IPv6)" | "ib_send_bw -c UD (link-local IPv6)" => case.quick = &[Net::Veth],
            _ => {}
        }
    }
    cases
}

/// Latency and bandwidth of each operation on each transport that has it.
fn traffic() -> Vec<Pair> {
    let latency = |program, args: &str| Pair::new(program, args, Expect::Latency(1));
    let bandwidth = |program, args: &str| Pair::new(program, args, Expect::Bandwidth(1));
    vec![
        Pair::new("ibv_rc_pingpong", "-c", Expect::PingPong),
        Pair::new("ibv_ud_pingpong", "-s 1024 -c", Expect::PingPong),
        latency("ib_send_lat", ""),
        latency("ib_send_lat", "-c UC"),
        latency("ib_send_lat", "-c UD"),
        latency("ib_write_lat", ""),
        latency("ib_write_lat", "-c UC"),
        latency("ib_read_lat", ""),
        latency("ib_atomic_lat", ""),
        bandwidth("ib_send_bw", ""),
        bandwidth("ib_send_bw", "-c UC"),
        bandwidth("ib_send_bw", "-c UD"),
        bandwidth("ib_send_bw", "-b -e"),
        bandwidth("ib_write_bw", ""),
        bandwidth("ib_write_bw", "-c UC"),
        bandwidth("ib_read_bw", ""),
        bandwidth("ib_atomic_bw", ""),
    ]
}

/// Every size, and many QPs at once.
fn strain() -> Vec<Pair> {
    let sizes = |program, args: &str, expect| Pair::new(program, args, expect).limit(120);
    vec![
        sizes("ib_write_bw", "-a -n 20", Expect::Bandwidth(23)),
        sizes("ib_read_bw", "-a -n 20", Expect::Bandwidth(23)),
        sizes("ib_send_lat", "-a -n 5", Expect::Latency(23)),
        sizes("ib_write_bw", "-q 16 -N", Expect::Bandwidth(1)),
    ]
}

/// `pair` between two addresses of one scope.
pub(crate) fn case(pair: Pair, scope: Ipv6Scope, nets: &'static [Net]) -> Case {
    let name = format!("{} ({})", pair.title(), scope.word());
    let run = move |world: &mut World, net| {
        let mut pair = pair.clone();
        for end in 0..2 {
            let table = match world.single(net, end, &["ibv_devinfo", "-v"]) {
                Ok(output) => gids(&output),
                Err(reason) => return Verdict::Fail(reason),
            };
            let Some((index, _)) = table.iter().find(|(_, address)| Ipv6Scope::of(address) == Some(scope))
            else {
                return Verdict::Skip(format!("no {} address here", scope.word()));
            };
            let option = if pair.program.starts_with("ibv_") { "-g" } else { "-x" };
            pair.own_args[end].extend([option.to_owned(), index.to_string()]);
        }
        pair.run(world, net).into()
    };
    Case::special("IPv6", &name, nets, run).quick(&[])
}

/// Index and address of each GID in ibv_devinfo's output: `GID[  0]: ::ffff:127.0.0.1, RoCE v2`.
pub(crate) fn gids(output: &str) -> Vec<(u32, String)> {
    let parse = |line: &str| {
        let (index, rest) = line.trim().strip_prefix("GID[")?.split_once("]:")?;
        let address = rest.trim().split(',').next()?.to_owned();
        Some((index.trim().parse().ok()?, address))
    };
    output.lines().filter_map(parse).collect()
}

fn each_gid(world: &mut World, net: Net) -> Verdict {
    let mut run = || {
        let list = gids(&world.single(net, 0, &["ibv_devinfo", "-v"])?);
        // Loopback addresses lead to the other end only when both ends are one host.
        let usable = |address: &str| net == Net::Lo || !(address == "::1" || address.contains(":127."));
        let mut tried = Vec::new();
        for (index, address) in list.iter().filter(|(_, address)| usable(address)) {
            let wrong = |reason| format!("GID {index} ({address}): {reason}");
            let checked = Pair::new("ibv_rc_pingpong", &format!("-g {index} -c"), Expect::PingPong);
            checked.run(world, net).map_err(wrong)?;
            let latency = Pair::new("ib_send_lat", &format!("-x {index}"), Expect::Latency(1));
            latency.run(world, net).map_err(wrong)?;
            tried.push(address.clone());
        }
        if tried.is_empty() { Err(format!("no usable GID in {list:?}")) } else { Ok(tried.join(" ")) }
    };
    run().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_found_in_the_listing() {
        let text =
            "\tport:\t1\n\t\t\tGID[  0]:\t\t::ffff:10.0.0.1, RoCE v2\n\t\t\tGID[ 12]:\t\tfe80::1, RoCE v2\n";
        let expected = [(0, "::ffff:10.0.0.1".to_owned()), (12, "fe80::1".to_owned())];
        assert_eq!(gids(text), expected);
    }

    #[test]
    fn kinds_are_told_apart() {
        let kinds = ["::1", "::ffff:127.0.0.1", "fd77::1", "fe80::fc:ff:fe00:1"].map(Ipv6Scope::of);
        assert_eq!(
            kinds,
            [Some(Ipv6Scope::Loopback), None, Some(Ipv6Scope::Global), Some(Ipv6Scope::LinkLocal)]
        );
    }
}
