//! libibverbs' own examples: ibv_rc_pingpong, ibv_uc_pingpong, ibv_ud_pingpong, ibv_srq_pingpong,
//! ibv_xsrq_pingpong.

use crate::case::{BOTH, Case, LARGE, Net};
use crate::check::Expect;
use crate::pair::Pair;

const GROUP: &str = "ping-pong";

fn case(program: &'static str, nets: &'static [Net], args: &str) -> Case {
    Case::pair(GROUP, nets, Pair::new(program, &format!("-g 0 {args}"), Expect::PingPong))
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for program in ["ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_srq_pingpong"] {
        cases.push(case(program, BOTH, "-c").quick(BOTH));
        cases.push(case(program, BOTH, "-c -e").quick(&[Net::Lo]));
        for args in ["", "-e", "-s 1", "-s 100000 -c", "-s 1000000 -n 100 -c", "-n 10000", "-n 5", "-r 16"] {
            cases.push(case(program, BOTH, args));
        }
        for mtu in [256, 512, 1024, 2048, 4096] {
            cases.push(case(program, LARGE, &format!("-m {mtu} -s 20000 -c")));
        }
    }
    for program in ["ibv_rc_pingpong", "ibv_uc_pingpong"] {
        cases.push(case(program, BOTH, "-r 1 -c"));
    }
    // On-demand paging, explicit and of the whole address space, with prefetching; device memory.
    for args in ["-o -c", "-O -c", "-j -c"] {
        cases.push(case("ibv_rc_pingpong", BOTH, args).quick(&[Net::Lo]));
    }
    for args in ["-o -P -c", "-O -P -e -c -s 100000", "-o -s 1000000 -n 100 -c", "-j -e -c -s 100000"] {
        cases.push(case("ibv_rc_pingpong", BOTH, args));
    }
    cases.push(case("ibv_srq_pingpong", BOTH, "-o -c"));
    for args in ["-q 1 -r 1", "-q 1", "-q 4 -e", "-q 64 -r 2000", "-q 16 -s 65536 -c"] {
        cases.push(case("ibv_srq_pingpong", BOTH, args));
    }
    // Without `-e` it polls; its `-c` is the number of clients.
    for args in ["", "-e", "-s 1 -n 100", "-s 100000 -n 100", "-n 1000 -e", "-m 1024 -n 100"] {
        let pair = Pair::new("ibv_xsrq_pingpong", format!("-g 0 {args}").trim_end(), Expect::Success);
        let case = Case::pair(GROUP, BOTH, pair);
        cases.push(if args == "-e" { case.quick(&[Net::Lo]) } else { case });
    }
    // A datagram is one packet of at most the port's MTU, which an Ethernet link of the host keeps at 1024.
    cases.push(case("ibv_ud_pingpong", LARGE, "-c").quick(&[Net::Lo]));
    cases.push(case("ibv_ud_pingpong", LARGE, "-e -c"));
    cases.push(case("ibv_ud_pingpong", &[Net::Jumbo], "-s 4096 -c"));
    cases.push(case("ibv_ud_pingpong", BOTH, "-s 1024 -c").quick(&[Net::Veth]));
    for args in ["-s 1024 -e -c", "-s 1", "-s 512 -n 10000", "-s 1024 -r 1", "-s 1024 -r 16"] {
        cases.push(case("ibv_ud_pingpong", BOTH, args));
    }
    let preloaded = Pair::new("ibv_rc_pingpong", "-g 0 -c", Expect::PingPong).preload();
    let mut case = Case::pair("LD_PRELOAD", BOTH, preloaded);
    case.name = format!("starverbs run --preload -- {}", case.name);
    cases.push(case.quick(&[Net::Lo]));
    cases
}
