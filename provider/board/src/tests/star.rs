//! StaR between functions of a board, as drivers see it, and as those do who mean harm.

use std::net::UdpSocket;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use starverbs_core::wire::IcrcHeader;
use starverbs_core::{Gid, Psn};
use starverbs_star::ring::Stamp;
use starverbs_star::token::{SlotArea, Token};
use starverbs_star::wire::{CardHalf, Crc, Opt, Prefix, Ptype, StarHead, StarHeader, fill_checksum};

use super::*;
use crate::env::{HostAddress, host_address};

/// A function's driver, and its end of a connection.
struct End {
    raw: Raw,
    basics: Basics,
    qp: RawQp,
}

impl End {
    /// One that is to be this.
    fn open(path: &Path, star: u32) -> End {
        let mut raw = Raw::open(path);
        let basics = raw.basics();
        let create = Raw::create_qp(basics.pd, basics.cq.number, QPS);
        let create = CreateQp { flags: create.flags | QP_STAR, star: star as u8, ..create };
        let qp = raw.qp_of(0, &create).unwrap();
        End { raw, basics, qp }
    }

    /// One more queue pair.
    fn another(&mut self, n: usize, star: u32) -> RawQp {
        let create = Raw::create_qp(self.basics.pd, self.basics.cq.number, self.raw.at(QPS + n * QP_BYTES));
        let create = CreateQp { flags: create.flags | QP_STAR, star: star as u8, ..create };
        self.raw.qp_of(n, &create).unwrap()
    }

    fn role(&mut self) -> u32 {
        let of = Object { number: self.qp.qpn, reserved: 0 };
        self.raw.command::<StarReply>(OP_STAR_QUERY, of.as_bytes()).unwrap().role
    }
}

/// The ends of a connection between two functions: the first is stateless.
fn two_ends(paths: &[PathBuf]) -> [End; 2] {
    let mut sl = End::open(&paths[0], STAR_STATELESS);
    let mut sf = End::open(&paths[1], STAR_STATEFUL);
    sl.raw.connect_qp(sl.qp, sf.qp.qpn);
    sf.raw.connect_qp(sf.qp, sl.qp.qpn);
    for (end, role) in [(&mut sl, STAR_STATELESS), (&mut sf, STAR_STATEFUL)] {
        let begun = Instant::now();
        while end.role() != role {
            assert!(begun.elapsed() < Duration::from_secs(60), "no role");
        }
    }
    [sl, sf]
}

/// A message from one end to the other.
fn message(from: &mut End, to: &mut End, n: u8) {
    from.raw.put(DATA, &[n; 64]);
    to.raw.post_recv(&mut to.qp, n.into(), data(4096, 64, to.basics.key));
    from.raw.put_send(&mut from.qp, signaled_send(n.into()), data(0, 64, from.basics.key));
    from.raw.doorbell(&from.qp);
    for end in [&mut *to, from] {
        let cqe = end.raw.completion();
        assert_eq!((cqe.status, cqe.wr_id, cqe.qpn), (WcStatus::Success, n.into(), end.qp.qpn));
    }
    assert_eq!(to.raw.bytes(DATA + 4096, 64), [n; 64]);
}

/// A board and the ends of a connection on it, whose clients stay.
fn board_with_ends() -> (Board, [End; 2]) {
    let kept = Mutex::new(None);
    let board = with_board(2, |paths| *kept.lock().unwrap() = Some(two_ends(paths)));
    (board, kept.into_inner().unwrap().unwrap())
}

/// Has the board work until something is so.
fn work_until(board: &mut Board, what: &str, mut is: impl FnMut(&mut Board) -> bool) {
    let begun = Instant::now();
    while !is(board) {
        assert!(begun.elapsed() < Duration::from_secs(60), "never: {what}");
        board.turn(now());
    }
}

/// Ends on two functions talk, and leave nothing when their clients are gone.
#[test]
fn what_was_made_of_star_ends_with_its_client() {
    let mut board = with_board(2, |paths| {
        for round in 0..3 {
            let [mut sl, mut sf] = two_ends(paths);
            for n in 0..8 {
                message(&mut sl, &mut sf, 10 * round + n);
                message(&mut sf, &mut sl, 10 * round + n);
            }
            /* one after the other is gone, with all that it has posted, in one way or another */
            sl.raw.post_recv(&mut sl.qp, 1, data(4096, 64, sl.basics.key));
            match round {
                0 => drop(sl),
                1 => drop(sf),
                _ => sl.raw.write(REG_CONTROL, &CTRL_RESET.to_le_bytes()).unwrap(),
            }
        }
    });
    let star = board.card.star_host().expect("it was opened");
    assert_eq!((board.card.nic.qp_count(), star.qpns().count()), (0, 0));
    /* slots are kept until nobody knows a token of theirs */
    assert_eq!(board.card.env.slot_areas(), 0);
    board.card.now = now();
    assert!(board.functions.iter().all(|function| function.contexts.is_empty()));
    board.turn(now());
}

