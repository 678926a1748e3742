//! Limits of cards and deadlines, over loopback's UDP: NACK, DISPATCH_TIMEOUT, and what comes too late.

use std::cell::Cell;

use super::*;

/// The least that a window or a NACK threshold holds: one command.
const ONE: u32 = MAX_OP;

fn open_with_card(pid: u32, retries: u8, card: CardConfig) -> Process {
    open_as(&ProcessOptions { pid, retries, card, ..ProcessOptions::default() }, &Settings::default())
}

impl Pair {
    /// A transfer of two commands, both of which are issued.
    fn submit_two(&mut self, op: OneRmaOp) {
        self.submit(op, &KEY, 2 * u64::from(MAX_OP));
        self.now = self.ends[0].executor.next_time().expect("the second command is paced");
        self.ends[0].advance(self.now);
    }

    /// A WRITE of so many commands until their data is on its way.
    fn send_data(&mut self, commands: usize) {
        (0..commands).for_each(|_| self.take(1, |_| true));
        self.ends[1].advance(self.now);
        (0..commands).for_each(|_| self.take(0, |_| true));
        self.ends[0].advance(self.now);
    }
}

#[test]
fn a_target_with_too_much_to_do_refuses() {
    let usual = ProcessOptions::default().card;
    for op in [OneRmaOp::Read, OneRmaOp::Write] {
        for (retries, status) in [(0, Status::Nack), (1, Status::Ok)] {
            let target = open_with_card(8, 0, CardConfig { nack_threshold: ONE, ..usual });
            let mut pair = Pair::of([open(7, retries), target]);
            pair.submit_two(op);
            /* the first request fills the target to its threshold; it is served after the second has come */
            pair.take(1, |_| true);
            pair.take(1, |_| true);
            assert_eq!(pair.ends[1].counts().nacks, 1);
            assert_eq!(pair.finish_with(|_| true), status, "{op:?}");
            assert_eq!((pair.ends[1].counts().nacks, pair.ends[0].counts().refused), (1, 1));
        }
    }
}

#[test]
fn what_a_window_does_not_admit_in_time_is_not_sent() {
    let usual = ProcessOptions::default().card;
    for (op, packets) in [(OneRmaOp::Read, 1), (OneRmaOp::Write, 2)] {
        for (retries, status) in [(0, Status::DispatchTimeout), (1, Status::Ok)] {
            let initiator = open_with_card(7, retries, CardConfig { window: ONE, ..usual });
            let mut pair = Pair::of([initiator, open(8, 0)]);
            pair.submit_two(op);
            /* the first command has the window, and is answered after the second has waited too long */
            assert_eq!(pair.ends[0].card.solicited(), ONE);
            pair.now = pair.ends[0].card.next_deadline().expect("a command that waits");
            assert_eq!(pair.finish_with(|_| true), status, "{op:?}");
            let CardCounts { received, nacks, .. } = *pair.ends[1].counts();
            assert_eq!((received, nacks), (packets * (1 + u64::from(retries)), 0), "{op:?}");
        }
    }
}

/// Whether the target has ended the transfer before, or finds its deadline when the data comes.
#[test]
fn data_of_a_write_that_comes_after_the_deadline_changes_nothing() {
    for ended in [false, true] {
        let mut pair = Pair::new(0);
        pair.submit(OneRmaOp::Write, &KEY, 64);
        pair.send_data(1);
        let [here, there] = pair.ends.each_ref().map(|end| end.card.next_deadline());
        assert!(there.is_some() && there <= here, "nothing lands after the completion");
        pair.now = here.expect("a command in service");
        if ended {
            pair.ends[1].advance(pair.now);
        }
        pair.take(1, |_| true);
        assert_eq!(pair.finish_with(|_| panic!("nothing was sent")), Status::Timeout);
        let CardCounts { late, transfer_timeouts, .. } = *pair.ends[1].counts();
        assert_eq!((late, transfer_timeouts), (1, 1));
        assert_eq!(pair.bytes(1), [0x22; LEN]);
    }
}

/// Packets that come together have one deadline: the one that is taken up after it is late.
#[test]
fn a_turn_looks_at_the_clock_for_each_packet() {
    let mut pair = Pair::new(0);
    pair.submit_two(OneRmaOp::Write);
    pair.send_data(2);
    let target = &mut pair.ends[1];
    let deadline = target.card.next_deadline().expect("two transfers");
    let (now, reads) = (pair.now, Cell::new(0));
    let clock = || if reads.replace(reads.get() + 1) == 0 { now } else { deadline };
    while target.counts().late == 0 {
        target.prepare_to_sleep();
        assert!(sockopt::wait(&[target.as_raw_fd()], libc::POLLIN, PATIENCE));
        target.turn(clock);
    }
    assert_eq!((target.counts().late, target.counts().transfer_timeouts), (1, 1));
    assert_eq!(pair.bytes(1).iter().filter(|byte| **byte == 0x11).count(), MAX_OP as usize);
}
