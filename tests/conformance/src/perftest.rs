//! perftest: latency and bandwidth of SEND, RDMA WRITE, RDMA READ and atomics, over the options people use.

use crate::case::{BOTH, Case, LARGE, Net};
use crate::check::Expect;
use crate::pair::Pair;

/// A perftest program and what it can do.
struct Program {
    name: &'static str,
    bandwidth: bool,
    /// Transports beside RC.
    transports: &'static [&'static str],
    /// Has a message size of its choice (atomics are 8 bytes).
    sized: bool,
    /// Can sleep on completion events.
    events: bool,
    /// Can send inline.
    inline: bool,
    /// Receives, so that a shared receive queue makes sense.
    receives: bool,
    atomic: bool,
}

const SEND: Program = Program {
    name: "ib_send_lat",
    bandwidth: false,
    transports: &["UC", "UD"],
    sized: true,
    events: true,
    inline: true,
    receives: true,
    atomic: false,
};
const WRITE: Program =
    Program { name: "ib_write_lat", transports: &["UC"], events: false, receives: false, ..SEND };
const READ: Program =
    Program { name: "ib_read_lat", transports: &[], inline: false, receives: false, ..SEND };
const ATOMIC: Program = Program { name: "ib_atomic_lat", sized: false, atomic: true, ..READ };

const PROGRAMS: [Program; 8] = [
    SEND,
    Program { name: "ib_send_bw", bandwidth: true, ..SEND },
    WRITE,
    Program { name: "ib_write_bw", bandwidth: true, ..WRITE },
    READ,
    Program { name: "ib_read_bw", bandwidth: true, ..READ },
    ATOMIC,
    Program { name: "ib_atomic_bw", bandwidth: true, ..ATOMIC },
];

/// Why a case of many datagrams for few receives is none for a board: `docs/board.md`.
const DROPS: &str = "a board drops datagrams that find no receive";

/// Rows of `-a`: 2, 4, ... 8 MiB.
const ALL_SIZES: usize = 23;

impl Program {
    fn expect(&self, rows: usize) -> Expect {
        if self.bandwidth { Expect::Bandwidth(rows) } else { Expect::Latency(rows) }
    }

    fn pair(&self, args: &str) -> Pair {
        Pair::new(self.name, args, self.expect(1))
    }

    fn case(&self, args: &str) -> Case {
        Case::pair("perftest", BOTH, self.pair(args))
    }

    /// The options that every transport of this program must take, one at a time.
    fn options(&self) -> Vec<&'static str> {
        let mut options = Vec::new();
        let mut add = |applies: bool, more: &[&'static str]| {
            if applies {
                options.extend(more);
            }
        };
        add(self.events, &["-e"]);
        add(self.bandwidth, &["-q 16", "-q 16 -N", "-b", "-l 16 -n 1600", "-q 4 -b"]);
        add(self.bandwidth && self.events, &["-b -e"]);
        add(self.inline, &["-s 64 -I 64"]);
        add(self.inline && self.bandwidth, &["-s 64 -I 64 -l 16 -n 1600"]);
        add(self.receives, &["--use-srq"]);
        add(self.receives && self.bandwidth, &["--use-srq -q 16"]);
        add(self.sized && !self.bandwidth, &["-s 65536", "-s 1000000 -n 100"]);
        add(self.sized && self.bandwidth, &["-s 8", "-s 1048576 -n 500"]);
        options
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = vec![self.case("").quick(BOTH)];
        // With many QPs perftest's search for the peak, quadratic in all iterations, takes longer than the
        // transfer.
        let patient = |args: &&str| Case::pair("perftest", BOTH, self.pair(args).limit(180));
        cases.extend(self.options().iter().map(patient));
        cases.push(Case::pair("perftest", BOTH, self.pair("-D 3").limit(30)));
        for transport in self.transports {
            let with = |args: &str| self.case(format!("-c {transport} {args}").trim_end());
            cases.push(with("").quick(BOTH));
            let fits =
                |args: &&&str| *transport != "UD" || !args.contains("-s 1") && !args.contains("-s 65536");
            cases.extend(self.options().iter().filter(fits).filter(|args| **args != "-q 16").map(|args| {
                let drops = *transport == "UD" && args.contains("--use-srq -q 16");
                if drops { with(args).of_software(DROPS) } else { with(args) }
            }));
            cases.push(with("-D 3"));
        }
        cases.extend(self.xrc());
        if self.sized {
            cases.extend(self.all_sizes());
            for mtu in [256, 512, 1024, 2048, 4096] {
                cases.push(Case::pair("perftest", LARGE, self.pair(&format!("-m {mtu}"))));
            }
        }
        if self.atomic {
            cases.push(self.case("-A FETCH_AND_ADD"));
            cases.push(self.case("-A CMP_AND_SWAP").quick(&[Net::Lo]));
        }
        cases
    }

    /// XRC, which is RC with other queue pairs: what differs is who receives, and how many share.
    fn xrc(&self) -> Vec<Case> {
        let mut cases = vec![self.case("-c XRC")];
        let mut add = |applies: bool, args: &str, rows| {
            if applies {
                let pair = Pair::new(self.name, args, self.expect(rows)).limit(180);
                cases.push(Case::pair("perftest", BOTH, pair));
            }
        };
        add(self.events, "-c XRC -e", 1);
        add(self.receives, "-c XRC --use-srq", 1);
        add(self.bandwidth, "-c XRC -q 16", 1);
        add(self.bandwidth, "-c XRC -b", 1);
        add(self.sized, "-c XRC -a -n 100", ALL_SIZES);
        cases
    }

    fn all_sizes(&self) -> Vec<Case> {
        let all = |args: &str, rows| {
            let pair = Pair::new(self.name, args, self.expect(rows)).limit(240);
            Case::pair("perftest", BOTH, pair)
        };
        // Before each size perftest calibrates its clock, which takes too long for a quick set.
        let mut cases = vec![all("-a", ALL_SIZES), all("-a -n 5", ALL_SIZES).quick(&[])];
        for transport in self.transports {
            // The sizes of UD end at the path MTU, 1024 over veth.
            let rows = if *transport == "UD" { 10 } else { ALL_SIZES };
            cases.push(all(&format!("-c {transport} -a -n 100"), rows));
        }
        cases
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = PROGRAMS.iter().flat_map(Program::cases).collect();
    for case in &mut cases {
        // One of each option belongs to the quick set, with the program that strains it most.
        let quick = [
            "ib_send_bw -e",
            "ib_write_bw -q 16 -N",
            "ib_send_bw -b",
            "ib_write_bw -l 16 -n 1600",
            "ib_send_bw --use-srq",
            "ib_send_bw -c XRC",
        ];
        if quick.contains(&case.name.as_str()) || case.name == "ib_send_lat -s 64 -I 64" {
            case.quick = &[Net::Lo];
        }
        if case.name == "ib_write_bw -m 4096" || case.name == "ib_read_bw -m 256" {
            case.quick = &[Net::Jumbo];
        }
    }
    cases
}