/// Has a function of a board that nobody runs take a command; gives its place.
fn begin(board: &mut Board, (function, end): (usize, &mut End), op: u16, body: &[u8]) -> usize {
    let at = end.raw.put_command(op, body);
    let Board { card, functions, .. } = board;
    functions[function].write(card, REG_COMMANDS_TAIL.into(), &end.raw.tail.to_le_bytes()).unwrap();
    at
}

/// A command that waits for a peer holds up those behind it, of its own function; a reset ends it.
#[test]
fn a_command_that_waits_holds_up_its_function_alone() {
    let (mut board, [mut sl, mut sf]) = board_with_ends();
    let status = |end: &End, at: usize| end.raw.get::<CommandHead>(at).status;
    let object = |number| Object { number, reserved: 0 };
    let (key, pd) = (sl.basics.key, sl.basics.pd);
    let first = begin(&mut board, (0, &mut sl), OP_DEREG_MR, object(key).as_bytes());
    let second = begin(&mut board, (0, &mut sl), OP_QUERY_DEVICE, &[]);
    assert_eq!([status(&sl, first), status(&sl, second)], [PENDING; 2], "its peer knows the key");
    /* of the other function one is done at once */
    let other = begin(&mut board, (1, &mut sf), OP_ALLOC_PD, &[]);
    assert_eq!((status(&sf, other), status(&sl, first)), (0, PENDING));
    work_until(&mut board, "the answer", |_| status(&sl, second) != PENDING);
    assert_eq!([status(&sl, first), status(&sl, second)], [0; 2]);
    /* one that a reset comes before is not answered, and harms nobody */
    let region = starverbs_rules::RawDriver::region(pd, 0, 4096);
    let at = begin(&mut board, (0, &mut sl), OP_REG_MR, region.as_bytes());
    assert_eq!(status(&sl, at), PENDING, "its peer does not know the key yet");
    let Board { card, functions, .. } = &mut board;
    functions[0].reset_function(card);
    board.turn(now());
    assert_eq!(status(&sl, at), PENDING);
    let qpn = sf.qp.qpn;
    let other = begin(&mut board, (1, &mut sf), OP_DESTROY_QP, object(qpn).as_bytes());
    work_until(&mut board, "the end of a peer", |_| status(&sf, other) != PENDING);
    assert_eq!(status(&sf, other), 0);
}

/// The end of a function ends its queue pairs together: none becomes the one that sends for those which end
/// after it.
#[test]
fn queue_pairs_that_end_together_send_no_rules() {
    const MORE: usize = 4;
    let kept = Mutex::new(None);
    let mut board = with_board(2, |paths| {
        let mut sl = End::open(&paths[0], STAR_STATELESS);
        let mut sf = End::open(&paths[1], STAR_STATEFUL);
        let mut qps = vec![(sl.qp, sf.qp)];
        qps.extend((1..=MORE).map(|n| (sl.another(n, STAR_STATELESS), sf.another(n, STAR_STATEFUL))));
        /* they end in the order of their numbers: who begins first, and leads, ends first */
        qps.sort_by_key(|(mine, _)| mine.qpn);
        for (mine, theirs) in qps {
            sl.raw.connect_qp(mine, theirs.qpn);
            sf.raw.connect_qp(theirs, mine.qpn);
            let begun = Instant::now();
            sl.qp = mine;
            while sl.role() != STAR_STATELESS {
                assert!(begun.elapsed() < Duration::from_secs(60), "no role");
            }
        }
        *kept.lock().unwrap() = Some([sl, sf]);
    });
    let [mut sl, _sf] = kept.into_inner().unwrap().unwrap();
    let region = starverbs_rules::RawDriver::region(sl.basics.pd, 0, 4096);
    begin(&mut board, (0, &mut sl), OP_REG_MR, region.as_bytes());
    let Board { card, functions, .. } = &mut board;
    let sent = card.nic.counters().tx_bytes.get();
    functions[0].reset_function(card);
    let sent = card.nic.counters().tx_bytes.get() - sent;
    /* a rule has 41 */
    assert!(sent <= 6 * (1 + MORE as u64), "more than a Bye each: {sent} bytes");
}

