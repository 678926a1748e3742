//! Steering: a classic-BPF program on the reuseport group that gives each frame to the process owning its
//! destination QPN.
//!
//! The program names sockets by their index in the group. The kernel does not report that index, and moves
//! the last socket into the place of one that closes. So it is found by probing: a probe is a datagram to the
//! port whose op-code no QP uses, and which the program delivers to the index it carries; the receiver
//! answers with its blocks through the prober's unix socket. Whoever learns something new attaches the next
//! program. Nothing depends on anyone's answering: frames that come to the wrong process are handed on. One
//! that does not run (stopped in a debugger, paused with its container) hands on nothing and notices nothing,
//! so each process that is not alone checks now and then that what is sent to its QPNs reaches it.
//!
//! Owns probes and the program. It must not receive: [`crate::Rx`] does, and passes on what concerns
//! steering.

use std::io;
use std::os::fd::AsRawFd;

use nix::sys::socket::{AddressFamily, MsgFlags, SockaddrIn, bind, sendto};
use starverbs_cm::wire::{ATTRIBUTE_AT, Attribute, REMOTE_ID_AT, REQUEST_ID_AT};
use starverbs_core::{Nanos, QPN_BLOCK_SHIFT, QPN_GSI, QPN_MASK};

use crate::control::SteeringAnswer;
use crate::descriptor::Socket;
use crate::owners::Owners;
use crate::probe::{PROBE_OPCODE, Probe, encode_check};
use crate::sockopt;
use crate::udp_rx::mads::{HEADERS, ID_SHIFT};

const MS: Nanos = 1_000_000;
/// How long a round waits for answers: a process that is stopped gives none, one that waits for its CPU is
/// late. A member that does not answer a round is missing from the next program, and its frames take the long
/// way.
const PATIENCE: Nanos = 100 * MS;
/// Least time between two rounds.
const PAUSE: Nanos = 50 * MS;
/// Time between two checks.
const CHECK: Nanos = 1000 * MS;
/// Datagrams of a check, each from a port of its own: where the program names no socket, the source decides.
const CHECKS: u32 = 4;
/// Most time between two rounds while somebody does not answer.
const LONG_PAUSE: Nanos = 1600 * MS;
/// Rounds without an answer of our own after which there is nothing to be expected of another: the first may
/// have found a group without a program, a second says that probes do not come back here (loopback is down,
/// or filtered).
const MISSED: u32 = 2;
/// Frames steered wrongly before a round begins.
const WRONG: u32 = 4;
/// Probes of a round's first wave.
const FIRST_WAVE: u32 = 16;
/// Most members that steering covers; jumps in the program allow some more.
const MOST: u32 = 1024;

/// A member of the group, as far as known.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    token: u64,
    index: u32,
    blocks: Vec<u16>,
}

/// A round of probing under way.
struct Round {
    nonce: u32,
    sent: u32,
    deadline: Nanos,
    answers: Vec<SteeringAnswer>,
}

impl Round {
    fn answered(&self) -> u32 {
        self.answers.iter().fold(0, |sum, a| sum.saturating_add(a.count))
    }
}

/// This process's part in steering.
pub(crate) struct Steering {
    port: u16,
    token: u64,
    probes: Option<Socket>,
    round: Option<Round>,
    wanted: bool,
    nonce: u32,
    wrong: u32,
    /// Rounds one after another in which our own socket did not get its probe
    missed: u32,
    pause: Nanos,
    next: Nanos,
    members: Vec<Member>,
    /// Whose each block is, until somebody takes it
    owners: Option<Owners>,
    /// Other processes use the port
    shared_port: bool,
    /// Datagrams of the check under way that have not come back
    checking: u32,
    /// Its number, or that of the last
    check_nonce: u32,
    /// When the next check begins, or the one under way has failed
    check_at: Nanos,
}

impl Steering {
    /// Steering for the process that answers probes with `token`.
    pub(crate) fn new(port: u16, token: u64) -> Self {
        Steering {
            port,
            token,
            probes: probe_socket(),
            round: None,
            wanted: true,
            nonce: sockopt::random() as u32,
            wrong: 0,
            missed: 0,
            pause: PAUSE,
            next: 0,
            members: Vec::new(),
            owners: None,
            shared_port: false,
            checking: 0,
            check_nonce: sockopt::random() as u32,
            check_at: 0,
        }
    }

