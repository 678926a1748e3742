//! Control messages: what the two ends settle beside the data. Each is repeated until it is answered, and a
//! duplicate does no harm.

use starverbs_core::mr::MemoryRule;
use starverbs_core::rng::mix;
use starverbs_core::{Access, Mtu, PdId, Psn};

use super::message::{WqeReader, Writer};
use super::ring::{CQE_SLOT, REPLAY_SLOT};
use super::round::QuiescePoint;
use super::token::{SlotArea, TOKEN_LEN, Token};

/// Bytes of the largest message.
pub const MAX_CONTROL: usize = 96;

/// Role preference: what a program wants its end to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Preference {
    /// Plain RC
    Off = 0,
    /// The cards decide by their load
    #[default]
    Auto = 1,
    /// The stateless end, unless the peer wants to be that
    Stateless = 2,
    /// The stateful end, unless the peer wants to be that
    Stateful = 3,
}

impl Preference {
    /// The preference of this number. `None`: there is none.
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            0 => Preference::Off,
            1 => Preference::Auto,
            2 => Preference::Stateless,
            3 => Preference::Stateful,
            _ => return None,
        })
    }
}

/// What an end has become.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Role {
    /// Its card keeps nothing of the connection
    Stateless = 2,
    /// Its card keeps all
    Stateful = 3,
}

impl Role {
    /// What the peer is then.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Role::Stateless => Role::Stateful,
            Role::Stateful => Role::Stateless,
        }
    }
    const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            2 => Role::Stateless,
            3 => Role::Stateful,
            _ => return None,
        })
    }
}

/// What the choice of roles depends on of one end, and where its card is. It does not change while an Offer
/// or Change is repeated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// The program's preference
    pub preference: Preference,
    /// Connections whose state the card keeps
    pub stateful: u32,
    /// Beyond how many it wants another end to keep them
    pub threshold: u32,
    /// UDP ports of its stateless and stateful half
    pub ports: [u16; 2],
    /// Boot ID of the card
    pub boot: u64,
}

impl Terms {
    fn encode(&self, out: &mut Writer<'_>) -> Option<()> {
        out.byte(self.preference as u8)?;
        out.word(self.stateful)?;
        out.word(self.threshold)?;
        self.ports.iter().try_for_each(|port| out.half(*port))?;
        out.long(self.boot)
    }

    fn decode(from: &mut WqeReader<'_>) -> Option<Self> {
        Some(Terms {
            preference: Preference::from_code(from.byte()?)?,
            stateful: from.word()?,
            threshold: from.word()?,
            ports: [from.half()?, from.half()?],
            boot: from.long()?,
        })
    }
}

/// One message. Its sender's QPN and epoch stand before it (a [`Prefix`](super::wire::Prefix)). Role messages
/// travel in RoCEv2 frames, as the ports are not known yet; the others in StaR packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Control {
    /// Preference of the sender, with what the choice depends on
    Offer {
        /// Its terms
        terms: Terms,
        /// Version of the protocol
        version: u8,
    },
    /// The answer to an offer
    Accept {
        /// What its sender becomes
        role: Role,
        /// UDP ports of the sender's stateless and stateful half
        ports: [u16; 2],
        /// Boot ID of the sender's card
        boot: u64,
    },
    /// The answer to that: both know
    Confirm {
        /// What its sender becomes
        role: Role,
    },
    /// The answer to an offer: plain RC
    Plain,
    /// The answer to an offer: the card is there, the QP is not ready
    NotYet,
    /// Asks the peer of a connection that runs to change to the other form, with what the choice depends on
    /// now
    Change {
        /// Counts the rounds of a connection
        round: u16,
        /// Version of the protocol
        version: u8,
        /// It is StaR's now, and is to be plain RC; else it is the other way round
        star: bool,
        /// Its terms
        terms: Terms,
    },
    /// The answer to that: the sender begins no request
    Quiescing {
        /// As in Change
        round: u16,
        /// What it is of StaR, or becomes
        role: Role,
        /// UDP ports of its stateless and stateful half
        ports: [u16; 2],
        /// Boot ID of its card
        boot: u64,
        /// The sender has nothing under way, and this is where SL stands if it is StaR's. SF begins nothing
        /// until SL says what it is.
        point: Option<QuiescePoint>,
    },
    /// The round is over
    Settled {
        /// As in Change
        round: u16,
        /// What the sender is: an end of StaR, or plain RC
        star: bool,
    },
    /// SL's state at first
    Setup(Setup),
    /// SF may reach this memory of SL
    Rule(MemoryRule),
    /// SF has all rules of before the connection: WQEs may begin
    Begin {
        /// Sum of the rules that SL sent through other connections. `None`: it sent all through this one
        known: Option<Sum>,
    },
    /// SF: its card has other rules than these; SL is to send all
    ResendRules,
    /// SF: a request names what its card has no rule for; which are there?
    RuleQuery,
    /// The answer to that: the sum of the rules, behind all that SL had to send through this connection
    RuleSum(Sum),
    /// SF may reach this memory no longer; answered once nothing for it is under way
    Unrule {
        /// Its key
        key: u32,
    },
    /// SF: of a shared receive queue, WQEs before this sequence are wanted
    Want {
        /// Sequence of the receive queue
        upto: u32,
    },
    /// Asks for an answer alone
    KeepAlive,
    /// The connection ends
    Bye {
        /// 0: closed; else a [`WcStatus`](starverbs_core::WcStatus)
        why: u8,
        /// Of SL: its receives before this sequence have their completions
        recvs: Psn,
    },
}