/// A packet that writes, with the token of a connection, to the stateless half at `port`.
fn write_to(socket: &UdpSocket, port: u16, prefix: Prefix, token: &Token, addr: u64) {
    let bytes = [0xee; 64];
    let header = StarHeader {
        ptype: Ptype::Rd,
        opt: Opt::Write,
        migrate: false,
        ack: true,
        qpn: 0x77,
        epoch: prefix.epoch as u8,
        psn: Psn::new(0),
        addr,
        len: bytes.len() as u16,
    };
    let here = Gid::from_ipv4([127, 0, 0, 1]);
    let sport = socket.local_addr().unwrap().port();
    let path = IcrcHeader { src: here, dst: here, sport, dport: port, ip_id: 0 };
    let mut frame = [StarHead::to_stateless(header, prefix, token).bytes(), &bytes].concat();
    fill_checksum(&path, &mut frame);
    let mut crc = Crc::new();
    crc.update(&frame);
    frame.extend(crc.finish());
    socket.send_to(&frame, ("127.0.0.1", port)).unwrap();
}

/// Whoever has a connection's token reaches the memory of its function, and no other one's.
#[test]
fn a_token_opens_its_own_functions_memory_alone() {
    let (mut board, [sl, sf]) = board_with_ends();
    let (host, words) = board.card.env.slot_area(0).expect("the one connection's slots");
    let slots = SlotArea::new(host, words.len() as u64 * 8).unwrap();
    let token = Token { slots, mac: words[0] };
    let Stamp { epoch, .. } = Stamp::of(words[4]);
    let prefix = Prefix { qpn: sl.qp.qpn, epoch };
    let port = board.card.env.star.as_ref().unwrap().tx.port(CardHalf::Stateless);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let counted = |board: &Board| {
        let counters = board.card.nic.counters();
        [counters.star_rd.get(), counters.star_refused.get()]
    };
    let at = |function| host_address(function, HostAddress::Direct(BASE + DATA as u64));
    for (function, done) in [(0, [1, 0]), (1, [0, 1])] {
        let before = counted(&board);
        write_to(&socket, port, prefix, &token, at(function));
        let is = |board: &mut Board| counted(board) == [before[0] + done[0], before[1] + done[1]];
        work_until(&mut board, "a packet", is);
    }
    assert_eq!(sl.raw.bytes(DATA, 64), [0xee; 64], "the packet was one");
    assert_eq!(sf.raw.bytes(DATA, 64), [0; 64]);
    let [mine, theirs, null] = [at(0), at(1), crate::env::NULL]
        .map(|addr| starverbs_star::env::StarEnv::is_of_program(&board.card.env, host, addr));
    assert_eq!((mine, theirs, null), (true, false, true));
}

/// StaR is for RC queue pairs of the first context, whose numbers are its own.
#[test]
fn star_is_for_queue_pairs_of_the_first_context() {
    with_board(2, |paths| {
        let [mut sl, sf] = two_ends(paths);
        let (own, other) = (sl.qp.qpn, sf.qp.qpn);
        let role = |qpn| StarRole { qpn, role: STAR_AUTO };
        let mut raw = sl.raw;
        assert_eq!(raw.object(OP_STAR_QUERY, other), Err(libc::EINVAL as u32));
        let foreign = raw.command::<Object>(OP_STAR_SET_ROLE, role(other).as_bytes());
        assert_eq!(foreign.err(), Some(libc::EINVAL as u32));
        raw.open_context(0);
        assert_eq!(raw.object(OP_STAR_QUERY, own), Err(libc::EINVAL as u32));
        let Basics { pd, cq, .. } = raw.basics();
        let at = raw.at(QPS);
        let create = Raw::create_qp(pd, cq.number, at);
        let star = CreateQp { flags: QP_STAR, star: STAR_AUTO as u8, ..create };
        let refused = raw.command::<NumberReply>(OP_CREATE_QP, star.as_bytes());
        assert_eq!(refused.err(), Some(libc::EOPNOTSUPP as u32));
        raw.number(OP_CREATE_QP, create.as_bytes());
        sl.raw = raw;
    });
}

/// Queue pairs that could be stateless ends count in what a function may have.
#[test]
fn stateless_ends_are_a_part_of_a_functions_share() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let Basics { pd, cq, .. } = raw.basics();
        let (_map, file) = sealed::create(c"long", 64 << 20, sealed::SIZE_STAYS).unwrap();
        let at = BASE + BYTES as u64;
        raw.client().dma_map(file.as_fd(), 0, at, 64 << 20).unwrap();
        let create = Raw::create_qp(pd, cq.number, QPS);
        let (recv_stride, recv_sge) = (528, 32);
        let long = Queues { recv: at, recv_stride, recv_sge, recv_log: 16, ..create.queues };
        let long = CreateQp { queues: long, flags: QP_STAR, star: STAR_AUTO as u8, ..create };
        let mut made = 0;
        let refused = loop {
            match raw.command::<NumberReply>(OP_CREATE_QP, long.as_bytes()) {
                Ok(_) => made += 1,
                Err(errno) => break errno,
            }
        };
        assert_eq!(refused, libc::ENOMEM as u32);
        assert!((1..16).contains(&made), "{made}");
    });
}