    /// The group changed (this process joined it, or has one block more).
    pub(crate) fn changed(&mut self) {
        self.wanted = true;
        self.missed = 0;
        self.next = 0;
    }

    /// From here on another clock is used.
    pub(crate) fn restart_clock(&mut self) {
        self.next = 0;
        self.check_at = 0;
        self.checking = 0;
        self.wanted |= self.round.take().is_some();
    }

    /// Another process probed.
    pub(crate) fn was_asked(&mut self) {
        self.shared_port = true;
    }

    /// A datagram of a check came back, by the wire or handed on.
    pub(crate) fn checked(&mut self, nonce: u32, by_wire: bool) {
        if nonce != self.check_nonce || self.checking == 0 {
            return;
        }
        self.wanted |= !by_wire;
        self.checking -= 1;
        if self.checking == 0 {
            self.check_at += CHECK;
        }
    }

    /// The first frame of a delivery belonged to another process that lives.
    #[inline]
    pub(crate) fn saw_wrong(&mut self) {
        self.wrong = self.wrong.saturating_add(1);
        self.wanted |= self.wrong >= WRONG;
        self.shared_port = true;
    }

    /// Whether frames come to their owners, as far as this process knows. Where its own probes do not come
    /// back, no more will be known than is: it would look into its socket at each doorbell for ever.
    #[inline]
    pub(crate) fn is_settled(&self) -> bool {
        self.wrong == 0 && self.round.is_none() && (!self.wanted || self.missed >= MISSED)
    }

    /// Whether a round is under way or due.
    pub(crate) fn busy(&self) -> bool {
        self.round.is_some() || self.wanted
    }

    /// When [`Steering::step`] has something to do.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        match &self.round {
            Some(round) => Some(round.deadline),
            None if self.wanted => Some(self.next),
            None => self.shared_port.then_some(self.check_at),
        }
    }

    /// Whether [`Steering::step`] has something to do.
    #[inline]
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        self.busy() || (self.shared_port && now >= self.check_at)
    }

    /// Whose each block is, if a round has ended since this was last asked.
    #[inline]
    pub(crate) fn take_owners(&mut self) -> Option<Owners> {
        self.owners.take()
    }

    /// Takes an answer to a probe.
    pub(crate) fn answer(&mut self, answer: SteeringAnswer) {
        if answer.nonce != self.nonce {
            return;
        }
        match &mut self.round {
            // Somebody was too slow for the round, or was stopped and goes on: worth another.
            None => self.wanted = true,
            Some(round) if answer.index < round.sent && round.answers.len() < MOST as usize => {
                round.answers.push(answer);
            }
            Some(_) => {}
        }
    }

    /// Goes on: begins a check or a round that is due, ends one that has its answers or is out of patience,
    /// and then attaches the program to `group`, a socket of it.
    pub(crate) fn step(&mut self, now: Nanos, group: &Socket, reply_block: u32) {
        match &mut self.round {
            None if self.wanted && now >= self.next => self.begin(now, reply_block),
            None if !self.wanted && self.shared_port && now >= self.check_at => self.check(now, reply_block),
            None => {}
            Some(round) => {
                let all = round.answered() >= round.sent;
                if all && distinct(&round.answers) == round.sent as usize && round.sent < MOST {
                    // As many members as probes: there may be more.
                    let (from, nonce) = (round.sent, round.nonce);
                    round.sent *= 4;
                    round.deadline = now + PATIENCE;
                    let to = round.sent;
                    self.send(from, to, nonce, reply_block);
                } else if all || now >= round.deadline {
                    self.end(now, group);
                }
            }
        }
    }

    fn begin(&mut self, now: Nanos, reply_block: u32) {
        self.nonce = self.nonce.wrapping_add(1);
        self.wanted = false;
        self.wrong = 0;
        let answers = Vec::with_capacity(FIRST_WAVE as usize);
        self.round = Some(Round { nonce: self.nonce, sent: FIRST_WAVE, deadline: now + PATIENCE, answers });
        self.send(0, FIRST_WAVE, self.nonce, reply_block);
    }

    /// Begins a check, or finds that none is needed: the one under way has failed, or a frame came wrong
    /// since the last round.
    fn check(&mut self, now: Nanos, block: u32) {
        if self.checking > 0 || self.wrong > 0 {
            self.checking = 0;
            self.wanted = true;
            return;
        }
        self.checking = CHECKS;
        self.check_at = now + PATIENCE;
        self.check_nonce = self.check_nonce.wrapping_add(1);
        let bytes = encode_check(block, self.check_nonce);
        (0..CHECKS).filter_map(|_| probe_socket()).for_each(|from| self.send_one(&from, &bytes));
    }

    fn send(&self, from: u32, to: u32, nonce: u32, reply_block: u32) {
        let Some(socket) = &self.probes else { return };
        for index in from..to {
            self.send_one(socket, &Probe { index, nonce, reply_block }.encode());
        }
    }

    /// Sends to the port. What is lost is what nobody answers.
    fn send_one(&self, socket: &Socket, bytes: &[u8]) {
        let _ = sendto(socket.as_raw_fd(), bytes, &loopback(self.port), MsgFlags::MSG_DONTWAIT);
    }

    fn end(&mut self, now: Nanos, group: &Socket) {
        let Some(round) = self.round.take() else { return };
        let silent = round.answered() < round.sent;
        self.pause = if silent { (self.pause * 2).min(LONG_PAUSE) } else { PAUSE };
        self.next = now + self.pause;
        self.check_at = now + CHECK;
        self.shared_port = round.answers.iter().any(|a| a.token != self.token);
        if round.answers.iter().any(|a| a.token == self.token) {
            self.missed = 0;
        } else {
            // Our own socket did not get its probe: the group had no program yet. Now it has one that knows
            // probes.
            self.wanted = true;
            self.missed = self.missed.saturating_add(1);
        }
        merge(&mut self.members, &round.answers);
        /* who is silent may be gone, and its blocks another's */
        let answered = self.members.iter().take(distinct(&round.answers));
        self.owners = Some(Owners::new(answered.map(|member| &member.blocks[..])));
        // Without a program frames are spread by hash and handed on: slower, not wrong.
        let _ = attach(group, &program(&self.members));
    }
}