/// What SF must know of SL's end. Queues' depths are powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setup {
    /// Boot ID of SL's card
    pub boot: u64,
    /// Protection domain of the QP
    pub pd: PdId,
    /// Path MTU
    pub mtu: Mtu,
    /// WQEs of the send queue
    pub sq_depth: u32,
    /// WQEs of the receive queue
    pub rq_depth: u32,
    /// Whether receives come from a shared receive queue, and only when they are wanted
    pub srq: bool,
    /// Slot memory, and what packets show that may fill it: behind the gate are the send queue's completion
    /// slots, the receive queue's, the replay slots, and the slot of WRITEs
    pub token: Token,
    /// How many replay slots there are: atomics of SF outstanding at most
    pub replay_slots: u32,
    /// Rights of the QP
    pub access: Access,
    /// READs and atomics of SL outstanding at most
    pub max_rd_atomic: u8,
    /// Times that a SEND of SL is tried without a receive; 7: for ever
    pub rnr_retry: u8,
    /// RNR NAK timer code of SL's receive queue
    pub min_rnr_timer: u8,
}

/// All rules of a protection domain in two numbers: equal sums mean equal rules, but for a chance of one in
/// 2^64.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sum {
    /// How many
    pub rules: u32,
    /// Sum of what each of them comes to
    pub sum: u64,
}

impl Sum {
    /// With this rule, too.
    pub fn add(&mut self, rule: &MemoryRule) {
        (self.rules, self.sum) = (self.rules.wrapping_add(1), self.sum.wrapping_add(mixed(rule)));
    }
    /// Without it again.
    pub fn remove(&mut self, rule: &MemoryRule) {
        (self.rules, self.sum) = (self.rules.wrapping_sub(1), self.sum.wrapping_sub(mixed(rule)));
    }
}

impl Control {
    /// Whether it is about the memory that SF may reach. Any connection of a protection domain sends that for
    /// the whole domain.
    pub fn is_of_memory(&self) -> bool {
        matches!(self, Control::Rule(_) | Control::Unrule { .. } | Control::Begin { .. })
    }

    /// The number of its round, by which a connection that runs changes. `None`: it is of none.
    pub fn round(&self) -> Option<u16> {
        match *self {
            Control::Change { round, .. }
            | Control::Quiescing { round, .. }
            | Control::Settled { round, .. } => Some(round),
            _ => None,
        }
    }