fn distinct(answers: &[SteeringAnswer]) -> usize {
    (0..answers.len()).filter(|&i| answers[..i].iter().all(|a| a.token != answers[i].token)).count()
}

/// What a round's answers make of the known members. An index past the group's end goes to a member chosen by
/// hash, so that of several answers by one member the one with the lowest index counts. A member that did not
/// answer (it may be stopped) keeps its place, unless that is another's now.
fn merge(members: &mut Vec<Member>, answers: &[SteeringAnswer]) {
    let mut now: Vec<Member> = Vec::new();
    for answer in answers {
        match now.iter_mut().find(|m| m.token == answer.token) {
            Some(member) => member.index = member.index.min(answer.index),
            None => {
                now.push(Member { token: answer.token, index: answer.index, blocks: answer.blocks.clone() })
            }
        }
    }
    let silent = members
        .drain(..)
        .filter(|old| !now.iter().any(|m| m.token == old.token || m.index == old.index))
        .collect::<Vec<_>>();
    now.extend(silent);
    *members = now;
}

fn filter(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

/// The program; it sees a datagram from the BTH on. A frame's owner follows from its QPN, or, to queue pair
/// 1, by the ID of a communication that it names. For a frame that no known member owns it gives an index
/// that no group has, at which the kernel chooses by hash.
fn program(members: &[Member]) -> Vec<libc::sock_filter> {
    use libc::{
        BPF_A, BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_H, BPF_JA, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET,
        BPF_RSH, BPF_W,
    };
    let jump_unless = |value: u32, over: u8| filter(BPF_JMP | BPF_JEQ | BPF_K, 0, over, value);
    let jump = |over: u32| filter(BPF_JMP | BPF_JA, 0, 0, over);
    let word_of_mad = |at: usize| filter(BPF_LD | BPF_W | BPF_ABS, 0, 0, (HEADERS + at) as u32);
    let shift = |bits: u32| filter(BPF_ALU | BPF_RSH | BPF_K, 0, 0, bits);
    let mut code = vec![
        filter(BPF_LD | BPF_B | BPF_ABS, 0, 0, 0),
        jump_unless(u32::from(PROBE_OPCODE), 2),
        filter(BPF_LD | BPF_W | BPF_ABS, 0, 0, 8),
        filter(BPF_RET | BPF_A, 0, 0, 0),
        filter(BPF_LD | BPF_W | BPF_ABS, 0, 0, 4),
        filter(BPF_ALU | BPF_AND | BPF_K, 0, 0, QPN_MASK),
        jump_unless(QPN_GSI, 7),
        filter(BPF_LD | BPF_H | BPF_ABS, 0, 0, (HEADERS + ATTRIBUTE_AT) as u32),
        jump_unless(Attribute::SidrRep as u32, 2),
        word_of_mad(REQUEST_ID_AT),
        jump(1),
        word_of_mad(REMOTE_ID_AT),
        shift(ID_SHIFT),
        jump(1),
        shift(QPN_BLOCK_SHIFT),
    ];
    let blocks = members.iter().flat_map(|m| m.blocks.iter().map(|&block| (u32::from(block), m.index)));
    for (block, index) in blocks.take(MOST as usize) {
        code.push(filter(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, block));
        code.push(filter(BPF_RET | BPF_K, 0, 0, index));
    }
    code.push(filter(BPF_RET | BPF_K, 0, 0, u32::MAX));
    code
}

fn attach(group: &Socket, code: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: code.len() as u16, filter: code.as_ptr().cast_mut() };
    // The kernel copies the program during the call and reads no more than `len` instructions of `code`,
    // which lives on.
    if sockopt::set(group, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, &program) {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn loopback(port: u16) -> SockaddrIn {
    SockaddrIn::new(127, 0, 0, 1, port)
}

/// A socket for probes. Bound to loopback, so that a receiver knows that the probe is of this host.
fn probe_socket() -> Option<Socket> {
    let socket = sockopt::datagram(AddressFamily::Inet, "a socket for probes").ok()?;
    bind(socket.as_raw_fd(), &loopback(0)).ok()?;
    Some(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(index: u32, token: u64) -> SteeringAnswer {
        SteeringAnswer { nonce: 0, index, count: 1, token, blocks: vec![token as u16] }
    }

    fn member(index: u32, token: u64) -> Member {
        Member { token, index, blocks: vec![token as u16] }
    }

    #[test]
    fn the_lowest_answered_index_is_a_members_own() {
        let mut members = Vec::new();
        merge(&mut members, &[answer(5, 70), answer(1, 70), answer(0, 60), answer(9, 70)]);
        members.sort_by_key(|m| m.index);
        assert_eq!(members, [member(0, 60), member(1, 70)]);
    }

    #[test]
    fn a_silent_member_keeps_its_place_until_another_has_it() {
        let mut members = vec![member(0, 50), member(1, 60), member(2, 70)];
        merge(&mut members, &[answer(0, 50), answer(2, 70)]);
        assert!(members.contains(&member(1, 60)));
        merge(&mut members, &[answer(0, 50), answer(1, 70)]);
        assert!(!members.iter().any(|m| m.token == 60));
        assert!(members.contains(&member(1, 70)));
    }

    /// What the kernel makes of the program and a datagram.
    fn run(code: &[libc::sock_filter], bytes: &[u8]) -> u32 {
        let load = |at: u32, len: usize| {
            let field = bytes.get(at as usize..).and_then(|rest| rest.get(..len)).unwrap_or(&[]);
            field.iter().fold(0, |value, byte| value << 8 | u32::from(*byte))
        };
        let (mut a, mut at) = (0, 0);
        loop {
            let step = &code[at];
            at += 1;
            match u32::from(step.code) {
                c if c == libc::BPF_LD | libc::BPF_B | libc::BPF_ABS => a = load(step.k, 1),
                c if c == libc::BPF_LD | libc::BPF_H | libc::BPF_ABS => a = load(step.k, 2),
                c if c == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => a = load(step.k, 4),
                c if c == libc::BPF_ALU | libc::BPF_AND | libc::BPF_K => a &= step.k,
                c if c == libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K => a >>= step.k,
                c if c == libc::BPF_JMP | libc::BPF_JA => at += step.k as usize,
                c if c == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K => {
                    at += usize::from(if a == step.k { step.jt } else { step.jf });
                }
                c if c == libc::BPF_RET | libc::BPF_A => return a,
                c if c == libc::BPF_RET | libc::BPF_K => return step.k,
                other => panic!("an instruction of another kind: {other:#x}"),
            }
        }
    }

    #[test]
    fn frames_go_to_the_owner_of_their_qpn_or_of_the_communication_they_name() {
        let code = program(&[member(0, 60), member(3, 70)]);
        let frame = |op: u8, qpn: u32| {
            let mut frame = vec![op, 0, 0, 0];
            frame.extend((0xff00_0000 | qpn).to_be_bytes());
            frame.resize(HEADERS, 0);
            frame
        };
        let mad = |attribute: Attribute, request: u32, remote: u32| {
            let mut frame = frame(0x64, QPN_GSI);
            let mut mad = vec![0; starverbs_core::MAD_LEN];
            mad[ATTRIBUTE_AT..][..2].copy_from_slice(&(attribute as u16).to_be_bytes());
            mad[REQUEST_ID_AT..][..4].copy_from_slice(&request.to_be_bytes());
            mad[REMOTE_ID_AT..][..4].copy_from_slice(&remote.to_be_bytes());
            frame.extend(mad);
            frame
        };
        let id = |block: u32| block << ID_SHIFT | 5;
        assert_eq!(run(&code, &frame(4, 70 << QPN_BLOCK_SHIFT | 9)), 3);
        assert_eq!(run(&code, &frame(4, 60 << QPN_BLOCK_SHIFT)), 0);
        assert_eq!(run(&code, &frame(4, 61 << QPN_BLOCK_SHIFT)), u32::MAX);
        assert_eq!(run(&code, &Probe { index: 12, nonce: 1, reply_block: 60 }.encode()), 12);
        for attribute in [Attribute::Rep, Attribute::Rej, Attribute::Dreq, Attribute::Drep] {
            assert_eq!(run(&code, &mad(attribute, id(60), id(70))), 3, "{attribute:?}");
        }
        assert_eq!(run(&code, &mad(Attribute::SidrRep, id(70), id(60))), 3);
        assert_eq!(run(&code, &mad(Attribute::Req, id(70), 0)), u32::MAX, "for a service");
    }

    #[test]
    fn whose_own_probes_never_come_back_is_settled_between_rounds() {
        let group = sockopt::datagram(AddressFamily::Inet, "test").expect("a socket");
        let (mut steering, mut now) = (Steering::new(9, 1), 100);
        for round in 1..5 {
            assert_eq!(steering.is_settled(), round > MISSED, "before round {round}");
            steering.step(now, &group, 1);
            assert!(!steering.is_settled(), "round {round} is under way");
            steering.step(now + PATIENCE, &group, 1);
            now = steering.deadline().expect("one more round");
        }
        steering.saw_wrong();
        assert!(!steering.is_settled(), "a frame came wrong");
        steering.step(now, &group, 1);
        steering.step(now + PATIENCE, &group, 1);
        assert!(steering.is_settled());
        steering.changed();
        assert!(!steering.is_settled(), "a new block");
    }

    #[test]
    fn a_round_is_bounded_and_backs_off_when_somebody_is_silent() {
        let group = sockopt::datagram(AddressFamily::Inet, "test").expect("a socket");
        let mut steering = Steering::new(9, 1);
        steering.step(100, &group, 1);
        assert_eq!(steering.deadline(), Some(100 + PATIENCE));
        steering.step(100 + PATIENCE, &group, 1);
        let again = 100 + PATIENCE + 2 * PAUSE;
        assert_eq!(steering.deadline(), Some(again), "its own answer was missing");
        steering.step(again, &group, 1);
        let answer = SteeringAnswer { nonce: steering.nonce, ..answer(0, 1) };
        steering.answer(answer);
        steering.step(again + PATIENCE, &group, 1);
        assert_eq!(steering.deadline(), None, "nothing wanted");
        assert!(steering.is_settled());
        for _ in 1..WRONG {
            steering.saw_wrong();
        }
        assert!(!steering.is_settled() && !steering.busy());
        assert_eq!(steering.deadline(), Some(again + PATIENCE + CHECK), "the next check is a round");
        steering.saw_wrong();
        assert_eq!(steering.deadline(), Some(again + PATIENCE + 4 * PAUSE));
    }
}