    /// Writes it to `room`; gives its length. `None`: `room` is too small, which [`MAX_CONTROL`] never is.
    pub fn encode(&self, room: &mut [u8]) -> Option<usize> {
        let mut out = Writer::new(room);
        match *self {
            Control::Offer { terms, version } => {
                out.byte(1)?;
                terms.encode(&mut out)?;
                out.byte(version)?;
            }
            Control::Accept { role, ports, boot } => {
                out.bytes(&[2, role as u8])?;
                ports.iter().try_for_each(|port| out.half(*port))?;
                out.long(boot)?;
            }
            Control::Confirm { role } => out.bytes(&[3, role as u8])?,
            Control::Plain => out.byte(4)?,
            Control::NotYet => out.byte(5)?,
            Control::Change { round, version, star, terms } => {
                out.byte(15)?;
                out.half(round)?;
                out.bytes(&[version, u8::from(star)])?;
                terms.encode(&mut out)?;
            }
            Control::Quiescing { round, role, ports, boot, point } => {
                out.byte(16)?;
                out.half(round)?;
                out.byte(role as u8)?;
                ports.iter().try_for_each(|port| out.half(*port))?;
                out.long(boot)?;
                let QuiescePoint { sends, recvs } = point.unwrap_or_default();
                out.byte(u8::from(point.is_some()))?;
                out.word(sends.get())?;
                out.word(recvs.get())?;
            }
            Control::Settled { round, star } => {
                out.byte(17)?;
                out.half(round)?;
                out.byte(u8::from(star))?;
            }
            Control::Setup(ref setup) => {
                out.byte(6)?;
                setup.encode(&mut out)?;
            }
            Control::Rule(ref rule) => {
                out.byte(7)?;
                encode_rule(rule, &mut out)?;
            }
            Control::Unrule { key } => {
                out.byte(8)?;
                out.word(key)?;
            }
            Control::Want { upto } => {
                out.byte(9)?;
                out.word(upto)?;
            }
            Control::KeepAlive => out.byte(10)?,
            Control::Begin { known: None } => out.byte(12)?,
            Control::Begin { known: Some(Sum { rules, sum }) } => {
                out.byte(13)?;
                out.word(rules)?;
                out.long(sum)?;
            }
            Control::ResendRules => out.byte(14)?,
            Control::RuleQuery => out.byte(22)?,
            Control::RuleSum(Sum { rules, sum }) => {
                out.byte(23)?;
                out.word(rules)?;
                out.long(sum)?;
            }
            Control::Bye { why, recvs } => {
                out.bytes(&[11, why])?;
                out.word(recvs.get())?;
            }
        }
        Some(out.len())
    }

    /// The message that these bytes are. `None`: they are none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = WqeReader(bytes);
        let message = match from.byte()? {
            1 => Control::Offer { terms: Terms::decode(&mut from)?, version: from.byte()? },
            2 => {
                let role = Role::from_code(from.byte()?)?;
                Control::Accept { role, ports: [from.half()?, from.half()?], boot: from.long()? }
            }
            3 => Control::Confirm { role: Role::from_code(from.byte()?)? },
            4 => Control::Plain,
            5 => Control::NotYet,
            6 => Control::Setup(Setup::decode(&mut from)?),
            7 => Control::Rule(decode_rule(&mut from)?),
            8 => Control::Unrule { key: from.word()? },
            9 => Control::Want { upto: from.word()? },
            10 => Control::KeepAlive,
            11 => Control::Bye { why: from.byte()?, recvs: Psn::new(from.word()?) },
            12 => Control::Begin { known: None },
            13 => Control::Begin { known: Some(Sum { rules: from.word()?, sum: from.long()? }) },
            14 => Control::ResendRules,
            15 => Control::Change {
                round: from.half()?,
                version: from.byte()?,
                star: flag(&mut from)?,
                terms: Terms::decode(&mut from)?,
            },
            16 => {
                let (round, role) = (from.half()?, Role::from_code(from.byte()?)?);
                let (ports, boot) = ([from.half()?, from.half()?], from.long()?);
                let is_drained = flag(&mut from)?;
                let point = QuiescePoint { sends: Psn::new(from.word()?), recvs: Psn::new(from.word()?) };
                Control::Quiescing { round, role, ports, boot, point: is_drained.then_some(point) }
            }
            17 => Control::Settled { round: from.half()?, star: flag(&mut from)? },
            22 => Control::RuleQuery,
            23 => Control::RuleSum(Sum { rules: from.word()?, sum: from.long()? }),
            _ => return None,
        };
        from.end()?;
        Some(message)
    }
}

impl Setup {
    /// Bytes of its slots, and of that of WRITEs.
    pub fn slot_bytes(&self) -> u64 {
        let Setup { sq_depth, rq_depth, replay_slots, .. } = *self;
        (u64::from(sq_depth) + u64::from(rq_depth)) * CQE_SLOT + (u64::from(replay_slots) + 1) * REPLAY_SLOT
    }

    /// Whether its slots fit their memory.
    pub(super) fn fits(&self) -> bool {
        SlotArea::len_for(self.slot_bytes()) <= self.token.slots.range().len
    }

    /// Address of the send queue's completion slots.
    pub fn send_ring(&self) -> u64 {
        self.token.slots.first()
    }
    /// Address of the receive queue's completion slots.
    pub fn recv_ring(&self) -> u64 {
        self.send_ring().wrapping_add(u64::from(self.sq_depth) * CQE_SLOT)
    }
    /// Address of the replay slots, and behind them of the slot of WRITEs.
    pub fn replay(&self) -> u64 {
        self.recv_ring().wrapping_add(u64::from(self.rq_depth) * CQE_SLOT)
    }

    fn encode(&self, out: &mut Writer<'_>) -> Option<()> {
        out.long(self.boot)?;
        out.word(self.pd.0)?;
        out.bytes(&[self.mtu as u8, u8::from(self.srq), self.max_rd_atomic, self.rnr_retry])?;
        out.byte(self.min_rnr_timer)?;
        out.word(self.sq_depth)?;
        out.word(self.rq_depth)?;
        let (count, token) = self.token.encode();
        out.byte(count)?;
        out.bytes(&token)?;
        out.word(self.replay_slots)?;
        out.word(self.access.bits())
    }

    fn decode(from: &mut WqeReader<'_>) -> Option<Self> {
        let (boot, pd) = (from.long()?, PdId(from.word()?));
        let [mtu, srq, max_rd_atomic, rnr_retry, min_rnr_timer] = from.bytes()?;
        let setup = Setup {
            boot,
            pd,
            mtu: Mtu::from_code(mtu.into())?,
            srq: srq != 0,
            max_rd_atomic,
            rnr_retry,
            min_rnr_timer,
            sq_depth: from.word()?,
            rq_depth: from.word()?,
            token: Token::decode(from.byte()?, from.bytes::<TOKEN_LEN>()?)?,
            replay_slots: from.word()?,
            access: Access::from_bits_truncate(from.word()?),
        };
        /* sequences have 24 bits, of which the upper half is the past */
        let depths = [setup.sq_depth, setup.rq_depth].iter().all(|d| d.is_power_of_two() && *d <= 1 << 20);
        (depths && setup.fits() && srq <= 1 && rnr_retry <= 7 && min_rnr_timer <= 31).then_some(setup)
    }
}

/// A byte that is 0 or 1.
fn flag(from: &mut WqeReader<'_>) -> Option<bool> {
    match from.byte()? {
        flag @ 0..=1 => Some(flag == 1),
        _ => None,
    }
}

/// A number that differs where rules do.
fn mixed(rule: &MemoryRule) -> u64 {
    let words = [
        u64::from(rule.key) << 32 | u64::from(rule.pd.0),
        u64::from(rule.qpn) << 32 | u64::from(rule.access.bits()),
        rule.addr,
        rule.len,
        rule.iova,
    ];
    words.iter().fold(0, |sum, word| mix(sum ^ word))
}

fn encode_rule(rule: &MemoryRule, out: &mut Writer<'_>) -> Option<()> {
    out.word(rule.key)?;
    out.word(rule.pd.0)?;
    out.word(rule.qpn)?;
    out.long(rule.addr)?;
    out.long(rule.len)?;
    out.long(rule.iova)?;
    out.word(rule.access.bits())
}

fn decode_rule(from: &mut WqeReader<'_>) -> Option<MemoryRule> {
    let rule = MemoryRule {
        key: from.word()?,
        pd: PdId(from.word()?),
        qpn: from.word()?,
        addr: from.long()?,
        len: from.long()?,
        iova: from.long()?,
        access: Access::from_bits_truncate(from.word()?),
    };
    let last = rule.len.saturating_sub(1);
    (rule.addr.checked_add(last).is_some() && rule.iova.checked_add(last).is_some()).then_some(rule)
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
